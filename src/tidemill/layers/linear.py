"""Matrix products with weights: linear layers (several checkpoint matrices may be stacked in one), and embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tidemill.layers.parameter import Parameter, Placement, Target
from tidemill.ops import kernels, reference
from tidemill.quant.on_load import PackedRows
from tidemill.quant.packed import PackedWeight
from tidemill.quant.packing import Matrix, Use
from tidemill.quant.scheme import TILE_OUTPUTS, Scheme

Weight = torch.Tensor | PackedWeight


@dataclass(frozen=True)
class Piece:
    """Output rows that lie in one matrix: all of a layer's, unless its parts are packed differently."""

    start: int
    stop: int
    weight: Weight


class Linear:
    """y = x Wᵀ + b, where W stacks `parts`: checkpoint prefix -> number of output rows.

    `rows` gives the order of the output rows where it is not the stored one; it counts over all parts together, and no
    row may leave its part. The placement says which parts are packed, and into what.
    """

    def __init__(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        place: Placement,
        transposed: bool = False,
        rows: torch.Tensor | None = None,
        use: Use = "linear",
    ) -> None:
        self.parts, self.transposed, self.rows = dict(parts), transposed, rows
        runs: list[tuple[int, int, Scheme | None]] = []
        start = 0
        for name, count in self.parts.items():
            scheme = place.packing.scheme(Matrix(f"{name}.weight", count, inputs, use, transposed))
            if runs and _joins(runs[-1], scheme):
                start_of_run = runs.pop()[0]
            else:
                start_of_run = start
            start += count
            runs.append((start_of_run, start, scheme))
        self.pieces = [Piece(begin, end, place.matrix(end - begin, inputs, scheme)) for begin, end, scheme in runs]
        self.bias = place.empty(start) if bias else None

    @property
    def weight(self) -> Weight:
        """Of a layer that is one piece."""
        (piece,) = self.pieces
        return piece.weight

    def parameters(self) -> Iterator[Parameter]:
        start = 0
        for prefix, count in self.parts.items():
            part = slice(start, start + count)
            rows = None if self.rows is None else self.rows[part] - start
            yield Parameter(f"{prefix}.weight", self._rows(part), self.transposed, rows)
            if self.bias is not None:
                yield Parameter(f"{prefix}.bias", self.bias[part], rows=rows)
            start += count

    def _rows(self, part: slice) -> Target:
        piece = next(piece for piece in self.pieces if piece.start <= part.start < piece.stop)
        return rows_of(piece.weight, part.start - piece.start, part.stop - piece.start)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found = [product(x, piece.weight, self._bias(piece)) for piece in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _bias(self, piece: Piece) -> torch.Tensor | None:
        return None if self.bias is None else self.bias[piece.start : piece.stop]

    def gated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The activation of the first half of the outputs, times the second half."""
        if len(self.pieces) == 1 and isinstance(self.weight, PackedWeight):
            return kernels.packed_gated_linear(x, self.weight, self.bias, activation)
        return kernels.act_and_mul(self(x), activation)


def _joins(run: tuple[int, int, Scheme | None], scheme: Scheme | None) -> bool:
    """Whether a part goes into the same matrix as the ones before it. An order of inputs is a part's own."""
    start, stop, before = run
    if scheme != before:
        return False
    if scheme is None:
        return True
    # Parts are filled one by one, so they are whole tiles, or whole blocks that share scales.
    whole = scheme.group_size if scheme.kind == "fp8" and scheme.group_size else TILE_OUTPUTS
    return not scheme.ordered and (stop - start) % whole == 0


def product(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    if isinstance(weight, PackedWeight):
        return kernels.packed_linear(x, weight, bias)
    return reference.linear(x, weight, bias)


def rows_of(weight: Weight, start: int, stop: int) -> Target:
    """Some output rows of a matrix, to be filled."""
    return PackedRows(weight.rows(start, stop)) if isinstance(weight, PackedWeight) else weight[start:stop]


class Embedding:
    def __init__(self, name: str, rows: int, width: int, place: Placement, scale: float = 1.0) -> None:
        self.name, self.dtype = name, place.dtype
        # The scale is rounded to the weights' precision, as it was in training.
        self.scale = torch.tensor(scale, dtype=place.dtype).item()
        scheme = place.packing.scheme(Matrix(f"{name}.weight", rows, width, "table"))
        self.weight = place.matrix(rows, width, scheme)

    def parameters(self) -> Iterator[Parameter]:
        yield Parameter(f"{self.name}.weight", rows_of(self.weight, 0, self.weight.shape[0]))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, PackedWeight):
            found = self.weight.take(tokens).to(self.dtype)
        else:
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
        if tied is None:
            scheme = place.packing.scheme(Matrix(f"{name}.weight", vocab_size, width, "table"))
            self.weight = place.matrix(vocab_size, width, None if normalised else scheme)
        else:
            self.weight = tied.weight
        self.bias = place.empty(vocab_size) if bias else None

    def parameters(self) -> Iterator[Parameter]:
        if self.tied is None:
            adjust = F.normalize if self.normalised else None
            yield Parameter(f"{self.name}.weight", rows_of(self.weight, 0, self.weight.shape[0]), adjust=adjust)
        if self.bias is not None:
            yield Parameter(f"{self.name}.bias", self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, PackedWeight):
            logits = kernels.packed_linear(x, self.weight, self.bias).float()
        else:
            logits = kernels.linear_to_float(x, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.soft_cap is None else reference.soft_cap(logits, self.soft_cap)
