"""SGLang's own word on a rank's load, pushed with every prefill and once a second at least (engines.md A.2, LoadStat).

A probe asks every few seconds; this hears in between. It takes nobody's place: an engine without it is asked as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from extproc.engine_pages import RankState, read_sglang_load
from extproc.metrics import Metrics

# More often tells nothing that a decision could use: our own accounting is ahead of it.
_EVERY_S = 0.5
_QUEUED_AT_MOST = 1000


class LoadFeed:
    """Runs until cancelled. `on_load` is told at most twice a second: the state, and when the one before it came."""

    def __init__(
        self,
        worker: str,
        endpoint: str,
        metrics: Metrics,
        context: zmq.asyncio.Context,
        on_load: Callable[[RankState, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker = worker
        self._endpoint = endpoint
        self._metrics = metrics
        self._context = context
        self._on_load = on_load
        self._clock = clock

    async def run(self) -> None:
        with self._context.socket(zmq.SUB) as socket:
            socket.set(zmq.RCVHWM, _QUEUED_AT_MOST)
            socket.set(zmq.LINGER, 0)
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            came_s = self._clock()
            told_s = came_s - _EVERY_S
            while True:
                frames = await socket.recv_multipart()
                # What is in it was counted after the one before was on its way.
                before_s, came_s = came_s, self._clock()
                state = read_sglang_load(frames[-1])
                self._metrics.load_reports.labels(self._worker, "malformed" if state is None else "ok").inc()
                if state is not None and came_s - told_s >= _EVERY_S:
                    told_s = came_s
                    self._on_load(state, before_s)
