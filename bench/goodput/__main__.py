"""`python -m bench.goodput TRACE.jsonl.gz [--engines 4] [--requests 1200]`: a table of all policies for each load.

TRACE is Mooncake's conversation trace (github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.goodput.policies import Headway, LeastRequest, Policy, RoundRobin
from bench.goodput.score import Score, score
from bench.goodput.traffic import Agents, Ask, from_trace
from bench.goodput.world import Core, SimulatedCore, World, worker_names
from enginesim.settings import CostSettings, SchedulerSettings

SEED = 20261129
BOUND_S = 10.0
LOADS = (0.7, 1.0, 1.3, 2.0)
LIMITS_PER_ENGINE = (8, 16, 32, 64)
COSTS = CostSettings(step_ms=5.0, prefill_us_per_token=30.0, prefill_ns_per_token2=0.037, decode_ms=0.05)
TRACE_LIMITS = SchedulerSettings(num_gpu_blocks=25_000, max_num_batched_tokens=8192, max_num_seqs=256)
# A second of lessons each: what is compared is how they do when they know their engines.
_LESSONS, _LESSON_GAP_S = 16, 4.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """`uniform`, or engines of which every second takes half as long again."""

    engines: int
    uniform: bool = True

    @property
    def costs(self) -> list[CostSettings]:
        slower = replace(COSTS, prefill_us_per_token=45.0, prefill_ns_per_token2=0.055, step_ms=7.0, decode_ms=0.08)
        return [COSTS if self.uniform or number % 2 == 0 else slower for number in range(self.engines)]

    def __str__(self) -> str:
        return f"{self.engines} engines, {'uniform' if self.uniform else 'unlike'}"


def lessons(fleet: Fleet) -> list[Ask]:
    """Prompts one after the other, which nobody else has."""
    asks = []
    for number in range(_LESSONS * fleet.engines):
        length = (500, 8000, 1500, 20_000, 3000, 12_000, 700, 30_000)[number // fleet.engines % 8]
        tokens = tuple(range(10_000_000 + number * 100_000, 10_000_000 + number * 100_000 + length))
        asks.append(Ask(number * _LESSON_GAP_S / fleet.engines, tokens, 20))
    return asks


def policies(fleet: Fleet, limits: SchedulerSettings) -> list[Callable[[], Policy]]:
    names = worker_names(fleet.engines)
    made: list[Callable[[], Policy]] = [lambda: RoundRobin(names), lambda: LeastRequest(names, SEED)]
    made += [partial(LeastRequest, names, SEED, limit * fleet.engines) for limit in LIMITS_PER_ENGINE]
    return [*made, lambda: Headway(names, limits, SEED)]


def trace_capacity_per_s(fleet: Fleet, trace: Path, count: int) -> float:
    """What the fleet gets through under least request when everything is there at once."""
    world = World(fleet.costs, TRACE_LIMITS, LeastRequest(worker_names(fleet.engines), SEED))
    world.run(from_trace(trace, count, 1e6, BOUND_S, SEED))
    return count / world.now_s


def play_trace(
    fleet: Fleet,
    trace: Path,
    count: int,
    per_s: float,
    policy: Policy,
    core: Callable[[SchedulerSettings, CostSettings], Core] = SimulatedCore,
) -> tuple[World, Score]:
    before = lessons(fleet)
    begins_s = before[-1].at_s + 60.0
    asks = [replace(ask, at_s=ask.at_s + begins_s) for ask in from_trace(trace, count, per_s, BOUND_S, SEED)]
    return _played(World(fleet.costs, TRACE_LIMITS, policy, core=core), before, asks, begins_s)


def agent_limits(fleet: Fleet) -> SchedulerSettings:
    """Caches that hold 60 % of what so many agents would have in them at a load of 1."""
    active_tokens = AGENTS_PER_ENGINE * _MEAN_HISTORY
    return SchedulerSettings(num_gpu_blocks=round(0.6 * active_tokens / 16), max_num_batched_tokens=8192)


# Agents that keep one engine busy, found by trying; and the mean length of their histories, in tokens.
AGENTS_PER_ENGINE, _MEAN_HISTORY = 30, 11_000
_AGENTS_FOR_S = 240.0


def play_agents(fleet: Fleet, load: float, policy: Policy) -> tuple[World, Score]:
    before = lessons(fleet)
    begins_s = before[-1].at_s + 60.0
    agents = Agents(round(load * AGENTS_PER_ENGINE * fleet.engines), BOUND_S, SEED)
    first = [replace(ask, at_s=ask.at_s + begins_s) for ask in agents.first()]
    world = World(fleet.costs, agent_limits(fleet), policy, agents, begins_s + _AGENTS_FOR_S)
    return _played(world, before, first, begins_s)


def _played(world: World, before: Sequence[Ask], asks: Sequence[Ask], begins_s: float) -> tuple[World, Score]:
    agents, until_s, world.agents, world.until_s = world.agents, world.until_s, None, None
    world.run(before)
    taught = world.prefilled_tokens
    world.agents, world.until_s = agents, until_s
    world.run(asks)
    outcomes = [outcome for outcome in world.outcomes.values() if outcome.asked_at_s >= begins_s]
    judged = world.policy.judgement(world.now_s)
    return world, score(world.policy.name, outcomes, world.prefilled_tokens - taught, judged)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.goodput", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--unlike", action="store_true", help="every second engine takes half as long again")
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--workload", choices=("trace", "agents"), default="trace")
    parser.add_argument("--only", help="policies whose names begin so")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    fleet = Fleet(chosen.engines, not chosen.unlike)
    limits = TRACE_LIMITS if chosen.workload == "trace" else agent_limits(fleet)
    capacity_per_s = 0.0
    if chosen.workload == "trace":
        capacity_per_s = trace_capacity_per_s(fleet, chosen.trace, chosen.requests)
        print(f"seed {SEED}, {fleet}, capacity {capacity_per_s:.2f} requests/s", flush=True)
    results = []
    for load in chosen.loads:
        scores = []
        for make in policies(fleet, limits):
            policy, started_s = make(), time.perf_counter()
            if chosen.only and not policy.name.startswith(chosen.only):
                continue
            if chosen.workload == "trace":
                _, got = play_trace(fleet, chosen.trace, chosen.requests, load * capacity_per_s, policy)
            else:
                _, got = play_agents(fleet, load, policy)
            scores.append(got)
            print(f"  {load:g} {got.policy}: {got.served:.1%} in {time.perf_counter() - started_s:.0f} s", flush=True)
        named = {"workload": chosen.workload, "fleet": str(fleet), "load": load}
        results += [{**named, **asdict(got)} for got in scores]
        shown = {result["policy"] for result in best_limit_only(results[-len(scores) :])}
        show(f"{chosen.workload}, {fleet}, load {load:g}", [got for got in scores if got.policy in shown])
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results, indent=1))
    return 0


def best_limit_only(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One load's results, with that limit only under which the most were served."""
    limited = [result for result in results if ", at most" in result["policy"]]
    best = max(limited, key=lambda result: float(result["served"]), default=None)
    return [result for result in results if result not in limited or result is best]


def show(title: str, scores: list[Score]) -> None:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("policy", "served", "bounded", "refused", "p50", "p90", "p99", "hits", "Mtok", "false", "under"):
        table.add_column(column, no_wrap=True)
    for got in scores:
        table.add_row(
            got.policy,
            *(f"{share:.1%}" for share in (got.served, got.served_bounded, got.refused)),
            *(f"{seconds:.2f}" for seconds in (got.p50_s, got.p90_s, got.p99_s)),
            f"{got.cache_hits:.1%}",
            f"{got.prefilled_mtokens:.1f}",
            *("-" if share is None else f"{share:.1%}" for share in (got.false_alarms, got.underpredicted)),
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
