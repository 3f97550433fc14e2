"""Which linear layers of a decoder layer are quantised, what each is given, and where a scale can hide before them.

Multiplying the inputs' columns of a matrix by s changes nothing where what makes those inputs is divided by s: the
weights of a norm, the rows of the value projection (attention is linear in values), or the rows of the linear half of a
gated MLP. Knows the parts of a layer; which s is good is `awq.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tidemill.layers.linear import Linear
from tidemill.layers.mlp import Mlp
from tidemill.layers.moe import Moe
from tidemill.layers.norm import Norm
from tidemill.layers.self_attention import SelfAttention
from tidemill.models.decoder import Layer

Round = Callable[[torch.Tensor], torch.Tensor]


class Watched(Linear):
    """A linear layer that adds up the second moments of what it is given, and rounds it first where asked to."""

    def __init__(self, inner: Linear) -> None:
        vars(self).update(vars(inner))
        self.gram: torch.Tensor | None = None
        self.watching = False
        self.round_inputs: Round | None = None

    @property
    def dense(self) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.watching:
            if self.gram is None:
                self.gram = torch.zeros(x.shape[1], x.shape[1], device=x.device)
            self.gram.addmm_(x.t(), x)
        return super().__call__(x if self.round_inputs is None else self.round_inputs(x))

    def prefixes(self) -> Iterator[tuple[str, slice, torch.Tensor | None]]:
        """Of each matrix of the checkpoint in here: its name, its rows, and which stored row each of them is."""
        start = 0
        for prefix, count in self.parts.items():
            part = slice(start, start + count)
            yield prefix, part, None if self.rows is None else self.rows[part] - start
            start += count


@dataclass(frozen=True)
class Fold:
    """Layers that share an input, and how it is divided by s: `divide` gives the s that was possible."""

    readers: tuple[Watched, ...]
    divide: Callable[[torch.Tensor], torch.Tensor]
    maker: Watched | None = None
    """The layer whose rows are divided, unless it is a norm."""
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Squared magnitudes of the inputs as s can follow them, where several inputs must have one s."""


@dataclass(frozen=True)
class Sites:
    """The linear layers of one decoder layer, and its folds in the order in which they are to be made."""

    linears: tuple[Watched, ...]
    folds: tuple[Fold, ...]


def watch(layer: Layer, dtype_of: Callable[[str], torch.dtype]) -> Sites:
    """Puts watched linear layers in place of the plain ones. `dtype_of`: what a tensor is going to be stored as."""
    attention = layer.attention if isinstance(layer.attention, SelfAttention) else None
    mlp = layer.mlp.shared if isinstance(layer.mlp, Moe) else layer.mlp
    linears: list[Watched] = []
    folds: list[Fold] = []
    qkv = up = None
    if attention is not None:
        qkv, out = Watched(attention.qkv), Watched(attention.out)
        attention.qkv, attention.out = qkv, out
        linears += [qkv, out]
        folds.append(_values_to_out(attention, qkv, out))
    if mlp is not None:
        up, down = Watched(mlp.up), Watched(mlp.down)
        mlp.up, mlp.down = up, down
        linears += [up, down]
        if mlp.spec.gated:
            folds.append(_up_to_down(mlp, up, down))
    folds += _norms(layer, qkv, up, dtype_of)
    return Sites(tuple(linears), tuple(folds))


def _norms(
    layer: Layer, qkv: Watched | None, up: Watched | None, dtype_of: Callable[[str], torch.dtype]
) -> Iterator[Fold]:
    """Only where all that reads a norm is multiplied in turn: routers and experts are not."""
    if layer.spec.normalise_after:
        return
    whole = isinstance(layer.mlp, Mlp)
    if layer.spec.parallel and layer.mlp_norm is None:
        if qkv is not None and up is not None and whole:
            yield from _norm(layer.input_norm, (qkv, up), dtype_of)
        return
    if qkv is not None:
        yield from _norm(layer.input_norm, (qkv,), dtype_of)
    if up is not None and whole and layer.mlp_norm is not None:
        yield from _norm(layer.mlp_norm, (up,), dtype_of)


def _norm(norm: Norm, readers: tuple[Watched, ...], dtype_of: Callable[[str], torch.dtype]) -> Iterator[Fold]:
    if not norm.spec.learned:
        return
    dtype = dtype_of(f"{norm.name}.weight")

    def divide(s: torch.Tensor) -> torch.Tensor:
        shift = 1.0 if norm.spec.unit_offset else 0.0
        divided = (norm.weight / s - shift).to(dtype).float() + shift
        # What rounding the norm's weights leaves over is the matrix's to make up for.
        usable = (divided != 0) & (norm.weight != 0)
        real = torch.where(usable, norm.weight / divided, 1.0)
        norm.weight.copy_(torch.where(usable, divided, norm.weight))
        if norm.bias is not None:
            norm.bias.div_(real)
        return real

    yield Fold(readers, divide)


def _values_to_out(attention: SelfAttention, qkv: Watched, out: Watched) -> Fold:
    spec = attention.spec
    queries = spec.heads // spec.kv_heads

    def shared(squares: torch.Tensor) -> torch.Tensor:
        by_head = squares.view(spec.kv_heads, queries, spec.head_dim)
        return by_head.mean(dim=1, keepdim=True).expand_as(by_head).reshape(-1)

    def divide(s: torch.Tensor) -> torch.Tensor:
        by_value = s.view(spec.kv_heads, queries, spec.head_dim)[:, 0].reshape(-1)
        _divide_rows(qkv, slice(sum(attention.sizes[:2]), None), by_value)
        return s

    return Fold((out,), divide, qkv, shared)


def _up_to_down(mlp: Mlp, up: Watched, down: Watched) -> Fold:
    def divide(s: torch.Tensor) -> torch.Tensor:
        _divide_rows(up, slice(mlp.spec.inner, None), s)
        return s

    return Fold((down,), divide, up)


def _divide_rows(linear: Watched, rows: slice, s: torch.Tensor) -> None:
    linear.dense[rows].div_(s[:, None])
    if linear.bias is not None:
        linear.bias[rows].div_(s)
