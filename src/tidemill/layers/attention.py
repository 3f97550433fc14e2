"""Attention over a paged cache: `plan(batch)` once a step, `run(q, k, v, layer)` per layer.

One ragged batch: some sequences bring one token (decode), some bring many (prefill, chunked or not); all read their
keys and values through block tables, one table per group of layers that see equally far (`cache_layout.py`). Knows
nothing of requests; the plan is made from lengths and tables alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from tidemill.layers.cache_layout import CacheLayout
from tidemill.layers.stored_vectors import StoredVectors
from tidemill.ops import reference

MAX_PADDING = 1.5
"""Decode sequences share one padded gather while the longest is at most this many times the shortest..."""
MAX_GATHERED_TOKENS = 32768
"""...and together they are no more tokens than this, which bounds the memory of a step."""


@dataclass(frozen=True)
class Ragged:
    """The shape of one step: sequence i brings query_lens[i] tokens, the last of its context_lens[i].

    Sequences with one token come first, shortest context first. Per group: `tables` [sequences, >= blocks needed] are
    block ids, `slots` the flat cache positions of the step's tokens.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    tables: Sequence[np.ndarray]
    slots: Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Part:
    """Sequences computed together: their query tokens, the blocks they read, and who sees what."""

    first: int
    last: int
    sequences: int
    blocks: torch.Tensor
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class _Plan:
    slots: torch.Tensor
    decode: list[_Part]
    prefill: list[_Part]


