"""What a fleet is made of, how it is loaded, and what happens to it. One seed decides everything."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import cos, pi

import numpy as np

from enginesim.settings import CostSettings, SchedulerSettings, SglangSettings
from predictor.engines.vllm import Settings

# Every step of every engine takes so much more or less (sigma of a lognormal factor).
_JITTER = 0.03
# The night's load and the day's, of what the pool's engines can do.
_LEAST_LOAD, _MOST_LOAD = 0.2, 1.1
_LONGEST_TOKENS = 400_000


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What one worker runs, until a rollout puts another in its place."""

    limits: SchedulerSettings
    costs: CostSettings
    version: int = 1

    @property
    def settings(self) -> Settings:
        """What it tells of itself."""
        known, sglang = self.limits, isinstance(self.limits, SglangSettings)
        return Settings(
            block_size=known.block_size,
            num_gpu_blocks=known.usable_blocks if sglang else known.num_gpu_blocks,
            max_num_batched_tokens=known.max_num_batched_tokens,
            max_num_seqs=known.max_num_seqs,
            long_prefill_token_threshold=known.long_prefill_token_threshold,
            max_model_len=known.max_model_len,
            family="sglang" if sglang else "vllm",
        )

    def rolled_out(self, rng: np.random.Generator) -> EngineKind:
        """The next version: another speed, and mostly another cache and another budget as well."""
        pace = float(rng.uniform(0.75, 1.3))
        limits = self.limits
        if rng.random() < 0.7:
            limits = replace(
                limits,
                num_gpu_blocks=round(limits.num_gpu_blocks * float(rng.uniform(0.8, 1.25))),
                max_num_batched_tokens=int(rng.choice((2048, 4096, 8192))),
            )
        return EngineKind(limits, _at_pace(self.costs, pace), self.version + 1)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One model on unlike engines. Lengths of the trace's prompts and outputs are taken times the scales."""

    name: str
    engines: tuple[EngineKind, ...]
    prompt_scale: float
    output_scale: float
    bound_s: float  # on the wait, of every third request
    night_at: float  # part of the day at which the load is least


class Trouble(enum.Enum):
    """What can happen to a worker."""

    CRASH = "crash"  # what it has in progress is lost, and its cache; it comes back as it was
    LOST_EVENTS = "lost events"  # a third of its KV batches does not arrive; mostly they can be had again
    SLOW = "slow"  # throttled, or a neighbour


@dataclass(frozen=True, slots=True)
class Incident:
    at_s: float
    trouble: Trouble
    worker: str
    seconds: float  # for so long


@dataclass(frozen=True, slots=True)
class Rollout:
    """Another version of the whole pool, one worker after the other."""

    at_s: float
    pool: str


@dataclass(frozen=True, slots=True)
class Plan:
    pools: tuple[PoolPlan, ...]
    day_s: float
    ends_at_s: float
    incidents: tuple[Incident, ...]
    rollouts: tuple[Rollout, ...]

    def load(self, pool: PoolPlan, at_s: float) -> float:
        """Of what the pool's engines can do."""
        swing = (_MOST_LOAD - _LEAST_LOAD) / 2
        return _LEAST_LOAD + swing * (1 - cos(2 * pi * (at_s / self.day_s - pool.night_at)))


def fleet_pools() -> tuple[PoolPlan, ...]:
    """Four models of four engines each, of both families."""
    return (
        # Prompts of 300K tokens take 12 s on the engine of pace 1.
        _pool("long", 4.0, 1.0, 30.0, 0.0, _long_engines()),
        _pool("chat", 0.5, 0.5, 10.0, 0.1, _chat_engines()),
        _pool("mixed", 1.0, 1.0, 10.0, 0.2, _mixed_engines()),
        _pool("radix", 0.5, 1.0, 10.0, 0.3, _radix_engines()),
    )


def _pool(name: str, prompts: float, outputs: float, bound_s: float, night: float, kinds: list[EngineKind]) -> PoolPlan:
    engines = tuple(
        replace(kind, costs=replace(kind.costs, jitter=_JITTER, seed=number)) for number, kind in enumerate(kinds)
    )
    return PoolPlan(name, engines, prompts, outputs, bound_s, night)


def _long_engines() -> list[EngineKind]:
    costs = CostSettings(step_ms=25.0, prefill_us_per_token=30.0, prefill_ns_per_token2=0.037, decode_ms=0.2)
    kinds = ((1.0, 31_250, 8192), (0.8, 25_000, 8192), (1.3, 31_250, 16_384), (1.0, 45_000, 4096))
    return [EngineKind(_vllm(64, blocks, budget), _at_pace(costs, pace)) for pace, blocks, budget in kinds]


