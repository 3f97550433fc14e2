"""How much memory a decoder's weights take, from its description alone: per layer, and by what quantising changes.

Torch-free. Counts what `decoder.py` allocates, which is not always what a checkpoint stores: norms without weights have
ones, and routers are wide. Knows no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.layers.spec import AttentionSpec, HeadNormSpec, LatentAttentionSpec, MlpSpec, MoeSpec, NormSpec
from tidemill.models.spec import DecoderSpec, LayerSpec
from tidemill.quant.scheme import Scheme, applies, weight_bytes


@dataclass
class PartCount:
    """One layer, or all that is outside of the layers. Numbers, not bytes."""

    matrices: list[tuple[int, int]] = field(default_factory=list)
    """(outputs, inputs) of those that quantise."""
    dense: int = 0
    """Numbers in the model's own precision..."""
    wide: int = 0
    """...and in float32 whatever that is."""

    @property
    def numbers(self) -> int:
        return self.dense + self.wide + sum(outputs * inputs for outputs, inputs in self.matrices)

    def nbytes(self, element_size: int, scheme: Scheme | None = None) -> int:
        total = self.dense * element_size + self.wide * 4
        return total + sum(weight_bytes(scheme, outputs, inputs, element_size) for outputs, inputs in self.matrices)

    def add_linear(self, outputs: int, inputs: int, bias: bool = False) -> None:
        self.matrices.append((outputs, inputs))
        self.dense += outputs if bias else 0

    def add_norm(self, width: int, spec: NormSpec) -> None:
        if spec.unit_offset:
            self.wide += width
        else:
            self.dense += width
        self.dense += width if spec.bias else 0

    def add_head_norm(self, heads: int, dim: int, spec: HeadNormSpec) -> None:
        self.add_norm(heads * dim if spec.per_head else dim, spec.norm)

    def add_self_attention(self, spec: AttentionSpec, width: int) -> None:
        inside = spec.heads * spec.head_dim
        self.add_linear(inside + 2 * spec.kv_heads * spec.head_dim, width, spec.bias)
        self.add_linear(width, inside, spec.out_bias)
        if spec.head_norm is not None:
            self.add_head_norm(spec.heads, spec.head_dim, spec.head_norm)
            self.add_head_norm(spec.kv_heads, spec.head_dim, spec.head_norm)

    def add_latent_attention(self, spec: LatentAttentionSpec, width: int) -> None:
        queries, norm = spec.heads * (spec.plain_dim + spec.rope_dim), NormSpec(spec.norm_eps)
        if spec.query_rank is None:
            self.add_linear(queries, width)
        else:
            self.add_linear(spec.query_rank, width, spec.bias)
            self.add_norm(spec.query_rank, norm)
            self.add_linear(queries, spec.query_rank)
        self.add_linear(spec.kv_rank + spec.rope_dim, width, spec.bias)
        self.add_norm(spec.kv_rank, norm)
        # Used head by head, as a plain tensor.
        self.dense += spec.heads * (spec.plain_dim + spec.value_dim) * spec.kv_rank
        self.add_linear(width, spec.heads * spec.value_dim, spec.bias)

    def add_mlp(self, spec: MlpSpec, width: int) -> None:
        self.add_linear((2 if spec.gated else 1) * spec.inner, width, spec.bias)
        self.add_linear(width, spec.inner, spec.bias)

    def add_moe(self, spec: MoeSpec, width: int) -> None:
        self.wide += spec.experts * width + (spec.experts if spec.choice_bias is not None else 0)
        self.dense += spec.experts * 3 * spec.inner * width
        if spec.shared is not None:
            self.add_mlp(spec.shared, width)
        if spec.shared_gate is not None:
            self.add_linear(1, width)


@dataclass(frozen=True)
class WeightCount:
    outside: PartCount
    layers: tuple[PartCount, ...]

    @property
    def numbers(self) -> int:
        return sum(part.numbers for part in (self.outside, *self.layers))

    @property
    def largest_matrix(self) -> int:
        """Numbers of the largest one that quantises."""
        parts = (self.outside, *self.layers)
        return max((outputs * inputs for part in parts for outputs, inputs in part.matrices), default=0)

    def nbytes(self, element_size: int, scheme: Scheme | None = None) -> int:
        return sum(part.nbytes(element_size, scheme) for part in (self.outside, *self.layers))

    def packed_share(self, scheme: Scheme) -> float:
        """Of all numbers, those that a scheme packs."""
        matrices = (matrix for part in (self.outside, *self.layers) for matrix in part.matrices)
        return sum(a * b for a, b in matrices if applies(scheme, a, b) is None) / self.numbers


def count_weights(spec: DecoderSpec) -> WeightCount:
    return WeightCount(_outside(spec), tuple(_layer(layer, spec) for layer in spec.layers))


def _outside(spec: DecoderSpec) -> PartCount:
    part, width = PartCount(), spec.hidden_size
    outer = spec.embedding_size or width
    part.dense += spec.vocab_size * outer * (1 if spec.tie_embeddings else 2)
    part.dense += spec.vocab_size if spec.head_bias else 0
    if spec.positions is not None:
        part.dense += (spec.positions.count + spec.positions.offset) * width
    if outer != width:
        part.add_linear(width, outer)
        part.add_linear(outer, width)
    if spec.final_norm is not None:
        part.add_norm(width, spec.norm)
    return part


def _layer(layer: LayerSpec, spec: DecoderSpec) -> PartCount:
    part, width = PartCount(), spec.hidden_size
    for name in (layer.input_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp):
        if name is not None:
            part.add_norm(width, spec.norm)
    if isinstance(layer.attention, AttentionSpec):
        part.add_self_attention(layer.attention, width)
    else:
        part.add_latent_attention(layer.attention, width)
    if isinstance(layer.mlp, MlpSpec):
        part.add_mlp(layer.mlp, width)
    else:
        part.add_moe(layer.mlp, width)
    return part
