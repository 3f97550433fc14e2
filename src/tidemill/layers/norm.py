"""RMS and layer normalisation, with the residual addition that precedes it in a decoder folded in."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.spec import HeadNormSpec, NormSpec
from tidemill.ops import kernels, reference


class Norm:
    def __init__(self, name: str, width: int, spec: NormSpec, place: Placement) -> None:
        self.name, self.spec = name, spec
        # 1 + w is rounded once, after the product, so it is kept wide.
        self.weight = place.empty(width, dtype=torch.float32 if spec.unit_offset else None)
        self.bias = place.empty(width) if spec.bias else None
        if not spec.learned:
            self.weight.fill_(1.0)

    def parameters(self) -> Iterator[Parameter]:
        if not self.spec.learned:
            return
        yield Parameter(f"{self.name}.weight", self.weight, adjust=_plus_one if self.spec.unit_offset else None)
        if self.bias is not None:
            yield Parameter(f"{self.name}.bias", self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.spec.kind == "layer":
            return reference.layer_norm(x, self.weight, self.bias, self.spec.eps)
        return kernels.rms_norm(x, self.weight, self.spec.eps)

    def add(self, x: torch.Tensor | None, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)"""
        if x is not None and self.spec.kind == "rms":
            return kernels.add_rms_norm(x, residual, self.weight, self.spec.eps)
        total = residual if x is None else x + residual
        return self(total), total


class HeadNorm:
    """Normalises each head of queries or keys [tokens, heads, dim], with weights they share or with their own."""

    def __init__(
        self,
        name: str,
        heads: int,
        dim: int,
        spec: HeadNormSpec,
        place: Placement,
        order: torch.Tensor | None = None,
    ) -> None:
        """`order`: how the dimensions of a head were rearranged in the projection."""
        self.name, self.heads, self.spec, self.order = name, heads, spec, order
        shape = (heads, dim) if spec.per_head else (dim,)
        dtype = torch.float32 if spec.norm.unit_offset else None
        self.weight = place.empty(*shape, dtype=dtype)
        self.bias = place.empty(*shape) if spec.norm.bias else None

    def parameters(self) -> Iterator[Parameter]:
        yield from self._filling("weight", self.weight)
        if self.bias is not None:
            yield from self._filling("bias", self.bias)

    @property
    def plain(self) -> bool:
        """RMS with weights that all heads share: what kernels that do more than normalise know too."""
        return self.spec.norm.kind == "rms" and not self.spec.per_head

    def _filling(self, kind: str, target: torch.Tensor) -> Iterator[Parameter]:
        def adjust(stored: torch.Tensor) -> torch.Tensor:
            stored = stored if self.order is None else stored[..., self.order]
            return stored + 1.0 if self.spec.norm.unit_offset and kind == "weight" else stored

        if self.spec.per_head and "{head}" in self.name:
            for head in range(self.heads):
                yield Parameter(f"{self.name.format(head=head)}.{kind}", target[head], adjust=adjust)
        else:
            yield Parameter(f"{self.name}.{kind}", target, adjust=adjust)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        norm = self.spec.norm
        if not self.spec.per_head:
            if norm.kind == "layer":
                return reference.layer_norm(x, self.weight, self.bias, norm.eps)
            return kernels.rms_norm(x, self.weight, norm.eps)
        return reference.head_norm(x, self.weight, self.bias, norm.eps, centred=norm.kind == "layer")


def _plus_one(stored: torch.Tensor) -> torch.Tensor:
    return stored + 1.0
