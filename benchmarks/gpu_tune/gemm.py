"""Times products with packed weights on the shapes of Llama-3.1-8B, against cuBLAS in bfloat16, and keeps the fastest.

Weights rotate over copies that together exceed the card's L2 several times, inside a captured graph, as a step finds
them. A configuration that does not compile or run is named and left out. Stops starting new ones after `SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
BUCKETS = {1: (1,), 4: (2, 4), 16: (8, 16), 64: (32, 64), 256: (128, 256)}
"""Rows that are measured, and the rows (powers of two) whose keys take the result."""
ROTATED_BYTES = 400 * 2**20
SECONDS = 150.0

Config = dict[str, Any]


def tune() -> dict[str, dict[str, Config]]:
    from tidemill.ops.triton import fp8, packed_gemm
    from tidemill.quant.scheme import FP8, INT4, INT8

    began = time.perf_counter()
    dense = {shape: {rows: _time_dense(shape, rows) for rows in BUCKETS} for shape in SHAPES}
    found: dict[str, dict[str, Config]] = {"packed_gemm": {}, "fp8_gemm": {}}
    step: dict[tuple[str, int], float] = {}
    print(f"{'scheme':6} {'shape':>12} {'rows':>4} {'us':>8} {'TB/s':>6} {'x bf16':>6}  config")
    for scheme in (INT4, FP8, INT8):
        for shape in SHAPES:
            copies = _copies(scheme, shape)
            for rows, buckets in BUCKETS.items():
                kernel = fp8 if scheme.kind == "fp8" else packed_gemm
                best: tuple[float, Config] | None = None
                for config in (
                    kernel.default_config(rows, copies[0], torch.bfloat16),
                    *_candidates(scheme, shape, rows),
                ):
                    if best is not None and time.perf_counter() - began > SECONDS:
                        break
                    spent = _try(lambda x, w, c=config, k=kernel: k.run(x, w, None, c), copies, rows, config)
                    if spent is None:
                        continue
                    _row(scheme.name, shape, rows, spent, copies[0].num_bytes, dense[shape][rows], config)
                    if best is None or spent < best[0]:
                        best = (spent, config)
                if best is None:
                    continue
                for bucket in buckets:
                    if scheme.kind == "fp8":
                        found["fp8_gemm"][f"{shape[0]}x{shape[1]} {bucket}"] = best[1]
                    else:
                        found["packed_gemm"][packed_gemm.tuning_key(copies[0], bucket)] = best[1]
                step[scheme.name, rows] = step.get((scheme.name, rows), 0.0) + best[0]
            del copies
    print("\nbest, all four linears of a layer: scheme rows us, bf16 us, ratio")
    for (name, rows), spent in step.items():
        bf16 = sum(dense[shape][rows] for shape in SHAPES)
        print(f"{name:6} {rows:4} {spent:8.1f} {bf16:8.1f} {bf16 / spent:6.2f}")
    print(f"{time.perf_counter() - began:.0f} s")
    return found


def _candidates(scheme: Any, shape: tuple[int, int], rows: int) -> Iterator[Config]:
    outputs = shape[0]

    def splits(block_n: int) -> Iterator[int]:
        tiles = outputs // block_n
        yield from (count for count in (1, 2, 4, 8) if 100 <= tiles * count <= 700)

    if scheme.kind == "fp8":
        if rows == 1:
            for block_n, block_k, stages, warps in ((8, 512, 1, 4), (16, 512, 3, 4), (8, 1024, 2, 4), (4, 1024, 3, 2)):
                yield _sum(block_n, stages, warps, BLOCK_K=block_k)
        if rows <= 16:
            for count in splits(64):
                yield _dot(16, 64, count, 4, 4, BLOCK_K=128)
            for count in splits(128):
                yield _dot(16, 128, count, 4, 8, BLOCK_K=128)
        if rows > 1:
            yield {"variant": "scaled_mm"}
        return
    if scheme.bits == 4:
        yield from _four_bits(shape, rows, splits)
        return
    if rows == 1:
        for block_n, chunks, stages, warps in ((16, 1, 1, 2), (32, 1, 1, 2), (32, 2, 3, 4), (16, 2, 3, 4)):
            yield _sum(block_n, stages, warps, CHUNKS=chunks)
    if rows <= 16:
        for block_n, stages, warps in ((64, 4, 4), (128, 3, 8), (32, 4, 4)):
            yield from (_dot(16, block_n, count, stages, warps) for count in splits(block_n))
    else:
        for block_n, stages, warps in ((64, 3, 4), (128, 3, 8)):
            yield from (_dot(64, block_n, count, stages, warps) for count in splits(block_n))
    if rows > 64:
        yield {"variant": "widen", "BLOCK_N": 64, "num_warps": 4}


def _four_bits(shape: tuple[int, int], rows: int, splits: Callable[[int], Iterator[int]]) -> Iterator[Config]:
    if rows == 1:
        few, many = ((2, 8), (4, 4), (4, 6), (4, 7), (8, 3), (8, 4)), ((2, 2), (4, 1), (8, 1))
        for block_n, per_sm in few if shape[1] <= 4096 else many:
            warps = 4 if shape[1] <= 4096 else 16
            yield {"variant": "integer", "BLOCK_N": block_n, "PER_SM": per_sm, "num_warps": warps}
        return
    block_m = min(64, max(16, rows))
    for block_n, stages, warps in ((64, 3, 4), (128, 3, 8), (128, 2, 8)):
        for count in splits(block_n):
            yield {**_dot(block_m, block_n, count, stages, warps), "variant": "scaled"}
    if rows > 64:
        yield {"variant": "widen", "BLOCK_N": 64, "num_warps": 4}


def _sum(block_n: int, stages: int, warps: int, **more: int) -> Config:
    return {"variant": "sum", "BLOCK_N": block_n, "STAGES": stages, "num_warps": warps, **more}


def _dot(block_m: int, block_n: int, splits: int, stages: int, warps: int, **more: int) -> Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "SPLITS": splits}
    return {"variant": "dot", **blocks, "STAGES": stages, "num_warps": warps, **more}


def _copies(scheme: Any, shape: tuple[int, int]) -> list[Any]:
    """The same numbers at different addresses."""
    from tidemill.quant.on_load import pack
    from tidemill.quant.packed import PackedWeight

    first = pack(torch.randn(shape, device="cuda") * 0.02, scheme)
    count = max(4, -(-ROTATED_BYTES // first.num_bytes))
    more = [
        PackedWeight(
            first.scheme, shape, first.data.clone(), first.scales.clone(),
            None if first.zeros is None else first.zeros.clone(),
        )
        for _ in range(count - 1)
    ]  # fmt: skip
    return [first, *more]


def _time_dense(shape: tuple[int, int], rows: int) -> float:
    count = max(4, -(-ROTATED_BYTES // (2 * shape[0] * shape[1])))
    weights = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    return _graphed(lambda x, w: torch.nn.functional.linear(x, w), weights, rows, shape[1])


def _try(product: Callable[..., torch.Tensor], copies: list[Any], rows: int, config: Config) -> float | None:
    try:
        return _graphed(product, copies, rows, copies[0].shape[1])
    except Exception as problem:
        lines = [*str(problem).strip().splitlines(), type(problem).__name__]
        print(f"failed: {copies[0].scheme.name} {copies[0].shape} rows {rows} {config}: {lines[0][:200]}", flush=True)
        return None


def _graphed(product: Callable[..., torch.Tensor], weights: list[Any], rows: int, inputs: int) -> float:
    """Microseconds of one product, the median of replays of a graph that takes every weight once."""
    x = torch.randn((rows, inputs), device="cuda", dtype=torch.bfloat16)
    product(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(x, weight)
    spent = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) * 1000 / len(weights))
    return sorted(spent)[len(spent) // 2]


def _row(scheme: str, shape: tuple[int, int], rows: int, spent: float, size: int, dense: float, config: Config) -> None:
    what = " ".join(f"{name}={value}" for name, value in config.items())
    numbers = f"{spent:8.1f} {size / spent / 1e6:6.2f} {dense / spent:6.2f}"
    print(f"{scheme:6} {shape[0]:>6}x{shape[1]:<5} {rows:4} {numbers}  {what}", flush=True)


if __name__ == "__main__":
    tune()
