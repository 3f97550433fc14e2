"""A folder in Hugging Face layout: config.json and safetensors shards, memory-mapped.

Headers are parsed here, without torch, so that planning costs milliseconds and every lie of a header is found before
anything is read; a tensor is a view of the mapped file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.checkpoint import DenseTensors, TensorInfo
from tidemill.weights.dtypes import DTYPES
from tidemill.weights.json_file import read_json
from tidemill.weights.lfs import refuse_lfs_pointer
from tidemill.weights.location import ModelFiles
from tidemill.weights.mapping import map_file
from tidemill.weights.shards import Shards, gather

if TYPE_CHECKING:
    import mmap

    import torch

# A header larger than this is refused by the reference reader too.
_MAX_HEADER = 100_000_000


class SafetensorsFolder(DenseTensors):
    def __init__(self, files: ModelFiles, shards: Shards) -> None:
        self.files = files
        folder = files.path
        self.config: dict[str, Any] = read_json(folder / "config.json", required=True)
        self.generation_config: dict[str, Any] = read_json(folder / "generation_config.json")
        headers = {shard: _read_header(folder / shard) for shard in shards.files}
        self.tensors = gather(folder, shards, (info for header in headers.values() for info, _ in header))
        self._offsets = {info.name: offset for header in headers.values() for info, offset in header}
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, name: str) -> torch.Tensor:
        import torch

        info = self.tensors.get(name)
        if info is None:
            raise BadCheckpoint(
                f"{self.files.path} has no tensor {name}",
                cause=f"it holds {len(self.tensors)} tensors, none of that name",
                fix="check that the weights belong to this config.json",
            )
        dtype: torch.dtype = getattr(torch, DTYPES[info.dtype][0])
        count = math.prod(info.shape)
        if count == 0:
            return torch.empty(info.shape, dtype=dtype)
        start = self._offsets[name]
        memory = self._map(info.file)
        if start % dtype.itemsize == 0:
            return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(info.shape)
        # Nothing forces a writer to align tensors, and kernels may assume it: such a tensor is copied.
        raw = torch.frombuffer(memory, dtype=torch.uint8, count=info.nbytes, offset=start)
        return raw.clone().view(dtype).view(info.shape)

    def _map(self, shard: str) -> mmap.mmap:
        if shard not in self._maps:
            self._maps[shard] = map_file(self.files.path / shard)
        return self._maps[shard]


def _read_header(path: Path) -> list[tuple[TensorInfo, int]]:
    """Every tensor of a shard with its absolute offset, after checking that the file holds all of them."""
    refuse_lfs_pointer(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            text = handle.read(length) if length <= min(_MAX_HEADER, size - 8) else None
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read", cause=str(error), fix="check its permissions, or download it again"
        ) from error
    if size == 0:
        raise _broken(path, "the file is empty")
    if text is None:
        raise _broken(path, f"the header claims {length} bytes, the file has {size}")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise _broken(path, f"the header is a {type(header).__name__}, not an object")
    header.pop("__metadata__", None)
    base = 8 + len(text)
    found = [_tensor_info(path, name, entry) for name, entry in header.items()]
    _check_extents(path, found, size - base)
    return [(info, base + offset) for info, offset in found]


def _tensor_info(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the header entry of tensor {name} is malformed: {error}") from error
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UnsupportedModel(
            f"{path.name}: tensor {name} has the unknown dtype {dtype}",
            cause=f"known: {', '.join(DTYPES)}",
            fix="save the checkpoint in bfloat16 or float32",
        )
    if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
        raise _broken(path, f"tensor {name} has the shape {shape} at bytes {start} to {end}")
    if end - start != math.prod(shape) * DTYPES[dtype][1]:
        raise _broken(path, f"tensor {name} of {dtype} {shape} takes {end - start} bytes")
    return TensorInfo(name, shape, dtype, end - start, path.name), start


def _check_extents(path: Path, found: list[tuple[TensorInfo, int]], available: int) -> None:
    reached, last = 0, ""
    for info, start in sorted((entry for entry in found if entry[0].nbytes), key=lambda entry: entry[1]):
        if start < reached:
            raise _broken(path, f"tensors {last} and {info.name} share bytes")
        reached, last = start + info.nbytes, info.name
    if reached > available:
        raise _broken(path, f"tensor {last} ends {reached - available} bytes after the end of the file")


def _broken(path: Path, cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} is truncated or corrupt", cause=cause, fix=f"delete {path} and download it again")
