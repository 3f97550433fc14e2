"""Products with 4-bit weights in groups of 128 inputs, the form most checkpoints have (layout: `quant/packed.py`).

- `integer`, one row: x is rounded to integers of 16 bits, each 16 inputs with a scale of their own, and multiplied with
  the codes as integers, two at a time. A program walks over several blocks of outputs and reads the next one's weights
  while it multiplies, because waiting for memory, not arithmetic, is what one row costs. The gate of an MLP can be
  applied on the way out.
- `scaled`, dozens of rows: codes become numbers of x's type in registers, as if the matrix were dense, for the tensor
  cores; programs may split the inputs among them (`split.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton.activation import FORMULAS, activated
from tidemill.ops.triton.card import multiprocessors
from tidemill.ops.triton.overlap import await_previous, overlap
from tidemill.ops.triton.split import finish, split_memory
from tidemill.quant.packed import PackedWeight

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
CHUNK = tl.constexpr(256)
"""Inputs of 32 words of 8 codes: two groups."""
BFLOAT16_8, FLOAT16_8 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)
MOST_INPUTS = 32768
"""Of a row that one program holds."""


def fits(weight: PackedWeight, dtype: torch.dtype) -> bool:
    scheme = weight.scheme
    return scheme.kind == "int" and scheme.bits == 4 and scheme.group_size == 128 and dtype.itemsize == 2


def widening(dtype: torch.dtype) -> str:
    """PTX that turns two neighbouring words into eight registers of two weights each: code * scale + offset.

    Four bits become the top of a mantissa under the exponent of 16, and 16 is subtracted: the code, exactly. The first
    four codes of a word belong to one group, the last four to the next."""
    if INTERPRETED:
        return ""
    name, top, mask, exponent, minus = (
        ("bf16x2", 3, "0x00780078", "0x41804180", "0xC180C180")
        if dtype == torch.bfloat16
        else ("f16x2", 6, "0x03C003C0", "0x4C004C00", "0xCC00CC00")
    )
    lines = [".reg .b32 a, b, t, m;", f"mov.b32 m, {minus};"]
    lines += ["prmt.b32 a, $8, $9, 0x5410;", "prmt.b32 b, $8, $9, 0x7632;"]
    for position in range(8):
        left, half = top - 4 * (position % 4), "ab"[position // 4]
        scale, offset = ("$10", "$11") if position < 4 else ("$12", "$13")
        lines.append(f"shl.b32 t, {half}, {left};" if left > 0 else f"shr.u32 t, {half}, {-left};")
        lines.append(f"lop3.b32 t, t, {mask}, {exponent}, 0xEA; add.{name} t, t, m;")
        lines.append(f"fma.rn.{name} ${position}, t, {scale}, {offset};")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def _pair(first, second, ASM: tl.constexpr):
    """Two numbers rounded to integers of 16 bits, in one word."""
    if ASM != "":
        return tl.inline_asm_elementwise(
            "{ .reg .b32 i, j; cvt.rni.s32.f32 i, $1; cvt.rni.s32.f32 j, $2; prmt.b32 $0, i, j, 0x5410; }",
            "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = tl.floor(first + 0.5).to(tl.int32), tl.floor(second + 0.5).to(tl.int32)
        return (low & 0xFFFF) | (high << 16)


PRODUCTS = """{
    .reg .b32 even, odd, part;
    and.b32 even, $2, 0x0F0F0F0F;
    shr.u32 odd, $2, 4;
    and.b32 odd, odd, 0x0F0F0F0F;
    dp2a.lo.s32.u32 part, $3, even, 0;
    dp2a.lo.s32.u32 $0, $4, odd, part;
    dp2a.hi.s32.u32 part, $5, even, 0;
    dp2a.hi.s32.u32 $1, $6, odd, part;
}"""
"""One word's codes times the integers of its eight inputs: the sums of its two groups."""
TWO_INTEGERS = tl.constexpr((tl.int32, tl.int32))


@triton.jit
def _product(pairs, codes):
    """Both integers of a pair times the low two bytes of `codes`: what dp2a does."""
    return ((pairs << 16) >> 16) * (codes & 255) + (pairs >> 16) * ((codes >> 8) & 255)


