"""A feed of KV events over real sockets, from a publisher that does what engines and networks do to it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq.asyncio
from prometheus_client import CollectorRegistry

from extproc import kv_feed
from extproc.kv_feed import KvFeed
from extproc.metrics import Metrics
from predictor.fleet import Fleet, PoolPolicy, WorkerSpec
from predictor.prompt import BlockHasher
from tests.fakes.kv_publisher import FakePublisher, payload_of, stored
from tests.fakes.notes import counted
from tests.fakes.waiting import until


class Follower:
    """A feed of worker `w` into a fleet of its own."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        self.registry = CollectorRegistry()
        self.fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
        self.fleet.join("m", WorkerSpec("w", "10.0.0.1:8000"))
        self.metrics = Metrics(self.registry)
        self.task: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()

    def follow(self, endpoint: str, replay_endpoint: str | None) -> None:
        feed = KvFeed("w", endpoint, replay_endpoint, self.fleet, self.metrics, self._context)
        self.task = asyncio.create_task(feed.run())

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
        self._context.destroy(linger=0)

    def _shown(self, key: str) -> Any:
        view: dict[str, Any] = self.fleet.view(0.0)
        return view["pools"]["m"]["workers"]["w"][key]

    @property
    def blocks(self) -> int:
        return int(self._shown("cached_blocks"))

    @property
    def trusted(self) -> bool:
        return bool(self._shown("feed_trusted"))

    def faults(self, kind: str) -> float:
        return counted(self.registry, "kv_feed_faults", worker="w", kind=kind)

    def batches(self, result: str) -> float:
        return counted(self.registry, "kv_batches", worker="w", result=result)

    async def applied(self, count: int) -> None:
        await until(lambda: self.batches("applied") >= count)

    async def subscribed(self, publisher: FakePublisher) -> None:
        """The live socket is connected: a malformed message has come through."""
        before = self.batches("malformed")
        deadline_s = time.monotonic() + 20
        while self.batches("malformed") == before:
            assert time.monotonic() < deadline_s
            await publisher.send_frames(b"ping")
            await asyncio.sleep(0.02)


@pytest.fixture
async def follower(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Follower]:
    monkeypatch.setattr(kv_feed, "_REPLAY_SILENCE_S", 0.4)
    follower = Follower()
    yield follower
    await follower.stop()


@pytest.fixture(params=["new", "old"])
async def publisher(request: pytest.FixtureRequest) -> AsyncIterator[FakePublisher]:
    async with FakePublisher(request.param) as publisher:
        yield publisher


@pytest.fixture
async def engine() -> AsyncIterator[FakePublisher]:
    async with FakePublisher() as publisher:
        yield publisher


async def joined(follower: Follower, engine: FakePublisher, batches: int = 0) -> None:
    """The feed has replayed that many batches, and hears what is published."""
    for number in range(batches):
        engine.drop(stored(number))
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await until(lambda: follower.trusted)
    await follower.subscribed(engine)
    await asyncio.sleep(0.08)  # the drain after the first replay ends after 50 ms of silence


async def test_a_late_joiner_asks_for_what_it_missed(follower: Follower, publisher: FakePublisher) -> None:
    for number in range(20):
        publisher.drop(stored(number))
    follower.follow(publisher.endpoint, publisher.replay_endpoint)
    await follower.applied(20)
    await until(lambda: follower.trusted)
    assert publisher.replays_asked == [0]
    assert follower.blocks == 20
    await follower.subscribed(publisher)
    await publisher.publish(stored(20))
    await follower.applied(21)
    assert (follower.blocks, follower.trusted) == (21, True)


async def test_a_gap_is_filled_from_the_first_missing_batch(follower: Follower, publisher: FakePublisher) -> None:
    await joined(follower, publisher, 3)
    publisher.drop(stored(3))
    publisher.drop(stored(4))
    await publisher.publish(stored(5))
    await follower.applied(6)
    assert publisher.replays_asked == [0, 3]
    assert (follower.blocks, follower.trusted) == (6, True)
    assert follower.faults("gap") == 1
    assert follower.batches("applied") == 6


