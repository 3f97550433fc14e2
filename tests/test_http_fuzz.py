"""Schemathesis over `/openapi.json`: whatever is sent, the answer is one that the description announces, never a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

MAX_TOKENS, MAX_CHOICES = 4, 2
GENERATES = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def described_api(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


api = schemathesis.pytest.from_fixture("described_api")


def shortened(body: Any) -> Any:
    """The same request, asking for little: fuzzing is about the answers' shape, not about long texts."""
    if not isinstance(body, dict):
        return body
    body = dict(body)
    # Nearly every random name is an unknown model, which would hide everything behind one 404.
    if isinstance(body.get("model"), str):
        del body["model"]
    for name, most in (("max_tokens", MAX_TOKENS), ("max_completion_tokens", MAX_TOKENS), ("n", MAX_CHOICES)):
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = min(body[name], most)
    if body.get("max_completion_tokens") is None:
        body.setdefault("max_tokens", MAX_TOKENS)
    return body


@pytest.mark.timeout(600)
@api.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server(case):
    if case.path in GENERATES:
        case.body = shortened(case.body)
    case.call_and_validate(
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
        timeout=120,
    )
