"""Our side of one engine as `headway serve` has it, without Envoy: reader, fleet and feed around a plain client."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp
import msgspec
import numpy as np
import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from extproc.apis import openai_chat, openai_completions
from extproc.kv_feed import KvFeed
from extproc.metrics import Metrics
from extproc.model_files import load_pool_text
from extproc.prompt_reader import PromptReader
from extproc.stack import simulator_folder
from predictor.arrivals import RecentArrivals
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.forecast import Forecast
from predictor.prompt import BlockHasher
from tests.engine.harness import MODEL, EngineSettings

POOL, WORKER = MODEL, "engine"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL_FOLDER: Path = simulator_folder() / "model"
_APIS = {CHAT: openai_chat.API, COMPLETIONS: openai_completions.API}
# An event leaves before the token of its step, by another thread and another socket.
_QUIET_S = 0.1


class Engine(Protocol):
    """A real engine or a simulated one."""

    @property
    def url(self) -> str: ...
    @property
    def kv_events_endpoint(self) -> str: ...
    @property
    def kv_replay_endpoint(self) -> str: ...


@dataclass(slots=True)
class Exchange:
    """One request: what was predicted of it, and what became of it."""

    forecast: Forecast
    actual_ttft_s: float
    usage: dict[str, Any]
    text: str

    @property
    def cached_tokens(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    @property
    def error_s(self) -> float:
        return self.actual_ttft_s - self.forecast.ttft_s

    @property
    def error_ratio(self) -> float:
        return abs(self.error_s) / self.actual_ttft_s

    def credited_rightly(self) -> bool:
        told = self.forecast.prompt_tokens, self.forecast.cached_tokens
        return told == (self.usage["prompt_tokens"], self.cached_tokens)

    def __str__(self) -> str:
        priced = self.forecast
        return (
            f"{priced.prompt_tokens:6d} tokens, {priced.cached_tokens:5d} credited, {self.cached_tokens:5d} cached, "
            f"predicted {priced.ttft_s:6.3f} s, took {self.actual_ttft_s:6.3f} s, {self.error_s * 1e3:+7.1f} ms"
        )


class Mirror:
    """`async with`: the feed runs inside. `send` does all that Envoy and the filter do for one request."""

    def __init__(self, engine: Engine, settings: EngineSettings) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        hasher = BlockHasher(np.random.default_rng())
        self.fleet = Fleet([PoolPolicy(POOL)], hasher, np.random.default_rng(0))
        known = Settings(
            block_size=settings.block_size,
            num_gpu_blocks=settings.num_gpu_blocks,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_num_seqs=settings.max_num_seqs,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
        )
        self.fleet.join(POOL, WorkerSpec(WORKER, "127.0.0.1:1", known))
        self._metrics = Metrics(self.registry)
        self._text = load_pool_text(MODEL_FOLDER)
        self._late_faults: list[BaseException] = []
        self._reader = PromptReader(
            hasher, threads=2, max_pending=1000, deadline_s=60.0, on_late_fault=self._late_faults.append
        )
        self._ids = itertools.count()
        self._running = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        context = zmq.asyncio.Context()
        self._running.callback(context.destroy, 0)
        self._running.callback(self._reader.close)
        engine = self._engine
        feed = KvFeed(WORKER, engine.kv_events_endpoint, engine.kv_replay_endpoint, self.fleet, self._metrics, context)
        self._feed = asyncio.create_task(feed.run())
        self._running.push_async_callback(_end, self._feed)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = await self._running.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120))
        )
        await self.settled()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._running.aclose()

    async def send(self, path: str, **fields: Any) -> Exchange:
        """Predicts, books, asks the engine, and hands the first token and the end back to the fleet."""
        body: dict[str, Any] = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **fields}
        raw = json.dumps(body).encode()
        received_s = time.monotonic()
        request = _APIS[path].read(raw)
        read = await self._reader.read(self._text, request, self.fleet.hash_families(POOL))
        assert read.estimated is None, f"not tokenized: {read.estimated}"
        ticket_id = f"t{next(self._ids)}"
        wish = Wish(ticket_id, received_s, max_tokens=request.max_tokens)
        decision = self.fleet.place(POOL, read.prompt, wish, time.monotonic())
        assert isinstance(decision, Grant)
        usage = Usage()
        try:
            first_s: float | None = None
            told: dict[str, Any] = {}
            text = ""
            async with self._http.post(self._engine.url + path, data=raw, headers=_JSON) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    if first_s is None:
                        first_s = time.monotonic()
                        self.fleet.first_token(ticket_id, None, first_s)
                    if line.startswith(b"data: {"):
                        event = json.loads(line[6:])
                        told = event.get("usage") or told
                        text += "".join(_text(choice) for choice in event["choices"])
            assert first_s is not None
            usage = Usage(
                told["prompt_tokens"], told["prompt_tokens_details"]["cached_tokens"], told["completion_tokens"]
            )
            return Exchange(decision.ticket.forecast, first_s - received_s, told, text)
        finally:
            self.fleet.finish(ticket_id, usage, time.monotonic())

    async def send_alone(self, path: str, **fields: Any) -> Exchange:
        """One at a time: returns once its events have been seen as well."""
        exchange = await self.send(path, **fields)
        await self.settled()
        return exchange

    def forget_arrivals(self) -> None:
        """The fleet does not expect anybody any more, until it has seen some come."""
        self.fleet._pools[POOL].workers[WORKER].arrivals = RecentArrivals()

    async def settled(self) -> None:
        """Nothing has come on the feed for a while."""
        before = -1.0
        while before != (now := self.count("kv_batches", result="applied")):
            before = now
            await asyncio.sleep(_QUIET_S)
        assert not self._feed.done(), self._feed.exception()

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"headway_{name}_total", {"worker": WORKER, **labels}) or 0.0

    @property
    def worker(self) -> dict[str, Any]:
        """The fleet's view of the engine."""
        view: Any = self.fleet.view(time.monotonic())
        seen: dict[str, Any] = view["pools"][POOL]["workers"][WORKER]
        return seen


