"""What goes through Envoy and the filter comes out as the engine said it."""

import asyncio
import hashlib
import io
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
import yaml

from extproc.stack import envoy_config_path
from tests.e2e.harness import CHAT, Answer, Bench, RawClient, chat, quick, read, running, words

pytestmark = pytest.mark.asyncio(loop_scope="module")

CREATED = re.compile(rb'"created":\d+')
DECISION = ("x-headway-worker", "x-headway-predicted-ttft-ms", "x-headway-cached-tokens", "x-headway-why")
LIMIT: int = yaml.safe_load(envoy_config_path().read_text())["static_resources"]["listeners"][0][
    "per_connection_buffer_limit_bytes"
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with running([quick("a", step_ms=0.3, more_flags=("--max-model-len", "20000"))]) as bench:
        yield bench


def same(body: bytes) -> str:
    """A body without its time stamps; its digest, since pytest would be long in showing how two of them differ."""
    return hashlib.sha256(CREATED.sub(b"", body)).hexdigest()


def as_json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()


def padded(size: int) -> bytes:
    """A request of exactly so many bytes, most of them in a field that nobody reads."""
    frame = b'{"model":"sim","stream":true,"max_tokens":2,"messages":[{"role":"user","content":"hi"}],"pad":"%s"}'
    return frame % (b"x" * (size - len(frame % b"")))


async def post_bytes(bench: Bench, body: Any, path: str = CHAT) -> Answer:
    headers = {"content-type": "application/json"}
    data = io.BytesIO(body) if isinstance(body, bytes) else body
    async with bench.http.post(bench.stack.url + path, data=data, headers=headers) as response:
        return await read(response)


def dechunked(raw: bytes) -> bytes:
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


async def test_3000_chunks_are_those_that_the_engine_sends(bench: Bench) -> None:
    body = chat(words(50, "same"), max_tokens=3000)
    await bench.post_to_engine("a", chat(words(50, "same")))  # what it caches is the same for both
    direct = await bench.post_to_engine("a", body, x_request_id="one")
    through = await bench.post(body, x_request_id="one")
    assert direct.complete
    assert len(direct.events) == 3002  # the role, the tokens, the usage
    assert same(through.body) == same(direct.body)
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert through.worker == "a"


async def test_a_slow_reader_misses_nothing(bench: Bench) -> None:
    body = chat(words(50, "same"), max_tokens=3000)
    await bench.post_to_engine("a", chat(words(50, "same")))
    direct = await bench.post_to_engine("a", body, x_request_id="one")
    client = RawClient(bench.stack.listener_port, receive_buffer=4096)
    await client.send_request(as_json(body), x_request_id="one", connection="close")
    got = b""
    while piece := await client.receive(2048):
        got += piece
        await asyncio.sleep(0.004)
    client.close()
    assert same(dechunked(got)) == same(direct.body)


async def test_a_routed_stream_says_what_was_decided(bench: Bench) -> None:
    text = words(600, "cached")
    first = await bench.post(chat(text))
    assert first.headers["x-headway-worker"] == "a" == first.engine
    assert int(first.headers["x-headway-predicted-ttft-ms"]) > 0
    assert first.headers["x-headway-cached-tokens"] == "0"
    assert first.headers["x-headway-why"] in ("only", "learning")
    await bench.settled()
    second = await bench.post(chat(text))
    assert int(second.headers["x-headway-cached-tokens"]) >= 512
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    assert int(second.headers["x-headway-cached-tokens"]) == cached


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        pytest.param(CHAT, b"", 400, id="no body"),
        pytest.param(CHAT, b'{"model": "sim", "messages": [', 400, id="malformed"),
        pytest.param(CHAT, b"\xff\xfe\x00", 400, id="not text"),
        pytest.param(CHAT, b'{"model":"sim"}', 400, id="no messages"),
        pytest.param(
            CHAT, b'{"model":"gpt-9","messages":[{"role":"user","content":"hi"}]}', 404, id="a model that nobody has"
        ),
        pytest.param("/v1/nothing", b"{}", 404, id="no such path"),
        pytest.param("/tokenize", b'{"prompt":"one two"}', 200, id="a path that is not ours"),
    ],
)
async def test_what_is_not_ours_is_the_engines_to_answer(bench: Bench, path: str, body: bytes, status: int) -> None:
    url = f"http://127.0.0.1:{bench.stack.engine_port('a')}{path}"
    async with bench.http.post(url, data=body) as response:
        direct = await response.read()
        assert response.status == status
    through = await post_bytes(bench, body, path)
    assert (through.status, through.body) == (status, direct)
    assert through.engine == "a"
    assert not set(DECISION) & set(through.headers)


