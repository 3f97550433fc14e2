"""AWQ as AutoAWQ's "gemm" version stores it: 4 bits, one scale and zero point per group of inputs of an output.

`qweight` int32 [inputs, outputs / 8] and `qzeros` int32 [groups, outputs / 8] hold eight outputs in a word, in the
order 0 2 4 6 1 3 5 7 from the lowest bits on; `scales` [groups, outputs]; number = (code - zero) * scale. Files of
symmetric weights (zero_point false) have `qzeros` all the same. What is quantised is told by the tensors, not by
modules_to_not_convert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tidemill.quant.formats.integers import (
    codes_of_words,
    count_groups,
    group_setting,
    in_words,
    integer_scheme,
    matrix_shape,
    quantised_modules,
    refused,
)
from tidemill.quant.formats.matrix import Directory, QuantisedMatrix, Read
from tidemill.quant.formats.parts import FLOATS, expect, required

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

BITS = 4
PER_WORD = 32 // BITS
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of its eight outputs lies."""
WAY_OUT = 'serve a checkpoint of version "gemm", or the unquantised model with --quantization int4'


def matrices(settings: Mapping[str, Any], tensors: Directory, origin: str) -> dict[str, QuantisedMatrix]:
    group_size = _group_size(settings, origin)
    return {f"{name}.weight": _matrix(name, group_size, tensors, origin) for name in quantised_modules(tensors)}


def _group_size(settings: Mapping[str, Any], origin: str) -> int | None:
    version = settings.get("version") or settings.get("format") or "gemm"
    if settings.get("backend") == "llm-awq":
        version = "llm-awq"
    if str(version).lower() != "gemm":
        raise refused(origin, "version", version, "gemm", WAY_OUT)
    bits = settings.get("bits", settings.get("w_bit", BITS))
    if bits != BITS:
        raise refused(origin, "bits", bits, f"{BITS}, the only width of AWQ", WAY_OUT)
    return group_setting(settings, "q_group_size" if "q_group_size" in settings else "group_size", origin)


def _matrix(module: str, group_size: int | None, tensors: Directory, origin: str) -> QuantisedMatrix:
    codes, zeros, scales = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    inputs, words = matrix_shape(codes, required(tensors, codes, zeros, "codes", origin), "I32", origin)
    outputs, groups = words * PER_WORD, count_groups(group_size, inputs)
    kind = in_words("AWQ", BITS, group_size)
    why = f"{kind}, of {inputs} inputs and {outputs} outputs, as {codes} has"
    found = required(tensors, scales, codes, "scales", origin)
    expect(scales, found, (groups, outputs), FLOATS, origin, why)
    expect(zeros, required(tensors, zeros, codes, "zero points", origin), (groups, words), ("I32",), origin, why)

    def read(get: Read) -> StoredMatrix:
        from tidemill.quant.stored import StoredMatrix

        scale = get(scales).float().t().contiguous()
        offset = -(_unpacked(get(zeros)) * scale)
        return StoredMatrix(_unpacked(get(codes)), scale, offset, group_size)

    scheme = integer_scheme("awq", BITS, group_size, inputs, zeros=True, scales=found.dtype)
    return QuantisedMatrix((outputs, inputs), scheme, kind, (codes, zeros, scales), read)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """uint8 [outputs, rows] of int32 [rows, outputs / 8]."""
    eights = codes_of_words(words, BITS).view(*words.shape, PER_WORD)[..., list(PLACES)]
    return eights.flatten(1).t().contiguous()
