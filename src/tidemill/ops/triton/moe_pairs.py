"""A mixture of experts for a few tokens: every (token, choice) pair reads its expert's rows, with nothing sorted.

Two launches: one program computes some of a pair's inner numbers, then one computes some of a token's outputs over all
of its choices. Programs of the same rows run beside each other, so a second reader of an expert finds it in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.activation import FORMULAS, activated
from tidemill.ops.triton.tuning import launch_config

TILE = 8192
"""Weights a program of four warps holds at a time: enough loads under way to keep the memory busy."""


@triton.jit(do_not_specialize=["top_k"])
def _up_pairs(
    x,
    experts,
    up,
    hidden,
    top_k,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair = tl.program_id(0)
    expert = tl.load(experts + pair).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, INNER - 1)
    x_at = x + (pair // top_k).to(tl.int64) * WIDTH + k
    gate_at = up + expert * (2 * INNER) * WIDTH + row[:, None] * WIDTH + k[None, :]
    up_at = gate_at + INNER * WIDTH
    gate_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up_sum = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, WIDTH, BLOCK_K):
        if WIDTH % BLOCK_K == 0:
            gate_part = tl.load(gate_at + first)
            up_part = tl.load(up_at + first)
            x_part = tl.load(x_at + first)
        else:
            left = k < WIDTH - first
            gate_part = tl.load(gate_at + first, mask=left[None, :], other=0.0)
            up_part = tl.load(up_at + first, mask=left[None, :], other=0.0)
            x_part = tl.load(x_at + first, mask=left, other=0.0)
        x_wide = x_part.to(tl.float32)[None, :]
        gate_sum += gate_part.to(tl.float32) * x_wide
        up_sum += up_part.to(tl.float32) * x_wide
    value = activated(tl.sum(gate_sum, axis=1), FORMULA) * tl.sum(up_sum, axis=1)
    tl.store(hidden + pair.to(tl.int64) * INNER + n, value.to(hidden.dtype.element_ty), mask=n < INNER)


@triton.jit
def _down_pairs(
    hidden,
    experts,
    weights,
    down,
    out,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    there = choice < TOP_K
    pair = token * TOP_K + choice
    expert = tl.load(experts + pair, mask=there, other=0).to(tl.int64)
    factor = tl.load(weights + pair, mask=there, other=0.0).to(tl.float32)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.minimum(n, WIDTH - 1)
    down_at = down + (expert * WIDTH * INNER)[:, None, None] + (row * INNER)[None, :, None] + k[None, None, :]
    hidden_at = hidden + (pair * INNER)[:, None] + k[None, :]
    total = tl.zeros([CHOICES, BLOCK_N, BLOCK_K], tl.float32)
    for first in range(0, INNER, BLOCK_K):
        if INNER % BLOCK_K == 0 and CHOICES == TOP_K:
            part = tl.load(down_at + first)
            h_part = tl.load(hidden_at + first)
        else:
            left = there[:, None] & (k < INNER - first)[None, :]
            part = tl.load(down_at + first, mask=left[:, None, :], other=0.0)
            h_part = tl.load(hidden_at + first, mask=left, other=0.0)
        total += part.to(tl.float32) * h_part.to(tl.float32)[:, None, :]
    value = tl.sum(tl.sum(total, axis=2) * factor[:, None], axis=0)
    tl.store(out + token * WIDTH + n, value.to(out.dtype.element_ty), mask=n < WIDTH)


def mix_by_pairs(
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
    (tokens, top_k), (width, inner) = experts.shape, down.shape[1:]
    choices = triton.next_power_of_2(top_k)
    hidden = torch.empty(tokens * top_k, inner, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    up_config = up_config or launch_config("moe_up_pairs", f"{width}x{inner}", default_config(width, 2))
    _up_pairs[(tokens * top_k, triton.cdiv(inner, up_config["BLOCK_N"]))](
        x,
        experts,
        up,
        hidden,
        top_k,
        WIDTH=width,
        INNER=inner,
        FORMULA=FORMULAS[activation],
        **up_config,
    )
    down_config = down_config or launch_config(
        "moe_down_pairs", f"{width}x{inner}x{top_k}", default_config(inner, choices)
    )
    _down_pairs[(tokens, triton.cdiv(width, down_config["BLOCK_N"]))](
        hidden,
        experts,
        weights,
        down,
        out,
        WIDTH=width,
        INNER=inner,
        TOP_K=top_k,
        CHOICES=choices,
        **down_config,
    )
    return out


def default_config(length: int, matrices: int) -> dict[str, Any]:
    """For rows of this length of so many matrices at a time: the longest parts of which a row is whole multiples."""
    whole = length & -length
    part = min(1024, whole) if whole >= 64 else 256
    part = max(64, min(part, TILE // matrices))
    return {"BLOCK_N": max(1, TILE // (matrices * part)), "BLOCK_K": part, "num_warps": 4}
