"""From a body received to the decision, in process: parsing, template, tokens, hashes, placing; and what the event
loop feels of it meanwhile."""

from __future__ import annotations

import asyncio
import io
import statistics
import time
from pathlib import Path

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from bench.row import Row
from enginesim import words
from extproc.apis import find_api
from extproc.config import Tokenization
from extproc.exchange import Headers
from extproc.judge import Exchange, Judge, Pool
from extproc.ledger import Ledger
from extproc.log import JsonLog
from extproc.metrics import Metrics
from extproc.model_files import load_pool_text
from extproc.prompt_reader import PromptReader
from extproc.request_reader import RequestReader
from extproc.session import Decide, Route
from extproc.stack import simulator_folder
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, PoolPolicy, WorkerSpec
from predictor.prompt import BlockHasher

_SIZES = {"4 KB": 4_000, "256 KB": 256_000, "3 MB": 3_000_000}


async def rows() -> list[Row]:
    judge, reader = _judge()
    found = []
    for name, size in _SIZES.items():
        body = chat_body(size)
        times, stalls = [], []
        # A conversation's next turn: the same messages with one more, as most requests are.
        for turn in range(8):
            grown = _with_turn(body, turn)
            stall = asyncio.create_task(_longest_stall_s(stop := asyncio.Event()))
            await asyncio.sleep(0.02)
            started_s = time.perf_counter()
            verdict = await judge.decide(grown, Exchange(time.monotonic()))
            times.append(time.perf_counter() - started_s)
            stop.set()
            stalls.append(await stall)
            assert isinstance(verdict, Route)
        tokens = len(body) // 5
        budget = "<= 60 ms, no stall over 20 ms" if name == "3 MB" else ""
        usual, first, stall_ms = (s * 1e3 for s in (statistics.median(times[1:]), times[0], max(stalls)))
        result = f"{usual:.1f} ms (first {first:.1f}), longest stall {stall_ms:.1f} ms"
        found.append(Row(f"body received -> decision, {name}, about {tokens:,} tokens", result, budget))
    reader.close()
    return found


def chat_body(size: int) -> bytes:
    """A chat request of about so many bytes."""
    turns = max(1, size // 40_000)
    text = words.text(size // 6 // turns, seed=size)
    messages = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"{n}{text}"} for n in range(turns)]
    return msgspec.json.encode({"model": "sim", "stream": True, "max_tokens": 8, "messages": messages})


def _with_turn(body: bytes, turn: int) -> Decide:
    request = msgspec.json.decode(body)
    request["messages"].append({"role": "user", "content": f"And now? {turn} {words.text(100, seed=turn)}"})
    api = find_api("POST", "/v1/chat/completions")
    assert api is not None
    return Decide(api, Headers(), msgspec.json.encode(request))


def _judge() -> tuple[Judge, PromptReader]:
    rng = np.random.default_rng(4)
    hasher = BlockHasher(rng)
    fleet = Fleet([PoolPolicy("sim")], hasher, rng)
    for number in range(3):
        fleet.join("sim", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", Settings()))
    metrics = Metrics(CollectorRegistry())
    log = JsonLog(io.StringIO())
    ledger = Ledger(fleet, metrics, log, time.monotonic)
    settings = Tokenization()
    reader = PromptReader(hasher, settings.threads, settings.max_pending, 30.0, _fail, settings.inline_bytes)
    text = load_pool_text(Path(simulator_folder()) / "model")
    pools = {"sim": Pool("sim", text)}
    requests = RequestReader(settings.threads, 30.0)
    return Judge(fleet, pools, requests, reader, ledger, metrics, log, time.monotonic, boot="bench"), reader


def _fail(fault: BaseException) -> None:
    raise fault


async def _longest_stall_s(stop: asyncio.Event) -> float:
    """The longest time by which a timer of 1 ms was late."""
    worst_s = 0.0
    while not stop.is_set():
        slept_s = time.perf_counter()
        await asyncio.sleep(0.001)
        worst_s = max(worst_s, time.perf_counter() - slept_s - 0.001)
    return worst_s
