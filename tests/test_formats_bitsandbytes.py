"""bitsandbytes: 4 bits in blocks of the flattened matrix, with scales quantised or not, and 8 bits per row."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.helpers.packers import Packed, directory, pack_bnb4, pack_bnb8, write_quantised
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.quant.formats import bitsandbytes
from tidemill.quant.formats.matrix import QuantisedMatrix
from tidemill.quant.packed import empty
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import locate

SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"


def random(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs + inputs))


def named(packed: Packed) -> dict[str, torch.Tensor]:
    return {f"{MODULE}.{part}": tensor for part, tensor in packed.tensors.items()}


def found_in(tensors: dict[str, torch.Tensor]) -> QuantisedMatrix:
    found = bitsandbytes.matrices(SETTINGS, directory(tensors), "folder", tensors.__getitem__)
    assert set(found) == {NAME}
    assert set(found[NAME].tensors) == set(tensors)
    return found[NAME]


def assert_reads(tensors: dict[str, torch.Tensor], dense: torch.Tensor, packed_group: int | str | None) -> None:
    matrix = found_in(tensors)
    assert matrix.shape == tuple(dense.shape)
    assert ("dense" if matrix.scheme is None else matrix.scheme.group_size) == packed_group
    stored = matrix.read(tensors.__getitem__)
    assert torch.allclose(stored.dense(), dense, rtol=1e-6, atol=1e-6)
    for layout in () if matrix.scheme is None else ("words", "tiles"):
        weight = empty(matrix.scheme, *matrix.shape, lambda shape, dtype: torch.zeros(shape, dtype=dtype), layout)
        weight.store(stored)
        assert (weight.unpack() - dense).norm() / dense.norm() < 1e-3


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "block", "packed_group"),
    [
        (32, 256, 64, 64),
        (16, 256, 128, 128),
        (24, 96, 64, 32),
        (16, 32, 64, None),
        (16, 80, 64, 16),
        (300, 64, 64, None),
        (18, 40, 64, "dense"),
        (5, 7, 64, "dense"),
    ],
)
def test_blocks_of_four_bits_are_read_as_they_were_packed(outputs, inputs, block, packed_group, kind, double):
    packed = pack_bnb4(random(outputs, inputs), kind, block, double)
    assert_reads(named(packed), packed.dense, packed_group)


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_bytes_may_be_called_something_else(storage):
    packed = pack_bnb4(random(16, 64))
    tensors = named(packed)
    tensors[NAME] = tensors[NAME].view(-1).view(storage)[:, None]
    assert_reads(tensors, packed.dense, None)


def test_rows_of_eight_bits_are_read_as_they_were_packed():
    packed = pack_bnb8(random(24, 80))
    assert_reads(named(packed), packed.dense, None)
    matrix = found_in(named(packed))
    assert matrix.scheme is not None and (matrix.scheme.kind, matrix.scheme.bits) == ("int", 8)


def test_an_order_of_one_gpus_own_is_refused():
    tensors = named(pack_bnb8(random(16, 32)))
    tensors[f"{MODULE}.weight_format"].fill_(2)
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight_format is 2"):
        found_in(tensors).read(tensors.__getitem__)


def changed_state(tensors: dict[str, torch.Tensor], **fields: Any) -> dict[str, torch.Tensor]:
    state = {**json.loads(bytes(tensors[STATE].tolist())), **fields}
    return {**tensors, STATE: torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)}


@pytest.mark.parametrize("part", ["weight.absmax", "weight.nested_absmax", "weight.nested_quant_map", "weight"])
def test_missing_parts_of_four_bits_are_named(part):
    tensors = named(pack_bnb4(random(16, 64)))
    del tensors[f"{MODULE}.{part}"]
    with pytest.raises(BadCheckpoint, match=f"there is no {MODULE}.{part}") as caught:
        found_in(tensors)
    assert caught.value.fix


def test_a_matrix_without_a_state_is_named():
    tensors = named(pack_bnb4(random(16, 64)))
    del tensors[STATE]
    with pytest.raises(BadCheckpoint, match=f"its shape and block size are missing: there is no {STATE}"):
        found_in(tensors)
    tensors = named(pack_bnb8(random(16, 64)))
    del tensors[f"{MODULE}.SCB"]
    with pytest.raises(BadCheckpoint, match=f"its scales are missing: there is no {MODULE}.SCB"):
        found_in(tensors)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"shape": [16, 128]}, BadCheckpoint, rf"{NAME} has shape \[512, 1\], expected 1024 bytes"),
        ({"blocksize": 128}, BadCheckpoint, r"weight.absmax has shape \[16\], expected \[8\]"),
        ({"nested_blocksize": 4}, BadCheckpoint, r"weight.nested_absmax has shape \[1\], expected \[4\]"),
        ({"shape": [1024]}, BadCheckpoint, "describes a matrix of shape"),
        ({"blocksize": 0}, BadCheckpoint, "in blocks of 0"),
        ({"nested_offset": None}, BadCheckpoint, "does not describe its matrix"),
        ({"quant_type": "af4"}, UnsupportedModel, "quant_type 'af4'"),
    ],
)
def test_states_that_do_not_fit_the_tensors(fields, error, message):
    tensors = changed_state(named(pack_bnb4(random(16, 64))), **fields)
    with pytest.raises(error, match=message) as caught:
        found_in(tensors)
    assert caught.value.fix


def test_states_that_are_no_json_and_tables_that_are_others():
    tensors = named(pack_bnb4(random(16, 64)))
    with pytest.raises(BadCheckpoint, match="does not describe its matrix"):
        found_in({**tensors, STATE: tensors[STATE][:-5]})
    tensors[f"{NAME}.quant_map"] = tensors[f"{NAME}.quant_map"].flip(0)
    with pytest.raises(BadCheckpoint, match="quant_map holds other numbers than nf4 has"):
        found_in(tensors).read(tensors.__getitem__)


@pytest.mark.parametrize(
    ("method", "options"),
    [("bitsandbytes-4bit", {}), ("bitsandbytes-4bit", {"kind": "fp4", "double": False}), ("bitsandbytes-8bit", {})],
)
def test_a_folder_shows_the_numbers_of_its_dense_twin(tmp_path, method, options):
    folders = write_quantised(tmp_path, method, **options)
    quantised, dense = (open_checkpoint(locate(str(folder))) for folder in folders)
    assert set(quantised.tensors) == set(dense.tensors)
    assert len(quantised.schemes) == 14
    for name in dense.tensors:
        assert torch.allclose(quantised.read(name), dense.read(name), rtol=1e-6, atol=1e-6)
