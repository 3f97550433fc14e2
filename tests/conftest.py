"""Fixtures shared by all tests: the default model, and one real server for all HTTP tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.server import Server, start_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server("smollm2", "--max-model-len", "2048", "--dtype", "float32") as running:
        yield running
