"""Attention of one ragged step over a paged cache on a GPU: chooses tiles and splits, and launches.

Sequences that decode and sequences that prefill are two launches of one kernel (`attention_kernels.py`). Everything a
launch depends on is known on the host without asking the device, so a step can be captured in a graph. Knows nothing of
layers; `layers/triton_attention.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import torch
import triton

from tidemill.ops.triton import attention_kernels as kernels
from tidemill.ops.triton.card import has_tensor_cores, multiprocessors, shared_memory
from tidemill.ops.triton.overlap import overlap
from tidemill.ops.triton.tuning import launch_config

Kind = Literal["decode", "split", "prefill", "short"]
"""Decoding whole contexts, or splits of them; prefill, or prefill of so few tokens that most of a tile were empty."""

KERNEL = "paged_attention"
"""Its name among the launch parameters."""
PROGRAMS_PER_PROCESSOR = 3
"""Contexts are split until there are about this many programs for each of the GPU's processors."""
MAX_SPLITS = 64
SMALLEST_DOT = 16
"""No side of a matrix product may be shorter."""


@dataclass(frozen=True)
class Launch:
    """How one kind of launch is cut: rows of queries, keys at a time, warps, and stages of the pipeline."""

    block_m: int
    tile_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class HeadShape:
    """What of a head decides how its attention is cut."""

    group: int
    """Query heads per kv head."""
    key_dim: int
    value_dim: int
    shared: bool
    """The values are the first numbers of the keys."""
    itemsize: int
    """Bytes of a number of the queries..."""
    cache_itemsize: int
    """...and of the cache."""

    @property
    def main(self) -> int:
        """Keys are multiplied in two parts, so that 576 numbers are not padded to 1024. Shared values are the first."""
        if self.shared:
            return self.value_dim
        return 1 << (self.key_dim.bit_length() - 1)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Of a key's main part, of its rest (0: none), and of a value: padded to what the device multiplies."""
        rest = self.key_dim - self.main
        return _padded(self.main), _padded(rest) if rest else 0, _padded(self.value_dim)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    table: torch.Tensor,
    rows: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    num_decode: int,
    max_query_len: int,
    window: int | None = None,
    soft_cap: float | None = None,
    slopes: torch.Tensor | None = None,
    value_dim: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    splits: int | None = None,
    launches: Mapping[Kind, Launch] | None = None,
) -> torch.Tensor:
    """q [tokens, heads, key_dim] -> [tokens, heads, value_dim]; sequences as `layers/device_batch.py` has them.

    Without `v_cache` the values are the first `value_dim` numbers of the keys. `splits` (a power of two) instead of as
    many as fill the card, and `launches` instead of the measured ones, are for tuning and for tests.
    """
    if v_cache is not None:
        value_dim = v_cache.shape[-1]
    elif value_dim is None:
        raise ValueError("value_dim: without v_cache it must say how many numbers of a key are its value")
    if q.stride(-1) != 1 or k_cache.stride(-1) != 1 or (v_cache is not None and v_cache.stride(-1) != 1):
        raise ValueError("q, k_cache, v_cache: the numbers of a head must stand side by side; call .contiguous()")
    tokens, heads, key_dim = q.shape
    kv_heads = k_cache.shape[2]
    shape = HeadShape(heads // kv_heads, key_dim, value_dim, v_cache is None, q.element_size(), k_cache.element_size())
    out = torch.empty(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    if k_scale is not None and v_scale is None:
        v_scale = k_scale
    if k_scale is not None and v_scale is not None and k_scale.stride() != v_scale.stride():
        raise ValueError("k_scale, v_scale: both must have the same strides")

    def launch(kind: Kind, cut: Launch, units: int, parts: tuple[Any, Any, Any] = (None, None, None)) -> None:
        decode = kind in ("decode", "split")
        tile_heads = min(shape.group, cut.block_m)
        main_width, rest_width, value_width = shape.widths
        kernels.attend[(units * kv_heads * triton.cdiv(shape.group, tile_heads), splits if kind == "split" else 1)](
            out,
            *parts,
            q,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            table,
            rows,
            query_starts,
            context_lens,
            slopes,
            scale,
            soft_cap or 0.0,
            window or 0,
            num_decode,
            rows.shape[0],
            *q.stride()[:2],
            *out.stride()[:2],
            table.stride(0),
            *k_cache.stride()[:3],
            *((0, 0, 0) if v_cache is None else v_cache.stride()[:3]),
            *((0, 0, 0) if k_scale is None else k_scale.stride()),
            DECODE=decode,
            SPLITS=splits if kind == "split" else 1,
            WINDOW=window is not None,
            SOFT_CAP=soft_cap is not None,
            ALIBI=slopes is not None,
            SCALED=k_scale is not None,
            SHARED=shape.shared,
            MAIN=shape.main,
            MAIN_WIDTH=main_width,
            REST=key_dim - shape.main,
            REST_WIDTH=rest_width,
            VALUE=value_dim,
            VALUE_WIDTH=value_width,
            BLOCK_SIZE=k_cache.shape[1],
            KV_HEADS=kv_heads,
            GROUP=shape.group,
            TILE_TOKENS=1 if decode else cut.block_m // tile_heads,
            TILE_HEADS=tile_heads,
            BLOCK_M=cut.block_m,
            TILE_N=cut.tile_n,
            num_warps=cut.num_warps,
            num_stages=cut.num_stages,
            **overlap(),
        )

    if num_decode > 0:
        if splits is None:
            splits = num_splits(num_decode * kv_heads, multiprocessors(q.device))
        if splits == 1:
            launch("decode", _cut("decode", shape, launches), num_decode)
        else:
            sums = torch.empty(num_decode, heads, splits, value_dim, dtype=torch.float32, device=q.device)
            peaks = torch.empty(2, num_decode, heads, splits, dtype=torch.float32, device=q.device)
            launch("split", _cut("split", shape, launches), num_decode, (sums, peaks[0], peaks[1]))
            chunk = min(128, triton.next_power_of_2(value_dim))
            kernels.merge_splits[(num_decode * heads, triton.cdiv(value_dim, chunk))](
                out,
                sums,
                *peaks,
                *out.stride()[:2],
                HEADS=heads,
                SPLITS=splits,
                VALUE=value_dim,
                CHUNK=chunk,
                **overlap(),
            )
    num_prefill = rows.shape[0] - num_decode
    if num_prefill > 0:
        cut = _cut("prefill", shape, launches)
        if 2 * max_query_len * shape.group <= cut.block_m:
            cut = _cut("short", shape, launches)
        tile_tokens = cut.block_m // min(shape.group, cut.block_m)
        launch("prefill", cut, (tokens - num_decode) // tile_tokens + num_prefill)
    return out


def num_splits(programs: int, processors: int) -> int:
    """Into how many parts each context is cut so that the programs fill the card: a power of two."""
    wanted = PROGRAMS_PER_PROCESSOR * processors // programs
    return min(triton.next_power_of_2(max(wanted, 1)), MAX_SPLITS)


def _cut(kind: Kind, shape: HeadShape, launches: Mapping[Kind, Launch] | None) -> Launch:
    return launches[kind] if launches is not None and kind in launches else measured_launch(kind, shape)


@cache
def measured_launch(kind: Kind, shape: HeadShape) -> Launch:
    """The card's measured cut, or the default, made to fit its shared memory."""
    return _fitted(Launch(**launch_config(KERNEL, launch_key(kind, shape), asdict(default_launch(kind, shape)))), shape)


def launch_key(kind: Kind, shape: HeadShape) -> str:
    key = f"{shape.key_dim}x{shape.group}x{kind}"
    if shape.itemsize > 2:
        return f"{key}x32bit"
    return f"{key}x8bit" if shape.cache_itemsize < shape.itemsize else key


def default_launch(kind: Kind, shape: HeadShape) -> Launch:
    width = sum(shape.widths[:2])
    if shape.itemsize > 2 or not has_tensor_cores():
        # Multiplied from registers: small tiles.
        return Launch(SMALLEST_DOT if kind in ("decode", "split") or width > 128 else 32, 16, 4, 1)
    if kind in ("decode", "split"):
        block_m = min(max(triton.next_power_of_2(shape.group), SMALLEST_DOT), 64)
        warps = 4 if block_m * shape.widths[2] <= 64 * 256 else 8
        return Launch(block_m, 32 if kind == "split" or width > 128 else 64, warps, 3)
    if kind == "short" or width > 256:
        return Launch(64, 64 if width <= 128 else 32, 4 if width <= 256 else 8, 2)
    return Launch(128, 64, 8, 3 if width <= 128 else 2)


def _fitted(cut: Launch, shape: HeadShape) -> Launch:
    """Fewer stages, then fewer keys at a time, where a card's shared memory is smaller than the one measured on."""
    available = shared_memory()
    main, rest, value = shape.widths
    stages, tile_n = cut.num_stages, cut.tile_n

    def needed() -> int:
        tile = tile_n * (main + rest + (0 if shape.shared else value)) * shape.cache_itemsize
        return stages * tile + cut.block_m * (main + rest + tile_n) * shape.itemsize

    while needed() > available and (stages > 1 or tile_n > SMALLEST_DOT):
        if stages > 1:
            stages -= 1
        else:
            tile_n //= 2
    return Launch(cut.block_m, tile_n, cut.num_warps, stages)


def _padded(numbers: int) -> int:
    return max(triton.next_power_of_2(numbers), SMALLEST_DOT)
