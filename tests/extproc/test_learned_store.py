"""What was learned survives the process, and never the engine that it was learned of."""

import asyncio
import json
import re
import sys
import timeit
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from extproc.learned_store import LearnedStore
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.prefill_cost import Basis
from predictor.prompt import BlockHasher, Prompt
from tests.fakes.step_engine import StepEngine, quadratic

SETTINGS = Settings(num_gpu_blocks=5000)


class Run:
    """One life of a filter with a store in `folder`."""

    def __init__(self, folder: Path, settings: Settings = SETTINGS, worker: str = "w0") -> None:
        rng = np.random.default_rng(1)
        self.fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
        self.counts: Counter[str] = Counter()
        self.store = LearnedStore(folder, self.fleet, self._count)
        self.store.recall_pool("m")
        self.worker = worker
        self.fleet.join("m", WorkerSpec(worker, "10.0.0.1:8000", settings))
        self.store.worker_joined(worker)

    def _count(self, result: str) -> None:
        self.counts[result] += 1

    def save(self) -> None:
        asyncio.run(self.store.save(["m"]))

    def learn(self, intervals: int = 600, requests: int = 30) -> None:
        engine = StepEngine(np.random.default_rng(2), quadratic(), outputs=100)
        cost = self.fleet._pools["m"].workers[self.worker].cost
        for one in islice(engine.samples(), intervals):
            cost.add_steps(one)
        for number in range(requests):
            at_s = 1000.0 * number
            wish = Wish(f"r{number}", at_s, max_tokens=500)
            granted = self.fleet.place("m", Prompt.estimated(1000 + number), wish, at_s)
            assert isinstance(granted, Grant)
            self.fleet.first_token(granted.ticket.id, None, at_s + 0.036)
            self.fleet.finish(granted.ticket.id, Usage(1000, 0, 50 + number), at_s + 2.0)

    def forecast(self) -> tuple[object, ...]:
        wish = Wish("last", 1e6)
        granted = self.fleet.place("m", Prompt.estimated(20_000), wish, 1e6)
        assert isinstance(granted, Grant)
        priced = granted.ticket.forecast
        return priced.basis, priced.ttft_s, priced.low_s, priced.high_s


