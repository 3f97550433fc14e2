"""The places a tokenizer can be: tokenizer.json, GGUF metadata, files of their makers, or what only transformers reads.

Each source gives a `tokenizers.Tokenizer` and the names of its special tokens. As in transformers 5, tokenizer.json
alone says what surrounds a text (`add_bos_token` beside it is a leftover of older classes); the other files only add
tokens and name them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tidemill.errors import BadCheckpoint, UnsupportedModel
from tidemill.text.llama_class import as_llama_class
from tidemill.text.tokenizer_files import added_tokens, extra_special_tokens, named_special_tokens, tokenizer_config
from tidemill.weights.json_file import read_json
from tidemill.weights.lfs import refuse_lfs_pointer

_SENTENCEPIECE_NAMES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model")
# What a tokenizer that only transformers reads is made of.
_OTHER_VOCABULARIES = (
    "vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.bpe",
    "*.codes",
    "*.tiktoken",
    "tokenization_*.py",
)
_MOST_OF_AN_ERROR = 400

Source = tuple[tokenizers.Tokenizer, dict[str, str]]


def from_gguf(metadata: Mapping[str, Any], file: str) -> Source:
    from tidemill.text.gguf_tokenizer import build_tokenizer, special_tokens_of

    return build_tokenizer(metadata, file), special_tokens_of(metadata)


def from_folder(folder: Path, trust_remote_code: bool) -> Source:
    """tokenizer.json where there is one, else a vocabulary of its maker; transformers for what none of these is."""
    try:
        found = _from_known_file(folder)
    except OSError as error:
        raise BadCheckpoint(
            f"{error.filename or folder} cannot be read", cause=str(error), fix="check its permissions"
        ) from error
    return _from_transformers(folder, trust_remote_code) if found is None else found


def _from_known_file(folder: Path) -> Source | None:
    from tidemill.text.sentencepiece_file import is_sentencepiece
    from tidemill.text.tekken_file import TEKKEN_FILE, read_tekken
    from tidemill.text.tiktoken_file import find_tiktoken

    if (folder / "tokenizer.json").exists():
        return _from_json(folder)
    if (folder / TEKKEN_FILE).is_file():
        return _with_neighbours(folder, read_tekken(folder / TEKKEN_FILE))
    for name in _SENTENCEPIECE_NAMES:
        refuse_lfs_pointer(folder / name)
        if (folder / name).is_file() and is_sentencepiece(folder / name):
            return _from_sentencepiece(folder, folder / name)
    table = find_tiktoken(folder)
    return None if table is None else _from_tiktoken(folder, table)


def _from_json(folder: Path) -> Source:
    path = folder / "tokenizer.json"
    refuse_lfs_pointer(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises bare Exceptions for every kind of broken file.
        raise BadCheckpoint(
            f"{path} cannot be read", cause=str(error), fix="download it again, or upgrade: pip install -U tokenizers"
        ) from error
    as_llama_class(backend, tokenizer_config(folder), _model_type(folder))
    return _with_neighbours(folder, (backend, {}))


def _from_sentencepiece(folder: Path, path: Path) -> Source:
    from tidemill.text.sentencepiece_file import read_sentencepiece

    config = tokenizer_config(folder)
    metadata = read_sentencepiece(path)
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(config.get(key), bool):
            metadata[f"tokenizer.ggml.{key}"] = config[key]
    return _with_neighbours(folder, from_gguf(metadata, path.name))


def _from_tiktoken(folder: Path, path: Path) -> Source:
    from tidemill.text.tiktoken_file import read_tiktoken

    tokens, config = added_tokens(folder), tokenizer_config(folder)
    return _with_neighbours(folder, read_tiktoken(path, _model_type(folder), tokens, config))


def _model_type(folder: Path) -> str | None:
    path = folder / "config.json"
    value = read_json(path).get("model_type")
    if value is not None and not isinstance(value, str):
        raise BadCheckpoint(
            f"{path} has an odd model_type",
            cause=f"a name is expected, found {value!r:.80}",
            fix="correct it, or download it again",
        )
    return value


def _with_neighbours(folder: Path, source: Source) -> Source:
    """Tokens named beside a vocabulary but absent from it join its end, as in transformers."""
    backend, special = source
    named = named_special_tokens(folder)
    special |= {name: token.content for name, token in named.items()}
    tokens = list(added_tokens(folder).values())
    for token in tokens:
        # Not every config marks the tokens it names.
        token.special = token.special or token.content in special.values()
    known = {token.content for token in (*tokens, *backend.get_added_tokens_decoder().values())}
    for token in (*named.values(), *extra_special_tokens(folder)):
        if token.content not in known:
            tokens.append(token)
            known.add(token.content)
    # The library leaves tokens alone that it has.
    backend.add_tokens(tokens)
    return backend, special


def _from_transformers(folder: Path, trust_remote_code: bool) -> Source:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UnsupportedModel(
            f"{folder} has no tokenizer that can be read",
            cause=_no_tokenizer(folder, error),
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


def _no_tokenizer(folder: Path, error: Exception) -> str:
    """transformers' own words count only where it had something to read; else they tell of packages to install."""
    looked_for = ", ".join(("tokenizer.json", "tekken.json", *_SENTENCEPIECE_NAMES))
    others = sorted(path.name for pattern in _OTHER_VOCABULARIES for path in folder.glob(pattern))
    if not others:
        return f"it holds no vocabulary: neither {looked_for} nor another file that transformers makes one of"
    said = textwrap.shorten(str(error) or type(error).__name__, _MOST_OF_AN_ERROR, placeholder=" ...")
    return f"none of {looked_for} is there and whole, and transformers makes none of {', '.join(others)}: {said}"