async def test_a_gap_that_cannot_be_filled_clears_the_view(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine, 3)
    engine.drop(stored(3))
    engine.forget_before(4)
    await engine.publish(stored(4))
    await follower.applied(4)
    assert (follower.blocks, follower.trusted) == (1, False)
    assert follower.faults("replay_incomplete") == 1


async def test_a_replay_that_stops_short_of_the_gaps_end_clears_the_view(
    follower: Follower, engine: FakePublisher
) -> None:
    await joined(follower, engine, 3)
    engine.drop(stored(3))
    engine.kept.clear()
    engine.skips_in_replay = frozenset({4})
    await engine.publish(stored(4))
    await follower.applied(4)
    assert (follower.blocks, follower.trusted) == (1, False)
    assert follower.faults("unfilled_gap") == 1
    await engine.publish(stored(5))
    await follower.applied(5)
    assert (follower.blocks, follower.trusted) == (2, False)


async def test_a_hole_inside_a_replay_clears_what_came_before_it(follower: Follower, engine: FakePublisher) -> None:
    engine.skips_in_replay = frozenset({4})
    for number in range(7):
        engine.drop(stored(number))
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await follower.applied(6)
    assert follower.faults("replay_incomplete") == 1
    assert (follower.blocks, follower.trusted) == (2, False)


async def test_a_buffer_that_has_lost_its_beginning_is_not_trusted(follower: Follower, engine: FakePublisher) -> None:
    for number in range(10):
        engine.drop(stored(number))
    engine.forget_before(6)
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await follower.applied(4)
    await follower.subscribed(engine)
    assert (follower.blocks, follower.trusted) == (4, False)


async def test_a_filled_gap_does_not_make_up_for_a_lost_beginning(follower: Follower, engine: FakePublisher) -> None:
    for number in range(10):
        engine.drop(stored(number))
    engine.forget_before(6)
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await follower.applied(4)
    await follower.subscribed(engine)
    engine.drop(stored(10))
    await engine.publish(stored(11))
    await follower.applied(6)
    await until(lambda: len(engine.replays_asked) == 2)
    await engine.publish(stored(12))
    await follower.applied(7)
    assert (follower.blocks, follower.trusted) == (7, False)


@pytest.mark.parametrize("seen_live", [False, True])
async def test_a_restart_is_known_by_its_first_batch(
    follower: Follower, engine: FakePublisher, seen_live: bool
) -> None:
    await joined(follower, engine, 5)
    if seen_live:
        await engine.publish(stored(5))
        await follower.applied(6)
    applied = follower.batches("applied")
    await engine.restart()
    await follower.subscribed(engine)
    await engine.publish(stored(100))
    await follower.applied(int(applied) + 1)
    assert follower.faults("restart") == 1
    assert (follower.blocks, follower.trusted) == (1, True)


async def test_a_restart_whose_first_batches_were_lost_is_replayed(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine, 5)
    await engine.restart()
    await follower.subscribed(engine)
    engine.drop(stored(100))
    engine.drop(stored(101))
    await engine.publish(stored(102))
    await follower.applied(8)
    assert engine.replays_asked[-1] == 0
    assert follower.faults("restart") == 1
    assert (follower.blocks, follower.trusted) == (3, True)


async def test_a_restart_that_has_passed_our_number_cannot_be_told_from_a_gap(
    follower: Follower, engine: FakePublisher
) -> None:
    """Documents a limit: nothing on the wire names the incarnation. The old blocks stay until the cap sheds them."""
    await joined(follower, engine, 5)
    await engine.restart()
    await follower.subscribed(engine)
    for number in range(100, 107):
        engine.drop(stored(number))
    await engine.publish(stored(107))
    await follower.applied(8)
    assert engine.replays_asked[-1] == 5
    assert follower.faults("restart") == 0
    assert (follower.blocks, follower.trusted) == (8, True)  # 5 of them are gone, 5 new ones are not known


