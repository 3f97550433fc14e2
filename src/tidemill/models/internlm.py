"""InternLM 2, 2.5 and 3: Llama decoders. InternLM 2 has names of its own and one matrix that holds, for each key/value
head, its queries, its key and its value; InternLM 3 has Llama's names. Both have their own words for biases."""

from __future__ import annotations

from dataclasses import replace

from tidemill.layers.spec import AttentionSpec, MlpSpec
from tidemill.models import llama
from tidemill.models.config import RawConfig
from tidemill.models.spec import DecoderSpec, LayerSpec


def describe(raw: RawConfig) -> DecoderSpec:
    dense, third = llama.describe(raw), raw.architecture.startswith("InternLM3")
    heads, bias = raw.size("num_attention_heads"), raw.flag("bias", not third)
    head_dim = raw.size("head_dim", default=dense.hidden_size // heads)
    attention = AttentionSpec(
        heads=heads,
        kv_heads=raw.kv_heads(heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv=llama.QKV if third else ("attention.wqkv",),
        out=llama.OUT if third else "attention.wo",
        bias=raw.flag("qkv_bias") if third else bias,
        out_bias=bias,
        grouped=not third,
    )
    mlp = MlpSpec(
        inner=raw.size("intermediate_size"),
        activation=raw.activation("hidden_act"),
        up=llama.GATE_UP if third else ("feed_forward.w1", "feed_forward.w3"),
        down=llama.DOWN if third else "feed_forward.w2",
        bias=third and bias,
    )
    norms = ("input_layernorm", "post_attention_layernorm") if third else ("attention_norm", "ffn_norm")
    return replace(
        dense,
        layers=(LayerSpec(attention, mlp, *norms),) * len(dense.layers),
        embedding=dense.embedding if third else "model.tok_embeddings",
        head=dense.head if third else "output",
    )
