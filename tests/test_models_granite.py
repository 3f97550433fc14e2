"""Granite 3 against transformers, and what its published config means."""

from __future__ import annotations

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint
from tidemill.models.registry import describe

MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.3,
}
CASES = {
    "granite": MULTIPLIERS,
    "granite-tied-one-kv-head": {**MULTIPLIERS, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "granite-biases": {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.3, "logits_scaling": 5.0},
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return reference_of(write_checkpoint(folder, "Granite", **CASES[request.param])), str(folder)


def test_same_tokens_as_transformers(case):
    assert_same_tokens(*case)


def test_logits_equal_transformers(case):
    assert_same_logits(*case)


GRANITE_31_8B = {
    "architectures": ["GraniteForCausalLM"],
    "attention_bias": False,
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49155,
}


def test_granite_31_8b_as_published():
    spec = describe(GRANITE_31_8B)
    layer = spec.layers[-1]
    assert (spec.embedding_scale, layer.attention.scale, layer.residual_scale) == (12.0, 1 / 128, 0.22)
    assert spec.logit_scale == 1 / 16, "the config gives a divisor"
    assert (layer.attention.head_dim, spec.ropes[0].theta, spec.tie_embeddings) == (128, 1e7, True)


def test_what_the_config_leaves_out_multiplies_by_one():
    spec = describe({key: value for key, value in GRANITE_31_8B.items() if not key.endswith(("multiplier", "scaling"))})
    assert spec.embedding_scale == spec.logit_scale == spec.layers[0].attention.scale == 1.0
    assert spec.layers[0].residual_scale == 1.0


def test_a_multiplier_that_is_no_number_is_told_by_name():
    with pytest.raises(BadCheckpoint, match="residual_multiplier is 'small'"):
        describe({**GRANITE_31_8B, "residual_multiplier": "small"})
