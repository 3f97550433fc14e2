"""Attention over a paged cache on a GPU: the interface of `attention.PagedAttention`, by Triton's kernels.

`plan(batch)` only remembers the step's tensors: lengths and tables are read on the device, so a captured graph replays
with whatever they hold then. Knows nothing of requests, nor of how the kernels are launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from tidemill.layers.cache_layout import CacheLayout
from tidemill.layers.device_batch import DeviceBatch

Place = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""A layer's part of the cache: keys, values (None: the first numbers of the keys), and the scales of both where the
cache is quantised."""


class TritonAttention:
    fuses: Literal[True] = True
    """One launch (`ops/triton/rotary.py`) normalises, turns and writes the cache; `attend` reads it then."""

    def __init__(
        self,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        layout: CacheLayout,
        alibi: Sequence[float] | None = None,
        scales: Sequence[tuple[torch.Tensor, torch.Tensor | None]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`caches` and `scales` per slot of a page: keys and values; without values, these are the first numbers of the
        keys. `alibi`: per head, how much a score falls with each position of distance. `dtype`: what queries, keys and
        values come in; the cache's own type unless that is narrower."""
        self.caches, self.layout, self.scales = caches, layout, scales
        keys = caches[0][0]
        self.block_size, self.dtype, self.device = keys.shape[1], dtype or keys.dtype, keys.device
        self.slopes = None if alibi is None else torch.tensor(alibi, dtype=torch.float32, device=self.device)
        self._batch: DeviceBatch | None = None

    @property
    def batch(self) -> DeviceBatch:
        if self._batch is None:
            raise RuntimeError("attention was asked for before plan(batch)")
        return self._batch

    def plan(self, batch: DeviceBatch) -> None:
        self._batch = batch

    def cache_of(self, layer: int) -> Place:
        _, slot = self.layout.places[layer]
        k_scale, v_scale = (None, None) if self.scales is None else self.scales[slot]
        return *self.caches[slot], k_scale, v_scale

    def slots_of(self, layer: int) -> torch.Tensor:
        """Where the step's tokens go in the cache of this layer."""
        group, _ = self.layout.places[layer]
        return self.batch.slots[group]

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: int,
        scale: float,
        *,
        soft_cap: float | None = None,
        value_dim: int | None = None,
    ) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads, dim]. Where v is None, the values
        are the first `value_dim` numbers of the keys."""
        # Imported when a GPU is there to run it: Triton is not installed everywhere.
        from tidemill.ops.triton.rotary import store_kv

        k_cache, v_cache, k_scale, v_scale = self.cache_of(layer)
        store_kv(k, v, k_cache, v_cache, self.slots_of(layer), k_scale, v_scale)
        return self.attend(q, layer, scale, soft_cap=soft_cap, value_dim=value_dim)

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        scale: float,
        *,
        soft_cap: float | None = None,
        value_dim: int | None = None,
    ) -> torch.Tensor:
        """As `run`, of keys and values that are in the cache already."""
        from tidemill.ops.triton.attention import paged_attention

        batch = self.batch
        group, _ = self.layout.places[layer]
        k_cache, v_cache, k_scale, v_scale = self.cache_of(layer)
        return paged_attention(
            q,
            k_cache,
            v_cache,
            batch.tables[group],
            batch.rows,
            batch.query_starts,
            batch.context_lens,
            scale=scale,
            num_decode=batch.num_decode,
            max_query_len=batch.max_query_len,
            window=self.layout.windows[group],
            soft_cap=soft_cap,
            slopes=self.slopes,
            value_dim=value_dim,
            k_scale=k_scale,
            v_scale=v_scale,
        )
