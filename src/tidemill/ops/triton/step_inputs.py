"""A step's inputs, gathered on the device from the rows of its requests: tokens, positions, lengths and cache slots."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 128


@triton.jit(do_not_specialize=["num_tokens", "table_group", "table_row", "tokens_row"])
def _gather(
    tokens_ptr,
    tables_ptr,
    least_ptr,
    rows_ptr,
    ends_ptr,
    out_ptr,
    slots_ptr,
    num_tokens,
    tokens_row,
    table_group,
    table_row,
    block_size,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tokens
    row = tl.load(rows_ptr + index, mask=inside, other=0).to(tl.int64)
    end = tl.load(ends_ptr + index, mask=inside, other=0)
    real = inside & (end > 0)
    position = tl.maximum(end - 1, 0)
    token = tl.load(tokens_ptr + row * tokens_row + position, mask=real, other=0)
    least = tl.load(least_ptr + row, mask=real, other=0)
    tl.store(out_ptr + index, token.to(tl.int64), mask=inside)
    tl.store(out_ptr + num_tokens + index, position.to(tl.int64), mask=inside)
    tl.store(out_ptr + 2 * num_tokens + index, tl.maximum(least, position + 1).to(tl.int64), mask=inside)
    for group in tl.static_range(GROUPS):
        entry = tables_ptr + group * table_group.to(tl.int64) + row * table_row + position // block_size
        page = tl.load(entry, mask=real, other=0).to(tl.int64)
        slot = tl.where(real, page * block_size + position % block_size, -1)
        tl.store(slots_ptr + group * num_tokens + index, slot, mask=inside)


def gather_inputs(
    tokens: torch.Tensor,
    tables: torch.Tensor,
    least: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.gather_inputs`."""
    count = rows.shape[0]
    out = torch.empty(3, count, dtype=torch.int64, device=rows.device)
    slots = torch.empty(tables.shape[0], count, dtype=torch.int64, device=rows.device)
    _gather[(triton.cdiv(count, BLOCK),)](
        tokens,
        tables,
        least,
        rows,
        ends,
        out,
        slots,
        count,
        tokens.stride(0),
        tables.stride(0),
        tables.stride(1),
        block_size,
        GROUPS=tables.shape[0],
        BLOCK=BLOCK,
    )
    return out, slots
