"""A worker that is to be emptied: it gets nothing new, finishes what it has, and conversations go on elsewhere."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.harness import Bench, chat, quick, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Bench]:
    engines = [quick(name, prefill_us_per_token=300, decode_ms=20) for name in "ab"]
    async with running(engines, pool={"learning": {"min_samples": 3, "share": 0.34}}) as bench:
        await bench.learn()
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def bench(shared: Bench) -> AsyncIterator[Bench]:
    """With two workers that take requests, whatever a test before has left."""
    yield shared
    for name in "ab":
        await switch(shared, "serve", name)
    await shared.settled()


async def switch(bench: Bench, what: str, worker: str) -> dict[str, Any]:
    async with bench.http.post(f"{bench.stack.admin_url}/{what}/{worker}") as response:
        assert response.status == 200
        told: dict[str, Any] = await response.json()
        return told


async def test_a_rollout_empties_a_worker_and_loses_nothing(bench: Bench) -> None:
    text = words(1500, "conversation")
    home = (await bench.post(chat(text))).worker
    assert home is not None
    await bench.settled()
    assert (await bench.post(chat(text))).worker == home, "its prefix is there"
    other = "b" if home == "a" else "a"

    long = asyncio.create_task(bench.post(chat(text, max_tokens=100)))

    async def streams() -> bool:
        decoding: int = (await bench.worker(home))["decoding"]
        return decoding == 1

    await until(streams, 10, "stream")
    assert await switch(bench, "drain", home) == {"draining": True, "in_flight": {home: 1}}
    for _ in range(4):
        answer = await bench.post(chat(text))
        assert (answer.status, answer.worker, answer.engine) == (200, other, other)
    answer = await long
    assert (answer.status, answer.engine, answer.complete) == (200, home, True)
    await bench.settled()
    view = await bench.worker(home)
    assert (view["draining"], view["in_flight"]) == (True, 0)
    assert await bench.metric("headway_worker_draining", worker=home) == 1

    await switch(bench, "serve", home)
    answers = await asyncio.gather(*(bench.post(chat(words(900, f"after {n}"))) for n in range(8)))
    assert {answer.engine for answer in answers} == {"a", "b"}


async def test_while_all_workers_drain_requests_are_told_that_there_is_none(bench: Bench) -> None:
    for name in "ab":
        await switch(bench, "drain", name)
    answer = await bench.post(chat("hi"))
    assert (answer.status, answer.headers["x-headway-reason"]) == (503, "no_worker")
    for name in "ab":
        await switch(bench, "serve", name)
    assert (await bench.post(chat("hi"))).status == 200
