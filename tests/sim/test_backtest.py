"""A recording of simulated engines, run again."""

import itertools
import json
import sys
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from enginesim.settings import CostSettings, SchedulerSettings
from predictor.accuracy import accuracy, as_text, summary
from predictor.backtest import Backtest, BadOverride, foresee, read_what_if, result_lines
from predictor.clairvoyance import read_costs
from predictor.engines.vllm import Settings
from predictor.recording import (
    BadRecording,
    DraftingRecord,
    EndRecord,
    FirstTokenRecord,
    Header,
    KvRecord,
    Record,
    RequestRecord,
    WorkerRecord,
    read_records,
    write_record,
)
from tests.sim.recorded import record_fleet

QUICK = CostSettings(step_ms=5.0, prefill_us_per_token=30.0, prefill_ns_per_token2=0.037, decode_ms=0.05)
SLOW = CostSettings(step_ms=8.0, prefill_us_per_token=90.0, prefill_ns_per_token2=1.2, decode_ms=0.25)
LIMITS = SchedulerSettings(num_gpu_blocks=20_000, max_num_batched_tokens=8192)


@pytest.fixture(scope="module")
def recording() -> list[bytes]:
    records = record_fleet(np.random.default_rng(5), [QUICK, SLOW], LIMITS, requests=400, per_s=3.5)
    return [write_record(record) for record in records]


def fresh(*what_if: str) -> Backtest:
    return Backtest(np.random.default_rng(1), read_what_if(what_if))


def run(lines: list[bytes], *what_if: str) -> Backtest:
    backtest = fresh(*what_if)
    backtest.run(read_records(lines))
    return backtest


def test_predictions_are_near_what_really_came(recording: list[bytes]) -> None:
    backtest = run(recording)
    sys.stdout.write("\n" + as_text(backtest.outcomes))
    found = accuracy(backtest.outcomes[40:])
    assert found is not None
    assert found.graded == 360
    assert found.within_1s > 0.98
    assert found.median_relative < 0.05
    assert 0.8 < found.coverage < 0.97
    assert all(outcome.cache == "right" for outcome in backtest.outcomes)
    assert not backtest.left_out


def test_the_same_recording_gives_the_same_report_to_the_byte(recording: list[bytes]) -> None:
    first, second = (
        b"".join(result_lines(one.outcomes, summary(one.outcomes))) for one in (run(recording), run(recording))
    )
    assert first == second


def test_each_prediction_and_the_summary_are_written_as_documented(recording: list[bytes]) -> None:
    backtest = run(recording)
    *lines, last = result_lines(backtest.outcomes, summary(backtest.outcomes))
    parsed = [json.loads(line) for line in lines]
    assert len(parsed) == 400
    assert list(parsed[0]) == [
        "id", "worker", "predicted_ttft_s", "wait_s", "prefill_s", "cached_tokens", "low_s", "high_s",
        "actual_ttft_s", "actual_cached_tokens",
    ]  # fmt: skip
    for one in parsed:
        assert one["low_s"] <= one["high_s"]
        assert one["predicted_ttft_s"] >= one["wait_s"] + one["prefill_s"] - 1e-9
    figures = json.loads(last)["summary"]
    assert figures["requests"] == 400
    assert set(figures["by"]) == {"worker", "load", "prompt length", "cache estimate"}
    assert sum(part["graded"] for part in figures["by"]["worker"].values()) == 400


