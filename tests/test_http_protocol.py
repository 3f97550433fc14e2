"""Connections that do not play by the rules: endless headers, slow senders, broken requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
import uvicorn

from tests.helpers.server import wait_for
from tidemill.server.http_protocol import MAX_HEAD_BYTES, GuardedProtocol


class Impatient(GuardedProtocol):
    head_seconds = 0.5
    body_seconds = 0.5


async def echo(scope, receive, send) -> None:
    """Answers with the body it was sent."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        more = message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def listening(protocol: type[GuardedProtocol]) -> Iterator[tuple[str, int]]:
    """The protocol alone, in front of the smallest app."""
    bound = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(echo, http=protocol, ws="none", lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        yield bound.getsockname()
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def guarded():
    with listening(GuardedProtocol) as address:
        yield address


@pytest.fixture(scope="module")
def impatient():
    with listening(Impatient) as address:
        yield address


def exchange(address: tuple[str, int], *pieces: bytes) -> bytes:
    """All that is answered until the server closes the connection."""
    with socket.create_connection(address, timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


def problem(answer: bytes, status: int) -> dict:
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0].startswith(f"http/1.1 {status} "), answer
    assert "content-type: application/json" in lines
    assert "connection: close" in lines
    assert any(line.startswith("x-request-id: ") for line in lines)
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


ENDLESS = {
    "one": (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ", b"a" * 65536, 4),
    "many": (b"GET / HTTP/1.1\r\nHost: x\r\n", b"X-H: a\r\n" * 8192, 4),
    "url": (b"GET /", b"a" * 65536, 4),
    "trailers": (
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
        b"X-T: a\r\n" * 8192,
        4,
    ),
}


@pytest.mark.parametrize(("start", "piece", "count"), ENDLESS.values(), ids=ENDLESS)
def test_endless_headers_are_refused(guarded, start, piece, count):
    error = problem(exchange(guarded, start, *[piece] * count), 431)
    assert error["code"] == "headers_too_large"
    assert str(MAX_HEAD_BYTES) in error["message"]


def test_long_but_bounded_headers_are_served(guarded):
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Long: " + b"a" * 60_000 + b"\r\n\r\n"
    assert exchange(guarded, request).startswith(b"HTTP/1.1 200 ")


def test_many_tiny_chunks_are_no_headers(guarded):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = exchange(guarded, head, b"1\r\na\r\n" * 30_000, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"a") > 30_000


BROKEN = {
    "method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "both lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    "length": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
    "chunk": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nmany\r\n",
    "target": b"CONNECT x:443 HTTP/1.1\r\nHost: x\r\n\r\n",
    "bytes": b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("request_bytes", BROKEN.values(), ids=BROKEN)
def test_a_broken_request_is_a_400_in_the_usual_shape(guarded, request_bytes):
    assert problem(exchange(guarded, request_bytes), 400)["type"] == "invalid_request_error"


def test_what_follows_a_good_request_does_not_spoil_its_answer(guarded):
    good = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
    answer = exchange(guarded, good + b"rubbish\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"hello" in answer


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_an_upgrade_is_declined_by_answering(guarded, upgrade):
    asked = f"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: {upgrade}\r\n\r\n"
    assert exchange(guarded, asked.encode()).startswith(b"HTTP/1.1 200 ")


SLOW = {
    "head": b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "body": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhel",
}


@pytest.mark.parametrize("start", SLOW.values(), ids=SLOW)
def test_the_rest_of_a_request_is_not_awaited_for_ever(impatient, start):
    assert problem(exchange(impatient, start), 408)["code"] == "request_timeout"


def test_trickled_headers_do_not_extend_their_deadline(impatient):
    with socket.create_connection(impatient, timeout=20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        connection.settimeout(0.05)
        answer = b""

        def answered() -> bool:
            nonlocal answer
            connection.sendall(b"a")
            with contextlib.suppress(TimeoutError):
                answer += connection.recv(65536)
            return bool(answer)

        wait_for(answered, 10, "the deadline")
    assert problem(answer, 408)["code"] == "request_timeout"


def test_a_connection_without_a_request_is_closed(impatient):
    assert exchange(impatient) == b""


def test_the_server_is_guarded(server):
    url = urlsplit(server.url)
    error = problem(exchange((url.hostname, url.port), b"GET / HTTP/1.1\r\nX: ", *[b"a" * 65536] * 4), 431)
    assert error["code"] == "headers_too_large"
