"""Structured log lines, written by a thread of their own: a full pipe must not stop the event loop."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

import msgspec

_CAPACITY = 10_000
# Waking the writer for each line would cost more than the line; it looks for itself.
_LOOK_EVERY_S = 0.02


class JsonLog:
    """One JSON object a line. What cannot be written is dropped and counted: logging never raises, never waits."""

    def __init__(self, stream: TextIO | None = None, dropped: Callable[[], object] = lambda: None) -> None:
        self._stream = stream or sys.stderr
        self._dropped = dropped
        self._lines: deque[bytes] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def __call__(self, event: str, **fields: object) -> None:
        if len(self._lines) >= _CAPACITY:
            self._dropped()
            return
        try:
            self._lines.append(
                msgspec.json.encode({"time": round(time.time(), 3), "event": event, **fields}, enc_hook=str)
            )
        except (ValueError, TypeError, OverflowError, RecursionError):
            # Nothing that was to be said is worth the request that it was said about.
            self._dropped()

    def close(self, timeout_s: float = 2.0) -> None:
        self._closing.set()
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        wrote = False
        while self._lines:
            line = self._lines.popleft()
            try:
                self._stream.write(line.decode() + "\n")
                wrote = True
            except (OSError, ValueError):
                # The reader is gone; the service is not.
                self._dropped()
        if wrote:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._dropped()
