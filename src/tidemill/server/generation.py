"""One HTTP request's work in the engine: its prompts run side by side, their deltas come back as one stream.

Knows requests, deltas and clients that leave; knows nothing of the JSON around them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import Request

from tidemill.core.params import SamplingParams
from tidemill.core.step import TokenLogprob
from tidemill.engine.messages import Delta, GenerateRequest
from tidemill.errors import TidemillError
from tidemill.server.body import ClientGone
from tidemill.server.envelope import request_id_of
from tidemill.server.prompts import Prompt
from tidemill.server.schemas_common import GenerationFields
from tidemill.server.state import AppState

if TYPE_CHECKING:
    from starlette.types import Receive

    from tidemill.engine.host import ServedModel

T = TypeVar("T")
logger = logging.getLogger("tidemill.server")

LABELS = ("user", "safety_identifier", "prompt_cache_key", "metadata")
MAX_LABEL_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Work:
    """Everything decided before the first token: the choice `prompt * n + j` is answer `j` to `prompt`."""

    id: str
    request_id: str
    created: int
    model: ServedModel
    model_name: str
    prompts: list[Prompt]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None

    def requests(self) -> list[GenerateRequest]:
        # Callers may repeat an id; inside the engine it has to be unique.
        unique = uuid.uuid4().hex[:12]
        return [
            GenerateRequest(f"{self.id}-{unique}-{i}", prompt.ids, self.params, self.priority, self.cache_salt)
            for i, prompt in enumerate(self.prompts)
        ]


def plan_work(
    state: AppState,
    prefix: str,
    request: Request,
    body: GenerationFields,
    model: ServedModel,
    prompts: list[Prompt],
    params: SamplingParams,
) -> Work:
    request_id = request_id_of(request.scope)
    if state.settings.log_requests:
        _log_labels(request_id, body)
    return Work(
        id=f"{prefix}-{body.request_id or request_id}",
        request_id=request_id,
        created=int(time.time()),
        model=model,
        model_name=body.model or model.names[0],
        prompts=prompts,
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )


def _log_labels(request_id: str, body: GenerationFields) -> None:
    labels = {name: getattr(body, name) for name in LABELS if getattr(body, name)}
    if labels:
        # repr escapes what could end the line; a label is the caller's and may be megabytes long.
        logger.info("request %s labels %s", request_id, repr(labels)[:MAX_LABEL_CHARS])


@dataclass(slots=True)
class Tally:
    """What the usage object counts, kept up to date delta by delta."""

    prompt: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    completion: int = 0
    finished: list[str] = field(default_factory=list)

    def saw(self, prompt_index: int, delta: Delta) -> None:
        self.completion += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.finished.append(delta.finish_reason)
        if prompt_index not in self.prompt:
            self.prompt[prompt_index] = delta.num_prompt_tokens
        if delta.index == 0:
            # Other answers to the same prompt find the prefix that the first one has just computed.
            self.cached[prompt_index] = delta.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        prompt = sum(self.prompt.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.completion,
            "total_tokens": prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


@dataclass(slots=True)
class Answer:
    """One choice, gathered whole."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_prompt_tokens: int = 0

    def saw(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        self.num_prompt_tokens = delta.num_prompt_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


async def run(state: AppState, work: Work) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all prompts as they come, each with the index of its prompt. Closing it aborts what still runs."""
    state.refuse_when_draining()
    # All or nothing: a batch of which some prompts were refused would have computed the others in vain.
    work.model.client.check_room(len(work.prompts) * work.params.n)
    requests = work.requests()
    sources = [_watched(state, work.model, request) for request in requests]
    merged = _alone(sources[0]) if len(sources) == 1 else _side_by_side(sources)
    logged = Tally() if state.settings.log_requests else None
    try:
        async with aclosing(merged):
            async for item in merged:
                if logged is not None:
                    logged.saw(*item)
                yield item
    finally:
        if logged is not None:
            _log_tokens(work, logged)


def _log_tokens(work: Work, tally: Tally) -> None:
    usage = tally.usage()
    ends = Counter(tally.finished)
    ends["unfinished"] = len(work.prompts) * work.params.n - len(tally.finished)
    logger.info(
        "request %s is %s: prompt tokens %d, completion tokens %d, finish %s",
        work.request_id,
        work.id,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        ", ".join(f"{reason} x {count}" if count > 1 else reason for reason, count in ends.items() if count),
    )


async def gather(state: AppState, work: Work) -> tuple[list[Answer], Tally]:
    answers = [Answer() for _ in range(len(work.prompts) * work.params.n)]
    tally = Tally()
    async with aclosing(run(state, work)) as deltas:
        async for prompt_index, delta in deltas:
            tally.saw(prompt_index, delta)
            answers[prompt_index * work.params.n + delta.index].saw(delta)
    return answers, tally


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientGone as soon as the connection closes, with `work` cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_connection_closed(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _connection_closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _watched(state: AppState, model: ServedModel, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
    """The engine's deltas, seen by the metrics on their way."""
    watch = state.metrics.watch(model, request)
    deltas = cast(AsyncGenerator[Delta, None], model.client.generate(request))
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                watch.saw(delta)
                yield delta
    except (asyncio.CancelledError, GeneratorExit):
        watch.ended_early("abort")
        raise
    except TidemillError as problem:
        if problem.status >= 500:
            watch.ended_early("error")
        raise


async def _alone(source: AsyncGenerator[Delta, None]) -> AsyncGenerator[tuple[int, Delta], None]:
    async with aclosing(source):
        async for delta in source:
            yield 0, delta


async def _side_by_side(sources: list[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    arrived: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def pump(index: int, source: AsyncGenerator[Delta, None]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(source):
                async for delta in source:
                    arrived.put_nowait((index, delta))
        except Exception as error:
            end = error
        arrived.put_nowait((index, end))

    pumps = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        running = len(pumps)
        while running:
            index, item = await arrived.get()
            if isinstance(item, Delta):
                yield index, item
            elif item is None:
                running -= 1
            else:
                raise item
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
