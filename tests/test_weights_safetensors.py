"""A Hugging Face folder is opened from headers alone, read without copies, and its faults are found at open time."""

import json
import shlex
import struct
import warnings

import pytest
import torch
from safetensors.torch import save_file

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b.weight": torch.arange(6).to(torch.bfloat16).view(2, 3),
    "c.scale": torch.tensor(1.5, dtype=torch.float16),
    "d.fp8": torch.arange(4).float().to(torch.float8_e4m3fn),
    "e.ids": torch.arange(5),
    "f.none": torch.zeros(0, 4),
}


def files(folder) -> ModelFiles:
    return ModelFiles("folder", folder, str(folder))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    shards = {
        "model-00001-of-00002.safetensors": ["a.weight"],
        "model-00002-of-00002.safetensors": ["b.weight", "e.ids"],
    }
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_every_tensor_comes_back_with_its_shape_and_dtype(folder):
    checkpoint = open_checkpoint(files(folder))
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config == {}
    assert set(checkpoint.tensors) == set(TENSORS)
    info = checkpoint.tensors["b.weight"]
    assert (info.shape, info.dtype, info.nbytes, info.file) == ((2, 3), "BF16", 12, "model.safetensors")
    for name, expected in TENSORS.items():
        tensor = checkpoint.read(name)
        assert tensor.dtype == expected.dtype and tensor.shape == expected.shape
        assert torch.equal(
            tensor.view(torch.uint8) if tensor.numel() and tensor.dim() else tensor.float(),
            expected.view(torch.uint8) if tensor.numel() and tensor.dim() else expected.float(),
        )


