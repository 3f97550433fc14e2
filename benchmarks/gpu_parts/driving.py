"""The engine under the clock: models without weights on disk, filled batches, and the wall time of its own steps.

Everything goes through `EngineCore.step()`, so scheduling, sampling and reading results back are inside the times.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_parts.shapes import Shape
from tidemill import LLM, SamplingParams
from tidemill.core.step import Step, StepResult
from tidemill.engine.messages import Add

_ids = itertools.count()


@contextlib.contextmanager
def opened(shape: Shape, folder: Path, **settings: Any) -> Iterator[LLM]:
    """An engine with random weights of this shape, and the card as it was afterwards."""
    given = {"dtype": "bfloat16", "device": "cuda", "load_format": "dummy", "max_num_seqs": 256, **settings}
    llm = LLM(str(shape.write(folder)), **given)
    try:
        yield llm
    finally:
        llm._core = None
        del llm
        release()


def release() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for _ in range(count)]


@dataclass(frozen=True)
class Decoded:
    """Steps in which every sequence of the batch got one token and nothing else happened."""

    batch: int
    context: float
    """Mean tokens before each new one."""
    median: float
    mean: float
    host: float
    """Median seconds of a step that were not spent waiting for the device."""

    @property
    def rate(self) -> float:
        return self.batch / self.median


def decode(llm: LLM, batch: int, context: int, vocab: int, steps: int = 80, temperature: float = 0.0) -> Decoded:
    """Fill a batch with prompts, let all of them begin to answer, then time steps one by one.

    The best token of random weights is soon the same one for everybody; a temperature keeps the sequences apart.
    """
    core = llm._core
    params = SamplingParams(temperature=temperature, max_tokens=context + 4096, ignore_eos=True)
    ids = [f"bench-{next(_ids)}" for _ in range(batch)]
    for name, prompt in zip(ids, random_prompts(batch, context, vocab, seed=batch * 7919 + context), strict=True):
        core.add(Add(name, prompt, params))
    answered = dict.fromkeys(ids, 0)
    while min(answered.values()) < 3:
        for output in core.step():
            if output.problem is not None:
                raise RuntimeError(f"a request failed while the batch was filled: {output.problem}")
            answered[output.id] += len(output.token_ids)
    watch = _Watch(core.runner)
    core.runner = watch
    try:
        # A size that is met for the first time may be captured now; and the handles in flight are not watched yet.
        for _ in range(24):
            core.step()
        before = _tokens(llm)
        walls, hosts = [], []
        for _ in range(steps):
            watch.waited = 0.0
            began = time.perf_counter()
            outputs = core.step()
            walls.append(time.perf_counter() - began)
            hosts.append(walls[-1] - watch.waited)
            if len(outputs) != batch:
                raise RuntimeError(f"{len(outputs)} of {batch} sequences got a token: not a pure decode step")
        mean_context = (before + _tokens(llm)) / 2 / batch
    finally:
        core.runner = watch.runner
        core.abort(ids)
        drain(llm)
    return Decoded(batch, mean_context, statistics.median(walls), statistics.fmean(walls), statistics.median(hosts))


def first_token_seconds(llm: LLM, length: int, vocab: int, times: int = 4) -> float:
    """Median seconds from handing in a prompt to its first token, in an engine that is idle; the first try is not
    counted."""
    core, found = llm._core, []
    for attempt in range(times + 1):
        (prompt,) = random_prompts(1, length, vocab, seed=31 * length + attempt + next(_ids))
        torch.cuda.synchronize()
        began = time.perf_counter()
        core.add(Add(f"bench-{next(_ids)}", prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
        while not any(output.token_ids for output in core.step()):
            pass
        found.append(time.perf_counter() - began)
        drain(llm)
    return statistics.median(found[1:])


@dataclass(frozen=True)
class Batch:
    seconds: float
    output_tokens: int
    prefix_share: float
    """Of all prompt tokens, those that came from the prefix cache."""

    @property
    def rate(self) -> float:
        return self.output_tokens / self.seconds


def generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> Batch:
    """All prompts at once, through `LLM.generate` as a user calls it."""
    before = llm._core.stats
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if tokens != max_tokens * len(prompts):
        raise RuntimeError(f"{tokens} tokens instead of {max_tokens} for each of {len(prompts)} requests")
    after = llm._core.stats
    asked = after.prefix_queries - before.prefix_queries
    return Batch(seconds, tokens, (after.prefix_hits - before.prefix_hits) / asked if asked else 0.0)


def drain(llm: LLM) -> None:
    while llm._core.has_work:
        llm._core.step()


def _tokens(llm: LLM) -> int:
    return sum(request.num_tokens for request in llm._core.scheduler.running)


class _Watch:
    """A runner that adds up how long results are waited for."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.waited = runner, 0.0

    def launch(self, step: Step) -> _WatchedHandle:
        return _WatchedHandle(self, self.runner.launch(step))


class _WatchedHandle:
    def __init__(self, watch: _Watch, handle: Any) -> None:
        self._watch, self._handle = watch, handle

    def result(self) -> StepResult:
        began = time.perf_counter()
        result = self._handle.result()
        self._watch.waited += time.perf_counter() - began
        return result
