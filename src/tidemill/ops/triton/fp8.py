"""y = x Wᵀ + b for weights in float8_e4m3fn with a scale per output, and products with scales per block (DeepSeek's).

A few rows (how few, a card's measurements say) are multiplied in their own precision with weights widened on the way,
which is exact in the activations and one launch. More rows are rounded to 8 bits, one scale per token, and multiplied
by the card's fp8 units, where it has them (8.9 and newer); elsewhere the weights are widened first.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.split import finish, split_memory
from tidemill.ops.triton.tuning import launch_config
from tidemill.quant.packed import PackedWeight
from tidemill.quant.scheme import supports

LARGEST = 448.0
FEW_ROWS = 16
BLOCK = 128
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)


@triton.jit
def _widened(byte):
    """Float16 of a float8_e4m3fn given as uint8, less by 2**8: the same bits under the narrower type's exponent."""
    bits = byte.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _nearest(values):
    """Float32 rounded to what float8_e4m3fn holds, ties to even: the interpreter's own conversion is not exact."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Adding this leaves multiples of 2**-9, the step below 2**-6.
    small = (values + 24576.0) - 24576.0
    return tl.where(tl.abs(values) < 0.015625, small, rounded.to(tl.float32, bitcast=True))


@triton.jit
def _quantise_kernel(
    x, out, scales, inputs, x_stride, GROUP: tl.constexpr, LARGEST: tl.constexpr, INEXACT: tl.constexpr
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = group * GROUP + tl.arange(0, GROUP)
    values = tl.load(x + row * x_stride + k, mask=k < inputs, other=0.0).to(tl.float32)
    # The least is what `quant/on_load.py` gives rows of zeros: 2**-24.
    scale = tl.maximum(tl.max(tl.abs(values), axis=0) / LARGEST, 5.9604645e-08)
    values = tl.minimum(tl.maximum(values / scale, -LARGEST), LARGEST)
    if INEXACT:
        values = _nearest(values)
    tl.store(out + row * inputs + k, values.to(out.dtype.element_ty), mask=k < inputs)
    tl.store(scales + row * tl.num_programs(1) + group, scale)


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x, data, scales, bias, out, partial, drawn, rows, outputs, inputs, x_stride, split_inputs: tl.constexpr,
    NATIVE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    n_here, m_here = n < outputs, m < rows
    weights = data + n.to(tl.int64)[:, None] * inputs
    x_rows = x + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in tl.range(0, split_inputs, BLOCK_K, num_stages=STAGES):
        k = split * split_inputs + step + tl.arange(0, BLOCK_K)
        if EVEN:
            stored = tl.load(weights + k[None, :])
            xs = tl.load(x_rows + k[:, None], mask=m_here[None, :], other=0.0)
        else:
            k_here = k < inputs
            stored = tl.load(weights + k[None, :], mask=n_here[:, None] & k_here[None, :], other=0.0)
            xs = tl.load(x_rows + k[:, None], mask=m_here[None, :] & k_here[:, None], other=0.0)
        if NATIVE:
            wide = stored.to(xs.dtype)
        else:
            wide = _widened(stored).to(xs.dtype)
        acc = tl.dot(wide, xs, acc, input_precision="ieee")
    scale = tl.load(scales + n, mask=n_here, other=0.0)
    if not NATIVE:
        scale *= 256.0
    finish(acc * scale[:, None], out, partial, drawn, bias, n, m, rows, outputs, split, SPLITS, HAS_BIAS)


@triton.jit
def _one_row_kernel(
    x, data, scales, bias, out, outputs, x_stride, inputs: tl.constexpr,
    NATIVE: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = n < outputs
    weights = data + n.to(tl.int64)[:, None] * inputs
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for first in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        if inputs % BLOCK_K == 0:
            stored = tl.load(weights + k[None, :], mask=here[:, None], other=0.0)
            xs = tl.load(x + row * x_stride + k).to(tl.float32)
        else:
            stored = tl.load(weights + k[None, :], mask=here[:, None] & (k < inputs)[None, :], other=0.0)
            xs = tl.load(x + row * x_stride + k, mask=k < inputs, other=0.0).to(tl.float32)
        if NATIVE:
            acc += stored.to(tl.float32) * xs[None, :]
        else:
            acc += _widened(stored).to(tl.float32) * xs[None, :]
    scale = tl.load(scales + n, mask=here, other=0.0)
    if not NATIVE:
        scale *= 256.0
    found = tl.sum(acc, axis=1) * scale
    if HAS_BIAS:
        found += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, found.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["rows"])
def _blocks_kernel(
    x, x_scales, data, scales, out, rows, outputs, inputs: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_here, n_here = m < rows, n < outputs
    blocks: tl.constexpr = (inputs + BLOCK - 1) // BLOCK
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(0, blocks):
        k = block * BLOCK + tl.arange(0, BLOCK)
        k_here = k < inputs
        a = tl.load(
            x + m.to(tl.int64)[:, None] * inputs + k[None, :], mask=m_here[:, None] & k_here[None, :], other=0.0
        )
        b = tl.load(
            data + n.to(tl.int64)[None, :] * inputs + k[:, None], mask=n_here[None, :] & k_here[:, None], other=0.0
        )
        a_scale = tl.load(x_scales + m * blocks + block, mask=m_here, other=0.0)
        b_scale = tl.load(scales + n // BLOCK * blocks + block, mask=n_here, other=0.0)
        if NATIVE:
            product = tl.dot(a, b)
        else:
            product = tl.dot(_widened(a), _widened(b)) * 65536.0
        acc += product * a_scale[:, None] * b_scale[None, :]
    here = m_here[:, None] & n_here[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * outputs + n[None, :], acc.to(out.dtype.element_ty), mask=here)


def native(weight: torch.Tensor) -> bool:
    """Whether kernels may name fp8 types: the card has them, and no interpreter stands in for it."""
    return not INTERPRETED and torch.cuda.get_device_capability(weight.device) >= (8, 9)


def _as_stored(data: torch.Tensor) -> torch.Tensor:
    """What kernels load: the type itself, or its bytes where they know no such type."""
    return data if native(data) else data.view(torch.uint8)


def quantise_rows(x: torch.Tensor, group: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(x rounded to float8_e4m3fn, scales [rows, groups] float32), a group being a whole row where it is not given."""
    rows, inputs = x.shape
    out = torch.empty((rows, inputs), dtype=torch.float8_e4m3fn, device=x.device)
    groups = 1 if group is None else triton.cdiv(inputs, group)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    size = group or triton.next_power_of_2(inputs)
    if rows:
        _quantise_kernel[(rows, groups)](
            x, out, scales, inputs, x.stride(0), GROUP=size, LARGEST=LARGEST, INEXACT=INTERPRETED,
            num_warps=max(1, min(16, size // 1024)),
        )  # fmt: skip
    return out, scales


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., inputs] times a packed fp8 matrix, in x's dtype."""
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    if weight.scheme.group_size is not None:
        # Groups come from squares of weights: rows of a square have the same scales.
        out = block_scaled_mm(flat, weight.data, weight.scales[:, ::BLOCK].t(), weight.scheme.group_size)
        out = out if bias is None else out + bias
    else:
        out = run(flat, weight, bias, choose(len(flat), weight, flat.dtype))
    return out.view(*x.shape[:-1], weight.shape[0])


def choose(rows: int, weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    outputs, inputs = weight.shape
    bucket = max(1, triton.next_power_of_2(rows))
    # A measured configuration may be another variant's, so it never mixes with the default's entries.
    measured = launch_config("fp8_gemm", f"{outputs}x{inputs} {bucket}", {}) if dtype.itemsize == 2 else {}
    return measured or default_config(bucket, weight, dtype)


def default_config(rows: int, weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    outputs, inputs = weight.shape
    if rows == 1:
        return {"variant": "sum", "BLOCK_N": 16, "BLOCK_K": 512, "STAGES": 1, "num_warps": 4}
    if rows > FEW_ROWS:
        device = weight.data.device
        exact = dtype == torch.float32 or device.type != "cuda"
        if exact or supports(weight.scheme, torch.cuda.get_device_capability(device)) is not None:
            return {"variant": "widen"}
        return {"variant": "scaled_mm"}
    tiles = -(-outputs // 64)
    splits = max(1, min(4, 264 // tiles, inputs // 256))
    return {
        "variant": "dot", "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "SPLITS": splits, "STAGES": 4, "num_warps": 4,
    }  # fmt: skip


def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, config: dict[str, Any]) -> torch.Tensor:
    """x [rows, inputs] by the variant of `config`, whose other entries are that kernel's."""
    config = dict(config)
    variant = config.pop("variant")
    if variant == "widen":
        return torch.nn.functional.linear(x, weight.unpack().to(x.dtype), bias)
    if variant == "scaled_mm":
        return _scaled_mm(x, weight, bias)
    rows, (outputs, inputs) = len(x), weight.shape
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    stored, blocks = _as_stored(weight.data), triton.cdiv(outputs, config["BLOCK_N"])
    shared = {"NATIVE": native(weight.data), "HAS_BIAS": bias is not None}
    tensors = (x, stored, weight.scales, x if bias is None else bias, out)
    if variant == "sum":
        _one_row_kernel[(blocks, rows)](*tensors, outputs, x.stride(0), inputs, **shared, **config)
        return out
    grid = (blocks, triton.cdiv(rows, config["BLOCK_M"]), config["SPLITS"])
    partial, drawn = split_memory(out, grid)
    split_inputs = triton.cdiv(triton.cdiv(inputs, grid[2]), config["BLOCK_K"]) * config["BLOCK_K"]
    even = outputs % config["BLOCK_N"] == 0 and split_inputs * grid[2] == inputs
    _few_rows_kernel[grid](
        *tensors, partial, drawn, rows, outputs, inputs, x.stride(0), split_inputs, EVEN=even, **shared, **config
    )
    return out


def _scaled_mm(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    rounded, scales = quantise_rows(x)
    # Products scaled by rows and columns exist with bfloat16 results only.
    out = torch._scaled_mm(
        rounded, weight.data.t(), scale_a=scales, scale_b=weight.scales, out_dtype=torch.bfloat16, use_fast_accum=True
    ).to(x.dtype)
    return out if bias is None else out + bias


def block_scaled_mm(
    x: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, block: int = BLOCK
) -> torch.Tensor:
    """x [rows, inputs] times weight [outputs, inputs] in float8_e4m3fn, whose scales [outputs / block, inputs / block]
    are each a square's own; x is rounded in groups of `block` inputs."""
    rounded, x_scales = quantise_rows(x, block)
    rows, (outputs, inputs) = len(x), weight.shape
    out = x.new_empty(rows, outputs)
    config = launch_config(
        "fp8_blocks", f"{outputs}x{inputs}", {"BLOCK_M": min(64, max(16, triton.next_power_of_2(rows))), "BLOCK_N": 64}
    )
    if rows:
        _blocks_kernel[(triton.cdiv(rows, config["BLOCK_M"]), triton.cdiv(outputs, config["BLOCK_N"]))](
            _as_stored(rounded), x_scales, _as_stored(weight), weight_scales.float().contiguous(), out,
            rows, outputs, inputs, NATIVE=native(weight), BLOCK=block, **config,
        )  # fmt: skip
    return out
