"""What every GGUF block type is taken apart with: fields of bits out of bytes, and the form in which blocks come out.

Knows no block type.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Unpacked:
    """`values * scale + shift`, with values [blocks, groups, group size] and scale, shift [blocks, groups, 1]."""

    values: Tensor
    """Integers: numbers themselves, or places in the table."""
    scale: Tensor
    shift: Tensor | None = None
    table: str | None = None
    """A name in `quant.scheme.TABLES`."""


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 stored at byte `at` of each block, as float32 [blocks, 1, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float().unsqueeze(1)


def words(blocks: Tensor, start: int, stop: int, bits: int) -> Tensor:
    """Consecutive words of 16 or 32 bits, as int32 [blocks, words]; of 32 bits, the highest is the sign."""
    found = blocks[:, start:stop].contiguous()
    return found.view(torch.int16).int() & 0xFFFF if bits == 16 else found.view(torch.int32)


def fields(packed: Tensor, bits: int, run: int) -> Tensor:
    """Splits bytes into `bits`-wide fields: each run of `run` bytes gives all its low fields, then the next ones up."""
    runs = packed.reshape(packed.shape[0], -1, run)
    mask = (1 << bits) - 1
    return torch.stack([(runs >> shift) & mask for shift in range(0, 8, bits)], dim=2).view(packed.shape[0], -1)


def single_bits(packed: Tensor) -> Tensor:
    """The bits of consecutive bytes, lowest first: [blocks, 8 * bytes]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts) & 1).view(packed.shape[0], -1)


def signed(values: Tensor, offset: int) -> Tensor:
    return values.view(torch.int8).sub_(offset)
