"""Whether a model has weights for every token of its tokenizer, and what to say where it has not.

More rows than tokens is padding and normal. Tokens without a row are an error only where no request could avoid them;
added tokens that nobody needs (a padding token is the usual one) are worth a line. Does not know requests: an id
without a row is refused by the engine's admission.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidemill.errors import BadCheckpoint, ConfigError
from tidemill.text.chat import ChatTemplate
from tidemill.text.tokenizer import Tokenizer

_LISTED = 5


def check_vocabulary(
    tokenizer: Tokenizer, template: ChatTemplate | None, num_rows: int, asked_for: str | None = None
) -> str | None:
    """A line to tell about tokens without a row, None where there are none. `asked_for` is --tokenizer, if given."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    outside = {token_id: token for token, token_id in vocabulary.items() if token_id >= num_rows}
    if not outside:
        return None
    needed = _needed(outside, tokenizer, template)
    if needed is not None:
        which, why = needed
        message = f"the tokenizer has tokens that the model has no weights for: {_listed(which)}"
        cause = f"{why}; the model has {num_rows} rows, the tokenizer's ids go up to {max(outside)}"
        if asked_for is not None:
            raise ConfigError(message, param="tokenizer", cause=cause, fix="leave --tokenizer out, or name the model's")
        raise BadCheckpoint(
            message, cause=cause, fix="pass the tokenizer the model was trained with: --tokenizer FOLDER or ORG/NAME"
        )
    return f"no weights for the added tokens {_listed(outside)}; requests that use them are refused"


def _needed(
    outside: Mapping[int, str], tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[dict[int, str], str] | None:
    """Tokens that cannot be done without, and why."""
    ordinary = {token_id: token for token_id, token in outside.items() if token_id not in tokenizer.added_ids}
    if ordinary:
        return ordinary, "they are part of the vocabulary itself, so ordinary text has them"
    for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token_id is not None and token_id in outside:
            return {token_id: outside[token_id]}, f"it is the {name}"
    written = {token_id: token for token_id, token in outside.items() if template and template.mentions(token)}
    return (written, "the chat template writes them") if written else None


def _listed(tokens: Mapping[int, str]) -> str:
    shown = [f"{tokens[token_id]!r} ({token_id})" for token_id in sorted(tokens)[:_LISTED]]
    more = len(tokens) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")
