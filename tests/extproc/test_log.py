"""Structured log lines: whatever the reader does, and whatever is said, the caller goes on at once."""

import io
import json
import os
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest

from extproc import log as log_module
from extproc.log import JsonLog


class Drops:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


class BrokenStream(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError("the reader is gone")


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_each_event_is_a_line_of_json() -> None:
    stream = io.StringIO()
    log = JsonLog(stream)
    before_s = time.time()
    log("decision", id="a-1", wait_s=1.5, candidates={"w": 1}, note="é\n", missing=None)
    log("ended", path=Path("x"))
    log.close()
    first, second = lines(stream)
    told_at_s = first.pop("time")
    assert isinstance(told_at_s, float)
    assert abs(told_at_s - before_s) < 5
    assert first == {
        "event": "decision",
        "id": "a-1",
        "wait_s": 1.5,
        "candidates": {"w": 1},
        "note": "é\n",
        "missing": None,
    }
    assert second["path"] == "x"


def test_what_cannot_be_written_is_dropped_and_counted() -> None:
    stream, drops = io.StringIO(), Drops()
    log = JsonLog(stream, drops)
    nested: list[object] = []
    nested.append(nested)
    log("bad", text="\ud800")
    log("bad", nested=nested)
    log("bad", keys={(1, 2): 3})
    log("good")
    log.close()
    assert lines(stream)[-1]["event"] == "good"
    assert drops.count + len(lines(stream)) == 4
    assert drops.count >= 2


def test_a_full_pipe_blocks_nobody_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_CAPACITY", 50)
    reading, writing = os.pipe()
    drops = Drops()
    stream: TextIO
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        log = JsonLog(stream, drops)
        said, slowest_s = 2000, 0.0
        for number in range(said):
            started_s = time.monotonic()
            log("line", number=number, text="x" * 500)
            slowest_s = max(slowest_s, time.monotonic() - started_s)
        assert slowest_s < 0.5
        assert drops.count >= said - 50 - 300  # a pipe holds 64 KiB, and the stream a little
        received: list[str] = []
        draining = threading.Thread(target=lambda: received.extend(reader))
        draining.start()
        log.close(timeout_s=20)
        stream.close()
        draining.join(20)
    assert len(received) + drops.count == said
    assert all(json.loads(line)["event"] == "line" for line in received)


def test_closing_gives_up_on_a_reader_that_never_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_CAPACITY", 5)
    held = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            held.wait(30)
            return len(text)

    log = JsonLog(Stuck())
    for _ in range(20):
        log("x")
    started_s = time.monotonic()
    log.close(timeout_s=0.2)
    assert time.monotonic() - started_s < 5
    held.set()


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    drops = Drops()
    log = JsonLog(BrokenStream(), drops)
    log("one")
    log("two")
    log.close()
    assert drops.count == 2


def test_what_is_described_later_carries_the_time_at_which_it_was_said() -> None:
    stream = io.StringIO()
    log = JsonLog(stream)
    said_at_s = time.time()
    log.later("ended", lambda number, text: {"number": number, "text": text}, 3, "x")
    time.sleep(0.1)
    log.close()
    (line,) = lines(stream)
    assert isinstance(line["time"], float)
    assert abs(line.pop("time") - said_at_s) < 0.05  # type: ignore[operator]
    assert line == {"event": "ended", "number": 3, "text": "x"}


def test_a_description_that_fails_is_dropped_and_the_next_is_written() -> None:
    stream, drops = io.StringIO(), Drops()
    log = JsonLog(stream, drops)
    log.later("bad", lambda: {"x": 1 / 0})
    log.later("unencodable", lambda: {"x": object.__new__, "y": {1: {2, 3}, ("a",): 1}})
    log.later("good", dict)
    log.close()
    assert [line["event"] for line in lines(stream)][-1] == "good"
    assert drops.count >= 1
    assert log._thread.is_alive() is False


def test_descriptions_count_towards_the_lines_that_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_CAPACITY", 3)
    monkeypatch.setattr(log_module, "_LOOK_EVERY_S", 60)
    stream, drops = io.StringIO(), Drops()
    log = JsonLog(stream, drops)
    for number in range(5):
        log.later("line", lambda shown: {"n": shown}, number)
    log.close()
    assert [line["n"] for line in lines(stream)] == [0, 1, 2]
    assert drops.count == 2
