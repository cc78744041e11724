"""The index against a twin that keeps whole prefixes and searches them one by one; then its memory and its speed."""

import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from predictor.cache_index import CacheIndex
from predictor.kv_events import Cleared, Removed, Stored, Tier
from predictor.prompt import BlockHasher, Namespace, as_tokens

BLOCK_SIZE = 2
# One block as the twin sees it: the adapter, the other keys of its identity, its tokens. A prefix is a tuple of them.
Block = tuple[str | None, tuple[str, ...], tuple[int, int]]
Prefix = tuple[Block, ...]
CLASH = 10**9  # an engine hash that stands for whatever was stored last


def hasher() -> BlockHasher:
    return BlockHasher(np.random.default_rng(1))


def store(
    hashes: list[int],
    tokens: list[int],
    parent: int | None = None,
    *,
    block_size: int = BLOCK_SIZE,
    tier: Tier = Tier.DEVICE,
    lora_name: str | None = None,
    extra_keys: tuple[tuple[str, ...], ...] | None = None,
    group: int | None = None,
) -> Stored:
    return Stored(tuple(hashes), parent, as_tokens(tokens), block_size, tier, lora_name, extra_keys, group)


def removal(*hashes: int, tier: Tier = Tier.DEVICE, group: int | None = None) -> Removed:
    return Removed(hashes, tier, group)


@dataclass
class TwinWorker:
    capacity: int | None
    prefixes: dict[int, Prefix] = field(default_factory=dict)  # engine hash -> everything up to its block's end
    copies: Counter[int] = field(default_factory=Counter)

    def hold(self, name: int, prefix: Prefix) -> None:
        self.prefixes[name] = prefix
        self.copies[name] += 1

    def drop(self, name: int) -> bool:
        if name not in self.prefixes:
            return False
        self.copies[name] -= 1
        if not self.copies[name]:
            del self.prefixes[name]
        return True

    def shed(self) -> int:
        shed = 0
        while self.capacity is not None and len(self.prefixes) > self.capacity:
            name = next(iter(self.prefixes))
            del self.prefixes[name], self.copies[name]
            shed += 1
        return shed

    def run(self, prompt: Prefix) -> int:
        held = set(self.prefixes.values())
        return next((done for done in range(len(prompt)) if prompt[: done + 1] not in held), len(prompt))


bits = st.integers(0, 1)
block_tokens = st.lists(st.tuples(bits, bits), min_size=1, max_size=4)
adapters = st.sampled_from([None, None, "ada"])
salts = st.sampled_from([None, None, "salt"])


def as_prefix(blocks: list[tuple[int, int]], lora_name: str | None, salt: str | None) -> Prefix:
    return tuple((lora_name, (salt,) if salt and not at else (), block) for at, block in enumerate(blocks))


