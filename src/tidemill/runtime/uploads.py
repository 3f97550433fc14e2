"""Host arrays on their way to the device: packed into one pinned buffer, sent by one copy, never waited for.

A buffer waits for its last copy before it is filled again. Steps that were launched and never read, as after a failure,
make that wait real; otherwise a ring longer than the steps in flight never waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

BUFFERS = 4
"""Two for each of the steps that are ever in flight: what changed in the rows, and the step's inputs."""


class Uploads:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = [self._buffer(4096) for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)] if device.type == "cuda" else []
        self._next = 0

    def send(self, arrays: Sequence[np.ndarray], into: torch.Tensor | None = None) -> list[torch.Tensor]:
        """The int32 arrays on the device: views of one new tensor, or of `into`, which is then overwritten."""
        sizes = [len(array) for array in arrays]
        total = sum(sizes)
        host = self._take(total)
        np.concatenate(arrays, out=host[:total].numpy())
        if into is None:
            into = torch.empty(total, dtype=torch.int32, device=self.device)
        sent = into[:total]
        sent.copy_(host[:total], non_blocking=True)
        if self._copied:
            self._copied[self._next].record()
        return list(sent.split(sizes))

    def _take(self, total: int) -> torch.Tensor:
        self._next = (self._next + 1) % BUFFERS
        if self._copied:
            self._copied[self._next].synchronize()
        if len(self._ring[self._next]) < total:
            self._ring[self._next] = self._buffer(2 * total)
        return self._ring[self._next]

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
