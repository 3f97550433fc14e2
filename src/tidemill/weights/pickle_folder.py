"""A folder in Hugging Face layout with pickled weights: pytorch_model.bin, or shards and their index.

Names, shapes and types come from `pickle_header`, which runs nothing and needs no torch; the tensors themselves come
from torch's own restricted loader, memory-mapped. No other way of unpickling is ever used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint
from tidemill.weights.checkpoint import DenseTensors
from tidemill.weights.json_file import read_json
from tidemill.weights.location import ModelFiles
from tidemill.weights.pickle_header import read_pickle_header
from tidemill.weights.shards import Shards, gather

if TYPE_CHECKING:
    import torch


class PickleFolder(DenseTensors):
    def __init__(self, files: ModelFiles, shards: Shards) -> None:
        self.files = files
        folder = files.path
        self.config: dict[str, Any] = read_json(folder / "config.json", required=True)
        self.generation_config: dict[str, Any] = read_json(folder / "generation_config.json")
        self.tensors = gather(
            folder, shards, (info for shard in shards.files for info in read_pickle_header(folder / shard))
        )
        self._loaded: dict[str, dict[str, torch.Tensor]] = {}

    def read(self, name: str) -> torch.Tensor:
        info = self.tensors.get(name)
        if info is None:
            raise BadCheckpoint(
                f"{self.files.path} has no tensor {name}",
                cause=f"it holds {len(self.tensors)} tensors, none of that name",
                fix="check that the weights belong to this config.json",
            )
        if info.file not in self._loaded:
            self._loaded[info.file] = self._load(info.file)
        return self._loaded[info.file][name].detach().contiguous()

    def _load(self, shard: str) -> dict[str, torch.Tensor]:
        import torch

        path = self.files.path / shard
        try:
            loaded: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            # torch reports a file it does not accept as any of half a dozen exceptions.
            raise BadCheckpoint(
                f"{path} is refused by torch's restricted loader",
                cause=str(error).strip().partition("\n")[0],
                fix=f"delete {path} and download it again",
            ) from error
        return loaded
