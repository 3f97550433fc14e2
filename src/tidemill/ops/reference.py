"""Every operation in plain torch: the specification that fast kernels are tested against, and what runs without them.

Works on any device and dtype. Knows tensors only, nothing of models, requests or steps.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from tidemill.quant.packed import PackedWeight

TILE_NUMBERS = 2**21
"""Scores that are held at a time where attention is computed by hand."""
LEAST_PEAK = 1e-30
"""Vectors whose largest magnitude is no more are zero once they are quantised: their factor would not be finite."""
ARM = platform.machine() in ("aarch64", "arm64")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b. On ARM, OpenBLAS multiplies two or three rows faster one by one, and a dozen to a hundred up to 1.4
    times faster as W xᵀ; widths of whole pages make it slow at fewer rows already."""
    if ARM and x.dtype == torch.float32 and x.device.type == "cpu" and 1 < x.shape[0] <= 128:
        if x.shape[0] < 4:
            return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])
        if x.shape[0] > 8 or weight.shape[1] % 2048 == 0:
            out = torch.mm(weight, x.t()).t()
            return out.contiguous() if bias is None else out + bias
    return F.linear(x, weight, bias)


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b of packed weights, which are unpacked every time: right anywhere, and slow. x is in the order of the
    packed columns."""
    dense = replace(weight, order=None).unpack()
    return linear(x, dense.to(x.dtype), bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    # Weights kept wider than the activations are applied before rounding.
    return (weight * wide).to(x.dtype) if weight.dtype == torch.float32 else weight * wide.to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def head_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, centred: bool
) -> torch.Tensor:
    """Normalise the last dimension of x [tokens, heads, dim]; weight and bias [heads, dim] are each head's own."""
    wide = x.float()
    if centred:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Squeezes scores smoothly into (-cap, cap)."""
    return torch.tanh(scores / cap) * cap


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, head_dim]; the first 2 * cos.shape[1] dimensions turn, halves paired."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


def grow_queries(q: torch.Tensor, positions: torch.Tensor, beta: float, length: int) -> torch.Tensor:
    """Queries far from the start grow with the logarithm of their position, counted in multiples of `length`."""
    growth = 1 + beta * torch.log1p((positions // length).float())
    return q * growth[:, None, None].to(q.dtype)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_python": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    return ACTIVATIONS[activation](x)


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Each token's weighted sum over its experts [tokens, top_k]; up [experts, 2 * inner, width] holds gate and up."""
    return mix(x, experts, weights, len(up), lambda expert, x: one_expert(x, up[expert], down[expert], activation))


def mix(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    compute: Callable[[int, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The same where `compute(expert, rows)` is what an expert makes of some tokens."""
    out = torch.zeros_like(x)
    if len(x) == 1:
        # One token needs no sorting; its experts add up in the same order as in a batch.
        for expert, weight in sorted(zip(experts[0].tolist(), weights[0].tolist(), strict=True)):
            out.add_(compute(expert, x), alpha=weight)
        return out
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    tokens = order.div(experts.shape[1], rounding_mode="floor")
    factors = weights.reshape(-1, 1).index_select(0, order)
    first = 0
    for expert, count in enumerate(torch.bincount(flat, minlength=num_experts).tolist()):
        if count:
            part = slice(first, first + count)
            mine = tokens[part]
            found = compute(expert, x.index_select(0, mine))
            # A token goes to an expert once at most, and index_add_ wakes every thread for the smallest addition.
            out.index_copy_(0, mine, out.index_select(0, mine).addcmul_(found, factors[part]))
            first += count
    return out


def one_expert(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: str) -> torch.Tensor:
    return linear(act_and_mul(linear(x, up), activation), down)


def write_cache(vectors: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store vectors [tokens, kv_heads, dim] at flat slots of a cache [blocks, block_size, kv_heads, dim]."""
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, vectors)


def gather_inputs(
    tokens: torch.Tensor,
    tables: torch.Tensor,
    least: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token of a step, given its row and its position + 1 (0: padding): [token, position, length] and, per
    group of tables [groups, rows, blocks], its flat cache position, -1 for padding. `least` is how long each row counts
    as at least."""
    rows, positions, real = rows.long(), (ends.long() - 1).clamp(min=0), ends > 0
    found = torch.where(real, tokens[rows, positions].long(), 0)
    lengths = torch.maximum(torch.where(real, least[rows].long(), 0), positions + 1)
    pages = tables[:, rows, positions // block_size].long()
    slots = torch.where(real, pages * block_size + positions % block_size, -1)
    return torch.stack((found, positions, lengths)), slots


def quantise_vectors(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., dim] as int8 or float8_e4m3fn, and each vector's float32 scale, by which its peak is the type's limit."""
    wide, limit = x.float(), quantised_limit(dtype)
    peak = wide.abs().amax(dim=-1)
    # What is not a number stays so: integers cannot say it, their scale must.
    scale = torch.where(peak <= LEAST_PEAK, limit, peak) / limit
    shrunk = wide / scale[..., None]
    return (shrunk if dtype.is_floating_point else shrunk.round()).to(dtype), scale


def dequantise_vectors(stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (stored.float() * scale[..., None]).to(dtype)


def quantised_limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else float(torch.iinfo(dtype).max)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, batch: int) -> torch.Tensor:
    """[batch, kv_heads, length, head_dim] of `batch` equally long runs of blocks. Whole blocks copy fastest."""
    _, _, heads, dim = cache.shape
    return cache.index_select(0, blocks).view(batch, -1, heads, dim).transpose(1, 2)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float | None = None,
    slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [batch, heads, queries, dim], k and v [batch, kv_heads, length, dim], additive mask broadcastable to
    [batch, 1, queries, length]; without a mask the queries are the whole sequence and attention is causal.

    `cap` squeezes the scores before they are masked; with `slopes` [heads], a score falls with its key's distance."""
    if cap is None and slopes is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    batch, heads, queries, dim = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    out = q.new_empty(batch, heads, queries, v.shape[-1])
    tile = max(1, TILE_NUMBERS // (batch * heads * length))
    for first in range(0, queries, tile):
        rows = slice(first, min(first + tile, queries))
        grouped = q[:, :, rows].reshape(batch, kv_heads, -1, dim)
        scores = _by_head(grouped, k.transpose(-1, -2)).float().view(batch, heads, -1, length)
        if cap is None:
            scores.mul_(scale)
        else:
            scores.mul_(scale / cap).tanh_().mul_(cap)
        if slopes is not None:
            # Distances may count from the last key: softmax does not see what all keys of a query have in common.
            scores += slopes[:, None, None] * torch.arange(1.0 - length, 1.0, device=q.device)
        if mask is not None:
            scores += mask[:, :, rows] if mask.shape[2] > 1 else mask
        else:
            ahead = torch.ones(rows.stop - first, length, dtype=torch.bool, device=q.device).triu_(first + 1)
            scores.masked_fill_(ahead, float("-inf"))
        weights = scores.softmax(dim=-1).to(q.dtype).view(batch, kv_heads, -1, length)
        out[:, :, rows] = _by_head(weights, v).view(batch, heads, -1, v.shape[-1])
    return out


def _by_head(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b over [batch, heads, ., .]. One product per head reads gathered keys and values where they lie, which one
    over all heads would copy; and one pair goes to the BLAS, which the batched product does not always ask."""
    out = a.new_empty(*a.shape[:3], b.shape[-1])
    for head in range(a.shape[1]):
        if len(a) == 1:
            torch.mm(a[0, head], b[0, head], out=out[0, head])
        else:
            out[:, head] = a[:, head] @ b[:, head]
    return out
