"""From GGUF's words to Hugging Face's: config keys, tensor names, and the row order of rotary weights.

Knows the architectures that can be translated and nothing about files, bytes or kernels. A new architecture is one
entry in `_ARCHITECTURES`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.errors import BadCheckpoint, UnsupportedModel


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    class_name: str
    # llama.cpp's converter reorders q and k rows of this family for rotation of neighbouring pairs
    interleaved_rotary: bool


_ARCHITECTURES = {
    "llama": _Architecture("llama", "LlamaForCausalLM", True),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", False),
}

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROTARY_FACTORS = "rope_freqs.weight"
# Written by some converters; carries nothing the config does not say.
_IGNORED = re.compile(r"rope_freqs\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight")

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def architecture_of(metadata: Mapping[str, Any], file: str) -> str:
    name = metadata.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file}: GGUF architecture '{name}' is not supported",
            cause=f"supported in GGUF: {', '.join(_ARCHITECTURES)}",
            fix="use the model's safetensors folder or hub id instead",
        )
    if metadata.get(f"{name}.expert_count", 0):
        raise UnsupportedModel(
            f"{file}: mixture-of-experts models are not read from GGUF",
            cause=f"{name}.expert_count is {metadata[f'{name}.expert_count']}",
            fix="use the model's safetensors folder or hub id instead",
        )
    return str(name)


def hf_name(name: str) -> str | None:
    """The Hugging Face name of a tensor, or None for one that is no weight (rotary tables)."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _IN_BLOCK:
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"
    if _IGNORED.fullmatch(name):
        return None
    raise UnsupportedModel(
        f"GGUF tensor {name} has no known meaning",
        cause="the file holds a variant of the architecture that is not supported",
        fix="use the model's safetensors folder or hub id instead",
    )


def rotary_heads(name: str, config: Mapping[str, Any], architecture: str) -> int | None:
    """Over how many heads the rows of a tensor were interleaved by the converter; None where they were not."""
    match = _BLOCK.fullmatch(name)
    if not match or not _ARCHITECTURES[architecture].interleaved_rotary:
        return None
    counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return counts.get(match[2])


def hf_config(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    vocab_rows: int,
    read_factors: Callable[[], list[float]],
    file: str,
) -> dict[str, Any]:
    """What config.json would say. `read_factors` is called only when the file carries rotary factors."""
    name = architecture_of(metadata, file)
    architecture = _ARCHITECTURES[name]

    def need(key: str) -> Any:
        if (value := metadata.get(f"{name}.{key}")) is None:
            raise BadCheckpoint(
                f"{file} does not say {name}.{key}",
                cause="the metadata entry is missing",
                fix="download the file again, or convert the model again with llama.cpp",
            )
        return value

    def maybe(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    heads = _uniform(need("attention.head_count"), "attention.head_count", file)
    head_dim = maybe("attention.key_length") or need("embedding_length") // heads
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": need("embedding_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _uniform(maybe("attention.head_count_kv", heads), "attention.head_count_kv", file),
        "head_dim": head_dim,
        "intermediate_size": _uniform(need("feed_forward_length"), "feed_forward_length", file),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(maybe("rope.freq_base", 10000.0)),
        "max_position_embeddings": need("context_length"),
        "vocab_size": vocab_rows,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }
    rotary_width = maybe("rope.dimension_count", head_dim)
    if rotary_width != head_dim:
        config["partial_rotary_factor"] = rotary_width / head_dim
    # Qwen2's biases are part of its definition; the other families say it in their config.
    if name != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    if name == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensor_names
    if window := maybe("attention.sliding_window"):
        config["sliding_window"] = window
        if config["architectures"] == ["LlamaForCausalLM"]:
            # Converters write Mistral as llama; the window is what tells them apart.
            config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"
    factors = read_factors() if ROTARY_FACTORS in tensor_names else None
    config["rope_scaling"] = _rope_scaling(maybe, factors)
    return config


def hf_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json would say: every id that ends a turn, and the sampling the author recommends."""
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    stops = list(dict.fromkeys(token for token in ids if token is not None))
    config: dict[str, Any] = {}
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    if stops:
        config["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    for key, hf_key in _SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            config[hf_key] = _shortest(value) if isinstance(value, float) else value
    return config


def _rope_scaling(maybe: Callable[..., Any], factors: list[float] | None) -> dict[str, Any] | None:
    if factors is not None:
        return {"rope_type": "gguf_factors", "factors": factors}
    kind, factor = maybe("rope.scaling.type"), maybe("rope.scaling.factor") or maybe("rope.scale_linear")
    if not factor or kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": _shortest(factor)}
    if original := maybe("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    for key, hf_key in (
        ("attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if (value := maybe(f"rope.scaling.{key}")) is not None:
            scaling[hf_key] = _shortest(value)
    return scaling


def _uniform(value: Any, key: str, file: str) -> int:
    """A per-layer list is fine as long as all layers agree."""
    if not isinstance(value, list):
        return int(value)
    if len(set(value)) != 1:
        raise UnsupportedModel(
            f"{file}: layers of different shape are not read from GGUF",
            cause=f"{key} is {value}",
            fix="use the model's safetensors folder or hub id instead",
        )
    return int(value[0])


def _shortest(value: float) -> float:
    """The shortest decimal of a stored float32, so that 1e-5 is 1e-5 again and not 9.99999974e-06."""
    import numpy as np

    return float(str(np.float32(value)))
