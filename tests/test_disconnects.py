"""Clients that leave: whatever they did, their work ends, their blocks come back, and the others do not notice.

The soak runs for TIDEMILL_SOAK_SECONDS (20 unless set), a third of it to warm up; memory is compared at rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
import pytest

from tests.helpers.server import Server, private_bytes, start_server, wait_for

SOAK_SECONDS = float(os.environ.get("TIDEMILL_SOAK_SECONDS", "20"))
CLIENTS = 64
MIB = 2**20
GROWTH = 64 * MIB
"""What allocators and caches may still gain once warm; a leak grows with every request."""
LONG = {"prompt": "Count: 1 2 3", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server():
    flags = ("--max-model-len", "1024", "--max-num-seqs", "32", "--dtype", "float32", "--kv-cache-memory-bytes", "512M")
    with start_server("smollm2", *flags) as running:
        yield running


@dataclass
class Tally:
    finished: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)


def test_64_streams_with_random_disconnects(server):
    pids = (server.process.pid, server.engine_pid())
    tally = Tally()
    asyncio.run(soak(server, SOAK_SECONDS / 3, tally))
    server.wait_idle(60)
    warm = [private_bytes(pid) for pid in pids]
    asyncio.run(soak(server, SOAK_SECONDS * 2 / 3, tally))
    server.wait_idle(60)
    growth = [private_bytes(pid) - before for pid, before in zip(pids, warm, strict=True)]

    print(
        f"\n{tally.finished} finished, {tally.left} left; grown since warm: {[round(g / MIB, 1) for g in growth]} MiB"
    )
    assert not tally.errors, tally.errors[:5]
    assert tally.finished > 0
    assert tally.left > 0
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    assert max(growth) < GROWTH, f"server and engine grew by {growth} bytes"
    assert pids[1] == server.engine_pid(), "the engine was restarted"
    assert "Traceback" not in server.output


async def soak(server: Server, seconds: float, tally: Tally) -> None:
    end = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        chances = [random.Random(number) for number in range(CLIENTS)]
        await asyncio.gather(*(keep_asking(client, chance, end, tally) for chance in chances))


async def keep_asking(client: httpx.AsyncClient, chance: random.Random, end: float, tally: Tally) -> None:
    while time.monotonic() < end:
        leaves_after = chance.choice([0, 1, 3, 8, None])
        try:
            # Who would leave anyway leaves when time is up; who reads to the end gets the whole answer.
            async with asyncio.timeout_at(None if leaves_after is None else loop_time(end)):
                await ask(client, chance, leaves_after, tally)
        except TimeoutError:
            tally.left += 1


def loop_time(moment: float) -> float:
    return asyncio.get_running_loop().time() + moment - time.monotonic()


async def ask(client: httpx.AsyncClient, chance: random.Random, leaves_after: int | None, tally: Tally) -> None:
    """One stream, read to its end or left after so many events."""
    wanted = chance.randint(2, 16)
    body = {
        "prompt": " ".join(str(chance.randint(0, 99)) for _ in range(chance.choice([1, 3, 8, 40]))),
        "max_tokens": wanted if leaves_after is None else 200,
        "n": chance.choice([1, 1, 1, 2]),
        "temperature": chance.choice([0, 1]),
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if leaves_after == 0:
        # Before the first token: while it waits or while its prompt is computed.
        try:
            await asyncio.wait_for(client.post("/v1/completions", json=body), timeout=chance.uniform(0.01, 0.5))
        except TimeoutError:
            tally.left += 1
        return
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            tally.errors.append(f"{response.status_code} {(await response.aread()).decode()}")
            return
        events = [line async for line in first_events(response, leaves_after)]
    if leaves_after is not None:
        tally.left += 1
    elif error := what_is_wrong(events, wanted * body["n"]):
        tally.errors.append(error)
    else:
        tally.finished += 1


async def first_events(response: httpx.Response, number: int | None):
    seen = 0
    async for line in response.aiter_lines():
        if line:
            yield line.removeprefix("data: ")
            seen += 1
        if seen == number:
            return


def what_is_wrong(events: list[str], num_tokens: int) -> str | None:
    """Why these are not the events of a whole answer of so many tokens; None if they are."""
    if events[-1] != "[DONE]":
        return f"the last event is {events[-1]}"
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return events[-2]
    used = chunks[-1]["usage"]["completion_tokens"]
    return None if used == num_tokens else f"{used} tokens, {num_tokens} were asked for"


def wait_load(server: Server, number: int) -> None:
    wait_for(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == number, 30, f"a load of {number}")


def raw_post(server: Server, body: dict) -> socket.socket:
    address = urlsplit(server.url)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_work_ends_with_its_connection(server, stream, how):
    wait_load(server, 0)
    connection = raw_post(server, {**LONG, "stream": stream})
    wait_load(server, 1)
    wait_for(lambda: server.metric("vllm:num_requests_running") == 1, 30, "the request to run")
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_load(server, 0)
    server.wait_idle()
    assert server.metric("vllm:num_requests_running") == 0


def test_a_reader_that_does_not_read_holds_up_nobody(server):
    """Its stream fills the buffers on the way; the others go on, and it ends when it leaves."""
    wait_load(server, 0)
    connection = raw_post(server, {**LONG, "stream": True, "n": 4, "temperature": 1, "logprobs": 5})
    wait_load(server, 1)
    answer = httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 8}, timeout=120)
    assert answer.status_code == 200
    connection.close()
    wait_load(server, 0)
    server.wait_idle()


def test_a_client_that_leaves_while_its_body_is_on_the_way(server):
    address = urlsplit(server.url)
    for _ in range(20):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n{"prompt"')
    wait_load(server, 0)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "Traceback" not in server.output
