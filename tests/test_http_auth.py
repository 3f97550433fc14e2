"""A server with keys: probes stay open, everything else needs one of the keys."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.helpers.server import start_server

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
    with start_server("smollm2", "--max-model-len", "512", "--root-path", "/mill", *keys) as server:
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


def test_the_root_path_works_with_and_without_the_prefix(http):
    key = {"Authorization": "Bearer first-key"}
    for prefix in ("", "/mill"):
        assert http.get(f"{prefix}/health").status_code == 200
        assert http.get(f"{prefix}/docs/swagger-ui.css").status_code == 200
        assert http.get(f"{prefix}/v1/models").status_code == 401
        assert http.get(f"{prefix}/v1/models", headers=key).status_code == 200
    assert http.get("/openapi.json").json()["servers"] == [{"url": "/mill"}]
