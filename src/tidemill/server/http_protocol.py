"""HTTP/1.1 on a connection that may be hostile: bounded headers, deadlines for slow senders, and OpenAI's error shape.

uvicorn's protocol holds a header of any size, waits for ever for the rest of a request, and answers a broken one with
plain text; this one does not. Knows connections and bytes; whatever reaches the app is a whole, sane request head.
"""

from __future__ import annotations

import asyncio
import uuid
from http import HTTPStatus

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.server.problems import error_object

MAX_HEAD_BYTES = 64 * 1024
# A client that was refused in the middle of sending reads the answer only if the connection is not reset at once.
LINGER_SECONDS = 2.0


class HeadersTooLarge(TidemillError):
    status, type, code = 431, "invalid_request_error", "headers_too_large"


class RequestTimeout(TidemillError):
    status, type, code = 408, "invalid_request_error", "request_timeout"


class GuardedProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=GuardedProtocol)`."""

    head_seconds = 30.0
    """How long the head of a request may take, from its first byte (or from the connection, for the first one)."""
    body_seconds = 60.0
    """How long a body may pause."""

    _head_bytes = 0
    """Of the request line and the headers, trailers included, as far as they were told by the parser."""
    _untold_bytes = 0
    """Fed since the parser last told of anything; it keeps them all while a header has no end."""
    _has_told = False
    _is_deaf = False
    """Set once a problem was answered: what still comes is thrown away."""
    _in_message = False
    _in_body = False
    _problem: TidemillError | None = None
    _deadline: float | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._allow(self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._unset_keepalive_if_required()
        self._has_told = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Nothing is upgraded to: the request was answered as if it had not asked.
            pass
        except httptools.HttpParserError as error:
            self._refuse(self._problem or _broken(error))
            return
        self._untold_bytes = 0 if self._has_told else self._untold_bytes + len(data)
        if self._untold_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._has_told, self._in_message = 0, True, True
        if self._deadline is None:
            self._allow(self.head_seconds)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # 32 for what Python needs to hold a pair of bytes: many tiny headers cost more than their bytes.
        self._count(len(name) + len(value) + 32)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._allow(self.body_seconds)
        super().on_headers_complete()
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._has_told = True
        self._allow(self.body_seconds)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_told = True
        self._in_message = self._in_body = False
        self._deadline = None
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return False

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            # The parser stops at an exception of its callbacks, but does not pass it on.
            self._problem = _head_too_large()
            raise self._problem

    def _allow(self, seconds: float) -> None:
        """Sets the deadline. One timer follows it lazily, since it moves with every piece of a body."""
        self._deadline = self.loop.time() + seconds
        if self._timer is None:
            self._timer = self.loop.call_at(self._deadline, self._look_at_the_clock)

    def _look_at_the_clock(self) -> None:
        self._timer = None
        if self._deadline is None or self._is_deaf or self.transport.is_closing():
            return
        if self.flow.read_paused:
            # It is the server that does not read; the client is not to blame.
            self._allow(self.body_seconds)
        elif self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._look_at_the_clock)
        elif self._in_message:
            self._refuse(RequestTimeout("the rest of the request did not come in time", fix="send it again"))
        else:
            # Nothing was asked on this connection, so there is nothing to answer.
            self.transport.close()

    def _refuse(self, problem: TidemillError) -> None:
        """Answers with the problem where an answer can still be told from others, and closes the connection."""
        self._is_deaf = True
        cycle = self.cycle
        if self._in_body:
            if self.pipeline or cycle.response_started:
                self.transport.close()
                return
            cycle.disconnected = True
            cycle.message_event.set()
        elif cycle is not None and not cycle.response_complete:
            # A whole request is being answered, and what followed it is broken: the answer is the last one.
            cycle.keep_alive = False
            return
        self.transport.write(_response(problem))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _head_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"the request line and headers are larger than the limit of {MAX_HEAD_BYTES} bytes")


def _broken(error: httptools.HttpParserError) -> InvalidRequest:
    if isinstance(error, httptools.HttpParserInvalidMethodError):
        return InvalidRequest("the request has a method that HTTP does not know")
    if isinstance(error, httptools.HttpParserCallbackError):
        return InvalidRequest("the request has a target that is no path")
    return InvalidRequest(f"the request is not valid HTTP: {error}")


def _response(problem: TidemillError) -> bytes:
    body = msgspec.json.encode({"error": error_object(problem)})
    lines = (
        f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"x-request-id: {uuid.uuid4().hex}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
