"""y = x Wᵀ + b for weights packed as integers of 4 or 8 bits (the layout is `quant/packed.py`'s).

A few rows are decided by how fast the weights stream, so a weight may cost about four instructions: codes become
floating point by placing their bits under a fixed exponent, and scales and zero points are applied once per group of
inputs.
- `sum`: one row, multiplied and added in registers, each program owns its outputs;
- `dot`: up to some dozen rows in tensor cores; programs may share outputs and split the inputs, and the last one to
  finish adds their parts up in a fixed order, so that a product is the same every time;
- many rows: the weights are widened once into a temporary matrix and multiplied by cuBLAS;
- 4 bits in groups of 128 have faster ways of their own up to a hundred rows (`packed_int4.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tidemill.ops.triton import packed_int4
from tidemill.ops.triton.split import finish, split_memory
from tidemill.ops.triton.tuning import launch_config
from tidemill.quant.packed import PackedWeight

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
BFLOAT16_8, FLOAT16_8 = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.float16,) * 8)
FLOAT32_8, FLOAT32_4 = tl.constexpr((tl.float32,) * 8), tl.constexpr((tl.float32,) * 4)
BFLOAT16_4, FLOAT16_4 = tl.constexpr((tl.bfloat16,) * 4), tl.constexpr((tl.float16,) * 4)


def unpacking(bits: int, dtype: torch.dtype) -> str:
    """PTX that turns two neighbouring words into one register of two codes for each position in a word.

    Four bits become the top of a mantissa under the exponent of 16: code + 16, exactly. Eight bits need all of
    bfloat16's precision, so seven of them and the sign go under the exponent of 128 and are subtracted."""
    if INTERPRETED or dtype == torch.float32:
        return ""
    wide = dtype == torch.bfloat16
    first, second = ("$8", "$9") if bits == 4 else ("$4", "$5")
    lines = [".reg .b32 a, b, t, u;"]
    if bits == 4:
        lines += [f"prmt.b32 a, {first}, {second}, 0x5410;", f"prmt.b32 b, {first}, {second}, 0x7632;"]
        top, mask, exponent = (3, "0x00780078", "0x41804180") if wide else (6, "0x03C003C0", "0x4C004C00")
        for position in range(8):
            left = top - 4 * (position % 4)
            move = (
                f"shl.b32 t, {'ab'[position // 4]}, {left};"
                if left > 0
                else f"shr.u32 t, {'ab'[position // 4]}, {-left};"
            )
            lines += [move, f"lop3.b32 ${position}, t, {mask}, {exponent}, 0xEA;"]
    else:
        lines.append(f"mov.b32 a, {'0xBF80BF80' if wide else '0x64806480'};")
        for position in range(4):
            lines.append(f"prmt.b32 t, {first}, {second}, 0x{4 + position}{4 + position}{position}{position};")
            if wide:
                lines += [
                    "lop3.b32 u, t, 0x00800080, 0x43004300, 0xEA;",
                    "lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;",
                    f"fma.rn.bf16x2 ${position}, u, a, t;",
                ]
            else:
                lines += ["lop3.b32 t, t, 0x00FF00FF, 0x64806480, 0x6A;", f"sub.f16x2 ${position}, t, a;"]
    return "{ " + " ".join(lines) + " }"


