"""OPT against transformers, and what its published configs mean."""

from __future__ import annotations

import pytest

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint
from tidemill.models.registry import describe

SMALL = {"ffn_dim": 80, "init_std": 0.25}

CASES = {
    "tied": {"tie_word_embeddings": True},
    "untied-gelu": {"activation_function": "gelu", "num_attention_heads": 3},
    "norms-after-narrow-embedding": {
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 32,
        "tie_word_embeddings": True,
    },
    "norms-before-narrow-embedding": {"word_embed_proj_dim": 64},
    "no-bias-nothing-learned-in-norms": {"enable_bias": False, "layer_norm_elementwise_affine": False},
    "no-final-norm": {"_remove_final_layer_norm": True},
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return reference_of(write_checkpoint(folder, "OPT", **SMALL, **CASES[request.param])), str(folder)


def test_same_tokens_as_transformers(case):
    assert_same_tokens(*case)


def test_same_logits_as_transformers(case):
    assert_same_logits(*case)


OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M = {
    **OPT_125M,
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}


def test_opt_125m():
    spec = describe(OPT_125M)
    attention, layer = spec.layers[0].attention, spec.layers[0]
    assert (attention.head_dim, attention.scale, attention.bias, attention.out_bias) == (64, 0.125, True, True)
    assert (layer.mlp.inner, layer.mlp.activation, layer.normalise_after) == (3072, "relu", False)
    assert (spec.positions.count, spec.positions.offset, spec.max_position) == (2048, 2, 2048)
    assert spec.tie_embeddings and spec.final_norm is not None and spec.norm.bias
    assert spec.embedding_size == spec.hidden_size


def test_opt_350m_normalises_after_and_has_a_narrow_embedding():
    spec = describe(OPT_350M)
    assert spec.layers[0].normalise_after and spec.final_norm is None
    assert (spec.hidden_size, spec.embedding_size) == (1024, 512)


def test_keys_of_old_configs():
    assert describe({**OPT_125M, "word_embed_proj_dim": None}).embedding_size == 768
    assert describe({**OPT_125M, "_remove_final_layer_norm": True}).final_norm is None


def test_missing_size_is_named():
    with pytest.raises(BadCheckpoint, match="ffn_dim"):
        describe({**OPT_125M, "ffn_dim": None})
