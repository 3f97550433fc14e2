"""Log-probabilities in the three shapes clients know: chat, completions, and vLLM's prompt_logprobs.

Knows the shapes and how to name a token; the numbers come from the engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tidemill.core.step import TokenLogprob

if TYPE_CHECKING:
    from tidemill.text.tokenizer import Tokenizer

# JSON has no minus infinity; this is what vLLM writes for a token that cannot be chosen.
FLOOR = -9999.0


class TokenNamer:
    """How tokens are called in an answer: by their text, or as `token_id:123` if the caller asked for it."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self.tokenizer.token_text(token)


def chat_logprobs(entries: Iterable[TokenLogprob], num_top: int, name: TokenNamer) -> dict[str, Any]:
    content = []
    for entry in entries:
        shaped = _chat_token(entry.token, entry.logprob, name)
        shaped["top_logprobs"] = [_chat_token(token, value, name) for token, value in entry.top[:num_top]]
        content.append(shaped)
    return {"content": content}


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None] | None, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: per prompt token a map from token id to its log-probability, rank and text; null for the first."""
    if entries is None:
        return None
    return [None if entry is None else _ranked(entry, tokenizer) for entry in entries]


class CompletionLogprobs:
    """The four parallel lists of a completion, with offsets that run on from chunk to chunk of a stream.

    An offset is a position in the returned text; `unwritten` are the tokens that do not appear in it.
    """

    def __init__(self, num_top: int, name: TokenNamer, unwritten: frozenset[int]) -> None:
        self._num_top, self._name, self._unwritten = num_top, name, unwritten
        self._lists = _empty_lists()
        # A character may span tokens, so offsets count characters of the bytes so far, not of each token's text.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add_prompt(self, entries: Iterable[TokenLogprob | None], tokens: Sequence[int], text: str) -> None:
        """The prompt in front, as `text` has it: with or without its special tokens, or a first space."""
        for token, entry in zip(tokens, entries, strict=False):
            self._append(token, entry)
            piece = self._decoder.decode(self._name.tokenizer.token_bytes(token))
            if self._offset == 0 and piece.startswith(" ") and not text.startswith(" "):
                piece = piece[1:]
            if token not in self._name.tokenizer.special_ids or text.startswith(piece, self._offset):
                self._offset = min(self._offset + len(piece), len(text))
        self._offset = len(text)
        self._decoder.reset()

    def add(self, entries: Iterable[TokenLogprob | None], tokens: Sequence[int]) -> None:
        for token, entry in zip(tokens, entries, strict=False):
            self._append(token, entry)
            if token not in self._unwritten:
                self._offset += len(self._decoder.decode(self._name.tokenizer.token_bytes(token)))

    def take(self) -> dict[str, Any]:
        """What was added since the last call."""
        lists, self._lists = self._lists, _empty_lists()
        return lists

    def _append(self, token: int, entry: TokenLogprob | None) -> None:
        self._lists["tokens"].append(self._name(token))
        self._lists["token_logprobs"].append(None if entry is None else max(entry.logprob, FLOOR))
        self._lists["top_logprobs"].append(None if entry is None else self._top(entry))
        self._lists["text_offset"].append(self._offset)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives and the token itself, which may be less likely than all of them."""
        top = {self._name(token): max(value, FLOOR) for token, value in entry.top[: self._num_top]}
        top.setdefault(self._name(entry.token), max(entry.logprob, FLOOR))
        return top


def _empty_lists() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _chat_token(token: int, value: float, name: TokenNamer) -> dict[str, Any]:
    return {"token": name(token), "logprob": max(value, FLOOR), "bytes": list(name.tokenizer.token_bytes(token))}


def _ranked(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = {
        str(token): {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": tokenizer.token_text(token)}
        for rank, (token, value) in enumerate(entry.top, start=1)
    }
    own = {"logprob": max(entry.logprob, FLOOR), "rank": entry.rank, "decoded_token": tokenizer.token_text(entry.token)}
    return {str(entry.token): own} | ranked
