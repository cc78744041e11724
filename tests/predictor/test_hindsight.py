"""Whether refusals were right, told afterwards, and the guard that acts on it."""

import pytest

from predictor.admission import Limits, Reason, Refusal
from predictor.forecast import Forecast
from predictor.hindsight import Guard, GuardPolicy, Hindsight, Review, Verdict, Watched, review_shadow
from predictor.prefill_cost import Basis


def refused(behind: int = 3, at_s: float = 0.0, bound_s: float = 5.0, tokens: int = 100) -> Watched:
    return Watched("r", Reason.QUEUE_WAIT, behind, at_s, 0.0, at_s + bound_s, tokens)


def room(_: Watched) -> bool:
    return True


def test_a_queue_that_drains_in_time_makes_it_a_false_alarm() -> None:
    hindsight = Hindsight("w")
    assert hindsight.watch(refused(), sure=True) == []
    assert hindsight.before(3.0) == hindsight.after(2, room, 3.0) == []
    (review,) = hindsight.after(4, room, 4.0)
    assert (review.verdict, review.wait_s, review.enforced) == (Verdict.FALSE_ALARM, 4.0, True)
    assert review.spare == pytest.approx(0.2)
    assert len(hindsight) == 0


def test_a_queue_that_is_still_there_when_the_bound_passes_makes_it_right() -> None:
    hindsight = Hindsight("w")
    hindsight.watch(refused(), sure=True)
    assert hindsight.before(5.0) == []
    (review,) = hindsight.before(5.01)
    assert (review.verdict, review.wait_s) == (Verdict.RIGHT, None)
    assert hindsight.after(None, room, 5.01) == []


def test_an_empty_queue_in_a_full_cache_is_still_a_queue() -> None:
    hindsight = Hindsight("w")
    hindsight.watch(refused(tokens=100), sure=True)
    assert hindsight.after(None, lambda watched: watched.new_tokens < 50, 2.0) == []
    assert len(hindsight.after(None, room, 3.0)) == 1


def test_what_cannot_be_seen_is_not_judged() -> None:
    (review,) = Hindsight("w").watch(refused(), sure=False)
    assert review.verdict is Verdict.UNKNOWN


def test_a_flood_is_judged_by_a_part_of_it() -> None:
    hindsight = Hindsight("w")
    verdicts = [review.verdict for _ in range(1000) for review in hindsight.watch(refused(), sure=True)]
    assert len(hindsight) == 256
    assert verdicts == [Verdict.UNKNOWN] * 744


def test_a_worker_that_leaves_takes_the_answer_with_it() -> None:
    hindsight = Hindsight("w")
    hindsight.watch(refused(), sure=True)
    assert [review.verdict for review in hindsight.give_up()] == [Verdict.UNKNOWN]
    assert len(hindsight) == 0


@pytest.mark.parametrize(
    ("reason", "limits", "actual_s", "verdict"),
    [
        # 2.1 s of what came are its own.
        (Reason.QUEUE_WAIT, Limits(max_queue_wait_s=5.0), 7.0, Verdict.FALSE_ALARM),
        (Reason.QUEUE_WAIT, Limits(max_queue_wait_s=5.0), 7.2, Verdict.RIGHT),
        (Reason.TTFT, Limits(max_ttft_s=5.0), 4.9, Verdict.FALSE_ALARM),
        (Reason.TTFT, Limits(max_ttft_s=5.0), 5.1, Verdict.RIGHT),
        (Reason.OVERLOAD_WAIT, Limits(overload_wait_s=60.0), 50.0, Verdict.FALSE_ALARM),
        (Reason.OVERLOAD_WAIT, Limits(overload_wait_s=60.0), 70.0, Verdict.RIGHT),
        (Reason.OVERLOAD_KV, Limits(overload_kv_demand=3.0), 70.0, Verdict.UNKNOWN),
        (Reason.FAIR_SHARE, Limits(fair_wait_s=3.0), 70.0, Verdict.UNKNOWN),
    ],
)
def test_a_refusal_in_shadow_is_judged_by_what_came(
    reason: Reason, limits: Limits, actual_s: float, verdict: Verdict
) -> None:
    priced = Forecast("w", 1000, 0, 0.0, 30.0, 2.0, 0.1, 32.1, Basis.CURVE, 5000, True)
    review = review_shadow("r", Refusal(reason, limits, None, priced, (priced,)), priced, actual_s)
    assert (review.verdict, review.enforced) == (verdict, False)
    assert review.wait_s == pytest.approx(actual_s - 2.1)


# The guard


def fed(guard: Guard, alarms: int, right: int) -> int:
    """How often it changed its mind."""
    changes = sum(guard.record(reviewed(Verdict.FALSE_ALARM)) for _ in range(alarms))
    return changes + sum(guard.record(reviewed(Verdict.RIGHT)) for _ in range(right))


def reviewed(verdict: Verdict, spare: float = 0.5) -> Review:
    return Review("r", "w", Reason.QUEUE_WAIT, True, verdict, None, spare)


def test_too_many_false_alarms_step_admission_down_and_right_ones_up_again() -> None:
    guard = Guard(GuardPolicy(false_alarms=0.3, window=20, least=10))
    assert fed(guard, 0, 20) == 0
    assert fed(guard, 6, 0) == 0
    assert guard.record(reviewed(Verdict.FALSE_ALARM))
    assert (guard.stepped_down, guard.rate_at_last_step) == (True, 0.35)
    assert fed(guard, 2, 7) == 0  # nine say nothing
    assert fed(guard, 0, 5) == 1
    assert not guard.stepped_down
    assert guard.rate_at_last_step <= 0.15


def test_a_few_refusals_say_nothing() -> None:
    guard = Guard(GuardPolicy(least=20))
    assert fed(guard, 19, 0) == 0
    assert guard.record(reviewed(Verdict.FALSE_ALARM))


def test_what_is_not_known_does_not_count() -> None:
    guard = Guard(GuardPolicy())
    assert not any(guard.record(reviewed(Verdict.UNKNOWN)) for _ in range(100))
    assert guard.false_alarm_rate is None


def test_close_calls_do_not_count_against_it() -> None:
    guard = Guard(GuardPolicy())
    assert not any(guard.record(reviewed(Verdict.FALSE_ALARM, spare=0.19)) for _ in range(100))
    assert guard.false_alarm_rate == 0.0


def test_without_a_limit_there_is_no_guard() -> None:
    guard = Guard(GuardPolicy(false_alarms=None))
    assert fed(guard, 100, 0) == 0
