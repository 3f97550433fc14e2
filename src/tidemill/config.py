"""Every engine setting, resolved once into a frozen object that remembers why each value was chosen.

`EngineArgs` is what the user said, None meaning "inferred"; `resolve` turns it into an `EngineConfig` from the
checkpoint's headers and the machine, before anything heavy is imported or any weight is read. A start that cannot
succeed is refused here, with what would fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

from tidemill.core.block_groups import pages_for
from tidemill.errors import ConfigError, OutOfMemory
from tidemill.hardware import Hardware
from tidemill.layers.cache_layout import plain_numbers_per_token
from tidemill.models.shape import ModelShape

GIB = 2**30
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPE_SPELLINGS = {"float": "float32", "half": "float16"}
SCHEDULING_POLICIES = ("fcfs", "priority")
_TYPES: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "bool": bool, "float": (int, float)}
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")
DEFAULT_BLOCK_SIZE = 16
MIN_BLOCKS = 2
"""Of every group of layers: one for a prompt and one for an answer."""
DEFAULT_CACHE_BYTES = 4 * GIB
GATHERED_TOKENS = 32768
"""Most tokens of keys and values that attention copies together out of the cache, see `layers/attention.py`."""
SCORES_BY_HAND = 2**21
"""Most scores that attention holds at a time where it computes them itself, see `ops/reference.py`."""
RUNTIME_BYTES = 400 * 2**20
"""What Python, torch and its thread pools hold before any model: measured 300 to 400 MB."""


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
    stored_dtype: str
    eos_ids: tuple[int, ...]


def resolve(args: EngineArgs, facts: ModelFacts, hardware: Hardware) -> EngineConfig:
    why: dict[str, str] = {}
    shape = facts.shape
    why["model_impl"] = facts.impl_why
    device = _device(args, why)
    dtype = _dtype(args, facts, hardware, why)
    block_size = _positive("block_size", args.block_size, DEFAULT_BLOCK_SIZE, why, "default")
    max_num_seqs = _positive("max_num_seqs", args.max_num_seqs, 64, why, "default on a CPU")
    threads = _positive("threads", args.threads, hardware.cores, why, hardware.cores_why)
    reason = "the model's own limit"
    if shape.longest_context > shape.max_position:
        reason += f"; its rope scaling allows up to {shape.longest_context:,} with --max-model-len"
    wanted_len = _positive("max_model_len", args.max_model_len, shape.max_position, why, reason)
    if wanted_len < 2:
        raise ConfigError(
            f"max_model_len is {wanted_len}, it must be at least 2: one prompt token and one new one",
            param="max_model_len",
            fix="leave --max-model-len out for the longest that fits",
        )
    _check_length(shape, wanted_len)
    _check_rest(args)
    chunked = True if args.enable_chunked_prefill is None else args.enable_chunked_prefill
    batched = _batched_tokens(args, chunked, wanted_len, max_num_seqs, why)
    weight_bytes = facts.num_parameters * DTYPE_BYTES[dtype]
    windows, per_block = shape.layout.windows, shape.layout.numbers_per_token * DTYPE_BYTES[dtype] * block_size
    cache = _Cache(per_block, block_size, windows, batched)

    def fit(planned: int, wanted: int) -> tuple[int, int, int]:
        """Activations for steps over `planned` tokens of context, blocks beside them, and the context these hold."""
        activation_bytes = activations(shape, batched, max_num_seqs, planned, DTYPE_BYTES[dtype])
        room = _room(args, hardware, weight_bytes + activation_bytes)
        num_blocks = _num_blocks(args, room, cache, wanted, max_num_seqs, why)
        return activation_bytes, num_blocks, _fitting_length(args, wanted, num_blocks, room, cache, why)

    activation_bytes, num_blocks, max_model_len = _longest_fit(args, fit, wanted_len, why)
    return EngineConfig(
        model_path=facts.path,
        model_kind=facts.kind,
        model_origin=facts.origin,
        model_impl=facts.impl,
        trust_remote_code=args.trust_remote_code,
        check_weights=args.check_weights,
        device=device,
        dtype=dtype,
        threads=threads,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=True if args.enable_prefix_caching is None else args.enable_prefix_caching,
        enable_chunked_prefill=chunked,
        scheduling_policy=args.scheduling_policy,
        max_waiting=_positive("max_waiting", args.max_waiting, 16 * max_num_seqs, why, "16 per running seat"),
        seed=args.seed,
        vocab_size=shape.vocab_size,
        eos_ids=[token for token in facts.eos_ids if 0 <= token < shape.vocab_size],
        weight_bytes=weight_bytes,
        kv_bytes=num_blocks * per_block,
        activation_bytes=activation_bytes,
        block_windows=list(windows),
        cache_saving=_saving(shape, cache, max_model_len, DTYPE_BYTES[dtype], why),
        why=why,
    )


def _longest_fit(
    args: EngineArgs, fit: Callable[[int, int], tuple[int, int, int]], wanted: int, why: dict[str, str]
) -> tuple[int, int, int]:
    """A longer context needs larger masks and tables beside the cache. One that nobody asked for is tried at a moderate
    length first, so that it is shortened rather than refused."""
    if args.max_model_len is not None:
        return fit(wanted, wanted)
    moderate = min(wanted, GATHERED_TOKENS)
    found = fit(moderate, wanted)
    if found[2] <= moderate:
        return found
    try:
        return fit(found[2], wanted)
    except OutOfMemory:
        why["max_model_len"] = f"the masks and tables of longer contexts do not fit (the model allows {wanted})"
        return fit(moderate, moderate)


def activations(shape: ModelShape, tokens: int, rows: int, length: int, element_size: int) -> int:
    """Peak of a step beside weights and cache: the widest layer's tensors for every token, the rows' logits, what
    attention gathers (one group's keys and values, and a chunk's mask over the whole context), and rotary tables."""
    layer = element_size * tokens * (3 * shape.hidden_size + shape.widest_layer)
    logits = 4 * 4 * min(rows, tokens) * shape.vocab_size
    gathered = max(length, min(GATHERED_TOKENS, rows * length))
    keys_values = element_size * gathered * max(cache.kv_heads * 2 * cache.key_dim for cache in shape.caches)
    masks = (element_size + 1) * tokens * length * len(set(shape.layout.windows))
    scores = 3 * 4 * SCORES_BY_HAND if shape.scores_by_hand else 0
    return layer + logits + keys_values + masks + scores + 4 * shape.rope_width * length


def _device(args: EngineArgs, why: dict[str, str]) -> str:
    if args.device not in ("auto", "cpu"):
        raise ConfigError(
            f"device {args.device!r} is not available in this build", param="device", fix="use --device cpu"
        )
    why["device"] = "asked for" if args.device == "cpu" else "the CPU is the device this build runs on"
    return "cpu"


def _dtype(args: EngineArgs, facts: ModelFacts, hardware: Hardware, why: dict[str, str]) -> str:
    asked = DTYPE_SPELLINGS.get(args.dtype, args.dtype)
    if asked in DTYPE_BYTES:
        if asked == "float16":
            raise ConfigError("float16 has no CPU kernels worth using", param="dtype", fix="use --dtype float32")
        why["dtype"] = "asked for"
        if asked == "bfloat16" and not hardware.fast_bf16:
            why["dtype"] = "asked for, but this CPU has no bfloat16 instructions: expect it to be slow"
        return asked
    if asked != "auto":
        names = ", ".join(["auto", *DTYPE_BYTES, *DTYPE_SPELLINGS])
        raise ConfigError(f"dtype {args.dtype!r} is unknown", param="dtype", fix=f"use one of {names}")
    if not hardware.fast_bf16:
        why["dtype"] = "this CPU has no bfloat16 instructions"
        return "float32"
    if facts.stored_dtype == "F32":
        why["dtype"] = "as stored"
        return "float32"
    why["dtype"] = f"this CPU multiplies bfloat16 in hardware; stored as {facts.stored_dtype}"
    return "bfloat16"


def _positive(name: str, given: int | None, default: int, why: dict[str, str], reason: str) -> int:
    why[name] = reason if given is None else "asked for"
    value = default if given is None else given
    if value < 1:
        fix = f"leave --{name.replace('_', '-')} out for the default of {default}"
        raise ConfigError(f"{name} must be at least 1, got {value}", param=name, fix=fix)
    return value


def _check_length(shape: ModelShape, wanted: int) -> None:
    if wanted > shape.longest_context:
        raise ConfigError(
            f"max_model_len {wanted} is more than the {shape.longest_context} positions the model was made for",
            param="max_model_len",
            cause="its config says so; beyond it the answers turn to noise",
            fix=f"--max-model-len {shape.longest_context}",
        )


def _check_rest(args: EngineArgs) -> None:
    if args.scheduling_policy not in SCHEDULING_POLICIES:
        raise ConfigError(
            f"scheduling_policy {args.scheduling_policy!r} is unknown",
            param="scheduling_policy",
            fix=f"use one of {', '.join(SCHEDULING_POLICIES)}",
        )
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"seed {args.seed} is not a 64-bit integer", param="seed", fix="--seed 0")


def _batched_tokens(args: EngineArgs, chunked: bool, length: int, rows: int, why: dict[str, str]) -> int:
    # 512 rows already run at the CPU's full matrix rate; more would only delay the others' next token.
    default, reason = (
        (max(512, rows), "full speed on a CPU, short steps") if chunked else (length, "no chunked prefill")
    )
    value = _positive("max_num_batched_tokens", args.max_num_batched_tokens, default, why, reason)
    if not chunked and value < length:
        raise ConfigError(
            f"without chunked prefill a prompt must fit one step: max_num_batched_tokens ({value}) is less than "
            f"max_model_len ({length})",
            param="max_num_batched_tokens",
            fix=f"--max-num-batched-tokens {length}, or --enable-chunked-prefill",
        )
    return value


@dataclass(frozen=True)
class _Room:
    """What is left for the KV cache, and how that was reckoned."""

    free: int
    share: str
    story: str


def _room(args: EngineArgs, hardware: Hardware, fixed_bytes: int) -> _Room:
    utilization = 0.9 if args.gpu_memory_utilization is None else args.gpu_memory_utilization
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(
            f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}",
            param="gpu_memory_utilization",
            fix="--gpu-memory-utilization 0.9",
        )
    free = int(hardware.available_bytes * utilization) - fixed_bytes - RUNTIME_BYTES
    return _Room(
        free,
        f"{utilization:.0%} of {hardware.memory_why}, less weights and activations",
        f"{hardware.available_bytes / GIB:.2f} GiB available ({hardware.memory_why}), {utilization:.0%} of it usable; "
        f"weights and activations take {fixed_bytes / GIB:.2f} GiB, the runtime {RUNTIME_BYTES / GIB:.2f}; "
        f"{max(0, free) / GIB:.2f} GiB are left for the KV cache",
    )


@dataclass(frozen=True)
class _Cache:
    """How a request's length turns into blocks and bytes."""

    per_block: int
    block_size: int
    windows: tuple[int | None, ...]
    budget: int

    @property
    def fewest(self) -> int:
        return MIN_BLOCKS * len(self.windows)

    def blocks(self, length: int) -> int:
        """Most blocks that a request of this length holds at a time."""
        return pages_for(length, self.block_size, self.windows, self.budget)

    def longest(self, num_blocks: int, limit: int) -> int:
        """The longest request that so many blocks hold, at most `limit` tokens; 0 if none."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks(middle) <= num_blocks else (low, middle - 1)
        return low


def _saving(shape: ModelShape, cache: _Cache, length: int, element_size: int, why: dict[str, str]) -> float:
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
    return saving


def _num_blocks(args: EngineArgs, room: _Room, cache: _Cache, length: int, rows: int, why: dict[str, str]) -> int:
    per_block = cache.per_block
    if room.free < per_block * cache.fewest:
        raise OutOfMemory(
            "the model does not fit in memory",
            cause=room.story,
            fix="use a smaller model, --dtype bfloat16, a smaller --max-num-seqs or --max-num-batched-tokens, or a "
            "machine with more memory",
        )
    asked = _asked_blocks(args, cache)
    if asked is not None:
        name, number, why["num_blocks"] = asked
        if number * per_block > room.free:
            most = room.free if name == "kv_cache_memory_bytes" else room.free // per_block
            raise OutOfMemory(
                f"{name}: a KV cache of {number * per_block / GIB:.2f} GiB does not fit",
                param=name,
                cause=room.story,
                fix=f"--{name.replace('_', '-')} {most}",
            )
        return number
    one = cache.blocks(length) * per_block
    cap = DEFAULT_CACHE_BYTES if args.gpu_memory_utilization is None else room.free
    budget = min(room.free, one * rows, max(cap, one))
    if budget == room.free:
        why["num_blocks"] = room.share
    elif budget == one * rows:
        why["num_blocks"] = "every seat at full length"
    else:
        why["num_blocks"] = "4 GiB unless --gpu-memory-utilization or --kv-cache-memory-bytes says otherwise"
    return max(cache.fewest, budget // per_block)


def _asked_blocks(args: EngineArgs, cache: _Cache) -> tuple[str, int, str] | None:
    """The field that says how large the cache is, the blocks it asks for and the reason to tell; None if none does."""
    number, nbytes, per_block = args.num_gpu_blocks_override, args.kv_cache_memory_bytes, cache.per_block
    if number is not None and nbytes is not None:
        raise ConfigError(
            "num_gpu_blocks_override and kv_cache_memory_bytes both say how large the KV cache is",
            param="num_gpu_blocks_override",
            fix="leave --num-gpu-blocks-override out",
        )
    if number is not None:
        if number < 1:
            raise ConfigError(
                f"num_gpu_blocks_override must be at least 1, got {number}",
                param="num_gpu_blocks_override",
                fix="leave --num-gpu-blocks-override out",
            )
        return "num_gpu_blocks_override", number, "asked for"
    if nbytes is not None:
        if nbytes < per_block * cache.fewest:
            raise ConfigError(
                f"kv_cache_memory_bytes is {nbytes}, which holds no {cache.fewest} blocks of {per_block} bytes",
                param="kv_cache_memory_bytes",
                fix=f"--kv-cache-memory-bytes {per_block * cache.fewest} or more",
            )
        return "kv_cache_memory_bytes", nbytes // per_block, "kv_cache_memory_bytes as asked"
    return None


def _fitting_length(
    args: EngineArgs, wanted: int, num_blocks: int, room: _Room, cache: _Cache, why: dict[str, str]
) -> int:
    """The length asked for, or the longest the cache holds where nobody asked for one."""
    holds = cache.longest(num_blocks, wanted)
    if holds >= wanted:
        return wanted
    if args.max_model_len is not None:
        needed = cache.blocks(wanted) * cache.per_block
        larger = ""
        if needed <= room.free:
            larger = f", or --kv-cache-memory-bytes {needed}"
        raise OutOfMemory(
            f"max_model_len {wanted} does not fit: the KV cache holds {holds} tokens",
            param="max_model_len",
            cause=f"one request of that length needs {needed / GIB:.2f} GiB of cache; {why['num_blocks']}",
            fix=f"--max-model-len {holds}{larger}",
        )
    if holds < 2:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks of {cache.block_size} tokens holds no prompt and answer",
            param="num_gpu_blocks_override",
            fix=f"--num-gpu-blocks-override {cache.blocks(wanted)} or more",
        )
    why["max_model_len"] = f"the longest that fits the cache (the model allows {wanted})"
    return holds
