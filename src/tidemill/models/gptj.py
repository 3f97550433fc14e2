"""GPT-J: attention and MLP beside each other behind one norm, rotary positions on neighbouring dimensions of a part of
each head, and a biased head."""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig, bad_config
from tidemill.models.spec import DecoderSpec, LayerSpec

QKV = ("attn.q_proj", "attn.k_proj", "attn.v_proj")


def describe(raw: RawConfig) -> DecoderSpec:
    hidden, heads = raw.size("n_embd", "hidden_size"), raw.size("n_head", "num_attention_heads")
    head_dim, rotary_dim = hidden // heads, raw.size("rotary_dim", default=64)
    if rotary_dim > head_dim:
        raise bad_config(f"rotary_dim is {rotary_dim}, and a head has only {head_dim} dimensions")
    max_position = raw.max_position("n_positions", "max_position_embeddings")
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv=QKV,
        out="attn.out_proj",
        neighbours=True,
    )
    mlp = MlpSpec(
        inner=raw.size("n_inner", default=4 * hidden),
        activation=raw.activation("activation_function", default="gelu_new"),
        up=("mlp.fc_in",),
        down="mlp.fc_out",
        gated=False,
        bias=True,
    )
    layer = LayerSpec(attention, mlp, "ln_1", None, parallel=True)
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden,
        max_position=max_position,
        norm=NormSpec(raw.number("layer_norm_epsilon", 1e-5), kind="layer", bias=True),
        layers=(layer,) * raw.size("n_layer", "num_hidden_layers"),
        layer_prefix="transformer.h.{layer}",
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        tie_embeddings=raw.flag("tie_word_embeddings"),
        head_bias=True,
        ropes=(raw.rope(rotary_dim, {}, max_position=max_position),),
    )
