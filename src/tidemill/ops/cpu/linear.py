"""x Wᵀ + b for a packed weight, by the native kernels. `ops/reference.py` is the specification.

Activations are rounded, in blocks of 32 inputs, to two planes of 8 bits: 2e-5 of a product's norm on random numbers.
One plane alone would cost 5e-3, and the logits of a small model 2%. fp8 weights are multiplied with activations as they
are. A row's result does not depend on the rows beside it, nor on the number of threads.
Scales and offsets must be finite. Applying a weight's input order is the caller's.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from tidemill.ops.cpu.library import library
from tidemill.quant.packed import PackedWeight
from tidemill.quant.scheme import STORED_GROUP_SIZES, TABLES

FP8_INPUTS = 16
"""The kernel of fp8 weights takes this many inputs at a time."""


def supports(weight: PackedWeight) -> str | None:
    """Why these kernels do not multiply a weight; None where they do."""
    scheme, inputs = weight.scheme, weight.shape[1]
    if weight.data.device.type != "cpu":
        return f"the weight is on {weight.data.device}"
    if scheme.kind == "fp8":
        if inputs % FP8_INPUTS or (scheme.group_size or 0) % FP8_INPUTS:
            return f"{inputs} inputs in groups of {scheme.group_size} are not multiples of {FP8_INPUTS}"
        return None
    if weight.layout != "tiles":
        return f"codes are laid out as {weight.layout}, not as tiles"
    if scheme.kind == "table" and (scheme.table is None or _table(scheme.table) is None):
        return f"the table {scheme.table} has numbers that are not whole"
    if scheme.group_size is not None and scheme.group_size not in STORED_GROUP_SIZES:
        return f"groups have {scheme.group_size} inputs"
    return None


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., outputs] in x's type, of x [..., inputs] in the order of the weight's columns."""
    assert x.shape[-1] == weight.shape[1], f"{x.shape[-1]} inputs for a weight of {weight.shape[1]}"
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    if weight.scheme.kind == "fp8":
        out = _fp8_linear(x.to(torch.float32).contiguous(), weight, bias)
    else:
        given = x if x.dtype in (torch.float32, torch.bfloat16) else x.float()
        out = _tiles_linear(given.contiguous(), weight, bias)
    return out if out.dtype == x.dtype else out.to(x.dtype)


def _tiles_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight.shape
    scheme, rows = weight.scheme, x.numel() // inputs
    offsets = weight.offsets if weight.zeros is None else weight.zeros
    out = x.new_empty((*x.shape[:-1], outputs))
    failed = library().tidemill_linear(
        x.data_ptr(),
        x.dtype == torch.bfloat16,
        rows,
        inputs,
        outputs,
        weight.data.data_ptr(),
        scheme.bits,
        None if scheme.table is None else _table(scheme.table),
        weight.scales.data_ptr(),
        None if offsets is None else offsets.data_ptr(),
        weight.zeros is not None,
        weight.scales.dtype == torch.float32,
        scheme.group_size or 0,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the activations of {rows} rows of {inputs} inputs")
    return out


def _fp8_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    outputs, inputs = weight.shape
    out = x.new_empty((*x.shape[:-1], outputs))
    library().tidemill_fp8_linear(
        x.data_ptr(),
        x.numel() // inputs,
        inputs,
        outputs,
        weight.data.data_ptr(),
        weight.scales.data_ptr(),
        weight.scales.stride(0),
        weight.scales.dtype == torch.float32,
        weight.scheme.group_size or 0,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


@functools.cache
def _table(name: str) -> ctypes.Array[ctypes.c_int8] | None:
    """The table's numbers as bytes, where they are whole."""
    numbers = TABLES[name]
    if any(number != int(number) or abs(number) > 127 for number in numbers):
        return None
    return (ctypes.c_int8 * 16)(*(int(number) for number in numbers))
