"""The one layout of quantised weights that every format is brought into and every kernel reads.

A matrix of `outputs` rows and `inputs` columns under a scheme is three tensors; number = (code - zero) * scale.

- `data` of integers: int32 [chunks, outputs, 32]. A chunk is 32 words of one row; with P = 32 / bits codes in a word it
  covers 32 P inputs (256 of 4 bits, 128 of 8). Bits [j * bits, (j + 1) * bits) of word w in chunk c belong to input
  (c P + j) * 32 + w: the same bits of neighbouring words are neighbouring inputs, so a kernel unpacks a tile of words
  into P tiles of inputs without moving a number between threads. Chunks lie outside rows, so that what one program
  reads is one stretch of memory. Codes of 4 bits are 0..15, codes of 8 bits are two's complement, -128..127. The last
  chunk is filled up with codes that no input meets.
- `data` of fp8: float8_e4m3fn [outputs, inputs], as the hardware's products want it; the zero is 0.
- `scales` [groups, outputs]: float16, or float32 where the whole row is one group; one per group of inputs and row.
- `zeros` [groups, outputs] float16 or None, in units of codes and not always whole. None: 8 for 4 bits, else 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidemill.quant.scheme import WORDS_PER_CHUNK, Scheme

Allocate = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class PackedWeight:
    scheme: Scheme
    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(part for part in (self.data, self.scales, self.zeros) if part is not None)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.tensors())

    def rows(self, start: int, stop: int) -> PackedWeight:
        """A view of some output rows."""
        part = slice(start, stop)
        data = self.data[part] if self.scheme.kind == "fp8" else self.data[:, part]
        zeros = None if self.zeros is None else self.zeros[:, part]
        return PackedWeight(self.scheme, (stop - start, self.shape[1]), data, self.scales[:, part], zeros)

    def codes(self) -> torch.Tensor:
        """[outputs, inputs] int32 of a packed integer matrix."""
        bits, words = self.scheme.bits, self.data
        shifts = torch.arange(self.scheme.codes_per_word, dtype=torch.int32, device=words.device) * bits
        codes = (words[:, :, None, :] >> shifts[:, None]) & (2**bits - 1)
        if bits == 8:
            codes = codes - ((codes & 128) << 1)
        return codes.transpose(0, 1).reshape(self.shape[0], -1)[:, : self.shape[1]]

    def unpack(self) -> torch.Tensor:
        """The dense matrix in float32."""
        if self.scheme.kind == "fp8":
            return self.data.float() * self.scales.t()
        codes = self.codes().float().view(self.shape[0], self.scales.shape[0], -1)
        zeros = middle_code(self.scheme.bits) if self.zeros is None else self.zeros.t()[..., None].float()
        return ((codes - zeros) * self.scales.t()[..., None].float()).view(self.shape)


def middle_code(bits: int) -> int:
    return 8 if bits == 4 else 0


def empty(scheme: Scheme, outputs: int, inputs: int, allocate: Allocate) -> PackedWeight:
    """Memory for a matrix, not yet filled; the scheme is fitted to the inputs."""
    scheme = scheme.fitted(inputs)
    groups = scheme.groups(inputs)
    if scheme.kind == "fp8":
        data = allocate((outputs, inputs), torch.float8_e4m3fn)
    else:
        chunks = -(-inputs // scheme.chunk)
        data = allocate((chunks, outputs, WORDS_PER_CHUNK), torch.int32)
    scales = allocate((groups, outputs), torch.float32 if scheme.group_size is None else torch.float16)
    zeros = allocate((groups, outputs), torch.float16) if scheme.zeros else None
    return PackedWeight(scheme, (outputs, inputs), data, scales, zeros)


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
