"""Between the projection and attention: head norm, rotation and the writing of the paged cache in one launch.

Queries turn where they lie. Keys and values go to the cache, quantised where the cache has scales: one per token and
head. Knows flat cache positions, nothing of pages, tables or sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.reference import LEAST_PEAK, quantised_limit
from tidemill.ops.triton.norm import weighted
from tidemill.ops.triton.overlap import await_previous, overlap, start_next
from tidemill.ops.triton.tuning import launch_config

FEW_TOKENS = 256
"""Up to here a launch is bound by latency, beyond it by bandwidth; the two are tuned apart."""
TINY = tl.constexpr(LEAST_PEAK)
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23: added and taken away again, it rounds a small float32 to the nearest integer, ties to even."""


def rotate_and_store(
    qkv: torch.Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    config: dict[str, Any] | None = None,
) -> torch.Tensor:
    """qkv [tokens, (heads + 2 * kv_heads) * head_dim] -> queries [tokens, heads, head_dim], a view into qkv, whose
    queries are overwritten. A token with a negative slot is not stored. `q_weight` and `k_weight` [head_dim] normalise
    each head before the rotation of `cos` and `sin` [tokens, rotated / 2]. `config` replaces the measured launch
    parameters."""
    tokens = qkv.shape[0]
    turn, norm = cos is not None, q_weight is not None
    half = head_dim // 2 if cos is None else cos.shape[-1]
    rest = head_dim - 2 * half
    if config is None:
        config = launch_config("rotate_and_store", key(head_dim, tokens), default_config(tokens))
    chunk = min(config["CHUNK"], triton.next_power_of_2(heads))
    # Queries that neither turn nor change stay as they are.
    query_parts = triton.cdiv(heads, chunk) if turn or norm else 0
    key_parts = triton.cdiv(kv_heads, chunk)
    _rotate_and_store_kernel[(tokens, query_parts + 2 * key_parts)](
        qkv,
        cos,
        sin,
        slots,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        q_weight,
        k_weight,
        qkv.stride(0),
        0 if cos is None else cos.stride(0),
        0 if sin is None else sin.stride(0),
        k_cache.stride(1),
        v_cache.stride(1),
        0 if k_scale is None else k_scale.stride(1),
        0 if v_scale is None else v_scale.stride(1),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        REST=rest,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        QUERY_PARTS=query_parts,
        KEY_PARTS=key_parts,
        TURN=turn,
        NORM=norm,
        LIMIT=0.0 if k_scale is None else quantised_limit(k_cache.dtype),
        **{**config, "CHUNK": chunk},
        **overlap(),
    )
    return qkv[:, : heads * head_dim].unflatten(-1, (heads, head_dim))


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """k and v [tokens, kv_heads, dim] to the cache; a negative slot is not stored."""
    # Models of transformers may pass any view.
    k = k if k.stride(-1) == 1 else k.contiguous()
    v = v if v is None or v.stride(-1) == 1 else v.contiguous()
    tokens, kv_heads, key_dim = k.shape
    value_dim = 0 if v is None else v.shape[2]
    config = launch_config("store_kv", key(key_dim, tokens), default_config(tokens))
    chunk = min(config["CHUNK"], triton.next_power_of_2(kv_heads))
    key_parts = triton.cdiv(kv_heads, chunk)
    _store_kv_kernel[(tokens, key_parts if v is None else 2 * key_parts)](
        k,
        v,
        slots,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        k.stride(0),
        k.stride(1),
        0 if v is None else v.stride(0),
        0 if v is None else v.stride(1),
        k_cache.stride(1),
        0 if v_cache is None else v_cache.stride(1),
        0 if k_scale is None else k_scale.stride(1),
        0 if v_scale is None else v_scale.stride(1),
        KV_HEADS=kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_KEY=triton.next_power_of_2(key_dim),
        BLOCK_VALUE=triton.next_power_of_2(max(value_dim, 1)),
        KEY_PARTS=key_parts,
        LIMIT=0.0 if k_scale is None else quantised_limit(k_cache.dtype),
        **{**config, "CHUNK": chunk},
    )


def key(head_dim: int, tokens: int) -> str:
    return f"{head_dim}x{'few' if tokens <= FEW_TOKENS else 'many'}"


