"""RMS normalisation, with the residual addition that precedes it in a decoder folded in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tidemill.layers.parameter import Parameter, Placement
from tidemill.ops import reference


class RMSNorm:
    def __init__(self, name: str, width: int, eps: float, place: Placement) -> None:
        self.name, self.eps = name, eps
        self.weight = place.empty(width)

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter(f"{self.name}.weight", self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reference.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)"""
        total = x + residual
        return reference.rms_norm(total, self.weight, self.eps), total
