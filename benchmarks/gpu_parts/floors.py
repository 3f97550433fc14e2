"""What the card itself does, measured in the same run: copies, a large matmul, and a decode step of matmuls alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from gpu_parts.shapes import Shape


def timed(work: Callable[[], object], times: int, warm_up: int = 3) -> float:
    """Median seconds of one call, by the device's own clock."""
    for _ in range(warm_up):
        work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def copy_bandwidth() -> float:
    """Bytes a second, read and written together."""
    source = torch.randn(2**30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), 10)


def matmul_rate(size: int = 8192) -> float:
    """FLOP/s of a bf16 product of random numbers: zeros would be faster."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return 2.0 * size**3 / timed(lambda: torch.mm(a, b, out=out), 15)


class GemmSteps:
    """All linears and the head of a shape, captured as graphs: decoding without anything else.

    The weights are as many and as large as the model's, so no cache of the card holds them.
    """

    def __init__(self, shape: Shape) -> None:
        linears = shape.attention_linears + shape.mlp_linears
        self._layers = [[_weight(*linear) for linear in linears] for _ in range(shape.layers)]
        self._head = _weight(shape.vocab, shape.hidden)

    def seconds(self, batch: int) -> float:
        inputs = {
            weight.shape[1]: torch.randn(batch, weight.shape[1], dtype=torch.bfloat16, device="cuda")
            for weight in [*self._layers[0], self._head]
        }

        def step() -> None:
            for layer in self._layers:
                for weight in layer:
                    torch.nn.functional.linear(inputs[weight.shape[1]], weight)
            torch.nn.functional.linear(inputs[self._head.shape[1]], self._head)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return timed(graph.replay, 30)


def _weight(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda").mul_(0.02)
