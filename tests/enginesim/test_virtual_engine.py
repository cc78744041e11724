"""Step times, and first tokens in virtual time."""

import statistics

import pytest

from enginesim.request import Request
from enginesim.scheduler import Scheduler
from enginesim.settings import CostSettings, SchedulerSettings
from enginesim.step_time import StepTime
from enginesim.virtual_engine import VirtualEngine, first_tokens_s

COSTS = CostSettings(step_ms=5.0, prefill_us_per_token=100.0, prefill_ns_per_token2=1.0, decode_ms=0.3)


def engine(costs: CostSettings = COSTS, **limits: int) -> VirtualEngine:
    return VirtualEngine(Scheduler(SchedulerSettings(**limits), sample=lambda request: 7), StepTime(costs))


def request(number: int, tokens: int, max_tokens: int = 1) -> Request:
    made = Request(number, list(range(number * 100_000, number * 100_000 + tokens)), max_tokens, 16)
    made.hash_more()
    return made


def test_a_lone_prompt_takes_one_fixed_part_a_step_and_a_quadratic_part_of_its_length() -> None:
    steps = engine().run([(1.0, request(1, 5000))])
    assert len(steps) == 3
    assert first_tokens_s(steps)[1] == pytest.approx(1.0 + 3 * 0.005 + 0.5 + 1e-9 * 5000**2)


def test_decodes_cost_their_fixed_part_each() -> None:
    steps = engine().run([(0.0, request(1, 16, max_tokens=3)), (0.0, request(2, 16, max_tokens=3))])
    durations = [step.end_s - step.start_s for step in steps]
    assert durations == pytest.approx([0.005 + 2 * (0.0016 + 256e-9), 0.0056, 0.0056])


def test_a_small_prompt_gets_its_token_with_the_giants_last_step_or_right_away_under_a_threshold() -> None:
    arrivals = [(0.0, 12_010), (0.05, 210)]
    plain = engine().run([(t, request(i, n)) for i, (t, n) in enumerate(arrivals, 1)])
    capped = engine(long_prefill_token_threshold=512).run([(t, request(i, n)) for i, (t, n) in enumerate(arrivals, 1)])
    whole_s = 6 * 0.005 + 12_220e-4 + 1e-9 * (12_010**2 + 210**2)
    assert first_tokens_s(plain) == pytest.approx({1: whole_s, 2: whole_s})
    first_s = 0.005 + 0.2048 + 1e-9 * 2048**2
    second_s = 0.005 + 0.0722 + 1e-9 * (2560**2 - 2048**2 + 210**2)
    assert first_tokens_s(capped)[2] == pytest.approx(first_s + second_s)


def test_a_second_identical_prompt_costs_only_what_is_not_cached() -> None:
    prompt = list(range(1000))
    first, second = Request(1, prompt, 1, 16), Request(2, list(prompt), 1, 16)
    first.hash_more()
    second.hash_more()
    steps = engine().run([(0.0, first), (1.0, second)])
    assert second.cached_tokens == 992
    assert first_tokens_s(steps)[2] == pytest.approx(1.0 + 0.005 + 8e-4 + 1e-9 * (1000**2 - 992**2))


def test_speed_divides_everything_and_may_change_between_steps() -> None:
    simulated = engine(CostSettings(speed=2.0))
    simulated.scheduler.add(request(1, 1000, max_tokens=2))
    assert simulated.step().end_s == pytest.approx((0.005 + 0.1 + 0.001) / 2)
    simulated.step_time.speed = 0.5
    step = simulated.step()
    assert step.end_s - step.start_s == pytest.approx(0.0053 / 0.5)


@pytest.mark.parametrize("speed", [0, -1, 1e9, float("nan"), "fast", None, True])
def test_a_speed_that_makes_no_sense_is_refused(speed: float) -> None:
    with pytest.raises(ValueError, match="speed must be a number above 0"):
        engine().step_time.speed = speed


def test_jitter_is_lognormal_about_the_formula_and_repeats_with_its_seed() -> None:
    def durations(seed: int) -> list[float]:
        steps = engine(CostSettings(jitter=0.1, seed=seed)).run([(0.0, request(1, 16, max_tokens=2000))])
        return [step.end_s - step.start_s for step in steps[1:]]

    assert durations(1) == durations(1) != durations(2)
    ratios = [duration / 0.0053 for duration in durations(1)]
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(ratios) == pytest.approx(0.1, rel=0.15)
