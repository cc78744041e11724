"""The index against a twin that keeps whole prefixes and searches them one by one; then its memory and its speed."""

import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from predictor import cache_index, column
from predictor.cache_index import CacheIndex, TierCaps, TieredRun
from predictor.kv_events import Bundle, Cleared, Named, Removed, Stored, Tier, decode_batch, decode_pieces
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Namespace, as_tokens

BLOCK_SIZE = 2
FAMILY = HashFamily(BLOCK_SIZE)
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
    ahead: list[list[int]] | None = None,
) -> Stored:
    rows = None if ahead is None else np.array(ahead, np.uint32)
    return Stored(tuple(hashes), parent, as_tokens(tokens), block_size, tier, lora_name, extra_keys, group, rows)


def removal(*hashes: int, tier: Tier = Tier.DEVICE, group: int | None = None) -> Removed:
    return Removed(hashes, tier, group)


@dataclass
class TwinTier:
    capacity: int | None
    prefixes: dict[int, Prefix] = field(default_factory=dict)  # engine hash -> everything up to its block's end
    copies: Counter[int] = field(default_factory=Counter)
    # Blocks without a known parent: parent, then (name, block, still there) one by one.
    orphans: list[tuple[int, list[list[object]]]] = field(default_factory=list)

    def hold(self, name: int, prefix: Prefix) -> None:
        self.prefixes[name] = prefix
        self.copies[name] += 1

    def drop(self, name: int) -> bool:
        """Whether anything of that name was there."""
        if name in self.prefixes:
            self.copies[name] -= 1
            if not self.copies[name]:
                del self.prefixes[name]
            return True
        for _, blocks in reversed(self.orphans):
            for entry in blocks:
                if entry[0] == name and entry[2]:
                    entry[2] = False
                    return True
        return False

    def shed(self) -> int:
        shed = 0
        while self.capacity is not None and len(self.prefixes) > self.capacity:
            name = next(iter(self.prefixes))
            del self.prefixes[name], self.copies[name]
            shed += 1
        return shed


@dataclass
class TwinWorker:
    tiers: dict[Tier, TwinTier]
    ever: dict[int, set[Prefix]] = field(default_factory=dict)  # all that a name has stood for
    last: dict[int, Prefix] = field(default_factory=dict)
    used: list[Tier] = field(default_factory=list)  # tiers that have been told of, in this order

    def run(self, prompt: Prefix) -> TieredRun:
        def held(at: int, *tiers: Tier) -> bool:
            return any(prompt[: at + 1] in set(self.tiers[tier].prefixes.values()) for tier in tiers)

        at = 0
        while at < len(prompt) and held(at, Tier.DEVICE):
            at += 1
        device, host, storage = at, 0, 0
        while at < len(prompt) and held(at, Tier.HOST, Tier.STORAGE):
            host += held(at, Tier.HOST)
            storage += not held(at, Tier.HOST)
            at += 1
        return TieredRun(device, host, storage)


bits = st.integers(0, 1)
block_tokens = st.lists(st.tuples(bits, bits), min_size=1, max_size=4)
adapters = st.sampled_from([None, None, "ada"])
salts = st.sampled_from([None, None, "salt"])
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.STORAGE])


def as_prefix(blocks: list[tuple[int, int]], lora_name: str | None, salt: str | None) -> Prefix:
    return tuple((lora_name, (salt,) if salt and not at else (), block) for at, block in enumerate(blocks))


