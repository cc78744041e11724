"""What is left of a prefix when a request's turn comes, beside a cache that evicts what was used least recently."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from predictor import last_use
from predictor.last_use import LastUse
from predictor.prompt import BlockHashes


def chain(*blocks: int) -> BlockHashes:
    """Stand-ins for chained hashes: equal exactly where everything up to there is."""
    return np.array([hash(blocks[: end + 1]) % 2**64 for end in range(len(blocks))], np.uint64)


def conversation(number: int, blocks: int, system: int = 0) -> BlockHashes:
    return chain(*range(system), *range(1000 * number, 1000 * number + blocks))


class Cache:
    """Serves one prompt after the other, and tells what it stores and evicts."""

    def __init__(self, blocks: int, told: LastUse) -> None:
        self.blocks, self.told = blocks, told
        self.held: OrderedDict[int, None] = OrderedDict()  # least recently used first

    def serve(self, hashes: BlockHashes) -> None:
        names = hashes.tolist()
        run = self.run(hashes)
        for name in names[:run]:
            del self.held[name]
        gone = [self.held.popitem(last=False)[0] for _ in range(len(self.held) + len(names) - self.blocks)]
        self.told.evicted(gone)
        self.told.stored(len(names) - run)
        self.held.update(dict.fromkeys(reversed(names)))  # its last block is given up first
        self.told.used(hashes)

    def run(self, hashes: BlockHashes) -> int:
        names = hashes.tolist()
        return next((place for place, name in enumerate(names) if name not in self.held), len(names))


def full_cache(blocks: int, each: int) -> tuple[Cache, LastUse]:
    told = LastUse()
    cache = Cache(blocks, told)
    for number in range(100, 100 + 4 * blocks // each):
        cache.serve(conversation(number, each))
    return cache, told


def test_of_a_cache_that_has_not_evicted_anything_all_is_left() -> None:
    told = LastUse()
    cache = Cache(1000, told)
    for number in range(20):
        cache.serve(conversation(number, 10))
    assert told.front is None
    assert told.left_of(conversation(0, 10), 10, 500) == 10


def test_a_block_lasts_until_the_order_of_eviction_has_got_to_it() -> None:
    cache, told = full_cache(100, 10)
    mine = conversation(1, 10)
    cache.serve(mine)
    # To within a prompt: of the one evicted last it is not known that it was the last of its time.
    for coming in range(0, 150, 10):
        assert told.left_of(mine, 10, coming) == max(0, min(10, 110 - coming)), coming


def test_the_end_of_a_prefix_goes_first_and_no_more_of_it_than_is_stored() -> None:
    cache, told = full_cache(100, 10)
    mine = conversation(1, 10)
    cache.serve(mine)
    for number in range(2, 11):
        cache.serve(conversation(number, 10))
    assert cache.run(mine) == 10, "it is the next to go"
    assert [told.left_of(mine, 10, coming) for coming in (0, 13, 20, 1000)] == [10, 7, 0, 0]


def test_what_the_engine_made_of_a_prompt_goes_with_it() -> None:
    cache, told = full_cache(100, 10)
    cache.serve(conversation(1, 10))
    next_turn = conversation(1, 16)  # of which 13 are cached: three blocks are the answer's
    for number in range(2, 11):
        cache.serve(conversation(number, 10))
    assert [told.left_of(next_turn, 13, coming) for coming in (0, 12, 23)] == [13, 11, 0]


def test_what_others_have_used_since_stays() -> None:
    cache, told = full_cache(200, 10)
    mine = conversation(1, 10, system=4)
    cache.serve(mine)
    for number in range(2, 20):
        cache.serve(conversation(number, 10))
    cache.serve(conversation(50, 10, system=4))
    assert [told.left_of(mine, 14, coming) for coming in (0, 3, 60, 400)] == [14, 11, 4, 0]


@pytest.mark.parametrize("shared", [40, 100, 150, 300])
def test_in_the_middle_of_a_long_prompt_last_uses_are_known_to_a_few_blocks(shared: int) -> None:
    cache, told = full_cache(2000, 10)
    mine = chain(*range(400))
    cache.serve(mine)
    for number in range(1000, 1150):
        cache.serve(conversation(number, 10))
    cache.serve(chain(*range(shared), *range(5000, 5010)))
    left = told.left_of(mine, 400, 900)
    assert shared - 16 <= left <= shared
    assert told.left_of(chain(*range(shared), 1, 2), shared, 900) == shared


def test_a_prompt_that_ended_in_what_others_go_on_from_does_not_make_it_old() -> None:
    cache, told = full_cache(200, 10)
    shared = conversation(1, 6)
    cache.serve(shared)
    for number in range(2, 17):
        cache.serve(conversation(number, 10))
    cache.serve(conversation(1, 26))
    assert told.left_of(shared, 6, 100) == 6


def test_nothing_is_taken_off_a_prefix_of_which_nobody_knows_when_it_was_used() -> None:
    _, told = full_cache(100, 10)
    assert told.left_of(conversation(1, 10), 10, 500) == 10
    assert told.left_of(conversation(1, 10), 0, 500) == 0


def test_of_a_cleared_device_nothing_is_known() -> None:
    cache, told = full_cache(100, 10)
    mine = conversation(1, 10)
    cache.serve(mine)
    told.cleared()
    assert (told.front, told.left_of(mine, 10, 500)) == (None, 10)


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_use, "_REMEMBERED", 50)
    cache, told = full_cache(100, 10)
    mine = conversation(1, 10)
    cache.serve(mine)
    assert told.left_of(mine, 10, 200) == 0
    for number in range(500):
        told.used(conversation(200 + number, 1 + number % 90))
        assert len(told._used) <= 50
    assert told.left_of(mine, 10, 200) == 10, "forgotten"
