"""Decode steps as captured graphs: one launch instead of hundreds, for a few batch sizes; smaller batches are padded.

All graphs share one pool of memory, which the largest shapes, so the largest is captured first. A few sizes are
captured at the start; the others once they have been wanted often. Knows no model: it captures whatever it is given.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from tidemill.errors import OutOfMemory

logger = logging.getLogger(__name__)

Outputs = tuple[torch.Tensor, ...]
WORTH_CAPTURING = 16
"""Steps of a size that were padded to a larger one before the size gets a graph of its own."""


class DecodeGraphs:
    """`compute(size)` runs a decode step of that many sequences from static inputs and returns its outputs;
    `clear(size)` makes these inputs harmless."""

    def __init__(self, sizes: Sequence[int], compute: Callable[[int], Outputs], clear: Callable[[int], None]) -> None:
        self.sizes = sorted(sizes)
        self._compute, self._clear = compute, clear
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Outputs]] = {}
        self._wanted: Counter[int] = Counter()
        self._pool = torch.cuda.graph_pool_handle()

    def capture_first(self, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        """The powers of two and the largest; every batch then fits one."""
        first = [size for size in self.sizes if size & (size - 1) == 0 or size == self.sizes[-1]]
        for done, size in enumerate(reversed(first), 1):
            self._capture(size)
            if on_progress is not None:
                on_progress("capturing graphs", done, len(first))

    def size_for(self, count: int) -> int | None:
        """The size to pad this many sequences to; None where they are too many for any graph."""
        fitting = next((size for size in self.sizes if size >= count), None)
        if fitting is None or fitting in self._graphs:
            return fitting
        self._wanted[fitting] += 1
        if self._wanted[fitting] >= WORTH_CAPTURING and self._captured_late(fitting):
            return fitting
        return min(size for size in self._graphs if size >= count)

    def replay(self, size: int) -> Outputs:
        """The outputs of the step; valid until the next replay of any size."""
        graph, outputs = self._graphs[size]
        graph.replay()
        return outputs

    def _captured_late(self, size: int) -> bool:
        """A graph that does not fit must not end the requests that run: they are padded, as they were before."""
        try:
            self._capture(size)
        except OutOfMemory as error:
            logger.warning("%s: %s", error.message, error.cause)
            self.sizes.remove(size)
            return False
        return True

    def _capture(self, size: int) -> None:
        graph = torch.cuda.CUDAGraph()
        self._clear(size)
        try:
            # Once without: kernels are compiled and libraries initialised outside of the capture.
            self._compute(size)
            torch.cuda.synchronize()
            # Other threads may go on using CUDA: a capture minds only its own.
            with _nothing_collected(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._compute(size)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(
                f"the GPU ran out of memory while a decode step of {size} sequences was captured",
                cause=str(error).split("\n")[0],
                fix="a lower --gpu-memory-utilization, a smaller --max-num-seqs, or --enforce-eager",
            ) from error
        self._graphs[size] = (graph, outputs)


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Graphs of an engine that is gone, freed by the garbage collector during a capture, would break it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
