"""In which precision a model is computed, and its weights and cache are kept: chosen, or refused, with a reason.

Torch-free. Knows the device and how the checkpoint is stored, but no tensors.
"""

from __future__ import annotations

from tidemill.device_choice import Device, dotted
from tidemill.errors import ConfigError
from tidemill.hardware import Hardware
from tidemill.nvidia import Gpu
from tidemill.quant.scheme import FP8_CAPABILITY, SCHEMES, Scheme, supports

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPE_SPELLINGS = {"float": "float32", "half": "float16"}
STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
QUANTISED_CACHES = ("fp8", "int8")
CACHE_SPELLINGS = {"fp8_e4m3": "fp8", **DTYPE_SPELLINGS}
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


def choose_quantization(
    asked: str | None, stored: str, device: Device, *, native: bool, origin: str
) -> tuple[Scheme | None, str]:
    """What the weights are packed into while they are loaded."""
    if asked is None:
        return None, "weights are kept as they are computed"
    scheme = SCHEMES.get(asked)
    if scheme is None:
        raise ConfigError(
            f"quantization {asked!r} is not what {origin} is",
            param="quantization",
            cause=f"its weights are stored as {stored}; they can be quantised while loading, to {', '.join(SCHEMES)}",
            fix="--quantization int4, or leave it out",
        )
    if not native:
        raise ConfigError(
            f"quantization {asked} needs a native model",
            param="quantization",
            cause="this one runs through transformers' own code, which keeps its weights itself",
            fix="leave --quantization out",
        )
    if device.gpu is None:
        return scheme, "asked for; on a CPU each matrix is unpacked whenever it is used, which is slow"
    if reason := supports(scheme, device.gpu.capability):
        return scheme, f"asked for; weights only: {reason}"
    return scheme, "asked for; quantised while loading"


def choose_cache_dtype(asked: str, dtype: str, device: Device) -> tuple[str, str]:
    """The type of the KV cache: the model's own, or one of 8 bits with a scale per token and head."""
    name = CACHE_SPELLINGS.get(asked, asked)
    if name in ("auto", dtype):
        return dtype, "as computed" if name == "auto" else "asked for"
    if name in DTYPE_BYTES:
        raise ConfigError(
            f"kv_cache_dtype {asked} differs from dtype {dtype}",
            param="kv_cache_dtype",
            cause="the cache holds numbers as they are computed, or in 8 bits",
            fix=f"--kv-cache-dtype auto, or --dtype {name}",
        )
    if name not in QUANTISED_CACHES:
        known = ", ".join(("auto", *QUANTISED_CACHES, *DTYPE_BYTES))
        raise ConfigError(f"kv_cache_dtype {asked!r} is unknown", param="kv_cache_dtype", fix=f"use one of {known}")
    if device.gpu is None:
        raise ConfigError(
            f"kv_cache_dtype {asked} needs a GPU",
            param="kv_cache_dtype",
            cause=f"only the GPU's attention kernels read quantised caches, and this runs on the CPU: {device.why}",
            fix="--kv-cache-dtype auto",
        )
    if name == "fp8" and device.gpu.capability < FP8_CAPABILITY:
        raise ConfigError(
            f"{device.gpu.name} has no fp8 numbers to keep a KV cache in",
            param="kv_cache_dtype",
            cause=f"that takes compute capability {dotted(FP8_CAPABILITY)}, it has {dotted(device.gpu.capability)}",
            fix="--kv-cache-dtype int8",
        )
    return name, "asked for; 8 bits a number, with a scale per token and head"
