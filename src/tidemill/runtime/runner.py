"""Executes steps: gathers inputs from rows, runs the model, samples, and writes the tokens back to the rows.

`launch(step)` returns a handle; the next launch is legal before `handle.result()` is read. Knows rows and tensors;
knows nothing of queues, text or processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidemill.core.step import Slice, SliceProblem, SliceResult, Step, StepResult, TokenLogprob
from tidemill.layers.attention import PagedAttention, Ragged
from tidemill.runtime.kv_cache import KVCache
from tidemill.runtime.problems import NO_TOKEN_LEFT, NOT_FINITE
from tidemill.runtime.rows import Gathered, Rows
from tidemill.runtime.sampler import Draw, sample
from tidemill.runtime.scores import SCORED_AT_ONCE, Scores


@dataclass(frozen=True)
class Handle:
    _result: StepResult

    def result(self) -> StepResult:
        return self._result


class Runner:
    steps_in_flight = 1
    """A CPU computes while it launches: there is nothing to hide behind."""

    def __init__(self, model: Any, cache: KVCache, rows: Rows, attention: PagedAttention, device: torch.device) -> None:
        self.model, self.cache, self.rows, self.attention, self.device = model, cache, rows, attention, device

    @torch.inference_mode()
    def launch(self, step: Step) -> Handle:
        for new in step.new_rows:
            self.rows.enter(new)
        for piece in step.slices:
            self.rows.extend_table(piece)
        # Attention wants single tokens first, shortest context first.
        order = sorted(range(len(step.slices)), key=lambda i: (step.slices[i].count > 1, step.slices[i].start))
        slices = [step.slices[index] for index in order]
        inputs = self.rows.gather(slices)
        hidden = self._forward(slices, inputs)
        poisoned = self._wipe_poisoned(slices, inputs, hidden)
        results = [
            SliceResult(problem=NOT_FINITE) if index in poisoned else result
            for index, result in enumerate(self._finish(slices, hidden))
        ]
        in_step_order: list[SliceResult] = [SliceResult()] * len(order)
        for index, result in zip(order, results, strict=True):
            in_step_order[index] = result
        return Handle(StepResult(in_step_order))

    def _forward(self, slices: list[Slice], inputs: Gathered) -> torch.Tensor:
        rows = [piece.row for piece in slices]
        self.attention.plan(
            Ragged(
                query_lens=[piece.count for piece in slices],
                context_lens=[piece.start + piece.count for piece in slices],
                tables=[table[rows] for table in self.rows.tables],
                slots=[self._to_device(slots) for slots in inputs.slots],
            )
        )
        return self.model.forward(
            self._to_device(inputs.tokens),
            self._to_device(inputs.positions),
            self._to_device(inputs.lengths),
            self.attention,
        )

    def _wipe_poisoned(self, slices: list[Slice], inputs: Gathered, hidden: torch.Tensor) -> set[int]:
        """Slices with a token whose state is not finite; what they wrote must not be read by anybody."""
        finite = torch.isfinite(hidden.sum(dim=-1))
        if bool(finite.all()):
            return set()
        found, first = set(), 0
        for index, piece in enumerate(slices):
            part = slice(first, first + piece.count)
            if not bool(finite[part].all()):
                for slots in inputs.slots:
                    self.cache.wipe(self._to_device(slots[part]))
                found.add(index)
            first += piece.count
        return found

    def _finish(self, slices: list[Slice], hidden: torch.Tensor) -> list[SliceResult]:
        ends = np.cumsum([piece.count for piece in slices])
        sampling = [index for index, piece in enumerate(slices) if piece.samples]
        prompt_logprobs = {
            index: self._prompt_logprobs(piece, hidden[int(ends[index]) - piece.count : int(ends[index])])
            for index, piece in enumerate(slices)
            if self.rows.state(piece.row).params.prompt_logprobs is not None
        }
        results = [SliceResult(prompt_logprobs=prompt_logprobs.get(index)) for index in range(len(slices))]
        if sampling:
            last = hidden.index_select(0, torch.from_numpy(ends[sampling] - 1).to(self.device))
            sampled = self._sample([slices[index] for index in sampling], self.model.logits(last))
            for index, (token, logprob, problem) in zip(sampling, sampled, strict=True):
                results[index] = SliceResult(token, logprob, prompt_logprobs.get(index), problem)
        return results

    def _sample(
        self, slices: list[Slice], logits: torch.Tensor
    ) -> list[tuple[int | None, TokenLogprob | None, SliceProblem | None]]:
        states = [self.rows.state(piece.row) for piece in slices]
        # NaN and +inf both survive a maximum, which is cheaper than looking at every score.
        finite = torch.isfinite(logits.amax(dim=-1)).tolist()
        wants = [index for index, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[wants] if wants else None
        draws = [
            Draw(
                state.params,
                self.rows.tokens[piece.row, : state.num_tokens],
                state.num_prompt,
                state.seed,
                state.stop_ids,
                state.banned_ids,
                state.bad_sequences,
            )
            for piece, state in zip(slices, states, strict=True)
        ]
        tokens = sample(logits, draws)
        logprobs: dict[int, TokenLogprob] = {}
        if raw is not None:
            counts = [states[index].params.logprobs or 0 for index in wants]
            logprobs = dict(zip(wants, Scores(raw, tokens[wants].clamp(min=0), counts).read(), strict=True))
        out: list[tuple[int | None, TokenLogprob | None, SliceProblem | None]] = []
        for index, (piece, token) in enumerate(zip(slices, tokens.tolist(), strict=True)):
            if not finite[index] or token < 0:
                out.append((None, None, NO_TOKEN_LEFT if finite[index] else NOT_FINITE))
                continue
            self.rows.append(piece.row, token)
            out.append((token, logprobs.get(index), None))
        return out

    def _prompt_logprobs(self, piece: Slice, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Scores of the prompt tokens that follow this slice's positions."""
        state = self.rows.state(piece.row)
        end = min(piece.start + piece.count + 1, state.num_prompt)
        targets = torch.from_numpy(self.rows.tokens[piece.row, piece.start + 1 : end]).to(self.device)
        count = state.params.prompt_logprobs or 0
        found: list[TokenLogprob] = []
        for first in range(0, len(targets), SCORED_AT_ONCE):
            some = targets[first : first + SCORED_AT_ONCE]
            logits = self.model.logits(hidden[first : first + len(some)])
            found.extend(Scores(logits, some, [count] * len(some)).read())
        return found

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
