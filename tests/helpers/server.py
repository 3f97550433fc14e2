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

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        try:
            return [int(pid) for pid in path.read_text().split()]
        except OSError:
            return []

    def engine_pid(self) -> int:
        pids = self.children()
        assert len(pids) == 1, f"expected one engine process, found {pids}"
        return pids[0]

    def health(self) -> int:
        """The status of /health; 0 when nobody answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=10).status_code
        except httpx.TransportError:
            return 0

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


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not reaped yet does not."""
    state = stat_of(pid)
    return state is not None and state[0] not in "ZX"


def cpu_ticks(pid: int) -> int:
    """CPU time used so far, user and system, in clock ticks."""
    state = stat_of(pid)
    assert state is not None, f"process {pid} is gone"
    return int(state[11]) + int(state[12])


def private_bytes(pid: int) -> int:
    """What a process holds for itself: neither mapped files nor the KV cache, which fills up to its fixed size."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found, "the kernel does not tell RssAnon"
    return int(found[1]) * 1024


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; the name before it may hold spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def run_tidemill(
    *args: str, env: dict[str, str] | None = None, stdin: str = "", timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """`tidemill ARGS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tidemill.cli.main", *args],
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def wait_for(condition: Callable[[], bool], deadline: float, what: str) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, f"waited {deadline} s for {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def start_server(
    *args: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    port: int = 0,
    program: list[str] | None = None,
    on_spawn: Callable[[Server], None] | None = None,
) -> Iterator[Server]:
    """`tidemill serve ARGS`, on a free port unless one is given; ready when its address is printed."""
    with tempfile.NamedTemporaryFile(prefix="tidemill-serve-", suffix=".log") as log:
        server = spawn((*args, "--port", str(port)), log.file, Path(log.name), env, cwd, program)
        try:
            if on_spawn is not None:
                on_spawn(server)
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


def spawn(
    args: tuple[str, ...],
    log: IO[bytes],
    path: Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    program: list[str] | None = None,
) -> Server:
    command = [*(program or [sys.executable, "-m", "tidemill.cli.main"]), "serve", *args]
    environment = {**os.environ, **(env or {})}
    return Server(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=cwd), path)


def wait_until_ready(server: Server) -> None:
    def ready() -> bool:
        assert server.process.poll() is None, f"the server ended:\n{server.output}"
        found = re.search(r"serving\s+(\S+)", server.output)
        server.url = found[1] if found else ""
        return bool(found)

    wait_for(ready, START_DEADLINE, f"the server to start; it printed:\n{server.output}")
    wait_for(lambda: _healthy(server), 10, "the server to answer /health")


def _healthy(server: Server) -> bool:
    transport = httpx.HTTPTransport(
        verify=False, uds=server.url.removeprefix("unix:") if "unix:" in server.url else None
    )
    base = "http://localhost" if "unix:" in server.url else server.url
    try:
        with httpx.Client(transport=transport, base_url=base) as client:
            return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