class IndexMachine(RuleBasedStateMachine):
    """Few distinct tokens and few hashes, so that blocks are shared, doubled, renamed, orphaned and pushed out."""

    def __init__(self) -> None:
        super().__init__()
        self.hasher = hasher()
        self.index = CacheIndex(self.hasher, FAMILY)
        self.twins: dict[str, TwinWorker] = {}
        self.skipped: Counter[str] = Counter()
        self.names: dict[tuple[Prefix, int], int] = {}
        self.prefixes: dict[int, Prefix] = {}  # our hash -> what it stands for

    @initialize(capacity=st.sampled_from([None, 3]))
    def first(self, capacity: int | None) -> None:
        self.join("a", capacity)

    def name(self, prefix: Prefix, alias: int) -> int:
        return self.names.setdefault((prefix, alias), len(self.names))

    def known_names(self) -> list[int]:
        return [CLASH, *self.names.values()]

    def worker(self, data: st.DataObject) -> tuple[str, TwinWorker]:
        worker = data.draw(st.sampled_from(sorted(self.twins)))
        return worker, self.twins[worker]

    @rule(worker=st.sampled_from("abcd"), capacity=st.sampled_from([None, 3, 6]))
    def join(self, worker: str, capacity: int | None) -> None:
        if worker in self.twins:
            with pytest.raises(ValueError, match="already"):
                self.index.add(worker, capacity)
            return
        # Else the lower tiers' caps would follow the device's.
        lower = 10_000 if capacity is None else capacity
        self.index.add(worker, TierCaps(capacity, lower, lower))
        self.twins[worker] = TwinWorker({tier: TwinTier(capacity) for tier in Tier})

    @precondition(lambda self: len(self.twins) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker, _ = self.worker(data)
        self.index.remove(worker)
        del self.twins[worker]

    @rule(
        data=st.data(),
        blocks=block_tokens,
        lora_name=adapters,
        salt=salts,
        alias=st.integers(0, 1),
        clash=st.sampled_from([False, False, False, True]),
        tier=tiers,
    )
    def store(
        self,
        data: st.DataObject,
        blocks: list[tuple[int, int]],
        lora_name: str | None,
        salt: str | None,
        alias: int,
        clash: bool,
        tier: Tier,
    ) -> None:
        worker, twin = self.worker(data)
        parent = data.draw(st.none() | st.sampled_from(self.known_names()))
        added = as_prefix(blocks, lora_name, salt)
        before = self.meaning(worker, parent, tier) or ()
        prefixes = [before + added[: at + 1] for at in range(len(added))]
        hashes = [self.name(prefix, alias) for prefix in prefixes]
        if clash:
            hashes[-1] = CLASH
        self.told(worker, twin, tier, parent, hashes, added)

    def meaning(self, worker: str, name: int | None, tier: Tier) -> Prefix | None:
        """What the index takes a name for.

        A name that is not held any more may be remembered or not, and one that stands for two things in two tiers may
        mean either; but it means nothing that it never stood for.
        """
        twin = self.twins[worker]
        if name is None:
            return ()
        view = self.index._views[worker]
        ours = self.index._resolve(view, name, self.index._holder(view, tier))
        held = {one.prefixes[name] for one in twin.tiers.values() if name in one.prefixes}
        if ours is None:
            assert not held, "a block that is held is known"
            return None
        prefix = self.prefixes[ours]
        assert prefix in twin.ever[name]
        own = twin.tiers[tier].prefixes.get(name)
        assert own is None or own == prefix, "a tier knows its own blocks best"
        return prefix

    def told(
        self, worker: str, twin: TwinWorker, tier: Tier, parent: int | None, hashes: list[int], added: Prefix
    ) -> None:
        before = self.meaning(worker, parent, tier)
        tokens = [token for block in added for token in block[2]]
        keys = tuple(block[1] for block in added)
        event = store(
            hashes, tokens, parent, tier=tier, lora_name=added[0][0], extra_keys=keys if any(keys) else None
        )  # fmt: skip
        self.index.apply(worker, event)
        twin.used += [tier] * (tier not in twin.used)
        if before is None:
            assert parent is not None
            self.skipped["unknown_parent"] += 1
            blocks: list[list[object]] = [[name, block, True] for name, block in zip(hashes, added, strict=True)]
            twin.tiers[tier].orphans.append((parent, blocks))
            return
        self.hold_run(twin, tier, before, hashes, added)
        self.adopt(twin, tier, hashes)
        self.count_shed(twin)

    def hold_run(self, twin: TwinWorker, tier: Tier, before: Prefix, hashes: list[int], added: Prefix) -> None:
        for at, one in enumerate(hashes):
            prefix = before + added[: at + 1]
            ours = self.hasher.root
            for lora_name, keys, tokens in prefix:
                digest = self.hasher.extra_digest(lora_name, keys)
                (ours,) = self.hasher.chain_few(ours, as_tokens(tokens), BLOCK_SIZE, [digest])
            self.prefixes[ours] = prefix
            twin.ever.setdefault(one, set()).add(prefix)
            twin.last[one] = prefix
            twin.tiers[tier].hold(one, prefix)

    def adopt(self, twin: TwinWorker, told_in: Tier, hashes: list[int]) -> None:
        def meant(name: int, tier: Tier) -> Prefix:
            where = [tier, *twin.used]
            held = (twin.tiers[one].prefixes[name] for one in where if name in twin.tiers[one].prefixes)
            return next(held, twin.last[name])  # one that was removed while it waited still tells its place

        del told_in
        ready = [hashes]
        while ready:
            told = ready.pop()
            for tier in twin.used:
                for name in told:
                    mine = [run for run in twin.tiers[tier].orphans if run[0] == name]
                    twin.tiers[tier].orphans = [run for run in twin.tiers[tier].orphans if run[0] != name]
                    for _, blocks in mine:
                        names = [entry[0] for entry in blocks]
                        added = tuple(entry[1] for entry in blocks)
                        self.hold_run(twin, tier, meant(name, tier), names, added)  # type: ignore[arg-type]
                        for entry in blocks:
                            if not entry[2]:
                                twin.tiers[tier].drop(entry[0])  # type: ignore[arg-type]
                        ready.append(names)  # type: ignore[arg-type]

    @rule(data=st.data(), alias=st.integers(0, 1), tier=tiers)
    def store_again(self, data: st.DataObject, alias: int, tier: Tier) -> None:
        """A second copy of a block, or its first under a second name, or in another tier."""
        worker, twin = self.worker(data)
        everything = {name: prefix for one in twin.tiers.values() for name, prefix in one.prefixes.items()}
        parents: dict[Prefix, int | None] = {(): None, **{prefix: name for name, prefix in everything.items()}}
        again = [prefix for prefix in everything.values() if prefix[:-1] in parents]
        if not again:
            return
        prefix = data.draw(st.sampled_from(again))
        parent = parents[prefix[:-1]]
        if self.meaning(worker, parent, tier) != prefix[:-1]:
            return  # the name stands for something else in another tier
        self.told(worker, twin, tier, parent, [self.name(prefix, alias)], prefix[-1:])

    @rule(data=st.data(), tier=st.sampled_from([Tier.HOST, Tier.STORAGE]))
    def name_blocks(self, data: st.DataObject, tier: Tier) -> None:
        """What an offloading connector says: no more than a name."""
        worker, twin = self.worker(data)
        hashes = data.draw(st.lists(st.sampled_from(self.known_names()), min_size=1, max_size=3))
        meanings = [(name, self.meaning(worker, name, tier)) for name in hashes]
        self.index.apply(worker, Named(tuple(hashes), tier))
        twin.used += [tier] * (tier not in twin.used)
        for name, prefix in meanings:
            if prefix is None:
                self.skipped["unknown_name"] += 1
            else:
                twin.tiers[tier].hold(name, prefix)
        self.count_shed(twin)

    def held(self, twin: TwinWorker) -> list[tuple[int, Prefix]]:
        return [entry for one in twin.tiers.values() for entry in one.prefixes.items()]

    @rule(data=st.data(), tier=tiers)
    def remove(self, data: st.DataObject, tier: Tier) -> None:
        worker, twin = self.worker(data)
        hashes = data.draw(st.lists(st.sampled_from(self.known_names()), min_size=1, max_size=4))
        self.index.apply(worker, removal(*hashes, tier=tier))
        unknown = [one for one in hashes if not twin.tiers[tier].drop(one)]
        if unknown:
            self.skipped["unknown_removal"] += len(unknown)

    @rule(data=st.data(), by_event=st.booleans())
    def clear(self, data: st.DataObject, by_event: bool) -> None:
        worker, twin = self.worker(data)
        if by_event:
            self.index.apply(worker, Cleared())
        else:
            self.index.clear(worker)
        for tier in (Tier.DEVICE,) if by_event else Tier:
            twin.tiers[tier] = TwinTier(twin.tiers[tier].capacity)
            twin.used = [one for one in twin.used if one is not tier]

    @rule(data=st.data(), capacity=st.integers(1, 8))
    def resize(self, data: st.DataObject, capacity: int) -> None:
        worker, twin = self.worker(data)
        self.index.set_capacity(worker, capacity)
        twin.tiers[Tier.DEVICE].capacity = capacity
        self.count_shed(twin)

    def count_shed(self, twin: TwinWorker) -> None:
        if shed := sum(one.shed() for one in twin.tiers.values()):
            self.skipped["over_capacity"] += shed

    def check_prompt(self, blocks: list[tuple[int, int]], lora_name: str | None, salt: str | None) -> None:
        tokens = as_tokens([token for block in blocks for token in block])
        hashes = self.hasher.prompt_hashes(tokens, FAMILY, Namespace(lora_name, salt))
        prompt = as_prefix(blocks, lora_name, salt)
        expected = {worker: twin.run(prompt) for worker, twin in self.twins.items()}
        assert self.index.match(hashes) == expected
        assert self.index.runs(hashes) == {worker: run.device for worker, run in expected.items()}

    @rule(blocks=st.lists(st.tuples(bits, bits), max_size=6), lora_name=adapters, salt=salts)
    def ask(self, blocks: list[tuple[int, int]], lora_name: str | None, salt: str | None) -> None:
        self.check_prompt(blocks, lora_name, salt)

    @invariant()
    def every_prefix_that_anyone_holds_is_found(self) -> None:
        held = {prefix for twin in self.twins.values() for _, prefix in self.held(twin)}
        assert len(self.index) == len(held)
        for prefix in held:
            adapter, keys, _ = prefix[0]
            salt = keys[0] if keys else None
            blocks = [block[2] for block in prefix]
            if prefix == as_prefix(blocks, adapter, salt):  # else no prompt looks like this
                self.check_prompt(blocks, adapter, salt)

    @invariant()
    def what_is_counted_agrees(self) -> None:
        for worker, twin in self.twins.items():
            for tier, one in twin.tiers.items():
                assert self.index.blocks(worker, tier) == len(one.prefixes)
                assert one.capacity is None or self.index.blocks(worker, tier) <= one.capacity
            waiting = {
                (tier, entry[0])
                for tier, one in twin.tiers.items()
                for _, blocks in one.orphans
                for entry in blocks
                if entry[2]
            }
            assert self.index.orphans(worker) == len(waiting)
        assert self.index.skipped == self.skipped

    def teardown(self) -> None:
        for worker in list(self.twins):
            self.index.remove(worker)
        assert len(self.index) == 0
        assert self.index.runs([1, 2]) == {}


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheIndex = IndexMachine.TestCase


class ByTheThousand(IndexMachine):
    """The same through the calls that take many blocks at once."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(cache_index, "_MANY", 0)
        self.patch.setattr(cache_index, "_FIRST_PIECE", 1)
        self.patch.setattr(cache_index, "_PIECE_GROWTH", 2)

    def teardown(self) -> None:
        super().teardown()
        self.patch.undo()


ByTheThousand.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCacheIndexByTheThousand = ByTheThousand.TestCase


def index_of(*workers: str) -> CacheIndex:
    index = CacheIndex(hasher(), FAMILY)
    for worker in workers:
        index.add(worker)
    return index


def prompt(*tokens: int) -> BlockHashes:
    return hasher().prompt_hashes(as_tokens(tokens), FAMILY, Namespace())


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


def test_a_block_whose_parent_comes_later_is_adopted_then_and_so_are_those_behind_it() -> None:
    """A filter that joins late hears of the middle of a prompt first."""
    index = index_of("a")
    index.apply("a", store([3, 4], [5, 6, 7, 8], parent=2))
    index.apply("a", store([5], [9, 9], parent=4))
    assert (index.orphans("a"), index.runs(prompt(1, 2, 3, 4, 5, 6))) == (3, {"a": 0})
    index.apply("a", store([1, 2], [1, 2, 3, 4]))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, 9)) == {"a": 5}
    assert (index.orphans("a"), index.adopted) == (0, 3)
    index.apply("a", removal(4))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6, 7, 8, 9, 9)) == {"a": 3}


def test_an_orphan_that_was_removed_is_not_adopted_but_those_behind_it_are() -> None:
    index = index_of("a")
    index.apply("a", store([2, 3], [3, 4, 5, 6], parent=1))
    index.apply("a", store([4], [7, 8], parent=3))
    index.apply("a", removal(2))
    assert index.skipped == {"unknown_parent": 2}
    index.apply("a", store([1], [1, 2]))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6, 7, 8)) == {"a": 1}
    index.apply("a", store([2], [3, 4], parent=1))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6, 7, 8)) == {"a": 4}


def test_orphans_behind_one_that_was_removed_are_adopted_whoever_takes_its_place_in_the_table() -> None:
    index = CacheIndex(hasher(), FAMILY)
    index.add("w")
    removed = 100
    beside = removed + index._prime  # wants the same slot
    for name, parent, tokens in [(3, removed, [5, 6]), (removed, 1, [3, 4]), (beside, 1, [7, 8])]:
        index.apply("w", store([name], tokens, parent))
    index.apply("w", removal(removed))
    index.apply("w", store([1], [1, 2]))
    assert (index.blocks("w"), index.orphans("w")) == (3, 0)


def test_orphans_are_bounded_and_the_longest_parked_go_first() -> None:
    index = index_of("a")
    for number in range(3_000):
        first = 10 * number + 1
        index.apply("a", store(list(range(first + 1, first + 9)), [5] * 16, parent=first))
    assert index.orphans("a") <= 16_384
    assert index.skipped["orphans_dropped"] == 24_000 - index.orphans("a")
    index.apply("a", store([1], [1, 2]))
    assert index.runs(prompt(1, 2, *[5] * 16)) == {"a": 1}
    index.apply("a", store([10 * 2_999 + 1], [3, 4]))
    assert index.runs(prompt(3, 4, *[5] * 16)) == {"a": 9}
    index.clear("a")
    assert index.orphans("a") == 0


def kept_runs(index: CacheIndex, tier: Tier = Tier.DEVICE) -> list[cache_index._Orphans]:
    """Those that wait for their parent, with all that is kept for the sake of their places."""
    holder = index._views["w"].own[tier]
    runs = [run for beside in holder.orphans.values() for run in beside]
    assert holder.parked == sum(len(run.hashes) for run in runs) <= 16_384
    assert {run for alike in holder.orphan_at.values() for run in alike} <= set(runs)
    return runs


def test_of_blocks_by_one_name_under_many_unknown_parents_only_the_newest_wait() -> None:
    index = index_of("w")
    for parent in range(10, 400):
        index.apply("w", store([1, 2], [5, 5, 6, 6], parent))
        index.apply("w", store([2], [7, 7], 1000 + parent))
    assert len(kept_runs(index)) <= 2 * 64
    assert index.orphans("w") == 2
    assert index.skipped["orphans_dropped"] == 2 * 390 + 390 - sum(len(run.hashes) for run in kept_runs(index))
    index.apply("w", store([399], [1, 2]))
    assert index.runs(prompt(1, 2, 5, 5, 6, 6)) == {"w": 3}
    for _ in range(400):
        index.apply("w", removal(1, 2))
    assert index.orphans("w") == 0


@pytest.mark.parametrize("blocks", [1, 3, 500])
@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_orphans_that_are_removed_again_and_again_do_not_pile_up(blocks: int, tier: Tier) -> None:
    index = index_of("w")
    for number in range(60_000 // blocks):
        names = [10 + 1000 * (number % 7) + at for at in range(blocks)]
        index.apply("w", store(names, [5] * 2 * blocks, 100_000 + number, tier=tier))
        index.apply("w", removal(*names, tier=tier))
        if number % 500 == 0:
            kept_runs(index, tier)
    assert index.orphans("w") == 0
    assert len(kept_runs(index, tier)) <= 16_384 // blocks
    assert +index.skipped == {"unknown_parent": 60_000 // blocks}


@given(
    events=st.lists(
        st.tuples(st.integers(0, 30), st.lists(st.integers(0, 9), min_size=1, max_size=4), st.booleans()), max_size=60
    )
)
@settings(max_examples=200, deadline=None)
def test_whatever_waits_and_goes_what_is_kept_is_what_is_counted(events: list[tuple[int, list[int], bool]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_index, "_PARKED_AT_MOST", 12)
        patch.setattr(cache_index, "_PARKED_ALIKE", 2)
        index = index_of("w")
        index.apply("w", store([500], [1, 1]))
        for parent, names, is_removed in events:
            event = removal(*names) if is_removed else store(names, [5] * 2 * len(names), 100 + parent)
            index.apply("w", event)
            runs = kept_runs(index)
            assert sum(len(run.hashes) for run in runs) <= 12
            assert max(sum(name in run.hashes and name not in run.gone for run in runs) for name in names) <= 2
            assert index.orphans("w") == len({name for run in runs for name in run.hashes if name not in run.gone})


def test_tiers_follow_one_another_and_a_hole_in_all_of_them_ends_the_run() -> None:
    index = index_of("a", "b")
    tokens = list(range(16))
    index.apply("a", store([1, 2, 3], tokens[:6]))
    index.apply("a", store([11, 12, 13, 14, 15], tokens[:10], tier=Tier.HOST))
    index.apply("a", store([16], tokens[10:12], parent=15, tier=Tier.STORAGE))
    index.apply("b", store([18], tokens[14:], parent=None, tier=Tier.HOST))
    assert index.match(prompt(*tokens)) == {"a": TieredRun(3, 2, 1), "b": TieredRun(0, 0, 0)}
    index.apply("a", removal(3))
    assert index.match(prompt(*tokens))["a"] == TieredRun(2, 3, 1)
    index.apply("a", removal(14, tier=Tier.HOST))
    assert index.match(prompt(*tokens))["a"] == TieredRun(2, 1, 0)
    assert index.runs(prompt(*tokens))["a"] == 2


def test_all_blocks_cleared_empties_the_tiers_that_the_engine_empties() -> None:
    index = index_of()
    index.add("vllm", cleared=[Tier.DEVICE])
    index.add("sglang", cleared=[Tier.DEVICE, Tier.HOST])
    for worker in ("vllm", "sglang"):
        for tier in Tier:
            index.apply(worker, store([1], [1, 2], tier=tier))
        index.apply(worker, Cleared())
    assert [index.blocks("vllm", tier) for tier in Tier] == [0, 1, 1]
    assert [index.blocks("sglang", tier) for tier in Tier] == [0, 0, 1]


def test_a_name_without_tokens_stands_for_what_the_device_called_by_it_even_after_it_is_gone_there() -> None:
    index = index_of("a")
    index.apply("a", store([1, 2], [1, 2, 3, 4]))
    index.apply("a", Named((1,), Tier.HOST))
    index.apply("a", removal(1, 2))
    index.apply("a", Named((2, 99), Tier.HOST))
    assert index.match(prompt(1, 2, 3, 4))["a"] == TieredRun(0, 2, 0)
    assert index.skipped == {"unknown_name": 1}


def test_a_chunk_of_several_blocks_is_held_whole_and_loaded_whole() -> None:
    """LMCache's chunks of 256 tokens beside blocks of 16; here of four blocks of two."""
    index = index_of("a")
    tokens = list(range(24))
    index.apply("a", store([101, 102], tokens[:16], tier=Tier.HOST, block_size=8))
    index.apply("a", store([103], tokens[16:], parent=102, tier=Tier.HOST, block_size=8))
    assert index.blocks("a", Tier.HOST) == 12
    assert index.match(prompt(*tokens))["a"] == TieredRun(0, 12, 0)
    # A prompt that ends inside a chunk loads none of it.
    assert index.match(prompt(*tokens[:22]))["a"] == TieredRun(0, 8, 0)
    index.apply("a", store([1], tokens[:2]))
    assert index.match(prompt(*tokens[:22]))["a"] == TieredRun(1, 7, 0)
    index.apply("a", removal(102, tier=Tier.HOST))
    assert index.match(prompt(*tokens))["a"] == TieredRun(1, 3, 0)
    index.apply("a", removal(101, 103, tier=Tier.HOST))
    assert (index.blocks("a", Tier.HOST), index.skipped) == (0, {})


def test_a_chunk_stored_twice_stays_whole_until_its_second_removal() -> None:
    index = index_of("a")
    for _ in range(2):
        index.apply("a", store([101], list(range(8)), tier=Tier.HOST, block_size=8))
    index.apply("a", removal(101, tier=Tier.HOST))
    assert index.match(prompt(*range(8)))["a"] == TieredRun(0, 4, 0)
    index.apply("a", removal(101, tier=Tier.HOST))
    assert (len(index), index.skipped) == (0, {})


def test_a_chunk_whose_parent_comes_later_is_split_then() -> None:
    index = index_of("a")
    index.apply("a", store([102], list(range(8, 16)), parent=101, tier=Tier.HOST, block_size=8))
    index.apply("a", store([101], list(range(8)), tier=Tier.HOST, block_size=8))
    assert index.match(prompt(*range(16)))["a"] == TieredRun(0, 8, 0)
    index.apply("a", removal(102, tier=Tier.HOST))
    assert index.match(prompt(*range(16)))["a"] == TieredRun(0, 4, 0)


def test_a_shared_store_is_credited_to_all_who_read_it_and_outlives_any_one_of_them() -> None:
    index = index_of("alone")
    stores = {Tier.HOST: "lmcache"}
    index.add("a", stores=stores)
    index.add("b", stores=stores)
    # Every engine announces what the store has, and what it evicts: it is one copy all the same.
    for worker in ("a", "b"):
        index.apply(worker, store([1, 2], [1, 2, 3, 4], tier=Tier.HOST))
    assert index.match(prompt(1, 2, 3, 4)) == {"alone": TieredRun(), "a": TieredRun(0, 2), "b": TieredRun(0, 2)}
    index.apply("b", store([7], [1, 2]))
    assert index.match(prompt(1, 2, 3, 4))["b"] == TieredRun(1, 1)
    index.apply("a", Cleared())
    index.clear("a")
    index.remove("a")
    assert index.match(prompt(1, 2, 3, 4))["b"] == TieredRun(1, 1)
    index.add("c", stores=stores)
    assert index.match(prompt(1, 2, 3, 4))["c"] == TieredRun(0, 2)
    for worker in ("b", "c"):
        index.apply(worker, removal(2, tier=Tier.HOST))
    assert (index.match(prompt(1, 2, 3, 4))["c"], index.skipped) == (TieredRun(0, 1), {})
    index.remove("b")
    index.remove("c")
    assert len(index) == 0
    index.add("d", stores=stores)
    assert index.match(prompt(1, 2))["d"] == TieredRun()


def test_a_device_is_never_shared() -> None:
    with pytest.raises(ValueError, match="worker 'a': a device's cache is never shared"):
        index_of().add("a", stores={Tier.DEVICE: "x"})


def test_look_ahead_tokens_are_part_of_a_blocks_identity() -> None:
    """vLLM 0.33 with EAGLE, and SGLang's pairs of neighbours: a block hits only if what follows it is the same."""
    family = HashFamily(2, lookahead=1)
    index, own = CacheIndex(hasher(), family), hasher()
    index.add("a")
    index.apply("a", store([1, 2], [1, 2, 3, 4], ahead=[[3], [5]]))
    index.apply("a", store([3], [5, 6], parent=2, ahead=[[7]]))

    def run(*tokens: int) -> int:
        return index.runs(own.prompt_hashes(as_tokens(tokens), family, Namespace()))["a"]

    assert [run(1, 2), run(1, 2, 3), run(1, 2, 9), run(1, 2, 3, 4), run(1, 2, 3, 4, 5)] == [0, 1, 0, 1, 2]
    assert [run(1, 2, 3, 4, 5, 6, 7), run(1, 2, 3, 4, 5, 6, 8), run(1, 2, 3, 4, 6, 6, 7)] == [3, 2, 1]
    index.apply("a", store([4], [1, 2]))
    assert index.skipped == {"lookahead": 1}


def test_other_block_sizes_are_counted_and_held_against_nobody() -> None:
    index = index_of("a")
    index.apply("a", store([1], [1, 2, 3, 4], block_size=4))
    index.apply("a", store([1], [1, 2, 3], block_size=3, tier=Tier.HOST))
    index.apply("a", store([1], [1], block_size=1, tier=Tier.HOST))
    assert (len(index), index.skipped) == (0, {"block_size": 3})


def test_of_several_groups_the_first_is_followed() -> None:
    index = index_of("a")
    index.apply("a", store([1, 2], [1, 2, 3, 4], group=1))
    index.apply("a", store([1, 2], [1, 2, 3, 4], group=2))
    index.apply("a", removal(1, 2, group=0))
    index.apply("a", removal(1, 2, group=2))
    assert index.runs(prompt(1, 2, 3, 4)) == {"a": 2}
    assert index.skipped == {"other_group": 1 + 2 + 2}
    index.apply("a", removal(2, group=1))
    index.apply("a", removal(1))
    assert len(index) == 0


def test_removals_of_a_group_that_was_never_taken_in_touch_nothing() -> None:
    index = index_of("a")
    index.apply("a", store([1, 2], [1, 2, 3, 4]))
    index.apply("a", removal(1, 2, group=0))
    assert index.runs(prompt(1, 2, 3, 4)) == {"a": 2}
    assert index.skipped == {"other_group": 2}


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


@pytest.mark.parametrize("name", [0, 1, 2**64 - 1])
def test_what_is_shed_goes_with_all_its_copies(name: int) -> None:
    index = index_of()
    index.add("a", 1)
    for _ in range(2):
        index.apply("a", store([name], [1, 2]))
    index.apply("a", store([5], [3, 4]))
    index.apply("a", store([name], [1, 2]))
    index.apply("a", removal(name))
    assert index.blocks("a") == 0


def test_every_tier_has_its_own_cap_which_follows_the_devices_where_nobody_tells() -> None:
    caps = TierCaps(10)
    assert [caps.of(tier) for tier in Tier] == [10, 80, 320]
    assert [TierCaps(10, 5, 6).of(tier) for tier in Tier] == [10, 5, 6]
    assert TierCaps().of(Tier.DEVICE) is None
    assert TierCaps().of(Tier.STORAGE) == 1 << 22
    index = index_of()
    index.add("a", TierCaps(None, host=640))
    for first in range(0, 6_400, 32):
        index.apply(
            "a", store(list(range(first + 1, first + 33)), list(range(2 * first, 2 * first + 64)), tier=Tier.HOST)
        )
    # A store that never tells what it evicts is taken to evict the oldest.
    assert 600 <= index.blocks("a", Tier.HOST) <= 640
    assert index.match(prompt(*range(2 * 6_368, 2 * 6_400)))["a"] == TieredRun(0, 32)


def contents_of(index: CacheIndex, worker: str) -> dict[str, object]:
    """All that an index knows of a worker, but for the order in which it came to know it."""
    told: dict[str, object] = {"orphans": index.orphans(worker), "skipped": +index.skipped, "groups": {}}
    view = index._views[worker]
    told["groups"] = dict(view.groups)
    for tier, holder in view.own.items():
        slots = holder.names.live_slots()
        mask = np.uint64(1 << (holder.bit & 63))
        held = index._holders.live_slots()
        held = held[index._holders.columns[holder.bit >> 6][held] & mask != 0]
        told[tier.value] = {
            "names": dict(zip(holder.names.keys_at(slots), holder.names.ours[slots].tolist(), strict=True)),
            "copies": holder.more_copies,
            "more names": holder.more_names,
            "held": holder.held,
            "blocks": set(index._holders.keys_at(held)),
        }
    return told


# Names that are few, so that they are stored twice, removed, stored with other content, and gone on from, known or not.
few_names = st.integers(0, 6)
small_stores = st.builds(
    lambda names, parent, content, lora, salted, tier, group: store(
        names,
        [token for name in names for token in (name if content is None else content, 0)],
        parent,
        lora_name=lora,
        extra_keys=(("salt",), *[()] * (len(names) - 1)) if salted else None,
        tier=tier,
        group=group,
    ),
    st.lists(few_names, min_size=1, max_size=5),
    st.none() | few_names,
    st.none() | st.none() | st.integers(0, 3),
    st.none() | st.none() | st.just("a"),
    st.booleans(),
    st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
    st.sampled_from([None, None, None, 0, 1]),
)
small_removals = st.builds(
    lambda names, tier, group: removal(*names, tier=tier, group=group),
    st.lists(few_names, min_size=1, max_size=4),
    st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST]),
    st.sampled_from([None, None, None, 0, 1]),
)
cleared = st.just(Cleared())
others = st.builds(lambda names: Named(tuple(names), Tier.HOST), st.lists(few_names, min_size=1, max_size=3))
small_events = st.integers(0, 20).flatmap(
    lambda kind: small_stores if kind < 12 else small_removals if kind < 19 else others if kind < 20 else cleared
)


