"""Every engine setting, resolved once into a frozen object that remembers why each value was chosen.

`EngineArgs` is what the user said, None meaning "inferred"; `resolve` turns it into an `EngineConfig` from the
checkpoint's headers and the machine, before anything heavy is imported or any weight is read. A start that cannot
succeed is refused here, with what would fit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Literal

from tidemill.core.block_groups import pages_for
from tidemill.device_choice import Device, choose_device
from tidemill.errors import ConfigError
from tidemill.hardware import Hardware
from tidemill.layers.cache_layout import plain_numbers_per_token
from tidemill.models.count import WeightCount
from tidemill.models.shape import ModelShape
from tidemill.plan.memory import Cache, Plan, Wishes, cpu_budget, gpu_budget, make_plan
from tidemill.plan.offload import Offload, choose_offload
from tidemill.plan.parts import (
    CUDA_BYTES,
    RUNTIME_BYTES,
    Load,
    activations,
    cache_bytes_per_token,
    gpu_parts,
)
from tidemill.precision import (
    CACHE_BYTES,
    DTYPE_BYTES,
    QUANTISED_CACHES,
    StoredWeights,
    choose_cache_dtype,
    choose_dtype,
    choose_packing,
)
from tidemill.quant.packing import Packing
from tidemill.quant.scheme import supports

GIB = 2**30
LOAD_FORMATS = ("auto", "dummy")
SCHEDULING_POLICIES = ("fcfs", "priority")
_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
MOST_ROW_TOKENS = 2**30
"""Tokens of all rows on a GPU, whose places are counted in 32 bits, block tables included."""
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
SMALL_CARD_BYTES = 20 * GIB
MOST_GRAPH_ROWS = 512
"""Beyond, a step computes longer than it takes to launch."""


@dataclass(frozen=True)
class _Defaults:
    """What a device likes."""

    block_size: int
    max_num_seqs: int
    batched_tokens: int
    batched_why: str


CPU_DEFAULTS = _Defaults(16, 64, 512, "full speed on a CPU, short steps")
GPU_DEFAULTS = _Defaults(64, 256, 8192, "full speed on a GPU, short steps")
SMALL_GPU_DEFAULTS = _Defaults(64, 256, 2048, "a small card: more would take memory from the cache")


def log_level() -> str:
    """TIDEMILL_LOG_LEVEL, for the server and the engine alike."""
    level = os.environ.get("TIDEMILL_LOG_LEVEL") or "warning"
    if level.lower() not in LOG_LEVELS:
        raise ConfigError(
            f"TIDEMILL_LOG_LEVEL is {level!r}", cause="no such level", fix=f"use one of {', '.join(LOG_LEVELS)}"
        )
    return level.upper()


@dataclass(frozen=True)
class EngineArgs:
    """What the user asked for. Names are vLLM's flags."""

    model: str = "smollm2"
    revision: str | None = None
    tokenizer: str | None = None
    tokenizer_revision: str | None = None
    chat_template: str | None = None
    model_impl: str = "auto"
    trust_remote_code: bool = False
    check_weights: bool = False
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    scheduling_policy: str = "fcfs"
    max_waiting: int | None = None
    seed: int = 0
    threads: int | None = None
    device: str = "auto"
    enforce_eager: bool | None = None
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    cpu_offload_gb: float = 0.0
    load_format: str = "auto"

    def __post_init__(self) -> None:
        """Python callers can pass anything, and 'no' must not mean yes."""
        for field_ in fields(self):
            value = getattr(self, field_.name)
            words = str(field_.type).split(" | ")
            if not (value is None and "None" in words) and not isinstance(value, _TYPES[words[0]]):
                raise ConfigError(
                    f"{field_.name} is {value!r:.80}, expected {field_.type}",
                    param=field_.name,
                    fix=f"{field_.name}={field_.default!r}",
                )
            if isinstance(value, bool) and words[0] != "bool":
                raise ConfigError(f"{field_.name} is {value!r}, expected {field_.type}", param=field_.name)