def test_a_prediction_knows_nothing_that_comes_later(recording: list[bytes]) -> None:
    whole = run(recording).outcomes
    half = run(recording[: len(recording) // 2]).outcomes
    assert 100 < len(half) < 400
    for early, full in zip(half, whole, strict=False):
        assert (early.id, early.predicted_ttft_s, early.high_s) == (full.id, full.predicted_ttft_s, full.high_s)


@pytest.mark.alone
def test_a_fleet_of_eight_is_run_again_twenty_times_as_fast_as_it_was() -> None:
    records = record_fleet(np.random.default_rng(6), [QUICK] * 8, LIMITS, requests=300, per_s=10.0)
    lines = [write_record(record) for record in records]
    speeds = []
    for _ in range(3):
        began_s = time.process_time()
        backtest = run(lines)
        speeds.append(backtest.recorded_s / (time.process_time() - began_s))
    sys.stdout.write(f"\n8 workers, 10 requests/s: {max(speeds):.0f} times real time")
    assert max(speeds) > 20


_SPEEDS: list[tuple[CostSettings, float]] = [
    (QUICK, 1.0),
    (QUICK, 4.0),
    (replace(QUICK, prefill_ns_per_token2=0.15), 0.8),
    (replace(QUICK, prefill_us_per_token=300.0), 0.8),
]


@pytest.mark.parametrize(("cost", "per_s"), _SPEEDS)
@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_an_engine_that_suddenly_runs_at_another_speed_is_priced_right_after_five_grades(
    cost: CostSettings, per_s: float, factor: float
) -> None:
    """Whatever its steps cost, nearly idle and so busy that twice as slow is too slow."""
    changes_s = 250 / per_s
    records = record_fleet(
        np.random.default_rng(12),
        [cost],
        LIMITS,
        requests=400,
        per_s=per_s,
        slower=lambda at_s: factor if at_s >= changes_s else 1.0,
    )
    backtest = run([write_record(record) for record in records])
    grades_s = [record.t for record in records if isinstance(record, FirstTokenRecord) and record.t > changes_s]
    asked_s = {record.id: record.t for record in records if isinstance(record, RequestRecord)}
    before = [one for one in backtest.outcomes if changes_s / 2 < asked_s[one.id] < changes_s]
    after = [one for one in backtest.outcomes if asked_s[one.id] > grades_s[4]]
    for part in (before, after[:20], after):
        found = accuracy(part)
        assert found is not None
        sys.stdout.write(f"\n{factor} times as slow, {per_s}/s: {found.graded} off by {found.median_relative:.1%}")
        assert found.median_relative < 0.1


# What if


def test_another_budget_changes_what_is_predicted(recording: list[bytes]) -> None:
    recorded, smaller = run(recording).outcomes, run(recording, "max_num_batched_tokens=512").outcomes
    assert [one.actual_ttft_s for one in recorded] == [one.actual_ttft_s for one in smaller]
    changed = [(a, b) for a, b in zip(recorded, smaller, strict=True) if a.predicted_ttft_s != b.predicted_ttft_s]
    assert len(changed) > 100


def test_one_worker_may_be_changed_alone(recording: list[bytes]) -> None:
    recorded, changed = run(recording).outcomes, run(recording, "w1:max_num_batched_tokens=512").outcomes
    workers = {a.worker for a, b in zip(recorded, changed, strict=True) if a.prefill_s != b.prefill_s}
    assert workers == {"w1"}


def test_what_is_assumed_of_an_unlearned_worker_may_be_changed(recording: list[bytes]) -> None:
    first = run(recording, "learning.default_tokens_per_s=100").outcomes[0]
    assert first.prefill_s == pytest.approx(first.prompt_tokens / 100, rel=0.01)
    assert not first.learned


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("max_num_seqs", "expected KEY=VALUE"),
        ("=4", "expected KEY=VALUE"),
        ("colour=red", "unknown key 'colour'; known are .*block_size"),
        ("learning.speed=1", "unknown key 'speed'; known are default_step_s"),
        ("max_num_seqs=many", r"Expected `int`, got `str` - at `\$.max_num_seqs`"),
        ("w1:max_num_seqs=1.5", "Expected `int`, got `float`"),
        ("default_output_tokens=x", "Expected `int`, got `str`"),
        ("block_size=0", "block_size=0: expected a number from 1 to"),
        ("max_num_batched_tokens=0", "max_num_batched_tokens=0: expected a number from 1 to"),
        ("w1:max_num_seqs=0", "max_num_seqs=0: expected a number from 1 to"),
        ("draft_slots=-3", "draft_slots=-3: expected a number from 0 to"),
    ],
)
def test_what_cannot_be_is_refused_by_name(override: str, says: str) -> None:
    with pytest.raises(BadOverride, match=says):
        read_what_if([override])


# Told the future


