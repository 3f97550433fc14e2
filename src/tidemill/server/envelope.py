"""What wraps every request, whatever its route: an id, a last resort for bugs, a key check, a limit on the body.

Plain ASGI rather than framework middleware, so that streams are not buffered and a rejected request costs nothing.
Knows paths and headers; knows nothing of the bodies.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.errors import BodyTooLarge, TidemillError, Unauthorized
from tidemill.server.problems import error_response, internal_error, loggable_path
from tidemill.server.state import AppState

logger = logging.getLogger("tidemill.server")

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json"})
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_ID_CHARS = 128


def request_id_of(scope: Scope) -> str:
    request_id: str = scope["tidemill_request_id"]
    return request_id


def _chosen_id(headers: Headers) -> str:
    """The caller's id if it can safely be logged and returned, else a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


class Envelope:
    """Outermost: every response carries its id, every bug becomes a plain 500, every request is counted."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if root_path := self._state.settings.root_path:
            scope["root_path"] = root_path
        started = time.monotonic()
        request_id = scope["tidemill_request_id"] = _chosen_id(Headers(scope=scope))
        status: int | None = None

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s %s %s failed", request_id, scope["method"], loggable_path(scope))
            if status is not None:
                raise
            await error_response(internal_error())(scope, receive, send_with_id)
        finally:
            self._count(scope, status, time.monotonic() - started)

    def _count(self, scope: Scope, status: int | None, seconds: float) -> None:
        # Labels come from the routes, never from the caller, so that nobody can make the number of series grow.
        route = getattr(scope.get("route"), "path", None) or "other"
        method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
        self._state.metrics.http_requests.labels(method, route, str(status or 499)).inc()
        self._state.metrics.http_seconds.labels(route).observe(seconds)
        if self._state.settings.log_requests:
            shown = (request_id_of(scope), method, loggable_path(scope), status, seconds)
            logger.info("request %s %s %s -> %s in %.3f s", *shown)


class KeyCheck:
    """Everything but probes, metrics and documentation needs one of the keys."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        problem = Unauthorized("this server needs an API key", fix="send the header Authorization: Bearer <key>")
        await error_response(problem)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        path = _route_path(scope)
        return scope["method"] == "OPTIONS" or path in OPEN_PATHS or path.startswith("/docs/")

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        # Every key is compared, in constant time: the time taken tells nothing about the keys.
        candidate = given.strip().encode("latin-1")
        return sum(hmac.compare_digest(candidate, key) for key in self._keys) > 0


class BodyLimit:
    """Refuses a body that is announced or turns out to be too large, before it is held in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced[:20]) > self._max_bytes:
            await error_response(self._problem())(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    raise self._problem()
            return message

        await self._app(scope, counted, send)

    def _problem(self) -> TidemillError:
        return BodyTooLarge(f"the body is larger than the limit of {self._max_bytes} bytes")


def _route_path(scope: Scope) -> str:
    """The path as routes see it: a proxy may or may not have removed `root_path`."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "").rstrip("/")
    return path[len(root) :] or "/" if root and path.startswith(root + "/") else path
