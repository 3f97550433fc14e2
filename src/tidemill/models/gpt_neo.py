"""GPT-Neo: a GPT-2 whose layers see everything and only the last positions in turn, and whose scores are not scaled."""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig, bad_config
from tidemill.models.spec import DecoderSpec, LayerSpec, LearnedPositions

QKV = ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj")
KINDS = ("global", "local")


def describe(raw: RawConfig) -> DecoderSpec:
    hidden, heads = raw.size("hidden_size"), raw.size("num_heads", "num_attention_heads")
    max_position = raw.max_position()
    mlp = MlpSpec(
        inner=raw.size("intermediate_size", default=4 * hidden),
        activation=raw.activation("activation_function", default="gelu_new"),
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        gated=False,
        bias=True,
    )

    def layer(kind: str) -> LayerSpec:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            scale=1.0,
            qkv=QKV,
            out="attn.attention.out_proj",
            out_bias=True,
            rope=None,
            window=raw.size("window_size", default=256) if kind == "local" else None,
        )
        return LayerSpec(attention, mlp, "ln_1", "ln_2")

    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden,
        max_position=max_position,
        norm=NormSpec(raw.number("layer_norm_epsilon", 1e-5), kind="layer", bias=True),
        layers=tuple(layer(kind) for kind in _kinds(raw)),
        layer_prefix="transformer.h.{layer}",
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        tie_embeddings=raw.flag("tie_word_embeddings", True),
        positions=LearnedPositions("transformer.wpe", max_position),
    )


def _kinds(raw: RawConfig) -> list[str]:
    """`attention_types` says how often each run of kinds is repeated: [[["global", "local"], 12]]."""
    count = raw.size("num_layers", "num_hidden_layers")
    runs = raw.get("attention_types", [[KINDS, 12]])
    try:
        kinds = [kind for run, times in runs for _ in range(times) for kind in run]
    except (TypeError, ValueError):
        raise bad_config(f'attention_types is {runs!r}, expected such as [[["global", "local"], 12]]') from None
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise bad_config(f"attention_types names {unknown[0]!r}; known are {', '.join(KINDS)}")
    if len(kinds) != count:
        raise bad_config(f"attention_types make {len(kinds)} layers, num_layers is {count}")
    return kinds
