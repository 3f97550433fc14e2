"""The families a GGUF file may hold: their Hugging Face names, and what llama.cpp's converter does to their weights.

Tables only: `gguf_names` makes the config from them and `gguf_checkpoint` undoes the converter's changes. A new family
with the usual parts is one entry in `ARCHITECTURES`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.errors import UnsupportedModel

ROTARY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Written by some converters; carries nothing the config does not say.
_IGNORED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
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
# One tensor stacks all experts; the star stands for the expert's number.
_EXPERTS = _ATTENTION | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}


@dataclass(frozen=True)
class Architecture:
    model_type: str
    class_name: str
    block: Mapping[str, str]
    """A layer's tensors: GGUF's name -> Hugging Face's."""
    interleaved_rotary: bool = False
    """The converter reorders q and k rows for rotation of neighbouring pairs."""
    norms_plus_one: bool = False
    """The converter adds the 1 that the model itself adds to its norm weights."""

    @property
    def has_experts(self) -> bool:
        return any("*" in name for name in self.block.values())


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, interleaved_rotary=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _LLAMA, norms_plus_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, norms_plus_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, norms_plus_one=True),
}


def architecture_of(metadata: Mapping[str, Any], file: str) -> str:
    name = str(metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file}: GGUF architecture '{name}' is not supported",
            cause=f"supported in GGUF: {', '.join(ARCHITECTURES)}",
            fix="use the model's safetensors folder or hub id instead",
        )
    experts = metadata.get(f"{name}.expert_count", 0)
    if experts and not ARCHITECTURES[name].has_experts:
        raise UnsupportedModel(
            f"{file}: mixture-of-experts models of the architecture '{name}' are not read from GGUF",
            cause=f"{name}.expert_count is {experts}",
            fix="use the model's safetensors folder or hub id instead",
        )
    return name


def hf_name(name: str, architecture: Architecture) -> str | None:
    """The Hugging Face name of a tensor, with a star where it stacks experts; None for what is no weight."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _BLOCK.fullmatch(name)
    if match and match[2] in architecture.block:
        return f"model.layers.{match[1]}.{architecture.block[match[2]]}.{match[3]}"
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
