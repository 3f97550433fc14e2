"""Layers with a window beside layers that see everything: what is held, what is found again, and that one pool is
enough for both."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.toy import POISON, ask, expected, run, toy_core
from tidemill.core.block_groups import NO_BLOCK, block_key, first_block_seen, most_blocks_held, pages_for
from tidemill.core.block_pool import BlockPool
from tidemill.core.block_tables import BlockTables
from tidemill.core.params import SamplingParams
from tidemill.core.request import Request
from tidemill.core.scheduler import Scheduler, SchedulerConfig
from tidemill.core.step import SliceResult, StepResult
from tidemill.engine.core import EngineCore
from tidemill.errors import OutOfMemory

PROMPT = [(7 * index) % 50 for index in range(33)]
"""Eight whole blocks of four, and one token more."""


def remember(core: EngineCore, prompt: list[int] = PROMPT) -> list[bytes]:
    """Let the prompt be computed once; the hashes of its blocks."""
    ask(core, "first", prompt, 1)
    request = core.scheduler.requests["first"]
    run(core)
    return request.block_hashes


def lose(core: EngineCore, hashes: list[bytes], group: int, indices: range) -> None:
    core.scheduler.pool.forget(block_key(hashes[index], group) for index in indices)


def tokens_found(core: EngineCore, prompt: list[int] = PROMPT) -> int:
    """How much of the prompt is read from the cache; what is said must not depend on it."""
    before = core.stats.prefix_hits
    ask(core, "again", prompt, 3)
    assert run(core)["again"] == expected(prompt, 3, tuple(core.config.block_windows))
    return core.stats.prefix_hits - before


def test_a_window_group_holds_its_window_while_the_other_holds_everything():
    core = toy_core(num_blocks=40, windows=(None, 6), budget=8, max_model_len=80)
    ask(core, "a", PROMPT, 40)
    request = core.scheduler.requests["a"]
    while request.num_computed < 60:
        core.step()
    whole, windowed = request.blocks
    assert len(whole) == len(windowed) == 15 and NO_BLOCK not in whole
    # The token at position 59 sees 54 to 59: of blocks of four, the last two.
    assert windowed[:13] == [NO_BLOCK] * 13 and NO_BLOCK not in windowed[13:]
    assert core.scheduler.pool.num_free == 40 - 15 - 2


def test_what_leaves_the_window_makes_room_for_others():
    """Three requests at once in pages that would hold one of them if nothing were given back."""
    windows, length = (4,), 64
    num_blocks = 16
    core = toy_core(num_blocks, windows=windows, max_model_len=length, budget=4)
    prompts = {name: [ord(name) % 50, 1, 2] for name in "abc"}
    for name, prompt in prompts.items():
        ask(core, name, prompt, 60)
    said = run(core)
    assert all(said[name] == expected(prompt, 60, windows) for name, prompt in prompts.items())
    assert core.stats.preemptions == 0
    assert 3 * length // 4 > num_blocks


def test_a_prompt_is_found_whole_when_only_the_window_at_its_end_is_left():
    core = toy_core(num_blocks=40, windows=(None, 6), budget=64, max_model_len=80)
    hashes = remember(core)
    # Position 32 sees 27 to 32, so blocks 6 and 7 are enough.
    lose(core, hashes, group=1, indices=range(6))
    assert tokens_found(core) == 32


def test_a_long_prompt_is_found_after_traffic_recycled_what_had_left_its_window():
    core = toy_core(num_blocks=20, windows=(None, 4), budget=8, max_model_len=52)
    hashes = remember(core)
    ask(core, "other", [49] * 16, 1)
    run(core)
    pool = core.scheduler.pool
    assert not any(block_key(block_hash, 1) in pool for block_hash in hashes[:2]), "nothing was recycled"
    assert tokens_found(core) == 32


def test_a_row_that_enters_behind_its_window_has_no_block_there():
    core = toy_core(num_blocks=40, windows=(None, 6), budget=64, max_model_len=80)
    remember(core)
    ask(core, "again", PROMPT, 1)
    run(core)
    (entered,) = core.runner.steps[-1].slices
    whole, windowed = entered.new_blocks
    assert entered.start == 32 and len(whole) == len(windowed) == 9
    assert windowed[:6] == [NO_BLOCK] * 6 and NO_BLOCK not in windowed[6:] and NO_BLOCK not in whole


@pytest.mark.parametrize(("lost", "found"), [(7, 28), (6, 24), (5, 32), (0, 32)])
def test_a_hit_is_shorter_when_a_block_of_the_window_at_its_end_is_gone(lost, found):
    core = toy_core(num_blocks=40, windows=(None, 6), budget=64, max_model_len=80)
    lose(core, remember(core), group=1, indices=range(lost, lost + 1))
    assert tokens_found(core) == found


def test_a_hit_falls_back_to_the_last_length_whose_window_is_there_in_every_group():
    core = toy_core(num_blocks=60, windows=(None, 5, 9), budget=64, max_model_len=80)
    hashes = remember(core)
    lose(core, hashes, group=1, indices=range(6, 8))
    # Without block 6 the group of 5 ends at 24 tokens; a window of 9 sees two blocks there, of which one is gone too.
    lose(core, hashes, group=2, indices=range(4, 5))
    assert tokens_found(core) == 16


def test_a_group_without_window_needs_every_block():
    core = toy_core(num_blocks=40, windows=(None, 6), budget=64, max_model_len=80)
    lose(core, remember(core), group=0, indices=range(3, 4))
    assert tokens_found(core) == 12


def test_a_window_of_one_token_needs_nothing_before_it():
    core = toy_core(num_blocks=40, windows=(None, 1), budget=64, max_model_len=80)
    lose(core, remember(core), group=1, indices=range(8))
    assert tokens_found(core) == 32


def test_what_a_chunk_wrote_and_left_behind_is_found_at_a_shorter_length():
    core = toy_core(num_blocks=40, windows=(None, 4), budget=64, max_model_len=80)
    ask(core, "first", PROMPT, 5)
    run(core)
    assert tokens_found(core, [*PROMPT[:16], 49, 49]) == 16


@pytest.mark.parametrize("windows", [(4,), (None, 4)])
def test_blocks_of_a_failed_slice_are_not_found_even_if_already_given_back(windows):
    """With two steps in flight the window has moved on before anybody knows that the first one failed."""
    core = toy_core(num_blocks=40, windows=windows, budget=16, depth=2, max_model_len=80)
    ask(core, "poisoned", [*PROMPT[:15], POISON, *PROMPT[15:]], 1)
    request = core.scheduler.requests["poisoned"]
    (output,) = core.step()
    assert "poisoned" in output.problem["message"]
    assert request.num_computed == 32, "the second step was not in flight"
    run(core)
    assert tokens_found(core, PROMPT[:15]) == 0


@settings(max_examples=300, deadline=None)
@given(
    windows=st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3),
    block_size=st.integers(1, 4),
    num_tokens=st.integers(1, 24),
    lost=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 23)), max_size=12),
)
def test_the_hit_is_the_greatest_length_whose_next_token_finds_all_it_sees(windows, block_size, num_tokens, lost):
    request = Request("a", list(range(num_tokens)), SamplingParams(), max_tokens=1)
    request.extend_hashes(block_size)
    pool = BlockPool(len(windows) * num_tokens)
    for group in range(len(windows)):
        for index, block_hash in enumerate(request.block_hashes):
            if (group, index) not in lost:
                pool.commit(group * num_tokens + index, block_key(block_hash, group))

    def seen_after(length: int) -> set[tuple[int, int]]:
        position = length * block_size
        return {
            (group, before // block_size)
            for group, window in enumerate(windows)
            for before in range(0 if window is None else max(0, position - window + 1), position)
        }

    whole_blocks = range((num_tokens - 1) // block_size + 1)
    longest = max(length for length in whole_blocks if not seen_after(length) & lost)
    tables = BlockTables(pool, block_size, windows, budget=8).find_cached(request)
    assert tables == [
        [group * num_tokens + index if (group, index) in seen_after(longest) else NO_BLOCK for index in range(longest)]
        for group in range(len(windows))
    ]


@settings(max_examples=200, deadline=None)
@given(window=st.integers(1, 12), block_size=st.integers(1, 5), budget=st.integers(1, 12), length=st.integers(1, 40))
def test_no_step_of_any_size_at_any_place_needs_more_blocks_than_foreseen(window, block_size, budget, length):
    needed = max(
        (start + count - 1) // block_size + 1 - first_block_seen(start, window, block_size)
        for start in range(length)
        for count in range(1, min(budget, length - start) + 1)
    )
    foreseen = most_blocks_held(length, block_size, window, budget)
    assert needed <= foreseen
    if length >= window + budget + 2 * block_size:
        assert needed == foreseen, "pages are reserved that nobody can use"


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 6), (None, 5, 5), (4, 9), (None, None)])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_the_longest_request_ends_alone_in_just_its_pages(windows, budget):
    length = 48
    core = toy_core(pages_for(length, 4, windows, budget), budget=budget, windows=windows, max_model_len=length)
    ask(core, "a", PROMPT, 100)
    assert run(core)["a"] == expected(PROMPT, length - len(PROMPT), windows)
    ask(core, "b", PROMPT, 100)
    assert run(core)["b"] == expected(PROMPT, length - len(PROMPT), windows)
    assert core.stats.preemptions == 0


def test_too_few_pages_for_the_longest_request_are_refused_at_the_start():
    needed = pages_for(48, 4, (None, 6), 8)
    with pytest.raises(OutOfMemory, match="max_model_len 48") as refused:
        toy_core(needed - 1, windows=(None, 6), max_model_len=48)
    assert f"--num-gpu-blocks-override {needed}" in refused.value.fix
    toy_core(needed, windows=(None, 6), max_model_len=48)


def test_the_same_block_has_another_key_in_every_group():
    keys = {block_key(bytes([number]) * 16, group) for number in range(4) for group in range(300)}
    assert len(keys) == 4 * 300


def test_gemma_3_at_8k_runs_three_times_the_requests_of_a_plain_cache_at_once():
    """Five groups of local layers to one of global ones, in the memory of four requests that keep everything."""
    length, block_size, windows = 8192, 16, (512,) * 5 + (None,)
    plain_pages = 4 * length // block_size * len(windows)
    scheduler = Scheduler(SchedulerConfig(plain_pages, block_size, length, 64, 512, windows=windows))
    for index in range(12):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        scheduler.add(Request(str(index), [index] * (length - 280), params, max_tokens=length))
    most = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        assert step is not None
        most = max(most, len(scheduler.running))
        scheduler.update(StepResult([SliceResult(1 if piece.samples else None) for piece in step.slices]))
    assert most == 12 and scheduler.num_preemptions == 0
