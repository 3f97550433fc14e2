"""The paged KV cache: per layer, keys and values in blocks of `block_size` tokens."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from tidemill.layers.parameter import Placement


class KVCache:
    """Zeroed, because masked positions are multiplied by zero, which only finite numbers survive."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, place: Placement
    ) -> None:
        shape = (num_blocks, block_size, kv_heads, head_dim)

        def zeros() -> torch.Tensor:
            if place.device.type != "cpu":
                return torch.zeros(shape, dtype=place.dtype, device=place.device)
            # Memory straight from the system is zero already and costs nothing until a block is first used.
            size = math.prod(shape) * place.dtype.itemsize
            return torch.frombuffer(mmap.mmap(-1, size), dtype=place.dtype).view(shape)

        self.layers = [(zeros(), zeros()) for _ in range(num_layers)]

    def clear(self, blocks: Sequence[int]) -> None:
        """Wipe blocks that hold numbers that are not finite, before they are recycled."""
        index = torch.tensor(list(blocks), device=self.layers[0][0].device)
        for keys, values in self.layers:
            keys[index] = 0
            values[index] = 0
