"""A GGUF file seen as a Hugging Face checkpoint.

Joins the container (`gguf_file`), the translation (`gguf_architectures`, `gguf_names`) and the numbers
(`gguf_dequant`), and undoes what the converter did to rows, norms and experts. Besides dense tensors it hands out
quantised matrices as stored, rows already in Hugging Face order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.scheme import Scheme
from tidemill.weights.checkpoint import TensorInfo
from tidemill.weights.gguf_architectures import (
    EXPERT,
    STACKED_QKV,
    architecture_of,
    hf_name,
    is_shifted_norm,
    rotary_heads,
)
from tidemill.weights.gguf_file import BLOCK_TYPES, GgufTensor
from tidemill.weights.gguf_names import hf_config, hf_generation_config
from tidemill.weights.gguf_schemes import SCHEMES
from tidemill.weights.gguf_split import open_gguf
from tidemill.weights.location import ModelFiles

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

# Where each block type keeps its float16 numbers; a big-endian file stores exactly these (and dense types) swapped.
_SWAPPED_AT = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}
_ITEM_SIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class GgufCheckpoint:
    def __init__(self, files: ModelFiles) -> None:
        self.files = files
        self._gguf = open_gguf(files.path)
        metadata, tensors, file = self._gguf.metadata, self._gguf.tensors, files.path.name
        self._architecture = architecture_of(metadata, file)
        embedding = tensors.get("token_embd.weight")
        if embedding is None:
            raise BadCheckpoint(
                f"{file} has no tensor token_embd.weight",
                cause="it holds a vocabulary or an adapter, not a whole model",
                fix="point at the GGUF of the whole model",
            )
        self.config: dict[str, Any] = hf_config(metadata, tensors, embedding.shape[0], self._floats, file)
        self.generation_config: dict[str, Any] = hf_generation_config(metadata)
        self._sources: dict[str, GgufTensor] = {}
        for tensor in tensors.values():
            if (name := hf_name(tensor.name, self._architecture)) is not None:
                self._sources.update(_parts(name, tensor))
        self.tensors = {
            name: TensorInfo(name, tensor.shape, tensor.type, tensor.nbytes, self._gguf.file_of(tensor))
            for name, tensor in self._sources.items()
        }
        self.schemes: Mapping[str, Scheme] = {
            name: SCHEMES[tensor.type]
            for name, tensor in self._sources.items()
            if tensor.type in SCHEMES and len(tensor.shape) == 2
        }
        self.format: str | None = "gguf" if self.schemes else None

    @property
    def metadata(self) -> dict[str, Any]:
        return self._gguf.metadata

    def read(self, name: str) -> torch.Tensor:
        from tidemill.weights import gguf_dequant

        source = self._source(name)
        gguf_dequant.check_supported(source.type, source.name)
        raw = self.read_blocks(name)
        if gguf_dequant.is_dense(source.type):
            dense = gguf_dequant.dense_view(raw.reshape(-1), source.type, source.shape)
            return dense.float() - 1 if is_shifted_norm(source.name, self._architecture) else dense
        return gguf_dequant.dequantize(raw, source.type, source.shape)

    def read_stored(self, name: str) -> StoredMatrix:
        from tidemill.weights import gguf_dequant

        source = self._source(name)
        if name not in self.schemes:
            raise KeyError(name)
        return gguf_dequant.stored_matrix(self.read_blocks(name), source.type, (source.shape[0], source.shape[1]))

    def read_blocks(self, name: str) -> torch.Tensor:
        """The bytes of a tensor as uint8 [rows, bytes per row], rows in Hugging Face order."""
        import torch

        source = self._source(name)
        raw = self._native_order(source, self._gguf.raw(source))
        heads = rotary_heads(source.name, self.config, self._architecture)
        if heads is None:
            rows = source.shape[0] if len(source.shape) > 1 else 1
            return torch.from_numpy(raw).view(rows, -1)
        # Row 2i of a head is Hugging Face's row i, row 2i+1 its row i + half: whole rows move, so blocks stay whole.
        table = torch.from_numpy(raw).view(heads, source.shape[0] // heads // 2, 2, -1)
        return table.transpose(1, 2).reshape(source.shape[0], -1)

    def _source(self, name: str) -> GgufTensor:
        if name not in self._sources:
            raise BadCheckpoint(
                f"{self.files.path.name} has no tensor {name}",
                cause=f"it holds {len(self._sources)} tensors, none of that name",
                fix="check that the file belongs to this architecture",
            )
        return self._sources[name]

    def _floats(self, gguf_name: str) -> list[float]:
        dtype = np.dtype(np.float32).newbyteorder(">" if self._gguf.big_endian else "<")
        return self._gguf.raw(self._gguf.tensors[gguf_name]).view(dtype).tolist()

    def _native_order(self, source: GgufTensor, raw: np.ndarray) -> np.ndarray:
        if not self._gguf.big_endian:
            return raw
        if size := _ITEM_SIZE.get(source.type):
            return raw.reshape(-1, size)[:, ::-1].reshape(-1)
        if source.type not in _SWAPPED_AT:
            raise UnsupportedModel(
                f"tensor {source.name} is {source.type} in a big-endian GGUF, which is not read",
                cause=f"big-endian files are read with {', '.join([*_ITEM_SIZE, *_SWAPPED_AT])} tensors",
                fix="use the little-endian file of the same model",
            )
        block = next(nbytes for name, _, nbytes in BLOCK_TYPES.values() if name == source.type)
        swapped = raw.reshape(-1, block).copy()
        for at in _SWAPPED_AT[source.type]:
            swapped[:, [at, at + 1]] = swapped[:, [at + 1, at]]
        return swapped.reshape(-1)


def _parts(name: str, tensor: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
    """A tensor under its name, or what it stacks under a name each: rows of a part lie together."""
    if EXPERT in name:
        return _cut(tensor, [name.replace(EXPERT, str(expert)) for expert in range(tensor.shape[0])], tensor.shape[1:])
    if STACKED_QKV in name:
        names = [name.replace(STACKED_QKV, part) for part in "qkv"]
        return _cut(tensor, names, (tensor.shape[0] // 3, *tensor.shape[1:]))
    return iter(((name, tensor),))


def _cut(stack: GgufTensor, names: list[str], shape: tuple[int, ...]) -> Iterator[tuple[str, GgufTensor]]:
    nbytes = stack.nbytes // len(names)
    for index, name in enumerate(names):
        yield name, replace(stack, shape=shape, offset=stack.offset + index * nbytes, nbytes=nbytes)
