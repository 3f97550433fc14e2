"""A GGUF read as a Hugging Face checkpoint says what transformers says of the same file."""

import gguf
import numpy as np
import pytest
import torch

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles, locate

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 4, 2, 8, 48, 16


def write_model(path, architecture: str, tensors: dict[str, np.ndarray], **metadata):
    """A tiny model with the metadata every architecture shares, plus what a test adds as `key=value`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in metadata.items():
        kinds = {str: gguf.GGUFValueType.STRING, float: gguf.GGUFValueType.FLOAT32, int: gguf.GGUFValueType.UINT32}
        writer.add_key_value(f"{architecture}.{key.replace('__', '.')}", value, kinds[type(value)])
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return ModelFiles("gguf", path, str(path))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def layer(bias: bool = False, qk_norm: bool = False) -> dict[str, np.ndarray]:
    tensors = {
        "token_embd.weight": random(VOCAB, HIDDEN),
        "output_norm.weight": random(HIDDEN),
        "blk.0.attn_norm.weight": random(HIDDEN),
        "blk.0.attn_q.weight": random(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": random(HIDDEN),
        "blk.0.ffn_gate.weight": random(FFN, HIDDEN),
        "blk.0.ffn_up.weight": random(FFN, HIDDEN),
        "blk.0.ffn_down.weight": random(HIDDEN, FFN),
    }
    if bias:
        tensors["blk.0.attn_q.bias"] = random(HEADS * HEAD_DIM)
        tensors["blk.0.attn_k.bias"] = random(KV_HEADS * HEAD_DIM)
        tensors["blk.0.attn_v.bias"] = random(KV_HEADS * HEAD_DIM)
    if qk_norm:
        tensors["blk.0.attn_q_norm.weight"] = random(HEAD_DIM)
        tensors["blk.0.attn_k_norm.weight"] = random(HEAD_DIM)
    return tensors


@pytest.fixture(scope="module")
def smollm2(transformers_smollm2):
    return open_checkpoint(locate("smollm2")), transformers_smollm2


def test_every_tensor_of_smollm2_equals_transformers(smollm2):
    checkpoint, model = smollm2
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor), name


def test_the_config_of_smollm2_equals_transformers(smollm2):
    checkpoint, model = smollm2
    config = model.config
    for key in (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        assert checkpoint.config[key] == getattr(config, key), key
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.config["rope_theta"] == config.rope_parameters["rope_theta"] == 100000.0
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["rope_scaling"] is None
    assert checkpoint.generation_config["eos_token_id"] == 2


def test_llama_rows_return_to_half_rotation_order_in_weights_and_biases(tmp_path):
    def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
        """What llama.cpp's converter does to q and k."""
        return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    original = layer(bias=True)
    stored = dict(original)
    for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        for part in ("weight", "bias"):
            stored[f"blk.0.{name}.{part}"] = interleave(original[f"blk.0.{name}.{part}"], heads)
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "llama", stored))
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v")):
        for part in ("weight", "bias"):
            tensor = checkpoint.read(f"model.layers.0.self_attn.{ours}.{part}")
            assert torch.equal(tensor, torch.from_numpy(original[f"blk.0.{theirs}.{part}"]))
    assert checkpoint.config["attention_bias"] is True


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_keeps_its_rows_and_has_its_names(tmp_path, architecture):
    tensors = layer(bias=architecture == "qwen2", qk_norm=architecture == "qwen3") | {
        "output.weight": random(VOCAB, HIDDEN)
    }
    files = write_model(tmp_path / "m.gguf", architecture, tensors, attention__key_length=HEAD_DIM)
    checkpoint = open_checkpoint(files)
    q = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
    assert torch.equal(q, torch.from_numpy(tensors["blk.0.attn_q.weight"]))
    assert torch.equal(checkpoint.read("lm_head.weight"), torch.from_numpy(tensors["output.weight"]))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.config["head_dim"] == HEAD_DIM
    extra = {"qwen2": "self_attn.k_proj.bias", "qwen3": "self_attn.k_norm.weight"}[architecture]
    assert f"model.layers.0.{extra}" in checkpoint.tensors


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_names_and_shapes_are_those_of_the_transformers_model(tmp_path, architecture):
    from transformers import AutoConfig, AutoModelForCausalLM

    tensors = layer(bias=architecture == "qwen2", qk_norm=architecture == "qwen3")
    files = write_model(tmp_path / "m.gguf", architecture, tensors, attention__key_length=HEAD_DIM)
    checkpoint = open_checkpoint(files)
    config = AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == shapes


class TestRope:
    def test_linear(self, tmp_path):
        files = write_model(
            tmp_path / "m.gguf", "llama", layer(), rope__scaling__type="linear", rope__scaling__factor=4.0
        )
        assert open_checkpoint(files).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def test_yarn(self, tmp_path):
        files = write_model(
            tmp_path / "m.gguf",
            "qwen2",
            layer(bias=True),
            rope__scaling__type="yarn",
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=32768,
        )
        assert open_checkpoint(files).config["rope_scaling"] == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        }

    def test_llama3_factors_are_passed_on(self, tmp_path):
        factors = np.array([1.0, 1.0, 2.5, 8.0], dtype=np.float32)
        files = write_model(tmp_path / "m.gguf", "llama", layer() | {"rope_freqs.weight": factors})
        checkpoint = open_checkpoint(files)
        assert checkpoint.config["rope_scaling"] == {"rope_type": "gguf_factors", "factors": factors.tolist()}
        assert "rope_freqs.weight" not in checkpoint.tensors

    def test_part_of_the_head(self, tmp_path):
        files = write_model(tmp_path / "m.gguf", "llama", layer(), rope__dimension_count=4)
        assert open_checkpoint(files).config["partial_rotary_factor"] == 0.5


def test_a_sliding_window_is_told(tmp_path):
    files = write_model(tmp_path / "m.gguf", "llama", layer(), attention__sliding_window=4096)
    assert open_checkpoint(files).config["sliding_window"] == 4096


class TestRefusals:
    def test_an_unknown_architecture_lists_the_known_ones(self, tmp_path):
        files = write_model(tmp_path / "m.gguf", "mamba", layer())
        with pytest.raises(UnsupportedModel, match="'mamba'") as caught:
            open_checkpoint(files)
        assert "llama, qwen2, qwen3" in caught.value.cause

    def test_experts(self, tmp_path):
        files = write_model(tmp_path / "m.gguf", "qwen2", layer(), expert_count=8)
        with pytest.raises(UnsupportedModel, match="mixture-of-experts"):
            open_checkpoint(files)

    def test_a_tensor_without_a_meaning_is_named(self, tmp_path):
        files = write_model(tmp_path / "m.gguf", "llama", layer() | {"blk.0.surprise.weight": random(4)})
        with pytest.raises(UnsupportedModel, match=r"blk\.0\.surprise\.weight"):
            open_checkpoint(files)

    def test_a_file_without_an_embedding(self, tmp_path):
        files = write_model(tmp_path / "m.gguf", "llama", {"output_norm.weight": random(HIDDEN)})
        with pytest.raises(BadCheckpoint, match=r"token_embd\.weight"):
            open_checkpoint(files)

    def test_a_tensor_nobody_has(self, tmp_path):
        with pytest.raises(BadCheckpoint, match="no tensor x"):
            open_checkpoint(write_model(tmp_path / "m.gguf", "llama", layer())).read("x")
