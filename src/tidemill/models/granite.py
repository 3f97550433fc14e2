"""Granite 3: Llama with four numbers of its own, for embeddings, attention scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace

from tidemill.models import llama
from tidemill.models.config import RawConfig
from tidemill.models.spec import DecoderSpec


def describe(raw: RawConfig) -> DecoderSpec:
    plain = llama.describe(raw)
    scale, residual_scale = raw.number("attention_multiplier", 1.0), raw.number("residual_multiplier", 1.0)
    layers = (
        replace(layer, attention=replace(layer.attention, scale=scale), residual_scale=residual_scale)
        for layer in plain.layers
    )
    return replace(
        plain,
        layers=tuple(layers),
        embedding_scale=raw.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / raw.number("logits_scaling", 1.0),
    )
