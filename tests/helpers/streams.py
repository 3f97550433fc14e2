"""A client's side of a stream, read event by event."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx


@contextlib.contextmanager
def streaming(url: str, timeout: float = 120, **body: Any) -> Iterator[Iterator[str]]:
    """POST /v1/completions; yields the data of the events as they come."""
    with (
        httpx.Client(timeout=timeout) as client,
        client.stream("POST", f"{url}/v1/completions", json={"stream": True, **body}) as response,
    ):
        assert response.status_code == 200, response.read()
        yield (line.removeprefix("data: ") for line in response.iter_lines() if line)


def text_of(events: list[str]) -> str:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def finish_of(events: list[str]) -> str | None:
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return next((reason for reason in reasons if reason), None)
