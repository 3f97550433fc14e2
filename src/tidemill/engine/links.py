"""Two ways to reach an engine: in a process of its own, or in a thread of this one. Both speak the same messages.

A link delivers messages in order to `on_message` on the event loop and calls `on_gone` once when the engine has ended.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tidemill.engine.cuda import device_problem, missing_settings
from tidemill.engine.messages import Failed, Progress, Ready, Start
from tidemill.errors import EngineDead, TidemillError

STDERR_LINES = 30
STDERR_LINE_CHARS = 500
LAST_MESSAGES_TIMEOUT = 2.0
"""How long the messages an engine sent before it ended may take to arrive after it."""


class Link(Protocol):
    async def open(self, start: Start, on_message: Callable[[Any], None], on_gone: Callable[[str], None]) -> None: ...
    def send(self, message: Any) -> None: ...
    async def close(self) -> None: ...
    @property
    def pid(self) -> int | None: ...


class ProcessLink:
    """An engine in a child process. Its stderr is passed on, and its last lines are kept to explain a sudden death."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.Transport | None = None
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._watcher: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def open(self, start: Start, on_message: Callable[[Any], None], on_gone: Callable[[str], None]) -> None:
        # Needs msgspec, which an engine in a thread does without.
        from tidemill.engine.transport import FrameParser, encode, socket_pair

        loop = asyncio.get_running_loop()
        ours, theirs = socket_pair()
        self._encode = encode
        parser = FrameParser()
        all_received = asyncio.Event()

        class Protocol(asyncio.Protocol):
            def data_received(self, data: bytes) -> None:
                for message in parser.feed(data):
                    on_message(message)

            def connection_lost(self, exc: Exception | None) -> None:
                all_received.set()

        # -P: what lies in the folder the server was started in must not be imported in place of a library.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "tidemill.engine.process",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stderr=asyncio.subprocess.PIPE,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **missing_settings(os.environ)},
        )
        theirs.close()
        ours.setblocking(False)
        self._transport, _ = await loop.create_connection(Protocol, sock=ours)
        self._watcher = asyncio.create_task(self._watch(on_gone, all_received))
        self.send(start)

    def send(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._encode(message))

    async def close(self) -> None:
        """Closing the stream is the order to exit; an engine that does not listen is killed."""
        if self._transport is not None:
            self._transport.close()
        if self._process is not None and self._watcher is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._watcher), timeout=5)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._watcher

    async def _watch(self, on_gone: Callable[[str], None], all_received: asyncio.Event) -> None:
        assert self._process is not None
        passing_on = asyncio.create_task(self._pass_on_stderr())
        code = await self._process.wait()
        # Its last words may still be on the way. They end with the process, unless a child of it holds the pipe.
        ending = {passing_on, asyncio.create_task(all_received.wait())}
        await asyncio.wait(ending, timeout=LAST_MESSAGES_TIMEOUT)
        for task in ending:
            task.cancel()
        on_gone(self._story(code))

    async def _pass_on_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        rest = ""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Not by lines: a line may be longer than a stream reader takes.
        while data := await self._process.stderr.read(2**16):
            text = decoder.decode(data)
            *lines, rest = (rest + text).split("\n")
            self._stderr.extend(lines)
            rest = rest[-STDERR_LINE_CHARS:]
            # The reader of our own stderr may be gone; the engine is not to block or die for that.
            with contextlib.suppress(OSError, ValueError):
                print(text, end="", file=sys.stderr, flush=True)
        self._stderr.append(rest)

    def _story(self, code: int) -> str:
        if code < 0:
            hint = ", which is what the kernel does when memory runs out" if -code == signal.SIGKILL else ""
            return f"the engine process was killed by {_signal_name(-code)}{hint}"
        last = next((line.strip() for line in reversed(self._stderr) if line.strip()), "it printed nothing")
        return f"the engine process ended with code {code}: {last[-STDERR_LINE_CHARS:]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ThreadLink:
    """An engine in a thread: no sockets and no serialisation, for offline use and for machines without msgspec."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return os.getpid()

    async def open(self, start: Start, on_message: Callable[[Any], None], on_gone: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()

        def emit(message: Any) -> None:
            loop.call_soon_threadsafe(on_message, message)

        def run() -> None:
            try:
                self._run(start, emit)
                story = "the engine was closed"
            except BaseException as error:
                problem = error if isinstance(error, TidemillError) else device_problem(error)
                problem = problem or EngineDead(f"{type(error).__name__}: {error}")
                emit(Failed(problem.as_dict()))
                story = problem.message
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(on_gone, story)

        self._thread = threading.Thread(target=run, name="tidemill-engine", daemon=True)
        self._thread.start()

    def _run(self, start: Start, emit: Callable[[Any], None]) -> None:
        from tidemill.engine.build import build_core
        from tidemill.engine.loop import run_loop
        from tidemill.runtime.build import device_bytes, resident_bytes

        began = time.perf_counter()
        core = build_core(start.config, lambda what, done, total: emit(Progress(what, done, total)))
        emit(Ready(time.perf_counter() - began, resident_bytes(), device_bytes()))
        run_loop(core, self, emit)

    def take(self, block: bool) -> list[Any] | None:
        """The inbox of the loop; None in the queue is the order to end."""
        messages: list[Any] = []
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get(block=block and not messages)
                if message is None:
                    return None
                messages.append(message)
        return messages

    def send(self, message: Any) -> None:
        self._inbox.put(message)

    async def close(self) -> None:
        self._inbox.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
