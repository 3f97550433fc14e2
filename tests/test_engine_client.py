"""The client with the engine in a thread: the same interface as over a process, without sockets or msgspec."""

from __future__ import annotations

import asyncio

import pytest

from tests.helpers.checkpoints import greedy, write_checkpoint
from tidemill.config import EngineArgs
from tidemill.core.params import SamplingParams
from tidemill.engine.client import EngineClient
from tidemill.engine.links import ProcessLink, ThreadLink
from tidemill.engine.messages import GenerateRequest
from tidemill.engine.prepare import prepare
from tidemill.errors import InvalidRequest, QueueFull, ShuttingDown


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_checkpoint(folder, "Llama"), str(folder)


def with_client(checkpoint, work, link=ThreadLink):
    """Run `work(client, model)` against a fresh engine."""
    model, folder = checkpoint

    async def run():
        prepared = prepare(EngineArgs(model=folder, dtype="float32", max_num_seqs=4, max_waiting=4))
        client = EngineClient(prepared.config, prepared.tokenizer, make_link=link)
        await client.start()
        try:
            return await work(client, model)
        finally:
            await client.close()

    return asyncio.run(run())


def ask(name: str, prompt: list[int], **params) -> GenerateRequest:
    settings = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params}
    return GenerateRequest(name, prompt, SamplingParams(**settings))


async def collect(client: EngineClient, request: GenerateRequest) -> list[int]:
    return [token async for delta in client.generate(request) for token in delta.token_ids]


async def until_idle(client: EngineClient) -> None:
    for _ in range(500):
        if client.stats.running == client.stats.waiting == 0 and client.stats.kv_usage == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the engine is still busy: {client.stats}")


@pytest.mark.parametrize("link", [ThreadLink, ProcessLink])
def test_many_at_once_get_what_transformers_gives(checkpoint, link):
    prompts = [[i + 1, i + 2, i + 3] for i in range(6)]

    async def work(client, model):
        found = await asyncio.gather(*(collect(client, ask(str(i), p)) for i, p in enumerate(prompts)))
        assert found == [greedy(model, prompt, 12) for prompt in prompts]
        client.check_health()
        await until_idle(client)

    with_client(checkpoint, work, link)


def test_leaving_early_aborts_in_the_engine(checkpoint):
    async def work(client, model):
        deltas = client.generate(ask("a", [1, 2, 3], max_tokens=100))
        await anext(deltas)
        assert client.num_in_flight == 1
        await deltas.aclose()
        assert client.num_in_flight == 0
        await until_idle(client)

    with_client(checkpoint, work)


def test_room_is_checked_before_anything_starts(checkpoint):
    async def work(client, model):
        client.check_room(8)
        with pytest.raises(InvalidRequest, match=r"9 sequences.*at most 8"):
            client.check_room(9)
        deltas = client.generate(ask("a", [1], max_tokens=100, n=8))
        await anext(deltas)
        with pytest.raises(QueueFull, match="limit is 8"):
            await collect(client, ask("b", [1]))
        await deltas.aclose()
        assert len(await collect(client, ask("c", [1]))) == 12

    with_client(checkpoint, work)


def test_draining_refuses_new_requests_and_lets_running_ones_finish(checkpoint):
    async def work(client, model):
        running = asyncio.create_task(collect(client, ask("a", [1, 2], max_tokens=40)))
        while not client.num_in_flight:
            await asyncio.sleep(0)
        draining = asyncio.create_task(client.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown):
            await collect(client, ask("b", [1]))
        assert await draining and len(await running) == 40

    with_client(checkpoint, work)
