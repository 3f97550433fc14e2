"""Executes steps on a GPU: everything is launched, nothing is waited for until somebody reads a result.

Inputs are gathered on the device from rows, and sampled tokens go back to the rows there, so a step can be launched
before the previous one has run. A step in which every sequence brings one token replays a captured graph; others run
kernel by kernel. Runs on a CPU too, where Triton's interpreter stands in for the kernels: that is for tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tidemill.core.step import Slice, SliceProblem, SliceResult, Step, StepResult, TokenLogprob
from tidemill.layers.device_batch import DeviceBatch
from tidemill.layers.triton_attention import TritonAttention
from tidemill.ops import kernels
from tidemill.runtime.device_rows import DeviceRows
from tidemill.runtime.device_sampler import DeviceSampler, Pick, Sampled
from tidemill.runtime.graphs import DecodeGraphs
from tidemill.runtime.kv_cache import KVCache
from tidemill.runtime.problems import NOT_FINITE
from tidemill.runtime.scores import SCORED_AT_ONCE, Scores, to_host
from tidemill.runtime.uploads import Uploads

FEW_SEQUENCES = 16
"""Up to here the host's time counts, and a graph holds the way to the best tokens as well."""

Outcome = tuple[int | None, TokenLogprob | None, SliceProblem | None]


