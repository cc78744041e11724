"""A feed of KV events over real sockets, from a publisher that does what engines and networks do to it."""

import asyncio
import contextlib
import gc
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
from predictor import feed_state
from predictor.fleet import Fleet, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.kv_events import Batch
from predictor.prompt import BlockHasher, Prompt
from tests.fakes.kv_publisher import BLOCK, FakePublisher, FrozenPublisher, payload_of, stored
from tests.fakes.notes import counted
from tests.fakes.waiting import until

pytestmark = pytest.mark.alone


class Follower:
    """A feed of worker `w` into a fleet of its own."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        self.registry = CollectorRegistry()
        self.fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
        self.fleet.join("m", WorkerSpec("w", "10.0.0.1:8000"))
        self.metrics = Metrics(self.registry)
        self.feed: KvFeed | None = None
        self.task: asyncio.Task[None] | None = None
        self.contacts: list[bool] = []
        self._context = zmq.asyncio.Context()

    def follow(self, endpoint: str, replay_endpoint: str | None) -> None:
        contacts = self.contacts.append
        self.feed = KvFeed("w", endpoint, replay_endpoint, self.fleet, self.metrics, self._context, on_contact=contacts)
        self.task = asyncio.create_task(self.feed.run())

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
    def trust(self) -> str:
        return str(self._shown("feed"))

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
    monkeypatch.setattr(feed_state, "_PATIENCE_S", 0.4)
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
    await until(lambda: follower.trusted)
    assert publisher.replays_asked == [0, 2]  # with one that is known, to tell lives apart
    assert follower.blocks == 6
    assert follower.faults("gap") == 1
    assert follower.batches("applied") == 6


async def test_an_end_that_was_lost_is_found_and_counted(follower: Follower, publisher: FakePublisher) -> None:
    await joined(follower, publisher, 3)
    await publisher.publish(stored(3))
    publisher.drop(stored(4))
    await follower.applied(5)
    await until(lambda: follower.faults("lost_end") == 1)
    assert (follower.blocks, follower.trusted) == (5, True)
    assert follower.faults("gap") == 0


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
    engine.skips_in_replay = frozenset({3})
    await engine.publish(stored(4))
    await follower.applied(4)
    assert (follower.blocks, follower.trust) == (1, "partial")
    await engine.publish(stored(5))
    await follower.applied(5)
    assert (follower.blocks, follower.trust) == (2, "partial")


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


async def test_a_restart_that_has_passed_our_number_is_seen(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine, 5)
    await engine.restart()
    for number in range(100, 107):
        engine.drop(stored(number))
    await follower.subscribed(engine)
    await engine.publish(stored(107))
    await until(lambda: follower.trusted and follower.blocks == 8)
    assert engine.replays_asked[-2:] == [4, 0]
    assert (follower.faults("restart"), follower.faults("disconnect")) == (1, 1)


async def test_a_connection_that_breaks_puts_the_view_in_doubt_until_it_is_proven(
    follower: Follower, engine: FakePublisher
) -> None:
    await joined(follower, engine, 5)
    async with engine.away():
        await until(lambda: follower.trust == "lost", timeout_s=5)
        assert follower.blocks == 5
        engine.drop(stored(5))
    await until(lambda: follower.trusted)
    assert (follower.blocks, follower.faults("restart")) == (6, 0)


async def test_an_engine_that_is_frozen_is_lost_within_seconds(follower: Follower, engine: FakePublisher) -> None:
    """Its connections stay open, and nothing comes over them: not even an answer to ZMTP's own ping."""
    async with FrozenPublisher(engine) as frozen:
        follower.follow(frozen.endpoint, engine.replay_endpoint)
        await until(lambda: follower.trusted)
        frozen.freeze()
        frozen_s = time.monotonic()
        await until(lambda: follower.trust == "lost", timeout_s=15)
        assert time.monotonic() - frozen_s < 8
        assert follower.contacts[:2] == [True, False]


async def test_counters_that_fall_back_have_the_view_proven(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine, 5)
    assert follower.feed is not None
    follower.feed.doubt("counters")
    await until(lambda: len(engine.replays_asked) == 2)
    await until(lambda: follower.trusted)
    assert (follower.blocks, engine.replays_asked) == (5, [0, 4])


async def test_a_lost_batch_is_missed_when_the_fleet_knows_of_requests(
    follower: Follower, engine: FakePublisher
) -> None:
    await joined(follower, engine, 3)
    await asyncio.sleep(1.2)  # the look that follows a silence has found nothing
    asked = len(engine.replays_asked)
    engine.drop(stored(3))
    prompt, wish = Prompt(10, exact=True), Wish("t", 0.0)
    follower.fleet.place("m", prompt, wish, 0.0)
    follower.fleet.finish("t", Usage(), 0.0)
    await until(lambda: follower.blocks == 4, timeout_s=10)
    assert (follower.trusted, len(engine.replays_asked) - asked) == (True, 1)


