"""OPT and Galactica: learned positions that start at row 2, a plain MLP, and norms before the sublayers.

The 350M model is unlike its siblings: its norms stand behind the residual additions, none ends the model, and its
embedding is narrower than its layers.
"""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.spec import DecoderSpec, LayerSpec, LearnedPositions

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
FIRST_POSITION = 2
NORM_EPS = 1e-5
"""No config says it."""


def describe(raw: RawConfig) -> DecoderSpec:
    hidden, heads, bias = raw.size("hidden_size"), raw.size("num_attention_heads"), raw.flag("enable_bias", True)
    max_position, learned = raw.max_position(), raw.flag("layer_norm_elementwise_affine", True)
    before = raw.flag("do_layer_norm_before", True)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        scale=(hidden // heads) ** -0.5,
        qkv=QKV,
        out="self_attn.out_proj",
        bias=bias,
        out_bias=bias,
        rope=None,
    )
    mlp = MlpSpec(
        inner=raw.size("ffn_dim"),
        activation=raw.activation("activation_function", default="relu"),
        up=("fc1",),
        down="fc2",
        gated=False,
        bias=bias,
    )
    layer = LayerSpec(attention, mlp, "self_attn_layer_norm", "final_layer_norm", normalise_after=not before)
    ends_in_norm = before and not raw.flag("_remove_final_layer_norm")
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden,
        max_position=max_position,
        norm=NormSpec(NORM_EPS, kind="layer", bias=learned, learned=learned),
        layers=(layer,) * raw.size("num_hidden_layers"),
        layer_prefix="model.decoder.layers.{layer}",
        embedding="model.decoder.embed_tokens",
        final_norm="model.decoder.final_layer_norm" if ends_in_norm else None,
        tie_embeddings=raw.flag("tie_word_embeddings", True),
        positions=LearnedPositions("model.decoder.embed_positions", max_position, FIRST_POSITION),
        embedding_size=raw.size("word_embed_proj_dim", default=hidden),
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
    )
