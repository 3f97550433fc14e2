"""Falcon against transformers, and what its published configs mean."""

from __future__ import annotations

import math

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.models.falcon import alibi_slopes
from tidemill.models.registry import describe

RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}

CASES = {
    "7b": {"tie_word_embeddings": True},
    "7b-bias-inner": {"bias": True, "ffn_hidden_size": 72, "activation": "gelu_pytorch_tanh"},
    "40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon2-11b": {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    "rw": RW,
    # Up to eight heads, every slope and every product is a number that bfloat16 holds, to which transformers rounds.
    "rw-six-heads": {**RW, "num_attention_heads": 6, "tie_word_embeddings": True},
    "alibi-one-key-head": {"alibi": True, "parallel_attn": False},
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return reference_of(write_checkpoint(folder, "Falcon", **CASES[request.param])), str(folder)


def test_same_tokens_as_transformers(case):
    assert_same_tokens(*case)


def test_same_logits_as_transformers(case):
    assert_same_logits(*case)


FALCON_7B = {
    "architectures": ["FalconForCausalLM"],
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "bias": False,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "vocab_size": 65024,
}
FALCON_40B = {
    **FALCON_7B,
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
FALCON2_11B = {
    **FALCON_7B,
    "activation": "gelu",
    "ffn_hidden_size": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "num_ln_in_parallel_attn": 1,
    "rope_theta": 500042.0,
    "tie_word_embeddings": False,
}
FALCON_RW_1B = {
    **FALCON_7B,
    "alibi": True,
    "bias": True,
    "hidden_size": 2048,
    "multi_query": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
    "vocab_size": 50304,
}


def test_falcon_7b():
    spec = describe(FALCON_7B)
    layer = spec.layers[0]
    assert (layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim) == (71, 1, 64)
    assert (layer.input_norm, layer.mlp_norm, layer.parallel) == ("input_layernorm", None, True)
    assert (layer.mlp.inner, layer.mlp.bias, spec.tie_embeddings) == (18176, False, True)
    assert (spec.max_position, spec.ropes[0].dim) == (2048, 64)


def test_falcon_40b_has_eight_key_heads_and_two_norms():
    layer = describe(FALCON_40B).layers[0]
    assert (layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim) == (128, 8, 64)
    assert (layer.input_norm, layer.mlp_norm, layer.parallel) == ("ln_attn", "ln_mlp", True)


def test_falcon2_11b_has_eight_key_heads_and_one_norm():
    spec = describe(FALCON2_11B)
    layer = spec.layers[0]
    assert (layer.attention.kv_heads, layer.attention.head_dim, layer.mlp.inner) == (8, 128, 16384)
    assert (layer.input_norm, layer.mlp_norm, layer.parallel) == ("input_layernorm", None, True)
    assert (spec.ropes[0].theta, spec.max_position, spec.tie_embeddings) == (500042.0, 8192, False)


def test_falcon_rw_1b_has_alibi_and_biases():
    spec = describe(FALCON_RW_1B)
    layer = spec.layers[0]
    assert (layer.attention.kv_heads, layer.attention.head_dim, layer.attention.rope, spec.ropes) == (32, 64, None, ())
    assert (layer.mlp_norm, layer.parallel, layer.mlp.bias) == ("post_attention_layernorm", False, True)
    assert len(spec.alibi) == 32 and math.isclose(spec.alibi[0], 2**-0.25 / 8) and math.isclose(spec.alibi[-1], 2**-11)


def test_slopes_of_any_number_of_heads():
    assert alibi_slopes(1) == (2**-8,)
    assert alibi_slopes(8) == tuple(2.0**-power for power in range(1, 9))
    assert alibi_slopes(6) == (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)
    assert len(alibi_slopes(71)) == len(set(alibi_slopes(71))) == 71


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**FALCON_7B, "num_attention_heads": None}, "num_attention_heads"),
        ({**FALCON_40B, "num_kv_heads": 7}, "evenly"),
        ({**FALCON_40B, "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3"),
        ({**FALCON_7B, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config, words):
    with pytest.raises(BadCheckpoint) as caught:
        describe(config)
    assert words in caught.value.message


def test_a_residual_behind_the_norm_is_refused():
    with pytest.raises(UnsupportedModel, match="apply_residual_connection_post_layernorm"):
        describe({**FALCON_7B, "apply_residual_connection_post_layernorm": True})
