"""Block hashes: the same prefix gives the same hash however it is told, and nothing else does."""

import itertools
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor import prompt as prompt_module
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Namespace, Prompt, Tokens, as_tokens

BLOCK_SIZES = [1, 2, 3, 5, 16, 17, 64, 513, 1024]
PLAIN = Namespace()
ids = st.integers(0, 2**32 - 1)


def hasher(seed: int = 1) -> BlockHasher:
    return BlockHasher(np.random.default_rng(seed))


def listed(hashes: BlockHasher, tokens: Tokens, block_size: int, namespace: Namespace) -> list[int]:
    told: list[int] = hashes.prompt_hashes(tokens, HashFamily(block_size), namespace).tolist()
    return told


def random_tokens(source: random.Random, count: int, vocabulary: int = 152_000) -> Tokens:
    return as_tokens([source.randrange(vocabulary) for _ in range(count)])


@given(
    blocks=st.lists(st.lists(ids, min_size=3, max_size=3), max_size=12),
    cuts=st.sets(st.integers(0, 12)),
    block_size=st.sampled_from([1, 3]),
)
def test_a_prompt_told_in_pieces_has_the_hashes_of_the_prompt_told_at_once(
    blocks: list[list[int]], cuts: set[int], block_size: int
) -> None:
    hashes = hasher()
    tokens = as_tokens([token for block in blocks for token in block])
    told: list[int] = []
    borders = sorted({0, len(tokens) // block_size, *(cut for cut in cuts if cut <= len(tokens) // block_size)})
    for first, last in itertools.pairwise(borders):
        parent = told[-1] if told else hashes.root
        told += hashes.chain(parent, tokens[first * block_size : last * block_size], block_size).tolist()
    assert told == listed(hashes, tokens, block_size, PLAIN)
    assert len(told) == len(tokens) // block_size


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_hashes_count_full_blocks_only(block_size: int) -> None:
    hashes = hasher()
    tokens = as_tokens(range(3 * block_size))
    whole = listed(hashes, tokens, block_size, PLAIN)
    assert len(whole) == 3
    assert listed(hashes, tokens[:-1], block_size, PLAIN) == whole[: (3 * block_size - 1) // block_size]
    assert listed(hashes, tokens[:0], block_size, PLAIN) == []
    assert all(0 <= one < 2**64 for one in whole)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_one_changed_token_changes_its_block_and_every_later_one(block_size: int) -> None:
    source = random.Random(block_size)
    hashes = hasher()
    tokens = random_tokens(source, 6 * block_size)
    before = listed(hashes, tokens, block_size, PLAIN)
    seen = set(before)
    positions = range(len(tokens)) if block_size < 100 else source.sample(range(len(tokens)), 200)
    for position in positions:
        for change in (1, 1 << 16, 1 << 31):
            edited = tokens.copy()
            edited[position] ^= change
            after = listed(hashes, edited, block_size, PLAIN)
            untouched = position // block_size
            assert after[:untouched] == before[:untouched]
            assert seen.isdisjoint(after[untouched:]), (position, change)
            seen.update(after[untouched:])


@pytest.mark.parametrize("block_size", [1, 2, 3, 16, 17])
def test_two_swapped_tokens_or_blocks_are_another_prompt(block_size: int) -> None:
    source = random.Random(block_size)
    hashes = hasher()
    tokens = as_tokens(source.sample(range(152_000), 8 * block_size))
    seen = set(listed(hashes, tokens, block_size, PLAIN)[-1:])
    swaps = [(source.randrange(len(tokens)), source.randrange(len(tokens))) for _ in range(300)]
    distinct = {tuple(sorted(swap)) for swap in swaps if swap[0] != swap[1]}
    for left, right in distinct:
        swapped = tokens.copy()
        swapped[[left, right]] = swapped[[right, left]]
        seen.update(listed(hashes, swapped, block_size, PLAIN)[-1:])
    assert len(seen) == 1 + len(distinct)

    orders = {tuple(source.sample(range(8), 8)) for _ in range(200)} | {tuple(range(8))}
    blocks = tokens.reshape(8, block_size)
    ends = {listed(hashes, blocks[list(order)].reshape(-1), block_size, PLAIN)[-1] for order in orders}
    assert len(ends) == len(orders)


@pytest.mark.parametrize("block_size", [15, 16])
def test_hundreds_of_thousands_of_prefixes_do_not_collide(block_size: int) -> None:
    hashes = hasher()
    tokens = np.random.default_rng(block_size).integers(0, 152_000, 200_000 * block_size).astype(np.uint32)
    chained = hashes.chain(hashes.root, tokens, block_size)
    # And what padding looks like: nothing but zeros, and a single 1 among them.
    zeros = hashes.chain(hashes.root, np.zeros(20_000 * block_size, np.uint32), block_size)
    lone = [hashes.chain(hashes.root, row, block_size)[-1] for row in np.eye(2 * block_size, dtype=np.uint32)]
    everything = np.concatenate([chained, zeros, np.array(lone, np.uint64)])
    assert len(np.unique(everything)) == len(everything)
    for shift in (0, 32):
        half = np.unique((chained >> np.uint64(shift)) & np.uint64(0xFFFFFFFF))
        expected = 200_000 - 200_000**2 / 2**33
        assert abs(len(half) - expected) < 20


def test_block_sizes_parents_and_seeds_tell_hashes_apart() -> None:
    tokens = as_tokens(range(960))
    one = hasher(1)
    by_size = {size: listed(one, tokens, size, PLAIN) for size in (1, 2, 4, 8, 16, 32)}
    assert len({value for chain in by_size.values() for value in chain}) == sum(map(len, by_size.values()))
    assert listed(one, as_tokens([5]), 1, PLAIN) != listed(one, as_tokens([5, 0]), 2, PLAIN)
    assert one.chain(7, tokens, 16).tolist() != one.chain(8, tokens, 16).tolist()
    assert listed(hasher(1), tokens, 16, PLAIN) == by_size[16]
    assert set(listed(hasher(2), tokens, 16, PLAIN)).isdisjoint(by_size[16])


def test_the_same_tokens_under_another_salt_or_adapter_share_nothing() -> None:
    hashes = hasher()
    tokens = as_tokens(range(64))
    names = (None, "a", "b", "", "ab")
    spaces = [Namespace(lora, salt) for lora in names for salt in names]
    chains = [listed(hashes, tokens, 16, space) for space in spaces]
    assert len({value for chain in chains for value in chain}) == 4 * len(spaces)
    assert chains == [listed(hasher(), tokens, 16, space) for space in spaces]


@pytest.mark.parametrize(
    ("namespace", "lora_name", "keys_of_block"),
    [
        (Namespace(), None, lambda block: ()),
        (Namespace(cache_salt="s"), None, lambda block: ("s",) if block == 0 else ()),
        (Namespace(lora_name="l"), "l", lambda block: ()),
        (Namespace(lora_name="l", cache_salt="s"), "l", lambda block: ("s",) if block == 0 else ()),
        (Namespace(lora_name="l", cache_salt="l"), "l", lambda block: ("l",) if block == 0 else ()),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_an_engine_that_tells_salt_and_adapter_block_by_block_arrives_at_the_prompts_hashes(
    namespace: Namespace, lora_name: str | None, keys_of_block: Callable[[int], tuple[str, ...]], cut: int
) -> None:
    hashes = hasher()
    tokens = as_tokens(range(64))
    told: list[int] = []
    for first, last in ((0, cut), (cut, 4)):
        digests = [hashes.extra_digest(lora_name, keys_of_block(block)) for block in range(first, last)]
        # An event in which nothing stands has no list at all.
        extras: BlockHashes | None = np.array(digests, np.uint64) if any(digests) else None
        parent = told[-1] if told else hashes.root
        told += hashes.chain(parent, tokens[first * 16 : last * 16], 16, extras).tolist()
    assert told == listed(hashes, tokens, 16, namespace)


def test_a_digest_is_zero_only_for_nothing_and_survives_that_the_memory_of_them_is_full() -> None:
    hashes = hasher()
    assert hashes.extra_digest(None, ()) == 0
    first = hashes.extra_digest("adapter", (("image", 3), b"\x00", "salt"))
    others = {hashes.extra_digest(None, (f"salt {number}",)) for number in range(5000)}
    assert len(others | {first, 0}) == 5002
    assert hashes.extra_digest("adapter", (("image", 3), b"\x00", "salt")) == first
    assert hashes.extra_digest("adapter", (("image", 4), b"\x00", "salt")) != first
    assert hashes.extra_digest(None, ("\ud800",)) != 0


def test_the_tables_grow_with_the_longest_prompt_and_change_no_hash() -> None:
    tokens = as_tokens(range(10_000))
    grown_early, grown_late = hasher(), hasher()
    whole = grown_early.chain(3, tokens, 1).tolist()
    for length in (1, 2, 3, 4, 7, 8, 9, 1023, 1024, 1025, 4095, 4096, 10_000):
        assert grown_late.chain(3, tokens[:length], 1).tolist() == whole[:length]
        assert grown_early.chain(3, tokens[:length], 1).tolist() == whole[:length]


def test_threads_may_share_a_hasher() -> None:
    source = random.Random(1)

    def dawdle(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """Lets other threads in between any two lines of the hasher."""
        if frame.f_code.co_filename != prompt_module.__file__:
            return None
        time.sleep(source.random() * 2e-4)
        return dawdle

    tokens = as_tokens(range(600))
    right = hasher().chain(1, tokens, 2).tolist()
    with ThreadPoolExecutor(3) as threads:
        for _ in range(40):
            hashes = hasher()

            def hash_blocks(blocks: int, hashes: BlockHasher = hashes) -> list[int]:
                sys.settrace(dawdle)
                try:
                    chained: list[int] = hashes.chain(1, tokens[: 2 * blocks], 2).tolist()
                    return chained
                finally:
                    sys.settrace(None)

            lengths = (300, 3, 60)
            assert list(threads.map(hash_blocks, lengths)) == [right[:blocks] for blocks in lengths]


def test_ten_times_the_blocks_cost_no_python_loop() -> None:
    hashes = hasher()
    tokens = as_tokens(range(800_000))

    def best_s(blocks: int) -> float:
        times = []
        for _ in range(7):
            started_s = time.perf_counter()
            hashes.chain(hashes.root, tokens[: blocks * 16], 16)
            times.append(time.perf_counter() - started_s)
        return min(times)

    best_s(50_000)
    few_s, many_s = best_s(5_000), best_s(50_000)
    assert many_s < 0.060
    assert many_s < 20 * few_s


def test_any_integers_become_tokens_and_tokens_stay_what_they_are() -> None:
    tokens = as_tokens([0, 1, 2**32 - 1])
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [0, 1, 2**32 - 1]
    assert as_tokens(tokens) is tokens
    strided = np.arange(32, dtype=np.uint32)[::2]
    hashes = hasher()
    assert hashes.chain(1, strided, 4).tolist() == hashes.chain(1, strided.copy(), 4).tolist()
    with pytest.raises(OverflowError):
        as_tokens([-1])


@settings(max_examples=50)
@given(st.integers(-5, 5))
def test_an_estimated_prompt_has_at_least_one_token_and_no_hashes(token_count: int) -> None:
    prompt = Prompt.estimated(token_count)
    assert prompt.token_count == max(1, token_count)
    assert not prompt.exact
    assert prompt.hashes == {}


# Blocks of which only the contents are known


def blocks_of(hashes: BlockHasher, blocks: list[int]) -> BlockHashes:
    return hashes.contents(as_tokens(blocks), 1)


few_blocks = st.lists(st.integers(1, 3), min_size=1, max_size=8)


@given(prompts=st.lists(few_blocks, max_size=4), looked_for=st.lists(st.integers(1, 3), min_size=1, max_size=4))
@settings(max_examples=500)
def test_blocks_are_behind_what_stands_before_them_in_the_first_prompt_that_has_them_once(
    prompts: list[list[int]], looked_for: list[int]
) -> None:
    hashes = hasher()
    expected = None
    for prompt in prompts:
        places = [at for at in range(1, len(prompt)) if prompt[at : at + len(looked_for)] == looked_for]
        if places:
            expected = prompt[: places[0]] if len(places) == 1 else None
            break
    chained = [hashes.prompt_hashes(as_tokens(prompt), HashFamily(1), PLAIN) for prompt in prompts]
    before = hashes.place(blocks_of(hashes, looked_for), chained)
    if before is None:
        many = len({tuple(prompt[:at]) for prompt in prompts for at in range(1, len(prompt))}) > 8
        assert expected is None or many
    else:
        assert before.tolist() == hashes.prompt_hashes(as_tokens(expected or []), HashFamily(1), PLAIN).tolist()


@pytest.mark.parametrize("every", [1, 400])
@pytest.mark.parametrize("last", [1, 2])
@pytest.mark.parametrize("different", [[], [200], [0, 399], [3, 200, 399]])
def test_a_long_run_is_compared_in_few_places_however_many_of_them_look_right(
    different: list[int], last: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0
    are_at = BlockHasher._are_at

    def counted(at: int, contents: BlockHashes, within: BlockHashes) -> bool:
        nonlocal compared
        compared += len(contents)
        return are_at(at, contents, within)

    monkeypatch.setattr(BlockHasher, "_are_at", staticmethod(counted))
    hashes = hasher()
    run = [1] * 400
    for place in different:
        run[place] = 2
    alike = hashes.prompt_hashes(as_tokens([1] * 4000 + [last] * 400), HashFamily(1), PLAIN)
    if every == 1:
        hashes.place(blocks_of(hashes, run), [alike] * 3)
    else:
        hashes.before(blocks_of(hashes, run), alike)
    assert compared <= 8 * 400
