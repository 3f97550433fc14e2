"""Loading with several threads gives what loading in order gives, bit for bit; random weights are always the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers.checkpoints import TINY, write_checkpoint
from tidemill.config import EngineArgs
from tidemill.engine.prepare import prepare
from tidemill.errors import BadCheckpoint, ConfigError, StartupError
from tidemill.layers.parameter import Placement
from tidemill.models.decoder import Decoder
from tidemill.models.registry import describe
from tidemill.runtime.loader import fill_dummy, fill_in_parallel, load_weights
from tidemill.runtime.staging import Stager, in_parallel
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.location import ModelFiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAMILIES = {
    "plain": ("Llama", {}),
    "transposed, with biases": ("GPT2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "rows rearranged": ("GPTNeoX", {"rotary_pct": 0.5}),
    "adjusted": ("Gemma3", {"head_dim": 16, "num_hidden_layers": 2}),
}


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("model")
    family, changes = FAMILIES[request.param]
    write_checkpoint(folder, family, shard_size="60KB", **changes)
    return opened(folder)


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(ModelFiles("folder", folder, "tiny"))


def empty_model(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device = DEVICE) -> Decoder:
    return Decoder(describe(checkpoint.config), 64, Placement(dtype, device))


def weights(model: Decoder) -> dict[str, torch.Tensor]:
    return {parameter.name: parameter.target.cpu() for parameter in model.parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parallel_loading_is_bit_equal(checkpoint, dtype):
    plain = empty_model(checkpoint, dtype, torch.device("cpu"))
    load_weights(plain, checkpoint)
    staged = empty_model(checkpoint, dtype)
    parameters = list(staged.parameters())
    # Chunks shorter than most tensors, and not a divisor of any.
    done = list(fill_in_parallel(parameters, checkpoint, DEVICE, threads=3, chunk_bytes=1000))
    assert {parameter.name for parameter in done} == {parameter.name for parameter in parameters}
    expected = weights(plain)
    for name, tensor in weights(staged).items():
        assert torch.equal(tensor, expected[name]), name


def test_progress_ends_at_the_whole(checkpoint):
    model, heard = empty_model(checkpoint, torch.float32), []
    load_weights(model, checkpoint, lambda what, done, total: heard.append((done, total)), device=DEVICE)
    assert heard[-1][0] == heard[-1][1] == sum(parameter.target.numel() for parameter in model.parameters())
    assert heard == sorted(heard)


def test_a_broken_tensor_is_found_by_any_thread(tmp_path):
    from safetensors.torch import load_file, save_file

    write_checkpoint(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    broken = "model.layers.1.mlp.down_proj.weight"
    tensors[broken][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = opened(tmp_path)
    parameters = list(empty_model(checkpoint, torch.float32).parameters())
    with pytest.raises(BadCheckpoint, match=broken):
        list(fill_in_parallel(parameters, checkpoint, DEVICE, threads=2, check=True))


def test_the_first_failure_ends_all():
    def work(stager: Stager, item: int) -> None:
        if item == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        list(in_parallel(work, range(100), DEVICE, threads=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (13, 11)], ids=str)
def test_bytes_arrive_whatever_they_are(shape, dtype):
    source = torch.randint(-100, 100, shape).to(dtype)
    arrived = Stager(DEVICE, chunk_bytes=24).copy(source)
    assert arrived.device.type == DEVICE.type
    assert torch.equal(arrived.cpu(), source)


def dummy_folder(folder: Path, **changes: object) -> Path:
    """What `--load-format dummy` needs: no weights."""
    write_checkpoint(folder, "Llama")
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_dummy_weights_need_no_files_and_are_planned(tmp_path):
    folder = dummy_folder(tmp_path)
    with pytest.raises(StartupError, match="no weights"):
        prepare(EngineArgs(str(folder), device="cpu"))
    config = prepare(EngineArgs(str(folder), device="cpu", load_format="dummy", dtype="float32")).config
    assert config.load_format == "dummy"
    model = Decoder(describe(json.loads((folder / "config.json").read_text())), 64, Placement(torch.float32, DEVICE))
    assert config.weight_bytes == 4 * sum(parameter.target.numel() for parameter in model.parameters())


def test_dummy_weights_are_small_and_the_same_each_time():
    spec = describe({**TINY, "architectures": ["LlamaForCausalLM"]})
    place = Placement(torch.float32, DEVICE)
    first, second = Decoder(spec, 64, place), Decoder(spec, 64, place)
    fill_dummy(first, place)
    fill_dummy(second, place)
    other = weights(second)
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, other[name]), name
        if "norm" in name:
            assert (tensor == 1).all()
        else:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.2)
    assert not torch.equal(other["model.layers.0.mlp.gate_proj.weight"], other["model.layers.1.mlp.gate_proj.weight"])


def test_an_unknown_load_format_is_refused_by_name():
    with pytest.raises(ConfigError) as caught:
        prepare(EngineArgs("smollm2", load_format="tensorizer"))
    assert caught.value.param == "load_format"
    assert "dummy" in caught.value.fix
