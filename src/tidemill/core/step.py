"""Step and StepResult: the only words between scheduling and execution.

Immutable and serialisable, and only what changed: a request's tokens, parameters and blocks travel once, when it gets
its row; after that a step says which rows advance, from where, by how much, and which blocks were added. Sampled tokens
are not sent back down: the runner keeps them in its rows, so a step can be launched before the previous result is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled or prompt token: its log-probability, its rank, and the most likely alternatives (best first)."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request enters a row, for the first time or after preemption. `tokens` is all that is known of it."""

    row: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    bad_words_ids: list[list[int]]
    counts_as: int = 0
    """The sequence is computed as if it had been at least so long from the start."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + count) of a row are computed in this step; `samples` if the last one yields a token.

    `new_blocks` has, per group of layers, the entries added to the row's table: page ids, or NO_BLOCK where the row
    begins behind blocks that the group's window no longer reaches. A table is not told when an entry leaves the window
    later: what a token does not see must not be read, for its page may be somebody else's by then.
    """

    row: int
    start: int
    count: int
    new_blocks: list[list[int]]
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One batch. Every slice's keys and values are written before any slice attends, layer by layer, so a slice may
    read blocks that another slice of the same step fills: the prefix cache relies on it."""

    id: int
    new_rows: list[NewRow]
    slices: list[Slice]

    @property
    def num_tokens(self) -> int:
        return sum(piece.count for piece in self.slices)


@dataclass(frozen=True, slots=True)
class SliceProblem:
    """Why one request alone failed: through what it asked for, or through the model."""

    message: str
    by_request: bool = False
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class SliceResult:
    """What one slice gave. `token` is None when it did not sample."""

    token: int | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    problem: SliceProblem | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One result per slice of the step, in the same order."""

    slices: list[SliceResult]
