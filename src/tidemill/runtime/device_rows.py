"""Permanent per-request state on a GPU, one row each: tokens, block tables, and what else a step gathers.

All of it is one int32 tensor, so that whatever a step changes (a new request's tokens, a table's new pages) goes up as
one list of places and one of values. Sampled tokens are written by the sampler, on the device: the host knows how many
tokens a row has, and learns which they are later.
"""

from __future__ import annotations

import numpy as np
import torch

from tidemill.core.step import NewRow, Slice
from tidemill.runtime.rows import RowState, row_state


class DeviceRows:
    def __init__(self, num_rows: int, max_len: int, block_size: int, num_groups: int, device: torch.device) -> None:
        """One row more than asked for: the sequences that pad a batch stand in it."""
        self.padding_row, self.block_size = num_rows, block_size
        count, width, blocks = num_rows + 1, max_len + 1, -(-max_len // block_size)
        sizes = (count * width, num_groups * count * blocks, count)
        self.memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        tokens, tables, least = self.memory.split(sizes)
        self.tokens, self.tables, self.least = tokens.view(count, width), tables.view(num_groups, count, blocks), least
        self._starts = (0, sizes[0], sizes[0] + sizes[1])
        self.states: list[RowState | None] = [None] * num_rows
        self._places: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def enter(self, new: NewRow) -> RowState:
        state = self.states[new.row] = row_state(new, len(self.tables))
        self._write(0, new.row * self.tokens.shape[1], new.tokens)
        self._write(2, new.row, [state.counts_as])
        return state

    def extend_table(self, piece: Slice) -> None:
        state = self.state(piece.row)
        count, blocks = self.tables.shape[1:]
        for group, pages in enumerate(piece.new_blocks):
            if pages:
                # Pages outside a window come as negative numbers; nobody looks at them.
                self._write(1, (group * count + piece.row) * blocks + state.num_blocks[group], pages)
                state.num_blocks[group] += len(pages)

    def state(self, row: int) -> RowState:
        state = self.states[row]
        assert state is not None, f"row {row} was never entered"
        return state

    def drop_writes(self) -> None:
        """Forget what a launch that failed has left behind: its requests have ended, and their rows may be others'."""
        self._places, self._values = [], []

    def take_writes(self) -> tuple[np.ndarray, np.ndarray]:
        """Places in `memory` and what they are to hold, since the last time."""
        if not self._places:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        self.drop_writes()
        return places, values

    def _write(self, part: int, first: int, values: list[int]) -> None:
        first += self._starts[part]
        self._places.append(np.arange(first, first + len(values), dtype=np.int32))
        self._values.append(np.asarray(values, dtype=np.int32))
