"""Structured log lines, written by a thread of their own: a full pipe must not stop the event loop."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

import msgspec

_CAPACITY = 10_000
# Waking the writer for each line would cost more than the line; it looks for itself.
_LOOK_EVERY_S = 0.02
_LINES_A_WRITE = 256

_Later = tuple[float, str, Callable[..., Mapping[str, object]], tuple[object, ...]]


class JsonLog:
    """One JSON object a line. What cannot be written is dropped and counted: logging never raises, never waits."""

    def __init__(self, stream: TextIO | None = None, dropped: Callable[[], object] = lambda: None) -> None:
        self._stream = stream or sys.stderr
        self._dropped = dropped
        self._lines: deque[bytes | _Later] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def __call__(self, event: str, **fields: object) -> None:
        if len(self._lines) >= _CAPACITY:
            self._dropped()
            return
        line = self._encoded(time.time(), event, fields)
        if line is not None:
            self._lines.append(line)

    def later(self, event: str, describe: Callable[..., Mapping[str, object]], *about: object) -> None:
        """As a call, for the request path: the writer calls `describe(*about)`, which must not change any more."""
        if len(self._lines) >= _CAPACITY:
            self._dropped()
            return
        self._lines.append((time.time(), event, describe, about))

    def _encoded(self, at_s: float, event: str, fields: Mapping[str, object]) -> bytes | None:
        try:
            return msgspec.json.encode({"time": round(at_s, 3), "event": event, **fields}, enc_hook=str)
        except (ValueError, TypeError, OverflowError, RecursionError):
            # Nothing that was to be said is worth the request that it was said about.
            self._dropped()
            return None

    def close(self, timeout_s: float = 2.0) -> None:
        self._closing.set()
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while not self._closing.wait(_LOOK_EVERY_S):
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._lines:
            lines: list[bytes] = []
            while self._lines and len(lines) < _LINES_A_WRITE:
                waiting = self._lines.popleft()
                line = self._described(waiting) if isinstance(waiting, tuple) else waiting
                if line is not None:
                    lines.append(line)
            try:
                # Not line by line: standard error hands each write to the system.
                self._stream.write(b"".join(line + b"\n" for line in lines).decode())
                self._stream.flush()
            except (OSError, ValueError):
                # The reader is gone; the service is not.
                for _ in lines:
                    self._dropped()

    def _described(self, later: _Later) -> bytes | None:
        at_s, event, describe, about = later
        try:
            fields = describe(*about)
        except Exception:
            self._dropped()
            return None
        return self._encoded(at_s, event, fields)
