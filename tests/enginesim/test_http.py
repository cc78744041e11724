"""The OpenAI API of a running engine, read by hand and by the real SDK."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families

from enginesim import words
from enginesim.process import EngineProcess
from enginesim.tokenizer import Tokenizer

pytestmark = pytest.mark.alone

NOBODY_CARES: dict[str, Any] = {"temperature": 0.7, "top_p": 1, "ignore_eos": True, "max_queue_wait_s": 10}


@pytest.fixture
async def http(fast_engine: EngineProcess) -> AsyncIterator[ClientSession]:
    async with ClientSession(fast_engine.url) as session:
        yield session


@pytest.fixture
async def sdk(fast_engine: EngineProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{fast_engine.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def events(http: ClientSession, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every server-sent event, parsed; the end marker as it is."""
    async with http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        data = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
        return [json.loads(line) if line.startswith("{") else line for line in data]


async def error(http: ClientSession, path: str, body: object) -> tuple[int, str, str | None]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(path, data=raw) as response:
        told = (await response.json())["error"]
        assert told["code"] == response.status
        return response.status, told["message"], told["param"]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_chat_stream_is_a_role_a_token_an_event_usage_and_done(http: ClientSession) -> None:
    body = {"model": "sim", "messages": user("hi"), "max_tokens": 3, "stream_options": {"include_usage": True}}
    *chunks, usage, done = await events(http, "/v1/chat/completions", {**body, **NOBODY_CARES})
    assert done == "[DONE]"
    assert [list(chunk["choices"][0]["delta"]) for chunk in chunks] == [["role", "content"], *[["content"]] * 3]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
    assert {chunk["object"] for chunk in [*chunks, usage]} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
    }


async def test_a_completion_stream_has_no_role_chunk_and_usage_only_on_request(http: ClientSession) -> None:
    *chunks, done = await events(http, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2})
    assert (len(chunks), done) == (2, "[DONE]")
    assert all(chunk["choices"][0]["text"].startswith(" ") for chunk in chunks)


async def test_headers_come_before_the_first_token_and_name_the_engine() -> None:
    with EngineProcess("--step-ms", "400", "--name", "slow") as slow:
        async with ClientSession(slow.url) as http:
            started_s = time.monotonic()
            async with http.post("/v1/completions", json={"prompt": "hi", "stream": True, "max_tokens": 1}) as response:
                headers_s = time.monotonic() - started_s
                await response.content.readany()
                first_token_s = time.monotonic() - started_s
    assert response.headers["x-engine-name"] == "slow"
    assert headers_s < 0.3 < 0.4 <= first_token_s


async def test_the_sdk_streams_chat_and_sees_the_cache_on_a_prompt_sent_again(sdk: openai.AsyncOpenAI) -> None:
    prompt = words.text(500, seed=11)

    async def ask() -> tuple[str, int | None, int]:
        stream = await sdk.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": prompt}],
            max_completion_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return text, usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

    (first, cold, tokens), (second, warm, _) = await ask(), await ask()
    assert first == second
    assert (cold, warm) == (0, (tokens - 1) // 16 * 16)


async def test_the_sdk_reads_a_plain_answer_with_several_choices(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "a"}], n=3, max_tokens=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens", "choices"),
    [(" the name", 2, 1), ([" the name"], 2, 1), ([9, 8, 7], 3, 1), ([[9, 8, 7]], 3, 1), ([" the", " the name"], 3, 2)],
)
async def test_a_completion_takes_each_form_of_prompt(
    http: ClientSession, prompt: object, prompt_tokens: int, choices: int
) -> None:
    async with http.post("/v1/completions", json={"prompt": prompt}) as response:
        answer = await response.json()
    assert len(answer["choices"]) == choices
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 16 * choices  # the default of the flag


async def test_a_conversation_goes_on_in_the_cache_of_its_own_answer(http: ClientSession) -> None:
    messages = user(words.text(100, seed=12))
    async with http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 200}) as response:
        first = await response.json()
    messages += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, *user("go on")]
    async with http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}) as response:
        second = await response.json()
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16


async def test_a_salt_hides_the_cache(http: ClientSession) -> None:
    async def cached(**more: str) -> int:
        body = {"prompt": words.text(100, seed=13), "max_tokens": 1, **more}
        async with http.post("/v1/completions", json=body) as response:
            usage = (await response.json())["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [await cached(), await cached(cache_salt="s"), await cached(), await cached(cache_salt="s")] == [
        0,
        0,
        96,
        96,
    ]


async def test_the_request_id_and_the_prompt_ids_come_back(http: ClientSession) -> None:
    headers = {"X-Request-Id": "abc"}
    body = {"messages": user("hi"), "stream": True, "max_tokens": 1, "return_token_ids": True}
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        first = json.loads((await response.text()).split("\n\n")[0].removeprefix("data: "))
    async with http.post("/tokenize", json={"messages": user("hi")}) as response:
        tokens = (await response.json())["tokens"]
    assert first["id"] == "chatcmpl-abc"
    assert first["prompt_token_ids"] == tokens