@dataclass(frozen=True)
class EngineConfig:
    """What will run. `why` maps a field to the reason for its value."""

    model_path: str
    model_kind: Literal["folder", "gguf"]
    model_origin: str
    model_impl: Literal["native", "transformers"]
    trust_remote_code: bool
    check_weights: bool
    device: str
    dtype: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: str
    max_waiting: int
    seed: int
    vocab_size: int
    eos_ids: list[int]
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    block_windows: list[int | None] = field(default_factory=lambda: [None])
    """One entry per group of cache blocks: how many of the last positions its layers see, None for all."""
    why: dict[str, str] = field(default_factory=dict)

    cache_saving: float = 1.0
    """How many times more requests of full length fit than in a cache without windows and compression."""
    device_index: int = 0
    """Which card, as CUDA numbers them for this process."""
    device_name: str = ""
    enforce_eager: bool = True
    """No captured graphs."""
    graph_sizes: list[int] = field(default_factory=list)
    """Numbers of decoding rows for which a step is captured; empty: none is."""
    quantization: str | None = None
    """What the weights are packed into while loading: a name of `quant/scheme.py`, or `stored` for those that are
    quantised already and stay so."""
    kv_cache_dtype: str = "auto"
    """The dtype's own name or that of a narrower one; fp8 and int8 have scales."""
    offload_layers: int = 0
    """So many of the last layers stay in host memory and pass through the device."""
    load_format: str = "auto"
    plan: dict[str, int] = field(default_factory=dict)
    """Bytes of the device by part, as planned; with the cache they make up what is used."""

    @property
    def full_length_requests(self) -> float:
        """How many requests of max_model_len the cache holds at once."""
        pages = pages_for(self.max_model_len, self.block_size, self.block_windows, self.max_num_batched_tokens)
        return self.num_blocks / pages

    @property
    def num_cache_tokens(self) -> int:
        """Tokens of requests of full length."""
        return int(self.full_length_requests * self.max_model_len)


@dataclass(frozen=True)
class ModelFacts:
    """What resolving needs to know of a checkpoint: from its headers alone."""

    path: str
    kind: Literal["folder", "gguf"]
    origin: str
    shape: ModelShape
    impl: Literal["native", "transformers"]
    impl_why: str
    num_parameters: int
    stored: StoredWeights
    eos_ids: tuple[int, ...]
    count: WeightCount | None = None
    """What a native model holds, by part."""


def resolve(args: EngineArgs, facts: ModelFacts, hardware: Hardware) -> EngineConfig:
    why: dict[str, str] = {}
    shape = facts.shape
    why["model_impl"] = facts.impl_why
    device = choose_device(args.device, hardware)
    why["device"] = device.why
    dtype, why["dtype"] = choose_dtype(args.dtype, facts.stored.dtype, device, hardware)
    quantization, packing, why["quantization"] = choose_packing(
        args.quantization, facts.stored, device, hardware, native=facts.impl == "native", origin=facts.origin
    )
    if quantization is not None and facts.count is not None:
        why["quantization"] += f"; {facts.count.packed_share(packing):.0%} of the weights are packed"
    cache_dtype, why["kv_cache_dtype"] = choose_cache_dtype(args.kv_cache_dtype, dtype, device)
    defaults = _defaults(device)
    block_size = _positive("block_size", args.block_size, defaults.block_size, why, "default")
    reason = f"default on a {'CPU' if device.gpu is None else 'GPU'}"
    max_num_seqs = _positive("max_num_seqs", args.max_num_seqs, defaults.max_num_seqs, why, reason)
    threads = _positive("threads", args.threads, hardware.cores, why, hardware.cores_why)
    wanted_len = _wanted_length(args, shape, why)
    _check_rest(args, facts)
    chunked = True if args.enable_chunked_prefill is None else args.enable_chunked_prefill
    batched = _batched_tokens(args, defaults, chunked, wanted_len, max_num_seqs, why)
    graph_sizes = _graph_sizes(args, facts, device, min(max_num_seqs, batched), why)
    layers = (
        None if facts.count is None else [layer.nbytes(DTYPE_BYTES[dtype], packing) for layer in facts.count.layers]
    )
    offload, freed = choose_offload(args.cpu_offload_gb, layers, hardware, on_cpu=None if device.gpu else device.why)
    if freed is not None:
        why["offload_layers"] = freed
    per_token = cache_bytes_per_token(shape, CACHE_BYTES[cache_dtype], scaled=cache_dtype in QUANTISED_CACHES)
    cache = Cache(per_token * block_size, block_size, shape.layout.windows, batched)
    load = Load(
        shape,
        batched,
        max_num_seqs,
        DTYPE_BYTES[dtype],
        block_size,
        graph_sizes,
        _scratch(facts, packing, device, hardware, DTYPE_BYTES[dtype]),
    )
    weight_bytes = _weight_bytes(facts, DTYPE_BYTES[dtype], packing) - offload.host_bytes
    plan = _plan(args, device, hardware, load, weight_bytes, offload, cache, wanted_len, why)
    if device.gpu is not None and (max_num_seqs + 1) * (plan.max_model_len + 1) >= MOST_ROW_TOKENS:
        raise ConfigError(
            f"{max_num_seqs} sequences of {plan.max_model_len:,} tokens are more than the GPU's tables count",
            param="max_num_seqs",
            fix=f"--max-num-seqs {MOST_ROW_TOKENS // (plan.max_model_len + 1) // 2}",
        )
    return EngineConfig(
        model_path=facts.path,
        model_kind=facts.kind,
        model_origin=facts.origin,
        model_impl=facts.impl,
        trust_remote_code=args.trust_remote_code,
        check_weights=args.check_weights,
        device=device.kind,
        dtype=dtype,
        threads=threads,
        max_model_len=plan.max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=block_size,
        num_blocks=plan.num_blocks,
        enable_prefix_caching=True if args.enable_prefix_caching is None else args.enable_prefix_caching,
        enable_chunked_prefill=chunked,
        scheduling_policy=args.scheduling_policy,
        max_waiting=_positive("max_waiting", args.max_waiting, 16 * max_num_seqs, why, "16 per running seat"),
        seed=args.seed,
        vocab_size=shape.vocab_size,
        eos_ids=[token for token in facts.eos_ids if 0 <= token < shape.vocab_size],
        weight_bytes=weight_bytes,
        kv_bytes=plan.num_blocks * cache.per_block,
        activation_bytes=plan.parts["activations"],
        block_windows=list(shape.layout.windows),
        cache_saving=_saving(shape, cache, plan.max_model_len, DTYPE_BYTES[dtype], cache_dtype, why),
        why=why,
        device_index=device.index,
        device_name=hardware.cpu_name if device.gpu is None else device.gpu.name,
        enforce_eager=not graph_sizes,
        graph_sizes=graph_sizes,
        quantization=quantization,
        kv_cache_dtype=cache_dtype,
        offload_layers=offload.layers,
        load_format=args.load_format,
        plan=plan.parts,
    )


