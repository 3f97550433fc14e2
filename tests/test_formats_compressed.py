"""compressed-tensors checkpoints, as the package's own compressors write them: every number, every refusal."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.packers import Packed, directory, words, write_quantised
from tests.helpers.packers_ct import METHODS, TOKENS, config_of, mixed_groups, pack_compressed, weights_of
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats import compressed
from tidemill.quant.formats.compressed_config import notes
from tidemill.quant.formats.matrix import QuantisedMatrix
from tidemill.quant.packed import empty

MODULE = "model.layers.0.self_attn.q_proj"


def random(outputs: int, inputs: int) -> torch.Tensor:
    """Rows of several sizes; some above zero, some below, some all zero."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))
    weight *= torch.linspace(0.01, 2, outputs)[:, None]
    weight[::7], weight[1::7], weight[5] = weight[::7].abs(), -weight[1::7].abs(), 0
    return weight


def found(tensors: dict[str, torch.Tensor], config: dict) -> QuantisedMatrix:
    return compressed.matrices(config, directory(tensors), "here")[f"{MODULE}.weight"]


def named(packed: Packed) -> dict[str, torch.Tensor]:
    return {f"{MODULE}.{part}": stored for part, stored in packed.tensors.items()}


def check(packed: Packed, config: dict, tolerance: float = 1e-6) -> QuantisedMatrix:
    """The reader's numbers are the writer's, and stay so in packed memory."""
    tensors = named(packed)
    matrix = found(tensors, config)
    assert matrix.shape == tuple(packed.dense.shape) and set(matrix.tensors) == set(tensors)
    stored = matrix.read(tensors.__getitem__)
    assert (stored.dense() - packed.dense).abs().max() <= tolerance * packed.dense.abs().max()
    for layout in ("words", "tiles") if matrix.scheme else ():
        memory = empty(matrix.scheme, *matrix.shape, lambda shape, dtype: torch.zeros(shape, dtype=dtype), layout)
        memory.store(stored)
        assert (memory.unpack() - packed.dense).norm() < max(1e-3, tolerance) * packed.dense.norm()
    return matrix


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
def test_integers_in_words(strategy, bits, symmetric):
    weights = weights_of(strategy, num_bits=bits, symmetric=symmetric)
    config = config_of(weights, "pack-quantized")
    matrix = check(pack_compressed(random(40, 192), weights, "pack-quantized", dtype=torch.float16), config)
    assert matrix.scheme is not None and matrix.scheme.bits == (4 if bits <= 4 else 8)
    assert matrix.scheme.zeros is not symmetric


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 128, 384])
def test_groups_stay_as_large_as_packed_memory_has_them(group, dtype):
    weights = weights_of(group_size=group, symmetric=False)
    packed = pack_compressed(random(24, 384), weights, "pack-quantized", dtype=dtype)
    matrix = check(packed, config_of(weights, "pack-quantized"))
    assert matrix.scheme is not None
    assert matrix.scheme.group_size == {48: 16, 96: 32, 384: None}.get(group, group)
    assert matrix.scheme.name == ("W4A16" if group == 384 else f"W4A16 g{group}")


def test_groups_that_packed_memory_has_not_are_widened():
    weights = weights_of(group_size=24)
    matrix = check(pack_compressed(random(24, 96), weights, "pack-quantized"), config_of(weights, "pack-quantized"))
    assert matrix.scheme is None


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_at_both_extremes(bits):
    weights = weights_of(symmetric=False, num_bits=bits)
    weight = random(32, 64)
    weight[:16], weight[16:] = weight[:16].abs() + 0.1, -weight[16:].abs() - 0.1
    packed = pack_compressed(weight, weights, "pack-quantized", dtype=torch.float16)
    read = found(named(packed), config_of(weights, "pack-quantized")).read(named(packed).__getitem__)
    zeros = (-read.offsets / read.scales).round()
    lowest = 0 if bits == 4 else -128
    assert zeros.min() == lowest and zeros.max() == lowest + 2**bits - 1
    check(packed, config_of(weights, "pack-quantized"))


def test_zero_points_count_even_if_the_config_calls_them_symmetric():
    packed = pack_compressed(random(32, 64), weights_of(symmetric=False), "pack-quantized")
    matrix = check(packed, config_of(weights_of(symmetric=True), "pack-quantized"))
    assert matrix.scheme is not None and matrix.scheme.zeros


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("stored_as", "bits"), [("pack-quantized", 4), ("int-quantized", 8)])
def test_inputs_in_an_order_of_their_own(stored_as, bits, symmetric):
    weights = weights_of(actorder="group", symmetric=symmetric, num_bits=bits)
    packed = pack_compressed(random(32, 192), weights, stored_as, mixed_groups(192, 32))
    matrix = check(packed, config_of(weights, stored_as))
    assert matrix.scheme is not None and matrix.scheme.ordered


