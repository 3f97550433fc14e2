"""GPT-NeoX and what keeps its form: Pythia, Dolly 2, RedPajama-INCITE, the first StableLM.

Rotary positions on a part of each head, one matrix that holds query, key and value of each head in turn, and attention
beside the MLP (each behind its own norm) or before it.
"""

from __future__ import annotations

from tidemill.layers.rope_config import RopeConfig
from tidemill.layers.spec import AttentionSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.spec import DecoderSpec, LayerSpec

ROTATED_PART = 0.25


def describe(raw: RawConfig) -> DecoderSpec:
    hidden, heads = raw.size("hidden_size"), raw.size("num_attention_heads")
    head_dim, bias = hidden // heads, raw.flag("attention_bias", True)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv=("attention.query_key_value",),
        out="attention.dense",
        bias=bias,
        out_bias=bias,
        grouped=True,
    )
    mlp = MlpSpec(
        inner=raw.size("intermediate_size"),
        activation=raw.activation("hidden_act", default="gelu"),
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        gated=False,
        bias=True,
    )
    layer = LayerSpec(
        attention,
        mlp,
        "input_layernorm",
        "post_attention_layernorm",
        parallel=raw.flag("use_parallel_residual", True),
    )
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden,
        max_position=raw.max_position(),
        norm=NormSpec(raw.number("layer_norm_eps", 1e-5), kind="layer", bias=True),
        layers=(layer,) * raw.size("num_hidden_layers"),
        layer_prefix="gpt_neox.layers.{layer}",
        embedding="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
        head="embed_out",
        tie_embeddings=raw.flag("tie_word_embeddings"),
        ropes=(_rope(raw, head_dim),),
    )


def _rope(raw: RawConfig, head_dim: int) -> RopeConfig:
    """Old configs name the base and the rotated part of a head in words of their own."""
    parameters = raw.mapping("rope_parameters") or raw.mapping("rope_scaling")
    parameters.setdefault("partial_rotary_factor", raw.number("rotary_pct", ROTATED_PART))
    parameters.setdefault("rope_theta", raw.number("rotary_emb_base", raw.number("rope_theta", 10000.0)))
    return raw.rope(head_dim, parameters)
