"""StableLM 3B and StableLM 2: Llama with layer norms, heads that turn by a quarter, and in the 12B parallel layers."""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, HeadNormSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.llama import DOWN, GATE_UP, OUT, QKV
from tidemill.models.spec import DecoderSpec, LayerSpec


def describe(raw: RawConfig) -> DecoderSpec:
    raw = raw.assuming(max_position_embeddings=4096)
    eps = raw.number("layer_norm_eps", 1e-5)
    heads = raw.size("num_attention_heads")
    head_dim = raw.size("hidden_size") // heads
    head_norm = HeadNormSpec(
        NormSpec(eps, kind="layer"),
        query="self_attn.q_layernorm.norms.{head}",
        key="self_attn.k_layernorm.norms.{head}",
        per_head=True,
    )
    attention = AttentionSpec(
        heads=heads,
        kv_heads=raw.kv_heads(heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv=QKV,
        out=OUT,
        bias=raw.flag("use_qkv_bias"),
        head_norm=head_norm if raw.flag("qk_layernorm") else None,
    )
    mlp = MlpSpec(inner=raw.size("intermediate_size"), activation=raw.activation("hidden_act"), up=GATE_UP, down=DOWN)
    parallel = raw.flag("use_parallel_residual")
    layer = LayerSpec(
        attention,
        mlp,
        input_norm="input_layernorm",
        mlp_norm=None if parallel else "post_attention_layernorm",
        parallel=parallel,
    )
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        max_position=raw.max_position(),
        norm=NormSpec(eps, kind="layer", bias=True),
        layers=(layer,) * raw.size("num_hidden_layers"),
        tie_embeddings=raw.flag("tie_word_embeddings"),
        ropes=(raw.rope(head_dim, fraction=0.25),),
    )
