"""Logits changed by what a row's tokens so far are: penalties for those that occurred, and tokens that must not follow.

Reads the tokens on the device, where the newest may be unknown to the host. A token id outside the vocabulary counts
for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.sampling import FIELDS, FREQUENCY, NUM_PROMPT, PRESENCE, REPETITION

HISTORY_BLOCK = 1024
VOCABULARY_BLOCK = 2048
SHORTEST_PREFIX = 16

_IN_PROMPT: tl.constexpr = tl.constexpr(2**30)
"""Marks a token that the prompt holds; below it stands how often the output does."""
_NUM_PROMPT: tl.constexpr = tl.constexpr(NUM_PROMPT)
_REPETITION: tl.constexpr = tl.constexpr(REPETITION)
_FREQUENCY: tl.constexpr = tl.constexpr(FREQUENCY)
_PRESENCE: tl.constexpr = tl.constexpr(PRESENCE)
_FIELDS: tl.constexpr = tl.constexpr(FIELDS)


def penalise(
    logits: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
    table: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Repetition, frequency and presence penalties on logits[places]; `rows` and `lengths` are those of all logits, and
    no row at `places` has more than `longest` tokens. `counts` is int32 [at least places, vocabulary], to work in."""
    vocab = logits.shape[1]
    counts = counts[: len(places)].zero_()
    _count_kernel[(len(places), triton.cdiv(longest, HISTORY_BLOCK))](
        counts, places, rows, lengths, tokens, table, vocab, tokens.stride(0), BLOCK=HISTORY_BLOCK, num_warps=4
    )
    _penalise_kernel[(len(places), triton.cdiv(vocab, VOCABULARY_BLOCK))](
        logits, counts, places, rows, table, vocab, BLOCK=VOCABULARY_BLOCK, num_warps=4
    )


def forbid(
    logits: torch.Tensor,
    entries: torch.Tensor,
    prefixes: torch.Tensor,
    longest: int,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Masks tokens. An entry (int32 [entries, 4]) is a row of the logits, the token, and the first place and the number
    of the tokens in `prefixes` which the row must end with; none of these are longer than `longest`."""
    _forbid_kernel[(len(entries),)](
        logits,
        entries,
        prefixes,
        rows,
        lengths,
        tokens,
        logits.shape[1],
        tokens.stride(0),
        BLOCK=max(triton.next_power_of_2(longest), SHORTEST_PREFIX),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["places", "rows", "lengths"])
def _count_kernel(counts, places, rows, lengths, tokens, table, vocab, tokens_stride, BLOCK: tl.constexpr):
    place = tl.load(places + tl.program_id(0))
    row = tl.load(rows + place).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position < tl.load(lengths + place)
    token = tl.load(tokens + row * tokens_stride + position, mask=inside, other=-1)
    known = (token >= 0) & (token < vocab)
    prompt = position < tl.load(table + row * _FIELDS + _NUM_PROMPT)
    count = counts + tl.program_id(0).to(tl.int64) * vocab + token
    tl.atomic_or(count, _IN_PROMPT, mask=known & prompt, sem="relaxed")
    tl.atomic_add(count, 1, mask=known & (prompt == 0), sem="relaxed")


@triton.jit(do_not_specialize=["places", "rows"])
def _penalise_kernel(logits, counts, places, rows, table, vocab, BLOCK: tl.constexpr):
    place = tl.load(places + tl.program_id(0)).to(tl.int64)
    fields = table + tl.load(rows + place).to(tl.int64) * _FIELDS
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + tl.program_id(0).to(tl.int64) * vocab + ids, mask=ids < vocab, other=0)
    seen = count != 0
    scores = tl.load(logits + place * vocab + ids, mask=seen, other=0.0)
    repetition = tl.load(fields + _REPETITION).to(tl.float32, bitcast=True)
    scores = tl.where(scores > 0.0, tl.div_rn(scores, repetition), scores * repetition)
    outputs = count & (_IN_PROMPT - 1)
    frequency = tl.load(fields + _FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(fields + _PRESENCE).to(tl.float32, bitcast=True)
    scores = tl.where(outputs > 0, scores - (frequency * outputs.to(tl.float32) + presence), scores)
    tl.store(logits + place * vocab + ids, scores, mask=seen)


@triton.jit(do_not_specialize=["entries", "prefixes", "rows", "lengths"])
def _forbid_kernel(logits, entries, prefixes, rows, lengths, tokens, vocab, tokens_stride, BLOCK: tl.constexpr):
    entry = entries + tl.program_id(0) * 4
    place = tl.load(entry).to(tl.int64)
    token = tl.load(entry + 1)
    first = tl.load(entry + 2)
    count = tl.load(entry + 3)
    row = tl.load(rows + place).to(tl.int64)
    end = tl.load(lengths + place)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < count
    wanted = tl.load(prefixes + first + offsets, mask=inside, other=0)
    found = tl.load(tokens + row * tokens_stride + (end - count) + offsets, mask=inside, other=0)
    differs = tl.max((wanted != found).to(tl.int32), axis=0)
    forbidden = (differs == 0) & (token >= 0) & (token < vocab)
    tl.store(logits + place * vocab + token, float("-inf"), mask=forbidden)
