"""Multi-head latent attention (DeepSeek): the cache keeps one compressed vector and one rotated key per token.

Keys and values of every head are linear in the compressed vector, so their matrices are moved to the other side: the
query is brought into the compressed space, attends there as if all heads shared one key, and what it finds is brought
out again. Nothing is ever expanded per cached token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tidemill.layers.attention import PagedAttention
from tidemill.layers.linear import Linear
from tidemill.layers.norm import Norm
from tidemill.layers.parameter import Parameter, Placement
from tidemill.layers.rope import Angles
from tidemill.layers.self_attention import halves_from_neighbours
from tidemill.layers.spec import LatentAttentionSpec, NormSpec
from tidemill.ops import reference


class LatentAttention:
    def __init__(self, spec: LatentAttentionSpec, prefix: str, layer: int, width: int, place: Placement) -> None:
        self.spec, self.layer = spec, layer
        head_dim, prefix = spec.plain_dim + spec.rope_dim, f"{prefix}.self_attn"
        norm = NormSpec(spec.norm_eps)
        query_rows = self._turned(spec.heads, spec.plain_dim)
        self.q_down = self.q_norm = None
        if spec.query_rank is None:
            self.q_up = Linear(
                width, {f"{prefix}.q_proj": spec.heads * head_dim}, bias=False, place=place, rows=query_rows
            )
        else:
            self.q_down = Linear(width, {f"{prefix}.q_a_proj": spec.query_rank}, bias=spec.bias, place=place)
            self.q_norm = Norm(f"{prefix}.q_a_layernorm", spec.query_rank, norm, place)
            self.q_up = Linear(
                spec.query_rank,
                {f"{prefix}.q_b_proj": spec.heads * head_dim},
                bias=False,
                place=place,
                rows=query_rows,
            )
        compressed = {f"{prefix}.kv_a_proj_with_mqa": spec.kv_rank + spec.rope_dim}
        self.kv_down = Linear(width, compressed, bias=spec.bias, place=place, rows=self._turned(1, spec.kv_rank))
        self.kv_norm = Norm(f"{prefix}.kv_a_layernorm", spec.kv_rank, norm, place)
        expanded = {f"{prefix}.kv_b_proj": spec.heads * (spec.plain_dim + spec.value_dim)}
        # Used by head, as views, so it stays dense under any scheme.
        self.kv_up = Linear(spec.kv_rank, expanded, bias=False, place=place.dense())
        assert isinstance(self.kv_up.weight, torch.Tensor)
        by_head = self.kv_up.weight.view(spec.heads, spec.plain_dim + spec.value_dim, spec.kv_rank)
        self.key_up, self.value_up = by_head.split((spec.plain_dim, spec.value_dim), dim=1)
        self.out = Linear(spec.heads * spec.value_dim, {f"{prefix}.o_proj": width}, bias=spec.bias, place=place)

    def _turned(self, heads: int, plain: int) -> torch.Tensor | None:
        """The row order of `heads` times (plain, rotated) rows whose rotated ones pair neighbours."""
        spec = self.spec
        if not spec.neighbours:
            return None
        order = torch.cat((torch.arange(plain), plain + halves_from_neighbours(spec.rope_dim, spec.rope_dim)))
        return (torch.arange(heads)[:, None] * len(order) + order).reshape(-1)

    def parameters(self) -> Iterator[Parameter]:
        for part in (self.q_down, self.q_norm, self.q_up, self.kv_down, self.kv_norm, self.kv_up, self.out):
            if part is not None:
                yield from part.parameters()

    def __call__(self, x: torch.Tensor, angles: Sequence[Angles], attention: PagedAttention) -> torch.Tensor:
        spec, turn = self.spec, angles[self.spec.rope]
        narrow = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        queries = self.q_up(narrow).view(len(x), spec.heads, -1)
        plain, turned = queries.split((spec.plain_dim, spec.rope_dim), dim=-1)
        latent, key = self.kv_down(x).split((spec.kv_rank, spec.rope_dim), dim=-1)
        key = reference.rotate(key[:, None], turn.cos, turn.sin)
        keys = torch.cat((self.kv_norm(latent)[:, None], key), dim=-1)
        inside = torch.bmm(plain.transpose(0, 1), self.key_up).transpose(0, 1)
        q = torch.cat((inside, reference.rotate(turned, turn.cos, turn.sin)), dim=-1)
        found = attention.run(q, keys, None, self.layer, spec.scale, value_dim=spec.kv_rank)
        values = torch.bmm(found.transpose(0, 1), self.value_up.transpose(1, 2)).transpose(0, 1)
        return self.out(values.flatten(1))
