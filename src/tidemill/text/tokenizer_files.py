"""What the files beside a vocabulary say: special tokens and the tokens added after training.

Knows Hugging Face's file names in their old and new spellings, and reads them as transformers 5 does; does not
tokenize.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tidemill.errors import BadCheckpoint
from tidemill.text.ranked_vocabulary import MAX_TOKEN_ID
from tidemill.weights.json_file import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "tokenizer_config.json")


def named_special_tokens(folder: Path) -> dict[str, AddedToken]:
    """bos_token, eos_token and the others; models have names of their own too, such as image_token."""
    config, merged = tokenizer_config(folder), _merged(folder)
    found = {name: _special(merged[name]) for name in _NAMES if text_of_token(merged.get(name))}
    own = {key: value for key, value in config.items() if key.endswith("_token") and isinstance(value, str)}
    extra = merged.get("extra_special_tokens")
    own |= extra if isinstance(extra, dict) else {}
    return found | {name: _special(value) for name, value in own.items() if name not in _NAMES and text_of_token(value)}


def extra_special_tokens(folder: Path) -> list[AddedToken]:
    """Special tokens without a name. What the config lists counts, the older file only where it lists none."""
    for holder in (tokenizer_config(folder), _merged(folder)):
        listed = holder.get("extra_special_tokens") or holder.get("additional_special_tokens")
        if isinstance(listed, list):
            return [_special(entry) for entry in listed]
    return []


def added_tokens(folder: Path) -> dict[int, AddedToken]:
    """Tokens the folder adds to the vocabulary, by id: tokenizer_config.json, or added_tokens.json before it."""
    config = tokenizer_config(folder)
    if "added_tokens_decoder" in config:
        entries = config["added_tokens_decoder"] or {}
        path = folder / "tokenizer_config.json"
        if not isinstance(entries, dict):
            raise _odd(path, "added_tokens_decoder", f"a {type(entries).__name__}", "tokens by their ids")
        keys = {_token_id(path, "added_tokens_decoder", key): key for key in entries}
        return {token_id: _added_token(entries[keys[token_id]]) for token_id in sorted(keys)}
    legacy = read_json(folder / "added_tokens.json")
    special = {token.content for token in named_special_tokens(folder).values()}
    for name in ("extra_special_tokens", "additional_special_tokens"):
        special.update(_texts(config.get(name)))
    path = folder / "added_tokens.json"
    by_id = sorted((_token_id(path, token, token_id), token) for token, token_id in legacy.items())
    return {
        token_id: AddedToken(token, normalized=token not in special, special=token in special)
        for token_id, token in by_id
    }


def _merged(folder: Path) -> dict[str, Any]:
    """Before configs carried `added_tokens_decoder`, special_tokens_map.json was the authority."""
    config = tokenizer_config(folder)
    if "added_tokens_decoder" in config:
        return config
    return config | read_json(folder / "special_tokens_map.json")


def _token_id(path: Path, key: str, value: Any) -> int:
    """Numbers, written as JSON's keys are too: in quotes."""
    try:
        token_id = int(value) if isinstance(value, str) or type(value) is int else -1
    except ValueError:
        token_id = -1
    if not 0 <= token_id <= MAX_TOKEN_ID:
        raise _odd(path, key, f"{value!r:.80}", "the id of a token")
    return token_id


def _odd(path: Path, key: str, found: str, expected: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{path} has an odd entry {key!r:.80}",
        cause=f"{expected} expected, found {found}",
        fix="correct it, or download it again",
    )


def _added_token(entry: Any) -> AddedToken:
    text = text_of_token(entry)
    if text is None:
        raise BadCheckpoint(
            "tokenizer_config.json describes an added token without its text",
            cause=f"found {entry!r:.80}",
            fix="download it again, or pass --tokenizer with a folder or hub id that has a tokenizer.json",
        )
    flags = {flag: bool(entry[flag]) for flag in _FLAGS if isinstance(entry, dict) and flag in entry}
    return AddedToken(text, **flags)


def _special(entry: Any) -> AddedToken:
    return _added_token({**entry, "special": True} if isinstance(entry, dict) else {"content": entry, "special": True})


def _texts(tokens: Any) -> Iterable[str]:
    return [text for token in tokens if (text := text_of_token(token))] if isinstance(tokens, list) else []


def text_of_token(value: Any) -> str | None:
    """A token is written as its text or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
