"""Each family written as llama.cpp's converter writes it reads back as the Hugging Face checkpoint it was made from."""

import json

import pytest
import torch
import transformers
from transformers import AutoConfig

from tests.helpers.gguf_writing import LONG, MODEL_ARCH, SHORT, TRANSPOSED, convert
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.location import ModelFiles

LAYERS = 7
TINY = {
    "vocab_size": 203,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

FAMILIES = {
    "Gemma": (MODEL_ARCH.GEMMA, {"head_dim": 16, "tie_word_embeddings": True}),
    "Gemma2": (MODEL_ARCH.GEMMA2, {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "Gemma3": (MODEL_ARCH.GEMMA3, {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
    "GPT2": (
        MODEL_ARCH.GPT2,
        {"n_inner": 80, "intermediate_size": None, "num_key_value_heads": None, "tie_word_embeddings": True},
    ),
    "Mistral": (MODEL_ARCH.LLAMA, {"head_dim": 12, "sliding_window": 20}),
    "Mixtral": (MODEL_ARCH.LLAMA, {"head_dim": 12, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "Phi": (MODEL_ARCH.PHI2, {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "Phi3": (MODEL_ARCH.PHI3, {"pad_token_id": 0, "sliding_window": 20, "original_max_position_embeddings": 64}),
    "Qwen3Moe": (
        MODEL_ARCH.QWEN3MOE,
        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True},
    ),
}
# Training only, or said by no GGUF because nothing in it depends on it.
NOT_IN_A_GGUF = {
    "attention_dropout",
    "dtype",
    "embd_pdrop",
    "initializer_range",
    "output_router_logits",
    "resid_pdrop",
    "router_aux_loss_coef",
    "transformers_version",
    "use_bidirectional_attention",
    "use_cache",
}


def written(tmp_path, family: str, **settings):
    """The folder transformers writes, the GGUF made of it, and transformers' config."""
    arch, special = FAMILIES[family]
    torch.manual_seed(0)
    ending = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model_class = getattr(transformers, f"{family}{ending}")
    config_class = transformers.Gemma3TextConfig if family == "Gemma3" else model_class.config_class
    model = model_class(config_class(**TINY | special | settings)).float()
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(tensor, -0.5, 0.5)
    folder = tmp_path / "folder"
    model.save_pretrained(folder)
    source = open_checkpoint(ModelFiles("folder", folder, str(folder)))
    return source, convert(source, tmp_path / "m.gguf", arch, model.config), model.config


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_that_of_the_folder(tmp_path, family):
    source, checkpoint, config = written(tmp_path, family)
    expected = {name for name in source.tensors if not (config.tie_word_embeddings and name == "lm_head.weight")}
    assert set(checkpoint.tensors) == expected
    for name in expected:
        # A GGUF of GPT-2 holds plain linear layers, and the config made of it says so.
        turned = family == "GPT2" and name.endswith(TRANSPOSED)
        wanted = source.read(name).t() if turned else source.read(name)
        assert checkpoint.tensors[name].shape == wanted.shape
        # Adding 1 and taking it away again in float32 rounds once.
        tolerance = 1e-6 if name.endswith("norm.weight") else 0
        torch.testing.assert_close(checkpoint.read(name), wanted, rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_says_what_transformers_says(tmp_path, family):
    _, checkpoint, config = written(tmp_path, family)
    assert_says(checkpoint.config, config)


def assert_says(raw: dict, config) -> None:
    """transformers makes of it a config of the same class that says everything the original says."""
    read = AutoConfig.for_model(**raw)
    assert type(read) is type(config)
    ours, theirs = (json.loads(side.to_json_string(use_diff=False)) for side in (read, config))
    wanted = {key for key in theirs if key not in NOT_IN_A_GGUF and not key.startswith("_")}
    assert {key: ours.get(key) for key in wanted} == {key: theirs[key] for key in wanted}


def test_phi3_keeps_the_factors_of_both_lengths(tmp_path):
    scaling = {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT}
    _, checkpoint, config = written(tmp_path, "Phi3", rope_scaling=dict(scaling))
    assert checkpoint.config["rope_scaling"] == scaling
    assert "rope_factors_long.weight" not in checkpoint.tensors
    assert_says(checkpoint.config, config)


class TestGemma3:
    def test_scaling_is_for_global_layers_only(self, tmp_path):
        rope = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
        _, checkpoint, config = written(tmp_path, "Gemma3", rope_parameters=rope)
        assert checkpoint.config["rope_parameters"] == rope
        assert_says(checkpoint.config, config)

    def test_the_old_spelling_of_rotation_says_the_same(self, tmp_path):
        _, checkpoint, config = written(tmp_path, "Gemma3")
        old = {key: value for key, value in checkpoint.config.items() if key != "rope_parameters"}
        assert_says(old, config)

    @pytest.mark.parametrize(
        ("pattern", "full"), [(None, [5]), (2, [1, 3, 5]), ([True, False, True, True, True, True, False], [1, 6])]
    )
    def test_which_layers_see_everything(self, tmp_path, pattern, full):
        metadata = {"gemma3.attention.sliding_window": 24}
        if pattern is not None:
            metadata["gemma3.attention.sliding_window_pattern"] = pattern
        types = self.config(metadata)["layer_types"]
        assert [layer for layer, kind in enumerate(types) if kind == "full_attention"] == full

    def test_without_a_window_every_layer_sees_everything(self):
        config = self.config({})
        assert set(config["layer_types"]) == {"full_attention"}
        assert config["sliding_window"] is None

    def test_the_largest_scales_attention_by_its_hidden_size(self):
        """27B: 5376 / 32 = 168, where the heads are 128 wide; only the number of layers tells."""
        large = {"block_count": 62, "embedding_length": 5376, "attention.head_count": 32, "attention.key_length": 128}
        assert self.config({f"gemma3.{key}": value for key, value in large.items()})["query_pre_attn_scalar"] == 168
        small = large | {"block_count": 34}
        assert self.config({f"gemma3.{key}": value for key, value in small.items()})["query_pre_attn_scalar"] == 128

    def config(self, metadata: dict) -> dict:
        from tidemill.weights.gguf_names import hf_config

        common = {
            "general.architecture": "gemma3",
            "gemma3.block_count": LAYERS,
            "gemma3.context_length": 128,
            "gemma3.embedding_length": 64,
            "gemma3.feed_forward_length": 96,
            "gemma3.attention.head_count": 4,
            "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        }
        return hf_config(common | metadata, {"token_embd.weight"}, 203, lambda name: [], "m.gguf")