def unpacking_floats(bits: int) -> str:
    """PTX that turns a word into a float32 for each position in it, as `_widened` does. The compiler alone would take
    three instructions for each."""
    if INTERPRETED:
        return ""
    word = "$8" if bits == 4 else "$4"
    mask, exponent, table = ("0x00780000", "0x41800000", "0xEA") if bits == 4 else ("0x007F8000", "0x43C00000", "0x6A")
    lines = [".reg .b32 t;"]
    for position in range(32 // bits):
        left = 23 - bits - bits * position
        lines.append(f"shl.b32 t, {word}, {left};" if left > 0 else f"shr.u32 t, {word}, {-left};")
        lines.append(f"lop3.b32 ${position}, t, {mask}, {exponent}, {table};")
    return "{ " + " ".join(lines) + " }"


@triton.jit
def _widened(words, BITS: tl.constexpr, position: tl.constexpr):
    """Code `position` of each word as float32, above its value by 16 (4 bits) or 384 (8 bits): two instructions."""
    if BITS == 4:
        if position < 5:
            moved = words << (19 - 4 * position)
        else:
            moved = words >> (4 * position - 19)
        return ((moved & 0x00780000) | 0x41800000).to(tl.float32, bitcast=True)
    else:
        if position < 2:
            moved = words << (15 - 8 * position)
        else:
            moved = words >> (8 * position - 15)
        return ((moved & 0x007F8000) ^ 0x43C00000).to(tl.float32, bitcast=True)


@triton.jit
def _code(words, BITS: tl.constexpr, position: tl.constexpr, dtype: tl.constexpr):
    """Code `position` of each word in the products' type; of 4 bits, 16 above its value, as in `unpacking`."""
    if BITS == 4:
        return (((words >> (4 * position)) & 15) + 16).to(dtype)
    else:
        return ((words << (24 - 8 * position)) >> 24).to(dtype)


@triton.jit
def _sum_kernel(
    x, data, scales, zeros, bias, out, outputs, inputs, x_stride, chunks: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr, ASM: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    PER_WORD: tl.constexpr = 32 // BITS
    CHUNK: tl.constexpr = 32 * PER_WORD
    FOLD: tl.constexpr = CHUNK if GROUP == 0 or GROUP > CHUNK else GROUP
    # How far `_widened` is above a number of which no zero point is subtracted yet.
    ABOVE: tl.constexpr = 16 if BITS == 4 else 384
    MIDDLE: tl.constexpr = 8 if BITS == 4 else 0
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = n < outputs
    w = tl.arange(0, 32)
    acc = tl.zeros((BLOCK_N, CHUNKS, 32), dtype=tl.float32)
    for first in tl.range(0, chunks, CHUNKS, num_stages=STAGES):
        c = first + tl.arange(0, CHUNKS)
        inside = here[:, None] & (c < chunks)[None, :]
        places = (c[None, :] * outputs + n[:, None])[:, :, None] * 32 + w[None, None, :]
        if EVEN:
            words = tl.load(data + places)
        else:
            words = tl.load(data + places, mask=inside[:, :, None], other=0)
        if ASM != "":
            if BITS == 4:
                codes = tl.inline_asm_elementwise(
                    ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r", [words], dtype=FLOAT32_8, is_pure=True, pack=1
                )
            else:
                codes = tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [words], dtype=FLOAT32_4, is_pure=True, pack=1)
        part = tl.zeros((BLOCK_N, CHUNKS, 32), dtype=tl.float32)
        total = tl.zeros((CHUNKS, 32), dtype=tl.float32)
        for position in tl.static_range(PER_WORD):
            k = (c[:, None] * PER_WORD + position) * 32 + w[None, :]
            if EVEN:
                xs = tl.load(x + row * x_stride + k).to(tl.float32)
            else:
                xs = tl.load(x + row * x_stride + k, mask=k < inputs, other=0.0).to(tl.float32)
            if ASM != "":
                part += codes[position] * xs[None, :, :]
            else:
                part += _widened(words, BITS, position) * xs[None, :, :]
            total += xs
            if ((position + 1) * 32) % FOLD == 0:
                if GROUP == 0:
                    acc += part - total[None, :, :] * (ABOVE + MIDDLE)
                else:
                    group = (c * CHUNK + position * 32) // GROUP
                    known = None if EVEN else inside & (group < inputs // GROUP)[None, :]
                    at = group[None, :] * outputs + n[:, None]
                    scale = tl.load(scales + at, mask=known, other=None if EVEN else 0.0).to(tl.float32)
                    if HAS_ZEROS:
                        zero = tl.load(zeros + at, mask=known, other=None if EVEN else 0.0).to(tl.float32) + ABOVE
                        acc += (part - total[None, :, :] * zero[:, :, None]) * scale[:, :, None]
                    else:
                        acc += (part - total[None, :, :] * (ABOVE + MIDDLE)) * scale[:, :, None]
                part = tl.zeros((BLOCK_N, CHUNKS, 32), dtype=tl.float32)
                total = tl.zeros((CHUNKS, 32), dtype=tl.float32)
    found = tl.sum(tl.sum(acc, axis=2), axis=1)
    if GROUP == 0:
        found *= tl.load(scales + n, mask=here, other=0.0)
    if HAS_BIAS:
        found += tl.load(bias + n, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, found.to(out.dtype.element_ty), mask=here)


@triton.jit
def _codes(words, BITS: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """A tile of codes for each position in a word."""
    if BITS == 4:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(
                ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=BFLOAT16_8, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=FLOAT16_8, is_pure=True, pack=2
            )
    else:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r", [words], dtype=BFLOAT16_4, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r", [words], dtype=FLOAT16_4, is_pure=True, pack=2)


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x, data, scales, zeros, bias, out, partial, drawn, rows, outputs, inputs, x_stride,
    chunks: tl.constexpr, split_chunks: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    PER_WORD: tl.constexpr = 32 // BITS
    CHUNK: tl.constexpr = 32 * PER_WORD
    FOLD: tl.constexpr = CHUNK if GROUP > CHUNK else GROUP
    ABOVE: tl.constexpr = 16 if BITS == 4 else 0
    MIDDLE: tl.constexpr = 8 if BITS == 4 else 0
    # Tensor cores are idle while weights stream, so they also add up the inputs that an offset is multiplied with.
    SUMS: tl.constexpr = BITS == 4 or HAS_ZEROS
    dtype: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    n_here, m_here = n < outputs, m < rows
    w = tl.arange(0, 32)
    x_rows = x + m.to(tl.int64)[None, :] * x_stride
    ones = tl.full((BLOCK_N, 32), 1.0, dtype)
    acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in tl.range(0, split_chunks, num_stages=STAGES):
        # Where the splits do not divide the chunks, the last one meets chunks that are not there: they are zero.
        c = split * split_chunks + step
        inside = n_here & (c < chunks)
        known = None if EVEN else inside[:, None]
        words = tl.load(data + (c * outputs + n)[:, None] * 32 + w[None, :], mask=known, other=None if EVEN else 0)
        if ASM != "":
            codes = _codes(words, BITS, dtype, ASM)
        for position in tl.static_range(PER_WORD):
            k = (c * PER_WORD + position) * 32 + w
            if EVEN:
                xs = tl.load(x_rows + k[:, None], mask=m_here[None, :], other=0.0)
            else:
                xs = tl.load(x_rows + k[:, None], mask=m_here[None, :] & (k < inputs)[:, None], other=0.0)
            if ASM != "":
                code = codes[position]
            else:
                code = _code(words, BITS, position, dtype)
            part = tl.dot(code, xs, part, input_precision="ieee")
            if SUMS:
                total = tl.dot(ones, xs, total, input_precision="ieee")
            if GROUP > 0:
                if ((position + 1) * 32) % FOLD == 0:
                    group = (c * CHUNK + position * 32) // GROUP
                    grouped = None if EVEN else n_here & (group < inputs // GROUP)
                    other = None if EVEN else 0.0
                    scale = tl.load(scales + group * outputs + n, mask=grouped, other=other).to(tl.float32)
                    if HAS_ZEROS:
                        zero = tl.load(zeros + group * outputs + n, mask=grouped, other=other).to(tl.float32) + ABOVE
                        part -= total * zero[:, None]
                    elif SUMS:
                        part -= total * (ABOVE + MIDDLE)
                    acc += part * scale[:, None]
                    part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
                    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    if GROUP == 0:
        if SUMS:
            part -= total * (ABOVE + MIDDLE)
        acc = part * tl.load(scales + n, mask=n_here, other=0.0)[:, None]
    finish(acc, out, partial, drawn, bias, n, m, rows, outputs, split, SPLITS, HAS_BIAS)


@triton.jit
def _widen_kernel(
    data, scales, zeros, out, outputs, inputs,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    PER_WORD: tl.constexpr = 32 // BITS
    ABOVE: tl.constexpr = 16 if BITS == 4 else 384
    MIDDLE: tl.constexpr = 8 if BITS == 4 else 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.program_id(1)
    here = n < outputs
    w = tl.arange(0, 32)
    words = tl.load(data + (c * outputs + n)[:, None] * 32 + w[None, :], mask=here[:, None], other=0)
    for position in tl.static_range(PER_WORD):
        first = (c * PER_WORD + position) * 32
        group = 0 if GROUP == 0 else first // GROUP
        known = here & (first < inputs)
        scale = tl.load(scales + group * outputs + n, mask=known, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zero = tl.load(zeros + group * outputs + n, mask=known, other=0.0).to(tl.float32)[:, None]
        else:
            zero = MIDDLE
        number = (_widened(words, BITS, position) - ABOVE - zero) * scale[:, None]
        k = first + w
        inside = here[:, None] & (k < inputs)[None, :]
        tl.store(out + n.to(tl.int64)[:, None] * inputs + k[None, :], number.to(out.dtype.element_ty), mask=inside)


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., inputs] times a packed integer matrix, in x's dtype."""
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    config = choose(len(flat), weight, flat.dtype)
    out = run(flat, weight, bias, config)
    return out.view(*x.shape[:-1], weight.shape[0])


def gated_linear(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str
) -> torch.Tensor | None:
    """The activation of the first half of the outputs times the second half, where one launch can do it; else None."""
    if x.numel() != x.shape[-1] or weight.shape[0] % 2:
        return None
    config = choose(1, weight, x.dtype)
    if config["variant"] != "integer" or config["BLOCK_N"] == 1:
        return None
    out = packed_int4.run(x.reshape(1, -1), weight, bias, config, activation)
    return out.view(*x.shape[:-1], -1)


def choose(rows: int, weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    """Variant and block sizes for a number of rows: measured ones where there are any (for 16-bit types)."""
    bucket = max(1, triton.next_power_of_2(rows))
    # A measured configuration may be another variant's, so it never mixes with the default's entries.
    measured = launch_config("packed_gemm", tuning_key(weight, bucket), {}) if dtype.itemsize == 2 else {}
    return measured or default_config(bucket, weight, dtype)


def tuning_key(weight: PackedWeight, rows: int) -> str:
    (outputs, inputs), scheme = weight.shape, weight.scheme
    return f"{scheme.bits}b/{scheme.group_size or 'row'} {outputs}x{inputs} {rows}"


def default_config(rows: int, weight: PackedWeight, dtype: torch.dtype) -> dict[str, Any]:
    if packed_int4.fits(weight, dtype) and (config := packed_int4.default_config(rows, weight)) is not None:
        return config
    if rows > 256:
        return {"variant": "widen", "BLOCK_N": 64, "num_warps": 4}
    outputs, chunks = weight.shape[0], weight.data.shape[0]
    block_m, block_n, stages, warps = (16, 64, 4, 4) if rows <= 16 else (min(64, rows), 128, 3, 8)
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(rows, block_m)
    splits = max(1, min(4, 264 // tiles, chunks // 2))
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLITS": splits}
    # Twice the bytes of a number leave room for half as many stages in shared memory.
    return {"variant": "dot", **blocks, "STAGES": 2 if dtype == torch.float32 else stages, "num_warps": warps}


def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, config: dict[str, Any]) -> torch.Tensor:
    """x [rows, inputs] by the variant of `config`, whose other entries are that kernel's."""
    if len(x) and config["variant"] in ("integer", "scaled"):
        return packed_int4.run(x, weight, bias, config)
    config = dict(config)
    variant = config.pop("variant")
    if variant == "widen":
        return torch.nn.functional.linear(x, widen(weight, x.dtype, config), bias)
    rows, (outputs, inputs) = len(x), weight.shape
    out = x.new_empty(rows, outputs)
    if not rows:
        return out
    chunks, zeros = weight.data.shape[0], weight.zeros
    shared = {
        "BITS": weight.scheme.bits, "GROUP": weight.scheme.group_size or 0,
        "HAS_ZEROS": zeros is not None, "HAS_BIAS": bias is not None,
    }  # fmt: skip
    tensors = (
        x,
        weight.data,
        weight.scales,
        weight.scales if zeros is None else zeros,
        x if bias is None else bias,
        out,
    )
    blocks = triton.cdiv(outputs, config["BLOCK_N"])
    # Masks cost more than what they guard where nothing sticks out.
    even = outputs % config["BLOCK_N"] == 0 and inputs % weight.scheme.chunk == 0
    if variant == "sum":
        shared["EVEN"] = even and chunks % config["CHUNKS"] == 0
        _sum_kernel[(blocks, rows)](
            *tensors, outputs, inputs, x.stride(0), chunks, **shared, ASM=unpacking_floats(weight.scheme.bits), **config
        )
        return out
    grid = (blocks, triton.cdiv(rows, config["BLOCK_M"]), config["SPLITS"])
    partial, drawn = split_memory(out, grid)
    asm = unpacking(weight.scheme.bits, x.dtype)
    split_chunks = triton.cdiv(chunks, grid[2])
    shared["EVEN"] = even and chunks % grid[2] == 0
    _dot_kernel[grid](
        *tensors, partial, drawn, rows, outputs, inputs, x.stride(0), chunks, split_chunks,
        **shared, ASM=asm, **config,
    )  # fmt: skip
    return out


def widen(weight: PackedWeight, dtype: torch.dtype, config: dict[str, Any] | None = None) -> torch.Tensor:
    """The dense matrix in `dtype`."""
    outputs, inputs = weight.shape
    config = config or {"BLOCK_N": 64, "num_warps": 4}
    out = torch.empty((outputs, inputs), dtype=dtype, device=weight.data.device)
    zeros = weight.zeros
    _widen_kernel[(triton.cdiv(outputs, config["BLOCK_N"]), weight.data.shape[0])](
        weight.data, weight.scales, weight.scales if zeros is None else zeros, out, outputs, inputs,
        BITS=weight.scheme.bits, GROUP=weight.scheme.group_size or 0, HAS_ZEROS=zeros is not None, **config,
    )  # fmt: skip
    return out
