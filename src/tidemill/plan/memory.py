"""How a device's memory is divided before any of it is used: fixed parts first, the rest is the KV cache.

Decides how many blocks there are and how long a context they hold; what cannot fit is refused with the sums and with
what would. Torch-free. Knows neither how large the parts are made (`parts.py`) nor what a device is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.core.block_groups import pages_for
from tidemill.errors import ConfigError, OutOfMemory
from tidemill.hardware import Hardware
from tidemill.nvidia import Gpu
from tidemill.plan.parts import GATHERED_TOKENS

GIB = 2**30
USUAL_SHARE = 0.9
MIN_BLOCKS = 2
"""Of every group of layers: one for a prompt and one for an answer."""
DEFAULT_CACHE_BYTES = 4 * GIB
"""On a CPU, whose memory others want too."""
MOST_BLOCKS = 2**19
"""More are never handed out by anybody, and each costs the scheduler memory and a moment at start-up."""
OTHERS_WORTH_NAMING = GIB
"""Below, a card is as good as free: its driver holds some itself."""


@dataclass(frozen=True)
class Wishes:
    """What the user said about memory; None: nothing."""

    max_model_len: int | None = None
    utilization: float | None = None
    cache_bytes: int | None = None
    num_blocks: int | None = None


@dataclass(frozen=True)
class Budget:
    """What may be used in all, and how to tell it."""

    usable: int
    story: str
    """What there is and how much of it may be used."""
    share: str
    advice: str
    """What to do when it is too little."""
    shared: bool = False
    """Others want this memory too: no more than the seats need is taken..."""
    cap: int | None = None
    """...and no more than this, unless somebody asks."""


def cpu_budget(wishes: Wishes, hardware: Hardware) -> Budget:
    utilization = _utilization(wishes)
    return Budget(
        int(hardware.available_bytes * utilization),
        f"{hardware.available_bytes / GIB:.2f} GiB available ({hardware.memory_why}), {utilization:.0%} of it usable",
        f"{utilization:.0%} of {hardware.memory_why}, less weights and activations",
        "use a smaller model, --dtype bfloat16, a smaller --max-num-seqs or --max-num-batched-tokens, or a machine "
        "with more memory",
        True,
        DEFAULT_CACHE_BYTES if wishes.utilization is None else None,
    )


def gpu_budget(wishes: Wishes, gpu: Gpu, cards: Sequence[Gpu] = ()) -> Budget:
    """The share counts of the whole card, so that two engines of 0.45 each get along; what all hold together stays
    within the usual share, or the one asked for where that is larger. `cards`: all there are, as CUDA numbers them."""
    utilization = _utilization(wishes)
    story = f"{gpu.name} has {gpu.total_bytes / GIB:.2f} GiB, {utilization:.0%} of it usable"
    advice = (
        "use a smaller model, --quantization int4, --cpu-offload-gb, or a smaller --max-num-seqs or "
        "--max-num-batched-tokens"
    )
    if gpu.used_bytes >= OTHERS_WORTH_NAMING:
        story += f", others hold {gpu.used_bytes / GIB:.2f} GiB of it now"
        advice = f"end what else runs on the card (nvidia-smi lists it), or {advice}"
    freer = [card for card in cards if card.capability >= gpu.capability and card.free_bytes > gpu.free_bytes]
    if freer:
        freest = max(freer, key=lambda card: card.free_bytes)
        advice = f"--device cuda:{cards.index(freest)} ({freest.free_bytes / GIB:.0f} GiB are free there), or {advice}"
    share, left = int(gpu.total_bytes * utilization), int(gpu.total_bytes * max(utilization, USUAL_SHARE))
    left -= gpu.used_bytes
    if share < left:
        advice = f"--gpu-memory-utilization {USUAL_SHARE}, or {advice}"
    usable = min(share, left)
    return Budget(usable, story, f"{utilization:.0%} of the card, less everything else", advice)


def _utilization(wishes: Wishes) -> float:
    utilization = USUAL_SHARE if wishes.utilization is None else wishes.utilization
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(
            f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}",
            param="gpu_memory_utilization",
            fix=f"--gpu-memory-utilization {USUAL_SHARE}",
        )
    return utilization


@dataclass(frozen=True)
class Cache:
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


@dataclass(frozen=True)
class Plan:
    num_blocks: int
    max_model_len: int
    parts: dict[str, int]
    """Bytes of everything but the cache."""


Parts = Callable[[int], Mapping[str, int]]
"""What steps over contexts of a length take beside the cache, by name."""


def make_plan(
    wishes: Wishes, budget: Budget, parts: Parts, cache: Cache, rows: int, wanted: int, why: dict[str, str]
) -> Plan:
    """A longer context needs larger tables beside the cache. One that nobody asked for is tried at a moderate length
    first, so that it is shortened rather than refused."""

    def fit(planned: int, wanted: int) -> Plan:
        taken = dict(parts(planned))
        room = _Room(budget, taken)
        num_blocks = _num_blocks(wishes, room, cache, wanted, rows, why)
        return Plan(num_blocks, _fitting_length(wishes, wanted, num_blocks, room, cache, why), taken)

    if wishes.max_model_len is not None:
        return fit(wanted, wanted)
    moderate = min(wanted, GATHERED_TOKENS)
    found = fit(moderate, wanted)
    if found.max_model_len <= moderate:
        return found
    try:
        return fit(found.max_model_len, wanted)
    except OutOfMemory:
        why["max_model_len"] = f"the tables of longer contexts do not fit (the model allows {wanted})"
        return fit(moderate, moderate)


class _Room:
    """What is left for the KV cache, and how that was reckoned."""

    def __init__(self, budget: Budget, parts: Mapping[str, int]) -> None:
        self.budget = budget
        self.free = budget.usable - sum(parts.values())
        taken = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        self.story = (
            f"{budget.story}; taken in GiB: {taken}; {max(0, self.free) / GIB:.2f} GiB are left for the KV cache"
        )


def _num_blocks(wishes: Wishes, room: _Room, cache: Cache, length: int, rows: int, why: dict[str, str]) -> int:
    per_block = cache.per_block
    if room.free < per_block * cache.fewest:
        raise OutOfMemory("the model does not fit in memory", cause=room.story, fix=room.budget.advice)
    asked = _asked_blocks(wishes, cache)
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
    limits = [(room.free, room.budget.share)]
    if room.budget.shared:
        limits.append((one * rows, "every seat at full length"))
    else:
        # What no seat needs keeps prefixes for later.
        limits.append((max(one, MOST_BLOCKS * per_block), f"{MOST_BLOCKS:,} blocks are as many as are worth keeping"))
    if room.budget.cap is not None:
        reason = "4 GiB unless --gpu-memory-utilization or --kv-cache-memory-bytes says otherwise"
        limits.append((max(one, room.budget.cap), reason))
    size, why["num_blocks"] = min(limits, key=lambda limit: limit[0])
    return max(cache.fewest, size // per_block)


def _asked_blocks(wishes: Wishes, cache: Cache) -> tuple[str, int, str] | None:
    """The field that says how large the cache is, the blocks it asks for and the reason to tell; None if none does."""
    number, nbytes, per_block = wishes.num_blocks, wishes.cache_bytes, cache.per_block
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
    wishes: Wishes, wanted: int, num_blocks: int, room: _Room, cache: Cache, why: dict[str, str]
) -> int:
    """The length asked for, or the longest the cache holds where nobody asked for one."""
    holds = cache.longest(num_blocks, wanted)
    if holds >= wanted:
        return wanted
    if wishes.max_model_len is not None:
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
