"""InternLM 2 and 3, whose code is published with their weights only, against a transformers Llama whose weights are
stored as InternLM stores them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import greedy, write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill import LLM, SamplingParams
from tidemill.errors import BadCheckpoint
from tidemill.models.registry import describe

SECOND = {
    "model.embed_tokens": "model.tok_embeddings",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "lm_head": "output",
}
"""What InternLM 2 calls Llama's tensors."""


def store_as_internlm2(folder, **own):
    stored = load_file(folder / "model.safetensors")
    llama = json.loads((folder / "config.json").read_text())
    kv_heads, head_dim = llama["num_key_value_heads"], llama["head_dim"]
    renamed = {}
    for name, tensor in stored.items():
        if "q_proj" in name:
            q, k, v = (stored[name.replace("q_proj", kind)] for kind in ("q_proj", "k_proj", "v_proj"))
            groups = [part.unflatten(0, (kv_heads, -1, head_dim)) for part in (q, k, v)]
            packed = torch.cat(groups, dim=1).flatten(0, 2)
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = packed
        elif "k_proj" not in name and "v_proj" not in name:
            for old, new in SECOND.items():
                name = name.replace(old, new)
            renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")
    write_config(folder, llama, "InternLM2ForCausalLM", bias=llama["attention_bias"], **own)


def write_config(folder, llama, architecture, **own):
    words = ("architectures", "attention_bias", "mlp_bias", "rope_parameters")
    config = {key: value for key, value in llama.items() if key not in words}
    rope = llama["rope_parameters"]
    if rope["rope_type"] != "default":
        config["rope_scaling"] = {"type": rope["rope_type"], "factor": rope["factor"]}
    config |= {"architectures": [architecture], "model_type": architecture.removesuffix("ForCausalLM").lower()}
    config |= {"rope_theta": rope["rope_theta"], **own}
    (folder / "config.json").write_text(json.dumps(config))


def second(folder, **config):
    model = write_checkpoint(folder, "Llama", **config)
    store_as_internlm2(folder)
    return model


def third(folder, qkv_bias, bias):
    """A Llama has one switch for all biases of its attention; the one that is off here is a bias of zero there."""
    model = write_checkpoint(folder, "Llama", attention_bias=True, mlp_bias=bias, head_dim=16)
    off = [("q_proj.bias", "k_proj.bias", "v_proj.bias")] * (not qkv_bias) + [("o_proj.bias",)] * (not bias)
    stored = load_file(folder / "model.safetensors")
    for name, tensor in model.named_parameters():
        if any(name.endswith(ends) for ends in off):
            tensor.data.zero_()
            del stored[name]
    save_file(stored, folder / "model.safetensors")
    llama = json.loads((folder / "config.json").read_text())
    write_config(folder, llama, "InternLM3ForCausalLM", qkv_bias=qkv_bias, bias=bias)
    return model


DYNAMIC = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 5000.0}

CASES = {
    "2": lambda folder: second(folder),
    "2-bias-one-key-head": lambda folder: second(folder, attention_bias=True, num_key_value_heads=1),
    "2-all-heads-tied": lambda folder: second(folder, num_key_value_heads=4, tie_word_embeddings=True),
    "2.5-dynamic": lambda folder: second(folder, rope_parameters=DYNAMIC),
    "3-qkv-bias": lambda folder: third(folder, qkv_bias=True, bias=False),
    "3-other-bias": lambda folder: third(folder, qkv_bias=False, bias=True),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return reference_of(CASES[request.param](folder)), str(folder)


def test_same_tokens_as_a_llama(case):
    assert_same_tokens(*case)


def test_same_logits_as_a_llama(case):
    assert_same_logits(*case)


def test_rotation_stretches_beyond_the_trained_length(tmp_path):
    model = second(tmp_path, max_position_embeddings=32, rope_parameters=DYNAMIC)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=96)
    prompt = list(range(3, 53))
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == greedy(model, prompt, 20)


INTERNLM2_5_7B = {
    "architectures": ["InternLM2ForCausalLM"],
    "bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "vocab_size": 92544,
}
INTERNLM3_8B = {
    "architectures": ["InternLM3ForCausalLM"],
    "bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "qkv_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    "rope_theta": 50000000,
    "tie_word_embeddings": False,
    "vocab_size": 128512,
}


def test_internlm2_5_7b():
    spec = describe(INTERNLM2_5_7B)
    attention = spec.layers[0].attention
    assert (attention.kv_heads, attention.head_dim, attention.bias, attention.out_bias) == (8, 128, False, False)
    assert (spec.ropes[0].kind, spec.ropes[0].theta, spec.shape.longest_context) == ("dynamic", 1e6, 65536)
    assert (spec.max_position, spec.head, spec.norm.eps) == (32768, "output", 1e-5)


def test_internlm2_without_a_word_on_biases_has_them_in_its_attention_alone():
    plain = {key: value for key, value in INTERNLM2_5_7B.items() if key != "bias"}
    layer = describe(plain).layers[0]
    assert (layer.attention.bias, layer.attention.out_bias, layer.mlp.bias) == (True, True, False)


def test_internlm3_8b():
    spec = describe(INTERNLM3_8B)
    attention = spec.layers[0].attention
    assert (attention.kv_heads, attention.head_dim, attention.bias, attention.grouped) == (2, 128, False, False)
    assert (len(spec.layers), spec.head, spec.shape.longest_context) == (48, "lm_head", 196608)


@pytest.mark.parametrize("config", [INTERNLM2_5_7B, INTERNLM3_8B])
def test_heads_that_cannot_be_shared_are_refused(config):
    with pytest.raises(BadCheckpoint, match="evenly"):
        describe({**config, "num_key_value_heads": 5})
