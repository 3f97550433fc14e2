"""Mixtral: a Llama decoder whose MLP is a mixture of experts. Also what other mixtures read of a config alike."""

from __future__ import annotations

from dataclasses import replace

from tidemill.layers.spec import MoeSpec
from tidemill.models import llama
from tidemill.models.config import RawConfig, bad_config
from tidemill.models.spec import DecoderSpec

_ASSUMED = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}


def describe(raw: RawConfig) -> DecoderSpec:
    raw = raw.assuming(**_ASSUMED)
    experts, top_k = expert_counts(raw, "num_local_experts")
    mixture = MoeSpec(
        experts=experts,
        top_k=top_k,
        inner=raw.size("intermediate_size"),
        activation=raw.activation("hidden_act"),
        router="block_sparse_moe.gate",
        up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        down="block_sparse_moe.experts.{expert}.w2",
    )
    dense = llama.describe(raw)
    window = raw.get("sliding_window") or None
    layers = (replace(layer, attention=replace(layer.attention, window=window), mlp=mixture) for layer in dense.layers)
    return replace(dense, layers=tuple(layers))


def expert_counts(raw: RawConfig, *keys: str) -> tuple[int, int]:
    """How many experts there are, under the first of these keys that is there, and to how many of them a token goes."""
    experts, top_k = raw.size(*keys), raw.size("num_experts_per_tok")
    if top_k > experts:
        raise bad_config(f"num_experts_per_tok is {top_k}, and there are only {experts} experts")
    return experts, top_k
