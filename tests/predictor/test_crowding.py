"""How many requests with a bound a placement crowds out, and who waits longer so that it does not."""

import msgspec
import numpy as np
import pytest

from predictor.admission import Limits, Reason, Refusal
from predictor.crowding import Crowding
from predictor.fleet import Grant
from predictor.routing import Prefer, RoutingPolicy, Why, choose, cost_s
from tests.predictor.test_fleet import Bench
from tests.predictor.test_routing import candidate


def test_nobody_is_crowded_out_where_nobody_is_refused() -> None:
    crowding = Crowding()
    assert crowding.crowds_out(1.0, 5.0) == 0.0
    for _ in range(100):
        crowding.decided(10.0, 0.5, refused=False)
    assert crowding.crowds_out(1.0, 5.0) == 0.0


def test_where_some_are_each_that_fits_in_is_one_that_will_not() -> None:
    crowding = Crowding()
    for number in range(200):
        crowding.decided(10.0, 0.5, refused=number % 5 == 0)
    assert crowding.crowds_out(9.0, 0.5) == pytest.approx(1.0)
    assert crowding.crowds_out(0.0, 2.0) == pytest.approx(4.0), "a giant takes the place of several"


def test_the_longer_a_queue_is_beyond_the_bound_the_less_it_costs_them() -> None:
    crowding = Crowding()
    for _ in range(100):
        crowding.decided(10.0, 0.5, refused=True)
    assert [crowding.crowds_out(wait_s, 0.5) for wait_s in (10.0, 17.5, 25.0, 99.0)] == [1.0, 0.5, 0.0, 0.0]


def test_it_is_forgotten_when_they_are_let_in_again() -> None:
    crowding = Crowding()
    for _ in range(100):
        crowding.decided(10.0, 0.5, refused=True)
    for _ in range(400):
        crowding.decided(10.0, 0.5, refused=False)
    assert crowding.crowds_out(9.0, 0.5) < 0.001


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
