"""Refusals through the real Envoy: bursts of them, and a steady stream of them, while answers are streamed.

An engine has a queue of half a minute, and callers who would wait for 5 s ask for more. Envoy, the filter, the
simulated engine, who asks, and who listens to the streams share the machine. What of a burst is theirs is seen
where Envoy answers 429 by itself: the same callers, streams and connections, in turns with the filter's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.row import Row
from enginesim import words
from extproc.stack import EngineSpec, Stack

_AT_ONCE, _ROUNDS = (30, 100, 1000), 3
_PER_S, _STEADY_S = 200, 5.0
_STREAMS, _STREAM_TOKENS = 20, 4000
_PROMPT_WORDS = 100
# Of words, one after the other: what the engine costs is learned from them.
_LESSONS = (200, 2000, 500, 4000, 1000) * 3
_GIANTS, _GIANT_WORDS = 32, 60_000
_ENGINE = EngineSpec(
    "a",
    prefill_us_per_token=20.0,
    prefill_ns_per_token2=0.0,
    step_ms=10.0,
    decode_ms=0.0,
    max_num_batched_tokens=512,
    num_gpu_blocks=200_000,
)
_BOUNDED = "x-max-queue-wait-s: 5\r\n"
# Envoy answers these itself.
_SPARED = "x-bench-refused: 1\r\n"


async def rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        stack = Stack(Path(folder), [_ENGINE], change_envoy=_also_refuses_by_itself)
        try:
            await stack.start()
            return await _measure(stack)
        finally:
            await stack.stop()


def _also_refuses_by_itself(config: dict[str, Any]) -> None:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    name, _, value = _SPARED.strip().partition(": ")
    kind = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    route = {
        "match": {"prefix": "/", "headers": [{"name": name, "string_match": {"exact": value}}]},
        "direct_response": {"status": 429},
        "typed_per_filter_config": {"envoy.filters.http.ext_proc": {"@type": kind, "disabled": True}},
    }
    for host in manager["route_config"]["virtual_hosts"]:
        host["routes"].insert(0, route)


@dataclass(slots=True)
class _Told:
    """Milliseconds to each refusal (None: passed on, since the decision came too late for Envoy), and seconds between
    tokens meanwhile."""

    times_ms: list[float | None] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


async def _measure(stack: Stack) -> list[Row]:
    port = stack.listener_port
    for number, size in enumerate(_LESSONS):
        lesson = _request("connection: close\r\n", words.text(size, seed=100 + number), stream=True, max_tokens=4)
        reader, writer = await _asked(port, lesson)
        await reader.read()
        writer.close()
    gaps_s: list[float] = []
    running = [asyncio.create_task(_stream(port, gaps_s)) for _ in range(_STREAMS)]
    await asyncio.sleep(1.0)
    giants = [_request("", words.text(_GIANT_WORDS, seed=200 + n), stream=True, max_tokens=2) for n in range(_GIANTS)]
    running += [asyncio.create_task(_hold(port, giant)) for giant in giants]
    try:
        await asyncio.sleep(2.0)
        gaps_s.clear()
        await asyncio.sleep(1.0)
        usual_s = _quantile(gaps_s, 0.99)
        told: dict[tuple[str, int], _Told] = {}
        for _, size, header in itertools.product(range(_ROUNDS), _AT_ONCE, (_SPARED, _BOUNDED)):
            await _ask(port, gaps_s, told.setdefault((header, size), _Told()), "burst", size, header)
        steady = _Told()
        await _ask(port, gaps_s, steady, "steady", round(_PER_S * _STEADY_S), _BOUNDED)
        unread = await _counted(stack, "headway_refusals_unread_total")
        refused = await _counted(stack, "headway_refusals_total")
    finally:
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return [
        *(
            Row(
                f"{size} refusals at once",
                f"{_times(told[_BOUNDED, size].times_ms)}; by Envoy itself {_times(told[_SPARED, size].times_ms)}",
                "p99 <= 50 ms" if size == max(_AT_ONCE) else "",
            )
            for size in _AT_ONCE
        ),
        Row(f"{_PER_S} refusals a second, over new connections", _times(steady.times_ms), "p99 <= 50 ms"),
        Row("... of all refusals, told without a look at the prompt", f"{unread / max(1.0, refused):.0%}"),
        Row(
            f"99 % of gaps between tokens of {_STREAMS} streams",
            f"{usual_s * 1e3:.0f} ms before, {_quantile(steady.gaps_s, 0.99) * 1e3:.0f} ms during the steady stream",
        ),
        *(
            Row(
                f"... during bursts of {size}",
                f"{_quantile(told[_BOUNDED, size].gaps_s, 0.99) * 1e3:.0f} ms; "
                f"where Envoy itself refuses {_quantile(told[_SPARED, size].gaps_s, 0.99) * 1e3:.0f} ms",
            )
            for size in _AT_ONCE
        ),
    ]


def _times(told: list[float | None]) -> str:
    ms = [took for took in told if took is not None]
    late = len(told) - len(ms)
    passed = f"; {late / len(told):.0%} came too late for Envoy, and were passed on" if late else ""
    return f"p50 {_quantile(ms, 0.5):.0f}, p99 {_quantile(ms, 0.99):.0f} ms{passed}"


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


async def _counted(stack: Stack, name: str) -> float:
    async with aiohttp.ClientSession() as session, session.get(f"{stack.admin_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


# The streams


def _request(headers: str, text: str, **fields: object) -> bytes:
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": text}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def _asked(port: int, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """On a new connection, until the answer begins."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def _hold(port: int, request: bytes) -> None:
    _, writer = await _asked(port, request)
    with contextlib.closing(writer):
        await asyncio.Event().wait()


