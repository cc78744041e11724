"""Blocks that an engine has and nobody was told of: who goes on from one shows that it is there, and all before it."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor import cache_index
from predictor.cache_index import CacheIndex, TierCaps
from predictor.kv_events import Removed, Stored, Tier
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Namespace, as_tokens

SIZE = 2
FAMILY = HashFamily(SIZE)
HASHER = BlockHasher(np.random.default_rng(1))


def hashes(blocks: Iterable[int]) -> BlockHashes:
    """Of a prompt of blocks that are told apart by a number."""
    tokens = [token for block in blocks for token in (block, block + 1)]
    return HASHER.prompt_hashes(as_tokens(tokens), FAMILY, Namespace())


def stored(names: list[int], blocks: list[int], parent: int | None) -> Stored:
    tokens = as_tokens([token for block in blocks for token in (block, block + 1)])
    return Stored(tuple(names), parent, tokens, SIZE, Tier.DEVICE, None, None, None, None)


def removed(*names: int) -> Removed:
    return Removed(names, Tier.DEVICE, None)


class View:
    """One worker's, with the prompts that it has in progress."""

    def __init__(self, capacity: int | None = None) -> None:
        self.index = CacheIndex(HASHER, FAMILY)
        self.prompts: list[BlockHashes] = []
        self.index.add("w", TierCaps(capacity), prompts=lambda: self.prompts)

    def takes(self, *events: Stored | Removed) -> None:
        for event in events:
            self.index.apply("w", event)

    def run(self, *blocks: int) -> int:
        return self.index.match(hashes(blocks))["w"].device

    def holds(self, *blocks: int) -> bool:
        """The last of these, whatever of those before it."""
        return self.index.match(hashes(blocks)[-1:])["w"].device == 1


def test_who_goes_on_from_a_block_that_was_never_told_of_shows_that_the_engine_has_all_before_it() -> None:
    view = View()
    view.prompts.append(hashes([10, 20, 30, 40, 50]))
    view.takes(stored([104, 105], [40, 50], parent=103))
    assert view.run(10, 20, 30, 40, 50) == 5
    assert view.run(10, 20, 30, 77) == 3
    assert view.index.adopted == 3


def test_orphans_that_waited_for_it_get_their_place() -> None:
    view = View()
    view.takes(stored([204], [60], parent=103))
    assert view.run(10, 20, 30, 60) == 0
    view.prompts.append(hashes([10, 20, 30, 40]))
    view.takes(stored([104], [40], parent=103))
    assert view.run(10, 20, 30, 60) == 4


def test_when_the_engine_lets_go_of_it_nothing_before_it_is_counted_on_either() -> None:
    view = View()
    view.prompts.append(hashes([10, 20, 30, 40]))
    view.takes(stored([104], [40], parent=103), removed(104))
    assert view.run(10, 20, 30) == 3
    view.takes(removed(103))
    assert view.run(10, 20, 30) == 0
    assert view.index.blocks("w") == 0


def test_what_two_show_is_there_until_both_are_gone() -> None:
    view = View()
    view.prompts.append(hashes([10, 20, 30, 40]))
    view.takes(stored([104], [40], parent=103))
    view.prompts.insert(0, hashes([10, 20, 66, 70]))
    view.takes(stored([304], [70], parent=303))
    view.takes(removed(104), removed(103))
    assert (view.run(10, 20, 66, 70), view.run(10, 20, 30)) == (4, 2)
    view.takes(removed(304), removed(303))
    assert (view.run(10), view.index.blocks("w")) == (0, 0)


@pytest.mark.parametrize(
    "prompts",
    [[], [[10, 20, 30, 50]], [[40, 10, 20]], [[10, 40, 20, 40]]],
    ids=["nobody", "somebody else", "at its very beginning", "in two places"],
)
def test_what_no_prompt_tells_waits_for_its_parent(prompts: list[list[int]]) -> None:
    view = View()
    view.prompts += [hashes(blocks) for blocks in prompts]
    view.takes(stored([104], [40], parent=103))
    assert (view.index.blocks("w"), view.index.orphans("w")) == (0, 1)


def test_a_block_that_was_taken_to_be_gone_is_there_again_when_somebody_goes_on_from_it() -> None:
    """Removals were lost, the view has more than the engine can hold, and lets go of what it was told of first."""
    view = View(capacity=64)
    view.takes(stored([101, 102, 103], [10, 20, 30], parent=None))
    for number in range(70):
        view.takes(stored([1000 + number], [5000 + 10 * number], parent=None))
    assert view.run(10, 20, 30) == 0
    view.prompts.append(hashes([10, 20, 30, 40]))
    view.takes(stored([104], [40], parent=103))
    assert view.run(10, 20, 30, 40) == 4
    for number in range(300):
        view.takes(stored([3000 + number], [90_000 + 10 * number], parent=None))
    assert view.run(10, 20, 30) == 3


