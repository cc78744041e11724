"""What an engine's steps say of the token budget that is assumed of it: simulated engines in virtual time."""

import numpy as np
import pytest

from enginesim.settings import SchedulerSettings
from predictor.budget_check import BudgetDoubt
from predictor.engines.vllm import Settings
from predictor.kv_events import Batch, Stored, Tier
from predictor.prompt import as_tokens
from tests.sim.test_virtual_fleet import A100, SEED, SLOWER, Traffic, World

NONE, EXCEEDED, NEVER_FILLED = BudgetDoubt.NONE, BudgetDoubt.EXCEEDED, BudgetDoubt.NEVER_FILLED


def world_with(assumed: int, real: int, threshold: int = 0) -> World:
    limits = SchedulerSettings(
        num_gpu_blocks=60_000, max_num_batched_tokens=real, long_prefill_token_threshold=threshold
    )
    world = World(np.random.default_rng(SEED), [A100, SLOWER], limits)
    for worker in world.engines:
        settings = Settings(
            num_gpu_blocks=60_000, max_num_batched_tokens=assumed, long_prefill_token_threshold=threshold
        )
        world.fleet.configure(worker, settings)
    return world


def doubts(world: World, longest: int = 40_000, per_s: float = 1.0, count: int = 150) -> set[BudgetDoubt]:
    traffic = Traffic(world.rng, longest)
    world.run(list(traffic.poisson(0.0, count, per_s)))
    told = world.fleet.budget_doubts()
    pools = world.fleet.view(world.now_s)["pools"]
    assert isinstance(pools, dict)
    shown = {name: worker["token_budget_doubt"] for name, worker in pools["m"]["workers"].items()}
    assert shown == {name: told.get(name, NONE).value for name in world.engines}
    return {told.get(name, NONE) for name in world.engines}


@pytest.mark.parametrize(
    ("assumed", "real", "said"),
    [
        (2048, 2048, NONE),
        (8192, 8192, NONE),
        (512, 512, NONE),
        (8192, 2048, NEVER_FILLED),
        (2048, 1024, NEVER_FILLED),
        (2048, 8192, EXCEEDED),
        (1024, 2048, EXCEEDED),
    ],
)
def test_a_budget_that_is_not_the_engines_is_noticed_and_no_other(assumed: int, real: int, said: BudgetDoubt) -> None:
    world = world_with(assumed, real)
    assert doubts(world, per_s=4.0, count=450) == {said}


@pytest.mark.parametrize("load", [0.2, 4.0])
def test_prompts_that_never_fill_a_step_say_nothing_of_a_large_budget(load: float) -> None:
    # Many begin alike, and each goes on where another ended: those are no unfinished prefills.
    assert doubts(world_with(16384, 16384), longest=1500, per_s=load) == {NONE}


def test_with_a_cap_on_long_prefills_a_step_may_stay_below_its_budget() -> None:
    assert doubts(world_with(8192, 8192, threshold=512)) == {NONE}


def test_a_budget_that_is_set_right_is_not_doubted_any_more() -> None:
    world = world_with(2048, 8192)
    assert doubts(world) == {EXCEEDED}
    for worker in world.engines:
        world.fleet.configure(worker, Settings(num_gpu_blocks=60_000, max_num_batched_tokens=8192))
    assert not world.fleet.budget_doubts()


def test_runs_that_a_lower_tier_may_have_loaded_are_no_steps() -> None:
    world = world_with(2048, 8192)
    block = Stored((1,), None, as_tokens(range(16)), 16, Tier.HOST, None, None)
    for worker in world.engines:
        world.fleet.apply(worker, Batch(None, (block,), 0))
    assert doubts(world) == {NONE}
