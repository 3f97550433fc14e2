"""Falcon: 7B (one key/value head, attention beside the MLP behind one norm), 40B and 180B (grouped heads, two norms),
Falcon2-11B (grouped heads, one norm), and Falcon-RW (alibi instead of rotation, attention before the MLP, biases)."""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig, bad_config
from tidemill.models.spec import DecoderSpec, LayerSpec


def describe(raw: RawConfig) -> DecoderSpec:
    raw.refuse("apply_residual_connection_post_layernorm")
    hidden, bias = raw.size("n_embed", "hidden_size"), raw.flag("bias")
    attention = _attention(raw, hidden, bias)
    mlp = MlpSpec(
        inner=raw.size("ffn_hidden_size", default=4 * hidden),
        activation=raw.activation("activation", default="gelu"),
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        gated=False,
        bias=bias,
    )
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden,
        max_position=raw.max_position(),
        norm=NormSpec(raw.number("layer_norm_epsilon", 1e-5), kind="layer", bias=True),
        layers=(_layer(raw, attention, mlp),) * raw.size("num_hidden_layers"),
        layer_prefix="transformer.h.{layer}",
        embedding="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        tie_embeddings=raw.flag("tie_word_embeddings", True),
        ropes=() if attention.rope is None else (raw.rope(attention.head_dim),),
    )


def _attention(raw: RawConfig, hidden: int, bias: bool) -> AttentionSpec:
    heads = raw.size("num_attention_heads")
    head_dim, alibi = hidden // heads, raw.flag("alibi")
    if raw.flag("new_decoder_architecture"):
        kv_heads = raw.kv_heads(heads, "num_kv_heads")
    else:
        # Here num_kv_heads says nothing: transformers writes the number of heads even where they share one.
        kv_heads = 1 if raw.flag("multi_query", True) else heads
    scale = head_dim**-0.5
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scale,
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        bias=bias,
        out_bias=bias,
        grouped=True,
        rope=None if alibi else 0,
        # Falcon adds the slopes to the scores before it scales both.
        alibi=tuple(slope * scale for slope in alibi_slopes(heads)) if alibi else None,
    )


def _layer(raw: RawConfig, attention: AttentionSpec, mlp: MlpSpec) -> LayerSpec:
    newer = raw.flag("new_decoder_architecture")
    if not newer and not raw.flag("parallel_attn", True):
        return LayerSpec(attention, mlp, "input_layernorm", "post_attention_layernorm")
    norms = raw.size("num_ln_in_parallel_attn", default=2 if newer else 1)
    if norms > (2 if newer else 1):
        raise bad_config(f"num_ln_in_parallel_attn is {norms}, with new_decoder_architecture {newer} there is no such")
    if norms == 2:
        return LayerSpec(attention, mlp, "ln_attn", "ln_mlp", parallel=True)
    return LayerSpec(attention, mlp, "input_layernorm", None, parallel=True)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """A geometric series for the largest power of two in `heads`, and every other term of the next one for the rest."""
    power = 1 << (heads.bit_length() - 1)
    series = [2.0 ** (-8.0 * (index + 1) / power) for index in range(power)]
    between = [2.0 ** (-4.0 * (2 * index + 1) / power) for index in range(heads - power)]
    return (*series, *between)
