"""Long events cut short say the same as before."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from predictor.cache_index import CacheIndex
from predictor.event_slices import groups_of, slices
from predictor.kv_events import Cleared, KvEvent, Removed, Stored, Tier
from predictor.prompt import BlockHasher, HashFamily, as_tokens

SIZE = 2


@st.composite
def runs(draw: st.DrawFn) -> KvEvent:
    first, blocks = draw(st.integers(0, 5)), draw(st.integers(1, 30))
    hashes = tuple(range(first + 1, first + blocks + 1))
    kind = draw(st.sampled_from(["stored", "salted", "removed", "cleared"]))
    if kind == "cleared":
        return Cleared()
    if kind == "removed":
        return Removed(tuple(range(first + 1, 41)), Tier.DEVICE)  # as engines do, the children with their parents
    keys = None
    if kind == "salted":  # other content has other names
        first, hashes, keys = 0, tuple(name + 100 for name in hashes), (("salt",), *[()] * (blocks - 1))
    tokens = as_tokens([number for number in hashes for _ in range(SIZE)])
    return Stored(hashes, first or None, tokens, SIZE, Tier.DEVICE, None, keys)


def held(events: Sequence[KvEvent]) -> tuple[dict[int, int], dict[str, int]]:
    index = CacheIndex(BlockHasher(np.random.default_rng(1)), HashFamily(SIZE))
    index.add("w", None)
    for event in events:
        index.apply("w", event)
    asked = BlockHasher(np.random.default_rng(1)).chain(
        BlockHasher(np.random.default_rng(1)).root, as_tokens([n for n in range(1, 40) for _ in range(SIZE)]), SIZE
    )
    return {length: index.match(asked[:length])["w"].device for length in range(1, 40)}, {"w": index.blocks("w")}


@given(st.lists(runs(), max_size=8), st.integers(1, 12))
def test_an_index_cannot_tell_slices_from_whole_events(events: list[KvEvent], most: int) -> None:
    cut = list(slices(events, most))
    assert held(cut) == held(events)
    assert all(len(event.hashes) <= most for event in cut if not isinstance(event, Cleared))


@given(st.lists(runs(), max_size=8), st.integers(1, 12))
def test_groups_are_the_events_in_their_order(events: list[KvEvent], most: int) -> None:
    cut = list(slices(events, most))
    groups = list(groups_of(cut, most))
    assert [event for group in groups for event in group] == cut
    sizes = [[1 if isinstance(event, Cleared) else len(event.hashes) for event in group] for group in groups]
    assert all(0 < sum(size) <= most for size in sizes)


def test_short_events_are_passed_on_as_they_are() -> None:
    events: list[KvEvent] = [Removed((1, 2), Tier.HOST, group=3), Cleared()]
    assert all(one is other for one, other in zip(slices(events, 2), events, strict=True))
    assert list(slices(events[:1], 1)) == [Removed((1,), Tier.HOST, 3), Removed((2,), Tier.HOST, 3)]