@triton.jit
def _products(words, pairs02, pairs13, pairs46, pairs57, ASM: tl.constexpr):
    if ASM != "":
        return tl.inline_asm_elementwise(
            ASM, "=&r,=&r,r,r,r,r,r", [words, pairs02, pairs13, pairs46, pairs57],
            dtype=TWO_INTEGERS, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even, odd = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
        first = _product(pairs02, even) + _product(pairs13, odd)
        return first, _product(pairs46, even >> 16) + _product(pairs57, odd >> 16)


@triton.jit
def _at(x, k, inputs: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(x + k).to(tl.float32)
    else:
        return tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)


@triton.jit
def _largest(a, b, c, d):
    """Of four tiles [quads, ., 4], the largest number of each four words; never zero."""
    most = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.maximum(tl.max(most, axis=2), 1e-30)


@triton.jit
def _block(
    data, scales, zeros, n, c, w, group, outputs, inputs: tl.constexpr, chunks: tl.constexpr,
    HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The words of some outputs, and the scales and zero points of each chunk's two groups."""
    if EVEN:
        words = tl.load(data + (c * outputs + n[None, :, None]) * 32 + w)
    else:
        there = (c < chunks) & (n[None, :, None] < outputs)
        words = tl.load(data + (c * outputs + n[None, :, None]) * 32 + w, mask=there, other=0)
    at = group * outputs + n[None, :]
    if EVEN:
        scale0, scale1 = tl.load(scales + at), tl.load(scales + at + outputs)
    else:
        first = (group < inputs // 128) & (n[None, :] < outputs)
        second = (group + 1 < inputs // 128) & (n[None, :] < outputs)
        scale0 = tl.load(scales + at, mask=first, other=0.0)
        scale1 = tl.load(scales + at + outputs, mask=second, other=0.0)
    if not HAS_ZEROS:
        zero0, zero1 = tl.full(scale0.shape, 8.0, tl.float16), tl.full(scale1.shape, 8.0, tl.float16)
    elif EVEN:
        zero0, zero1 = tl.load(zeros + at), tl.load(zeros + at + outputs)
    else:
        zero0 = tl.load(zeros + at, mask=first, other=0.0)
        zero1 = tl.load(zeros + at + outputs, mask=second, other=0.0)
    return words, scale0, scale1, zero0, zero1


@triton.jit
def _multiplied(block, row, ASM: tl.constexpr):
    """What a block's outputs are, for one row."""
    words, scale0, scale1, zero0, zero1 = block
    pairs02, pairs13, pairs46, pairs57, step0, step1, sum0, sum1 = row
    first, second = _products(words, pairs02, pairs13, pairs46, pairs57, ASM)
    found0 = tl.sum(first, axis=2).to(tl.float32) * step0 - zero0.to(tl.float32) * sum0
    found1 = tl.sum(second, axis=2).to(tl.float32) * step1 - zero1.to(tl.float32) * sum1
    return tl.sum(found0 * scale0.to(tl.float32) + found1 * scale1.to(tl.float32), axis=0)


@triton.jit
def _row_of(x, k, inputs: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr):
    """x as pairs of integers, the step between two integers, and the sums that zero points are multiplied with."""
    x0, x1 = _at(x, k, inputs, EVEN), _at(x, k + 32, inputs, EVEN)
    x2, x3 = _at(x, k + 64, inputs, EVEN), _at(x, k + 96, inputs, EVEN)
    x4, x5 = _at(x, k + 128, inputs, EVEN), _at(x, k + 160, inputs, EVEN)
    x6, x7 = _at(x, k + 192, inputs, EVEN), _at(x, k + 224, inputs, EVEN)
    step0, step1 = _largest(x0, x1, x2, x3) / 32767.0, _largest(x4, x5, x6, x7) / 32767.0
    sum0, sum1 = tl.sum(x0 + x1 + x2 + x3, axis=2), tl.sum(x4 + x5 + x6 + x7, axis=2)
    times0, times1 = (1.0 / step0)[:, :, None], (1.0 / step1)[:, :, None]
    pairs02, pairs13 = _pair(x0 * times0, x2 * times0, ASM), _pair(x1 * times0, x3 * times0, ASM)
    pairs46, pairs57 = _pair(x4 * times1, x6 * times1, ASM), _pair(x5 * times1, x7 * times1, ASM)
    return pairs02, pairs13, pairs46, pairs57, step0, step1, sum0, sum1


@triton.jit
def _integer_kernel(
    x, data, scales, zeros, bias, out, outputs, blocks, programs, gated,
    inputs: tl.constexpr, chunks: tl.constexpr, QUADS: tl.constexpr, BLOCK_N: tl.constexpr, ROUNDS: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr, FORMULA: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    # A thread takes four words that lie together, a "quad", of each output: eight quads make a chunk. Quads stand first
    # in every tile, which makes the compiler spread them over the threads and keep all outputs of a quad in one.
    c = tl.arange(0, QUADS)[:, None, None] // 8
    w = (tl.arange(0, QUADS)[:, None, None] % 8) * 4 + tl.arange(0, 4)[None, None, :]
    group = (tl.arange(0, QUADS) // 8 * 2)[:, None]
    index = tl.program_id(0)
    n = index * BLOCK_N + tl.arange(0, BLOCK_N)
    await_previous(OVERLAP)
    block = _block(data, scales, zeros, n, c, w, group, outputs, inputs, chunks, HAS_ZEROS, EVEN)
    if FORMULA != "":
        beside = _block(data, scales, zeros, n + gated, c, w, group, outputs, inputs, chunks, HAS_ZEROS, EVEN)
    row = _row_of(x, c * CHUNK + w, inputs, EVEN, ASM)
    for _ in range(ROUNDS):
        if ROUNDS > 1:
            later = tl.minimum(index + programs, blocks - 1) * BLOCK_N + tl.arange(0, BLOCK_N)
            next_block = _block(data, scales, zeros, later, c, w, group, outputs, inputs, chunks, HAS_ZEROS, EVEN)
            if FORMULA != "":
                later += gated
                next_beside = _block(data, scales, zeros, later, c, w, group, outputs, inputs, chunks, HAS_ZEROS, EVEN)
        n = index * BLOCK_N + tl.arange(0, BLOCK_N)
        here = (n < gated) & (index < blocks)
        found = _multiplied(block, row, ASM)
        if HAS_BIAS:
            found += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
        if FORMULA != "":
            times = _multiplied(beside, row, ASM)
            if HAS_BIAS:
                times += tl.load(bias + gated + n, mask=here, other=0.0).to(tl.float32)
            found = activated(found, FORMULA) * times
        tl.store(out + n, found.to(out.dtype.element_ty), mask=here)
        index += programs
        if ROUNDS > 1:
            block = next_block
            if FORMULA != "":
                beside = next_beside


@triton.jit
def _weights(words, scale0, offset0, scale1, offset1, dtype: tl.constexpr, ASM: tl.constexpr):
    """Eight tiles [BLOCK_N, 32], one for each position in a word."""
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [words, scale0, offset0, scale1, offset1],
            dtype=BFLOAT16_8, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r", [words, scale0, offset0, scale1, offset1],
            dtype=FLOAT16_8, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _scale_and_offset(
    scales, zeros, group, n, outputs, groups: tl.constexpr, dtype: tl.constexpr,
    HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Of one group, [BLOCK_N, 1] each: number = code * scale + offset."""
    known = None if EVEN else (n < outputs) & (group < groups)
    scale = tl.load(scales + group * outputs + n, mask=known, other=None if EVEN else 0.0).to(tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros + group * outputs + n, mask=known, other=None if EVEN else 0.0).to(tl.float32)
    else:
        zero = 8.0
    return scale.to(dtype)[:, None], (-scale * zero).to(dtype)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _scaled_kernel(
    x, data, scales, zeros, bias, out, partial, drawn, rows, outputs, x_stride,
    inputs: tl.constexpr, chunks: tl.constexpr, split_chunks: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    await_previous(OVERLAP)
    dtype: tl.constexpr = x.dtype.element_ty
    groups: tl.constexpr = inputs // 128
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    w = tl.arange(0, 32)
    x_rows = x + m.to(tl.int64)[None, :] * x_stride
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in tl.range(0, split_chunks, num_stages=STAGES):
        # Where the splits do not divide the chunks, the last one meets chunks that are not there: inputs of zero.
        c = split * split_chunks + step
        known = None if EVEN else ((n < outputs) & (c < chunks))[:, None]
        words = tl.load(data + (c * outputs + n)[:, None] * 32 + w[None, :], mask=known, other=None if EVEN else 0)
        scale0, offset0 = _scale_and_offset(scales, zeros, 2 * c, n, outputs, groups, dtype, HAS_ZEROS, EVEN)
        scale1, offset1 = _scale_and_offset(scales, zeros, 2 * c + 1, n, outputs, groups, dtype, HAS_ZEROS, EVEN)
        if ASM != "":
            weights = _weights(words, scale0, offset0, scale1, offset1, dtype, ASM)
        for position in tl.static_range(8):
            k = c * CHUNK + position * 32 + w
            inside = (m < rows)[None, :] if EVEN else (m < rows)[None, :] & (k < inputs)[:, None]
            xs = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
            if ASM != "":
                weight = weights[position]
            else:
                code = ((words >> (4 * position)) & 15).to(tl.float32)
                if position < 4:
                    weight = (code * scale0.to(tl.float32) + offset0.to(tl.float32)).to(dtype)
                else:
                    weight = (code * scale1.to(tl.float32) + offset1.to(tl.float32)).to(dtype)
            acc = tl.dot(weight, xs, acc)
    finish(acc, out, partial, drawn, bias, n, m, rows, outputs, split, SPLITS, HAS_BIAS)


def default_config(rows: int, weight: PackedWeight) -> dict[str, Any] | None:
    """None where neither variant is the best choice."""
    outputs, inputs = weight.shape
    if rows == 1 and inputs <= MOST_INPUTS:
        warps = min(16, max(1, _quads(weight) // 32))
        block_n, per_sm = (8, 1) if warps == 16 else (4, 24 // warps)
        return {"variant": "integer", "BLOCK_N": block_n, "PER_SM": per_sm, "num_warps": warps}
    if rows > 128:
        return None
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    tiles = -(-outputs // 64) * -(-rows // block_m)
    splits = next((count for count in (4, 2) if tiles * count <= (400 if block_m == 16 else 256)), 1)
    config = {"variant": "scaled", "BLOCK_M": block_m, "SPLITS": min(splits, weight.data.shape[0])}
    if block_m == 64 and tiles > 400:
        return {**config, "BLOCK_N": 128, "SPLITS": 2, "STAGES": 2, "num_warps": 8}
    return {**config, "BLOCK_N": 64, "STAGES": 3, "num_warps": 4}


def run(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    config: dict[str, Any],
    activation: str | None = None,
) -> torch.Tensor:
    """x [rows, inputs] by the variant of `config`, whose other entries are that kernel's. With an activation, which
    `integer` alone has, the first half of the outputs are gates: their activation times the second half is returned."""
    config = dict(config)
    variant = config.pop("variant")
    rows, (outputs, inputs) = len(x), weight.shape
    chunks, zeros = weight.data.shape[0], weight.zeros
    out = x.new_empty(rows, outputs if activation is None else outputs // 2)
    gated = out.shape[1]
    if activation is not None:
        config["BLOCK_N"] //= 2
    blocks = triton.cdiv(gated, config["BLOCK_N"])
    tensors = (
        x,
        weight.data,
        weight.scales,
        weight.scales if zeros is None else zeros,
        x if bias is None else bias,
        out,
    )
    # Masks cost more than what they guard where nothing sticks out.
    even = gated % config["BLOCK_N"] == 0 and inputs % CHUNK.value == 0
    shared = {"inputs": inputs, "chunks": chunks, "HAS_ZEROS": zeros is not None, "HAS_BIAS": bias is not None}
    if variant == "integer":
        programs = min(blocks, config.pop("PER_SM") * multiprocessors(x.device))
        quads = _quads(weight)
        _integer_kernel[(programs,)](
            *tensors, outputs, blocks, programs, gated, **shared, QUADS=quads, ROUNDS=triton.cdiv(blocks, programs),
            EVEN=even and quads == 8 * chunks, ASM="" if INTERPRETED else PRODUCTS,
            FORMULA="" if activation is None else FORMULAS[activation], **config, **overlap(),
        )  # fmt: skip
        return out
    grid = (blocks, triton.cdiv(rows, config["BLOCK_M"]), config["SPLITS"])
    partial, drawn = split_memory(out, grid)
    _scaled_kernel[grid](
        *tensors, partial, drawn, rows, outputs, x.stride(0), **shared, split_chunks=triton.cdiv(chunks, grid[2]),
        EVEN=even and chunks % grid[2] == 0, ASM=widening(x.dtype), **config, **overlap(),
    )  # fmt: skip
    return out


def _quads(weight: PackedWeight) -> int:
    return triton.next_power_of_2(8 * weight.data.shape[0])
