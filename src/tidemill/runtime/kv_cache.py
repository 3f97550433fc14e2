"""The paged KV cache: pages of `block_size` tokens, each holding what `slots` layers keep of them."""

from __future__ import annotations

import math
import mmap

import torch

from tidemill.layers.cache_layout import CacheLayout
from tidemill.layers.parameter import Placement


class KVCache:
    """Blocks 0 to num_blocks - 1, and one more, `padding_block`, that is never written.

    Masked positions are multiplied by zero, which only finite numbers survive, so whatever may be gathered must be
    finite: memory starts as zeros, padding reads the padding block, and numbers that are not finite are wiped in the
    step that wrote them.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        place: Placement,
        stored: torch.dtype | None = None,
    ) -> None:
        """`stored`: a narrower type the numbers are kept in; one of 8 bits with a scale for each token and head."""
        self.padding_block = num_blocks

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (num_blocks + 1, block_size, *shape)
            if place.device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=place.device)
            # Memory straight from the system is zero already and costs nothing until a block is first used.
            size = math.prod(shape) * dtype.itemsize
            return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype).view(shape)

        dtype = stored or place.dtype
        self.slots = [
            (
                zeros(shape.kv_heads, shape.key_dim, dtype=dtype),
                zeros(shape.kv_heads, shape.value_dim, dtype=dtype) if shape.value_dim else None,
            )
            for shape in layout.shapes
        ]
        self.scales = None
        if dtype.itemsize == 1:
            self.scales = [
                (
                    zeros(shape.kv_heads, dtype=torch.float32),
                    zeros(shape.kv_heads, dtype=torch.float32) if shape.value_dim else None,
                )
                for shape in layout.shapes
            ]

    def wipe(self, positions: torch.Tensor) -> None:
        """Zero these flat positions in every layer."""
        slots = [*self.slots, *(self.scales or ())]
        for cache in (tensor for slot in slots for tensor in slot if tensor is not None):
            cache.view(-1, *cache.shape[2:])[positions] = 0
