"""AWQ and GPTQ: matrices are read as they were packed, stay so in memory, and faults are found in the headers."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.packers import awq_tensors, directory, gptq_tensors, random_integers, write_quantised
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats import awq, gptq
from tidemill.quant.formats.matrix import QuantisedMatrix
from tidemill.quant.packed import empty
from tidemill.quant.stored import StoredMatrix
from tidemill.runtime.loader import check_tensors
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import locate

AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"


def named(parts: dict[str, torch.Tensor], module: str = MODULE) -> dict[str, torch.Tensor]:
    return {f"{module}.{part}": tensor for part, tensor in parts.items()}


def read(
    format: Any, settings: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> tuple[QuantisedMatrix, StoredMatrix]:
    found = format.matrices(settings, directory(tensors), "folder")
    assert set(found) == {NAME}
    matrix = found[NAME]
    assert set(matrix.tensors) <= set(tensors)
    return matrix, matrix.read(tensors.__getitem__)


def assert_packs(matrix: QuantisedMatrix, stored: StoredMatrix, dense: torch.Tensor) -> None:
    """The matrix is read to the bit, and memory of its scheme holds it in both layouts."""
    assert matrix.shape == stored.shape == tuple(dense.shape)
    assert torch.equal(stored.dense(), dense)
    if matrix.scheme is None:
        return
    assert matrix.scheme.ordered == (stored.order is not None)
    for layout in ("words", "tiles"):
        weight = empty(matrix.scheme, *matrix.shape, lambda shape, dtype: torch.zeros(shape, dtype=dtype), layout)
        weight.store(stored)
        assert (weight.unpack() - dense).norm() / dense.norm() < 1e-3


@pytest.mark.parametrize(
    ("outputs", "inputs", "group_size", "packed_group"),
    [
        (64, 256, 128, 128),
        (64, 96, 32, 32),
        (40, 96, -1, None),
        (24, 64, 128, None),
        (16, 96, 48, 16),
        (16, 80, 32, 16),
        (16, 96, 24, "dense"),
    ],
)
def test_awq_is_read_as_it_was_packed(outputs, inputs, group_size, packed_group):
    integers = random_integers(outputs, inputs, 4, group_size)
    matrix, stored = read(awq, {**AWQ, "group_size": group_size}, named(awq_tensors(integers)))
    assert ("dense" if matrix.scheme is None else matrix.scheme.group_size) == packed_group
    assert_packs(matrix, stored, integers.dense())


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_read_as_it_was_packed(bits, sym, checkpoint_format):
    integers = random_integers(64, 96, bits, 32, sym=sym)
    settings = {**GPTQ, "bits": bits, "sym": sym, "checkpoint_format": checkpoint_format}
    tensors = gptq_tensors(integers, bits, less_one=checkpoint_format == "gptq")
    matrix, stored = read(gptq, settings, named(tensors))
    assert matrix.scheme is not None
    assert (matrix.scheme.bits, matrix.scheme.zeros) == (8 if bits == 8 else 4, not sym)
    assert_packs(matrix, stored, integers.dense())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_nought_that_borrows_from_its_neighbour_is_gptqmodels(bits):
    integers = random_integers(64, 64, bits, 32)
    assert bool((integers.zeros == 0).any())
    tensors = gptq_tensors(integers, bits, borrowed=True)
    settings = {**GPTQ, "bits": bits, "meta": {"quantizer": ["optimum:1.24.0", "gptqmodel:2.1.0"]}}
    assert_packs(*read(gptq, settings, named(tensors)), integers.dense())


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(
    ("inputs", "group_size", "packed_group"),
    [(256, 128, 128), (96, -1, None), (96, 64, 32), (80, 32, 16), (160, 48, 16), (96, 24, "dense"), (64, 40, "dense")],
)
def test_gptq_groups_of_any_size(inputs, group_size, packed_group, indexed):
    integers = random_integers(32, inputs, 4, group_size)
    matrix, stored = read(gptq, {**GPTQ, "group_size": group_size}, named(gptq_tensors(integers, 4, indexed=indexed)))
    assert ("dense" if matrix.scheme is None else matrix.scheme.group_size) == packed_group
    assert_packs(matrix, stored, integers.dense())


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(("inputs", "group_size"), [(128, 32), (96, 64), (96, 40), (64, -1), (64, 128)])
def test_act_order_sorts_inputs_by_group(bits, inputs, group_size):
    integers = random_integers(32, inputs, bits, group_size, mixed=True)
    settings = {**GPTQ, "bits": bits, "group_size": group_size, "desc_act": True}
    matrix, stored = read(gptq, settings, named(gptq_tensors(integers, bits)))
    assert (stored.order is not None) == (0 < group_size < inputs)
    assert_packs(matrix, stored, integers.dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_that_float16_does_not_hold_stay_wide(dtype):
    integers = random_integers(32, 64, 4, 32, dtype=dtype)
    for format, settings, parts in ((awq, AWQ, awq_tensors(integers)), (gptq, GPTQ, gptq_tensors(integers, 4))):
        matrix, stored = read(format, {**settings, "group_size": 32}, named(parts))
        assert matrix.scheme is not None and matrix.scheme.wide
        assert torch.allclose(stored.dense(), integers.dense(), atol=1e-6)


def test_a_last_word_that_is_not_full():
    integers = random_integers(12, 36, 4, -1)
    matrix, stored = read(gptq, {**GPTQ, "group_size": -1}, named(gptq_tensors(integers, 4)))
    assert_packs(matrix, stored, integers.dense())


def test_dynamic_exceptions_have_their_own_bits_and_groups():
    base, other = random_integers(32, 64, 4, 32, sym=True), random_integers(32, 64, 8, 64)
    tensors = named(gptq_tensors(base, 4), "model.layers.0.mlp.up_proj")
    tensors |= named(gptq_tensors(other, 8), "model.layers.1.mlp.up_proj")
    tensors |= named({"weight": torch.zeros(4, 4)}, "model.layers.2.mlp.up_proj")
    dynamic = {
        r"-:.*layers\.2\.": {},
        r"+:.*\.1\..*up.*": {"bits": 8, "group_size": 64, "sym": False},
        "model": {"bits": 4},
    }
    settings = {**GPTQ, "sym": True, "dynamic": dynamic}
    found = gptq.matrices(settings, directory(tensors), "folder")
    assert [matrix.kind for matrix in found.values()] == [
        "GPTQ, 4 bits in groups of 32",
        "GPTQ, 8 bits in groups of 64",
    ]
    for integers, matrix in zip((base, other), found.values(), strict=True):
        assert torch.equal(matrix.read(tensors.__getitem__).dense(), integers.dense())
    tensors |= named(gptq_tensors(base, 4), "model.layers.2.mlp.up_proj")
    with pytest.raises(BadCheckpoint, match=r"layers\.2\.mlp\.up_proj is quantised, but a -: pattern"):
        gptq.matrices(settings, directory(tensors), "folder")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "gemv"}, "version 'gemv'"),
        ({"version": "GEMV_fast"}, "version 'GEMV_fast'"),
        ({"backend": "llm-awq"}, "version 'llm-awq'"),
        ({"bits": 8}, "bits 8"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_awq_settings_nobody_reads_are_refused_by_name(settings, message):
    with pytest.raises(UnsupportedModel, match=message) as caught:
        awq.matrices({**AWQ, **settings}, {}, "folder")
    assert caught.value.fix


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "bits 5"),
        ({"bits": None}, "bits None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"is_marlin_format": True}, "checkpoint_format 'marlin'"),
        ({"checkpoint_format": "gptq_p"}, "checkpoint_format 'gptq_p'"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({"adapter": {"name": "lora"}}, "adapter"),
        ({"group_size": "all"}, "group_size is 'all'"),
        ({"dynamic": {"+:a": {"format": "marlin"}}}, r"dynamic \+:a format 'marlin'"),
        ({"dynamic": {"-:(": {}}}, r"dynamic '-:\('"),
        ({"dynamic": ["lm_head"]}, r"dynamic \['lm_head'\]"),
    ],
)
def test_gptq_settings_nobody_reads_are_refused_by_name(settings, message):
    tensors = directory(named(gptq_tensors(random_integers(32, 64, 4, 32), 4)))
    with pytest.raises(UnsupportedModel, match=message) as caught:
        gptq.matrices({**GPTQ, **settings}, tensors, "folder")
    assert caught.value.fix


def wrong(parts: dict[str, torch.Tensor], part: str, tensor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    changed = {key: value for key, value in parts.items() if key != part}
    return named(changed if tensor is None else {**changed, part: tensor})


WORDS = torch.zeros(1, 1, dtype=torch.int32)


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("scales", None, "no .*up_proj.scales"),
        ("qzeros", None, "no .*up_proj.qzeros"),
        ("qweight", None, "no .*up_proj.qweight"),
        ("qweight", torch.zeros(64, 4), "up_proj.qweight is F32, expected I32"),
        ("qweight", torch.zeros(64, dtype=torch.int32), r"up_proj.qweight has shape \[64\]"),
        ("scales", torch.zeros(1, 32).half(), r"up_proj.scales has shape \[1, 32\], expected \[2, 32\]"),
        ("scales", WORDS.expand(2, 32), "up_proj.scales is I32"),
        ("qzeros", WORDS, r"up_proj.qzeros has shape \[1, 1\], expected \[2, 4\]"),
    ],
)
def test_faults_are_found_in_headers_and_name_the_tensor(part, tensor, message):
    integers = random_integers(32, 64, 4, 32)
    for format, settings, parts in ((awq, AWQ, awq_tensors(integers)), (gptq, GPTQ, gptq_tensors(integers, 4))):
        with pytest.raises(BadCheckpoint, match=message) as caught:
            format.matrices({**settings, "group_size": 32}, directory(wrong(parts, part, tensor)), "folder")
        assert caught.value.fix and caught.value.cause


def test_bits_that_the_packed_shape_does_not_fit():
    tensors = named(gptq_tensors(random_integers(32, 64, 4, 32), 4))
    with pytest.raises(BadCheckpoint, match=r"up_proj.qweight has shape \[8, 32\], expected \[16, 32\]") as caught:
        gptq.matrices({**GPTQ, "bits": 8}, directory(tensors), "folder")
    assert "64 codes of 8 bits" in str(caught.value.cause)
    del tensors[f"{MODULE}.g_idx"]
    with pytest.raises(BadCheckpoint, match=r"expected \[9, 32\]"):
        gptq.matrices({**GPTQ, "bits": 3}, directory(tensors), "folder")
    with pytest.raises(BadCheckpoint, match=r"its groups are missing: there is no .*g_idx"):
        gptq.matrices({**GPTQ, "desc_act": True}, directory(tensors), "folder")


@pytest.mark.parametrize(
    ("integers", "settings", "message"),
    [
        (random_integers(32, 64, 4, 32), {"sym": True}, "up_proj.qzeros holds zero points other than 8"),
        (random_integers(32, 64, 4, 32, mixed=True), {}, "up_proj.g_idx mixes the inputs of groups"),
    ],
)
def test_data_that_disagrees_with_the_settings(integers, settings, message):
    with pytest.raises(BadCheckpoint, match=message) as caught:
        read(gptq, {**GPTQ, **settings}, named(gptq_tensors(integers, 4)))
    assert str(caught.value.fix).startswith('set "')


def test_groups_of_unequal_size_are_not_taken_for_others():
    tensors = named(gptq_tensors(random_integers(32, 64, 4, 32), 4))
    tensors[f"{MODULE}.g_idx"][:3] = 1
    with pytest.raises(BadCheckpoint, match=r"up_proj\.g_idx gives some group other than 32 inputs"):
        read(gptq, {**GPTQ, "desc_act": True}, tensors)


@pytest.mark.parametrize(
    ("method", "head", "options"),
    [("awq", False, {}), ("gptq", True, {"bits": 3, "sym": False, "desc_act": True, "group_size": 64})],
)
def test_a_folder_shows_the_numbers_of_its_dense_twin(tmp_path, method, head, options):
    folders = write_quantised(tmp_path, method, head=head, **options)
    quantised, dense = (open_checkpoint(locate(str(folder))) for folder in folders)
    assert set(quantised.tensors) == set(dense.tensors)
    for name in dense.tensors:
        assert torch.equal(quantised.read(name), dense.read(name))
    assert ("lm_head.weight" in quantised.schemes) == head


def test_autogptqs_biases_of_zeros_are_let_pass_and_others_are_not(tmp_path):
    folder, _ = write_quantised(tmp_path, "gptq")
    file, bias = folder / "model.safetensors", "model.layers.0.self_attn.q_proj.bias"
    tensors = load_file(file)
    parameters = [SimpleNamespace(name="model.layers.0.self_attn.q_proj.weight", stored_shape=(64, 64))]
    for value in (0, 1):
        kept = {name: tensor for name, tensor in tensors.items() if "layers.0.self_attn.q_proj" in name}
        save_file({**kept, bias: torch.full((64,), value).half()}, file)
        checkpoint = open_checkpoint(locate(str(folder)))
        with nullcontext() if value == 0 else pytest.raises(BadCheckpoint, match=f"{bias} has no place"):
            check_tensors(parameters, checkpoint)
