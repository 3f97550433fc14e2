"""How much memory a decoder's weights take, from its description alone: per layer, and by what quantising changes.

Torch-free. Counts what `decoder.py` allocates, which is not always what a checkpoint stores: norms without weights have
ones, and routers are wide. Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.layers.spec import AttentionSpec, HeadNormSpec, LatentAttentionSpec, MlpSpec, MoeSpec, NormSpec
from tidemill.models.spec import DecoderSpec
from tidemill.quant.packing import DENSE, Matrix, Packing, Use


@dataclass
class PartCount:
    """One layer, or all that is outside of the layers. Numbers, not bytes."""

    stacks: list[tuple[Matrix, ...]] = field(default_factory=list)
    """Matrices that can be packed, those of one layer together."""
    dense: int = 0
    """Other numbers, in the model's own precision..."""
    wide: int = 0
    """...and in float32 whatever that is."""

    @property
    def matrices(self) -> list[Matrix]:
        return [matrix for stack in self.stacks for matrix in stack]

    @property
    def numbers(self) -> int:
        return self.dense + self.wide + sum(matrix.numbers for matrix in self.matrices)

    def nbytes(self, element_size: int, packing: Packing = DENSE) -> int:
        total = self.dense * element_size + self.wide * 4
        return total + sum(packing.nbytes(matrix, element_size) for matrix in self.matrices)

    def add_matrix(self, name: str, outputs: int, inputs: int, use: Use) -> None:
        self.stacks.append((Matrix(f"{name}.weight", outputs, inputs, use),))

    def add_linear(self, parts: Mapping[str, int], inputs: int, bias: bool = False, transposed: bool = False) -> None:
        """`parts`: name -> outputs of the matrices that are stacked in one layer."""
        stack = (Matrix(f"{name}.weight", count, inputs, transposed=transposed) for name, count in parts.items())
        self.stacks.append(tuple(stack))
        self.dense += sum(parts.values()) if bias else 0

    def add_norm(self, width: int, spec: NormSpec) -> None:
        if spec.unit_offset:
            self.wide += width
        else:
            self.dense += width
        self.dense += width if spec.bias else 0

    def add_head_norm(self, heads: int, dim: int, spec: HeadNormSpec) -> None:
        self.add_norm(heads * dim if spec.per_head else dim, spec.norm)

    def add_self_attention(self, spec: AttentionSpec, prefix: str, width: int) -> None:
        inside = spec.heads * spec.head_dim
        self.add_linear(spec.qkv_parts(prefix), width, spec.bias, spec.transposed)
        self.add_linear({f"{prefix}.{spec.out}": width}, inside, spec.out_bias, spec.transposed)
        if spec.head_norm is not None:
            self.add_head_norm(spec.heads, spec.head_dim, spec.head_norm)
            self.add_head_norm(spec.kv_heads, spec.head_dim, spec.head_norm)

    def add_latent_attention(self, spec: LatentAttentionSpec, prefix: str, width: int) -> None:
        queries, norm = spec.heads * (spec.plain_dim + spec.rope_dim), NormSpec(spec.norm_eps)
        prefix = f"{prefix}.self_attn"
        if spec.query_rank is None:
            self.add_linear({f"{prefix}.q_proj": queries}, width)
        else:
            self.add_linear({f"{prefix}.q_a_proj": spec.query_rank}, width, spec.bias)
            self.add_norm(spec.query_rank, norm)
            self.add_linear({f"{prefix}.q_b_proj": queries}, spec.query_rank)
        self.add_linear({f"{prefix}.kv_a_proj_with_mqa": spec.kv_rank + spec.rope_dim}, width, spec.bias)
        self.add_norm(spec.kv_rank, norm)
        # Used head by head, as a plain tensor.
        self.dense += spec.heads * (spec.plain_dim + spec.value_dim) * spec.kv_rank
        self.add_linear({f"{prefix}.o_proj": width}, spec.heads * spec.value_dim, spec.bias)

    def add_mlp(self, spec: MlpSpec, prefix: str, width: int) -> None:
        self.add_linear(spec.up_parts(prefix), width, spec.bias, spec.transposed)
        self.add_linear({f"{prefix}.{spec.down}": width}, spec.inner, spec.bias, spec.transposed)

    def add_moe(self, spec: MoeSpec, prefix: str, width: int) -> None:
        self.wide += spec.experts * width + (spec.experts if spec.choice_bias is not None else 0)
        for expert in range(spec.experts):
            for name in spec.up:
                self.add_matrix(f"{prefix}.{name.format(expert=expert)}", spec.inner, width, "expert")
            self.add_matrix(f"{prefix}.{spec.down.format(expert=expert)}", width, spec.inner, "expert")
        if spec.shared is not None:
            self.add_mlp(spec.shared, prefix, width)
        if spec.shared_gate is not None:
            self.add_linear({f"{prefix}.{spec.shared_gate}": 1}, width)


@dataclass(frozen=True)
class WeightCount:
    outside: PartCount
    layers: tuple[PartCount, ...]

    @property
    def numbers(self) -> int:
        return sum(part.numbers for part in (self.outside, *self.layers))

    @property
    def _matrices(self) -> list[Matrix]:
        return [matrix for part in (self.outside, *self.layers) for matrix in part.matrices]

    def largest_packed(self, packing: Packing) -> int:
        """Numbers of the largest layer that is packed."""
        stacks = (stack for part in (self.outside, *self.layers) for stack in part.stacks)
        packed = ([matrix.numbers for matrix in stack if packing.scheme(matrix) is not None] for stack in stacks)
        return max(map(sum, packed), default=0)

    def nbytes(self, element_size: int, packing: Packing = DENSE) -> int:
        return sum(part.nbytes(element_size, packing) for part in (self.outside, *self.layers))

    def packed_share(self, packing: Packing) -> float:
        """Of all numbers, those that are packed."""
        packed = (matrix.numbers for matrix in self._matrices if packing.scheme(matrix) is not None)
        return sum(packed) / self.numbers


def count_weights(spec: DecoderSpec) -> WeightCount:
    return WeightCount(_outside(spec), tuple(_layer(index, spec) for index in range(len(spec.layers))))


def _outside(spec: DecoderSpec) -> PartCount:
    part, width = PartCount(), spec.hidden_size
    outer = spec.embedding_size or width
    part.add_matrix(spec.embedding, spec.vocab_size, outer, "table")
    if spec.normalise_head and not spec.tie_embeddings:
        part.dense += spec.vocab_size * outer
    elif not spec.tie_embeddings:
        part.add_matrix(spec.head, spec.vocab_size, outer, "table")
    part.dense += spec.vocab_size if spec.head_bias else 0
    if spec.positions is not None:
        part.dense += (spec.positions.count + spec.positions.offset) * width
    if outer != width:
        part.add_linear({spec.project_in: width}, outer)
        part.add_linear({spec.project_out: outer}, width)
    if spec.final_norm is not None:
        part.add_norm(width, spec.norm)
    return part


def _layer(index: int, spec: DecoderSpec) -> PartCount:
    part, width, layer = PartCount(), spec.hidden_size, spec.layers[index]
    prefix = spec.layer_prefix.format(layer=index)
    for name in (layer.input_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp):
        if name is not None:
            part.add_norm(width, spec.norm)
    if isinstance(layer.attention, AttentionSpec):
        part.add_self_attention(layer.attention, prefix, width)
    else:
        part.add_latent_attention(layer.attention, prefix, width)
    if isinstance(layer.mlp, MlpSpec):
        part.add_mlp(layer.mlp, prefix, width)
    else:
        part.add_moe(layer.mlp, prefix, width)
    return part