# As many in a row as make a bundle.
plain_stores = st.builds(
    lambda names, parent: store(names, [token for name in names for token in (name, 0)], parent),
    st.lists(st.integers(1, 9), min_size=1, max_size=2),
    st.none() | st.integers(1, 9),
)
plain_removals = st.builds(lambda name: removal(name), st.integers(1, 9))
mostly_plain = st.integers(0, 12).flatmap(
    lambda kind: plain_stores if kind < 8 else plain_removals if kind < 12 else small_events
)


def wire(event: Stored | Removed | Named | Cleared) -> dict[str, object]:
    """As an engine publishes it."""
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    kind = "BlockRemoved" if isinstance(event, Removed) else "BlockStored"
    medium = "GPU" if event.tier is Tier.DEVICE else "CPU"
    told: dict[str, object] = {
        "type": kind,
        "block_hashes": list(event.hashes),
        "medium": medium,
        "group_idx": event.group,
    }
    if isinstance(event, Named):
        told |= {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    elif isinstance(event, Stored):
        adapter = () if event.lora_name is None else (event.lora_name,)
        keys = event.extra_keys or ((),) * len(event.hashes)
        told |= {
            "parent_block_hash": event.parent,
            "token_ids": event.tokens.tolist(),
            "block_size": event.block_size,
            "lora_name": event.lora_name,
            "extra_keys": [[*adapter, *entry] or None for entry in keys],
        }
    return told


_TWICE_REMOVED = removal(0, tier=Tier.DEVICE, group=1)


@settings(max_examples=400, deadline=None)
@example([removal(1), store([1], [1, 0]), removal(1), _TWICE_REMOVED, _TWICE_REMOVED], 1, 4, 3, 0)
@given(
    st.lists(small_events | mostly_plain, min_size=4, max_size=30) | st.lists(mostly_plain, min_size=4, max_size=30),
    st.sampled_from([1, 65]),
    st.integers(4, 30),
    st.sampled_from([3, 192]),
    st.sampled_from([0, 1024]),
)
def test_an_index_cannot_tell_bundles_from_one_event_after_the_other(
    events: list[Stored | Removed | Named | Cleared], bits: int, most: int, many: int, recent: int
) -> None:
    payload = msgspec.msgpack.encode([0.0, [wire(event) for event in events], 0])
    one_by_one, bundled = CacheIndex(hasher(), FAMILY), CacheIndex(hasher(), FAMILY)
    for index in (one_by_one, bundled):
        for number in range(bits):
            index.add(str(number))
            index.apply(str(number), store([100 + number], [number, number], group=0))
    worker = str(bits - 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_index, "_MANY", many)
        patch.setattr(cache_index, "_RECENT", recent)
        told = [(event, one_by_one.apply(worker, event)) for event in decode_batch(payload).events]
        firsts: list[int | None] = []
        for piece in decode_pieces(payload, most):
            for event in piece.events:
                if isinstance(event, Bundle):
                    firsts += bundled.take(worker, event)
                else:
                    first = bundled.apply(worker, event)
                    firsts += [first] if isinstance(event, Stored) else []
    assert firsts == [first for event, first in told if isinstance(event, Stored)]
    assert contents_of(bundled, worker) == contents_of(one_by_one, worker)
    assert len(bundled) == len(one_by_one)


def bundle_of(*runs: Stored) -> Bundle:
    (batch,) = decode_pieces(msgspec.msgpack.encode([0.0, [wire(run) for run in runs], 0]), 100)
    (bundle,) = batch.events
    assert isinstance(bundle, Bundle)
    return bundle


def test_decoding_goes_on_from_what_a_name_was_last_said_to_be() -> None:
    index = index_of("a")
    index.apply("a", bundle_of(*[store([number], [number, number]) for number in (1, 2, 3, 4)]))
    index.apply("a", removal(1, 2))
    index.apply("a", store([1], [8, 8]))
    index.apply("a", bundle_of(*[store([10 + number], [9, 9], parent=number) for number in (1, 2, 3, 4)]))
    assert [index.runs(prompt(*tokens))["a"] for tokens in ((8, 8, 9, 9), (1, 1, 9, 9), (3, 3, 9, 9))] == [2, 0, 2]


def test_what_decoding_goes_on_from_is_kept_at_hand_for_so_many_blocks_only() -> None:
    index = index_of("a")
    for first in range(1, 20_001, 64):
        names = range(first, first + 64)
        index.apply("a", bundle_of(*[store([name], [name, name], parent=max(0, name - 64) or None) for name in names]))
    (holder,) = index._views["a"].own.values()
    assert len(holder.recent) <= cache_index._RECENT + 64
    assert index.blocks("a") == 20_032
    assert not index.skipped


def test_the_first_bundle_of_an_engine_with_groups_says_which_one_is_followed() -> None:
    index = index_of("a")
    runs = [wire(store([number], [number, number], group=1)) for number in range(1, 6)]
    payload = msgspec.msgpack.encode([0.0, [*runs, wire(removal(99, group=1))], 0])
    (batch,) = decode_pieces(payload, 100)
    (bundle,) = batch.events
    assert isinstance(bundle, Bundle)
    index.apply("a", bundle)
    assert (index.blocks("a"), +index.skipped) == (5, {"unknown_removal": 1})
    index.apply("a", store([7], [7, 7], group=0))
    assert (index.blocks("a"), index.skipped["other_group"]) == (5, 1)


def test_a_bundle_of_other_blocks_than_the_index_has_is_counted_run_by_run() -> None:
    index = index_of("a")
    runs = [store([number], [number] * 4, block_size=4) for number in range(1, 6)]
    payload = msgspec.msgpack.encode([0.0, [wire(event) for event in runs], 0])
    (batch,) = decode_pieces(payload, 100)
    index.apply("a", batch.events[0])
    assert (index.blocks("a"), index.skipped) == (0, {"block_size": 5})


def test_births_are_renumbered_before_they_overflow() -> None:
    index = index_of()
    index.add("a", 4)
    index.apply("a", store([1, 2], [1, 2, 3, 4]))
    index._views["a"].own[Tier.DEVICE].clock = (1 << 32) - 3
    for number in (3, 4, 5, 6):
        index.apply("a", store([number], [number, number]))
    assert index.skipped == {"over_capacity": 2}
    assert [index.runs(prompt(number, number))["a"] for number in (3, 4, 5, 6)] == [1, 1, 1, 1]


def test_a_workers_place_is_free_for_the_next_and_what_it_held_is_gone() -> None:
    index = index_of("a", "b")
    index.apply("a", store([1], [1, 2]))
    index.remove("a")
    index.add("c", None)
    assert index.runs(prompt(1, 2)) == {"b": 0, "c": 0}
    with pytest.raises(ValueError, match="'c' is already"):
        index.add("c", None)


def test_thousands_of_restarts_leave_nothing_behind() -> None:
    index = index_of("stays")
    index.apply("stays", store([1, 2], [1, 2, 3, 4]))
    for number in range(2_000):
        worker = f"w{number % 5}"
        if number >= 5:
            index.remove(worker)
        index.add(worker)
        index.apply(worker, store([1, 2, 3], [1, 2, 3, 4, number, 6]))
    assert len(index) <= 2 + 5
    assert len(index._bits) <= 64
    assert index._holders.slots <= 8_192
    assert index.runs(prompt(1, 2, 3, 4))["stays"] == 2


def test_more_workers_than_bits_in_a_machine_word() -> None:
    names = [f"w{number}" for number in range(130)]
    index = index_of(*names)
    for number, name in enumerate(names):
        index.apply(name, store([1, 2, 3][: number % 4], [1, 2, 3, 4, 5, 6][: number % 4 * 2]))
    assert index.runs(prompt(1, 2, 3, 4, 5, 6)) == {name: number % 4 for number, name in enumerate(names)}


def fill(index: CacheIndex, worker: str, blocks: int, seed: int, hash_seed: int) -> list[Stored]:
    """Prompts of 128 blocks, stored in chunks of 32 as an engine's steps would."""
    size = index.family.block_size
    tokens = np.random.default_rng(seed).integers(0, 152_000, blocks * size).astype(np.uint32)
    hashes = np.random.default_rng(hash_seed).integers(0, 2**64, blocks, dtype=np.uint64).tolist()
    events = []
    for first in range(0, blocks, 32):
        chunk = tuple(hashes[first : first + 32])
        parent = hashes[first - 1] if first % 128 else None
        piece = tokens[first * size : (first + len(chunk)) * size]
        events.append(Stored(chunk, parent, piece, size, Tier.DEVICE, None, None))
    return events


@pytest.mark.parametrize(("shared", "budget"), [(False, 120), (True, 80)], ids=["disjoint", "shared"])
def test_a_block_costs_no_more_than_its_budget(shared: bool, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column, "_addresses_are_free", lambda: False)  # or nobody counts what is taken
    workers, blocks = 8, 16_000
    index = CacheIndex(hasher(), HashFamily(16))
    for worker in range(workers):
        index.add(str(worker), None)
    events = [fill(index, str(worker), blocks, 0 if shared else worker, worker + 100) for worker in range(workers)]
    tracemalloc.start()
    try:
        for worker in range(workers):
            for event in events[worker]:
                index.apply(str(worker), event)
        traced, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(index.blocks(str(worker)) for worker in range(workers)) == workers * blocks
    assert len(index) == (blocks if shared else workers * blocks)
    assert traced / (workers * blocks) < budget
    assert index.bytes == pytest.approx(traced, rel=0.1)


def test_fifty_thousand_blocks_are_matched_against_64_workers_in_a_fraction_of_a_second() -> None:
    index = CacheIndex(hasher(), HashFamily(16))
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
    first_prompt = own.prompt_hashes(np.concatenate(parts), HashFamily(16), Namespace())
    assert index.runs(first_prompt) == {str(worker): 128 if worker else 0 for worker in range(64)}

    # One chain of 50,000 blocks that everybody holds a different part of.
    long = np.arange(800_000, dtype=np.uint32)
    for worker in range(64):
        index.clear(str(worker))
        held = 50_000 * (worker + 1) // 64
        hashes = tuple(range(held))
        index.apply(str(worker), Stored(hashes, None, long[: held * 16], 16, Tier.DEVICE, None, None))
    hashes_of_long = own.prompt_hashes(long, HashFamily(16), Namespace())
    started_s = time.perf_counter()
    runs = index.runs(hashes_of_long)
    took_s = time.perf_counter() - started_s
    assert runs == {str(worker): 50_000 * (worker + 1) // 64 for worker in range(64)}
    assert took_s < 0.5
