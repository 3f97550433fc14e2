"""The scheduler's promises, over random traffic: budget kept, no leak, no starvation, and the same tokens out whatever
the batch was. Drives the real engine core; only the model is a toy."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.toy import ToyRunner, expected
from tidemill.config import EngineConfig
from tidemill.core.params import SamplingParams
from tidemill.engine.core import EngineCore
from tidemill.engine.messages import Add


def make_core(
    num_blocks: int = 8,
    block_size: int = 4,
    max_num_seqs: int = 4,
    budget: int = 8,
    caching: bool = True,
    chunked: bool = True,
    policy: str = "fcfs",
    depth: int = 1,
    eos_ids: tuple[int, ...] = (),
) -> EngineCore:
    max_model_len = num_blocks * block_size
    config = EngineConfig(
        model_path="",
        model_kind="folder",
        model_origin="toy",
        device="cpu",
        dtype="float32",
        threads=1,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
        block_size=block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=caching,
        enable_chunked_prefill=chunked,
        scheduling_policy=policy,
        max_waiting=100,
        seed=0,
        vocab_size=50,
        eos_ids=list(eos_ids),
        weight_bytes=0,
        kv_bytes=0,
        activation_bytes=0,
    )
    return EngineCore(config, ToyRunner(num_blocks, block_size), steps_in_flight=depth)


def ask(core: EngineCore, name: str, prompt: list[int], count: int, **more: object) -> None:
    salt, priority = more.pop("cache_salt", None), more.pop("priority", 0)
    params = SamplingParams(temperature=0, max_tokens=count, **more)
    core.add(Add(name, prompt, params, cache_salt=salt, priority=priority))


def run(core: EngineCore, max_steps: int = 5000) -> dict[str, list[int]]:
    said: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return said
        for output in core.step():
            said.setdefault(output.id, []).extend(output.token_ids)
        core.scheduler.pool.check()
    raise AssertionError("somebody starves: the work does not end")


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=20),  # few tokens, so prefixes are often shared
        st.integers(1, 12),
        st.integers(0, 30),  # step of arrival
        st.one_of(st.none(), st.integers(0, 40)),  # step of abort
        st.integers(-2, 2),
        st.sampled_from([None, "salt"]),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(8, 14),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    caching=st.booleans(),
    chunked=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
    depth=st.integers(1, 3),
)
def test_any_traffic_gives_the_same_tokens_and_leaks_nothing(
    requests, num_blocks, max_num_seqs, budget, caching, chunked, policy, depth
):
    core = make_core(num_blocks, 4, max_num_seqs, budget, caching, chunked, policy, depth)
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
            said[output.id].extend(output.token_ids)
        core.scheduler.pool.check()
        assert len(core.scheduler.running) <= max_num_seqs
        clock += 1
        assert clock < 5000, "somebody starves"

    for step in core.runner.steps:
        assert step.num_tokens <= core.config.max_num_batched_tokens
        assert len({piece.row for piece in step.slices}) == len(step.slices)
    for index, (prompt, count, *_) in enumerate(requests):
        full = expected(prompt, min(count, core.config.max_model_len - len(prompt)))
        if str(index) in aborted:
            assert said[str(index)] == full[: len(said[str(index)])]
        else:
            assert said[str(index)] == full
    assert core.scheduler.pool.num_free == num_blocks
    assert core.scheduler.num_waiting == 0 and not core.scheduler.requests
    assert core.stats.kv_usage == 0.0


def test_small_pool_preempts_and_everyone_finishes():
    core = make_core(num_blocks=8, budget=64)
    for name in "abcd":
        ask(core, name, [ord(name) % 50] * 6, 20)
    said = run(core)
    assert core.stats.preemptions > 0
    assert all(said[name] == expected([ord(name) % 50] * 6, 20) for name in "abcd")


def test_preemption_takes_the_last_to_arrive():
    core = make_core(num_blocks=8, budget=64)
    ask(core, "first", [1] * 8, 20)
    ask(core, "second", [2] * 8, 20)
    finished = []
    while core.has_work:
        finished += [output.id for output in core.step() if output.finish]
    assert finished == ["first", "second"] and core.stats.preemptions > 0


def test_long_prompt_is_computed_in_chunks_while_others_keep_decoding():
    core = make_core(num_blocks=20, budget=6)
    ask(core, "talker", [1, 2, 3], 10)
    core.step()
    ask(core, "reader", [4] * 30, 2)
    run(core)
    mixed = [step for step in core.runner.steps if len(step.slices) == 2]
    assert len(mixed) >= 5
    assert all(step.num_tokens <= 6 for step in core.runner.steps)


def test_a_second_equal_prompt_reads_the_first_ones_blocks():
    core = make_core(num_blocks=20, budget=64)
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
    core = make_core(num_blocks=20, budget=64)
    for name in "abc":
        ask(core, name, list(range(18)), 2)
    said = run(core)
    assert core.runner.steps[0].num_tokens == 18 + 2 + 2
    assert all(said[name] == expected(list(range(18)), 2) for name in "abc")


def test_a_whole_prompt_in_the_cache_still_computes_one_token():
    core = make_core(num_blocks=20, budget=64)
    prompt = list(range(16))
    ask(core, "a", prompt, 1)
    run(core)
    ask(core, "b", prompt, 2)
    assert run(core)["b"] == expected(prompt, 2)
    assert core.stats.prefix_hits == 12


def test_salts_do_not_share():
    core = make_core(num_blocks=20, budget=64)
    ask(core, "a", list(range(18)), 1, cache_salt="mine")
    run(core)
    ask(core, "b", list(range(18)), 1, cache_salt="yours")
    run(core)
    assert core.stats.prefix_hits == 0


def test_prompt_logprobs_read_nothing_from_the_cache():
    core = make_core(num_blocks=20, budget=64)
    ask(core, "a", list(range(18)), 1)
    run(core)
    ask(core, "b", list(range(18)), 1, prompt_logprobs=0)
    run(core)
    assert core.stats.prefix_hits == 0


def test_priority_is_served_first_and_only_under_its_policy():
    for policy, order in (("priority", ["urgent", "normal"]), ("fcfs", ["normal", "urgent"])):
        core = make_core(num_blocks=20, max_num_seqs=1, policy=policy)
        ask(core, "normal", [1], 1, priority=1)
        ask(core, "urgent", [2], 1, priority=-1)
        finished = []
        while core.has_work:
            finished += [output.id for output in core.step() if output.finish]
        assert finished == order


def test_end_of_sequence_stop_token_and_length_finish_a_request():
    first = expected([1, 2, 3], 3)
    core = make_core(eos_ids=(first[1],))
    ask(core, "eos", [1, 2, 3], 10)
    ask(core, "ignored", [1, 2, 3], 3, ignore_eos=True)
    ask(core, "token", [1, 2, 3], 10, stop_token_ids=[first[0]])
    ends = {}
    while core.has_work:
        ends |= {output.id: (output.finish, output.stop_reason) for output in core.step() if output.finish}
    assert ends == {"eos": ("stop", None), "ignored": ("length", None), "token": ("stop", first[0])}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_its_requests_with_the_cause_and_the_engine_goes_on(depth):
    core = make_core(num_blocks=20, budget=64, depth=depth)
    ask(core, "victim", list(range(9)), 5)
    core.runner.fail_next = True
    (output,) = core.step()
    assert output.finish == "error" and "the toy broke" in output.problem["cause"]
    core.scheduler.pool.check()
    ask(core, "next", list(range(9)), 5)
    assert run(core)["next"] == expected(list(range(9)), 5)
    assert core.stats.prefix_hits == 0, "blocks of a failed step must not be found"
    assert core.scheduler.pool.num_free == 20


def test_abort_frees_blocks_at_once():
    core = make_core(num_blocks=20, budget=64)
    ask(core, "a", list(range(18)), 10)
    core.step()
    assert core.stats.kv_usage > 0
    core.abort(["a", "unknown"])
    assert core.stats.kv_usage == 0 and not core.has_work


def test_a_block_half_computed_when_its_request_leaves_is_not_found():
    core = make_core(num_blocks=20, budget=6)
    ask(core, "leaver", list(range(18)), 5)
    core.step()
    core.abort(["leaver"])
    ask(core, "next", list(range(18)), 5)
    assert run(core)["next"] == expected(list(range(18)), 5)
    assert core.stats.prefix_hits == 4


def test_aborted_while_waiting_leaves_nothing_behind():
    core = make_core(num_blocks=20, max_num_seqs=1)
    ask(core, "runs", [1], 50)
    core.step()
    for index in range(100):
        ask(core, str(index), [2], 5)
    core.abort([str(index) for index in range(1, 100)])
    assert core.scheduler.num_waiting == 1 and len(core.scheduler._waiting) == 1
    assert set(core.scheduler.requests) == {"runs", "0"}
    run(core)
