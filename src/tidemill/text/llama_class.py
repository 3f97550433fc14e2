"""What transformers' class LlamaTokenizer makes of a vocabulary, whatever the file itself says about spaces.

Since version 5 the class puts the space in front of a text by its own rule, told by `legacy` and `add_prefix_space` in
tokenizer_config.json: not again after a special token, and not where the text already starts with one. The ids of
checkpoints that name this class depend on it. Does not read files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_SPACE = "\u2581"

# Types whose files transformers takes as they are, although many of them name the class.
READ_AS_SAVED = frozenset(
    (
        "arctic",
        "ernie4_5",
        "ernie4_5_moe",
        "fuyu",
        "granite",
        "granitemoe",
        "internlm2",
        "jamba",
        "minicpm3",
        "ministral",
        "ministral3",
        "mistral",
        "mistral3",
        "mixtral",
        "nemotron",
        "olmo2",
        "persimmon",
        "phi3",
        "phi3_v",
        "phimoe",
        "stablelm",
    )
)


def as_llama_class(backend: tokenizers.Tokenizer, config: Mapping[str, Any], model_type: str | None) -> None:
    """Changes `backend` as the class would, where the checkpoint names it and the vocabulary is of its kind."""
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if named != "LlamaTokenizer" or model_type in READ_AS_SAVED or config.get("auto_map"):
        return
    # A byte-level vocabulary under this name (Llama 3, DeepSeek) spells no spaces, so the class does not fit it.
    if not isinstance(backend.model, models.BPE) or not backend.model.byte_fallback:
        return
    prefixes = config.get("add_prefix_space") is not False
    scheme = "never" if not prefixes else "always" if config.get("legacy") else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixes else back)