class IndexMachine(RuleBasedStateMachine):
    """Few distinct tokens and few hashes, so that blocks are shared, doubled, renamed and pushed out."""

    def __init__(self) -> None:
        super().__init__()
        self.hasher = hasher()
        self.index = CacheIndex(self.hasher, BLOCK_SIZE)
        self.twins: dict[str, TwinWorker] = {}
        self.skipped: Counter[str] = Counter()
        self.names: dict[tuple[Prefix, int], int] = {}

    @initialize(capacity=st.sampled_from([None, 3]))
    def first(self, capacity: int | None) -> None:
        self.join("a", capacity)

    def name(self, prefix: Prefix, alias: int) -> int:
        return self.names.setdefault((prefix, alias), len(self.names))

    def known_names(self) -> list[int]:
        return [CLASH, *self.names.values()]

    @rule(worker=st.sampled_from("abcd"), capacity=st.sampled_from([None, 3, 6]))
    def join(self, worker: str, capacity: int | None) -> None:
        if worker in self.twins:
            with pytest.raises(ValueError, match="already"):
                self.index.add(worker, capacity)
            return
        self.index.add(worker, capacity)
        self.twins[worker] = TwinWorker(capacity)

    @precondition(lambda self: len(self.twins) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.twins)))
        self.index.remove(worker)
        del self.twins[worker]

    @rule(
        data=st.data(),
        blocks=block_tokens,
        lora_name=adapters,
        salt=salts,
        alias=st.integers(0, 1),
        clash=st.sampled_from([False, False, False, True]),
    )
    def store(
        self,
        data: st.DataObject,
        blocks: list[tuple[int, int]],
        lora_name: str | None,
        salt: str | None,
        alias: int,
        clash: bool,
    ) -> None:
        worker = data.draw(st.sampled_from(sorted(self.twins)))
        twin = self.twins[worker]
        parent = data.draw(st.none() | st.sampled_from(self.known_names()))
        before: Prefix | None = () if parent is None else twin.prefixes.get(parent)
        added = as_prefix(blocks, lora_name, salt)
        prefixes = [(before or ()) + added[: at + 1] for at in range(len(added))]
        hashes = [self.name(prefix, alias) for prefix in prefixes]
        if clash:
            hashes[-1] = CLASH
        tokens = [token for block in blocks for token in block]
        keys = tuple(block[1] for block in added)
        event = store(hashes, tokens, parent, lora_name=lora_name, extra_keys=keys if any(keys) else None)
        self.index.apply(worker, event)
        if before is None:
            self.skipped["unknown_parent"] += 1
            return
        for one, prefix in zip(hashes, prefixes, strict=True):
            twin.hold(one, prefix)
        self.count_shed(twin)

    @rule(data=st.data(), alias=st.integers(0, 1))
    def store_again(self, data: st.DataObject, alias: int) -> None:
        """A second copy of a block, or its first under a second name."""
        worker = data.draw(st.sampled_from(sorted(self.twins)))
        twin = self.twins[worker]
        parents: dict[Prefix, int | None] = {(): None, **{prefix: name for name, prefix in twin.prefixes.items()}}
        again = [prefix for prefix in twin.prefixes.values() if prefix[:-1] in parents]
        if not again:
            return
        prefix = data.draw(st.sampled_from(again))
        lora_name, keys, tokens = prefix[-1]
        name = self.name(prefix, alias)
        extra_keys = (keys,) if keys else None
        self.index.apply(
            worker, store([name], list(tokens), parents[prefix[:-1]], lora_name=lora_name, extra_keys=extra_keys)
        )
        twin.hold(name, prefix)
        self.count_shed(twin)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.twins)))
        hashes = data.draw(st.lists(st.sampled_from(self.known_names()), min_size=1, max_size=4))
        self.index.apply(worker, removal(*hashes))
        unknown = [one for one in hashes if not self.twins[worker].drop(one)]
        if unknown:
            self.skipped["unknown_removal"] += len(unknown)

    @rule(data=st.data(), by_event=st.booleans())
    def clear(self, data: st.DataObject, by_event: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.twins)))
        if by_event:
            self.index.apply(worker, Cleared())
        else:
            self.index.clear(worker)
        self.twins[worker] = TwinWorker(self.twins[worker].capacity)

    @rule(data=st.data(), capacity=st.integers(1, 8))
    def resize(self, data: st.DataObject, capacity: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.twins)))
        self.index.set_capacity(worker, capacity)
        self.twins[worker].capacity = capacity
        self.count_shed(self.twins[worker])

    def count_shed(self, twin: TwinWorker) -> None:
        if shed := twin.shed():
            self.skipped["over_capacity"] += shed

    def check_prompt(self, blocks: list[tuple[int, int]], lora_name: str | None, salt: str | None) -> None:
        tokens = as_tokens([token for block in blocks for token in block])
        hashes = self.hasher.prompt_hashes(tokens, BLOCK_SIZE, Namespace(lora_name, salt))
        prompt = as_prefix(blocks, lora_name, salt)
        assert self.index.runs(hashes) == {worker: twin.run(prompt) for worker, twin in self.twins.items()}

    @rule(
        blocks=st.lists(st.tuples(bits, bits), max_size=6),
        lora_name=adapters,
        salt=salts,
    )
    def ask(self, blocks: list[tuple[int, int]], lora_name: str | None, salt: str | None) -> None:
        self.check_prompt(blocks, lora_name, salt)

    @invariant()
    def every_prefix_that_anyone_holds_is_found(self) -> None:
        for prefix in {prefix for twin in self.twins.values() for prefix in twin.prefixes.values()}:
            adapter, keys, _ = prefix[0]
            salt = keys[0] if keys else None
            blocks = [block[2] for block in prefix]
            if prefix == as_prefix(blocks, adapter, salt):  # else no prompt looks like this
                self.check_prompt(blocks, adapter, salt)

    @invariant()
    def the_tables_agree_with_each_other(self) -> None:
        index = self.index
        views = index._views
        assert len({view.bit for view in views.values()}) == len(views)
        held = {view.bit: Counter(view.blocks.values()) for view in views.values()}
        expected: Counter[int] = Counter()
        for bit, ours in held.items():
            assert bit.bit_count() == 1
            expected.update(dict.fromkeys(ours, bit))
        assert index._holders == expected
        assert len(index) == len(expected)
        for worker, view in views.items():
            assert view.more_names == {ours: names - 1 for ours, names in held[view.bit].items() if names > 1}
            twin = self.twins[worker]
            assert list(view.blocks) == list(twin.prefixes)
            assert view.more_copies == {name: copies - 1 for name, copies in twin.copies.items() if copies > 1}
            assert index.blocks(worker) == len(twin.prefixes)
            assert view.capacity_blocks is None or len(view.blocks) <= view.capacity_blocks
        assert index.skipped == self.skipped

    def teardown(self) -> None:
        for worker in list(self.twins):
            self.index.remove(worker)
        assert len(self.index) == 0
        assert self.index.runs([1, 2]) == {}


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheIndex = IndexMachine.TestCase


