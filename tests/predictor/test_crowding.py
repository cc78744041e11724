"""How many requests with a bound a placement crowds out, and who waits longer so that it does not."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.admission import Limits, Reason, Refusal
from predictor.crowding import Crowding
from predictor.fleet import Grant, Usage
from predictor.routing import Prefer, RoutingPolicy, Why, choose, cost_s
from tests.predictor.test_fleet import Bench
from tests.predictor.test_routing import candidate


def asked(bounded: int, unbounded: int = 0) -> Crowding:
    """So many of either kind came, mixed."""
    crowding = Crowding()
    for number in range(200):
        crowding.asked(10.0 if number % (bounded + unbounded) < bounded else None, 0.5)
    return crowding


def test_nobody_is_crowded_out_where_somebody_would_be_served_soon() -> None:
    assert Crowding().crowds_out(9.0, 5.0, 9.0) == 0.0
    assert [asked(20).crowds_out(99.0, 5.0, shortest_s) for shortest_s in (0.0, 3.0, 7.0)] == [0.0, 0.0, 0.0]


def test_where_the_shortest_queue_comes_near_their_bound_each_that_joins_it_is_one_that_will_not() -> None:
    crowding = asked(20)
    assert crowding.crowds_out(7.505, 0.5, 7.505) == pytest.approx(0.5)
    assert crowding.crowds_out(9.0, 0.5, 9.0) == pytest.approx(1.0)
    assert crowding.crowds_out(9.0, 2.0, 9.0) == pytest.approx(4.0), "a giant takes the place of several"


def test_the_longer_a_queue_is_than_the_shortest_the_less_it_costs_them() -> None:
    crowding = asked(20)
    assert [crowding.crowds_out(wait_s, 0.5, 9.0) for wait_s in (9.0, 16.5, 24.0, 99.0)] == [1.0, 0.5, 0.0, 0.0]
    # Where nobody can have it any more, it is all the same who does.
    assert [crowding.crowds_out(wait_s, 0.5, 30.0) for wait_s in (30.0, 40.0)] == [0.0, 0.0]


def test_where_they_are_refused_sooner_places_count_sooner_and_where_they_are_let_in_later_again() -> None:
    crowding = asked(20)
    assert crowding.crowds_out(6.0, 0.5, 6.0) == 0.0
    for _ in range(40):
        crowding.asked(10.0, 0.5, 6.0, refused=True)
    assert crowding.crowds_out(6.0, 0.5, 6.0) == pytest.approx(1.0)
    for _ in range(40):
        crowding.asked(10.0, 0.5, 9.5, refused=False)
    assert crowding.crowds_out(6.0, 0.5, 6.0) == 0.0


def test_a_queue_far_beyond_the_bound_says_nothing_of_where_they_are_refused() -> None:
    crowding = asked(20)
    for _ in range(40):
        crowding.asked(10.0, 0.5, 90.0, refused=True)
    assert crowding.crowds_out(7.505, 0.5, 7.505) == pytest.approx(0.5, abs=0.01)


def test_one_whose_prompt_was_not_read_counts_as_one_more_that_has_a_bound_and_is_as_long_as_the_others() -> None:
    crowding = Crowding()
    crowding.asked(10.0, None, 99.0, refused=True)
    assert crowding.crowds_out(9.0, 0.5, 9.0) == 0.0, "of nobody is it known how long he is"
    for number in range(400):
        crowding.asked(10.0, 0.5 if number < 200 else None)
    assert crowding.crowds_out(9.0, 0.5, 9.0) == pytest.approx(1.0)


def test_where_hardly_anybody_has_a_bound_hardly_anybody_is_crowded_out() -> None:
    assert asked(1, 1).crowds_out(9.0, 0.5, 9.0) == pytest.approx(1.0)
    few = Crowding()
    few.asked(10.0, 0.5)
    for _ in range(100):
        few.asked(None, 0.5)
    assert 0.0 < few.crowds_out(9.0, 0.5, 9.0) < 0.05


@settings(deadline=None, max_examples=40)
@given(workers=st.integers(2, 6), refused=st.integers(1, 60), idle=st.integers(1, 6), tokens=st.integers(100, 20_000))
def test_an_idle_worker_is_no_dearer_for_refusals_before(workers: int, refused: int, idle: int, tokens: int) -> None:
    """A fleet that has refused dozens, of which some workers then have nothing to do."""
    bench = Bench(workers)
    now_s = bench.teach()
    while not isinstance(bench.place(5000, now_s, 5.0), Refusal):
        pass
    for _ in range(refused):
        bench.place(20_000, now_s, 5.0)
    for name in [f"w{number}" for number in range(min(idle, workers))]:
        for ticket_id in list(bench.fleet._pool_of[name].workers[name].tickets):
            bench.fleet.first_token(ticket_id, None, now_s)
            bench.fleet.finish(ticket_id, Usage(), now_s)
    placed = bench.place(tokens, now_s + 0.5)
    assert isinstance(placed, Grant)
    assert placed.why is not Why.ROOM
    assert placed.ticket.forecast.wait_s < 0.1, "somebody is idle"


def test_a_bound_on_the_first_token_leaves_its_own_prefill_less_to_wait() -> None:
    assert Limits(max_queue_wait_s=10.0).allows_wait_s(4.0) == 10.0
    assert Limits(max_ttft_s=12.0).allows_wait_s(4.0) == 8.0
    assert Limits(max_queue_wait_s=10.0, max_ttft_s=12.0).allows_wait_s(4.0) == 8.0
    assert Limits(max_ttft_s=3.0).allows_wait_s(4.0) == 0.0


def test_one_without_a_bound_waits_longer_elsewhere_up_to_what_a_refusal_is_worth() -> None:
    short, long = candidate("short", 8.0), candidate("long", 40.0)
    crowded = msgspec.structs.replace(short, crowded_out=1.0)
    rng = np.random.default_rng(1)
    policy = RoutingPolicy(refusal_s=60.0)
    for candidates, prefer, winner in (
        ([short, long], None, "short"),
        ([crowded, long], None, "long"),
        ([crowded, candidate("long", 69.0)], None, "short"),
        ([crowded, long], Prefer.LATENCY, "short"),
    ):
        choice = choose(candidates, policy, prefer, rng)
        assert choice is not None
        assert choice.ranked[0].forecast.worker == winner
        assert choice.why is (Why.ROOM if winner == "long" else Why.FASTEST)
    assert cost_s(crowded, 0.0, 0.0, 60.0) == cost_s(short, 0.0) + 60.0


def test_in_a_fleet_those_without_a_bound_make_room_for_those_with_one() -> None:
    """Two workers that are both full up to the bound: without the price each would stay so, and refuse."""
    bench = Bench(2)
    now_s = bench.teach()
    served = {True: 0, False: 0}
    for _ in range(60):
        for bound_s in (5.0, None):
            decision = bench.place(5000, now_s, bound_s)
            served[bound_s is not None] += isinstance(decision, Grant)
            if isinstance(decision, Refusal):
                assert decision.reason is Reason.QUEUE_WAIT
    waits_s = sorted(worker["wait_s"] for worker in bench.views(now_s).values())
    assert served[False] == 60
    assert waits_s[0] < 6.0 < 15.0 < waits_s[1]


def test_they_make_room_before_anybody_is_refused() -> None:
    """Both queues come near to where the first would be refused, and then only requests without a bound come: what they
    leave is still open to those with one."""
    bench = Bench(2)
    now_s = bench.teach()
    for _ in range(16):
        assert isinstance(bench.place(5000, now_s, 6.0), Grant)
    for _ in range(12):
        bench.grant(5000, now_s)
    waits_s = sorted(worker["wait_s"] for worker in bench.views(now_s).values())
    assert waits_s[0] < 4.5 < 8.0 < waits_s[1], "one queue has nearly all of them"
