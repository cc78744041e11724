"""Engines that refuse connections, and engines that come back with an empty cache."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from extproc.ledger import BACK_OFF_S
from tests.e2e.harness import Answer, Bench, chat, quick, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Bench]:
    """Probed so rarely that the filter learns of a death by what happens to requests, or by a feed that breaks off."""
    engines = [quick(name, prefill_us_per_token=300) for name in "abc"]
    learning = {"min_samples": 3, "share": 0.34}
    async with running(engines, {"probe": {"interval_s": 60}}, {"learning": learning}) as bench:
        await bench.learn()
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def bench(shared: Bench) -> AsyncIterator[Bench]:
    await shared.settled()
    yield shared
    for spec in shared.stack.specs:
        if not shared.stack.engines[spec.name].running:
            await shared.stack.start_engine(spec)

    async def all_up() -> bool:
        return all([(await shared.worker(name))["up"] for name in "abc"])

    await until(all_up, 20, "engines that are up")


async def home_of(bench: Bench, text: str) -> str:
    """Sends a cold prompt, and waits until a follow-up would go where it was served."""
    first = await bench.post(chat(text))
    assert first.worker == first.engine
    await bench.settled()
    second = await bench.post(chat(text))
    assert second.worker == first.worker
    assert int(second.headers["x-headway-cached-tokens"]) > 0
    await bench.settled()
    return first.engine


async def graded(bench: Bench) -> dict[str, float]:
    return {name: await bench.metric("headway_predictions_graded_total", worker=name) for name in "abc"}


async def test_the_next_of_the_list_serves_when_the_chosen_one_refuses(bench: Bench) -> None:
    text = words(1500, "fallback")
    home = await home_of(bench, text)
    # Its pages and its events stay as they are: of one that dies the filter knows, and does not choose it.
    faults = f"http://127.0.0.1:{bench.stack.engine_port(home)}/sim/faults"
    async with bench.http.post(faults, json={"refuse_status": 503}) as told:
        assert told.status == 200
    before = await graded(bench)
    elsewhere = await bench.metric("headway_ungraded_total", reason="served_elsewhere")
    answer = await bench.post(chat(text))
    assert (answer.status, answer.complete) == (200, True)
    assert answer.headers["x-headway-cached-tokens"] != "0"  # it was meant for its home
    assert answer.engine != home

    async def ended() -> bool:
        return await bench.in_flight() == 0

    await until(ended, 5, "release")
    # The prediction was for another worker: it is nobody's grade.
    assert await graded(bench) == before
    assert await bench.metric("headway_ungraded_total", reason="served_elsewhere") == elsewhere + 1
    async with bench.http.delete(faults) as told:
        assert told.status == 200


async def test_a_dead_engine_costs_no_client_an_answer(bench: Bench) -> None:
    await asyncio.sleep(BACK_OFF_S + 0.5)  # nobody is spared any more for what an earlier test did
    await bench.stack.engines["b"].end(signal.SIGKILL)
    # Together three steps of prefill: more than a busy machine adds to the answers that the costs are learned from.
    answers: list[Answer] = await asyncio.gather(*(bench.post(chat(words(600, n))) for n in range(40)))
    assert [(answer.status, answer.complete) for answer in answers] == [(200, True)] * 40
    assert {answer.engine for answer in answers} == {"a", "c"}

    async def ended() -> bool:
        return await bench.in_flight() == 0

    await until(ended, 5, "release")


async def test_a_stream_that_its_engine_breaks_off_is_released(bench: Bench) -> None:
    """The client sees a broken stream, as without us; the ticket goes."""
    streaming = asyncio.create_task(bench.post(chat(words(60, "breaks"), max_tokens=20_000)))

    async def begun() -> bool:
        workers = [await bench.worker(name) for name in "abc"]
        return any(worker["decoding"] == 1 for worker in workers)

    await until(begun, 5, "stream")
    (home,) = [name for name in "abc" if (await bench.engine_state(name))["running"]]
    await bench.stack.engines[home].end(signal.SIGKILL)
    (outcome,) = await asyncio.gather(streaming, return_exceptions=True)
    assert isinstance(outcome, Exception)

    async def ended() -> bool:
        return await bench.in_flight() == 0

    await until(ended, 5, "release")


async def test_an_engine_that_restarts_has_an_empty_cache(bench: Bench) -> None:
    text = words(1505, "restart")  # ends within a block: no block is computed twice
    home = await home_of(bench, text)
    # A restart shows by a sequence number that is lower than before: one that had hardly begun to count does not.
    for number in range(60):
        assert (await bench.post_to_engine(home, chat(words(60, f"counts {number}"), max_tokens=1))).complete
    before = await bench.metric("headway_kv_feed_faults_total", worker=home, kind="restart")
    await bench.stack.engines[home].end(signal.SIGKILL)
    await bench.stack.start_engine(next(spec for spec in bench.stack.specs if spec.name == home))

    wakes = itertools.count()

    async def dropped() -> bool:
        """The feed learns of the restart when it is connected again, or else with what the new engine caches first."""
        assert (await bench.post_to_engine(home, chat(words(60, f"wakes it {next(wakes)}")))).complete
        return await bench.metric("headway_kv_feed_faults_total", worker=home, kind="restart") == before + 1

    await until(dropped, 20, "restart noticed")
    answer = await bench.post(chat(text))
    assert answer.headers["x-headway-cached-tokens"] == "0"
    assert answer.usage["prompt_tokens_details"]["cached_tokens"] == 0
    await bench.settled()
    # The feed goes on: what it stores now is credited.
    again = await bench.post(chat(text))
    assert again.worker == answer.worker
    assert int(again.headers["x-headway-cached-tokens"]) == again.usage["prompt_tokens_details"]["cached_tokens"] > 1400

    async def agreed() -> bool:
        worker, state = await bench.worker(home), await bench.engine_state(home)
        return bool(worker["cached_blocks"] == state["cached_blocks"])

    await until(agreed, 5, "agreement on what is cached")
