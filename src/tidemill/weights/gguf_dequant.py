"""GGUF blocks into numbers: every block type becomes small integers with a scale and a shift per group.

Knows the bit layout of each type and nothing about files or models. `unpack` gives the integers and their scales, for
whoever repacks them; `dequantize` gives float32, bit for bit what `gguf.quants.dequantize` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.errors import UnsupportedModel
from tidemill.weights.gguf_file import BLOCK_TYPES

# Enough blocks to occupy the threads, few enough for the integers of a chunk to stay in cache.
_CHUNK_ELEMENTS = 1 << 21

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_SIZES = {name: (elements, nbytes) for name, elements, nbytes in BLOCK_TYPES.values()}


@dataclass(frozen=True)
class Unpacked:
    """`values * scale + shift`, with values [blocks, groups, group size] and scale, shift [blocks, groups, 1]."""

    values: Tensor
    scale: Tensor
    shift: Tensor | None = None


def is_dense(type_name: str) -> bool:
    return type_name in _DENSE


def check_supported(type_name: str, tensor: str) -> None:
    if type_name not in _DENSE and type_name not in _UNPACK:
        raise UnsupportedModel(
            f"tensor {tensor} is stored as {type_name}, which is not read",
            cause=f"supported types: {', '.join([*_DENSE, *_UNPACK])}",
            fix="use another file of the same model, for example Q4_K_M or Q8_0",
        )


def dense_view(raw: Tensor, type_name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor over the bytes of a dense type, without copying."""
    return raw.view(_DENSE[type_name]).view(shape)


def unpack(blocks: Tensor, type_name: str) -> Unpacked:
    """The integers of whole blocks, given as uint8 [blocks, bytes per block]."""
    return _UNPACK[type_name](blocks)


def dequantize(raw: Tensor, type_name: str, shape: tuple[int, ...]) -> Tensor:
    """A quantised tensor's bytes as float32 of the given shape."""
    elements, nbytes = _SIZES[type_name]
    blocks = raw.view(-1, nbytes)
    out = torch.empty(shape, dtype=torch.float32)
    rows = out.view(-1, elements)
    step = _CHUNK_ELEMENTS // elements
    for start in range(0, blocks.shape[0], step):
        part = unpack(blocks[start : start + step], type_name)
        target = rows[start : start + step].view(part.values.shape)
        # Two roundings, as in the reference: a fused multiply-add would differ in the last bit.
        target.copy_(part.values).mul_(part.scale)
        if part.shift is not None:
            target.add_(part.shift)
    return out


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 stored at byte `at` of each block, as float32 [blocks, 1, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float().unsqueeze(1)


def _fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Splits bytes into `bits`-wide fields: each run of `run` bytes gives all its low fields, then the next ones up."""
    runs = packed.reshape(packed.shape[0], -1, run)
    mask = (1 << bits) - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, bits)], dim=2).view(packed.shape[0], -1)


def _bits(packed: Tensor) -> Tensor:
    """The bits of consecutive bytes, lowest first: [blocks, 8 * bytes]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(packed.shape[0], -1)


def _signed(values: Tensor, offset: int) -> Tensor:
    return values.view(torch.int8).sub_(offset)


def _q4_0(b: Tensor) -> Unpacked:
    return Unpacked(_signed(_fields(b[:, 2:], 4, 16), 8).unsqueeze(1), _half(b, 0))


def _q4_1(b: Tensor) -> Unpacked:
    return Unpacked(_fields(b[:, 4:], 4, 16).unsqueeze(1), _half(b, 0), _half(b, 2))


def _q5_0(b: Tensor) -> Unpacked:
    values = _fields(b[:, 6:], 4, 16) | (_bits(b[:, 2:6]) << 4)
    return Unpacked(_signed(values, 16).unsqueeze(1), _half(b, 0))


def _q5_1(b: Tensor) -> Unpacked:
    values = _fields(b[:, 8:], 4, 16) | (_bits(b[:, 4:8]) << 4)
    return Unpacked(values.unsqueeze(1), _half(b, 0), _half(b, 2))


def _q8_0(b: Tensor) -> Unpacked:
    return Unpacked(b[:, 2:].view(torch.int8).unsqueeze(1), _half(b, 0))


def _q2_k(b: Tensor) -> Unpacked:
    scales, values = b[:, :16].unsqueeze(-1), _fields(b[:, 16:80], 2, 32)
    return Unpacked(values.view(-1, 16, 16), _half(b, 80) * (scales & 15), -(_half(b, 82) * (scales >> 4)))


def _q3_k(b: Tensor) -> Unpacked:
    high, low, packed_scales = b[:, :32], _fields(b[:, 32:96], 2, 32), b[:, 96:108]
    scales = _fields(packed_scales[:, :8], 4, 8) | (_fields(packed_scales[:, 8:], 2, 4) << 4)
    # A set bit in the mask means "no offset", so subtracting 4 from low + 4 * bit is the same thing.
    values = _signed(low | (_fields(high, 1, 32) << 2), 4)
    return Unpacked(values.view(-1, 16, 16), _half(b, 108) * _signed(scales, 32).unsqueeze(-1))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minimums that Q4_K and Q5_K squeeze into twelve bytes."""
    first, second, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 0x3F, (mixed & 0x0F) | ((first >> 2) & 0x30)], dim=1)
    minimums = torch.cat([second & 0x3F, (mixed >> 4) | ((second >> 2) & 0x30)], dim=1)
    return scales.unsqueeze(-1), minimums.unsqueeze(-1)


def _q4_k(b: Tensor) -> Unpacked:
    scales, minimums = _six_bit_scales(b[:, 4:16])
    return Unpacked(_fields(b[:, 16:], 4, 32).view(-1, 8, 32), _half(b, 0) * scales, -(_half(b, 2) * minimums))


def _q5_k(b: Tensor) -> Unpacked:
    scales, minimums = _six_bit_scales(b[:, 4:16])
    values = _fields(b[:, 48:], 4, 32) | (_fields(b[:, 16:48], 1, 32) << 4)
    return Unpacked(values.view(-1, 8, 32), _half(b, 0) * scales, -(_half(b, 2) * minimums))


def _q6_k(b: Tensor) -> Unpacked:
    values = _fields(b[:, :128], 4, 64) | (_fields(b[:, 128:192], 2, 32) << 4)
    scales = b[:, 192:208].contiguous().view(torch.int8).unsqueeze(-1)
    return Unpacked(_signed(values, 32).view(-1, 16, 16), _half(b, 208) * scales)


_UNPACK: dict[str, Callable[[Tensor], Unpacked]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
