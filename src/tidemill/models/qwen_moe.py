"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B) and Qwen3-MoE (30B-A3B, 235B-A22B): Llama decoders in which some layers
hold a mixture of experts, in Qwen2 beside an expert that every token goes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tidemill.layers.spec import AttentionSpec, MlpSpec, MoeSpec
from tidemill.models import llama
from tidemill.models.config import RawConfig, bad_config
from tidemill.models.mixtral import expert_counts
from tidemill.models.spec import DecoderSpec, LayerSpec

EXPERT_UP = ("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj")
EXPERT_DOWN = "mlp.experts.{expert}.down_proj"
_ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "Qwen2MoeForCausalLM": {
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
    "Qwen3MoeForCausalLM": {
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
}


def describe(raw: RawConfig) -> DecoderSpec:
    raw = raw.assuming(**_ASSUMED[raw.architecture])
    qwen2 = raw.architecture.startswith("Qwen2")
    dense = llama.describe(raw)
    count = len(dense.layers)
    mixture, sparse, windows = _mixture(raw, qwen2), _sparse_layers(raw, count), _windows(raw, count, qwen2)
    bias = raw.flag("qkv_bias", True) if qwen2 else raw.flag("attention_bias")

    def layer(index: int, plain: LayerSpec) -> LayerSpec:
        assert isinstance(plain.attention, AttentionSpec), "a Llama layer has plain attention"
        attention = replace(plain.attention, window=windows[index], bias=bias)
        return replace(plain, attention=attention, mlp=mixture if index in sparse else plain.mlp)

    return replace(dense, layers=tuple(layer(index, plain) for index, plain in enumerate(dense.layers)))


def _mixture(raw: RawConfig, qwen2: bool) -> MoeSpec:
    experts, top_k = expert_counts(raw, "num_experts", "num_local_experts")
    activation = raw.activation("hidden_act")
    shared = None
    if qwen2:
        shared = MlpSpec(
            inner=raw.size("shared_expert_intermediate_size"),
            activation=activation,
            up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            down="mlp.shared_expert.down_proj",
        )
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        inner=raw.size("moe_intermediate_size"),
        activation=activation,
        router="mlp.gate",
        up=EXPERT_UP,
        down=EXPERT_DOWN,
        renormalise=raw.flag("norm_topk_prob"),
        shared=shared,
        shared_gate="mlp.shared_expert_gate" if qwen2 else None,
    )


def _sparse_layers(raw: RawConfig, count: int) -> set[int]:
    """Every `decoder_sparse_step`th layer has experts, but not those that `mlp_only_layers` names."""
    plain = raw.get("mlp_only_layers", [])
    if not isinstance(plain, list):
        raise bad_config(f"mlp_only_layers is {plain!r}, expected a list of layers")
    step = raw.size("decoder_sparse_step", default=1)
    return {layer for layer in range(count) if (layer + 1) % step == 0 and layer not in plain}


def _windows(raw: RawConfig, count: int, qwen2: bool) -> list[int | None]:
    if not raw.flag("use_sliding_window") or not raw.get("sliding_window"):
        return [None] * count
    if not qwen2:
        return [raw.size("sliding_window")] * count
    # Unlike in Qwen2 without experts, the windows come first, and only in every second layer.
    first = raw.get("max_window_layers", 28)
    return raw.windows([layer % 2 == 0 and layer < first for layer in range(count)])
