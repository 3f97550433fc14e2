"""Hands out, shares and recycles KV block ids.

A full block can be reused iff the key of its content matches; freed blocks keep their key and stay findable until they
are handed out again, least recently used first. Knows ids, counts and keys only: no tensors, no requests, no groups.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The longest run of cached blocks that starts at the first key. Nothing is taken yet."""
        found = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_among(self, blocks: Sequence[int]) -> int:
        return sum(1 for block in blocks if self._refs[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks for writing, or None (and nothing taken) when there are not so many."""
        if count > len(self._free):
            return None
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def commit(self, block: int, key: bytes) -> None:
        """The block now holds the content `key` names. If another block already does, that one stays the known one."""
        if self._key[block] is None and key not in self._by_key:
            self._key[block] = key
            self._by_key[key] = block

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. The tail of a sequence is recycled before its head, which more prompts may share."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                if self._key[block] is None:
                    self._free.move_to_end(block, last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """What these keys name must not be found any more; who holds such a block keeps it."""
        for key in keys:
            block = self._by_key.get(key)
            if block is not None:
                self._forget(block)

    def forget_all(self) -> None:
        """Drop every key: what the blocks hold can no longer be trusted."""
        self._by_key.clear()
        self._key = [None] * self.num_blocks

    def _forget(self, block: int) -> None:
        key = self._key[block]
        if key is not None:
            del self._by_key[key]
            self._key[block] = None

    def check(self) -> None:
        """Raise if the books do not balance; property tests call this after every step."""
        for block, refs in enumerate(self._refs):
            if (refs == 0) != (block in self._free):
                raise AssertionError(f"block {block} has {refs} references but free={block in self._free}")
        for key, block in self._by_key.items():
            if self._key[block] != key:
                raise AssertionError(f"block {block} is found under a key it does not carry")
