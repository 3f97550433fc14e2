"""Starting a kernel while the one before it still runs, which hides the start: from compute capability 9.0 on.

A kernel launched with `overlap()` must call `await_previous` before it reads what others write, or writes what others
read. Small kernels also call `start_next` first. A kernel that keeps the memory busy does neither early: programs of
the next one that wait, and weights that are read before the wait, cost it more than they save (measured on an H200).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tidemill.ops.triton.card import overlaps


@triton.jit
def start_next(OVERLAP: tl.constexpr):
    """Let the next kernel's programs come as soon as all of this one's are there."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Wait until everything before this kernel is done."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()


def overlap() -> dict[str, bool]:
    """Launch arguments of a kernel that calls `await_previous(OVERLAP)`."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps() else {"OVERLAP": False}
