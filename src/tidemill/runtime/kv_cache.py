"""The paged KV cache: per layer, keys and values in blocks of `block_size` tokens."""

from __future__ import annotations

import math
import mmap

import torch

from tidemill.layers.parameter import Placement


class KVCache:
    """Blocks 0 to num_blocks - 1, and one more, `padding_block`, that is never written.

    Masked positions are multiplied by zero, which only finite numbers survive, so whatever may be gathered must be
    finite: memory starts as zeros, padding reads the padding block, and numbers that are not finite are wiped in the
    step that wrote them.
    """

    def __init__(
        self, num_layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, place: Placement
    ) -> None:
        self.padding_block = num_blocks
        shape = (num_blocks + 1, block_size, kv_heads, head_dim)

        def zeros() -> torch.Tensor:
            if place.device.type != "cpu":
                return torch.zeros(shape, dtype=place.dtype, device=place.device)
            # Memory straight from the system is zero already and costs nothing until a block is first used.
            size = math.prod(shape) * place.dtype.itemsize
            return torch.frombuffer(mmap.mmap(-1, size), dtype=place.dtype).view(shape)

        self.layers = [(zeros(), zeros()) for _ in range(num_layers)]

    def wipe(self, slots: torch.Tensor) -> None:
        """Zero these flat positions in every layer."""
        for cache in (tensor for layer in self.layers for tensor in layer):
            cache.view(-1, *cache.shape[2:])[slots] = 0
