"""What planning counts is what a model allocates: checked against the real thing, family by family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.helpers.checkpoints import TINY
from tidemill.layers.parameter import Placement
from tidemill.layers.rope import Rope
from tidemill.models.count import count_weights
from tidemill.models.decoder import Decoder
from tidemill.models.registry import describe
from tidemill.models.spec import DecoderSpec
from tidemill.precision import cpu_packing
from tidemill.quant.packing import Packing
from tidemill.quant.scheme import INT4, INT8

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "biases": ("Qwen2", {}),
    "head norms": ("Qwen3", {"head_dim": 16}),
    "wide norms": ("Gemma3", {"head_dim": 16, "tie_word_embeddings": True}),
    "learned positions": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "another embedding width": ("OPT", {"word_embed_proj_dim": 32, "ffn_dim": 80}),
    "own head norms": ("Cohere", {"use_qk_norm": True, "tie_word_embeddings": True}),
    "experts": ("Mixtral", {"num_local_experts": 4}),
    "shared experts": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 64}),
    "latent attention": (
        "DeepseekV3",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
    ),
}


def spec_of(family: str, changes: dict[str, Any]) -> DecoderSpec:
    kind = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    return describe({**kind.config_class(**{**TINY, **changes}).to_dict(), "architectures": [kind.__name__]})


def tensors_of(thing: Any) -> list[torch.Tensor]:
    """Every tensor an object holds, but not its rotary tables and orders of rows."""
    if isinstance(thing, torch.Tensor):
        return [] if thing.dtype == torch.int64 else [thing]
    if isinstance(thing, list | tuple):
        return [tensor for item in thing for tensor in tensors_of(item)]
    if isinstance(thing, Rope) or not type(thing).__module__.startswith("tidemill."):
        return []
    values = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    return tensors_of([*values, *getattr(thing, "__dict__", {}).values()])


def allocated(thing: Any) -> int:
    storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in tensors_of(thing)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages.values()}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_counted_is_what_is_allocated(case, dtype):
    spec = spec_of(*CASES[case])
    model = Decoder(spec, 64, Placement(dtype, torch.device("cpu")))
    count = count_weights(spec)
    assert count.nbytes(dtype.itemsize) == allocated(model)
    for counted, layer in zip(count.layers, model.layers, strict=True):
        assert counted.nbytes(dtype.itemsize) == allocated(layer)


@pytest.mark.parametrize("case", ["plain", "biases", "tied"])
def test_numbers_are_the_parameters_that_are_loaded(case):
    spec = spec_of(*CASES[case])
    model = Decoder(spec, 64, Placement(torch.float32, torch.device("cpu")))
    assert count_weights(spec).numbers == sum(parameter.target.numel() for parameter in model.parameters())


@pytest.mark.parametrize("packing", [Packing(INT4), Packing(INT8), cpu_packing(INT4, {})], ids=["int4", "int8", "CPU"])
@pytest.mark.parametrize("case", ["plain", "latent attention", "shared experts"])
def test_packed_matrices_are_counted_packed(case, packing):
    family, changes = CASES[case]
    spec = spec_of(family, {"hidden_size": 64, "intermediate_size": 128, **changes})
    count = count_weights(spec)
    model = Decoder(spec, 64, Placement(torch.bfloat16, torch.device("cpu"), packing))
    assert count.nbytes(2, packing) == allocated(model) != count.nbytes(2)


def test_a_published_model_has_its_published_size():
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }
    count = count_weights(describe(raw))
    assert count.numbers == 8_030_261_248
    assert count.largest_packed(Packing(INT4)) == 2 * 14336 * 4096
    assert (
        0.24
        < sum(layer.nbytes(2, Packing(INT4)) for layer in count.layers) / sum(layer.nbytes(2) for layer in count.layers)
        < 0.28
    )
