"""The routes around generation: probes, version, load, tokenising, documentation that needs no network."""

from __future__ import annotations

import json
import re
from http.client import HTTPConnection

import httpx
import pytest

from tests.helpers.server import wait_for


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def wait_for_load(http: httpx.Client, wanted: int) -> None:
    wait_for(lambda: http.get("/load").json()["server_load"] == wanted, 30, f"a load of {wanted}")


def test_probes_answer_with_an_empty_200(http):
    for response in (http.get("/health"), http.get("/ping"), http.post("/ping")):
        assert response.status_code == 200
        assert response.content == b""


def test_probes_take_head(http):
    for path in ("/health", "/ping", "/version"):
        response = http.head(path)
        assert response.status_code == 200
        assert response.content == b""


def test_the_root_and_the_version_point_on(http):
    root = http.get("/").json()
    assert http.get(root["docs"]).status_code == 200
    assert http.get(root["models"]).status_code == 200
    assert http.get("/version").json() == {"version": root["version"]}


def test_text_goes_to_tokens_and_back(http):
    text = "Grüße, 世界! def f(x):\n    return x"
    made = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    assert made["max_model_len"] == 2048
    assert http.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": text}


def test_a_tokenised_chat_is_what_chat_sees(http):
    messages = [{"role": "user", "content": "Hello"}]
    made = http.post("/tokenize", json={"messages": messages}).json()
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, "return_token_ids": True})
    assert made["tokens"] == answer.json()["prompt_token_ids"]
    without = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert without["count"] < made["count"]


def test_the_documentation_loads_nothing_from_elsewhere(http):
    page = http.get("/docs").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert links
    for link in links:
        assert "//" not in link
        asset = http.get("/" + link)
        assert asset.status_code == 200
        if link.endswith(".css"):
            assert not re.search(r"url\((?![\"']?data:)", asset.text), "a style sheet may name files too"
    assert "default-src 'self'" in http.get("/docs").headers["content-security-policy"]
    start = http.get("/docs/start.js").text
    assert 'url: "openapi.json"' in start
    assert "//" not in start
    assert "validatorUrl: null" in start
    assert http.get("/openapi.json").json()["openapi"].startswith("3.")


def test_the_documentation_reads_the_description_it_is_given(http):
    """Swagger UI before 5 shows OpenAPI 3.1 as an error."""
    assert http.get("/openapi.json").json()["openapi"].startswith("3.1")
    assert "isOAS31" in http.get("/docs/swagger-ui-bundle.js").text


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("prompt", ["Count: 1 2 3", ["Count: 1", "Count: 2"]], ids=["one", "several"])
def test_a_client_that_leaves_ends_its_work(http, server, stream, prompt):
    body = {"prompt": prompt, "max_tokens": 1900, "ignore_eos": True, "stream": stream, "temperature": 0}
    wait_for_load(http, 0)
    leaving = HTTPConnection(http.base_url.host, http.base_url.port)
    leaving.request("POST", "/v1/completions", body=json.dumps(body))
    if stream:
        assert leaving.getresponse().readline().startswith(b"data: ")
    wait_for_load(http, 1 if isinstance(prompt, str) else 2)
    leaving.close()
    wait_for_load(http, 0)
    server.wait_idle()


def test_browsers_may_call_from_anywhere(http):
    preflight = {"Origin": "http://example.org", "Access-Control-Request-Method": "POST"}
    response = http.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "*"
    response = http.get("/v1/models", headers={"Origin": "http://example.org"})
    assert response.headers["access-control-allow-origin"] == "*"
    assert "X-Request-Id" in response.headers["access-control-expose-headers"]
