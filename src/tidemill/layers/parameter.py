"""How a layer says which checkpoint tensor fills which part of its memory.

A fused layer (q, k and v in one matrix) yields one Parameter per checkpoint tensor, each a view into the fused one, so
fusing is declared where the layer is made and the loader stays a plain copy loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Parameter:
    name: str
    target: torch.Tensor
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

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
