"""Whether a request can be let in, and when to come back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.admission import (
    AdmissionPolicy,
    Limits,
    Prospect,
    Reason,
    RetryAfter,
    RetryPolicy,
    drained_in_s,
    limits_of,
    objection,
    refuse,
    retry_after,
)
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis

BOUND = Limits(max_queue_wait_s=5.0)


def waiting(
    wait_s: float,
    already_s: float = 0.0,
    basis: Basis = Basis.CURVE,
    prefill_s: float = 1.0,
    idle: bool = False,
    kv_demand: float | None = None,
    high_s: float | None = None,
) -> Prospect:
    forecast = Forecast(
        "w", 1000, 0, already_s, wait_s, prefill_s, 0.0, already_s + wait_s + prefill_s, basis, 0, exact_tokens=True
    )
    return Prospect(forecast, wait_s if high_s is None else high_s, idle, kv_demand)


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def told(drains_s: list[float | None], policy: RetryPolicy | None = None) -> RetryAfter:
    found = retry_after(drains_s, policy or RetryPolicy(jitter=0.0), rng())
    assert found is not None
    return found


# Bounds


def test_a_bound_on_the_queue_holds_for_all_the_waiting_and_none_of_the_prefill() -> None:
    assert objection(waiting(5.0, prefill_s=100.0), BOUND) is None
    assert objection(waiting(5.01), BOUND) is Reason.QUEUE_WAIT
    assert objection(waiting(2.0, already_s=3.0), BOUND) is None
    assert objection(waiting(2.0, already_s=3.01), BOUND) is Reason.QUEUE_WAIT


def test_a_bound_on_the_first_token_holds_for_everything() -> None:
    bound = Limits(max_ttft_s=5.0)
    assert objection(waiting(2.0, already_s=1.0, prefill_s=2.0), bound) is None
    assert objection(waiting(2.1, already_s=1.0, prefill_s=2.0), bound) is Reason.TTFT


def test_a_prefill_that_takes_longer_than_the_bound_on_the_first_token_is_refused_as_such_even_by_an_idle_worker() -> (
    None
):
    bound = Limits(max_ttft_s=5.0)
    assert objection(waiting(0.0, prefill_s=5.1, idle=True), bound) is Reason.OWN_PREFILL
    assert objection(waiting(0.0, prefill_s=4.9, idle=True), bound) is None
    assert objection(waiting(0.0, prefill_s=5.1, idle=True, basis=Basis.RATE), bound) is None
    # Not as one that time has used up: a retry would not help.
    assert objection(waiting(0.0, prefill_s=5.1, already_s=5.1, idle=True), bound) is Reason.OWN_PREFILL


def test_both_bounds_hold_where_both_are_given() -> None:
    both = Limits(max_queue_wait_s=5.0, max_ttft_s=20.0)
    assert objection(waiting(4.0, prefill_s=17.0), both) is Reason.TTFT
    assert objection(waiting(6.0, prefill_s=1.0), both) is Reason.QUEUE_WAIT
    assert objection(waiting(4.0, prefill_s=15.0), both) is None


def test_bounds_are_judged_by_the_quantile_and_overload_by_the_point() -> None:
    assert objection(waiting(3.0, high_s=5.5), BOUND) is Reason.QUEUE_WAIT
    assert objection(waiting(3.0, high_s=4.5, prefill_s=1.0), Limits(max_ttft_s=5.0)) is Reason.TTFT
    assert objection(waiting(59.0, high_s=500.0), Limits(overload_wait_s=60.0)) is None


def test_a_pools_own_bounds_are_for_requests_that_bring_none() -> None:
    policy = AdmissionPolicy(max_queue_wait_s=20.0, max_ttft_s=30.0)
    assert limits_of(policy, None, None, None).max_queue_wait_s == 20.0
    assert limits_of(policy, None, None, None).max_ttft_s == 30.0
    own = limits_of(policy, 100.0, None, None)
    assert (own.max_queue_wait_s, own.max_ttft_s) == (100.0, None)


@pytest.mark.parametrize("basis", [Basis.DEFAULT, Basis.RATE])
@pytest.mark.parametrize("limits", [BOUND, Limits(max_ttft_s=0.5), Limits(overload_wait_s=10.0, fair_wait_s=1.0)])
def test_nobody_is_refused_on_the_word_of_a_model_that_has_not_learned(basis: Basis, limits: Limits) -> None:
    assert objection(waiting(1000.0, basis=basis), limits) is None


@pytest.mark.parametrize("basis", list(Basis))
def test_an_idle_worker_is_open_to_every_bound_that_the_time_already_waited_has_not_used_up(basis: Basis) -> None:
    assert objection(waiting(1000.0, already_s=5.0, basis=basis, idle=True, kv_demand=99.0), BOUND) is None
    assert objection(waiting(0.0, already_s=5.01, basis=basis, idle=True), BOUND) is Reason.BOUND_USED_UP
    assert objection(waiting(0.0, already_s=6.0, basis=basis, idle=True), Limits(max_ttft_s=5.0)) is (
        Reason.BOUND_USED_UP
    )


# Without a bound


def test_without_a_bound_only_severe_overload_is_a_reason() -> None:
    limits = limits_of(AdmissionPolicy(overload_wait_s=60.0), None, None, None)
    assert objection(waiting(59.0), limits) is None
    assert objection(waiting(61.0), limits) is Reason.OVERLOAD_WAIT
    assert objection(waiting(1e6, already_s=1e6), Limits()) is None


def test_a_bound_stands_in_for_the_rule_of_overload() -> None:
    limits = limits_of(AdmissionPolicy(overload_wait_s=60.0), 300.0, None, None)
    assert objection(waiting(61.0), limits) is None


@pytest.mark.parametrize("basis", list(Basis))
def test_a_demand_for_several_caches_is_overload_before_anything_is_learned(basis: Basis) -> None:
    limits = Limits(overload_kv_demand=2.0)
    assert objection(waiting(0.0, basis=basis, kv_demand=2.1), limits) is Reason.OVERLOAD_KV
    assert objection(waiting(0.0, basis=basis, kv_demand=1.9), limits) is None
    assert objection(waiting(0.0, basis=basis, kv_demand=None), limits) is None


def test_a_learned_worker_that_keeps_the_bound_is_not_overloaded_for_the_caller() -> None:
    limits = Limits(max_queue_wait_s=5.0, overload_kv_demand=2.0)
    assert objection(waiting(1.0, kv_demand=3.0), limits) is None
    assert objection(waiting(1.0, kv_demand=3.0, basis=Basis.RATE), limits) is Reason.OVERLOAD_KV


def test_a_tenant_beyond_its_share_finds_short_queues_only() -> None:
    limits = Limits(max_queue_wait_s=30.0, fair_wait_s=2.0)
    assert objection(waiting(2.1), limits) is Reason.FAIR_SHARE
    assert objection(waiting(1.9), limits) is None
    assert objection(waiting(2.1, idle=True), limits) is None


# When to come back


@pytest.mark.parametrize(
    ("prospect", "reason", "limits", "drain_s"),
    [
        (waiting(12.5, already_s=100.0), Reason.QUEUE_WAIT, BOUND, 7.5),
        (waiting(3.0, already_s=100.0), Reason.BOUND_USED_UP, BOUND, 0.0),
        (waiting(12.5, already_s=100.0), Reason.BOUND_USED_UP, Limits(max_ttft_s=10.0), 2.5),
        (waiting(12.0, prefill_s=3.0), Reason.TTFT, Limits(max_ttft_s=5.0), 10.0),
        (waiting(0.0, prefill_s=30.0), Reason.OWN_PREFILL, Limits(max_ttft_s=5.0), None),
        (waiting(100.0), Reason.OVERLOAD_WAIT, Limits(overload_wait_s=60.0), 40.0),
        (waiting(40.0, kv_demand=4.0), Reason.OVERLOAD_KV, Limits(overload_kv_demand=3.0), 10.0),
        (waiting(9.0), Reason.FAIR_SHARE, Limits(fair_wait_s=2.0), 7.0),
    ],
)
def test_a_worker_is_open_again_when_its_queue_has_drained_to_what_is_allowed(
    prospect: Prospect, reason: Reason, limits: Limits, drain_s: float | None
) -> None:
    assert drained_in_s(prospect, reason, limits) == pytest.approx(drain_s)


def test_a_refusal_rests_on_the_worker_with_the_least_wait_and_the_first_that_drains_tells_when_to_return() -> None:
    prospects = [waiting(30.0), waiting(12.5), waiting(0.0, basis=Basis.RATE), waiting(90.0)]
    refusal = refuse(prospects, [objection(p, BOUND) for p in prospects], BOUND, RetryPolicy(jitter=0.0), rng())
    assert (refusal.reason, refusal.best.wait_s, refusal.allowed_wait_s) == (Reason.QUEUE_WAIT, 12.5, 5.0)
    assert refusal.retry == RetryAfter(told_s=7.5, uncapped_s=7.5)
    assert len(refusal.forecasts) == 4


def test_one_worker_that_is_fast_enough_makes_it_a_matter_of_waiting() -> None:
    limits = Limits(max_ttft_s=5.0)
    prospects = [waiting(0.0, prefill_s=8.0, idle=True), waiting(20.0, prefill_s=2.0)]
    refusal = refuse(prospects, [objection(p, limits) for p in prospects], limits, RetryPolicy(jitter=0.0), rng())
    assert refusal.reason is Reason.TTFT
    assert refusal.retry is not None
    assert refusal.retry.uncapped_s == pytest.approx(17.0)
    assert refusal.allowed_wait_s == 3.0


def test_where_no_worker_is_fast_enough_coming_back_is_no_use() -> None:
    limits = Limits(max_ttft_s=5.0)
    slow = [waiting(0.0, prefill_s=8.0, idle=True)]
    refusal = refuse(slow, [Reason.OWN_PREFILL], limits, RetryPolicy(), rng())
    assert (refusal.reason, refusal.retry, refusal.allowed_wait_s) == (Reason.OWN_PREFILL, None, None)


def test_nobody_is_told_more_than_the_cap_but_the_truth_is_kept() -> None:
    capped = told([500.0, None])
    assert (capped.told_s, capped.whole_s, capped.uncapped_s) == (60.0, 60, 500.0)
    assert told([500.0], RetryPolicy(cap_s=20.0)).whole_s == 20


def test_jitter_spreads_up_to_a_fifth_later_and_never_earlier() -> None:
    draw = np.random.default_rng(11)
    told_s = []
    for _ in range(500):
        found = retry_after([10.0], RetryPolicy(), draw)
        assert found is not None
        told_s.append(found.told_s)
    assert 10.0 <= min(told_s) < 10.1
    assert 11.9 < max(told_s) <= 12.0


@pytest.mark.parametrize(("told_s", "whole_s"), [(0.0, 1), (0.2, 1), (1.0, 1), (1.001, 2), (59.2, 60), (60.0, 60)])
def test_whole_seconds_are_rounded_up_and_never_zero(told_s: float, whole_s: int) -> None:
    assert RetryAfter(told_s, told_s).whole_s == whole_s


_limit = st.none() | st.floats(0.1, 400)
_prospects = st.lists(
    st.builds(
        waiting,
        st.floats(0, 1e5),
        already_s=st.floats(0, 400),
        basis=st.sampled_from(Basis),
        prefill_s=st.floats(0, 100),
        idle=st.booleans(),
        kv_demand=st.none() | st.floats(0, 50),
    ),
    min_size=1,
    max_size=8,
)


@given(
    prospects=_prospects,
    limits=st.builds(Limits, _limit, _limit, _limit, st.none() | st.floats(1, 9), _limit),
    seed=st.integers(0, 99),
)
def test_whatever_is_refused_has_a_reason_that_is_true_and_a_usable_time_to_return(
    prospects: list[Prospect], limits: Limits, seed: int
) -> None:
    objections = [objection(prospect, limits) for prospect in prospects]
    for prospect, reason in zip(prospects, objections, strict=True):
        if reason is None:
            continue
        if prospect.forecast.basis is not Basis.CURVE:
            assert reason in (Reason.BOUND_USED_UP, Reason.OVERLOAD_KV)
        if prospect.idle:
            assert reason in (Reason.BOUND_USED_UP, Reason.OWN_PREFILL)
    if all(reason is None for reason in objections):
        return
    refusal = refuse(prospects, objections, limits, RetryPolicy(), np.random.default_rng(seed))
    assert refusal.reason in objections
    if refusal.retry is not None:
        assert 0 <= refusal.retry.told_s <= 60
        assert 1 <= refusal.retry.whole_s <= 60
        assert refusal.retry.told_s <= 1.2 * refusal.retry.uncapped_s + 1e-9
    else:
        assert set(objections) <= {None, Reason.OWN_PREFILL}