def test_of_more_parents_than_are_remembered_those_go_that_were_not_used_for_longest() -> None:
    view = View()
    for number in range(70):
        block = 1000 + 10 * number
        view.prompts = [hashes([10, block, block + 2, block + 4])]
        view.takes(stored([2 * number + 1], [block + 4], parent=2 * number + 2))
        if number >= 3:
            view.takes(stored([5000 + number], [3000 + number], parent=2))  # the first is gone on from again and again
    runs = [view.run(10, 1000 + 10 * number, 1000 + 10 * number + 2) for number in range(70)]
    # What is given up is what is before them: the parents themselves were told of.
    assert runs == [3, *[1] * 6, *[3] * 63]


@pytest.mark.parametrize("prompt", [30, 300])
def test_a_worker_has_no_more_than_half_of_its_cache_presumed_whatever_its_events_say(prompt: int) -> None:
    view = View(capacity=100)
    for number in range(40):
        blocks = [10_000 * (number + 1) + 2 * place for place in range(prompt)]
        view.prompts = [hashes(blocks)]
        view.takes(stored([2 * number + 1], blocks[-1:], parent=2 * number + 2))
        assert view.index.blocks("w") <= 50 + 2 * (number + 1)
        assert view.run(*blocks) >= min(prompt, 50)


@pytest.mark.parametrize("capacity", [4, 8, 64])
@pytest.mark.parametrize("parents", [1, 10])
def test_blocks_count_as_beyond_the_capacity_if_they_are_let_go_of_and_only_then(capacity: int, parents: int) -> None:
    view = View(capacity)
    told = []
    for number in range(parents):
        view.prompts = [hashes([10, 20, 30, 40 + 10 * number, 500 + 10 * number])]
        view.takes(stored([2 * number + 1], [500 + 10 * number], parent=2 * number + 2))
        told += [[10, 20, 30, 40 + 10 * number], [10, 20, 30, 40 + 10 * number, 500 + 10 * number]]
    for number in range(100):
        view.takes(stored([1000 + number], [5000 + 10 * number], parent=None))
        told.append([5000 + 10 * number])
        left = sum(view.holds(*blocks) for blocks in told)
        assert view.index.skipped["over_capacity"] == len(told) - left
    view.index.set_capacity("w", 2)
    left = sum(view.holds(*blocks) for blocks in told)
    assert view.index.skipped["over_capacity"] == len(told) - left


def test_of_a_cache_that_has_become_smaller_no_more_than_half_is_presumed() -> None:
    view = View(capacity=400)
    for number in range(10):
        blocks = [10_000 * (number + 1) + 2 * place for place in range(20)]
        view.prompts = [hashes(blocks)]
        view.takes(stored([2 * number + 1], blocks[-1:], parent=2 * number + 2))
    assert view.index.blocks("w") == 10 * 20
    view.index.set_capacity("w", 100)
    assert view.index.blocks("w") <= 100


paths = st.lists(st.sampled_from([10, 20]), min_size=0, max_size=6)


@given(
    shown=st.lists(st.tuples(paths, st.integers(0, 2)), max_size=8),
    gone=st.lists(st.integers(0, 7), max_size=8, unique=True),
)
@settings(max_examples=200, deadline=None)
def test_whoever_shows_what_others_show_too_and_goes_first_what_is_left_shows_is_there(
    shown: list[tuple[list[int], int]], gone: list[int]
) -> None:
    view = View()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_index, "_PRESUMED_AT_ONCE", 3)
        patch.setattr(cache_index, "_PRESUMED_PER_BLOCK", 3)
        here: dict[int, list[int]] = {}
        for number, (path, goes) in enumerate(shown):
            block = 1000 * (number + 1)
            view.prompts = [hashes([*path, block, block + 2])]
            if path:
                view.takes(stored([2 * number + 1], [block + 2], parent=2 * number + 2))
                here[number] = [*path, block, block + 2]
            for leaver in gone[:goes]:
                if here.pop(leaver, None):
                    view.takes(removed(2 * leaver + 1, 2 * leaver + 2))
        for told in range(20):
            view.takes(stored([10_000 + told], [50_000 + 2 * told], parent=None))
    prefixes = {tuple(blocks[:end]) for blocks in here.values() for end in range(1, len(blocks) + 1)}
    assert len(view.index) == len(prefixes) + 20
    assert all(view.run(*blocks) == len(blocks) for blocks in here.values())


def test_what_is_before_a_block_is_presumed_from_its_beginning_on_as_more_is_told() -> None:
    view = View()
    blocks = list(range(10, 400_010, 20))
    view.prompts.append(hashes(blocks))
    view.takes(stored([7], blocks[-1:], parent=6))
    runs = [view.run(*blocks)]
    for number in range(110):
        start = 1_000_000 + 1000 * number
        names = list(range(10_000 + 10 * number, 10_010 + 10 * number))
        view.takes(stored(names, list(range(start, start + 20, 2)), parent=None))
        runs.append(view.run(*blocks))
    assert 0 < runs[0] < runs[10] < runs[50] < runs[-1] == len(blocks)
    view.takes(removed(7, 6))
    assert view.index.blocks("w") == 1100


