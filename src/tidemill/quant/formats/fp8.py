"""Checkpoints of float8_e4m3fn weights: Hugging Face's `fp8` (scales of blocks or one), `fbgemm_fp8`, modelopt's FP8.

A number is its code times its scale, whether that is called weight_scale or weight_scale_inv. Which modules are
quantised is told by their type: lists of modules that are not (modules_to_not_convert, ignored_layers) add nothing to
it. Scales of activations are not used: inputs are rounded, where a kernel does so, by scales of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats.matrix import Directory, QuantisedMatrix, Read, Stored
from tidemill.quant.formats.parts import EXPONENTS, FLOATS, Grid, Module, expect_dtype, scales_of
from tidemill.quant.scheme import FP8_MULTIPLE, Scheme

if TYPE_CHECKING:
    from tidemill.quant.stored import StoredMatrix

BLOCK = 128
"""Inputs of a group that kernels take."""
SCALES = ("weight_scale_inv", "weight_scale")
INPUT_SCALES = ("input_scale", "activation_scale", "input_scale_ub")
NARROW = "F8_"
MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
WHOLE, BY_ROW = Grid(None, None), Grid(1, None)


def matrices(settings: Mapping[str, Any], tensors: Directory, origin: str) -> dict[str, QuantisedMatrix]:
    block = _block(settings, origin)
    found = {}
    for name, stored in tensors.items():
        owner, _, kind = name.rpartition(".")
        module = Module(owner, name, tensors, origin)
        if stored.dtype.startswith(NARROW) and kind not in (*SCALES, *INPUT_SCALES):
            if kind != "weight" or len(stored.shape) != 2:
                raise _unsupported(f"{name} is {stored.dtype} of shape {list(stored.shape)}", stored.file, origin)
            found[name] = _matrix(module, block)
        elif stored.dtype == "I8" and kind == "weight" and module.present(*SCALES):
            raise _unsupported(f"{name} holds numbers of 4 bits (expert_dtype fp4)", stored.file, origin)
    return found


def scheme_of(shape: tuple[int, int], grid: Grid, rounded: bool, name: str = "FP8") -> Scheme | None:
    """None where no kernel has such groups. `rounded`: inputs are too, where the card multiplies such numbers."""
    outputs, inputs = shape
    group = grid.group_size(inputs)
    if outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE or (group is not None and (group % BLOCK or inputs % BLOCK)):
        return None
    return Scheme(
        name,
        bits=8,
        group_size=None if group is None else BLOCK,
        kind="fp8",
        wide=True,
        activations="fp8_dynamic" if rounded else "none",
    )


def refuse_other_floats(name: str, stored: Stored, origin: str) -> None:
    if stored.dtype != "F8_E4M3":
        raise _unsupported(f"{name} is {stored.dtype}", stored.file, origin)


def read_matrix(names: tuple[str, str], shape: tuple[int, int], grid: Grid, read: Read) -> StoredMatrix:
    """From the names of the weight and of its scales."""
    from tidemill.quant.stored import StoredMatrix

    scales = grid.per_row(scales_of(read(names[1])), *shape)
    return StoredMatrix(read(names[0]), scales, group_size=grid.group_size(shape[1]))


def _matrix(module: Module, block: Grid | None) -> QuantisedMatrix:
    refuse_other_floats(module.weight, module.stored, module.origin)
    shape = (module.stored.shape[0], module.stored.shape[1])
    # Blocks and Hugging Face's single scales have the first name, everything else the second.
    here = module.present(SCALES[0])
    name, scales = module.required(SCALES[0] if here or block else SCALES[1], "scales")
    expect_dtype(name, scales, (*FLOATS, *EXPONENTS), module.origin)
    # Without blocks the settings do not say whether rows have scales of their own.
    grid = block or (BY_ROW if scales.shape in ((shape[0], 1), (shape[0],)) else WHOLE)
    grid.check(name, scales, *shape, module.origin)
    return QuantisedMatrix(
        shape,
        scheme_of(shape, grid, rounded=True),
        f"FP8, {grid}",
        (module.weight, name, *module.present(*INPUT_SCALES)),
        partial(read_matrix, (module.weight, name), shape, grid),
    )


def _block(settings: Mapping[str, Any], origin: str) -> Grid | None:
    """The blocks that the settings name; also refuses settings under which numbers mean something else."""
    method = settings.get("quant_method")
    if method == "modelopt":
        algorithm = settings.get("quant_algo")
        if algorithm not in MODELOPT_ALGORITHMS:
            raise UnsupportedModel(
                f"{origin}: modelopt's quant_algo {algorithm!r} is not read",
                cause=f"quantization_config.quant_algo; read are {', '.join(MODELOPT_ALGORITHMS)}",
                fix="serve an FP8 or unquantised checkpoint of the model",
            )
    if str(settings.get("fmt", "e4m3")).lower() not in ("e4m3", "e4m3fn", "float8_e4m3fn"):
        raise _unsupported(f"fmt is {settings['fmt']!r}", "quantization_config.fmt", origin)
    sizes = settings.get("weight_block_size")
    if sizes is None:
        return None
    if not isinstance(sizes, list | tuple) or len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise BadCheckpoint(
            f"{origin}: weight_block_size is {sizes!r}, expected two whole numbers such as [128, 128]",
            cause="quantization_config.weight_block_size in config.json",
            fix="restore config.json as it was published",
        )
    return Grid(sizes[0], sizes[1])


def _unsupported(what: str, where: str, origin: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{origin}: {what}; of FP8 checkpoints only linear layers in F8_E4M3 are read",
        cause=where,
        fix="serve the unquantised model, with --quantization fp8 if it should take as little memory",
    )