def test_a_restarted_filter_forecasts_what_the_last_one_would_have(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.learn()
    first.save()
    assert first.counts == {"saved": 2}
    second = Run(tmp_path)
    assert second.counts == {"loaded": 2}
    basis, *seconds = second.forecast()
    _, *before = first.forecast()
    assert basis is Basis.CURVE
    assert seconds == pytest.approx(before, rel=0.03)
    old, new = (run.fleet._pools["m"].lengths.memory() for run in (first, second))
    assert old == new
    assert len(old) == 30


@pytest.mark.parametrize(
    "other", [Settings(num_gpu_blocks=6000), Settings(num_gpu_blocks=5000, max_num_batched_tokens=2048)]
)
def test_nothing_is_recalled_of_an_engine_with_other_settings(tmp_path: Path, other: Settings) -> None:
    first = Run(tmp_path)
    first.learn()
    first.save()
    second = Run(tmp_path, other)
    assert second.counts == {"loaded": 1, "stale": 1}
    assert second.forecast()[0] is Basis.DEFAULT


def test_an_engine_is_recognised_when_it_tells_its_settings_later(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.learn()
    first.save()
    second = Run(tmp_path, Settings())  # as the config assumes
    assert second.forecast()[0] is Basis.DEFAULT
    assert second.fleet.configure("w0", SETTINGS)
    second.store.settings_known("w0")
    second.fleet.finish("last", Usage(), 1e6)
    assert second.forecast()[0] is Basis.CURVE


def test_what_has_been_learned_since_is_not_overwritten_by_what_is_remembered(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.learn()
    first.save()
    second = Run(tmp_path)
    second.fleet._pools["m"].workers["w0"].cost.forget()
    second.learn(intervals=40, requests=0)
    second.store.settings_known("w0")
    assert second.fleet._pools["m"].workers["w0"].cost.samples < 41


def test_only_what_has_changed_is_written_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.learn()
    run.save()
    run.save()
    assert run.counts == {"saved": 2}
    run.learn(intervals=1, requests=0)
    run.save()
    assert run.counts == {"saved": 3}


def test_of_a_worker_that_has_taught_nothing_no_file_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["pool"]


def test_names_that_no_file_can_have_are_kept_apart(tmp_path: Path) -> None:
    learned = {}
    for name, intervals in (("a/../b", 100), ("a/.._b", 200), ("x" * 128, 300)):
        run = Run(tmp_path, worker=name)
        run.learn(intervals, requests=0)
        learned[name] = run.fleet._pools["m"].workers[name].cost.samples
        run.save()
    assert len(list(tmp_path.iterdir())) == 4
    assert all(path.parent == tmp_path and len(path.name) < 100 for path in tmp_path.iterdir())
    assert len(set(learned.values())) == 3
    for name, samples in learned.items():
        assert Run(tmp_path, worker=name).fleet._pools["m"].workers[name].cost.samples == samples


# What is on disk may be anything


def _with_row(text: str, number: int, change: Callable[[list[Any]], list[Any]]) -> str:
    told = json.loads(text)
    rows = told["cost"]["rows"]
    rows[number] = change(rows[number])
    return json.dumps(told, separators=(",", ":"))


def saved(folder: Path) -> Path:
    run = Run(folder)
    run.learn(200)
    run.save()
    return next(path for path in folder.iterdir() if path.name.startswith("worker"))


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (lambda text: text[: len(text) // 2], "corrupt"),
        (lambda text: "", "corrupt"),
        (lambda text: "[1, 2]", "corrupt"),
        (lambda text: text.replace('"rows":[', '"rows":[[["x"],1,1.0,1.0,1.0,[1.0]],', 1), "corrupt"),
        (lambda text: text.replace('"requests":', '"requests":-', 1), "corrupt"),
        (lambda text: re.sub(r'"rows":.*(?=},"errors")', '"rows":[]', text), "corrupt"),
        (lambda text: _with_row(text, 0, lambda row: [row[0], row[1] - 1, *row[2:]]), "corrupt"),
        (lambda text: _with_row(text, -1, lambda row: [*row[:2], 1e300, *row[3:]]), "corrupt"),
        (lambda text: _with_row(text, -1, lambda row: [*row[:3], 1e-300, *row[4:]]), "corrupt"),
        (lambda text: _with_row(text, -1, lambda row: [*row[:4], -1.0, *row[5:]]), "corrupt"),
        (lambda text: _with_row(text, -1, lambda row: [*row[:5], [1e200] * len(row[5])]), "corrupt"),
        (lambda text: text.replace('"version":1', '"version":2', 1), "stale"),
        (lambda text: text.replace('"worker":"w0"', '"worker":"w1"', 1), None),
    ],
)
def test_a_file_that_is_no_memory_is_counted_and_learning_begins_from_nothing(
    tmp_path: Path, change: object, result: str | None
) -> None:
    path = saved(tmp_path)
    assert callable(change)
    path.write_text(change(path.read_text()))
    run = Run(tmp_path)
    assert run.counts == ({"loaded": 1} if result is None else {"loaded": 1, result: 1})
    assert run.forecast()[0] is Basis.DEFAULT
    run.learn(100)
    run.save()
    assert Run(tmp_path).counts == {"loaded": 2}, "the next run has a good file again"


@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_with_one_byte_wrong_never_stops_a_start(
    small_memory: bytes, tmp_path: Path, position: int, byte: int
) -> None:
    at = position % len(small_memory)
    path = LearnedStore(tmp_path, Run(tmp_path / "none").fleet, lambda _: None)._path("worker", "w0")
    path.write_bytes(small_memory[:at] + bytes([byte]) + small_memory[at + 1 :])
    run = Run(tmp_path)
    ttft_s = run.forecast()[1]
    assert isinstance(ttft_s, float)
    assert np.isfinite(ttft_s)


@pytest.fixture(scope="module")
def small_memory() -> bytes:
    run = Run(Path("/nonexistent"))
    run.learn(30, requests=0)
    make = run.fleet.worker_memory("w0")
    assert make is not None
    return msgspec.json.encode(make())


def test_a_disk_that_cannot_be_written_is_counted_and_nothing_else(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    run = Run(blocked / "folder")
    run.learn()
    run.save()
    assert run.counts["failed"] == 2 + 2  # nor could it be read
    assert run.forecast()[0] is Basis.CURVE


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    run = Run(tmp_path)
    run.learn(50)

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    run.save()
    assert path.read_bytes() == before
    assert json.loads(before)["worker"] == "w0"
    assert [other.suffix for other in tmp_path.iterdir()] == [".json", ".json"]


def test_what_the_event_loop_does_for_it_is_little(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.learn(4000, requests=0)
    took_s = min(timeit.repeat(lambda: run.fleet.worker_memory("w0"), number=1, repeat=10))
    sys.stdout.write(f"\na memory of {run.fleet._pools['m'].workers['w0'].cost.samples} samples: {took_s * 1e3:.2f} ms")
    assert took_s < 0.010
