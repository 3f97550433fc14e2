"""Schemathesis over `/openapi.json`: whatever is sent, the answer is one the description announces, never a 5xx."""

from __future__ import annotations

from collections import Counter
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
MAX_TOKENS, MAX_CHOICES, VOCABULARY = 2, 2, 40_000
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def api(server) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def shortened(body: Any) -> Any:
    """The same request, asking for little: fuzzing is about the shape of the answers, not about long texts."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    for name, most in (("max_tokens", MAX_TOKENS), ("max_completion_tokens", MAX_TOKENS), ("n", MAX_CHOICES)):
        if isinstance(body.get(name), int | float) and not isinstance(body[name], bool):
            body[name] = min(body[name], most)
    if body.get("max_completion_tokens") is None and body.get("max_tokens") is None:
        body["max_tokens"] = MAX_TOKENS
    return body


def meaningful(body: dict[str, Any]) -> dict[str, Any]:
    """A valid body made servable, in what a schema cannot say: names and ids that exist, fields that agree."""
    body = {name: value for name, value in body.items() if name not in ("model", "priority", "stream_options")}
    for name in ("min_tokens", "documents", "chat_template_kwargs", "tools"):
        body.pop(name, None)
    if body.get("max_completion_tokens") is not None:
        body.pop("max_tokens", None)
    if not body.get("logprobs"):
        body.pop("top_logprobs", None)
        body.pop("return_tokens_as_token_ids", None)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    if body.get("continue_final_message"):
        body.pop("add_generation_prompt", None)
    if body.get("truncate_prompt_tokens") == 0:
        del body["truncate_prompt_tokens"]
    if "messages" in body:
        unread = dict.fromkeys(("tool_calls", "reasoning_content", "reasoning"))
        body["messages"] = [{**message, **unread} for message in body["messages"]]
    for name in ("prompt", "stop_token_ids", "allowed_token_ids", "tokens"):
        if name in body:
            body[name] = with_known_ids(body[name])
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(token) % VOCABULARY): bias for token, bias in body["logit_bias"].items()}
    return body


def with_known_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [with_known_ids(entry) for entry in value]
    return value % VOCABULARY if isinstance(value, int | float) else value


def fuzz(api: BaseSchema, method: str, path: str, mode: GenerationMode, examples: int) -> Counter[int]:
    """Sends what the schema allows (or, negative, forbids), checks each answer, and counts the statuses."""
    statuses: Counter[int] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def send(case: Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = meaningful(case.body)
        if path in GENERATES:
            case.body = shortened(case.body)
        response = case.call_and_validate(checks=CHECKS, timeout=120)
        statuses[response.status_code] += 1

    send()
    return statuses


def test_every_route_is_fuzzed(api):
    described = {result.ok().path for result in api.get_all_operations()}
    assert described == {*PLAIN, *TAKES_A_BODY, BY_NAME}


@pytest.mark.parametrize("path", PLAIN)
def test_plain_routes_answer_as_described(api, path):
    statuses = fuzz(api, "GET", path, GenerationMode.POSITIVE, examples=2)
    assert statuses[200] == statuses.total() > 0


@pytest.mark.parametrize("path", TAKES_A_BODY)
def test_valid_bodies_are_answered_as_described(api, path):
    statuses = fuzz(api, "POST", path, GenerationMode.POSITIVE, examples=30)
    assert statuses[200] > statuses.total() / 2, f"too few requests get through to mean much: {statuses}"


@pytest.mark.parametrize("path", TAKES_A_BODY)
def test_invalid_bodies_are_refused_as_described(api, path):
    statuses = fuzz(api, "POST", path, GenerationMode.NEGATIVE, examples=100)
    assert statuses[400] > statuses.total() / 2, f"too few requests are refused to mean much: {statuses}"


def test_any_model_name_is_answered_as_described(api):
    statuses = fuzz(api, "GET", BY_NAME, GenerationMode.POSITIVE, examples=30)
    assert statuses[404] > statuses.total() / 2, f"too few names are unknown to mean much: {statuses}"
