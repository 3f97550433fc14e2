"""The GGUF container: metadata, tensor directory and raw bytes, over a memory map.

Knows the file format (versions 2 and 3, both byte orders) and the size of every block type; does not know what any key
or tensor means, nor how to turn blocks into numbers (`gguf_dequant`).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.lfs import refuse_lfs_pointer
from tidemill.weights.mapping import map_file

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4

# id -> (name, elements per block, bytes per block)
BLOCK_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the directory. `shape` is row-major (the file stores it the other way round)."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int
    part: int = 0
    """Which file of a split one holds it, see `gguf_split`."""


@dataclass(frozen=True)
class GgufFile:
    path: Path
    version: int
    big_endian: bool
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: mmap.mmap
    others: tuple[GgufFile, ...] = ()
    """The later parts of a split file."""

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """A tensor's bytes as stored, without copying."""
        return np.frombuffer(self._holder(tensor).data, np.uint8, tensor.nbytes, tensor.offset)

    def file_of(self, tensor: GgufTensor) -> str:
        return self._holder(tensor).path.name

    def _holder(self, tensor: GgufTensor) -> GgufFile:
        return self if tensor.part == 0 else self.others[tensor.part - 1]


def read_gguf(path: Path) -> GgufFile:
    """Reads the whole header and checks that every tensor lies inside the file."""
    data = map_file(path)
    return _Parser(path, data).parse()


class _Parser:
    """One forward pass over the header; `position` is where an error is reported."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.position = path, data, len(data), 0
        self.order: Literal["<", ">"] = "<"

    def parse(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            refuse_lfs_pointer(self.path)
            raise self.bad(f"starts with {self.data[:4]!r}, not with b'GGUF'", fix="point at a real .gguf file")
        self.position = 4
        version = self.version()
        tensor_count, pair_count = self.scalar("Q"), self.scalar("Q")
        # Every entry takes more than 8 bytes, so a larger count is a corrupt one: told now, not after a long loop.
        if max(tensor_count, pair_count) > self.size // 8:
            raise self.bad(f"claims {tensor_count} tensors and {pair_count} metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"), key)
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        tensors = self.place(entries, int(metadata.get("general.alignment", 32)))
        return GgufFile(self.path, version, self.order == ">", metadata, tensors, self.data)

    def version(self) -> int:
        version = self.scalar("I")
        # No version has its low half empty unless the bytes are the other way round.
        if version & 0xFFFF == 0:
            self.order, self.position = ">", 4
            version = self.scalar("I")
        if version not in (2, 3):
            raise UnsupportedModel(
                f"{self.path.name}: GGUF version {version} is not read",
                cause="versions 2 and 3 are supported",
                fix="convert the model again with a current llama.cpp (convert_hf_to_gguf.py)",
            )
        return version

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(self.order + code, self.data, self.position)
        except struct.error:
            raise self.truncated() from None
        self.position += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, end = self.position, self.position + length
        if end > self.size:
            raise self.truncated()
        self.position = end
        return self.data[start:end].decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        """The hot loop: vocabularies and merges are 10^5 strings, so everything is local and checked once."""
        unpack: Callable[[Any, int], tuple[int]] = struct.Struct(self.order + "Q").unpack_from
        data, size, position = self.data, self.size, self.position
        result: list[str] = []
        append = result.append
        try:
            for _ in range(count):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    raise self.truncated(start)
                append(data[start:position].decode("utf-8", "replace"))
        except struct.error:
            raise self.truncated(position) from None
        self.position = position
        return result

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        raise self.bad(f"metadata entry {key!r} has the unknown type {kind}")

    def array(self, key: str) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > self.size:
            raise self.bad(f"metadata entry {key!r} claims {count} elements")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.array(key) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.bad(f"metadata entry {key!r} is an array of the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder(self.order)
        end = self.position + count * dtype.itemsize
        if end > self.size:
            raise self.truncated()
        values = np.frombuffer(self.data, dtype, count, self.position)
        self.position = end
        return values.tolist()

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise self.bad(f"tensor {name!r} claims {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        return name, shape, kind, offset

    def place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GgufTensor]:
        if alignment <= 0 or alignment % 8:
            raise self.bad(f"general.alignment is {alignment}")
        base = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if kind not in BLOCK_TYPES:
                raise UnsupportedModel(
                    f"{self.path.name}: tensor {name} has the unknown type {kind}",
                    cause="the file is newer than this reader, or corrupt",
                    fix="convert the model to Q8_0 or Q4_K_M with llama-quantize",
                )
            type_name, elements, nbytes_per_block = BLOCK_TYPES[kind]
            count = math.prod(shape)
            if count % elements or (shape and shape[-1] % elements):
                raise self.bad(f"tensor {name!r} of shape {shape} does not divide into {type_name} blocks")
            nbytes = count // elements * nbytes_per_block
            end = base + offset + nbytes
            if end > self.size:
                raise BadCheckpoint(
                    f"{self.path.name} is truncated: tensor {name} ends at byte {end}, the file at {self.size}",
                    cause="the download or copy was cut short",
                    fix=f"delete {self.path} and download it again",
                )
            tensors[name] = GgufTensor(name, shape, type_name, base + offset, nbytes)
        return tensors

    def truncated(self, position: int | None = None) -> BadCheckpoint:
        at = self.position if position is None else position
        return BadCheckpoint(
            f"{self.path.name} is truncated or corrupt: the header runs past the end at byte {at} of {self.size}",
            cause="the download or copy was cut short",
            fix=f"delete {self.path} and download it again",
        )

    def bad(self, what: str, fix: str | None = None) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path.name} {what} (byte {self.position})",
            cause="the file is not a valid GGUF",
            fix=fix or f"delete {self.path} and download it again",
        )
