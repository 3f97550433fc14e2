"""The families a GGUF file may hold: their Hugging Face names, and what llama.cpp's converter does to their weights.

Tables only: `gguf_names` makes the config from them and `gguf_checkpoint` undoes the converter's changes. A new family
with the usual parts is one entry in `ARCHITECTURES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.errors import UnsupportedModel

ROTARY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
EXPERT, STACKED_QKV = "*", "?"
"""In a name, for a tensor that holds several: one for each expert, or one each for queries, keys and values."""
# Written by some converters; carries nothing the config does not say.
_IGNORED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")
# Old mixtures have a tensor for each expert, whose number follows the name.
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)(?:\.(\d+))?\.(weight|bias)")

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_ATTENTION = _QKV | {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
_LLAMA = _ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FOUR_NORMS = _LLAMA | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERTS = _ATTENTION | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
_MIXTRAL = _ATTENTION | {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
    "ffn_up_exps": "block_sparse_moe.experts.*.w3",
    "ffn_down_exps": "block_sparse_moe.experts.*.w2",
}
_PHI2 = _QKV | {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.?_proj",
    "attn_output": "self_attn.dense",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclass(frozen=True)
class Architecture:
    name: str
    """GGUF's; it stands before the metadata keys."""
    model_type: str
    class_name: str
    block: Mapping[str, str]
    """A layer's tensors: GGUF's name -> Hugging Face's."""
    top: Mapping[str, str] = field(default_factory=lambda: _TOP_LEVEL)
    """The same for tensors outside of layers."""
    layers: str = "model.layers"
    interleaved_rotary: bool = False
    """The converter reorders q and k rows for rotation of neighbouring pairs."""
    norms_plus_one: bool = False
    """The converter adds the 1 that the model itself adds to its norm weights."""
    layer_norm: bool = False
    """Norms subtract the mean."""

    @property
    def has_experts(self) -> bool:
        return any(EXPERT in name for name in self.block.values())


_ALL = (
    Architecture("llama", "llama", "LlamaForCausalLM", _LLAMA, interleaved_rotary=True),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _LLAMA),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", _LLAMA),
    Architecture("qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS),
    Architecture(
        "phi2", "phi", "PhiForCausalLM", _PHI2, _TOP_LEVEL | {"output_norm": "model.final_layernorm"}, layer_norm=True
    ),
    Architecture("phi3", "phi3", "Phi3ForCausalLM", _FUSED),
    Architecture("gemma", "gemma", "GemmaForCausalLM", _LLAMA, norms_plus_one=True),
    Architecture("gemma2", "gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, norms_plus_one=True),
    Architecture("gemma3", "gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, norms_plus_one=True),
    Architecture(
        "gpt2",
        "gpt2",
        "GPT2LMHeadModel",
        _GPT2,
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        "transformer.h",
        layer_norm=True,
    ),
)
ARCHITECTURES: Mapping[str, Architecture] = {architecture.name: architecture for architecture in _ALL}
# Converters write Mixtral as llama; the experts are what tells them apart.
MIXTURES = {"llama": Architecture("llama", "mixtral", "MixtralForCausalLM", _MIXTRAL, interleaved_rotary=True)}


def architecture_of(metadata: Mapping[str, Any], file: str) -> Architecture:
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file}: GGUF architecture '{name}' is not supported",
            cause=f"supported in GGUF: {', '.join(ARCHITECTURES)}",
            fix="use the model's safetensors folder or hub id instead",
        )
    experts = metadata.get(f"{name}.expert_count", 0)
    architecture = MIXTURES.get(name, ARCHITECTURES[name]) if experts else ARCHITECTURES[name]
    if experts and not architecture.has_experts:
        raise UnsupportedModel(
            f"{file}: mixture-of-experts models of the architecture '{name}' are not read from GGUF",
            cause=f"{name}.expert_count is {experts}",
            fix="use the model's safetensors folder or hub id instead",
        )
    return architecture


def hf_name(name: str, architecture: Architecture) -> str | None:
    """The Hugging Face name of a tensor, with a sign where it holds several; None for what is no weight."""
    part, _, ending = name.rpartition(".")
    if part in architecture.top and ending in ("weight", "bias"):
        return f"{architecture.top[part]}.{ending}"
    if match := _BLOCK.fullmatch(name):
        layer, part, expert, ending = match.groups()
        if found := architecture.block.get(part if expert is None else f"{part}_exps"):
            found = found if expert is None else found.replace(EXPERT, expert)
            return f"{architecture.layers}.{layer}.{found}.{ending}"
    if _IGNORED.fullmatch(name):
        return None
    raise UnsupportedModel(
        f"GGUF tensor {name} has no known meaning in a {architecture.class_name}",
        cause="the file holds a variant of the architecture that is not supported",
        fix="use the model's safetensors folder or hub id instead",
    )


def is_shifted_norm(name: str, architecture: Architecture) -> bool:
    return architecture.norms_plus_one and name.endswith("norm.weight")


def rotary_heads(name: str, config: Mapping[str, Any], architecture: Architecture) -> int | None:
    """Over how many heads the rows of a tensor were interleaved by the converter; None where they were not."""
    match = _BLOCK.fullmatch(name)
    if not match or not architecture.interleaved_rotary:
        return None
    counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return counts.get(match[2])