async def test_bad_requests_are_refused_by_field(http: ClientSession) -> None:
    chat, text = "/v1/chat/completions", "/v1/completions"
    assert (await error(http, chat, {"model": "other", "messages": user("x")}))[::2] == (404, "model")
    assert (await error(http, chat, {"model": "sim"}))[::2] == (400, "body.messages")
    assert (await error(http, chat, {"messages": []}))[::2] == (400, None)
    assert (await error(http, chat, {"messages": [{"content": "x"}]}))[::2] == (400, "messages")
    assert (await error(http, chat, b'{"messages": ['))[::2] == (400, "body.14")
    assert (await error(http, text, {"prompt": "x", "max_tokens": "many"}))[::2] == (400, "body.max_tokens")
    assert (await error(http, text, {"prompt": "x", "max_tokens": 0}))[::2] == (400, "max_tokens")
    assert (await error(http, text, {"prompt": "x", "cache_salt": ""}))[::2] == (400, "cache_salt")
    assert (await error(http, text, {"prompt": [1.5]}))[::2] == (400, "prompt")
    assert (await error(http, text, {"prompt": [8192]}))[::2] == (400, None)
    assert (await error(http, text, {"prompt": [-1]}))[::2] == (400, "prompt")
    assert (await error(http, text, {"prompt": ""}))[::2] == (400, "prompt")
    assert (await error(http, text, {"prompt": "x", "stream_options": {}}))[::2] == (400, "stream_options")
    assert (await error(http, "/sim/speed", {"speed": "fast"}))[::2] == (400, "speed")
    status, message, param = await error(http, text, {"prompt": [5] * 140_000, "stream": True})
    assert (status, param) == (400, "input_tokens")
    assert "131056 tokens. However, your request has 140000 input tokens" in message


async def test_tokenize_counts_text_and_messages_as_the_engine_does(http: ClientSession) -> None:
    async with http.post("/tokenize", json={"prompt": words.text(33, seed=1)}) as response:
        told = await response.json()
    assert (told["count"], len(told["tokens"]), told["max_model_len"]) == (33, 33, 131056)
    assert (await error(http, "/tokenize", {}))[0] == 400


async def test_a_prompt_of_100_000_tokens_does_not_hold_up_others(http: ClientSession) -> None:
    body = {"prompt": words.text(100_000, seed=14), "max_tokens": 1}
    giant = asyncio.create_task(http.post("/v1/completions", json=body))
    waits_s = []
    while not giant.done():
        started_s = time.monotonic()
        async with http.get("/health"):
            waits_s.append(time.monotonic() - started_s)
        await asyncio.sleep(0.002)
    async with await giant as response:
        assert (await response.json())["usage"]["prompt_tokens"] == 100_000
    assert max(waits_s) < 0.25  # some milliseconds on a quiet machine


async def test_pages_tell_what_vllm_tells(http: ClientSession, fast_engine: EngineProcess) -> None:
    async def get(path: str) -> Any:
        async with http.get(path) as response:
            assert response.status == 200
            return await response.json()

    assert await get("/version") == {"version": "0.32.0"}
    assert (await get("/v1/models"))["data"][0]["max_model_len"] == 131056
    source = (await get("/kv_event_sources"))["0"]
    assert source["endpoint"].rpartition(":")[2] == fast_engine.kv_events_endpoint.rpartition(":")[2]
    config = (await get("/server_info?config_format=json"))["vllm_config"]
    assert config["scheduler_config"]["max_num_batched_tokens"] == 2048
    assert config["scheduler_config"]["async_scheduling"] is False
    assert config["cache_config"]["num_gpu_blocks"] == 8192
    assert "scheduler_config" not in await get("/server_info")
    async with http.get("/health") as health, http.get("/nothing") as nothing:
        assert (health.status, nothing.status) == (200, 404)


async def test_metrics_have_vllms_names_and_labels(http: ClientSession) -> None:
    async def samples() -> dict[tuple[str, str], float]:
        async with http.get("/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            return {(s.name, s.labels.get("finished_reason", "")): s.value for f in families for s in f.samples}

    before = await samples()
    async with http.post("/v1/completions", json={"prompt": words.text(40, seed=15), "max_tokens": 6}):
        pass
    after = await samples()
    grown = {key: value - before[key] for key, value in after.items() if value != before[key]}
    assert grown.pop(("vllm:time_to_first_token_seconds_sum", "")) > 0
    assert grown.pop(("vllm:time_to_first_token_seconds_bucket", ""), 1) == 1
    assert grown == {
        ("vllm:prefix_cache_queries_total", ""): 40,
        ("vllm:prompt_tokens_total", ""): 40,
        ("vllm:generation_tokens_total", ""): 6,
        ("vllm:request_success_total", "length"): 1,
        ("vllm:time_to_first_token_seconds_count", ""): 1,
    }
    async with http.get("/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    info = families["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"], info["enable_prefix_caching"]) == ("16", "8192", "True")
    assert "model_name" not in info
    running = families["vllm:num_requests_running"].samples[0].labels
    assert running == {"engine": "0", "model_name": "sim"}
    reasons = families["vllm:num_requests_waiting_by_reason"].samples
    assert [sample.labels["reason"] for sample in reasons] == ["capacity", "deferred"]


async def test_details_can_be_left_out() -> None:
    with EngineProcess("--no-prompt-tokens-details", "--step-ms", "1") as engine:
        async with ClientSession(engine.url) as http:
            async with http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}) as response:
                plain = (await response.json())["usage"]
            body = {"prompt": "x", "max_tokens": 1, "stream_options": {"include_usage": True}}
            *_, usage, _ = await events(http, "/v1/completions", body)
    assert plain["prompt_tokens_details"] is None
    assert "prompt_tokens_details" not in usage["usage"]


def test_streamed_text_is_made_of_words_of_the_vocabulary() -> None:
    tokenizer = Tokenizer.load(words.MODEL_FOLDER)
    assert all(tokenizer.decode([token_id]) == word for word, token_id in words.vocabulary().items())
