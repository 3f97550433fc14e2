"""Groups of layers, and what their windows mean in blocks.

Layers that hold the same positions form a group. A group without a window sees all positions before a token; one with
a window of W sees, from position p, only p-W+1 to p, and keeps no block that no later token will see. All groups take
their blocks from the same pool of equally large pages. Only arithmetic: no pool, no requests, no layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

NO_BLOCK = -1
"""Stands in a block table where nothing is held: outside the window, given back or never needed."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def first_block_seen(position: int, window: int | None, block_size: int) -> int:
    """The first block that a token at `position`, or any token after it, reads."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def most_blocks_held(length: int, block_size: int, window: int | None, budget: int) -> int:
    """The most blocks one group holds at a time for a request of `length` tokens, computed `budget` a step or fewer."""
    whole = blocks_for(length, block_size)
    if window is None:
        return whole
    # A step needs what its first token sees and all that it writes; these may begin at the last place of a block.
    touched = window - 1 + budget
    return min(whole, blocks_for(touched - 1, block_size) + 1)


def pages_for(length: int, block_size: int, windows: Sequence[int | None], budget: int) -> int:
    """The most pages a request of `length` tokens holds at a time, over all groups."""
    return sum(most_blocks_held(length, block_size, window, budget) for window in windows)


def block_key(block_hash: bytes, group: int) -> bytes:
    """Names what one group keeps of a block. Hashes are equally long and so are group numbers, so no two keys meet."""
    return block_hash + group.to_bytes(2, "big")


def block_keys(block_hashes: Iterable[bytes], group: int) -> Iterator[bytes]:
    suffix = block_key(b"", group)
    return (block_hash + suffix for block_hash in block_hashes)
