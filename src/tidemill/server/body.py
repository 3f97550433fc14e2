"""From the bytes of a request to a validated schema, or to a 400 that names the field and what was expected.

Knows JSON and pydantic's way of reporting; knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from tidemill.errors import InvalidRequest, UnsupportedParameter
from tidemill.server.refusals import Refusals
from tidemill.server.state import AppState

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

MAX_SHOWN_CHARS = 60
# Bodies up to this size are read in less time than it takes to hand them to a thread and back.
INLINE_BYTES = 64 * 1024
# An empty object is two bytes here and a hundred in memory. No request needs so many; texts with so many braces are
# longer than any that is tokenised.
MAX_BRACES = 1_000_000
# Each field is bounded so that there are fewer; making the report of a million takes seconds and a gigabyte.
MAX_REPORTED = 5000


class ClientGone(Exception):
    """The client closed the connection; whatever is answered, nobody reads it."""


async def read_body(state: AppState, request: Request, understand: Callable[[dict[str, Any]], T]) -> T:
    """What `understand` makes of the body's JSON object, without holding up others when there is much of it."""
    try:
        raw = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    if len(raw) <= INLINE_BYTES:
        return understand(_object(raw))
    return await state.in_thread(lambda: understand(_object(raw)))


def _object(raw: bytes) -> dict[str, Any]:
    if not raw or raw.isspace():
        raise InvalidRequest("the body is empty; send a JSON object")
    if (count := raw.count(b"{") + raw.count(b"[")) > MAX_BRACES:
        raise InvalidRequest(f"the body has {count} opening braces and brackets, more than the limit of {MAX_BRACES}")
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
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARS + 1]
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
    first = names[0][:MAX_SHOWN_CHARS]
    close = get_close_matches(first, schema.model_fields, n=1)
    hint = f"did you mean {close[0]!r}?" if close else None
    listed = ", ".join(shown(name) for name in names[:10])
    return UnsupportedParameter(f"unknown parameter: {listed}", param=first, fix=hint)


def _first_problem(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    """One message for the first field at fault.

    A union reports every branch; the branch that got deepest is the one the caller meant, and branches that failed at
    the same place are alternatives.
    """
    if error.error_count() > MAX_REPORTED:
        return InvalidRequest(f"{error.error_count()} values in the body have the wrong type; see /docs for the types")
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
    for entry in alternatives:
        if entry["type"] == "value_error":
            return InvalidRequest(f"{name}: {entry['msg'].removeprefix('Value error, ')}", param=name)
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
