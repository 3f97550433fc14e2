"""Mistral's `tekken.json`: a ranked byte vocabulary with its own pattern, its special tokens in front of it.

Reading it here spares the mistral-common and tiktoken packages; only the chat template is theirs (`chat_files`).
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from tidemill.errors import BadCheckpoint
from tidemill.text.ranked_vocabulary import RankedVocabulary
from tidemill.weights.json_file import read_json

TEKKEN_FILE = "tekken.json"

# Files of the first versions do not list their special tokens.
_FIRST_SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by the names that chat templates use."""
    data = read_json(path, required=True)
    try:
        backend, special = _build(data)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"{path} is not a tekken vocabulary",
            cause=f"{type(error).__name__}: {error}",
            fix="download it again, or pass --tokenizer with a folder or hub id that has a tokenizer.json",
        ) from error
    return backend, {name: token for name, token in _NAMES.items() if token in special}


def _build(data: dict[str, Any]) -> tuple[Tokenizer, list[str]]:
    config = data["config"]
    special = _special_tokens(data)
    # The file may hold more tokens than the models have rows: the vocabulary is cut to its declared size.
    size = config.get("default_vocab_size") or len(special) + len(data["vocab"])
    entries = data["vocab"][: size - len(special)]
    cut = pre_tokenizers.Split(Regex(config["pattern"]), "isolated")
    backend = RankedVocabulary(
        ranks={base64.b64decode(entry["token_bytes"]): rank for rank, entry in enumerate(entries)},
        named={rank: AddedToken(token, special=True, normalized=False) for rank, token in enumerate(special)},
        pre_tokenizer=pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
        first_id=len(special),
    ).build()
    bos = special.index(_NAMES["bos_token"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return backend, special


def _special_tokens(data: dict[str, Any]) -> list[str]:
    """By id; ids that are set aside without a name get one."""
    listed = data.get("special_tokens")
    if listed is None:
        names = dict(enumerate(_FIRST_SPECIAL_TOKENS))
    else:
        names = {int(entry["rank"]): str(entry["token_str"]) for entry in listed}
    count = data["config"].get("default_num_special_tokens") or len(names)
    if any(rank >= count for rank in names):
        raise ValueError(f"a special token has rank {max(names)}, but there are {count}")
    return [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]
