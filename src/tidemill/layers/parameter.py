"""How a layer says which checkpoint tensor fills which part of its memory.

A fused layer (q, k and v in one matrix) yields one Parameter per checkpoint tensor, each a view into the fused one, so
fusing is declared where the layer is made and the loader stays a plain copy loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tidemill.quant.on_load import PackedRows
from tidemill.quant.packed import PackedWeight, empty
from tidemill.quant.packing import DENSE, Packing
from tidemill.quant.scheme import Scheme
from tidemill.quant.stored import StoredMatrix


class Target(Protocol):
    """What a checkpoint tensor is copied into: a tensor, or rows of packed memory, which round dense numbers they are
    given and take quantised ones as they are."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def numel(self) -> int: ...

    def copy_(self, stored: torch.Tensor, /) -> object: ...


@dataclass(frozen=True)
class Parameter:
    name: str
    target: Target
    """Filled in place."""
    transposed: bool = False
    """The checkpoint holds the transpose."""
    rows: torch.Tensor | None = None
    """Row i of the target is row rows[i] of what is stored."""
    adjust: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Applied to the float32 of what is stored."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = tuple(self.target.shape)
        return shape[::-1] if self.transposed else shape

    def fill(self, stored: torch.Tensor) -> None:
        if self.transposed:
            stored = stored.t()
        if self.rows is not None:
            stored = stored[self.rows]
        if self.adjust is not None:
            stored = self.adjust(stored.float())
        self.target.copy_(stored)

    def fill_packed(self, stored: StoredMatrix) -> None:
        """For a target that holds the very scheme of what is stored."""
        assert isinstance(self.target, PackedRows) and not self.transposed and self.adjust is None
        self.target.store(stored if self.rows is None else stored.rows(self.rows))


@dataclass(frozen=True)
class Placement:
    """Where and in which precision a model's tensors live."""

    dtype: torch.dtype
    device: torch.device
    packing: Packing = DENSE
    """Which matrices are packed, and how."""

    def dense(self) -> Placement:
        return replace(self, packing=DENSE)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def matrix(self, outputs: int, inputs: int, scheme: Scheme | None) -> torch.Tensor | PackedWeight:
        """Memory for a matrix, packed under a scheme."""
        if scheme is None:
            return self.empty(outputs, inputs)
        return empty(scheme, outputs, inputs, lambda shape, dtype: self.empty(*shape, dtype=dtype), self.packing.layout)
