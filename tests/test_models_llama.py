"""The Llama family against transformers: same greedy tokens, same logits, through the normal path from disk, in a mixed
batch with chunked prefill, prefix hits and preemption."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import TINY, greedy, reset_rope, write_checkpoint, write_model
from tests.helpers.parity import assert_same_logits, assert_same_tokens, prompts_for, reference_of
from tidemill import LLM, SamplingParams
from tidemill.errors import BadCheckpoint, ConfigError, UnsupportedModel
from tidemill.models.registry import describe

CASES = {
    "llama": ("Llama", {}),
    "llama-tied-mha": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-odd-head-dim": ("Llama", {"head_dim": 20, "num_key_value_heads": 1}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu"}),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "rope-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "rope-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
            }
        },
    ),
    "rope-yarn": (
        "Qwen2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
            }
        },
    ),
    "rope-yarn-mscale": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
                "beta_fast": 16,
                "beta_slow": 2,
            }
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "rope_theta": 10000.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
}

BY_LENGTH = {
    "rope-dynamic": (
        "Llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
        },
    ),
    "rope-longrope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            }
        },
    ),
}
"""Rotations that depend on how long the sequence is: transformers looks at each forward pass, so only its own
generation, token by token, is the same computation."""


def write(name, tmp_path_factory):
    family, config = {**CASES, **BY_LENGTH}[name]
    folder = tmp_path_factory.mktemp(name)
    return write_checkpoint(folder, family, **config), str(folder)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return write(request.param, tmp_path_factory)


@pytest.fixture(scope="module", params=BY_LENGTH)
def case_by_length(request, tmp_path_factory):
    return write(request.param, tmp_path_factory)


def test_same_tokens_as_transformers_in_a_mixed_batch_with_chunks_hits_and_preemption(case):
    model, folder = case
    assert_same_tokens(reference_of(model), folder)


def test_logits_equal_transformers(case):
    model, folder = case
    assert_same_logits(reference_of(model), folder)


def test_rotations_by_length_give_the_tokens_of_transformers_own_generation(case_by_length):
    model, folder = case_by_length
    prompts = prompts_for(1)
    llm = LLM(
        folder,
        dtype="float32",
        block_size=4,
        max_model_len=96,
        max_num_batched_tokens=13,
        max_num_seqs=6,
        num_gpu_blocks_override=40,
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    want = [greedy(model, prompt, 20) for prompt in prompts]
    for _ in range(2):  # the second time the prompts are in the cache
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == want
    stats = llm._core.stats
    assert stats.preemptions > 0 and stats.prefix_hits > 0 and stats.kv_usage == 0


def test_rotations_by_length_give_the_logits_of_one_forward_pass(case_by_length):
    model, folder = case_by_length
    reset_rope(model)
    assert_same_logits(reference_of(model), folder, max_model_len=96)


@pytest.mark.parametrize(("part", "tied"), [("mistral", False), ("ministral3", True)])
def test_the_text_part_of_a_model_of_text_and_images(tmp_path, part, tied):
    torch.manual_seed(0)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Mistral3Config(
        text_config={**TINY, "model_type": part, "head_dim": 16, "sliding_window": None},
        vision_config={**vision, "model_type": "pixtral", "image_size": 28, "patch_size": 14},
        tie_word_embeddings=tied,
    )
    model = write_model(tmp_path, transformers.Mistral3ForConditionalGeneration(config))
    assert_same_logits(reference_of(model), str(tmp_path))


def test_shards_with_an_index_load(tmp_path):
    model = write_checkpoint(tmp_path, "Llama", shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    llm = LLM(str(tmp_path), dtype="float32")
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert output.outputs[0].token_ids == greedy(model, [1, 2, 3], 8)


def test_config_that_disagrees_with_the_weights_is_refused_by_name(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 80', '"intermediate_size": 96'))
    with pytest.raises(BadCheckpoint, match=r"gate_proj.*\(80, 48\).*\(96, 48\)"):
        LLM(str(tmp_path), dtype="float32")


def test_missing_tensor_is_named(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(BadCheckpoint, match=r"model\.layers\.3\."):
        LLM(str(tmp_path), dtype="float32")


def test_unknown_architecture_lists_what_is_native():
    with pytest.raises(UnsupportedModel) as caught:
        describe({"architectures": ["UnheardOfForCausalLM"]})
    assert "UnheardOf" in caught.value.message and "LlamaForCausalLM" in caught.value.cause


def test_unknown_architecture_asked_to_run_natively_is_refused(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "UnheardOfForCausalLM"))
    with pytest.raises(ConfigError, match="UnheardOf") as caught:
        LLM(str(tmp_path), model_impl="native")
    assert caught.value.param == "model_impl"


def test_a_head_that_is_stored_counts_even_where_the_config_ties_it(tmp_path):
    """As in transformers: who trained the head further may have left the switch as it was."""
    write_checkpoint(tmp_path, "Llama", tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = torch.randn_like(stored["model.embed_tokens.weight"])
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert_same_logits(reference_of(model), str(tmp_path))


def test_of_two_tied_tensors_either_may_be_stored(tmp_path):
    model = write_checkpoint(tmp_path, "Llama", tie_word_embeddings=True)
    stored = load_file(tmp_path / "model.safetensors")
    stored["lm_head.weight"] = stored.pop("model.embed_tokens.weight")
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(reference_of(model), str(tmp_path))


@pytest.mark.parametrize(("family", "bias"), [("Qwen2", False), ("Mistral", True)])
def test_biases_that_are_part_of_the_architecture_do_not_depend_on_the_config(tmp_path, family, bias):
    model = write_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": bias}))
    assert_same_logits(reference_of(model), str(tmp_path))


def test_a_tensor_that_the_config_does_not_announce_is_named(tmp_path):
    write_checkpoint(tmp_path, "Llama")
    stored = load_file(tmp_path / "model.safetensors")
    stored["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(48)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"model.safetensors: tensor model.layers.1.self_attn.q_proj.bias"):
        LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"rope_scaling": 5}, "rope_scaling is 5"),
        ({"partial_rotary_factor": "half"}, "half"),
        ({"layer_types": 5}, "layer_types is 5"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    ],
)
def test_values_that_no_config_has_are_named(changes, words):
    raw = {**TINY, "architectures": ["LlamaForCausalLM"], **changes}
    with pytest.raises((BadCheckpoint, UnsupportedModel)) as caught:
        describe(raw)
    assert words in f"{caught.value.message} {caught.value.cause}"


def test_a_config_without_architectures_is_known_by_its_type():
    assert describe({**TINY, "model_type": "qwen3"}).architecture == "Qwen3ForCausalLM"
    both = {**TINY, "model_type": "llama", "architectures": ["Qwen3ForCausalLM"]}
    assert describe(both).architecture == "LlamaForCausalLM", "transformers follows the type"
