"""A folder in Hugging Face layout: config.json and safetensors shards, memory-mapped.

Headers are parsed here, without torch, so that planning costs milliseconds; a tensor is a view of the mapped file.
Refuses pickles: loading one runs whatever code its author put in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.checkpoint import TensorInfo
from tidemill.weights.json_file import read_json
from tidemill.weights.location import ModelFiles
from tidemill.weights.mapping import map_file

if TYPE_CHECKING:
    import mmap

    import torch

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# A header larger than this is refused by the reference reader too.
_MAX_HEADER = 100_000_000

# safetensors name -> (torch name, bytes per element)
_DTYPES = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}


class SafetensorsFolder:
    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        folder = files.path
        self.config: dict[str, Any] = read_json(folder / "config.json", required=True)
        self.generation_config: dict[str, Any] = read_json(folder / "generation_config.json")
        self.tensors: dict[str, TensorInfo] = {}
        self._offsets: dict[str, int] = {}
        self._maps: dict[str, mmap.mmap] = {}
        expected, shards = _shards_of(folder)
        for shard in shards:
            for info, offset in _read_header(folder / shard):
                self.tensors[info.name] = info
                self._offsets[info.name] = offset
        for name, shard in expected.items():
            if name not in self.tensors:
                raise BadCheckpoint(
                    f"tensor {name} is missing from {shard}",
                    cause=f"{_INDEX} promises it there",
                    fix=f"download {shard} again, or delete {folder} and download the model again",
                )

    def read(self, name: str) -> torch.Tensor:
        import torch

        info = self.tensors.get(name)
        if info is None:
            raise BadCheckpoint(
                f"{self.files.path} has no tensor {name}",
                cause=f"it holds {len(self.tensors)} tensors, none of that name",
                fix="check that the weights belong to this config.json",
            )
        dtype: torch.dtype = getattr(torch, _DTYPES[info.dtype][0])
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


def _shards_of(folder: Path) -> tuple[dict[str, str], list[str]]:
    """What the index promises (tensor -> shard), and the shards to read."""
    if (folder / _INDEX).exists():
        weight_map: dict[str, str] = read_json(folder / _INDEX, required=True).get("weight_map") or {}
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise BadCheckpoint(
                f"{folder} lacks {missing[0]}" + (f" and {len(missing) - 1} more shards" if missing[1:] else ""),
                cause=f"{_INDEX} names {len(shards)} shards, {len(missing)} of them are not there",
                fix="finish the download (hf download org/name), or copy the missing files",
            )
        return weight_map, shards
    if (folder / _SINGLE).exists():
        return {}, [_SINGLE]
    # Mistral ships every weight twice, the second time in its own layout; an adapter is no model.
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    own = [name for name in names if not name.startswith(("consolidated", "adapter_"))]
    if own:
        return {}, own
    raise _no_weights(folder, names)


def _no_weights(folder: Path, safetensors: list[str]) -> UnsupportedModel | BadCheckpoint:
    if "adapter_model.safetensors" in safetensors:
        return UnsupportedModel(
            f"{folder} is a LoRA adapter, not a model",
            cause="it holds adapter_model.safetensors and no model weights",
            fix=f"serve the base model with --enable-lora --lora-modules name={folder}",
        )
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return UnsupportedModel(
            f"{folder} holds only pickled weights ({pickles[0]}), which are never loaded",
            cause="unpickling runs code chosen by the file's author",
            fix='convert them once: python -c "from transformers import AutoModel as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}-safetensors')\"",
        )
    return BadCheckpoint(
        f"{folder} has no weights",
        cause=f"there is neither {_INDEX} nor any .safetensors file",
        fix="finish the download (hf download org/name)",
    )


def _read_header(path: Path) -> Iterable[tuple[TensorInfo, int]]:
    """Every tensor of a shard with its absolute offset, after checking that the file holds all of them."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        prefix = handle.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(_MAX_HEADER, size - 8):
            raise _broken(path, f"the header claims {length} bytes, the file has {size}")
        try:
            header: dict[str, Any] = json.loads(handle.read(length))
        except ValueError as error:
            raise _broken(path, f"the header is not JSON: {error}") from error
    base = 8 + length
    header.pop("__metadata__", None)
    result: list[tuple[TensorInfo, int]] = []
    for name, entry in header.items():
        info, offset = _tensor_info(path, name, entry)
        if base + offset + info.nbytes > size:
            raise _broken(path, f"tensor {name} ends at byte {base + offset + info.nbytes}, the file at {size}")
        result.append((info, base + offset))
    return result


def _tensor_info(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        count = math.prod(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the header entry of tensor {name} is malformed: {error}") from error
    if dtype not in _DTYPES:
        raise UnsupportedModel(
            f"{path.name}: tensor {name} has the unknown dtype {dtype}",
            cause=f"known: {', '.join(_DTYPES)}",
            fix="save the checkpoint in bfloat16 or float32",
        )
    if start < 0 or end - start != count * _DTYPES[dtype][1]:
        raise _broken(path, f"tensor {name} of {dtype} {shape} takes {end - start} bytes")
    return TensorInfo(name, shape, dtype, end - start, path.name), start


def _broken(path: Path, cause: str) -> BadCheckpoint:
    return BadCheckpoint(f"{path} is truncated or corrupt", cause=cause, fix=f"delete {path} and download it again")
