"""Which architectures run natively, by the name config.json gives them. Imports a family only when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.models.config import DecoderConfig, read_decoder_config

LLAMA_FAMILY = "tidemill.models.llama:LlamaModel"
NATIVE: dict[str, str] = {
    "LlamaForCausalLM": LLAMA_FAMILY,
    "MistralForCausalLM": LLAMA_FAMILY,
    "Qwen2ForCausalLM": LLAMA_FAMILY,
    "Qwen3ForCausalLM": LLAMA_FAMILY,
}


def architecture_of(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    if not names:
        raise BadCheckpoint(
            "config.json names no architecture", fix='add "architectures": ["LlamaForCausalLM"] or such'
        )
    for name in names:
        if name in NATIVE:
            return str(name)
    raise UnsupportedModel(
        f"architecture {names[0]} is not supported",
        cause=f"supported are {', '.join(NATIVE)}",
        fix="tidemill models list",
    )


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    return read_decoder_config(raw, architecture_of(raw))


def model_class(architecture: str) -> Any:
    module, _, name = NATIVE[architecture].partition(":")
    return getattr(import_module(module), name)
