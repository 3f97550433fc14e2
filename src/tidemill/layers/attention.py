"""Attention over a paged cache: `plan(batch)` once a step, `run(q, k, v, layer)` per layer.

One ragged batch: some sequences bring one token (decode), some bring many (prefill, chunked or not); all read their
keys and values through block tables. Knows nothing of requests; the plan is made from lengths and tables alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.ops import reference

MAX_PADDING = 1.5
"""Decode sequences share one padded gather while the longest is at most this many times the shortest..."""
MAX_GATHERED_TOKENS = 32768
"""...and together they are no more tokens than this, which bounds the memory of a step."""


@dataclass(frozen=True)
class Ragged:
    """The shape of one step: sequence i brings query_lens[i] tokens, the last of its context_lens[i].

    Sequences with one token come first. `tables` [sequences, >= blocks needed] are block ids; `slots` are the flat
    cache positions of the step's tokens.
    """

    query_lens: Sequence[int]
    context_lens: Sequence[int]
    tables: np.ndarray
    slots: torch.Tensor


@dataclass
class _DecodeGroup:
    first: int
    last: int
    blocks: torch.Tensor
    masks: dict[int | None, torch.Tensor]


@dataclass
class _PrefillPart:
    first: int
    last: int
    blocks: torch.Tensor
    length: int
    masks: dict[int | None, torch.Tensor | None]


class PagedAttention:
    """The reference backend, in plain torch."""

    def __init__(
        self,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        windows: Sequence[int | None],
        scale: float,
    ) -> None:
        self.caches, self.windows, self.scale = caches, windows, scale
        self.block_size = caches[0][0].shape[1]
        self.dtype, self.device = caches[0][0].dtype, caches[0][0].device
        self._decode: list[_DecodeGroup] = []
        self._prefill: list[_PrefillPart] = []
        self._slots = torch.empty(0)

    def plan(self, batch: Ragged) -> None:
        self._slots = batch.slots
        num_decode = sum(1 for length in batch.query_lens if length == 1)
        self._decode = [self._plan_decode(batch, a, b) for a, b in _similar_lengths(batch.context_lens[:num_decode])]
        self._prefill = []
        start = num_decode
        for index in range(num_decode, len(batch.query_lens)):
            self._prefill.append(self._plan_prefill(batch, index, start))
            start += batch.query_lens[index]

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """q [tokens, heads, dim], k and v [tokens, kv_heads, dim] -> [tokens, heads, dim]"""
        k_cache, v_cache = self.caches[layer]
        window = self.windows[layer]
        reference.write_kv(k, v, k_cache, v_cache, self._slots)
        out = torch.empty_like(q)
        for group in self._decode:
            size = group.last - group.first
            keys = reference.gather_blocks(k_cache, group.blocks, size)
            values = reference.gather_blocks(v_cache, group.blocks, size)
            queries = q[group.first : group.last]
            out[group.first : group.last] = reference.attend_one_each(
                queries, keys, values, group.masks[window], self.scale
            )
        for part in self._prefill:
            keys = reference.gather_blocks(k_cache, part.blocks, 1)[:, :, : part.length]
            values = reference.gather_blocks(v_cache, part.blocks, 1)[:, :, : part.length]
            queries = q[part.first : part.last]
            out[part.first : part.last] = reference.attend_sequence(
                queries, keys, values, part.masks[window], self.scale
            )
        return out

    def _plan_decode(self, batch: Ragged, first: int, last: int) -> _DecodeGroup:
        lengths = torch.tensor(batch.context_lens[first:last], device=self.device)
        width = -(-max(batch.context_lens[first:last]) // self.block_size)
        blocks = torch.from_numpy(batch.tables[first:last, :width].reshape(-1).astype(np.int64)).to(self.device)
        positions = torch.arange(width * self.block_size, device=self.device)
        masks: dict[int | None, torch.Tensor] = {}
        for window in set(self.windows):
            visible = positions[None, :] < lengths[:, None]
            if window is not None:
                visible &= positions[None, :] >= (lengths - window)[:, None]
            masks[window] = self._additive(visible)[:, None, None, :]
        return _DecodeGroup(first, last, blocks, masks)

    def _plan_prefill(self, batch: Ragged, index: int, start: int) -> _PrefillPart:
        queries, length = batch.query_lens[index], batch.context_lens[index]
        width = -(-length // self.block_size)
        blocks = torch.from_numpy(batch.tables[index, :width].astype(np.int64)).to(self.device)
        keys = torch.arange(length, device=self.device)[None, :]
        positions = torch.arange(length - queries, length, device=self.device)[:, None]
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in set(self.windows):
            if queries == length and (window is None or window >= length):
                masks[window] = None
                continue
            visible = keys <= positions
            if window is not None:
                visible &= keys > positions - window
            masks[window] = self._additive(visible)
        return _PrefillPart(start, start + queries, blocks, length, masks)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~visible, float("-inf"))


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
