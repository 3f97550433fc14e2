"""compressed-tensors checkpoints: integers (`compressed_int.py`), floats of 8 bits, and floats of 4 bits.

The tensors of a module tell how its weight is stored; the config group that is for it tells what the numbers mean.
Matrices that are stored as plain floats are dense, whether they are ignored, not targeted or never were quantised.
Activations are rounded as our kernels do it, whatever the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats import fp8, mxfp4
from tidemill.quant.formats.compressed_config import Group, Weights, groups_of
from tidemill.quant.formats.compressed_int import integers
from tidemill.quant.formats.integers import integer_scheme
from tidemill.quant.formats.matrix import Directory, QuantisedMatrix, Read, Stored
from tidemill.quant.formats.parts import AGAIN, EXPONENTS, FLOATS, Grid, Module, expect, expect_dtype, scales_of
from tidemill.quant.scheme import Scheme

if TYPE_CHECKING:
    from tidemill.quant.stored import StoredMatrix

PACKED, PLAIN = "weight_packed", "weight"
STORED = {(PACKED, "I32"): "int", (PACKED, "U8"): "float", (PLAIN, "I8"): "int"}
"""What a tensor of such a name and type is made of, besides floats of 8 bits."""
OF_INPUTS = ("input_scale", "input_zero_point", "input_global_scale")
NVFP4_GROUP = 16


def matrices(settings: Mapping[str, Any], tensors: Directory, origin: str) -> dict[str, QuantisedMatrix]:
    groups = groups_of(settings, origin)
    found = {}
    for name, stored in tensors.items():
        owner, _, part = name.rpartition(".")
        made_of = STORED.get((part, stored.dtype))
        if part == PLAIN and stored.dtype.startswith(fp8.NARROW):
            made_of = "float"
        if made_of is None and part != PACKED:
            continue
        if made_of is None or len(stored.shape) != 2:
            raise UnsupportedModel(
                f"{origin}: {name} is {stored.dtype} of shape {list(stored.shape)}, which is not read",
                cause=f"packed weights are matrices of I32 or U8; {stored.file}",
                fix="serve another checkpoint of the model, or the unquantised one with --quantization",
            )
        group = groups.find(owner)
        if group is None or group.weights is None or not group.stored or group.weights.type != made_of:
            raise _not_described(name, stored, owner, group, origin)
        found[f"{owner}.weight"] = _matrix(Module(owner, name, tensors, origin), group, group.weights)
    return found


def _matrix(module: Module, group: Group, weights: Weights) -> QuantisedMatrix:
    if weights.type == "int":
        return _integers(module, group, weights)
    packed = module.weight.endswith(PACKED)
    if packed != (weights.bits == 4):
        raise _not_described(module.weight, module.stored, module.name, group, module.origin)
    return _floats_of_4_bits(module, group, weights.grid) if packed else _floats_of_8_bits(module, group, weights.grid)


def _integers(module: Module, group: Group, weights: Weights) -> QuantisedMatrix:
    stored = integers(module, weights, group.name)
    inputs = stored.shape[1]
    size, name = weights.grid.group_size(inputs), f"W{weights.bits}A{group.activation_bits}"
    scheme = integer_scheme(
        name if size is None else f"{name} g{size}",
        weights.bits,
        size,
        inputs,
        zeros=stored.zeros is not None,
        scales=module.tensors[stored.scales].dtype,
        ordered=stored.order is not None,
    )
    kind = _kind(f"{name} int, {weights.grid}", group)
    return QuantisedMatrix(stored.shape, scheme, kind, (*stored.tensors, *module.present(*OF_INPUTS)), stored.read)


def _floats_of_8_bits(module: Module, group: Group, grid: Grid) -> QuantisedMatrix:
    fp8.refuse_other_floats(module.weight, module.stored, module.origin)
    shape = module.stored.shape[0], module.stored.shape[1]
    name, scales = module.required("weight_scale", "scales")
    expect_dtype(name, scales, (*FLOATS, *EXPONENTS), module.origin)
    grid.check(name, scales, *shape, module.origin)
    return QuantisedMatrix(
        shape,
        fp8.scheme_of(shape, grid, rounded=group.activations is not None),
        _kind(f"FP8, {grid}", group),
        (module.weight, name, *module.present(*OF_INPUTS)),
        partial(fp8.read_matrix, (module.weight, name), shape, grid),
    )


def _floats_of_4_bits(module: Module, group: Group, grid: Grid) -> QuantisedMatrix:
    """MXFP4 has exponents of groups of 32; NVFP4 floats of groups of 16, over one number for the whole matrix."""
    outputs, inputs = module.stored.shape[0], module.stored.shape[1] * 2
    size = grid.columns
    if grid.rows != 1 or size not in (mxfp4.GROUP, NVFP4_GROUP) or inputs % size:
        raise BadCheckpoint(
            f"{module.origin}: {module.weight} has floats of 4 bits with {grid}, "
            f"expected groups of {mxfp4.GROUP} (MXFP4) or {NVFP4_GROUP} (NVFP4) that divide its {inputs} inputs",
            cause=f"config_groups.{group.name}.weights; {module.stored.file}",
            fix=AGAIN,
        )
    is_mx = size == mxfp4.GROUP
    name, scales = module.required("weight_scale", "scales")
    expect(name, scales, (outputs, inputs // size), EXPONENTS if is_mx else ("F8_E4M3",), module.origin, str(grid))
    over = None
    if not is_mx:
        over, stored = module.required("weight_global_scale", "global scale")
        expect_dtype(over, stored, FLOATS, module.origin)
        Grid(None, None).check(over, stored, outputs, inputs, module.origin)
    label = "MXFP4" if is_mx else "NVFP4"
    return QuantisedMatrix(
        (outputs, inputs),
        Scheme(label, bits=4, group_size=size, kind="table", wide=True, table="e2m1"),
        _kind(f"{label}, {grid}", group),
        tuple(part for part in (module.weight, name, over) if part) + module.present(*OF_INPUTS),
        partial(_read_floats_of_4_bits, module.weight, name, over, size),
    )


def _read_floats_of_4_bits(codes: str, scales: str, over: str | None, size: int, read: Read) -> StoredMatrix:
    numbers = scales_of(read(scales))
    return mxfp4.matrix_of(read(codes), numbers if over is None else numbers / read(over).float(), size)


def _kind(what: str, group: Group) -> str:
    if group.activations is None:
        return f"compressed-tensors {what}"
    return f"compressed-tensors {what}; activations are rounded as the kernel does, not {group.activations}"


def _not_described(name: str, stored: Stored, owner: str, group: Group | None, origin: str) -> BadCheckpoint:
    if group is None:
        what = f"no group of config_groups is for {owner}, or the ignore list has it"
    elif group.weights is None or not group.stored:
        what = f"config_groups.{group.name} says that its weights are not quantised"
    else:
        what = f"config_groups.{group.name} says {group.weights.bits} bits of type {group.weights.type}"
    return BadCheckpoint(
        f"{origin}: {name} is {stored.dtype}, but {what}",
        cause=f"quantization_config in config.json and {stored.file} disagree",
        fix="restore config.json as it was published, or download the checkpoint again",
    )
