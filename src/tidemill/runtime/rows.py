"""Permanent per-request state, one row each: tokens, block table, parameters.

A step names rows and ranges; its inputs are gathered from here. Sampled tokens are written back here at once, so the
next step can be prepared before anybody has read them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.core.params import SamplingParams
from tidemill.core.step import NewRow, Slice


@dataclass
class RowState:
    params: SamplingParams
    num_prompt: int
    counts_as: int
    """Every token is computed as if the sequence were at least so long."""
    seed: int
    stop_ids: list[int]
    banned_ids: list[int]
    """Bad words of one token: never allowed."""
    bad_sequences: list[list[int]]
    """Bad words of several tokens: the last one is not allowed after the others."""
    num_blocks: list[int]
    """Entries of each group's table."""
    num_tokens: int


def row_state(new: NewRow, num_groups: int) -> RowState:
    return RowState(
        params=new.params,
        num_prompt=new.num_prompt,
        counts_as=max(new.num_prompt, new.counts_as),
        seed=new.seed,
        stop_ids=new.stop_ids,
        banned_ids=[words[0] for words in new.bad_words_ids if len(words) == 1],
        bad_sequences=[words for words in new.bad_words_ids if len(words) > 1],
        num_blocks=[0] * num_groups,
        num_tokens=len(new.tokens),
    )


@dataclass(frozen=True)
class Gathered:
    """The token inputs of a step, flat, in the order of its slices."""

    tokens: np.ndarray
    positions: np.ndarray
    lengths: np.ndarray
    slots: list[np.ndarray]
    """Per group of cache blocks, the flat cache position of every token."""


class Rows:
    def __init__(self, num_rows: int, max_len: int, block_size: int, padding_block: int, num_groups: int = 1) -> None:
        """`padding_block` fills the tables where a row has no blocks; it is never written, so it is safe to read."""
        self.block_size, self.padding_block = block_size, padding_block
        # Untouched pages of these cost no memory, however large max_len is.
        self.tokens = np.zeros((num_rows, max_len + 1), dtype=np.int64)
        shape = (num_rows, -(-max_len // block_size))
        self.tables = [np.full(shape, padding_block, dtype=np.int32) for _ in range(num_groups)]
        self.states: list[RowState | None] = [None] * num_rows

    def enter(self, new: NewRow) -> None:
        self.tokens[new.row, : len(new.tokens)] = new.tokens
        for table in self.tables:
            table[new.row] = self.padding_block
        self.states[new.row] = row_state(new, len(self.tables))

    def state(self, row: int) -> RowState:
        state = self.states[row]
        assert state is not None, f"row {row} was never entered"
        return state

    def extend_table(self, piece: Slice) -> None:
        state = self.state(piece.row)
        for group, blocks in enumerate(piece.new_blocks):
            if blocks:
                start, end = state.num_blocks[group], state.num_blocks[group] + len(blocks)
                self.tables[group][piece.row, start:end] = blocks
                if blocks[0] < 0:
                    # Blocks outside a window come first; nobody reads them, and padding is safe to read.
                    entries = self.tables[group][piece.row, start:end]
                    entries[entries < 0] = self.padding_block
                state.num_blocks[group] = end

    def append(self, row: int, token: int) -> None:
        state = self.state(row)
        self.tokens[row, state.num_tokens] = token
        state.num_tokens += 1

    def gather(self, slices: list[Slice]) -> Gathered:
        counts = np.fromiter((piece.count for piece in slices), dtype=np.int64, count=len(slices))
        starts = np.fromiter((piece.start for piece in slices), dtype=np.int64, count=len(slices))
        rows = np.fromiter((piece.row for piece in slices), dtype=np.int64, count=len(slices))
        least = np.fromiter((self.state(piece.row).counts_as for piece in slices), np.int64, count=len(slices))
        first = np.cumsum(counts) - counts
        positions = np.arange(int(counts.sum())) + np.repeat(starts - first, counts)
        rows = np.repeat(rows, counts)
        blocks, inside = positions // self.block_size, positions % self.block_size
        return Gathered(
            tokens=self.tokens[rows, positions],
            positions=positions,
            lengths=np.maximum(np.repeat(least, counts), positions + 1),
            slots=[table[rows, blocks].astype(np.int64) * self.block_size + inside for table in self.tables],
        )
