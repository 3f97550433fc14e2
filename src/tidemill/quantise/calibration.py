"""Text to calibrate and to measure on: from a file to sequences of token ids.

Samples are spread evenly over the file and do not overlap; the end of it is held back to measure on, unless another
file is given for that. The same file gives the same samples every time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tidemill.errors import ConfigError
from tidemill.text.tokenizer import Tokenizer

MOST_CHARACTERS = 2**25
"""Of a longer file, this much of its beginning is read."""
EVALUATED_TOKENS = 16384
HELD_BACK = 0.1
FEWEST_TOKENS = 32

Sequences = list[list[int]]


@dataclass(frozen=True)
class Texts:
    calibration: Sequences
    evaluation: Sequences
    evaluated_on: str
    """For people; empty where nothing is."""


def read_texts(
    tokenizer: Tokenizer, calibration: str | None, evaluation: str | None, samples: int, length: int
) -> Texts:
    prefix = beginning(tokenizer)
    room = max(length - len(prefix), 1)
    held: list[int] = []
    chosen: Sequences = []
    where = ""
    if calibration is not None:
        ids = _tokens(tokenizer, calibration, "calibration")
        if evaluation is None:
            count = min(int(len(ids) * HELD_BACK), EVALUATED_TOKENS)
            ids, held = ids[: len(ids) - count], ids[len(ids) - count :]
            where = f"the last {count:,} tokens of {Path(calibration).name}, which were not calibrated on"
        chosen = [prefix + part for part in _spread(ids, samples, room)]
    if evaluation is not None:
        held = _tokens(tokenizer, evaluation, "eval")[:EVALUATED_TOKENS]
        where = f"{len(held):,} tokens of {Path(evaluation).name}"
    measured = [prefix + held[start : start + room] for start in range(0, len(held), room)]
    # A sequence of one token predicts nothing.
    measured = [sequence for sequence in measured if len(sequence) > 1]
    return Texts(chosen, measured, where if measured else "")


def beginning(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every text."""
    first = tokenizer.encode("a")[:1]
    return first if first and first[0] == tokenizer.bos_id else []


def _spread(ids: list[int], samples: int, length: int) -> Sequences:
    length = min(length, len(ids))
    count = min(samples, len(ids) // length)
    gap = (len(ids) - count * length) / max(count - 1, 1)
    starts = [int(index * (length + gap)) for index in range(count)]
    return [ids[start : start + length] for start in starts]


def _tokens(tokenizer: Tokenizer, file: str, option: str) -> list[int]:
    ids = tokenizer.encode(_text(Path(file).expanduser(), option), add_special_tokens=False)
    if len(ids) < FEWEST_TOKENS:
        raise ConfigError(
            f"{file} holds {len(ids)} tokens, which are too few",
            param=option,
            cause=f"at least {FEWEST_TOKENS} are needed; tens of thousands are good",
            fix=f"--{option} FILE with more text, such as a few pages of an encyclopedia",
        )
    return ids


def _text(path: Path, option: str) -> str:
    try:
        with path.open(encoding="utf-8") as handle:
            if path.suffix != ".jsonl":
                return handle.read(MOST_CHARACTERS)
            texts: list[str] = []
            for number, line in enumerate(handle, 1):
                if line.strip():
                    texts.append(_entry(line, path, number, option))
                if len(texts) % 64 == 0 and sum(map(len, texts)) > MOST_CHARACTERS:
                    break
            return "\n\n".join(texts)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as text",
            param=option,
            cause=str(error),
            fix=f'--{option} FILE, plain text in UTF-8 or .jsonl with a "text" each',
        ) from error


def _entry(line: str, path: Path, number: int, option: str) -> str:
    try:
        text = json.loads(line)["text"]
        if isinstance(text, str):
            return text
        cause = f'its "text" is a {type(text).__name__}'
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        cause = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"{path}, line {number}, has no text",
        param=option,
        cause=cause,
        fix='every line of a .jsonl is an object such as {"text": "..."}; plain text goes into a .txt file',
    )
