"""A decoder's shape, read once from a Hugging Face style config dictionary.

Knows config.json in its old and new spellings; knows no tensors, so planning and start-up checks need no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.errors import BadCheckpoint
from tidemill.layers.rope_config import ROPE_PARAMETERS, RopeConfig

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")


@dataclass(frozen=True)
class DecoderConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    activation: str
    tie_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: how many of the last positions it sees, None for all."""
    rope: RopeConfig

    @property
    def longest_context(self) -> int:
        """Positions the rotary embedding is made for. Configs give the length before scaling for linear and dynamic,
        and either length for yarn."""
        factor = float(self.rope.parameters.get("factor") or 1.0)
        if self.rope.kind in ("linear", "dynamic"):
            return int(self.max_position * factor)
        if self.rope.kind == "yarn":
            return max(self.max_position, int(self.rope.parameters["original_max_position_embeddings"] * factor))
        return self.max_position

    def kv_bytes_per_token(self, element_size: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * element_size


def read_decoder_config(raw: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """The Llama family's config. Defaults are transformers' for the keys that published configs leave out."""
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        if not isinstance(raw.get(key), int) or raw[key] < 1:
            raise _bad(f"{key} is {raw.get(key)!r}, expected a positive integer")
    num_heads, qwen2, qwen3 = raw["num_attention_heads"], "Qwen2" in architecture, "Qwen3" in architecture
    head_dim = raw.get("head_dim") or raw["hidden_size"] // num_heads
    attention_bias = bool(raw.get("attention_bias", qwen2))
    max_position = raw.get("max_position_embeddings") or 2048
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=raw.get("rms_norm_eps") or 1e-6,
        activation=raw.get("hidden_act") or "silu",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=attention_bias,
        output_bias=attention_bias and not qwen2,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=qwen3,
        windows=_windows(raw, architecture),
        rope=_rope(raw, head_dim, max_position),
    )
    _check(config)
    return config


def _check(config: DecoderConfig) -> None:
    """What would otherwise fail in the middle of loading."""
    if config.num_heads % config.num_kv_heads:
        raise _bad(f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key/value heads evenly")
    if config.activation not in ACTIVATIONS:
        raise _bad(f"hidden_act {config.activation!r} is not known; known are {', '.join(ACTIVATIONS)}")
    if len(config.windows) != config.num_layers:
        raise _bad(f"layer_types has {len(config.windows)} entries for {config.num_layers} layers")
    required = ROPE_PARAMETERS.get(config.rope.kind)
    if required is None:
        raise _bad(f"rope type {config.rope.kind!r} is not known; known are {', '.join(ROPE_PARAMETERS)}")
    if missing := [name for name in required if config.rope.parameters.get(name) is None]:
        raise _bad(f"rope type {config.rope.kind} needs {', '.join(missing)}")
    for name in ("short_factor", "long_factor", "factors"):
        factors = config.rope.parameters.get(name)
        if factors is not None and len(factors) != config.rope.dim // 2:
            raise _bad(f"rope {name} has {len(factors)} entries, expected {config.rope.dim // 2}")


def _bad(message: str) -> BadCheckpoint:
    return BadCheckpoint(f"config.json: {message}", fix="fetch config.json of the model again")


def _windows(raw: Mapping[str, Any], architecture: str) -> tuple[int | None, ...]:
    num_layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if not window or ("Qwen" in architecture and not raw.get("use_sliding_window", False)):
        return (None,) * num_layers
    if raw.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in raw["layer_types"])
    if "Qwen" in architecture:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return (window,) * num_layers if "Mistral" in architecture else (None,) * num_layers


def _rope(raw: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = {"su": "longrope"}.get(kind, kind)
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    fraction = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if kind in ("llama3", "yarn", "longrope"):
        # Some configs keep the pretraining length outside the rope section; where both exist that one wins.
        outside = raw.get("original_max_position_embeddings")
        inside = parameters.get("original_max_position_embeddings", max_position)
        parameters["original_max_position_embeddings"] = outside or inside
    return RopeConfig(kind, float(theta), int(head_dim * fraction), max_position, parameters)
