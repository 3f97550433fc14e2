"""Owns the socket and the signals: serves an app until told to stop, and drains before it does.

The first SIGTERM or SIGINT stops taking requests and waits for those that run, at most `shutdown_timeout` seconds; the
second one stops at once. Knows uvicorn; knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from tidemill.errors import ConfigError, TidemillError
from tidemill.server.http_protocol import GuardedProtocol
from tidemill.server.state import AppState

logger = logging.getLogger(__name__)

CERTIFICATE_POLL_SECONDS = 2.0
BACKLOG = 2048


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
    """Take the address before anything slow happens, so that a taken port is told at once.

    It does not listen yet: until the model is ready, a connection is refused rather than left waiting.
    """
    _check_tls(listen)
    family = socket.AF_UNIX if listen.uds else socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    bound = socket.socket(family)
    try:
        if listen.uds:
            _remove_stale(Path(listen.uds))
            bound.bind(listen.uds)
        else:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((listen.host, listen.port))
    except OSError as error:
        bound.close()
        raise _cannot_listen(listen, error) from None
    return bound


def release(listen: Listen) -> None:
    """Remove what `bind` left in the file system."""
    if listen.uds:
        Path(listen.uds).unlink(missing_ok=True)


def _cannot_listen(listen: Listen, error: OSError) -> ConfigError:
    where, flag = (listen.uds, "--uds") if listen.uds else (f"{listen.host}:{listen.port}", "--port")
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        flag = "--host"
    return ConfigError(
        f"cannot listen on {where}",
        param=flag.lstrip("-"),
        cause=error.strerror or str(error),
        fix=f"choose another with {flag}" + (", or 0 for any free one" if flag == "--port" else ""),
    )


def _remove_stale(path: Path) -> None:
    """Only the socket of a server that is gone is removed; anything else there stays and is an error."""
    if not path.is_socket():
        if path.exists():
            raise OSError(errno.EEXIST, "a file is there that is not a socket")
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise OSError(errno.EADDRINUSE, "another server listens there")


def _check_tls(listen: Listen) -> None:
    """A certificate that cannot be used is refused now, not after the model was loaded."""
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path, flag = getattr(listen, name), f"--{name.replace('_', '-')}"
        if path and not listen.ssl_certfile:
            raise ConfigError(
                f"{flag} needs --ssl-certfile",
                param="ssl_certfile",
                cause="TLS needs a certificate",
                fix="--ssl-certfile PATH",
            )
        if path and not Path(path).is_file():
            raise ConfigError(
                f"{flag}: no such file: {path}", param=name, cause=f"{path} is not a file", fix=f"{flag} PATH"
            )
    if listen.ssl_certfile:
        try:
            _certificate_context(listen)
            if listen.ssl_ca_certs:
                ssl.create_default_context(cafile=listen.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the TLS certificate {listen.ssl_certfile} cannot be used",
                param="ssl_certfile",
                cause=str(error),
                fix="give a PEM certificate with --ssl-certfile and its key with --ssl-keyfile",
            ) from None


def _certificate_context(listen: Listen) -> ssl.SSLContext:
    assert listen.ssl_certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(listen.ssl_certfile, listen.ssl_keyfile)
    return context


async def serve(
    app: FastAPI, bound: socket.socket, listen: Listen, on_listening: Callable[[], None] = lambda: None
) -> TidemillError | None:
    """Serve until stopped. Returns the problem if an engine died for good, else None."""
    state: AppState = app.state.server
    try:
        # Two servers that start together can both bind; only one of them can listen.
        bound.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(listen, error) from None
    on_listening()
    server = _Server(
        uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
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
    stopping = _Stopping(server, state, listen.shutdown_timeout)
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.on_signal)
    helpers = [asyncio.create_task(stopping.wait_and_drain()), asyncio.create_task(stopping.watch_engines())]
    if listen.enable_ssl_refresh and listen.ssl_certfile:
        helpers.append(asyncio.create_task(_refresh_certificates(server, listen)))
    try:
        await server.serve(sockets=[bound])
    finally:
        for helper in helpers:
            helper.cancel()
        await asyncio.gather(*(client.close() for client in state.clients))
    return stopping.problem


class _Stopping:
    """When the server ends, and how: drained after a signal, at once after a second one, or for an engine's death."""

    def __init__(self, server: uvicorn.Server, state: AppState, timeout: float) -> None:
        self._server, self._state, self._timeout = server, state, timeout
        self._told, self._told_again = asyncio.Event(), asyncio.Event()
        self.problem: TidemillError | None = None

    def on_signal(self) -> None:
        if self._told.is_set():
            self._told_again.set()
        self._told.set()

    async def wait_and_drain(self) -> None:
        await self._told.wait()
        state = self._state
        state.draining = True
        running = sum(client.num_in_flight for client in state.clients)
        if running:
            logger.warning("draining: %d requests run, waiting up to %g s", running, self._timeout)
        drained = asyncio.create_task(self._drain(self._timeout))
        hurried = asyncio.create_task(self._told_again.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            await self._drain(0)
        self._server.should_exit = True

    async def _drain(self, timeout: float) -> bool:
        return all(await asyncio.gather(*(client.drain(timeout) for client in self._state.clients)))

    async def watch_engines(self) -> None:
        waiting = [client.fatal for client in self._state.clients if client.fatal is not None]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        self.problem = done.pop().result()
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Signals are handled above, where draining is known."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
                # First into a context of its own: a half-written pair must not spoil the one in use.
                _certificate_context(listen)
                context.load_cert_chain(listen.ssl_certfile, listen.ssl_keyfile)
                seen = now
                logger.warning("TLS certificates were reloaded")
        except (OSError, ssl.SSLError) as error:
            logger.error("TLS certificates could not be reloaded, the old ones stay: %s", error)
