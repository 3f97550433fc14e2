"""The block pool: what it hands out, shares, remembers and forgets."""

from __future__ import annotations

import pytest

from tidemill.core.block_pool import BlockPool


def test_allocates_until_empty_and_takes_nothing_when_short():
    pool = BlockPool(3)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check()


def test_freed_block_stays_findable_until_it_is_handed_out_again():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.commit(block, b"a")
    pool.free([block])
    assert pool.match([b"a"]) == [block]
    pool.allocate(2)
    assert pool.match([b"a"]) == []
    pool.check()


def test_match_stops_at_the_first_gap():
    pool = BlockPool(3)
    for block, key in zip(pool.allocate(3), (b"a", b"b", b"c"), strict=True):
        if key != b"b":
            pool.commit(block, key)
    assert pool.match([b"a", b"b", b"c"]) == [0]


def test_shared_block_is_free_only_when_the_last_user_leaves():
    pool = BlockPool(1)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_free == 0
    pool.free(blocks)
    assert pool.num_free == 1


def test_least_recently_used_is_recycled_first_and_unhashed_before_hashed():
    pool = BlockPool(3)
    a, b, c = pool.allocate(3)
    pool.commit(a, b"a")
    pool.commit(b, b"b")
    pool.free([a])
    pool.free([b])
    pool.free([c])
    assert pool.allocate(1) == [c]
    assert pool.allocate(1) == [a]
    assert pool.match([b"b"]) == [b]


def test_tail_of_a_sequence_is_recycled_before_its_head():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.commit(block, key)
    pool.free(blocks)
    pool.allocate(1)
    assert pool.match([b"a", b"b", b"c"]) == blocks[:2]


def test_second_block_with_the_same_content_does_not_replace_the_first():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.commit(first, b"a")
    pool.commit(second, b"a")
    pool.free([first, second])
    assert pool.match([b"a"]) == [first]
    pool.check()


def test_forgotten_content_is_not_found_but_its_block_stays_held():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.commit(first, b"a")
    pool.commit(second, b"b")
    pool.forget([b"a", b"unknown"])
    assert b"a" not in pool and pool.match([b"a"]) == []
    assert b"b" in pool and pool.match([b"b"]) == [second]
    assert pool.num_free == 0
    pool.forget_all()
    assert pool.match([b"b"]) == []
    pool.check()


def test_check_notices_books_that_do_not_balance():
    pool = BlockPool(1)
    pool.allocate(1)
    pool._free[0] = None
    with pytest.raises(AssertionError):
        pool.check()
