"""The engine: a scheduler and a runner, advanced one step at a time.

Knows requests and tokens, no text and no transport. A step that fails ends the requests that were in it, with the
cause, and leaves the rest running.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from tidemill.config import EngineConfig
from tidemill.core.request import Request, Turn
from tidemill.core.scheduler import Progress, Scheduler, SchedulerConfig
from tidemill.core.step import Step, StepResult, TokenLogprob
from tidemill.engine.cuda import context_lost, device_problem
from tidemill.engine.messages import Add, SequenceOutput, Stats
from tidemill.errors import InvalidRequest, TidemillError

logger = logging.getLogger(__name__)


class StepHandle(Protocol):
    def result(self) -> StepResult: ...


class StepRunner(Protocol):
    def launch(self, step: Step) -> StepHandle: ...


class EngineCore:
    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        *,
        cache_regime: Callable[[int], bytes] = lambda num_prompt: b"",
        turn_length: int | None = None,
        steps_in_flight: int = 1,
    ) -> None:
        self.config, self.runner = config, runner
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                enable_prefix_caching=config.enable_prefix_caching,
                enable_chunked_prefill=config.enable_chunked_prefill,
                policy=config.scheduling_policy,
                windows=tuple(config.block_windows),
            )
        )
        self._cache_regime, self._turn_length = cache_regime, turn_length
        self._steps_in_flight = steps_in_flight
        self._handles: deque[StepHandle] = deque()
        self._eos_ids = frozenset(config.eos_ids)
        self._seeds = random.Random(config.seed)
        self._num_scored: dict[str, int] = {}
        self._steps = self._prompt_tokens = self._generation_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._handles) or self.scheduler.has_work

    @property
    def stats(self) -> Stats:
        scheduler = self.scheduler
        return Stats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            kv_usage=scheduler.pool.usage,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
        )

    def add(self, message: Add) -> None:
        params = message.params
        room = self.config.max_model_len - len(message.prompt_ids)
        self.scheduler.add(
            Request(
                id=message.id,
                prompt_ids=message.prompt_ids,
                params=params,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_ids=self._eos_ids,
                bad_words_ids=message.bad_words_ids,
                seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
                priority=message.priority,
                cache_key=self._cache_key(len(message.prompt_ids), message.cache_salt),
                turn=self._turn(message),
            )
        )

    def _turn(self, message: Add) -> Turn | None:
        length = self._turn_length
        if length is None or len(message.prompt_ids) > length:
            return None
        return Turn(length, self._cache_key(length + 1, message.cache_salt))

    def _cache_key(self, num_prompt: int, salt: str | None) -> bytes:
        return repr((self._cache_regime(num_prompt), salt)).encode()

    def abort(self, ids: Sequence[str]) -> None:
        for request in self.scheduler.abort(ids):
            self._num_scored.pop(request.id, None)

    def step(self) -> list[SequenceOutput]:
        """Launch what can be launched, then take the oldest result."""
        try:
            while len(self._handles) < self._steps_in_flight and (step := self.scheduler.schedule()) is not None:
                self._handles.append(self.runner.launch(step))
            if not self._handles:
                return []
            result = self._handles.popleft().result()
        except Exception as error:
            return self._fail(error)
        except BaseException:
            # Ctrl-C in the middle of a step: who goes on afterwards must not get its result for a later one's.
            self._drop_steps()
            raise
        self._steps += 1
        return [self._output(progress) for progress in self.scheduler.update(result) if _tells(progress)]

    def _output(self, progress: Progress) -> SequenceOutput:
        request, result = progress.request, progress.result
        if result.token is not None:
            self._generation_tokens += 1
            if request.num_output == 1:
                self._prompt_tokens += len(request.prompt_ids)
        problem = None
        if result.problem is not None:
            kind = InvalidRequest if result.problem.by_request else TidemillError
            problem = kind(result.problem.message, fix=result.problem.fix).as_dict()
        output = SequenceOutput(
            id=request.id,
            token_ids=[] if result.token is None else [result.token],
            finish=request.finish,
            stop_reason=request.stop_reason,
            logprobs=None if result.logprob is None else [result.logprob],
            prompt_logprobs=self._unseen_prompt_logprobs(progress),
            num_cached=request.num_cached,
            problem=problem,
        )
        if request.finish is not None:
            self._num_scored.pop(request.id, None)
        return output

    def _unseen_prompt_logprobs(self, progress: Progress) -> list[TokenLogprob] | None:
        """A preempted request computes its prompt again; what was told once is not told again."""
        scores = progress.result.prompt_logprobs
        if scores is None:
            return None
        told = self._num_scored.get(progress.request.id, 0)
        unseen = scores[max(0, told - progress.start) :]
        self._num_scored[progress.request.id] = max(told, progress.start + len(scores))
        return unseen

    def _fail(self, error: Exception) -> list[SequenceOutput]:
        if not self.scheduler.num_in_flight or context_lost(error):
            # The scheduler itself, or a card that answers nothing more: going on would only fail the same way again.
            raise error
        logger.exception("a step failed; its requests end with this cause")
        problem = error if isinstance(error, TidemillError) else device_problem(error) or _step_failure(error)
        return [SequenceOutput(request.id, [], "error", problem=problem.as_dict()) for request in self._drop_steps()]

    def _drop_steps(self) -> list[Request]:
        """Nothing is in flight any more; the requests that were have ended."""
        dropped = [request for _ in range(self.scheduler.num_in_flight) for request in self.scheduler.fail_step()]
        self._handles.clear()
        for request in dropped:
            self._num_scored.pop(request.id, None)
        return dropped


def _tells(progress: Progress) -> bool:
    result = progress.result
    return result.token is not None or result.problem is not None or bool(result.prompt_logprobs)


def _step_failure(error: Exception) -> TidemillError:
    return TidemillError(
        "a step of the engine failed",
        cause=f"{type(error).__name__}: {error}",
        fix="the engine goes on; if it happens again, report it with the server's log",
    )
