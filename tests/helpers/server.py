"""Starts the real server, as a user would, and stops it again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx

START_DEADLINE = 120.0


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        pids = [int(pid) for pid in children]
        assert len(pids) == 1, f"expected one engine process, found {pids}"
        return pids[0]

    def metric(self, name: str) -> float:
        """The value of a metric, summed over its labels."""
        text = httpx.get(f"{self.url}/metrics").text
        values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? ([0-9.e+-]+)$", text, re.M)
        assert values, f"metric {name} is not exposed"
        return sum(float(value) for value in values)

    def wait_idle(self, deadline: float = 30.0) -> None:
        """Until nothing runs, nothing waits and every block is free."""

        def idle() -> bool:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
            return all(self.metric(name) == 0 for name in names)

        wait_for(idle, deadline, "the server to be idle")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


def wait_for(condition: Callable[[], bool], deadline: float, what: str) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"waited {deadline} s for {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def start_server(*args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`tidemill serve ARGS --port 0`; ready when the report with the address is printed."""
    with tempfile.NamedTemporaryFile(prefix="tidemill-serve-", suffix=".log") as log:
        server = spawn(args, log.file, Path(log.name), env)
        try:
            wait_until_ready(server)
            yield server
        finally:
            if server.process.poll() is None:
                server.process.terminate()
                try:
                    server.process.wait(timeout=40)
                except subprocess.TimeoutExpired:
                    server.process.kill()
                    server.process.wait()


def spawn(args: tuple[str, ...], log: IO[bytes], path: Path, env: dict[str, str] | None = None) -> Server:
    command = [sys.executable, "-m", "tidemill.cli.main", "serve", *args, "--port", "0"]
    environment = {**os.environ, **(env or {})}
    return Server(subprocess.Popen(command, stdout=log, stderr=log, env=environment), path)


def wait_until_ready(server: Server) -> None:
    def ready() -> bool:
        assert server.process.poll() is None, f"the server ended:\n{server.output}"
        found = re.search(r"serving\s+(\S+)", server.output)
        server.url = found[1] if found else ""
        return bool(found)

    wait_for(ready, START_DEADLINE, f"the server to start; it printed:\n{server.output}")
    wait_for(lambda: _healthy(server), 10, "the server to answer /health")


def _healthy(server: Server) -> bool:
    try:
        return httpx.get(f"{server.url}/health", verify=False).status_code == 200
    except httpx.TransportError:
        return False
