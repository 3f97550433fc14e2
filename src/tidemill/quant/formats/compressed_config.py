"""What a compressed-tensors config says: which modules a group of settings is for, and how their weights are rounded.

Knows settings only; the tensors they describe are `compressed.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats.parts import Grid

DENSE = ("dense", "fakequant")
"""Nothing is stored quantised."""
FORMATS = (
    *DENSE,
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
PATTERN = "re:"


@dataclass(frozen=True)
class Weights:
    bits: int
    type: Literal["int", "float"]
    symmetric: bool
    grid: Grid


@dataclass(frozen=True)
class Group:
    name: str
    weights: Weights | None
    """None: the group is about activations only."""
    activations: str | None
    """For people: 'int8 per token'. None: they are not rounded."""
    activation_bits: int
    """16 where they are not rounded."""
    stored: bool
    """Whether its weights are stored quantised at all."""


@dataclass(frozen=True)
class Groups:
    by_target: Mapping[str, Group]
    ignore: tuple[str, ...]

    def find(self, module: str) -> Group | None:
        """None: no group is for this module, or it is ignored."""
        if any(_matches(target, module) for target in self.ignore):
            return None
        # Names go before patterns, and both before classes.
        ordered = sorted(self.by_target, key=lambda target: (target.startswith(PATTERN), target))
        for matches in (_matches_name, _matches_class):
            for target in ordered:
                if matches(target, module):
                    return self.by_target[target]
        return None


def groups_of(settings: Mapping[str, Any], origin: str) -> Groups:
    inner = settings.get("quantization_config")
    if isinstance(inner, Mapping):
        # Old files nest it beside the sparsity.
        settings = {**settings, **inner}
    _refuse_what_changes_numbers(settings, origin)
    stored_as = settings.get("format")
    by_target = {}
    for name, group in _mapping(settings.get("config_groups") or {}, "config_groups", origin).items():
        parsed = _group(name, _mapping(group, f"config_groups.{name}", origin), stored_as, origin)
        for target in _targets(group.get("targets"), f"config_groups.{name}.targets", origin):
            by_target[target] = parsed
    return Groups(by_target, _targets(settings.get("ignore"), "ignore", origin))


def notes(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """What the config asks for beyond the weights and the engine decides by itself, in words for people."""
    inner = settings.get("quantization_config")
    settings = {**settings, **inner} if isinstance(inner, Mapping) else settings
    found = []
    if settings.get("kv_cache_scheme"):
        found.append("kv_cache_scheme is not followed: --kv-cache-dtype says how keys and values are kept")
    groups = settings.get("config_groups") or {}
    if any(isinstance(group, Mapping) and group.get("output_activations") for group in groups.values()):
        found.append("output_activations are not followed: outputs of layers are not rounded")
    return tuple(found)


def _group(name: str, group: Mapping[str, Any], stored_as: Any, origin: str) -> Group:
    where = f"config_groups.{name}"
    stored_as = group.get("format") or stored_as
    if stored_as is not None and stored_as not in FORMATS:
        raise UnsupportedModel(
            f"{origin}: weights in compressed-tensors' format {stored_as!r} are not read",
            cause=f"quantization_config.{where}.format; read are {', '.join(FORMATS)}",
            fix="serve another checkpoint of the model, or the unquantised one with --quantization",
        )
    weights, inputs = group.get("weights"), group.get("input_activations")
    words, bits = None, 16
    if inputs is not None:
        inputs = _mapping(inputs, f"{where}.input_activations", origin)
        bits = _whole(inputs.get("num_bits", 8), f"{where}.input_activations.num_bits", origin)
        dynamic = "dynamic" if inputs.get("dynamic") else "static"
        words = f"{inputs.get('type', 'int')}{bits} per {inputs.get('strategy') or 'tensor'}, {dynamic}"
    parsed = None if weights is None else _weights(_mapping(weights, f"{where}.weights", origin), where, origin)
    return Group(name, parsed, words, bits, stored_as not in DENSE)


def _weights(weights: Mapping[str, Any], where: str, origin: str) -> Weights:
    where = f"{where}.weights"
    bits = _whole(weights.get("num_bits", 8), f"{where}.num_bits", origin)
    kind = str(weights.get("type", "int")).lower()
    symmetric = weights.get("symmetric", True)
    if kind not in ("int", "float"):
        raise _unknown(f"{where}.type", kind, "int or float", origin)
    if (kind == "int" and not 1 <= bits <= 8) or (kind == "float" and bits not in (4, 8)):
        raise _unknown(f"{where}.num_bits", bits, "1 to 8 of type int, 4 or 8 of type float", origin)
    if kind == "float" and not symmetric:
        raise _unknown(f"{where}.symmetric", symmetric, "true for weights of type float", origin)
    return Weights(bits, "int" if kind == "int" else "float", bool(symmetric), _grid(weights, where, origin))


def _grid(weights: Mapping[str, Any], where: str, origin: str) -> Grid:
    size = weights.get("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(weights.get("strategy") or inferred).lower()
    if strategy == "tensor":
        return Grid(None, None)
    if strategy == "channel":
        return Grid(1, None)
    if strategy in ("group", "tensor_group"):
        return Grid(1, _whole(size, f"{where}.group_size", origin))
    if strategy == "block":
        block = weights.get("block_structure")
        # Old files write 128x128.
        sizes = block.split("x") if isinstance(block, str) else block
        if not isinstance(sizes, list | tuple) or len(sizes) != 2:
            raise _unknown(f"{where}.block_structure", block, "two whole numbers such as [128, 128]", origin)
        rows, columns = (_whole(side, f"{where}.block_structure", origin) for side in sizes)
        return Grid(rows, columns)
    raise _unknown(f"{where}.strategy", strategy, ", ".join(STRATEGIES), origin)


def _refuse_what_changes_numbers(settings: Mapping[str, Any], origin: str) -> None:
    sparsity = settings.get("sparsity_config") or {}
    stored_as = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    refused = {
        f"sparse weights ({stored_as})": stored_as not in DENSE,
        "weights turned by transforms (transform_config)": bool(settings.get("transform_config")),
        "pruned experts (moe_sparsity_config)": bool(settings.get("moe_sparsity_config")),
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedModel(
                f"{origin}: compressed-tensors checkpoints with {what} are not read",
                cause="quantization_config in config.json",
                fix="serve another checkpoint of the model, or the unquantised one with --quantization",
            )


def _matches(target: str, module: str) -> bool:
    return _matches_name(target, module) or _matches_class(target, module)


def _matches_name(target: str, module: str) -> bool:
    if target.startswith(PATTERN):
        return re.match(target.removeprefix(PATTERN), module) is not None
    return target == module


def _matches_class(target: str, module: str) -> bool:
    """A checkpoint has no classes, but only these two are ever stored quantised, and names tell them apart."""
    last = module.rpartition(".")[2]
    return target == ("Embedding" if "embed" in last or last in ("wte", "wpe") else "Linear")


def _targets(targets: Any, where: str, origin: str) -> tuple[str, ...]:
    if not isinstance(targets, list | tuple | None) or not all(isinstance(target, str) for target in targets or ()):
        raise _unknown(where, targets, "a list of names", origin)
    for target in targets or ():
        try:
            re.compile(target.removeprefix(PATTERN) if target.startswith(PATTERN) else "")
        except re.error as error:
            raise _unknown(where, target, f"a regular expression after re: ({error})", origin) from error
    return tuple(targets or ())


def _mapping(value: Any, where: str, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unknown(where, value, "an object with targets and weights", origin)
    return value


def _whole(value: Any, where: str, origin: str) -> int:
    number = int(value) if isinstance(value, str) and value.isdigit() else value
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise _unknown(where, value, "a whole number of 1 or more", origin)
    return number


def _unknown(where: str, value: Any, expected: str, origin: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{origin}: {where} is {value!r}, expected {expected}",
        cause="quantization_config in config.json",
        fix="restore config.json as it was published, or serve the unquantised model with --quantization",
    )
