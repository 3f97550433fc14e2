"""In which precision a model is computed, and its weights and cache are kept: chosen, or refused, with a reason.

Torch-free. Knows the device and how the checkpoint is stored, but no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tidemill.device_choice import Device, dotted
from tidemill.errors import ConfigError
from tidemill.hardware import Hardware
from tidemill.nvidia import Gpu
from tidemill.quant.packing import DENSE, Packing
from tidemill.quant.scheme import FP8_CAPABILITY, SCHEMES, Scheme, gpu_reads, supports

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPE_SPELLINGS = {"float": "float32", "half": "float16"}
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
WIDENED = ("none", "dense")
"""What users call weights that are not to stay quantised."""
QUANTISED_CACHES = ("fp8", "int8")
CACHE_BYTES = {**dict.fromkeys(QUANTISED_CACHES, 1), **DTYPE_BYTES}
CACHE_SPELLINGS = {"fp8_e4m3": "fp8", "bf16": "bfloat16", **DTYPE_SPELLINGS}
BF16_CAPABILITY = (8, 0)


def choose_dtype(asked: str, stored: str, device: Device, hardware: Hardware) -> tuple[str, str]:
    """The precision and the reason. `stored` is what most of the checkpoint is."""
    name = DTYPE_SPELLINGS.get(asked, asked)
    if name != "auto" and name not in DTYPE_BYTES:
        names = ", ".join(["auto", *DTYPE_BYTES, *DTYPE_SPELLINGS])
        raise ConfigError(f"dtype {asked!r} is unknown", param="dtype", fix=f"use one of {names}")
    if device.gpu is not None:
        return _on_gpu(name, stored, device.gpu)
    return _on_cpu(name, stored, device, hardware)


def _on_gpu(name: str, stored: str, gpu: Gpu) -> tuple[str, str]:
    has_bf16 = gpu.capability >= BF16_CAPABILITY
    if name == "bfloat16" and not has_bf16:
        raise ConfigError(
            f"{gpu.name} does not compute in bfloat16",
            param="dtype",
            cause=f"that takes compute capability {dotted(BF16_CAPABILITY)}, it has {dotted(gpu.capability)}",
            fix="--dtype half",
        )
    if name != "auto":
        return name, "asked for"
    wanted = STORED_DTYPES.get(stored, "bfloat16")
    if wanted == "bfloat16" and not has_bf16:
        return "float16", f"stored as {stored}; {gpu.name} has no bfloat16"
    return wanted, "as stored" if stored in STORED_DTYPES else f"stored as {stored}, which is computed in {wanted}"


def _on_cpu(name: str, stored: str, device: Device, hardware: Hardware) -> tuple[str, str]:
    if name == "float16":
        raise ConfigError(
            "float16 has no CPU kernels worth using",
            param="dtype",
            cause=f"this runs on the CPU: {device.why}",
            fix="use --dtype float32",
        )
    if name == "bfloat16" and not hardware.fast_bf16:
        return name, "asked for, but this CPU has no bfloat16 instructions: expect it to be slow"
    if name != "auto":
        return name, "asked for"
    if not hardware.fast_bf16:
        return "float32", "this CPU has no bfloat16 instructions"
    if stored == "F32":
        return "float32", "as stored"
    return "bfloat16", f"this CPU multiplies bfloat16 in hardware; stored as {stored}"


@dataclass(frozen=True)
class StoredWeights:
    """How a checkpoint holds its weights."""

    dtype: str
    """What most of them are."""
    format: str | None = None
    """The name of what they are quantised as; None: they are not."""
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    """By name, those that can stay as they are..."""
    described: str = ""
    """...and what they are, for people."""


def choose_packing(
    asked: str | None, stored: StoredWeights, device: Device, hardware: Hardware, *, native: bool, origin: str
) -> tuple[str | None, Packing, str]:
    """What weights are packed as (a scheme's name, or `stored`; None: they are dense), which ones are, and why."""
    if asked in SCHEMES and stored.format in (None, "gguf"):
        return _on_load(SCHEMES[asked], device, hardware, native)
    own = stored.format is not None and asked is not None and _plain(asked) == _plain(stored.format)
    if asked is not None and asked not in WIDENED and not own:
        raise _not_what_it_is(asked, stored, origin)
    if stored.format is None:
        return None, DENSE, "weights are kept as they are computed"
    if asked in WIDENED:
        return None, DENSE, f"asked for; {stored.format} weights are widened while they are loaded"
    if device.gpu is None:
        if hardware.no_cpu_kernels is not None and not own:
            return None, DENSE, f"{stored.format} weights are widened while loading: {hardware.no_cpu_kernels}"
        return "stored", cpu_packing(None, stored.schemes), f"{stored.format}, as stored: {stored.described}"
    packing = gpu_packing(None, stored.schemes)
    why = f"{stored.format}, as stored: {stored.described}"
    if widened := len(stored.schemes) - len(packing.stored):
        why += f"; {widened} matrices have no GPU kernel and are widened"
    return "stored", packing, why


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def cpu_packing(on_load: Scheme | None, stored: Mapping[str, Scheme]) -> Packing:
    return Packing(on_load, stored, "tiles", frozenset(("linear", "table", "expert")))


def gpu_packing(on_load: Scheme | None, stored: Mapping[str, Scheme]) -> Packing:
    return Packing(on_load, {name: scheme for name, scheme in stored.items() if gpu_reads(scheme)})


def _on_load(scheme: Scheme, device: Device, hardware: Hardware, native: bool) -> tuple[str, Packing, str]:
    if not native:
        raise ConfigError(
            f"quantization {scheme.name} needs a native model",
            param="quantization",
            cause="this one runs through transformers' own code, which keeps its weights itself",
            fix="leave --quantization out",
        )
    if device.gpu is None:
        slow = f"; slow: {hardware.no_cpu_kernels}" if hardware.no_cpu_kernels is not None else ""
        return scheme.name, cpu_packing(scheme, {}), f"asked for; quantised while loading{slow}"
    if reason := supports(scheme, device.gpu.capability):
        return scheme.name, gpu_packing(scheme, {}), f"asked for; weights only: {reason}"
    return scheme.name, gpu_packing(scheme, {}), "asked for; quantised while loading"


def _not_what_it_is(asked: str, stored: StoredWeights, origin: str) -> ConfigError:
    if stored.format is None:
        return ConfigError(
            f"quantization {asked!r} is not what {origin} is",
            param="quantization",
            cause=f"its weights are stored as {stored.dtype}; they can be quantised while loading, "
            f"to {', '.join(SCHEMES)}",
            fix="--quantization int4, or leave it out",
        )
    return ConfigError(
        f"quantization {asked!r} is not what {origin} is",
        param="quantization",
        cause=f"its weights are quantised as {stored.format}",
        fix="leave --quantization out",
    )


def choose_cache_dtype(asked: str, dtype: str, device: Device) -> tuple[str, str]:
    """The type of the KV cache: the model's own, a narrower one, or one of 8 bits with a scale per token and head."""
    name = CACHE_SPELLINGS.get(asked, asked)
    if name in ("auto", dtype):
        return dtype, "as computed" if name == "auto" else "asked for"
    if name not in CACHE_BYTES:
        known = ", ".join(("auto", "bf16", *QUANTISED_CACHES, *DTYPE_BYTES))
        raise ConfigError(f"kv_cache_dtype {asked!r} is unknown", param="kv_cache_dtype", fix=f"use one of {known}")
    if CACHE_BYTES[name] >= DTYPE_BYTES[dtype]:
        raise ConfigError(
            f"kv_cache_dtype {asked} is no narrower than dtype {dtype}",
            param="kv_cache_dtype",
            cause="the cache holds numbers as they are computed, or in fewer bits",
            fix="--kv-cache-dtype auto, or int8 for fewer bits",
        )
    needed = {"fp8": FP8_CAPABILITY, "bfloat16": BF16_CAPABILITY}.get(name)
    if device.gpu is not None and needed is not None and device.gpu.capability < needed:
        raise ConfigError(
            f"{device.gpu.name} has no {name} numbers to keep a KV cache in",
            param="kv_cache_dtype",
            cause=f"that takes compute capability {dotted(needed)}, it has {dotted(device.gpu.capability)}",
            fix="--kv-cache-dtype int8",
        )
    if name in QUANTISED_CACHES:
        return name, "asked for; 8 bits a number, with a scale per token and head"
    return name, f"asked for; {dtype} numbers are rounded to it when they are stored"
