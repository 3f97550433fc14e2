"""A GGUF in several files, as the gguf package splits it, reads as the whole one; parts that do not fit are named."""

import re
import shutil

import gguf
import numpy as np
import pytest
import torch

from tidemill.errors import BadCheckpoint
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles, locate

NAMES = ("token_embd.weight", "output_norm.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight", "output.weight")


def write(path, split: int, seed: int = 0, names=NAMES):
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=split)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(seed)
    for name in names:
        shape = (32,) if "norm" in name else (32, 32)
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def parts(tmp_path):
    folder = tmp_path / "split"
    folder.mkdir()
    write(folder / "m.gguf", 2)
    found = sorted(folder.iterdir())
    assert [path.name for path in found] == [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


@pytest.mark.parametrize("named", ["first", "second", "folder"])
def test_the_parts_are_the_whole(tmp_path, parts, named):
    whole = open_checkpoint(ModelFiles("gguf", write(tmp_path / "whole.gguf", 0), "m"))
    path = {"first": parts[0], "second": parts[1], "folder": parts[0].parent}[named]
    joined = open_checkpoint(locate(str(path)))
    assert joined.config == whole.config and set(joined.tensors) == set(whole.tensors)
    for name in whole.tensors:
        assert torch.equal(joined.read(name), whole.read(name)), name
    assert {info.file for info in joined.tensors.values()} == {path.name for path in parts}


def opened(parts):
    return open_checkpoint(ModelFiles("gguf", parts[0], "m"))


def test_a_missing_part_is_named(parts):
    parts[1].unlink()
    with pytest.raises(BadCheckpoint, match=re.escape(f"lacks {parts[1].name}")) as caught:
        opened(parts)
    assert "first of 3 parts" in caught.value.cause


def test_a_part_in_the_wrong_place_is_named(parts):
    shutil.copy(parts[2], parts[1])
    with pytest.raises(BadCheckpoint, match=f"{parts[1].name} does not belong to {parts[0].name}") as caught:
        opened(parts)
    assert "split.no is 2, expected 1" in caught.value.cause


def test_a_part_of_another_model_is_named(tmp_path, parts):
    other = tmp_path / "other"
    other.mkdir()
    write(other / "m.gguf", 2, names=(*NAMES, "blk.0.ffn_gate.weight"))
    shutil.copy(other / parts[2].name, parts[2])
    with pytest.raises(BadCheckpoint, match=f"{parts[2].name} does not belong") as caught:
        opened(parts)
    assert "split.tensors.count is 6, expected 5" in caught.value.cause


def test_a_tensor_in_two_parts_is_named(tmp_path, parts):
    other = tmp_path / "other"
    other.mkdir()
    write(other / "m.gguf", 2, names=NAMES[::-1])
    shutil.copy(other / parts[2].name, parts[2])
    with pytest.raises(BadCheckpoint, match=f"{parts[2].name} does not belong") as caught:
        opened(parts)
    assert caught.value.cause == f"tensor token_embd.weight is also in {parts[0].name}"


def test_a_part_under_another_name_is_told_so(tmp_path, parts):
    path = tmp_path / "model.gguf"
    shutil.copy(parts[1], path)
    with pytest.raises(BadCheckpoint, match=r"model\.gguf is part 2 of 3") as caught:
        open_checkpoint(ModelFiles("gguf", path, "m"))
    assert "-00001-of-00003.gguf" in caught.value.fix


def test_a_part_cut_short_is_named(parts):
    parts[2].write_bytes(parts[2].read_bytes()[:-64])
    with pytest.raises(BadCheckpoint, match=f"{parts[2].name} is truncated"):
        opened(parts)
