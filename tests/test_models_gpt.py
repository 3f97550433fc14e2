"""GPT-2, GPT-Neo, GPT-J and GPT-NeoX against transformers, and what their published configs mean."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.models.registry import describe

TURNING = [[["global", "local"], 1], [["global"], 1]]

CASES = {
    "gpt2": ("GPT2", {"tie_word_embeddings": True}),
    "gpt2-untied-inner": ("GPT2", {"n_inner": 72, "activation_function": "gelu", "num_attention_heads": 3}),
    "gpt2-by-layer": ("GPT2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    "gpt2-unscaled": ("GPT2", {"scale_attn_weights": False}),
    "neo": ("GPTNeo", {"attention_types": TURNING, "window_size": 9, "tie_word_embeddings": True}),
    "neo-local-untied": ("GPTNeo", {"attention_types": [[["local"], 3]], "window_size": 4, "intermediate_size": None}),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "gptj-tied-whole-head": ("GPTJ", {"rotary_dim": 12, "n_inner": 56, "tie_word_embeddings": True}),
    "neox": ("GPTNeoX", {"hidden_size": 64}),
    "neox-one-after-another": ("GPTNeoX", {"hidden_size": 64, "use_parallel_residual": False}),
    "neox-no-bias-tied": ("GPTNeoX", {"hidden_size": 64, "attention_bias": False, "tie_word_embeddings": True}),
    "neox-rope": (
        "GPTNeoX",
        {
            "hidden_act": "gelu_fast",
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
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


def test_same_logits_as_transformers(case):
    assert_same_logits(*case)


def test_gpt2_as_it_was_first_published_without_a_prefix_and_with_masks_beside_the_weights(tmp_path):
    model = write_checkpoint(tmp_path, "GPT2", tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(128, 128).tril().view(1, 1, 128, 128) for layer in range(3)}
    save_file(renamed | masks, tmp_path / "model.safetensors")
    assert_same_logits(reference_of(model), str(tmp_path))


GPT2_XL = {
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 1600,
    "n_head": 25,
    "n_layer": 48,
    "n_positions": 1024,
    "vocab_size": 50257,
}
NEO_125M = {
    "architectures": ["GPTNeoForCausalLM"],
    "activation_function": "gelu_new",
    "attention_layers": ["global", "local"] * 6,
    "attention_types": [[["global", "local"], 6]],
    "hidden_size": 768,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "num_heads": 12,
    "num_layers": 12,
    "vocab_size": 50257,
    "window_size": 256,
}
GPTJ_6B = {
    "architectures": ["GPTJForCausalLM"],
    "activation_function": "gelu_new",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary_dim": 64,
    "tie_word_embeddings": False,
    "vocab_size": 50400,
}
PYTHIA_1B = {
    "architectures": ["GPTNeoXForCausalLM"],
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 16,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}


def test_gpt2_xl():
    spec = describe(GPT2_XL)
    attention, mlp = spec.layers[47].attention, spec.layers[47].mlp
    assert (attention.heads, attention.head_dim, attention.scale, attention.rope) == (25, 64, 0.125, None)
    assert (mlp.inner, mlp.activation, mlp.transposed, spec.tie_embeddings) == (6400, "gelu_new", True, True)
    assert spec.positions.count == spec.shape.longest_context == 1024


def test_gpt_neo_125m_turns_between_all_and_the_last_256_positions():
    spec = describe(NEO_125M)
    assert [layer.attention.window for layer in spec.layers] == [None, 256] * 6
    assert (spec.layers[0].attention.scale, spec.layers[0].mlp.inner, spec.tie_embeddings) == (1.0, 3072, True)


def test_gptj_6b():
    spec = describe(GPTJ_6B)
    attention = spec.layers[0].attention
    assert (attention.head_dim, spec.ropes[0].dim, attention.neighbours, attention.bias) == (256, 64, True, False)
    assert (spec.head_bias, spec.layers[0].mlp.inner, spec.layers[0].mlp_norm) == (True, 16384, None)


def test_pythia_1b_in_the_old_words_and_in_the_new():
    old = describe(PYTHIA_1B)
    assert (old.layers[0].attention.head_dim, old.ropes[0].dim, old.ropes[0].theta) == (256, 64, 10000.0)
    assert old.layers[0].parallel and old.layers[0].attention.bias and not old.tie_embeddings
    words = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    plain = {key: value for key, value in PYTHIA_1B.items() if not key.startswith("rotary")}
    assert describe({**plain, "rope_parameters": words}).ropes[0].dim == old.ropes[0].dim
    assert describe(plain).ropes[0].dim == old.ropes[0].dim
    assert describe({**PYTHIA_1B, "rotary_pct": 1.0, "rotary_emb_base": 500}).ropes[0].theta == 500.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**GPT2_XL, "n_embd": None}, "n_embd"),
        ({**GPT2_XL, "activation_function": "squish"}, "activation_function 'squish'"),
        ({**NEO_125M, "num_layers": 11}, "attention_types make 12 layers, num_layers is 11"),
        ({**NEO_125M, "attention_types": [[["global", "linear"], 6]]}, "attention_types names 'linear'"),
        ({**NEO_125M, "attention_types": ["global"]}, "attention_types is"),
        ({**GPTJ_6B, "rotary_dim": 512}, "rotary_dim is 512"),
        ({**PYTHIA_1B, "intermediate_size": 0}, "intermediate_size"),
    ],
)
def test_what_cannot_be_is_refused_by_name(config, words):
    with pytest.raises((BadCheckpoint, UnsupportedModel)) as caught:
        describe(config)
    assert words in caught.value.message


def test_attention_to_an_encoder_is_refused():
    with pytest.raises(UnsupportedModel, match="add_cross_attention"):
        describe({**GPT2_XL, "add_cross_attention": True})
