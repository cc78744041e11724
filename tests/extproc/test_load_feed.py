"""SGLang's pushed load: what is published over a real socket is heard, and no more often than is of use."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from extproc.engine_pages import RankState, read_sglang_load
from extproc.load_feed import LoadFeed
from tests.fakes.clock import ManualClock
from tests.fakes.filter import Filter
from tests.fakes.waiting import until


def stat(running: int, waiting: int, prefilled: int) -> bytes:
    """As SGLang 0.5.23 publishes it: running, waiting, tokens, capacity, rank, ..., prefilled, busy microseconds."""
    return msgspec.msgpack.encode(["LoadStat", running, waiting, 4000, 64000, 0, 120, 4120, 4096, prefilled, 81_000])


def test_a_load_is_read_whatever_its_version_says_besides() -> None:
    assert read_sglang_load(stat(3, 4, 9000)) == RankState(in_progress=7, tokens_done=9000.0)
    assert read_sglang_load(msgspec.msgpack.encode(["LoadStat", 3, 4, 4000])) == RankState(in_progress=7)
    for other in ([], ["LoadStat", 3], ["Other", 3, 4], ["LoadStat", -1, 4], ["LoadStat", True, 4], "LoadStat", 5):
        assert read_sglang_load(msgspec.msgpack.encode(other)) is None
    assert read_sglang_load(b"\xc1") is None


@given(st.binary(max_size=60) | st.lists(st.integers() | st.text(max_size=9), max_size=12).map(msgspec.json.encode))
def test_whatever_is_published_is_a_load_or_none(payload: bytes) -> None:
    read_sglang_load(payload)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(0)


async def test_loads_are_heard_at_most_twice_a_second_and_garbage_is_counted(context: zmq.asyncio.Context) -> None:
    clock = ManualClock()
    filter_ = Filter({"a": "10.0.0.1:8000"}, clock)
    heard: list[tuple[RankState, float]] = []
    with context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        feed = LoadFeed(
            "a", f"tcp://127.0.0.1:{port}", filter_.metrics, context, lambda *told: heard.append(told), clock
        )
        running = asyncio.create_task(feed.run())

        def counted(result: str) -> float:
            return filter_.counted("load_reports", worker="a", result=result)

        async def publish(payload: bytes) -> None:
            await publisher.send_multipart([b"load", (0).to_bytes(8, "big"), payload])

        while not counted("malformed"):  # until the subscription is up
            await publish(b"hello")
            await asyncio.sleep(0.01)
        began_s = clock()
        await publish(stat(1, 0, 10))
        await until(lambda: len(heard) == 1)
        assert heard == [(RankState(in_progress=1, tokens_done=10.0), began_s)]
        clock.advance(0.1)
        await publish(stat(2, 0, 20))
        await until(lambda: counted("ok") == 2)
        assert len(heard) == 1
        clock.advance(0.5)
        await publish(stat(3, 0, 30))
        await until(lambda: len(heard) == 2)
        # It was counted after the one before came, and not only after the one before that was told.
        assert heard[1] == (RankState(in_progress=3, tokens_done=30.0), began_s + 0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