def default_config(tokens: int) -> dict[str, Any]:
    return {"CHUNK": 4, "num_warps": 1} if tokens <= FEW_TOKENS else {"CHUNK": 8, "num_warps": 2}


@triton.jit
def _rotate_and_store_kernel(
    qkv,
    cos,
    sin,
    slots,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    q_weight,
    k_weight,
    qkv_row,
    cos_row,
    sin_row,
    k_place,
    v_place,
    k_scale_place,
    v_scale_place,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    QUERY_PARTS: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has one token and CHUNK heads of one kind. A head is three runs of numbers: the two halves that turn
    against each other, and the rest."""
    start_next(OVERLAP)
    await_previous(OVERLAP)
    KIND: tl.constexpr = qkv.dtype.element_ty
    DIM: tl.constexpr = 2 * HALF + REST
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = qkv + token * qkv_row
    lane = tl.arange(0, CHUNK)[:, None]
    near = tl.arange(0, BLOCK_HALF)[None, :]
    far = tl.arange(0, BLOCK_REST)[None, :]
    if part < QUERY_PARTS:
        head = part * CHUNK + lane
        here = head < HEADS
        first, second, rest = _load_head(row + head * DIM, here, near, far, HALF, REST)
        if NORM:
            first, second, rest = _normalised(first, second, rest, near, far, q_weight, eps, HALF, REST, KIND)
        if TURN:
            first, second = _turned(first, second, near, cos + token * cos_row, sin + token * sin_row, HALF, KIND)
        _store_head(row + head * DIM, here, near, far, first, second, rest, HALF, REST if NORM else 0, KIND)
    else:
        slot = tl.load(slots + token)
        if part < QUERY_PARTS + KEY_PARTS:
            head = (part - QUERY_PARTS) * CHUNK + lane
            here = (head < KV_HEADS) & (slot >= 0)
            first, second, rest = _load_head(row + (HEADS + head) * DIM, here, near, far, HALF, REST)
            if NORM:
                first, second, rest = _normalised(first, second, rest, near, far, k_weight, eps, HALF, REST, KIND)
            if TURN:
                first, second = _turned(first, second, near, cos + token * cos_row, sin + token * sin_row, HALF, KIND)
            _cache_head(
                k_cache + slot * k_place + head * DIM,
                k_scale,
                slot * k_scale_place + head,
                here,
                near,
                far,
                first,
                second,
                rest,
                HALF,
                REST,
                LIMIT,
                k_cache.dtype.element_ty,
            )
        else:
            head = (part - QUERY_PARTS - KEY_PARTS) * CHUNK + lane
            here = (head < KV_HEADS) & (slot >= 0)
            first, second, rest = _load_head(row + (HEADS + KV_HEADS + head) * DIM, here, near, far, HALF, REST)
            _cache_head(
                v_cache + slot * v_place + head * DIM,
                v_scale,
                slot * v_scale_place + head,
                here,
                near,
                far,
                first,
                second,
                rest,
                HALF,
                REST,
                LIMIT,
                v_cache.dtype.element_ty,
            )


@triton.jit
def _store_kv_kernel(
    k,
    v,
    slots,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    k_token,
    k_head,
    v_token,
    v_head,
    k_place,
    v_place,
    k_scale_place,
    v_scale_place,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    LIMIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    slot = tl.load(slots + token)
    lane = tl.arange(0, CHUNK)[:, None]
    if part < KEY_PARTS:
        head = part * CHUNK + lane
        here = (head < KV_HEADS) & (slot >= 0)
        place = k_cache + slot * k_place + head * KEY_DIM
        scale = slot * k_scale_place + head
        _copy_head(
            k + token * k_token + head * k_head,
            here,
            place,
            k_scale,
            scale,
            KEY_DIM,
            BLOCK_KEY,
            LIMIT,
            k_cache.dtype.element_ty,
        )
    if VALUE_DIM > 0:
        if part >= KEY_PARTS:
            head = (part - KEY_PARTS) * CHUNK + lane
            here = (head < KV_HEADS) & (slot >= 0)
            place = v_cache + slot * v_place + head * VALUE_DIM
            scale = slot * v_scale_place + head
            _copy_head(
                v + token * v_token + head * v_head,
                here,
                place,
                v_scale,
                scale,
                VALUE_DIM,
                BLOCK_VALUE,
                LIMIT,
                v_cache.dtype.element_ty,
            )


@triton.jit
def _copy_head(
    source,
    here,
    place,
    scales,
    scale,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    numbers = tl.load(source + column, mask=here & (column < DIM), other=0.0).to(tl.float32)
    if LIMIT > 0:
        peak = _not_tiny(tl.max(tl.abs(numbers), axis=1)[:, None], LIMIT)
        tl.store(scales + scale, peak / LIMIT, mask=here)
        numbers = _shrunk(numbers, LIMIT / peak, KIND)
    tl.store(place + column, numbers.to(KIND), mask=here & (column < DIM))


@triton.jit
def _load_head(place, here, near, far, HALF: tl.constexpr, REST: tl.constexpr):
    """Without a rest, it is something that nobody stores."""
    first = tl.load(place + near, mask=here & (near < HALF), other=0.0).to(tl.float32)
    second = tl.load(place + HALF + near, mask=here & (near < HALF), other=0.0).to(tl.float32)
    if REST > 0:
        rest = tl.load(place + 2 * HALF + far, mask=here & (far < REST), other=0.0).to(tl.float32)
    else:
        rest = first
    return first, second, rest


@triton.jit
def _store_head(
    place, here, near, far, first, second, rest, HALF: tl.constexpr, REST: tl.constexpr, KIND: tl.constexpr
):
    tl.store(place + near, first.to(KIND), mask=here & (near < HALF))
    tl.store(place + HALF + near, second.to(KIND), mask=here & (near < HALF))
    if REST > 0:
        tl.store(place + 2 * HALF + far, rest.to(KIND), mask=here & (far < REST))


@triton.jit
def _normalised(
    first, second, rest, near, far, weight, eps, HALF: tl.constexpr, REST: tl.constexpr, KIND: tl.constexpr
):
    """The head over its RMS, rounded to KIND where `reference.rms_norm` rounds."""
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    if REST > 0:
        squares += tl.sum(rest * rest, axis=1)
    factor = tl.rsqrt(squares / (2 * HALF + REST) + eps)[:, None]
    first = weighted(first * factor, tl.load(weight + near, mask=near < HALF, other=0.0), KIND)
    second = weighted(second * factor, tl.load(weight + HALF + near, mask=near < HALF, other=0.0), KIND)
    if REST > 0:
        rest = weighted(rest * factor, tl.load(weight + 2 * HALF + far, mask=far < REST, other=0.0), KIND)
    return first, second, rest


@triton.jit
def _turned(first, second, near, cos, sin, HALF: tl.constexpr, KIND: tl.constexpr):
    """The rotation in float32, rounded once; cos and sin are rounded first, as in `reference.rotate`."""
    c = tl.load(cos + near, mask=near < HALF, other=0.0).to(KIND).to(tl.float32)
    s = tl.load(sin + near, mask=near < HALF, other=0.0).to(KIND).to(tl.float32)
    before = (first * c - second * s).to(KIND).to(tl.float32)
    after = (second * c + first * s).to(KIND).to(tl.float32)
    return before, after


@triton.jit
def _cache_head(
    place,
    scales,
    scale,
    here,
    near,
    far,
    first,
    second,
    rest,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    LIMIT: tl.constexpr,
    KIND: tl.constexpr,
):
    if LIMIT > 0:
        peak = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        if REST > 0:
            peak = tl.maximum(peak, tl.max(tl.abs(rest), axis=1))
        peak = _not_tiny(peak[:, None], LIMIT)
        tl.store(scales + scale, peak / LIMIT, mask=here)
        first, second = _shrunk(first, LIMIT / peak, KIND), _shrunk(second, LIMIT / peak, KIND)
        rest = _shrunk(rest, LIMIT / peak, KIND)
    _store_head(place, here, near, far, first, second, rest, HALF, REST, KIND)


@triton.jit
def _not_tiny(peak, LIMIT: tl.constexpr):
    """A vector of (nearly) zeros gets the scale 1."""
    return tl.where(peak > TINY, peak, LIMIT)


@triton.jit
def _shrunk(numbers, factor, KIND: tl.constexpr):
    """Into the range of KIND; for integers also to the nearest of them."""
    numbers = numbers * factor
    if KIND == tl.int8:
        numbers = (numbers + ROUNDING) - ROUNDING
    return numbers
