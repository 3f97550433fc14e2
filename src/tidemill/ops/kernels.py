"""Which implementation of an operation runs: Triton's on a GPU, native code or the reference elsewhere. Layers call
these.

The reference (`reference.py`) is the specification of every function here.
"""

from __future__ import annotations

import os

import torch

from tidemill.ops import reference
from tidemill.ops.cpu import linear as native
from tidemill.ops.cpu.library import available
from tidemill.quant.packed import PackedWeight
from tidemill.quant.scheme import gpu_reads

FORCED = os.environ.get("TIDEMILL_KERNELS") == "triton"
"""Triton's kernels on any device: on a CPU they need its interpreter (TRITON_INTERPRET=1), and are for tests."""


def use_triton(x: torch.Tensor) -> bool:
    return x.is_cuda or FORCED


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if use_triton(x):
        from tidemill.ops.triton import norm

        return norm.rms_norm(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual)"""
    if use_triton(x):
        from tidemill.ops.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return reference.rms_norm(total, weight, eps), total


def linear_to_float(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b in float32. A GPU adds up in float32 anyway, so there nothing is rounded in between."""
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out + bias
    return reference.linear(x, weight, bias).float()


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    if weight.order is not None:
        x = x.index_select(-1, weight.order)
    if not use_triton(x) or weight.layout == "tiles":
        if available() is None and native.supports(weight) is None:
            return native.linear(x, weight, bias)
        return reference.packed_linear(x, weight, bias)
    if not gpu_reads(weight.scheme):
        return reference.packed_linear(x, weight, bias)
    if weight.scheme.kind == "fp8":
        from tidemill.ops.triton import fp8

        return fp8.linear(x, weight, bias)
    from tidemill.ops.triton import packed_gemm

    return packed_gemm.linear(x, weight, bias)


def packed_gated_linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """act_and_mul of packed_linear."""
    if use_triton(x) and weight.layout == "words" and weight.scheme.kind == "int" and weight.order is None:
        from tidemill.ops.triton import packed_gemm

        if (found := packed_gemm.gated_linear(x, weight, bias, activation)) is not None:
            return found
    return act_and_mul(packed_linear(x, weight, bias), activation)


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    if use_triton(gate_up):
        from tidemill.ops.triton import activation as gated

        return gated.act_and_mul(gate_up, activation)
    return reference.act_and_mul(gate_up, activation)


def mix_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    if use_triton(x):
        from tidemill.ops.triton import moe

        return moe.mix_experts(x, experts, weights, up, down, activation)
    return reference.mix_experts(x, experts, weights, up, down, activation)


def gather_inputs(
    tokens: torch.Tensor,
    tables: torch.Tensor,
    least: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    if use_triton(tokens):
        from tidemill.ops.triton import step_inputs

        return step_inputs.gather_inputs(tokens, tables, least, rows, ends, block_size)
    return reference.gather_inputs(tokens, tables, least, rows, ends, block_size)
