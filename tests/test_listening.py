"""Where a server listens and who may talk to it: TLS and its renewal, a Unix socket, keys, names, a path prefix."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.helpers.server import run_tidemill, start_server, wait_for

SMALL = ("smollm2", "--max-model-len", "64", "--max-num-seqs", "2")
BODY = {"prompt": "Hello", "max_tokens": 2}
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl runs the line")


def make_certificate(folder: Path, name: str) -> None:
    """A self-signed certificate for 127.0.0.1, put in place the way renewal tools do."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "new.key"), "-out", str(folder / "new.pem")]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "new.key").replace(folder / "server.key")
    (folder / "new.pem").replace(folder / "server.pem")


def curl_line(output: str) -> str:
    """The line the start-up report offers for copying."""
    found = re.search(r"^  (curl .*\\\n.*)$", output, re.M)
    assert found, output
    return found[1]


def run_line(line: str, env: dict[str, str] | None = None) -> str:
    ended = subprocess.run(
        ["sh", "-c", line], env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@needs_openssl
@needs_curl
def test_tls_and_a_renewed_certificate(tmp_path):
    make_certificate(tmp_path, "first")
    pair = ("--ssl-certfile", str(tmp_path / "server.pem"), "--ssl-keyfile", str(tmp_path / "server.key"))
    with start_server(*SMALL, *pair, "--enable-ssl-refresh") as server:
        host, port = re.fullmatch(r"https://(.*):(\d+)", server.url).groups()
        first = ssl.get_server_certificate((host, int(port)))
        trust = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, verify=trust).status_code == 200
        assert "choices" in run_line(curl_line(server.output))

        # A key without its certificate is a renewal half done: the old pair stays in use until it is whole.
        good = (tmp_path / "server.key").read_bytes()
        (tmp_path / "server.key").write_text("half written")
        wait_for(lambda: "the old ones stay" in server.output, 30, "the broken key to be told")
        assert ssl.get_server_certificate((host, int(port))) == first
        (tmp_path / "server.key").write_bytes(good)

        make_certificate(tmp_path, "second")
        wait_for(lambda: ssl.get_server_certificate((host, int(port))) != first, 30, "the new certificate")
        trust = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
        assert httpx.get(f"{server.url}/health", verify=trust).status_code == 200


@needs_openssl
def test_a_key_that_does_not_belong_to_the_certificate_is_refused(tmp_path):
    make_certificate(tmp_path, "first")
    (tmp_path / "server.pem").rename(tmp_path / "old.pem")
    make_certificate(tmp_path, "second")
    files = ("--ssl-certfile", str(tmp_path / "old.pem"), "--ssl-keyfile", str(tmp_path / "server.key"))
    ended = run_tidemill("serve", *SMALL, *files, "--port", "0")
    assert ended.returncode == 1
    assert re.search(r"error: the TLS certificate .*\ncause: .*mismatch.*\nfix: ", ended.stderr, re.I)


@needs_curl
def test_a_unix_socket(tmp_path):
    path = tmp_path / "mill.sock"
    # What a killed server left behind is no obstacle.
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with start_server(*SMALL, "--uds", str(path)) as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
            assert client.post("/v1/completions", json=BODY, timeout=60).status_code == 200
        assert "choices" in run_line(curl_line(server.output))
        second = run_tidemill("serve", *SMALL, "--uds", str(path))
        assert second.returncode == 1
        assert re.search(r"cause: another server listens there\nfix: .*--uds", second.stderr)
        assert server.stop() == 0
    assert not path.exists()


@needs_curl
@pytest.mark.parametrize("variable", ["TIDEMILL_API_KEY", "VLLM_API_KEY"])
def test_a_key_from_the_environment(variable):
    key = {variable: "s3cret with $pace"}
    with start_server(*SMALL, env=key) as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        header = {"Authorization": f"Bearer {key[variable]}"}
        assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 200
        assert key[variable] not in server.output
        assert "choices" in run_line(curl_line(server.output), env=key)


@needs_curl
def test_names_and_a_path_prefix():
    names = ("it's", 'a "mill"')
    with start_server(*SMALL, "--root-path", "/mill", "--served_model_name", *names) as server:
        listed = httpx.get(f"{server.url}/mill/v1/models").json()["data"]
        assert tuple(model["id"] for model in listed) == names
        for name in names:
            answer = httpx.post(f"{server.url}/v1/completions", json={**BODY, "model": name}, timeout=60)
            assert answer.json()["model"] == name
        unknown = httpx.post(f"{server.url}/v1/completions", json={**BODY, "model": "smollm2"})
        assert unknown.status_code == 404
        assert all(name in unknown.json()["error"]["message"] for name in names)
        assert "choices" in run_line(curl_line(server.output))
