"""From the bytes of a request to a validated schema, or to a 400 that names the field and what was expected.

Knows JSON and pydantic's way of reporting; knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from tidemill.errors import InvalidRequest, UnsupportedParameter
from tidemill.server.refusals import Refusals

M = TypeVar("M", bound=BaseModel)

MAX_SHOWN_CHARS = 60


class ClientGone(Exception):
    """The client closed the connection; whatever is answered, nobody reads it."""


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    if not raw.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(_why_not_json(raw, str(error))) from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {shown(body)}")
    return body


def parse(body: dict[str, Any], schema: type[M], refusals: Refusals | None = None) -> M:
    """Checks names first, then values, so that a misspelt parameter is reported as such."""
    if refusals is not None:
        body = refusals.drop_neutral(body)
    unknown = [name for name in body if name not in schema.model_fields]
    if unknown:
        raise _unknown_parameters(unknown, schema)
    try:
        return schema.model_validate(body, strict=True)
    except ValidationError as error:
        raise _first_problem(error, body) from None


def shown(value: object) -> str:
    """A value as the caller would recognise it, never longer than a line."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _why_not_json(raw: bytes, reason: str) -> str:
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"the body is not valid UTF-8: {error.reason} at byte {error.start}"
    if "recursion" in reason:
        return f"the body is nested too deeply: {reason}"
    if "hex escape" in reason:
        return f"the body has an invalid unicode escape (a lone surrogate?): {reason}"
    return f"the body is not valid JSON: {reason}"


def _unknown_parameters(names: Sequence[str], schema: type[BaseModel]) -> UnsupportedParameter:
    close = get_close_matches(names[0], schema.model_fields, n=1)
    hint = f"did you mean {close[0]!r}?" if close else None
    listed = ", ".join(shown(name) for name in names[:10])
    return UnsupportedParameter(f"unknown parameter: {listed}", param=names[0][:MAX_SHOWN_CHARS], fix=hint)


def _first_problem(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    """One message for the first field at fault.

    A union reports every branch; the branch that got deepest is the one the caller meant, and branches that failed at
    the same place are alternatives.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    top = errors[0]["loc"][:1]
    located = [(_path(entry, body), entry) for entry in errors if entry["loc"][:1] == top]
    path, value = max((where for where, _ in located), key=lambda where: len(where[0]))
    alternatives = [entry for (candidate, _), entry in located if candidate == path]
    return _describe(_dotted(path), value, alternatives)


def _describe(name: str, value: object, alternatives: Sequence[ErrorDetails]) -> InvalidRequest:
    kind = alternatives[0]["type"]
    if kind == "missing":
        return InvalidRequest(f"{name} is required", param=name)
    if kind == "extra_forbidden":
        return UnsupportedParameter(f"unknown field {name}", param=name)
    if kind == "value_error":
        return InvalidRequest(f"{name}: {alternatives[0]['msg'].removeprefix('Value error, ')}", param=name)
    # A value of the right type that is out of range says more than the types of the other branches.
    fitting = [entry for entry in alternatives if not entry["type"].endswith("_type")] or alternatives
    expected = list(dict.fromkeys(entry["msg"].removeprefix("Input should be ") for entry in fitting))
    return InvalidRequest(f"{name} should be {' or '.join(expected)}, got {shown(value)}", param=name)


def _path(entry: ErrorDetails, body: object) -> tuple[tuple[int | str, ...], object]:
    """The part of pydantic's location that is in the body (the rest names branches of unions), and what is there."""
    path: list[int | str] = []
    value = body
    for step in entry["loc"]:
        is_there = step in value if isinstance(value, dict) else isinstance(value, list) and isinstance(step, int)
        if is_there:
            value = value[step]  # type: ignore[index]
        elif entry["type"] == "missing" and step == entry["loc"][-1]:
            value = None
        else:
            continue
        path.append(step)
    return tuple(path), value


def _dotted(path: Sequence[int | str]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text
