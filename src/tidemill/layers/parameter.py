"""How a layer says which checkpoint tensor fills which part of its memory.

A fused layer (q, k and v in one matrix) yields one Parameter per checkpoint tensor, each a view into the fused one, so
fusing is declared where the layer is made and the loader stays a plain copy loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tidemill.quant.scheme import Scheme


class Target(Protocol):
    """What a checkpoint tensor is copied into: a tensor, or rows of packed memory that round what they are given."""

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


@dataclass(frozen=True)
class Placement:
    """Where and in which precision a model's tensors live."""

    dtype: torch.dtype
    device: torch.device
    scheme: Scheme | None = None
    """How linear layers hold their weights, where it fits them."""

    def without_scheme(self) -> Placement:
        return self if self.scheme is None else replace(self, scheme=None)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
