"""From GGUF's metadata keys to the keys of Hugging Face's config.json and generation_config.json.

Knows what each family (`gguf_architectures`) says beyond the common keys, and the constants that llama.cpp takes for
granted where a file is silent. Knows nothing about files, bytes or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.weights.gguf_architectures import (
    LONG_FACTORS,
    ROTARY_FACTORS,
    SHORT_FACTORS,
    Architecture,
    architecture_of,
)

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
# The two largest Gemmas scale attention by hidden size per head, the others by head size; no key of the file says so.
_SCALED_BY_HIDDEN_SIZE = {("gemma2", 46), ("gemma3", 62)}
_GEMMA3_LOCAL_THETA = 10000.0
# The other families say in their config whether they have biases.
_BIASED_BY_DEFINITION = ("qwen2", "phi")


class _Words:
    """The metadata of one architecture, asked without its prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, file: str) -> None:
        self.metadata, self.architecture, self.file = metadata, architecture, file

    def need(self, key: str) -> Any:
        if (value := self.maybe(key)) is None:
            raise BadCheckpoint(
                f"{self.file} does not say {self.architecture}.{key}",
                cause="the metadata entry is missing",
                fix="download the file again, or convert the model again with llama.cpp",
            )
        return value

    def maybe(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.maybe(key, default)
        return None if value is None else _shortest(value)

    def uniform(self, key: str, default: Any = None) -> int:
        """A per-layer list is fine as long as all layers agree."""
        value = self.need(key) if default is None else self.maybe(key, default)
        if not isinstance(value, list):
            return int(value)
        if len(set(value)) != 1:
            raise UnsupportedModel(
                f"{self.file}: layers of different shape are not read from GGUF",
                cause=f"{self.architecture}.{key} is {value}",
                fix="use the model's safetensors folder or hub id instead",
            )
        return int(value[0])


def hf_config(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    vocab_rows: int,
    read_floats: Callable[[str], list[float]],
    file: str,
) -> dict[str, Any]:
    """What config.json would say. `read_floats` is called only for tensors that hold rotary factors."""
    architecture = architecture_of(metadata, file)
    words = _Words(metadata, architecture.name, file)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": vocab_rows,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }
    if architecture.model_type == "gpt2":
        return config | _gpt2(words)
    factors = {key: read_floats(key) for key in (ROTARY_FACTORS, LONG_FACTORS, SHORT_FACTORS) if key in tensor_names}
    config |= _rotary_decoder(words, architecture, tensor_names)
    config["rope_scaling"] = _rope_scaling(words, factors)
    if architecture.model_type in _FAMILIES:
        _FAMILIES[architecture.model_type](words, tensor_names, config)
    return config


def _rotary_decoder(words: _Words, architecture: Architecture, tensor_names: Collection[str]) -> dict[str, Any]:
    """What all families but GPT-2 say alike."""
    heads = words.uniform("attention.head_count")
    head_dim = words.maybe("attention.key_length") or words.need("embedding_length") // heads
    config: dict[str, Any] = {
        "hidden_size": words.need("embedding_length"),
        "num_hidden_layers": words.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": words.uniform("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": words.uniform("feed_forward_length"),
        "hidden_act": "silu",
        "rope_theta": words.number("rope.freq_base", 10000.0),
        "max_position_embeddings": words.need("context_length"),
    }
    if architecture.layer_norm:
        config["layer_norm_eps"] = _shortest(words.need("attention.layer_norm_epsilon"))
    else:
        config["rms_norm_eps"] = _shortest(words.need("attention.layer_norm_rms_epsilon"))
    rotary_width = words.maybe("rope.dimension_count", head_dim)
    if rotary_width != head_dim:
        config["partial_rotary_factor"] = rotary_width / head_dim
    if architecture.model_type not in _BIASED_BY_DEFINITION:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    if window := words.maybe("attention.sliding_window"):
        config["sliding_window"] = window
    return config


def _gpt2(words: _Words) -> dict[str, Any]:
    return {
        "n_embd": words.need("embedding_length"),
        "n_layer": words.need("block_count"),
        "n_head": words.uniform("attention.head_count"),
        "n_inner": words.uniform("feed_forward_length"),
        "n_positions": words.need("context_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": _shortest(words.need("attention.layer_norm_epsilon")),
        # The converter stores [outputs, inputs], where Hugging Face stores the transpose.
        "transposed_weights": False,
    }


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


def _llama(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensor_names
    if config.get("sliding_window"):
        # Converters write Mistral as llama; the window is what tells them apart.
        config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"


def _mixtral(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    config["num_local_experts"] = words.need("expert_count")
    config["num_experts_per_tok"] = words.need("expert_used_count")


def _phi2(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    config["hidden_act"] = "gelu_new"
    # Silence means one half to the family, and the whole head to the file.
    config.setdefault("partial_rotary_factor", 1.0)


def _qwen3moe(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    used = words.need("expert_used_count")
    config["num_experts"] = words.need("expert_count")
    config["num_experts_per_tok"] = used
    config["moe_intermediate_size"] = words.maybe("expert_feed_forward_length") or config["intermediate_size"] // used
    # Every Qwen3 mixture has experts in all layers and weights that sum to one; no key of the file says so.
    config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _phi3(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    original = words.maybe("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original


def _gemma(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


def _gemma2(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    config.setdefault("sliding_window", 4096)
    _alternating(words, config, period=2)


def _gemma3(words: _Words, tensor_names: Collection[str], config: dict[str, Any]) -> None:
    config.setdefault("sliding_window", None)
    _alternating(words, config, period=6)
    # transformers 5 spells rotation per kind of layer, older configs as two bases; scaling is for global layers only.
    local = words.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)
    scaling = config["rope_scaling"] or {}
    config["rope_local_base_freq"] = local
    config["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": config["rope_theta"], **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _alternating(words: _Words, config: dict[str, Any], period: int) -> None:
    """What Gemma 2 and 3 share: windowed layers, of which every `period`-th sees all, and scaled, capped scores."""
    layers = config["num_hidden_layers"]
    pattern = words.maybe("attention.sliding_window_pattern", period)
    if not isinstance(pattern, list):
        pattern = [not pattern or (layer + 1) % pattern != 0 for layer in range(layers)]
    local = [bool(config["sliding_window"] and slides) for slides in pattern]
    config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in local]
    by_hidden_size = (words.architecture, layers) in _SCALED_BY_HIDDEN_SIZE
    scalar = config["hidden_size"] // config["num_attention_heads"] if by_hidden_size else config["head_dim"]
    config["query_pre_attn_scalar"] = scalar
    config["attn_logit_softcapping"] = words.number("attn_logit_softcapping")
    config["final_logit_softcapping"] = words.number("final_logit_softcapping")
    config["hidden_activation"] = "gelu_pytorch_tanh"
    del config["hidden_act"]


_FAMILIES: Mapping[str, Callable[[_Words, Collection[str], dict[str, Any]], None]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3moe,
    "phi": _phi2,
    "phi3": _phi3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}


def _rope_scaling(words: _Words, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    if ROTARY_FACTORS in factors:
        return {"rope_type": "gguf_factors", "factors": factors[ROTARY_FACTORS]}
    if LONG_FACTORS in factors and SHORT_FACTORS in factors:
        return {
            "rope_type": "longrope",
            "short_factor": factors[SHORT_FACTORS],
            "long_factor": factors[LONG_FACTORS],
        }
    kind, factor = (
        words.maybe("rope.scaling.type"),
        words.maybe("rope.scaling.factor") or words.maybe("rope.scale_linear"),
    )
    if not factor or kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind or "linear", "factor": _shortest(factor)}
    if original := words.maybe("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    for key, hf_key in (
        ("attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if (value := words.number(f"rope.scaling.{key}")) is not None:
            scaling[hf_key] = value
    return scaling


def _shortest(value: float) -> float:
    """The shortest decimal of a stored float32, so that 1e-5 is 1e-5 again and not 9.99999974e-06."""
    import numpy as np

    return float(str(np.float32(value)))
