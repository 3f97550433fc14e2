"""RMS normalisation, with the residual addition before it: one pass, one load and one store per number.

Rounds where `reference.rms_norm` rounds. Knows rows of numbers only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.overlap import await_previous, overlap, start_next
from tidemill.ops.triton.tuning import launch_config

FEW_ROWS = 512
"""Up to here a launch is bound by latency, beyond it by bandwidth; the two are tuned apart."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, config: dict[str, Any] | None = None
) -> torch.Tensor:
    """x [..., width]; three dimensions may be strided, as the heads of a row of queries, keys and values are.
    `config` replaces the measured launch parameters."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() == 3 and x.stride(2) == 1:
        _launch(x, None, weight, out, None, eps, inner=x.shape[1], strides=(x.stride(0), x.stride(1)), config=config)
    else:
        rows = _as_rows(x)
        _launch(rows, None, weight, out, None, eps, inner=1, strides=(rows.stride(0), 0), config=config)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, config: dict[str, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual); both are contiguous and of one dtype."""
    rows, beside = _as_rows(x), _as_rows(residual)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(rows, beside, weight, out, total, eps, inner=1, strides=(rows.stride(0), 0), config=config)
    return out, total


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    *,
    inner: int,
    strides: tuple[int, int],
    config: dict[str, Any] | None,
) -> None:
    width = x.shape[-1]
    rows = x.numel() // width
    if config is None:
        config = launch_config("rms_norm", key(width, rows), default_config(width))
    _rms_norm_kernel[(triton.cdiv(rows, config["ROWS"]),)](
        x,
        residual,
        weight,
        out,
        total,
        *strides,
        0 if residual is None else residual.stride(0),
        rows,
        eps,
        INNER=inner,
        WIDTH=width,
        ADD=residual is not None,
        BLOCK=triton.next_power_of_2(width),
        **config,
        **overlap(),
    )


def key(width: int, rows: int) -> str:
    return f"{width}x{'few' if rows <= FEW_ROWS else 'many'}"


def default_config(width: int) -> dict[str, Any]:
    """Sixteen bytes of bfloat16 per thread; narrow rows share a program."""
    block = triton.next_power_of_2(width)
    rows = max(1, 512 // block)
    return {"ROWS": rows, "num_warps": min(max(block * rows // 256, 1), 16)}


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    x_outer,
    x_inner,
    residual_row,
    rows,
    eps,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    KIND: tl.constexpr = x.dtype.element_ty
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = (row < rows) & (column < WIDTH)
    # Loaded before the sum is known, so that it is there when the sum is.
    factors = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    start_next(OVERLAP)
    await_previous(OVERLAP)
    numbers = tl.load(x + (row // INNER) * x_outer + (row % INNER) * x_inner + column, mask=here, other=0.0)
    wide = numbers.to(tl.float32)
    if ADD:
        beside = tl.load(residual + row * residual_row + column, mask=here, other=0.0)
        rounded = (wide + beside.to(tl.float32)).to(KIND)
        tl.store(total + row * WIDTH + column, rounded, mask=here)
        wide = rounded.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=1) / WIDTH + eps)[:, None]
    tl.store(out + row * WIDTH + column, weighted(wide, factors, KIND).to(KIND), mask=here)


@triton.jit
def weighted(wide, factors, KIND: tl.constexpr):
    """Weights kept in float32 apply before rounding to KIND, weights in KIND after it. The result is
    float32 again."""
    if factors.dtype == tl.float32:
        product = wide * factors
    else:
        product = wide.to(KIND).to(tl.float32) * factors.to(tl.float32)
    return product.to(KIND).to(tl.float32)
