"""The gated activation of an MLP: act(gate) * up in one pass, in float32 inside. Rounds where the reference rounds."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.overlap import await_previous, overlap, start_next
from tidemill.ops.triton.tuning import launch_config

FEW_ROWS = 512
"""Up to here a launch is bound by latency, beyond it by bandwidth; the two are tuned apart."""

FORMULAS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Which formula of `activated` each name of `reference.ACTIVATIONS` is."""


def act_and_mul(gate_up: torch.Tensor, activation: str, *, config: dict[str, Any] | None = None) -> torch.Tensor:
    """gate_up [..., 2 * inner] -> [..., inner]. `config` replaces the measured launch parameters."""
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    inner = rows.shape[1] // 2
    out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype, device=gate_up.device)
    if config is None:
        config = launch_config("act_and_mul", key(inner, len(rows)), {"BLOCK": 1024, "num_warps": 4})
    _act_and_mul_kernel[(len(rows) * triton.cdiv(inner, config["BLOCK"]),)](
        rows, out, rows.stride(0), INNER=inner, FORMULA=FORMULAS[activation], **config, **overlap()
    )
    return out


def key(inner: int, rows: int) -> str:
    return f"{inner}x{'few' if rows <= FEW_ROWS else 'many'}"


@triton.jit
def _act_and_mul_kernel(
    gate_up,
    out,
    gate_up_row,
    INNER: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    await_previous(OVERLAP)
    # One axis for both: the second axis of a grid is too short for the rows of a batch of experts.
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // BLOCKS).to(tl.int64)
    column = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    here = column < INNER
    place = gate_up + row * gate_up_row + column
    gate = tl.load(place, mask=here, other=0.0)
    up = tl.load(place + INNER, mask=here, other=0.0)
    gate = activated(gate.to(tl.float32), FORMULA).to(gate.dtype).to(tl.float32)
    tl.store(out + row * INNER + column, (gate * up.to(tl.float32)).to(out.dtype.element_ty), mask=here)


@triton.jit
def activated(x, FORMULA: tl.constexpr):
    """x in float32. A NaN stays one."""
    if FORMULA == "silu":
        y = x * tl.sigmoid(x)
    elif FORMULA == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FORMULA == "gelu_tanh":
        # 1 + tanh(u) = 2 * sigmoid(2u), which loses nothing where tanh is close to -1.
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FORMULA == "quick_gelu":
        y = x * tl.sigmoid(1.702 * x)
    elif FORMULA == "relu":
        y = tl.where(x < 0, 0.0, x)
    else:
        tl.static_assert(FORMULA == "relu2", "an unknown activation")
        y = tl.where(x < 0, 0.0, x * x)
    return y
