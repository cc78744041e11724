"""Real engines behind a real Envoy and the filter, a client of them, and the account of what was credited to whom."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from extproc.stack import Stack
from tests.e2e.harness import CHAT, Counts, read, send_to
from tests.engine.conversations import Callers
from tests.engine.harness import MODEL, RealEngine
from tests.engine.hindsight import Hindsight
from tests.engine.mirror import MODEL_FOLDER

# Events come to the filter by a socket of their own, and may be read a little after a request that was sent later.
_READ_LATER_S = 0.5


@dataclass(frozen=True, slots=True)
class Served:
    """One request: what the filter credited the engine with, and what the engine says that it reused. Tokens."""

    sent_s: float
    answered_s: float  # when its headers came, which vLLM sends before it looks for anything cached
    ended_s: float
    worker: str
    credited: int
    cached: int
    turn: int
    tokens: tuple[int, ...] = field(repr=False)
    salt: str | None = None

    @property
    def right(self) -> bool:
        return self.credited == self.cached

    @property
    def over(self) -> int:
        return self.credited - self.cached

    def held(self, hindsight: Hindsight, block_size: int) -> list[tuple[float, int]]:
        """How many tokens of it the engine held before it answered, and since when, in seconds from when it was sent:
        by one of these, or by one and a guess of what will be gone at its turn, the filter has decided."""
        most = (len(self.tokens) - 1) // block_size
        runs = hindsight.history(self.tokens, self.salt, block_size, self.sent_s - _READ_LATER_S, self.answered_s)
        return [(round(at_s - self.sent_s, 3), min(run, most) * block_size) for at_s, run in runs]

    def shares(self, other: Served) -> int:
        """The leading tokens that it has in common with another that was there at the same time."""
        at_once = other.sent_s <= self.ended_s and self.sent_s <= other.ended_s
        if other is self or not at_once or (other.worker, other.salt) != (self.worker, self.salt):
            return 0
        pairs = enumerate(zip(self.tokens, other.tokens, strict=False))
        return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(self.tokens), len(other.tokens)))

    def __str__(self) -> str:
        return f"{self.worker}, turn {self.turn}: {self.credited} credited, {self.cached} cached of {len(self.tokens)}"


@dataclass(slots=True)
class Account:
    """The requests of one stretch of traffic."""

    served: list[Served] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def right_share(self) -> float:
        return sum(one.right for one in self.served) / len(self.served)

    @property
    def most_over(self) -> int:
        return max((one.over for one in self.served), default=0)

    @property
    def wrong(self) -> list[Served]:
        return [one for one in self.served if not one.right]

    def since(self, moment_s: float) -> Account:
        return Account([one for one in self.served if one.sent_s >= moment_s], list(self.failed))

    def of(self, worker: str) -> Account:
        return Account([one for one in self.served if one.worker == worker], list(self.failed))

    def __str__(self) -> str:
        reused = sum(one.cached for one in self.served) / max(1, sum(len(one.tokens) for one in self.served))
        lines = [f"{len(self.served)} requests, {len(self.wrong)} wrong, {reused:.0%} of their tokens reused"]
        return "\n".join([*lines, *map(str, self.wrong[:20])])


@dataclass(slots=True)
class Live:
    """A running stack around real engines."""

    stack: Stack
    http: aiohttp.ClientSession
    engines: Mapping[str, RealEngine]

    async def ask(self, body: Mapping[str, Any], turn: int = 0, path: str = CHAT) -> tuple[Served, str]:
        """Streams one answer through Envoy: the account of it, and its words. AssertionError if it is no answer."""
        sent_s = time.monotonic()
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        sent = {"model": MODEL, "temperature": 0, **options, **body}
        async with self.http.post(self.stack.url + path, json=sent) as response:
            answered_s = time.monotonic()
            answer = await read(response)
        ended_s = time.monotonic()
        assert answer.status == 200, (answer.status, answer.body[:300])
        assert answer.worker is not None, "no worker was chosen: the filter was not asked, or did not answer"
        words = "".join(
            choice.get("text") or choice.get("delta", {}).get("content") or ""
            for event in answer.events
            for choice in event["choices"]
        )
        served = Served(
            sent_s=sent_s,
            answered_s=answered_s,
            ended_s=ended_s,
            worker=answer.worker,
            credited=int(answer.headers["x-headway-cached-tokens"]),
            cached=answer.usage["prompt_tokens_details"]["cached_tokens"],
            turn=turn,
            tokens=tuple(answer.events[0]["prompt_token_ids"]),
            salt=body.get("cache_salt"),
        )
        return served, words

    async def talk(
        self, callers: Callers, clients: int, until: Callable[[Account], bool], think_s: float = 0.0
    ) -> Account:
        """Conversations by so many clients at once, until the account says that it is enough."""
        account = Account()

        async def client() -> None:
            while not until(account):
                conversation = callers.take()
                turn = conversation.turns
                try:
                    served, words = await self.ask(conversation.next_turn(), turn)
                except (AssertionError, aiohttp.ClientError, TimeoutError) as error:
                    account.failed.append(f"{type(error).__name__}: {error}"[:300])
                    conversation.turns = 1 << 20  # what it knows of itself is torn: it ends
                    await asyncio.sleep(0.05)
                else:
                    account.served.append(served)
                    conversation.answered(words)
                callers.give_back(conversation)
                await asyncio.sleep(think_s)

        await asyncio.gather(*(client() for _ in range(clients)))
        return account

    async def worker(self, name: str) -> dict[str, Any]:
        seen: dict[str, Any] = (await self.stack.fleet())["pools"][MODEL]["workers"][name]
        return seen

    async def trusted(self, name: str) -> bool:
        """Whether the filter believes to know all that this engine's cache holds."""
        return bool((await self.worker(name))["feed_trusted"])

    async def switch(self, what: str, worker: str) -> None:
        """`drain` or `serve`."""
        async with self.http.post(f"{self.stack.admin_url}/{what}/{worker}") as response:
            assert response.status == 200, await response.text()

    async def counts(self) -> Counts:
        async with self.http.get(f"{self.stack.admin_url}/metrics") as response:
            return Counts(await response.text())

    async def until(self, holds: Callable[[], Awaitable[bool]], within_s: float, what: str) -> float:
        """Waits until it holds; the seconds that it took. AssertionError if it takes longer."""
        began_s = time.monotonic()
        while not await holds():
            assert time.monotonic() - began_s < within_s, f"not within {within_s:g} s: {what}"
            await asyncio.sleep(0.02)
        return time.monotonic() - began_s