def _plan(
    args: EngineArgs,
    device: Device,
    hardware: Hardware,
    load: Load,
    weight_bytes: int,
    offload: Offload,
    cache: Cache,
    wanted_len: int,
    why: dict[str, str],
) -> Plan:
    wishes = Wishes(
        args.max_model_len, args.gpu_memory_utilization, args.kv_cache_memory_bytes, args.num_gpu_blocks_override
    )

    def on_cpu(length: int) -> dict[str, int]:
        needed = activations(load.shape, load.tokens, load.rows, length, load.element_size) + load.scratch
        return {"weights": weight_bytes, "activations": needed, "runtime": RUNTIME_BYTES}

    def on_gpu(length: int) -> dict[str, int]:
        fixed = {"weights": weight_bytes, "offload staging": offload.staging_bytes, "CUDA": CUDA_BYTES}
        # The cache has one page more than it hands out.
        return {**fixed, **gpu_parts(load, length), "padding": cache.per_block}

    if device.gpu is None:
        return make_plan(wishes, cpu_budget(wishes, hardware), on_cpu, cache, load.rows, wanted_len, why)
    return make_plan(wishes, gpu_budget(wishes, device.gpu, hardware.gpus), on_gpu, cache, load.rows, wanted_len, why)


def _weight_bytes(facts: ModelFacts, element_size: int, packing: Packing) -> int:
    if facts.count is None:
        return facts.num_parameters * element_size
    return facts.count.nbytes(element_size, packing)


def _scratch(facts: ModelFacts, packing: Packing, device: Device, hardware: Hardware, element_size: int) -> int:
    """Packed matrices are unpacked one at a time where a step has many tokens; on a CPU without kernels always, by way
    of integers. fp8 goes by way of float32 where it is not multiplied as it is."""
    if facts.count is None or not (largest := facts.count.largest_packed(packing)):
        return 0
    if device.gpu is None:
        return 0 if hardware.no_cpu_kernels is None else largest * 12
    scheme = packing.on_load
    widened = (
        scheme is not None
        and scheme.kind == "fp8"
        and (element_size == 4 or supports(scheme, device.gpu.capability) is not None)
    )
    return largest * (8 if widened else element_size)


def _defaults(device: Device) -> _Defaults:
    if device.gpu is None:
        return CPU_DEFAULTS
    return SMALL_GPU_DEFAULTS if device.gpu.total_bytes < SMALL_CARD_BYTES else GPU_DEFAULTS


def _wanted_length(args: EngineArgs, shape: ModelShape, why: dict[str, str]) -> int:
    reason = "the model's own limit"
    if shape.longest_context > shape.max_position:
        reason += f"; its rope scaling allows up to {shape.longest_context:,} with --max-model-len"
    wanted = _positive("max_model_len", args.max_model_len, shape.max_position, why, reason)
    if wanted < 2:
        raise ConfigError(
            f"max_model_len is {wanted}, it must be at least 2: one prompt token and one new one",
            param="max_model_len",
            fix="leave --max-model-len out for the longest that fits",
        )
    if wanted > shape.longest_context:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {shape.longest_context} positions the model was made for",
            param="max_model_len",
            cause="its config says so; beyond it the answers turn to noise",
            fix=f"--max-model-len {shape.longest_context}",
        )
    return wanted


