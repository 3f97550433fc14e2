"""Matrix products with weights: linear layers (several checkpoint matrices may be stacked in one), and embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from tidemill.layers.parameter import Parameter, Placement
from tidemill.ops import reference


class Linear:
    """y = x Wᵀ + b, where W stacks `parts`: checkpoint prefix -> number of output rows."""

    def __init__(self, inputs: int, parts: Mapping[str, int], *, bias: bool, place: Placement) -> None:
        self.parts = dict(parts)
        outputs = sum(self.parts.values())
        self.weight = place.empty(outputs, inputs)
        self.bias = place.empty(outputs) if bias else None

    def parameters(self) -> Iterator[Parameter]:
        start = 0
        for prefix, rows in self.parts.items():
            yield Parameter(f"{prefix}.weight", self.weight[start : start + rows])
            if self.bias is not None:
                yield Parameter(f"{prefix}.bias", self.bias[start : start + rows])
            start += rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reference.linear(x, self.weight, self.bias)


class Embedding:
    def __init__(self, name: str, vocab_size: int, width: int, place: Placement) -> None:
        self.name = name
        self.weight = place.empty(vocab_size, width)

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter(f"{self.name}.weight", self.weight)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.weight.index_select(0, tokens)


class Head:
    """Hidden states to logits, in float32 whatever the weights are. Tied to the embedding when it is given."""

    def __init__(self, name: str, vocab_size: int, width: int, place: Placement, tied: Embedding | None) -> None:
        self.name, self.tied = name, tied
        self.weight = place.empty(vocab_size, width) if tied is None else tied.weight

    def parameters(self) -> Iterator[Parameter]:
        if self.tied is None:
            yield Parameter(f"{self.name}.weight", self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return reference.linear(x, self.weight).float()
