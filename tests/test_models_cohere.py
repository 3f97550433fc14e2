"""Cohere's Command models against transformers, and what their published configs mean."""

from __future__ import annotations

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.models.registry import describe

TIED = {"tie_word_embeddings": True, "eos_token_id": 0, "bos_token_id": 0}
CASES = {
    "cohere": ("Cohere", {**TIED, "logit_scale": 0.4, "num_key_value_heads": 4}),
    "cohere-qk-norm": ("Cohere", {**TIED, "logit_scale": 1.5, "use_qk_norm": True}),
    "cohere-biases-untied": ("Cohere", {**TIED, "attention_bias": True, "tie_word_embeddings": False}),
    "cohere2": (
        "Cohere2",
        {**TIED, "logit_scale": 0.25, "sliding_window": 11, "num_hidden_layers": 4, "sliding_window_pattern": 3},
    ),
    "cohere2-one-kv-head": (
        "Cohere2",
        {
            **TIED,
            "sliding_window": 9,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    family, config = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return reference_of(write_checkpoint(folder, family, **config)), str(folder)


def test_same_tokens_as_transformers(case):
    assert_same_tokens(*case)


def test_logits_equal_transformers(case):
    assert_same_logits(*case)


COMMAND_R = {
    "architectures": ["CohereForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
    "use_qk_norm": False,
    "vocab_size": 256000,
}
COMMAND_R_PLUS = {
    **COMMAND_R,
    "hidden_size": 12288,
    "intermediate_size": 33792,
    "logit_scale": 0.8333333333333334,
    "num_attention_heads": 96,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rope_theta": 75000000.0,
    "use_qk_norm": True,
}
COMMAND_A = {
    "architectures": ["Cohere2ForCausalLM"],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 12288,
    "intermediate_size": 36864,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 131072,
    "num_attention_heads": 96,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "vocab_size": 256000,
}


def test_command_r_as_published():
    spec = describe(COMMAND_R)
    layer = spec.layers[0]
    assert spec.tie_embeddings and spec.logit_scale == 1 / 16 and spec.max_position == 131072
    assert layer.parallel and layer.mlp_norm is None and layer.attention.neighbours
    assert layer.attention.head_norm is None and layer.attention.window is None and not spec.norm.bias


def test_command_r_plus_normalises_every_head_by_its_own_weights():
    spec = describe(COMMAND_R_PLUS)
    attention = spec.layers[0].attention
    assert attention.head_norm.per_head and (attention.head_dim, attention.kv_heads) == (128, 8)
    assert spec.logit_scale == pytest.approx(5 / 6)


def test_command_a_turns_only_where_it_slides():
    spec = describe(COMMAND_A)
    assert [layer.attention.window for layer in spec.layers[:8]] == [4096, 4096, 4096, None] * 2
    assert [layer.attention.rope for layer in spec.layers[:8]] == [0, 0, 0, None] * 2


def test_what_the_configs_leave_out():
    short = {key: value for key, value in COMMAND_A.items() if key not in ("logit_scale", "sliding_window_pattern")}
    spec = describe(short)
    assert spec.logit_scale == 0.0625 and [layer.attention.window for layer in spec.layers[:4]] == [4096] * 3 + [None]
    with pytest.raises(BadCheckpoint, match="sliding_window"):
        describe({**COMMAND_A, "sliding_window": None})


@pytest.mark.parametrize(
    ("key", "value"), [("use_parallel_block", False), ("rotary_pct", 0.5), ("position_embedding_type", "alibi")]
)
def test_switches_the_model_knows_in_one_position_are_refused_in_another(key, value):
    with pytest.raises(UnsupportedModel, match=key) as caught:
        describe({**COMMAND_A, key: value})
    assert caught.value.param == key
