"""Quantising a checkpoint: what is written, who can read it, what it costs, and what happens to bad input."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.server import run_tidemill
from tidemill.errors import ConfigError, TidemillError, UnsupportedModel
from tidemill.quantise import run as quantise_run
from tidemill.quantise.awq import find_scales
from tidemill.quantise.compressed import dense_of, is_quantised, pack, unpack
from tidemill.quantise.folder import OutFolder
from tidemill.quantise.gptq import gptq
from tidemill.quantise.grid import Grid, output_error, round_to_nearest
from tidemill.quantise.perplexity import perplexity, windows
from tidemill.quantise.run import Report, quantise
from tidemill.quantise.settings import TARGETS, Wishes
from tidemill.weights.location import locate

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SCHEMES = ("w4a16", "w8a16", "w8a8", "fp8")
METHODS = ("rtn", "gptq", "awq")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tiny random Llama, and a text in its words."""
    folder = tmp_path_factory.mktemp("quantize")
    write_checkpoint(folder / "model", "Llama", **SIZES)
    chosen = random.Random(0)
    (folder / "text.txt").write_text(" ".join(f"w{chosen.randrange(203)}" for _ in range(2000)))
    return folder


def quantised(home: Path, out: Path, model: str = "model", **wishes) -> Report:
    given = {"scheme": "w4a16", "calibration": str(home / "text.txt"), "samples": 8, "length": 48, **wishes}
    force = given.pop("force", False)
    return quantise(locate(str(home / model)), out, Wishes(**given), force=force)


