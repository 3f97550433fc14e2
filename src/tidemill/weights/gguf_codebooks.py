"""GGUF's block types of numbers that stand in tables: the IQ types, MXFP4 and NVFP4. Also the ternary ones.

Of the IQ types below 4 bits, an index picks 4 or 8 magnitudes at once out of a grid, and signs lie apart. A code here
is the magnitude's place in the type's table, plus 8 where it is negative, so that all of them fit 4 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.weights.gguf_bits import Unpacked, fields, half, signed, single_bits, words
from tidemill.weights.gguf_grids import grid

_NEGATIVE = 8


def _places(name: str, index: Tensor) -> Tensor:
    """The rows of a grid, side by side: uint8 [blocks, numbers]."""
    rows = grid(name)
    # A row as one number: looked up many times faster than as several.
    whole = rows.view(torch.int64 if rows.shape[1] == 8 else torch.int32).view(-1)
    return whole.index_select(0, index.reshape(-1).int()).view(torch.uint8).view(index.shape[0], -1)


def _with_signs(places: Tensor, bits: Tensor) -> Tensor:
    """Sets what says 'negative' where a bit is set, both uint8 [blocks, numbers]."""
    return places | (bits * _NEGATIVE)


def _even(seven: Tensor) -> Tensor:
    """Sign bits of eight numbers, of which seven are stored: the last makes the count of set ones even."""
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    return (seven | (((parity ^ (parity >> 1)) & 1) << 7)).to(torch.uint8)


def _four_sevens(packed: Tensor) -> Tensor:
    """Sign bits of 32 numbers in the low 28 bits of each word: [blocks, 32 * words]."""
    shifts = torch.tensor([0, 7, 14, 21], dtype=torch.int32)
    sevens = (packed.unsqueeze(-1) >> shifts) & 127
    return single_bits(_even(sevens).view(packed.shape[0], -1))


def _nibbles(packed: Tensor) -> Tensor:
    """Low half, high half of each byte in turn, float32 [blocks, 2 * bytes, 1]."""
    return fields(packed, 4, 1).float().unsqueeze(-1)


def _iq1_s(b: Tensor) -> Unpacked:
    high = words(b, 34, 50, 16)
    index = b[:, 2:34].int() | _three_bits(high) << 8
    places = _places("iq1", index).view(-1, 8, 32) | ((high >> 15) * _NEGATIVE).to(torch.uint8).unsqueeze(-1)
    scale = half(b, 0) * (2 * ((high >> 12) & 7) + 1).unsqueeze(-1)
    return Unpacked(places, scale * 0.125, table="iq1")


def _iq1_m(b: Tensor) -> Unpacked:
    packed = words(b, 48, 56, 16)
    # The float16 of a block lies in the highest four bits of four words.
    shifts = torch.tensor([12, 8, 4, 0], dtype=torch.int32)
    bits = ((packed & 0xF000) >> shifts).sum(dim=1, keepdim=True)
    whole = bits.to(torch.int16).view(torch.float16).float().unsqueeze(1)
    high = fields(b[:, 32:48], 4, 1)
    places = _places("iq1", b[:, :32].int() | (high & 7).int() << 8).view(-1, 32, 8) | (high & 8).unsqueeze(-1)
    scale = whole * (2 * _three_bits(packed) + 1).unsqueeze(-1)
    return Unpacked(places.view(-1, 16, 16), scale * 0.125, table="iq1")


def _three_bits(packed: Tensor) -> Tensor:
    """The four lowest fields of three bits of each word, [blocks, 4 * words]."""
    return ((packed.unsqueeze(-1) >> torch.tensor([0, 3, 6, 9], dtype=torch.int32)) & 7).view(packed.shape[0], -1)


def _iq2_xxs(b: Tensor) -> Unpacked:
    parts = b[:, 2:].reshape(-1, 8, 8)
    packed = words(parts.reshape(-1, 64), 0, 64, 32)[:, 1::2]
    places = _with_signs(_places("iq2_xxs", parts[:, :, :4].reshape(-1, 32)), _four_sevens(packed))
    scale = half(b, 0) * (0.5 + ((packed >> 28) & 15).float()).unsqueeze(-1) * 0.25
    return Unpacked(places.view(-1, 8, 32), scale, table="iq2")


def _iq2_xs(b: Tensor) -> Unpacked:
    packed = words(b, 2, 66, 16)
    places = _with_signs(_places("iq2_xs", packed & 511), single_bits(_even(packed >> 9)))
    return Unpacked(places.view(-1, 16, 16), half(b, 0) * (0.5 + _nibbles(b[:, 66:])) * 0.25, table="iq2")


def _iq2_s(b: Tensor) -> Unpacked:
    index = b[:, 2:34].int() | fields(b[:, 66:74], 2, 1).int() << 8
    places = _with_signs(_places("iq2_s", index), single_bits(b[:, 34:66]))
    return Unpacked(places.view(-1, 16, 16), half(b, 0) * (0.5 + _nibbles(b[:, 74:])) * 0.25, table="iq2")


def _iq3_xxs(b: Tensor) -> Unpacked:
    packed = words(b, 66, 98, 32)
    places = _with_signs(_places("iq3_xxs", b[:, 2:66]), _four_sevens(packed))
    scale = half(b, 0) * (0.5 + ((packed >> 28) & 15).float()).unsqueeze(-1) * 0.5
    return Unpacked(places.view(-1, 8, 32), scale, table="iq3_xxs")


def _iq3_s(b: Tensor) -> Unpacked:
    index = b[:, 2:66].int() | single_bits(b[:, 66:74]).int() << 8
    places = _with_signs(_places("iq3_s", index), single_bits(b[:, 74:106]))
    return Unpacked(places.view(-1, 8, 32), half(b, 0) * (1 + 2 * _nibbles(b[:, 106:])), table="iq3_s")


def _iq4_nl(b: Tensor) -> Unpacked:
    return Unpacked(fields(b[:, 2:], 4, 16).unsqueeze(1), half(b, 0), table="iq4_nl")


def _iq4_xs(b: Tensor) -> Unpacked:
    high = (words(b, 2, 4, 16) >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    scales = fields(b[:, 4:8], 4, 1).int() | high << 4
    return Unpacked(fields(b[:, 8:], 4, 16).view(-1, 8, 32), half(b, 0) * (scales - 32).unsqueeze(-1), table="iq4_nl")


def _mxfp4(b: Tensor) -> Unpacked:
    # Half of a power of two, by its bits: the table's numbers are doubled. The two smallest have no exponent.
    power = b[:, :1].int()
    bits = torch.where(power < 2, 0x00200000 << power.clamp(max=1), (power - 1) << 23)
    return Unpacked(fields(b[:, 1:], 4, 16).unsqueeze(1), bits.view(torch.float32).unsqueeze(-1), table="e2m1")


def _nvfp4(b: Tensor) -> Unpacked:
    # Bytes of float8_e4m3fn without a sign, halved as above; what would be NaN is 0.
    stored = b[:, :4]
    scale = (stored & 127).view(torch.float8_e4m3fn).float() * 0.5
    scale = torch.where(stored == 127, 0.0, torch.where(stored == 255, 240.0, scale)).unsqueeze(-1)
    return Unpacked(fields(b[:, 4:], 4, 8).view(-1, 4, 16), scale, table="e2m1")


def _tq1_0(b: Tensor) -> Unpacked:
    """Five numbers of three values in a byte: its highest digits to base 3, times 256 / 243."""
    parts = [_ternary(b[:, start:stop], count) for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))]
    return Unpacked(signed(torch.cat(parts, dim=1), 1).unsqueeze(1), half(b, 52))


def _ternary(packed: Tensor, count: int) -> Tensor:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.int32)[:count].view(1, -1, 1)
    rest = (packed.int().unsqueeze(1) * powers) & 255
    return ((rest * 3) >> 8).to(torch.uint8).view(packed.shape[0], -1)


def _tq2_0(b: Tensor) -> Unpacked:
    return Unpacked(signed(fields(b[:, :64], 2, 32), 1).unsqueeze(1), half(b, 64))


UNPACK: dict[str, Callable[[Tensor], Unpacked]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