async def _stream(port: int, gaps_s: list[float]) -> None:
    reader, _ = await _asked(port, _request("", words.text(_PROMPT_WORDS, 1), stream=True, max_tokens=_STREAM_TOKENS))
    last_s: float | None = None
    while await reader.read(65536):
        now_s = time.perf_counter()
        if last_s is not None:
            gaps_s.append(now_s - last_s)
        last_s = now_s


# Who asks: a process of its own, so that whoever listens to the streams is not kept from it by asking


async def _ask(port: int, gaps_s: list[float], told: _Told, how: str, count: int, header: str) -> None:
    """Adds what comes of `count` requests, and the gaps while they are answered."""
    command = [sys.executable, "-m", "bench.refusals", str(port), how, str(count), header.strip()]
    asker = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
    )
    assert asker.stdin is not None
    assert asker.stdout is not None
    await asker.stdout.readline()  # it is connected
    await asyncio.sleep(0.2)
    gaps_s.clear()
    asker.stdin.write(b"\n")
    told.times_ms += json.loads(await asker.stdout.readline())
    told.gaps_s += gaps_s
    await asker.wait()


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _refused(connection: _Connection, request: bytes) -> float | None:
    reader, writer = connection
    started_s = time.perf_counter()
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    took_ms = (time.perf_counter() - started_s) * 1e3
    writer.close()
    return took_ms if head.startswith(b"HTTP/1.1 429") else None


async def _steadily(connections: Sequence[_Connection], requests: Sequence[bytes]) -> AsyncIterator[float | None]:
    asked = []
    started_s = time.perf_counter()
    for number, (connection, request) in enumerate(zip(connections, requests, strict=True)):
        await asyncio.sleep(max(0.0, started_s + number / _PER_S - time.perf_counter()))
        asked.append(asyncio.create_task(_refused(connection, request)))
    for one in asked:
        yield await one


async def ask(port: int, how: str, count: int, header: str) -> None:
    """Connects, says so, waits for a line, asks, and prints what each took."""
    requests = [_request(f"{header}\r\n", f"{n} {words.text(_PROMPT_WORDS, seed=1)}") for n in range(count)]
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    print("connected", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    if how == "steady":
        told = [took async for took in _steadily(connections, requests)]
    else:
        told = await asyncio.gather(*map(_refused, connections, requests))
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    asyncio.run(ask(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
