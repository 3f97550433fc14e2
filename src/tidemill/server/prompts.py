"""From what the caller sent to token ids, without holding up the event loop and without tokenising what cannot fit.

Knows the tokenizer's interface; whether the ids are in the vocabulary and fit the context is the engine client's word.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.errors import BodyTooLarge, ContextTooLong, InvalidRequest
from tidemill.server.state import AppState

if TYPE_CHECKING:
    from tidemill.engine.host import ServedModel

# More text than this is tokenised for nobody, unless the context is so long that it might fit.
MAX_TEXT_CHARS = 4 * 1024 * 1024
# Prompts of a batch are tokenised in groups of about so many characters, so that other requests get their turn.
GROUP_CHARS = 256 * 1024
# A text is looked at from its start before all of it is tokenised. Tokens of ordinary text have about four characters,
# so a start of 16 per token of context settles nearly every hopeless prompt in milliseconds.
PROBE_CHARS_PER_TOKEN = 16
# Cutting a text changes the tokens around the cut, never more than a few.
CUT_SLACK = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what the caller wrote, where the prompt came as text."""

    ids: list[int]
    text: str | None = None

    def kept(self, num_tokens: int) -> list[int]:
        """The ids the engine has used: the last ones, where the caller had the prompt truncated."""
        return self.ids[-num_tokens:] if 0 < num_tokens < len(self.ids) else self.ids


def split_prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """One entry per prompt, whatever of the four shapes the caller chose."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list", param="prompt")
    # The schema has seen to it that all entries are of one kind.
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


async def tokenize_all(
    state: AppState,
    model: ServedModel,
    prompts: list[str | list[int]],
    *,
    add_special_tokens: bool,
    truncates: bool,
    param: str,
) -> list[Prompt]:
    done: list[Prompt] = []
    for group, num_chars in _groups(prompts):

        def work(group: list[str | list[int]] = group) -> list[Prompt]:
            return [_tokenize(model, prompt, add_special_tokens, truncates, param) for prompt in group]

        done += await state.off_loop(work, num_chars)
    return done


def _groups(prompts: list[str | list[int]]) -> Iterator[tuple[list[str | list[int]], int]]:
    group: list[str | list[int]] = []
    num_chars = 0
    for prompt in prompts:
        group.append(prompt)
        num_chars += len(prompt) if isinstance(prompt, str) else 0
        if num_chars >= GROUP_CHARS:
            yield group, num_chars
            group, num_chars = [], 0
    yield group, num_chars


def refuse_endless(text: str, param: str) -> None:
    """For a route that answers with the tokens of any text: some texts only keep the others waiting."""
    if len(text) > MAX_TEXT_CHARS:
        raise BodyTooLarge(
            f"{param} has {len(text)} characters, but at most {MAX_TEXT_CHARS} are tokenised in one request",
            param=param,
            fix="send it in parts",
        )


def encode_within(model: ServedModel, text: str, *, add_special_tokens: bool, truncates: bool, param: str) -> list[int]:
    """Token ids of `text`, refusing early when its start alone is too long (unless the prompt will be cut anyway)."""
    limit = model.max_model_len
    probe = limit * PROBE_CHARS_PER_TOKEN
    if not truncates and len(text) > 2 * probe:
        at_least = len(model.tokenizer.encode(text[:probe], add_special_tokens=False)) - CUT_SLACK
        if at_least > limit:
            raise ContextTooLong(
                f"{param} has more than {at_least} tokens ({len(text)} characters), "
                f"but the context of the model is {limit} tokens",
                param=param,
                fix="shorten it, or set truncate_prompt_tokens",
            )
    most = max(MAX_TEXT_CHARS, 2 * probe)
    if len(text) > most:
        # Where a cut text may be tokenised differently anywhere after the cut, its end alone is not enough.
        raise ContextTooLong(
            f"{param} has {len(text)} characters, but at most {most} are tokenised for a context of {limit} tokens",
            param=param,
            fix="send only the end of it" if truncates else "shorten it",
        )
    ids = model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not ids:
        raise InvalidRequest(f"{param} must hold at least one token, got an empty text", param=param)
    return ids


def _tokenize(
    model: ServedModel, prompt: str | list[int], add_special_tokens: bool, truncates: bool, param: str
) -> Prompt:
    if isinstance(prompt, str):
        ids = encode_within(model, prompt, add_special_tokens=add_special_tokens, truncates=truncates, param=param)
        return Prompt(ids, prompt)
    if not prompt:
        raise InvalidRequest(f"{param} must hold at least one token, got an empty list", param=param)
    return Prompt(prompt)