class PagedAttention:
    """The reference backend, in plain torch."""

    fuses: Literal[False] = False
    """Head norm, rotation and the writing of the cache are steps of their own before it."""

    def __init__(
        self,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        layout: CacheLayout,
        alibi: Sequence[float] | None = None,
        scales: Sequence[tuple[torch.Tensor, torch.Tensor | None]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`caches` per slot of a page: keys and values; without values, these are the first numbers of the keys.
        `alibi`: per head, how much a score falls with each position of distance. `scales` of quantised caches: per
        slot, [blocks, block_size, kv_heads]. `dtype`: what queries, keys and values come in; the cache's own type
        unless that is narrower."""
        self.caches, self.layout = caches, layout
        keys = caches[0][0]
        self.block_size, self.dtype, self.device = keys.shape[1], dtype or keys.dtype, keys.device
        self._slots: list[tuple[StoredVectors, StoredVectors | None]] = []
        for slot, (k_cache, v_cache) in enumerate(caches):
            k_scale, v_scale = (None, None) if scales is None else scales[slot]
            values = None if v_cache is None else StoredVectors(v_cache, v_scale, self.dtype)
            self._slots.append((StoredVectors(k_cache, k_scale, self.dtype), values))
        self.slopes = None if alibi is None else torch.tensor(alibi, device=self.device)
        self._plans: list[_Plan] = []

    def plan(self, batch: Ragged) -> None:
        num_decode = sum(1 for length in batch.query_lens if length == 1)
        similar = _similar_lengths(batch.context_lens[:num_decode])
        starts = np.cumsum(batch.query_lens) - batch.query_lens
        masks: dict[tuple[int | None, int], torch.Tensor | None] = {}
        self._plans = []
        for window, table, slots in zip(self.layout.windows, batch.tables, batch.slots, strict=True):
            decode = [self._plan_decode(batch, table, window, a, b, masks) for a, b in similar]
            prefill = [
                self._plan_prefill(batch, table, window, index, int(starts[index]), masks)
                for index in range(num_decode, len(batch.query_lens))
            ]
            self._plans.append(_Plan(slots, decode, prefill))

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
        group, slot = self.layout.places[layer]
        plan, (stored_keys, stored_values) = self._plans[group], self._slots[slot]
        stored_keys.write(k, plan.slots)
        if v is not None and stored_values is not None:
            stored_values.write(v, plan.slots)
            value_dim = v.shape[-1]
        heads = q.shape[1]
        out = q.new_empty(q.shape[0], heads, value_dim or q.shape[-1])
        for part in (*plan.decode, *plan.prefill):
            keys = stored_keys.gather(part.blocks, part.sequences)[:, :, : part.length]
            if stored_values is None:
                # Whole keys as values take the fast path of equal widths; what is too much is cut off below.
                values = keys
            else:
                values = stored_values.gather(part.blocks, part.sequences)[:, :, : part.length]
            queries = q[part.first : part.last]
            if part.sequences < part.last - part.first:
                found = reference.attend(
                    queries.transpose(0, 1)[None], keys, values, part.mask, scale, soft_cap, self.slopes
                )[0].transpose(0, 1)
            elif soft_cap is None and self.slopes is None:
                # One query each: the query heads that share a kv head stand as positions, so nothing is repeated.
                grouped = queries.view(part.sequences, keys.shape[1], heads // keys.shape[1], -1)
                mask = None if part.mask is None else part.mask.expand(*grouped.shape[:3], -1)
                found = reference.attend(grouped, keys, values, mask, scale).reshape(part.sequences, heads, -1)
            else:
                found = reference.attend(queries[:, :, None], keys, values, part.mask, scale, soft_cap, self.slopes)
                found = found[:, :, 0]
            out[part.first : part.last] = found[..., : out.shape[-1]]
        return out

    def _plan_decode(
        self,
        batch: Ragged,
        table: np.ndarray,
        window: int | None,
        first: int,
        last: int,
        masks: dict[tuple[int | None, int], torch.Tensor | None],
    ) -> _Part:
        """`masks` is shared by groups that see equally far: only their blocks differ."""
        lengths = np.asarray(batch.context_lens[first:last])
        begin = self._first_blocks(lengths - 1, window)
        width = int((-(-lengths // self.block_size) - begin).max())
        if begin.any():
            columns = np.minimum(begin[:, None] + np.arange(width), table.shape[1] - 1)
            chosen = np.take_along_axis(table[first:last], columns, axis=1)
        else:
            chosen = table[first:last, :width]
        if (window, first) not in masks:
            positions = torch.from_numpy(begin * self.block_size)[:, None] + torch.arange(width * self.block_size)
            ends = torch.from_numpy(lengths)[:, None]
            visible = positions < ends
            if window is not None:
                visible &= positions >= ends - window
            masks[window, first] = self._additive(visible[:, None, None, :])
        blocks = torch.from_numpy(chosen.reshape(-1).astype(np.int64)).to(self.device)
        return _Part(first, last, last - first, blocks, width * self.block_size, masks[window, first])

    def _plan_prefill(
        self,
        batch: Ragged,
        table: np.ndarray,
        window: int | None,
        index: int,
        start: int,
        masks: dict[tuple[int | None, int], torch.Tensor | None],
    ) -> _Part:
        queries, length = batch.query_lens[index], batch.context_lens[index]
        begin = int(self._first_blocks(np.asarray(length - queries), window))
        begin_token = begin * self.block_size
        blocks = torch.from_numpy(table[index, begin : -(-length // self.block_size)].astype(np.int64)).to(self.device)
        if (window, start) not in masks:
            mask = None
            if queries != length or (window is not None and window < length):
                keys = torch.arange(begin_token, length)[None, :]
                positions = torch.arange(length - queries, length)[:, None]
                visible = keys <= positions
                if window is not None:
                    visible &= keys > positions - window
                mask = self._additive(visible[None, None])
            masks[window, start] = mask
        return _Part(start, start + queries, 1, blocks, length - begin_token, masks[window, start])

    def _first_blocks(self, positions: np.ndarray, window: int | None) -> np.ndarray:
        """The block that holds the first position these see."""
        if window is None:
            return np.zeros_like(positions)
        return np.maximum(positions - window + 1, 0) // self.block_size

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        """0 where a key is seen, -inf elsewhere."""
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible.to(self.device), float("-inf"))


def _similar_lengths(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a list sorted by length into runs whose padding stays small."""
    groups: list[tuple[int, int]] = []
    start = 0
    for index in range(1, len(lengths) + 1):
        if (
            index == len(lengths)
            or lengths[index] > MAX_PADDING * lengths[start] + 64
            or lengths[index] * (index + 1 - start) > MAX_GATHERED_TOKENS
        ):
            groups.append((start, index))
            start = index
    return groups
