"""Gemma 1, 2 and 3 against transformers, and what their published configs mean."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from tests.helpers.checkpoints import TINY, write_checkpoint, write_model
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.layers.linear import Embedding
from tidemill.layers.parameter import Placement
from tidemill.models.registry import describe

TIED = {"tie_word_embeddings": True, "initializer_range": 0.1}
SLIDING = {**TIED, "head_dim": 16, "sliding_window": 11, "num_hidden_layers": 4, "query_pre_attn_scalar": 24}

CASES = {
    "gemma": ("Gemma", {**TIED, "head_dim": 20, "num_key_value_heads": 1}),
    "gemma-biases-untied": ("Gemma", {"head_dim": 12, "attention_bias": True, "initializer_range": 0.1}),
    "gemma2": ("Gemma2", {**SLIDING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2-uncapped": ("Gemma2", {**SLIDING, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("Gemma3", {**SLIDING, "sliding_window_pattern": 3, "attention_bias": True}),
    "gemma3-scaled": (
        "Gemma3",
        {
            **SLIDING,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
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


def test_the_text_part_of_a_model_of_text_and_images(tmp_path):
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**TINY, **SLIDING},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = write_model(tmp_path, transformers.Gemma3ForConditionalGeneration(config))
    assert_same_logits(reference_of(model), str(tmp_path))


def test_the_scale_of_the_embedding_is_rounded_as_it_was_in_training():
    embedding = Embedding(
        "e", 1, 3072, Placement(torch.bfloat16, torch.device("cpu")), describe(GEMMA_7B).embedding_scale
    )
    embedding.weight.fill_(1.0)
    assert set(embedding(torch.tensor([0]))[0].tolist()) == {55.5}, "and not the square root of 3072, 55.43"


def test_old_and_new_spellings_of_the_two_rotations_agree(tmp_path):
    family, config = CASES["gemma3-scaled"]
    write_checkpoint(tmp_path, family, **config)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }
    for one, other in zip(describe(new).ropes, describe(old).ropes, strict=True):
        assert (one.kind, one.theta, one.dim, one.parameters.get("factor")) == (
            other.kind,
            other.theta,
            other.dim,
            other.parameters.get("factor"),
        )


GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "vocab_size": 256000,
}
GEMMA_7B = {
    **GEMMA_2B,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 16,
}
GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}


def windows(spec):
    return [layer.attention.window for layer in spec.layers]


def test_gemma_2b_as_published():
    spec = describe(GEMMA_2B)
    attention = spec.layers[0].attention
    assert (attention.head_dim, attention.kv_heads, attention.scale) == (256, 1, 1 / 16)
    assert spec.layers[0].mlp.activation == "gelu_pytorch_tanh", "published as gelu, trained with its approximation"
    assert spec.tie_embeddings and spec.embedding_scale == 2048**0.5 and spec.max_position == 8192
    assert set(windows(spec)) == {None} and spec.norm.unit_offset


def test_gemma2_9b_as_published():
    spec = describe(GEMMA2_9B)
    assert windows(spec) == [4096, None] * 21
    assert (spec.layers[0].attention.soft_cap, spec.logit_soft_cap) == (50.0, 30.0)
    assert spec.tie_embeddings and spec.layers[0].after_attention == "post_attention_layernorm"


def test_gemma2_27b_scales_by_its_own_number():
    spec = describe({**GEMMA2_9B, "head_dim": 128, "num_attention_heads": 32, "query_pre_attn_scalar": 144})
    assert spec.layers[0].attention.scale == pytest.approx(1 / 12)


def test_gemma3_1b_as_published():
    spec = describe(GEMMA3_1B)
    assert windows(spec)[:12] == ([512] * 5 + [None]) * 2
    assert [layer.attention.rope for layer in spec.layers[:6]] == [1] * 5 + [0]
    assert [(rope.kind, rope.theta) for rope in spec.ropes] == [("default", 1e6), ("default", 1e4)]
    assert spec.logit_soft_cap is None and spec.shape.longest_context == 32768


def test_gemma3_4b_leaves_out_what_transformers_takes_for_granted():
    spec = describe(GEMMA3_4B)
    attention = spec.layers[0].attention
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.scale) == (8, 4, 256, 1 / 16)
    assert (spec.vocab_size, spec.max_position, spec.shape.longest_context) == (262208, 131072, 131072)
    assert windows(spec).count(None) == 5 and len(spec.layers) == 34 and spec.tie_embeddings
    assert [(rope.kind, rope.theta) for rope in spec.ropes] == [("linear", 1e6), ("default", 1e4)]


def test_what_gemma_does_not_do_here_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention"):
        describe({**GEMMA3_1B, "use_bidirectional_attention": True})
    with pytest.raises(UnsupportedModel, match="attn_logit_softcapping"):
        describe({**GEMMA3_1B, "attn_logit_softcapping": 50.0})
    with pytest.raises(BadCheckpoint, match="rope_parameters"):
        describe({**GEMMA3_1B, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    with pytest.raises(BadCheckpoint, match="hidden_size"):
        describe({**GEMMA2_9B, "hidden_size": None})
