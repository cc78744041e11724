"""Every fault of a running engine, switched on over HTTP, seen by a client, and switched off again."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import pytest
import zmq
import zmq.asyncio
from aiohttp import ClientConnectionError, ClientError, ClientSession, ClientTimeout

from enginesim import words
from enginesim.process import EngineProcess

pytestmark = pytest.mark.alone

CHAT = "/v1/chat/completions"
END = b"\xff" * 8
WELL = {
    "delay_s": 0.0,
    "headers_delay_s": 0.0,
    "hang": False,
    "refuse_status": None,
    "reset": False,
    "reset_after_chunks": None,
    "comments": 0,
    "empty_stream": False,
    "gzip": False,
    "interim": False,
    "cached_tokens_off": 0,
    "everywhere": False,
    "drop_batches": 0,
    "duplicate_batches": 0,
    "skip_sequences": 0,
}


@pytest.fixture
async def http(fast_engine: EngineProcess) -> AsyncIterator[ClientSession]:
    """With an engine that is well again after each test."""
    async with ClientSession(fast_engine.url, timeout=ClientTimeout(20)) as session:
        yield session
        async with session.delete("/sim/faults") as response:
            assert await response.json() == WELL


@pytest.fixture
def subscriber(fast_engine: EngineProcess) -> Iterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    with context.socket(zmq.SUB) as wire:
        wire.subscribe(b"")
        wire.rcvtimeo = 5000
        wire.connect(fast_engine.kv_events_endpoint)
        yield wire
    context.destroy(linger=0)


async def fault(http: ClientSession, **fields: Any) -> dict[str, Any]:
    async with http.post("/sim/faults", json=fields) as response:
        assert response.status == 200, await response.text()
        told: dict[str, Any] = await response.json()
        return told


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "stream": True}
    return {**body, "stream_options": {"include_usage": True}, **fields}


async def stream(http: ClientSession, body: dict[str, Any] | None = None) -> bytes:
    async with http.post(CHAT, json=body or chat()) as response:
        assert response.status == 200
        return await response.read()


async def read_into(http: ClientSession, got: bytearray) -> None:
    async with http.post(CHAT, json=chat()) as response:
        assert response.status == 200
        while piece := await response.content.readany():
            got += piece


async def plain(http: ClientSession, text: str = "hi") -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    async with http.post(CHAT, json=body) as response:
        assert response.status == 200
        told: dict[str, Any] = await response.json()
        return told


async def test_faults_are_set_by_name_shown_and_cleared(http: ClientSession) -> None:
    async with http.get("/sim/faults") as response:
        assert await response.json() == WELL
    assert await fault(http, comments=3, refuse_status=503) == {**WELL, "comments": 3, "refuse_status": 503}
    assert await fault(http, delay_s=1) == {**WELL, "comments": 3, "refuse_status": 503, "delay_s": 1.0}
    assert await fault(http, refuse_status=None) == {**WELL, "comments": 3, "delay_s": 1.0}
    async with http.delete("/sim/faults") as response:
        assert await response.json() == WELL


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"delay_s": -1}', "delay_s"),
        (b'{"delay_s": "long"}', "delay_s"),
        (b'{"refuse_status": 200}', "refuse_status"),
        (b'{"hang": 1}', "hang"),
        (b'{"reset_after_chunks": 1.5}', "reset_after_chunks"),
        (b'{"no_such_fault": 1}', "no_such_fault"),
        (b"{", "body.1"),
    ],
)
async def test_a_bad_fault_is_refused_by_name_and_changes_nothing(http: ClientSession, body: bytes, field: str) -> None:
    async with http.post("/sim/faults", data=body) as response:
        assert response.status == 400
        error = (await response.json())["error"]
        assert field in error["param"], error
    async with http.get("/sim/faults") as response:
        assert await response.json() == WELL


async def test_a_delay_holds_the_first_event_back_but_not_the_headers(http: ClientSession) -> None:
    await fault(http, delay_s=0.4)
    started_s = time.monotonic()
    async with http.post(CHAT, json=chat()) as response:
        headers_s = time.monotonic() - started_s
        await response.content.readany()
        first_s = time.monotonic() - started_s
    assert headers_s < 0.3
    assert first_s >= 0.4
    started_s = time.monotonic()
    await plain(http)
    assert time.monotonic() - started_s >= 0.4


async def test_slow_headers_hold_everything_back(http: ClientSession) -> None:
    await fault(http, headers_delay_s=0.4)
    started_s = time.monotonic()
    async with http.post(CHAT, json=chat()) as response:
        assert time.monotonic() - started_s >= 0.4
        assert (await response.read()).endswith(b"[DONE]\n\n")


async def test_a_hanging_engine_accepts_and_says_nothing_until_it_is_well(http: ClientSession) -> None:
    await fault(http, hang=True)
    asking = asyncio.create_task(stream(http))
    await asyncio.sleep(0.4)
    assert not asking.done()
    async with http.get("/health") as response:
        assert response.status == 200  # probes see nothing of it
    await fault(http, hang=False)
    with pytest.raises(ClientConnectionError):
        await asking
    assert (await stream(http)).endswith(b"[DONE]\n\n")


@pytest.mark.parametrize(("status", "kind"), [(429, "Too Many Requests"), (503, "Service Unavailable")])
async def test_a_refusing_engine_says_so_in_the_callers_shape(http: ClientSession, status: int, kind: str) -> None:
    await fault(http, refuse_status=status)
    async with http.post(CHAT, json=chat()) as response:
        assert response.status == status
        error = (await response.json())["error"]
        assert (error["type"], error["code"]) == (kind, status)
    async with http.post("/v1/messages", json={}) as response:
        assert response.status == status
        told = await response.json()
        assert (told["type"], told["error"]["type"]) == ("error", kind)
    async with http.get("/metrics") as response:
        assert response.status == 200


async def test_a_fault_everywhere_reaches_the_pages_but_not_its_own_switch(http: ClientSession) -> None:
    await fault(http, refuse_status=500, everywhere=True)
    for path in ("/metrics", "/health", "/v1/models", "/server_info"):
        async with http.get(path) as response:
            assert response.status == 500, path
    async with http.get("/sim/state") as response:
        assert response.status == 200


async def test_a_reset_leaves_no_answer(http: ClientSession) -> None:
    await fault(http, reset=True)
    with pytest.raises(ClientConnectionError):
        await stream(http)


@pytest.mark.parametrize("chunks", [0, 1, 3])
async def test_a_stream_is_cut_behind_so_many_chunks(http: ClientSession, chunks: int) -> None:
    await fault(http, reset_after_chunks=chunks)
    got = bytearray()
    with pytest.raises(ClientError):
        await read_into(http, got)
    assert got.count(b'"content":" ') == chunks
    assert b"DONE" not in got
    async with http.get("/sim/state") as response:
        assert (await response.json())["running"] == 0  # nobody goes on working for it


async def test_comments_come_first_and_change_nothing(http: ClientSession) -> None:
    await fault(http, comments=3, delay_s=0.2)
    got = await stream(http)
    assert got.startswith(b": keep-alive\n\n" * 3 + b"data: ")
    assert got.count(b": keep-alive") == 3
    assert got.endswith(b"data: [DONE]\n\n")


async def test_an_empty_stream_ends_without_a_word(http: ClientSession) -> None:
    await fault(http, empty_stream=True)
    assert await stream(http) == b""


async def test_a_gzipped_stream_can_be_read_as_it_comes(fast_engine: EngineProcess, http: ClientSession) -> None:
    await fault(http, gzip=True)
    assert (await stream(http)).endswith(b"data: [DONE]\n\n")
    assert "choices" in await plain(http)
    async with (
        ClientSession(fast_engine.url, auto_decompress=False) as raw,
        raw.post(CHAT, json=chat(max_tokens=50)) as response,
    ):
        assert response.headers["content-encoding"] == "gzip"
        first = await response.content.readany()
        assert first.startswith(b"\x1f\x8b")
        whole = first + await response.read()
    assert gzip.decompress(whole).endswith(b"data: [DONE]\n\n")


async def test_an_interim_response_comes_before_the_real_one(fast_engine: EngineProcess, http: ClientSession) -> None:
    await fault(http, interim=True)
    reader, writer = await asyncio.open_connection("127.0.0.1", fast_engine.port)
    body = json.dumps(chat()).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: e\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    got = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert got.count(b"HTTP/1.1") == 2


async def test_usage_can_be_wrong_by_any_number_but_not_below_nothing(http: ClientSession) -> None:
    text = words.text(100, 77)
    await plain(http, text)
    true = (await plain(http, text))["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert true >= 96
    for off, told in ((-16, true - 16), (1000, true + 1000), (-1000, 0)):
        await fault(http, cached_tokens_off=off)
        assert (await plain(http, text))["usage"]["prompt_tokens_details"]["cached_tokens"] == told


async def subscribed(http: ClientSession, subscriber: zmq.asyncio.Socket) -> None:
    """Returns when what is published arrives, with nothing on its way."""
    for seed in range(100):
        await plain(http, words.text(40, 1000 + seed))
        if await subscriber.poll(100):
            break
    while await subscriber.poll(200):
        await subscriber.recv_multipart()


async def published(http: ClientSession, subscriber: zmq.asyncio.Socket, *seeds: int) -> list[int]:
    """Numbers of the batches that arrive of prompts sent one after the other; a batch each."""
    for seed in seeds:
        async with http.post(
            "/v1/completions", json={"prompt": words.text(40, 5000 + seed), "max_tokens": 1}
        ) as response:
            assert response.status == 200
    numbers = []
    while await subscriber.poll(300):
        _, sequence, _ = await subscriber.recv_multipart()
        numbers.append(int.from_bytes(sequence, "big"))
    return numbers


async def replayed(engine: EngineProcess, first: int) -> list[int]:
    context = zmq.asyncio.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.rcvtimeo = 5000
        dealer.connect(engine.kv_replay_endpoint)
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        numbers = []
        while (reply := await dealer.recv_multipart())[-2] != END:
            numbers.append(int.from_bytes(reply[-2], "big"))
    context.destroy(linger=0)
    return numbers


async def test_dropped_batches_are_missing_live_but_can_be_replayed(
    fast_engine: EngineProcess, http: ClientSession, subscriber: zmq.asyncio.Socket
) -> None:
    await subscribed(http, subscriber)
    async with http.get("/sim/state") as response:
        first = (await response.json())["seq"]
    await fault(http, drop_batches=2)
    assert await published(http, subscriber, 1, 2, 3) == [first + 2]
    async with http.get("/sim/faults") as response:
        assert await response.json() == WELL  # used up
    assert await replayed(fast_engine, first) == [first, first + 1, first + 2]


async def test_duplicated_batches_come_twice_and_skipped_numbers_never(
    fast_engine: EngineProcess, http: ClientSession, subscriber: zmq.asyncio.Socket
) -> None:
    await subscribed(http, subscriber)
    async with http.get("/sim/state") as response:
        first = (await response.json())["seq"]
    await fault(http, duplicate_batches=1)
    assert await published(http, subscriber, 11, 12) == [first, first, first + 1]
    await fault(http, skip_sequences=3)
    assert await published(http, subscriber, 13, 14) == [first + 5, first + 6]
    assert await replayed(fast_engine, first) == [first, first + 1, first + 5, first + 6]


async def test_a_restart_forgets_everything_and_cuts_who_was_waiting(
    fast_engine: EngineProcess, http: ClientSession, subscriber: zmq.asyncio.Socket
) -> None:
    await subscribed(http, subscriber)
    text = words.text(200, 4)
    await plain(http, text)
    waiting = asyncio.create_task(stream(http, chat(max_tokens=5000)))
    await asyncio.sleep(0.2)
    async with http.post("/sim/restart") as response:
        assert response.status == 200
    with pytest.raises(ClientError):
        await waiting
    async with http.get("/sim/state") as response:
        state = await response.json()
    assert (state["seq"], state["cached_blocks"], state["running"], state["steps"]) == (0, 0, 0, 0)
    assert await replayed(fast_engine, 0) == []
    while await subscriber.poll(200):
        await subscriber.recv_multipart()
    assert await published(http, subscriber, 21) == [0]
    assert (await plain(http, text))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    async with http.get("/metrics") as response:
        assert "vllm:request_success_total" in await response.text()


async def test_the_anthropic_client_gets_a_message_and_a_stream(
    fast_engine: EngineProcess, http: ClientSession
) -> None:
    async with anthropic.AsyncAnthropic(base_url=fast_engine.url, api_key="none", max_retries=0) as client:
        question: Any = {
            "model": "sim",
            "max_tokens": 7,
            "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be kind."}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": words.text(80, 9)}]}],
        }
        whole = await client.messages.create(**question)
        assert (whole.role, whole.stop_reason, whole.usage.output_tokens) == ("assistant", "max_tokens", 7)
        async with client.messages.stream(**question) as events:
            kinds = [event.type async for event in events]
            final = await events.get_final_message()
        assert [kind for kind in kinds if kind != "text"] == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 7,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert [block.to_dict()["text"] for block in final.content] == [b.to_dict()["text"] for b in whole.content]
        usage = final.usage
        assert usage.cache_read_input_tokens is not None
        assert usage.cache_read_input_tokens >= 64
        # What Anthropic calls input is what was neither read nor written.
        as_chat = {
            "messages": [{"role": "system", "content": "Be kind."}, *question["messages"]],
            "max_tokens": 7,
        }
        async with http.post(CHAT, json=as_chat) as response:
            total = (await response.json())["usage"]["prompt_tokens"]
        told = usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens
        assert sum(count or 0 for count in told) == total
        with pytest.raises(anthropic.NotFoundError) as raised:
            await client.messages.create(**{**question, "model": "other"})
        assert "does not exist" in str(raised.value)
