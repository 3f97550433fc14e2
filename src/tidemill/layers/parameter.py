"""How a layer says which checkpoint tensor fills which part of its memory.

A fused layer (q, k and v in one matrix) yields one Parameter per checkpoint tensor, each a view into the fused one, so
fusing is declared where the layer is made and the loader stays a plain copy loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Parameter:
    name: str
    target: torch.Tensor
    """Filled in place; its shape is what the checkpoint must hold."""


@dataclass(frozen=True)
class Placement:
    """Where and in which precision a model's tensors live."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)
