"""Decides what runs next: `schedule() -> Step`, `update(StepResult)`.

One token budget per step, running requests first, then waiting ones. There are no phases: a request simply has tokens
that are not computed yet, which makes chunked prefill, prefix hits, decode and resuming after preemption one rule.
No I/O, no tensors, no clock: the same calls give the same steps.

Several steps may be in flight. A request whose newest token is still in flight can be scheduled again (the runner reads
that token from its own row); results come back in the order of the steps.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tidemill.core.block_groups import pages_for
from tidemill.core.block_pool import BlockPool
from tidemill.core.block_tables import BlockTables
from tidemill.core.request import Request
from tidemill.core.step import NewRow, Slice, SliceResult, Step, StepResult
from tidemill.errors import OutOfMemory


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    policy: str = "fcfs"
    windows: tuple[int | None, ...] = (None,)
    """One entry per group of layers: how many of the last positions they see, None for all."""

    @property
    def pages_for_one(self) -> int:
        """What the longest request holds when it runs alone: with fewer, it could never end."""
        return pages_for(self.max_model_len, self.block_size, self.windows, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class Progress:
    """What one request gained in a step."""

    request: Request
    start: int
    """First position the step computed for it."""
    result: SliceResult


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched, with the request of each slice and the life it was launched in."""

    step: Step
    members: list[Request]
    lives: list[int]

    def entries(self) -> Iterator[tuple[Slice, Request, bool]]:
        """Each slice, its request, and whether its result counts by the time it is looked at."""
        for piece, request, life in zip(self.step.slices, self.members, self.lives, strict=True):
            yield piece, request, request.finish is None and request.life == life


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        if config.num_blocks < config.pages_for_one:
            raise OutOfMemory(
                f"a request of max_model_len {config.max_model_len} does not fit the KV cache",
                param="max_model_len",
                cause=f"it needs up to {config.pages_for_one} blocks, and there are {config.num_blocks}",
                fix=f"a smaller --max-model-len, or --num-gpu-blocks-override {config.pages_for_one}",
            )
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.tables = BlockTables(self.pool, config.block_size, config.windows, config.max_num_batched_tokens)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._in_flight: deque[_Flight] = deque()
        self._arrivals = self._steps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, request: Request) -> None:
        request.arrival = self._arrivals
        self._arrivals += 1
        if self.config.policy == "fcfs":
            request.priority = 0
        self.requests[request.id] = request
        self._enqueue(request)

    def abort(self, ids: Iterable[str], finish: str = "abort") -> list[Request]:
        """End requests now and free all they hold; unknown and finished ids are ignored."""
        aborted = []
        for request in [self.requests[i] for i in ids if i in self.requests]:
            request.finish = finish
            self._retire(request)
            aborted.append(request)
        return aborted

    def schedule(self) -> Step | None:
        """The next step, or None when nothing can be computed now. The step counts as launched."""
        budget = self.config.max_num_batched_tokens
        new_rows: list[NewRow] = []
        slices: list[Slice] = []
        members: list[Request] = []
        preempted = False

        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if request.must_turn:
                # Its tokens must be known to be computed anew; then it waits for a row like everybody else.
                if request.num_pending:
                    index += 1
                else:
                    self._give_up_row(request)
                continue
            count = min(request.num_tokens - request.num_computed, budget)
            if count > 0 and not self._at_limit(request):
                blocks, lost = self._grow_or_preempt(request, count)
                preempted |= lost
                if blocks is None:
                    break
                slices.append(self._advance(request, count, blocks))
                members.append(request)
                budget -= count
            index += 1

        while not preempted and budget > 0 and self._free_rows:
            head = self._waiting[0][1] if self._waiting else None
            if head is None or head.num_pending:
                break
            if head.must_turn:
                head.make_turn()
            count = self._admit(head, budget)
            if count == 0:
                break
            new_rows.append(self._new_row(head))
            slices.append(self._advance(head, count, [list(table) for table in head.blocks]))
            members.append(head)
            budget -= count

        if not slices:
            return None
        step = Step(self._steps, new_rows, slices)
        self._steps += 1
        self._in_flight.append(_Flight(step, members, [request.life for request in members]))
        return step

    def update(self, result: StepResult) -> list[Progress]:
        """Take the result of the oldest step in flight; finished requests give back all they hold."""
        flight = self._in_flight.popleft()
        self._restart_readers_of_problems(flight, result)
        progress = []
        for (piece, request, valid), outcome in zip(flight.entries(), result.slices, strict=True):
            if piece.samples:
                request.num_pending -= 1
            if not valid:
                continue
            if outcome.problem is not None:
                request.finish = "error"
                self.tables.forget(request)
            elif outcome.token is not None:
                request.append(outcome.token, self.config.max_model_len)
            if request.finish is not None:
                self._retire(request)
            progress.append(Progress(request, piece.start, outcome))
        return progress

    def fail_step(self) -> list[Request]:
        """The oldest step in flight did not run. Its requests end; cached blocks are no longer trusted."""
        flight = self._in_flight.popleft()
        self.tables.forget_all(self.running)
        return self.abort([request.id for request in flight.members], finish="error")

    def _restart_readers_of_problems(self, flight: _Flight, result: StepResult) -> None:
        """A request may share blocks that another one of the same step fills. If that other one fails, what was
        computed from its blocks is worthless: who shares them is computed anew, and what is in flight for him is void.
        Who fills blocks stands before those who read them, so a reader is restarted before his own result is seen."""
        for (piece, failed, valid), outcome in zip(flight.entries(), result.slices, strict=True):
            if not valid or outcome.problem is None:
                continue
            first = piece.start // self.config.block_size
            spoiled = failed.block_hashes[first : first + 1]
            for request in list(self.requests.values()) if spoiled else ():
                if request is not failed and request.block_hashes[first : first + 1] == spoiled:
                    self.tables.forget(request)
                    request.life += 1
                    if request.row >= 0:
                        self._give_up_row(request)

    def _at_limit(self, request: Request) -> bool:
        """All the tokens it may have are in flight already: one more step would compute a token nobody asked for."""
        return request.num_pending > 0 and (
            request.num_output + request.num_pending >= request.max_tokens
            or request.num_tokens >= self.config.max_model_len
        )

    def _advance(self, request: Request, count: int, new_blocks: list[list[int]]) -> Slice:
        start = request.num_computed
        request.num_computed += count
        samples = request.num_computed == request.num_tokens
        if samples:
            request.num_pending += 1
        if self.config.enable_prefix_caching:
            self.tables.commit(request)
        return Slice(request.row, start, count, new_blocks, samples)

    def _grow_or_preempt(self, request: Request, count: int) -> tuple[list[list[int]] | None, bool]:
        """Blocks for `count` more tokens, taking them from the last in order while there are none."""
        preempted = False
        while (new_blocks := self.tables.grow(request, count)) is None:
            victim = self.running[-1]
            self._preempt(victim)
            preempted = True
            if victim is request:
                return None, preempted
        return new_blocks, preempted

    def _preempt(self, request: Request) -> None:
        self._give_up_row(request)
        self.num_preemptions += 1

    def _give_up_row(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed = request.num_committed = 0
        request.num_rows_left += 1
        self._enqueue(request)

    def _admit(self, request: Request, budget: int) -> int:
        """Move the head of the queue into a row if all its known tokens have room; returns how many to compute now."""
        total = request.num_tokens
        cached = self._find_cached(request)
        num_cached = len(cached[0]) * self.config.block_size
        count = total - num_cached
        if count > budget:
            if not self.config.enable_chunked_prefill:
                return 0
            count = budget
        # Room for the whole sequence, not just this chunk, or half-prefilled requests would preempt each other; while
        # others run, a little more, so that they can grow.
        spare = max(1, self.config.num_blocks // 100) if self.running else 0
        if self.tables.pages_wanted(total, cached) + spare > self.pool.num_free:
            return 0
        self.tables.enter(request, cached, count)
        heapq.heappop(self._waiting)
        if self.config.enable_prefix_caching and request.num_rows_left == 0:
            self.prefix_queries += len(request.prompt_ids)
            self.prefix_hits += num_cached
            request.num_cached = num_cached
        request.row = self._free_rows.pop()
        insort(self.running, request, key=lambda r: r.order)
        return count

    def _find_cached(self, request: Request) -> list[list[int]]:
        # Prompt log-probabilities need every prompt position computed, so such a request reads nothing from the cache.
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return [[] for _ in self.config.windows]
        return self.tables.find_cached(request)

    def _new_row(self, request: Request) -> NewRow:
        return NewRow(
            row=request.row,
            tokens=list(request.tokens),
            num_prompt=len(request.prompt_ids),
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            bad_words_ids=request.bad_words_ids,
            counts_as=request.counts_as,
        )

    def _enqueue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (request.order, request))

    def _retire(self, request: Request) -> None:
        if request.row >= 0:
            self.running.remove(request)
            self._release(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)
        del self.requests[request.id]

    def _release(self, request: Request) -> None:
        self.tables.release(request)
        self._free_rows.append(request.row)
        request.row = -1