@pytest.mark.parametrize(("per_s", "engines"), [(1.5, 1), (4.0, 1), (8.0, 2)])
def test_told_costs_lengths_and_arrivals_it_is_exact(per_s: float, engines: int) -> None:
    records = record_fleet(np.random.default_rng(8), [QUICK] * engines, LIMITS, requests=300, per_s=per_s)
    costs = read_costs(b'{"a": 30e-6, "b": 37e-12, "c": 0.005, "d": 50e-6}')
    backtest = Backtest(np.random.default_rng(1), foresight=foresee(records, costs, np.random.default_rng(2)))
    backtest.run(records)
    found = accuracy(backtest.outcomes)
    assert found is not None
    assert found.graded == 300
    assert found.p90_relative < 0.001
    assert all(outcome.learned for outcome in backtest.outcomes)


def test_told_wrong_costs_it_does_not_learn_better_ones() -> None:
    records = record_fleet(np.random.default_rng(8), [QUICK], LIMITS, requests=100, per_s=1.0)
    foresight = foresee(records, read_costs(b'{"a": 60e-6, "c": 0.005}'), np.random.default_rng(2))
    backtest = Backtest(np.random.default_rng(1), foresight=foresight)
    backtest.run(records)
    ratios = [one.predicted_ttft_s / one.actual_ttft_s for one in backtest.outcomes if one.actual_ttft_s]
    assert np.median(ratios[50:]) > 1.5


# What recordings may hold


def small(*more: Record) -> list[Record]:
    worker = WorkerRecord(t=0.0, worker="w0", pool="m", settings={"block_size": 16, "num_gpu_blocks": 100})
    return [Header(version=1), worker, *more]


def asked(id_: str, t: float, worker: str = "w0", **changes: object) -> RequestRecord:
    record = RequestRecord(t=t, id=id_, pool="m", worker=worker, prompt_tokens=1000)
    return msgspec.structs.replace(record, **changes)


def ran(*more: Record) -> Backtest:
    backtest = fresh()
    backtest.run(small(*more))
    return backtest


def test_requests_that_never_got_a_token_are_predicted_and_not_graded() -> None:
    backtest = ran(asked("a", 1.0), EndRecord(t=2.0, id="a", status=0), asked("b", 3.0))
    assert [(one.id, one.actual_ttft_s) for one in backtest.outcomes] == [("a", None), ("b", None)]
    assert accuracy(backtest.outcomes) is None
    assert summary(backtest.outcomes)["all"] is None
    assert "all" not in as_text(backtest.outcomes)


def test_time_waited_before_the_decision_is_part_of_both_times() -> None:
    backtest = ran(asked("a", 1.0, waited_s=2.0), FirstTokenRecord(t=1.5, id="a"))
    (outcome,) = backtest.outcomes
    assert outcome.actual_ttft_s == pytest.approx(2.5)
    assert outcome.predicted_ttft_s > 2.0


def test_a_request_that_was_served_elsewhere_is_not_graded() -> None:
    other = WorkerRecord(t=0.0, worker="w1", pool="m")
    backtest = ran(other, asked("a", 1.0), FirstTokenRecord(t=1.5, id="a", worker="w1"), EndRecord(t=2.0, id="a"))
    assert backtest.outcomes[0].actual_ttft_s is None


def test_drafts_are_followed_from_when_they_were_seen_on() -> None:
    """Two hundred decode for another second or two, or, with drafts, a third of that."""
    crowd = [asked(f"d{number}", 1.0, max_tokens=200) for number in range(4)]
    begun = [FirstTokenRecord(t=8.0, id=one.id) for one in crowd]
    late = asked("late", 8.5, prompt_tokens=1500)
    slow = ran(*crowd, *begun, late)
    quick = ran(DraftingRecord(t=0.5, worker="w0", gain=3.0, drafted=3.0), *crowd, *begun, late)
    waits = [backtest.outcomes[-1].wait_s for backtest in (slow, quick)]
    assert 0 < waits[1] < waits[0]


def test_drafts_of_a_worker_that_nobody_knows_are_no_recording() -> None:
    with pytest.raises(BadRecording, match=r"drafting.*nobody"):
        ran(DraftingRecord(t=0.5, worker="nobody", gain=3.0))


