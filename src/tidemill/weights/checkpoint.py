"""One view of any checkpoint: a config, a directory of tensors, and dense tensors by Hugging Face name.

Opening reads headers only and finds every missing or broken file before any long work; torch is imported at the first
`read`. Does not know which model the tensors belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from tidemill.quant.scheme import Scheme
from tidemill.weights.location import ModelFiles

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as stored: `shape` is that of the dense tensor, `dtype` and `nbytes` are what the file holds."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str


class Checkpoint(Protocol):
    files: ModelFiles
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """Quantised matrices that can stay as they are, by name."""
        ...

    @property
    def format(self) -> str | None:
        """What quantised weights are stored as, in the word users know it by; None: they are dense."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """A dense tensor: a view of the mapped file where it is stored as it is, float32 where it was changed."""
        ...

    def read_stored(self, name: str) -> StoredMatrix:
        """One of `schemes`, as it is stored."""
        ...


class DenseTensors:
    """The part of a checkpoint that is about quantised weights, where there are none."""

    schemes: Mapping[str, Scheme] = MappingProxyType({})
    format: str | None = None

    def read_stored(self, name: str) -> StoredMatrix:
        raise KeyError(name)


def open_checkpoint(files: ModelFiles) -> Checkpoint:
    if files.kind == "gguf":
        from tidemill.weights.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(files)
    from tidemill.weights.shards import no_weights, pickled_shards, safetensors_shards

    # Where a model is published in both, safetensors need no parsing and run no code.
    if (shards := safetensors_shards(files.path)) is not None:
        from tidemill.weights.quantised import opened
        from tidemill.weights.safetensors_folder import SafetensorsFolder

        return opened(SafetensorsFolder(files, shards))
    if (shards := pickled_shards(files.path)) is not None:
        from tidemill.weights.pickle_folder import PickleFolder

        return PickleFolder(files, shards)
    raise no_weights(files.path)
