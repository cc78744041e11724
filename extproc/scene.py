"""The scripted scene: what Headway does, shown act by act on the local stack, and checked.

Every request goes through the real Envoy, as a client's would. What was predicted is read from the response headers,
what really happened is timed here.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from extproc.stack import EngineSpec, Stack
from predictor.tokenizer import Tokenizer

_SPACE = "\u0120"  # how byte-level vocabularies write a leading space
# Every engine gets each of them once. Two are long: what a giant costs must not hang on a single sample, which a busy
# machine may have held up.
_CALIBRATION_TOKENS = (300, 3_000, 800, 20_000, 1_800, 32_000, 5_000, 500, 12_000)
_MOST_ROUNDS = 3 * len(_CALIBRATION_TOKENS)
_SHOWN_TOKENS = (1_000, 10_000, 46_000)
_LONG_TOKENS = 25_000
# Farther apart than Envoy needs to pass one on: two that overtake each other swap their waits.
_BURST, _BURST_TOKENS, _BURST_GAP_S = 9, 6_000, 0.05
_GIANT_TOKENS = 46_000
_BOUND_S = 5
# A prediction is right within a tenth, or, below a second, within a tenth of a second.
_RELATIVE, _ABSOLUTE_S = 0.10, 0.100


class Screen(Console):
    """Standard output, for people."""

    def __init__(self) -> None:
        super().__init__(file=sys.stdout, width=118)

    def on_broken_pipe(self) -> None:
        """Rich's own way out ends the process before the stack's parts are."""
        raise BrokenPipeError


@dataclass(slots=True)
class Shot:
    """One request and what became of it."""

    title: str
    tokens: int
    status: int = 0
    worker: str = ""
    why: str = ""
    predicted_s: float | None = None
    actual_s: float | None = None
    credited: int | None = None
    reused: int | None = None
    retry_after: str | None = None
    text: str = ""
    took_s: float = 0.0

    @property
    def error_s(self) -> float | None:
        if self.predicted_s is None or self.actual_s is None:
            return None
        return self.actual_s - self.predicted_s

    @property
    def right(self) -> bool:
        if self.error_s is None or self.actual_s is None:
            return False
        return abs(self.error_s) <= (self.actual_s * _RELATIVE if self.actual_s >= 1 else _ABSOLUTE_S)


@dataclass(slots=True)
class Check:
    what: str
    good: bool
    detail: str = ""


@dataclass(slots=True)
class Scene:
    stack: Stack
    seed: int = 20
    console: Console = field(default_factory=Screen)
    checks: list[Check] = field(default_factory=list)
    shots: list[Shot] = field(default_factory=list)
    _random: random.Random = field(init=False)
    _words: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        source = (self.stack.model_folder / "tokenizer.json").read_text()
        tokenizer = Tokenizer(source)
        # Words that are one token with the space before them: so a text has as many tokens as words.
        words = {word[1:] for word in msgspec.json.decode(source)["model"]["vocab"] if word.startswith(_SPACE)}
        plain = sorted(word for word in words if word.isascii() and word.isalpha() and len(word) > 3)
        self._words = [word for word in plain if len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1]

    async def play(self) -> bool:
        """Plays all acts; True if everything went as it should."""
        started_s = time.monotonic()
        say = self.console.print
        engines = len(self.stack.specs)
        say(
            f"\n[bold]Headway[/] in a real Envoy at {self.stack.url} before {engines} simulated engines.",
            highlight=False,
        )
        say(f"Metrics and fleet view: {self.stack.admin_url}/metrics and /fleet while it is up.", highlight=False)
        say("Each answer's headers say what was predicted; the first token is timed here, by the client.\n")
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as self_session:
            client = _Client(self_session, self.stack.url)
            await self._calibrate(client)
            conversation = await self._long_prompt(client)
            await self._follow_up(client, conversation)
            await self._burst(client)
            await self._giants(client)
        await self._settled()
        self._judge_predictions()
        say(f"\n[bold]Checks[/] ({time.monotonic() - started_s:.0f} s)")
        for check in self.checks:
            mark = "[green]ok  [/]" if check.good else "[red bold]FAIL[/]"
            say(f"  {mark} {check.what}" + (f" [dim]({check.detail})[/]" if check.detail else ""))
        return all(check.good for check in self.checks)

    async def _calibrate(self, client: _Client) -> None:
        """Cold prompts of several lengths, one for each engine at a time: who is busy learning gets no second one."""
        self.console.print("[bold]Act 1.[/] Nine cold prompts each teach Headway what the engines' prefill costs.")
        for tokens in itertools.islice(itertools.cycle(_CALIBRATION_TOKENS), _MOST_ROUNDS):
            shots = [Shot("calibration", tokens) for _ in self.stack.specs]
            await asyncio.gather(*(client.send(shot, self._prompt(tokens), max_tokens=10) for shot in shots))
            await self._in_flight(0)
            if tokens == _CALIBRATION_TOKENS[-1] and await self._all_learned():
                break
        workers = await self._workers()
        columns = [text for tokens in _SHOWN_TOKENS for text in (f"{tokens:,} tokens", "really")]
        table = _table("engine", "learned from", *columns)
        for spec in self.stack.specs:
            cost = workers[spec.name]["cost"]
            learned = [_learned_s(cost, spec, tokens) for tokens in _SHOWN_TOKENS]
            true = [_true_s(spec, tokens) for tokens in _SHOWN_TOKENS]
            cells = [_seconds(seconds) for pair in zip(learned, true, strict=True) for seconds in pair]
            table.add_row(spec.name, f"{cost['samples']} timings", *cells)
        self.console.print(table)
        names = sorted(name for name, worker in workers.items() if worker["cost"]["basis"] == "curve")
        self._check("every engine has learned", len(names) == len(workers), ", ".join(names))

    async def _long_prompt(self, client: _Client) -> list[dict[str, str]]:
        self.console.print("\n[bold]Act 2.[/] A long cold prompt: the engine with the fastest prefill wins.")
        messages = self._prompt(_LONG_TOKENS)
        shot = await client.send(Shot("long, cold", _LONG_TOKENS), messages, max_tokens=40)
        self._show([shot])
        self._check("the long prompt took at least 2 s of prefill", (shot.actual_s or 0) >= 2)
        return [*messages, {"role": "assistant", "content": shot.text}]

    async def _follow_up(self, client: _Client, conversation: list[dict[str, str]]) -> None:
        self.console.print("\n[bold]Act 3.[/] Its follow-up: most of its prompt is cached where the first was served.")
        home = self.shots[-1].worker
        messages = [*conversation, {"role": "user", "content": self._text(60)}]
        shot = await client.send(Shot("follow-up", _LONG_TOKENS + 100), messages, max_tokens=8)
        self._show([shot])
        self._check("the follow-up went to the engine with the cache", shot.worker == home, f"{shot.worker}")
        self._check(
            "it reused what was credited", shot.credited == shot.reused and bool(shot.reused), f"{shot.reused} tokens"
        )

    async def _burst(self, client: _Client) -> None:
        self.console.print(f"\n[bold]Act 4.[/] A burst of {_BURST}: each goes where its own first token comes soonest.")
        shots = [Shot(f"burst {number + 1}", _BURST_TOKENS) for number in range(_BURST)]
        sending = []
        for shot in shots:
            sending.append(asyncio.create_task(client.send(shot, self._prompt(shot.tokens), max_tokens=8)))
            await asyncio.sleep(_BURST_GAP_S)
        await asyncio.gather(*sending)
        self._show(shots)
        used = {shot.worker for shot in shots}
        self._check(
            "the burst was spread over all engines", len(used) == len(self.stack.specs), ", ".join(sorted(used))
        )

    async def _giants(self, client: _Client) -> None:
        self.console.print(f"\n[bold]Act 5.[/] A giant for each engine; then one that will wait {_BOUND_S} s at most.")
        giants = [Shot(f"giant {number + 1}", _GIANT_TOKENS) for number in range(len(self.stack.specs))]
        tasks = []
        for giant in giants:
            tasks.append(asyncio.create_task(client.send(giant, self._prompt(giant.tokens), max_tokens=4)))
            await self._in_flight(len(tasks))
        small = self._prompt(500)
        refused = await client.send(Shot(f"bound {_BOUND_S} s", 500), small, max_tokens=4, max_queue_wait_s=_BOUND_S)
        leaver = asyncio.create_task(client.send(Shot("hangs up", 800), self._prompt(800), max_tokens=4))
        patient = asyncio.create_task(client.send(Shot("no bound", 500), small, max_tokens=4))
        await self._in_flight(len(tasks) + 2)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        released = await self._in_flight(len(tasks) + 1)
        gone = Shot("hangs up", 800, why="the client left while it waited")
        await asyncio.gather(*tasks, patient)
        self._show([*giants, refused, gone, patient.result()])
        self._check("one giant on each engine", len({giant.worker for giant in giants}) == len(giants))
        told = refused.retry_after is not None and int(refused.retry_after) >= 1
        at_once = refused.status == 429 and told and refused.took_s < 1
        self._check("the bounded request was refused at once, with a Retry-After", at_once, f"{refused.took_s:.2f} s")
        self._check("the same request without a bound was served", patient.result().status == 200)
        self._check("the request of the client that left is booked no more", released)

    async def _settled(self) -> None:
        self._check("no request is left booked", await self._in_flight(0))

    def _judge_predictions(self) -> None:
        graded = [shot for shot in self.shots if shot.error_s is not None]
        wrong = [f"{shot.title} {shot.predicted_s:.2f}/{shot.actual_s:.2f}" for shot in graded if not shot.right]
        text = f"{len(graded)} predictions within 10 %, or within 100 ms where it took less than a second"
        self._check(text, bool(graded) and not wrong, ", ".join(wrong) or "all of them")

    def _show(self, shots: Sequence[Shot]) -> None:
        self.shots += shots
        table = _table("request", "tokens", "answer", "engine", "why", "predicted", "actual", "error", "cached")
        for shot in shots:
            error = "" if shot.error_s is None else f"[{'green' if shot.right else 'red bold'}]{_error(shot)}[/]"
            answer = {0: "-", 429: f"429, retry in {shot.retry_after} s"}.get(shot.status, str(shot.status))
            table.add_row(
                shot.title,
                f"{shot.tokens:,}",
                answer,
                shot.worker or "-",
                shot.why,
                _seconds(shot.predicted_s),
                _seconds(shot.actual_s),
                error,
                "" if not shot.credited else f"{shot.credited:,}",
            )
        self.console.print(table)

    def _check(self, what: str, good: bool, detail: str = "") -> None:
        self.checks.append(Check(what, good, detail))

    def _prompt(self, tokens: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._text(tokens)}]

    def _text(self, tokens: int) -> str:
        return "".join(f" {word}" for word in self._random.choices(self._words, k=tokens))

    async def _workers(self) -> dict[str, Any]:
        workers: dict[str, Any] = (await self.stack.fleet())["pools"]["sim"]["workers"]
        return workers

    async def _all_learned(self) -> bool:
        return all(worker["cost"]["basis"] == "curve" for worker in (await self._workers()).values())

    async def _in_flight(self, wanted: int) -> bool:
        """Waits until so many requests are booked; False if that takes too long."""
        for _ in range(200):
            if (await self.stack.fleet())["in_flight"] == wanted:
                return True
            await asyncio.sleep(0.02)
        return False


class _Client:
    """A client that streams, and times its first token."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"

    async def send(self, shot: Shot, messages: Sequence[dict[str, str]], **fields: object) -> Shot:
        usage = {"stream_options": {"include_usage": True}}
        body = {"model": "sim", "stream": True, "messages": messages, **usage, **fields}
        started_s = time.monotonic()
        async with self._session.post(self._url, json=body) as response:
            headers = response.headers
            shot.status = response.status
            shot.retry_after = headers.get("retry-after")
            if response.status != 200:
                shot.why = headers.get("x-headway-reason", "").replace("_", " ")
                await response.read()
                shot.took_s = time.monotonic() - started_s
                return shot
            shot.worker = headers.get("x-headway-worker", "")
            shot.why = headers.get("x-headway-why", "").replace("_", " ")
            if "x-headway-predicted-ttft-ms" in headers:
                shot.predicted_s = int(headers["x-headway-predicted-ttft-ms"]) / 1000
                shot.credited = int(headers["x-headway-cached-tokens"])
            async for event in _events(response):
                if shot.actual_s is None:
                    shot.actual_s = time.monotonic() - started_s
                for choice in event.get("choices", ()):
                    shot.text += choice["delta"].get("content") or ""
                if event.get("usage"):
                    shot.tokens = event["usage"]["prompt_tokens"]
                    shot.reused = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return shot


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield msgspec.json.decode(line[6:])


