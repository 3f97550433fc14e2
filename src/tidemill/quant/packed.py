"""Quantised weights in memory: what every format is brought into and every kernel reads.

A matrix of `outputs` rows and `inputs` columns under a scheme is a few tensors, in one of two layouts. A code stands
for itself, or for what the scheme's table has for it.

`words`, for a GPU (and fp8 anywhere): number = (code - zero) * scale.

- `data` of codes: int32 [chunks, outputs, 32]. A chunk is 32 words of one row; with P = 32 / bits codes in a word it
  covers 32 P inputs (256 of 4 bits, 128 of 8). Bits [j * bits, (j + 1) * bits) of word w in chunk c belong to input
  (c P + j) * 32 + w: the same bits of neighbouring words are neighbouring inputs, so a kernel unpacks a tile of words
  into P tiles of inputs without moving a number between threads. Chunks lie outside rows, so that what one program
  reads is one stretch of memory. Codes of 4 bits are 0..15, codes of 8 bits are two's complement, -128..127. The last
  chunk is filled up with codes that no input meets.
- `data` of fp8: float8_e4m3fn [outputs, inputs], as the hardware's products want it; the zero is 0.
- `scales` [groups, outputs]: float16, or float32 where they are wide or the whole row is one group.
- `zeros` [groups, outputs] like scales, or None: in units of codes and not always whole. None: 8 for 4 bits, else 0.

`tiles`, for a CPU: number = (code - zero) * scale, or code * scale + offset.

- `data`: uint8 [tiles, blocks, bytes], see `tiles.py`; codes as above.
- `scales` [tiles, groups, 16], the last tile filled up with 0; types as above.
- `zeros` or, where the scheme says so, `offsets`, like scales; without either the zero is as above.

With `order` int32 [inputs], column i of the codes is input order[i]; groups count columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tidemill.quant.scheme import TILE_INPUTS, TILE_OUTPUTS, WORDS_PER_CHUNK, Layout, Scheme
from tidemill.quant.stored import StoredMatrix
from tidemill.quant.tiles import codes_of, codes_of_rows, tile_bytes, tiles_of

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
NUMBERS_AT_A_TIME = 2**23
"""Packing takes some ten times the memory of what it packs."""


@dataclass(frozen=True)
class PackedWeight:
    scheme: Scheme
    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    order: torch.Tensor | None = None
    layout: Layout = "words"

    def tensors(self) -> tuple[torch.Tensor, ...]:
        parts = (self.data, self.scales, self.zeros, self.offsets, self.order)
        return tuple(part for part in parts if part is not None)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.tensors())

    def rows(self, start: int, stop: int) -> PackedWeight:
        """A view of some output rows; of tiles, whole ones."""
        shape = (stop - start, self.shape[1])
        if self.layout == "tiles":
            assert start % TILE_OUTPUTS == 0 and (stop % TILE_OUTPUTS == 0 or stop == self.shape[0]), "rows cut a tile"
            part = slice(start // TILE_OUTPUTS, -(-stop // TILE_OUTPUTS))
            zeros = None if self.zeros is None else self.zeros[part]
            offsets = None if self.offsets is None else self.offsets[part]
            return replace(
                self, shape=shape, data=self.data[part], scales=self.scales[part], zeros=zeros, offsets=offsets
            )
        part = slice(start, stop)
        data = self.data[part] if self.scheme.kind == "fp8" else self.data[:, part]
        zeros = None if self.zeros is None else self.zeros[:, part]
        return replace(self, shape=shape, data=data, scales=self.scales[:, part], zeros=zeros)

    def codes(self) -> torch.Tensor:
        """[outputs, inputs] int32 of a packed integer matrix, in the order of its columns."""
        if self.layout == "tiles":
            return codes_of(self.data, self.scheme.bits)[: self.shape[0], : self.shape[1]]
        bits, words = self.scheme.bits, self.data
        shifts = torch.arange(self.scheme.codes_per_word, dtype=torch.int32, device=words.device) * bits
        codes = (words[:, :, None, :] >> shifts[:, None]) & (2**bits - 1)
        if bits == 8:
            codes = codes - ((codes & 128) << 1)
        return codes.transpose(0, 1).reshape(self.shape[0], -1)[:, : self.shape[1]]

    def unpack(self) -> torch.Tensor:
        """The dense matrix in float32."""
        if self.layout == "words":
            codes = self.data if self.scheme.kind == "fp8" else self.codes()
            return self._dense(codes, self.scales.t(), None if self.zeros is None else self.zeros.t(), None)
        parts = [
            None if part is None else part.transpose(1, 2).flatten(0, 1)[: self.shape[0]]
            for part in (self.scales, self.zeros, self.offsets)
        ]
        return self._dense(self.codes(), *parts)

    def take(self, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of the dense matrix in float32."""
        if self.layout == "words":
            data = self.data[rows] if self.scheme.kind == "fp8" else self.data[:, rows]
            zeros = None if self.zeros is None else self.zeros[:, rows]
            shape = (len(rows), self.shape[1])
            return replace(self, shape=shape, data=data, scales=self.scales[:, rows], zeros=zeros).unpack()
        tiles, inside = rows // TILE_OUTPUTS, rows % TILE_OUTPUTS
        codes = codes_of_rows(self.data, self.scheme.bits, rows)[:, : self.shape[1]]
        parts = [None if part is None else part[tiles, :, inside] for part in (self.scales, self.zeros, self.offsets)]
        return self._dense(codes, *parts)

    def _dense(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor | None,
        zeros: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> torch.Tensor:
        """Of codes as they are packed and the rest by [rows, groups]."""
        assert scales is not None
        scheme, scales = self.scheme, scales.float()
        if zeros is not None:
            offsets = -zeros.float() * scales
        elif offsets is not None:
            offsets = offsets.float()
        elif scheme.kind == "int":
            codes = codes - middle_code(scheme.bits)
        return StoredMatrix(
            codes,
            scales,
            offsets,
            scheme.group_size,
            scheme.table,
            None if self.order is None else self.order.long(),
        ).dense()

    def store(self, stored: StoredMatrix) -> None:
        """Takes the very codes of a matrix that this scheme holds."""
        step = max(TILE_OUTPUTS, NUMBERS_AT_A_TIME // stored.shape[1] // TILE_OUTPUTS * TILE_OUTPUTS)
        for start in range(0, self.shape[0], step):
            index = torch.arange(start, min(start + step, self.shape[0]), device=stored.codes.device)
            self.rows(start, int(index[-1]) + 1)._store_rows(stored.rows(index).to(self.data.device))
        if self.order is not None and stored.order is not None:
            self.order.copy_(stored.order)

    def _store_rows(self, stored: StoredMatrix) -> None:
        scheme = self.scheme
        scales = stored.spread(stored.scales, scheme.group_size)
        offsets = None if stored.offsets is None else stored.spread(stored.offsets, scheme.group_size)
        codes = stored.codes
        if scheme.kind == "fp8":
            self.data.copy_(codes)
            self.scales.copy_(scales.t())
            return
        if scheme.kind == "int" and offsets is None:
            codes = codes + middle_code(scheme.bits)
            offsets = -middle_code(scheme.bits) * scales if scheme.zeros else None
        elif scheme.bits == 8 and codes.dtype == torch.uint8 and offsets is not None:
            codes, offsets = codes.to(torch.int16) - 128, offsets + 128 * scales
        assert scheme.zeros or offsets is None, "the scheme has no room for offsets"
        zeros = None
        if self.zeros is not None and offsets is not None:
            # A group of equal numbers may have no scale: then the offset is one, times a code of its own.
            flat = (scales == 0) & (offsets != 0)
            scales = torch.where(flat, offsets.abs(), scales)
            codes = codes.masked_fill(flat.repeat_interleave(codes.shape[1] // flat.shape[1], dim=1), 0)
            zeros = torch.where(scales == 0, 0.0, -offsets / scales)
        for into, numbers in ((self.scales, scales), (self.zeros, zeros), (self.offsets, offsets)):
            if into is not None and numbers is not None:
                self._store_by_group(into, numbers)
        if self.layout == "words":
            self.data.copy_(words_of(codes, scheme))
        else:
            self.data.copy_(tiles_of(codes.to(torch.int16) & 255, scheme.bits))

    def _store_by_group(self, into: torch.Tensor, numbers: torch.Tensor) -> None:
        """`numbers` [rows, groups]."""
        if self.layout == "words":
            into.copy_(numbers.t())
            return
        tiles, groups, _ = into.shape
        padded = numbers.new_zeros(tiles * TILE_OUTPUTS, groups)
        padded[: numbers.shape[0], : numbers.shape[1]] = numbers
        into.copy_(padded.view(tiles, TILE_OUTPUTS, groups).transpose(1, 2))


def middle_code(bits: int) -> int:
    return 8 if bits == 4 else 0


def empty(scheme: Scheme, outputs: int, inputs: int, allocate: Allocate, layout: Layout = "words") -> PackedWeight:
    """Memory for a matrix, not yet filled."""
    groups, wide = scheme.groups(inputs), scheme.wide or scheme.group_size is None
    type_of_scales = torch.float32 if wide else torch.float16
    order = allocate((inputs,), torch.int32) if scheme.ordered else None
    if scheme.kind == "fp8" or layout == "words":
        if scheme.kind == "fp8":
            data = allocate((outputs, inputs), torch.float8_e4m3fn)
        else:
            data = allocate((-(-inputs // scheme.chunk), outputs, WORDS_PER_CHUNK), torch.int32)
        scales = allocate((groups, outputs), type_of_scales)
        zeros = allocate((groups, outputs), type_of_scales) if scheme.zeros else None
        return PackedWeight(scheme, (outputs, inputs), data, scales, zeros, order=order)
    tiles, blocks = -(-outputs // TILE_OUTPUTS), -(-inputs // TILE_INPUTS)
    groups = scheme.groups(blocks * TILE_INPUTS)
    data = allocate((tiles, blocks, tile_bytes(scheme.bits)), torch.uint8)
    scales = allocate((tiles, groups, TILE_OUTPUTS), type_of_scales)
    shifts = allocate((tiles, groups, TILE_OUTPUTS), type_of_scales) if scheme.zeros else None
    zeros, offsets = (None, shifts) if scheme.by_offset else (shifts, None)
    return PackedWeight(scheme, (outputs, inputs), data, scales, zeros, offsets, order, "tiles")


def words_of(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """int32 [chunks, outputs, 32] of codes [outputs, inputs]: how a format's own codes are stored."""
    outputs, inputs = codes.shape
    chunks, per_word = -(-inputs // scheme.chunk), scheme.codes_per_word
    filled = torch.nn.functional.pad(codes.to(torch.int32), (0, chunks * scheme.chunk - inputs))
    parts = (filled & (2**scheme.bits - 1)).view(outputs, chunks, per_word, WORDS_PER_CHUNK)
    words = torch.zeros((outputs, chunks, WORDS_PER_CHUNK), dtype=torch.int32, device=codes.device)
    for position in range(per_word):
        words |= parts[:, :, position] << (position * scheme.bits)
    return words.transpose(0, 1)
