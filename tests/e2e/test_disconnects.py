"""Clients that leave: the ticket is released, and the engine stops working for them."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.harness import Bench, RawClient, chat, quick, running, until, words

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.parametrize("abruptly", [False, True])]

# Far beyond what a test waits: what is released was released because its client left.
LONG = {"max_tokens": 15_000}
RELEASED_S = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """An engine that prefills 1,000 tokens a second and decodes 50."""
    engine = quick("a", prefill_us_per_token=1000, step_ms=20, max_num_batched_tokens=256)
    async with running([engine]) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def client(bench: Bench) -> AsyncIterator[RawClient]:
    await bench.settled()
    client = RawClient(bench.stack.listener_port)
    yield client
    # A test that fails before its client leaves must not fail all others.
    client.close()


async def engine_has(bench: Bench, requests: int) -> None:
    async def reached() -> bool:
        state = await bench.engine_state("a")
        return bool(state["running"] + state["waiting"] == requests)

    await until(reached, 10, f"engine with {requests} requests")


async def counted(bench: Bench) -> float:
    """Granted requests whose end is known."""
    return await bench.metric("headway_requests_ended_total")


async def granted(bench: Bench) -> float:
    return await bench.metric("headway_decisions_total", outcome="routed")


async def all_is_released(bench: Bench) -> None:
    await bench.settled(RELEASED_S)
    assert await granted(bench) == await counted(bench)
    # Nothing is stuck: the next one is served at once.
    assert (await bench.post(chat())).complete


async def test_during_the_upload(bench: Bench, client: RawClient, abruptly: bool) -> None:
    before = await granted(bench)
    await client.send_request(json.dumps(chat(words(3000), **LONG)).encode(), part=0.6)

    async def open_stream() -> bool:
        return await bench.metric("headway_streams_open") == 1

    await until(open_stream, 5, "stream")
    client.close(abruptly)
    await bench.settled(RELEASED_S)
    assert await granted(bench) == before
    await all_is_released(bench)


async def test_right_after_the_body(bench: Bench, client: RawClient, abruptly: bool) -> None:
    """Many times, so that it happens before, during and after the decision."""
    client.close()
    for number in range(40):
        leaver = RawClient(bench.stack.listener_port)
        await leaver.send_request(json.dumps(chat(words(400, number), **LONG)).encode())
        await asyncio.sleep(number * 0.0004)
        leaver.close(abruptly)
    await all_is_released(bench)


async def test_while_it_waits_for_its_first_token(bench: Bench, client: RawClient, abruptly: bool) -> None:
    await client.send_request(json.dumps(chat(words(20_000, "waits"), **LONG)).encode())
    await engine_has(bench, 1)
    assert await bench.in_flight() == 1
    given_up = await bench.metric("headway_ungraded_total", reason="given_up")
    client.close(abruptly)
    await all_is_released(bench)
    assert await bench.metric("headway_ungraded_total", reason="given_up") == given_up + 1


async def test_while_it_waits_behind_another(bench: Bench, client: RawClient, abruptly: bool) -> None:
    await client.send_request(json.dumps(chat(words(20_000, "ahead"), **LONG)).encode())
    await engine_has(bench, 1)
    behind = RawClient(bench.stack.listener_port)
    await behind.send_request(json.dumps(chat(words(20_000, "behind"), **LONG)).encode())
    await engine_has(bench, 2)
    behind.close(abruptly)
    await engine_has(bench, 1)

    async def one_left() -> bool:
        return await bench.in_flight() == 1

    await until(one_left, RELEASED_S, "release of the one that left")
    client.close(abruptly)
    await all_is_released(bench)


async def test_in_the_middle_of_its_stream(bench: Bench, client: RawClient, abruptly: bool) -> None:
    graded = await bench.metric("headway_predictions_graded_total")
    await client.send_request(json.dumps(chat(words(50, "middle"), **LONG)).encode())
    await client.receive_until(b'"content":"')
    for _ in range(5):
        await client.receive_until(b"data: ")
    assert await bench.in_flight() == 1
    client.close(abruptly)
    await all_is_released(bench)
    assert await bench.metric("headway_predictions_graded_total") == graded + 2  # it, and the next one


async def test_after_the_last_byte(bench: Bench, client: RawClient, abruptly: bool) -> None:
    before = await bench.metric("headway_requests_ended_total", source="access_log")
    await client.send_request(json.dumps(chat(words(50, "last"))).encode())
    await client.receive_until(b"data: [DONE]\n\n")
    client.close(abruptly)
    await all_is_released(bench)
    await bench.settled()
    assert await bench.metric("headway_requests_ended_total", source="access_log") == before + 2


async def test_while_it_waits_for_an_answer_that_is_not_streamed(
    bench: Bench, client: RawClient, abruptly: bool
) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": words(50, "plain")}], **LONG}
    await client.send_request(json.dumps(body).encode())
    await engine_has(bench, 1)
    client.close(abruptly)
    await all_is_released(bench)
