"""Which worker gets a request."""

from collections import Counter, deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecast import Forecast
from predictor.prefill_cost import Basis
from predictor.routing import Candidate, Choice, Prefer, RoutingPolicy, Why, choose, cost_s


def candidate(
    name: str,
    wait_s: float = 0.0,
    prefill_s: float = 1.0,
    cached: int = 0,
    uncached_s: float | None = None,
    feasible: bool = True,
    learned: bool = True,
    prefilling: int = 0,
    samples: int = 0,
    share: float = 0.0,
    eviction_s: float = 0.0,
    session: bool = False,
) -> Candidate:
    basis = Basis.CURVE if learned else Basis.DEFAULT
    priced = Forecast(name, 1000, cached, 0.0, wait_s, prefill_s, 0.0, wait_s + prefill_s, basis, 0, True)
    return Candidate(
        priced,
        feasible,
        prefilling,
        learned,
        samples,
        share,
        prefill_s if uncached_s is None else uncached_s,
        eviction_s,
        session,
    )


def chosen_from(
    candidates: list[Candidate], share: float = 0.1, fallbacks: int = 2, rng: np.random.Generator | None = None
) -> Choice | None:
    policy = RoutingPolicy(learning_share=share, fallbacks=fallbacks)
    return choose(candidates, policy, None, rng or np.random.default_rng(1))


def winner(*candidates: Candidate, prefer: Prefer | None = None, seed: int = 1) -> tuple[str, Why]:
    choice = choose(candidates, RoutingPolicy(), prefer, np.random.default_rng(seed))
    assert choice is not None
    return choice.ranked[0].forecast.worker, choice.why


def test_the_lowest_predicted_ttft_wins() -> None:
    assert winner(candidate("a", 3.0), candidate("b", 1.0), candidate("c", 2.0)) == ("b", Why.FASTEST)


def test_those_that_cannot_keep_the_bound_are_out_however_fast() -> None:
    assert winner(candidate("a", 0.0, feasible=False), candidate("b", 9.0), candidate("c", 10.0))[0] == "b"
    assert chosen_from([candidate("a", feasible=False)], 0.1, 2) is None
    assert chosen_from([], 0.1, 2) is None


def test_ties_are_drawn_and_everybody_in_the_tie_is_chosen_about_as_often() -> None:
    rng = np.random.default_rng(3)
    tied = [candidate("a", 1.0), candidate("b", 1.015), candidate("c", 1.5)]
    chosen = Counter[str]()
    for _ in range(1000):
        choice = chosen_from(tied, rng=rng)
        assert choice is not None
        chosen[choice.ranked[0].forecast.worker] += 1
    assert set(chosen) == {"a", "b"}
    assert min(chosen.values()) > 420


def routed(candidates: list[Candidate], times: int = 4000) -> Counter[tuple[str, Why]]:
    rng = np.random.default_rng(5)
    counts = Counter[tuple[str, Why]]()
    for _ in range(times):
        choice = chosen_from(candidates, rng=rng)
        assert choice is not None
        counts[choice.ranked[0].forecast.worker, choice.why] += 1
    return counts


def test_who_had_nothing_for_long_is_tried_again_now_and_then() -> None:
    """It would else never be found out that it is as fast as the other."""
    counts = routed([candidate("used", share=1.0), candidate("unused", 0.8), candidate("used too", 0.9, share=0.1)])
    assert set(counts) == {("used", Why.FASTEST), ("unused", Why.REVISITED)}
    assert 0.04 < counts["unused", Why.REVISITED] / 4000 < 0.06


@pytest.mark.parametrize(
    "unused",
    [
        candidate("unused", 0.8, share=0.02),
        candidate("unused", 0.8, prefilling=1),
        candidate("unused", 1.1),  # more than twice as long
        candidate("unused", 0.8, feasible=False),
    ],
)
def test_nobody_waits_much_longer_for_that(unused: Candidate) -> None:
    assert set(routed([candidate("used", share=0.98), unused])) == {("used", Why.FASTEST)}


def test_fallbacks_are_the_next_best_and_as_many_as_wanted() -> None:
    four = [candidate(name, wait_s) for name, wait_s in (("a", 4.0), ("b", 1.0), ("c", 3.0), ("d", 2.0))]
    for wanted, names in ((0, "b"), (1, "bd"), (2, "bdc"), (9, "bdca")):
        choice = chosen_from(four, 0.1, wanted)
        assert choice is not None
        assert "".join(c.forecast.worker for c in choice.ranked) == names


