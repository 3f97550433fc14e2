"""What the files beside tokenizer.json say: special tokens and the tokens added after training.

Knows Hugging Face's file names in their old and new spellings; does not tokenize.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.weights.json_file import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "tokenizer_config.json")


def folder_special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token and the others, as strings; what a chat template may refer to."""
    config, legacy = tokenizer_config(folder), read_json(folder / "special_tokens_map.json")
    # Before configs carried `added_tokens_decoder`, the separate map was the authority.
    first, second = (config, legacy) if "added_tokens_decoder" in config else (legacy, config)
    found: dict[str, str] = {}
    for name in _NAMES:
        text = _content(first.get(name)) or _content(second.get(name))
        if text:
            found[name] = text
    return found


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    """Tokens the folder adds to the vocabulary, by rising id, with the flags AddedToken takes."""
    described: dict[int, dict[str, Any]] = {}
    for token, token_id in read_json(folder / "added_tokens.json").items():
        described[int(token_id)] = {"content": token, "normalized": True, "special": False}
    for token_id, entry in (tokenizer_config(folder).get("added_tokens_decoder") or {}).items():
        described[int(token_id)] = dict(entry)
    return [described[token_id] for token_id in sorted(described)]


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
