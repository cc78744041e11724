"""Requests yet to come, and what they do to one that is there."""

import statistics
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.arrivals import CappedPrefill, RecentArrivals
from predictor.engines.vllm import Queue, Sequence, Settings, schedule
from predictor.prefill_cost import StepCost
from predictor.run_forward import RunForward
from predictor.timeline import Course, Timeline

MEASURED = StepCost(0.0, 0.0, 0.005, 30e-6, 37e-12, 0.0)


def course(queue: Queue, settings: Settings, tokens: int) -> Course:
    ends = {seq.id: seq.expected_output for seq in queue.running}
    return Timeline(0.0, RunForward(queue, settings, MEASURED, ends)).course(tokens)


def stepped_s(queue: Queue, settings: Settings, tokens: int, output: int, coming: list[tuple[float, int]]) -> float:
    """How long the prompt takes by the engine's own rule, step by step."""
    queue, clock_s, left = queue.copy(), 0.0, list(coming)
    newcomer = Sequence("newcomer", tokens, 0, 10**9)
    queue.waiting.append(newcomer)
    while not newcomer.generated:
        while left and left[0][0] <= clock_s:
            queue.waiting.append(Sequence(str(len(left)), left.pop(0)[1], 0, output))
        step = schedule(queue, settings)
        clock_s += MEASURED.step_s(step.new_tokens, step.squares, 0)
        queue.running = [seq for seq in queue.running if seq.generated < seq.expected_output]
    return clock_s


@hypothesis_settings(deadline=None)
@example(20_000, 1024, [(5.3e-20, 18_392), (1.0, 5120)], 1, 0)
@example(20_000, 1024, [(5.3e-20, 30_000), *[(0.0, 30_000)] * 6], 1, 0)
@given(
    st.integers(20_000, 300_000),
    st.sampled_from([1024, 2048, 4096]),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 100_000)), max_size=8),
    st.integers(1, 300),
    st.integers(0, 2),
)
def test_a_capped_prompt_and_those_that_come_later_flow_as_their_engine_steps(
    tokens: int, threshold: int, gaps: list[tuple[float, int]], output: int, decoding: int
) -> None:
    settings = Settings(long_prefill_token_threshold=threshold)
    beside = [Sequence(f"d{n}", 10, 10, 100) for n in range(decoding)]
    for seq in beside:
        seq.generated = 1
    queue = Queue(beside)
    at_s, coming = 0.0, []
    for gap_s, size in gaps:
        at_s += gap_s
        coming.append((at_s, size))
    own_s = MEASURED.tokens_s(0, tokens)
    flow = CappedPrefill(course(queue, settings, tokens), own_s / tokens, tokens, output, settings, MEASURED)
    engine_s = stepped_s(queue, settings, tokens, output, coming)
    # A flow knows no whole steps, and spreads the newcomer's own squares evenly. Who comes when a step has just begun
    # finds the prompt alone in it: ahead by as many steps as would be shared for so many tokens.
    budget = settings.max_num_batched_tokens
    shared_s = MEASURED.step_s(min(budget, (1 + len(coming)) * threshold), 0, 0) * budget / threshold
    ahead_s = shared_s - MEASURED.step_s(budget, 0, 0)
    assert flow.takes_s(coming) == pytest.approx(engine_s, rel=0.25, abs=0.35 + ahead_s)


def test_most_capped_prompts_flow_within_a_hundredth_of_their_engines_steps() -> None:
    rng, off = np.random.default_rng(3), []
    for _ in range(200):
        tokens, output = int(rng.integers(20_000, 300_000)), int(rng.integers(1, 300))
        settings = Settings(long_prefill_token_threshold=int(rng.choice([1024, 2048, 4096])))
        times_s = np.cumsum(rng.uniform(0, 3, rng.integers(9)))
        coming = [(float(at_s), int(rng.integers(1, 100_000))) for at_s in times_s]
        own_s = MEASURED.tokens_s(0, tokens)
        flow = CappedPrefill(course(Queue(), settings, tokens), own_s / tokens, tokens, output, settings, MEASURED)
        engine_s = stepped_s(Queue(), settings, tokens, output, coming)
        off.append(abs(flow.takes_s(coming) / engine_s - 1))
    assert statistics.median(off) < 0.01
    assert sorted(off)[190] < 0.1


def busy(per_s: float, tokens: int, now_s: float) -> RecentArrivals:
    recent = RecentArrivals()
    for number in range(64):
        recent.add(now_s - (63 - number) / per_s, tokens)
    return recent


def test_a_giant_that_is_alone_is_expected_to_share_its_steps_with_those_that_are_likely_to_come() -> None:
    settings = Settings(long_prefill_token_threshold=1024)
    alone = course(Queue(), settings, 200_000)
    now_s, own_s = 1.8e9, MEASURED.tokens_s(0, 200_000)
    small, at = busy(1.0, 500, now_s), Course(now_s, now_s, now_s + alone.finish_s, 0, 0, 0, 0, alone.alone_tokens)
    stretch_s = small.stretch_under_cap_s(at, own_s, 200_000, 100, settings, MEASURED, now_s)
    # Nearly always somebody is there for a hundred steps, so it gets 1024 tokens of nearly each: 195 steps, not 25.
    assert 0.5 * 170 * 0.005 < stretch_s < 1.5 * 170 * 0.005
    nobody = RecentArrivals()
    assert nobody.stretch_under_cap_s(at, own_s, 200_000, 100, settings, MEASURED, now_s) == 0.0


@pytest.mark.parametrize("now_s", [0.0, 1.8e9])
def test_what_is_imagined_takes_a_bounded_time_at_any_rate_cost_and_time_of_day(now_s: float) -> None:
    settings = Settings(long_prefill_token_threshold=16)
    rng = np.random.default_rng(1)
    for _ in range(200):
        recent = busy(float(10 ** rng.uniform(-3, 4)), int(10 ** rng.uniform(0, 6)), now_s)
        tokens, alone = int(10 ** rng.uniform(0, 6)), int(rng.integers(2))
        cost = StepCost(0.0, 0.0, float(rng.choice([0.0, 1e-9, 0.03])), float(rng.choice([0.0, 3e-5])), 0.0, 0.0)
        at_s = now_s + float(rng.uniform(0, 30))
        where = Course(at_s, at_s, at_s + 1.0, 1, 0, 100, 0 if alone else 7, tokens if alone else 0)
        begun_s = time.process_time()
        assert recent.stretch_under_cap_s(where, cost.tokens_s(0, tokens), tokens, 300, settings, cost, now_s) >= 0.0
        assert time.process_time() - begun_s < 0.1
