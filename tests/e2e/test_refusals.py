"""Refusals as clients see them: the real OpenAI client, and one connection kept open."""

import asyncio
import contextlib
import http.client
import json
import subprocess
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from predictor.admission import BOUND_MAX_S, BOUND_MIN_S
from tests.e2e.harness import CHAT, Bench, RawClient, chat, quick, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "short"}]
MS_PER_TOKEN = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """One engine that takes a millisecond a token, learned at once."""
    engine = quick("a", prefill_us_per_token=1000 * MS_PER_TOKEN, max_num_batched_tokens=256)
    async with running([engine], pool={"learning": {"min_samples": 3}}) as bench:
        await bench.learn(tokens=(100, 800, 5000))
        yield bench


@contextlib.asynccontextmanager
async def queue(bench: Bench, seconds: float) -> AsyncIterator[None]:
    """A prompt that keeps the engine busy for so long, or until the block ends."""
    client = RawClient(bench.stack.listener_port)
    text = words(round(seconds * 1000 / MS_PER_TOKEN), time.monotonic_ns())
    await client.send_request(json.dumps(chat(text)).encode())

    async def booked() -> bool:
        return bool((await bench.worker("a"))["prefill_tokens_ahead"])

    try:
        await until(booked, 5, "queue")
        yield
    finally:
        client.close()
        await bench.settled()


def sdk(bench: Bench, max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{bench.stack.url}/v1", api_key="none", max_retries=max_retries)


async def test_the_openai_client_is_refused_at_once(bench: Bench) -> None:
    async with queue(bench, 12), sdk(bench) as client:
        started_s = time.monotonic()
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(
                model="sim", messages=MESSAGES, stream=True, extra_body={"max_queue_wait_s": 5}
            )
        took_s = time.monotonic() - started_s
    assert took_s < 1.5
    error, headers = refused.value, refused.value.response.headers
    assert (error.status_code, error.type, error.code) == (429, "rate_limit_error", "queue_wait_exceeded")
    assert "max_queue_wait_s = 5 s" in error.message
    # 12 s of work, 5 of which the caller would have waited for. The longest prompt that taught the filter took 5 s.
    drained_s, told_s = float(headers["x-headway-retry-after-uncapped-s"]), int(headers["retry-after-ms"]) / 1000
    assert drained_s == pytest.approx(7, abs=3)
    assert drained_s - 0.01 <= told_s <= 1.2 * drained_s + 0.01
    assert int(headers["retry-after"]) == pytest.approx(told_s + 0.5, abs=0.51)  # rounded up
    assert headers["x-headway-reason"] == "queue_wait"
    assert "x-headway-worker" not in headers
    assert headers["x-request-id"]


async def test_a_refused_request_never_reaches_the_engine_and_books_nothing(bench: Bench) -> None:
    async with queue(bench, 12):
        before = await bench.in_flight()
        answer = await bench.post(chat(max_queue_wait_s=5))
        assert answer.status == 429
        assert await bench.in_flight() == before
        state = await bench.engine_state("a")
        assert state["running"] + state["waiting"] == 1  # the queue's


async def test_the_header_bounds_too_and_wins_over_the_body(bench: Bench) -> None:
    async with queue(bench, 12):
        assert (await bench.post(chat(), x_max_queue_wait_s="5")).status == 429
        assert (await bench.post(chat(max_queue_wait_s=300), x_max_queue_wait_s="5.5")).status == 429


async def test_a_wider_bound_is_admitted_and_kept(bench: Bench) -> None:
    async with queue(bench, 6):
        started_s = time.monotonic()
        answer = await bench.post(chat(words(40, time.monotonic_ns()), max_queue_wait_s=20))
        assert (answer.status, answer.complete) == (200, True)
        assert 4 <= time.monotonic() - started_s <= 12
        assert int(answer.headers["x-headway-predicted-ttft-ms"]) == pytest.approx(6000, rel=0.25)
    assert await bench.metric("headway_bounds_total", kept="yes") >= 1


async def test_the_openai_client_sleeps_as_told_and_then_succeeds(bench: Bench) -> None:
    refused = await bench.metric("headway_decisions_total", outcome="refused")
    async with queue(bench, 7.5), sdk(bench, max_retries=5) as client:
        started_s = time.monotonic()
        stream = await client.chat.completions.create(
            model="sim", messages=MESSAGES, stream=True, max_tokens=3, extra_body={"max_queue_wait_s": 5}
        )
        admitted_s = time.monotonic() - started_s
        pieces = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
    assert len(pieces) == 4  # the role, then three words
    # 2.5 s too much, what is not yet sure of a wait of 5 s, and up to a fifth. By itself the client would come back
    # after half a second.
    assert 1.5 <= admitted_s <= 7
    # Told truly, it need not ask often: once more where the first estimate was a little short.
    assert 1 <= await bench.metric("headway_decisions_total", outcome="refused") - refused <= 2


async def test_clients_that_want_to_fall_back_raise_at_once_although_they_would_retry(bench: Bench) -> None:
    refused = await bench.metric("headway_decisions_total", outcome="refused")
    headers = {"x-headway-on-reject": "fail", "x-max-queue-wait-s": "5"}
    base_url = bench.stack.url
    async with (
        queue(bench, 14),
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="k", default_headers=headers) as one,
        anthropic.AsyncAnthropic(base_url=base_url, api_key="k", default_headers=headers) as other,
    ):
        started_s = time.monotonic()
        with pytest.raises(openai.RateLimitError):
            await one.chat.completions.create(model="sim", messages=MESSAGES)
        with pytest.raises(anthropic.RateLimitError):
            await other.messages.create(model="sim", max_tokens=5, messages=[{"role": "user", "content": "short"}])
        assert time.monotonic() - started_s < 2.5
    assert await bench.metric("headway_decisions_total", outcome="refused") - refused == 2


