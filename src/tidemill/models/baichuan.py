"""Baichuan and Baichuan 2: Llama decoders that stack queries, keys and values in one matrix.

The 7B models rotate positions, the 13B models use alibi and have no `max_position_embeddings`. Baichuan 2 doubled the
vocabulary and normalises the rows of its head. No config says either in words.
"""

from __future__ import annotations

from dataclasses import replace

from tidemill.layers.spec import AttentionSpec
from tidemill.models import llama
from tidemill.models.config import RawConfig
from tidemill.models.falcon import alibi_slopes
from tidemill.models.spec import DecoderSpec

LARGEST_PLAIN_VOCABULARY = 100_000
"""Baichuan has 64,000 tokens and Baichuan 2 125,696; a few that were added later change nothing."""


def describe(raw: RawConfig) -> DecoderSpec:
    raw.refuse("tie_word_embeddings")
    dense = llama.describe(raw)
    heads, alibi = raw.size("num_attention_heads"), raw.get("max_position_embeddings") is None
    head_dim = dense.hidden_size // heads
    attention = AttentionSpec(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv=("self_attn.W_pack",),
        out=llama.OUT,
        rope=None if alibi else 0,
        alibi=alibi_slopes(heads) if alibi else None,
    )
    return replace(
        dense,
        max_position=raw.max_position("max_position_embeddings", "model_max_length"),
        layers=tuple(replace(layer, attention=attention) for layer in dense.layers),
        normalise_head=dense.vocab_size > LARGEST_PLAIN_VOCABULARY,
        ropes=() if alibi else dense.ropes,
    )
