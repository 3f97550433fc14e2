"""Launch parameters of the mixture of experts, measured at the shapes of Mixtral-8x7B and Qwen3-30B-A3B.

A case is a graph of calls that each go to other experts, so that no call finds its weights in the cache. Its floor is
the time in which the experts it touches can be read, or its products computed, whichever is longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BANDWIDTH = 4.3e12
FLOPS = 790e12
BUDGET = 60.0
"""Seconds in all; candidates that are not reached keep the default."""
CALLS = 6

Config = dict[str, Any]
Found = dict[str, dict[str, Config]]


@dataclass(frozen=True)
class Shape:
    name: str
    width: int
    inner: int
    experts: int
    top_k: int


SHAPES = (Shape("mixtral", 4096, 14336, 8, 2), Shape("qwen3-30b", 2048, 768, 128, 8))
TOKENS = (1, 64, 8, 4096, 512)
"""In the order of what matters most."""

PAIRS_UP = [{"BLOCK_N": 8, "BLOCK_K": 512}, {"BLOCK_N": 2, "BLOCK_K": 2048}, {"BLOCK_N": 4, "num_warps": 8}]
PAIRS_DOWN = [{"BLOCK_N": 2}, {"BLOCK_N": 8, "num_warps": 8}]
# Rows, columns, depth, warps, stages; and whether the weights are the left side.
TILES_UP: dict[str, list[tuple[int, int, int, int, int, bool]]] = {
    "6": [(16, 64, 128, 4, 3, True), (16, 32, 128, 4, 4, False), (16, 64, 64, 4, 5, False)],
    "24": [(32, 64, 128, 4, 3, True), (32, 32, 128, 4, 4, False), (16, 64, 128, 4, 3, False)],
    "64": [(64, 128, 64, 8, 4, False), (32, 64, 128, 4, 3, True)],
    "256": [(128, 64, 64, 8, 4, False), (128, 128, 64, 8, 3, False)],
    "more": [(128, 128, 64, 8, 4, False), (128, 64, 64, 4, 4, False)],
}
TILES_DOWN: dict[str, list[tuple[int, int, int, int, bool]]] = {
    "6": [(64, 128, 4, 4, True), (32, 128, 4, 4, False), (128, 64, 4, 4, False)],
    "24": [(64, 128, 4, 4, True), (32, 128, 4, 4, False), (128, 64, 4, 4, True)],
    "64": [(64, 64, 4, 4, False), (128, 64, 8, 4, False)],
    "256": [(128, 64, 8, 4, False), (256, 64, 8, 3, False)],
    "more": [(256, 64, 8, 3, False), (128, 64, 4, 4, False)],
}


class Layer:
    """Two layers' weights and, for a number of tokens, inputs and the experts of some calls."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.up = [torch.empty(shape.experts, 2 * shape.inner, shape.width, **options) for _ in range(2)]
        self.down = [torch.empty(shape.experts, shape.width, shape.inner, **options) for _ in range(2)]
        for weight in (*self.up, *self.down):
            weight.normal_(0, 0.02)

    def calls(self, tokens: int) -> list[tuple[torch.Tensor, ...]]:
        torch.manual_seed(tokens)
        shape, calls = self.shape, []
        for index in range(CALLS):
            x = torch.randn(tokens, shape.width, device="cuda", dtype=torch.bfloat16)
            experts = torch.rand(tokens, shape.experts).topk(shape.top_k).indices.int().cuda()
            weights = torch.rand(tokens, shape.top_k, device="cuda", dtype=torch.bfloat16)
            calls.append((x, experts, weights, self.up[index % 2], self.down[index % 2]))
        return calls

    def floor(self, calls: list[tuple[torch.Tensor, ...]]) -> float:
        """Seconds of one call."""
        numbers = 3 * self.shape.width * self.shape.inner
        touched = sum(len(experts.unique()) for _, experts, *_ in calls) / len(calls)
        return max(2 * numbers * touched / BANDWIDTH, 2 * numbers * calls[0][1].numel() / FLOPS)


def measure(call: Callable[..., object], calls: list[tuple[Any, ...]], **configs: Config) -> float:
    """Seconds of one call, in a graph."""
    call(*calls[0], **configs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in calls:
            call(*args, **configs)
    graph.replay()
    best = float("inf")
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / len(calls))
    return best


class Tuning:
    """One shape at one number of tokens: tries candidates while there is time, and remembers the best."""

    def __init__(self, layer: Layer, tokens: int, deadline: float) -> None:
        self.layer, self.tokens, self.deadline = layer, tokens, deadline
        self.calls = layer.calls(tokens)
        self.floor = layer.floor(self.calls)

    def best(
        self, way: Callable[..., torch.Tensor], up: list[Config], down: list[Config]
    ) -> tuple[float, Config, Config]:
        """The first of each list are the defaults."""
        best = (self.time(way, up[0], down[0]), up[0], down[0])
        for config in up[1:]:
            best = min(best, (self.time(way, config, best[2]), config, best[2]), key=lambda found: found[0])
        for config in down[1:]:
            best = min(best, (self.time(way, best[1], config), best[1], config), key=lambda found: found[0])
        return best

    def time(self, way: Callable[..., torch.Tensor], up: Config, down: Config) -> float:
        if time.perf_counter() > self.deadline:
            return float("inf")
        name = f"{self.layer.shape.name:10} {self.tokens:5} {way.__name__:12}"
        said = f"{_short(up)} / {_short(down)}"
        try:
            seconds = measure(way, [(*args, "silu") for args in self.calls], up_config=up, down_config=down)
        except Exception as error:
            print(f"{name} failed: {type(error).__name__}: {str(error).splitlines()[0][:90]}  {said}", flush=True)
            return float("inf")
        share = self.floor / seconds
        print(f"{name} {seconds * 1e6:9.1f} us, floor {self.floor * 1e6:8.1f}, {share:6.1%}  {said}", flush=True)
        return seconds


