"""Builds and runs any decoder from its description. There is no other model code: a family is data (`spec.py`).

A layer passes on (x, residual) with x not yet added, so that the addition happens inside the next norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from tidemill.layers.attention import PagedAttention
from tidemill.layers.latent_attention import LatentAttention
from tidemill.layers.linear import Embedding, Head, Linear
from tidemill.layers.mlp import Mlp
from tidemill.layers.moe import Moe
from tidemill.layers.norm import Norm
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.rope import Angles, Rope
from tidemill.layers.self_attention import SelfAttention
from tidemill.layers.spec import AttentionSpec, MlpSpec
from tidemill.models.spec import DecoderSpec, LayerSpec

Flow = tuple[torch.Tensor | None, torch.Tensor]


class Layer:
    def __init__(self, decoder: DecoderSpec, index: int, ropes: Sequence[Rope], place: Placement) -> None:
        self.spec: LayerSpec = decoder.layers[index]
        prefix, width = decoder.layer_prefix.format(layer=index), decoder.hidden_size

        def norm(name: str | None) -> Norm | None:
            return None if name is None else Norm(f"{prefix}.{name}", width, decoder.norm, place)

        spec = self.spec
        self.input_norm = Norm(f"{prefix}.{spec.input_norm}", width, decoder.norm, place)
        self.attention = (
            SelfAttention(spec.attention, prefix, index, width, ropes, place)
            if isinstance(spec.attention, AttentionSpec)
            else LatentAttention(spec.attention, prefix, index, width, place)
        )
        self.mlp_norm = norm(spec.mlp_norm)
        self.mlp = (
            Mlp(spec.mlp, prefix, width, place)
            if isinstance(spec.mlp, MlpSpec)
            else Moe(spec.mlp, prefix, width, place)
        )
        self.after_attention, self.after_mlp = norm(spec.after_attention), norm(spec.after_mlp)

    def parameters(self) -> Iterator[Parameter]:
        parts = (self.input_norm, self.attention, self.mlp_norm, self.mlp, self.after_attention, self.after_mlp)
        for part in parts:
            if part is not None:
                yield from part.parameters()

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, angles: Sequence[Angles], attention: PagedAttention
    ) -> Flow:
        if self.spec.normalise_after:
            return self._normalising_after(residual, angles, attention)
        normed, residual = self.input_norm.add(x, residual)
        attended = self.attention(normed, angles, attention)
        if self.spec.parallel:
            beside = normed if self.mlp_norm is None else self.mlp_norm(residual)
            return self._scaled(attended + self.mlp(beside)), residual
        assert self.mlp_norm is not None, "only a parallel layer shares its norm"
        if self.after_attention is not None:
            attended = self.after_attention(attended)
        normed, residual = self.mlp_norm.add(self._scaled(attended), residual)
        out = self.mlp(normed)
        if self.after_mlp is not None:
            out = self.after_mlp(out)
        return self._scaled(out), residual

    def _normalising_after(self, x: torch.Tensor, angles: Sequence[Angles], attention: PagedAttention) -> Flow:
        assert self.mlp_norm is not None, "only a parallel layer shares its norm"
        x = self.input_norm(x + self.attention(x, angles, attention))
        return None, self.mlp_norm(x + self.mlp(x))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.spec.residual_scale == 1.0 else x * self.spec.residual_scale


class DecoderLayer(Protocol):
    """What a decoder needs of a layer, wherever its weights are."""

    def parameters(self) -> Iterator[Parameter]: ...
    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, angles: Sequence[Angles], attention: PagedAttention
    ) -> Flow: ...


MakeLayer = Callable[[DecoderSpec, int, Sequence[Rope], Placement], DecoderLayer]


class Decoder:
    """`forward` gives hidden states for every token of a step, `logits` turns chosen ones into scores."""

    def __init__(self, spec: DecoderSpec, max_len: int, place: Placement, make_layer: MakeLayer = Layer) -> None:
        self.spec = spec
        outside = spec.embedding_size or spec.hidden_size
        self.embedding = Embedding(spec.embedding, spec.vocab_size, outside, place, spec.embedding_scale)
        self.positions = self.project_in = self.project_out = self.norm = None
        if spec.positions is not None:
            rows = spec.positions.count + spec.positions.offset
            self.positions = Embedding(spec.positions.name, rows, spec.hidden_size, place)
        if outside != spec.hidden_size:
            self.project_in = Linear(outside, {spec.project_in: spec.hidden_size}, bias=False, place=place)
            self.project_out = Linear(spec.hidden_size, {spec.project_out: outside}, bias=False, place=place)
        self.ropes = [Rope(rope, max_len, place.device) for rope in spec.ropes]
        self.layers = [make_layer(spec, index, self.ropes, place) for index in range(len(spec.layers))]
        if spec.final_norm is not None:
            self.norm = Norm(spec.final_norm, spec.hidden_size, spec.norm, place)
        self.head = Head(
            spec.head,
            spec.vocab_size,
            outside,
            place,
            self.embedding if spec.tie_embeddings else None,
            bias=spec.head_bias,
            normalised=spec.normalise_head,
            scale=spec.logit_scale,
            soft_cap=spec.logit_soft_cap,
        )

    def parameters(self) -> Iterator[Parameter]:
        before = (self.embedding, self.positions, self.project_in)
        for part in (*before, *self.layers, self.norm, self.project_out, self.head):
            if part is not None:
                yield from part.parameters()

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, attention: PagedAttention
    ) -> torch.Tensor:
        residual = self.embedding(tokens)
        if self.project_in is not None:
            residual = self.project_in(residual)
        if self.positions is not None and self.spec.positions is not None:
            residual = residual + self.positions(positions + self.spec.positions.offset)
        angles = [rope.angles(positions, lengths) for rope in self.ropes]
        x: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, angles, attention)
        if self.norm is not None:
            out, _ = self.norm.add(x, residual)
        else:
            out = residual if x is None else x + residual
        return out if self.project_out is None else self.project_out(out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
