"""How far forecasts may be off: coverage is measured here, and stays near what is promised whatever the errors do."""

import sys
import timeit
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.forecast import Forecast
from predictor.interval import HIGH, LEVELS, LOW, UNKNOWN, Calibration, Kind, PoolErrors, Spread, scale_s
from predictor.prefill_cost import Basis

WAITS = Kind(waits=True, sure=True)
Errors = Callable[[np.random.Generator, int], float]


def coverage(error_s: Errors, count: int = 3000, skipped: int = 300, calibration: Calibration | None = None) -> float:
    """The share of intervals that held, of forecasts between 50 ms and 20 s, each graded before the next is made."""
    rng = np.random.default_rng(7)
    calibration = calibration or Calibration(PoolErrors())
    held = []
    for number in range(count):
        predicted_s = float(np.exp(rng.uniform(np.log(0.05), np.log(20.0))))
        actual_s = max(0.0, predicted_s + error_s(rng, number) * scale_s(predicted_s))
        held.append(calibration.grade(WAITS, calibration.spread(WAITS), predicted_s, actual_s))
    return float(np.mean(held[skipped:]))


@pytest.mark.parametrize(
    "error_s",
    [
        lambda rng, _: float(rng.normal(0.0, 1.0)),
        lambda rng, _: float(rng.normal(3.0, 0.2)),  # always too short
        lambda rng, _: float(rng.exponential(4.0)),
        lambda rng, _: float(rng.standard_cauchy()),
        lambda rng, _: 10.0 if rng.random() < 0.3 else float(rng.normal(0.0, 0.1)),  # one more step, or not
    ],
    ids=["normal", "biased", "skewed", "without a variance", "of two kinds"],
)
def test_nine_in_ten_intervals_hold_whatever_errors_look_like(error_s: Errors) -> None:
    assert coverage(error_s) == pytest.approx(0.9, abs=0.02)


