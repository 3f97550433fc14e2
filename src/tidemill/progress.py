"""Progress of long work on the terminal: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

LINE_INTERVAL = 5.0


class ProgressReporter:
    """Call it with (what, done, total); each `what` gets its own bar."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}
        self._last_line = 0.0
        self._closed = False

    def __enter__(self) -> ProgressReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Whoever still reports after this, such as an engine that is restarted, is not shown."""
        self._closed = True
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._closed:
            return
        if sys.stderr.isatty():
            self._draw(what, done, total)
        elif time.monotonic() - self._last_line > LINE_INTERVAL or (done == total and what not in self._tasks):
            self._last_line = time.monotonic()
            self._tasks[what] = True
            share = f" {100 * done // total}%" if total else ""
            print(f"{what}{share}", file=sys.stderr, flush=True)

    def _draw(self, what: str, done: int, total: int) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total or None)
        self._bar.update(self._tasks[what], completed=done, total=total or None)
