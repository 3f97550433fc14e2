"""Pickled weights are described without running them, read by torch's restricted loader, and refused when unsafe."""

import json
import os
import pickle
import shlex
import struct
import subprocess
import sys
import warnings
import zipfile
from collections import OrderedDict
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from tidemill.errors import BadCheckpoint, TidemillError, UnsupportedModel
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles

BASE = torch.arange(24, dtype=torch.float32)
TENSORS = OrderedDict(
    {
        "a.weight": BASE.view(4, 6),
        "tied.weight": BASE.view(4, 6),
        "b.half": torch.arange(6).to(torch.bfloat16).view(2, 3),
        "c.scalar": torch.tensor(1.5, dtype=torch.float16),
        "d.view": BASE.view(4, 6)[1:3, 2:4],
        "e.transposed": BASE.view(4, 6).t(),
        "f.ids": torch.arange(5),
        "g.none": torch.zeros(0, 4),
        "h.fp8": torch.arange(4).float().to(torch.float8_e4m3fn),
        "i.parameter": torch.nn.Parameter(torch.ones(3)),
    }
)


def files(folder) -> ModelFiles:
    return ModelFiles("folder", folder, str(folder))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shards = {"pytorch_model-00001-of-00002.bin": ["a.weight"], "pytorch_model-00002-of-00002.bin": ["b.half", "f.ids"]}
    for shard, names in shards.items():
        torch.save({name: TENSORS[name].clone() for name in names}, tmp_path / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_every_tensor_comes_back_with_its_shape_and_dtype(folder):
    checkpoint = open_checkpoint(files(folder))
    assert checkpoint.config["model_type"] == "llama"
    assert list(checkpoint.tensors) == list(TENSORS)
    for name, expected in TENSORS.items():
        info, tensor = checkpoint.tensors[name], checkpoint.read(name)
        assert (info.shape, info.nbytes, info.file) == (expected.shape, expected.nbytes, "pytorch_model.bin")
        assert tensor.dtype == expected.dtype and not tensor.requires_grad and tensor.is_contiguous()
        assert torch.equal(tensor.float(), expected.float()), name
    names = {"b.half": "BF16", "c.scalar": "F16", "f.ids": "I64", "h.fp8": "F8_E4M3", "i.parameter": "F32"}
    assert {name: checkpoint.tensors[name].dtype for name in names} == names


def test_describing_it_needs_no_torch(folder):
    code = (
        "import sys; from pathlib import Path; from tidemill.weights.location import locate;"
        "from tidemill.weights.checkpoint import open_checkpoint;"
        f"c = open_checkpoint(locate({str(folder)!r})); print(len(c.tensors), 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(len(TENSORS)), "False"]


def test_reading_maps_the_file_and_writing_never_reaches_it(folder):
    before = (folder / "pytorch_model.bin").read_bytes()
    checkpoint = open_checkpoint(files(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = checkpoint.read("a.weight"), checkpoint.read("a.weight")
    assert first.data_ptr() == second.data_ptr()
    first.fill_(7)
    assert (folder / "pytorch_model.bin").read_bytes() == before


def test_a_model_transformers_would_save(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(files(tmp_path))
    state = model.state_dict()
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {n: t.shape for n, t in state.items()}
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in state.items())


def test_shards_are_one_checkpoint(sharded):
    checkpoint = open_checkpoint(files(sharded))
    assert set(checkpoint.tensors) == {"a.weight", "b.half", "f.ids"}
    assert checkpoint.tensors["f.ids"].file == "pytorch_model-00002-of-00002.bin"
    assert torch.equal(checkpoint.read("f.ids"), TENSORS["f.ids"])


def test_safetensors_win_where_both_are_there(folder):
    save_file({"only": torch.ones(2)}, folder / "model.safetensors")
    assert set(open_checkpoint(files(folder)).tensors) == {"only"}


def test_another_name_will_do_and_training_leftovers_are_no_weights(folder):
    (folder / "pytorch_model.bin").rename(folder / "model.pt")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        (folder / name).write_bytes(b"\x80\x02not weights")
    assert {info.file for info in open_checkpoint(files(folder)).tensors.values()} == {"model.pt"}


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {shlex.quote(str(self.marker))}",)


def write_program(folder, program: bytes) -> None:
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", program)


class TestUnsafe:
    @pytest.mark.parametrize("where", ["a value", "a key", "the whole file", "an attribute"])
    def test_a_pickle_that_runs_a_command_is_refused_by_name_and_nothing_runs(self, folder, tmp_path, where):
        marker = tmp_path / "executed"
        evil = Malicious(marker)
        state = OrderedDict(w=torch.ones(2))
        state._metadata = {"evil": evil}
        content = {
            "a value": {"w": torch.ones(2), "x": evil},
            "a key": {(evil,): torch.ones(2)},
            "the whole file": evil,
            "an attribute": state,
        }
        torch.save(content[where], folder / "pytorch_model.bin")
        with pytest.raises(
            UnsupportedModel, match=rf"pytorch_model\.bin is not loaded: .* {os.name}\.system"
        ) as caught:
            open_checkpoint(files(folder))
        assert "nothing was executed" in caught.value.cause
        assert not marker.exists()

    @pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), print, slice, torch.load, OrderedDict], ids=str)
    def test_anything_but_what_makes_tensors_is_refused(self, folder, value):
        torch.save({"w": torch.ones(2), "x": value}, folder / "pytorch_model.bin")
        if value is OrderedDict:
            assert "w" in open_checkpoint(files(folder)).tensors
            return
        with pytest.raises(UnsupportedModel, match="it asks for "):
            open_checkpoint(files(folder))

    def test_names_reached_through_allowed_ones_are_refused(self, folder):
        """Protocol 4 takes dotted names, which walk attributes of what a module holds."""
        program = b"\x80\x04\x8c\x0ctorch._utils\x8c\x12_rebuild_tensor_v2\x93."
        dotted = program.replace(b"\x8c\x12_rebuild_tensor_v2", b"\x8c\x0csys.settrace")
        for data, refused in ((program, "is not a dictionary"), (dotted, r"torch\._utils\.sys\.settrace")):
            write_program(folder, data)
            with pytest.raises(UnsupportedModel, match=refused):
                open_checkpoint(files(folder))

    def test_no_instruction_takes_memory_by_the_gigabyte(self, folder):
        """A place in the memo of number two thousand million: an array of that length would be 16 GB."""
        write_program(folder, b"\x80\x02}r\xff\xff\xff\x7f.")
        limited = (
            "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30));"
            "from tidemill.weights.checkpoint import open_checkpoint; from tidemill.weights.location import locate;"
            f"open_checkpoint(locate({str(folder)!r}))"
        )
        ended = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
        assert "holds no tensors" in ended.stderr

    @pytest.mark.parametrize("depth", [3, 2_000_000])
    def test_a_deep_tuple_as_a_key_ends_no_process(self, folder, depth):
        """Hashing it runs on the C stack, one frame a level."""
        write_program(folder, b"\x80\x02})" + b"\x85" * depth + b"K\x01s.")
        code = (
            "from tidemill.weights.checkpoint import open_checkpoint; from tidemill.weights.location import locate;"
            f"open_checkpoint(locate({str(folder)!r}))"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert ended.returncode == 1
        assert "UnsupportedModel" in ended.stderr

    FOREIGN: ClassVar = {
        "a bytearray": (b"\x96" + struct.pack("<Q", 1_200_000_000), "BYTEARRAY8"),
        "a text of eight bytes' length": (b"\x8d" + struct.pack("<Q", 1 << 40), "BINUNICODE8"),
        "a text of 100 kilobytes": (b"X" + struct.pack("<I", 100_000) + b"a" * 100_000, "a text of 100000 bytes"),
        "bytes": (b"C\x01x", "SHORT_BINBYTES"),
        "an integer of a megabyte": (b"\x8b" + struct.pack("<I", 1 << 20) + b"\x01" * (1 << 20), "LONG4"),
        "an integer of 200 bytes": (b"\x8a\xc8" + b"\x01" * 200, "an integer of 200 bytes"),
        "an extension": (b"\x82\x01", "EXT1"),
        "a buffer from outside": (b"\x97", "NEXT_BUFFER"),
        "a set": (b"\x8f", "EMPTY_SET"),
        "an object": (b")\x81", "NEWOBJ"),
        "a float as a key": (b"}G" + bytes(8) + b"Ns", "a float as the key of a dictionary"),
        "a tuple as a key": (b"}(K\x01tNs", "a tuple as the key of a dictionary"),
        "a long tuple": (b"(" + b"N" * 1000 + b"t", "a tuple that is longer or deeper"),
    }

    @pytest.mark.parametrize("what", FOREIGN)
    def test_what_no_dictionary_of_tensors_needs_is_not_run(self, folder, what):
        program, cause = self.FOREIGN[what]
        write_program(folder, b"\x80\x05" + program + b".")
        with pytest.raises(UnsupportedModel, match="what no dictionary of tensors has") as caught:
            open_checkpoint(files(folder))
        assert cause in caught.value.cause

    def test_a_text_longer_than_the_file_is_refused(self, folder):
        write_program(folder, b"\x80\x02}X" + struct.pack("<I", 1 << 31) + b"w")
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert "claims to go on" in caught.value.cause

    def test_no_dictionary_is_copied(self, folder):
        """OrderedDict(d), a thousand times over a large one, is a gigabyte."""
        entries = b"".join(b"X\x01\0\0\0" + bytes([65 + at]) + b"N" for at in range(20))
        copies = b"ccollections\nOrderedDict\nh\x00\x85R" * 3
        write_program(folder, b"\x80\x02}q\x00(" + entries + b"u" + copies + b".")
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert "takes 0 positional arguments" in caught.value.cause

    def test_a_program_ends(self, folder, monkeypatch):
        monkeypatch.setattr("tidemill.weights.pickle_machine._MAX_INSTRUCTIONS", 1000)
        write_program(folder, b"\x80\x02" + b"}" * 1000 + b".")
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert "more than 1000 instructions" in caught.value.cause

    @pytest.mark.parametrize("protocol", [2, 3, 4, 5])
    def test_every_protocol_torch_writes_is_read(self, folder, protocol):
        torch.save(TENSORS, folder / "pytorch_model.bin", pickle_protocol=protocol)
        assert list(open_checkpoint(files(folder)).tensors) == list(TENSORS)

    def test_a_tensor_larger_than_its_storage_is_refused(self, folder):
        """Strides of zero let one number claim any shape, and reading it would take the memory."""
        torch.save({"w": torch.ones(1).expand(10**9, 10**9)}, folder / "pytorch_model.bin")
        with pytest.raises(UnsupportedModel, match="tensor w repeats its numbers") as caught:
            open_checkpoint(files(folder))
        assert "1000000000000000000 elements, its storage of 4 bytes" in caught.value.cause
        torch.save({"w": torch.arange(5).expand(1, -1)}, folder / "pytorch_model.bin")
        assert open_checkpoint(files(folder)).tensors["w"].shape == (1, 5)

    @settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(data=st.data())
    def test_a_changed_byte_never_escapes_as_anything_but_a_typed_error(self, folder, data):
        """The pickle is a program, so any byte may turn it into another one."""
        with zipfile.ZipFile(folder / "pytorch_model.bin") as archive:
            members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
        (name,) = (name for name in members if name.endswith("data.pkl"))
        program = bytearray(members[name])
        program[data.draw(st.integers(2, len(program) - 1))] = data.draw(st.integers(0, 255))
        changed = folder / "changed"
        changed.mkdir(exist_ok=True)
        (changed / "config.json").write_text("{}")
        with zipfile.ZipFile(changed / "pytorch_model.bin", "w") as archive:
            for member, content in members.items():
                archive.writestr(member, bytes(program) if member == name else content)
        try:
            open_checkpoint(files(changed))
        except TidemillError as error:
            assert "changed" in error.message
            assert error.fix


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_changed_byte_of_the_container_is_found_or_harmless(folder, data):
    whole = bytearray((folder / "pytorch_model.bin").read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    changed = folder / "changed"
    changed.mkdir(exist_ok=True)
    (changed / "config.json").write_text("{}")
    (changed / "pytorch_model.bin").write_bytes(whole)
    try:
        open_checkpoint(files(changed))
    except TidemillError as error:
        assert "changed" in error.message
        assert error.fix


class TestFaults:
    def test_a_missing_shard(self, sharded):
        (sharded / "pytorch_model-00002-of-00002.bin").unlink()
        with pytest.raises(BadCheckpoint, match=r"lacks pytorch_model-00002-of-00002\.bin") as caught:
            open_checkpoint(files(sharded))
        assert "pytorch_model.bin.index.json names 2 shards" in caught.value.cause

    def test_a_tensor_the_index_promises(self, sharded):
        torch.save({"f.ids": TENSORS["f.ids"]}, sharded / "pytorch_model-00002-of-00002.bin")
        with pytest.raises(BadCheckpoint, match=r"b\.half is missing from pytorch_model-00002"):
            open_checkpoint(files(sharded))

    def test_a_tensor_in_two_shards(self, sharded):
        torch.save(dict(TENSORS), sharded / "pytorch_model-00001-of-00002.bin")
        with pytest.raises(BadCheckpoint, match=r"is in both pytorch_model-00001\S+ and pytorch_model-00002"):
            open_checkpoint(files(sharded))

    @pytest.mark.parametrize("keep", [0, 3, 100, 1000, -1, -200])
    def test_a_truncated_file(self, folder, keep):
        path = folder / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin is truncated or corrupt") as caught:
            open_checkpoint(files(folder))
        assert caught.value.fix == f"delete {path} and download it again"

    def test_a_storage_the_file_lacks_names_the_tensor(self, folder):
        whole, path = folder / "whole.zip", folder / "pytorch_model.bin"
        path.rename(whole)
        with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
            for entry in source.infolist():
                if not entry.filename.endswith("/data/0"):
                    target.writestr(entry, source.read(entry))
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert caught.value.cause == "tensor a.weight lies in a storage of 96 bytes, of which the file has no"

    def test_a_tensor_that_ends_after_its_storage(self, folder):
        whole, path = folder / "whole.zip", folder / "pytorch_model.bin"
        torch.save({"w": torch.ones(2, 3)}, whole)
        with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
            for entry in source.infolist():
                data = source.read(entry)
                target.writestr(entry, data.replace(b"K\x02K\x03\x86", b"K\x07K\x03\x86", 1))
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert "tensor w of F32 (7, 3) ends after its storage of 24 bytes" in caught.value.cause

    def test_a_file_of_the_old_format_comes_with_the_command_that_converts_it(self, folder):
        folder = folder.rename(folder.parent / (folder.name + ' it\'s a "model" $HOME'))
        path = folder / "pytorch_model.bin"
        torch.save({"a.weight": TENSORS["a.weight"]}, path, _use_new_zipfile_serialization=False)
        with pytest.raises(UnsupportedModel, match=r"before 1\.6") as caught:
            open_checkpoint(files(folder))
        command = shlex.split(caught.value.fix)
        assert command[0] == "python"
        subprocess.run([sys.executable, *command[1:]], check=True)
        assert torch.equal(open_checkpoint(files(folder)).read("a.weight"), TENSORS["a.weight"])

    def test_a_gguf_file_under_this_name_is_to_be_renamed(self, folder):
        folder = folder.rename(folder.parent / f"{folder.name} with spaces")
        path = folder / "pytorch_model.bin"
        path.write_bytes(b"GGUF\3\0\0\0")
        with pytest.raises(UnsupportedModel, match="is a GGUF file under another name") as caught:
            open_checkpoint(files(folder))
        assert caught.value.fix == f"rename it to .gguf: mv '{path}' '{folder}/pytorch_model.gguf'"

    def test_a_tensor_under_a_number_has_no_name(self, folder):
        torch.save({1: torch.ones(2)}, folder / "pytorch_model.bin")
        with pytest.raises(BadCheckpoint) as caught:
            open_checkpoint(files(folder))
        assert "the number 1 where its name should be" in caught.value.cause

    def test_a_git_lfs_pointer_is_called_one(self, folder):
        (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin is a Git LFS pointer"):
            open_checkpoint(files(folder))

    def test_a_training_checkpoint_says_how_to_save_the_weights_alone(self, folder):
        optimizer = {"state": {0: {"step": 1.0}}, "param_groups": [{"betas": (0.9, 0.99), "params": [0]}]}
        torch.save(
            {"epoch": 3, "state_dict": {"w": torch.ones(2)}, "optimizer": optimizer}, folder / "pytorch_model.bin"
        )
        with pytest.raises(UnsupportedModel, match="not a dictionary of tensors") as caught:
            open_checkpoint(files(folder))
        assert "'state_dict'" in caught.value.cause

    def test_what_is_no_tensor_is_told(self, folder, caplog):
        torch.save({"w": torch.ones(2), "step": 3}, folder / "pytorch_model.bin")
        assert set(open_checkpoint(files(folder)).tensors) == {"w"}
        assert "such as step" in caplog.text

    def test_a_bare_pickle_is_the_old_format_and_is_not_run(self, folder, tmp_path):
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "executed")))
        with pytest.raises(UnsupportedModel):
            open_checkpoint(files(folder))
        assert not (tmp_path / "executed").exists()

    def test_a_tensor_nobody_has(self, folder):
        with pytest.raises(BadCheckpoint, match="no tensor x"):
            open_checkpoint(files(folder)).read("x")