def test_nobody_infeasible_is_a_fallback() -> None:
    choice = chosen_from([candidate("a"), candidate("b", feasible=False)], 0.1, 2)
    assert choice is not None
    assert [c.forecast.worker for c in choice.ranked] == ["a"]


def test_why_says_what_made_the_difference() -> None:
    assert winner(candidate("a")) == ("a", Why.ONLY)
    # a holds the prefix: without it b, with the shorter queue, would have won.
    holds = candidate("a", wait_s=1.0, prefill_s=0.1, cached=900, uncached_s=3.0)
    assert winner(holds, candidate("b", wait_s=0.5, prefill_s=3.0)) == ("a", Why.CACHE)
    # b would be faster if nobody waited there.
    assert winner(candidate("a", 0.5, 2.0), candidate("b", 9.0, 1.0)) == ("a", Why.SHORTER_QUEUE)
    assert winner(candidate("a", 0.5, 1.0), candidate("b", 0.5, 2.0)) == ("a", Why.FASTEST)
    # It holds a prefix, and would have won without it: a small one is not worth a word, a large one is.
    assert winner(candidate("a", 0.0, 0.9, 90, 1.0), candidate("b", 5.0, 1.0)) == ("a", Why.FASTEST)
    assert winner(candidate("a", 0.0, 0.1, 900, 1.0), candidate("b", 5.0, 1.0)) == ("a", Why.CACHE)
    assert winner(candidate("a"), candidate("new", 99.0, learned=False)) == ("new", Why.LEARNING)


# What others pay


def test_in_an_idle_pool_nobody_else_pays() -> None:
    holder, other = candidate("holder", 2.0, 0.1, 900, 3.0), candidate("other", 0.0, 2.0)
    assert winner(holder, other, prefer=Prefer.CACHE)[0] == "other"


@pytest.mark.parametrize(
    ("wait_s", "stays"),
    [
        # Moving costs 1.9 s of prefill: once for the caller, and once, four times or not at all for others.
        (1.8, {Prefer.LATENCY, Prefer.BALANCED, Prefer.CACHE}),
        (2.0, {Prefer.BALANCED, Prefer.CACHE}),
        (4.0, {Prefer.CACHE}),
        (9.0, {Prefer.CACHE}),
        (10.0, set()),
    ],
)
def test_a_conversation_leaves_its_history_when_waiting_costs_more_than_starting_over(
    wait_s: float, stays: set[Prefer]
) -> None:
    holder = candidate("holder", wait_s, 0.1, 900, 2.0, prefilling=3)
    other = candidate("other", 0.0, 2.0, prefilling=1)
    for prefer in Prefer:
        assert winner(holder, other, prefer=prefer)[0] == ("holder" if prefer in stays else "other")


def test_a_cache_that_has_room_is_taken_before_one_that_would_have_to_evict_what_comes_back() -> None:
    full, roomy = candidate("full", eviction_s=0.5, prefilling=1), candidate("roomy", 0.2, prefilling=1)
    assert winner(full, roomy)[0] == "roomy"
    assert winner(full, roomy, prefer=Prefer.LATENCY)[0] == "full"


def test_a_session_is_a_hint_and_no_more() -> None:
    known = candidate("known", 0.4, 1.0, session=True)
    assert winner(known, candidate("other", 0.0, 1.0)) == ("known", Why.SESSION)
    assert winner(candidate("known", 0.6, 1.0, session=True), candidate("other", 0.0, 1.0))[0] == "other"


# Workers that have not learned


def test_an_idle_learner_gets_a_request_although_learned_ones_are_said_to_be_faster() -> None:
    assert winner(candidate("a"), candidate("new", 50.0, learned=False, share=0.1))[0] == "new"


@pytest.mark.parametrize("why", ["its share is used up", "it has a prefill already"])
def test_a_learner_is_never_flooded_while_a_learned_one_can_take_the_rest(why: str) -> None:
    learner = candidate(
        "new", 0.0, 0.1, learned=False, share=0.11 if "share" in why else 0.0, prefilling=int("prefill" in why)
    )
    assert winner(candidate("a", 30.0), learner) == ("a", Why.FASTEST)


def test_a_learner_with_a_prefill_is_no_fallback_either() -> None:
    learner = candidate("new", learned=False, prefilling=1)
    choice = chosen_from([candidate("a"), learner], 0.1, 2)
    assert choice is not None
    assert len(choice.ranked) == 1


def test_an_idle_learner_takes_what_the_learned_ones_cannot_keep_the_bound_for() -> None:
    full = candidate("a", 90.0, feasible=False)
    assert winner(full, candidate("new", 3.0, learned=False, share=1.0))[0] == "new"


