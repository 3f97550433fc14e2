"""Matrix products with weights: linear layers (several checkpoint matrices may be stacked in one), and embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from tidemill.layers.parameter import Parameter, Placement
from tidemill.ops import kernels, reference
from tidemill.quant.on_load import PackedRows
from tidemill.quant.packed import PackedWeight, empty
from tidemill.quant.scheme import applies


class Linear:
    """y = x Wᵀ + b, where W stacks `parts`: checkpoint prefix -> number of output rows.

    `rows` gives the order of the output rows where it is not the stored one; it counts over all parts together, and no
    row may leave its part. Under a scheme that fits it, W is packed and rounds what is loaded into it.
    """

    weight: torch.Tensor | PackedWeight

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        place: Placement,
        transposed: bool = False,
        rows: torch.Tensor | None = None,
    ) -> None:
        self.parts, self.transposed, self.rows = dict(parts), transposed, rows
        outputs = sum(self.parts.values())
        if place.scheme is None or applies(place.scheme, outputs, inputs) is not None:
            self.weight = place.empty(outputs, inputs)
        else:
            self.weight = empty(place.scheme, outputs, inputs, lambda shape, dtype: place.empty(*shape, dtype=dtype))
        self.bias = place.empty(outputs) if bias else None

    def parameters(self) -> Iterator[Parameter]:
        start = 0
        for prefix, count in self.parts.items():
            part = slice(start, start + count)
            rows = None if self.rows is None else self.rows[part] - start
            yield Parameter(f"{prefix}.weight", self._rows(part), self.transposed, rows)
            if self.bias is not None:
                yield Parameter(f"{prefix}.bias", self.bias[part], rows=rows)
            start += count

    def _rows(self, part: slice) -> torch.Tensor | PackedRows:
        if isinstance(self.weight, PackedWeight):
            return PackedRows(self.weight.rows(part.start, part.stop))
        return self.weight[part]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, PackedWeight):
            return kernels.packed_linear(x, self.weight, self.bias)
        return reference.linear(x, self.weight, self.bias)

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The activation of the first half of the outputs, times the second half."""
        if isinstance(self.weight, PackedWeight):
            return kernels.packed_gated_linear(x, self.weight, self.bias, activation)
        return kernels.act_and_mul(self(x), activation)


class Embedding:
    def __init__(self, name: str, rows: int, width: int, place: Placement, scale: float = 1.0) -> None:
        self.name = name
        # The scale is rounded to the weights' precision, as it was in training.
        self.scale = torch.tensor(scale, dtype=place.dtype).item()
        self.weight = place.empty(rows, width)

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter(f"{self.name}.weight", self.weight)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.weight.index_select(0, tokens)
        return found if self.scale == 1.0 else found * self.scale


class Head:
    """Hidden states to logits, in float32 whatever the weights are. Tied to the embedding when it is given."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        width: int,
        place: Placement,
        tied: Embedding | None = None,
        *,
        bias: bool = False,
        normalised: bool = False,
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        self.name, self.tied, self.normalised = name, tied, normalised
        self.scale, self.soft_cap = scale, soft_cap
        self.weight = place.empty(vocab_size, width) if tied is None else tied.weight
        self.bias = place.empty(vocab_size) if bias else None

    def parameters(self) -> Iterator[Parameter]:
        if self.tied is None:
            yield Parameter(f"{self.name}.weight", self.weight, adjust=F.normalize if self.normalised else None)
        if self.bias is not None:
            yield Parameter(f"{self.name}.bias", self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = kernels.linear_to_float(x, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else reference.soft_cap(logits, self.soft_cap)
