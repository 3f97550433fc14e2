"""The words that cross the process boundary, in both directions, and what a caller receives.

Plain frozen dataclasses: they travel as msgpack between processes (`transport.py`) and as objects inside one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.core.step import TokenLogprob


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue. `cache_salt` isolates its prefix cache; a lower `priority` is served earlier."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Add:
    """Client to engine: run this sequence (a request with n > 1 becomes n of these)."""

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    bad_words_ids: list[list[int]] = field(default_factory=list)
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    ids: list[str]


@dataclass(frozen=True, slots=True)
class Ping:
    """Client to engine: a sign of life, please."""


@dataclass(frozen=True, slots=True)
class Start:
    """Client to engine, first of all: what to run."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine to client: the model is loaded and a first step has run."""

    load_seconds: float
    resident_bytes: int
    device_bytes: int = 0
    """What the engine's tensors hold of a GPU."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine to client: start-up or a step failed for good. `problem` is `TidemillError.as_dict()`."""

    problem: dict[str, str | None]


@dataclass(frozen=True, slots=True)
class Progress:
    """Engine to client, before Ready: how far loading is."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Pong:
    """Engine to client: the loop is turning."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence. `finish` is None while it runs, else stop, length, abort or error."""

    id: str
    token_ids: list[int]
    finish: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached: int = 0
    problem: dict[str, str | None] | None = None


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine taken after a step; counters only grow."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outputs:
    outputs: list[SequenceOutput]
    stats: Stats


@dataclass(frozen=True, slots=True)
class Delta:
    """What a caller of `EngineClient.generate` receives: new text of choice `index`, and how the choice ended.

    `text` never holds half a character nor the start of a possible stop string. `prompt_logprobs` comes once, on the
    first delta of choice 0; its first entry is None because nothing precedes the first token.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
