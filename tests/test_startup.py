"""Starts that cannot succeed: each ends at once, non-zero, and its last lines say what failed, why and what to type."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.server import is_alive, run_tidemill, start_server, wait_for
from tidemill.weights.location import locate


@pytest.fixture(scope="module")
def gguf() -> Path:
    return locate("smollm2").path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, "Llama")
    return folder


def refused(*args: str, **kwargs) -> tuple[str, str, str]:
    """The three lines that end a failed `tidemill serve ARGS`."""
    ended = run_tidemill("serve", *args, "--port", "0", **kwargs)
    return three_lines(ended)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def three_lines(ended: subprocess.CompletedProcess[str]) -> tuple[str, str, str]:
    assert ended.returncode == 1
    assert "tidemill is ready" not in ended.stdout
    found = re.search(r"^error: (.+)\ncause: (.+)\nfix:   (.+)\n\Z", ended.stderr, re.M)
    assert found, ended.stderr
    return found[1], found[2], found[3]


def test_a_model_that_is_not_there(tmp_path):
    error, cause, _ = refused("./no-such-model")
    assert "no-such-model" in error and "nothing exists" in cause
    error, _, fix = refused("org/nothing", env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)})
    assert "org/nothing" in error and "HF_HUB_OFFLINE" in fix


def test_a_context_longer_than_the_model():
    error, _, fix = refused("smollm2", "--max-model-len", "100k")
    assert "100000" in error and fix == "--max-model-len 8192"


def test_a_context_longer_than_the_cache():
    error, cause, fix = refused("smollm2", "--max-model-len", "8192", "--kv-cache-memory-bytes", "10M")
    assert "max_model_len 8192" in error and "GiB" in cause
    length = re.fullmatch(r"--max-model-len (\d+), or --kv-cache-memory-bytes \d+", fix)[1]
    assert 0 < int(length) < 8192


def test_a_cache_larger_than_memory():
    error, cause, fix = refused("smollm2", "--kv-cache-memory-bytes", "4T")
    assert "4096.00 GiB" in error and "available" in cause
    assert re.fullmatch(r"--kv-cache-memory-bytes \d+", fix)


@pytest.mark.parametrize("size", [0, 100, 1_000_000])
def test_a_gguf_that_was_cut_short(gguf, tmp_path, size):
    cut = tmp_path / "cut.gguf"
    with gguf.open("rb") as whole:
        cut.write_bytes(whole.read(size))
    error, _, fix = refused(str(cut))
    assert "cut.gguf" in error and "again" in fix


def test_a_gguf_that_is_not_one(tmp_path):
    junk = tmp_path / "junk.gguf"
    junk.write_bytes(b"not a model at all" * 100)
    error, _, _ = refused(str(junk))
    assert "junk.gguf" in error


def test_safetensors_that_were_cut_short(tiny, tmp_path):
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    error, _, _ = refused(str(tmp_path))
    assert "model.safetensors" in error


def test_an_engine_that_cannot_import_torch(tmp_path):
    stub = tmp_path / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: no such file')")
    error, cause, fix = refused("smollm2", env={"PYTHONPATH": str(tmp_path)})
    assert "import" in error
    assert "libtorch_cpu.so: no such file" in cause
    assert "pip install" in fix


def test_an_engine_that_dies_while_it_loads(tmp_path):
    stub = tmp_path / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    error, cause, _ = refused("smollm2", env={"PYTHONPATH": str(tmp_path)})
    assert "did not start" in error
    assert "SIGKILL" in cause and "memory runs out" in cause


def test_the_last_words_of_an_engine_are_kept_however_long(tmp_path):
    stub = tmp_path / "torch"
    stub.mkdir()
    (stub / "__init__.py").write_text(
        "import os, sys; sys.stderr.write('x' * 300_000 + ' the last words'); sys.stderr.flush(); os._exit(3)"
    )
    _, cause, _ = refused("smollm2", env={"PYTHONPATH": str(tmp_path)})
    assert "code 3" in cause and cause.endswith("the last words")
    assert len(cause) < 1000


def test_the_engine_imports_nothing_from_the_folder_it_is_started_in(tmp_path):
    """A folder of someone's checkpoints may hold a torch.py; it is no part of the engine."""
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    (tmp_path / "socket.py").write_text("raise SystemExit('the wrong socket')")
    script = Path(sys.executable).with_name("tidemill")
    ended = subprocess.run(
        [script, "complete", "Hello", "--max-tokens", "1"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    with start_server("smollm2", "--max-model-len", "256", cwd=tmp_path, program=[str(script)]) as server:
        assert server.health() == 200


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_tidemill("serve", "smollm2", "--port", str(port))
    error, cause, fix = three_lines(ended)
    assert str(port) in error and "in use" in cause and "--port" in fix
    # Told before anything was loaded.
    assert "loading" not in ended.stderr


def test_a_port_that_another_server_takes_while_the_model_loads():
    port = free_port()

    def take(server) -> None:
        """Both have bound the port, neither listens yet."""
        wait_for(lambda: len(server.children()) == 1, 60, "the engine process")
        rival = socket.socket()
        rival.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rival.bind(("127.0.0.1", port))
        rival.listen()
        engine = server.engine_pid()
        wait_for(lambda: server.process.poll() is not None, 60, "the server to give up")
        rival.close()
        assert server.process.returncode == 1
        assert re.search(r"error: cannot listen on .*\ncause: .*in use.*\nfix: ", server.output)
        assert "tidemill is ready" not in server.output
        wait_for(lambda: not is_alive(engine), 30, "the engine to end")

    with pytest.raises(AssertionError, match="the server ended"), start_server("smollm2", port=port, on_spawn=take):
        pass


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "203.0.113.1"], "--host"),
        (["--api-key", ""], "everybody"),
        (["--ssl-certfile", "/nowhere.pem"], "/nowhere.pem"),
        (["--ssl-certfile", __file__], "certificate"),
        (["--chat-template", "/nowhere.jinja"], "/nowhere.jinja"),
        (["--uds", __file__], "not a socket"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_said_of_other_wrong_settings(flags, words):
    assert words in " ".join(refused("smollm2", *flags))
    assert Path(__file__).exists()


def test_an_unknown_log_level_is_refused():
    assert "loud" in refused("smollm2", env={"TIDEMILL_LOG_LEVEL": "loud"})[0]
