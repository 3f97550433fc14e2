"""The engine as a process: `python -m tidemill.engine.process FD`, speaking over the inherited socket FD.

Whatever goes wrong is sent as a `Failed` message with its cause before the process ends. The end of the stream is the
order to exit, so an engine never outlives its server.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

from tidemill.config import log_level
from tidemill.engine.cuda import device_problem
from tidemill.engine.messages import Failed, Progress, Ready, Start
from tidemill.engine.transport import SocketInbox, encode
from tidemill.errors import StartupError, TidemillError

PROGRESS_INTERVAL = 0.1


def main() -> int:
    faulthandler.enable()
    # A service manager signals every process of a service; the server decides when the engine has finished.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    logging.basicConfig(level=log_level(), format="%(levelname)s engine %(name)s: %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    inbox = SocketInbox(connection)

    def emit(message: Any) -> None:
        connection.sendall(encode(message))

    try:
        first = inbox.take(block=True)
        if not first or not isinstance(first[0], Start):
            return 0
        _serve(first[0], inbox, emit)
    except (BrokenPipeError, ConnectionResetError):
        return 0
    except BaseException as error:
        if not isinstance(error, TidemillError):
            traceback.print_exc()
        with contextlib.suppress(OSError):
            emit(Failed(as_problem(error).as_dict()))
        return 1
    return 0


def _serve(start: Start, inbox: SocketInbox, emit: Any) -> None:
    began = time.perf_counter()
    # Imported here so that a failing import of torch is reported like every other failure.
    from tidemill.engine.build import build_core
    from tidemill.engine.loop import run_loop
    from tidemill.runtime.build import device_bytes, resident_bytes

    last = 0.0

    def on_progress(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last > PROGRESS_INTERVAL or done == total:
            last = now
            emit(Progress(what, done, total))

    core = build_core(start.config, on_progress)
    # What was loaded lives as long as the process: the collector need not walk it again.
    gc.collect()
    gc.freeze()
    emit(Ready(time.perf_counter() - began, resident_bytes(), device_bytes()))
    run_loop(core, inbox, emit)


def as_problem(error: BaseException) -> TidemillError:
    """The error itself if it is one of ours, else one that carries its words and where it was raised."""
    if isinstance(error, TidemillError):
        return error
    if problem := device_problem(error):
        return problem
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return StartupError(
            "the engine ran out of memory",
            cause=f"{error}{where}",
            fix="use a smaller --max-model-len, --max-num-seqs or --kv-cache-memory-bytes",
        )
    cause = f"{type(error).__name__}: {error}{where}"
    if isinstance(error, ImportError):
        name = (error.name or "torch").partition(".")[0]
        return StartupError(
            "the engine could not be imported",
            cause=cause,
            fix=f"{sys.executable} -m pip install --force-reinstall {name}",
        )
    return StartupError("the engine failed", cause=cause, fix="the traceback is above; report it if it happens again")


if __name__ == "__main__":
    # Not sys.exit: torch's threads can hang the interpreter's clean-up, and there is nothing left to clean up.
    code = main()
    sys.stderr.flush()
    os._exit(code)
