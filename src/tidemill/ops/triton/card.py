"""What kernels ask of the card they run on. The interpreter has the answers of a card that does everything."""

from __future__ import annotations

from functools import cache

import torch
import triton


@cache
def has_tensor_cores() -> bool:
    """Which Triton knows to use."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


@cache
def overlaps() -> bool:
    """Whether a kernel may start before the one before it ends (`overlap.py`)."""
    if triton.knobs.runtime.interpret or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


@cache
def shared_memory() -> int:
    """Bytes that one program may have."""
    if not torch.cuda.is_available():
        return 2**20
    return triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]


@cache
def multiprocessors(device: torch.device) -> int:
    """The interpreter counts as one: it runs programs one after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