def test_errors_that_come_in_waves_are_covered_nearly_as_often() -> None:
    # A hundred good ones, then a hundred that are all too short: a window of the last ones alone covers 75 %.
    found = coverage(lambda rng, n: float(rng.normal(8.0 if n // 100 % 2 else 0.0, 1.0)))
    assert found == pytest.approx(0.9, abs=0.04)


def test_exact_forecasts_are_given_intervals_of_nothing() -> None:
    calibration = Calibration(PoolErrors())
    for _ in range(50):
        calibration.grade(WAITS, calibration.spread(WAITS), 2.0, 2.0)
    spread = calibration.spread(WAITS)
    assert spread.quantile_s(2.0, LOW) == spread.quantile_s(2.0, HIGH) == 2.0


def test_before_anything_is_graded_the_interval_is_wide() -> None:
    spread = Calibration(PoolErrors()).spread(WAITS)
    assert spread == UNKNOWN
    assert spread.quantile_s(3.0, LOW) < 1.5
    assert spread.quantile_s(3.0, HIGH) > 6.0


def test_a_worker_without_grades_goes_by_those_of_its_pool_and_later_by_its_own() -> None:
    pool, rng = PoolErrors(), np.random.default_rng(1)
    steady, wild = Calibration(pool), Calibration(pool)
    for _ in range(300):
        steady.grade(WAITS, steady.spread(WAITS), 1.0, 1.0 + 0.022 * float(rng.normal()))
    assert wild.spread(WAITS).quantile_s(1.0, HIGH) == pytest.approx(1.0 + 0.022 * 1.7, abs=0.02)
    for _ in range(300):
        wild.grade(WAITS, wild.spread(WAITS), 1.0, 1.0 + 0.22 * float(rng.normal()))
        steady.grade(WAITS, steady.spread(WAITS), 1.0, 1.0 + 0.022 * float(rng.normal()))
    assert wild.spread(WAITS).quantile_s(1.0, HIGH) > 1.25
    assert steady.spread(WAITS).quantile_s(1.0, HIGH) < 1.1


def test_kinds_of_forecasts_do_not_learn_from_each_other() -> None:
    calibration = Calibration(PoolErrors())
    for _ in range(100):
        calibration.grade(WAITS, calibration.spread(WAITS), 1.0, 9.0)
    assert calibration.spread(Kind(waits=False, sure=True)) == UNKNOWN


def test_a_request_that_is_overdue_widens_the_next_interval_before_its_token_comes() -> None:
    rng = np.random.default_rng(2)
    calibration = Calibration(PoolErrors())
    for _ in range(200):
        calibration.grade(WAITS, calibration.spread(WAITS), 1.0, 1.0 + 0.02 * float(rng.normal()))
    before = calibration.spread(WAITS)
    calibration.overdue(WAITS)
    calibration.overdue(WAITS)
    during = calibration.spread(WAITS)
    assert during.score(HIGH) > before.score(HIGH)
    assert during.score(LOW) == pytest.approx(before.score(LOW), abs=0.01)
    tail = calibration._errors(WAITS).high_tail
    calibration.grade(WAITS, before, 1.0, 5.0, overdue=True)
    assert calibration._errors(WAITS).high_tail == tail, "counted twice"
    assert (calibration.graded, calibration.covered) == (201, round(201 * calibration.coverage))


def test_another_engine_begins_with_what_its_pool_has() -> None:
    pool = PoolErrors()
    calibration = Calibration(pool)
    for _ in range(100):
        calibration.grade(WAITS, calibration.spread(WAITS), 1.0, 1.5)
    calibration.forget()
    assert calibration.spread(WAITS).quantile_s(1.0, 0.5) == pytest.approx(1.5)


def exact_so_far(predicted_s: float, count: int, pool: PoolErrors | None = None) -> Calibration:
    calibration = Calibration(pool or PoolErrors())
    for _ in range(count):
        calibration.grade(WAITS, calibration.spread(WAITS), predicted_s, predicted_s)
    return calibration


def test_short_waits_say_nothing_of_a_first_long_one_in_the_interval_that_is_shown() -> None:
    calibration = exact_so_far(0.1, 100)
    assert calibration.shown(WAITS, 0.2) == calibration.spread(WAITS)
    assert calibration.shown(WAITS, 20.0) == UNKNOWN
    known = exact_so_far(20.0, 12)
    assert known.shown(WAITS, 20.0) == known.shown(WAITS, 0.2) == known.spread(WAITS)
    assert known.shown(WAITS, 40.0) == known.spread(WAITS)
    assert known.shown(WAITS, 41.0) == UNKNOWN


def test_the_interval_narrows_as_forecasts_of_its_size_are_graded() -> None:
    pool = PoolErrors()
    exact_so_far(0.1, 100, pool)
    widths_s = []
    for graded in range(13):
        spread = exact_so_far(30.0, 1 if graded else 0, pool).shown(WAITS, 20.0)
        widths_s.append(spread.quantile_s(20.0, HIGH) - spread.quantile_s(20.0, LOW))
    assert widths_s[0] > 20.0
    assert all(later < earlier for earlier, later in pairwise(widths_s))
    assert widths_s[-1] == 0.0


def test_a_bound_is_not_judged_by_how_long_a_wait_nobody_has_seen_may_be() -> None:
    calibration = exact_so_far(0.1, 100)
    priced = Forecast(
        "w", 10, 0, 0.0, 6.0, 2.0, 0.0, 8.0, Basis.CURVE, 0, True, WAITS,
        calibration.spread(WAITS), calibration.shown(WAITS, 8.0),
    )  # fmt: skip
    assert priced.low_s < 4.0 < 15.0 < priced.high_s
    assert priced.queue_wait_quantile_s(0.85) == pytest.approx(6.0)
    assert priced.quantile_s(0.85) == pytest.approx(8.0)


def test_how_long_the_forecasts_were_that_a_pool_has_graded_outlives_a_restart() -> None:
    pool = PoolErrors()
    exact_so_far(30.0, 12, pool)
    again = PoolErrors()
    again.recall(pool.memory())
    assert Calibration(again).shown(WAITS, 30.0) == Calibration(pool).shown(WAITS, 30.0) != UNKNOWN


@given(
    scores=st.lists(st.floats(-1e3, 1e3), max_size=80),
    overdue=st.integers(0, 30),
    probabilities=st.lists(st.floats(0.001, 0.999), min_size=2, max_size=10),
)
def test_quantiles_ascend_and_stay_within_what_was_seen_or_guessed(
    scores: list[float], overdue: int, probabilities: list[float]
) -> None:
    calibration = Calibration(PoolErrors())
    for score in scores:
        calibration.grade(WAITS, calibration.spread(WAITS), 100.0, 100.0 + score * scale_s(100.0))
    for _ in range(overdue):
        calibration.overdue(WAITS)
    spread = calibration.spread(WAITS)
    assert list(spread.scores) == sorted(spread.scores)
    found = [spread.score(probability) for probability in sorted(probabilities)]
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(found))
    known = (*scores, *UNKNOWN.scores)
    assert min(known) - 1e-6 <= found[0] <= found[-1] <= max(known) + 1e-6


def test_between_two_levels_quantiles_are_interpolated_and_beyond_the_last_they_stay() -> None:
    spread = Spread(tuple(float(number) for number in range(len(LEVELS))))
    assert spread.score(0.5) == LEVELS.index(0.5)
    assert spread.score(0.925) == pytest.approx(LEVELS.index(0.9) + 0.5)
    assert (spread.score(0.0001), spread.score(0.9999)) == (0.0, len(LEVELS) - 1.0)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 95.0, float("nan")])
def test_what_is_no_probability_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1, not"):
        UNKNOWN.score(probability)


def test_a_forecast_tells_its_quantiles_and_lays_all_doubt_on_the_wait() -> None:
    spread = Spread((-2.0, -2.0, -2.0, -1.0, 0.0, 0.0, 0.0, 5.0, 10.0, 10.0, 10.0))
    priced = Forecast("w", 10, 0, 1.0, 6.0, 2.0, 0.5, 9.5, Basis.CURVE, 0, True, WAITS, spread, spread)
    unit_s = scale_s(8.5)  # what was waited before is certain
    assert priced.quantile_s(0.9) == pytest.approx(9.5 + 5 * unit_s)
    assert priced.low_s == pytest.approx(9.5 - 2 * unit_s)
    assert priced.high_s == pytest.approx(9.5 + 10 * unit_s)
    assert priced.queue_wait_quantile_s(0.9) == pytest.approx(7.0 + 5 * unit_s)
    assert priced.queue_wait_quantile_s(0.5) == pytest.approx(priced.queue_wait_s)


def test_taking_in_a_grade_is_no_work_to_speak_of() -> None:
    calibration = Calibration(PoolErrors())
    took_s = timeit.timeit(lambda: calibration.grade(WAITS, calibration.spread(WAITS), 1.0, 1.1), number=500) / 500
    sys.stdout.write(f"\none grade and a fresh spread: {took_s * 1e6:.0f} us")
    assert took_s < 0.002
