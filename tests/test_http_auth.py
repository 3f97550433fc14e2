"""A server with keys, little room and a log: only probes are open, batches fit or do not, and lines stay lines."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.helpers.server import start_server, wait_for

OPEN = ["/", "/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json"]
GUARDED = [
    ("GET", "/v1/models"),
    ("GET", "/load"),
    ("GET", "/nowhere"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


@pytest.fixture(scope="module")
def guarded():
    keys = ("--api-key", "first-key", "--api-key", "second-key")
    room = ("--max-num-seqs", "4", "--max-waiting", "4", "--max-model-len", "512")
    with start_server("smollm2", *room, "--root-path", "/mill", "--enable-log-requests", *keys) as server:
        yield server


@pytest.fixture(scope="module")
def http(guarded):
    with httpx.Client(base_url=guarded.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", OPEN)
def test_probes_and_documentation_are_open(http, path):
    assert http.get(path).status_code == 200


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer first-key-and-more"},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": b"Bearer f\xefrst-key"},
    ],
    ids=["none", "wrong", "longer", "blank", "basic", "bare", "latin"],
)
def test_everything_else_is_401_without_a_key(http, method, path, headers):
    response = http.request(method, path, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("key", ["first-key", "second-key"])
def test_each_key_opens(http, key):
    assert http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_a_wrong_key_is_the_clients_typed_exception(guarded):
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_a_preflight_needs_no_key(http):
    headers = {
        "Origin": "http://example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    assert http.options("/v1/chat/completions", headers=headers).status_code == 200


def test_a_refusal_can_be_read_by_a_browser(http):
    response = http.get("/v1/models", headers={"Origin": "http://example.org"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "*"


def test_a_batch_that_never_fits_is_no_matter_of_retrying(http):
    key = {"Authorization": "Bearer first-key"}
    body = {"prompt": ["One", "Two", "Three"], "n": 3, "max_tokens": 1, "temperature": 1}
    response = http.post("/v1/completions", headers=key, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert "9" in response.json()["error"]["message"]
    assert "8" in response.json()["error"]["message"]
    assert http.post("/v1/completions", headers=key, json=body | {"n": 2}).status_code == 200


def test_a_batch_that_does_not_fit_now_is_not_begun(guarded, http):
    key = {"Authorization": "Bearer first-key"}
    long = {"prompt": ["One", "Two"], "n": 2, "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 1}
    with http.stream("POST", "/v1/completions", headers=key, json=long) as running:
        lines = running.iter_lines()
        next(lines)
        # A step's numbers come with its tokens, and the second prompt's first step may be the next one.
        while guarded.metric("vllm:generation_tokens_total") < 40:
            next(lines)
        before = guarded.metric("vllm:prompt_tokens_total")
        response = http.post("/v1/completions", headers=key, json={"prompt": ["x"] * 5, "max_tokens": 1})
        assert response.status_code == 429
        assert response.headers["retry-after"]
        assert guarded.metric("vllm:prompt_tokens_total") == before


def test_the_log_tells_of_each_request(guarded, http):
    headers = {"Authorization": "Bearer first-key", "X-Request-Id": "logged-1"}
    labels = {"user": "a\nb", "prompt_cache_key": "shelf", "metadata": {"run": "7"}}
    body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True, **labels}
    assert http.post("/v1/completions", headers=headers, json=body).status_code == 200
    wait_for(lambda: "logged-1 POST" in guarded.output, 10, "the line about the request")
    lines = [line for line in guarded.output.splitlines() if "logged-1" in line]
    assert any("prompt tokens 3, completion tokens 2, finish length" in line for line in lines)
    assert any("'user': 'a\\nb'" in line and "'shelf'" in line and "'run': '7'" in line for line in lines)
    assert any("POST /v1/completions -> 200" in line for line in lines)


def test_a_path_cannot_write_lines_into_the_log(guarded, http):
    http.get("/nowhere%0AINFO%20forged:%20line%0D%1B[31m")
    wait_for(lambda: "/nowhere%0AINFO%20forged" in guarded.output, 10, "the line about the request")
    assert not any(line.startswith("INFO forged") for line in guarded.output.splitlines())
    assert "\x1b[31m" not in guarded.output


def test_the_root_path_works_with_and_without_the_prefix(http):
    key = {"Authorization": "Bearer first-key"}
    for prefix in ("", "/mill"):
        assert http.get(f"{prefix}/health").status_code == 200
        assert http.get(f"{prefix}/docs/swagger-ui.css").status_code == 200
        assert http.get(f"{prefix}/v1/models").status_code == 401
        assert http.get(f"{prefix}/v1/models", headers=key).status_code == 200
    assert http.get("/openapi.json").json()["servers"] == [{"url": "/mill"}]
