"""DeepSeek V2 and V3 against transformers: latent attention over a compressed cache, and how they choose experts."""

from __future__ import annotations

import math

import pytest
import torch

from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.parity import assert_same_logits, assert_same_tokens, reference_of
from tidemill import LLM
from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.layers.moe import Moe
from tidemill.layers.parameter import Placement
from tidemill.layers.spec import MlpSpec, MoeSpec
from tidemill.models.registry import describe

TINY = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "mscale": 0.707,
    "mscale_all_dim": 1.2,
    "beta_fast": 16,
    "beta_slow": 1,
}

CASES = {
    "v2-lite": ("DeepseekV2", {"q_lora_rank": None}),
    "v2-groups-scaled": ("DeepseekV2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}),
    "v2-biases-yarn": ("DeepseekV2", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    "v2-all-experts-tied": ("DeepseekV2", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    "v3": ("DeepseekV3", {}),
    "v3-lite-one-group": ("DeepseekV3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "v3-halves-yarn": ("DeepseekV3", {"rope_interleave": False, "attention_bias": True, "rope_parameters": YARN}),
    "v3-wide-values": ("DeepseekV3", {"v_head_dim": 28, "qk_nope_head_dim": 4, "n_shared_experts": 1}),
}


def write(folder, family, config):
    """The learned bias that V3 chooses by is no parameter of transformers' model, so it starts as zeros there."""
    model = write_checkpoint(folder, family, **{**TINY, **config})
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # Mostly below zero and wider than the scores: it decides, and a zero would beat what it leaves.
            buffer.normal_(-1.5, 0.5)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    family, config = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return reference_of(write(folder, family, config)), str(folder)


def test_same_tokens_as_transformers(case):
    assert_same_tokens(*case)


def test_same_logits_as_transformers(case):
    assert_same_logits(*case)


def test_the_cache_holds_the_compressed_vector_and_one_rotated_key_and_nothing_else(tmp_path):
    write(tmp_path, "DeepseekV3", {})
    llm = LLM(str(tmp_path), dtype="float32", block_size=4, num_gpu_blocks_override=10, max_model_len=32)
    slots = llm._core.runner.cache.slots
    assert len(slots) == 3, "one per layer"
    for keys, values in slots:
        assert values is None
        assert keys.shape == (10 + 1, 4, 1, TINY["kv_lora_rank"] + TINY["qk_rope_head_dim"])


class TestChoosingExperts:
    """The router alone, on scores made by hand: the width is the number of experts and its matrix the identity."""

    def route(self, logits: list[float], bias: list[float] | None = None, **changes) -> dict[int, float]:
        spec = MoeSpec(len(logits), 2, 1, "silu", "gate", ("gate", "up"), "down", **changes)
        moe = Moe(spec, "layer", len(logits), Placement(torch.float32, torch.device("cpu")))
        moe.router.copy_(torch.eye(len(logits)))
        if moe.choice_bias is not None:
            moe.choice_bias.copy_(torch.tensor(bias))
        experts, weights = moe._route(torch.tensor([logits]))
        return dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))

    def test_a_bias_chooses_and_does_not_weigh(self):
        found = self.route([2.0, 1.0, 0.0], [-9.0, 0.0, 0.0], scoring="sigmoid", choice_bias="bias", renormalise=False)
        assert found == pytest.approx({1: 1 / (1 + math.exp(-1)), 2: 0.5})

    def test_experts_of_other_groups_stay_out_even_if_the_bias_is_negative(self):
        found = self.route(
            [3.0, 2.0, 1.0, 0.0],
            [-5.0, -5.0, -7.0, -7.0],
            scoring="sigmoid",
            choice_bias="bias",
            groups=2,
            top_groups=1,
            group_score="best_two",
        )
        assert set(found) == {0, 1} and sum(found.values()) == pytest.approx(1.0)

    def test_a_group_counts_as_its_best_expert_or_as_its_best_two(self):
        logits = [5.0, -5.0, 2.0, 2.0]
        assert set(self.route(logits, groups=2, top_groups=1, group_score="best")) == {0, 1}
        both = {"scoring": "sigmoid", "choice_bias": "bias", "groups": 2, "top_groups": 1, "group_score": "best_two"}
        assert set(self.route(logits, [0.0] * 4, **both)) == {2, 3}

    def test_weights_are_the_softmax_over_all_experts_times_the_scaling(self):
        logits = [0.5, 2.0, 1.0]
        shares = torch.tensor(logits).softmax(0).tolist()
        plain = self.route(logits, renormalise=False, scaling=16.0)
        assert plain == pytest.approx({1: 16 * shares[1], 2: 16 * shares[2]})
        summing_to_one = self.route(logits, renormalise=True)
        assert summing_to_one == pytest.approx({1: 1 / (1 + math.exp(-1)), 2: 1 / (1 + math.exp(1))})


V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2 = {
    **V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}
V3 = {
    **V2,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def test_v2_lite_as_published():
    spec = describe(V2_LITE)
    attention, mixture = spec.layers[1].attention, spec.layers[1].mlp
    assert attention.query_rank is None and attention.cache.numbers == 512 + 64
    magnitude = 0.1 * 0.707 * math.log(40) + 1
    assert attention.scale == pytest.approx((128 + 64) ** -0.5 * magnitude**2)
    assert attention.neighbours and attention.norm_eps == 1e-6
    assert isinstance(spec.layers[0].mlp, MlpSpec) and spec.layers[0].mlp.inner == 10944
    assert (mixture.experts, mixture.top_k, mixture.groups, mixture.scoring) == (64, 6, 1, "softmax")
    assert (mixture.inner, mixture.shared.inner, mixture.renormalise) == (1408, 2816, False)
    assert (spec.ropes[0].dim, spec.ropes[0].kind, spec.shape.longest_context) == (64, "yarn", 163840)


def test_v2_as_published():
    mixture = describe(V2).layers[59].mlp
    assert (mixture.groups, mixture.top_groups, mixture.group_score, mixture.scaling) == (8, 3, "best", 16.0)


def test_v3_as_published():
    spec = describe(V3)
    attention, mixture = spec.layers[3].attention, spec.layers[3].mlp
    assert [isinstance(layer.mlp, MoeSpec) for layer in spec.layers[:5]] == [False, False, False, True, True]
    assert (attention.query_rank, attention.heads, attention.cache.numbers) == (1536, 128, 576)
    assert (mixture.scoring, mixture.group_score, mixture.groups, mixture.top_groups) == ("sigmoid", "best_two", 8, 4)
    assert mixture.renormalise and mixture.scaling == 2.5 and mixture.shared.inner == 2048


def test_missing_keys_mean_what_they_mean_in_transformers():
    left_out = ("first_k_dense_replace", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
    assert describe({key: value for key, value in V3.items() if key not in left_out}) == describe(V3)
    lite = {key: value for key, value in V2_LITE.items() if key != "q_lora_rank"}
    assert describe(lite).layers[0].attention.query_rank == 1536, "only a null means that there is none"


def test_every_second_layer_may_have_experts():
    spec = describe({**V2_LITE, "moe_layer_freq": 2, "num_hidden_layers": 6})
    assert [index for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoeSpec)] == [2, 4]


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({**V2_LITE, "topk_method": "noaux_tc"}, "topk_method"),
        ({**V2_LITE, "scoring_func": "sigmoid"}, "scoring_func"),
        ({**V2_LITE, "norm_topk_prob": True}, "norm_topk_prob"),
        ({**V3, "topk_method": "greedy"}, "topk_method"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_choices_that_would_be_guessed_are_refused(raw, key):
    with pytest.raises(UnsupportedModel, match=key) as caught:
        describe(raw)
    assert caught.value.param == key and caught.value.fix == "--model-impl transformers"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**V2_LITE, "num_experts_per_tok": None}, "num_experts_per_tok is None"),
        ({**V2_LITE, "kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({**V3, "n_group": 7}, "256 experts cannot stand in 7 groups"),
        ({**V3, "n_group": 256}, "at least 2"),
        ({**V3, "topk_group": 9}, "topk_group 9"),
        ({**V2, "n_group": 80, "topk_group": 2}, "topk_group 2 leaves no 6 experts"),
        ({**V3, "rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "mscale_all_dim needs factor"),
    ],
)
def test_what_cannot_work_is_told_by_name(raw, words):
    with pytest.raises(BadCheckpoint, match=words):
        describe(raw)
