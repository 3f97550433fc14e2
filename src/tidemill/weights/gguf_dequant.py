"""GGUF blocks into numbers: every block type becomes small integers with a scale and a shift per group.

Knows the bit layout of the plain types and of the K types (`gguf_codebooks` has the others) and nothing about files or
models. `dequantize` gives float32, bit for bit what `gguf.quants.dequantize` gives; `stored_matrix` gives the integers
and their scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tidemill.errors import UnsupportedModel
from tidemill.quant.scheme import TABLES
from tidemill.quant.stored import StoredMatrix
from tidemill.weights import gguf_codebooks
from tidemill.weights.gguf_bits import Unpacked, fields, half, signed, single_bits
from tidemill.weights.gguf_file import BLOCK_TYPES

# Enough blocks to occupy the threads, few enough for the integers of a chunk to stay in cache.
_CHUNK_ELEMENTS = 1 << 21

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_SIZES = {name: (elements, nbytes) for name, elements, nbytes in BLOCK_TYPES.values()}


def is_dense(type_name: str) -> bool:
    return type_name in _DENSE


def check_supported(type_name: str, tensor: str) -> None:
    if type_name not in _DENSE and type_name not in UNPACK:
        raise UnsupportedModel(
            f"tensor {tensor} is stored as {type_name}, which is not read",
            cause=f"supported types: {', '.join([*_DENSE, *UNPACK])}",
            fix="use another file of the same model, for example Q4_K_M or Q8_0",
        )


def dense_view(raw: Tensor, type_name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor over the bytes of a dense type, without copying."""
    return raw.view(_DENSE[type_name]).view(shape)


def dequantize(raw: Tensor, type_name: str, shape: tuple[int, ...]) -> Tensor:
    """A quantised tensor's bytes as float32 of the given shape."""
    out = torch.empty(shape, dtype=torch.float32)
    rows = out.view(-1, _SIZES[type_name][0])
    for blocks, part in _parts(raw, type_name):
        target = rows[blocks].view(part.values.shape)
        values = part.values
        if part.table is not None:
            values = torch.tensor(TABLES[part.table], dtype=torch.float32).index_select(0, values.int().view(-1))
            values = values.view(part.values.shape)
        # Two roundings, as in the reference: a fused multiply-add would differ in the last bit.
        target.copy_(values).mul_(part.scale)
        if part.shift is not None:
            target.add_(part.shift)
    return out


def stored_matrix(raw: Tensor, type_name: str, shape: tuple[int, int]) -> StoredMatrix:
    """The integers of a quantised matrix, as its scheme (`gguf_schemes`) holds them."""
    codes = torch.empty(shape, dtype=torch.int8)
    rows = codes.view(-1, _SIZES[type_name][0])
    scales: list[Tensor] = []
    shifts: list[Tensor] = []
    group, table = None, None
    for blocks, part in _parts(raw, type_name):
        rows[blocks].view(part.values.shape).copy_(part.values)
        scales.append(part.scale.reshape(-1))
        if part.shift is not None:
            shifts.append(part.shift.reshape(-1))
        group, table = part.values.shape[-1], part.table
    offsets = torch.cat(shifts).view(shape[0], -1) if shifts else None
    return StoredMatrix(codes, torch.cat(scales).view(shape[0], -1), offsets, group, table)


def _parts(raw: Tensor, type_name: str) -> Iterator[tuple[slice, Unpacked]]:
    elements, nbytes = _SIZES[type_name]
    blocks, step = raw.view(-1, nbytes), max(1, _CHUNK_ELEMENTS // elements)
    for start in range(0, blocks.shape[0], step):
        yield slice(start, start + step), UNPACK[type_name](blocks[start : start + step])


def _q4_0(b: Tensor) -> Unpacked:
    return Unpacked(signed(fields(b[:, 2:], 4, 16), 8).unsqueeze(1), half(b, 0))


def _q4_1(b: Tensor) -> Unpacked:
    return Unpacked(fields(b[:, 4:], 4, 16).unsqueeze(1), half(b, 0), half(b, 2))


def _q5_0(b: Tensor) -> Unpacked:
    values = fields(b[:, 6:], 4, 16) | (single_bits(b[:, 2:6]) << 4)
    return Unpacked(signed(values, 16).unsqueeze(1), half(b, 0))


def _q5_1(b: Tensor) -> Unpacked:
    values = fields(b[:, 8:], 4, 16) | (single_bits(b[:, 4:8]) << 4)
    return Unpacked(values.unsqueeze(1), half(b, 0), half(b, 2))


def _q8_0(b: Tensor) -> Unpacked:
    return Unpacked(b[:, 2:].view(torch.int8).unsqueeze(1), half(b, 0))


def _q2_k(b: Tensor) -> Unpacked:
    scales, values = b[:, :16].unsqueeze(-1), fields(b[:, 16:80], 2, 32)
    return Unpacked(values.view(-1, 16, 16), half(b, 80) * (scales & 15), -(half(b, 82) * (scales >> 4)))


def _q3_k(b: Tensor) -> Unpacked:
    high, low, packed_scales = b[:, :32], fields(b[:, 32:96], 2, 32), b[:, 96:108]
    scales = fields(packed_scales[:, :8], 4, 8) | (fields(packed_scales[:, 8:], 2, 4) << 4)
    # A set bit in the mask means "no offset", so subtracting 4 from low + 4 * bit is the same thing.
    values = signed(low | (fields(high, 1, 32) << 2), 4)
    return Unpacked(values.view(-1, 16, 16), half(b, 108) * signed(scales, 32).unsqueeze(-1))


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and eight minimums that Q4_K and Q5_K squeeze into twelve bytes."""
    first, second, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 0x3F, (mixed & 0x0F) | ((first >> 2) & 0x30)], dim=1)
    minimums = torch.cat([second & 0x3F, (mixed >> 4) | ((second >> 2) & 0x30)], dim=1)
    return scales.unsqueeze(-1), minimums.unsqueeze(-1)


def _q4_k(b: Tensor) -> Unpacked:
    scales, minimums = _six_bit_scales(b[:, 4:16])
    return Unpacked(fields(b[:, 16:], 4, 32).view(-1, 8, 32), half(b, 0) * scales, -(half(b, 2) * minimums))


def _q5_k(b: Tensor) -> Unpacked:
    scales, minimums = _six_bit_scales(b[:, 4:16])
    values = fields(b[:, 48:], 4, 32) | (fields(b[:, 16:48], 1, 32) << 4)
    return Unpacked(values.view(-1, 8, 32), half(b, 0) * scales, -(half(b, 2) * minimums))


def _q6_k(b: Tensor) -> Unpacked:
    values = fields(b[:, :128], 4, 64) | (fields(b[:, 128:192], 2, 32) << 4)
    scales = b[:, 192:208].contiguous().view(torch.int8).unsqueeze(-1)
    return Unpacked(signed(values, 32).view(-1, 16, 16), half(b, 208) * scales)


UNPACK: dict[str, Callable[[Tensor], Unpacked]] = {
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
    **gguf_codebooks.UNPACK,
}
"""The integers of whole blocks, given as uint8 [blocks, bytes per block]."""
