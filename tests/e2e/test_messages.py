"""Anthropic's Messages API from end to end, by Anthropic's own client."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from tests.e2e.harness import Bench, RawClient, chat, quick, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = "/v1/messages"
MS_PER_TOKEN = 1.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    """One engine that takes a millisecond a token, learned at once."""
    engine = quick("a", prefill_us_per_token=1000 * MS_PER_TOKEN, max_num_batched_tokens=256)
    async with running([engine], pool={"learning": {"min_samples": 3}}) as bench:
        await bench.learn(tokens=(100, 800, 3000))
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def client(bench: Bench) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=bench.stack.url, api_key="none", max_retries=0) as client:
        yield client


def question(text: str, **fields: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": text}, {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]
    body = {"model": "sim", "max_tokens": 12, "messages": [{"role": "user", "content": blocks}]}
    billing = {"type": "text", "text": f"x-anthropic-billing-header: {time.monotonic_ns()}"}
    return {
        **body,
        "system": [billing, {"type": "text", "text": "Be kind. "}, {"type": "text", "text": "Always."}],
        **fields,
    }


async def stream(client: anthropic.AsyncAnthropic, body: dict[str, Any]) -> tuple[anthropic.types.Message, Any]:
    async with client.messages.stream(**body) as events:
        headers = events.response.headers
        kinds = [event.type async for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert kinds.count("content_block_delta") == body["max_tokens"]
        return await events.get_final_message(), headers


async def test_a_stream_is_whole_decided_and_graded_by_its_first_event(
    bench: Bench, client: anthropic.AsyncAnthropic
) -> None:
    graded = await bench.metric("headway_predictions_graded_total")
    ungraded = await bench.metric("headway_ungraded_total")
    message, headers = await stream(client, question(words(700, time.monotonic_ns())))
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 12
    assert headers["x-headway-worker"] == headers["x-engine-name"] == "a"
    assert int(headers["x-headway-predicted-ttft-ms"]) > 500
    await bench.settled()
    assert await bench.metric("headway_predictions_graded_total") == graded + 1
    assert await bench.metric("headway_ungraded_total") == ungraded


async def test_the_first_token_is_seen_when_it_comes(bench: Bench, client: anthropic.AsyncAnthropic) -> None:
    """Not at the end: the answer takes ten times as long as its first token."""
    text = words(300, time.monotonic_ns())
    await stream(client, question(text, max_tokens=900))
    await bench.settled()
    assert 0.25 < (await bench.last_graded())["actual_ttft_s"] < 0.8


async def test_prompts_are_tokenized_as_the_engine_does_it(bench: Bench, client: anthropic.AsyncAnthropic) -> None:
    """To the token: the next request's credit is what the engine then reports, whatever the billing header says."""
    text = words(500, time.monotonic_ns())
    await stream(client, question(text))
    await bench.settled()
    estimated = await bench.metric("headway_prompts_estimated_total")
    right = await bench.metric("headway_cache_estimates_total", verdict="right")
    before = len(bench.logged("ended"))
    message, headers = await stream(client, question(text))
    cached = message.usage.cache_read_input_tokens
    assert cached is not None
    assert cached >= 496
    assert int(headers["x-headway-cached-tokens"]) == cached
    assert await bench.metric("headway_prompts_estimated_total") == estimated
    # The same count came to the filter, by Envoy, under Anthropic's names.
    await bench.settled()
    assert await bench.metric("headway_cache_estimates_total", verdict="right") == right + 1

    async def logged() -> bool:
        lines = bench.logged("ended")[before:]
        return (cached, 12) in [(line["cached_tokens"], line["output_tokens"]) for line in lines]

    await until(logged, 5, "log line with the engine's counts")


async def test_tools_are_estimated_and_served(bench: Bench, client: anthropic.AsyncAnthropic) -> None:
    estimated = await bench.metric("headway_prompts_estimated_total", reason="opaque")
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
    _, headers = await stream(client, question("hello", tools=[tool]))
    assert headers["x-headway-worker"] == "a"
    assert await bench.metric("headway_prompts_estimated_total", reason="opaque") == estimated + 1


async def test_a_plain_answer_is_whole(bench: Bench, client: anthropic.AsyncAnthropic) -> None:
    plain = await bench.metric("headway_ungraded_total", reason="plain")
    message = await client.messages.create(**question("hello"))
    assert (message.type, message.role, message.usage.output_tokens) == ("message", "assistant", 12)
    await bench.settled()
    assert await bench.metric("headway_ungraded_total", reason="plain") == plain + 1


async def test_what_the_engine_refuses_comes_through_in_its_own_words(
    bench: Bench, client: anthropic.AsyncAnthropic
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(**question("hello", model="other"))
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**question("hello", max_tokens=0))
    assert "max_tokens" in str(refused.value.api_message)
    await bench.settled()


@contextlib.asynccontextmanager
async def queue(bench: Bench, seconds: float) -> AsyncIterator[None]:
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


async def test_a_refusal_has_anthropics_shape(bench: Bench, client: anthropic.AsyncAnthropic) -> None:
    async with queue(bench, 12):
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.create(**question("hello"), extra_body={"max_queue_wait_s": 5})
    error = refused.value
    assert (error.status_code, error.type) == (429, "rate_limit_error")
    assert "max_queue_wait_s = 5 s" in str(error.api_message)
    assert 1 <= int(error.response.headers["retry-after"]) <= 15
    assert error.response.headers["x-headway-reason"] == "queue_wait"


async def test_the_client_comes_back_by_itself_when_it_was_told_to(bench: Bench) -> None:
    async with anthropic.AsyncAnthropic(base_url=bench.stack.url, api_key="none", max_retries=3) as client:
        async with queue(bench, 8):
            refusals = await bench.metric("headway_decisions_total", outcome="refused")
            asking = asyncio.create_task(
                client.messages.create(**question("hello"), extra_headers={"x-max-queue-wait-s": "5"})
            )
            message = await asking
        assert message.usage.output_tokens == 12
        assert await bench.metric("headway_decisions_total", outcome="refused") > refusals


async def test_a_bad_bound_is_the_callers_fault(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        await client.messages.create(**question("hello"), extra_body={"max_queue_wait_s": "soon"})
    assert refused.value.type == "invalid_request_error"
    assert "max_queue_wait_s must be a number" in str(refused.value.api_message)


async def test_the_wire_has_event_lines_before_data(bench: Bench) -> None:
    """What the answer reader must see through."""
    answer = await bench.post({**question("hello"), "stream": True}, MESSAGES)
    assert answer.body.startswith(b"event: message_start\ndata: {")
    assert answer.body.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert answer.worker == "a"
