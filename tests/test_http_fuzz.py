"""Schemathesis over `/openapi.json`: whatever is sent, the answer is one the description announces, never a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.schemas import BaseSchema

PLAIN = ["/", "/health", "/ping", "/version", "/load", "/metrics", "/v1/models"]
GENERATES = ["/v1/chat/completions", "/v1/completions"]
TAKES_A_BODY = [*GENERATES, "/tokenize", "/detokenize"]
BY_NAME = "/v1/models/{model_id}"
MAX_TOKENS, MAX_CHOICES = 4, 2
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def api(server) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def shortened(body: Any) -> Any:
    """The same request, asking for little: fuzzing is about the shape of the answers, not about long texts."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    # Nearly every random name is an unknown model, which would hide everything else behind one 404.
    if isinstance(body.get("model"), str):
        del body["model"]
    for name, most in (("max_tokens", MAX_TOKENS), ("max_completion_tokens", MAX_TOKENS), ("n", MAX_CHOICES)):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(body[name], most)
    if body.get("max_completion_tokens") is None:
        body.setdefault("max_tokens", MAX_TOKENS)
    return body


def fuzz(api: BaseSchema, method: str, path: str, mode: GenerationMode, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        if path in GENERATES:
            case.body = shortened(case.body)
        case.call_and_validate(checks=CHECKS, timeout=120)

    send()


def test_every_route_is_fuzzed(api):
    described = {result.ok().path for result in api.get_all_operations()}
    assert described == {*PLAIN, *TAKES_A_BODY, BY_NAME}


@pytest.mark.parametrize("path", PLAIN)
def test_plain_routes_answer_as_described(api, path):
    fuzz(api, "GET", path, GenerationMode.POSITIVE, examples=2)


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", TAKES_A_BODY)
def test_bodies_are_answered_as_described(api, path, mode):
    fuzz(api, "POST", path, mode, examples=60)


def test_any_model_name_is_answered_as_described(api):
    fuzz(api, "GET", BY_NAME, GenerationMode.POSITIVE, examples=30)
