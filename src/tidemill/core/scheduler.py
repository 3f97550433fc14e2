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
from collections.abc import Iterable
from dataclasses import dataclass

from tidemill.core.block_pool import BlockPool
from tidemill.core.request import Request
from tidemill.core.step import NewRow, Slice, SliceResult, Step, StepResult


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


@dataclass(frozen=True, slots=True)
class Progress:
    """What one request gained in a step."""

    request: Request
    start: int
    """First position the step computed for it."""
    result: SliceResult


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.num_preemptions = self.prefix_queries = self.prefix_hits = 0
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._free_rows = list(range(config.max_num_seqs))[::-1]
        self._in_flight: deque[tuple[Step, list[Request]]] = deque()
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
            count = self._admit(head, budget)
            if count == 0:
                break
            new_rows.append(self._new_row(head))
            slices.append(self._advance(head, count, head.blocks))
            members.append(head)
            budget -= count

        if not slices:
            return None
        step = Step(self._steps, new_rows, slices)
        self._steps += 1
        self._in_flight.append((step, members))
        return step

    def update(self, result: StepResult) -> list[Progress]:
        """Take the result of the oldest step in flight; finished requests give back all they hold."""
        step, members = self._in_flight.popleft()
        progress = []
        for piece, request, outcome in zip(step.slices, members, result.slices, strict=True):
            if piece.samples:
                request.num_pending -= 1
            if request.finish is not None:
                continue
            if outcome.problem is not None:
                request.finish = "error"
                self.pool.forget(request.blocks)
            elif outcome.token is not None:
                request.append(outcome.token, self.config.max_model_len)
            if request.finish is not None:
                self._retire(request)
            progress.append(Progress(request, piece.start, outcome))
        return progress

    def fail_step(self) -> list[Request]:
        """The oldest step in flight did not run. Its requests end; cached blocks are no longer trusted."""
        _, members = self._in_flight.popleft()
        self.pool.forget_all()
        for request in self.requests.values():
            request.num_committed = len(request.blocks)
        return self.abort([request.id for request in members], finish="error")

    def _at_limit(self, request: Request) -> bool:
        """All the tokens it may have are in flight already: one more step would compute a token nobody asked for."""
        return request.num_pending > 0 and (
            request.num_output + request.num_pending >= request.max_tokens
            or request.num_tokens >= self.config.max_model_len
        )

    def _advance(self, request: Request, count: int, new_blocks: list[int]) -> Slice:
        start = request.num_computed
        request.num_computed += count
        samples = request.num_computed == request.num_tokens
        if samples:
            request.num_pending += 1
        self._commit_full_blocks(request)
        return Slice(request.row, start, count, list(new_blocks), samples)

    def _commit_full_blocks(self, request: Request) -> None:
        if not self.config.enable_prefix_caching:
            return
        request.extend_hashes(self.config.block_size)
        full = min(request.num_computed // self.config.block_size, len(request.block_hashes))
        for index in range(request.num_committed, full):
            self.pool.commit(request.blocks[index], request.block_hashes[index])
        request.num_committed = max(request.num_committed, full)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _grow_or_preempt(self, request: Request, count: int) -> tuple[list[int] | None, bool]:
        """Blocks for `count` more tokens, taking them from the last in order while there are none."""
        needed = self._blocks_for(request.num_computed + count) - len(request.blocks)
        preempted = False
        while (blocks := self.pool.allocate(max(needed, 0))) is None:
            victim = self.running[-1]
            self._preempt(victim)
            preempted = True
            if victim is request:
                return None, preempted
        request.blocks.extend(blocks)
        return blocks, preempted

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed = request.num_committed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(request)

    def _admit(self, request: Request, budget: int) -> int:
        """Move the head of the queue into a row if all its known tokens have room; returns how many to compute now."""
        total = request.num_tokens
        cached = self._find_cached(request)
        num_cached = len(cached) * self.config.block_size
        count = total - num_cached
        if count > budget:
            if not self.config.enable_chunked_prefill:
                return 0
            count = budget
        # Room for the whole sequence, not just this chunk, or half-prefilled requests would preempt each other; while
        # others run, a little more, so that they can grow.
        spare = max(1, self.config.num_blocks // 100) if self.running else 0
        available = self.pool.num_free - self.pool.num_free_among(cached)
        if self._blocks_for(total) - len(cached) + spare > available:
            return 0
        self.pool.share(cached)
        fresh = self.pool.allocate(self._blocks_for(num_cached + count) - len(cached))
        assert fresh is not None
        heapq.heappop(self._waiting)
        if self.config.enable_prefix_caching and request.num_preemptions == 0:
            self.prefix_queries += len(request.prompt_ids)
            self.prefix_hits += num_cached
            request.num_cached = num_cached
        request.blocks = cached + fresh
        request.num_computed = num_cached
        request.num_committed = len(cached)
        request.row = self._free_rows.pop()
        insort(self.running, request, key=lambda r: r.order)
        return count

    def _find_cached(self, request: Request) -> list[int]:
        # Prompt log-probabilities need every prompt position computed, so such a request reads nothing from the cache.
        if not self.config.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        request.extend_hashes(self.config.block_size)
        cached = self.pool.match(request.block_hashes)
        if len(cached) * self.config.block_size >= request.num_tokens:
            cached.pop()
        return cached

    def _new_row(self, request: Request) -> NewRow:
        return NewRow(
            row=request.row,
            tokens=list(request.tokens),
            num_prompt=len(request.prompt_ids),
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            bad_words_ids=request.bad_words_ids,
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
        self.pool.free(request.blocks)
        request.blocks = []
        self._free_rows.append(request.row)
        request.row = -1
