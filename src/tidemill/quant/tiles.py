"""Codes in the order in which the CPU's kernels read them.

A tile is 16 outputs and 32 inputs. Its inputs are eight quads of 4; a quad holds, for each output, its four codes side
by side: 64 codes. Of 8 bits, the quads follow each other (512 bytes). Of 4 bits, byte p of the first 64 has code p of
quad 0 in its low half and code p of quad 4 in its high one, and so on for quads 1 and 5, 2 and 6, 3 and 7 (256 bytes).
A row's tiles lie outside of its blocks: [tiles of outputs, blocks of inputs, bytes]. What sticks out is filled with 0.

Four neighbouring inputs of one output are what dot-product instructions take, on ARM and x86 alike, and 16 outputs fill
the widest registers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tidemill.quant.scheme import TILE_INPUTS, TILE_OUTPUTS

QUADS = TILE_INPUTS // 4


def tile_bytes(bits: int) -> int:
    return TILE_OUTPUTS * TILE_INPUTS * bits // 8


def tiles_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [tiles, blocks, bytes] of integers [outputs, inputs]."""
    outputs, inputs = codes.shape
    bytes_ = codes.to(torch.uint8) if codes.dtype != torch.int8 else codes.view(torch.uint8)
    padded = F.pad(bytes_, (0, -inputs % TILE_INPUTS, 0, -outputs % TILE_OUTPUTS))
    quads = padded.view(-1, TILE_OUTPUTS, padded.shape[1] // TILE_INPUTS, QUADS, 4).permute(0, 2, 3, 1, 4)
    if bits == 4:
        quads = (quads[:, :, : QUADS // 2] & 15) | (quads[:, :, QUADS // 2 :] << 4)
    return quads.reshape(*quads.shape[:2], tile_bytes(bits))


def codes_of(tiles: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [outputs, inputs], filled up as the tiles are; of 8 bits with a sign."""
    quads = _quads(tiles.view(*tiles.shape[:2], -1, TILE_OUTPUTS, 4), bits)
    return quads.permute(0, 3, 1, 2, 4).reshape(-1, tiles.shape[1] * TILE_INPUTS)


def codes_of_rows(tiles: torch.Tensor, bits: int, rows: torch.Tensor) -> torch.Tensor:
    """The same of some rows only."""
    found = tiles.view(*tiles.shape[:2], -1, TILE_OUTPUTS, 4)[rows // TILE_OUTPUTS, :, :, rows % TILE_OUTPUTS]
    return _quads(found, bits).reshape(len(rows), -1)


def _quads(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Quads along dimension 2, all eight of them."""
    if bits == 8:
        return packed.view(torch.int8).int()
    return torch.cat((packed & 15, packed >> 4), dim=2).int()
