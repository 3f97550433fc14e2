"""Fixtures shared by all tests: one real server for all HTTP tests, and transformers' reading of the default model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton decides when a kernel is defined; without a GPU its interpreter runs the same kernels on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.helpers.server import Server, start_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server("smollm2", "--max-model-len", "2048", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def transformers_smollm2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The default model as transformers reads it. Once a session: it takes a while."""
    return transformers_of("smollm2", tmp_path_factory)


@pytest.fixture(scope="session")
def transformers_gemma3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return transformers_of("gemma3-270m", tmp_path_factory)


def transformers_of(alias: str, folders: pytest.TempPathFactory) -> Any:
    # Imported here: a machine without the gguf package runs the other tests.
    from tests.helpers.gguf_reference import transformers_reading
    from tidemill.weights.location import locate

    return transformers_reading(locate(alias).path, folders.mktemp(alias))
