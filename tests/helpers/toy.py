"""A model made of arithmetic, with a real paged cache: what it says depends on every token it sees through its blocks.

It has groups of layers with and without windows, each with its own table, and reads per group exactly what the tokens
of a slice see. If the scheduler ever shares a wrong block, loses one, gives one back too early, or computes a token
twice at the wrong place, the toy notices, or says something else than `expected` does. It keeps its own rows, as the
real runner does. `toy_core` puts it into a real engine core.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.core.step import Slice, SliceProblem, SliceResult, Step, StepResult
from tidemill.engine.core import EngineCore
from tidemill.engine.messages import Add

VOCABULARY = 50
POISON = 99
"""A prompt token that the toy cannot compute."""


def next_token(views: list[list[int]]) -> int:
    """`views` has what each group sees."""
    return hashlib.blake2b(b"|".join(map(bytes, views)), digest_size=2).digest()[0] % VOCABULARY


def expected(prompt: list[int], count: int, windows: Sequence[int | None] = (None,)) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token([tokens if window is None else tokens[-window:] for window in windows]))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Written:
    """What a slot of a page holds: a token as one group keeps it, with all that came before it."""

    group: int
    token: int
    prefix: int


WIPED = Written(-1, 0, 0)
"""What a poisoned slice leaves behind."""


@dataclass
class Page:
    slots: list[Written | None]
    generation: int = 0
    """How often somebody began to fill it: one who still reads it must find it as it was when he got it."""


@dataclass
class ToyRow:
    tokens: list[int]
    tables: list[list[int]]
    generations: list[list[int]]
    """Per table entry, the generation of its page once the step that added it had written."""
    long: bool = False
    """Longer than the length at which sequences turn: all its tokens are kept in another way."""
    prefixes: list[int] = field(default_factory=list)
    poisoned: bool = False

    def prefix(self, position: int) -> int:
        """Names the tokens up to and including this one."""
        for index in range(len(self.prefixes), position + 1):
            self.prefixes.append(hash((self.prefixes[-1] if index else self.long, self.tokens[index])))
        return self.prefixes[position]


@dataclass
class ToyHandle:
    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


class ToyRunner:
    def __init__(
        self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,), turn: int | None = None
    ) -> None:
        self.block_size, self.windows, self.turn = block_size, windows, turn
        self.pages = [Page([None] * block_size) for _ in range(num_blocks)]
        self.rows: dict[int, ToyRow] = {}
        self.steps: list[Step] = []
        self.fail_next = False

    def launch(self, step: Step) -> ToyHandle:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the toy broke")
        self.steps.append(step)
        for new in step.new_rows:
            long = self.turn is not None and max(new.num_prompt, new.counts_as) > self.turn
            none: list[list[list[int]]] = [[[] for _ in self.windows] for _ in range(2)]
            self.rows[new.row] = ToyRow(list(new.tokens), *none, long=long)
        for piece in step.slices:
            self._write(piece)
        for piece in step.slices:
            row = self.rows[piece.row]
            for table, generations in zip(row.tables, row.generations, strict=True):
                generations.extend(self.pages[page].generation for page in table[len(generations) :])
        return ToyHandle(StepResult([self._compute(piece) for piece in step.slices]))

    def _write(self, piece: Slice) -> None:
        row = self.rows[piece.row]
        for group, (table, added) in enumerate(zip(row.tables, piece.new_blocks, strict=True)):
            table.extend(added)
            assert len(table) == -(-(piece.start + piece.count) // self.block_size), "a table of the wrong length"
            for position in range(piece.start, piece.start + piece.count):
                block, offset = divmod(position, self.block_size)
                assert table[block] >= 0, "a token has no block to be written to"
                page = self.pages[table[block]]
                if offset == 0:
                    page.slots = [None] * self.block_size
                    page.generation += 1
                page.slots[offset] = Written(group, row.tokens[position], row.prefix(position))

    def _compute(self, piece: Slice) -> SliceResult:
        row, end = self.rows[piece.row], piece.start + piece.count
        assert row.long or self.turn is None or end <= self.turn, "a sequence outgrew its length and did not turn"
        row.poisoned |= POISON in row.tokens[piece.start : end]
        if row.poisoned:
            self._wipe(piece)
            if piece.samples:
                # A step that is in flight already reads something where the token would be.
                row.tokens.append(0)
            return SliceResult(problem=SliceProblem("the toy was poisoned"))
        views = []
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, piece.start - window + 1)
            seen = [self._read(row, group, position) for position in range(first, end)]
            # The last token alone decides what is said, and sees no more than its own window.
            views.append(seen if window is None else seen[-window:])
        if not piece.samples:
            return SliceResult()
        row.tokens.append(next_token(views))
        return SliceResult(row.tokens[-1])

    def _read(self, row: ToyRow, group: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        assert row.tables[group][block] >= 0, "a token sees what has no block"
        page = self.pages[row.tables[group][block]]
        assert page.generation == row.generations[group][block], "a page is read that was handed to somebody else"
        held = page.slots[offset]
        if held is WIPED:
            # As the real cache does: zeros, from which something wrong is computed.
            return 0
        assert held is not None, "a block is read that nobody wrote"
        assert held == Written(group, row.tokens[position], row.prefix(position)), "a block holds something else"
        return held.token

    def _wipe(self, piece: Slice) -> None:
        for table in self.rows[piece.row].tables:
            for position in range(piece.start, piece.start + piece.count):
                block, offset = divmod(position, self.block_size)
                self.pages[table[block]].slots[offset] = WIPED


def toy_core(
    num_blocks: int = 8,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 8,
    caching: bool = True,
    chunked: bool = True,
    policy: str = "fcfs",
    depth: int = 1,
    eos_ids: tuple[int, ...] = (),
    windows: tuple[int | None, ...] = (None,),
    max_model_len: int | None = None,
    turn: int | None = None,
) -> EngineCore:
    config = EngineConfig(
        model_path="",
        model_kind="folder",
        model_origin="toy",
        model_impl="native",
        trust_remote_code=False,
        check_weights=False,
        device="cpu",
        dtype="float32",
        threads=1,
        max_model_len=num_blocks * block_size if max_model_len is None else max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        scheduling_policy=policy,
        max_waiting=100,
        seed=0,
        vocab_size=VOCABULARY,
        eos_ids=list(eos_ids),
        weight_bytes=0,
        kv_bytes=0,
        activation_bytes=0,
        block_windows=list(windows),
    )
    return EngineCore(
        config,
        ToyRunner(num_blocks, block_size, windows, turn),
        cache_regime=lambda num_prompt: b"long" if turn is not None and num_prompt > turn else b"",
        turn_length=turn,
        steps_in_flight=depth,
    )


def ask(core: EngineCore, name: str, prompt: list[int], count: int, **more: object) -> None:
    salt, priority = more.pop("cache_salt", None), more.pop("priority", 0)
    params = SamplingParams(temperature=0, max_tokens=count, **more)
    core.add(Add(name, prompt, params, cache_salt=salt, priority=priority))


def run(core: EngineCore, max_steps: int = 5000) -> dict[str, list[int]]:
    """Step until all is said; nobody may fail."""
    said: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return said
        for output in core.step():
            assert output.problem is None, output.problem
            said.setdefault(output.id, []).extend(output.token_ids)
        check_books(core)
    raise AssertionError("somebody starves: the work does not end")


def check_books(core: EngineCore) -> None:
    """Every page is held as often as it stands in a table, and always as the same block of the same group."""
    scheduler = core.scheduler
    scheduler.pool.check()
    places = [
        (page, group, index)
        for request in scheduler.running
        for group, table in enumerate(request.blocks)
        for index, page in enumerate(table)
        if page >= 0
    ]
    holders = Counter(page for page, _, _ in places)
    assert [holders[page] for page in range(scheduler.pool.num_blocks)] == scheduler.pool._refs
    assert len(set(places)) == len(holders), "one page is two blocks at once"
