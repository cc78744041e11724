"""Whether a bound can be kept, and when to come back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.admission import RetryAfter, RetryPolicy, feasible, retry_after
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis


def waiting(wait_s: float, already_s: float = 0.0, basis: Basis = Basis.CURVE, prefill_s: float = 1.0) -> Forecast:
    return Forecast(
        "w", 1000, 0, already_s, wait_s, prefill_s, 0.0, already_s + wait_s + prefill_s, basis, 0, exact_tokens=True
    )


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def test_a_bound_holds_for_all_the_waiting_and_none_of_the_prefill() -> None:
    assert feasible(waiting(5.0, prefill_s=100.0), 5.0, idle=False)
    assert not feasible(waiting(5.01), 5.0, idle=False)
    assert feasible(waiting(2.0, already_s=3.0), 5.0, idle=False)
    assert not feasible(waiting(2.0, already_s=3.01), 5.0, idle=False)


def test_without_a_bound_nothing_is_infeasible() -> None:
    assert feasible(waiting(1e6, already_s=1e6), None, idle=False)


@pytest.mark.parametrize("basis", [Basis.DEFAULT, Basis.RATE])
def test_nobody_is_refused_on_the_word_of_a_model_that_has_not_learned(basis: Basis) -> None:
    assert feasible(waiting(1000.0, basis=basis), 5.0, idle=False)


@pytest.mark.parametrize("basis", list(Basis))
def test_an_idle_worker_is_open_to_every_bound_that_the_time_already_waited_has_not_used_up(basis: Basis) -> None:
    assert feasible(waiting(1000.0, already_s=5.0, basis=basis), 5.0, idle=True)
    assert not feasible(waiting(0.0, already_s=5.01, basis=basis), 5.0, idle=True)


def test_one_is_told_to_come_back_when_the_first_queue_has_drained_to_the_bound() -> None:
    forecasts = [waiting(30.0), waiting(12.5), waiting(90.0)]
    told = retry_after(forecasts, 5.0, RetryPolicy(jitter=0.0), rng())
    assert told == RetryAfter(told_s=7.5, uncapped_s=7.5)
    assert told.whole_s == 8


def test_the_wait_and_not_the_time_already_waited_decides_for_a_fresh_request() -> None:
    told = retry_after([waiting(1.0, already_s=100.0)], 5.0, RetryPolicy(), rng())
    assert (told.uncapped_s, told.whole_s) == (0.0, 1)


def test_nobody_is_told_more_than_the_cap_but_the_truth_is_kept() -> None:
    told = retry_after([waiting(505.0)], 5.0, RetryPolicy(), rng())
    assert (told.told_s, told.whole_s, told.uncapped_s) == (60.0, 60, 500.0)
    assert retry_after([waiting(505.0)], 5.0, RetryPolicy(cap_s=20.0), rng()).whole_s == 20


def test_jitter_spreads_up_to_a_fifth_later_and_never_earlier() -> None:
    draw = np.random.default_rng(11)
    told = [retry_after([waiting(15.0)], 5.0, RetryPolicy(), draw).told_s for _ in range(500)]
    assert 10.0 <= min(told) < 10.1
    assert 11.9 < max(told) <= 12.0


@pytest.mark.parametrize(("told_s", "whole_s"), [(0.0, 1), (0.2, 1), (1.0, 1), (1.001, 2), (59.2, 60), (60.0, 60)])
def test_whole_seconds_are_rounded_up_and_never_zero(told_s: float, whole_s: int) -> None:
    assert RetryAfter(told_s, told_s).whole_s == whole_s


@given(waits=st.lists(st.floats(0, 1e5), min_size=1, max_size=8), bound_s=st.floats(5, 300), seed=st.integers(0, 99))
def test_what_is_told_is_always_usable(waits: list[float], bound_s: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    told = retry_after([waiting(wait_s) for wait_s in waits], bound_s, RetryPolicy(), draw)
    assert 0 <= told.told_s <= 60
    assert 1 <= told.whole_s <= 60
    assert told.uncapped_s == max(0.0, min(waits) - bound_s)
