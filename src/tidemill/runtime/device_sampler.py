"""Sampling on the device, launched and not waited for; draws the tokens that `runtime/sampler.py` defines.

What a row's request asks for goes to a table on the device when the request enters. The host decides which kernels a
step needs; the kernels read the table, and the tokens so far, which the host may not know yet. Scores at a top_k or
top_p threshold that are equal all stay, where `sampler.py` keeps the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag, auto

import numpy as np
import torch

from tidemill.core.step import SliceProblem, TokenLogprob
from tidemill.ops.triton import sampling
from tidemill.ops.triton.sampling_search import ASIDE, search
from tidemill.runtime.device_edits import DeviceEdits, Pick
from tidemill.runtime.problems import NO_TOKEN_LEFT, NOT_FINITE
from tidemill.runtime.rows import RowState
from tidemill.runtime.sampler import MASKED, NOISE_SPAN, mix_seed
from tidemill.runtime.scores import SCORED_AT_ONCE, Scores, to_host
from tidemill.runtime.uploads import Uploads

__all__ = ["DeviceSampler", "Pick", "Sampled"]

PROBLEMS = {sampling.NO_TOKEN_LEFT: NO_TOKEN_LEFT, sampling.NOT_FINITE: NOT_FINITE}


class Needs(IntFlag):
    """What a request needs beyond the best token. A step does what any of its rows needs."""

    NOISE = auto()
    CUT = auto()
    EDITS = auto()
    LOGPROBS = auto()


@dataclass(frozen=True)
class Sampled:
    """Tokens on their way to the host. `read` is legal once the launch has run on the device."""

    _codes: torch.Tensor
    _scores: list[Scores]
    _scored: list[int]
    """Which picks the scores are of."""

    def read(self) -> list[tuple[int | None, TokenLogprob | None, SliceProblem | None]]:
        """Per pick: its token, its log-probability if it wants one, or why there is no token."""
        scores = [score for part in self._scores for score in part.read()]
        logprobs = dict(zip(self._scored, scores, strict=True))
        return [
            (code, logprobs.get(index), None) if code >= 0 else (None, None, PROBLEMS[code])
            for index, code in enumerate(self._codes.tolist())
        ]


class DeviceSampler:
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.table = torch.zeros(num_rows + 1, sampling.FIELDS, dtype=torch.int32, device=device)
        self._needs = [0] * num_rows
        self._entered: dict[int, np.ndarray] = {}
        self._entering, self._scoring = Uploads(device), Uploads(device)
        self._edits = DeviceEdits(num_rows, vocab_size, device)
        self._scanned = sampling.Chunks.empty(num_rows, vocab_size, device)
        self._drawn = sampling.Chunks.empty(num_rows, vocab_size, device)
        self._states = torch.empty_like(self._scanned.tokens)
        self._thresholds = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._aside = torch.empty(num_rows, ASIDE, dtype=torch.float32, device=device)

    def enter(self, row: int, state: RowState) -> None:
        """A request enters a row; the device learns its parameters with the next launch."""
        self._entered[row] = np.concatenate((np.array([row], np.int32), _fields(state, self.vocab_size)))
        self._needs[row] = int(_needs(state, self._edits.enter(row, state)))

    @torch.inference_mode()
    def launch(
        self,
        logits: torch.Tensor,
        picks: Sequence[Pick],
        rows: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        best: torch.Tensor | None = None,
    ) -> Sampled:
        """One token per row of contiguous float32 logits [picks, vocabulary], which may be changed; each is also
        written to tokens[row, length]. `rows` and `lengths` are int32 on the device and say what the picks say. `best`:
        what the method of that name has found for the same rows."""
        self._send_entered()
        needs = 0
        for pick in picks:
            needs |= self._needs[pick.row]
        if best is not None and not needs:
            return Sampled(to_host(best), [], [])
        scored: list[int] = []
        if needs & Needs.LOGPROBS:
            scored = [index for index, pick in enumerate(picks) if pick.state.params.logprobs is not None]
        where = self._scoring.send([np.array(scored, np.int32)])[0] if scored else None
        raw = None if where is None else logits.index_select(0, where)
        found = self._choose(logits, picks, rows, lengths, tokens, needs)
        chosen = sampling.finish(found, self._states, rows, lengths, tokens, self.vocab_size)
        scores = []
        if raw is not None and where is not None:
            of_scored = chosen.index_select(0, where).clamp(min=0).long()
            wanted = [picks[index].state.params.logprobs or 0 for index in scored]
            for first in range(0, len(scored), SCORED_AT_ONCE):
                part = slice(first, first + SCORED_AT_ONCE)
                scores.append(Scores(raw[part], of_scored[part], wanted[part]))
        return Sampled(to_host(chosen), scores, scored)

    def best(
        self, logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """The best token of every row, whatever its request asks for, also written to tokens[row, length]."""
        sampling.scan(logits, rows, lengths, self.table, self._scanned, self._states)
        return sampling.finish(self._scanned, self._states, rows, lengths, tokens, self.vocab_size)

    def _choose(
        self,
        logits: torch.Tensor,
        picks: Sequence[Pick],
        rows: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        needs: int,
    ) -> sampling.Chunks:
        """The best token of every chunk of the vocabulary, after all that the picks ask for."""
        states: torch.Tensor | None = self._states
        if needs & Needs.EDITS:
            # Whether the model's numbers are finite is asked before anything is masked.
            sampling.scan(logits, rows, lengths, self.table, self._scanned, states)
            self._edits.apply(logits, picks, rows, lengths, tokens, self.table)
            states = None
        cut = bool(needs & Needs.CUT)
        noise = bool(needs & Needs.NOISE) and not cut
        sampling.scan(logits, rows, lengths, self.table, self._scanned, states, scale=cut, noise=noise)
        if not cut:
            return self._scanned
        search(logits, rows, *self.search_buffers())
        sampling.draw(logits, rows, lengths, self.table, self._scanned, self._thresholds, NOISE_SPAN, self._drawn)
        return self._drawn

    def search_buffers(self) -> tuple[torch.Tensor, sampling.Chunks, torch.Tensor, torch.Tensor]:
        """What the search for cuts reads besides scores, and where it works and writes."""
        return self.table, self._scanned, self._aside, self._thresholds

    def _send_entered(self) -> None:
        if self._entered:
            (sent,) = self._entering.send([np.concatenate(list(self._entered.values()))])
            sent = sent.view(len(self._entered), -1)
            self.table.index_copy_(0, sent[:, 0].long(), sent[:, 1:])
            self._entered = {}


def _needs(state: RowState, edited: bool) -> Needs:
    params = state.params
    needs = Needs.EDITS if edited else Needs(0)
    if params.logprobs is not None:
        needs |= Needs.LOGPROBS
    if not params.greedy:
        needs |= Needs.NOISE
        if params.min_p > 0.0 or params.top_k > 0 or params.top_p < 1.0:
            needs |= Needs.CUT
    return needs


def _fields(state: RowState, vocab_size: int) -> np.ndarray:
    """The request's row of the device's table."""
    params = state.params
    fields = np.zeros(sampling.FIELDS, np.int32)
    numbers = fields.view(np.float32)
    numbers[sampling.TEMPERATURE] = 0.0 if params.greedy else params.temperature
    fields[sampling.TOP_K] = params.top_k if 0 < params.top_k < vocab_size else 0
    numbers[sampling.TOP_P] = params.top_p
    numbers[sampling.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0.0 else MASKED
    fields.view(np.uint32)[sampling.SEED] = mix_seed(state.seed)
    fields[sampling.NUM_PROMPT] = state.num_prompt
    numbers[sampling.REPETITION] = params.repetition_penalty
    numbers[sampling.FREQUENCY] = params.frequency_penalty
    numbers[sampling.PRESENCE] = params.presence_penalty
    return fields
