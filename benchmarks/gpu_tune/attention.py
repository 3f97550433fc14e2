"""Launch parameters of the paged attention: times each candidate on steps as serving has them, keeps the fastest.

`tune()` also prints how near each comes to the card: the share of its arithmetic for prefill, of its memory's speed for
decoding. Importable without a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

BLOCK_SIZE = 64
BYTES_PER_S = 4.3e12
"""What an H200's memory gives a plain copy."""
SECONDS = 45.0
"""After which no further candidate is tried."""
MAX_DIFFERENCE = 0.03
"""Between two candidates' results in bfloat16; more is a wrong kernel."""


@dataclass(frozen=True)
class Case:
    kind: str
    batch: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    value_dim: int | None = None
    """None: the cache holds values of its own, as wide as the keys."""

    def __str__(self) -> str:
        return f"{self.kind} {self.batch}x{self.context} {self.heads}/{self.kv_heads}x{self.dim}"

    @property
    def flops(self) -> float:
        pairs = self.context * (self.context + 1) / 2 if self.kind == "prefill" else self.context
        return 2.0 * self.batch * self.heads * pairs * (self.dim + (self.value_dim or self.dim))

    @property
    def cache_bytes(self) -> float:
        numbers = self.dim if self.value_dim else 2 * self.dim
        return 2.0 * self.batch * self.context * self.kv_heads * numbers


def cases() -> list[list[Case]]:
    """Those of one list share a key, so one candidate has to serve them all."""
    return [
        [Case("prefill", 1, 8192, 32, 8, 128)],
        [Case("decode", 64, 1024, 32, 8, 128), Case("decode", 256, 600, 32, 8, 128)],
        [Case("split", 1, 512, 32, 8, 128), Case("split", 8, 2048, 32, 8, 128)],
        [Case("prefill", 4, 2048, 9, 3, 64)],
        [Case("decode", 256, 600, 9, 3, 64)],
        [Case("prefill", 1, 4096, 16, 1, 576, 512)],
        [Case("split", 64, 1024, 16, 1, 576, 512)],
    ]


def candidates(case: Case) -> Iterator[tuple[int, int, int, int]]:
    """(block_m, tile_n, num_warps, num_stages), the likeliest first; the default is tried before all of them."""
    if case.kind == "prefill":
        if case.dim > 256:
            yield from ((64, 32, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2))
        elif case.dim > 64:
            yield from ((128, 64, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 2))
        else:
            yield from ((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 4))
    elif case.dim > 256:
        yield from ((16, 32, 8, 3), (16, 64, 8, 2), (16, 32, 4, 2), (16, 16, 4, 4))
    else:
        yield from ((16, 64, 4, 2), (16, 64, 4, 4), (16, 32, 4, 4), (16, 32, 2, 4), (16, 64, 8, 3))
        if case.kind == "split":
            yield from ((16, 16, 2, 3), (16, 16, 4, 3))


class Step:
    """One step of a case, on the card."""

    def __init__(self, case: Case) -> None:
        from tidemill.ops.triton.attention import HeadShape

        self.case = case
        draw = torch.Generator("cuda").manual_seed(0)
        blocks = -(-case.context // BLOCK_SIZE)
        pages = case.batch * blocks

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

        self.table = torch.randperm(pages, generator=draw, device="cuda").view(case.batch, blocks).int()
        self.k = numbers(pages, BLOCK_SIZE, case.kv_heads, case.dim)
        self.v = None if case.value_dim else torch.randn_like(self.k)
        queries = case.context if case.kind == "prefill" else 1
        self.max_query_len, self.num_decode = queries, 0 if case.kind == "prefill" else case.batch
        self.q = numbers(case.batch * queries, case.heads, case.dim)
        self.rows = torch.arange(case.batch, device="cuda", dtype=torch.int32)
        self.starts = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32) * queries
        self.contexts = torch.full_like(self.rows, case.context)
        group = case.heads // case.kv_heads
        self.shape = HeadShape(group, case.dim, case.value_dim or case.dim, self.v is None, 2, 2)

    def run(self, launches: dict | None = None, splits: int | None = None) -> torch.Tensor:
        from tidemill.ops.triton.attention import paged_attention

        return paged_attention(
            self.q,
            self.k,
            self.v,
            self.table,
            self.rows,
            self.starts,
            self.contexts,
            scale=self.case.dim**-0.5,
            num_decode=self.num_decode,
            max_query_len=self.max_query_len,
            value_dim=self.case.value_dim,
            splits=splits,
            launches=launches,
        )


def measure(step: Step, launches: dict | None = None, splits: int | None = None) -> float:
    """Microseconds of one call within a graph."""
    from triton.testing import do_bench_cudagraph

    return 1000 * float(do_bench_cudagraph(lambda: step.run(launches, splits), rep=15))


def tune(seconds: float = SECONDS) -> dict[str, dict[str, dict[str, int]]]:
    from tidemill.ops.triton.attention import KERNEL, Launch, default_launch, launch_key

    deadline = time.monotonic() + seconds
    best: dict[str, dict[str, int]] = {}
    for together in cases():
        steps = [Step(case) for case in together]
        kind, shape = together[0].kind, steps[0].shape
        default = default_launch(kind, shape)
        wanted = [step.run({kind: default}) for step in steps]
        fastest = math.inf
        for cut in (default, *(Launch(*numbers) for numbers in candidates(together[0]))):
            if cut != default and time.monotonic() > deadline:
                break
            try:
                product = 1.0
                for step, expected in zip(steps, wanted, strict=True):
                    difference = (step.run({kind: cut}) - expected).abs().max().item()
                    if not difference <= MAX_DIFFERENCE:
                        raise RuntimeError(f"differs by {difference} from the default's result")
                    took = measure(step, {kind: cut})
                    report(step.case, str(tuple(asdict(cut).values())), took)
                    product *= took
            except Exception as problem:  # a candidate that does not fit the card is only not chosen
                print(f"{together[0]!s:34} {cut}: {type(problem).__name__}: {str(problem)[:120]}", flush=True)
                continue
            if product < fastest:
                fastest, best[launch_key(kind, shape)] = product, asdict(cut)
        if kind == "split" and time.monotonic() < deadline:
            compare_splits(steps, Launch(**best[launch_key(kind, shape)]))
    return {KERNEL: best}


def compare_splits(steps: list[Step], cut: object) -> None:
    """For information: how well the number of splits is chosen."""
    for step in steps:
        for splits in (8, 16, 32):
            report(step.case, f"splits {splits}", measure(step, {"split": cut}, splits))


def report(case: Case, config: str, microseconds: float) -> None:
    if case.kind == "prefill":
        speed = f"{case.flops / microseconds / 1e6:7.0f} TFLOP/s"
    else:
        speed = f"{case.cache_bytes / microseconds * 1e6 / BYTES_PER_S:7.1%} of {BYTES_PER_S / 1e12} TB/s"
    print(f"{case!s:34} {config:22} {microseconds:9.1f} us {speed}", flush=True)
