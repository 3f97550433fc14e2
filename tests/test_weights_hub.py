"""The hub, driven through huggingface_hub against a small hub on localhost: what is fetched, and each way to fail."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPOS = {
    "org/folder": {
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "pytorch_model.bin": b"pickle",
        "original/consolidated.safetensors": b"twice",
    },
    "org/one-gguf": {"README.md": b"", "model-Q4_K_M.gguf": b"gguf", "config.json": b"{}"},
    "org/split-gguf": {f"q/m-Q8_0-0000{part}-of-00002.gguf": b"%d" % part for part in (1, 2)},
    "org/many-ggufs": {"m-Q4_K_M.gguf": b"q4", "m-Q8_0.gguf": b"q8"},
    "org/pickle": {
        "config.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "training_args.bin": b"x",
        "optimizer.pt": b"x",
    },
}


class Hub(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.answer(with_body=False)

    def do_GET(self):
        self.answer(with_body=True)

    def log_message(self, *args):
        pass

    def answer(self, with_body: bool):
        path = unquote(self.path.split("?")[0]).strip("/")
        parts = path.removeprefix("api/models/").split("/")
        repo = "/".join(parts[:2])
        if repo == "org/gated":
            return self.refuse(403, "GatedRepo")
        if repo not in REPOS:
            return self.refuse(401, "RepoNotFound")
        revision = {"revision": 3, "tree": 3, "resolve": 3}.get(parts[2] if len(parts) > 2 else "")
        if revision and parts[revision] not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        files = REPOS[repo]
        if not path.startswith("api/"):
            return self.send_file(files, "/".join(parts[4:]), with_body)
        if len(parts) > 2 and parts[2] == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            return self.send_json(tree)
        siblings = [{"rfilename": name} for name in files]
        return self.send_json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings})

    def send_json(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, files, name, with_body):
        if name not in files:
            return self.refuse(404, "EntryNotFound")
        body = files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"refused: {code}")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture(scope="module")
def hub():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


LOCATE = """
import json, sys
from tidemill.errors import TidemillError
from tidemill.weights.location import locate
told = []
try:
    if sys.argv[3] == "no weights":
        files = locate(sys.argv[1], revision=json.loads(sys.argv[2]), weights=False)
    else:
        files = locate(sys.argv[1], revision=json.loads(sys.argv[2]), on_progress=lambda *step: told.append(step))
    found = sorted(str(p.relative_to(files.path)) for p in files.path.rglob("*") if p.is_file())
    print(json.dumps({"kind": files.kind, "path": str(files.path), "files": found, "told": told}))
except TidemillError as error:
    print(json.dumps(error.as_dict()))
"""


def locate_in_process(
    home: Path, endpoint: str, model: str, revision: str | None = None, what: str = "model", **environment: str
) -> dict:
    """huggingface_hub reads its environment at import, so each case is a process of its own."""
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", **environment}
    run = subprocess.run(
        [sys.executable, "-c", LOCATE, model, json.dumps(revision), what],
        env={**clean, **settings},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_a_folder_brings_weights_config_and_tokenizer_but_no_pickles_or_copies(hub, tmp_path):
    found = locate_in_process(tmp_path, hub, "org/folder")
    assert found["kind"] == "folder"
    assert found["files"] == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert all(done <= total for _, done, total in found["told"])


def test_what_is_cached_works_offline(hub, tmp_path):
    online = locate_in_process(tmp_path, hub, "org/folder")
    offline = locate_in_process(tmp_path, hub, "org/folder", HF_HUB_OFFLINE="1")
    assert offline["path"] == online["path"]


def test_all_but_the_weights(hub, tmp_path):
    found = locate_in_process(tmp_path, hub, "org/folder", what="no weights")
    assert found["files"] == ["chat_template.jinja", "config.json", "tokenizer.json"]
    error = locate_in_process(tmp_path, hub, "org/typo", what="no weights")
    assert "does not exist" in error["message"]


def test_the_only_gguf_of_a_repository_is_taken(hub, tmp_path):
    found = locate_in_process(tmp_path, hub, "org/one-gguf")
    assert found["kind"] == "gguf"
    assert Path(found["path"]).read_bytes() == b"gguf"


@pytest.mark.parametrize("name", ["org/many-ggufs:m-Q8_0.gguf", "org/many-ggufs:Q8_0"])
def test_one_gguf_by_file_name_or_by_quantisation(hub, tmp_path, name):
    found = locate_in_process(tmp_path, hub, name)
    assert Path(found["path"]).read_bytes() == b"q8"


@pytest.mark.parametrize("name", ["org/split-gguf", "org/split-gguf:Q8_0"])
def test_all_parts_of_a_split_gguf_are_fetched(hub, tmp_path, name):
    path = Path(locate_in_process(tmp_path, hub, name)["path"])
    assert path.name == "m-Q8_0-00001-of-00002.gguf"
    assert sorted(part.read_bytes() for part in path.parent.iterdir()) == [b"1", b"2"]


def test_of_several_ggufs_one_must_be_named(hub, tmp_path):
    error = locate_in_process(tmp_path, hub, "org/many-ggufs")
    assert error["kind"] == "ModelUnavailable"
    assert error["fix"] == "name one: org/many-ggufs:m-Q4_K_M.gguf"


def test_a_gguf_that_is_not_there(hub, tmp_path):
    error = locate_in_process(tmp_path, hub, "org/many-ggufs:other.gguf")
    assert "has no file other.gguf" in error["message"]


def test_pickles_are_fetched_where_there_is_nothing_better_but_no_training_leftovers(hub, tmp_path):
    found = locate_in_process(tmp_path, hub, "org/pickle")
    assert (found["kind"], found["files"]) == ("folder", ["config.json", "pytorch_model.bin"])


def test_a_gated_model_asks_for_terms_and_token(hub, tmp_path):
    error = locate_in_process(tmp_path, hub, "org/gated")
    assert "gated" in error["message"]
    assert "HF_TOKEN" in error["fix"]
    assert f"{hub}/org/gated" in error["fix"]


def test_a_missing_model_asks_for_the_spelling(hub, tmp_path):
    error = locate_in_process(tmp_path, hub, "org/typo")
    assert "does not exist" in error["message"]
    assert "spelling" in error["fix"]


def test_a_missing_revision_is_named(hub, tmp_path):
    error = locate_in_process(tmp_path, hub, "org/folder", revision="v9")
    assert "no revision 'v9'" in error["message"]


def test_offline_without_a_copy(hub, tmp_path):
    error = locate_in_process(tmp_path, hub, "org/folder", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in error["message"]
    assert "hf download org/folder" in error["fix"]


def test_an_unreachable_hub(tmp_path):
    error = locate_in_process(tmp_path, "http://127.0.0.1:9", "org/folder")
    assert "cannot be reached" in error["message"]
    assert "network" in error["fix"]
