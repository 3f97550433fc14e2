"""What a request's constraints and penalties do to its logits on the device: `sampler.py` says what they mean.

Lists of tokens go up with every step that needs them, packed into one buffer; whatever depends on the tokens so far is
decided on the device. Knows nothing of temperatures or draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tidemill.ops.triton.logit_edits import forbid, penalise
from tidemill.runtime.rows import RowState
from tidemill.runtime.sampler import MASKED
from tidemill.runtime.uploads import Uploads

COUNT_BYTES = 32 * 2**20
"""Memory for counting the tokens of rows with penalties; more rows than fit are done in turns."""


@dataclass(frozen=True, slots=True)
class Pick:
    """One token to sample: the row it is for, and how many tokens the row has, read or not."""

    row: int
    state: RowState
    num_tokens: int


@dataclass(frozen=True)
class _RowEdits:
    """A request's lists as arrays, made once."""

    allowed: np.ndarray | None
    biased: np.ndarray
    biases: np.ndarray
    """The bits of float32 numbers."""
    banned: list[int]
    bad_sequences: list[list[int]]
    stop_ids: list[int]
    min_tokens: int
    num_prompt: int
    penalised: bool

    @staticmethod
    def of(state: RowState) -> _RowEdits | None:
        """None where the request's logits are never changed."""
        params = state.params
        bias = params.logit_bias or {}
        made = _RowEdits(
            allowed=None if params.allowed_token_ids is None else _ints(params.allowed_token_ids),
            biased=_ints(list(bias)),
            biases=np.fromiter(bias.values(), np.float32).view(np.int32),
            banned=state.banned_ids,
            bad_sequences=state.bad_sequences,
            stop_ids=state.stop_ids,
            min_tokens=params.min_tokens if state.stop_ids else 0,
            num_prompt=state.num_prompt,
            penalised=(params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0),
        )
        lists = made.allowed is not None or bias or made.banned or made.bad_sequences
        return made if lists or made.min_tokens or made.penalised else None


@dataclass
class _StepEdits:
    """The edits of a step, by index of its picks."""

    masked: list[int] = field(default_factory=list)
    """Picks that may choose only from the allowed tokens."""
    allowed: list[np.ndarray] = field(default_factory=list)
    """Of these and of the biased ones, indices into the flat logits."""
    biased: list[np.ndarray] = field(default_factory=list)
    biases: list[np.ndarray] = field(default_factory=list)
    forbidden: list[tuple[int, int, int, int]] = field(default_factory=list)
    prefixes: list[int] = field(default_factory=list)
    longest_prefix: int = 0
    penalised: list[int] = field(default_factory=list)

    def add(self, place: int, edits: _RowEdits, num_tokens: int, vocab_size: int) -> None:
        num_output = num_tokens - edits.num_prompt
        if edits.allowed is not None:
            self.masked.append(place)
            self.allowed.append(edits.allowed + place * vocab_size)
        if len(edits.biased):
            self.biased.append(edits.biased + place * vocab_size)
            self.biases.append(edits.biases)
        self.forbidden.extend((place, token, 0, 0) for token in edits.banned)
        if num_output < edits.min_tokens:
            self.forbidden.extend((place, token, 0, 0) for token in edits.stop_ids)
        for *prefix, last in edits.bad_sequences:
            if num_output >= len(prefix):
                self.forbidden.append((place, last, len(self.prefixes), len(prefix)))
                self.prefixes.extend(prefix)
                self.longest_prefix = max(self.longest_prefix, len(prefix))
        if edits.penalised:
            self.penalised.append(place)

    def arrays(self) -> list[np.ndarray]:
        return [
            _ints(self.masked),
            _joined(self.allowed),
            _joined(self.biased),
            _joined(self.biases),
            _ints(self.forbidden).reshape(-1),
            _ints(self.prefixes),
            _ints(self.penalised),
        ]


class DeviceEdits:
    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._of_row: list[_RowEdits | None] = [None] * num_rows
        self._uploads = Uploads(device)
        counted = max(1, min(num_rows, COUNT_BYTES // (4 * vocab_size)))
        self._counts = torch.empty(counted, vocab_size, dtype=torch.int32, device=device)

    def enter(self, row: int, state: RowState) -> bool:
        """A request enters a row; whether its logits are ever changed."""
        self._of_row[row] = _RowEdits.of(state)
        return self._of_row[row] is not None

    def apply(
        self,
        logits: torch.Tensor,
        picks: Sequence[Pick],
        rows: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        table: torch.Tensor,
    ) -> None:
        """Changes the contiguous logits of all picks in place."""
        step = _StepEdits()
        for place, pick in enumerate(picks):
            edits = self._of_row[pick.row]
            if edits is not None:
                step.add(place, edits, pick.num_tokens, self._vocab_size)
        masked, allowed, biased, biases, forbidden, prefixes, penalised = self._uploads.send(step.arrays())
        flat = logits.view(-1)
        if len(masked):
            kept = flat.index_select(0, allowed)
            logits.index_fill_(0, masked.long(), MASKED)
            flat.index_copy_(0, allowed.long(), kept)
        if len(biased):
            flat.index_add_(0, biased, biases.view(torch.float32))
        if len(forbidden):
            forbid(logits, forbidden.view(-1, 4), prefixes, step.longest_prefix, rows, lengths, tokens)
        for first in range(0, len(penalised), len(self._counts)):
            longest = max(picks[place].num_tokens for place in step.penalised[first : first + len(self._counts)])
            some = penalised[first : first + len(self._counts)]
            penalise(logits, some, rows, lengths, tokens, longest, table, self._counts)


def _ints(values: Sequence[int] | Sequence[tuple[int, int, int, int]]) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, np.int32)
