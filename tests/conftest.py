"""Fixtures shared by all tests: one real server for all HTTP tests, and transformers' reading of the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.gguf_reference import transformers_reading
from tests.helpers.server import Server, start_server
from tidemill.weights.location import locate


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server("smollm2", "--max-model-len", "2048", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def transformers_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The default model as transformers reads it. Once a session: it takes a while."""
    return transformers_reading(locate("smollm2").path, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="session")
def transformers_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return transformers_reading(locate("gemma3-270m").path, tmp_path_factory.mktemp("gemma3"))
