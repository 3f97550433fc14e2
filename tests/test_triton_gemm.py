"""Products with packed weights against the dense ones: every variant, scheme and awkward shape.

On a machine without a GPU the kernels run in Triton's interpreter, on smaller shapes and without bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tidemill.ops import reference
from tidemill.ops.triton import fp8, packed_gemm
from tidemill.quant.on_load import pack
from tidemill.quant.packed import PackedWeight
from tidemill.quant.scheme import FP8, INT4, INT8

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
BOUND = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SCHEMES = {
    "int4": INT4,
    "int4 by 64": replace(INT4, group_size=64),
    "int4 by 32": replace(INT4, group_size=32),
    "int4 symmetric": replace(INT4, zeros=False),
    "int8": INT8,
    "int8 by 64": replace(INT8, group_size=64),
}
SHAPES = [(40, 576), (48, 96), *([(6144, 4096), (1000, 14336)] if CUDA else [])]
SUM = {"variant": "sum", "BLOCK_N": 32, "CHUNKS": 2, "STAGES": 2, "num_warps": 4}
DOT = {"variant": "dot", "BLOCK_M": 16, "BLOCK_N": 64, "SPLITS": 1, "STAGES": 2, "num_warps": 4}
SPLIT = {**DOT, "BLOCK_N": 32, "SPLITS": 2}
INTEGER = {"variant": "integer", "BLOCK_N": 2, "PER_SM": 3, "num_warps": 4}
SCALED = {"variant": "scaled", "BLOCK_M": 16, "BLOCK_N": 32, "SPLITS": 1, "STAGES": 2, "num_warps": 4}
SCALED_SPLIT = {**SCALED, "SPLITS": 2}
FP8_SUM = {"variant": "sum", "BLOCK_N": 32, "BLOCK_K": 256, "STAGES": 2, "num_warps": 4}
FP8_DOT = {**DOT, "BLOCK_K": 128}
FP8_SPLIT = {**SPLIT, "BLOCK_K": 64}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def check(
    found: torch.Tensor, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None, slack: int = 1
) -> None:
    wanted = x.double() @ weight.unpack().double().t() + (0 if bias is None else bias.double())
    assert found.dtype == x.dtype
    assert (found.double() - wanted).norm() / wanted.norm() < slack * BOUND[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("config", "rows"), [(SUM, 1), (DOT, 17), (SPLIT, 3)], ids=["sum", "dot", "split"])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_variant_multiplies_every_scheme(name, config, rows, dtype):
    for outputs, inputs in SHAPES:
        weight = pack(random(outputs, inputs), SCHEMES[name])
        x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
        check(packed_gemm.run(x, weight, bias, config), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("config", [INTEGER, SCALED, SCALED_SPLIT], ids=["integer", "scaled", "split"])
@pytest.mark.parametrize("zeros", [True, False])
def test_four_bits_in_groups_of_128(config, dtype, zeros):
    rows = 1 if config is INTEGER else 17
    for outputs, inputs in [(37, 640), *([(6144, 4096), (1000, 14336)] if CUDA else [])]:
        weight = pack(random(outputs, inputs), replace(INT4, zeros=zeros))
        x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
        # Large inputs beside small ones: each sixteen of them are rounded by themselves.
        x[:, :16] *= 1000
        # Scaled weights are rounded to x's type, as dense ones would be.
        check(packed_gemm.run(x, weight, bias, config), x, weight, bias, slack=2)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_the_gate_of_an_mlp_is_applied_on_the_way_out(activation):
    dtype = DTYPES[-1]
    for inner, inputs in [(20, 640), (19, 256), *([(14336, 4096)] if CUDA else [])]:
        weight, bias = pack(random(2 * inner, inputs), INT4), random(2 * inner, dtype=dtype)
        x = random(1, inputs, dtype=dtype)
        found = packed_gemm.gated_linear(x, weight, bias, activation)
        whole = (x.double() @ weight.unpack().double().t() + bias.double()).float()
        wanted = reference.act_and_mul(whole, activation)
        assert found is not None and found.dtype == dtype
        assert (found.float() - wanted).norm() / wanted.norm() < 2 * BOUND[dtype]
    assert packed_gemm.gated_linear(random(2, inputs, dtype=dtype), weight, None, activation) is None


@pytest.mark.parametrize("rows", [1, 3, 70, *([16, 64, 200, 300] if CUDA else [])])
@pytest.mark.parametrize("scheme", [INT4, INT8, FP8], ids=lambda scheme: scheme.name)
def test_the_variant_that_is_chosen_is_right(scheme, rows):
    dtype = DTYPES[-1]
    kernel = fp8 if scheme is FP8 else packed_gemm
    for outputs, inputs in [(48, 320), *([(4096, 4096)] if CUDA else [])]:
        weight, x = pack(random(outputs, inputs), scheme), random(rows, inputs, dtype=dtype)
        found = kernel.linear(x[None], weight)
        assert found.shape == (1, rows, outputs)
        variant = kernel.choose(rows, weight, dtype)["variant"]
        if variant == "scaled_mm":
            wanted = x.float() @ weight.unpack().t()
            assert (found[0].float() - wanted).norm() / wanted.norm() < 0.05
        else:
            # Scaled weights are rounded to x's type, as dense ones would be.
            check(found[0], x, weight, slack=2 if variant == "scaled" else 1)


def test_a_strided_x_and_no_rows():
    weight = pack(random(32, 96), INT8)
    wide = random(4, 128)
    check(packed_gemm.linear(wide[:, :96], weight), wide[:, :96], weight)
    assert packed_gemm.linear(wide[:0, :96], weight).shape == (0, 32)


def test_splits_leave_their_tickets_as_they_found_them():
    """A product is the same every time, bit for bit, although nobody knows which split ends last."""
    weight, x = pack(random(64, 1024), INT4), random(5, 1024)
    config: dict[str, Any] = {**SPLIT, "BLOCK_N": 64, "SPLITS": 4}
    first = packed_gemm.run(x, weight, None, config)
    for _ in range(20 if CUDA else 1):
        assert torch.equal(packed_gemm.run(x, weight, None, config), first)


@pytest.mark.parametrize("scheme", [INT4, INT8, replace(INT4, zeros=False)], ids=str)
def test_widening_gives_the_dense_matrix(scheme):
    weight = pack(random(40, 320), scheme)
    assert torch.allclose(packed_gemm.widen(weight, torch.float32), weight.unpack(), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("config", "rows"), [(FP8_SUM, 1), (FP8_DOT, 9), (FP8_SPLIT, 3)], ids=["sum", "dot", "split"])
def test_fp8_weights_times_wider_inputs(config, rows, dtype):
    for outputs, inputs in [(48, 576), *([(4096, 4096), (1008, 14336)] if CUDA else [])]:
        weight = pack(random(outputs, inputs), FP8)
        x, bias = random(rows, inputs, dtype=dtype), random(outputs, dtype=dtype)
        check(fp8.run(x, weight, bias, config), x, weight, bias)


def test_rows_are_rounded_to_the_nearest_fp8():
    x = random(5, 200)
    x[3] = 0
    x[4] *= torch.logspace(-9, 3, 200, device=DEVICE)
    rounded, scales = fp8.quantise_rows(x)
    assert torch.allclose(scales[:3, 0], x[:3].abs().amax(dim=1) / 448)
    exact = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    # A division that rounds differently may fall on the other side of a tie.
    assert (rounded.float() != exact.float()).float().mean() < 0.01
    assert torch.allclose(rounded.float(), exact.float(), rtol=0.13, atol=2**-9)


@pytest.mark.skipif(not CUDA, reason="the product with both sides in fp8 is the card's")
@pytest.mark.parametrize("rows", [17, 64, 300])
def test_fp8_times_fp8_is_the_product_of_what_was_rounded(rows):
    weight, x = pack(random(4096, 1024), FP8), random(rows, 1024, dtype=torch.bfloat16)
    rounded, scales = fp8.quantise_rows(x)
    wanted = (rounded.float() * scales) @ weight.unpack().t()
    found = fp8.run(x, weight, None, {"variant": "scaled_mm"})
    assert (found.float() - wanted).norm() / wanted.norm() < 6e-3


@pytest.mark.parametrize(("outputs", "inputs"), [(144, 192), *([(4096, 7168)] if CUDA else [])])
def test_scales_of_blocks(outputs, inputs):
    dense = random(outputs, inputs)
    down, across = -(-outputs // 128), -(-inputs // 128)
    scales = torch.rand(down, across, device=DEVICE) + 0.5
    wide = scales.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    weight = (dense / wide).to(torch.float8_e4m3fn)
    x = random(5, inputs)
    rounded, x_scales = fp8.quantise_rows(x, 128)
    wanted = (rounded.float() * x_scales.repeat_interleave(128, 1)[:, :inputs]) @ (weight.float() * wide).t()
    found = fp8.block_scaled_mm(x, weight, scales)
    assert (found - wanted).norm() / wanted.norm() < 2e-3
