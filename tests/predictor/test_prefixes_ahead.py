"""What requests in flight will have computed is as good as cached for who comes after them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from predictor.admission import RetryPolicy
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.prefixes_ahead import PrefixesAhead, Share
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Namespace, Prompt, as_tokens

PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=6)


def chained(blocks: list[int]) -> BlockHashes:
    """Stand-ins for chained hashes: equal exactly where everything up to there is."""
    return np.array([hash(tuple(blocks[: end + 1])) % 2**64 for end in range(len(blocks))], np.uint64)


def shared_beginning(left: list[int], right: list[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@given(PROMPTS, st.lists(st.integers(0, 1), max_size=6), st.integers(0, 3))
def test_the_longest_shared_beginning_counts(ahead: list[list[int]], newcomer: list[int], known: int) -> None:
    prefixes = PrefixesAhead()
    for number, blocks in enumerate(ahead):
        prefixes.add(str(number), chained(blocks))
    shared = [shared_beginning(newcomer, blocks) for blocks in ahead]
    assert prefixes.run(chained(newcomer), known) == max([known, *shared])
    for number in range(len(ahead)):
        prefixes.remove(str(number))
    assert len(prefixes) == 0
    assert prefixes.run(chained(newcomer), known) == known


@given(PROMPTS, st.lists(st.integers(0, 1), max_size=6))
def test_the_nearest_come_first(ahead: list[list[int]], newcomer: list[int]) -> None:
    prefixes = PrefixesAhead()
    for number, blocks in enumerate(ahead):
        prefixes.add(str(number), chained(blocks))
    shared = {str(number): shared_beginning(newcomer, blocks) for number, blocks in enumerate(ahead)}
    nearest = list(prefixes.nearest(chained(newcomer)))
    assert dict(nearest) == {name: blocks for name, blocks in shared.items() if blocks}
    assert [blocks for _, blocks in nearest] == sorted((blocks for blocks in shared.values() if blocks), reverse=True)


@given(st.data(), PROMPTS)
def test_blocks_that_one_who_ends_later_holds_as_well_are_known(data: st.DataObject, ahead: list[list[int]]) -> None:
    prefixes = PrefixesAhead()
    gone = data.draw(st.sets(st.integers(0, len(ahead) - 1)))
    for number, blocks in enumerate(ahead):
        prefixes.add(str(number), chained(blocks))
    for number in gone:
        prefixes.remove(str(number))
    left = [number for number in range(len(ahead)) if number not in gone]
    order = dict(zip(left, data.draw(st.permutations(range(len(left)))), strict=True))
    shares = prefixes.shares({str(number): float(end) for number, end in order.items()})
    for number in left:
        common = {other: shared_beginning(ahead[number], ahead[other]) for other in left if other != number}
        later = [blocks for other, blocks in common.items() if order[other] > order[number]]
        found = shares.get(str(number), Share(0, 0))
        assert found == Share(max(common.values(), default=0), max(later, default=0))


def test_what_the_later_of_two_does_not_find_cached_is_not_shared() -> None:
    prefixes = PrefixesAhead()
    prefixes.add("first", chained([0, 1, 2, 3]))
    prefixes.add("second", chained([0, 1, 2, 4]), reused=1)
    assert prefixes.shares({"first": 1.0, "second": 2.0}) == {"first": Share(1, 1), "second": Share(1, 0)}


def test_one_that_was_never_added_can_be_removed() -> None:
    prefixes = PrefixesAhead()
    prefixes.add("short", chained([]))
    prefixes.remove("short")
    prefixes.remove("unknown")
    assert len(prefixes) == 0


def test_hundreds_of_copies_of_one_prompt_at_once_are_not_refused() -> None:
    """An engine computes it once; each copy priced in full would make a queue of a minute, where there is none."""
    rng = np.random.default_rng(5)
    hasher = BlockHasher(rng)
    fleet = Fleet([PoolPolicy("m", retry=RetryPolicy())], hasher, rng)
    fleet.join("m", WorkerSpec("w", "10.0.0.1:80"))
    now_s = 0.0
    for number, tokens in enumerate((100, 200, 400, 800, 1600, 3200, 150, 2000)):
        taught = fleet.place("m", Prompt(tokens, True), Wish(f"t{number}", now_s), now_s)
        assert isinstance(taught, Grant)
        now_s += 0.01 + tokens * 1e-3
        fleet.first_token(taught.ticket.id, None, now_s)
        fleet.finish(taught.ticket.id, Usage(tokens, 0, 1), now_s)
    ids = as_tokens(range(855))
    family = HashFamily(16)
    prompt = Prompt(len(ids), True, {family: hasher.prompt_hashes(ids, family, Namespace())})
    decisions = [fleet.place("m", prompt, Wish(f"c{n}", now_s, max_queue_wait_s=5.0), now_s) for n in range(200)]
    assert all(isinstance(decision, Grant) for decision in decisions)
    first, *others = [decision.ticket.forecast for decision in decisions if isinstance(decision, Grant)]
    assert first.cached_tokens == 0
    assert {forecast.cached_tokens for forecast in others} == {848}
    assert others[-1].ttft_s < 5.0
    for number in range(200):
        fleet.finish(f"c{number}", Usage(), now_s)
    after = fleet.place("m", prompt, Wish("after", now_s), now_s)
    assert isinstance(after, Grant)
    assert after.ticket.forecast.cached_tokens == 0


@given(st.data(), PROMPTS)
def test_who_is_credited_anew_shares_as_if_that_had_been_known_when_it_came(
    data: st.DataObject, ahead: list[list[int]]
) -> None:
    known, told_later = PrefixesAhead(), PrefixesAhead()
    for number, blocks in enumerate(ahead):
        reused = data.draw(st.integers(0, len(blocks)))
        known.add(str(number), chained(blocks), reused)
        told_later.add(str(number), chained(blocks), data.draw(st.integers(0, len(blocks))))
        if data.draw(st.booleans()):
            told_later.credit(str(number), reused)
        else:
            told_later.remove(str(number))
            told_later.add(str(number), chained(blocks), reused)
    told_later.credit("unknown", 3)
    ends = {str(number): float(end) for number, end in enumerate(data.draw(st.permutations(range(len(ahead)))))}
    assert told_later.shares(ends) == known.shares(ends)
