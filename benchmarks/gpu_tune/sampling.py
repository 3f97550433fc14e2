"""What sampling costs a step on this card, on the device and on the host, and how the search for cuts runs best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tidemill.core.params import SamplingParams
from tidemill.ops.triton.sampling_search import DEFAULT, search
from tidemill.runtime.device_sampler import DeviceSampler, Pick
from tidemill.runtime.rows import RowState

VOCABULARY = 128_256
ROWS = (1, 64, 256)
HISTORY, NUM_PROMPT = 1000, 600
REPEATS = 20
AHEAD_CYCLES = 60_000_000
"""The device sleeps for so long that the host has launched everything before it begins."""
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_p 0.9, top_k 50": SamplingParams(top_p=0.9, top_k=50),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.01, presence_penalty=0.1),
    "logprobs 5": SamplingParams(temperature=0, logprobs=5),
}
SEARCHES = (DEFAULT, {"BLOCK": 8192, "num_warps": 32}, {"BLOCK": 4096, "num_warps": 16})


@dataclass(frozen=True)
class Batch:
    """A sampler with `count` rows that all ask for the same. The temperature is 1: scores that are scaled in place stay
    what they were, so a launch can be repeated."""

    sampler: DeviceSampler
    logits: torch.Tensor
    picks: list[Pick]
    rows: torch.Tensor
    lengths: torch.Tensor
    tokens: torch.Tensor

    @staticmethod
    def of(count: int, params: SamplingParams, device: torch.device) -> Batch:
        generator = torch.Generator(device).manual_seed(0)
        sampler = DeviceSampler(count, VOCABULARY, device)
        picks = []
        for row in range(count):
            state = RowState(params, NUM_PROMPT, NUM_PROMPT, row, [], [], [], [0], HISTORY)
            sampler.enter(row, state)
            picks.append(Pick(row, state, HISTORY))
        return Batch(
            sampler,
            torch.randn(count, VOCABULARY, device=device, generator=generator) * 3,
            picks,
            torch.arange(count, dtype=torch.int32, device=device),
            torch.full((count,), HISTORY, dtype=torch.int32, device=device),
            torch.randint(0, VOCABULARY, (count + 1, HISTORY + 1), device=device, generator=generator).int(),
        )

    def launch(self) -> None:
        self.sampler.launch(self.logits, self.picks, self.rows, self.lengths, self.tokens)


def tune() -> dict[str, dict[str, dict[str, Any]]]:
    device = torch.device("cuda")
    print(f"sampling, vocabulary {VOCABULARY}: microseconds a step on the device / on the host")
    for name, params in CASES.items():
        cells = []
        for count in ROWS:
            batch = Batch.of(count, params, device)
            on_device, on_host = measure(batch.launch)
            cells.append(f"{count:>4} rows {on_device:7.1f} / {on_host:6.1f}")
        print(f"  {name:20}" + "   ".join(cells), flush=True)
    return {"sampling_search": {"row": fastest_search(device)}}


def fastest_search(device: torch.device) -> dict[str, Any]:
    """By the slower of one row and many, each relative to the default."""
    timed: list[list[float]] = []
    batches = [Batch.of(count, CASES["top_p 0.9, top_k 50"], device) for count in (1, 256)]
    for batch in batches:
        batch.launch()
    for config in SEARCHES:
        times = [measure(partial(search_once, batch, config))[0] for batch in batches]
        print(f"  search {config}: 1 row {times[0]:.1f}, 256 rows {times[1]:.1f} us", flush=True)
        timed.append(times)
    losses = [max(time / base for time, base in zip(times, timed[0], strict=True)) for times in timed]
    return SEARCHES[losses.index(min(losses))]


def search_once(batch: Batch, config: dict[str, Any]) -> None:
    """With the best scores that the batch's last launch has left."""
    search(batch.logits, batch.rows, *batch.sampler.search_buffers(), config=config)


def measure(launch: Callable[[], None]) -> tuple[float, float]:
    """Microseconds of one launch: of the device while nothing keeps it waiting, and of the calling thread."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    on_host = []
    for _ in range(REPEATS):
        before = time.perf_counter()
        launch()
        on_host.append(time.perf_counter() - before)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / REPEATS, statistics.median(on_host) * 1e6
