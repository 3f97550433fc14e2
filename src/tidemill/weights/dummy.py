"""A checkpoint without weights: config.json and a tokenizer are enough to plan and to start a model of random numbers.

For measuring speed and memory without a download. Which tensors there are is the model's business; here is only what
files would say about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint
from tidemill.weights.checkpoint import Checkpoint, DenseTensors, TensorInfo, open_checkpoint
from tidemill.weights.json_file import read_json
from tidemill.weights.location import ModelFiles

if TYPE_CHECKING:
    import torch

STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class DummyCheckpoint(DenseTensors):
    """Says what config.json says, and holds no tensors."""

    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self.config: dict[str, Any] = read_json(files.path / "config.json", required=True)
        self.generation_config: dict[str, Any] = read_json(files.path / "generation_config.json")
        self.tensors: Mapping[str, TensorInfo] = {}

    @property
    def stored_dtype(self) -> str:
        """What the weights would be stored in; bfloat16 where the config is silent, as almost all are."""
        return STORED.get(str(self.config.get("dtype") or self.config.get("torch_dtype")), "BF16")

    def read(self, name: str) -> torch.Tensor:
        raise BadCheckpoint(
            f"{self.files.path} is used without its weights",
            cause=f"--load-format dummy, and tensor {name} was asked for",
            fix="leave --load-format out",
        )


def open_for(files: ModelFiles, load_format: str) -> Checkpoint:
    """A GGUF file is its own config, so it is opened either way; a folder may lack weights under `dummy`."""
    return DummyCheckpoint(files) if load_format == "dummy" and files.kind == "folder" else open_checkpoint(files)
