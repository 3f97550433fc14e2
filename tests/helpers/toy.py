"""A model made of arithmetic, with a real paged cache: what it says depends on every token it sees through its blocks.

If the scheduler ever shares a wrong block, loses one, or computes a token twice at the wrong place, the toy says
something else than `expected` does. It keeps its own rows, as the real runner does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from tidemill.core.step import SliceResult, Step, StepResult

VOCABULARY = 50


def next_token(context: list[int]) -> int:
    return hashlib.blake2b(bytes(context), digest_size=2).digest()[0] % VOCABULARY


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@dataclass
class ToyRow:
    tokens: list[int]
    table: list[int] = field(default_factory=list)


@dataclass
class ToyHandle:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class ToyRunner:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.rows: dict[int, ToyRow] = {}
        self.steps: list[Step] = []
        self.fail_next = False

    def launch(self, step: Step) -> ToyHandle:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the toy broke")
        self.steps.append(step)
        for new in step.new_rows:
            self.rows[new.row] = ToyRow(list(new.tokens))
        for piece in step.slices:
            row = self.rows[piece.row]
            row.table.extend(piece.new_blocks)
            for position in range(piece.start, piece.start + piece.count):
                block = row.table[position // self.block_size]
                self.cache[block][position % self.block_size] = row.tokens[position]
        results = []
        for piece in step.slices:
            row = self.rows[piece.row]
            token = None
            if piece.samples:
                seen = [
                    self.cache[row.table[position // self.block_size]][position % self.block_size]
                    for position in range(piece.start + piece.count)
                ]
                assert None not in seen, "a block was read that nobody wrote"
                token = next_token([value for value in seen if value is not None])
                row.tokens.append(token)
            results.append(SliceResult(token))
        return ToyHandle(StepResult(results))
