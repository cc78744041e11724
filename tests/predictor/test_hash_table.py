"""The tables against a plain dict: whatever is entered and let go of, one by one or by the thousand."""

import resource
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor import column, hash_table
from predictor.cache_index import CacheIndex
from predictor.hash_table import HolderTable, NameTable
from predictor.prompt import BlockHasher, HashFamily


def keys_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint64)


def enter(table: NameTable, key: int, ours: int) -> None:
    at = table.find_one(key)
    if at < 0:
        at = table.insert_one(key)
    table.views[0][at], table.views[1][at] = ours, 1


# Keys that differ in their high bits only, in their low bits only, and the one that marks an empty slot.
KEYS = st.integers(0, 40) | st.integers(0, 40).map(lambda number: number << 58)
KEYS |= st.integers(0, 2**64 - 1).filter(lambda key: key != hash_table._STAND_IN)  # for which key 0 passes
STEPS = st.lists(
    st.tuples(st.just("one"), KEYS, st.integers(0, 2**64 - 1))
    | st.tuples(st.just("few"), st.lists(KEYS, unique=True, max_size=60), st.integers(0, 2**64 - 1))
    | st.tuples(st.just("many"), st.lists(KEYS, unique=True, max_size=60), st.integers(0, 2**64 - 1))
    | st.tuples(st.just("let go of few"), st.lists(KEYS, unique=True, max_size=60), st.none())
    | st.tuples(st.just("let go"), st.lists(KEYS, unique=True, max_size=60), st.none()),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_a_table_finds_what_was_entered_and_what_was_let_go_of_is_dead(steps: list[tuple[str, object, int]]) -> None:
    table, twin = NameTable(), dict[int, int]()
    for verb, told, ours in steps:
        if verb == "one":
            assert isinstance(told, int)
            enter(table, told, ours)
            twin[told] = ours
            continue
        assert isinstance(told, list)
        if verb == "few":
            assert [told[place] for place in table.enter_few(told, [ours] * len(told), 1)] == [
                key for key in told if key in twin
            ]
            twin = dict.fromkeys(told, ours) | twin
            continue
        if verb == "let go of few":
            known = [key for key in told if key in twin]
            were, others = table.let_go_of_few(told)
            assert (were, others) == ([twin.pop(key) for key in known], [key for key in told if key not in known])
            continue
        keys = np.array(told, np.uint64)
        slots = table.find(keys)
        if verb == "many":
            absent = slots < 0
            table.ours[slots[~absent]] = ours
            table.born[slots[~absent]] = 1
            table.insert(keys[absent], np.uint64(ours), np.uint32(1))
            twin |= dict.fromkeys(told, ours)
        else:
            table.born[slots[slots >= 0]] = 0
            for key in told:
                twin.pop(key, None)
        assert len(table.live_slots()) == len(twin)
    everything = np.array(list(twin), np.uint64)
    slots = table.find(everything)
    assert (slots >= 0).all()
    assert table.ours[slots].tolist() == list(twin.values())
    assert [table.find_one(key) for key in twin] == slots.tolist()
    others = [key for key in range(50) if key not in twin]
    for key, at in zip(others, table.find(np.array(others, np.uint64)).tolist(), strict=True):
        assert at == table.find_one(key)
        assert at < 0 or not table.born[at]


@pytest.fixture(params=["addresses for all", "addresses for some", "addresses are charged for"])
def addresses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a system may grant."""
    if request.param == "addresses for some":
        monkeypatch.setattr(hash_table, "_ROOM", 4 * hash_table._SEGMENT)
    elif request.param == "addresses are charged for":
        monkeypatch.setattr(column, "_addresses_are_free", lambda: False)


@pytest.mark.usefixtures("addresses")
@pytest.mark.parametrize(
    ("at_a_time", "few"), [(1, False), (7, False), (512, False), (60_000, False), (1, True), (100, True), (6_000, True)]
)
def test_a_table_grows_by_splitting_and_forgets_nothing(at_a_time: int, few: bool) -> None:
    count = 60_000 if at_a_time > 1 and not few else 6_000
    rng = np.random.default_rng(at_a_time)
    keys = np.unique(rng.integers(0, 2**64, count, dtype=np.uint64))
    rng.shuffle(keys)
    table = NameTable()
    for first in range(0, len(keys), at_a_time):
        some = keys[first : first + at_a_time]
        if few:
            assert not table.enter_few(some.tolist(), some.tolist(), 1), "all are new"
        elif at_a_time == 1:
            enter(table, int(some[0]), int(some[0]))
        else:
            table.insert(some, some, np.uint32(1))
    slots = table.find(keys)
    assert (table.keys[slots] == keys).all()
    assert (table.ours[slots] == keys).all()
    assert len(np.unique(slots)) == len(keys)
    assert (table.find(keys + np.uint64(1)) < 0).all()
    assert len(keys) / table.slots > 0.3


def test_consecutive_numbers_are_spread_as_well_as_random_ones() -> None:
    table = NameTable()
    for step in (1, 1 << 16, 1 << 32, 1 << 44):
        keys = (np.arange(1, 20_001, dtype=np.uint64) * np.uint64(step)) | np.uint64(1 << 63)
        table = NameTable()
        for first in range(0, len(keys), 500):
            table.insert(keys[first : first + 500], np.uint64(1), np.uint32(1))
        assert len(keys) / table.slots > 0.3, f"step {step}: segments fill unevenly"


def test_churn_at_one_size_does_not_make_a_table_grow() -> None:
    rng = np.random.default_rng(7)
    table = NameTable()
    held = rng.integers(0, 2**64, 20_000, dtype=np.uint64)
    table.insert(held, held, np.uint32(1))
    before = table.slots
    for _ in range(400):
        table.born[table.find(held[:500])] = 0
        fresh = rng.integers(0, 2**64, 500, dtype=np.uint64)
        table.insert(fresh, fresh, np.uint32(1))
        held = np.concatenate([held[500:], fresh])
    assert (table.ours[table.find(held)] == held).all()
    assert len(table.live_slots()) == len(held)
    assert table.slots <= 2 * before


def test_a_dead_entry_tells_what_it_stood_for_until_its_place_is_taken() -> None:
    table = NameTable()
    table.insert(keys_of(5), keys_of(50), np.uint32(1))
    table.born[table.find(keys_of(5))] = 0
    (at,) = table.find(keys_of(5)).tolist()
    assert (table.ours[at], table.live_slots().tolist()) == (50, [])


@pytest.mark.usefixtures("addresses")
def test_a_column_more_is_empty_and_what_was_there_stays() -> None:
    table = HolderTable()
    table.insert(np.arange(100, 20_000, dtype=np.uint64), np.uint64(4))
    table.insert(keys_of(1, 2, 3), np.uint64(4))
    table.add_column(np.uint64)
    table.insert(keys_of(9), np.uint64(0), np.uint64(7))
    assert [column[table.find(keys_of(1, 9))].tolist() for column in table.columns] == [[4, 0], [0, 7]]
    table.insert(np.arange(20_000, 60_000, dtype=np.uint64), np.uint64(0), np.uint64(5))
    assert [column[table.find(keys_of(1, 9, 100, 20_000))].tolist() for column in table.columns] == [
        [4, 0, 4, 0],
        [0, 7, 0, 5],
    ]
    assert len(table.live_slots()) == 4 + 59_900


def test_no_insertion_moves_more_than_what_one_event_can_split() -> None:
    """A table that copied itself to grow would stall whoever waits for the event loop."""
    rng = np.random.default_rng(3)
    table = HolderTable()
    moved: list[int] = []
    counted = {name: getattr(HolderTable, name) for name in ("_place", "_spread")}

    def count(self: HolderTable, keys: np.ndarray, *rest: object, name: str) -> object:
        moved[-1] += len(keys)
        return counted[name](self, keys, *rest)

    with pytest.MonkeyPatch.context() as patch:
        for name in counted:
            patch.setattr(hash_table.HashTable, name, partialmethod(count, name=name))
        for _ in range(600):
            moved.append(0)
            table.insert(rng.integers(1, 2**64, 512, dtype=np.uint64), np.uint64(1))
    assert max(moved) < 60_000
    assert sum(moved) < 6 * 600 * 512


@pytest.mark.parametrize("kind", [NameTable, HolderTable])
def test_a_table_that_grows_copies_no_column_and_moves_none(kind: type[NameTable] | type[HolderTable]) -> None:
    """At ten million blocks a column has 160 MB: whoever copies it, or has the system move it, holds the event loop."""
    rng = np.random.default_rng(4)
    table = kind()
    places = {at_of(one) for one in (table.keys, *table.columns)}
    for _ in range(1_000):
        table.insert(rng.integers(1, 2**64, 512, dtype=np.uint64), *[1 for _ in table.columns])
    assert table.slots > 400 * hash_table._SEGMENT
    assert {at_of(one) for one in (table.keys, *table.columns)} == places


def at_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_a_table_takes_memory_as_it_fills_and_gives_all_of_it_back() -> None:
    before = addresses_and_memory()
    table = NameTable()
    for first in range(1, 1_000_000, 4096):
        table.insert(np.arange(first, first + 4096, dtype=np.uint64), np.uint64(1), np.uint32(1))
    taken = addresses_and_memory()
    assert table.bytes * 0.9 < taken[1] - before[1] < table.bytes * 1.2
    del table
    left = addresses_and_memory()
    assert left[0] - before[0] < 16 << 20
    assert left[1] - before[1] < 16 << 20


def addresses_and_memory() -> tuple[int, int]:
    """Of this process, in bytes."""
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def test_where_addresses_are_limited_a_table_leaves_them_to_others() -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
import numpy as np
from predictor.hash_table import NameTable
tables = [NameTable() for _ in range(64)]
keys = np.arange(1, 300_001, dtype=np.uint64)
tables[0].insert(keys, keys, np.uint32(1))
assert (tables[0].ours[tables[0].find(keys)] == keys).all()
assert len(bytearray(1 << 30)) == 1 << 30
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], timeout=60)


def test_keys_that_one_segment_cannot_tell_apart_are_refused_before_memory_is() -> None:
    table = NameTable()
    keys = np.arange(1, 2_000, dtype=np.uint64) * np.uint64(table._prime)
    with pytest.raises(AssertionError, match="rest in common"):
        table.insert(keys, keys, np.uint32(1))
    assert table.bytes < 128 << 20


def test_what_keys_are_spread_by_is_as_secret_as_the_hashes() -> None:
    primes = {CacheIndex(BlockHasher(np.random.default_rng(seed)), HashFamily(16))._prime for seed in range(20)}
    assert len(primes) == 20
    for prime in primes:
        assert 1 << 29 < prime < 1 << 30
        assert all(prime % number for number in range(2, 1 << 15))
