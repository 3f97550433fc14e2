"""The scheduler's promises, over random traffic: budget kept, no leak, no starvation, and the same tokens out whatever
the batch was. Drives the real engine core; only the model is a toy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.toy import POISON, ask, check_books, expected, run, toy_core
from tidemill.core.block_groups import pages_for
from tidemill.engine.core import EngineCore

MOTHERS = [[0, 1, 2, 1, 0] * 6, [0, 1, 2, 1, 0] * 2 + [2] * 20, [1] * 30]
"""Prompts begin like one of these, so that they often share whole blocks."""
prefixes = st.builds(
    lambda mother, length: mother[:length], st.sampled_from(MOTHERS), st.sampled_from([30, 24, 17, 8, 1])
)

requests = st.lists(
    st.tuples(
        st.builds(lambda prefix, rest: [*prefix, *rest], prefixes, st.lists(st.integers(0, 2), max_size=3)),
        st.integers(1, 16),
        st.integers(0, 20),  # step of arrival
        st.one_of(st.none(), st.integers(0, 40)),  # step of abort
        st.integers(-2, 2),
        st.sampled_from([None, None, "salt"]),
    ),
    min_size=4,
    max_size=16,
)
window = st.integers(1, 24)
windows = st.one_of(
    st.tuples(st.none(), window),
    st.just((None,)),
    st.tuples(window),
    window.map(lambda width: (None, width, width)),
    st.tuples(window, window),
)


@settings(max_examples=250, deadline=None)
@given(
    requests=requests,
    windows=windows,
    block_size=st.sampled_from([1, 3, 4]),
    max_model_len=st.integers(34, 56),
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.sampled_from([4, 6, 3, 2, 1]),
    budget=st.integers(1, 40),
    caching=st.sampled_from([True, True, True, False]),
    chunked=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.integers(1, 3),
    turn=st.one_of(st.none(), st.integers(1, 30)),
)
def test_any_traffic_gives_the_same_tokens_and_leaks_nothing(
    requests,
    windows,
    block_size,
    max_model_len,
    spare_blocks,
    max_num_seqs,
    budget,
    caching,
    chunked,
    policy,
    depth,
    turn,
):
    if not chunked:
        budget = max(budget, max_model_len)
    num_blocks = pages_for(max_model_len, block_size, windows, budget) + spare_blocks
    core = toy_core(
        num_blocks,
        block_size,
        max_num_seqs,
        budget,
        caching,
        chunked,
        policy,
        depth,
        windows=windows,
        max_model_len=max_model_len,
        turn=turn,
    )
    said: dict[str, list[int]] = {str(index): [] for index in range(len(requests))}
    aborted: set[str] = set()
    clock = 0
    while core.has_work or any(arrival >= clock for _, _, arrival, _, _, _ in requests):
        for index, (prompt, count, arrival, abort, priority, salt) in enumerate(requests):
            if arrival == clock:
                ask(core, str(index), prompt, count, priority=priority, cache_salt=salt)
            if abort == clock and arrival <= clock and str(index) in core.scheduler.requests:
                core.abort([str(index)])
                aborted.add(str(index))
        for output in core.step():
            assert output.problem is None, output.problem
            said[output.id].extend(output.token_ids)
        check_books(core)
        check_windows_are_kept(core)
        assert len(core.scheduler.running) <= max_num_seqs
        clock += 1
        assert clock < 5000, "somebody starves"

    for step in core.runner.steps:
        assert step.num_tokens <= budget
        assert len({piece.row for piece in step.slices}) == len(step.slices)
    for index, (prompt, count, *_) in enumerate(requests):
        full = expected(prompt, min(count, max_model_len - len(prompt)), windows)
        if str(index) in aborted:
            assert said[str(index)] == full[: len(said[str(index)])]
        else:
            assert said[str(index)] == full
    assert core.scheduler.pool.num_free == num_blocks
    assert core.scheduler.num_waiting == 0 and not core.scheduler.requests
    assert core.stats.kv_usage == 0.0


def check_windows_are_kept(core: EngineCore) -> None:
    """A window group holds what the first token of its last slice saw and what came after, and not one block more."""
    size, budget = core.config.block_size, core.config.max_num_batched_tokens
    for request in core.scheduler.running:
        last = next(piece for step in reversed(core.runner.steps) for piece in step.slices if piece.row == request.row)
        for window, table in zip(core.config.block_windows, request.blocks, strict=True):
            first_seen = 0 if window is None else last.start - window + 1
            assert all((page >= 0) == ((index + 1) * size > first_seen) for index, page in enumerate(table))
            if window is not None:
                assert sum(page >= 0 for page in table) * size <= window - 1 + budget + 2 * (size - 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_sequence_that_outgrows_a_length_is_computed_anew_once(depth):
    core = toy_core(num_blocks=20, budget=64, depth=depth, turn=10)
    ask(core, "grows", [1, 2, 3], 20)
    ask(core, "is long", list(range(12)), 4)
    ask(core, "stays", [4, 5], 5)
    said = run(core)
    assert said["grows"] == expected([1, 2, 3], 20) and said["is long"] == expected(list(range(12)), 4)
    entered = [new for step in core.runner.steps for new in step.new_rows]
    assert [len(new.tokens) for new in entered if new.tokens[0] == 1] == [3, 11]
    assert len(entered) == 4 and core.stats.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("windows", [(None,), (5,), (None, 5)])
def test_who_shares_blocks_with_a_request_that_fails_in_the_same_step_is_computed_anew(depth, windows):
    core = toy_core(num_blocks=60, budget=64, depth=depth, windows=windows, max_model_len=40)
    shared = list(range(16))
    ask(core, "poisoned", [*shared, POISON], 5)
    for name, more in (("short", [1]), ("longer", [2] * 9), ("as long", [2] * 9)):
        ask(core, name, [*shared, *more], 5)
    outputs: dict[str, list] = {}
    while core.has_work:
        for output in core.step():
            outputs.setdefault(output.id, []).append(output)
        check_books(core)
    assert [output.finish for output in outputs.pop("poisoned")] == ["error"]
    for name, more in (("short", [1]), ("longer", [2] * 9), ("as long", [2] * 9)):
        said = [token for output in outputs[name] for token in output.token_ids]
        assert said == expected([*shared, *more], 5, windows), name


def test_small_pool_preempts_and_everyone_finishes():
    core = toy_core(num_blocks=8, budget=64)
    for name in "abcd":
        ask(core, name, [ord(name) % 50] * 6, 20)
    said = run(core)
    assert core.stats.preemptions > 0
    assert all(said[name] == expected([ord(name) % 50] * 6, 20) for name in "abcd")


def test_preemption_takes_the_last_to_arrive():
    core = toy_core(num_blocks=8, budget=64)
    ask(core, "first", [1] * 8, 20)
    ask(core, "second", [2] * 8, 20)
    finished = []
    while core.has_work:
        finished += [output.id for output in core.step() if output.finish]
    assert finished == ["first", "second"] and core.stats.preemptions > 0


def test_long_prompt_is_computed_in_chunks_while_others_keep_decoding():
    core = toy_core(num_blocks=20, budget=6)
    ask(core, "talker", [1, 2, 3], 10)
    core.step()
    ask(core, "reader", [4] * 30, 2)
    run(core)
    mixed = [step for step in core.runner.steps if len(step.slices) == 2]
    assert len(mixed) >= 5
    assert all(step.num_tokens <= 6 for step in core.runner.steps)


def test_a_second_equal_prompt_reads_the_first_ones_blocks():
    core = toy_core(num_blocks=20, budget=64)
    prompt = list(range(18))
    ask(core, "a", prompt, 1)
    run(core)
    ask(core, "b", prompt, 3)
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert outputs[0].num_cached == 16
    assert core.stats.prefix_hits == 16 and core.stats.prefix_queries == 36


def test_equal_prompts_of_one_step_share_what_the_first_computes():
    core = toy_core(num_blocks=20, budget=64)
    for name in "abc":
        ask(core, name, list(range(18)), 2)
    said = run(core)
    assert core.runner.steps[0].num_tokens == 18 + 2 + 2
    assert all(said[name] == expected(list(range(18)), 2) for name in "abc")


def test_a_whole_prompt_in_the_cache_still_computes_one_token():
    core = toy_core(num_blocks=20, budget=64)
    prompt = list(range(16))
    ask(core, "a", prompt, 1)
    run(core)
    ask(core, "b", prompt, 2)
    assert run(core)["b"] == expected(prompt, 2)
    assert core.stats.prefix_hits == 12


def test_salts_do_not_share():
    core = toy_core(num_blocks=20, budget=64)
    ask(core, "a", list(range(18)), 1, cache_salt="mine")
    run(core)
    ask(core, "b", list(range(18)), 1, cache_salt="yours")
    run(core)
    assert core.stats.prefix_hits == 0


def test_prompt_logprobs_read_nothing_from_the_cache():
    core = toy_core(num_blocks=20, budget=64)
    ask(core, "a", list(range(18)), 1)
    run(core)
    ask(core, "b", list(range(18)), 1, prompt_logprobs=0)
    run(core)
    assert core.stats.prefix_hits == 0


def test_priority_is_served_first_and_only_under_its_policy():
    for policy, order in (("priority", ["urgent", "normal"]), ("fcfs", ["normal", "urgent"])):
        core = toy_core(num_blocks=20, max_num_seqs=1, policy=policy)
        ask(core, "normal", [1], 1, priority=1)
        ask(core, "urgent", [2], 1, priority=-1)
        finished = []
        while core.has_work:
            finished += [output.id for output in core.step() if output.finish]
        assert finished == order


def test_end_of_sequence_stop_token_and_length_finish_a_request():
    first = expected([1, 2, 3], 3)
    core = toy_core(eos_ids=(first[1],))
    ask(core, "eos", [1, 2, 3], 10)
    ask(core, "ignored", [1, 2, 3], 3, ignore_eos=True)
    ask(core, "token", [1, 2, 3], 10, stop_token_ids=[first[0]])
    ends = {}
    while core.has_work:
        ends |= {output.id: (output.finish, output.stop_reason) for output in core.step() if output.finish}
    assert ends == {"eos": ("stop", None), "ignored": ("length", None), "token": ("stop", first[0])}


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_its_requests_with_the_cause_and_the_engine_goes_on(depth, windows):
    core = toy_core(num_blocks=20, budget=64, depth=depth, windows=windows, max_model_len=40)
    ask(core, "victim", list(range(9)), 5)
    core.runner.fail_next = True
    (output,) = core.step()
    assert output.finish == "error" and "the toy broke" in output.problem["cause"]
    check_books(core)
    ask(core, "next", list(range(9)), 5)
    assert run(core)["next"] == expected(list(range(9)), 5, windows)
    assert core.stats.prefix_hits == 0, "blocks of a failed step must not be found"
    assert core.scheduler.pool.num_free == 20


def test_abort_frees_blocks_at_once():
    core = toy_core(num_blocks=20, budget=64)
    ask(core, "a", list(range(18)), 10)
    core.step()
    assert core.stats.kv_usage > 0
    core.abort(["a", "unknown"])
    assert core.stats.kv_usage == 0 and not core.has_work


def test_a_block_half_computed_when_its_request_leaves_is_not_found():
    core = toy_core(num_blocks=20, budget=6)
    ask(core, "leaver", list(range(18)), 5)
    core.step()
    core.abort(["leaver"])
    ask(core, "next", list(range(18)), 5)
    assert run(core)["next"] == expected(list(range(18)), 5)
    assert core.stats.prefix_hits == 4


def test_aborted_while_waiting_leaves_nothing_behind():
    core = toy_core(num_blocks=20, max_num_seqs=1)
    ask(core, "runs", [1], 50)
    core.step()
    for index in range(100):
        ask(core, str(index), [2], 5)
    core.abort([str(index) for index in range(1, 100)])
    assert core.scheduler.num_waiting == 1 and len(core.scheduler._waiting) == 1
    assert set(core.scheduler.requests) == {"runs", "0"}
    run(core)
