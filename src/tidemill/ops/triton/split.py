"""How programs that share outputs and split the inputs among them bring their parts together, the same way every time.

Each writes its part and draws a ticket; whoever draws a tile's last ticket adds the parts up, in the splits' order.
Knows nothing of what was multiplied.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

MOST_TILES = 2**16


@triton.jit
def finish(acc, out, partial, drawn, bias, n, m, rows, outputs, split, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Stores acc [BLOCK_N, BLOCK_M] plus bias as out [rows, outputs], once all splits are there."""
    n_here, m_here = n < outputs, m < rows
    here = n_here[:, None] & m_here[None, :]
    places = m.to(tl.int64)[None, :] * outputs + n[:, None]
    if SPLITS == 1:
        if HAS_BIAS:
            acc += tl.load(bias + n, mask=n_here, other=0.0).to(tl.float32)[:, None]
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=here)
    else:
        size = rows.to(tl.int64) * outputs
        tl.store(partial + split * size + places, acc, mask=here)
        # Every thread's part is written before the ticket is drawn; whoever draws the last one sees all parts.
        tl.debug_barrier()
        ticket = drawn + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        before = tl.atomic_add(ticket, 1, sem="acq_rel")
        if before == SPLITS - 1:
            found = tl.zeros_like(acc)
            for part in tl.static_range(SPLITS):
                found += tl.load(partial + part * size + places, mask=here, other=0.0, cache_modifier=".cg")
            if HAS_BIAS:
                found += tl.load(bias + n, mask=n_here, other=0.0).to(tl.float32)[:, None]
            tl.store(out + places, found.to(out.dtype.element_ty), mask=here)
            tl.store(ticket, 0)


@cache
def _tickets(device: torch.device) -> torch.Tensor:
    """One counter per tile of outputs, zero between launches. Launches of one stream may share them."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def split_memory(out: torch.Tensor, grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the parts of `out` [rows, outputs] go, and the tickets."""
    assert grid[2] == 1 or grid[0] * grid[1] <= MOST_TILES, "inputs are split only where there are few tiles"
    partial = out if grid[2] == 1 else torch.empty((grid[2], *out.shape), dtype=torch.float32, device=out.device)
    return partial, _tickets(out.device)
