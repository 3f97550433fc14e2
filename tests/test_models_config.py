"""config.json as people publish it: missing keys, old and new spellings, and what cannot work, told before loading."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tidemill import LLM
from tidemill.errors import BadCheckpoint, ConfigError, UnsupportedModel
from tidemill.models.registry import describe

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def read(**changes):
    return describe({**BASE, **changes})


def windows(**changes):
    return [layer.attention.window for layer in read(**changes).layers]


def test_keys_that_old_configs_leave_out_get_transformers_defaults():
    spec = read(num_key_value_heads=None, head_dim=None, rms_norm_eps=None, hidden_act=None, rope_scaling=None)
    attention, mlp = spec.layers[0].attention, spec.layers[0].mlp
    assert (attention.kv_heads, attention.head_dim, spec.norm.eps, mlp.activation) == (4, 16, 1e-6, "silu")
    assert (spec.max_position, spec.ropes[0].kind, spec.ropes[0].theta) == (2048, "default", 10000.0)
    assert not spec.tie_embeddings and not attention.bias and not attention.out_bias and not mlp.bias
    assert windows() == [None, None]


def test_old_and_new_spellings_of_rope():
    old = read(rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 2.0}).ropes[0]
    new = read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}).ropes[0]
    assert (old.kind, old.theta, old.parameters["factor"]) == ("linear", 5000.0, 2.0)
    assert (new.kind, new.theta, new.parameters["factor"]) == ("linear", 5000.0, 2.0)


def test_families_differ_where_they_should():
    qwen2 = read(architectures=["Qwen2ForCausalLM"]).layers[0].attention
    assert qwen2.bias and not qwen2.out_bias and qwen2.head_norm is None
    assert read(architectures=["Qwen3ForCausalLM"]).layers[0].attention.head_norm is not None
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
    assert windows(**mistral, sliding_window=8) == [8, 8]
    assert windows(**mistral, sliding_window=None) == [None, None]
    assert windows(**mistral) == [4096, 4096], "what Mistral means when it does not say"
    assert windows(architectures=["Qwen2ForCausalLM"], sliding_window=8) == [None, None]
    some = {"use_sliding_window": True, "max_window_layers": 1}
    assert windows(architectures=["Qwen2ForCausalLM"], **some, sliding_window=8) == [None, 8]
    assert windows(architectures=["Qwen2ForCausalLM"], **some) == [None, 4096]
    mixed = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    assert windows(architectures=["Qwen3ForCausalLM"], **mixed) == [None, 8]


def test_a_kind_of_layer_nobody_knows_is_refused():
    with pytest.raises(UnsupportedModel, match="chunked_attention") as caught:
        windows(
            architectures=["MistralForCausalLM"],
            num_key_value_heads=4,
            sliding_window=8,
            layer_types=["chunked_attention"] * 2,
        )
    assert caught.value.param == "layer_types" and caught.value.fix == "--model-impl transformers"


PUBLISHED = {
    "TinyLlama-1.1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_attention_heads": 32,
            "num_hidden_layers": 22,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "vocab_size": 32000,
        },
        {"heads": 32, "kv_heads": 4, "head_dim": 64, "bias": False, "window": None},
    ),
    "Yi-6B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 4,
            "rope_theta": 5000000.0,
            "vocab_size": 64000,
        },
        {"heads": 32, "kv_heads": 4, "head_dim": 128, "bias": False, "window": None},
    ),
    "Orca-2-13b": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "max_position_embeddings": 4096,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 40,
            "pretraining_tp": 1,
            "vocab_size": 32003,
        },
        {"heads": 40, "kv_heads": 40, "head_dim": 128, "bias": False, "window": None},
    ),
    "Qwen1.5-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"heads": 32, "kv_heads": 32, "head_dim": 128, "bias": True, "window": None},
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
        {"heads": 32, "kv_heads": 8, "head_dim": 128, "bias": False, "window": 4096},
    ),
    "Mistral-Nemo-2407": (
        {
            "architectures": ["MistralForCausalLM"],
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        {"heads": 32, "kv_heads": 8, "head_dim": 128, "bias": False, "window": None},
    ),
    "Mistral-Small-24B-2501": (
        {
            "architectures": ["MistralForCausalLM"],
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rope_theta": 100000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        {"heads": 32, "kv_heads": 8, "head_dim": 128, "bias": False, "window": None},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_llama_shaped_models_as_published(name):
    raw, want = PUBLISHED[name]
    spec = describe(raw)
    attention = spec.layers[-1].attention
    assert {key: getattr(attention, key) for key in want} == want
    assert (len(spec.layers), spec.max_position) == (
        raw["num_hidden_layers"],
        raw.get("max_position_embeddings", 2048),
    )
    assert spec.ropes[0].theta == raw.get("rope_theta", 10000.0)


def test_the_text_parts_of_mistral_models_of_text_and_images():
    small = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "model_type": "mistral",
            "num_hidden_layers": 40,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "vocab_size": 131072,
        },
        "vision_config": {"hidden_size": 1024, "num_attention_heads": 16},
    }
    spec = describe(small)
    attention = spec.layers[0].attention
    assert spec.architecture == "MistralForCausalLM" and attention.query_growth is None
    # Saved again by transformers, a part leaves out what equals its defaults.
    assert (attention.heads, attention.kv_heads, attention.window, spec.max_position) == (32, 8, None, 131072)

    ministral = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {
            "hidden_size": 3072,
            "intermediate_size": 9216,
            "model_type": "ministral3",
            "num_hidden_layers": 26,
            "tie_word_embeddings": True,
        },
    }
    spec = describe(ministral)
    attention, (rope,) = spec.layers[0].attention, spec.ropes
    assert (attention.head_dim, attention.kv_heads, attention.query_growth) == (128, 8, (0.1, 16384))
    assert (rope.kind, rope.theta, rope.parameters["factor"], spec.norm.eps) == ("yarn", 1e6, 16.0, 1e-5)
    assert spec.max_position == spec.shape.longest_context == 262144 and spec.tie_embeddings


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
    assert read(max_position_embeddings=1000, rope_scaling=rope).shape.longest_context == longest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"hidden_act": "squish"}, "hidden_act 'squish'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope type 'spiral'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear needs factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "short_factor has 1"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "num_key_value_heads": 4,
                "sliding_window": 8,
                "layer_types": ["sliding_attention"],
            },
            "layer_types has 1",
        ),
    ],
)
def test_what_cannot_work_is_told_by_name(changes, words):
    with pytest.raises((BadCheckpoint, UnsupportedModel), match=words):
        read(**changes)


def test_a_length_beyond_the_rope_is_refused_with_the_limit(tmp_path):
    write_checkpoint(tmp_path, "Llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert LLM(str(tmp_path), dtype="float32", max_model_len=256).config.max_model_len == 256
    with pytest.raises(ConfigError) as caught:
        LLM(str(tmp_path), dtype="float32", max_model_len=257)
    assert caught.value.fix == "--max-model-len 256"


@pytest.mark.parametrize("mark", ["config", "dtype"])
def test_quantised_safetensors_are_refused_not_misread(tmp_path, mark):
    write_checkpoint(tmp_path, "Llama")
    if mark == "config":
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "awq"}}))
    else:
        weights = load_file(tmp_path / "model.safetensors")
        name = "model.layers.0.mlp.down_proj.weight"
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    words = "announces awq weights, and none" if mark == "config" else "is F8_E4M3, packed numbers whose scales"
    with pytest.raises(BadCheckpoint, match=words):
        LLM(str(tmp_path), dtype="float32")
