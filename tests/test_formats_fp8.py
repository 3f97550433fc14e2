"""FP8 and MXFP4 checkpoints: every number, and every refusal."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.packers import Packed, directory, write_quantised
from tests.helpers.packers_ct import METHODS, pack_fp8, pack_mxfp4
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats import fp8, mxfp4
from tidemill.quant.formats.matrix import QuantisedMatrix
from tidemill.quant.packed import empty

MODULE = "model.layers.0.mlp.down_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
MXFP4 = {"quant_method": "mxfp4"}


def random(outputs: int, inputs: int) -> torch.Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))
    return weight * torch.logspace(-3, 1, outputs)[:, None]


def named(packed: Packed) -> dict[str, torch.Tensor]:
    return {f"{MODULE}.{part}": stored for part, stored in packed.tensors.items()}


def check(packed: Packed, settings: dict) -> QuantisedMatrix:
    tensors = named(packed)
    # Modules that are not quantised are no business of the format's.
    others = {"lm_head.weight": torch.ones(4, 4), "model.norm.weight": torch.ones(4)}
    format_ = mxfp4 if settings["quant_method"] == "mxfp4" else fp8
    (name, matrix), = format_.matrices(settings, directory({**others, **tensors}), "here").items()  # fmt: skip
    assert name == f"{MODULE}.weight" and matrix.shape == tuple(packed.dense.shape)
    assert set(matrix.tensors) == set(tensors)
    stored = matrix.read(tensors.__getitem__)
    assert (stored.dense() - packed.dense).abs().max() <= 1e-6 * packed.dense.abs().max()
    for layout in ("words", "tiles") if matrix.scheme else ():
        memory = empty(matrix.scheme, *matrix.shape, lambda shape, dtype: torch.zeros(shape, dtype=dtype), layout)
        memory.store(stored)
        assert (memory.unpack() - packed.dense).norm() < 1e-6 * packed.dense.norm()
    return matrix


@pytest.mark.parametrize("outputs", [128, 208, 32])
def test_blocks_of_weights_share_a_scale(outputs):
    matrix = check(pack_fp8(random(outputs, 256), (128, 128)), BLOCKS)
    assert matrix.scheme is not None and matrix.scheme.kind == "fp8" and matrix.scheme.group_size == 128
    assert matrix.scheme.wide and matrix.scheme.activations == "fp8_dynamic"


def test_a_block_that_covers_the_inputs_is_a_row():
    matrix = check(pack_fp8(random(160, 96), (128, 128)), BLOCKS)
    assert matrix.scheme is not None and matrix.scheme.group_size is None


@pytest.mark.parametrize(("shape", "block"), [((64, 192), (128, 128)), ((64, 128), (64, 64)), ((40, 256), (128, 128))])
def test_what_no_kernel_takes_is_widened(shape, block):
    settings = {**FP8, "weight_block_size": list(block)}
    assert check(pack_fp8(random(*shape), block), settings).scheme is None


@pytest.mark.parametrize("kind", ["F8_E8M0", "U8"])
def test_scales_may_be_exponents(kind):
    packed = pack_fp8(random(128, 128), (64, 128))
    exponents = torch.tensor([[120], [131]], dtype=torch.uint8)
    stored = exponents if kind == "U8" else exponents.view(torch.float8_e8m0fnu)
    numbers = packed.tensors["weight"].float() * torch.exp2(exponents.float() - 127).repeat_interleave(64, 0)
    tensors = {**packed.tensors, "weight_scale_inv": stored}
    check(Packed(tensors, numbers), {**FP8, "weight_block_size": [64, 128], "scale_fmt": "ue8m0"})


@pytest.mark.parametrize(("options", "settings"), [
    ({}, FP8),
    ({"name": "weight_scale"}, {**FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    ({"by_row": True}, FP8),
    ({"by_row": True, "name": "weight_scale"}, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    ({"name": "weight_scale"}, {"quant_method": "modelopt", "quant_algo": "FP8"}),
])  # fmt: skip
def test_one_scale_or_one_per_row(options, settings):
    packed = pack_fp8(random(48, 80), **options)
    if settings.get("activation_scheme") == "static":
        packed.tensors["input_scale"] = torch.tensor(0.5)
    matrix = check(packed, settings)
    assert matrix.scheme is not None and matrix.scheme.group_size is None
    assert "a scale per row" in matrix.kind if options.get("by_row") else "one scale" in matrix.kind


def test_the_numbers_are_those_of_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    packed = pack_fp8(random(256, 384), (128, 128))
    parts = packed.tensors
    theirs = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
    check(Packed(parts, theirs), BLOCKS)


FINE = pack_fp8(random(256, 256), (128, 128)).tensors
ONE = pack_fp8(random(16, 16)).tensors


@pytest.mark.parametrize(("tensors", "settings", "words"), [
    ({"weight": FINE["weight"]}, BLOCKS, ["scales are missing", f"{MODULE}.weight_scale_inv"]),
    ({"weight": ONE["weight"]}, FP8, ["scales are missing", f"{MODULE}.weight_scale"]),
    ({**FINE, "weight_scale_inv": torch.ones(2, 3)}, BLOCKS, ["has shape [2, 3], expected [2, 2]", "128 x 128"]),
    ({**FINE, "weight_scale_inv": torch.ones(2, 2).int()}, BLOCKS, ["weight_scale_inv is I32"]),
    (FINE, FP8, ["has shape [2, 2], expected [1, 1]"]),
    (FINE, {**FP8, "weight_block_size": [128]}, ["weight_block_size is [128]", "[128, 128]"]),
    (FINE, {**FP8, "weight_block_size": [0, 128]}, ["weight_block_size is [0, 128]"]),
])  # fmt: skip
def test_what_does_not_fit_is_refused_from_headers(tensors, settings, words):
    with pytest.raises(BadCheckpoint) as refusal:
        fp8.matrices(settings, directory({f"{MODULE}.{name}": stored for name, stored in tensors.items()}), "here")
    assert refusal.value.message.startswith("here: ") and refusal.value.fix and refusal.value.cause
    for word in words:
        assert word in refusal.value.report()


@pytest.mark.parametrize(("tensors", "settings", "words"), [
    ({**ONE, "weight": ONE["weight"].float().to(torch.float8_e5m2)}, FP8, f"{MODULE}.weight is F8_E5M2"),
    (ONE, {**FP8, "fmt": "e5m2"}, "fmt is 'e5m2'"),
    (ONE, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo 'NVFP4'"),
    ({"experts": torch.ones(2, 4, 4).to(torch.float8_e4m3fn)}, FP8, f"{MODULE}.experts is F8_E4M3 of shape [2, 4, 4]"),
    ({**ONE, "weight": torch.ones(16, 16).to(torch.int8)}, FP8, "numbers of 4 bits"),
])  # fmt: skip
def test_what_is_not_read_is_refused_by_name(tensors, settings, words):
    with pytest.raises(UnsupportedModel) as refusal:
        fp8.matrices(settings, directory({f"{MODULE}.{name}": stored for name, stored in tensors.items()}), "here")
    assert words in refusal.value.message and refusal.value.fix


@pytest.mark.parametrize("inputs", [32, 96, 256])
def test_mxfp4(inputs):
    matrix = check(pack_mxfp4(random(40, inputs)), MXFP4)
    assert matrix.scheme == mxfp4.MXFP4


def test_mxfp4_of_every_exponent():
    """The highest stands for no number, which the loader must see."""
    packed = pack_mxfp4(torch.ones(256, 32))
    packed.tensors["weight_scales"] = torch.arange(256, dtype=torch.uint8)[:, None]
    numbers = mxfp4.matrices(MXFP4, directory(named(packed)), "here")[f"{MODULE}.weight"].read(
        named(packed).__getitem__
    )
    assert numbers.scales[-1].isnan().all()
    expected = torch.exp2(torch.arange(255, dtype=torch.float64) - 128)
    assert torch.equal(numbers.scales[:-1, 0].double(), expected)


def test_the_numbers_of_mxfp4_are_those_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed = pack_mxfp4(random(24, 96))
    blocks, scales = packed.tensors["weight_blocks"], packed.tensors["weight_scales"]
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    check(Packed(packed.tensors, theirs.contiguous()), MXFP4)


FOUR = pack_mxfp4(random(16, 64)).tensors


@pytest.mark.parametrize(("tensors", "problem", "words"), [
    ({"weight_blocks": FOUR["weight_blocks"]}, BadCheckpoint, "there is no " + MODULE + ".weight_scales"),
    ({**FOUR, "weight_scales": torch.ones(16, 3).byte()}, BadCheckpoint, "has shape [16, 3], expected [16, 2]"),
    ({**FOUR, "weight_scales": torch.ones(16, 2)}, BadCheckpoint, "weight_scales is F32, expected U8 or F8_E8M0"),
    ({**FOUR, "weight_blocks": torch.ones(16, 2, 8).byte()}, BadCheckpoint, "has shape [16, 2, 8]"),
    ({"weight_blocks": torch.ones(8, 16, 2, 16).byte()}, UnsupportedModel, "stacks 8 experts"),
])  # fmt: skip
def test_mxfp4_that_does_not_fit_is_refused(tensors, problem, words):
    with pytest.raises(problem) as refusal:
        mxfp4.matrices(MXFP4, directory({f"{MODULE}.{name}": stored for name, stored in tensors.items()}), "here")
    assert words in refusal.value.message and refusal.value.fix


@pytest.mark.parametrize(("method", "options"), [("fp8", {"block": (32, 32)}), ("fp8", {}), ("mxfp4", {})])
def test_a_whole_model(tmp_path, method, options):
    """Every matrix of the quantised folder is the one of the dense folder."""
    import json

    from safetensors.torch import load_file

    quantised, dense = write_quantised(tmp_path, METHODS[method], **options)
    settings = json.loads((quantised / "config.json").read_text())["quantization_config"]
    tensors, wanted = load_file(quantised / "model.safetensors"), load_file(dense / "model.safetensors")
    found = (mxfp4 if method == "mxfp4" else fp8).matrices(settings, directory(tensors), "here")
    assert len(found) == 14
    for name, matrix in found.items():
        assert torch.allclose(matrix.read(tensors.__getitem__).dense(), wanted[name], rtol=1e-6)
    read = {name for matrix in found.values() for name in matrix.tensors}
    assert {name for name in tensors if name not in read} == {name for name in wanted if name not in found}
