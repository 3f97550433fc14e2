"""Server-sent events: one `data:` line per event, `[DONE]` at the end, and an end to the work when the reader leaves.

Knows bytes and connections; what is in an event is the caller's business.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.errors import TidemillError
from tidemill.server.body import ClientGone
from tidemill.server.generation import unless_client_leaves
from tidemill.server.problems import error_object, internal_error

logger = logging.getLogger("tidemill.server")

DONE = b"data: [DONE]\n\n"
_encoder = msgspec.json.Encoder()


def event(payload: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % _encoder.encode(payload)


class EventStream(Response):
    """Sends events as they are made. The first one is made before this object, so its failure was an HTTP status."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        # A proxy that buffers would turn a stream of tokens into one late block.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send_all(send))
        except ClientGone:
            logger.debug("the reader of a stream left")

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            try:
                async for chunk in self._rest:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except TidemillError as problem:
                logger.error("a stream failed: %s", problem.report())
                await self._send_problem(send, problem)
            except Exception:
                logger.exception("a stream failed")
                await self._send_problem(send, internal_error())
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send_problem(send: Send, problem: TidemillError) -> None:
        """Too late for a status: the error travels as an event, which OpenAI's clients raise."""
        chunk = event({"error": error_object(problem)})
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def open_stream(receive: Receive, events: AsyncGenerator[bytes, None]) -> EventStream:
    """Waits for the first event, so that whatever goes wrong before it is answered with its status."""
    try:
        first = await unless_client_leaves(receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)