@contextlib.asynccontextmanager
async def live(
    folder: Path, engines: Mapping[str, RealEngine], feeds: Mapping[str, tuple[str, str | None]] | None = None
) -> AsyncIterator[Live]:
    """The filter follows each engine's own sockets, or those that `feeds` names: (events, replay)."""
    workers = [_worker(name, engine, (feeds or {}).get(name)) for name, engine in engines.items()]
    overrides = {
        "pools": [{"name": MODEL, "tokenizer": str(MODEL_FOLDER), "learning": {"share": 0.34}, "workers": workers}],
        "probe": {"interval_s": 0.5},
        "shutdown": {"notice_s": 1.5, "grace_s": 5.0},  # Envoy outlives filters here
    }
    ports = [engine.port for engine in engines.values()]
    stack = Stack(folder, (), overrides, change_envoy=lambda envoy: send_to(envoy, *ports))
    try:
        await stack.start()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as http:
            yield Live(stack, http, engines)
    finally:
        await stack.stop()


def _worker(name: str, engine: RealEngine, feed: tuple[str, str | None] | None) -> dict[str, Any]:
    events, replay = feed or (engine.kv_events_endpoint, engine.kv_replay_endpoint)
    known = engine.settings
    settings = {key: getattr(known, key) for key in ("block_size", "max_num_batched_tokens", "max_num_seqs")}
    told = {"name": name, "endpoint": engine.endpoint, "kv_events": events, "settings": settings}
    return told if replay is None else {**told, "kv_replay": replay}


def enough(requests: int) -> Callable[[Account], bool]:
    return lambda account: len(account.served) + len(account.failed) >= requests


def for_seconds(seconds: float) -> Callable[[Account], bool]:
    ends_s = time.monotonic() + seconds
    return lambda _: time.monotonic() >= ends_s
