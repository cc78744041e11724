"""A forecast against what came."""

import pytest

from predictor.forecast import Forecast
from predictor.grading import CacheVerdict, grade, judge_cache
from predictor.prefill_cost import Basis

# Waited 1 s before, 3 s predicted in the queue, 2 s of prefill, 0.1 s around it.
PROMISED = Forecast("w", 1000, 0, 1.0, 3.0, 2.0, 0.1, 6.1, Basis.CURVE, 5000, True)


@pytest.mark.parametrize(("actual_s", "error_s"), [(6.1, 0.0), (8.1, 2.0), (5.0, -1.1)])
def test_the_error_is_positive_when_the_truth_was_slower(actual_s: float, error_s: float) -> None:
    graded = grade(PROMISED, actual_s, None)
    assert graded.error_s == pytest.approx(error_s)
    assert (graded.predicted_s, graded.actual_s, graded.kept_bound) == (6.1, actual_s, None)


@pytest.mark.parametrize(("actual_s", "held"), [(6.1, True), (2.0, False), (5.0, True), (60.0, False)])
def test_it_says_whether_the_interval_held(actual_s: float, held: bool) -> None:
    assert grade(PROMISED, actual_s, None).within_interval is held


@pytest.mark.parametrize(("actual_s", "kept"), [(6.1, True), (7.09, True), (7.11, False), (60.0, False), (0.5, True)])
def test_a_bound_is_kept_by_what_is_left_of_the_time_without_prefill_and_overhead(actual_s: float, kept: bool) -> None:
    # 5 s of waiting and the 2.1 s that are its own: 7.1.
    assert grade(PROMISED, actual_s, 5.0).kept_bound is kept


@pytest.mark.parametrize(
    ("credited", "reported", "verdict"),
    [
        (160, 160, CacheVerdict.RIGHT),
        (160, 175, CacheVerdict.RIGHT),
        (160, 145, CacheVerdict.RIGHT),
        (160, 144, CacheVerdict.OVER),
        (160, 176, CacheVerdict.UNDER),
        (160, 0, CacheVerdict.OVER),
        (0, 0, CacheVerdict.RIGHT),
        (0, 16, CacheVerdict.UNDER),
        (160, None, CacheVerdict.UNREPORTED),
        (0, None, CacheVerdict.UNREPORTED),
    ],
)
def test_the_cache_is_judged_to_the_block_and_none_is_never_zero(
    credited: int, reported: int | None, verdict: CacheVerdict
) -> None:
    assert judge_cache(credited, reported, 16) is verdict
