"""Engines that answer badly: a client sees what it would see without the filter, and nothing is left behind."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.ledger import BACK_OFF_S
from tests.e2e.harness import CHAT, Answer, Bench, chat, quick, read, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Bench]:
    async with running([quick("a"), quick("b")], {"probe": {"interval_s": 0.5}}) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def bench(shared: Bench) -> AsyncIterator[Bench]:
    """With engines that are well, before each test and after it."""
    await shared.settled()
    yield shared
    for name in "ab":
        async with shared.http.delete(f"{url(shared, name)}/sim/faults") as response:
            assert response.status == 200
    await shared.settled()


def url(bench: Bench, engine: str) -> str:
    return f"http://127.0.0.1:{bench.stack.engine_port(engine)}"


async def fault(bench: Bench, engines: str = "ab", **fields: Any) -> None:
    for name in engines:
        async with bench.http.post(f"{url(bench, name)}/sim/faults", json=fields) as response:
            assert response.status == 200, await response.text()


async def counts(bench: Bench) -> dict[str, float]:
    page = await bench.metrics()
    kinds = ("plain", "error", "empty", "given_up", "served_elsewhere", "unseen", "unanswered")
    told = {kind: page.sum("headway_ungraded_total", reason=kind) for kind in kinds}
    return {**told, "graded": page.sum("headway_predictions_graded_total")}


async def moved(bench: Bench, before: dict[str, float]) -> dict[str, float]:
    """What has been counted since, once everything is settled."""
    await bench.settled()
    after = await counts(bench)
    return {kind: after[kind] - before[kind] for kind in after if after[kind] != before[kind]}


@pytest.mark.parametrize(
    "fields",
    [
        {"comments": 3, "delay_s": 0.3},
        {"delay_s": 0.3},
        {"headers_delay_s": 0.3},
        {"interim": True},
        {"gzip": True},
        {"gzip": True, "comments": 2, "delay_s": 0.3, "interim": True},
    ],
    ids=json.dumps,
)
async def test_odd_but_right_answers_are_whole_and_graded_by_their_first_token(
    bench: Bench, fields: dict[str, Any]
) -> None:
    await fault(bench, **fields)
    before = await counts(bench)
    answer = await bench.post(chat(words(50, json.dumps(fields)), max_tokens=30))
    assert (answer.status, answer.complete) == (200, True)
    assert answer.worker == answer.engine
    assert sum(bool(event["choices"]) for event in answer.events if "choices" in event) == 31
    assert await moved(bench, before) == {"graded": 1}
    slow = any("delay" in field for field in fields)
    assert ((await bench.last_graded())["actual_ttft_s"] >= 0.3) == slow


async def test_an_empty_stream_is_an_answer_that_is_not_graded(bench: Bench) -> None:
    await fault(bench, empty_stream=True)
    before = await counts(bench)
    answer = await bench.post(chat("hello"))
    assert (answer.status, answer.body) == (200, b"")
    assert await moved(bench, before) == {"empty": 1}


async def test_a_gzipped_plain_answer_is_whole(bench: Bench) -> None:
    await fault(bench, gzip=True)
    before = await counts(bench)
    body = chat("hello")
    del body["stream"], body["stream_options"]
    assert (await bench.post(body)).json["usage"]["completion_tokens"] == 4
    assert await moved(bench, before) == {"plain": 1}


@pytest.mark.parametrize("chunks", [1, 3])
async def test_a_stream_that_breaks_off_is_graded_and_released(bench: Bench, chunks: int) -> None:
    await fault(bench, reset_after_chunks=chunks)
    before = await counts(bench)
    with pytest.raises(aiohttp.ClientPayloadError):
        await bench.post(chat("hello", max_tokens=50))
    assert await moved(bench, before) == {"graded": 1}


async def test_a_reset_without_an_answer_is_envoys_to_report(bench: Bench) -> None:
    await fault(bench, reset=True)
    before = await counts(bench)
    answer = await bench.post(chat("hello"))
    assert answer.status == 503
    assert await moved(bench, before) == {"unanswered": 1}


async def test_clients_that_leave_a_hanging_engine_leave_nothing_behind(bench: Bench) -> None:
    await fault(bench, hang=True)
    before = await counts(bench)

    async def ask(number: int) -> None:
        timeout = aiohttp.ClientTimeout(total=0.5)
        with pytest.raises(TimeoutError):
            async with bench.http.post(bench.stack.url + CHAT, json=chat(f"{number}"), timeout=timeout) as response:
                await response.read()

    await asyncio.gather(*(ask(number) for number in range(20)))
    assert await moved(bench, before) == {"given_up": 20}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_full_engine_is_counted_and_left_alone_for_a_while(bench: Bench, status: int) -> None:
    await asyncio.sleep(BACK_OFF_S)  # nobody is spared any more for what an earlier test did
    await fault(bench, refuse_status=status)
    before = {
        name: await bench.metric("headway_engine_refusals_total", worker=name, status=str(status)) for name in "ab"
    }
    refused = await bench.post(chat(words(20, f"full {status}")))
    refused_s = time.monotonic()
    assert refused.status == status
    assert "told to" in refused.json["error"]["message"]
    await fault(bench, refuse_status=None)
    # A 503 was retried, and may be another's in the end: the chosen one is known to be full.
    full, other = refused.worker, "b" if refused.worker == "a" else "a"
    spared: list[Answer] = []
    while time.monotonic() - refused_s < 0.75 * BACK_OFF_S:
        spared.append(await bench.post(chat(words(20, f"next {status} {len(spared)}"))))
        await asyncio.sleep(0.05)
        if time.monotonic() - refused_s > BACK_OFF_S:
            spared.pop()  # a machine this slow may have decided it after the engine's time was up
    why = [(answer.engine, answer.worker, answer.headers.get("x-headway-why")) for answer in spared]
    assert {(answer.status, answer.engine) for answer in spared} == {(200, other)}, (full, why)
    for name in "ab":
        after = await bench.metric("headway_engine_refusals_total", worker=name, status=str(status))
        assert after - before[name] == (name == full)


async def test_other_errors_are_passed_on(bench: Bench) -> None:
    await fault(bench, refuse_status=418)
    before = await counts(bench)
    answer = await bench.post(chat("hello"))
    assert (answer.status, answer.json["error"]["code"]) == (418, 418)
    assert await moved(bench, before) == {"error": 1}


async def mirrored(bench: Bench) -> bool:
    """Whether the filter knows of as many blocks as the engines have."""
    for name in "ab":
        state, worker = await bench.engine_state(name), await bench.worker(name)
        if not worker["feed_trusted"] or worker["cached_blocks"] != state["distinct_blocks"]:
            return False
    return True


@pytest.mark.parametrize(
    ("fields", "counter"),
    [
        ({"drop_batches": 3}, "headway_kv_feed_faults_total"),
        ({"duplicate_batches": 5}, "headway_kv_batches_total"),
    ],
    ids=["lost", "repeated"],
)
async def test_the_mirror_is_right_again_after_trouble_in_the_feed(
    bench: Bench, fields: dict[str, Any], counter: str
) -> None:
    await bench.post(chat(words(300, f"before {fields}")))
    await until(lambda: mirrored(bench), 15, "mirror")
    kind = {"result": "repeated"} if "duplicate_batches" in fields else {"kind": "gap"}
    seen = await bench.metric(counter, **kind)
    restarts = await bench.metric("headway_kv_feed_faults_total", kind="restart")
    await fault(bench, **fields)
    await asyncio.gather(*(bench.post(chat(words(200, f"{number} {fields}"), max_tokens=40)) for number in range(12)))
    await bench.settled()
    await until(lambda: mirrored(bench), 20, "mirror")
    assert await bench.metric(counter, **kind) > seen
    assert await bench.metric("headway_kv_feed_faults_total", kind="restart") == restarts


async def test_numbers_that_are_lost_for_good_cost_trust_until_the_engine_begins_anew(bench: Bench) -> None:
    await until(lambda: mirrored(bench), 15, "mirror")
    await fault(bench, "a", skip_sequences=7)
    await bench.post_to_engine("a", chat(words(200, "skipped")))

    async def trusts(name: str, wanted: bool) -> bool:
        return bool((await bench.worker(name))["feed_trusted"]) == wanted

    await until(lambda: trusts("a", False), 10, "distrust")
    assert await trusts("b", True)
    answers = await asyncio.gather(*(bench.post(chat(words(50, f"blind {number}"))) for number in range(10)))
    assert all(answer.complete and answer.worker == answer.engine for answer in answers)
    await restart(bench, "a")
    await bench.post_to_engine("a", chat(words(200, "anew")))
    await until(lambda: mirrored(bench), 20, "mirror")


async def restart(bench: Bench, engine: str) -> None:
    async with bench.http.post(f"{url(bench, engine)}/sim/restart") as response:
        assert response.status == 200


async def test_an_engine_that_crashed_and_came_back_is_known_to_be_empty(bench: Bench) -> None:
    text = words(800, "crash")
    first = await bench.post(chat(text))
    await until(lambda: mirrored(bench), 15, "mirror")
    await restart(bench, first.engine)
    for name in "ab":  # each has something to publish
        await bench.post_to_engine(name, chat(words(60, f"direct {name}")))
    await until(lambda: mirrored(bench), 20, "mirror")
    again = await bench.post(chat(text))
    assert int(again.headers["x-headway-cached-tokens"]) == again.usage["prompt_tokens_details"]["cached_tokens"]


async def test_wrong_usage_is_seen_in_the_cache_verdicts(bench: Bench) -> None:
    text = words(500, "usage")
    await asyncio.gather(*(bench.post_to_engine(name, chat(text)) for name in "ab"))
    await until(lambda: mirrored(bench), 15, "mirror")
    for off, verdict in ((-160, "over"), (320, "under")):
        before = await bench.metric("headway_cache_estimates_total", verdict=verdict)
        await fault(bench, cached_tokens_off=off)
        answer = await bench.post(chat(text))
        assert answer.status == 200
        await bench.settled()
        assert await bench.metric("headway_cache_estimates_total", verdict=verdict) == before + 1


async def test_an_expectation_to_continue_is_met(bench: Bench) -> None:
    """A client that asks before it sends its body."""
    body = json.dumps(chat("hello")).encode()
    async with bench.http.post(bench.stack.url + CHAT, data=body, expect100=True) as response:
        answer = await read(response)
    assert (answer.status, answer.complete) == (200, True)
    assert answer.worker == answer.engine
