"""Packed weights whose scales would be ignored load as noise, so they are refused by what they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.errors import UnsupportedModel
from tidemill.weights.checkpoint import Checkpoint

PACKED_DTYPES = frozenset(("I8", "U8", "I16", "U16", "I32", "U32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"))
CAUSAL_MASKS = ("attn.bias", "attention.bias")
"""Old checkpoints store them beside the weights, as bytes."""


def refuse_quantised_config(config: Mapping[str, Any], origin: str) -> None:
    """What config.json alone can tell."""
    settings = config.get("quantization_config")
    if settings:
        method = settings.get("quant_method", settings) if isinstance(settings, Mapping) else settings
        raise _refusal(origin, f"its quantization_config says {method}")


def refuse_quantised(checkpoint: Checkpoint) -> None:
    if checkpoint.files.kind != "folder":
        return
    refuse_quantised_config(checkpoint.config, checkpoint.files.origin)
    for name, info in checkpoint.tensors.items():
        if info.dtype in PACKED_DTYPES and not name.endswith(CAUSAL_MASKS):
            raise _refusal(checkpoint.files.origin, f"{info.name} is {info.dtype}")


def _refusal(origin: str, cause: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{origin} holds quantised weights, which this version reads from GGUF files only",
        cause=cause,
        fix="serve the unquantised checkpoint, or a .gguf of the model",
    )