def test_an_order_that_was_never_filled_in_is_none():
    weights = weights_of(actorder="group")
    packed = pack_compressed(random(32, 64), weights, "pack-quantized")
    packed.tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    check(packed, config_of(weights, "pack-quantized"))


def test_activation_order_of_the_calibration_only_changes_nothing():
    weights = weights_of(actorder="static")
    matrix = check(pack_compressed(random(32, 64), weights, "pack-quantized"), config_of(weights, "pack-quantized"))
    assert matrix.scheme is not None and not matrix.scheme.ordered


@pytest.mark.parametrize("symmetric", [True, False])
def test_three_bits_as_they_were_packed_before_release_0_18(symmetric):
    """Ten codes to a word, two bits unused."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    def old(signed: torch.Tensor) -> torch.Tensor:
        tens = torch.nn.functional.pad(signed.long() + 4, (0, -signed.shape[1] % 10)).split(10, dim=1)
        return torch.cat([words(ten, 3) for ten in tens], dim=1)

    weights = weights_of(num_bits=3, symmetric=symmetric)
    packed = pack_compressed(random(40, 192), weights, "pack-quantized")
    tensors = packed.tensors
    tensors["weight_packed"] = old(unpack_from_int32(tensors["weight_packed"], 3, (40, 192)))
    if not symmetric:
        zeros = unpack_from_int32(tensors["weight_zero_point"], 3, (40, 6), packed_dim=0)
        tensors["weight_zero_point"] = old(zeros.t()).t().contiguous()
    check(packed, config_of(weights, "pack-quantized"))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor", "block"])
def test_integers_in_bytes(strategy, bits, symmetric):
    block = {"block_structure": [16, 64]} if strategy == "block" else {}
    weights = weights_of(strategy, num_bits=bits, symmetric=symmetric, **block)
    config = config_of(weights, "int-quantized", input_activations={**TOKENS, "type": "int"})
    matrix = check(pack_compressed(random(40, 192), weights, "int-quantized"), config)
    assert matrix.scheme is not None and matrix.scheme.name.startswith(f"W{bits}A8")
    assert "activations are rounded as the kernel does, not int8 per token, dynamic" in matrix.kind


@pytest.mark.parametrize("stored_as", ["float-quantized", "naive-quantized"])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_floats_of_8_bits(strategy, stored_as):
    block = {"block_structure": [128, 128]} if strategy == "block" else {}
    weights = weights_of(strategy, num_bits=8, type="float", **block)
    inputs = {**TOKENS, "type": "float"} if stored_as == "float-quantized" else None
    packed = pack_compressed(random(144, 256), weights, stored_as)
    matrix = check(packed, config_of(weights, stored_as, input_activations=inputs))
    assert matrix.scheme is not None and matrix.scheme.name == "FP8"
    assert matrix.scheme.group_size == (128 if strategy == "block" else None)
    assert matrix.scheme.activations == ("fp8_dynamic" if inputs else "none")


@pytest.mark.parametrize(("method", "options"), [
    ("compressed-mxfp4", {}),
    # The package multiplies these in bfloat16.
    ("compressed-nvfp4", {"tolerance": 4e-3}),
])  # fmt: skip
def test_floats_of_4_bits(method, options):
    chosen = METHODS[method]
    matrix = check(chosen.pack(random(32, 128)), chosen.settings(), **options)
    assert matrix.scheme is not None and matrix.scheme.table == "e2m1" and matrix.scheme.wide


def test_numbers_of_nvfp4_are_those_of_its_definition():
    packed = METHODS["compressed-nvfp4"].pack(random(16, 64))
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    bytes_ = packed.tensors["weight_packed"].long()
    codes = torch.stack((bytes_ % 16, bytes_ // 16), dim=-1).flatten(1)
    scales = packed.tensors["weight_scale"].float() / packed.tensors["weight_global_scale"]
    exact = Packed(packed.tensors, table[codes] * scales.repeat_interleave(16, dim=1))
    check(exact, METHODS["compressed-nvfp4"].settings())


def test_floats_of_8_bits_with_exponents_are_widened():
    weights = weights_of(type="float", num_bits=8, scale_dtype="torch.uint8")
    packed = pack_compressed(random(32, 128), weights, "mxfp8-quantized")
    assert check(packed, config_of(weights, "mxfp8-quantized")).scheme is None


def test_scales_of_activations_belong_to_the_matrix():
    weights = weights_of("tensor", num_bits=8, type="float")
    packed = pack_compressed(random(32, 64), weights, "float-quantized")
    packed.tensors["input_scale"] = torch.ones(1)
    check(packed, config_of(weights, "float-quantized", input_activations={"num_bits": 8, "type": "float"}))


def group(weights: dict, *targets: str, **changes) -> dict:
    return {"targets": list(targets), "weights": weights, **changes}


def test_names_go_before_patterns_and_patterns_before_classes():
    four, eight, rows = weights_of(), weights_of("channel", num_bits=8), weights_of("channel")
    config = config_of(four, "pack-quantized")
    config["config_groups"] = {
        "linear": group(four, "Linear"),
        "pattern": group(eight, "re:.*k_proj$"),
        "named": group(rows, "model.a.k_proj"),
    }
    wanted = {"model.a.q_proj": four, "model.b.k_proj": eight, "model.a.k_proj": rows}
    tensors = {}
    for module, weights in wanted.items():
        packed = pack_compressed(random(16, 64), weights, "pack-quantized")
        tensors |= {f"{module}.{part}": stored for part, stored in packed.tensors.items()}
    tensors |= {"lm_head.weight": random(16, 64), "model.norm.weight": torch.ones(64)}
    matrices = compressed.matrices(config, directory(tensors), "here")
    assert {name.removesuffix(".weight"): matrix.scheme.name for name, matrix in matrices.items()} == {
        "model.a.q_proj": "W4A16 g32",
        "model.b.k_proj": "W8A16",
        "model.a.k_proj": "W4A16",
    }


def test_groups_may_be_stored_in_formats_of_their_own():
    four, floats = weights_of(), weights_of("channel", num_bits=8, type="float")
    config = config_of(four, "mixed-precision")
    config["config_groups"] = {
        "a": group(four, "re:.*q_proj", format="pack-quantized"),
        "b": group(floats, "re:.*k_proj", format="float-quantized"),
    }
    tensors = {}
    for module, weights, stored_as in (("q_proj", four, "pack-quantized"), ("k_proj", floats, "float-quantized")):
        packed = pack_compressed(random(16, 64), weights, stored_as)
        tensors |= {f"{module}.{part}": stored for part, stored in packed.tensors.items()}
    matrices = compressed.matrices(config, directory(tensors), "here")
    assert [matrix.scheme.name for matrix in matrices.values()] == ["W4A16 g32", "FP8"]


def test_a_dense_checkpoint_has_no_quantised_matrices():
    tensors = {f"{MODULE}.weight": random(16, 64)}
    for stored_as in ("dense", "pack-quantized"):
        assert compressed.matrices(config_of(weights_of(), stored_as), directory(tensors), "here") == {}


def test_what_is_not_followed_is_said():
    config = config_of(weights_of(), "pack-quantized", kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert notes(config_of(weights_of(), "pack-quantized")) == ()
    assert "--kv-cache-dtype" in notes(config)[0]


PLAIN = config_of(weights_of(symmetric=False), "pack-quantized")


def changed(changes: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """What PLAIN describes, with other tensors; None: without one."""
    packed = pack_compressed(random(16, 64), weights_of(symmetric=False), "pack-quantized")
    tensors = {f"{MODULE}.{part}": stored for part, stored in {**packed.tensors, **changes}.items()}
    return {name: stored for name, stored in tensors.items() if stored is not None}


@pytest.mark.parametrize(("changes", "config", "words"), [
    ({"weight_scale": None}, PLAIN, ["scales are missing", f"{MODULE}.weight_scale"]),
    ({"weight_zero_point": None}, PLAIN, ["zero points are missing", f"{MODULE}.weight_zero_point"]),
    ({"weight_scale": torch.ones(16, 3)}, PLAIN, ["weight_scale has shape [16, 3], expected [16, 2]"]),
    ({"weight_scale": torch.ones(16, 2).int()}, PLAIN, ["weight_scale is I32", "F32 or F16"]),
    ({"weight_zero_point": torch.ones(3, 2).int()}, PLAIN, ["has shape [3, 2], expected [2, 2]"]),
    ({"weight_g_idx": torch.ones(63).int()}, PLAIN, ["weight_g_idx has shape [63], expected [64]"]),
    ({"weight_packed": torch.ones(16, 12).int()}, PLAIN, ["weight_scale has shape [16, 2], expected [16, 3]"]),
    (
        {"weight_packed": torch.ones(16, 6).int()},
        PLAIN,
        ["groups of 32 do not divide the 48 inputs", "group_size", "ignore list"],
    ),
    ({}, {**PLAIN, "ignore": [MODULE]}, ["weight_packed is I32", "the ignore list has it"]),
    ({}, {**PLAIN, "ignore": ["re:.*q_proj"]}, ["the ignore list has it"]),
    ({}, {**PLAIN, "format": "dense"}, ["weights are not quantised"]),
    ({}, {**PLAIN, "config_groups": {"a": group(weights_of(), "Embedding")}}, ["no group"]),
    ({}, config_of(weights_of(type="float", num_bits=8), "float-quantized"), ["8 bits of type float"]),
    ({}, config_of(weights_of(type="posit"), "pack-quantized"), ["type is 'posit'", "int or float"]),
    ({}, config_of(weights_of(num_bits=12), "pack-quantized"), ["num_bits is 12", "1 to 8"]),
    ({}, config_of(weights_of(strategy="diagonal"), "pack-quantized"), ["'diagonal'", "tensor, channel"]),
    ({}, config_of(weights_of(group_size=0), "pack-quantized"), ["group_size is 0", "1 or more"]),
    ({}, {**PLAIN, "ignore": ["re:("]}, ["ignore is 're:('", "regular expression"]),
    ({}, {**PLAIN, "config_groups": {"W4A16": ["Linear"]}}, ["config_groups.W4A16 is ['Linear']"]),
])  # fmt: skip
def test_what_does_not_fit_is_refused_from_headers(changes, config, words):
    with pytest.raises(BadCheckpoint) as refusal:
        found(changed(changes), config)
    assert refusal.value.message.startswith("here: ") and refusal.value.fix and refusal.value.cause
    for word in words:
        assert word in refusal.value.report()


@pytest.mark.parametrize(("config", "words"), [
    ({**PLAIN, "format": "marlin-24"}, "'marlin-24'"),
    ({**PLAIN, "format": "mxfp6-pack-quantized"}, "'mxfp6-pack-quantized'"),
    ({**PLAIN, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights (sparse-24-bitmask)"),
    ({**PLAIN, "transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
])  # fmt: skip
def test_what_is_not_read_is_refused_by_name(config, words):
    with pytest.raises(UnsupportedModel) as refusal:
        found(changed({}), config)
    assert words in refusal.value.message and refusal.value.fix


def test_floats_with_more_exponent_are_refused_by_name():
    weights = weights_of("channel", num_bits=8, type="float")
    packed = pack_compressed(random(16, 64), weights, "float-quantized")
    packed.tensors["weight"] = packed.tensors["weight"].float().to(torch.float8_e5m2)
    with pytest.raises(UnsupportedModel, match=f"{MODULE}.weight is F8_E5M2"):
        found(named(packed), config_of(weights, "float-quantized"))


@pytest.mark.parametrize(("part", "stored", "words"), [
    ("weight_shape", torch.tensor([16, 60]), r"weight_shape says \[16, 60\]"),
    ("weight_g_idx", torch.zeros(64).int(), "weight_g_idx does not give every group 32 inputs"),
])  # fmt: skip
def test_what_only_numbers_tell_is_refused_when_they_are_read(part, stored, words):
    tensors = changed({part: stored})
    with pytest.raises(BadCheckpoint, match=words):
        found(tensors, PLAIN).read(tensors.__getitem__)


def test_bytes_that_the_bits_do_not_hold_are_refused_when_they_are_read():
    weights = weights_of("channel")
    packed = pack_compressed(random(16, 64), weights, "int-quantized")
    packed.tensors["weight"][3, 3] = 9
    with pytest.raises(BadCheckpoint, match="numbers that 4 bits do not hold"):
        found(named(packed), config_of(weights, "int-quantized")).read(named(packed).__getitem__)


@pytest.mark.parametrize("method", ["w4a16", "w8a8"])
def test_transformers_reads_what_these_helpers_write(tmp_path, method):
    """So that a mistake of the writers is not one of the readers, too."""
    import transformers

    quantised, dense = write_quantised(tmp_path, METHODS[method], dtype=torch.float32)
    ids = torch.arange(12)[None]
    logits = []
    for folder in (quantised, dense):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(ids).logits)
    # Its activations are rounded to 8 bits in the second.
    assert (logits[0] - logits[1]).norm() < (1e-4 if method == "w4a16" else 5e-2) * logits[1].norm()
