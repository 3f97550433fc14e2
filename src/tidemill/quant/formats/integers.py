"""What the formats of grouped integers share: settings, codes in words of 32 bits, and the scheme they stay in.

Torch is imported where codes are unpacked only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats.matrix import Directory, Stored
from tidemill.quant.formats.parts import AGAIN, expect_dtype
from tidemill.quant.scheme import Scheme, can_group, stored_group

if TYPE_CHECKING:
    import torch


def group_setting(settings: Mapping[str, Any], key: str, origin: str, default: int = 128) -> int | None:
    """None: one scale per row, which config.json spells -1."""
    size = settings.get(key, default)
    if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
        raise UnsupportedModel(
            f"{origin}: {key} is {size!r}",
            cause="quantization_config in config.json takes a count of inputs there, or -1 for whole rows",
            fix=f"set {key} to what the checkpoint was quantised with",
        )
    return None if size == -1 else size


def refused(origin: str, key: str, value: object, known: str, fix: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{origin}: quantization_config says {key} {value!r}, which is not read here", cause=f"known: {known}", fix=fix
    )


def matrix_shape(name: str, stored: Stored, dtype: str, origin: str) -> tuple[int, int]:
    expect_dtype(name, stored, (dtype,), origin)
    if len(stored.shape) != 2 or 0 in stored.shape:
        raise misfit(name, stored, "a matrix", origin, "nothing else is packed so")
    return stored.shape[0], stored.shape[1]


def misfit(name: str, stored: Stored, expected: str, origin: str, why: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{origin}: {name} has shape {list(stored.shape)}, expected {expected}",
        cause=f"{why}; {stored.file}",
        fix=AGAIN,
    )


def quantised_modules(tensors: Directory) -> list[str]:
    return sorted({name.rpartition(".")[0] for name in tensors if name.endswith((".qweight", ".qzeros"))})


def count_groups(group_size: int | None, inputs: int) -> int:
    """The last group may be shorter."""
    return 1 if group_size is None else -(-inputs // group_size)


def integer_scheme(
    name: str, bits: int, group_size: int | None, inputs: int, zeros: bool, scales: str, ordered: bool = False
) -> Scheme | None:
    """`scales` is the type they are stored in. None: such groups cannot be packed."""
    if not can_group(group_size, inputs):
        return None
    group = stored_group(group_size, inputs)
    wide = group is not None and scales != "F16"
    return Scheme(name, 4 if bits <= 4 else 8, group, "int", zeros=zeros, wide=wide, ordered=ordered)


def in_words(method: str, bits: int, group_size: int | None, also: str = "") -> str:
    """For people."""
    return f"{method}, {bits} bits " + ("per row" if group_size is None else f"in groups of {group_size}") + also


def codes_of_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, codes] of int32 [rows, words]: a row is one stream of bits, lowest first, `bits` for each code."""
    import torch

    stream = words.contiguous().view(torch.uint8)
    if bits == 8:
        return stream
    if bits == 3:
        # Three bytes are eight codes.
        first, second, third = stream.view(words.shape[0], -1, 3).int().unbind(-1)
        eight = first | (second << 8) | (third << 16)
        parts = [((eight >> (3 * index)) & 7).to(torch.uint8) for index in range(8)]
    else:
        parts = [(stream >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(1)
