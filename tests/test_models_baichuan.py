"""Baichuan, whose code is published with its weights only: the 7B form against a transformers Llama whose weights are
stored as Baichuan stores them, the 13B form against attention with alibi written out here."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.models.falcon import alibi_slopes
from tidemill.models.registry import describe

LARGE_VOCABULARY = 100_203
SLOPES = (1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8)


def store_as_baichuan(folder, architecture, *, left_out=(), **own):
    """Rewrite a Llama checkpoint: q, k and v in W_pack, and a config with the keys Baichuan has."""
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("q_proj.weight")]:
        parts = [stored.pop(name.replace("q_proj", kind)) for kind in ("q_proj", "k_proj", "v_proj")]
        stored[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    save_file(stored, folder / "model.safetensors")
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_act")
    kept += ("max_position_embeddings", "rms_norm_eps", "initializer_range", "tie_word_embeddings")
    llama = json.loads((folder / "config.json").read_text())
    config = {key: llama[key] for key in kept if key not in left_out}
    config |= {"architectures": [architecture], "model_type": "baichuan", "model_max_length": 128, **own}
    (folder / "config.json").write_text(json.dumps(config))
    return stored


def rotating(folder, vocab_size, architecture):
    model = write_checkpoint(folder, "Llama", num_key_value_heads=4, vocab_size=vocab_size, rms_norm_eps=1e-6)
    store_as_baichuan(folder, architecture)
    if vocab_size == LARGE_VOCABULARY:
        with torch.no_grad():
            model.lm_head.weight /= model.lm_head.weight.norm(dim=1, keepdim=True)
    return reference_of(model)


def with_alibi(folder):
    """The 13B form, with six heads so that their slopes are not all of one series."""
    write_checkpoint(folder, "Llama", num_attention_heads=6, num_key_value_heads=6, rms_norm_eps=1e-6)
    weights = store_as_baichuan(folder, "BaichuanForCausalLM", left_out=("max_position_embeddings",))
    return lambda ids: alibi_logits(weights, ids[0])[None]


def alibi_logits(weights, tokens):
    heads, length = len(SLOPES), len(tokens)
    x = weights["model.embed_tokens.weight"][tokens]
    positions = torch.arange(length)
    distance = (positions[:, None] - positions[None, :]).float()
    bias = -torch.tensor(SLOPES)[:, None, None] * distance
    bias = bias.masked_fill(distance < 0, float("-inf"))

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weights[f"{name}.weight"]

    for layer in range(3):
        name = f"model.layers.{layer}"
        packed = norm(x, f"{name}.input_layernorm") @ weights[f"{name}.self_attn.W_pack.weight"].T
        q, k, v = (part.view(length, heads, -1).transpose(0, 1) for part in packed.chunk(3, dim=-1))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]) + bias
        attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
        x = x + attended @ weights[f"{name}.self_attn.o_proj.weight"].T
        inner = norm(x, f"{name}.post_attention_layernorm")
        gate = F.silu(inner @ weights[f"{name}.mlp.gate_proj.weight"].T)
        inner = gate * (inner @ weights[f"{name}.mlp.up_proj.weight"].T)
        x = x + inner @ weights[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ weights["lm_head.weight"].T


CASES = {
    "7b": lambda folder: rotating(folder, 203, "BaiChuanForCausalLM"),
    "2-7b": lambda folder: rotating(folder, LARGE_VOCABULARY, "BaichuanForCausalLM"),
    "13b": with_alibi,
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return CASES[request.param](folder), str(folder)


def test_same_tokens_as_the_reference(case):
    assert_same_tokens(*case)


def test_same_logits_as_the_reference(case):
    assert_same_logits(*case)


BAICHUAN2_7B = {
    "architectures": ["BaichuanForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_max_length": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "vocab_size": 125696,
}
BAICHUAN2_13B = {
    **{key: value for key, value in BAICHUAN2_7B.items() if key != "max_position_embeddings"},
    "hidden_size": 5120,
    "intermediate_size": 13696,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
}


def test_baichuan2_7b_rotates_and_normalises_its_head():
    spec = describe(BAICHUAN2_7B)
    assert (spec.layers[0].attention.head_dim, spec.layers[0].attention.kv_heads) == (128, 32)
    assert (spec.alibi, spec.ropes[0].dim, spec.normalise_head, spec.max_position) == (None, 128, True, 4096)


def test_baichuan2_13b_has_alibi_in_forty_heads():
    spec = describe(BAICHUAN2_13B)
    assert (spec.alibi, spec.ropes, spec.normalise_head, spec.max_position) == (alibi_slopes(40), (), True, 4096)
    assert math.isclose(spec.alibi[0], 2**-0.25) and math.isclose(spec.alibi[32], 2**-0.125)


@pytest.mark.parametrize("config", [BAICHUAN2_7B, BAICHUAN2_13B])
def test_the_first_baichuan_has_a_plain_head(config):
    assert not describe({**config, "vocab_size": 64000}).normalise_head


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(BadCheckpoint, match="intermediate_size"):
        describe({**BAICHUAN2_7B, "intermediate_size": None})
    with pytest.raises(UnsupportedModel, match="tie_word_embeddings"):
        describe({**BAICHUAN2_7B, "tie_word_embeddings": True})