def index_of(*workers: str) -> CacheIndex:
    index = CacheIndex(hasher(), BLOCK_SIZE)
    for worker in workers:
        index.add(worker, None)
    return index


def prompt(*tokens: int) -> list[int]:
    return hasher().prompt_hashes(as_tokens(tokens), BLOCK_SIZE, Namespace())


def test_a_run_ends_at_the_first_missing_block_whatever_lies_behind() -> None:
    index = index_of("a", "b", "c")
    index.apply("a", store([1, 2, 3], [1, 2, 3, 4, 5, 6]))
    index.apply("b", store([11, 12, 13], [1, 2, 3, 4, 5, 6]))
    index.apply("b", removal(12))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6, 7, 8)) == {"a": 3, "b": 1, "c": 0}
    assert index.runs(prompt(1, 2, 3, 4, 5)) == {"a": 2, "b": 1, "c": 0}
    assert index.runs(prompt(9, 2, 3, 4)) == {"a": 0, "b": 0, "c": 0}
    assert index.runs([]) == {"a": 0, "b": 0, "c": 0}


def test_a_block_stored_twice_goes_with_its_second_removal() -> None:
    index = index_of("a")
    for _ in range(2):
        index.apply("a", store([1], [1, 2]))
    index.apply("a", removal(1))
    assert index.runs(prompt(1, 2)) == {"a": 1}
    index.apply("a", removal(1))
    assert index.runs(prompt(1, 2)) == {"a": 0}
    assert index.skipped == {}
    index.apply("a", removal(1))
    assert index.skipped == {"unknown_removal": 1}


def test_hashes_of_one_engine_mean_nothing_to_another() -> None:
    index = index_of("a", "b")
    index.apply("a", store([1], [1, 2]))
    index.apply("b", store([1], [8, 9]))
    index.apply("b", store([2], [3, 4], parent=1))
    assert index.runs(prompt(1, 2, 3, 4)) == {"a": 1, "b": 0}
    assert index.runs(prompt(8, 9, 3, 4)) == {"a": 0, "b": 2}
    index.apply("b", removal(1))
    assert index.runs(prompt(1, 2)) == {"a": 1, "b": 0}


def test_a_child_can_be_placed_after_its_parent_is_gone_only_if_it_came_before() -> None:
    index = index_of("a")
    index.apply("a", store([1], [1, 2]))
    index.apply("a", store([2], [3, 4], parent=1))
    index.apply("a", removal(1))
    index.apply("a", store([3], [5, 6], parent=2))
    index.apply("a", store([4], [7, 8], parent=1))
    assert index.skipped == {"unknown_parent": 1}
    index.apply("a", store([1], [1, 2]))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6)) == {"a": 3}


def test_other_tiers_and_block_sizes_are_counted_and_held_against_nobody() -> None:
    index = index_of("a")
    index.apply("a", store([1], [1, 2], tier=Tier.HOST))
    index.apply("a", store([1], [1, 2], tier=Tier.STORAGE))
    index.apply("a", store([1], [1, 2, 3, 4], block_size=4))
    assert (len(index), index.skipped) == (0, {"tier_host": 1, "tier_storage": 1, "block_size": 1})
    index.apply("a", store([1], [1, 2]))
    index.apply("a", removal(1, tier=Tier.HOST))
    assert index.runs(prompt(1, 2)) == {"a": 1}


def test_removals_of_a_group_that_was_never_taken_in_do_not_touch_the_blocks_of_the_same_hash() -> None:
    index = index_of("a")
    index.apply("a", store([1, 2], [1, 2, 3, 4], group=1))
    index.apply("a", removal(1, 2, group=0))
    assert index.runs(prompt(1, 2, 3, 4)) == {"a": 2}
    assert index.skipped == {"other_group": 1}
    index.apply("a", removal(2, group=1))
    index.apply("a", removal(1))
    assert len(index) == 0


