"""A request that would be refused waits in the filter for a moment, through the real Envoy."""

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.harness import Bench, RawClient, chat, quick, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOLD_S = 2.0
BOUNDED = json.dumps(chat(max_queue_wait_s=5)).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """One engine that takes a millisecond a token, learned at once; requests are held for longer than Envoy waits by
    itself."""
    engine = quick("a", prefill_us_per_token=1000, max_num_batched_tokens=256)
    pool = {"learning": {"min_samples": 3}, "admission": {"hold_s": HOLD_S}}
    async with running([engine], pool=pool) as bench:
        await bench.learn(tokens=(100, 800, 5000))
        yield bench


async def busy(bench: Bench) -> RawClient:
    """Somebody whose prompt keeps the engine busy for twelve seconds, or until it leaves."""
    client = RawClient(bench.stack.listener_port)
    await client.send_request(json.dumps(chat(words(12_000, time.monotonic_ns()))).encode())

    async def booked() -> bool:
        return bool((await bench.worker("a"))["prefill_tokens_ahead"])

    await until(booked, 5, "queue")
    return client


async def held(bench: Bench, before: float) -> None:
    """The filter has a stream open that it has not decided on."""

    async def waits() -> bool:
        counts = await bench.metrics()
        return counts.sum("headway_streams_open") == before + 1

    await until(waits, 5, "held request")
    await asyncio.sleep(0.1)


async def test_it_is_served_when_the_queue_goes_away(bench: Bench) -> None:
    before = await bench.metric("headway_held_total", outcome="placed")
    queue = await busy(bench)
    streams = await bench.metric("headway_streams_open")
    asked = asyncio.create_task(bench.post(chat(max_queue_wait_s=5)))
    await held(bench, streams)
    assert not asked.done()
    queue.close()
    answer = await asked
    assert (answer.status, answer.worker, answer.complete) == (200, "a", True)
    assert await bench.metric("headway_held_total", outcome="placed") == before + 1
    await bench.settled()


async def test_it_is_refused_when_its_time_is_over_and_envoy_has_waited(bench: Bench) -> None:
    before = await bench.metric("headway_held_total", outcome="refused")
    queue = await busy(bench)
    began_s = time.monotonic()
    answer = await bench.post(chat(max_queue_wait_s=5))
    took_s = time.monotonic() - began_s
    assert (answer.status, answer.headers["x-headway-reason"]) == (429, "queue_wait")
    assert HOLD_S <= took_s < HOLD_S + 2
    assert await bench.metric("headway_held_total", outcome="refused") == before + 1
    assert await bench.envoy_stat("http.llm.ext_proc.message_timeouts") == 0
    queue.close()
    await bench.settled()


async def test_a_client_that_leaves_while_it_is_held_leaves_nothing(bench: Bench) -> None:
    queue = await busy(bench)
    streams, before = (
        await bench.metric("headway_streams_open"),
        await bench.metric("headway_held_total", outcome="gone"),
    )
    client = RawClient(bench.stack.listener_port)
    await client.send_request(BOUNDED)
    await held(bench, streams)
    client.close()

    async def gone() -> bool:
        counts = await bench.metrics()
        return (
            counts.sum("headway_held_total", outcome="gone") == before + 1
            and counts.sum("headway_streams_open") == streams
        )

    await until(gone, HOLD_S * 0.9, "end of its stay")
    queue.close()
    await bench.settled()


async def test_a_filter_that_stops_decides_on_all_that_it_holds(bench: Bench) -> None:
    queue = await busy(bench)
    streams = await bench.metric("headway_streams_open")
    asked = [asyncio.create_task(bench.post(chat(f"{n}", max_queue_wait_s=5))) for n in range(3)]

    async def all_held() -> bool:
        return await bench.metric("headway_streams_open") == streams + 3

    await until(all_held, 5, "held requests")
    assert bench.stack.filter is not None
    began_s = time.monotonic()
    ending = asyncio.create_task(bench.stack.filter.end())
    answers = await asyncio.gather(*asked)
    assert time.monotonic() - began_s < HOLD_S
    assert [answer.status for answer in answers] == [429] * 3
    queue.close()
    await ending
    await bench.revive_filter()
    await bench.learn(tokens=(100, 800, 5000))  # a new filter knows nothing, and refuses nobody
