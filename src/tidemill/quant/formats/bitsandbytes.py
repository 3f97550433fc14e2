"""bitsandbytes as transformers saves it: 4 bits (nf4 or fp4) in blocks, or 8 bits with a scale per row.

4 bits: `weight` holds two codes in a byte, the first in the high half, whatever type its bytes are called;
`weight.absmax` has a scale per block, and blocks run over the flattened matrix. With double quantisation absmax holds
codes of 8 bits: scale = nested_quant_map[code] * nested_absmax[block] + nested_offset. Shape, block sizes and that
offset are JSON in `weight.quant_state.bitsandbytes__nf4` (or fp4): headers alone do not tell them, so this format
reads those small tensors at once.

8 bits: `weight` int8 [outputs, inputs], `SCB` [outputs]: number = code * SCB / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats.integers import matrix_shape, misfit
from tidemill.quant.formats.matrix import Directory, QuantisedMatrix, Read
from tidemill.quant.formats.parts import AGAIN, FLOATS, expect, expect_dtype, required
from tidemill.quant.scheme import TABLES, Scheme, can_group, stored_group

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

STORAGE = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
"""What the bytes of codes may be called, and how many of them a number of that type has."""
STATE = ".quant_state.bitsandbytes__"
PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
WHOLE = 127
"""The largest code of 8 bits, which stands for a row's SCB."""
EIGHT_BITS = Scheme("bitsandbytes-int8", bits=8, group_size=None, kind="int")


@dataclass(frozen=True)
class _State:
    kind: str
    shape: tuple[int, int]
    block: int
    nested_block: int | None
    """Scales that share a scale; None: they are stored as they are."""
    offset: float


def matrices(settings: Mapping[str, Any], tensors: Directory, origin: str, get: Read) -> dict[str, QuantisedMatrix]:
    states = {name.partition(STATE)[0]: name for name in tensors if STATE in name}
    found = {}
    for name, info in tensors.items():
        scales = name.removesuffix("weight") + "SCB"
        if name in states:
            found[name] = _four_bits(name, states[name], tensors, origin, get)
        elif name.endswith(".weight") and (info.dtype == "I8" or scales in tensors):
            found[name] = _eight_bits(name, scales, tensors, origin)
        elif name.endswith(".weight") and (info.dtype == "U8" or f"{name}.absmax" in tensors):
            kind = settings.get("bnb_4bit_quant_type", "nf4")
            required(tensors, f"{name}{STATE}{kind}", name, "shape and block size", origin)
    for name in states:
        required(tensors, name, states[name], "codes", origin)
    return found


def _eight_bits(name: str, scales: str, tensors: Directory, origin: str) -> QuantisedMatrix:
    outputs, inputs = matrix_shape(name, tensors[name], "I8", origin)
    found = required(tensors, scales, name, "scales", origin)
    expect(scales, found, (outputs,), FLOATS, origin, f"one scale per row of {name}")
    layout = f"{name}_format"
    parts = (name, scales, layout) if layout in tensors else (name, scales)

    def read(get: Read) -> StoredMatrix:
        from tidemill.quant.stored import StoredMatrix

        if layout in parts and int(get(layout)) != 0:
            raise UnsupportedModel(
                f"{layout} is {int(get(layout))}: {name} lies in an order of one GPU's own",
                cause="0, rows of outputs, is the only order that is read",
                fix="load the checkpoint with a current bitsandbytes and save it again",
            )
        return StoredMatrix(get(name), get(scales).float()[:, None] / WHOLE)

    return QuantisedMatrix((outputs, inputs), EIGHT_BITS, "bitsandbytes, 8 bits per row", parts, read)


