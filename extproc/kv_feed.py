"""One engine's stream of KV events: subscribed to, kept contiguous, and handed to the fleet's cache view.

ZMQ drops what a subscriber is not there for, and engines send no snapshot. So a feed begins by asking for a replay of
what the engine still has (its last 10,000 batches), does so again when a sequence number is missing, and where the
replay cannot fill a gap it drops the view and says that it is not complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import zmq
import zmq.asyncio

from extproc.metrics import Metrics
from extproc.recorder import Recorder
from predictor.fleet import Fleet
from predictor.kv_events import Arrival, FeedCursor, MalformedBatch, decode_batch

_END = b"\xff" * 8
_PUBLISHER_HWM = 100_000  # the engines' own default: no reason to drop earlier on our side
_REPLAY_TIMEOUT_S = 10.0
_REPLAY_SILENCE_S = 2.0
# The event loop gets its turn after so much work on events. A request takes several turns.
_SLICE_S = 0.002


class KvFeed:
    """Runs until cancelled; a broken endpoint costs this worker its cache view, and nothing else."""

    def __init__(
        self,
        worker: str,
        endpoint: str,
        replay_endpoint: str | None,
        fleet: Fleet,
        metrics: Metrics,
        context: zmq.asyncio.Context,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._worker = worker
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._fleet = fleet
        self._metrics = metrics
        self._context = context
        self._cursor = FeedCursor()
        self._complete = False  # all that the engine has published since its start was applied
        self._slice_started_s = 0.0

    async def run(self) -> None:
        self._trust(complete=False)
        try:
            await self._follow()
        except Exception:
            # The view would grow old without anybody knowing.
            self._lost("bug")
            raise

    async def _follow(self) -> None:
        with self._context.socket(zmq.SUB) as live:
            live.set(zmq.RCVHWM, _PUBLISHER_HWM)
            live.set(zmq.LINGER, 0)
            live.subscribe(b"")
            live.connect(self._endpoint)
            await self._catch_up()
            await self._drain_replayed(live)
            while True:
                await self._receive(await live.recv_multipart())
                await self._breathe()

    async def _receive(self, frames: list[bytes]) -> None:
        if len(frames) < 2 or len(frames[-2]) != 8:
            self._metrics.kv_batches.labels(self._worker, "malformed").inc()
            return
        seq, payload = int.from_bytes(frames[-2], "big"), frames[-1]
        arrival = self._cursor.judge_live(seq)
        if arrival is Arrival.REPEATED:
            return
        if arrival is Arrival.RESTARTED:
            self._lost("restart")
        if seq > self._cursor.next_seq:
            await self._fill(seq)
        if seq == self._cursor.next_seq:
            if seq == 0:
                self._trust(complete=True)  # seen from its start
            self._apply(seq, payload, time.monotonic())

    async def _fill(self, seq: int) -> None:
        """Batches before `seq` are missing."""
        self._metrics.feed_faults.labels(self._worker, "gap").inc()
        await self._catch_up()
        if self._cursor.next_seq < seq:
            # The replay could not reach what we already have: begin again from here.
            self._lost("unfilled_gap")
            self._cursor.next_seq = seq

    async def _catch_up(self) -> None:
        """Asks for everything from the first batch that is missing.

        Only a replay from the engine's very first batch makes the view complete: one that fills a gap leaves it as
        good or bad as it was.
        """
        if self._replay_endpoint is None:
            return
        complete, ended = self._complete or self._cursor.next_seq == 0, False
        async with aclosing(self._replay(self._replay_endpoint, self._cursor.next_seq)) as batches:
            async for seq, payload in batches:
                if seq < 0:
                    ended = True
                    break
                arrival = self._cursor.judge_replayed(seq)
                if arrival is Arrival.GAP:
                    self._lost("replay_incomplete")
                    complete = False
                if arrival is not Arrival.REPEATED:
                    self._apply(seq, payload)
                await self._breathe()
        if not ended:
            self._metrics.feed_faults.labels(self._worker, "replay_timeout").inc()
        self._complete = complete
        self._fleet.set_trusted(self._worker, trusted=complete and ended)

    async def _replay(self, endpoint: str, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Replayed batches in order, and a last (-1, b"") if the end marker came in time.

        Read as fast as they come: the engine's ROUTER drops what its reader leaves waiting.
        """
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.RCVHWM, 0)
            dealer.set(zmq.LINGER, 0)
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            deadline_s = time.monotonic() + _REPLAY_TIMEOUT_S
            while time.monotonic() < deadline_s:
                try:
                    frames = await asyncio.wait_for(dealer.recv_multipart(), _REPLAY_SILENCE_S)
                except TimeoutError:
                    return
                if len(frames) < 2 or len(frames[-2]) != 8:
                    self._metrics.kv_batches.labels(self._worker, "malformed").inc()
                    continue
                if frames[-2] == _END:
                    yield -1, b""
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]

    async def _drain_replayed(self, live: zmq.asyncio.Socket) -> None:
        """Skips the live copies of what the first replay brought, so that a later 0 is known for a restart."""
        while await live.poll(timeout=50):
            await self._receive(await live.recv_multipart())
        self._cursor.caught_up()

    def _apply(self, seq: int, payload: bytes, now_s: float | None = None) -> None:
        """`now_s`: it has come live, and tells what the engine has just done."""
        self._cursor.applied(seq)
        if self._recorder is not None:
            self._recorder.kv(self._worker, seq, payload)
        try:
            batch = decode_batch(payload)
        except MalformedBatch:
            self._metrics.kv_batches.labels(self._worker, "malformed").inc()
            # Whatever it stored or removed is missing from the view now.
            self._fleet.set_trusted(self._worker, trusted=False)
            return
        self._fleet.apply(self._worker, batch, now_s)
        self._metrics.kv_batches.labels(self._worker, "applied").inc()
        for reason, count in batch.skipped.items():
            self._metrics.kv_skipped.labels(self._worker, reason).inc(count)

    async def _breathe(self) -> None:
        """A queue of waiting batches, applied or not, never lets go of the loop by itself."""
        now_s = time.monotonic()
        if now_s - self._slice_started_s > _SLICE_S:
            await asyncio.sleep(0)
            self._slice_started_s = time.monotonic()

    def _lost(self, kind: str) -> None:
        self._metrics.feed_faults.labels(self._worker, kind).inc()
        self._fleet.clear(self._worker)
        self._trust(complete=False)

    def _trust(self, complete: bool) -> None:
        self._complete = complete
        self._fleet.set_trusted(self._worker, trusted=complete)
