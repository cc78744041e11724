"""Forecasts against vLLM's and SGLang's own schedulers in virtual time: costs learned, seen is what leaves them.

Reduced workloads; `python -m tests.engine.forecast_truth` runs whole ones, and docs/performance.md has their figures.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine.forecast_truth import Accuracy, Observer, Outcome, counted, coverage, observer, record

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def told(name: str, watcher: Observer, outcomes: list[Outcome]) -> tuple[Accuracy, Accuracy]:
    rest = counted(outcomes)
    naive = Accuracy.of([(o.naive_s, o.actual_s) for o in rest])
    ours = Accuracy.of([(o.predicted_s, o.actual_s) for o in rest])
    sys.stdout.write(f"\n{name}: naive {naive}, ours {ours}, p90 {ours.p90_ratio:.1%}, {watcher.spent_s:.1f} s")
    return naive, ours


@pytest.mark.parametrize(
    ("name", "count", "within_1s", "median"),
    [
        ("trace 0.8", 300, 0.98, 0.02),
        ("giants, threshold 1024", 150, 0.97, 0.02),
        ("trace 0.8, threshold 2048", 300, 0.95, 0.1),
        ("decodes, budget 512", 300, 0.99, 0.02),
        ("trace 0.8, async", 300, 0.98, 0.02),
        ("giants, threshold 1024, async", 150, 0.97, 0.02),
        ("trace 0.8, drafts", 300, 0.98, 0.06),
        ("trace 1.3, drafts", 300, 0.93, 0.06),
        ("trace 0.8 | seed 3 | tokens /10", 300, 0.98, 0.02),
        ("synthetic 1.3", 300, 0.98, 0.02),
        ("sglang giants", 150, 0.99, 0.02),
        ("sglang conversations", 300, 0.99, 0.05),
        ("sglang trace 1.3", 400, 0.98, 0.02),
    ],
)
def test_forecasts_come_near_and_nearer_than_adding_up_the_prefills_ahead(
    name: str, count: int, within_1s: float, median: float, recordings: Path
) -> None:
    recording = record(name, recordings, count)
    watcher = observer(recording)
    naive, ours = told(name, watcher, watcher.play(recording))
    assert ours.within_1s >= within_1s
    assert ours.within_10s == 1.0
    assert ours.median_ratio < min(median, naive.median_ratio)
    assert watcher.worker.shadow.forced == 0


@pytest.mark.parametrize(
    ("name", "count", "within_1s", "median"),
    [
        ("trace 0.8", 300, 0.98, 0.1),
        ("trace 0.8, async", 300, 0.98, 0.1),
        ("giants, threshold 1024, async", 150, 0.97, 0.1),
        ("decodes, budget 512", 300, 0.97, 0.15),  # half of them take 50 ms or less
    ],
)
def test_milliseconds_on_the_way_to_an_engine_and_back_cost_milliseconds(
    name: str, count: int, within_1s: float, median: float, recordings: Path
) -> None:
    recording = record(name, recordings, count)
    for seed in 1, 2:
        watcher = observer(recording, ways_seed=seed)
        naive, ours = told(f"{name}, ways {seed}", watcher, watcher.play(recording))
        assert ours.within_1s >= within_1s
        assert ours.within_10s == 1.0
        assert ours.median_ratio < min(median, naive.median_ratio)


@pytest.mark.parametrize(
    ("name", "count", "within_1s", "median"), [("trace 0.8", 1000, 0.95, 0.1), ("trace 1.3", 400, 0.2, 0.15)]
)
def test_who_comes_past_the_filter_is_followed_by_what_the_engine_stores(
    name: str, count: int, within_1s: float, median: float, recordings: Path
) -> None:
    recording = record(name, recordings, count)
    watcher = observer(recording)
    watcher.bypass = 0.2
    _, ours = told(f"{name}, a fifth past the filter", watcher, watcher.play(recording))
    assert ours.within_1s >= within_1s
    assert ours.within_10s == 1.0
    assert ours.median_ratio <= median


def test_who_overtakes_by_priority_on_sglang_is_foreseen(recordings: Path) -> None:
    recording = record("sglang trace 1.3, by priority", recordings, 400)
    watcher = observer(recording)
    _, ours = told(recording.work.name, watcher, watcher.play(recording))
    unaware = observer(recording)
    unaware = replace(unaware, settings=replace(unaware.settings, scheduling_policy="fcfs"))
    _, in_order = told("the same as if first come first served", unaware, unaware.play(recording))
    assert ours.within_1s >= 0.45
    assert ours.within_1s > 3 * in_order.within_1s
    assert ours.median_ratio < in_order.median_ratio / 2


def test_before_anybody_has_ended_outputs_are_taken_to_be_longer_than_what_nobody_has_ended_at(
    recordings: Path,
) -> None:
    # 128 slots, and 200 outputs of 1,500 to 6,000 tokens where 256 are the guess: the last wait for half of them.
    recording = record("decodes, 128 slots, async", recordings)
    watcher = observer(recording)
    outcomes = watcher.play(recording)
    _, ours = told(recording.work.name, watcher, outcomes)
    assert ours.within_10s >= 0.97
    # And that nobody knows is in the interval: those before them waited for nothing, to the millisecond.
    assert coverage(counted(outcomes)) >= 0.75


def test_what_was_learned_of_all_outputs_does_not_mislead_about_a_batch_of_long_ones(recordings: Path) -> None:
    # Short prompts are answered at length here, and long ones briefly.
    recording = record("decodes, 128 slots, async", recordings)
    watcher = observer(recording)
    watcher.play(recording)
    _, ours = told(f"{recording.work.name}, warm", watcher, watcher.play(recording))
    assert ours.within_1s >= 0.65
    assert ours.within_10s >= 0.99


def test_a_storm_is_foreseen_from_the_second_third_on(recordings: Path) -> None:
    recording = record("storm", recordings)
    watcher = observer(recording)
    _, cold = told("storm", watcher, watcher.play(recording))
    assert cold.within_1s >= 0.28
    assert cold.within_10s >= 0.72
    assert cold.median_ratio <= 0.45
    _, warm = told("storm, warm", watcher, watcher.play(recording))
    assert warm.within_1s >= 0.55
    assert warm.within_10s >= 0.98
    assert warm.median_ratio <= 0.08


@pytest.mark.parametrize(("name", "count"), [("sglang trace 1.3", 400), ("sglang storm", 90)])
def test_nobody_is_let_in_by_sglang_whom_the_shadow_has_wait(name: str, count: int, recordings: Path) -> None:
    recording = record(name, recordings, count)
    watcher = observer(recording, true_costs=True)
    outcomes = watcher.play(recording)
    most_s = max(outcome.actual_s for outcome in outcomes)
    assert most_s > 10, "somebody has to wait for space"
    assert watcher.worker.shadow.forced == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("trace 0.8", 300),
        ("trace 1.3", 400),
        ("trace 1.3 | seed 2 | squares x4 | blocks of 32", 300),
        ("trace 1.3, by priority", 300),
        ("giants, fair shares of 1024", 150),
        ("decodes, budget 512", 300),
        ("decodes, 128 slots, async", 240),
        ("trace 0.8, async", 300),
        ("sglang trace 1.0, whole prompts", 300),
    ],
)
def test_a_shadow_that_knew_the_future_would_be_exact(name: str, count: int, recordings: Path) -> None:
    recording = record(name, recordings, count)
    watcher = observer(recording, true_costs=True)
    watcher.clairvoyant_every = 5
    outcomes = watcher.play(recording)
    exact = Accuracy.of(
        [(watcher.clairvoyant[o.number], o.actual_s) for o in outcomes if o.number in watcher.clairvoyant]
    )
    sys.stdout.write(f"\n{name}: clairvoyant {exact}, p90 {exact.p90_ratio:.3%} of {len(watcher.clairvoyant)}")
    assert exact.p90_ratio <= 0.001
