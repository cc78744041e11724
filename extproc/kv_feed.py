"""One engine's stream of KV events: subscribed to, kept contiguous, and handed to the fleet's cache view.

What is to be applied, asked for or dropped, `predictor.feed_state` decides; here are the sockets, the clock, and the
care that a flood of events leaves the event loop to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from extproc.metrics import Metrics
from extproc.recorder import Recorder
from predictor.event_slices import groups_of, slices
from predictor.feed_state import Apply, Clear, FeedState, Step, Trust
from predictor.fleet import Fleet
from predictor.kv_events import Batch, Bundle, Cleared, KvEvent, MalformedBatch, Stored, Tier, decode_pieces

_END = b"\xff" * 8
_PUBLISHER_HWM = 100_000  # the engines' own default: no reason to drop earlier on our side
_REPLAY_TIMEOUT_S = 10.0
# Engines keep 10,000 batches for replay, which can be hundreds of megabytes: not from all of them at once.
REPLAYS_AT_ONCE = 4
# The event loop gets its turn after so much work on events. A request takes several turns.
_SLICE_S = 0.002
_SLICE_EVENTS = 1024
# Blocks that are taken in at once: fewer where that has just taken longer than a slice, on a slow or busy machine.
_FEWEST_BLOCKS, _MOST_BLOCKS = 64, 512
_MOST_WAITING_BYTES = 64 << 20
# A host that is gone, or a process that is frozen, closes no connection.
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1000, 2000
_RECONNECT_MS, _LATEST_RECONNECT_MS = 100, 1000
# A request can come and go between two looks at the fleet, but not unseen.
_ACTIVITY_S = 0.25
_LOST_EVENTS = frozenset({"malformed"})

_Verb = Callable[[float], Sequence[Step]]


class KvFeed:
    """Runs until cancelled; a broken endpoint costs this worker its cache view, and nothing else.

    `on_contact(True)` is told of every connection, `on_contact(False)` of its loss.
    """

    def __init__(
        self,
        worker: str,
        endpoint: str,
        replay_endpoint: str | None,
        fleet: Fleet,
        metrics: Metrics,
        context: zmq.asyncio.Context,
        replays: asyncio.Semaphore | None = None,
        on_contact: Callable[[bool], None] = lambda up: None,
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._worker = worker
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._fleet = fleet
        self._metrics = metrics
        self._context = context
        self._replays = asyncio.Semaphore(REPLAYS_AT_ONCE) if replays is None else replays
        self._on_contact = on_contact
        self.settled = asyncio.Event()  # for the first time, all that the engine keeps is in the view
        self._begin()

    @property
    def replaying(self) -> bool:
        """A replay is coming in, and is not at its end."""
        return self._state.trust is Trust.REPLAYING and self._state.coverage > 0

    def _begin(self) -> None:
        self._state = FeedState(can_replay=self._replay_endpoint is not None)
        self._inbox: deque[_Verb] = deque()
        self._waiting_bytes = 0
        self._arrived = asyncio.Event()
        self._roomy = asyncio.Event()
        self._changed = asyncio.Event()
        self._slice_started_s = 0.0
        self._at_once = _MOST_BLOCKS
        self._show()

    async def run(self) -> None:
        """Raises only what is a fault of ours; may be run again."""
        self._begin()
        self._fleet.clear(self._worker)
        try:
            await self._follow()
        except Exception:
            # The view would grow old without anybody knowing.
            self._metrics.feed_faults.labels(self._worker, "bug").inc()
            self._begin()
            self._fleet.clear(self._worker)
            raise

    def doubt(self, why: str) -> None:
        """Something else says that the engine was restarted."""
        self._put(partial(self._state.doubt, why))

    async def _follow(self) -> None:
        with self._context.socket(zmq.SUB) as live:
            live.set(zmq.RCVHWM, _PUBLISHER_HWM)
            live.set(zmq.LINGER, 0)
            live.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            live.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
            live.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
            live.set(zmq.RECONNECT_IVL_MAX, _LATEST_RECONNECT_MS)
            live.subscribe(b"")
            monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            try:
                live.connect(self._endpoint)
                await _all(self._listen(live), self._watch(monitor), self._expect(), self._mend(), self._work())
            finally:
                live.disable_monitor()
                monitor.close(linger=0)

    # What comes in

    async def _listen(self, live: zmq.asyncio.Socket) -> None:
        while True:
            frames = await live.recv_multipart()
            seq, payload = _number(frames), frames[-1]
            if seq is None:
                self._metrics.kv_batches.labels(self._worker, "malformed").inc()
            else:
                self._waiting_bytes += len(payload)
                self._put(partial(self._live, seq, payload))
                if self._waiting_bytes > _MOST_WAITING_BYTES:
                    self._roomy.clear()
                    await self._roomy.wait()
            await self._breathe()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            self._contact(await monitor.recv_multipart())

    def _contact(self, frames: list[bytes]) -> None:
        up = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._put(self._state.connected if up else self._state.disconnected)
        self._on_contact(up)

    def _put(self, verb: _Verb) -> None:
        self._inbox.append(verb)
        self._arrived.set()

    def _live(self, seq: int, payload: bytes, now_s: float) -> Sequence[Step]:
        self._waiting_bytes -= len(payload)
        self._roomy.set()
        return self._state.live(seq, payload, now_s)

    # What is asked for

    async def _mend(self) -> None:
        while True:
            self._changed.clear()
            due_s, now_s = self._state.due_s, time.monotonic()
            if due_s is None or due_s > now_s:
                # Not wait_for, which up to Python 3.11 loses a cancellation that comes with what it waits for.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if due_s is None else due_s - now_s):
                        await self._changed.wait()
                continue
            async with self._replays:
                await self._replay()

    async def _replay(self) -> None:
        first, number = self._state.ask(time.monotonic()), self._state.round
        if first is None or number is None or self._replay_endpoint is None:
            return
        complete = False
        # A socket of its own: what an earlier request may still bring must not be taken for this one's answer.
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.RCVHWM, 0)
            dealer.set(zmq.LINGER, 0)
            dealer.connect(self._replay_endpoint)
            await dealer.send_multipart([b"", first.to_bytes(8, "big")])
            deadline_s = time.monotonic() + _REPLAY_TIMEOUT_S
            # Read as fast as they come: the engine's ROUTER drops what its reader leaves waiting.
            while time.monotonic() < deadline_s and self._state.round == number:
                try:
                    async with asyncio.timeout(self._state.patience_s):
                        frames = await dealer.recv_multipart()
                except TimeoutError:
                    break
                if len(frames) >= 2 and frames[-2] == _END:
                    complete = True
                    break
                seq = _number(frames)
                if seq is None:
                    self._metrics.kv_batches.labels(self._worker, "malformed").inc()
                    continue
                self._put(partial(self._state.replayed, number, seq, frames[-1]))
                await self._breathe()
        self._put(partial(self._state.replay_ended, number, complete))
        while self._state.round == number:
            self._changed.clear()
            await self._changed.wait()

    async def _expect(self) -> None:
        seen = 0
        while True:
            await asyncio.sleep(_ACTIVITY_S)
            changes, busy = self._fleet.activity(self._worker)
            if busy or changes != seen:
                seen = changes
                self._state.expect(time.monotonic())
                self._changed.set()

    # What is done with it

    async def _work(self) -> None:
        while True:
            while not self._inbox:
                self._arrived.clear()
                await self._arrived.wait()
            verb = self._inbox.popleft()
            await self._do(verb(time.monotonic()))
            while self._state.more:
                await self._do(self._state.go_on())
            self._show()
            self._changed.set()
            await self._breathe()

    async def _do(self, steps: Sequence[Step]) -> None:
        # What would be dropped at once need not be applied.
        last_clear = max((place for place, step in enumerate(steps) if isinstance(step, Clear)), default=0)
        for step in steps[last_clear:]:
            match step:
                case Clear():
                    self._fleet.clear(self._worker)
                case Apply():
                    await self._apply(step)

    async def _apply(self, step: Apply) -> None:
        if self._recorder is not None:
            self._recorder.kv(self._worker, step.seq, step.payload)
        try:
            pieces = decode_pieces(step.payload, _SLICE_EVENTS)
        except MalformedBatch:
            self._metrics.kv_batches.labels(self._worker, "malformed").inc()
            self._state.unreadable()
            return
        now_s = time.monotonic() if step.live else None
        await self._breathe()
        piece = next(pieces, None)
        while piece is not None:
            await self._breathe()
            following = next(pieces, None)
            await self._take_in(piece, now_s, more=following is not None)
            piece = following
        self._metrics.kv_batches.labels(self._worker, "applied").inc()

    async def _take_in(self, batch: Batch, now_s: float | None, more: bool) -> None:
        if now_s is not None:
            self._look_at_sizes(batch.events)
        groups = groups_of(slices(batch.events, self._at_once), self._at_once)
        group: tuple[KvEvent, ...] | None = next(groups, ())
        while group is not None:
            following = next(groups, None)
            started_s = time.monotonic()
            part = Batch(batch.timestamp_s, group, batch.rank)
            self._fleet.apply(self._worker, part, now_s, more or following is not None)
            self._measure(time.monotonic() - started_s)
            for event in group:
                if isinstance(event, Cleared):
                    self._state.emptied()
            await self._breathe()
            group = following
        for reason, count in batch.skipped.items():
            self._metrics.kv_skipped.labels(self._worker, reason).inc(count)
            if reason in _LOST_EVENTS:
                self._state.unreadable()

    def _look_at_sizes(self, events: Sequence[KvEvent]) -> None:
        most = max((_longest_run(event) for event in events), default=0)
        if most:
            self._fleet.stored_at_once(self._worker, most)

    def _measure(self, took_s: float) -> None:
        if took_s > _SLICE_S:
            self._at_once = max(_FEWEST_BLOCKS, self._at_once // 2)
        elif took_s < _SLICE_S / 2:
            self._at_once = min(_MOST_BLOCKS, self._at_once * 2)

    def _show(self) -> None:
        for kind, count in self._state.faults.items():
            self._metrics.feed_faults.labels(self._worker, kind).inc(count)
        self._state.faults.clear()
        if self._state.repeated:
            self._metrics.kv_batches.labels(self._worker, "repeated").inc(self._state.repeated)
            self._state.repeated = 0
        self._fleet.set_trust(self._worker, self._state.trust, self._state.coverage)
        if self._state.trust in (Trust.LIVE, Trust.PARTIAL):
            self.settled.set()

    async def _breathe(self) -> None:
        """A queue of waiting batches, applied or not, never lets go of the loop by itself."""
        now_s = time.monotonic()
        if now_s - self._slice_started_s > _SLICE_S:
            await asyncio.sleep(0)
            self._slice_started_s = time.monotonic()


def _number(frames: Sequence[bytes]) -> int | None:
    """A batch's number, by the frame before its events; None where that is no number of a batch. Engines count from 0
    (vLLM 0.32, in 8 signed bytes)."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    seq = int.from_bytes(frames[-2], "big", signed=True)
    return seq if seq >= 0 else None


def _longest_run(event: KvEvent) -> int:
    """Blocks that were stored on the device at once."""
    if isinstance(event, Bundle):
        return max(event.lengths)
    return len(event.hashes) if isinstance(event, Stored) and event.tier is Tier.DEVICE else 0


async def _all(*works: Coroutine[None, None, None]) -> None:
    """Runs until one of them raises, which is raised here, as itself."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
