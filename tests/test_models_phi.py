"""Phi-1 to Phi-2 and Phi-3 to Phi-4-mini against transformers, and what their published configs mean."""

from __future__ import annotations

import pytest

from tests.helpers.checkpoints import greedy, write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, prompts_for, reference_of
from tidemill import LLM, SamplingParams
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.models.registry import describe

PHI3 = {"pad_token_id": 0, "eos_token_id": 0}
CASES = {
    "phi": ("Phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    "phi-qk-norm": ("Phi", {"partial_rotary_factor": 0.34, "qk_layernorm": True, "num_key_value_heads": 1}),
    "phi-tied": ("Phi", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    "phi3": ("Phi3", {**PHI3, "num_key_value_heads": 4}),
    "phi3-window": ("Phi3", {**PHI3, "sliding_window": 11}),
    "phi4-mini": (
        "Phi3",
        {**PHI3, "partial_rotary_factor": 0.67, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
}
LONG = {
    **PHI3,
    "partial_rotary_factor": 0.67,
    "original_max_position_embeddings": 37,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.5, 4.0, 6.0],
    },
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


def test_prompts_within_and_beyond_the_original_length_turn_by_their_own_factors(tmp_path):
    model = write_checkpoint(tmp_path, "Phi3", **LONG)
    llm = LLM(str(tmp_path), dtype="float32", block_size=4, max_num_batched_tokens=13, num_gpu_blocks_override=60)
    # Whoever stays on one side of the length throughout.
    prompts = [prompt for prompt in prompts_for(1) if len(prompt) + 20 <= 37 or len(prompt) > 37]
    assert {len(prompt) > 37 for prompt in prompts} == {True, False}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [greedy(model, prompt, 20) for prompt in prompts]
    assert_same_logits(reference_of(model), str(tmp_path))


def test_an_answer_that_outgrows_the_original_length_is_computed_anew_as_in_transformers(tmp_path):
    """Six answers cross at different steps, in one batch, with chunks and preemption; a seventh never does."""
    model = write_checkpoint(tmp_path, "Phi3", **LONG)
    llm = LLM(
        str(tmp_path),
        dtype="float32",
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=13,
        max_num_seqs=5,
        num_gpu_blocks_override=40,
    )
    prompts = [[(7 * i + seed) % 200 for i in range(length)] for seed, length in enumerate((20, 30, 35, 36, 37, 25, 3))]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert answers == [greedy(model, prompt, 24) for prompt in prompts]
    assert llm._core.stats.kv_usage == 0
    again = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    assert again == answers


PHI_2 = {
    "architectures": ["PhiForCausalLM"],
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 51200,
}
PHI3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
FACTORS = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
PHI3_MINI_128K = {
    **PHI3_MINI_4K,
    "max_position_embeddings": 131072,
    "rope_scaling": {"type": "su", **FACTORS},
    "sliding_window": 262144,
}
PHI4_MINI = {
    **PHI3_MINI_128K,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {"type": "longrope", **FACTORS},
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def test_phi_2_as_published():
    spec = describe(PHI_2)
    layer = spec.layers[0]
    assert (layer.attention.head_dim, spec.ropes[0].dim) == (80, 32)
    assert layer.parallel and layer.mlp_norm is None and not layer.mlp.gated and layer.attention.head_norm is None
    assert layer.attention.bias and layer.attention.out_bias and layer.mlp.bias and spec.head_bias and spec.norm.bias
    assert describe({**PHI_2, "partial_rotary_factor": None}).ropes[0].dim == 40


def test_phi3_mini_4k_as_published():
    spec = describe(PHI3_MINI_4K)
    assert (spec.layers[0].attention.head_dim, spec.layers[0].attention.window) == (96, 2047)
    assert (spec.ropes[0].kind, spec.max_position, spec.norm.eps) == ("default", 4096, 1e-5)


@pytest.mark.parametrize("word", ["su", "yarn", "longrope"])
def test_phi3_mini_128k_under_every_name_its_rotation_had(word):
    spec = describe({**PHI3_MINI_128K, "rope_scaling": {"type": word, **FACTORS}})
    (rope,) = spec.ropes
    assert (rope.kind, rope.parameters["original_max_position_embeddings"], rope.max_position) == (
        "longrope",
        4096,
        131072,
    )
    assert spec.layers[0].attention.window is None, "wider than the context"


def test_phi4_mini_as_published():
    spec = describe(PHI4_MINI)
    attention = spec.layers[0].attention
    assert (attention.head_dim, spec.ropes[0].dim, attention.kv_heads, spec.tie_embeddings) == (128, 96, 8, True)


def test_what_cannot_work_is_told_by_name():
    with pytest.raises(UnsupportedModel, match="attention_bias"):
        describe({**PHI3_MINI_4K, "attention_bias": True})
    with pytest.raises(BadCheckpoint, match="long_factor has 48 entries, expected 64"):
        describe(
            {
                **PHI4_MINI,
                "partial_rotary_factor": 1.0,
                "rope_scaling": {"type": "su", **FACTORS, "short_factor": [1.0] * 64},
            }
        )
    with pytest.raises(BadCheckpoint, match="intermediate_size"):
        describe({**PHI_2, "intermediate_size": None})
