"""The KV event stream of a running engine: what is published, when, and how it is replayed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import ClientSession

from enginesim import words
from enginesim.process import EngineProcess

END = b"\xff" * 8
QUICK = ("--step-ms", "2", "--prefill-us-per-token", "1", "--prefill-ns-per-token2", "0", "--decode-ms", "0")
PATIENCE_MS = 5000


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


@contextmanager
def subscription(context: zmq.asyncio.Context, engine: EngineProcess) -> Iterator[zmq.asyncio.Socket]:
    with context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(engine.kv_events_endpoint)
        subscriber.rcvtimeo = PATIENCE_MS
        yield subscriber


async def complete(http: ClientSession, prompt: object, max_tokens: int = 1) -> dict[str, Any]:
    async with http.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens}) as response:
        assert response.status == 200
        answer: dict[str, Any] = await response.json()
        return answer


async def replay(context: zmq.asyncio.Context, engine: EngineProcess, first: int) -> list[list[bytes]]:
    with context.socket(zmq.DEALER) as dealer:
        dealer.rcvtimeo = PATIENCE_MS
        dealer.connect(engine.kv_replay_endpoint)
        await dealer.send_multipart([b"", first.to_bytes(8, "big")])
        replies = [await dealer.recv_multipart()]
        while replies[-1][-2] != END:
            replies.append(await dealer.recv_multipart())
        return replies


async def test_batches_are_numbered_from_zero_one_a_step_and_add_up_to_the_cache(context: zmq.asyncio.Context) -> None:
    with EngineProcess(*QUICK, "--num-gpu-blocks", "60", "--kv-events-topic", "kv") as engine:
        async with ClientSession(engine.url) as http:
            with subscription(context, engine) as subscriber:
                for seed in range(100, 150):
                    await complete(http, words.text(20, seed))
                    if await subscriber.poll(100):  # the subscription has arrived
                        break
                await asyncio.gather(*(complete(http, words.text(300, seed), 40) for seed in range(8)))
                async with http.get("/sim/state") as response:
                    state = await response.json()
                heard = [await subscriber.recv_multipart()]
                while int.from_bytes(heard[-1][1], "big") < state["seq"] - 1:
                    heard.append(await subscriber.recv_multipart())
            *replayed, _ = await replay(context, engine, 0)
    messages = [frames[1:] for frames in replayed]
    assert [int.from_bytes(sequence, "big") for _, sequence, _ in messages] == list(range(state["seq"]))
    assert messages[-len(heard) :] == heard
    assert heard[0][0] == b"kv"
    held: Counter[int] = Counter()
    for _, _, payload in messages:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            (held.update if event["type"] == "BlockStored" else held.subtract)(event["block_hashes"])
    assert min(held.values()) == 0
    assert held.total() == state["cached_blocks"]
    assert state["free_blocks"] == 59


async def test_a_replay_has_the_topic_in_the_new_layout(context: zmq.asyncio.Context) -> None:
    with EngineProcess(*QUICK, "--kv-events-topic", "kv") as engine:
        assert await replay(context, engine, 0) == [[b"", b"", END, b""]]
        async with ClientSession(engine.url) as http:
            for seed in range(3):
                await complete(http, words.text(40, seed))
        assert [frames[:3] for frames in await replay(context, engine, 1)] == [
            [b"", b"kv", (1).to_bytes(8, "big")],
            [b"", b"kv", (2).to_bytes(8, "big")],
            [b"", b"", END],
        ]
        assert [frames[2] for frames in await replay(context, engine, 9)] == [END]


async def test_a_replay_lacks_it_in_the_old_one_and_reaches_back_no_further_than_the_buffer(
    context: zmq.asyncio.Context,
) -> None:
    with EngineProcess(*QUICK, "--event-format", "array", "--buffer-steps", "2") as engine:
        async with ClientSession(engine.url) as http:
            for seed in range(4):
                await complete(http, words.text(40, seed))
        replies = await replay(context, engine, 0)
    assert [frames[:2] for frames in replies] == [[b"", n.to_bytes(8, "big")] for n in (2, 3)] + [[b"", END]]
    _, [[kind, hashes, parent, token_ids, *_]], _ = msgspec.msgpack.decode(replies[0][2])
    assert (kind, len(hashes), parent, len(token_ids)) == ("BlockStored", 2, None, 32)


async def test_a_replay_request_of_the_wrong_shape_gets_no_answer_and_does_no_harm(
    context: zmq.asyncio.Context,
) -> None:
    with EngineProcess(*QUICK) as engine:
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(engine.kv_replay_endpoint)
            await dealer.send_multipart([(0).to_bytes(8, "big")])
            await dealer.send_multipart([b"", b"short"])
            assert not await dealer.poll(300)
        assert len(await replay(context, engine, 0)) == 1


async def test_a_reset_is_published_with_the_next_step(context: zmq.asyncio.Context) -> None:
    with EngineProcess(*QUICK) as engine:
        async with ClientSession(engine.url) as http:
            await complete(http, words.text(40, 1))
            async with http.post("/reset_prefix_cache") as response:
                assert response.status == 200
            assert len(await replay(context, engine, 1)) == 1
            again = await complete(http, words.text(40, 1))
            [told, _] = await replay(context, engine, 1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert [event["type"] for event in msgspec.msgpack.decode(told[3])[1]] == ["AllBlocksCleared", "BlockStored"]


async def test_stored_tokens_are_the_prompts_and_carry_the_salt_in_block_0_only(context: zmq.asyncio.Context) -> None:
    with EngineProcess(*QUICK) as engine:
        async with ClientSession(engine.url) as http:
            body = {"prompt": list(range(100, 150)), "max_tokens": 1, "cache_salt": "tenant"}
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200
        [told, _] = await replay(context, engine, 0)
    [event] = msgspec.msgpack.decode(told[3])[1]
    assert event["token_ids"] == list(range(100, 148))
    assert event["extra_keys"] == [["tenant"], None, None]
