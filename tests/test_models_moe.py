"""Mixtures of experts (Mixtral, Qwen2-MoE, Qwen3-MoE) against transformers, what their published configs mean, and that
only the experts a token is routed to are computed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import TINY, write_checkpoint
from tests.helpers.parity import assert_greedy, assert_same_logits, assert_same_tokens, reference_of
from tidemill import LLM, SamplingParams
from tidemill.errors import BadCheckpoint, TidemillError
from tidemill.layers.moe import Moe
from tidemill.layers.parameter import Placement
from tidemill.layers.spec import MlpSpec, MoeSpec
from tidemill.models.registry import describe

QWEN2 = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28, "shared_expert_intermediate_size": 20}
QWEN3 = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 28, "head_dim": 16}

CASES = {
    "mixtral": ("Mixtral", {}),
    "mixtral-window": ("Mixtral", {"sliding_window": 11, "head_dim": 20, "num_key_value_heads": 1}),
    "mixtral-tied-one-expert": (
        "Mixtral",
        {"tie_word_embeddings": True, "num_local_experts": 5, "num_experts_per_tok": 1, "hidden_act": "gelu"},
    ),
    "qwen2": ("Qwen2Moe", QWEN2),
    "qwen2-renormalised-tied": ("Qwen2Moe", {**QWEN2, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen2-every-second-layer": ("Qwen2Moe", {**QWEN2, "decoder_sparse_step": 2, "qkv_bias": False}),
    "qwen2-window": (
        "Qwen2Moe",
        {**QWEN2, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "num_hidden_layers": 4},
    ),
    "qwen3": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3-plain-weights-bias": ("Qwen3Moe", {**QWEN3, "attention_bias": True, "num_key_value_heads": 1}),
    "qwen3-some-layers": ("Qwen3Moe", {**QWEN3, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3Moe", {**QWEN3, "use_sliding_window": True, "sliding_window": 11}),
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


PROMPT = [3, 141, 59]
CPU = torch.device("cpu")


@torch.no_grad()
def chosen_experts(model, tokens: list[int]) -> dict[int, set[int]]:
    """Per layer, the experts that transformers routes these tokens to."""
    found: dict[int, set[int]] = {}
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out, index=index: found.update({index: set(_flat(out[2]))}))
        for index, layer in enumerate(model.model.layers)
    ]
    model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def _flat(indices: torch.Tensor) -> list[int]:
    return indices.reshape(-1).tolist()


def poison(folder: Path, wanted) -> int:
    """Not a number in every weight of the experts that `wanted(layer, expert)` names; how many experts these were."""
    weights = load_file(folder / "model.safetensors")
    experts = set()
    for name, tensor in weights.items():
        found = re.match(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.", name)
        if found and wanted(int(found[1]), int(found[2])):
            tensor.fill_(float("nan"))
            experts.add(found.groups())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return len(experts)


def test_experts_nobody_is_routed_to_are_not_computed(tmp_path):
    """Alone in its step, a token reads its own experts; a prompt in one step reads those of its tokens."""
    model = write_checkpoint(tmp_path, "Mixtral", num_local_experts=16)
    greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    (output,) = LLM(str(tmp_path), dtype="float32").generate([PROMPT], greedy, use_tqdm=False)
    answer = output.outputs[0].token_ids
    assert_greedy(reference_of(model), PROMPT, answer)
    used = chosen_experts(model, PROMPT + answer)
    assert poison(tmp_path, lambda layer, expert: expert not in used[layer]) > 10
    (again,) = LLM(str(tmp_path), dtype="float32").generate([PROMPT], greedy, use_tqdm=False)
    assert again.outputs[0].token_ids == answer


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["in a batch of tokens", "alone"])
def test_a_routed_expert_that_is_not_a_number_ends_the_request_with_an_error(tmp_path, prompt):
    model = write_checkpoint(tmp_path, "Mixtral", num_local_experts=16)
    used = chosen_experts(model, prompt)
    assert poison(tmp_path, lambda layer, expert: layer == 1 and expert == min(used[1])) == 1
    with pytest.raises(TidemillError, match="not finite"):
        LLM(str(tmp_path), dtype="float32").generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_token_that_is_not_a_number_does_not_reach_its_neighbours():
    moe = Moe(describe({**MIXTRAL_8X7B, **TINY}).layers[0].mlp, "layer", 48, Placement(torch.float32, CPU))
    torch.manual_seed(0)
    for parameter in moe.parameters():
        parameter.target.normal_(0, 0.2)
    x = torch.randn(9, 48)
    want = moe(x)
    x[4] = float("nan")
    found = moe(x)
    assert found[4].isnan().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    torch.testing.assert_close(found[others], want[others], rtol=1e-4, atol=1e-4)


MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_mixtral_8x7b_as_published():
    spec = describe(MIXTRAL_8X7B)
    mixture = spec.layers[31].mlp
    assert isinstance(mixture, MoeSpec) and mixture.renormalise and mixture.shared is None
    assert (mixture.experts, mixture.top_k, mixture.inner, mixture.scaling) == (8, 2, 14336, 1.0)
    assert (spec.ropes[0].theta, spec.norm.eps, spec.max_position) == (1e6, 1e-5, 32768)
    assert spec.layers[0].attention.window is None and not spec.layers[0].attention.bias


def test_qwen15_moe_as_published():
    spec = describe(QWEN15_MOE)
    mixture = spec.layers[0].mlp
    assert isinstance(mixture, MoeSpec) and not mixture.renormalise
    assert (mixture.experts, mixture.top_k, mixture.inner, mixture.shared.inner) == (60, 4, 1408, 5632)
    assert mixture.shared_gate == "mlp.shared_expert_gate"
    assert spec.layers[0].attention.bias and not spec.layers[0].attention.out_bias
    assert all(layer.attention.window is None for layer in spec.layers)


def test_qwen3_30b_a3b_as_published():
    spec = describe(QWEN3_30B_A3B)
    mixture = spec.layers[47].mlp
    assert isinstance(mixture, MoeSpec) and mixture.renormalise and mixture.shared is None
    assert (mixture.experts, mixture.top_k, mixture.inner) == (128, 8, 768)
    assert spec.layers[0].attention.head_dim == 128 and spec.layers[0].attention.head_norm is not None


def test_missing_keys_mean_what_they_mean_in_transformers():
    def without(raw, *keys):
        return {key: value for key, value in raw.items() if key not in keys}

    mixtral = describe(without(MIXTRAL_8X7B, "num_local_experts", "num_experts_per_tok", "rope_theta", "rms_norm_eps"))
    assert mixtral == describe(MIXTRAL_8X7B)
    qwen2 = describe(without(QWEN15_MOE, "num_experts_per_tok", "norm_topk_prob", "decoder_sparse_step"))
    assert qwen2 == describe(QWEN15_MOE)
    qwen3 = describe(without(QWEN3_30B_A3B, "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"))
    assert qwen3.layers[0].mlp.top_k == 8 and not qwen3.layers[0].mlp.renormalise


def test_which_layers_have_experts():
    def sparse(**changes):
        spec = describe({**QWEN3_30B_A3B, "num_hidden_layers": 6, **changes})
        return [index for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoeSpec)]

    assert sparse() == [0, 1, 2, 3, 4, 5]
    assert sparse(decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[3, 4]) == [1, 5]
    plain = describe({**QWEN3_30B_A3B, "mlp_only_layers": [0]}).layers[0].mlp
    assert isinstance(plain, MlpSpec) and plain.inner == 6144


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**MIXTRAL_8X7B, "num_experts_per_tok": 9}, "num_experts_per_tok is 9.*only 8"),
        ({**MIXTRAL_8X7B, "num_local_experts": "many"}, "num_local_experts is 'many'"),
        ({**QWEN15_MOE, "num_experts": None}, "num_experts is None"),
        ({**QWEN15_MOE, "shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({**QWEN3_30B_A3B, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ],
)
def test_what_cannot_work_is_told_by_name(raw, words):
    with pytest.raises(BadCheckpoint, match=words):
        describe(raw)
