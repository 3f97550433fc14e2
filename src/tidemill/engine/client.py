"""The caller's side of an engine: `async for delta in client.generate(request)`.

The same over a process or a thread. Cancelling the iteration aborts in the engine. When the engine dies, every request
ends with the real cause, and the engine is started again, unless it keeps dying.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tidemill.config import EngineConfig
from tidemill.engine.admission import admit
from tidemill.engine.links import Link, ProcessLink
from tidemill.engine.messages import (
    Abort,
    Delta,
    Failed,
    GenerateRequest,
    Outputs,
    Ping,
    Pong,
    Progress,
    Ready,
    SequenceOutput,
    Start,
    Stats,
)
from tidemill.engine.output import Choice
from tidemill.errors import (
    EngineDead,
    EngineStalled,
    InvalidRequest,
    QueueFull,
    ShuttingDown,
    StartupError,
    TidemillError,
)

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
RESTART_WINDOW = 600.0
"""An engine that dies more than MAX_RESTARTS times in so many seconds is not started again."""


class TextCodec(Protocol):
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]: ...
    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str: ...


@dataclass
class _Stream:
    """One request being served: its choices by sequence id, and what the caller has not taken yet."""

    choices: dict[str, Choice]
    queue: asyncio.Queue[Delta | TidemillError]

    @property
    def open_ids(self) -> list[str]:
        return [name for name, choice in self.choices.items() if choice.finish_reason is None]


class EngineClient:
    def __init__(
        self,
        config: EngineConfig,
        tokenizer: TextCodec,
        *,
        make_link: Callable[[], Link] = ProcessLink,
        stall_timeout: float = 120.0,
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.config, self.tokenizer, self.stall_timeout = config, tokenizer, stall_timeout
        self.stats = Stats()
        self.ready: Ready | None = None
        self.fatal: asyncio.Future[TidemillError] | None = None
        """Set once the engine will not be started again; a server then exits with this problem."""
        self._make_link, self._on_progress = make_link, on_progress
        self._link: Link | None = None
        self._streams: dict[str, _Stream] = {}
        self._starting: asyncio.Future[Ready] | None = None
        self._problem: TidemillError | None = None
        """Why requests are refused now; None while the engine serves."""
        self._last_words: TidemillError | None = None
        """What the engine itself said before it ended."""
        self._deaths: list[float] = []
        self._closing = self._draining = False
        self._counted = Stats()
        self._ping_sent: float | None = None
        self._last_heard = time.monotonic()
        self._num_requests = 0
        self._restart: asyncio.Task[None] | None = None

    @property
    def num_in_flight(self) -> int:
        """Requests accepted and not finished."""
        return self._num_requests

    @property
    def pid(self) -> int | None:
        return self._link.pid if self._link else None

    async def start(self) -> Ready:
        """Start the engine and wait until it is ready; raises what kept it from starting."""
        loop = asyncio.get_running_loop()
        if self.fatal is None:
            self.fatal = loop.create_future()
        self._starting = loop.create_future()
        self._last_words, self._ping_sent = None, None
        self._link = self._make_link()
        try:
            await self._link.open(Start(self.config), self._on_message, self._on_gone)
        except OSError as error:
            raise StartupError(
                "the engine process could not be started",
                cause=error.strerror or str(error),
                fix="see that this user may start processes (ulimit -a) and that memory is left (free -m)",
            ) from error
        self.ready = await self._starting
        return self.ready

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        """Deltas of all choices as they come. Raises before the first one if the request cannot be taken."""
        self._check_open()
        sequences = admit(request, self.config, self.tokenizer)
        self.check_room(len(sequences))
        choices = {
            add.id: Choice(index, add.prompt_ids, add.params, self.tokenizer) for index, add in enumerate(sequences)
        }
        stream = _Stream(choices, asyncio.Queue())
        self._num_requests += 1
        try:
            for add in sequences:
                if add.id in self._streams:
                    raise TidemillError(f"request id {request.id} is in use")
            if not self._streams:
                self._last_heard = time.monotonic()
            for add in sequences:
                self._streams[add.id] = stream
                self._send(add)
            while stream.open_ids or not stream.queue.empty():
                item = await stream.queue.get()
                if isinstance(item, TidemillError):
                    raise item
                yield item
        finally:
            self._num_requests -= 1
            left = [name for name in choices if self._streams.get(name) is stream]
            for name in left:
                del self._streams[name]
            if left:
                self._send(Abort(left))

    def check_health(self) -> None:
        """Raises EngineDead or EngineStalled. Each call also asks the engine for a sign of life."""
        if self._problem is not None:
            raise self._problem
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        now = time.monotonic()
        silent_since = self._ping_sent or now
        if self._streams:
            # With work to do it speaks after every step, so its silence tells even when nobody asked before.
            silent_since = min(silent_since, self._last_heard)
        if self._ping_sent is None:
            self._ping_sent = now
            self._send(Ping())
        if now - silent_since > self.stall_timeout:
            raise EngineStalled(
                f"the engine has not answered for {now - silent_since:.0f} s",
                fix="look at the server's log; a step that long usually means the machine is overloaded or swapping",
            )

    async def drain(self, timeout: float) -> bool:
        """Take nothing new, wait for what runs and end the rest; True if all of it finished in time."""
        self._draining = True
        deadline = time.monotonic() + timeout
        while self._num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        finished = not self._num_requests
        self._fail_streams(
            ShuttingDown(
                "the server shut down before this answer was finished",
                cause=f"it waited no longer than {timeout:g} s for what ran",
                fix="retry on another replica, or serve with a longer --shutdown-timeout",
            )
        )
        return finished

    async def close(self) -> None:
        self._closing = self._draining = True
        if self._restart is not None:
            self._restart.cancel()
        self._fail_streams(ShuttingDown("the server is shutting down"))
        if self._link is not None:
            await self._link.close()

    def _check_open(self) -> None:
        if self._draining:
            raise ShuttingDown("the server is shutting down and takes no new requests", fix="retry elsewhere")
        if self._problem is not None:
            raise self._problem

    def check_room(self, count: int) -> None:
        """Raises InvalidRequest if so many sequences can never be held at once, QueueFull if not now."""
        limit = self.config.max_num_seqs + self.config.max_waiting
        if count > limit:
            raise InvalidRequest(
                f"the request makes {count} sequences (prompts times n), but this server holds at most {limit}, "
                "running and waiting; send fewer at a time, or serve with a larger --max-waiting",
                param="n",
            )
        if len(self._streams) + count > limit:
            raise QueueFull(
                f"{len(self._streams)} sequences are running or waiting and the limit is {limit}; retry in a moment",
                fix="retry with backoff, or serve with a larger --max-waiting",
            )

    def _send(self, message: Any) -> None:
        if self._link is not None and self._problem is None:
            self._link.send(message)

    def _on_message(self, message: Any) -> None:
        self._last_heard = time.monotonic()
        if isinstance(message, Outputs):
            self._take_stats(message.stats)
            for output in message.outputs:
                self._deliver(output)
        elif isinstance(message, Pong):
            self._ping_sent = None
        elif isinstance(message, Progress):
            if self._on_progress is not None:
                self._on_progress(message.what, message.done, message.total)
        elif isinstance(message, Ready):
            self._settle(message)
        elif isinstance(message, Failed):
            self._last_words = TidemillError.from_dict(message.problem)

    def _deliver(self, output: SequenceOutput) -> None:
        stream = self._streams.get(output.id)
        if stream is None:
            return
        if output.problem is not None:
            del self._streams[output.id]
            stream.queue.put_nowait(TidemillError.from_dict(output.problem))
            return
        choice = stream.choices[output.id]
        delta = choice.feed(output)
        if choice.finish_reason is not None:
            del self._streams[output.id]
            if output.finish is None:
                # A stop string: the engine does not know text, so it must be told.
                self._send(Abort([output.id]))
        if delta is not None:
            stream.queue.put_nowait(delta)

    def _take_stats(self, stats: Stats) -> None:
        """Counters go on where the engine before this one left them."""
        counted = self._counted
        self.stats = replace(
            stats,
            preemptions=counted.preemptions + stats.preemptions,
            prefix_queries=counted.prefix_queries + stats.prefix_queries,
            prefix_hits=counted.prefix_hits + stats.prefix_hits,
            steps=counted.steps + stats.steps,
            prompt_tokens=counted.prompt_tokens + stats.prompt_tokens,
            generation_tokens=counted.generation_tokens + stats.generation_tokens,
        )

    def _settle(self, ready: Ready) -> None:
        if self._starting is not None and not self._starting.done():
            self._problem = None
            self._starting.set_result(ready)

    def _on_gone(self, story: str) -> None:
        if self._closing:
            return
        said = self._last_words
        if self._starting is not None and not self._starting.done():
            fix = "see the lines above; TIDEMILL_LOG_LEVEL=debug tells more"
            self._starting.set_exception(said or StartupError("the engine did not start", cause=story, fix=fix))
            return
        self._on_death(story if said is None else _in_one_line(said))

    def _on_death(self, cause: str) -> None:
        """What ran fails with the cause; what comes is refused until the engine is back."""
        self._problem = EngineDead("the engine died and is being restarted", cause=cause, fix="retry in a few seconds")
        self._counted, self.stats = self.stats, replace(self.stats, running=0, waiting=0, kv_usage=0.0)
        self._fail_streams(EngineDead("the engine died while serving this request", cause=cause, fix="retry"))
        logger.error("the engine died: %s", cause)
        now = time.monotonic()
        self._deaths = [when for when in self._deaths if now - when < RESTART_WINDOW] + [now]
        if len(self._deaths) > MAX_RESTARTS:
            self._give_up(cause)
        elif not self._draining:
            self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        try:
            await self.start()
            logger.warning("the engine was restarted")
        except Exception as error:
            self._on_death(_in_one_line(error) if isinstance(error, TidemillError) else f"{error!r}")

    def _give_up(self, cause: str) -> None:
        self._problem = EngineDead(
            f"the engine died {len(self._deaths)} times and is not started again",
            cause=cause,
            fix="see the log above for the first death; tidemill serve again when its cause is gone",
        )
        if self.fatal is not None and not self.fatal.done():
            self.fatal.set_result(self._problem)

    def _fail_streams(self, problem: TidemillError) -> None:
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.queue.put_nowait(problem)
        self._streams.clear()


def _in_one_line(problem: TidemillError) -> str:
    return f"{problem.message}: {problem.cause}" if problem.cause else problem.message
