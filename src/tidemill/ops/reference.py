"""Every operation in plain torch: the specification that fast kernels are tested against, and what runs without them.

Works on any device and dtype. Knows tensors only, nothing of models, requests or steps.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F

ARM = platform.machine() in ("aarch64", "arm64")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b. With a dozen to a hundred rows, OpenBLAS on ARM multiplies W xᵀ up to 1.4 times faster."""
    if ARM and x.dtype == torch.float32 and x.device.type == "cpu" and 8 < x.shape[0] <= 128:
        out = torch.mm(weight, x.t()).t()
        return out.contiguous() if bias is None else out + bias
    return F.linear(x, weight, bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [tokens, heads, head_dim]; the first 2 * cos.shape[1] dimensions turn, halves paired."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def write_kv(
    keys: torch.Tensor, values: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store keys and values [tokens, kv_heads, dim] at flat slots of a cache [blocks, block_size, kv_heads, dim]."""
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, keys)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, values)


def gather_blocks(cache: torch.Tensor, blocks: torch.Tensor, batch: int) -> torch.Tensor:
    """[batch, kv_heads, length, head_dim] of `batch` equally long runs of blocks. Whole blocks copy fastest."""
    _, _, heads, dim = cache.shape
    return cache.index_select(0, blocks).view(batch, -1, heads, dim).transpose(1, 2)


def attend_one_each(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """One query per sequence: q [batch, heads, dim], k and v [batch, kv_heads, length, dim], additive mask
    [batch, 1, 1, length]. The query heads that share a kv head are laid out as positions, so nothing is repeated."""
    batch, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(batch, kv_heads, heads // kv_heads, dim)
    mask = mask.expand(batch, kv_heads, heads // kv_heads, k.shape[2])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale).reshape(batch, heads, dim)


def attend_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Many queries of one sequence: q [queries, heads, dim], k and v [1, kv_heads, length, dim]; without a mask the
    queries are the whole sequence and attention is causal."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
