"""Launch parameters of the norm, the gated activation and the rotation that writes the cache, at the shapes of an 8B
Llama: few rows (decode, bound by latency) and many (prefill, bound by bandwidth) are chosen apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
BLOCK_SIZE = 64
BANDWIDTH = 4.3e12
"""Bytes per second that an H200's memory gives at best."""
FEW, MANY = (1, 64, 256), (8192,)

Config = dict[str, Any]
Case = tuple[Callable[[Config], object], int]
"""What runs with a config, and the bytes it has to move."""


@dataclass(frozen=True)
class Kernel:
    name: str
    key: Callable[[int], str]
    """The key in the card's file, by the number of rows."""
    case: Callable[[int], Case]
    few: list[Config]
    many: list[Config]


def kernels() -> list[Kernel]:
    from tidemill.ops.triton import activation, norm, rotary

    return [
        Kernel(
            "rms_norm",
            lambda rows: norm.key(HIDDEN, rows),
            _norm_case,
            few=[{"ROWS": 1, "num_warps": warps} for warps in (4, 8, 16)],
            many=[{"ROWS": rows, "num_warps": warps} for rows, warps in ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16))],
        ),
        Kernel(
            "act_and_mul",
            lambda rows: activation.key(INNER, rows),
            _activation_case,
            few=[{"BLOCK": block, "num_warps": warps} for block, warps in ((512, 2), (512, 4), (1024, 4), (2048, 8))],
            many=[
                {"BLOCK": block, "num_warps": warps} for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8))
            ],
        ),
        Kernel(
            "rotate_and_store",
            lambda rows: rotary.key(DIM, rows),
            _rotary_case,
            few=[{"CHUNK": chunk, "num_warps": warps} for chunk, warps in ((1, 1), (2, 1), (4, 1), (8, 2), (8, 4))],
            many=[{"CHUNK": chunk, "num_warps": warps} for chunk, warps in ((4, 1), (8, 2), (8, 4), (16, 4), (32, 8))],
        ),
    ]


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _norm_case(rows: int) -> Case:
    from tidemill.ops.triton.norm import add_rms_norm

    x, residual, weight = _numbers(rows, HIDDEN), _numbers(rows, HIDDEN), _numbers(HIDDEN)
    return lambda config: add_rms_norm(x, residual, weight, 1e-5, config=config), 4 * x.nbytes


def _activation_case(rows: int) -> Case:
    from tidemill.ops.triton.activation import act_and_mul

    gate_up = _numbers(rows, 2 * INNER)
    return lambda config: act_and_mul(gate_up, "silu", config=config), gate_up.nbytes * 3 // 2


def _rotary_case(rows: int) -> Case:
    from tidemill.ops.triton.rotary import rotate_and_store

    qkv = _numbers(rows, (HEADS + 2 * KV_HEADS) * DIM)
    angles = torch.randn(rows, DIM // 2, device="cuda")
    turns = torch.cat((angles.cos(), angles.sin()), dim=-1)
    cos, sin = turns.chunk(2, dim=-1)
    k_cache, v_cache = (_numbers(rows // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, DIM) for _ in range(2))
    slots = torch.randperm(rows, device="cuda")

    def run(config: Config) -> object:
        # Queries turn in place, again and again; a rotation keeps their size.
        return rotate_and_store(qkv, HEADS, KV_HEADS, DIM, cos, sin, slots, k_cache, v_cache, config=config)

    return run, 2 * qkv.nbytes + turns.nbytes


def microseconds(run: Callable[[], object]) -> float:
    """Replayed from a graph: what a step sees of it, without the launch from Python."""
    from triton.testing import do_bench_cudagraph

    return 1e3 * do_bench_cudagraph(run, rep=15)


def tune() -> dict[str, dict[str, Config]]:
    """Per kernel and key the config that is fastest over its row counts, compared by the product of its times."""
    found: dict[str, dict[str, Config]] = {}
    print(f"{'kernel':18}{'rows':>6}  {'config':38}{'us':>9}{'of 4.3 TB/s':>13}")
    for kernel in kernels():
        found[kernel.name] = {}
        for counts, candidates in ((FEW, kernel.few), (MANY, kernel.many)):
            cost = [1.0] * len(candidates)
            for rows in counts:
                run, moved = kernel.case(rows)
                for index, config in enumerate(candidates):
                    took = microseconds(lambda run=run, config=config: run(config))
                    cost[index] *= took
                    share = moved / (took * 1e-6) / BANDWIDTH
                    print(f"{kernel.name:18}{rows:6}  {config!s:38}{took:9.2f}{share:12.0%}", flush=True)
            found[kernel.name][kernel.key(counts[0])] = candidates[cost.index(min(cost))]
    return found
