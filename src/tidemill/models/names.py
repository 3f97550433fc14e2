"""Where a checkpoint keeps a decoder's tensors, when it does not call them as the architecture does.

The same weights are published with and without the name of the base model in front (`h.0.attn` and
`transformer.h.0.attn`), and inside models of text and images (`language_model.model.layers`). One tensor tells which:
the embedding, which every decoder has. Torch-free; knows names only.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tidemill.models.spec import DecoderSpec


def with_stored_head(spec: DecoderSpec, stored: Collection[str]) -> DecoderSpec:
    """The description as this checkpoint completes it; `stored` are names as the architecture gives them."""
    if not spec.tied_unless_stored:
        return spec
    return replace(spec, tie_embeddings=f"{spec.head}.weight" not in stored)


def stored_names(spec: DecoderSpec, stored: Collection[str]) -> dict[str, str] | None:
    """Architecture's name -> stored name, for the decoder's tensors alone; None where they are stored as expected."""
    embedding = f"{spec.embedding}.weight"
    if embedding in stored:
        return None
    base = _common_prefix(spec)
    tail = embedding.removeprefix(base)
    homes = [name.removesuffix(tail) for name in stored if name == tail or name.endswith(f".{tail}")]
    head = f"{spec.head}.weight"
    if not homes and spec.tie_embeddings and head in stored:
        # Of two tied tensors, either may be the one that is stored.
        return {name: name for name in stored if name != head} | {embedding: head}
    if len(homes) != 1:
        return None
    heads = {name: name[name.rindex(spec.head) :] for name in stored if f".{spec.head}." in f".{name}"}
    return {
        heads.get(name) or base + name.removeprefix(homes[0]): name
        for name in stored
        if name.startswith(homes[0]) or name in heads
    }


def _common_prefix(spec: DecoderSpec) -> str:
    """`model.` of model.embed_tokens and model.layers.{layer}."""
    words = []
    for embedding, layer in zip(spec.embedding.split("."), spec.layer_prefix.split("."), strict=False):
        if embedding != layer:
            break
        words.append(embedding)
    return "".join(f"{word}." for word in words)
