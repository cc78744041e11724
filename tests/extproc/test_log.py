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