async def test_the_last_batch_before_a_silence_is_not_missed(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine, 3)
    await engine.publish(stored(3))
    engine.drop(stored(4))
    await until(lambda: follower.blocks == 5, timeout_s=10)
    assert follower.trusted


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
    await until(lambda: follower.trusted)
    assert follower.batches("applied") == 24
    assert follower.blocks == 24
    assert follower.faults("restart") == 0


async def test_malformed_messages_are_counted_and_the_feed_goes_on(follower: Follower, engine: FakePublisher) -> None:
    await joined(follower, engine)
    before = follower.batches("malformed")
    await engine.send_frames(b"one")
    await engine.send_frames(b"", b"short", b"x")
    await engine.send_frames(b"", b"\x80" + bytes(7), payload_of([stored(7)]))  # batches are numbered from 0
    await engine.publish_raw(b"\xc1")
    await engine.publish_raw(msgspec.msgpack.encode({"not": "a batch"}))
    await engine.publish(stored(0), {"type": "Tomorrow"})
    await follower.applied(1)
    assert follower.batches("malformed") == before + 5
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
        async with engine.away():
            follower.follow(engine.endpoint, engine.replay_endpoint)
            await asyncio.sleep(0.3)
            assert (follower.trust, engine.replays_asked) == ("lost", [])
            engine.drop(stored(0))
        await follower.subscribed(engine)
        await engine.publish(stored(1))
        await follower.applied(2)
        await until(lambda: follower.trusted)
        assert follower.blocks == 2


async def test_a_replay_that_nobody_answered_is_asked_for_until_somebody_does(
    follower: Follower, engine: FakePublisher
) -> None:
    await joined(follower, engine, 3)
    engine.answers_replays = False
    engine.drop(stored(3))
    await engine.publish(stored(4))
    await until(lambda: follower.trust == "partial")
    assert follower.blocks == 1
    engine.answers_replays = True
    await until(lambda: follower.trusted)  # no other gap was needed
    assert follower.blocks == 5


async def test_a_feed_that_is_run_again_begins_anew(
    follower: Follower, engine: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(follower, engine, 3)
    apply, faults = follower.fleet.apply, [ZeroDivisionError()]

    def broken_once(worker: str, batch: Batch, now_s: float | None, more: bool) -> None:
        if faults:
            raise faults.pop()
        apply(worker, batch, now_s, more)

    monkeypatch.setattr(follower.fleet, "apply", broken_once)
    await engine.publish(stored(3))
    assert follower.task is not None
    assert follower.feed is not None
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(follower.task, 10)
    follower.task = asyncio.create_task(follower.feed.run())
    await until(lambda: follower.trusted)
    assert follower.blocks == 4


async def test_a_fault_of_ours_ends_the_feed_and_takes_its_view_along(
    follower: Follower, engine: FakePublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(follower, engine, 3)

    def broken(worker: str, batch: object, now_s: float | None, more: bool) -> None:
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
        gc.collect()  # what earlier tests have left is not the feed's
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


@pytest.mark.parametrize("form", ["one event", "many events", "removals"])
async def test_a_batch_of_thousands_of_blocks_leaves_the_loop_its_turns(
    follower: Follower, engine: FakePublisher, form: str
) -> None:
    """As SGLang stores them with pages of one token; the index has to take in every block."""
    blocks = 50_000
    await joined(follower, engine)
    chain: list[dict[str, object]] = [
        {**stored(0), "block_hashes": list(range(1, blocks + 1)), "token_ids": [7] * (BLOCK * blocks)},
        {"type": "BlockRemoved", "block_hashes": list(range(1, blocks + 1)), "medium": "GPU"},
    ]
    events = {
        "one event": chain[:1],
        "many events": [stored(number) for number in range(4000)],
        "removals": chain,
    }[form]
    payload = payload_of(events)
    gc.collect()
    watch = LoopWatch()
    await engine.publish_raw(payload)
    await watch.watch(lambda: follower.batches("applied") == 1)
    assert follower.blocks == {"one event": blocks, "many events": 4000, "removals": 0}[form]
    # Against all of the work, for a busy machine is twice as slow from one moment to the next.
    assert max(watch.gaps_s) < 0.6 * sum(watch.gaps_s)
    assert max(watch.gaps_s) < 0.08
