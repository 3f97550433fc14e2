"""A request as the scheduler sees it: tokens, parameters and one cursor.

`num_computed` is the whole state of progress: prefill, chunked prefill, decode and resuming after preemption are all
"tokens from num_computed on are still to be computed". Knows nothing of text, devices or transport.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field

from tidemill.core.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that grows beyond `length` tokens is computed anew from its first token, as one that was always so
    long; `cache_key` is its key from then on."""

    length: int
    cache_key: bytes


@dataclass(slots=True, eq=False)
class Request:
    id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """Resolved limit on new tokens: the caller's, or what the context leaves."""
    eos_ids: frozenset[int] = frozenset()
    bad_words_ids: list[list[int]] = field(default_factory=list)
    seed: int = 0
    priority: int = 0
    arrival: int = 0
    cache_key: bytes = b""
    """What must be equal, besides the tokens, for blocks to be shared (salt, adapter, media, rope regime)."""
    turn: Turn | None = None
    """Still to come, if any."""
    counts_as: int = 0
    """It is computed as if it had been at least so long from the start."""

    tokens: list[int] = field(init=False)
    num_computed: int = 0
    num_pending: int = 0
    """Samples launched whose tokens are not known yet."""
    num_cached: int = 0
    row: int = -1
    blocks: list[list[int]] = field(default_factory=list)
    """One table per group of layers while it has a row; NO_BLOCK where nothing is held."""
    num_given_back: list[int] = field(default_factory=list)
    """Per group, the leading entries of its table that hold no block."""
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    """Leading blocks that the pool has been told of, in every group that held them."""
    finish: str | None = None
    stop_reason: int | str | None = None
    life: int = 0
    """Grows when what is in flight for it has become worthless."""
    num_rows_left: int = 0
    """How often it was preempted or turned."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Who is served first; preemption takes the greatest."""
        return (self.priority, self.arrival)

    @property
    def stop_ids(self) -> list[int]:
        ids = list(self.params.stop_token_ids)
        return ids if self.params.ignore_eos else [*self.eos_ids, *ids]

    @property
    def must_turn(self) -> bool:
        return self.turn is not None and self.num_tokens > self.turn.length

    def make_turn(self) -> None:
        """Forget all progress but the tokens."""
        assert self.turn is not None
        self.cache_key, self.counts_as, self.turn = self.turn.cache_key, self.turn.length + 1, None
        self.block_hashes = []
        self.num_computed = self.num_committed = 0

    def extend_hashes(self, block_size: int) -> None:
        """Hash the full blocks of the known tokens, each chained to its parent, so equal hash means equal prefix.

        A cryptographic hash: a crafted prompt must not be able to collide with somebody else's prefix.
        """
        for index in range(len(self.block_hashes), len(self.tokens) // block_size):
            # A digest has 16 bytes and a key never does, so no chain can pass for another's beginning.
            parent = self.block_hashes[-1] if self.block_hashes else self.cache_key + b"\0root"
            tokens = array("q", self.tokens[index * block_size : (index + 1) * block_size])
            self.block_hashes.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())

    def append(self, token: int, max_model_len: int) -> None:
        """Take a sampled token and decide whether the request ends with it."""
        self.tokens.append(token)
        if token in self.eos_ids and not self.params.ignore_eos:
            self.finish = "stop"
        elif token in self.params.stop_token_ids:
            self.finish, self.stop_reason = "stop", token
        elif self.num_output >= self.max_tokens or len(self.tokens) >= max_model_len:
            self.finish = "length"
