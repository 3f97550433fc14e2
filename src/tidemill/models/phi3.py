"""Phi-3, Phi-3.5 mini, Phi-4 and Phi-4-mini: Llama's layer with stacked matrices, and rotations for long contexts.

Knows the dense text models only; Phi-3-small, Phi-3.5-MoE and the vision models are other architectures.
"""

from __future__ import annotations

from dataclasses import replace

from tidemill.layers.rope_config import RopeConfig
from tidemill.layers.spec import AttentionSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.llama import DOWN, OUT
from tidemill.models.spec import DecoderSpec, LayerSpec


def describe(raw: RawConfig) -> DecoderSpec:
    raw = raw.assuming(max_position_embeddings=4096, original_max_position_embeddings=4096)
    raw.refuse("attention_bias")
    norm = NormSpec(raw.number("rms_norm_eps", 1e-5))
    heads = raw.size("num_attention_heads")
    head_dim = raw.size("head_dim", default=raw.size("hidden_size") // heads)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=raw.kv_heads(heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv=("self_attn.qkv_proj",),
        out=OUT,
        window=_window(raw),
    )
    mlp = MlpSpec(
        inner=raw.size("intermediate_size"),
        activation=raw.activation("hidden_act"),
        up=("mlp.gate_up_proj",),
        down=DOWN,
    )
    layer = LayerSpec(attention, mlp, "input_layernorm", "post_attention_layernorm")
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        max_position=raw.max_position(),
        norm=norm,
        layers=(layer,) * raw.size("num_hidden_layers"),
        tie_embeddings=raw.flag("tie_word_embeddings"),
        ropes=(_rope(raw, head_dim),),
    )


def _window(raw: RawConfig) -> int | None:
    """The long models name a window wider than their context, which is none."""
    window = raw.size("sliding_window", default=raw.max_position())
    return window if window < raw.max_position() else None


def _rope(raw: RawConfig, head_dim: int) -> RopeConfig:
    parameters = raw.mapping("rope_parameters") or raw.mapping("rope_scaling")
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind == "yarn":
        # What the first Phi-3 models called longrope.
        parameters["rope_type"] = "longrope"
    rope = raw.rope(head_dim, parameters)
    return replace(rope, turns=rope.kind == "longrope")
