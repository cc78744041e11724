"""The filter killed, stopped, restarted and drained: no client may notice, and decisions resume."""

import asyncio
import errno
import json
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import yaml

from extproc.stack import envoy_config_path
from tests.e2e.harness import Answer, Bench, RawClient, chat, quick, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")


def message_timeout_s() -> float:
    config = yaml.safe_load(envoy_config_path().read_text())
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    ext_proc = next(f for f in manager["http_filters"] if f["name"] == "envoy.filters.http.ext_proc")
    return float(ext_proc["typed_config"]["message_timeout"].removesuffix("s"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Bench]:
    """Two engines that decode 100 tokens a second."""
    overrides = {"shutdown": {"notice_s": 1.5, "grace_s": 20}}
    engines = [quick(name, step_ms=10, prefill_us_per_token=200) for name in "ab"]
    async with running(engines, overrides) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def bench(shared: Bench) -> AsyncIterator[Bench]:
    """With a filter at work, before each test and after the last."""
    await shared.revive_filter()
    await decisions_resume(shared)
    yield shared
    await shared.revive_filter()


def filter_of(bench: Bench) -> Any:
    assert bench.stack.filter is not None
    return bench.stack.filter


async def decisions_resume(bench: Bench) -> None:
    async def routed() -> bool:
        answer = await bench.post(chat(words(20, time.monotonic_ns())))
        assert answer.status == 200
        return answer.worker is not None

    await until(routed, 15, "decision")
    await bench.settled()


def tokens(answer: Answer) -> int:
    """How many were generated: an event each, and one before them for the role."""
    return sum(1 for event in answer.events if event["choices"]) - 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_filter_lost_in_mid_stream_costs_no_token(bench: Bench, number: int) -> None:
    client = RawClient(bench.stack.listener_port)
    await client.send_request(json.dumps(chat(words(50, number), max_tokens=200)).encode(), connection="close")
    got = await client.receive_until(b'"content":" ')
    filter_of(bench).process.send_signal(number)
    try:
        while piece := await client.receive():
            got += piece
    finally:
        client.close()
        if number == signal.SIGSTOP:
            filter_of(bench).process.send_signal(signal.SIGCONT)
        else:
            await filter_of(bench).process.wait()
    assert got.count(b'"delta":{"content"') == 200
    assert b'"finish_reason":"length"' in got
    assert b"data: [DONE]\n\n" in got


async def test_a_filter_killed_while_clients_wait_for_their_first_token(bench: Bench) -> None:
    waiting = [asyncio.create_task(bench.post(chat(words(8000, n), max_tokens=20))) for n in range(4)]

    async def booked() -> bool:
        return await bench.in_flight() == 4

    await until(booked, 10, "four bookings")
    await filter_of(bench).end(signal.SIGKILL)
    answers = await asyncio.gather(*waiting)
    assert [(answer.status, answer.complete, tokens(answer)) for answer in answers] == [(200, True, 20)] * 4
    assert {answer.engine for answer in answers} == {"a", "b"}


async def test_a_filter_that_hangs_delays_by_its_timeout_and_no_more(bench: Bench) -> None:
    await bench.settled()
    filter_of(bench).process.send_signal(signal.SIGSTOP)
    try:
        started_s = time.monotonic()
        answers = await asyncio.gather(*(bench.post(chat(words(20, n))) for n in range(10)))
        took_s = time.monotonic() - started_s
        assert all((a.status, a.complete, a.worker) == (200, True, None) for a in answers)
        assert took_s < message_timeout_s() + 2

        async def at_once() -> bool:
            started_s = time.monotonic()
            assert (await bench.post(chat())).status == 200
            return time.monotonic() - started_s < message_timeout_s() / 2

        # Envoy's health check finds out, and then nobody waits any more.
        await until(at_once, 15, "answer without a delay")
    finally:
        filter_of(bench).process.send_signal(signal.SIGCONT)
    await decisions_resume(bench)
    assert await bench.metric("headway_bugs_total") == 0


async def test_without_a_filter_the_engines_share_the_load(bench: Bench) -> None:
    await bench.settled()
    await filter_of(bench).end(signal.SIGKILL)
    started_s = time.monotonic()
    answers = [await bench.post(chat(words(20, n))) for n in range(20)]
    assert all((a.status, a.complete, a.worker) == (200, True, None) for a in answers)
    assert {answer.engine for answer in answers} == {"a", "b"}
    assert time.monotonic() - started_s < 20 * message_timeout_s() / 2


async def test_decisions_resume_when_the_filter_is_back(bench: Bench) -> None:
    await filter_of(bench).end(signal.SIGKILL)
    text = words(400, "comes back")
    before = await bench.post(chat(text))
    assert before.worker is None
    await bench.revive_filter()
    await decisions_resume(bench)
    # It has asked the engines for what they published while it was away.
    cached = [(await bench.worker(name))["cached_blocks"] for name in "ab"]
    assert max(cached) >= 25

    async def trusted() -> bool:
        return all([(await bench.worker(name))["feed_trusted"] for name in "ab"])

    await until(trusted, 15, "trusted feed")


async def test_a_stream_that_began_with_another_filter_ends_without_trouble(bench: Bench) -> None:
    """Its end is reported to a filter that never booked it. It is long: on a busy machine a filter takes seconds."""
    streaming = asyncio.create_task(bench.post(chat(words(20, "old"), max_tokens=1000)))

    async def booked() -> bool:
        return await bench.in_flight() == 1

    await until(booked, 5, "booking")
    await filter_of(bench).end(signal.SIGKILL)
    await bench.revive_filter()
    answer = await streaming
    assert (answer.status, answer.complete, tokens(answer)) == (200, True, 1000)

    async def late() -> bool:
        return await bench.metric("headway_access_log_entries_total", kind="late") == 1

    await until(late, 10, "late entry")
    assert await bench.in_flight() == 0


async def test_a_drained_filter_costs_no_client_anything(bench: Bench) -> None:
    """SIGTERM with a hundred clients that come back as soon as they are served."""
    stop = asyncio.Event()
    failures: list[str] = []
    served = {"routed": 0, "unrouted": 0}

    async def client(number: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            answer = await bench.post(chat(words(20, f"{number} {count}"), max_tokens=30))
            if answer.status != 200 or not answer.complete or tokens(answer) != 30:
                failures.append(f"{answer.status} {answer.body[-200:]!r}")
            served["routed" if answer.worker else "unrouted"] += 1

    async def hundred(kind: str) -> None:
        async def reached() -> bool:
            assert not failures
            return served[kind] >= 100

        await until(reached, 30, f"hundred {kind} answers")

    clients = [asyncio.create_task(client(number)) for number in range(100)]
    try:
        await hundred("routed")
        assert served["unrouted"] == 0
        started_s = time.monotonic()
        assert await filter_of(bench).end(signal.SIGTERM) == 0
        drained_s = time.monotonic() - started_s
        await hundred("unrouted")
    finally:
        stop.set()
        await asyncio.gather(*clients)
    assert not failures
    assert drained_s < 10
    log = filter_of(bench).log.read_text()
    assert '"stopped"' in log
    assert '"bug"' not in log


async def test_nothing_is_listening_after_the_drain(bench: Bench) -> None:
    assert await filter_of(bench).end(signal.SIGTERM) == 0
    for port in (bench.stack.grpc_port, bench.stack.admin_port):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
