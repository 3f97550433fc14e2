"""Text to token ids and back, the same for every source of a tokenizer.

Wraps a `tokenizers.Tokenizer`, wherever it came from (`tokenizer_sources`). Knows the ids that end a turn and the exact
bytes of every token; does not stream (the engine's detokenizer does) and does not know chat.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from tidemill.errors import BadCheckpoint, InvalidRequest
from tidemill.text.byte_alphabet import BYTE_OF
from tidemill.text.tokenizer_sources import from_folder, from_gguf
from tidemill.weights.json_file import read_json
from tidemill.weights.location import ModelFiles

logger = logging.getLogger(__name__)

_SPACE = "\u2581"


class Tokenizer:
    """Ids as transformers would give them; special tokens written out in a text are special tokens."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        stop_ids: Iterable[int],
        files: ModelFiles,
    ) -> None:
        # A limit saved in tokenizer.json would cut prompts silently.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.files = files
        self.special_tokens_map: dict[str, str] = dict(special_tokens)
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = self._id_of("bos_token")
        self.eos_id = self._id_of("eos_token")
        own = () if self.eos_id is None else (self.eos_id,)
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *stop_ids)))
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        self._decoder_kinds = _decoder_kinds(backend.decoder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """One list per text; several texts are spread over the cores."""
        try:
            # The fast variant keeps no offsets, which are most of the time and memory of a long text.
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise _not_text(texts, error) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, id: int) -> str:
        """One token as text, spaces kept; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of a token, so that joining them over a reply gives the reply; empty for an unused id."""
        if (added := self._added.get(id)) is not None:
            return added.encode()
        token = self.backend.id_to_token(id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoder_kinds:
            try:
                return bytes(BYTE_OF[character] for character in token)
            except KeyError:
                return str(token).encode()
        if "ByteFallback" in self._decoder_kinds and len(token) == 6 and token.startswith("<0x"):
            return bytes.fromhex(token[3:5])
        if "WordPiece" in self._decoder_kinds:
            return str(token).removeprefix("##").encode()
        return str(token).replace(_SPACE, " ").encode()

    @property
    def added_ids(self) -> Collection[int]:
        """Tokens that were added to the vocabulary, special or not."""
        return self._added.keys()

    def knows(self, id: int) -> bool:
        """Whether an id is a token; there may be holes, and models have rows to spare."""
        return self.backend.id_to_token(id) is not None

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token string with its id, added tokens included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend.token_to_id(token)


def load_tokenizer(
    files: ModelFiles, *, tokenizer: str | None = None, revision: str | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """The model's own tokenizer, or the one named by `tokenizer` (a path, an alias or a hub id)."""
    source = files if tokenizer is None else _locate_tokenizer(tokenizer, revision)
    metadata = _gguf_metadata(files)
    stops = _folder_stop_ids(files.path) if metadata is None else _gguf_stop_ids(files.path, metadata)
    source_metadata = metadata if source is files else _gguf_metadata(source)
    if source_metadata is None:
        backend, special = from_folder(source.path, trust_remote_code)
    else:
        backend, special = from_gguf(source_metadata, source.path.name)
    return Tokenizer(backend, special, stops, source)


def _gguf_metadata(files: ModelFiles) -> dict[str, Any] | None:
    if files.kind != "gguf":
        return None
    from tidemill.weights.gguf_file import read_gguf

    return read_gguf(files.path).metadata


def _locate_tokenizer(name: str, revision: str | None) -> ModelFiles:
    """Like `locate`, but a hub id brings the tokenizer's files only, and a folder needs no weights."""
    from tidemill.weights.aliases import ALIASES
    from tidemill.weights.hub import fetch_without_weights
    from tidemill.weights.location import is_hub_id, locate

    path = Path(name).expanduser()
    if path.is_dir() and not any(path.glob("*.gguf")):
        return ModelFiles("folder", path, name)
    if name not in ALIASES and not path.exists() and is_hub_id(name) and ":" not in name:
        return fetch_without_weights(name, revision)
    return locate(name, revision=revision)


def _folder_stop_ids(folder: Path) -> list[int]:
    """Every id that the model's own files call an end: generation_config.json, then config.json."""
    path, config = folder / "config.json", read_json(folder / "config.json")
    nested = config.get("text_config")
    generation = folder / "generation_config.json"
    return [
        *_stop_ids(generation, "eos_token_id", read_json(generation).get("eos_token_id")),
        *_stop_ids(path, "eos_token_id", config.get("eos_token_id")),
        *_stop_ids(path, "text_config.eos_token_id", nested.get("eos_token_id") if isinstance(nested, dict) else None),
    ]


def _gguf_stop_ids(path: Path, metadata: Mapping[str, Any]) -> list[int]:
    from tidemill.weights.gguf_names import hf_generation_config

    return _stop_ids(path, "tokenizer.ggml.eos_token_id", hf_generation_config(metadata).get("eos_token_id"))


def _stop_ids(path: Path, key: str, value: Any) -> list[int]:
    """One id or a list of them; a negative one is how some files say that there is none."""
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if any(type(token) is not int for token in ids):
        raise BadCheckpoint(
            f"{path} has an odd {key}",
            cause=f"the id of a token or a list of ids is expected, found {value!r:.80}",
            fix=f"write the number of the token there, or take {key} out",
        )
    if outside := [token for token in ids if token < 0]:
        logger.warning("%s: %s has %d, which is no token and ends nothing", path, key, outside[0])
    return [token for token in ids if token >= 0]


def _decoder_kinds(decoder: decoders.Decoder | None) -> frozenset[str]:
    """The kinds of step in a decoder, which tell how the vocabulary spells bytes."""
    if decoder is None:
        return frozenset()
    kinds: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if isinstance(node.get("type"), str):
                kinds.add(node["type"])
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(json.loads(decoder.__getstate__()))
    return frozenset(kinds)


def _not_text(texts: Sequence[object], error: Exception) -> InvalidRequest:
    wrong = next((type(text).__name__ for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        return InvalidRequest(f"text expected, got {wrong}", cause=str(error), fix="send a string")
    return InvalidRequest(
        "the text holds half of a surrogate pair, which is no character",
        cause=str(error),
        fix="send valid Unicode (an emoji needs both \\uD83D\\uDE00 halves)",
    )
