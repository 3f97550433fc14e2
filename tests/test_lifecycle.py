"""What an operator does to a running server: kills, stops, drains, floods it. It answers, recovers or says why not."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.helpers.server import Server, cpu_ticks, is_alive, start_server, wait_for
from tests.helpers.streams import finish_of, streaming, text_of

SMALL = (
    "smollm2",
    "--max-model-len",
    "2048",
    "--max-num-seqs",
    "8",
    "--dtype",
    "float32",
    "--kv-cache-memory-bytes",
    "1G",
)
LONG = {"prompt": "Count: 1 2 3", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "Count: 1 2 3", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
COUNTERS = (
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:request_success_total",
)


@pytest.fixture(scope="module")
def running():
    """A server for the tests that leave it well."""
    with start_server(*SMALL, "--engine-stall-timeout", "1") as server:
        yield server


def complete(server: Server, **body) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**SHORT, **body}, timeout=120)


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def assert_none_went_down(server: Server, before: dict[str, float]) -> None:
    for name, value in before.items():
        assert server.metric(name) >= value, f"{name} went down"


def wait_healthy(server: Server) -> None:
    wait_for(lambda: server.health() == 200, 60, "the server to be well again")


def wait_running(server: Server, number: int) -> None:
    wait_for(lambda: server.metric("vllm:num_requests_running") == number, 30, f"{number} running requests")


def wait_exit(server: Server, deadline: float = 30) -> int:
    wait_for(lambda: server.process.poll() is not None, deadline, f"the server to exit; it printed:\n{server.output}")
    return server.process.returncode


def test_an_engine_killed_mid_stream_fails_its_requests_with_the_cause_and_comes_back(running):
    assert complete(running).status_code == 200
    wait_for(lambda: running.metric("vllm:generation_tokens_total") >= 8, 10, "the counters to move")
    before = {name: running.metric(name) for name in COUNTERS}
    first = running.engine_pid()
    with ThreadPoolExecutor() as pool, streaming(running.url, **LONG) as events:
        next(events)
        whole = pool.submit(complete, running, **LONG)
        wait_running(running, 2)
        os.kill(first, signal.SIGKILL)
        error = json.loads(list(events)[-1])["error"]
        assert error["code"] == "engine_dead"
        assert "SIGKILL" in error["message"]

        refused = whole.result()
        assert refused.status_code == 503
        assert error_of(refused)["code"] == "engine_dead"
        assert "SIGKILL" in error_of(refused)["message"]

    # Loading takes seconds; until then probes and new requests are told.
    health = httpx.get(f"{running.url}/health")
    assert (health.status_code, error_of(health)["code"]) == (503, "engine_dead")
    early = complete(running)
    assert (early.status_code, error_of(early)["code"]) == (503, "engine_dead")
    assert int(early.headers["retry-after"]) >= 1
    assert_none_went_down(running, before)

    wait_healthy(running)
    assert running.engine_pid() != first
    assert complete(running).status_code == 200
    assert_none_went_down(running, before)
    running.wait_idle()


def test_an_engine_that_does_not_answer_makes_health_fail_until_it_does(running):
    engine = running.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_for(lambda: running.health() == 503, 20, "/health to be 503")
        assert error_of(httpx.get(f"{running.url}/health"))["code"] == "engine_stalled"
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_healthy(running)
    assert running.engine_pid() == engine
    assert complete(running).status_code == 200


def test_an_engine_ignores_the_signals_meant_for_the_server(running):
    """A service manager signals every process of the service; a terminal's Ctrl-C too."""
    engine = running.engine_pid()
    with streaming(running.url, **{**SHORT, "max_tokens": 32}) as events:
        seen = [next(events)]
        os.kill(engine, signal.SIGTERM)
        os.kill(engine, signal.SIGINT)
        seen += events
    assert finish_of(seen) == "length"
    assert running.engine_pid() == engine


def test_an_idle_server_uses_no_cpu(running):
    running.wait_idle()
    pids = (running.process.pid, running.engine_pid())

    def ticks_in_two_seconds() -> list[int]:
        before = [cpu_ticks(pid) for pid in pids]
        end = time.monotonic() + 2
        wait_for(lambda: time.monotonic() > end, 10, "two seconds to pass")
        return [cpu_ticks(pid) - start for pid, start in zip(pids, before, strict=True)]

    # A few of the 200 there are: a thread pool may still be settling when this begins, so it may try again.
    wait_for(lambda: max(ticks_in_two_seconds()) <= 4, 30, "the processes to rest")
    assert (running.process.pid, running.engine_pid()) == pids


def test_a_broken_request_line_or_a_silent_connection_disturbs_nobody(running):
    import socket

    host, port = re.fullmatch(r"http://(.*):(\d+)", running.url).groups()
    with socket.create_connection((host, int(port))) as silent, socket.create_connection((host, int(port))) as rude:
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        rude.sendall(b"\x00\xff\x16\x03 nonsense\r\n\r\n")
        assert complete(running).status_code == 200
    running.wait_idle()


def test_an_engine_that_keeps_dying_ends_the_server_with_the_reason():
    with start_server(*SMALL) as server:
        killed: set[int] = set()

        def kill_what_is_there() -> bool:
            for pid in set(server.children()) - killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            return server.process.poll() is not None

        wait_for(kill_what_is_there, 60, "the server to give up")
        assert len(killed) == 4
        assert server.process.returncode == 1
        lines = server.output.strip().splitlines()[-3:]
        assert re.match(r"error: the engine died 4 times", lines[0])
        assert re.match(r"cause: .*SIGKILL", lines[1])
        assert lines[2].startswith("fix: ")
        assert "Traceback" not in server.output


