"""The whole: a real client, a real Envoy, the filter, and a real engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginesim.words import text
from extproc.stack import Stack
from tests.engine.harness import MODEL, RealEngine
from tests.engine.mirror import MODEL_FOLDER

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(600)]

_PATIENCE_S = 15.0


class Whole:
    """A running stack around one real engine, and a client of it."""

    def __init__(self, stack: Stack, client: openai.AsyncOpenAI, http: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.client = client
        self._http = http

    async def ask(self, content: str, max_tokens: int = 3) -> tuple[dict[str, str], float, Any]:
        """Streams one answer: headers, seconds to the first token, and the usage."""
        started_s = time.monotonic()
        raw = await self.client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": content}],
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
        )
        first_s, usage = None, None
        async for chunk in raw.parse():
            first_s = first_s or time.monotonic() - started_s
            usage = chunk.usage or usage
        assert first_s is not None
        return dict(raw.headers), first_s, usage

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels."""
        async with self._http.get(f"{self.stack.admin_url}/metrics") as response:
            page = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == f"headway_{name}" and labels.items() <= sample.labels.items()
        )

    async def worker(self) -> dict[str, Any]:
        seen: dict[str, Any] = (await self.stack.fleet())["pools"][MODEL]["workers"]["real"]
        return seen

    async def has_learned(self) -> bool:
        learned: bool = (await self.worker())["cost"]["basis"] == "curve"
        return learned


@pytest.fixture
async def whole(engine: RealEngine, tmp_path: Path) -> AsyncIterator[Whole]:
    settings = engine.settings
    worker = {
        "name": "real",
        "endpoint": engine.endpoint,
        "kv_events": engine.kv_events_endpoint,
        "kv_replay": engine.kv_replay_endpoint,
        "settings": {
            "block_size": settings.block_size,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "max_num_seqs": settings.max_num_seqs,
        },
    }
    overrides = {
        "pools": [{"name": MODEL, "tokenizer": str(MODEL_FOLDER), "workers": [worker]}],
        "probe": {"interval_s": 0.5},
    }

    def name_the_engine(envoy: dict[str, Any]) -> None:
        cluster = next(c for c in envoy["static_resources"]["clusters"] if c["name"] == "engines")
        address = {"socket_address": {"address": "127.0.0.1", "port_value": engine.port}}
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]

    stack = Stack(tmp_path, engines=(), overrides=overrides, change_envoy=name_the_engine)
    try:
        await stack.start()
        async with (
            openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
            aiohttp.ClientSession() as http,
        ):
            yield Whole(stack, client, http)
    finally:
        await stack.stop()


async def test_a_conversation_through_envoy_is_predicted_graded_and_credited(whole: Whole) -> None:
    question = text(9000, seed=901)
    # A worker that nothing was measured of learns while it serves.
    for tokens in (100, 3000, 250, 6000, 1200, 60, 700, 2000, 4500):
        await whole.ask(text(tokens, seed=tokens), max_tokens=10)
    await _until(lambda: _equals(whole.metric("prefill_samples_total"), 9))

    first = await whole.ask(question)
    await _until(lambda: _equals(whole.metric("requests_ended_total"), 10))
    again = await whole.ask(question)
    await _until(lambda: _equals(whole.metric("requests_ended_total"), 11))

    for headers, _, _ in (first, again):
        assert headers["x-headway-worker"] == "real"
    credited = [int(headers["x-headway-cached-tokens"]) for headers, _, _ in (first, again)]
    cached = [usage.prompt_tokens_details.cached_tokens for _, _, usage in (first, again)]
    assert credited == cached
    assert cached[0] < 100 < 8900 < cached[1]

    predicted = [int(headers["x-headway-predicted-ttft-ms"]) / 1000 for headers, _, _ in (first, again)]
    actual = [seconds for _, seconds, _ in (first, again)]
    assert predicted[1] < predicted[0] / 2
    assert actual[1] < actual[0] / 2
    for promised, real in zip(predicted, actual, strict=True):
        assert abs(promised - real) < max(0.2 * real, 0.15), (predicted, actual)

    # Envoy read the engine's own count out of the stream, and every credit was right.
    assert await whole.metric("cache_estimates_total", verdict="right") == 11
    assert await whole.metric("cache_estimates_total") == 11
    assert await whole.metric("predictions_graded_total") == 11
    assert await whole.metric("bugs_total") == 0
    worker = await whole.worker()
    assert worker["num_gpu_blocks"] == 2049
    assert worker["feed_trusted"]


async def test_a_client_that_goes_away_frees_its_ticket_and_the_engine(whole: Whole, engine: RealEngine) -> None:
    stream = await whole.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text(500, seed=902)}], max_tokens=2000, stream=True
    )
    async for _ in stream:
        break
    assert await whole.metric("tickets_in_flight") == 1
    await stream.close()
    await _until(lambda: _equals(whole.metric("tickets_in_flight"), 0))

    # Before the first token, too.
    with pytest.raises(openai.APITimeoutError):
        await whole.client.with_options(timeout=0.5).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text(25_000, seed=903)}], max_tokens=1
        )
    await _until(lambda: _equals(whole.metric("tickets_in_flight"), 0))
    assert await whole.metric("requests_ended_total") == 2

    async def engine_is_idle() -> bool:
        _, page = await asyncio.to_thread(engine.request, "/metrics")
        return "vllm:num_requests_running" in page and all(
            line.endswith(" 0.0") for line in page.splitlines() if line.startswith("vllm:num_requests_running{")
        )

    await _until(engine_is_idle)


async def test_what_the_engine_refuses_comes_through_as_it_said_it(whole: Whole) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await whole.ask(text(33_000, seed=904))
    with pytest.raises(openai.NotFoundError):
        await whole.client.chat.completions.create(model="other", messages=[{"role": "user", "content": "Hi"}])
    await _until(lambda: _equals(whole.metric("tickets_in_flight"), 0))
    assert await whole.metric("bugs_total") == 0


async def test_a_bound_that_the_queue_breaks_is_refused_at_once(whole: Whole) -> None:
    for place, tokens in enumerate((100, 3000, 250, 6000, 1200, 60, 700, 2000) * 3):
        if await whole.has_learned():
            break
        await whole.ask(text(tokens, seed=10 * tokens + place), max_tokens=2)
    assert await whole.has_learned()
    # Some seven seconds of prefill ahead.
    ahead = [asyncio.create_task(whole.ask(text(28_000, seed=905 + place))) for place in range(2)]
    try:
        await _until(lambda: _equals(whole.metric("tickets_in_flight"), 2))
        with pytest.raises(openai.RateLimitError) as refused:
            await whole.client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=1,
                extra_headers={"x-max-queue-wait-s": "5"},
            )
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.response.headers["x-headway-reason"]
    finally:
        await asyncio.gather(*ahead)
    assert await whole.metric("decisions_total", outcome="refused") == 1


async def _equals(measured: Awaitable[float], wanted: float) -> bool:
    return await measured == wanted


async def _until(holds: Callable[[], Awaitable[bool]]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not await holds():
        assert time.monotonic() < deadline_s, "it never came to hold"
        await asyncio.sleep(0.05)
