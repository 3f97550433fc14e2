"""The same tensors under the names a model asks for."""

import pytest
import torch
from safetensors.torch import save_file

from tidemill.errors import BadCheckpoint
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.location import ModelFiles
from tidemill.weights.renamed import RenamedCheckpoint

TENSORS = {"h.0.attn.weight": torch.ones(2, 3), "wte.weight": torch.zeros(4), "vision.weight": torch.ones(1)}


@pytest.fixture
def stored(tmp_path) -> Checkpoint:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return open_checkpoint(ModelFiles("folder", tmp_path, "gpt2-old"))


@pytest.fixture
def renamed(stored) -> Checkpoint:
    return RenamedCheckpoint(stored, {f"transformer.{name}": name for name in ("h.0.attn.weight", "wte.weight")})


def test_exactly_the_named_tensors_are_there_under_their_new_names(renamed):
    assert set(renamed.tensors) == {"transformer.h.0.attn.weight", "transformer.wte.weight"}
    assert torch.equal(renamed.read("transformer.h.0.attn.weight"), TENSORS["h.0.attn.weight"])


def test_a_description_names_what_is_in_the_file(renamed):
    info = renamed.tensors["transformer.wte.weight"]
    assert (info.name, info.shape, info.file) == ("wte.weight", (4,), "model.safetensors")


def test_everything_else_is_passed_on(renamed, stored):
    assert renamed.files == stored.files
    assert renamed.config == {"model_type": "gpt2"}
    assert renamed.generation_config == {"eos_token_id": 7}


def test_a_name_that_is_not_stored_is_told_at_once(stored):
    with pytest.raises(BadCheckpoint, match=r"gpt2-old has no tensor lm_head\.weight"):
        RenamedCheckpoint(stored, {"lm_head.weight": "lm_head.weight", "a": "wte.weight"})


@pytest.mark.parametrize("name", ["wte.weight", "vision.weight", "nothing"])
def test_a_tensor_without_a_name_cannot_be_read(renamed, name):
    with pytest.raises(BadCheckpoint, match=f"no tensor {name}"):
        renamed.read(name)
