"""Fixtures shared by all tests: one real server for all HTTP tests, and transformers' reading of the default model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.server import Server, start_server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start_server("smollm2", "--max-model-len", "2048", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="session")
def transformers_smollm2() -> Any:
    """The default model as transformers reads it, dequantised to float32. Once: it takes half a minute."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from tidemill.weights.location import locate

    path = locate("smollm2").path
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
