"""Speculative decoding: what an engine's counters say of it, and what a queue becomes with it."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from predictor.drafts import DraftCounts, Drafts
from predictor.engines.vllm import NO_DRAFTS, Drafting, Queue, Sequence, Settings, schedule, undo
from predictor.fleet import Fleet, PoolPolicy, WorkerSpec
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHasher
from predictor.shadow import Shadow
from predictor.step_sample import StepSample
from predictor.stored_run import StoredRun

EAGLE = Drafting(gain=2.5, drafted=3.0)


def test_who_decodes_gets_what_was_not_drafted_and_what_was_accepted() -> None:
    drafts = Drafts()
    # 1,000 steps of single sequences: one token each, three drafted, 1.5 of them right.
    assert drafts.count(DraftCounts(generated=2500, drafted=3000, accepted=1500))
    assert drafts.drafting == EAGLE
    assert drafts.drafting.width == 4


def test_an_engine_that_drafts_nothing_changes_nothing() -> None:
    drafts = Drafts()
    assert not drafts.count(DraftCounts(generated=5000, drafted=0, accepted=0))
    assert drafts.drafting is NO_DRAFTS


def test_a_few_steps_say_nothing_and_small_changes_are_not_worth_a_word() -> None:
    drafts = Drafts()
    assert not drafts.count(DraftCounts(40, 60, 20))
    assert drafts.count(DraftCounts(2540, 3060, 1520))
    known = drafts.drafting
    assert not drafts.count(DraftCounts(5040, 6060, 3021))
    assert drafts.drafting is known


def test_newer_drafts_count_for_more_than_older_ones() -> None:
    drafts = Drafts()
    drafts.count(DraftCounts(2_500, 3_000, 1_500))
    drafts.count(DraftCounts(2_500 + 150_000, 3_000 + 300_000, 1_500 + 50_000))
    assert drafts.drafting.gain == pytest.approx(1.5, rel=0.03)


def test_counters_that_fall_back_are_another_engines() -> None:
    drafts = Drafts()
    drafts.count(DraftCounts(250_000, 300_000, 150_000))
    assert drafts.count(DraftCounts(1_200, 1_000, 200))
    assert drafts.drafting == Drafting(gain=1.2, drafted=1.0)


def decoding(count: int, **more: float) -> Queue:
    running = [Sequence(f"d{n}", 100, 100, 500, generated=1) for n in range(count)]
    return Queue(running=running, drafting=EAGLE, **more)  # type: ignore[arg-type]


def test_drafts_take_room_in_a_step_whether_they_are_accepted_or_not() -> None:
    queue = decoding(50)
    queue.waiting.append(Sequence("prompt", 1000, 0, 1))
    step = schedule(queue, Settings(max_num_batched_tokens=512))
    assert step.new_tokens == 512 - 50 * 4
    with_slots = decoding(50)
    with_slots.waiting.append(Sequence("prompt", 1000, 0, 1))
    step = schedule(with_slots, Settings(max_num_batched_tokens=512, draft_slots=1))
    assert step.new_tokens == 512 - 50 * 5 - 1


def test_a_step_gives_whole_tokens_and_many_steps_the_average() -> None:
    queue = decoding(3)
    steps = [schedule(queue, Settings()) for _ in range(20)]
    assert {gain for step in steps for gain in step.gains} == {2, 3}
    assert [seq.generated for seq in queue.running] == [1 + 50] * 3


@given(
    gain=st.one_of(st.floats(1.0, 8.0), st.integers(100, 800).map(lambda hundredths: hundredths / 100)),
    since=st.integers(0, 10_000_000),
    tokens=st.integers(0, 2000),
    granted=st.one_of(st.none(), st.integers(1, 9)),
)
@example(gain=1.15, since=100, tokens=1, granted=None)  # 100 * 1.15 is a little less than 115, as a machine reckons
def test_the_steps_to_an_outputs_end_are_as_few_as_give_all_of_its_tokens(
    gain: float, since: int, tokens: int, granted: int | None
) -> None:
    drafting = Drafting(gain, drafted=8.0)
    steps = drafting.steps_to(tokens, since, granted)
    assert drafting.gained(since, steps, granted) >= tokens
    assert not tokens or drafting.gained(since, steps - 1, granted) < tokens


@given(gain=st.floats(1.0, 8.0), since=st.integers(0, 1000), steps=st.integers(1, 50), granted=st.integers(1, 9))
def test_many_steps_with_room_for_some_drafts_give_what_each_of_them_gives(
    gain: float, since: int, steps: int, granted: int
) -> None:
    drafting = Drafting(gain, drafted=8.0)
    each = [min(granted, drafting.gained(since + number, 1)) for number in range(steps)]
    assert drafting.gained(since, steps, granted) == sum(each)


def test_nobody_gets_more_than_was_asked_for() -> None:
    queue = decoding(1)
    queue.running[0].max_output = 7
    for _ in range(9):
        schedule(queue, Settings())
    assert queue.running[0].generated == 7


def test_a_composition_with_drafts_can_be_taken_back() -> None:
    queue = decoding(4, free_blocks=100)
    before = [(seq.computed, seq.generated) for seq in queue.running]
    undo(queue, schedule(queue, Settings()))
    assert [(seq.computed, seq.generated) for seq in queue.running] == before


def test_a_fleet_takes_an_engines_counters_and_shows_what_they_say() -> None:
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("pool")], BlockHasher(rng), rng)
    fleet.join("pool", WorkerSpec("w", "10.0.0.1:8000", Settings()))
    fleet.observe_drafts("w", DraftCounts(generated=2500, drafted=3000, accepted=1500))
    view = json.loads(msgspec.json.encode(fleet.view(1.0)))["pools"]["pool"]["workers"]["w"]
    assert (view["tokens_per_decode"], view["drafted_per_decode"]) == (2.5, 3.0)


COST = StepCost(0.0, 0.0, 0.005, 30e-6, 0.0, 50e-6)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(max_num_batched_tokens=10),
        Settings(max_num_batched_tokens=13),
        Settings(max_num_batched_tokens=10, num_gpu_blocks=40),
        Settings(max_num_batched_tokens=100, long_prefill_token_threshold=2),
        Settings(max_num_batched_tokens=100),
    ],
    ids=["room for one draft and a starved one", "room for none of the last", "little space", "a low cap", "plenty"],
)
def test_a_silence_passes_as_its_steps_would_one_by_one_however_many_drafts_have_room(settings: Settings) -> None:
    def left_alone(asks: int) -> list[tuple[int, int, int]]:
        shadow = Shadow(settings, COST)
        shadow.set_drafting(EAGLE)
        for name in ("a", "b", "c", "d"):
            shadow.book(Sequence(name, 4, 0, 500), 0.0)
        now_s = 0.0
        for name in ("a", "b", "c", "d"):
            now_s += 0.007
            shadow.first_token(name, now_s)
        for number in range(asks):
            shadow.state(now_s + (number + 1) / asks)
        return [(seq.computed, seq.generated, seq.blocks) for seq in shadow.state(2.0).queue.running]

    assert left_alone(asks=1) == left_alone(asks=1000)


def test_blocks_that_decodes_fill_tell_that_a_step_ended_and_not_how_many() -> None:
    """One is lucky with its drafts: the other does not go as far for that, and no cost is learned of it."""
    samples: list[StepSample] = []
    shadow = Shadow(Settings(block_size=16), COST, on_sample=samples.append)
    shadow.set_sees_blocks(True)
    shadow.set_drafting(EAGLE)
    for name, first in (("a", 1), ("b", 11)):
        shadow.book(Sequence(name, 32, 0, 500, hashes=[first, first + 1]), 0.0)
    shadow.stored([StoredRun(1, None, 2, 2), StoredRun(11, None, 12, 2)], 0.007)
    for name in ("a", "b"):
        shadow.first_token(name, 0.007)
    learned = len(samples)
    shadow.stored([StoredRun(None, 2, 3, 1)], 0.007 + 0.0051 * 4)  # sixteen tokens in four steps
    a, b = shadow.state(0.0275).queue.running
    assert a.computed >= 48
    assert b.computed <= 48
    assert len(samples) == learned


def test_an_engine_that_comes_back_without_a_drafter_drafts_no_more() -> None:
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("pool")], BlockHasher(rng), rng)
    fleet.join("pool", WorkerSpec("w", "10.0.0.1:8000", Settings()))
    assert fleet.observe_drafts("w", DraftCounts(2500, 3000, 1500)) == EAGLE
    assert fleet.observe_drafts("w", None) is NO_DRAFTS
    assert fleet.observe_drafts("w", None) is None
    assert fleet.observe_drafts("w", DraftCounts(2500, 3000, 1500)) == EAGLE


def test_an_engine_that_stops_drafting_counts_steps_again() -> None:
    drafts = Drafts()
    drafts.count(DraftCounts(2_500, 3_000, 1_500))
    generated = 2_500
    for _ in range(200):
        generated += 5_000
        drafts.count(DraftCounts(generated, 3_000, 1_500))
    assert drafts.drafting is NO_DRAFTS