def test_reading_copies_nothing_and_writing_never_reaches_the_file(folder):
    before = (folder / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(files(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = checkpoint.read("a.weight"), checkpoint.read("a.weight")
    assert first.data_ptr() == second.data_ptr()
    first.fill_(7)
    assert (folder / "model.safetensors").read_bytes() == before


def test_a_tensor_outlives_its_checkpoint(folder):
    tensor = open_checkpoint(files(folder)).read("a.weight")
    assert torch.equal(tensor, TENSORS["a.weight"])


def test_unaligned_tensors_are_read_right(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    values = torch.tensor([1.0, 2.0, 3.0])
    header = {"odd": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]}}
    text = json.dumps(header).encode()
    data = b"\0" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert torch.equal(open_checkpoint(files(tmp_path)).read("odd"), values)


def test_shards_are_one_checkpoint(sharded):
    checkpoint = open_checkpoint(files(sharded))
    assert set(checkpoint.tensors) == {"a.weight", "b.weight", "e.ids"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.tensors["e.ids"].file == "model-00002-of-00002.safetensors"
    assert torch.equal(checkpoint.read("e.ids"), TENSORS["e.ids"])


class TestFaults:
    def test_a_missing_shard(self, sharded):
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(BadCheckpoint, match=r"model-00002-of-00002\.safetensors"):
            open_checkpoint(files(sharded))

    def test_a_tensor_the_index_promises(self, sharded):
        save_file({"e.ids": TENSORS["e.ids"]}, sharded / "model-00002-of-00002.safetensors")
        with pytest.raises(BadCheckpoint, match=r"b\.weight is missing from model-00002"):
            open_checkpoint(files(sharded))

    def test_a_tensor_in_another_shard_than_the_index_says(self, sharded):
        save_file({n: TENSORS[n] for n in ("a.weight", "b.weight")}, sharded / "model-00001-of-00002.safetensors")
        save_file({"e.ids": TENSORS["e.ids"]}, sharded / "model-00002-of-00002.safetensors")
        with pytest.raises(BadCheckpoint, match=r"b\.weight is missing from model-00002") as caught:
            open_checkpoint(files(sharded))
        assert "it is in model-00001-of-00002.safetensors" in caught.value.cause

    @pytest.mark.parametrize("with_index", [True, False])
    def test_a_tensor_in_two_shards(self, sharded, with_index):
        save_file({n: TENSORS[n] for n in TENSORS}, sharded / "model-00001-of-00002.safetensors")
        if not with_index:
            (sharded / "model.safetensors.index.json").unlink()
        with pytest.raises(BadCheckpoint, match=r"tensor \S+ is in both model-00001\S+ and model-00002\S+") as caught:
            open_checkpoint(files(sharded))
        assert str(sharded) in caught.value.fix

    @pytest.mark.parametrize(
        ("weight_map", "told"),
        [(None, "names no tensors"), ({}, "names no tensors"), ([1], "names no tensors")]
        + [({"a": file}, "places tensor a in") for file in (3, "../model.safetensors", "/etc/passwd", "")],
    )
    def test_an_index_that_says_nothing_sensible(self, sharded, weight_map, told):
        (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BadCheckpoint, match=told) as caught:
            open_checkpoint(files(sharded))
        assert "model.safetensors.index.json" in caught.value.message

    @pytest.mark.parametrize("keep", [0, 4, 8, 60, -1])
    def test_a_truncated_shard(self, folder, keep):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert "model.safetensors" in caught.value.message
        assert "download it again" in caught.value.fix

    def test_a_shape_that_does_not_fit_its_bytes(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        text = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(tmp_path))
        assert "tensor w" in caught.value.cause

    @pytest.mark.parametrize(
        ("header", "told"),
        [
            ([], "the header is a list"),
            ("x", "the header is a str"),
            ({"w": {"dtype": "F32", "shape": [2]}}, "tensor w is malformed"),
            ({"w": 3}, "tensor w is malformed"),
            ({"w": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, "tensor w has the shape (-1, -2)"),
            ({"w": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, "tensor w has the shape (2.0,)"),
            ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, "at bytes -8 to 0"),
            ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, "tensor w ends 4 bytes after the end"),
            (
                {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("v", "w")},
                "tensors v and w share bytes",
            ),
        ],
    )
    def test_a_header_that_lies(self, tmp_path, header, told):
        (tmp_path / "config.json").write_text("{}")
        text = json.dumps(header).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors is truncated or corrupt") as caught:
            open_checkpoint(files(tmp_path))
        assert told in caught.value.cause

    @pytest.mark.parametrize("dtype", ["F4", "Q9", None, ["F32"]])
    def test_an_unknown_dtype_names_the_tensor_and_the_known_ones(self, tmp_path, dtype):
        (tmp_path / "config.json").write_text("{}")
        text = json.dumps({"w": {"dtype": dtype, "shape": [2], "data_offsets": [0, 8]}}).encode()
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
        with pytest.raises(UnsupportedModel, match=r"model\.safetensors: tensor w has the unknown dtype") as caught:
            open_checkpoint(files(tmp_path))
        assert "BF16" in caught.value.cause

    def test_an_empty_file_is_called_empty(self, folder):
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert caught.value.cause == "the file is empty"

    def test_a_file_of_no_tensors(self, folder):
        save_file({}, folder / "model.safetensors")
        with pytest.raises(BadCheckpoint, match="holds no tensors"):
            open_checkpoint(files(folder))

    def test_a_link_to_nowhere(self, folder):
        """What a pruned hub cache leaves."""
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(folder / "gone")
        with pytest.raises(BadCheckpoint, match=r"model\.safetensors cannot be read"):
            open_checkpoint(files(folder))

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.gguf"])
    def test_a_git_lfs_pointer_is_called_one(self, folder, name):
        folder = folder.rename(folder.parent / f"{folder.name} it's a model")
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n"
        (folder / name).write_text(pointer)
        kind = "gguf" if name.endswith(".gguf") else "folder"
        path = folder / name if kind == "gguf" else folder
        with pytest.raises(BadCheckpoint, match=f"{name} is a Git LFS pointer") as caught:
            open_checkpoint(ModelFiles(kind, path, "m"))
        assert shlex.split(caught.value.fix) == ["cd", str(folder), "&&", "git", "lfs", "pull"]

    @pytest.mark.parametrize(
        ("name", "author"), [("consolidated.safetensors", "Mistral"), ("consolidated.00.pth", "Meta")]
    )
    def test_an_authors_own_layout_is_called_by_name(self, tmp_path, name, author):
        (tmp_path / "params.json").write_text("{}")
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UnsupportedModel, match=f"only {name}, the weights in {author}'s own layout") as caught:
            open_checkpoint(files(tmp_path))
        assert "--exclude 'consolidated*'" in caught.value.fix

    def test_weights_for_other_frameworks_are_named(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "tf_model.h5").write_bytes(b"x")
        with pytest.raises(BadCheckpoint, match="no weights") as caught:
            open_checkpoint(files(tmp_path))
        assert "only tf_model.h5" in caught.value.cause

    def test_a_tensor_nobody_has(self, folder):
        with pytest.raises(BadCheckpoint, match="no tensor x"):
            open_checkpoint(files(folder)).read("x")

    def test_no_config(self, folder):
        (folder / "config.json").unlink()
        with pytest.raises(BadCheckpoint, match=r"has no config\.json"):
            open_checkpoint(files(folder))

    @pytest.mark.parametrize("text", ["{", "[1]", ""])
    def test_a_broken_config(self, folder, text):
        (folder / "config.json").write_text(text)
        with pytest.raises(BadCheckpoint, match=r"config\.json"):
            open_checkpoint(files(folder))

    def test_an_adapter_is_not_a_model(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
        with pytest.raises(UnsupportedModel, match="LoRA adapter") as caught:
            open_checkpoint(files(tmp_path))
        assert "merge_and_unload" in caught.value.fix
        *_, code, named = shlex.split(caught.value.fix)
        compile(code, "the fix", "exec")
        assert named == str(tmp_path)
        (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
        with pytest.raises(UnsupportedModel, match="LoRA adapter"):
            open_checkpoint(files(tmp_path))

    def test_an_adapter_beside_a_model_is_told(self, folder, caplog):
        open_checkpoint(files(folder))
        assert not caplog.records
        save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")
        assert set(open_checkpoint(files(folder)).tensors) == set(TENSORS)
        assert f"{folder / 'adapter_model.safetensors'} is not applied" in caplog.text

    def test_no_weights_at_all(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(BadCheckpoint, match="no weights"):
            open_checkpoint(files(tmp_path))