def test_a_view_beyond_its_engines_size_sheds_what_it_has_known_longest() -> None:
    index = index_of()
    index.add("a", 2)
    index.apply("a", store([1], [1, 2]))
    index.apply("a", store([2, 3], [3, 4, 5, 6]))
    assert index.runs(prompt(1, 2)) == {"a": 0}
    assert index.runs(prompt(3, 4, 5, 6)) == {"a": 2}
    assert index.blocks("a") == 2
    index.set_capacity("a", 1)
    assert index.skipped == {"over_capacity": 2}
    assert len(index) == 1


def test_a_workers_place_is_free_for_the_next_and_what_it_held_is_gone() -> None:
    index = index_of("a", "b")
    index.apply("a", store([1], [1, 2]))
    index.remove("a")
    index.add("c", None)
    assert index.runs(prompt(1, 2)) == {"b": 0, "c": 0}
    with pytest.raises(ValueError, match="'c' is already"):
        index.add("c", None)


def test_more_workers_than_bits_in_a_machine_word() -> None:
    names = [f"w{number}" for number in range(130)]
    index = index_of(*names)
    for number, name in enumerate(names):
        index.apply(name, store([1, 2, 3][: number % 4], [1, 2, 3, 4, 5, 6][: number % 4 * 2]))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6)) == {name: number % 4 for number, name in enumerate(names)}


def fill(index: CacheIndex, worker: str, blocks: int, seed: int, hash_seed: int) -> list[Stored]:
    """Prompts of 128 blocks, stored in chunks of 32 as an engine's steps would."""
    tokens = np.random.default_rng(seed).integers(0, 152_000, blocks * index.block_size).astype(np.uint32)
    hashes = np.random.default_rng(hash_seed).integers(0, 2**64, blocks, dtype=np.uint64).tolist()
    events = []
    for first in range(0, blocks, 32):
        chunk = tuple(hashes[first : first + 32])
        parent = hashes[first - 1] if first % 128 else None
        piece = tokens[first * index.block_size : (first + len(chunk)) * index.block_size]
        events.append(Stored(chunk, parent, piece, index.block_size, Tier.DEVICE, None, None))
    return events


@pytest.mark.parametrize("shared", [False, True], ids=["disjoint", "shared"])
def test_a_block_costs_a_few_hundred_bytes_at_most(shared: bool) -> None:
    workers, blocks = 8, 12_800
    tracemalloc.start()
    try:
        index = CacheIndex(hasher(), 16)
        for worker in range(workers):
            index.add(str(worker), None)
        before, _ = tracemalloc.get_traced_memory()
        for worker in range(workers):
            for event in fill(index, str(worker), blocks, 0 if shared else worker, worker + 100):
                index.apply(str(worker), event)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(index.blocks(str(worker)) for worker in range(workers)) == workers * blocks
    assert len(index) == (blocks if shared else workers * blocks)
    assert (after - before) / (workers * blocks) < 300


def test_fifty_thousand_blocks_are_matched_against_64_workers_in_a_fraction_of_a_second() -> None:
    index = CacheIndex(hasher(), 16)
    events = fill(index, "0", 51_200, 0, 0)
    started_s = time.perf_counter()
    for worker in range(64):
        index.add(str(worker), None)
        for event in events if worker == 63 else events[: 4 * worker]:
            index.apply(str(worker), event)
    applied = sum(index.blocks(str(worker)) for worker in range(64))
    assert applied / (time.perf_counter() - started_s) > 20_000

    parts = [event.tokens for event in events[:4]]
    own = hasher()
    first_prompt = own.prompt_hashes(np.concatenate(parts), 16, Namespace())
    assert index.runs(first_prompt) == {str(worker): 128 if worker else 0 for worker in range(64)}

    # One chain of 50,000 blocks that everybody holds a different part of.
    long = np.arange(800_000, dtype=np.uint32)
    for worker in range(64):
        index.clear(str(worker))
        held = 50_000 * (worker + 1) // 64
        hashes = tuple(range(held))
        index.apply(str(worker), Stored(hashes, None, long[: held * 16], 16, Tier.DEVICE, None, None))
    hashes_of_long = own.prompt_hashes(long, 16, Namespace())
    started_s = time.perf_counter()
    runs = index.runs(hashes_of_long)
    took_s = time.perf_counter() - started_s
    assert runs == {str(worker): 50_000 * (worker + 1) // 64 for worker in range(64)}
    assert took_s < 0.5
