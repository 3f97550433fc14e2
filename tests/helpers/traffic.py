"""Random traffic against an engine core: prompts that share prefixes, all kinds of parameters, aborts at any moment.

What came back can be compared with what a request gives alone, and the engine must end up as empty as it began. Knows
no device: the same traffic runs in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill import LLM, SamplingParams
from tidemill.engine.messages import Add


@dataclass
class Asked:
    prompt: list[int]
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    aborted: bool = False

    @property
    def repeatable(self) -> bool:
        """Answered to the end, by a rule that leaves nothing to chance."""
        params = self.params
        greedy = params.temperature == 0 and params.repetition_penalty == 1.0 and params.logit_bias is None
        return self.finished and not self.aborted and greedy


def run_traffic(
    llm: LLM,
    seed: int,
    *,
    vocab: int,
    longest: int,
    waiting: int = 6,
    until: Callable[[int], bool],
) -> list[Asked]:
    """Keep some requests waiting until `until(steps)` says so, then let all of them end."""
    core, rng = llm._core, random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(longest // 3)]
    asked: dict[str, Asked] = {}
    alive: set[str] = set()
    steps = 0
    while not until(steps) or core.has_work:
        while not until(steps) and core.stats.waiting < rng.randrange(waiting + 1):
            name = f"{seed}-{len(asked)}"
            asked[name] = one = _random_request(rng, shared, vocab, longest)
            core.add(Add(name, one.prompt, one.params))
            alive.add(name)
        for output in core.step():
            assert output.problem is None, output.problem
            one = asked[output.id]
            assert not one.finished, "a token for a request that has ended"
            one.tokens += output.token_ids
            if output.finish is not None:
                one.finished = True
                alive.discard(output.id)
        if alive and rng.random() < 0.05:
            name = rng.choice(sorted(alive))
            core.abort([name])
            asked[name].aborted = asked[name].finished = True
            alive.discard(name)
        steps += 1
    return list(asked.values())


def steps(count: int) -> Callable[[int], bool]:
    return lambda done: done >= count


def seconds(count: float) -> Callable[[int], bool]:
    end = time.monotonic() + count
    return lambda done: time.monotonic() >= end


def _random_request(rng: random.Random, shared: list[int], vocab: int, longest: int) -> Asked:
    own = [rng.randrange(vocab) for _ in range(rng.randint(1, longest // 2))]
    prompt = shared[: rng.randint(0, len(shared))] + own
    room = longest - len(prompt)
    kind = rng.randrange(8)
    more = {
        1: {"temperature": 0.8, "seed": rng.randrange(10**6)},
        2: {"temperature": 1.2, "top_k": rng.randint(1, 10), "top_p": 0.9},
        3: {"temperature": 0.7, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        4: {"temperature": 0, "repetition_penalty": 1.3},
        5: {"temperature": 0, "logprobs": rng.randint(0, 3), "prompt_logprobs": rng.choice([None, 2])},
        6: {"temperature": 0, "logit_bias": {rng.randrange(vocab): 4.0}, "min_tokens": 2},
    }.get(kind, {"temperature": 0})
    params = SamplingParams(max_tokens=rng.randint(2, room), ignore_eos=True, **more)
    return Asked(prompt, params)


def assert_as_alone(llm: LLM, asked: list[Asked], most: int) -> None:
    """Greedy requests that ended on their own got the tokens they get when nothing else runs."""
    some = [one for one in asked if one.repeatable][:most]
    assert some, "no request to compare"
    for one in some:
        params = SamplingParams(temperature=0, max_tokens=one.params.max_tokens, ignore_eos=True)
        (alone,) = llm.generate([one.prompt], params, use_tqdm=False)
        assert one.tokens == alone.outputs[0].token_ids, f"a prompt of {len(one.prompt)} tokens"


def assert_empty(llm: LLM) -> None:
    """No request, block or row is held. A step that was launched before its last request ended may be in flight."""
    core = llm._core
    scheduler = core.scheduler
    assert not scheduler.requests and not scheduler.has_work
    while core.has_work:
        assert core.step() == []
    assert scheduler.num_in_flight == 0
    scheduler.pool.check()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert len(scheduler._free_rows) == scheduler.config.max_num_seqs