def test_what_is_not_presumed_yet_when_the_engine_lets_go_of_the_block_never_is() -> None:
    view = View()
    blocks = list(range(10, 400_010, 20))
    view.prompts.append(hashes(blocks))
    view.takes(stored([7], blocks[-1:], parent=6))
    view.takes(removed(7, 6))
    view.takes(stored(list(range(10_000, 11_000)), list(range(1_000_000, 1_002_000, 2)), parent=None))
    assert (view.index.blocks("w"), view.run(*blocks)) == (1000, 0)


class Work:
    """Blocks that are searched through, and blocks that are presumed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.searched = self.presumed = 0
        place, hold = BlockHasher.place, CacheIndex._hold_presumed

        def counted_place(hasher: BlockHasher, contents: BlockHashes, prompts: list[BlockHashes]) -> BlockHashes | None:
            self.searched += sum(map(len, prompts))
            return place(hasher, contents, prompts)

        def counted_hold(index: CacheIndex, holder: cache_index._Holder, ours: BlockHashes) -> None:
            self.presumed += len(ours)
            hold(index, holder, ours)

        patch.setattr(BlockHasher, "place", counted_place)
        patch.setattr(CacheIndex, "_hold_presumed", counted_hold)


@pytest.mark.parametrize("kind", ["in one prompt", "in a new prompt every time", "nowhere"])
@pytest.mark.parametrize("prompt", [200, 5000, 50_000])
def test_whoever_goes_on_from_blocks_that_were_never_told_of_costs_little_again_and_again(
    kind: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, view = Work(monkeypatch), View()
    most = 0
    for number in range(600):
        if not number or (kind == "in a new prompt every time" and number < 100):
            shift = 100_000 * number
            view.prompts = [hashes(range(shift + 10, shift + 10 + 2 * prompt, 2))]
        block = 99_000_000 if kind == "nowhere" else shift + 10 + 2 * (prompt - 1 - number % 100)
        work.presumed = 0
        view.takes(stored([2 * number + 1], [block], parent=2 * number + 2))
        most = max(most, work.presumed)
    assert most <= 4096
    # For each run a thousand blocks, or a 32nd of what is looked at, and what may be looked at ahead of runs to come.
    assert work.searched <= (600 + 256) * min(prompt, max(1024, prompt // 32 + 1))


def test_parents_that_show_the_same_long_prompt_do_not_cost_each_other_what_they_show() -> None:
    view = View()
    blocks = list(range(10, 60_010, 20))
    for number in range(60):
        block = 1_000_000 + 10 * number
        view.prompts = [hashes([*blocks, block, block + 2])]
        view.takes(stored([2 * number + 1], [block + 2], parent=2 * number + 2))
    assert view.index.blocks("w") == 3000 + 2 * 60
    for number in range(60):
        assert view.run(*blocks) == 3000
        view.takes(removed(2 * number + 1, 2 * number + 2))
    assert view.index.blocks("w") == 0


class Engine:
    """A prefix cache that evicts what was used longest ago, of one request's blocks the last first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.names: dict[tuple[int, ...], int] = {}
        self.used: dict[tuple[int, ...], int] = {}
        self.time = self.named = 0

    def run(self, blocks: tuple[int, ...]) -> int:
        return next((n for n in range(len(blocks)) if blocks[: n + 1] not in self.names), len(blocks))

    def serve(self, blocks: tuple[int, ...]) -> tuple[list[int], Stored | None]:
        """The names of what it has evicted, and what it has stored."""
        self.time += 1000
        run = self.run(blocks)
        for n in range(run):
            self.used[blocks[: n + 1]] = self.time - n
        gone = []
        while len(self.names) > self.capacity - (len(blocks) - run):
            oldest = min(self.used, key=lambda prefix: self.used[prefix])
            gone.append(self.names.pop(oldest))
            del self.used[oldest]
        parent = self.names[blocks[:run]] if run else None
        for n in range(run, len(blocks)):
            self.named += 1
            self.names[blocks[: n + 1]] = 10_000 + self.named
            self.used[blocks[: n + 1]] = self.time - n
        new = [self.names[blocks[: n + 1]] for n in range(run, len(blocks))]
        return gone, stored(new, list(blocks[run:]), parent) if new else None


asks = st.lists(st.sampled_from([10, 20, 30]), min_size=1, max_size=6).map(tuple)


@given(served=st.lists(st.tuples(asks, st.booleans()), max_size=40))
@settings(max_examples=300, deadline=None)
def test_whatever_stores_are_lost_no_more_is_counted_on_than_the_engine_has(
    served: list[tuple[tuple[int, ...], bool]],
) -> None:
    engine, view = Engine(12), View(12)
    for blocks, is_lost in served:
        gone, event = engine.serve(blocks)
        view.prompts = [hashes(blocks)]
        if gone:
            view.takes(removed(*gone))
        if event is not None and not is_lost:
            view.takes(event)
        for other, _ in served:
            assert view.run(*other) <= engine.run(other)
