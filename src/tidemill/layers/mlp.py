"""The MLP of a layer, gated or plain."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tidemill.layers.linear import Linear
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.spec import MlpSpec
from tidemill.ops import reference


class Mlp:
    def __init__(self, spec: MlpSpec, prefix: str, width: int, place: Placement) -> None:
        self.spec = spec
        self.up = Linear(width, spec.up_parts(prefix), bias=spec.bias, place=place, transposed=spec.transposed)
        self.down = Linear(
            spec.inner, {f"{prefix}.{spec.down}": width}, bias=spec.bias, place=place, transposed=spec.transposed
        )

    def parameters(self) -> Iterator[Parameter]:
        yield from self.up.parameters()
        yield from self.down.parameters()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.gated:
            return self.down(self.up.gated(x, self.spec.activation))
        return self.down(reference.activate(self.up(x), self.spec.activation))