def say_where(stack: Stack) -> None:
    """Where to look, and what to try."""
    console = Screen()
    console.print("\n[bold]Where to look[/]")
    console.print(f"  send requests to   {stack.url}/v1/chat/completions   (model: sim)", highlight=False)
    console.print(f"  the fleet          {stack.admin_url}/fleet", highlight=False)
    console.print(f"  metrics            {stack.admin_url}/metrics", highlight=False)
    console.print(f"  Envoy's own admin  {stack.envoy_admin_url}", highlight=False)
    console.print(f"  logs and configs   {stack.folder}\n", highlight=False)
    body = '{"model":"sim","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"Hi"}]}'
    console.print(
        f"  curl -i {stack.url}/v1/chat/completions -H 'x-max-queue-wait-s: 5' -d '{body}'",
        highlight=False,
        soft_wrap=True,
    )
    console.print("\nCtrl-C ends it.")


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        text = column in ("request", "answer", "engine", "why", "learned from")
        table.add_column(column, justify="left" if text else "right", no_wrap=True)
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _error(shot: Shot) -> str:
    """In the unit that the limit is in: a part of the truth for long ones, milliseconds for short ones."""
    assert shot.error_s is not None
    assert shot.actual_s is not None
    if shot.actual_s >= 1:
        return f"{shot.error_s / shot.actual_s:+.1%}"
    return f"{shot.error_s * 1000:+.0f} ms"


def _learned_s(cost: dict[str, Any], spec: EngineSpec, tokens: int) -> float:
    """A cold prefill by what the fleet shows of a worker's cost, with what surrounds the engine's steps."""
    steps = ceil(tokens / spec.max_num_batched_tokens)
    around_ms = cost["ms_per_request"] + cost["us_per_request_token"] * tokens / 1e3
    linear_ms = cost["ms_per_step"] * steps + cost["us_per_token"] * tokens / 1e3
    return float(around_ms + linear_ms + cost["ns_per_token_squared"] * tokens**2 / 1e6) / 1e3


def _true_s(spec: EngineSpec, tokens: int) -> float:
    """The same as the engine was told to take, without HTTP and tokenization."""
    steps = ceil(tokens / spec.max_num_batched_tokens)
    linear_s = spec.step_ms / 1e3 * steps + spec.prefill_us_per_token * tokens / 1e6
    return linear_s + spec.prefill_ns_per_token2 * tokens**2 / 1e9
