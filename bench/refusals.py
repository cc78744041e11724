"""Refusals through the real Envoy: a burst of them at once, and a steady stream of them, while answers are streamed.

Every request is read, tokenized and decided on as any other; a trusted `x-request-start` says that its bound is used
up. Envoy, the filter, a simulated engine and the load share the machine. What a burst takes without the filter, where
Envoy itself answers 429, is what the load and Envoy take of it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.row import Row
from enginesim import words
from extproc.stack import EngineSpec, Stack

_AT_ONCE, _BURSTS = (30, 100, 1000), 3
_PER_S, _STEADY_S = 200, 5.0
_STREAMS, _STREAM_TOKENS = 20, 4000
_PROMPT_WORDS = 100


async def rows() -> list[Row]:
    spec = EngineSpec("a", prefill_us_per_token=1.0, step_ms=20.0, decode_ms=0.0, max_num_batched_tokens=8192)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        stack = Stack(Path(folder), [spec], {"gateway": {"trust_request_start": True}})
        try:
            await stack.start()
            rows = await _measure(stack.listener_port)
        finally:
            await stack.stop()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        stack = Stack(Path(folder), [spec], change_envoy=_refuses_by_itself)
        try:
            await stack.start()
            times = [ms for _ in range(_BURSTS) for ms in await _burst(stack.listener_port, 1000)]
            return [*rows, Row("1000 at once, refused by Envoy without the filter", _times(times))]
        finally:
            await stack.stop()


def _refuses_by_itself(config: dict[str, Any]) -> None:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [one for one in manager["http_filters"] if one["name"] == "envoy.filters.http.router"]
    for host in manager["route_config"]["virtual_hosts"]:
        host["routes"] = [{"match": {"prefix": "/"}, "direct_response": {"status": 429}}]


async def _measure(port: int) -> list[Row]:
    for _ in range(50):
        await _refused(await asyncio.open_connection("127.0.0.1", port))
    gaps_s: list[float] = []
    streams = [asyncio.create_task(_stream(port, gaps_s)) for _ in range(_STREAMS)]
    await asyncio.sleep(1.0)
    usual_s = _quantile(gaps_s, 0.99)
    gaps_s.clear()
    bursts = {size: [ms for _ in range(_BURSTS) for ms in await _burst(port, size)] for size in _AT_ONCE}
    burst_gap_s = _quantile(gaps_s, 0.99)
    gaps_s.clear()
    steady = await _steady(port)
    steady_gap_s = _quantile(gaps_s, 0.99)
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    budget = "p99 <= 50 ms"
    return [
        *(
            Row(f"{size} refusals at once", _times(times), budget if size == 1000 else "")
            for size, times in bursts.items()
        ),
        Row(f"{_PER_S} refusals a second, over new connections", _times(steady), budget),
        Row(
            f"99 % of gaps between tokens of {_STREAMS} streams",
            f"{usual_s * 1e3:.0f} ms before, {burst_gap_s * 1e3:.0f} ms during bursts, {steady_gap_s * 1e3:.0f} ms "
            "during the steady stream",
        ),
    ]


def _times(told: list[float | None]) -> str:
    ms = [took for took in told if took is not None]
    late = len(told) - len(ms)
    passed = f"; {late / len(told):.0%} came too late for Envoy, and were passed on" if late else ""
    return f"p50 {_quantile(ms, 0.5):.0f} ms, p99 {_quantile(ms, 0.99):.0f} ms{passed}"


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


_numbers = itertools.count()


def _request(headers: str, **fields: object) -> bytes:
    text = f"{next(_numbers)} " + words.text(_PROMPT_WORDS, seed=1)
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": text}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


async def _refused(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> float | None:
    """Milliseconds from the request to its refusal, on an open connection. None: Envoy's `message_timeout` came first,
    and it went on without a decision."""
    reader, writer = connection
    started_s = time.perf_counter()
    writer.write(_request(f"x-max-queue-wait-s: 5\r\nx-request-start: t={time.time() - 6}\r\n"))
    head = await reader.readuntil(b"\r\n\r\n")
    took_ms = (time.perf_counter() - started_s) * 1e3
    writer.close()
    return took_ms if head.startswith(b"HTTP/1.1 429") else None


async def _burst(port: int, size: int) -> list[float | None]:
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(size)]
    return list(await asyncio.gather(*(_refused(connection) for connection in connections)))


async def _steady(port: int) -> list[float | None]:
    asked = []
    started_s = time.perf_counter()
    for number in range(round(_PER_S * _STEADY_S)):
        await asyncio.sleep(max(0.0, started_s + number / _PER_S - time.perf_counter()))
        asked.append(asyncio.create_task(_refused(await asyncio.open_connection("127.0.0.1", port))))
    return list(await asyncio.gather(*asked))


async def _stream(port: int, gaps_s: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request("", stream=True, max_tokens=_STREAM_TOKENS))
    await reader.readuntil(b"\r\n\r\n")
    last_s: float | None = None
    while await reader.read(65536):
        now_s = time.perf_counter()
        if last_s is not None:
            gaps_s.append(now_s - last_s)
        last_s = now_s