def _graph_sizes(args: EngineArgs, facts: ModelFacts, device: Device, most: int, why: dict[str, str]) -> list[int]:
    if device.gpu is None:
        why["graph_sizes"] = "graphs are for GPUs"
    elif args.enforce_eager:
        why["graph_sizes"] = "--enforce-eager as asked for"
    elif facts.impl == "transformers":
        why["graph_sizes"] = "transformers' own code is not captured"
    elif args.cpu_offload_gb > 0:
        why["graph_sizes"] = "layers that pass through the device are not captured (--cpu-offload-gb)"
    else:
        why["graph_sizes"] = "decoding steps are captured once and replayed"
        most = min(most, MOST_GRAPH_ROWS)
        sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_GRAPH_ROWS + 1, 32)]
        return sorted({size for size in sizes if size < most} | {most})
    if args.enforce_eager is False:
        raise ConfigError(
            "enforce_eager is off, but this start can use no graphs",
            param="enforce_eager",
            cause=why["graph_sizes"],
            fix="leave --no-enforce-eager out",
        )
    return []


def _positive(name: str, given: int | None, default: int, why: dict[str, str], reason: str) -> int:
    why[name] = reason if given is None else "asked for"
    value = default if given is None else given
    if value < 1:
        fix = f"leave --{name.replace('_', '-')} out for the default of {default}"
        raise ConfigError(f"{name} must be at least 1, got {value}", param=name, fix=fix)
    return value


def _check_rest(args: EngineArgs, facts: ModelFacts) -> None:
    if args.scheduling_policy not in SCHEDULING_POLICIES:
        raise ConfigError(
            f"scheduling_policy {args.scheduling_policy!r} is unknown",
            param="scheduling_policy",
            fix=f"use one of {', '.join(SCHEDULING_POLICIES)}",
        )
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"seed {args.seed} is not a 64-bit integer", param="seed", fix="--seed 0")
    check_load_format(args.load_format)
    if args.load_format == "dummy" and facts.impl != "native":
        raise ConfigError(
            "load_format dummy needs a native model",
            param="load_format",
            cause="transformers' own code loads its weights itself",
            fix="leave --load-format out",
        )
    if args.load_format == "dummy" and args.check_weights:
        raise ConfigError(
            "check_weights has nothing to check",
            param="check_weights",
            cause="load_format dummy reads no weights",
            fix="leave --check-weights out",
        )


def check_load_format(name: str) -> None:
    if name not in LOAD_FORMATS:
        raise ConfigError(
            f"load_format {name!r} is unknown",
            param="load_format",
            cause="how weights are stored is seen from their files",
            fix=f"use one of {', '.join(LOAD_FORMATS)}",
        )


def _batched_tokens(
    args: EngineArgs, defaults: _Defaults, chunked: bool, length: int, rows: int, why: dict[str, str]
) -> int:
    # So many already run at a device's full matrix rate; more would only delay the others' next token.
    default, reason = (max(defaults.batched_tokens, rows), defaults.batched_why)
    if not chunked:
        default, reason = max(length, rows), "no chunked prefill"
    value = _positive("max_num_batched_tokens", args.max_num_batched_tokens, default, why, reason)
    if not chunked and value < length:
        raise ConfigError(
            f"without chunked prefill a prompt must fit one step: max_num_batched_tokens ({value}) is less than "
            f"max_model_len ({length})",
            param="max_num_batched_tokens",
            fix=f"--max-num-batched-tokens {length}, or --enable-chunked-prefill",
        )
    return value


def _saving(
    shape: ModelShape, cache: Cache, length: int, element_size: int, cache_dtype: str, why: dict[str, str]
) -> float:
    plain = plain_numbers_per_token(shape.caches) * element_size * -(-length // cache.block_size) * cache.block_size
    saving = plain / (cache.blocks(length) * cache.per_block)
    compressed = any(layer.uncompressed for layer in shape.caches)
    windows = sorted({window for window in cache.windows if window is not None})
    if windows and saving > 1.0:
        reach = " and ".join(f"{window:,}" for window in windows)
        count = sum(1 for layer in shape.caches if layer.window is not None)
        why["cache_saving"] = f"{count} of {len(shape.caches)} layers keep only their window of {reach} tokens"
    elif compressed:
        why["cache_saving"] = "keys and values are kept compressed"
    if CACHE_BYTES[cache_dtype] < element_size:
        why["cache_saving"] = "; ".join(filter(None, (why.get("cache_saving"), f"numbers are kept as {cache_dtype}")))
    return saving
