"""Mistral's `tekken.json`: a ranked byte vocabulary with its own pattern, its special tokens in front of it.

Reading it here spares the mistral-common and tiktoken packages; only the chat template is theirs (`chat_files`).
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, processors

from tidemill.errors import BadCheckpoint
from tidemill.text.ranked_vocabulary import MAX_TOKEN_ID, RankedVocabulary, fault_in
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
# A thousand are set aside in every file so far.
_MAX_SPECIAL_TOKENS = 100_000
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """The tokenizer, and its special tokens by the names that chat templates use."""
    data = read_json(path, required=True)
    try:
        backend, special = _build(data)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"{path} is not a tekken vocabulary",
            cause=f"it has no {error}" if isinstance(error, KeyError) else str(error),
            fix="download it again, or pass --tokenizer with a folder or hub id that has a tokenizer.json",
        ) from error
    return backend, {name: token for name, token in _NAMES.items() if token in special}


def _build(data: dict[str, Any]) -> tuple[Tokenizer, list[str]]:
    config, vocab = data["config"], data["vocab"]
    for key, value, kind in (("config", config, dict), ("vocab", vocab, list)):
        if not isinstance(value, kind):
            raise ValueError(f"{key} is a {type(value).__name__}")
    special = _special_tokens(data)
    # The file may hold more tokens than the models have rows: the vocabulary is cut to its declared size.
    size = _count(config, "default_vocab_size", MAX_TOKEN_ID) or len(special) + len(vocab)
    if size < len(special):
        raise ValueError(f"default_vocab_size is {size}, less than the {len(special)} special tokens")
    ranks = _ranks(vocab[: size - len(special)])
    backend = RankedVocabulary(
        ranks=ranks,
        named={rank: AddedToken(token, special=True, normalized=False) for rank, token in enumerate(special)},
        pre_tokenizer=pre_tokenizers.Sequence(
            [_cut(config["pattern"]), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
        first_id=len(special),
    ).build()
    bos = special.index(_NAMES["bos_token"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return backend, special


def _cut(pattern: Any) -> pre_tokenizers.PreTokenizer:
    try:
        return pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:
        # The library raises bare Exceptions for patterns it does not understand.
        raise ValueError(f"config.pattern is no regular expression: {error}") from error


def _ranks(entries: list[Any]) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries):
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"vocab[{rank}].token_bytes is not base64: {entry!r:.80}") from error
        if ranks.setdefault(token, rank) != rank:
            raise ValueError(f"vocab[{ranks[token]}] and vocab[{rank}] are the same token")
    if (fault := fault_in(ranks)) is not None:
        raise ValueError(f"vocab: {fault}")
    return ranks


def _count(config: dict[str, Any], key: str, most: int) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or not 0 <= value <= most):
        raise ValueError(f"config.{key} is {value!r:.80}, not a number from 0 to {most}")
    return value


def _special_tokens(data: dict[str, Any]) -> list[str]:
    """By id; ids that are set aside without a name get one."""
    listed = data.get("special_tokens")
    if listed is None:
        names = dict(enumerate(_FIRST_SPECIAL_TOKENS))
    else:
        names = dict(_special_token(entry) for entry in listed)
    count = _count(data["config"], "default_num_special_tokens", _MAX_SPECIAL_TOKENS) or len(names)
    if outside := [rank for rank in names if not 0 <= rank < count]:
        raise ValueError(f"a special token has rank {outside[0]}, but there are {count}")
    return [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _special_token(entry: Any) -> tuple[int, str]:
    rank, text = (entry.get("rank"), entry.get("token_str")) if isinstance(entry, dict) else (None, None)
    if type(rank) is not int or not isinstance(text, str):
        raise ValueError(f"special_tokens holds {entry!r:.80}, without a rank and a token_str")
    return rank, text
