"""DeepSeek V2 (also Lite) and V3 (also R1, Moonlight): latent attention, and experts behind the first dense layers.

V2 and V3 differ in how experts are chosen: V2 takes the best of a softmax, V3 the best of sigmoids shifted by a learned
bias, and counts groups of experts by their best two.
"""

from __future__ import annotations

import math

from tidemill.errors import UnsupportedModel
from tidemill.layers.rope_config import RopeConfig
from tidemill.layers.spec import LatentAttentionSpec, MlpSpec, MoeSpec, NormSpec
from tidemill.models import llama
from tidemill.models.config import RawConfig, bad_config
from tidemill.models.mixtral import expert_counts
from tidemill.models.qwen_moe import EXPERT_DOWN, EXPERT_UP
from tidemill.models.spec import DecoderSpec, LayerSpec

_BOTH = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_V2 = _BOTH | {
    "n_routed_experts": 64,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "scoring_func": "softmax",
}
_V3 = _BOTH | {
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
LATENT_NORM_EPS = 1e-6
"""Of the norms inside the attention, whatever rms_norm_eps is."""


def describe(raw: RawConfig) -> DecoderSpec:
    v3 = raw.architecture.startswith("DeepseekV3")
    raw = raw.assuming(**(_V3 if v3 else _V2))
    if v3:
        _known(raw, "topk_method", "noaux_tc")
        _known(raw, "scoring_func", "sigmoid")
    else:
        _known(raw, "topk_method", "greedy", "group_limited_greedy")
        _known(raw, "scoring_func", "softmax")
        # Its authors' code and transformers' disagree on what it does to the scaling, and no checkpoint settles it.
        raw.refuse("norm_topk_prob")
    rope = raw.rope(raw.size("qk_rope_head_dim"))
    attention = _attention(raw, rope, neighbours=not v3 or raw.flag("rope_interleave"))
    dense = MlpSpec(
        inner=raw.size("intermediate_size"),
        activation=raw.activation("hidden_act"),
        up=llama.GATE_UP,
        down=llama.DOWN,
        bias=not v3 and raw.flag("mlp_bias"),
    )
    mixture = _mixture(raw, v3)
    first, step = raw.number("first_k_dense_replace", 0), raw.size("moe_layer_freq", default=1)
    return DecoderSpec(
        architecture=raw.architecture,
        vocab_size=raw.size("vocab_size"),
        hidden_size=raw.size("hidden_size"),
        max_position=raw.max_position(),
        norm=NormSpec(raw.number("rms_norm_eps", 1e-6)),
        layers=tuple(
            LayerSpec(
                attention,
                mixture if layer >= first and layer % step == 0 else dense,
                "input_layernorm",
                "post_attention_layernorm",
            )
            for layer in range(raw.size("num_hidden_layers"))
        ),
        tie_embeddings=raw.flag("tie_word_embeddings"),
        ropes=(rope,),
    )


def _known(raw: RawConfig, key: str, *values: str) -> None:
    if raw.get(key, values[0]) not in values:
        raise UnsupportedModel(
            f"config.json: {key} is {raw.get(key)!r}, which the native {raw.architecture} does not do",
            param=key,
            cause=f"it does {' and '.join(values)}",
            fix="--model-impl transformers",
        )


def _attention(raw: RawConfig, rope: RopeConfig, *, neighbours: bool) -> LatentAttentionSpec:
    plain = raw.size("qk_nope_head_dim")
    return LatentAttentionSpec(
        heads=raw.size("num_attention_heads"),
        query_rank=None if raw.get("q_lora_rank") is None else raw.size("q_lora_rank"),
        kv_rank=raw.size("kv_lora_rank"),
        plain_dim=plain,
        rope_dim=rope.dim,
        value_dim=raw.size("v_head_dim"),
        scale=(plain + rope.dim) ** -0.5 * _sharpening(rope),
        norm_eps=LATENT_NORM_EPS,
        bias=raw.flag("attention_bias"),
        neighbours=neighbours,
    )


def _sharpening(rope: RopeConfig) -> float:
    """Stretched rotations flatten attention; the scores grow to make up for it, on the query and on the key."""
    weight = rope.parameters.get("mscale_all_dim")
    if rope.kind == "default" or not weight:
        return 1.0
    factor = rope.parameters.get("factor")
    if not factor:
        raise bad_config("rope mscale_all_dim needs factor")
    return (1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0) ** 2


def _mixture(raw: RawConfig, v3: bool) -> MoeSpec:
    experts, top_k = expert_counts(raw, "n_routed_experts")
    inner, activation = raw.size("moe_intermediate_size"), raw.activation("hidden_act")
    shared = None
    if raw.get("n_shared_experts"):
        # They are stored as one, as wide as all of them.
        shared = MlpSpec(
            inner=inner * raw.size("n_shared_experts"),
            activation=activation,
            up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
            down="mlp.shared_experts.down_proj",
            bias=not v3 and raw.flag("mlp_bias"),
        )
    groups, top_groups = 1, 1
    if v3 or raw.get("topk_method") == "group_limited_greedy":
        groups, top_groups = _groups(raw, experts, top_k, smallest=2 if v3 else 1)
    return MoeSpec(
        experts=experts,
        top_k=top_k,
        inner=inner,
        activation=activation,
        router="mlp.gate",
        up=EXPERT_UP,
        down=EXPERT_DOWN,
        scoring="sigmoid" if v3 else "softmax",
        renormalise=raw.flag("norm_topk_prob"),
        scaling=raw.number("routed_scaling_factor", 1.0),
        choice_bias="mlp.gate.e_score_correction_bias" if v3 else None,
        groups=groups,
        top_groups=top_groups,
        group_score="best_two" if v3 else "best",
        shared=shared,
    )


def _groups(raw: RawConfig, experts: int, top_k: int, smallest: int) -> tuple[int, int]:
    groups, top_groups = raw.size("n_group"), raw.size("topk_group")
    size = experts // groups
    if experts % groups or size < smallest:
        raise bad_config(f"{experts} experts cannot stand in {groups} groups of at least {smallest} (n_group)")
    if top_groups > groups or top_k > top_groups * size:
        raise bad_config(f"topk_group {top_groups} leaves no {top_k} experts to choose from groups of {size}")
    return groups, top_groups
