"""Brings stored tensors to a device with several threads, each with buffers and a stream of its own.

A mapped file is read by touching its pages, and one thread cannot touch them as fast as a disk or a bus can deliver.
Threads copy chunks into pinned memory while earlier chunks are on their way to the device. On a CPU the same path runs
without pinning and streams, so that it can be tested anywhere. Knows bytes, but no parameters and no files.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")

CHUNK_BYTES = 16 * 2**20
"""Long enough for the bus to run at its full rate, short enough that all buffers together stay small."""
BUFFERS = 2
"""One is filled while the other is on its way."""
MOST_THREADS = 8


class Stager:
    """The buffers and the stream of one thread."""

    def __init__(self, device: torch.device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._buffers = [torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(BUFFERS)]
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._sent: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """The source on the device, when it has arrived: in `target`, which is contiguous and of its type, or in new
        memory."""
        if target is None:
            target = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        if source.numel() == 0:
            return target
        there = target.view(-1).view(torch.uint8)
        here = source.contiguous().view(-1).view(torch.uint8)
        size = self._buffers[0].numel()
        if self._stream is None:
            for start in range(0, len(here), size):
                self._send(here[start : start + size], there[start : start + size])
            return target
        # New memory may have belonged to work that is still queued there.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for start in range(0, len(here), size):
                self._send(here[start : start + size], there[start : start + size])
        self._stream.synchronize()
        return target

    def _send(self, here: torch.Tensor, there: torch.Tensor) -> None:
        buffer, sent = self._buffers[self._next], self._sent[self._next]
        if sent is not None:
            sent.synchronize()
        chunk = buffer[: len(here)]
        # torch would wake a pool of threads for each of ours; numpy copies in this one, and lets the others run.
        np.copyto(chunk.numpy(), here.numpy())
        there.copy_(chunk, non_blocking=True)
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
            self._sent[self._next] = event
        self._next = (self._next + 1) % BUFFERS


def in_parallel(
    work: Callable[[Stager, T], None],
    items: Iterable[T],
    device: torch.device,
    threads: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[T]:
    """Does `work` with every item, several at a time, and yields each when it is done. The first failure ends all."""
    own = threading.local()

    def one(item: T) -> T:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            if not hasattr(own, "stager"):
                own.stager = Stager(device, chunk_bytes)
            work(own.stager, item)
        return item

    with ThreadPoolExecutor(threads, thread_name_prefix="tidemill-load") as pool:
        pending: set[Future[T]] = {pool.submit(one, item) for item in items}
        try:
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
