"""The goodput benchmark's two kinds of engines: vLLM's own scheduler and cache, and the simulator's."""

import numpy as np
import pytest

from bench.goodput.policies import Headway, LeastRequest
from bench.goodput.traffic import Ask
from bench.goodput.vllm_engines import Cores
from bench.goodput.world import Outcome, World, worker_names
from enginesim.settings import CostSettings, SchedulerSettings
from tests.engine.harness import engine_home

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

COSTS = CostSettings(step_ms=5.0, prefill_us_per_token=30.0, prefill_ns_per_token2=0.037, decode_ms=0.05)
# A cache that is short, so that requests wait for space and blocks are evicted.
LIMITS = SchedulerSettings(num_gpu_blocks=2_500, max_num_batched_tokens=4096, max_num_seqs=64)
NAMES = worker_names(2)


def asks(count: int) -> list[Ask]:
    rng = np.random.default_rng(3)
    shared = [tuple(rng.integers(1, 100_000, 3000).tolist()) for _ in range(4)]
    made, at_s = [], 0.0
    for number in range(count):
        at_s += float(rng.exponential(0.15))
        own = tuple(rng.integers(1, 100_000, int(rng.integers(20, 6000))).tolist())
        made.append(Ask(at_s, shared[number % 4] + own, int(rng.integers(1, 80)), 10.0 if number % 2 else None))
    return made


def cores() -> Cores:
    return Cores(engine_home())


def of(outcome: Outcome) -> tuple[float | None, int]:
    return None if outcome.ttft_s is None else round(outcome.ttft_s, 6), outcome.cached_tokens


def test_vllms_cores_serve_each_request_when_the_simulated_ones_do() -> None:
    vllm = cores()
    try:
        theirs = World([COSTS] * 2, LIMITS, LeastRequest(NAMES, 1), core=vllm.core).run(asks(120))
    finally:
        vllm.close()
    ours = World([COSTS] * 2, LIMITS, LeastRequest(NAMES, 1)).run(asks(120))
    assert theirs.prefilled_tokens == ours.prefilled_tokens
    assert [of(outcome) for outcome in theirs.outcomes.values()] == [of(outcome) for outcome in ours.outcomes.values()]
    assert any(outcome.cached_tokens for outcome in theirs.outcomes.values())


def test_headway_hears_of_them_what_it_hears_of_engines() -> None:
    vllm = cores()
    try:
        policy = Headway(NAMES, LIMITS, 1)
        world = World([COSTS] * 2, LIMITS, policy, core=vllm.core).run(asks(60))
    finally:
        vllm.close()
    assert all(outcome.ttft_s is not None for outcome in world.outcomes.values() if outcome.worker is not None)
    assert any(policy.fleet.learned(name) for name in NAMES)
    assert all(policy.fleet.in_flight_on(name) == 0 for name in NAMES)


def test_a_core_that_dies_is_told_as_such() -> None:
    vllm = cores()
    core = vllm.core(LIMITS, COSTS)
    vllm.say("what")
    with pytest.raises(OSError, match="exit code"):
        core.begin()
    vllm.close()