@dataclass(slots=True)
class Witness:
    """Listens to the same engine with none of our code, and keeps what it hears. `async with`."""

    endpoint: str
    frames: list[list[bytes]] = field(default_factory=list)
    _context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        socket = self._context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(self.endpoint)
        self._task = asyncio.create_task(self._listen(socket))
        await asyncio.sleep(0.3)  # a subscription takes a moment, and nothing says when it stands
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        await _end(self._task)
        self._context.destroy(0)

    @property
    def batches(self) -> list[list[Any]]:
        return [msgspec.msgpack.decode(frames[-1]) for frames in self.frames]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch[1]]

    def tags(self) -> Counter[str]:
        return Counter(event["type"] for event in self.events)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self.frames.append(await socket.recv_multipart())


async def replay(endpoint: str) -> list[list[bytes]]:
    """All that an engine still has, without its end marker."""
    context = zmq.asyncio.Context()
    try:
        with context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.RCVHWM, 0)
            dealer.connect(endpoint)
            await dealer.send_multipart([b"", bytes(8)])
            kept: list[list[bytes]] = []
            while True:
                frames = await asyncio.wait_for(dealer.recv_multipart(), 10)
                if frames[-2] == b"\xff" * 8:
                    return kept
                kept.append(frames)
    finally:
        context.destroy(0)


def held_blocks(batches: list[list[Any]]) -> int:
    """Distinct blocks that an engine holds after all these batches, counted in the plainest way."""
    copies: Counter[int] = Counter()
    for _, events, _ in batches:
        for event in events:
            match event["type"]:
                case "BlockStored":
                    copies.update(event["block_hashes"])
                case "BlockRemoved":
                    copies.subtract(event["block_hashes"])
                case "AllBlocksCleared":
                    copies.clear()
    assert min(copies.values(), default=0) >= 0, "more was removed than stored"
    return sum(count > 0 for count in copies.values())


_JSON = {"content-type": "application/json"}


def _text(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    return text


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
