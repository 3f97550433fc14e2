"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side behind one layer norm, with biases everywhere.

Of every head, only a part turns with its position.
"""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, HeadNormSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.llama import QKV
from tidemill.models.spec import DecoderSpec, LayerSpec


def describe(raw: RawConfig) -> DecoderSpec:
    norm = NormSpec(raw.number("layer_norm_eps", 1e-5), kind="layer", bias=True)
    heads = raw.size("num_attention_heads")
    head_dim = raw.size("head_dim", default=raw.size("hidden_size") // heads)
    head_norm = HeadNormSpec(norm, "self_attn.q_layernorm", "self_attn.k_layernorm")
    attention = AttentionSpec(
        heads=heads,
        kv_heads=raw.kv_heads(heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv=QKV,
        out="self_attn.dense",
        bias=True,
        out_bias=True,
        head_norm=head_norm if raw.flag("qk_layernorm") else None,
    )
    mlp = MlpSpec(
        inner=raw.size("intermediate_size"),
        activation=raw.activation("hidden_act", default="gelu_new"),
        up=("mlp.fc1",),
        down="mlp.fc2",
        gated=False,
        bias=True,
    )
    layer = LayerSpec(attention, mlp, input_norm="input_layernorm", mlp_norm=None, parallel=True)
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        max_position=raw.max_position(),
        norm=norm,
        layers=(layer,) * raw.size("num_hidden_layers"),
        final_norm="model.final_layernorm",
        tie_embeddings=raw.flag("tie_word_embeddings"),
        head_bias=True,
        ropes=(raw.rope(head_dim, fraction=0.5),),
    )
