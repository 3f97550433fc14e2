"""A SentencePiece `tokenizer.model`, read into the keys GGUF files use for the same facts.

The file is a protobuf of three parts: pieces, how it was trained, how it normalises. Reading it here spares the
sentencepiece, protobuf and transformers packages; `gguf_tokenizer` builds the tokenizer. Does not know Hugging Face.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.errors import BadCheckpoint

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE_TEXT, _PIECE_SCORE, _PIECE_TYPE = 1, 2, 3
_MODEL_TYPE, _UNK_ID, _BOS_ID, _EOS_ID, _PAD_ID = 3, 40, 41, 42, 43
_CHARSMAP, _ADD_PREFIX, _REMOVE_SPACES = 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_NORMAL = 1


def is_sentencepiece(path: Path) -> bool:
    """Whether a file starts with a piece, which tells a SentencePiece model from a tiktoken table of the same name."""
    with path.open("rb") as handle:
        return handle.read(1) == b"\x0a"


def read_sentencepiece(path: Path) -> dict[str, Any]:
    """The metadata `gguf_tokenizer.build_tokenizer` takes."""
    data = path.read_bytes()
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == _PIECES:
                piece = dict(_fields(value))
                tokens.append(piece.get(_PIECE_TEXT, b"").decode("utf-8"))
                scores.append(struct.unpack("<f", piece.get(_PIECE_SCORE, bytes(4)))[0])
                types.append(piece.get(_PIECE_TYPE, _NORMAL))
            elif field == _TRAINER:
                trainer = dict(_fields(value))
            elif field == _NORMALIZER:
                normalizer = dict(_fields(value))
    except (IndexError, KeyError, ValueError, TypeError, struct.error) as error:
        raise BadCheckpoint(
            f"{path} is not a valid SentencePiece model", cause=str(error), fix="download it again"
        ) from error
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise BadCheckpoint(
            f"{path} holds a SentencePiece model of type {kind}",
            cause="unigram (1) and BPE (2) are read",
            fix="pass --tokenizer with a folder or hub id that has a tokenizer.json",
        )
    metadata: dict[str, Any] = {
        "model": "llama" if kind == _BPE else "t5",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "add_space_prefix": bool(normalizer.get(_ADD_PREFIX, 1)),
        "remove_extra_whitespaces": bool(normalizer.get(_REMOVE_SPACES, 1)),
        "precompiled_charsmap": list(normalizer.get(_CHARSMAP, b"")),
    }
    defaults = {"unknown": (_UNK_ID, 0), "bos": (_BOS_ID, 1), "eos": (_EOS_ID, 2), "padding": (_PAD_ID, -1)}
    for name, (field, default) in defaults.items():
        token_id = _signed(trainer.get(field, default))
        if 0 <= token_id < len(tokens):
            metadata[f"{name}_token_id"] = token_id
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Every field of a protobuf message: integers as int, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield field, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}[wire]
        if at + size > len(data):
            raise ValueError(f"field {field} runs past the end at byte {at}")
        yield field, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if byte < 0x80:
            return value, at


def _signed(value: int) -> int:
    """Negative numbers are written as 64-bit two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value