async def test_a_cleared_cache_is_a_cleared_view(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine, 4)
    await engine.publish({"type": "AllBlocksCleared"}, stored(9))
    await follower.applied(5)
    assert (follower.blocks, follower.trusted) == (1, True)


async def test_batches_seen_before_are_not_applied_again(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine, 2)
    await engine.publish(stored(2))
    await follower.applied(3)
    engine.drop(stored(3))
    await engine.publish(stored(4))
    await follower.applied(5)
    await engine.publish(stored(5))
    await follower.applied(6)
    assert follower.batches("applied") == 6
    assert follower.blocks == 6


async def test_what_is_published_during_a_replay_is_applied_once(follower: Follower, engine: FakePublisher) -> None:
    for number in range(30):
        engine.drop(stored(number))
    engine.pause_before_each_s = 0.01
    engine.during_replay = [stored(number) for number in range(30, 40)]
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await follower.applied(40)
    await until(lambda: follower.trusted)
    await follower.subscribed(engine)
    await engine.publish(stored(40))
    await follower.applied(41)
    assert follower.batches("applied") == 41
    assert (follower.blocks, follower.trusted) == (41, True)
    assert follower.faults("restart") == 0


async def test_what_is_published_while_a_gap_is_filled_is_applied_once(
    follower: Follower, engine: FakePublisher
) -> None:
    await joined(follower, engine, 2)
    for number in range(2, 12):
        engine.drop(stored(number))
    engine.pause_before_each_s = 0.01
    engine.during_replay = [stored(number) for number in range(13, 23)]
    await engine.publish(stored(12))
    await follower.applied(23)
    await engine.publish(stored(23))
    await follower.applied(24)
    assert follower.batches("applied") == 24
    assert (follower.blocks, follower.trusted) == (24, True)
    assert follower.faults("restart") == 0


async def test_malformed_messages_are_counted_and_the_feed_goes_on(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine)
    before = follower.batches("malformed")
    await engine.send_frames(b"one")
    await engine.send_frames(b"", b"short", b"x")
    await engine.publish_raw(b"\xc1")
    await engine.publish_raw(msgspec.msgpack.encode({"not": "a batch"}))
    await engine.publish(stored(0), {"type": "Tomorrow"})
    await follower.applied(1)
    assert follower.batches("malformed") == before + 4
    assert follower.blocks == 1
    assert counted(follower.registry, "kv_events_skipped", worker="w", reason="unknown_event") == 1


async def test_a_replay_without_an_end_is_given_up_and_not_trusted(follower: Follower, engine: FakePublisher) -> None:
    engine.sends_end = False
    engine.drop(stored(0))
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await until(lambda: follower.faults("replay_timeout") == 1)
    assert (follower.blocks, follower.trusted) == (1, False)
    engine.sends_end = True
    await follower.subscribed(engine)
    engine.drop(stored(1))
    await engine.publish(stored(2))
    await follower.applied(3)
    await until(lambda: follower.trusted)  # now all of it is known to have come


async def test_a_silent_replay_service_does_not_stop_the_feed(follower: Follower, engine: FakePublisher) -> None:
    engine.answers_replays = False
    engine.drop(stored(0))
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await until(lambda: follower.faults("replay_timeout") == 1)
    await follower.subscribed(engine)
    await engine.publish(stored(1))
    await follower.applied(1)
    assert (follower.blocks, follower.trusted) == (1, False)
    assert follower.faults("unfilled_gap") == 1


async def test_a_replay_that_never_stops_is_time_boxed(
    follower: Follower, engine: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_feed, "_REPLAY_TIMEOUT_S", 0.3)
    engine.pause_before_each_s = 0.02
    for number in range(200):
        engine.drop(stored(number))
    follower.follow(engine.endpoint, engine.replay_endpoint)
    await until(lambda: follower.faults("replay_timeout") == 1, timeout_s=3)
    assert not follower.trusted
    assert 0 < follower.blocks < 100


