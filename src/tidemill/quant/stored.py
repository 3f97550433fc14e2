"""A quantised matrix as a checkpoint holds it, whatever its format: what readers give and packed memory takes.

Knows neither files nor how packed numbers lie in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tidemill.quant.scheme import TABLES


@dataclass(frozen=True)
class StoredMatrix:
    """number = value * scale + offset, where the value is the code itself, or what the table has for it.

    Groups are `group_size` inputs that follow each other (the last may be shorter), None: a whole row. Where `order` is
    given, column i of the codes is input order[i], and groups count columns.
    """

    codes: torch.Tensor
    """[outputs, inputs]: integers, at most 8 bits of them, or float8_e4m3fn. Without offsets they are signed; with
    offsets of 4 bits 0..15, of 8 bits -128..127, or 0..255 as uint8."""
    scales: torch.Tensor
    """[outputs, groups] float32."""
    offsets: torch.Tensor | None = None
    """[outputs, groups] float32."""
    group_size: int | None = None
    table: str | None = None
    """A name in `scheme.TABLES`; codes are then 0..15."""
    order: torch.Tensor | None = None
    """[inputs] int64."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def rows(self, index: torch.Tensor) -> StoredMatrix:
        """Some output rows, or all in another order."""
        offsets = None if self.offsets is None else self.offsets[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], offsets=offsets)

    def to(self, device: torch.device) -> StoredMatrix:
        def moved(part: torch.Tensor | None) -> torch.Tensor | None:
            return None if part is None else part.to(device)

        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, offsets=moved(self.offsets), order=moved(self.order))

    def spread(self, per_group: torch.Tensor, group_size: int | None) -> torch.Tensor:
        """Scales or offsets [outputs, groups] for groups of `group_size`, which divides this one's."""
        if group_size == self.group_size:
            return per_group
        if group_size is None:
            assert per_group.shape[1] == 1, "groups cannot be joined"
            return per_group
        starts = torch.arange(0, self.codes.shape[1], group_size, device=per_group.device)
        return per_group[:, starts // (self.group_size or self.codes.shape[1])]

    def values(self) -> torch.Tensor:
        """What the codes stand for, float32."""
        if self.table is None:
            return self.codes.float()
        return torch.tensor(TABLES[self.table], dtype=torch.float32, device=self.codes.device)[self.codes.long()]

    def dense(self) -> torch.Tensor:
        """float32 [outputs, inputs], inputs in their own order."""
        inputs = self.codes.shape[1]
        groups = torch.arange(inputs, device=self.codes.device) // (self.group_size or inputs)
        numbers = self.values().mul_(self.scales[:, groups])
        if self.offsets is not None:
            numbers.add_(self.offsets[:, groups])
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order, numbers)
