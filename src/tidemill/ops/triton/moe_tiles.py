"""A mixture of experts for many tokens: pairs sorted by expert, and two grouped matrix products over tiles of them.

The rows of a tile are gathered where they lie, and each pair's result is written to its own place; a last pass adds a
token's choices in their order, so results do not depend on who came first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.activation import FORMULAS, activated
from tidemill.ops.triton.card import has_tensor_cores, shared_memory
from tidemill.ops.triton.routing import SortedPairs, sort_pairs
from tidemill.ops.triton.tuning import launch_config

ROWS = (6, 24, 64, 256)
"""Launch parameters are chosen by the rows an expert has on average: up to each of these, or more."""

_UP: dict[str, tuple[int, int, int, int, int]] = {
    "6": (16, 64, 128, 4, 3),
    "24": (32, 64, 128, 4, 3),
    "64": (64, 64, 64, 4, 4),
    "256": (64, 128, 64, 8, 4),
    "more": (128, 128, 64, 8, 3),
}
"""By rows of an expert: rows, columns and depth of a tile (columns count gate and up once), warps and stages."""
_DOWN: dict[str, tuple[int, int, int, int]] = {
    "6": (64, 128, 4, 4),
    "24": (64, 128, 4, 4),
    "64": (128, 64, 4, 4),
    "256": (128, 64, 4, 4),
    "more": (128, 64, 8, 4),
}
"""Columns and depth of a tile, warps and stages; rows are those of the sorting, so of the first product."""


@triton.jit
def _tile_of(program, max_tiles, blocks, GROUP: tl.constexpr):
    """(tile, block of columns) of a program: the tiles of a group take turns at each block, so that they meet in the
    cache, both those of one expert and the rows that several experts gather."""
    group = program // (GROUP * blocks)
    first = group * GROUP
    size = tl.minimum(max_tiles - first, GROUP)
    rest = program - first * blocks
    return first + rest % size, rest // size


@triton.jit(do_not_specialize=["max_tiles", "top_k"])
def _up_tiles(
    x,
    order,
    tiles,
    up,
    hidden,
    max_tiles,
    top_k,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FORMULA: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, block = _tile_of(tl.program_id(0), max_tiles, tl.cdiv(INNER, BLOCK_N), GROUP)
    rows = tl.load(tiles + 2 * max_tiles + tile)
    if rows == 0:
        return
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(order + tl.load(tiles + max_tiles + tile) + m, mask=m < rows, other=0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    column = tl.minimum(n, INNER - 1)
    x_at = x + (pair // top_k).to(tl.int64)[:, None] * WIDTH + k[None, :]
    expert = tl.load(tiles + tile).to(tl.int64)
    gate_at = up + expert * (2 * INNER) * WIDTH + column[:, None] * WIDTH + k[None, :]
    up_at = gate_at + INNER * WIDTH
    # With few rows, the weights are the better left side of a product: the tensor cores want 64 rows there.
    if SWAP:
        gate_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        gate_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            x_part = tl.load(x_at + first)
            gate_part = tl.load(gate_at + first)
            up_part = tl.load(up_at + first)
        else:
            left = (k < WIDTH - first)[None, :]
            x_part = tl.load(x_at + first, mask=left, other=0.0)
            gate_part = tl.load(gate_at + first, mask=left, other=0.0)
            up_part = tl.load(up_at + first, mask=left, other=0.0)
        if SWAP:
            gate_sum = tl.dot(gate_part, tl.trans(x_part), gate_sum, input_precision="ieee")
            up_sum = tl.dot(up_part, tl.trans(x_part), up_sum, input_precision="ieee")
        else:
            gate_sum = tl.dot(x_part, tl.trans(gate_part), gate_sum, input_precision="ieee")
            up_sum = tl.dot(x_part, tl.trans(up_part), up_sum, input_precision="ieee")
    value = (activated(gate_sum, FORMULA) * up_sum).to(hidden.dtype.element_ty)
    if SWAP:
        value = tl.trans(value)
    hidden_at = hidden + pair.to(tl.int64)[:, None] * INNER + n[None, :]
    tl.store(hidden_at, value, mask=(m < rows)[:, None] & (n < INNER)[None, :])


@triton.jit(do_not_specialize=["max_tiles"])
def _down_tiles(
    hidden,
    order,
    tiles,
    weights,
    down,
    parts,
    max_tiles,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, block = _tile_of(tl.program_id(0), max_tiles, tl.cdiv(WIDTH, BLOCK_N), GROUP)
    rows = tl.load(tiles + 2 * max_tiles + tile)
    if rows == 0:
        return
    m = tl.arange(0, BLOCK_M)
    pair = tl.load(order + tl.load(tiles + max_tiles + tile) + m, mask=m < rows, other=0)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    column = tl.minimum(n, WIDTH - 1)
    hidden_at = hidden + pair.to(tl.int64)[:, None] * INNER + k[None, :]
    expert = tl.load(tiles + tile).to(tl.int64)
    down_at = down + expert * WIDTH * INNER + column[:, None] * INNER + k[None, :]
    if SWAP:
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, INNER, BLOCK_K):
        if INNER % BLOCK_K == 0:
            h_part = tl.load(hidden_at + first)
            part = tl.load(down_at + first)
        else:
            left = (k < INNER - first)[None, :]
            h_part = tl.load(hidden_at + first, mask=left, other=0.0)
            part = tl.load(down_at + first, mask=left, other=0.0)
        if SWAP:
            total = tl.dot(part, tl.trans(h_part), total, input_precision="ieee")
        else:
            total = tl.dot(h_part, tl.trans(part), total, input_precision="ieee")
    if SWAP:
        total = tl.trans(total)
    factor = tl.load(weights + pair, mask=m < rows, other=0.0).to(tl.float32)
    parts_at = parts + pair.to(tl.int64)[:, None] * WIDTH + n[None, :]
    value = (total * factor[:, None]).to(parts.dtype.element_ty)
    tl.store(parts_at, value, mask=(m < rows)[:, None] & (n < WIDTH)[None, :])


@triton.jit
def _add_choices(parts, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        total += tl.load(parts + (token * TOP_K + choice) * WIDTH + n, mask=n < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + n, total.to(out.dtype.element_ty), mask=n < WIDTH)


def mix_by_tiles(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
    *,
    up_config: dict[str, Any] | None = None,
    down_config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """As `reference.mix_experts`; all tensors contiguous. The configs replace the measured launch parameters."""
    (tokens, top_k), (num_experts, width, inner) = experts.shape, down.shape
    rows = rows_key(tokens * top_k, num_experts)
    if x.dtype == torch.float32 or not has_tensor_cores():
        up_config, down_config = _small_configs(rows)
    up_config = dict(up_config or launch_config("moe_up_tiles", f"{width}x{inner}@{rows}", default_up(rows)))
    down_config = dict(down_config or launch_config("moe_down_tiles", f"{width}x{inner}@{rows}", default_down(rows)))
    pairs = sort_pairs(experts, num_experts, up_config["BLOCK_M"])
    down_config["BLOCK_M"] = pairs.block
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    _launch_up(x, pairs, top_k, up, hidden, activation, up_config)
    parts = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    _launch_down(hidden, pairs, weights, down, parts, down_config)
    if top_k == 1:
        return parts
    out = torch.empty_like(x)
    block = min(1024, triton.next_power_of_2(width))
    _add_choices[(tokens, triton.cdiv(width, block))](parts, out, TOP_K=top_k, WIDTH=width, BLOCK=block, num_warps=4)
    return out


def _launch_up(
    x: torch.Tensor,
    pairs: SortedPairs,
    top_k: int,
    up: torch.Tensor,
    hidden: torch.Tensor,
    activation: str,
    config: dict[str, Any],
) -> None:
    width, inner = x.shape[1], hidden.shape[1]
    config = fitting(config, 2, x.element_size())
    _up_tiles[(pairs.max_tiles * triton.cdiv(inner, config["BLOCK_N"]),)](
        x,
        pairs.order,
        pairs.tiles,
        up,
        hidden,
        pairs.max_tiles,
        top_k,
        WIDTH=width,
        INNER=inner,
        FORMULA=FORMULAS[activation],
        **config,
    )


def _launch_down(
    hidden: torch.Tensor,
    pairs: SortedPairs,
    weights: torch.Tensor,
    down: torch.Tensor,
    parts: torch.Tensor,
    config: dict[str, Any],
) -> None:
    width, inner = parts.shape[1], hidden.shape[1]
    config = fitting(config, 1, hidden.element_size())
    _down_tiles[(pairs.max_tiles * triton.cdiv(width, config["BLOCK_N"]),)](
        hidden,
        pairs.order,
        pairs.tiles,
        weights,
        down,
        parts,
        pairs.max_tiles,
        WIDTH=width,
        INNER=inner,
        **config,
    )


def rows_key(pairs: int, num_experts: int) -> str:
    return next((str(limit) for limit in ROWS if pairs <= limit * num_experts), "more")


def default_up(rows: str) -> dict[str, Any]:
    block_m, block_n, block_k, warps, stages = _UP[rows]
    return _config(block_n, block_k, warps, stages) | {"BLOCK_M": block_m}


def default_down(rows: str) -> dict[str, Any]:
    return _config(*_DOWN[rows])


def _small_configs(rows: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Without tensor cores every product is unrolled, so tiles are small."""
    config = _config(32, 32, 4, 2)
    return config | {"BLOCK_M": 16 if rows == "6" else 32}, config


def _config(block_n: int, block_k: int, warps: int, stages: int) -> dict[str, Any]:
    tile = {"BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 64, "SWAP": False}
    return tile | {"num_warps": warps, "num_stages": stages}


def fitting(config: dict[str, Any], matrices: int, element_size: int) -> dict[str, Any]:
    """With fewer stages where the card's shared memory would not hold them."""
    stage = (config["BLOCK_M"] + matrices * config["BLOCK_N"]) * config["BLOCK_K"] * element_size
    return {**config, "num_stages": max(1, min(config["num_stages"], shared_memory() // stage))}