def _chat_engines() -> list[EngineKind]:
    costs = CostSettings(step_ms=35.0, prefill_us_per_token=250.0, prefill_ns_per_token2=0.5, decode_ms=0.3)
    kinds = ((1.0, 25_000, 2048, 0), (1.4, 25_000, 2048, 0), (0.9, 18_000, 2048, 0), (1.0, 30_000, 2048, 1024))
    return [EngineKind(_vllm(16, blocks, budget, cap), _at_pace(costs, pace)) for pace, blocks, budget, cap in kinds]


def _mixed_engines() -> list[EngineKind]:
    costs = CostSettings(step_ms=30.0, prefill_us_per_token=120.0, prefill_ns_per_token2=0.16, decode_ms=0.25)
    return [
        EngineKind(_vllm(32, 25_000, 4096), _at_pace(costs, 1.0)),
        EngineKind(_vllm(32, 20_000, 8192), _at_pace(costs, 1.2)),
        EngineKind(_sglang(64, 12_000, 4096), _at_pace(costs, 0.9)),
        EngineKind(_sglang(64, 10_000, 8192), _at_pace(costs, 1.1)),
    ]


def _radix_engines() -> list[EngineKind]:
    costs = CostSettings(step_ms=30.0, prefill_us_per_token=200.0, prefill_ns_per_token2=0.4, decode_ms=0.3)
    kinds = ((1.0, 30_000, 4096), (1.3, 30_000, 2048), (0.8, 25_000, 4096), (1.0, 40_000, 8192))
    return [EngineKind(_sglang(16, pages, chunk), _at_pace(costs, pace)) for pace, pages, chunk in kinds]


def _vllm(block_size: int, blocks: int, budget: int, cap: int = 0) -> SchedulerSettings:
    return SchedulerSettings(
        block_size=block_size,
        num_gpu_blocks=blocks,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=cap,
        max_model_len=_LONGEST_TOKENS,
    )


def _sglang(page_size: int, pages: int, chunk: int) -> SglangSettings:
    return SglangSettings(
        block_size=page_size,
        num_gpu_blocks=pages + 1,
        max_num_batched_tokens=chunk,
        max_prefill_tokens=16_384,
        max_model_len=_LONGEST_TOKENS,
    )


def _at_pace(costs: CostSettings, pace: float) -> CostSettings:
    """An engine that takes so many times as long for everything."""
    return replace(
        costs,
        step_ms=costs.step_ms * pace,
        prefill_us_per_token=costs.prefill_us_per_token * pace,
        prefill_ns_per_token2=costs.prefill_ns_per_token2 * pace,
        decode_ms=costs.decode_ms * pace,
    )


# A day's troubles of one worker, each with its shortest and longest time.
_TROUBLES = ((Trouble.CRASH, 1, 40.0, 180.0), (Trouble.LOST_EVENTS, 3, 20.0, 90.0), (Trouble.SLOW, 1, 120.0, 900.0))


def make_plan(pools: tuple[PoolPlan, ...], hours: float, day_hours: float, seed: int, is_calm: bool = False) -> Plan:
    """`is_calm`: nothing happens but load."""
    rng = np.random.default_rng([seed, 1])
    ends_at_s, day_s = hours * 3600.0, day_hours * 3600.0
    incidents = [
        Incident(at_s, trouble, worker_name(pool, number), float(rng.uniform(least_s, most_s)))
        for pool in pools
        for number in range(len(pool.engines))
        for trouble, a_day, least_s, most_s in _TROUBLES
        for at_s in _moments(rng, a_day, day_s, ends_at_s)
    ]
    rollouts = [Rollout(at_s, pool.name) for pool in pools for at_s in _moments(rng, 1, day_s, ends_at_s)]
    if is_calm:
        incidents, rollouts = [], []
    by_time: Callable[[Incident | Rollout], float] = lambda what: what.at_s  # noqa: E731 - typed for both
    return Plan(pools, day_s, ends_at_s, tuple(sorted(incidents, key=by_time)), tuple(sorted(rollouts, key=by_time)))


def _moments(rng: np.random.Generator, a_day: int, day_s: float, ends_at_s: float) -> list[float]:
    """So many in each day, at any time of it; of days that are cut short those before the end."""
    days = int(-(-ends_at_s // day_s))
    drawn = [day_s * (day + float(rng.random())) for day in range(days) for _ in range(a_day)]
    return [at_s for at_s in drawn if at_s < ends_at_s]


def worker_name(pool: PoolPlan, number: int) -> str:
    return f"{pool.name}-{number}"
