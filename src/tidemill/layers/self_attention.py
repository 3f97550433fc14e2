"""Multi-head attention with its projections: from hidden states to hidden states, for every way checkpoints store it.

However a checkpoint orders the rows of its matrices, they are rearranged while loading into queries, keys, values with
rotated dimensions paired as halves, so that a step knows one form only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tidemill.layers.attention import PagedAttention
from tidemill.layers.linear import Linear
from tidemill.layers.norm import HeadNorm
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.rope import Angles, Rope
from tidemill.layers.spec import AttentionSpec
from tidemill.layers.triton_attention import TritonAttention
from tidemill.ops import reference


class SelfAttention:
    def __init__(
        self, spec: AttentionSpec, prefix: str, layer: int, width: int, ropes: Sequence[Rope], place: Placement
    ) -> None:
        self.spec, self.layer = spec, layer
        self.sizes = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim)
        order = None
        if spec.neighbours and spec.rope is not None:
            order = halves_from_neighbours(spec.head_dim, ropes[spec.rope].config.dim)
        self.qkv = Linear(
            width,
            spec.qkv_parts(prefix),
            bias=spec.bias,
            place=place,
            transposed=spec.transposed,
            rows=_row_order(spec, order),
        )
        self.out = Linear(
            self.sizes[0],
            {f"{prefix}.{spec.out}": width},
            bias=spec.out_bias,
            place=place,
            transposed=spec.transposed,
        )
        self.q_norm = self.k_norm = None
        if norm := spec.head_norm:
            self.q_norm = HeadNorm(f"{prefix}.{norm.query}", spec.heads, spec.head_dim, norm, place, order)
            self.k_norm = HeadNorm(f"{prefix}.{norm.key}", spec.kv_heads, spec.head_dim, norm, place, order)

    def parameters(self) -> Iterator[Parameter]:
        for part in (self.qkv, self.out, self.q_norm, self.k_norm):
            if part is not None:
                yield from part.parameters()

    def __call__(
        self, x: torch.Tensor, angles: Sequence[Angles], attention: PagedAttention | TritonAttention
    ) -> torch.Tensor:
        qkv = self.qkv(x)
        if attention.fuses and (self.q_norm is None or self.q_norm.plain):
            found = self._fused(qkv, angles, attention)
        else:
            found = self._in_steps(qkv, angles, attention)
        return self.out(found.flatten(1))

    def _in_steps(
        self, qkv: torch.Tensor, angles: Sequence[Angles], attention: PagedAttention | TritonAttention
    ) -> torch.Tensor:
        spec = self.spec
        q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in qkv.split(self.sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if spec.rope is not None:
            turn = angles[spec.rope]
            q, k = reference.rotate(q, turn.cos, turn.sin), reference.rotate(k, turn.cos, turn.sin)
        if spec.query_growth is not None:
            q = reference.grow_queries(q, angles[0].positions, *spec.query_growth)
        return attention.run(q, k, v, self.layer, spec.scale, soft_cap=spec.soft_cap)

    def _fused(self, qkv: torch.Tensor, angles: Sequence[Angles], attention: TritonAttention) -> torch.Tensor:
        from tidemill.ops.triton.rotary import rotate_and_store

        spec = self.spec
        turn = None if spec.rope is None else angles[spec.rope]
        k_cache, v_cache, k_scale, v_scale = attention.cache_of(self.layer)
        assert v_cache is not None, "only latent attention keeps no values"
        q = rotate_and_store(
            qkv,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            None if turn is None else turn.cos,
            None if turn is None else turn.sin,
            attention.slots_of(self.layer),
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            0.0 if spec.head_norm is None else spec.head_norm.norm.eps,
        )
        if spec.query_growth is not None:
            q = reference.grow_queries(q, angles[0].positions, *spec.query_growth)
        return attention.attend(q, self.layer, spec.scale, soft_cap=spec.soft_cap)


def halves_from_neighbours(head_dim: int, rotated: int) -> torch.Tensor:
    """The order of a head's dimensions that makes a rotation of neighbours one of halves."""
    turned = torch.arange(rotated).view(-1, 2).t().reshape(-1)
    return torch.cat((turned, torch.arange(rotated, head_dim)))


def _row_order(spec: AttentionSpec, order: torch.Tensor | None) -> torch.Tensor | None:
    """Which stored row each row of [queries; keys; values] is; None where they are stored so."""
    if order is None and not spec.grouped:
        return None
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    stored = torch.arange((heads + 2 * kv_heads) * dim).view(-1, dim)
    if spec.grouped:
        groups = stored.view(kv_heads, heads // kv_heads + 2, dim)
        q, k, v = groups[:, :-2].reshape(-1, dim), groups[:, -2], groups[:, -1]
    else:
        q, k, v = stored.split((heads, kv_heads, kv_heads))
    if order is not None:
        q, k = q[:, order], k[:, order]
    return torch.cat((q, k, v)).reshape(-1)
