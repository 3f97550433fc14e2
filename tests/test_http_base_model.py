"""A base model behind a real server: no chat template, and tokens without weights. Both are said at the start."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.helpers.checkpoints import TINY, write_checkpoint
from tests.helpers.server import start_server

ROWS = TINY["vocab_size"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, "Llama")
    added = {str(ROWS): {"content": "<pad>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "pad_token": "<pad>"}))
    with start_server(str(folder), "--served-model-name", "base", "--dtype", "float32") as server:
        yield server


def post(server, route, **body) -> httpx.Response:
    return httpx.post(f"{server.url}{route}", json=body, timeout=60)


def test_the_start_says_that_there_is_no_template(base):
    (line,) = [line for line in base.output.splitlines() if line.strip().startswith("chat ")]
    assert "no chat template" in line
    assert "/v1/completions works" in line and "--chat-template" in line
    assert f"curl {base.url}/v1/completions" in base.output, "the line to copy is one that works"


def test_chat_says_what_to_do(base):
    for route in ("/v1/chat/completions", "/tokenize"):
        response = post(base, route, messages=[{"role": "user", "content": "w1"}])
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert "no chat template" in error["message"]
        assert "/v1/completions" in error["message"] and "--chat-template" in error["message"]


def test_completions_work(base):
    response = post(base, "/v1/completions", prompt="w1 w2 w3", max_tokens=4, ignore_eos=True, temperature=0)
    assert response.status_code == 200
    assert len(response.json()["choices"][0]["text"].split()) == 4


def test_the_start_names_tokens_without_weights(base):
    (line,) = [line for line in base.output.splitlines() if line.strip().startswith("vocabulary ")]
    assert f"{ROWS + 1} tokens" in line
    assert f"'<pad>' ({ROWS})" in line and "refused" in line


@pytest.mark.parametrize("prompt", ["w1 <pad> w2", [1, ROWS]], ids=["text", "ids"])
def test_a_prompt_with_such_a_token_is_refused_by_its_id(base, prompt):
    response = post(base, "/v1/completions", prompt=prompt, max_tokens=1)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "prompt"
    assert f"token id {ROWS}" in error["message"]


def test_a_template_given_at_the_start_makes_it_chat(base, tmp_path):
    """The same folder, told how to chat."""
    folder = next(line.split()[-1] for line in base.output.splitlines() if line.strip().startswith("model "))
    template = tmp_path / "words.jinja"
    template.write_text("{% for message in messages %}{{ message.content }} {% endfor %}{{ closing }}")
    with start_server(folder, "--chat-template", str(template), "--dtype", "float32") as server:
        (line,) = [line for line in server.output.splitlines() if line.strip().startswith("chat ")]
        assert "yes" in line and "closing" in line
        body = {"messages": [{"role": "user", "content": "w1 w2"}], "chat_template_kwargs": {"closing": "w9"}}
        response = post(server, "/v1/chat/completions", max_tokens=1, return_token_ids=True, **body)
        assert response.json()["prompt_token_ids"] == [1, 2, 9]