def test_sigterm_lets_streams_finish_and_refuses_what_comes():
    with start_server(*SMALL, "--shutdown-timeout", "60") as server:
        engine = server.engine_pid()
        expected = complete(server, max_tokens=40).json()["choices"][0]["text"]
        with streaming(server.url, **{**SHORT, "max_tokens": 40}) as events:
            seen = [next(events)]
            # Held still, the stream cannot end before everything was looked at.
            os.kill(engine, signal.SIGSTOP)
            try:
                server.process.send_signal(signal.SIGTERM)
                wait_for(lambda: server.health() == 503, 10, "/health to be 503")
                health = httpx.get(f"{server.url}/health")
                assert error_of(health)["code"] == "shutting_down"
                for stream in (False, True):
                    refused = complete(server, stream=stream)
                    assert (refused.status_code, error_of(refused)["code"]) == (503, "shutting_down")
                    assert int(refused.headers["retry-after"]) >= 1
            finally:
                os.kill(engine, signal.SIGCONT)
            seen += events
        assert seen[-1] == "[DONE]"
        assert (finish_of(seen), text_of(seen)) == ("length", expected)
        assert wait_exit(server) == 0
        assert not is_alive(engine)
        assert "Traceback" not in server.output


def test_what_does_not_finish_in_time_is_ended_with_an_error():
    with start_server(*SMALL, "--shutdown-timeout", "1") as server:
        engine = server.engine_pid()
        with streaming(server.url, **LONG) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            error = json.loads(list(events)[-1])["error"]
        assert error["code"] == "shutting_down"
        assert "--shutdown-timeout" in error["message"]
        assert wait_exit(server) == 0
        assert not is_alive(engine)
        assert "Traceback" not in server.output


def test_an_engine_that_dies_while_the_server_drains_is_not_started_again():
    with start_server(*SMALL, "--shutdown-timeout", "600") as server:
        with streaming(server.url, **LONG) as events:
            next(events)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.health() == 503, 10, "/health to be 503")
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert json.loads(list(events)[-1])["error"]["code"] == "engine_dead"
        assert wait_exit(server) == 0
        assert server.output.count("the engine was restarted") == 0
        assert "Traceback" not in server.output


def test_a_signal_while_the_engine_restarts_stops_at_once():
    with start_server(*SMALL) as server:
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: server.health() == 503, 10, "the death to be noticed")
        wait_for(lambda: len(server.children()) == 1, 10, "the next engine process")
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        assert wait_exit(server) == 0
        wait_for(lambda: not is_alive(engine), 30, "the engine to follow its server")
        assert "Traceback" not in server.output


@pytest.mark.parametrize("stalled", [False, True], ids=["engine-well", "engine-stalled"])
def test_a_second_signal_stops_at_once(stalled):
    with start_server(*SMALL, "--shutdown-timeout", "600") as server:
        engine = server.engine_pid()
        with streaming(server.url, **LONG) as events:
            next(events)
            if stalled:
                os.kill(engine, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: server.health() == 503, 10, "/health to be 503")
            server.process.send_signal(signal.SIGTERM)
            assert wait_exit(server) == 0
        assert not is_alive(engine)
        assert "Traceback" not in server.output


def test_a_signal_while_the_model_loads_stops_at_once():
    for number in (signal.SIGTERM, signal.SIGINT):
        with (
            pytest.raises(AssertionError, match="the server ended"),
            start_server(*SMALL, on_spawn=stop_when_loading(number)),
        ):
            pass


def stop_when_loading(number: signal.Signals):
    def stop(server: Server) -> None:
        wait_for(lambda: len(server.children()) == 1, 30, "the engine process")
        engine = server.engine_pid()
        server.process.send_signal(number)
        assert wait_exit(server, 10) == 128 + number
        wait_for(lambda: not is_alive(engine), 30, "the engine to follow its server")
        assert "Traceback" not in server.output

    return stop


def test_an_engine_does_not_outlive_a_killed_server():
    with start_server(*SMALL) as server:
        engine = server.engine_pid()
        with streaming(server.url, **LONG) as events:
            next(events)
            server.process.kill()
            server.process.wait()
            wait_for(lambda: not is_alive(engine), 30, "the engine to follow its server")
        assert not is_alive(engine)


def test_a_full_queue_is_429_and_the_others_do_not_notice():
    with start_server("smollm2", "--max-model-len", "1024", "--max-num-seqs", "1", "--max-waiting", "1") as server:
        expected = complete(server, max_tokens=24).json()["choices"][0]["text"]
        engine = server.engine_pid()
        with (
            streaming(server.url, **{**SHORT, "max_tokens": 24}) as first,
            ThreadPoolExecutor() as pool,
        ):
            seen = [next(first)]
            second = pool.submit(complete, server, max_tokens=24)
            wait_for(lambda: httpx.get(f"{server.url}/load").json()["server_load"] == 2, 10, "both to be taken")
            os.kill(engine, signal.SIGSTOP)
            try:
                for stream in (False, True):
                    refused = complete(server, stream=stream)
                    assert (refused.status_code, error_of(refused)["code"]) == (429, "queue_full")
                    assert int(refused.headers["retry-after"]) >= 1
                assert "--max-waiting" in error_of(refused)["message"]
            finally:
                os.kill(engine, signal.SIGCONT)
            seen += first
            assert text_of(seen) == second.result().json()["choices"][0]["text"] == expected
        # What can never fit is not worth a retry.
        never = complete(server, n=3, temperature=1)
        assert (never.status_code, error_of(never)["param"]) == (400, "n")
        server.wait_idle()
        assert complete(server).status_code == 200