async def test_a_prompt_that_is_too_long_is_refused_by_the_engine(bench: Bench) -> None:
    """It is ours, and routed; what the engine says of it is passed on, and the request leaves no trace."""
    before = await bench.metric("headway_ungraded_total", reason="error")
    graded = await bench.metric("headway_predictions_graded_total")
    answer = await bench.post(chat(words(21_000)))
    assert answer.status == 400
    assert "maximum context length" in answer.json["error"]["message"]
    assert answer.worker == "a"
    await bench.settled()
    assert await bench.metric("headway_ungraded_total", reason="error") == before + 1
    assert await bench.metric("headway_predictions_graded_total") == graded


async def test_models_are_listed(bench: Bench) -> None:
    answer = await bench.get("/v1/models")
    assert [model["id"] for model in answer.json["data"]] == ["sim"]
    assert not set(DECISION) & set(answer.headers)


async def test_an_answer_that_is_not_streamed_is_whole(bench: Bench) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": words(40, "plain")}], "max_tokens": 20}
    await bench.post_to_engine("a", body)
    before = await bench.metric("headway_ungraded_total", reason="plain")
    direct = await bench.post_to_engine("a", body, x_request_id="plain")
    through = await bench.post(body, x_request_id="plain")
    assert through.json["usage"]["completion_tokens"] == 20
    assert same(through.body) == same(direct.body)
    assert through.worker == "a"
    await bench.settled()
    assert await bench.metric("headway_ungraded_total", reason="plain") == before + 1


async def test_text_completions_stream(bench: Bench) -> None:
    body = {"model": "sim", "prompt": words(40, "text"), "stream": True, "max_tokens": 30}
    await bench.post_to_engine("a", body, "/v1/completions")
    direct = await bench.post_to_engine("a", body, "/v1/completions", x_request_id="text")
    through = await bench.post(body, "/v1/completions", x_request_id="text")
    assert len(direct.events) == 30
    assert same(through.body) == same(direct.body)
    assert through.worker == "a"


@pytest.mark.parametrize("size", [4 << 10, 4 << 20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_bodies_of_every_size_are_decided_on(bench: Bench, size: int, chunked: bool) -> None:
    body = padded(size)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, 100_000):
            yield body[start : start + 100_000]

    answer = await post_bytes(bench, pieces() if chunked else body)
    assert (answer.status, answer.worker, answer.complete) == (200, "a", True)


async def test_the_largest_body_passes(bench: Bench) -> None:
    """Whether the filter is in time to decide on 64 MB is up to the machine."""
    answer = await post_bytes(bench, padded(LIMIT - 4096))
    assert (answer.status, answer.complete) == (200, True)
    await bench.settled()


async def test_a_body_above_the_limit_is_refused_by_envoy(bench: Bench) -> None:
    before = await bench.envoy_stat("http.llm.downstream_rq_total")
    answer = await post_bytes(bench, padded(LIMIT + 4096))
    assert answer.status == 413
    assert "x-engine-name" not in answer.headers
    assert await bench.envoy_stat("http.llm.downstream_rq_total") == before + 1
    assert (await bench.post(chat())).status == 200


async def test_the_clients_request_id_is_kept(bench: Bench) -> None:
    answer = await bench.post(chat(), x_request_id="my-own-id")
    assert answer.events[0]["id"] == "chatcmpl-my-own-id"  # the engine heard it
    assert answer.headers["x-request-id"] == "my-own-id"  # and so does the client
    other = await bench.post(chat())
    assert other.headers["x-request-id"] in other.events[0]["id"]


async def test_the_openai_client_streams(bench: Bench) -> None:
    async with openai.AsyncOpenAI(base_url=f"{bench.stack.url}/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": words(30, "sdk")}],
            stream=True,
            stream_options={"include_usage": True},
            max_tokens=25,
            extra_body={"max_queue_wait_s": 30},
        )
        assert stream.response.headers["x-headway-worker"] == "a"
        chunks = [chunk async for chunk in stream]
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) == 25
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 25
    # The filter read the same usage, out of Envoy's access log.
    await bench.settled()
    assert await bench.metric("headway_cache_estimates_total", verdict="right") > 0
