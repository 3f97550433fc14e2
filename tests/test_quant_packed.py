"""Packed weights: where each number lies, how far rounding takes it, and that a model loads into them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tidemill.errors import BadCheckpoint
from tidemill.layers.linear import Linear
from tidemill.layers.parameter import Placement
from tidemill.models.decoder import Decoder
from tidemill.models.registry import describe
from tidemill.quant.on_load import pack
from tidemill.quant.packed import PackedWeight
from tidemill.quant.packing import DENSE, Matrix, Packing
from tidemill.quant.scheme import FP8, INT4, INT8, SCHEMES, applies, supports
from tidemill.runtime.loader import load_weights
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.location import locate

CPU = torch.device("cpu")


def random(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(locate(str(folder)))


def number_at(weight: PackedWeight, row: int, column: int) -> float:
    """One number, read as the layout's docstring says."""
    scheme = weight.scheme
    per_word = 32 // scheme.bits
    chunk, inside = divmod(column, 32 * per_word)
    position, word = divmod(inside, 32)
    code = (int(weight.data[chunk, row, word]) >> (position * scheme.bits)) & (2**scheme.bits - 1)
    if scheme.bits == 8 and code > 127:
        code -= 256
    group = 0 if scheme.group_size is None else column // scheme.group_size
    zero = (8 if scheme.bits == 4 else 0) if weight.zeros is None else float(weight.zeros[group, row])
    return (code - zero) * float(weight.scales[group, row])


@pytest.mark.parametrize(
    "scheme", [INT4, replace(INT4, group_size=32), replace(INT4, zeros=False), INT8, replace(INT8, group_size=64)]
)
@pytest.mark.parametrize("inputs", [64, 320])
def test_the_layout_is_what_it_says(scheme, inputs):
    packed = pack(random(16, inputs), scheme)
    slowly = torch.tensor([[number_at(packed, row, column) for column in range(inputs)] for row in range(16)])
    assert torch.allclose(slowly, packed.unpack(), atol=1e-7)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_numbers_a_scheme_can_hold_stay_what_they_are(scheme):
    if scheme.kind == "fp8":
        exact = (random(32, 256) * 30).to(torch.float8_e4m3fn).float()
        exact[:, 0] = 448.0
    else:
        low, high = (-3, 12) if scheme.bits == 4 else (-127, 127)
        exact = torch.randint(low, high + 1, (32, 256), generator=torch.Generator().manual_seed(0)).float()
        exact[:, ::128], exact[:, 1::128] = low, high
        exact *= 0.25
    assert torch.equal(pack(exact, scheme).unpack(), exact)


@pytest.mark.parametrize(("scheme", "bound"), [(INT4, 0.1), (INT8, 0.01), (FP8, 0.03)])
@pytest.mark.parametrize("inputs", [512, 576])
def test_rounding_takes_numbers_no_further_than_this(scheme, bound, inputs):
    weight = random(64, inputs)
    packed = pack(weight, scheme)
    assert (packed.unpack() - weight).norm() / weight.norm() < bound
    assert packed.num_bytes == scheme.bytes_for(64, inputs)


def test_groups_of_equal_numbers_and_of_zeros_survive():
    weight = torch.zeros(16, 256)
    weight[3], weight[4], weight[5, :128] = 5.0, -1e-3, 1e-9
    for scheme in SCHEMES.values():
        assert torch.allclose(pack(weight, scheme).unpack(), weight, rtol=2e-3, atol=1e-6)


def test_the_group_is_the_largest_that_divides():
    assert [INT4.fitted(inputs).group_size for inputs in (4096, 576, 96)] == [128, 64, 32]
    assert INT8.fitted(100).group_size is None


def test_what_stays_dense_has_a_reason():
    assert applies(INT4, 64, 48) == "48 inputs are no multiple of 32, the smallest group"
    assert "multiples of 16" in str(applies(FP8, 64, 40))
    assert "fewer than 16" in str(applies(INT8, 1, 64))
    assert applies(INT8, 64, 40) is None
    assert Packing(INT4).nbytes(Matrix("x", 64, 48), 2) == 64 * 48 * 2
    assert Packing(INT4).nbytes(Matrix("x", 64, 256), 2) == 64 * (128 + 2 * 2 * 2)
    assert supports(FP8, (9, 0)) is None and supports(INT4, (7, 5)) is None
    assert "8.0" in str(supports(FP8, (8, 0)))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_fused_layer_fills_the_rows_of_each_part(scheme):
    place = Placement(torch.float32, CPU, Packing(scheme))
    order = torch.cat((torch.arange(32).flip(0), torch.arange(32, 64)))
    linear = Linear(96, {"q": 32, "k": 32}, bias=True, place=place, transposed=True, rows=order)
    stored = {
        "q.weight": random(96, 32),
        "k.weight": random(96, 32) * 2,
        "q.bias": torch.ones(32),
        "k.bias": torch.zeros(32),
    }
    for parameter in linear.parameters():
        assert parameter.stored_shape == tuple(stored[parameter.name].shape)
        parameter.fill(stored[parameter.name])
    dense = torch.cat((stored["q.weight"].t(), stored["k.weight"].t()))[order]
    x = random(3, 96)
    wanted = x @ pack(dense, scheme).unpack().t() + torch.cat((torch.ones(32), torch.zeros(32)))
    assert torch.allclose(linear(x), wanted, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_a_model_loads_packed_and_answers_as_its_unpacked_self(tmp_path, scheme):
    write_checkpoint(tmp_path, "Llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    checkpoint = opened(tmp_path)
    spec = describe(checkpoint.config)
    packed, dense = (Decoder(spec, 32, Placement(torch.float32, CPU, chosen)) for chosen in (Packing(scheme), DENSE))
    load_weights(packed, checkpoint, check=True)
    load_weights(dense, checkpoint)
    layers = 0
    for mine, plain in zip(packed.layers, dense.layers, strict=True):
        for part in ("qkv", "out"):
            layers += _unpack_into(getattr(mine.attention, part), getattr(plain.attention, part))
        for part in ("up", "down"):
            layers += _unpack_into(getattr(mine.mlp, part), getattr(plain.mlp, part))
    assert layers == 4
    assert isinstance(packed.head.weight, torch.Tensor) and isinstance(packed.embedding.weight, torch.Tensor)
    x = random(5, 64)
    assert torch.allclose(packed.layers[0].mlp(x), dense.layers[0].mlp(x), atol=1e-3)
    assert torch.allclose(packed.layers[0].attention.qkv(x), dense.layers[0].attention.qkv(x), atol=1e-3)


def _unpack_into(packed: Linear, dense: Linear) -> int:
    assert isinstance(packed.weight, PackedWeight)
    assert isinstance(dense.weight, torch.Tensor)
    unpacked = packed.weight.unpack()
    assert (unpacked - dense.weight).norm() / dense.weight.norm() < 0.1
    dense.weight.copy_(unpacked)
    return 1


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_found_behind_the_packing(tmp_path, scheme, value):
    write_checkpoint(tmp_path, "Llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][3, 7] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = opened(tmp_path)
    model = Decoder(describe(checkpoint.config), 32, Placement(torch.float32, CPU, Packing(scheme)))
    with pytest.raises(BadCheckpoint, match=rf"1 of .* {name} are NaN or infinite"):
        load_weights(model, checkpoint, check=True)
