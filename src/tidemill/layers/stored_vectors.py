"""Keys or values of one layer as a paged cache holds them: rounded when they are written, widened when gathered.

Whatever is attended to has been through the cache, so it does not matter when and in which company a token was
computed. Knows memory and types, but neither sequences nor attention. For the reference backend: kernels of a GPU do
both themselves.
"""

from __future__ import annotations

import torch

from tidemill.ops import reference

WIDENED_AT_ONCE = 2**22
"""Numbers that are copied out of the cache as they are stored, before they are widened into their place."""
E4M3_TO_FLOAT32 = 20
"""How far left the bits of a float8_e4m3fn go to be those of a float32..."""
E4M3_KEPT = -(2**31) | 0x07F00000
"""...of which these are its sign, exponent and mantissa, the rest being copies of the sign..."""
E4M3_REBASED = 2.0**120
"""...and the exponent counts from elsewhere."""


class StoredVectors:
    def __init__(self, numbers: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`numbers` [blocks, block_size, heads, dim], with `scales` [blocks, block_size, heads] where they are
        quantised; vectors come and go in `dtype`."""
        self.numbers, self.scales, self.dtype = numbers, scales, dtype
        # Not everything of torch that copies integers copies 8-bit floats.
        self._bytes = numbers.view(torch.int8) if numbers.dtype.itemsize == 1 else numbers

    def write(self, vectors: torch.Tensor, slots: torch.Tensor) -> None:
        """Vectors [tokens, heads, dim] to these flat positions."""
        if self.scales is None:
            reference.write_cache(vectors.to(self.numbers.dtype), self.numbers, slots)
            return
        codes, scale = reference.quantise_vectors(vectors, self.numbers.dtype)
        reference.write_cache(codes.view(torch.int8), self._bytes, slots)
        reference.write_cache(scale, self.scales, slots)

    def gather(self, blocks: torch.Tensor, batch: int) -> torch.Tensor:
        """[batch, heads, length, dim] of `batch` equally long runs of blocks."""
        if self.numbers.dtype == self.dtype:
            return reference.gather_blocks(self.numbers, blocks, batch)
        _, block_size, heads, dim = self.numbers.shape
        wide = torch.empty(len(blocks), block_size, heads, dim, dtype=self.dtype, device=self.numbers.device)
        step = max(1, WIDENED_AT_ONCE // (block_size * heads * dim))
        for some, place in zip(blocks.split(step), wide.split(step), strict=True):
            self._widen(some, place)
        return wide.view(batch, -1, heads, dim).transpose(1, 2)

    def _widen(self, blocks: torch.Tensor, place: torch.Tensor) -> None:
        found = self._bytes.index_select(0, blocks)
        if self.scales is None:
            place.copy_(found)
            return
        scale = self.scales.index_select(0, blocks)
        if place.dtype == torch.float32 and place.device.type == "cpu":
            _widen_in_place(found, scale, place, self.numbers.dtype)
        else:
            place.copy_(reference.dequantise_vectors(found.view(self.numbers.dtype), scale, place.dtype))


def _widen_in_place(codes: torch.Tensor, scale: torch.Tensor, place: torch.Tensor, stored: torch.dtype) -> None:
    """`reference.dequantise_vectors`, the same bits, into float32 memory that is there already. torch takes five times
    as long for 8-bit floats as for integers where the CPU has no such type, so their bits are moved as integers."""
    if stored == torch.float8_e4m3fn:
        rebased = scale * E4M3_REBASED
        if bool(rebased.isinf().any()):
            place.copy_(reference.dequantise_vectors(codes.view(stored), scale, place.dtype))
            return
        place.view(torch.int32).copy_(codes).bitwise_left_shift_(E4M3_TO_FLOAT32).bitwise_and_(E4M3_KEPT)
        place.mul_(rebased[..., None])
    else:
        place.copy_(codes).mul_(scale[..., None])