async def test_a_prompt_that_takes_longer_than_its_bound_on_the_first_token_is_told_that_coming_back_is_no_use(
    bench: Bench,
) -> None:
    answer = await bench.post(chat(words(4000, time.monotonic_ns())), x_slo_ttft_ms="1000")
    assert (answer.status, answer.headers["x-headway-reason"]) == (429, "own_prefill")
    assert answer.headers["x-should-retry"] == "false"
    assert "retry-after" not in answer.headers
    assert (await bench.post(chat(words(40, time.monotonic_ns())), x_slo_ttft_ms="1000")).status == 200


async def test_curl_sees_the_refusal_and_what_is_said_with_it(bench: Bench) -> None:
    async with queue(bench, 12):
        command = ["curl", "-sS", "-D", "-", "-H", "content-type: application/json", "-H", "x-max-queue-wait-s: 5"]
        body, url = json.dumps(chat()), bench.stack.url + CHAT
        run = await asyncio.to_thread(
            subprocess.run, [*command, "-d", body, url], capture_output=True, text=True, timeout=30, check=True
        )
    head, _, told = run.stdout.partition("\n\n")
    assert head.startswith("HTTP/1.1 429")
    assert "retry-after: " in head
    assert json.loads(told)["error"]["code"] == "queue_wait_exceeded"


async def test_in_shadow_mode_what_would_be_refused_is_served_and_counted() -> None:
    engine = quick("a", prefill_us_per_token=1000 * MS_PER_TOKEN, max_num_batched_tokens=256)
    pool = {"learning": {"min_samples": 3}, "admission": {"mode": "shadow"}}
    async with running([engine], pool=pool) as bench:
        await bench.learn(tokens=(100, 800, 5000))
        long = asyncio.create_task(bench.post(chat(words(9000, "long"))))

        async def booked() -> bool:
            return bool((await bench.worker("a"))["prefill_tokens_ahead"])

        await until(booked, 5, "queue")
        answer = await bench.post(chat(max_queue_wait_s=5))
        assert (answer.status, answer.complete) == (200, True)
        assert (await long).status == 200
        assert await bench.metric("headway_refusals_total", reason="queue_wait", carried_out="shadow") == 1

        async def graded() -> bool:
            return await bench.metric("headway_refusals_graded_total", carried_out="shadow", verdict="right") == 1

        await until(graded, 15, "grade")


@pytest.mark.parametrize("wrong", [0, 4.99, 301, -5, "ten", True, [5], {}])
async def test_a_bound_in_the_body_that_makes_no_sense_is_a_400(bench: Bench, wrong: object) -> None:
    async with sdk(bench) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="sim", messages=MESSAGES, extra_body={"max_queue_wait_s": wrong})
    assert bad.value.param == "max_queue_wait_s"
    assert bad.value.type == "invalid_request_error"
    shown = f"{wrong:g}" if isinstance(wrong, float) else str(wrong) if type(wrong) in (int, str) else ""
    for part in ("max_queue_wait_s", f"{BOUND_MIN_S:g}", f"{BOUND_MAX_S:g}", shown):
        assert part in bad.value.message
    assert await bench.in_flight() == 0


@pytest.mark.parametrize("wrong", ["4", "301", "soon", "nan", "", "inf"])
async def test_a_bound_in_the_header_that_makes_no_sense_is_a_400(bench: Bench, wrong: str) -> None:
    async with sdk(bench) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(
                model="sim", messages=MESSAGES, extra_headers={"x-max-queue-wait-s": wrong}
            )
    for part in ("x-max-queue-wait-s", f"{BOUND_MIN_S:g}", f"{BOUND_MAX_S:g}", repr(wrong)):
        assert part in bad.value.message


async def test_a_connection_is_good_for_more_after_a_refusal(bench: Bench) -> None:
    def ask() -> list[tuple[int, str | None]]:
        connection = http.client.HTTPConnection("127.0.0.1", bench.stack.listener_port, timeout=30)
        told: list[tuple[int, str | None]] = []
        try:
            first: Any = None
            for body in (chat(max_queue_wait_s=5), chat(max_queue_wait_s=5), None):
                method, path = ("POST", CHAT) if body else ("GET", "/v1/models")
                connection.request(method, path, json.dumps(body) if body else None)
                first = first or connection.sock
                response = connection.getresponse()
                response.read()
                told.append((response.status, response.getheader("connection")))
                assert connection.sock is first, "the connection was closed"
            return told
        finally:
            connection.close()

    async with queue(bench, 12):
        assert await asyncio.to_thread(ask) == [(429, None), (429, None), (200, None)]


async def test_a_pool_without_workers_is_a_503() -> None:
    async with running([], pool={"workers": []}) as bench, sdk(bench) as client:
        with pytest.raises(openai.InternalServerError) as nobody:
            await client.chat.completions.create(model="sim", messages=MESSAGES)
        assert nobody.value.status_code == 503
        assert nobody.value.code == "no_worker"
        assert nobody.value.response.headers["x-headway-reason"] == "no_worker"
        assert await bench.in_flight() == 0
