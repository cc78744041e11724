"""The forecast of one worker: its parts, and that they add up."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.engines.vllm import Sequence, Settings
from predictor.forecast import Forecast, forecast
from predictor.prefill_cost import Basis, StepCost
from predictor.shadow import Shadow

COST = StepCost(0.016, 1e-6, 0.005, 100e-6, 1e-9, 0.0002)
SETTINGS = Settings(max_num_batched_tokens=2048)


def priced(
    shadow: Shadow, tokens: int, cached: int = 0, waited_s: float = 0.0, now_s: float = 0.0, cost: StepCost = COST
) -> Forecast:
    return forecast(
        worker="w",
        prompt_tokens=tokens,
        cached_tokens=cached,
        already_waited_s=waited_s,
        timeline=shadow.timeline(now_s),
        settings=SETTINGS,
        cost=cost,
        basis=Basis.CURVE,
        tokens_ahead=shadow.prefill_tokens_ahead(),
        now_s=now_s,
        exact_tokens=True,
    )


def test_on_an_idle_worker_there_is_no_wait_and_the_rest_is_the_requests_own() -> None:
    found = priced(Shadow(SETTINGS, COST), 5000, cached=1000, waited_s=0.25)
    assert found.wait_s == 0
    assert found.prefill_s == pytest.approx(2 * 0.005 + 0.4 + 1e-9 * (5000**2 - 1000**2))
    assert found.overhead_s == pytest.approx(0.016 + 0.005)
    assert found.ttft_s == pytest.approx(0.25 + found.prefill_s + found.overhead_s)
    assert found.queue_wait_s == 0.25


def test_the_wait_is_all_that_others_cost_it() -> None:
    shadow = Shadow(SETTINGS, COST)
    shadow.book(Sequence("ahead", 3000, 0, 100), 0.0)
    found = priced(shadow, 1000)
    # Their prefill, two steps of it, and 16 + 3 ms in which the engine has yet to hear of it; in the second step there
    # is room for the newcomer's 1000 tokens, so that it brings no step of its own.
    ahead_s = 0.019 + 2 * 0.005 + 0.3 + 1e-9 * 3000**2
    assert found.wait_s == pytest.approx(ahead_s - 0.005)
    assert (found.tokens_ahead, found.queue_wait_s) == (3000, found.wait_s)


def test_decodes_beside_it_count_as_waiting_too() -> None:
    shadow = Shadow(SETTINGS, COST)
    for number in range(10):
        shadow.adopt(Sequence(f"d{number}", 10, 10, 500), 0.0)
    alone_s = priced(Shadow(SETTINGS, COST), 4000).ttft_s
    # The rest of the step under way, 10 decodes in each of two steps more.
    rest_s = 0.005 + 10 * 0.0002 - 0.001
    assert priced(shadow, 4000, now_s=0.001).ttft_s == pytest.approx(alone_s + rest_s + 2 * 10 * 0.0002)


def test_a_forecast_whose_parts_do_not_add_up_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="do not add up"):
        Forecast("w", 10, 0, 1.0, 1.0, 1.0, 0.0, 3.1, Basis.CURVE, 0, True)
    with pytest.raises(AssertionError, match="negative"):
        Forecast("w", 10, 0, 1.0, -1.0, 1.0, 0.0, 1.0, Basis.CURVE, 0, True)


@given(
    ahead=st.lists(st.integers(1, 9000), max_size=6),
    tokens=st.integers(1, 50_000),
    share=st.floats(0, 0.999),
    now_s=st.floats(0, 20),
    parts=st.lists(st.sampled_from([0.0, 1e-9, 1e-5, 0.01, 3.0]), min_size=6, max_size=6),
)
def test_whatever_is_ahead_and_whatever_it_costs_the_parts_add_up(
    ahead: list[int], tokens: int, share: float, now_s: float, parts: list[float]
) -> None:
    request, token, fixed, linear, square, decode = parts
    cost = StepCost(request, token, fixed, linear, square, decode)
    shadow = Shadow(SETTINGS, cost)
    for number, length in enumerate(ahead):
        shadow.book(Sequence(str(number), length, 0, 10), 0.0)
    found = priced(shadow, tokens, cached=int(share * tokens), now_s=now_s, cost=cost)
    total_s = found.already_waited_s + found.wait_s + found.prefill_s + found.overhead_s
    assert found.ttft_s == pytest.approx(total_s)
    assert min(found.wait_s, found.prefill_s, found.overhead_s) >= 0


@given(ahead=st.lists(st.integers(1, 9000), max_size=5), tokens=st.integers(2, 30_000))
def test_more_of_a_prompt_in_the_cache_is_never_slower(ahead: list[int], tokens: int) -> None:
    shadow = Shadow(SETTINGS, COST)
    for number, length in enumerate(ahead):
        shadow.book(Sequence(str(number), length, 0, 1000), 0.0)
    by_cached = [priced(shadow, tokens, cached).ttft_s for cached in range(0, tokens, max(1, tokens // 20))]
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(by_cached))