def _four_bits(name: str, state_name: str, tensors: Directory, origin: str, get: Read) -> QuantisedMatrix:
    expect_dtype(state_name, tensors[state_name], ("U8",), origin)
    state = _parsed(state_name, bytes(get(state_name).tolist()))
    count = math.prod(state.shape)
    weight = tensors[name]
    expect_dtype(name, weight, tuple(STORAGE), origin)
    if math.prod(weight.shape) * STORAGE[weight.dtype] != -(-count // 2):
        why = f"two codes of {state.shape[0]} x {state.shape[1]} in a byte, as {state_name} says"
        raise misfit(name, weight, f"{-(-count // 2)} bytes", origin, why)
    blocks = -(-count // state.block)
    why = f"{state.shape[0]} x {state.shape[1]} numbers in blocks of {state.block}, as {state_name} says"
    absmax = required(tensors, f"{name}.absmax", name, "scales", origin)
    expect(f"{name}.absmax", absmax, (blocks,), FLOATS if state.nested_block is None else ("U8",), origin, why)
    if state.nested_block is not None:
        for part, length in (("nested_absmax", -(-blocks // state.nested_block)), ("nested_quant_map", 256)):
            found = required(tensors, f"{name}.{part}", name, "scales of scales", origin)
            expect(f"{name}.{part}", found, (length,), FLOATS, origin, why)
    if f"{name}.quant_map" in tensors:
        expect(f"{name}.quant_map", tensors[f"{name}.quant_map"], (16,), FLOATS, origin, "a number for each code")
    # Rows start where blocks do only if they are multiples of them, but runs of this many inputs never cross a border.
    group = math.gcd(state.shape[1], state.block)
    scheme = None
    if can_group(group, state.shape[1]):
        size = stored_group(group, state.shape[1])
        scheme = Scheme(state.kind, bits=4, group_size=size, kind="table", wide=size is not None, table=state.kind)
    doubly = ", scales quantised too" if state.nested_block is not None else ""
    kind = f"bitsandbytes {state.kind}, 4 bits in blocks of {state.block}{doubly}"
    parts = (name, state_name, *(name + part for part in PARTS if name + part in tensors))
    return QuantisedMatrix(state.shape, scheme, kind, parts, partial(_read, name, state, parts, group))


def _parsed(name: str, blob: bytes) -> _State:
    try:
        fields = json.loads(blob)
        kind, shape, block = fields["quant_type"], tuple(fields["shape"]), fields["blocksize"]
        nested = fields.get("nested_blocksize")
        offset = float(fields["nested_offset"]) if nested is not None else 0.0
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(
            f"{name} does not describe its matrix",
            cause=f"JSON with quant_type, shape and blocksize was expected: {error!r}",
            fix=AGAIN,
        ) from error
    sizes = (*shape, block, 1 if nested is None else nested)
    if len(shape) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise BadCheckpoint(
            f"{name} describes a matrix of shape {shape} in blocks of {block}",
            cause="two dimensions and sizes above 0 were expected",
            fix=AGAIN,
        )
    if kind not in ("nf4", "fp4"):
        raise UnsupportedModel(
            f"{name} says quant_type {kind!r}",
            cause="known: nf4 and fp4",
            fix="serve the unquantised model with --quantization int4",
        )
    return _State(kind, (shape[0], shape[1]), block, nested, offset)


def _read(name: str, state: _State, parts: tuple[str, ...], group: int, get: Read) -> StoredMatrix:
    import torch

    from tidemill.quant.stored import StoredMatrix

    outputs, inputs = state.shape
    pairs = get(name).contiguous().view(-1).view(torch.uint8)
    codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()[: outputs * inputs].view(outputs, inputs)
    absmax = get(f"{name}.absmax")
    if state.nested_block is not None:
        blocks = torch.arange(len(absmax)) // state.nested_block
        values = get(f"{name}.nested_quant_map").float()[absmax.long()]
        absmax = values * get(f"{name}.nested_absmax").float()[blocks] + state.offset
    if f"{name}.quant_map" in parts:
        _check_table(f"{name}.quant_map", get(f"{name}.quant_map"), state.kind)
    starts = torch.arange(0, outputs * inputs, group) // state.block
    scales = absmax.float()[starts].view(outputs, inputs // group)
    return StoredMatrix(codes, scales, None, None if group == inputs else group, state.kind)


def _check_table(name: str, numbers: torch.Tensor, kind: str) -> None:
    """Files round the numbers of a table differently, but no other table is that near."""
    import torch

    if not torch.allclose(numbers.float(), torch.tensor(TABLES[kind]), rtol=0, atol=1e-3):
        raise BadCheckpoint(
            f"{name} holds other numbers than {kind} has",
            cause=f"{numbers.tolist()}",
            fix="serve the unquantised model with --quantization int4",
        )
