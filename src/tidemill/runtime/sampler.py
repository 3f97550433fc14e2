"""From logits to tokens: constraints, penalties, temperature, truncation, and a draw that depends on nothing else.

The draw is Gumbel-max: every candidate gets noise that is a hash of (seed, position, token id), and the best sum wins.
A seeded request therefore draws the same token whatever shares its batch, with no generator state to keep or restore
after preemption. Log-probabilities are those of the model, before any of this, as OpenAI and vLLM report them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.core.params import SamplingParams

MASKED = float("-inf")
TOP_CANDIDATES = 256
_UNIFORM_BITS = 24
NOISE_SPAN = -math.log(-math.log1p(-(2.0 ** -(_UNIFORM_BITS + 1)))) + math.log(math.log(2.0 ** (_UNIFORM_BITS + 1)))
"""Greatest possible difference of two noises: a score further behind the best one cannot win."""


@dataclass(frozen=True)
class Draw:
    """What the sampler needs of one request: its parameters and its tokens so far (prompt first)."""

    params: SamplingParams
    tokens: np.ndarray
    num_prompt: int
    seed: int
    stop_ids: Sequence[int]
    banned_ids: Sequence[int] = ()
    bad_sequences: Sequence[Sequence[int]] = ()

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """One token per row of float32 logits [rows, vocabulary]; -1 where the constraints leave none. The logits may be
    changed in place."""
    impossible = [row for row, draw in enumerate(draws) if not _constrain(logits[row], draw)]
    for row, draw in enumerate(draws):
        _penalise(logits[row], draw)
    tokens = _choose(logits, draws)
    if impossible:
        tokens[impossible] = -1
    return tokens


def _choose(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    random = [row for row, draw in enumerate(draws) if not draw.params.greedy]
    if not random:
        return logits.argmax(dim=-1)
    if len(random) == len(draws):
        return _sample_random(logits, draws)
    tokens = logits.argmax(dim=-1)
    rows = torch.tensor(random, device=logits.device)
    tokens[rows] = _sample_random(logits[rows], [draws[row] for row in random])
    return tokens


def _constrain(logits: torch.Tensor, draw: Draw) -> bool:
    """Mask what the request forbids; whether anything is left."""
    params = draw.params
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=logits.device)
        kept = logits[allowed]
        logits.fill_(MASKED)
        logits[allowed] = kept
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    forbidden = list(draw.banned_ids)
    for *prefix, last in draw.bad_sequences:
        if draw.num_output >= len(prefix) and draw.tokens[len(draw.tokens) - len(prefix) :].tolist() == prefix:
            forbidden.append(last)
    if draw.num_output < params.min_tokens:
        forbidden.extend(draw.stop_ids)
    if forbidden:
        logits[torch.tensor(forbidden, device=logits.device)] = MASKED
    return not (forbidden and params.allowed_token_ids is not None) or bool(logits.amax() > MASKED)


def _penalise(logits: torch.Tensor, draw: Draw) -> None:
    params = draw.params
    if params.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(draw.tokens)).to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and draw.num_output:
        ids, counts = np.unique(draw.tokens[draw.num_prompt :], return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(penalty).float().to(logits.device)


def _sample_random(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    device = logits.device
    temperature = torch.tensor([draw.params.temperature for draw in draws], device=device)
    scores = logits / temperature[:, None]
    best = scores.max(dim=-1, keepdim=True).values
    min_p = torch.tensor([draw.params.min_p for draw in draws], device=device)
    if min_p.any():
        # p >= min_p * p_best, in logs.
        scores.masked_fill_(scores < best + min_p.log()[:, None], MASKED)
    _keep_top(scores, draws)
    keys = torch.tensor([_key(draw.seed, len(draw.tokens)) for draw in draws], device=device)
    rows, ids = (scores >= best - NOISE_SPAN).nonzero(as_tuple=True)
    noisy = torch.full_like(scores, MASKED)
    noisy[rows, ids] = scores[rows, ids] + _gumbel(keys[rows], ids)
    return noisy.argmax(dim=-1)


def _keep_top(scores: torch.Tensor, draws: Sequence[Draw]) -> None:
    """Mask what top_k and top_p exclude. top_p counts the mass that top_k leaves."""
    vocab = scores.shape[-1]
    for row, draw in enumerate(draws):
        top_k = draw.params.top_k if 0 < draw.params.top_k < vocab else vocab
        top_p = draw.params.top_p
        if top_k == vocab and top_p == 1.0:
            continue
        line = scores[row]
        # Few candidates usually hold top_p of the mass; a full sort is for the rare flat distribution.
        count = min(top_k, vocab) if top_k < vocab else min(TOP_CANDIDATES, vocab)
        values, ids = line.topk(count)
        if top_p < 1.0:
            normaliser = values.logsumexp(0) if top_k < vocab else line.logsumexp(0)
            before = (values - normaliser).exp().cumsum(0)
            if top_k == vocab and before[-1] < top_p and count < vocab:
                values, ids = line.sort(descending=True)
                before = (values - normaliser).exp().cumsum(0)
            keep = before - (values - normaliser).exp() < top_p
            keep[0] = True
            values, ids = values[keep], ids[keep]
        line.fill_(MASKED)
        line[ids] = values


def _key(seed: int, position: int) -> int:
    """32 bits that name this draw."""
    return _mix_int(mix_seed(seed) ^ position)


def mix_seed(seed: int) -> int:
    """What the draws of a seed have in common: 32 bits of it."""
    seed &= 2**64 - 1
    return _mix_int(_mix_int(seed & 0xFFFFFFFF) ^ (seed >> 32))


def _mix_int(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def _gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    bits = _mix(_mix(keys + ids * 0x9E3779B1 & 0xFFFFFFFF) ^ keys)
    uniform = ((bits >> (32 - _UNIFORM_BITS)).double() + 0.5) * 2.0**-_UNIFORM_BITS
    return -torch.log(-torch.log(uniform)).float()