def test_when_nobody_has_learned_the_one_that_knows_least_is_next() -> None:
    two = [candidate("a", learned=False, samples=3), candidate("b", 50.0, learned=False, samples=2)]
    assert winner(*two) == ("b", Why.LEARNING)


def test_when_all_that_learn_are_busy_the_lowest_guess_wins() -> None:
    busy = [candidate("a", 5.0, learned=False, prefilling=2), candidate("b", 4.0, learned=False, prefilling=1)]
    assert winner(*busy)[0] == "b"


def played(
    learned: dict[str, bool], rounds: int, prefill_rounds: int, seed: int, share: float = 0.1
) -> dict[str, list[int]]:
    """When each worker was chosen, if a prefill stays for so many rounds on the worker that got it."""
    rng, recent = np.random.default_rng(seed), deque[str](maxlen=50)
    busy = {name: deque[int]() for name in learned}
    got: dict[str, list[int]] = {name: [] for name in learned}
    for at in range(rounds):
        candidates = []
        for name, knows in learned.items():
            while busy[name] and busy[name][0] <= at:
                busy[name].popleft()
            part = recent.count(name) / max(1, len(recent))
            load = len(busy[name])
            candidates.append(
                candidate(name, float(load), learned=knows, prefilling=load, samples=len(got[name]), share=part)
            )
        choice = chosen_from(candidates, share, 0, rng)
        assert choice is not None
        name = choice.ranked[0].forecast.worker
        recent.append(name)
        busy[name].append(at + prefill_rounds)
        got[name].append(at)
    return got


@given(seed=st.integers(0, 1000), prefill_rounds=st.integers(1, 12), share=st.sampled_from([0.05, 0.1, 0.2]))
def test_a_learner_is_neither_starved_nor_flooded(seed: int, prefill_rounds: int, share: float) -> None:
    got = played({"a": True, "b": True, "new": False}, 400, prefill_rounds, seed, share)["new"]
    # Never more than its share of the last fifty, and the one that crosses the line.
    for end in range(50, 400):
        assert sum(end - 50 <= at < end for at in got) <= 50 * share + 1
    # One prefill at a time.
    assert all(later - earlier >= prefill_rounds for earlier, later in pairwise(got))
    assert len(got) >= min(400 * share * 0.5, 400 / (prefill_rounds + 1) * 0.5)


def test_a_fleet_that_knows_nothing_is_learned_evenly() -> None:
    got = played(dict.fromkeys("abcd", False), 400, 4, seed=9)
    assert {len(rounds) for rounds in got.values()} == {100}


@given(
    candidates=st.lists(
        st.builds(
            candidate,
            st.uuids().map(str),
            wait_s=st.floats(0, 100),
            prefill_s=st.floats(0, 10),
            cached=st.integers(0, 999),
            uncached_s=st.floats(0, 20),
            feasible=st.booleans(),
            learned=st.booleans(),
            prefilling=st.integers(0, 3),
            samples=st.integers(0, 9),
            share=st.floats(0, 1),
            eviction_s=st.floats(0, 10),
            session=st.booleans(),
        ),
        max_size=8,
    ),
    prefer=st.none() | st.sampled_from(Prefer),
    seed=st.integers(0, 9),
)
def test_whatever_the_candidates_the_choice_is_one_of_the_open_ones_and_fallbacks_follow_in_order(
    candidates: list[Candidate], prefer: Prefer | None, seed: int
) -> None:
    policy = RoutingPolicy()
    choice = choose(candidates, policy, prefer, np.random.default_rng(seed))
    if choice is None:
        # Only where nobody is feasible, or a learner is spared because a learned one is there.
        assert not any(c.feasible and (c.learned or not c.prefilling) for c in candidates)
        return
    ranked = choice.ranked
    assert all(c.feasible for c in ranked)
    assert 1 <= len(ranked) <= 3
    assert len({c.forecast.worker for c in ranked}) == len(ranked)
    others = policy.others[prefer or policy.prefer] * sum(c.prefilling > 0 for c in candidates) / len(candidates)

    def cost(candidate: Candidate) -> float:
        return cost_s(candidate, others, policy.session_hint)

    costs = [cost(c) for c in ranked[1:]]
    assert costs == sorted(costs)
    if choice.why is not Why.LEARNING:
        best = min(cost(c) for c in candidates if c.feasible and c.learned == ranked[0].learned)
        assert ranked[0].learned is False or cost(ranked[0]) <= best + max(0.001, 0.01 * best) + 1e-9
