"""Where min_p, top_k and top_p cut a row of scores: one threshold per row; what is not below it stays.

One program per row. The cut is the greatest score that leaves enough, tokens for top_k and mass for top_p, found by
bisection between scores that occur. As soon as few scores are left above the lower end they are copied aside, so that
only the first looks go over the whole vocabulary. Sums run in a fixed order: what shares the batch changes no cut.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.sampling import FIELDS, LOG_MIN_P, TEMPERATURE, TOP_K, TOP_P, Chunks, num_chunks, padded
from tidemill.ops.triton.tuning import launch_config

ASIDE = 4096
"""Scores that are copied aside at most."""
DEFAULT = {"BLOCK": 8192, "num_warps": 16}

_TEMPERATURE: tl.constexpr = tl.constexpr(TEMPERATURE)
_TOP_K: tl.constexpr = tl.constexpr(TOP_K)
_TOP_P: tl.constexpr = tl.constexpr(TOP_P)
_LOG_MIN_P: tl.constexpr = tl.constexpr(LOG_MIN_P)
_FIELDS: tl.constexpr = tl.constexpr(FIELDS)


def search(
    scores: torch.Tensor,
    rows: torch.Tensor,
    table: torch.Tensor,
    best: Chunks,
    aside: torch.Tensor,
    thresholds: torch.Tensor,
    *,
    config: dict[str, Any] | None = None,
) -> None:
    """Fills `thresholds` (float32, one per row) from scaled scores and their best per chunk. `aside` is float32
    [rows, ASIDE], to work in. A score equal to the threshold stays, however many are equal. `config` replaces the
    measured launch parameters."""
    count, vocab = scores.shape
    used = num_chunks(count, vocab)
    if config is None:
        config = launch_config("sampling_search", "row", DEFAULT)
    _search_kernel[(count,)](
        scores,
        rows,
        table,
        best.values,
        aside,
        thresholds,
        used,
        best.values.stride(0),
        VOCAB=vocab,
        CHUNKS=padded(used),
        ASIDE=aside.shape[1],
        **config,
    )


@triton.jit(do_not_specialize=["rows"])
def _search_kernel(
    scores,
    rows,
    table,
    best_values,
    aside,
    thresholds,
    num_chunks,
    chunk_stride,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    ASIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    fields = table + tl.load(rows + index).to(tl.int64) * _FIELDS
    temperature = tl.load(fields + _TEMPERATURE).to(tl.float32, bitcast=True)
    top_k = tl.load(fields + _TOP_K)
    top_p = tl.load(fields + _TOP_P).to(tl.float32, bitcast=True)
    chunks = tl.arange(0, CHUNKS)
    bests = tl.load(best_values + index * chunk_stride + chunks, mask=chunks < num_chunks, other=float("-inf"))
    best = tl.max(bests, axis=0)
    low = best + tl.load(fields + _LOG_MIN_P).to(tl.float32, bitcast=True)
    usable = (best > float("-inf")) & (best < float("inf"))
    if (temperature > 0.0) & usable & ((top_k > 0) | (top_p < 1.0)):
        row = scores + index * VOCAB
        count, mass, low, _ = _look(row, VOCAB, low, best, BLOCK)
        above = best + (tl.abs(best) + 1.0) * 1e-6
        by_count = (top_k > 0) & (top_k < count)
        target = tl.where(by_count, top_k.to(tl.float32), top_p * mass)
        both = by_count & (top_p < 1.0)
        if by_count | (top_p < 1.0):
            low, high, count = _bisect(row, VOCAB, low, above, count, best, target, by_count, ASIDE, BLOCK)
            if count <= ASIDE:
                few = aside + index * ASIDE
                _copy_above(row, VOCAB, low, few, ASIDE, BLOCK)
                # What some threads of the program wrote is read by others.
                tl.debug_barrier()
                low, high, count = _bisect(few, ASIDE, low, high, count, best, target, by_count, 0, ASIDE)
                if both:
                    count, mass, low, _ = _look(few, ASIDE, low, best, ASIDE)
                    low, high, count = _bisect(few, ASIDE, low, above, count, best, top_p * mass, False, 0, ASIDE)
            else:
                if both:
                    count, mass, low, _ = _look(row, VOCAB, low, best, BLOCK)
                    low, high, count = _bisect(row, VOCAB, low, above, count, best, top_p * mass, False, 0, BLOCK)
    tl.store(thresholds + index, low)


@triton.jit
def _bisect(source, SIZE: tl.constexpr, low, high, count, best, target, by_count, enough, BLOCK: tl.constexpr):
    """The greatest score that leaves `target`, if more than `enough` scores are not below it; else a bracket of it.

    `low` occurs and leaves at least `target`, `high` leaves less; `count` scores are not below `low`."""
    unsettled = (count > enough) & (low < best)
    while unsettled:
        pivot = 0.5 * low + 0.5 * high
        # Between neighbours there is no number left to try.
        unsettled = pivot > low
        found, mass, up, down = _look(source, SIZE, pivot, best, BLOCK)
        if tl.where(by_count, found.to(tl.float32), mass) >= target:
            low = up
            count = found
            unsettled = unsettled & (count > enough) & (low < best)
        else:
            high = pivot
            unsettled = unsettled & (down > low)
    return low, high, count


@triton.jit
def _look(source, SIZE: tl.constexpr, pivot, best, BLOCK: tl.constexpr):
    """Of the scores not below the pivot: how many, their mass relative to the best, and the least of them; and the
    greatest score below the pivot."""
    counts = tl.zeros((BLOCK,), dtype=tl.int32)
    masses = tl.zeros((BLOCK,), dtype=tl.float32)
    ups = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
    downs = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, SIZE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        found = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
        stays = (found >= pivot) & (found > float("-inf"))
        counts += stays.to(tl.int32)
        masses += tl.where(stays, tl.exp(found - best), 0.0)
        ups = tl.minimum(ups, tl.where(stays, found, float("inf")))
        downs = tl.maximum(downs, tl.where(stays, float("-inf"), found))
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0), tl.min(ups, axis=0), tl.max(downs, axis=0)


@triton.jit
def _copy_above(source, SIZE: tl.constexpr, low, target, ROOM: tl.constexpr, BLOCK: tl.constexpr):
    """The scores not below `low`, one after another, and nothing (-inf) behind them."""
    filled = tl.full((), 0, dtype=tl.int32)
    for start in range(0, SIZE, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        found = tl.load(source + ids, mask=ids < SIZE, other=float("-inf"))
        stays = (found >= low) & (ids < SIZE)
        places = filled + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        tl.store(target + places, found, mask=stays)
        filled += tl.sum(stays.to(tl.int32), axis=0)
    ids = tl.arange(0, ROOM)
    tl.store(target + ids, tl.full((ROOM,), float("-inf"), dtype=tl.float32), mask=ids >= filled)
