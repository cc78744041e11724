"""Which request a stored run belongs to, and so how much it reused."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from predictor.first_stored import FirstStored
from predictor.prompt import BlockHashes


def chain(*blocks: int) -> BlockHashes:
    """Stand-ins for chained hashes: equal exactly where everything up to there is."""
    return np.array([hash(blocks[: end + 1]) % 2**64 for end in range(len(blocks))], np.uint64)


def test_chunks_of_one_prompt_belong_to_it_even_where_a_later_one_shares_them() -> None:
    first, twin = chain(1, 2, 3, 4, 5), chain(1, 2, 3, 9, 9)
    seen = FirstStored()
    seen.add("a", first)
    seen.add("b", twin)
    seen.stored(int(first[0]), 2)
    seen.stored(int(first[2]), 3)
    seen.stored(int(twin[3]), 2)
    assert [seen.end(name) for name in ("a", "b")] == [0, 3]
    assert len(seen) == 0


def test_a_request_that_stores_nothing_of_its_prompt_is_not_seen() -> None:
    seen = FirstStored()
    seen.add("a", chain(1, 2))
    seen.add("none", chain())
    seen.stored(int(chain(7)[0]), 1)
    assert seen.waiting
    assert [seen.end(name) for name in ("a", "none", "unknown")] == [None, None, None]
    assert not seen.waiting


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8), st.integers(1, 3))
def test_of_prompts_served_one_after_the_other_each_reuse_is_found(prompts: list[list[int]], chunk: int) -> None:
    """An engine that never evicts and computes at least the last block."""
    seen, held = FirstStored(), set[int]()
    expected: list[int] = []
    for number, blocks in enumerate(prompts):
        seen.add(str(number), chain(*blocks))
    for blocks in prompts:
        hashes = chain(*blocks).tolist()
        reused = 0
        while reused < len(hashes) - 1 and hashes[reused] in held:
            reused += 1
        expected.append(reused)
        for first in range(reused, len(hashes), chunk):
            seen.stored(hashes[first], len(hashes[first : first + chunk]))
        held |= set(hashes)
    assert [seen.end(str(number)) for number in range(len(prompts))] == expected
