"""Structured log lines, written by a thread of their own: a full pipe must not stop the event loop."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

import msgspec

_CAPACITY = 10_000


class JsonLog:
    """One JSON object a line. Lines are dropped, and counted, when the reader of the log cannot keep up."""

    def __init__(self, stream: TextIO | None = None, dropped: Callable[[], object] = lambda: None) -> None:
        self._stream = stream or sys.stderr
        self._dropped = dropped
        self._lines: queue.Queue[bytes | None] = queue.Queue(_CAPACITY)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def __call__(self, event: str, **fields: object) -> None:
        line = msgspec.json.encode({"time": round(time.time(), 3), "event": event, **fields}, enc_hook=str)
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._dropped()

    def close(self, timeout_s: float = 2.0) -> None:
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._stream.write(line.decode() + "\n")
                if self._lines.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                # The reader is gone; the service is not.
                self._dropped()
