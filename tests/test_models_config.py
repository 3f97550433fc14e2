"""config.json as people publish it: missing keys, old and new spellings, and what cannot work, told before loading."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tidemill import LLM
from tidemill.errors import BadCheckpoint, ConfigError, UnsupportedModel
from tidemill.models.registry import decoder_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def read(**changes):
    return decoder_config({**BASE, **changes})


def test_keys_that_old_configs_leave_out_get_transformers_defaults():
    config = read(num_key_value_heads=None, head_dim=None, rms_norm_eps=None, hidden_act=None, rope_scaling=None)
    assert (config.num_kv_heads, config.head_dim, config.norm_eps, config.activation) == (4, 16, 1e-6, "silu")
    assert (config.max_position, config.rope.kind, config.rope.theta) == (2048, "default", 10000.0)
    assert not config.tie_embeddings and not config.attention_bias and config.windows == (None, None)


def test_old_and_new_spellings_of_rope():
    old = read(rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0})
    assert (old.rope.kind, old.rope.theta, old.rope.parameters["factor"]) == ("linear", 5000.0, 2.0)
    assert (new.rope.kind, new.rope.theta, new.rope.parameters["factor"]) == ("linear", 5000.0, 2.0)


def test_families_differ_where_they_should():
    assert read(architectures=["Qwen2ForCausalLM"]).attention_bias
    assert not read(architectures=["Qwen2ForCausalLM"]).output_bias
    assert read(architectures=["Qwen3ForCausalLM"]).qk_norm
    assert read(architectures=["MistralForCausalLM"], sliding_window=8).windows == (8, 8)
    assert read(architectures=["MistralForCausalLM"], sliding_window=None).windows == (None, None)
    assert read(architectures=["Qwen2ForCausalLM"], sliding_window=8).windows == (None, None)
    mixed = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    assert read(architectures=["Qwen3ForCausalLM"], **mixed).windows == (None, 8)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        (None, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 4000),
        ({"rope_type": "dynamic", "factor": 2.0}, 2000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
    ],
)
def test_scaled_ropes_reach_further_than_the_config_says(rope, longest):
    assert read(max_position_embeddings=1000, rope_scaling=rope).longest_context == longest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"hidden_act": "squish"}, "hidden_act 'squish'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear needs factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "short_factor has 1"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["sliding_attention"]},
            "layer_types has 1",
        ),
    ],
)
def test_what_cannot_work_is_told_by_name(changes, words):
    with pytest.raises(BadCheckpoint, match=words):
        read(**changes)


def test_a_length_beyond_the_rope_is_refused_with_the_limit(tmp_path):
    write_checkpoint(tmp_path, "Llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert LLM(str(tmp_path), dtype="float32", max_model_len=256).config.max_model_len == 256
    with pytest.raises(ConfigError) as caught:
        LLM(str(tmp_path), dtype="float32", max_model_len=257)
    assert caught.value.fix == "--max-model-len 256"


@pytest.mark.parametrize("mark", ["config", "dtype"])
def test_quantised_safetensors_are_refused_not_misread(tmp_path, mark):
    import json

    import torch

    write_checkpoint(tmp_path, "Llama")
    if mark == "config":
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "awq"}}))
    else:
        weights = load_file(tmp_path / "model.safetensors")
        name = "model.layers.0.mlp.down_proj.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="quantised") as caught:
        LLM(str(tmp_path), dtype="float32")
    assert ("awq" if mark == "config" else "F8_E4M3") in caught.value.cause
