"""Gemma 1, 2 and 3: norms that multiply by 1 + w, and embeddings that grow by the square root of their width.

Gemma 2 adds norms behind attention and MLP, windows on every other layer and caps on scores; Gemma 3 normalises queries
and keys, slides on five layers of six and turns those by a base of their own. Knows the text part only, not images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.layers.rope_config import RopeConfig
from tidemill.layers.spec import AttentionSpec, HeadNormSpec, MlpSpec, NormSpec
from tidemill.models.config import RawConfig, bad_config
from tidemill.models.llama import DOWN, GATE_UP, OUT, QKV
from tidemill.models.spec import DecoderSpec, LayerSpec

_GEMMA = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GEMMA2 = _GEMMA | {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3 = _GEMMA | {
    # As the text part of a larger model, Gemma 3 is published without what equals transformers' defaults.
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_ASSUMED: Mapping[str, Mapping[str, Any]] = {
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
}
_GLOBAL, _LOCAL = 0, 1


def describe(raw: RawConfig) -> DecoderSpec:
    raw = raw.assuming(**_ASSUMED[raw.architecture])
    raw.refuse("use_bidirectional_attention")
    first, third = raw.architecture == "GemmaForCausalLM", raw.architecture == "Gemma3ForCausalLM"
    if third:
        # transformers reads the cap on Gemma 3's attention and does nothing with it: what it would mean is unknown.
        raw.refuse("attn_logit_softcapping")
    norm = NormSpec(raw.number("rms_norm_eps", 1e-6), unit_offset=True)
    heads, head_dim = raw.size("num_attention_heads"), raw.size("head_dim")
    bias = raw.flag("attention_bias")
    mlp = MlpSpec(inner=raw.size("intermediate_size"), activation=_activation(raw, first), up=GATE_UP, down=DOWN)

    def layer(window: int | None) -> LayerSpec:
        attention = AttentionSpec(
            heads=heads,
            kv_heads=raw.kv_heads(heads),
            head_dim=head_dim,
            scale=raw.number("query_pre_attn_scalar", head_dim) ** -0.5,
            qkv=QKV,
            out=OUT,
            bias=bias,
            out_bias=bias,
            rope=_LOCAL if third and window is not None else _GLOBAL,
            window=window,
            soft_cap=raw.number("attn_logit_softcapping", 0.0) or None,
            head_norm=HeadNormSpec(norm, "self_attn.q_norm", "self_attn.k_norm") if third else None,
        )
        if first:
            return LayerSpec(attention, mlp, "input_layernorm", "post_attention_layernorm")
        return LayerSpec(
            attention,
            mlp,
            input_norm="input_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            after_attention="post_attention_layernorm",
            after_mlp="post_feedforward_layernorm",
        )

    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        max_position=raw.max_position(),
        norm=norm,
        layers=tuple(layer(window) for window in _windows(raw, first)),
        tie_embeddings=raw.flag("tie_word_embeddings"),
        ropes=_two_ropes(raw, head_dim) if third else (raw.rope(head_dim),),
        embedding_scale=raw.size("hidden_size") ** 0.5,
        logit_soft_cap=raw.number("final_logit_softcapping", 0.0) or None,
    )


def _activation(raw: RawConfig, first: bool) -> str:
    tanh = "gelu_pytorch_tanh"
    if not first:
        return raw.activation("hidden_activation", default=tanh)
    # Gemma 1 was published as "gelu" and trained with its approximation.
    found = raw.activation("hidden_act", default=tanh)
    return tanh if found == "gelu" else found


def _windows(raw: RawConfig, first: bool) -> list[int | None]:
    count = raw.size("num_hidden_layers")
    if first:
        return [None] * count
    period = raw.size("sliding_window_pattern")
    return raw.windows([(layer + 1) % period != 0 for layer in range(count)])


def _two_ropes(raw: RawConfig, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """(global, local). Older configs give two bases, and a scaling that is for the global layers only."""
    given, length = raw.mapping("rope_parameters"), raw.max_position()
    if given and not given.keys() & {"full_attention", "sliding_attention"}:
        raise bad_config("rope_parameters names neither full_attention nor sliding_attention")
    everywhere = {"rope_theta": raw.number("rope_theta", 1e6), **raw.mapping("rope_scaling")}
    everywhere |= given.get("full_attention") or {}
    nearby = {"rope_theta": raw.number("rope_local_base_freq", 1e4), **(given.get("sliding_attention") or {})}
    if everywhere.get("rope_type") == "linear":
        # Unlike others, Gemma 3 gives the length after scaling.
        length = int(length / everywhere.get("factor", 1.0))
    return raw.rope(head_dim, everywhere, max_position=length), raw.rope(head_dim, nearby)
