"""Tokens from logits on the device: the best score, or the best score with noise, over chunks of the vocabulary.

A row is cut into chunks so that one row alone keeps many multiprocessors busy; `finish` joins them and writes the token
where the next step finds it. Which parameters a row has stands in a table of int32 fields on the device. The noise is
the hash that `runtime/sampler.py` defines. Knows nothing of requests, penalties or constraints.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.tuning import launch_config

TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, SEED, NUM_PROMPT, REPETITION, FREQUENCY, PRESENCE = range(9)
"""Fields of a row of the table. Numbers that are not integers stand there as the bits of a float32."""
FIELDS = 12
NO_TOKEN_LEFT, NOT_FINITE = -1, -2
"""What stands in place of a token that could not be chosen."""

SMALLEST_CHUNK = 1024
FEW_ROWS = 8
"""Up to here chunks are small, since there are more multiprocessors than rows."""

_TEMPERATURE: tl.constexpr = tl.constexpr(TEMPERATURE)
_SEED: tl.constexpr = tl.constexpr(SEED)
_FIELDS: tl.constexpr = tl.constexpr(FIELDS)
_NO_TOKEN_LEFT: tl.constexpr = tl.constexpr(NO_TOKEN_LEFT)
_NOT_FINITE: tl.constexpr = tl.constexpr(NOT_FINITE)
_NOTHING: tl.constexpr = tl.constexpr(0)
_SOMETHING: tl.constexpr = tl.constexpr(1)
_BROKEN: tl.constexpr = tl.constexpr(2)


@dataclass(frozen=True)
class Chunks:
    """Per row and chunk, the best score and its token; room for as many rows as were asked for."""

    values: torch.Tensor
    tokens: torch.Tensor

    @staticmethod
    def empty(num_rows: int, vocab_size: int, device: torch.device) -> Chunks:
        shape = (num_rows, triton.cdiv(vocab_size, SMALLEST_CHUNK))
        return Chunks(
            torch.empty(shape, dtype=torch.float32, device=device), torch.empty(shape, dtype=torch.int32, device=device)
        )


def scan(
    logits: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    best: Chunks,
    states: torch.Tensor | None,
    *,
    scale: bool = False,
    noise: bool = False,
) -> None:
    """The best score of every chunk. Scores are the logits; of rows with a temperature, with `scale`, the logits
    divided by it, which are also stored in their place; with `noise` those plus noise, and nothing is stored.
    `states` (int32, shaped as the chunks) learns which chunks hold numbers that are not finite."""
    count, vocab = logits.shape
    _scan_kernel[(count, num_chunks(count, vocab))](
        logits,
        rows,
        lengths,
        table,
        best.values,
        best.tokens,
        states,
        vocab,
        best.values.stride(0),
        SCALE=scale,
        NOISE=noise,
        **_config(count),
    )


def draw(
    scores: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    best: Chunks,
    thresholds: torch.Tensor,
    noise_span: float,
    drawn: Chunks,
) -> None:
    """Noise on scaled scores not below their row's threshold: the best sum of every chunk. Greedy rows stay as they
    were scanned. Scores more than `noise_span` behind the best are not looked at, as they cannot win."""
    count, vocab = scores.shape
    used = num_chunks(count, vocab)
    _draw_kernel[(count, used)](
        scores,
        rows,
        lengths,
        table,
        best.values,
        best.tokens,
        thresholds,
        drawn.values,
        drawn.tokens,
        vocab,
        used,
        best.values.stride(0),
        noise_span,
        CHUNKS=padded(used),
        **_config(count),
    )


def finish(
    best: Chunks,
    states: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """The chosen tokens, int32, also written to tokens[row, length]; NO_TOKEN_LEFT or NOT_FINITE, and nothing written,
    where there is none."""
    count = len(rows)
    chosen = torch.empty(count, dtype=torch.int32, device=rows.device)
    used = num_chunks(count, vocab)
    _finish_kernel[(count,)](
        best.values,
        best.tokens,
        states,
        rows,
        lengths,
        tokens,
        chosen,
        used,
        best.values.stride(0),
        tokens.stride(0),
        CHUNKS=padded(used),
        num_warps=1,
    )
    return chosen


def num_chunks(count: int, vocab: int) -> int:
    """How many chunks of a row are used when `count` rows are sampled."""
    return triton.cdiv(vocab, _config(count)["BLOCK"])


def padded(used: int) -> int:
    """A size that a kernel can load all chunks of a row with."""
    return max(triton.next_power_of_2(used), 16)


def _config(count: int) -> dict[str, Any]:
    return _few_rows_config() if count <= FEW_ROWS else _many_rows_config()


@cache
def _few_rows_config() -> dict[str, Any]:
    return _unfused(launch_config("sampling", "few", {"BLOCK": SMALLEST_CHUNK, "num_warps": 4}))


@cache
def _many_rows_config() -> dict[str, Any]:
    return _unfused(launch_config("sampling", "many", {"BLOCK": 8192, "num_warps": 8}))


def _unfused(config: dict[str, Any]) -> dict[str, Any]:
    """Every kernel rounds a product before adding to it, so that all of them make the same noise."""
    return {**config, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["rows", "lengths"])
def _scan_kernel(
    logits,
    rows,
    lengths,
    table,
    values,
    tokens,
    states,
    vocab,
    chunk_stride,
    SCALE: tl.constexpr,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    scores = tl.load(logits + index * vocab + ids, mask=inside, other=float("-inf"))
    nan = scores != scores
    place = index * chunk_stride + chunk
    if states is not None:
        broken = nan | (scores == float("inf"))
        state = tl.where(broken, _BROKEN, tl.where(scores > float("-inf"), _SOMETHING, _NOTHING))
        tl.store(states + place, tl.max(state, axis=0))
    scores = tl.where(nan, float("-inf"), scores)
    if SCALE or NOISE:
        row = tl.load(rows + index).to(tl.int64)
        temperature = tl.load(table + row * _FIELDS + _TEMPERATURE).to(tl.float32, bitcast=True)
        random = temperature > 0.0
        scaled = tl.div_rn(scores, tl.where(random, temperature, 1.0))
        if NOISE:
            key = draw_key(tl.load(table + row * _FIELDS + _SEED), tl.load(lengths + index))
            scores = tl.where(random, scaled + gumbel(key, ids), scores)
        else:
            tl.store(logits + index * vocab + ids, scaled, mask=ids < tl.where(random, vocab, 0))
            scores = tl.where(random, scaled, scores)
    value, at = tl.max(scores, axis=0, return_indices=True)
    tl.store(values + place, value)
    tl.store(tokens + place, chunk * BLOCK + at)


@triton.jit(do_not_specialize=["rows", "lengths"])
def _draw_kernel(
    scores,
    rows,
    lengths,
    table,
    best_values,
    best_tokens,
    thresholds,
    values,
    tokens,
    vocab,
    num_chunks,
    chunk_stride,
    noise_span,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    place = index * chunk_stride + chunk
    row = tl.load(rows + index).to(tl.int64)
    temperature = tl.load(table + row * _FIELDS + _TEMPERATURE).to(tl.float32, bitcast=True)
    if temperature > 0.0:
        chunks = tl.arange(0, CHUNKS)
        bests = tl.load(best_values + index * chunk_stride + chunks, mask=chunks < num_chunks, other=float("-inf"))
        least = tl.maximum(tl.max(bests, axis=0) - noise_span, tl.load(thresholds + index))
        ids = chunk * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(scores + index * vocab + ids, mask=ids < vocab, other=float("-inf"))
        key = draw_key(tl.load(table + row * _FIELDS + _SEED), tl.load(lengths + index))
        noisy = tl.where(found >= least, found + gumbel(key, ids), float("-inf"))
        value, at = tl.max(noisy, axis=0, return_indices=True)
        tl.store(values + place, value)
        tl.store(tokens + place, chunk * BLOCK + at)
    else:
        tl.store(values + place, tl.load(best_values + place))
        tl.store(tokens + place, tl.load(best_tokens + place))


@triton.jit(do_not_specialize=["rows", "lengths"])
def _finish_kernel(
    values,
    chunk_tokens,
    states,
    rows,
    lengths,
    tokens,
    chosen,
    num_chunks,
    chunk_stride,
    tokens_stride,
    CHUNKS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    first = index * chunk_stride
    state = tl.max(tl.load(states + first + chunks, mask=inside, other=_NOTHING), axis=0)
    value, at = tl.max(tl.load(values + first + chunks, mask=inside, other=float("-inf")), axis=0, return_indices=True)
    token = tl.load(chunk_tokens + first + at)
    token = tl.where(value > float("-inf"), token, _NO_TOKEN_LEFT)
    token = tl.where(state == _SOMETHING, token, _NOT_FINITE)
    tl.store(chosen + index, token)
    row = tl.load(rows + index).to(tl.int64)
    tl.store(tokens + row * tokens_stride + tl.load(lengths + index), token, mask=token >= 0)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def draw_key(seed, position):
    """32 bits that name a draw; the seed comes mixed already."""
    return _mix(seed.to(tl.uint32, bitcast=True) ^ position.to(tl.uint32))


@triton.jit
def gumbel(key, ids):
    """The noise of a draw for these tokens."""
    return gumbel_of(_mix(_mix(key + ids.to(tl.uint32) * 0x9E3779B1) ^ key) >> 8)


@triton.jit
def gumbel_of(bits):
    """-log(-log(u)) of u = (bits + 1/2) / 2^24, in float32 without losing how close u is to one."""
    uniform = (bits.to(tl.float32) + 0.5) * 5.9604644775390625e-08
    rest = ((16777216 - bits).to(tl.float32) - 0.5) * 5.9604644775390625e-08
    # From one half upwards, -log(u) = 2 artanh(t): each term is at most a ninth of the one before.
    t = rest / (2.0 - rest)
    s = t * t
    series = 1.0 / 9.0 + s * (1.0 / 11.0 + s * (1.0 / 13.0 + s * (1.0 / 15.0 + s * (1.0 / 17.0))))
    series = 1.0 / 3.0 + s * (1.0 / 5.0 + s * (1.0 / 7.0 + s * series))
    from_rest = 2.0 * t * (1.0 + s * series)
    return -tl.log(tl.where(bits < 8388608, -tl.log(uniform), from_rest))