async def test_without_a_replay_endpoint_only_the_start_of_an_engine_is_trusted(
    follower: Follower, engine: FakePublisher
) -> None:
    follower.follow(engine.endpoint, None)
    await follower.subscribed(engine)
    engine.drop(stored(0))
    await engine.publish(stored(1))
    await follower.applied(1)
    assert (follower.blocks, follower.trusted) == (1, False)
    await engine.publish(stored(2))
    await follower.applied(2)
    assert (follower.blocks, follower.trusted) == (2, False)
    await engine.restart()
    await follower.subscribed(engine)
    await engine.publish(stored(0))
    await follower.applied(3)
    assert (follower.blocks, follower.trusted) == (1, True)


async def test_an_engine_that_starts_later_is_followed_from_then_on(follower: Follower) -> None:
    async with FakePublisher() as engine:
        await engine._end()
        follower.follow(engine.endpoint, engine.replay_endpoint)
        await until(lambda: follower.faults("replay_timeout") == 1)
        assert not follower.trusted
        await engine.restart()
        engine.drop(stored(0))
        await follower.subscribed(engine)
        await engine.publish(stored(1))
        await follower.applied(2)
        await until(lambda: follower.trusted)
        assert follower.blocks == 2


async def test_a_fault_of_ours_ends_the_feed_and_takes_its_view_along(
    follower: Follower, engine: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(follower, engine, 3)

    def broken(worker: str, batch: object, now_s: float | None = None) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(follower.fleet, "apply", broken)
    await engine.publish(stored(3))
    assert follower.task is not None
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(follower.task, 10)
    follower.task = None
    assert (follower.blocks, follower.trusted) == (0, False)
    assert follower.faults("bug") == 1


class LoopWatch:
    """How much work was done between two turns of somebody else on the event loop.

    CPU time of this thread: on a shared machine, the wall clock would show the neighbours.
    """

    def __init__(self) -> None:
        self.gaps_s: list[float] = []

    async def watch(self, done: Callable[[], bool]) -> None:
        last_s = time.thread_time()
        while not done():
            await asyncio.sleep(0.001)
            now_s = time.thread_time()
            self.gaps_s.append(now_s - last_s)
            last_s = now_s

    def assert_smooth(self) -> None:
        gaps_s = sorted(self.gaps_s)
        assert gaps_s[int(len(gaps_s) * 0.99)] < 0.02
        assert gaps_s[-1] < 0.08


async def test_thousands_of_waiting_batches_leave_the_loop_its_turns(follower: Follower, engine: FakePublisher) -> None:
    payloads = [payload_of([stored(number)]) for number in range(5000)]
    await joined(follower, engine)
    # Sent at once: they wait in the subscriber's queue while the feed works.
    for payload in payloads:
        engine.drop_raw(payload)
        engine._pub.send_multipart([b"", (engine.next_seq - 1).to_bytes(8, "big"), payload])
    watch = LoopWatch()
    await watch.watch(lambda: follower.batches("applied") >= 5000)
    assert follower.blocks == 5000
    assert follower.faults("gap") == 0
    watch.assert_smooth()


async def test_thousands_of_waiting_duplicates_leave_the_loop_its_turns(
    follower: Follower, engine: FakePublisher
) -> None:
    """Live copies of what a replay has brought are skipped without anything to wait for."""
    await joined(follower, engine)
    for number in range(8000):
        engine.drop_raw(payload_of([stored(number)]))
    for seq, payload in engine.kept[1:]:  # the first was lost: the replay that this costs brings all of them
        engine._pub.send_multipart([b"", seq.to_bytes(8, "big"), payload])
    await until(lambda: follower.batches("applied") >= 1)
    watch = LoopWatch()
    await engine.publish(stored(8000))
    await watch.watch(lambda: follower.batches("applied") == 8001)
    assert follower.faults("gap") == 1
    watch.assert_smooth()