def dequantised(source: Path, out: Path) -> transformers.PreTrainedModel:
    """The dense model with the weights that the quantised folder stands for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = settings["config_groups"]["group_0"]["weights"]
    grid = Grid("int" if weights["type"] == "int" else "fp8", weights["num_bits"], weights["group_size"], torch.float32)
    stored = {name: tensor for shard in out.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for name, parameter in model.named_parameters():
        prefix = name.removesuffix(".weight")
        dense = dense_of(prefix, stored, grid) if is_quantised(prefix, stored) else stored[name]
        parameter.data.copy_(dense)
    return model


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    ids = torch.randint(0, 203, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scheme", [*SCHEMES, "w4a16 asymmetric"])
def test_transformers_reads_what_is_written(home, tmp_path, scheme, method):
    scheme, *asymmetric = scheme.split()
    report = quantised(home, tmp_path / "out", scheme=scheme, method=method, asymmetric=bool(asymmetric))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = logits(dequantised(home / "model", tmp_path / "out"))
    error = (logits(read) - expected).norm() / expected.norm()
    # Where inputs are rounded too, the dequantised model is another one: a random model shows every rounding.
    assert error < (0.5 if TARGETS[scheme].activations else 1e-5)
    words = (home / "text.txt").read_text().split()
    held_back = [int(word[1:]) for word in words[-int(len(words) * 0.1) :]]
    assert report.after == pytest.approx(perplexity(read, held_back, 48), rel=1e-3)
    assert report.before != report.after


def test_the_folder_has_all_that_belongs_to_a_model(home, tmp_path):
    report = quantised(home, tmp_path / "out", scheme="w4a16", group_size=16, method="rtn")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    shards = [f"model-{index:05}-of-00003.safetensors" for index in (1, 2, 3)]
    beside = ["config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert names == sorted([*shards, *beside])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    settings = config["quantization_config"]
    assert settings["quant_method"] == "compressed-tensors"
    assert settings["format"] == "pack-quantized"
    assert settings["ignore"] == ["lm_head"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 16
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["weight_map"]["model.layers.1.mlp.down_proj.weight_packed"] == shards[1]
    assert report.bits == pytest.approx(4 + 32 / 16)


def test_packing_is_that_of_the_format():
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    for bits, inputs in ((4, 64), (4, 37), (8, 64), (8, 37)):
        codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (5, inputs)).to(torch.int8)
        assert torch.equal(pack(codes, bits), pack_to_int32(codes, bits))
        assert torch.equal(unpack(pack(codes, bits), bits, inputs).to(torch.int8), codes)


def correlated(inputs: int, tokens: int) -> torch.Tensor:
    """Few directions, and some channels far louder than others."""
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs // 4) @ torch.randn(inputs // 4, inputs) + 0.1 * torch.randn(tokens, inputs)
    return x * torch.logspace(-1, 1, inputs)[torch.randperm(inputs)]


@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, None])
def test_gptq_and_awq_lose_less_than_rounding(group_size, asymmetric):
    x, weight = correlated(128, 512), torch.randn(96, 128)
    gram, grid = x.t() @ x, Grid("int", 4, group_size, torch.float32, asymmetric)
    nearest = output_error(round_to_nearest(weight, grid).dense() - weight, gram)
    with_gptq = output_error(gptq(weight, grid, gram).dense() - weight, gram)
    s = find_scales([weight], gram, gram.diagonal(), grid)
    assert s is not None
    scaled = round_to_nearest(weight * s, grid, gram / torch.outer(s, s)).dense() / s
    assert with_gptq < 0.5 * nearest
    assert output_error(scaled - weight, gram) < nearest


def test_gptq_survives_inputs_that_are_never_there():
    x = correlated(64, 256)
    x[:, 10:20] = 0
    rounded = gptq(torch.randn(32, 64), Grid("int", 4, 32, torch.float16), x.t() @ x)
    assert torch.isfinite(rounded.dense()).all()


@pytest.mark.parametrize("family", ["Phi3", "GPTNeoX", "Gemma2", "Qwen2"])
def test_scales_are_folded_exactly(tmp_path, family):
    """Of 8 bits in small groups, so that any difference is a fold that is wrong: fused and grouped rows, parallel
    layers, norms around one, biases."""
    more = {"pad_token_id": 0} if family == "Phi3" else {"head_dim": 16} if family == "Gemma2" else {}
    write_checkpoint(tmp_path / "model", family, **SIZES, **more)
    (tmp_path / "text.txt").write_text(" ".join(f"w{7 * i % 203}" for i in range(1000)))
    quantised(tmp_path, tmp_path / "out", scheme="w8a16", group_size=16, method="awq")
    source, stored = (
        {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
        for folder in (tmp_path / "model", tmp_path / "out")
    )
    assert any(
        "norm" in name and not torch.equal(tensor, source[name]) for name, tensor in stored.items() if name in source
    )
    dense, packed = (
        logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32))
        for name in ("model", "out")
    )
    assert (dense - packed).norm() / dense.norm() < 0.05


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_interrupted_run_goes_on_where_it_stopped(home, tmp_path, monkeypatch, method):
    quantised(home, tmp_path / "whole", method=method)
    real = OutFolder.save

    def stop_at_the_second(self, index, tensors):
        if index == 1:
            raise KeyboardInterrupt
        real(self, index, tensors)

    monkeypatch.setattr(OutFolder, "save", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        quantised(home, tmp_path / "out", method=method)
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    with pytest.raises(ConfigError, match="unfinished work of another kind") as other:
        quantised(home, tmp_path / "out", method="rtn")
    assert f"method was '{method}', now it is 'rtn'" in other.value.cause
    report = quantised(home, tmp_path / "out", method=method)
    assert report.resumed == 1
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_folder_that_is_not_empty_is_left_alone(home, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty"):
        quantised(home, tmp_path, method="rtn")
    quantised(home, tmp_path, method="rtn", force=True)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="is not empty"):
        quantised(home, tmp_path, method="rtn", scheme="fp8")
    assert (tmp_path / "config.json").read_bytes() == before
    quantised(home, tmp_path, method="rtn", scheme="fp8", force=True)
    assert (tmp_path / "config.json").read_bytes() != before
    with pytest.raises(ConfigError, match="is where the model itself is"):
        quantised(home, home / "model", method="rtn", force=True)


def test_matrices_can_be_left_dense(home, tmp_path):
    quantised(home, tmp_path / "out", ignore=("down_proj", r"re:.*layers\.0\..*q_proj"), method="awq")
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    dense = ["model.layers.0.mlp.down_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    assert sorted(ignore) == ["lm_head", *dense]
    source = load_file(home / "model" / "model.safetensors")
    stored = load_file(tmp_path / "out" / "model-00001-of-00003.safetensors")
    for prefix in dense[:2]:
        assert torch.equal(stored[f"{prefix}.weight"], source[f"{prefix}.weight"])
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    expected = logits(dequantised(home / "model", tmp_path / "out"))
    assert torch.allclose(logits(read), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("wishes", "message", "fix"),
    [
        ({"scheme": "w3a16"}, "scheme 'w3a16' is unknown", "w4a16"),
        ({"method": "smooth"}, "method 'smooth' is unknown", "rtn"),
        ({"method": "awq", "calibration": None}, "needs a text to calibrate on", "--calibration FILE"),
        ({"scheme": "fp8", "group_size": 32}, "does not go with --scheme fp8", "leave --group-size out"),
        ({"scheme": "w8a8", "asymmetric": True}, "does not go with --scheme w8a8", "leave --asymmetric out"),
        ({"group_size": 64}, "groups of 64 do not divide model.layers.0.mlp.down_proj", "--group-size 32"),
        ({"ignore": ("no_proj",)}, "--ignore no_proj names no matrix", "--ignore down_proj"),
        ({"ignore": ("re:(",)}, "is no pattern", "re:"),
        ({"ignore": ("model.layers",)}, "leaves nothing to quantise", "name fewer"),
        ({"calibration": "nowhere.txt"}, "nowhere.txt cannot be read", "--calibration FILE"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(home, tmp_path, wishes, message, fix):
    with pytest.raises(ConfigError) as refused:
        quantised(home, tmp_path / "out", **wishes)
    assert message in refused.value.message
    assert fix in refused.value.fix
    assert not (tmp_path / "out").exists()


def test_texts_come_as_lines_of_json_too(home, tmp_path):
    words = (home / "text.txt").read_text().split()
    lines = [json.dumps({"text": " ".join(words[start : start + 100])}) for start in range(0, 2000, 100)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    report = quantised(home, tmp_path / "out", calibration=str(tmp_path / "text.jsonl"))
    assert report.calibrated_on == "8 samples of 48 tokens"
    (tmp_path / "text.jsonl").write_text('{"text": "w1"}\n{"words": 3}\n')
    with pytest.raises(ConfigError, match="line 2, has no text"):
        quantised(home, tmp_path / "other", calibration=str(tmp_path / "text.jsonl"))
    (tmp_path / "short.txt").write_text("w1 w2 w3")
    with pytest.raises(ConfigError, match="holds 3 tokens"):
        quantised(home, tmp_path / "other", calibration=str(tmp_path / "short.txt"))


def test_models_that_cannot_be_quantised_are_refused(home, tmp_path, monkeypatch):
    quantised(home, tmp_path / "out", method="rtn")
    with pytest.raises(UnsupportedModel, match="quantised already"):
        quantise(locate(str(tmp_path / "out")), tmp_path / "twice", Wishes("w8a8"))
    write_checkpoint(tmp_path / "gpt2", "GPT2", n_embd=64, n_layer=1, n_head=4)
    with pytest.raises(UnsupportedModel, match="GPT2LMHeadModel cannot be quantised"):
        quantise(locate(str(tmp_path / "gpt2")), tmp_path / "twice", Wishes("w8a8"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ConfigError, match="has no room"):
        quantised(home, tmp_path / "small", method="rtn")


def test_a_full_disk_leaves_nothing_that_looks_whole(home, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tidemill.quantise.folder.save_file", full)
    with pytest.raises(TidemillError) as refused:
        quantised(home, tmp_path / "out", method="rtn")
    assert "finished layers are kept" in refused.value.fix
    assert not (tmp_path / "out" / "config.json").exists()


def test_perplexity_counts_every_token_once():
    assert [(part.begin, part.end, part.scored) for part in windows(10, 4, 2)] == [
        (0, 4, 1),
        (2, 6, 4),
        (4, 8, 6),
        (6, 10, 8),
    ]

    class Uniform:
        def __call__(self, ids):
            return torch.zeros(1, ids.shape[1], 50)

    assert perplexity(Uniform(), list(range(30)), 8, 4) == pytest.approx(50)
    assert perplexity(Uniform(), list(range(30)), 8, prefix=[1]) == pytest.approx(50)


def test_the_command_tells_what_it_did(home, tmp_path):
    arguments = [str(home / "model"), str(tmp_path / "out"), "--scheme", "w8a8"]
    ended = run_tidemill("quantize", *arguments, "--eval", str(home / "text.txt"), "--length", "64")
    assert ended.returncode == 0, ended.stderr
    assert "layer 2 of 2" in ended.stderr
    assert "perplexity" in ended.stdout and "before" in ended.stdout and "2,000 tokens of text.txt" in ended.stdout
    ended = run_tidemill("quantize", str(home / "model"), str(tmp_path / "other"), "--scheme", "w5")
    assert ended.returncode == 1
    assert "error: scheme 'w5' is unknown" in ended.stderr and "fix:" in ended.stderr


def test_only_the_same_release_goes_on(home, tmp_path, monkeypatch):
    """Numbers of two versions of the quantiser are never mixed."""
    monkeypatch.setattr(quantise_run._Walk, "run", lambda self, on_layer: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantised(home, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(quantise_run, "VERSION", 2)
    with pytest.raises(ConfigError, match="unfinished work of another kind"):
        quantised(home, tmp_path / "out")
