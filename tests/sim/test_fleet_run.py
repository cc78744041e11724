"""Minutes of the fleet run (`python -m bench.fleet`): engines of both families, and everything that happens to them."""

import sys
from dataclasses import asdict, replace

import pytest

from bench.fleet.plan import Incident, Plan, Rollout, Trouble, fleet_pools, make_plan
from bench.fleet.report import OVERALL, Report, report
from bench.fleet.world import World
from predictor.feed_state import Trust

SEED = 20261130
_MINUTE_S = 60.0

pytestmark = pytest.mark.timeout(600)


def run(minutes: float, *names: str) -> World:
    """Two engines of each pool, of the mixed one those of unlike families, at night; a day lasts half an hour."""
    pools = tuple(replace(pool, engines=pool.engines[::2]) for pool in fleet_pools() if pool.name in names)
    incidents = (
        Incident(60.0, Trouble.LOST_EVENTS, "chat-0", 20.0),
        Incident(80.0, Trouble.SLOW, "chat-1", 40.0),
        Incident(100.0, Trouble.LOST_EVENTS, "mixed-1", 20.0),
        Incident(130.0, Trouble.CRASH, "chat-0", 25.0),
    )
    plan = Plan(pools, 30 * _MINUTE_S, minutes * _MINUTE_S, incidents, (Rollout(110.0, "mixed"),))
    if "chat" not in names:
        plan = replace(plan, incidents=(), rollouts=())
    world = World(plan, SEED, capacity_asks=24)
    world.run()
    return world


def figures(found: Report) -> dict[str, object]:
    """All but what the machine's speed decides."""
    return {**asdict(found), "headway_cpu_s": None}


@pytest.fixture(scope="module")
def world() -> World:
    return run(5.0, "chat", "mixed")


def test_predictions_hold_through_load_crashes_lost_events_throttling_and_rollouts(world: World) -> None:
    found = report(world)
    whole = found.of(OVERALL)
    sys.stdout.write(f"\nseed {SEED}: {whole}\n{found.done}")
    assert {Trouble.CRASH.value, Trouble.LOST_EVENTS.value, Trouble.SLOW.value, "rollouts"} <= set(found.done)
    assert found.done["batches lost"] > 5
    assert found.done["replays"] > 0
    assert whole.whole is not None
    assert whole.whole.graded > 100
    assert whole.whole.within_1s >= 0.9
    assert whole.whole.within_10s >= 0.98
    assert whole.wrong_share is not None
    assert whole.wrong_share <= 0.06
    assert 0.80 <= whole.whole.coverage <= 0.98


def test_every_request_is_accounted_for(world: World) -> None:
    for name, count in world.counts.items():
        outcomes = [one.outcome for one in world.judged if one.pool == name]
        ungraded = sum(outcome.actual_ttft_s is None for outcome in outcomes)
        assert count.asked >= len(outcomes) + count.refused
        # Who was not graded died with its engine, gave up, was served by another engine, or found none.
        assert ungraded <= count.failed + count.given_up + count.moved
        assert count.asked - count.refused - len(outcomes) <= count.failed
    assert world.fleet.in_flight == 0


def test_at_the_end_every_view_is_what_its_engine_holds(world: World) -> None:
    compared = 0
    for machine in world.machines.values():
        if machine.up and machine.feed.trust is Trust.LIVE:
            compared += 1
            held = machine.scheduler.pool.distinct_blocks
            told = world.fleet.view(world.now_s)["pools"][machine.pool]["workers"][machine.name]  # type: ignore[index]
            assert told["cached_blocks"] == held, machine.name
            assert told["num_gpu_blocks"] == machine.kind.settings.num_gpu_blocks
    assert compared >= len(world.machines) // 2


def test_engines_of_one_speed_are_not_taken_to_change_it_however_full_they_are() -> None:
    """SGLang's, at noon: who waits, and who decodes together, has the same things in common."""
    pools = tuple(
        replace(pool, engines=pool.engines[::2], night_at=0.6) for pool in fleet_pools() if pool.name == "radix"
    )
    world = World(Plan(pools, 30 * _MINUTE_S, 7 * _MINUTE_S, (), ()), SEED, capacity_asks=60)
    world.run()
    assert world.counts["radix"].refused > 50, "they are full"
    view = world.fleet.view(world.now_s)["pools"]["radix"]["workers"]  # type: ignore[index]
    for name, machine in world.machines.items():
        cost = view[name]["cost"]
        sys.stdout.write(f"\nseed {SEED}: {name} {cost}")
        assert sum(cost["speed_changes"].values()) == 0
        assert cost["us_per_token"] == pytest.approx(machine.kind.costs.prefill_us_per_token, rel=0.2)


def test_the_same_seed_gives_the_same_figures() -> None:
    once, again = (figures(report(run(1.0, "radix"))) for _ in range(2))
    assert once == again


def test_a_fifth_of_the_traffic_past_the_filter_costs_at_most_five_points() -> None:
    (chat,) = (pool for pool in fleet_pools() if pool.name == "chat")
    within_1s = dict.fromkeys((0.0, 0.2), 0.0)
    graded = dict.fromkeys(within_1s, 0)
    for seed in (3, 4):
        for bypass in within_1s:
            # Twelve minutes from night to noon, and nothing else happens.
            world = World(make_plan((chat,), 0.2, 0.4, seed, is_calm=True), seed, bypass)
            world.run()
            found = report(world).of(OVERALL).whole
            assert found is not None
            graded[bypass] += found.graded
            within_1s[bypass] += found.within_1s * found.graded
            assert found.within_10s >= 0.99
            assert (world.counts["chat"].bypassed > 100) == (bypass > 0)
    without, beside = (within_1s[bypass] / graded[bypass] for bypass in within_1s)
    sys.stdout.write(f"\nwithin 1 s: {without:.1%}, with a fifth past the filter {beside:.1%}")
    assert without >= 0.97
    assert beside >= without - 0.05
