"""Which experts a token goes to, and (token, choice) pairs in the order of their experts, on the device throughout.

A pair is numbered token * top_k + choice. Sorted pairs are cut into tiles of one expert each; how many tiles there may
be is known on the host, how many there are only on the device. Knows nothing of what experts compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.tuning import launch_config

MOST_EXPERTS = 512
CHUNK = 512
"""Pairs that one program sorts."""
FEW_LOGITS = 8192
"""Up to so many, each expert's row is read again for every few tokens; beyond, torch multiplies matrices."""


@triton.jit(do_not_specialize=["tokens"])
def _expert_logits(x, router, logits, tokens, x_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    x_at = x + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    router_at = router + expert * WIDTH + k
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        inside = k < WIDTH - first
        x_part = tl.load(x_at + first, mask=(token < tokens)[:, None] & inside[None, :], other=0.0)
        total += x_part.to(tl.float32) * tl.load(router_at + first, mask=inside, other=0.0)[None, :]
    tl.store(logits + token * tl.num_programs(0) + expert, tl.sum(total, axis=1), mask=token < tokens)


def expert_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """x Wᵀ in float32, whatever x is: [tokens, experts]. A few of them are one launch, with none for a cast."""
    num_experts, width = router.shape
    most = launch_config("moe_logits", f"{width}x{num_experts}", {"tokens": max(16, FEW_LOGITS // num_experts)})
    return few_logits(x, router) if len(x) <= most["tokens"] else many_logits(x, router)


def few_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    (tokens, width), num_experts = x.shape, len(router)
    logits = torch.empty(tokens, num_experts, dtype=torch.float32, device=x.device)
    rows, block = 1 if tokens == 1 else 4, min(1024, triton.next_power_of_2(width))
    _expert_logits[(num_experts, triton.cdiv(tokens, rows))](
        x, router, logits, tokens, x.stride(0), WIDTH=width, ROWS=rows, BLOCK=block, num_warps=4
    )
    return logits


def many_logits(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(x.float(), router)


@triton.jit
def _route(
    logits,
    choice_bias,
    experts,
    weights,
    logits_stride,
    num_experts,
    scaling,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    there = expert < num_experts
    logit = tl.load(logits + token * logits_stride + expert, mask=there, other=float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(logit)
    else:
        scores = tl.exp(logit - tl.max(logit, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if BIASED:
        choice = scores + tl.load(choice_bias + expert, mask=there, other=0.0)
    # Whatever a row holds, its choices are different experts that exist: a NaN is the last choice, not no choice.
    choice = tl.where(choice > -3.0e38, choice, -3.0e38)
    choice = tl.where(there, choice, float("-inf"))
    index = tl.arange(0, CHOICES)
    chosen = tl.zeros([CHOICES], tl.int32)
    weight = tl.zeros([CHOICES], tl.float32)
    for turn in range(TOP_K):
        best = tl.argmax(choice, axis=0)
        hit = expert == best
        chosen = tl.where(index == turn, best, chosen)
        weight = tl.where(index == turn, tl.sum(tl.where(hit, scores, 0.0), axis=0), weight)
        choice = tl.where(hit, float("-inf"), choice)
    if RENORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    weight = weight * scaling
    at = token * TOP_K + index
    tl.store(experts + at, chosen, mask=index < TOP_K)
    tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=index < TOP_K)


def route(
    logits: torch.Tensor,
    top_k: int,
    scoring: str,
    renormalise: bool,
    scaling: float,
    choice_bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts (int32) and their weights (in `dtype`), both [tokens, top_k], best first; the first among equals."""
    tokens, num_experts = logits.shape
    experts = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    _route[(tokens,)](
        logits,
        logits if choice_bias is None else choice_bias,
        experts,
        weights,
        logits.stride(0),
        num_experts,
        float(scaling),
        SIGMOID=scoring == "sigmoid",
        BIASED=choice_bias is not None,
        RENORMALISE=renormalise,
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        EXPERTS=triton.next_power_of_2(num_experts),
        num_warps=1 if num_experts <= 256 else 4,
    )
    return experts, weights


@dataclass(frozen=True)
class SortedPairs:
    """Pairs in the order of their experts, and tiles of at most `block` of them; a tile behind the last has no rows."""

    order: torch.Tensor
    """int32 [pairs]"""
    tiles: torch.Tensor
    """int32 [3, max_tiles]: each tile's expert, its first place in `order` and its number of rows."""
    max_tiles: int
    block: int


@triton.jit
def _count_chunk(experts, chunk, pairs, expert, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr):
    """How many of a chunk's pairs each expert has."""
    count = tl.zeros([EXPERTS], tl.int32)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, pairs)
    while first < end:
        pair = first + tl.arange(0, PART)
        mine = tl.load(experts + pair, mask=pair < pairs, other=-1).to(tl.int32)
        count += tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), axis=0)
        first += PART
    return count


@triton.jit(do_not_specialize=["pairs"])
def _count(experts, counts, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr):
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = _count_chunk(experts, chunk, pairs, expert, EXPERTS, CHUNK, PART)
    tl.store(counts + chunk * EXPERTS + expert, count)


@triton.jit(do_not_specialize=["pairs", "chunks", "max_tiles"])
def _place(
    experts,
    counts,
    order,
    tiles,
    pairs,
    chunks,
    max_tiles,
    BLOCK: tl.constexpr,
    ALONE: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
):
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    part = tl.arange(0, PART)
    before = tl.zeros([EXPERTS], tl.int32)
    if ALONE:
        total = _count_chunk(experts, chunk, pairs, expert, EXPERTS, CHUNK, PART)
    else:
        total = tl.zeros([EXPERTS], tl.int32)
        other_first = 0
        while other_first < chunks:
            other = other_first + part
            at = counts + other[:, None] * EXPERTS + expert[None, :]
            found = tl.load(at, mask=(other < chunks)[:, None], other=0)
            total += tl.sum(found, axis=0)
            before += tl.sum(tl.where((other < chunk)[:, None], found, 0), axis=0)
            other_first += PART
    first_pair = tl.cumsum(total, axis=0) - total
    place = first_pair + before
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, pairs)
    while first < end:
        pair = first + part
        mine = tl.load(experts + pair, mask=pair < pairs, other=-1).to(tl.int32)
        hit = mine[:, None] == expert[None, :]
        earlier = (mine[:, None] == mine[None, :]) & (part[:, None] > part[None, :])
        to = tl.sum(tl.where(hit, place[None, :], 0), axis=1) + tl.sum(earlier.to(tl.int32), axis=1)
        tl.store(order + to, pair, mask=pair < pairs)
        place += tl.sum(hit.to(tl.int32), axis=0)
        first += PART

    of_expert = (total + BLOCK - 1) // BLOCK
    last_tile = tl.cumsum(of_expert, axis=0)
    first_tile = last_tile - of_expert
    first = chunk * PART
    while first < max_tiles:
        tile = first + part
        inside = (tile[:, None] >= first_tile[None, :]) & (tile[:, None] < last_tile[None, :])
        skipped = (tile[:, None] - first_tile[None, :]) * BLOCK
        rows = tl.minimum(total[None, :] - skipped, BLOCK)
        there = tile < max_tiles
        tl.store(tiles + tile, tl.sum(tl.where(inside, expert[None, :], 0), axis=1), mask=there)
        start = tl.sum(tl.where(inside, first_pair[None, :] + skipped, 0), axis=1)
        tl.store(tiles + max_tiles + tile, start, mask=there)
        tl.store(tiles + 2 * max_tiles + tile, tl.sum(tl.where(inside, rows, 0), axis=1), mask=there)
        first += chunks * PART


def sort_pairs(experts: torch.Tensor, num_experts: int, block: int) -> SortedPairs:
    """Sort the pairs of `experts` [tokens, top_k] stably by expert."""
    pairs = experts.numel()
    # Every tile has a row, and all but one of an expert's tiles are full.
    max_tiles = min(pairs, (pairs + min(pairs, num_experts) * (block - 1)) // block)
    chunks = triton.cdiv(pairs, CHUNK)
    padded = max(16, triton.next_power_of_2(num_experts))
    sizes = {"EXPERTS": padded, "CHUNK": CHUNK, "PART": max(16, min(64, 8192 // padded))}
    order = torch.empty(pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty(3, max_tiles, dtype=torch.int32, device=experts.device)
    counts = order
    if chunks > 1:
        counts = torch.empty(chunks, padded, dtype=torch.int32, device=experts.device)
        _count[(chunks,)](experts, counts, pairs, **sizes)
    _place[(chunks,)](
        experts, counts, order, tiles, pairs, chunks, max_tiles, BLOCK=block, ALONE=chunks == 1, **sizes, num_warps=8
    )
    return SortedPairs(order, tiles, max_tiles, block)
