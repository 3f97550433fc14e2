"""Command R (Cohere) and Command R7B, Command A (Cohere 2): attention and MLP side by side behind one layer norm.

Heads turn in neighbouring pairs, and logits are scaled. In Cohere 2 most layers slide, and only those turn at all.
"""

from __future__ import annotations

from tidemill.layers.spec import AttentionSpec, HeadNormSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig
from tidemill.models.llama import DOWN, GATE_UP, OUT, QKV
from tidemill.models.spec import DecoderSpec, LayerSpec

_ASSUMED = {
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "tie_word_embeddings": True,
}
_ONLY = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
}


def describe(raw: RawConfig) -> DecoderSpec:
    raw = raw.assuming(**_ASSUMED)
    raw.only(**_ONLY)
    second = raw.architecture == "Cohere2ForCausalLM"
    norm = NormSpec(raw.number("layer_norm_eps", 1e-5), kind="layer")
    heads = raw.size("num_attention_heads")
    head_dim = raw.size("head_dim", default=raw.size("hidden_size") // heads)
    bias = raw.flag("attention_bias")
    head_norm = HeadNormSpec(norm, "self_attn.q_norm", "self_attn.k_norm", per_head=True)
    mlp = MlpSpec(inner=raw.size("intermediate_size"), activation=raw.activation("hidden_act"), up=GATE_UP, down=DOWN)

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=raw.kv_heads(heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qkv=QKV,
            out=OUT,
            bias=bias,
            out_bias=bias,
            rope=None if second and window is None else 0,
            neighbours=True,
            window=window,
            head_norm=head_norm if raw.flag("use_qk_norm") else None,
        )
        return LayerSpec(attention, mlp, input_norm="input_layernorm", mlp_norm=None, parallel=True)

    # Command R was published with the length of its first training phase, and the real one beside it.
    length = raw.max_position("model_max_length", "max_position_embeddings")
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        max_position=length,
        norm=norm,
        layers=tuple(layer(window) for window in _windows(raw, second)),
        tie_embeddings=raw.flag("tie_word_embeddings"),
        ropes=(raw.rope(head_dim, max_position=length),),
        logit_scale=raw.number("logit_scale", 1.0),
    )


def _windows(raw: RawConfig, second: bool) -> list[int | None]:
    count = raw.size("num_hidden_layers")
    if not second:
        return [None] * count
    period = raw.size("sliding_window_pattern")
    return raw.windows([(layer + 1) % period != 0 for layer in range(count)])
