"""GPT-2 and what keeps its form: DistilGPT-2, DialoGPT, Cerebras-GPT.

Pre-norm decoder with learned positions and a plain MLP. Matrices are stored [inputs, outputs], unless the config of a
GGUF file says otherwise, and one of them stacks queries, keys and values. What old files keep beside the weights
(`attn.bias`, `attn.masked_bias`) is no part of the model.
"""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.spec import DecoderSpec, LayerSpec, LearnedPositions


def describe(raw: RawConfig) -> DecoderSpec:
    raw.refuse("add_cross_attention")
    hidden, heads = raw.size("n_embd", "hidden_size"), raw.size("n_head", "num_attention_heads")
    transposed = raw.flag("transposed_weights", True)
    max_position = raw.size("n_positions", "max_position_embeddings", default=1024)
    mlp = MlpSpec(
        inner=raw.size("n_inner", default=4 * hidden),
        activation=raw.activation("activation_function", default="gelu_new"),
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        gated=False,
        bias=True,
        transposed=transposed,
    )

    def layer(index: int) -> LayerSpec:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            scale=_scale(raw, hidden // heads, index),
            qkv=("attn.c_attn",),
            out="attn.c_proj",
            bias=True,
            out_bias=True,
            transposed=transposed,
            rope=None,
        )
        return LayerSpec(attention, mlp, "ln_1", "ln_2")

    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=hidden,
        max_position=max_position,
        norm=NormSpec(raw.number("layer_norm_epsilon", 1e-5), kind="layer", bias=True),
        layers=tuple(layer(index) for index in range(raw.size("n_layer", "num_hidden_layers"))),
        layer_prefix="transformer.h.{layer}",
        embedding="transformer.wte",
        final_norm="transformer.ln_f",
        tie_embeddings=raw.flag("tie_word_embeddings", True),
        positions=LearnedPositions("transformer.wpe", max_position),
    )


def _scale(raw: RawConfig, head_dim: int, layer: int) -> float:
    """`reorder_and_upcast_attn` says in which order and precision scores were computed in training: the same scores."""
    scale = head_dim**-0.5 if raw.flag("scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if raw.flag("scale_attn_by_inverse_layer_idx") else scale
