"""GPTQ as AutoGPTQ and GPTQModel store it: 2, 3, 4 or 8 bits, groups of any size, with or without act-order.

`qweight` int32 [inputs * bits / 32, outputs] and `qzeros` int32 [groups, outputs * bits / 32] are streams of bits,
lowest first, along inputs and outputs: codes of 3 bits run across the borders of words. `scales` [groups, outputs];
`g_idx` [inputs] names the group of each input, which act-order (desc_act) mixes. number = (code - zero) * scale. The
format "gptq" stores zeros less one, "gptq_v2" as they are. What is quantised is told by the tensors, how by
quantization_config and its `dynamic` exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tidemill.errors import BadCheckpoint
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
from tidemill.quant.formats.parts import AGAIN, FLOATS, expect, required, wrong_shape

if TYPE_CHECKING:
    import torch

    from tidemill.quant.stored import StoredMatrix

WIDTHS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")
FIXED = ("format", "checkpoint_format", "method", "quant_method", "pack_dtype", "adapter")
"""What a `dynamic` exception may not change."""
WAY_OUT = "serve another quantisation of the model, or the unquantised one with --quantization int4"


@dataclass(frozen=True)
class _Settings:
    bits: int
    group_size: int | None
    act_order: bool
    symmetric: bool
    """Every zero is the middle code."""
    less_one: bool
    """Zeros are stored so."""
    borrowed: bool
    """The one was taken from whole words, so that a zero of 0 borrows from its neighbour."""


def matrices(settings: Mapping[str, Any], tensors: Directory, origin: str) -> dict[str, QuantisedMatrix]:
    dynamic = _exceptions(settings, origin)
    found = {}
    for module in quantised_modules(tensors):
        own = next((changes for pattern, changes in dynamic if pattern.match(module)), {})
        if own is None:
            raise BadCheckpoint(
                f"{origin}: {module} is quantised, but a -: pattern of quantization_config's dynamic excludes it",
                cause=f"the weights hold {module}.qweight",
                fix=AGAIN,
            )
        found[f"{module}.weight"] = _matrix(module, _parsed({**settings, **own}, origin), tensors, origin)
    return found


def _exceptions(settings: Mapping[str, Any], origin: str) -> list[tuple[re.Pattern[str], Mapping[str, Any] | None]]:
    """Patterns of module names, the first that matches counts, with what they change; None: not quantised."""
    exceptions: list[tuple[re.Pattern[str], Mapping[str, Any] | None]] = []
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(isinstance(changes, Mapping) for changes in dynamic.values()):
        raise refused(origin, "dynamic", dynamic, "patterns of module names, each with its settings", WAY_OUT)
    for key, changes in dynamic.items():
        excludes = key.startswith("-:")
        for name in () if excludes else FIXED:
            if name in changes:
                known = "bits, group_size, sym and desc_act"
                raise refused(origin, f"dynamic {key} {name}", changes[name], known, WAY_OUT)
        try:
            pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
        except re.error as error:
            raise refused(origin, "dynamic", key, f"regular expressions, and this is none: {error}", WAY_OUT) from error
        exceptions.append((pattern, None if excludes else changes))
    return exceptions


def _parsed(settings: Mapping[str, Any], origin: str) -> _Settings:
    bits = settings.get("bits")
    if bits not in WIDTHS or isinstance(bits, bool):
        raise refused(origin, "bits", bits, "2, 3, 4 and 8", WAY_OUT)
    stored = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if settings.get("is_marlin_format"):
        stored = "marlin"
    if stored not in FORMATS:
        raise refused(origin, "checkpoint_format", stored, " and ".join(FORMATS), WAY_OUT)
    if settings.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise refused(origin, "pack_dtype", settings["pack_dtype"], "int32", WAY_OUT)
    if settings.get("adapter"):
        raise refused(origin, "adapter", settings["adapter"], "none: its product would be left out", WAY_OUT)
    # GPTQModel subtracts the one from words and adds it to words; everybody else treats each zero by itself. Codes of 3
    # bits, which words cut, it treats like everybody else.
    meta = settings.get("meta")
    writers = meta.get("quantizer") if isinstance(meta, Mapping) else None
    writers = writers if isinstance(writers, list) else [writers]
    return _Settings(
        bits=bits,
        group_size=group_setting(settings, "group_size", origin),
        act_order=bool(settings.get("desc_act", False)),
        symmetric=settings.get("sym") is True,
        less_one=stored == "gptq",
        borrowed=bits != 3 and any(str(writer).startswith("gptqmodel") for writer in writers),
    )


def _matrix(module: str, chosen: _Settings, tensors: Directory, origin: str) -> QuantisedMatrix:
    codes, zeros, scales, order = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    bits = chosen.bits
    packed = required(tensors, codes, zeros, "codes", origin)
    words, outputs = matrix_shape(codes, packed, "I32", origin)
    inputs = words * 32 // bits
    if order in tensors and len(tensors[order].shape) == 1:
        # The last word may not be full.
        inputs = tensors[order].shape[0]
    if words != _words(inputs, bits):
        shape = (_words(inputs, bits), outputs)
        raise wrong_shape(codes, packed, shape, origin, f"{inputs} codes of {bits} bits in words of 32")
    groups = count_groups(chosen.group_size, inputs)
    mixed = chosen.act_order and groups > 1
    kind = in_words("GPTQ", bits, chosen.group_size, ", act-order" if mixed else "")
    why = f"{kind}, of {inputs} inputs and {outputs} outputs, as {codes} has"
    found = required(tensors, scales, codes, "scales", origin)
    expect(scales, found, (groups, outputs), FLOATS, origin, why)
    points = required(tensors, zeros, codes, "zero points", origin)
    expect(zeros, points, (groups, _words(outputs, bits)), ("I32",), origin, why)
    parts = [codes, zeros, scales]
    if mixed:
        required(tensors, order, codes, "groups", origin)
    if order in tensors:
        expect(order, tensors[order], (inputs,), ("I32", "I64"), origin, "the group of each input")
        parts.append(order)
    scheme = integer_scheme("gptq", bits, chosen.group_size, inputs, not chosen.symmetric, found.dtype, mixed)
    read = partial(_read, module, chosen, (outputs, inputs), mixed, order in tensors)
    return QuantisedMatrix((outputs, inputs), scheme, kind, tuple(parts), read)


def _words(count: int, bits: int) -> int:
    """Words of so many codes; those of 3 bits come in threes."""
    return -(-count // 32) * 3 if bits == 3 else -(-count * bits // 32)


def _read(
    module: str, chosen: _Settings, shape: tuple[int, int], mixed: bool, indexed: bool, get: Read
) -> StoredMatrix:
    import torch

    from tidemill.quant.stored import StoredMatrix

    outputs, inputs = shape
    codes = codes_of_words(get(f"{module}.qweight").t(), chosen.bits)[:, :inputs]
    scales = get(f"{module}.scales").float().t().contiguous()
    zeros = _zeros(get(f"{module}.qzeros"), chosen)[:, :outputs].t()
    order = _order(module, get(f"{module}.g_idx"), chosen, mixed) if indexed else None
    if order is not None:
        codes = codes[:, order]
    if not chosen.symmetric:
        return StoredMatrix(codes, scales, -(zeros * scales), chosen.group_size, order=order)
    middle = 2 ** (chosen.bits - 1)
    if not bool((zeros == middle).all()):
        raise BadCheckpoint(
            f"{module}.qzeros holds zero points other than {middle}",
            cause="quantization_config in config.json says sym true, which puts all of them there",
            fix='set "sym": false in quantization_config if the checkpoint was quantised so, or download it again',
        )
    signed = (codes.to(torch.int16) - middle).to(torch.int8)
    return StoredMatrix(signed, scales, None, chosen.group_size, order=order)


def _zeros(words: torch.Tensor, chosen: _Settings) -> torch.Tensor:
    """uint8 [groups, outputs]."""
    bits, last = chosen.bits, 2**chosen.bits - 1
    if not chosen.less_one:
        return codes_of_words(words, bits)
    if chosen.borrowed:
        return codes_of_words(words + 0xFFFFFFFF // last, bits)
    return (codes_of_words(words, bits) + 1) & last


def _order(module: str, index: torch.Tensor, chosen: _Settings, mixed: bool) -> torch.Tensor | None:
    """Inputs sorted by group; None where they already are."""
    import torch

    count = len(index)
    columns = torch.arange(count)
    index = index.long()
    order = index.argsort(stable=True)
    if not torch.equal(index[order], columns // (chosen.group_size or count)):
        raise BadCheckpoint(
            f"{module}.g_idx gives some group other than {chosen.group_size or count} inputs",
            cause="quantization_config in config.json says that this is the group_size",
            fix=AGAIN,
        )
    if mixed:
        return order
    if not torch.equal(order, columns):
        raise BadCheckpoint(
            f"{module}.g_idx mixes the inputs of groups",
            cause="quantization_config in config.json does not say desc_act true",
            fix='set "desc_act": true in quantization_config',
        )
    return None