@dataclass(frozen=True)
class Handle:
    """A launched step. Reading its result waits for the device, once."""

    slices: list[Slice]
    order: list[int]
    sampled: Sampled | None
    sampling: list[int]
    """Which of the slices, in the order they were computed in, have a sampled token."""
    finite: torch.Tensor | None
    """On the host, per token; None where the sampler sees every token's numbers."""
    prompt_scores: dict[int, list[Scores]]
    done: torch.cuda.Event | None

    def result(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        outcomes: list[Outcome] = [] if self.sampled is None else self.sampled.read()
        of_slice = dict(zip(self.sampling, outcomes, strict=True))
        poisoned = self._poisoned()
        results: list[SliceResult] = [SliceResult()] * len(self.order)
        for index, place in enumerate(self.order):
            token, logprob, problem = of_slice.get(index, (None, None, None))
            if index in poisoned:
                token, logprob, problem = None, None, NOT_FINITE
            scores = None
            if problem is None and index in self.prompt_scores:
                scores = [score for part in self.prompt_scores[index] for score in part.read()]
            results[place] = SliceResult(token, logprob, scores, problem)
        return StepResult(results)

    def _poisoned(self) -> set[int]:
        """Slices with a token whose state is not finite. What they wrote to the cache is read by nobody: their blocks
        are forgotten, and kernels never touch what they do not see."""
        if self.finite is None or bool(self.finite.all()):
            return set()
        starts = np.cumsum([0] + [piece.count for piece in self.slices])
        return {i for i in range(len(self.slices)) if not bool(self.finite[starts[i] : starts[i + 1]].all())}


class DeviceRunner:
    steps_in_flight = 2

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        rows: DeviceRows,
        attention: TritonAttention,
        device: torch.device,
        vocab_size: int,
    ) -> None:
        self.model, self.cache, self.rows, self.attention, self.device = model, cache, rows, attention, device
        self.sampler = DeviceSampler(rows.padding_row, vocab_size, device)
        self.graphs: DecodeGraphs | None = None
        self._uploads = Uploads(device)
        count = rows.padding_row
        self._decode_inputs = torch.zeros(2 * count, dtype=torch.int32, device=device)
        """Rows, then context lengths, of a decode step: where graphs find them."""
        self._query_starts = torch.arange(count + 1, dtype=torch.int32, device=device)

    def capture(self, sizes: Sequence[int], on_progress: Callable[[str, int, int], None] | None = None) -> None:
        with torch.inference_mode(), self._on_device():
            self.graphs = DecodeGraphs(sizes, self._compute_decode, self._pad_inputs)
            self.graphs.capture_first(on_progress)

    @torch.inference_mode()
    def launch(self, step: Step) -> Handle:
        with self._on_device():
            return self._launch(step)

    def _launch(self, step: Step) -> Handle:
        self.rows.drop_writes()
        for new in step.new_rows:
            self.sampler.enter(new.row, self.rows.enter(new))
        for piece in step.slices:
            self.rows.extend_table(piece)
        order = sorted(range(len(step.slices)), key=lambda index: step.slices[index].count > 1)
        slices = [step.slices[index] for index in order]
        if all(self._decodes(piece) for piece in slices):
            return self._launch_decode(slices, order)
        return self._launch_mixed(slices, order)

    def _decodes(self, piece: Slice) -> bool:
        return piece.count == 1 and piece.samples and self.rows.state(piece.row).params.prompt_logprobs is None

    def _launch_decode(self, slices: list[Slice], order: list[int]) -> Handle:
        count = len(slices)
        size = (None if self.graphs is None else self.graphs.size_for(count)) or count
        rows = np.full(size, self.rows.padding_row, dtype=np.int32)
        ends = np.zeros(size, dtype=np.int32)
        rows[:count] = [piece.row for piece in slices]
        ends[:count] = [piece.start + 1 for piece in slices]
        self._send_writes()
        device_rows, device_ends = self._uploads.send([rows, ends], into=self._decode_inputs)
        if self.graphs is not None and size in self.graphs.sizes:
            outputs = self.graphs.replay(size)
        else:
            outputs = self._compute_decode(size)
        logits = self.model.logits(outputs[0][:count]) if len(outputs) == 1 else outputs[1][:count]
        best = outputs[2][:count] if len(outputs) == 3 else None
        sampled = self._sample(slices, logits, device_rows[:count], device_ends[:count], best)
        return Handle(slices, order, sampled, list(range(count)), None, {}, self._event())

    def _compute_decode(self, size: int) -> tuple[torch.Tensor, ...]:
        """Of a step of `size` sequences with one token each, from `_decode_inputs`: hidden states, and for few of them
        their logits and best tokens too. Every graph keeps its outputs, and logits of all sizes would be gigabytes."""
        rows, ends = self._decode_inputs[:size], self._decode_inputs[size : 2 * size]
        starts = self._query_starts[: size + 1]
        hidden = self._forward(rows, ends, rows, starts, ends, num_decode=size, max_query_len=1)
        if size > FEW_SEQUENCES:
            return (hidden,)
        logits = self.model.logits(hidden)
        return hidden, logits, self.sampler.best(logits, rows, ends, self.rows.tokens)

    def _pad_inputs(self, size: int) -> None:
        """What is run to be captured touches nobody's cache and nobody's tokens."""
        self._decode_inputs[:size] = self.rows.padding_row
        self._decode_inputs[size : 2 * size] = 0

    def _launch_mixed(self, slices: list[Slice], order: list[int]) -> Handle:
        counts = np.array([piece.count for piece in slices])
        rows = np.array([piece.row for piece in slices], dtype=np.int32)
        ends = np.array([piece.start + piece.count for piece in slices], dtype=np.int32)
        query_starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        num_tokens = int(query_starts[-1])
        token_rows = np.repeat(rows, counts)
        token_ends = (np.arange(num_tokens) + np.repeat(ends - query_starts[1:], counts) + 1).astype(np.int32)
        sampling = [index for index, piece in enumerate(slices) if piece.samples]
        last = (query_starts[1:] - 1)[sampling].astype(np.int32)
        self._send_writes()
        arrays = (token_rows, token_ends, rows, query_starts, ends, last, rows[sampling], ends[sampling])
        *batch, device_last, sampling_rows, sampling_ends = self._uploads.send(arrays)
        hidden = self._forward(*batch, num_decode=int((counts == 1).sum()), max_query_len=int(counts.max()))
        finite = to_host(torch.isfinite(hidden.sum(dim=-1, dtype=torch.float32)))
        scores = {
            index: self._prompt_scores(piece, hidden[query_starts[index] : query_starts[index + 1]])
            for index, piece in enumerate(slices)
            if self.rows.state(piece.row).params.prompt_logprobs is not None
        }
        sampled = None
        if sampling:
            logits = self.model.logits(hidden.index_select(0, device_last))
            sampled = self._sample([slices[index] for index in sampling], logits, sampling_rows, sampling_ends)
        return Handle(slices, order, sampled, sampling, finite, scores, self._event())

    def _forward(
        self,
        token_rows: torch.Tensor,
        token_ends: torch.Tensor,
        rows: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        *,
        num_decode: int,
        max_query_len: int,
    ) -> torch.Tensor:
        state = self.rows
        inputs, slots = kernels.gather_inputs(
            state.tokens, state.tables, state.least, token_rows, token_ends, state.block_size
        )
        self.attention.plan(
            DeviceBatch(
                rows=rows,
                query_starts=query_starts,
                context_lens=context_lens,
                tables=list(state.tables),
                slots=list(slots),
                num_decode=num_decode,
                max_query_len=max_query_len,
                num_tokens=len(token_rows),
            )
        )
        return self.model.forward(inputs[0], inputs[1], inputs[2], self.attention)

    def _sample(
        self,
        slices: list[Slice],
        logits: torch.Tensor,
        rows: torch.Tensor,
        lengths: torch.Tensor,
        best: torch.Tensor | None = None,
    ) -> Sampled:
        picks = []
        for piece in slices:
            state = self.rows.state(piece.row)
            picks.append(Pick(piece.row, state, piece.start + piece.count))
            state.num_tokens = piece.start + piece.count + 1
        return self.sampler.launch(logits, picks, rows, lengths, self.rows.tokens, best)

    def _prompt_scores(self, piece: Slice, hidden: torch.Tensor) -> list[Scores]:
        """Scores of the prompt tokens that follow this slice's positions."""
        state = self.rows.state(piece.row)
        end = min(piece.start + piece.count + 1, state.num_prompt)
        targets = self.rows.tokens[piece.row, piece.start + 1 : end].long()
        wanted = state.params.prompt_logprobs or 0
        return [
            Scores(self.model.logits(hidden[first : first + len(some)]), some, [wanted] * len(some))
            for first in range(0, len(targets), SCORED_AT_ONCE)
            if len(some := targets[first : first + SCORED_AT_ONCE])
        ]

    def _send_writes(self) -> None:
        places, values = self.rows.take_writes()
        if len(places):
            sent_places, sent_values = self._uploads.send([places, values])
            self.rows.memory[sent_places.long()] = sent_values

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels go to a thread's current card, which another engine, or the caller, may have changed."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _event(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event