def lessons(start_s: float, count: int = 12) -> list[Record]:
    """Lone requests at 1 ms a token, enough to have learned."""
    lengths = itertools.islice(itertools.cycle((100, 200, 400, 800)), count)
    records: list[Record] = []
    for number, tokens in enumerate(lengths):
        at_s, name = start_s + 10.0 * number, f"{start_s}-{number}"
        records.append(asked(name, at_s, hashes="", block_size=16, prompt_tokens=tokens))
        records.append(FirstTokenRecord(t=at_s + 0.001 * tokens, id=name))
        records.append(EndRecord(t=at_s + 2.0, id=name, prompt_tokens=tokens, cached_tokens=0, output_tokens=10))
    return records


def worker_again(t: float, **changes: object) -> WorkerRecord:
    record = WorkerRecord(t=t, worker="w0", pool="m", settings={"block_size": 16, "num_gpu_blocks": 100})
    return msgspec.structs.replace(record, **changes)


@pytest.mark.parametrize(
    ("again", "keeps"),
    [
        (worker_again(500.0), True),
        (worker_again(500.0, settings={"block_size": 16, "num_gpu_blocks": 100, "max_num_seqs": 8}), False),
        (worker_again(500.0, version="0.33.0"), False),
    ],
    ids=["the same settings", "other settings", "another version"],
)
def test_what_was_learned_survives_a_restart_but_no_other_engine(again: WorkerRecord, keeps: bool) -> None:
    backtest = ran(*lessons(0.0), again, asked("last", 501.0))
    assert backtest.outcomes[-2].learned
    assert backtest.outcomes[-1].learned is keeps


def test_hits_are_taken_from_events_and_lost_with_a_restart() -> None:
    records = record_fleet(np.random.default_rng(9), [QUICK], LIMITS, requests=30, per_s=1.0)
    requests = [record for record in records if isinstance(record, RequestRecord)]
    again = msgspec.structs.replace(requests[0], t=1e4, id="again")
    backtest = fresh()
    backtest.run([*records, again])
    assert backtest.outcomes[-1].cached_tokens > 0
    restart = next(record for record in records if isinstance(record, WorkerRecord))
    backtest = fresh()
    backtest.run([*records, msgspec.structs.replace(restart, t=9e3), again])
    assert backtest.outcomes[-1].cached_tokens == 0


def test_a_hole_in_the_events_empties_the_view_and_is_counted() -> None:
    records = record_fleet(np.random.default_rng(9), [QUICK], LIMITS, requests=30, per_s=1.0)
    kv = [record for record in records if isinstance(record, KvRecord)]
    backtest = fresh()
    backtest.run([record for record in records if record is not kv[4]])
    assert backtest.left_out == {"kv gap": 1}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (asked("a", 1.0, worker="w9"), "a request record names worker 'w9'"),
        (KvRecord(t=1.0, worker="w9", seq=0, payload=""), "a kv record names worker 'w9'"),
        (KvRecord(t=1.0, worker="w0", seq=0, payload="AAAA"), "`payload`"),
        (worker_again(1.0, settings={"block_size": "large"}), "settings of worker 'w0': Expected `int`, got `str`"),
    ],
)
def test_records_that_cannot_be_are_refused(record: Record, says: str) -> None:
    with pytest.raises(BadRecording, match=says):
        ran(record)


def test_a_request_cannot_come_twice() -> None:
    with pytest.raises(BadRecording, match="'a' comes twice"):
        ran(asked("a", 1.0), asked("a", 2.0))


def test_what_matches_nothing_is_counted() -> None:
    backtest = ran(FirstTokenRecord(t=1.0, id="x"), EndRecord(t=1.0, id="x"), asked("a", 0.5))
    assert backtest.left_out == {"first token of nobody": 1, "end of nobody": 1, "out of order": 1}
    assert len(backtest.outcomes) == 1


def test_settings_of_later_versions_are_left_out() -> None:
    backtest = fresh()
    backtest.run(small(worker_again(1.0, settings={"num_gpu_blocks": None, "warp": 9, "max_num_seqs": 8})))
    assert backtest._workers["w0"].settings == Settings(max_num_seqs=8)
