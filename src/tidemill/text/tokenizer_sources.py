"""The places a tokenizer can be: tokenizer.json, GGUF metadata, a SentencePiece model, or what only transformers reads.

Each source gives a `tokenizers.Tokenizer` and the names of its special tokens. As in transformers 5, tokenizer.json
alone says what surrounds a text (`add_bos_token` beside it is a leftover of older classes); the other files only add
tokens and name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.text.tokenizer_files import added_tokens, folder_special_tokens, tokenizer_config

_SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")

Source = tuple[tokenizers.Tokenizer, dict[str, str]]


def from_gguf(metadata: Mapping[str, Any], file: str) -> Source:
    from tidemill.text.gguf_tokenizer import build_tokenizer, special_tokens_of

    return build_tokenizer(metadata, file), special_tokens_of(metadata)


def from_folder(folder: Path, trust_remote_code: bool) -> Source:
    """tokenizer.json where there is one, else a SentencePiece model; transformers for what neither is."""
    from tidemill.text.sentencepiece_file import is_sentencepiece

    if (folder / "tokenizer.json").exists():
        return _from_json(folder)
    for name in _SENTENCEPIECE_NAMES:
        if (folder / name).is_file() and is_sentencepiece(folder / name):
            return _from_sentencepiece(folder, folder / name)
    return _from_transformers(folder, trust_remote_code)


def _from_json(folder: Path) -> Source:
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises bare Exceptions for every kind of broken file.
        raise BadCheckpoint(
            f"{path} cannot be read", cause=str(error), fix="download it again, or upgrade: pip install -U tokenizers"
        ) from error
    special = folder_special_tokens(folder)
    _add_missing(backend, folder, special)
    return backend, special


def _add_missing(backend: tokenizers.Tokenizer, folder: Path, special: Mapping[str, str]) -> None:
    """Tokens named beside tokenizer.json but absent from it join the end of the vocabulary, as in transformers."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    names = set(special.values())
    for entry in added_tokens(folder):
        if entry["content"] in known:
            continue
        flags = {
            key: entry[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in entry
        }
        if entry["content"] in names:
            flags["special"] = True
        known.add(entry["content"])
        backend.add_tokens([AddedToken(entry["content"], **flags)])
    missing = [token for token in dict.fromkeys(special.values()) if token not in known]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in missing])


def _from_sentencepiece(folder: Path, path: Path) -> Source:
    from tidemill.text.sentencepiece_file import read_sentencepiece

    config, named = tokenizer_config(folder), folder_special_tokens(folder)
    metadata = read_sentencepiece(path)
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(config.get(key), bool):
            metadata[f"tokenizer.ggml.{key}"] = config[key]
    backend, own = from_gguf(metadata, path.name)
    special = own | named
    _add_missing(backend, folder, special)
    return backend, special


def _from_transformers(folder: Path, trust_remote_code: bool) -> Source:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UnsupportedModel(
            f"{folder} has no tokenizer that can be read",
            cause=f"there is no tokenizer.json, and transformers says: {_first_line(error)}",
            fix="pass --tokenizer with a folder or hub id that has a tokenizer.json"
            + ("" if trust_remote_code else ", or --trust-remote-code if the model ships its own tokenizer code"),
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModel(
            f"{folder} has a tokenizer written in Python, which is not supported",
            cause=f"transformers loads it as {type(loaded).__name__}, without a tokenizers backend",
            fix="pass --tokenizer with a folder or hub id that has a tokenizer.json",
        )
    special = {name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)}
    return backend, special


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