def tune() -> Found:
    from tidemill.ops.triton import moe

    deadline = time.perf_counter() + BUDGET
    found: Found = {}
    for number, shape in enumerate(SHAPES):
        layer = Layer(shape)
        until = time.perf_counter() + (deadline - time.perf_counter()) / (len(SHAPES) - number)
        for tokens in TOKENS:
            if tokens == 1:
                tune_pairs(Tuning(layer, tokens, until), found)
            else:
                tune_tiles(Tuning(layer, tokens, until), found)
        key = moe.shape_key(layer.up[0], shape.top_k)
        found.setdefault("moe_by_pairs", {})[key] = {"tokens": most_tokens_by_pairs(layer, found)}
        key = f"{shape.width}x{shape.experts}"
        found.setdefault("moe_logits", {})[key] = {"tokens": most_tokens_of_few_logits(layer)}
        del layer
        torch.cuda.empty_cache()
    return found


def tune_pairs(tuning: Tuning, found: Found) -> None:
    from tidemill.ops.triton import moe_pairs

    shape = tuning.layer.shape
    up = moe_pairs.default_config(shape.width, 2)
    down = moe_pairs.default_config(shape.inner, shape.top_k)
    ups, downs = (
        [up, *({**up, **change} for change in PAIRS_UP)],
        [down, *({**down, **change} for change in PAIRS_DOWN)],
    )
    _, up, down = tuning.best(moe_pairs.mix_by_pairs, ups, downs)
    found.setdefault("moe_up_pairs", {})[f"{shape.width}x{shape.inner}"] = up
    found.setdefault("moe_down_pairs", {})[f"{shape.width}x{shape.inner}x{shape.top_k}"] = down


def tune_tiles(tuning: Tuning, found: Found) -> None:
    """The first number of tokens of a key decides; the others are measured with what it found."""
    from tidemill.ops.triton import moe_tiles

    shape = tuning.layer.shape
    rows = moe_tiles.rows_key(tuning.tokens * shape.top_k, shape.experts)
    key = f"{shape.width}x{shape.inner}@{rows}"
    of_up, of_down = found.setdefault("moe_up_tiles", {}), found.setdefault("moe_down_tiles", {})
    if key in of_up:
        tuning.time(moe_tiles.mix_by_tiles, of_up[key], of_down[key])
        return
    up, down = moe_tiles.default_up(rows), moe_tiles.default_down(rows)
    ups = [up, *(tile(up, *rest) | {"BLOCK_M": block_m} for block_m, *rest in TILES_UP[rows])]
    downs = [down, *(tile(down, *rest) for rest in TILES_DOWN[rows])]
    _, of_up[key], of_down[key] = tuning.best(moe_tiles.mix_by_tiles, ups, downs)


def tile(default: Config, columns: int, depth: int, warps: int, stages: int, swap: bool) -> Config:
    sizes = {"BLOCK_N": columns, "BLOCK_K": depth, "SWAP": swap}
    return {**default, **sizes, "num_warps": warps, "num_stages": stages}


def most_tokens_by_pairs(layer: Layer, found: Found) -> int:
    """Up to how many tokens the way over pairs is the faster one."""
    from tidemill.ops.triton import moe_pairs, moe_tiles

    shape, most = layer.shape, 1
    sizes = f"{shape.width}x{shape.inner}"
    by_pairs = found["moe_up_pairs"][sizes], found["moe_down_pairs"][f"{sizes}x{shape.top_k}"]
    by_tiles = found["moe_up_tiles"][f"{sizes}@6"], found["moe_down_tiles"][f"{sizes}@6"]
    for tokens in (2, 4, 8, 16):
        tuning = Tuning(layer, tokens, time.perf_counter() + 10)
        if tuning.time(moe_pairs.mix_by_pairs, *by_pairs) > tuning.time(moe_tiles.mix_by_tiles, *by_tiles):
            break
        most = tokens
    return most


def most_tokens_of_few_logits(layer: Layer) -> int:
    """Up to how many tokens one launch for the router is faster than a cast and torch's product."""
    from tidemill.ops.triton import routing

    shape, most = layer.shape, 1
    routers = torch.randn(CALLS, shape.experts, shape.width, device="cuda")
    for tokens in (1, 16, 64, 128, 256):
        calls = [(x, router) for (x, *_), router in zip(layer.calls(tokens), routers, strict=True)]
        few, many = measure(routing.few_logits, calls), measure(routing.many_logits, calls)
        logits = [
            (routing.many_logits(*call), shape.top_k, "softmax", True, 1.0, None, torch.bfloat16) for call in calls
        ]
        chosen = measure(routing.route, logits)
        print(
            f"{shape.name:10} {tokens:5} router: one launch {few * 1e6:.1f} us, torch {many * 1e6:.1f} us;"
            f" choosing {chosen * 1e6:.1f} us",
            flush=True,
        )
        if few > many:
            break
        most = tokens
    return most


def _short(config: Config) -> str:
    sizes = "x".join(str(config[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K") if name in config)
    stages = f"s{config['num_stages']}" if "num_stages" in config else ""
    return f"{sizes} w{config['num_warps']}{stages}{' swapped' if config.get('SWAP') else ''}"


if __name__ == "__main__":
    print(tune())
