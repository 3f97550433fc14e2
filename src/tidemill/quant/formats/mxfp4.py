"""MXFP4 checkpoints, as gpt-oss publishes them, and reading numbers of 4 bits: two of exponent, one of fraction.

Linear layers are read: `X_blocks` uint8 [outputs, groups, 16], two codes in a byte, the first in its low half, and
`X_scales` uint8 [outputs, groups], the exponents of groups of 32. Which modules are quantised is told by their tensors,
so `modules_to_not_convert` adds nothing. Experts stacked in one tensor are refused by name: no native architecture
takes them so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tidemill.errors import UnsupportedModel
from tidemill.quant.formats.matrix import Directory, QuantisedMatrix, Read
from tidemill.quant.formats.parts import EXPONENTS, expect, required, scales_of, wrong_shape
from tidemill.quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

GROUP = 32
MXFP4 = Scheme("MXFP4", bits=4, group_size=GROUP, kind="table", wide=True, table="e2m1")
BLOCKS, SCALES = "_blocks", "_scales"


def matrices(settings: Mapping[str, Any], tensors: Directory, origin: str) -> dict[str, QuantisedMatrix]:
    found = {}
    for name, stored in tensors.items():
        if not name.endswith(BLOCKS) or stored.dtype != "U8":
            continue
        base = name.removesuffix(BLOCKS)
        if len(stored.shape) == 4:
            raise UnsupportedModel(
                f"{origin}: {name} stacks {stored.shape[0]} experts in MXFP4, which is not read yet",
                cause=f"shape {list(stored.shape)}, {stored.file}",
                fix="serve a .gguf of the model, or an unquantised checkpoint of it",
            )
        if len(stored.shape) != 3 or stored.shape[2] * 2 != GROUP:
            raise wrong_shape(name, stored, (*stored.shape[:2], GROUP // 2), origin, f"blocks hold {GROUP} codes each")
        outputs, groups = stored.shape[:2]
        scales = required(tensors, base + SCALES, name, "scales", origin)
        expect(base + SCALES, scales, (outputs, groups), EXPONENTS, origin, f"a scale per block of {name}")
        found[base] = QuantisedMatrix(
            (outputs, groups * GROUP),
            MXFP4,
            "MXFP4, 4 bits in groups of 32",
            (name, base + SCALES),
            partial(_read, name, base + SCALES),
        )
    return found


def _read(blocks: str, scales: str, read: Read) -> StoredMatrix:
    return matrix_of(read(blocks).flatten(1), scales_of(read(scales)), GROUP)


def matrix_of(packed: torch.Tensor, scales: torch.Tensor, group_size: int) -> StoredMatrix:
    """Of bytes [outputs, inputs / 2] and float32 scales [outputs, groups] of numbers up to 6."""
    import torch

    from tidemill.quant.stored import StoredMatrix

    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    # The table has twice the numbers.
    return StoredMatrix(codes, scales / 2, group_size=group_size, table="e2m1")
