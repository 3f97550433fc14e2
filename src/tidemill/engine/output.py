"""Tokens to text, one sequence at a time: incremental detokenisation and stop strings.

Emits no half characters and holds back exactly as much text as could still become a stop string. Knows the tokenizer;
knows nothing of HTTP, queues or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.core.params import SamplingParams
from tidemill.core.step import TokenLogprob
from tidemill.engine.messages import Delta, SequenceOutput

CONTEXT_TOKENS = 6
"""Prompt tokens decoded along with the first new ones: some tokenizers join or strip at the seam."""
MAX_PENDING = 8
MAX_WINDOW = 64
UNFINISHED = "\ufffd"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Text of a growing token sequence. Only a short tail is decoded each time, so the cost per token is constant."""

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._emitted = len(self._ids)
        self._pending = 0
        self._known_text = tokenizer.decode(self._ids, skip_special_tokens) if self._ids else ""

    def push(self, ids: Sequence[int]) -> str:
        """The text these tokens complete; empty while they end inside a character."""
        pieces = []
        for token in ids:
            self._ids.append(token)
            text = self._tokenizer.decode(self._ids, self._skip)
            self._pending = self._pending + 1 if text.endswith(UNFINISHED) else 0
            if self._pending:
                if self._pending <= MAX_PENDING:
                    continue
                # A character has at most four bytes: before its beginning are bytes that are no text at all.
                text, self._pending = self._before_last_character(text)
            piece = text[len(self._known_text) :]
            if not piece and len(self._ids) < MAX_WINDOW:
                # A skipped special token: without text before it, the next word would lose its leading space.
                continue
            pieces.append(piece)
            # Keep the tokens just emitted as context, drop what came before them.
            self._ids = self._ids[self._emitted :]
            self._emitted = len(self._ids) - self._pending
            self._known_text = self._tokenizer.decode(self._ids[: self._emitted], self._skip)
        return "".join(pieces)

    def _before_last_character(self, text: str) -> tuple[str, int]:
        """The part of `text` that stays as it is whatever comes next, and how many tokens come after that part."""
        for count in range(1, len(self._ids) - self._emitted):
            before = self._tokenizer.decode(self._ids[:-count], self._skip)
            after = self._tokenizer.decode(self._ids[-count:], self._skip)
            # Cut inside a character, the two sides would show more replacements than the whole.
            if after and before + after == text:
                return before, count
        return text, 0

    def flush(self) -> str:
        """What is left when the sequence ends inside a character."""
        text = self._tokenizer.decode(self._ids, self._skip)[len(self._known_text) :]
        self._known_text += text
        return text


class StopStrings:
    """Finds stop strings in a text that arrives in pieces, and holds back a tail that may become one."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops, self._include = stops, include
        self._held = ""

    def push(self, text: str, searching: bool = True) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string found or None). While not `searching`, text passes through."""
        if not self._stops:
            return text, None
        text = self._held + text
        if not searching:
            self._held = ""
            return text, None
        found = [(text.index(stop), stop) for stop in self._stops if stop in text]
        if found:
            start, stop = min(found)
            self._held = ""
            return text[: start + len(stop)] if self._include else text[:start], stop
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class Choice:
    """One sequence of a request on its way to the caller."""

    def __init__(self, index: int, prompt_ids: Sequence[int], params: SamplingParams, tokenizer: Decoder) -> None:
        self.index, self.params = index, params
        self.finish_reason: str | None = None
        self._num_prompt, self._num_tokens = len(prompt_ids), 0
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, params.skip_special_tokens)
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        if params.prompt_logprobs is not None and index == 0:
            self._prompt_logprobs = [None]

    def feed(self, output: SequenceOutput) -> Delta | None:
        """The delta to show, or None when nothing is to be told yet (a prompt's scores are still coming)."""
        if output.prompt_logprobs and self._prompt_logprobs is not None:
            self._prompt_logprobs.extend(output.prompt_logprobs)
        if not output.token_ids and output.finish is None:
            return None
        shown = output.token_ids
        if output.finish == "stop" and not self.params.include_stop_str_in_output:
            # The token that ended it (end of sequence or a stop token) is counted but not part of the text.
            shown = shown[:-1]
        self._num_tokens += len(output.token_ids)
        text = self._detokenizer.push(shown)
        if output.finish is not None:
            text += self._detokenizer.flush()
        text, stop = self._stops.push(text, searching=self._num_tokens > self.params.min_tokens)
        finish, reason = output.finish, output.stop_reason
        if stop is not None:
            finish, reason = "stop", stop
        elif finish is not None:
            text += self._stops.flush()
        self.finish_reason = finish
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return Delta(
            index=self.index,
            text=text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason=finish,
            stop_reason=reason,
            num_prompt_tokens=self._num_prompt,
            num_cached_tokens=output.num_cached,
            prompt_logprobs=prompt_logprobs,
        )
