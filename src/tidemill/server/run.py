"""Owns the socket and the signals: serves an app until told to stop, and drains before it does.

The first SIGTERM or SIGINT stops taking requests and waits for those that run, at most `shutdown_timeout` seconds; the
second one stops at once. Knows uvicorn; knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from tidemill.errors import ConfigError, TidemillError
from tidemill.server.state import AppState

logger = logging.getLogger(__name__)

CERTIFICATE_POLL_SECONDS = 10.0


@dataclass(frozen=True)
class Listen:
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    enable_ssl_refresh: bool = False
    log_level: str = "warning"
    access_log: bool = False
    shutdown_timeout: float = 30.0

    def url(self, bound: socket.socket) -> str:
        """Where a client on this machine connects."""
        if self.uds:
            return f"unix:{self.uds}"
        scheme = "https" if self.ssl_certfile else "http"
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


def bind(listen: Listen) -> socket.socket:
    """Take the address before anything slow happens, so that a taken port is told at once."""
    if listen.ssl_keyfile and not listen.ssl_certfile:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile", param="ssl_certfile")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(listen, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"--{name.replace('_', '-')}: no such file: {path}", param=name)
    try:
        if listen.uds:
            bound = socket.socket(socket.AF_UNIX)
            Path(listen.uds).unlink(missing_ok=True)
            bound.bind(listen.uds)
            return bound
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        bound = socket.socket(family)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((listen.host, listen.port))
        return bound
    except OSError as error:
        where = listen.uds or f"{listen.host}:{listen.port}"
        raise ConfigError(
            f"cannot listen on {where}", cause=error.strerror or str(error), fix="choose another with --port"
        ) from None


async def serve(app: FastAPI, bound: socket.socket, listen: Listen) -> TidemillError | None:
    """Serve until stopped. Returns the problem if an engine died for good, else None."""
    state: AppState = app.state.server
    server = _Server(
        uvicorn.Config(
            app,
            log_level=listen.log_level,
            access_log=listen.access_log,
            ssl_keyfile=listen.ssl_keyfile,
            ssl_certfile=listen.ssl_certfile,
            ssl_ca_certs=listen.ssl_ca_certs,
            ssl_cert_reqs=listen.ssl_cert_reqs,
            timeout_graceful_shutdown=1,
            # Probes and load balancers hold idle connections; they must not delay a shutdown.
            timeout_keep_alive=30,
        ),
    )
    stopping = asyncio.Event()
    problem: list[TidemillError] = []
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stopping.is_set():
            server.force_exit = server.should_exit = True
        stopping.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)

    async def wait_and_drain() -> None:
        await stopping.wait()
        state.draining = True
        running = sum(client.num_in_flight for client in state.clients)
        if running:
            logger.warning("draining: %d requests run, waiting up to %g s", running, listen.shutdown_timeout)
        await asyncio.gather(*(client.drain(listen.shutdown_timeout) for client in state.clients))
        server.should_exit = True

    async def watch_engines() -> None:
        waiting = [client.fatal for client in state.clients if client.fatal is not None]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        problem.append(done.pop().result())
        server.should_exit = True

    helpers = [asyncio.create_task(wait_and_drain()), asyncio.create_task(watch_engines())]
    if listen.enable_ssl_refresh and listen.ssl_certfile:
        helpers.append(asyncio.create_task(_refresh_certificates(server, listen)))
    try:
        await server.serve(sockets=[bound])
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*(client.close() for client in state.clients))
        if listen.uds:
            Path(listen.uds).unlink(missing_ok=True)
    return problem[0] if problem else None


class _Server(uvicorn.Server):
    """Signals are handled above, where draining is known."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        pass

    def capture_signals(self):  # type: ignore[no-untyped-def]  # noqa: ANN201
        from contextlib import nullcontext

        return nullcontext()


async def _refresh_certificates(server: uvicorn.Server, listen: Listen) -> None:
    """Certificates are renewed on disk while the server runs; new connections get the new ones."""
    assert listen.ssl_certfile is not None
    paths = [path for path in (listen.ssl_certfile, listen.ssl_keyfile) if path]
    seen = [os.stat(path).st_mtime for path in paths]
    while True:
        await asyncio.sleep(CERTIFICATE_POLL_SECONDS)
        try:
            now = [os.stat(path).st_mtime for path in paths]
            context = server.config.ssl
            if now != seen and context is not None:
                context.load_cert_chain(listen.ssl_certfile, listen.ssl_keyfile)
                seen = now
                logger.warning("TLS certificates were reloaded")
        except (OSError, ssl.SSLError) as error:
            logger.error("TLS certificates could not be reloaded, the old ones stay: %s", error)
