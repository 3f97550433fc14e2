"""StableLM against transformers, and what its published configs mean."""

from __future__ import annotations

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint
from tidemill.models.registry import describe

HALF = {"partial_rotary_factor": 0.5}
CASES = {
    "stablelm": {**HALF, "num_key_value_heads": 4},
    "stablelm-qkv-bias-one-kv-head": {**HALF, "use_qkv_bias": True, "num_key_value_heads": 1},
    "stablelm-parallel": {**HALF, "use_parallel_residual": True, "tie_word_embeddings": True},
    "stablelm-12b": {**HALF, "use_parallel_residual": True, "qk_layernorm": True},
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return reference_of(write_checkpoint(folder, "StableLm", **CASES[request.param])), str(folder)


def test_same_tokens_as_transformers(case):
    assert_same_tokens(*case)


def test_logits_equal_transformers(case):
    assert_same_logits(*case)


STABLELM_2_16B = {
    "architectures": ["StableLmForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "use_qkv_bias": True,
    "vocab_size": 100352,
}
STABLELM_2_12B = {
    **STABLELM_2_16B,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "qk_layernorm": True,
    "use_parallel_residual": True,
    "use_qkv_bias": False,
}


def test_stablelm_2_16b_as_published():
    spec = describe(STABLELM_2_16B)
    layer = spec.layers[0]
    assert (layer.attention.head_dim, spec.ropes[0].dim) == (64, 16)
    assert layer.attention.bias and not layer.attention.out_bias and not layer.mlp.bias and spec.norm.bias
    assert not layer.parallel and layer.mlp_norm is not None and layer.attention.head_norm is None


def test_stablelm_2_12b_as_published():
    layer = describe(STABLELM_2_12B).layers[0]
    assert layer.parallel and layer.mlp_norm is None and not layer.attention.bias
    assert layer.attention.head_norm.per_head and not layer.attention.head_norm.norm.bias


def test_keys_old_configs_leave_out():
    spec = describe({**STABLELM_2_16B, "partial_rotary_factor": None, "layer_norm_eps": None, "use_qkv_bias": None})
    assert (spec.ropes[0].dim, spec.norm.eps, spec.layers[0].attention.bias) == (16, 1e-5, False)
    with pytest.raises(BadCheckpoint, match="num_hidden_layers"):
        describe({**STABLELM_2_16B, "num_hidden_layers": None})
