"""The Llama family: Llama, Mistral, Ministral 3, Qwen2, Qwen3, SmolLM and whatever else differs only in its config.

Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP. Bias, q/k norm, sliding window and tied
embeddings come from the config. Other families start from these words and change what they do differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.layers.rope_config import RopeConfig
from tidemill.layers.spec import AttentionSpec, HeadNormSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.spec import DecoderSpec, LayerSpec

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"

_MISTRAL = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_MINISTRAL3 = _MISTRAL | {
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_ASSUMED: Mapping[str, Mapping[str, Any]] = {
    # As the text part of a larger model, these are published without what equals transformers' defaults.
    "MistralForCausalLM": _MISTRAL,
    "Ministral3ForCausalLM": _MINISTRAL3,
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN,
}


def describe(raw: RawConfig) -> DecoderSpec:
    raw = raw.assuming(**_ASSUMED.get(raw.architecture, {}))
    qwen2, qwen3 = raw.architecture.startswith("Qwen2"), raw.architecture.startswith("Qwen3")
    mistral = "istral" in raw.architecture
    norm = NormSpec(raw.number("rms_norm_eps", 1e-6))
    heads = raw.size("num_attention_heads")
    head_dim = raw.size("head_dim", default=raw.size("hidden_size") // heads)
    rope = raw.rope(head_dim)
    # Qwen2's biases and Mistral's lack of them are part of the architecture, whatever a config says.
    attention_bias = qwen2 or (raw.flag("attention_bias") and not mistral)
    mlp = MlpSpec(
        inner=raw.size("intermediate_size"),
        activation=raw.activation("hidden_act"),
        up=GATE_UP,
        down=DOWN,
        bias=raw.flag("mlp_bias") and not (qwen2 or qwen3 or mistral),
    )
    head_norm = HeadNormSpec(norm, "self_attn.q_norm", "self_attn.k_norm") if qwen3 else None

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=raw.kv_heads(heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv=QKV,
            out=OUT,
            bias=attention_bias,
            out_bias=attention_bias and not qwen2,
            window=window,
            head_norm=head_norm,
            query_growth=_query_growth(rope),
        )
        return LayerSpec(attention, mlp, "input_layernorm", "post_attention_layernorm")

    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        max_position=raw.max_position(),
        norm=norm,
        layers=tuple(layer(window) for window in _windows(raw)),
        tie_embeddings=raw.flag("tie_word_embeddings"),
        ropes=(rope,),
    )


def _windows(raw: RawConfig) -> list[int | None]:
    count = raw.size("num_hidden_layers")
    if raw.architecture.startswith("Qwen") and raw.get("sliding_window") and raw.flag("use_sliding_window"):
        first = raw.get("max_window_layers", 28)
        return raw.windows([layer >= first for layer in range(count)])
    if "istral" in raw.architecture and raw.get("sliding_window"):
        return raw.windows([True] * count)
    if "sliding_attention" in (raw.layer_kinds(count) or ()) and not raw.architecture.startswith("Qwen"):
        raw.refuse("layer_types")
    return [None] * count


def _query_growth(rope: RopeConfig) -> tuple[float, int] | None:
    """Ministral 3: queries beyond the pretraining length grow."""
    beta = rope.parameters.get("llama_4_scaling_beta")
    return (
        None if not beta else (float(beta), rope.parameters.get("original_max_position_embeddings", rope.max_position))
    )
