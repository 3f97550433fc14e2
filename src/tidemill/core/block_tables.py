"""The block tables of requests: one per group, filled from one pool.

Finds what of a request is cached, grows its tables, gives back what has left a window, and tells the pool which content
a block holds. Knows nothing of queues and preemption: who gets blocks, and from whom, is the scheduler's matter.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.block_groups import (
    NO_BLOCK,
    block_key,
    block_keys,
    blocks_for,
    first_block_seen,
    most_blocks_held,
)
from tidemill.core.block_pool import BlockPool
from tidemill.core.request import Request


class BlockTables:
    """All tables of a request are equally long: entry i is for tokens [i * block_size, (i + 1) * block_size)."""

    def __init__(self, pool: BlockPool, block_size: int, windows: Sequence[int | None], budget: int) -> None:
        self.pool, self.block_size, self.windows, self.budget = pool, block_size, tuple(windows), budget
        self._unlimited = [group for group, window in enumerate(windows) if window is None]
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._widest = max((window for _, window in self._windowed), default=1)

    def find_cached(self, request: Request) -> list[list[int]]:
        """The tables of the longest prefix that is cached, leaving at least one token to compute. Takes nothing yet."""
        request.extend_hashes(self.block_size)
        hashes = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
        tables: list[list[int]] = [[] for _ in self.windows]
        for group in self._unlimited:
            tables[group] = self.pool.match(block_keys(hashes, group))
            del hashes[len(tables[group]) :]
        del hashes[self._longest_in_windows(hashes) :]
        for group in self._unlimited:
            del tables[group][len(hashes) :]
        for group, window in self._windowed:
            first = first_block_seen(len(hashes) * self.block_size, window, self.block_size)
            tables[group] = [NO_BLOCK] * first + self.pool.match(block_keys(hashes[first:], group))
        return tables

    def _longest_in_windows(self, hashes: Sequence[bytes]) -> int:
        """The most of these blocks after which a token finds, in every window group, all that it sees."""
        length = index = len(hashes)
        while index > first_block_seen(length * self.block_size, self._widest, self.block_size):
            index -= 1
            for group, window in self._windowed:
                seen = index >= first_block_seen(length * self.block_size, window, self.block_size)
                if seen and block_key(hashes[index], group) not in self.pool:
                    # Every length from the next block up to the one tried sees this block, so only shorter ones remain.
                    length = index
                    break
        return length

    def pages_wanted(self, length: int, cached: Sequence[Sequence[int]]) -> int:
        """How many free pages it takes at most, at one time, to compute `length` tokens that begin with `cached`.

        A cached page that nobody holds counts until it leaves the window. One that others hold costs nothing, but does
        not become free when this request leaves it either.
        """
        num_fresh = blocks_for(length, self.block_size) - len(cached[0])
        wanted = 0
        for window, table in zip(self.windows, cached, strict=True):
            most = most_blocks_held(length, self.block_size, window, self.budget)
            wanted += min(most, num_fresh + self.pool.num_free_among(_held(table)))
        return wanted

    def enter(self, request: Request, cached: list[list[int]], count: int) -> None:
        """Begin its tables with what is cached and blocks for `count` tokens more; the pages wanted must be free."""
        for table in cached:
            self.pool.share(_held(table))
        num_cached = len(cached[0])
        request.blocks = cached
        request.num_computed = num_cached * self.block_size
        request.num_committed = num_cached
        request.num_given_back = [
            first_block_seen(request.num_computed, window, self.block_size) for window in self.windows
        ]
        grown = self.grow(request, count)
        assert grown is not None

    def grow(self, request: Request, count: int) -> list[list[int]] | None:
        """Blocks for `count` more tokens in every group, or None (and nothing taken) when there are not so many.

        What the tokens to come no longer see is given back first: steps run in order, so even a request of this very
        step may write to it.
        """
        for group, window in self._windowed:
            first = first_block_seen(request.num_computed, window, self.block_size)
            if first > request.num_given_back[group]:
                self._give_back_before(first, request, group)
        needed = blocks_for(request.num_computed + count, self.block_size) - len(request.blocks[0])
        if needed == 0:
            return [[] for _ in request.blocks]
        pages = self.pool.allocate(needed * len(request.blocks))
        if pages is None:
            return None
        added = [pages[first : first + needed] for first in range(0, len(pages), needed)]
        for table, entries in zip(request.blocks, added, strict=True):
            table.extend(entries)
        return added

    def _give_back_before(self, first: int, request: Request, group: int) -> None:
        table, given_back = request.blocks[group], request.num_given_back[group]
        self.pool.free(table[given_back:first])
        table[given_back:first] = [NO_BLOCK] * (first - given_back)
        request.num_given_back[group] = first

    def commit(self, request: Request) -> None:
        """Make the blocks that the scheduled tokens fill findable, in every group that holds them."""
        request.extend_hashes(self.block_size)
        full = min(request.num_computed // self.block_size, len(request.block_hashes))
        for index in range(request.num_committed, full):
            for group, table in enumerate(request.blocks):
                if table[index] != NO_BLOCK:
                    self.pool.commit(table[index], block_key(request.block_hashes[index], group))
        request.num_committed = max(request.num_committed, full)

    def forget(self, request: Request) -> None:
        """Nothing of this request may be found any more, not even what it has given back or lost to others."""
        for group in range(len(self.windows)):
            self.pool.forget(block_keys(request.block_hashes, group))

    def forget_all(self, holders: Sequence[Request]) -> None:
        """Nothing computed so far may be found any more; what `holders` hold of it is never committed again."""
        self.pool.forget_all()
        for request in holders:
            request.num_committed = len(request.blocks[0])

    def release(self, request: Request) -> None:
        """Give back all that the request holds. Position by position, so that the groups lose their tails together."""
        pages_by_position = zip(*request.blocks, strict=True)
        self.pool.free([page for pages in pages_by_position for page in pages if page != NO_BLOCK])
        request.blocks, request.num_given_back = [], []


def _held(table: Sequence[int]) -> list[int]:
    return [page for page in table if page != NO_BLOCK]
