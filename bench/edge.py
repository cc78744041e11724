"""The filter behind the real Envoy, against a do-nothing ext_proc server and against Envoy alone, in one run.

The server under test has a core to itself; Envoy, which also plays the engine (a direct response), and the load share
the other. Cost is the server's own CPU time per request, which a noisy neighbour does not change; latency is taken
one request at a time. The three are measured in turn, several rounds, and compared round by round.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench.decision import chat_body
from bench.row import Row
from extproc.stack import envoy_config_path, find_envoy, free_ports, simulator_folder

_ROUNDS = 5
_REQUESTS, _CONNECTIONS = 1_500, 16
_LATENCY_REQUESTS = 300
_LOAD_TIMEOUT_S = 120.0
_BIG, _BIG_REQUESTS, _BIG_CONNECTIONS = 220_000, 450, 150
_EXTENSIONS = "type.googleapis.com/envoy.extensions.filters"
_SERVERS = ("none", "do-nothing", "headway")
_ANSWER = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\ndata: [DONE]\n\n'


@dataclass(slots=True)
class Results:
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    latency_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    big_ms: dict[str, list[list[float]]] = field(default_factory=dict)
    big_cpu_us: dict[str, list[float]] = field(default_factory=dict)


async def rows() -> list[Row]:
    results = Results()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        async with contextlib.AsyncExitStack() as running:
            sites = {name: await running.enter_async_context(_site(name, Path(folder))) for name in _SERVERS}
            for site in sites.values():
                await _load(site.port, chat_body(4_000), 200, 4)
            for _ in range(_ROUNDS):
                for name, site in sites.items():
                    await _measure(name, site, results)
    return _table(results)


@dataclass(frozen=True, slots=True)
class Site:
    """One Envoy with the server under test behind it."""

    port: int
    server_pid: int | None

    def cpu_s(self) -> float:
        if self.server_pid is None:
            return 0.0
        fields = Path(f"/proc/{self.server_pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _measure(name: str, site: Site, results: Results) -> None:
    body, big = chat_body(4_000), chat_body(_BIG)
    cpu_s = site.cpu_s()
    await _load(site.port, body, _REQUESTS, _CONNECTIONS)
    results.cpu_us.setdefault(name, []).append((site.cpu_s() - cpu_s) / _REQUESTS * 1e6)
    results.latency_ms.setdefault(name, []).append(await _load(site.port, body, _LATENCY_REQUESTS, 1))
    cpu_s = site.cpu_s()
    results.big_ms.setdefault(name, []).append(await _load(site.port, big, _BIG_REQUESTS, _BIG_CONNECTIONS))
    results.big_cpu_us.setdefault(name, []).append((site.cpu_s() - cpu_s) / _BIG_REQUESTS * 1e6)


def _table(results: Results) -> list[Row]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    def quantile(rounds: list[list[float]], share: float) -> float:
        return median([sorted(values)[int(share * (len(values) - 1))] for values in rounds])

    cpu = {name: median(results.cpu_us[name]) for name in _SERVERS[1:]}
    ratio = median([n / h for n, h in zip(results.cpu_us["do-nothing"], results.cpu_us["headway"], strict=True)])
    found = [
        Row(
            "CPU per request, 4 KB, do-nothing server", f"{cpu['do-nothing']:.0f} us = {1e6 / cpu['do-nothing']:,.0f}/s"
        ),
        Row("CPU per request, 4 KB, Headway", f"{cpu['headway']:.0f} us = {1e6 / cpu['headway']:,.0f}/s per core"),
        Row("requests per core, Headway / do-nothing", f"{ratio:.0%}", ">= 70 %"),
    ]
    p50 = {name: quantile(results.latency_ms[name], 0.5) for name in _SERVERS}
    p99 = {name: quantile(results.latency_ms[name], 0.99) for name in _SERVERS}
    found += [Row(f"latency, 4 KB, {_label(n)}", f"p50 {p50[n]:.2f} ms, p99 {p99[n]:.2f} ms") for n in _SERVERS]
    added = (p50["headway"] - p50["none"]) / max(1e-9, p50["do-nothing"] - p50["none"])
    found.append(Row("added p50, Headway / do-nothing", f"{added:.2f}x", "<= 2x"))
    for name in _SERVERS:
        low, high = quantile(results.big_ms[name], 0.5), quantile(results.big_ms[name], 0.99)
        cost = median(results.big_cpu_us[name])
        text = f"p50 {low:.0f} ms, p99 {high:.0f} ms" + (f", CPU {cost:.0f} us" if name != "none" else "")
        found.append(Row(f"220 KB, {_BIG_CONNECTIONS} at once, {_label(name)}", text))
    return found


def _label(name: str) -> str:
    return {"none": "Envoy alone", "do-nothing": "do-nothing server", "headway": "Headway"}[name]


@contextlib.asynccontextmanager
async def _site(name: str, folder: Path) -> AsyncIterator[Site]:
    listener, admin, server, engine = free_ports(4)
    async with contextlib.AsyncExitStack() as running:
        server_pid = None
        if name != "none":
            command = _server_command(name, folder, server, engine)
            server_pid = await running.enter_async_context(_child(command, core=0))
        path = folder / f"envoy-{name}.yaml"
        path.write_text(yaml.safe_dump(_envoy_config(name, listener, admin, server, engine)))
        command = [find_envoy(), "-c", str(path), "--disable-hot-restart", "--concurrency", "1", "-l", "error"]
        await running.enter_async_context(_child(command, core=1))
        await _until_ready(listener, admin, expect_server=name != "none")
        yield Site(listener, server_pid)


def _server_command(name: str, folder: Path, port: int, engine: int) -> list[str]:
    if name == "do-nothing":
        return [sys.executable, "-m", "bench.do_nothing", f"127.0.0.1:{port}", f"127.0.0.1:{engine}"]
    worker = {"name": "w", "endpoint": f"127.0.0.1:{engine}"}
    pool = {"name": "sim", "tokenizer": str(simulator_folder() / "model"), "workers": [worker]}
    admin = free_ports(1)[0]
    config = {
        "listen": {"grpc": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin}"},
        "probe": {"interval_s": 0},
        "pools": [pool],
    }
    path = folder / "headway.yaml"
    path.write_text(yaml.safe_dump(config))
    return [sys.executable, "-m", "extproc.cli", "serve", "-c", str(path)]


def _envoy_config(name: str, listener: int, admin: int, server: int, engine: int) -> dict[str, Any]:
    """envoy/envoy.yaml on other ports, with one engine: a second listener that answers by itself."""
    config: dict[str, Any] = yaml.safe_load(envoy_config_path().read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = admin
    resources = config["static_resources"]
    first = resources["listeners"][0]
    first["address"]["socket_address"]["port_value"] = listener
    manager = first["filter_chains"][0]["filters"][0]["typed_config"]
    if name == "none":
        manager["http_filters"] = [f for f in manager["http_filters"] if "ext_proc" not in f["name"]]
        manager["access_log"] = []
        resources["clusters"] = [c for c in resources["clusters"] if c["name"] == "engines"]
    for cluster in resources["clusters"]:
        port = engine if cluster["name"] == "engines" else server
        endpoint = {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
        cluster["load_assignment"] = {"cluster_name": cluster["name"], "endpoints": [{"lb_endpoints": [endpoint]}]}
    resources["listeners"].append(_engine_listener(engine))
    return config


def _engine_listener(port: int) -> dict[str, Any]:
    answer = {
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"inline_string": _ANSWER}},
        "response_headers_to_add": [{"header": {"key": "content-type", "value": "text/event-stream"}}],
    }
    manager = {
        "@type": f"{_EXTENSIONS}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "engine",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [answer]}]},
        "http_filters": [
            {
                "name": "buffer",
                "typed_config": {
                    "@type": f"{_EXTENSIONS}.http.buffer.v3.Buffer",
                    "max_request_bytes": 1 << 26,
                },
            },
            {
                "name": "router",
                "typed_config": {"@type": f"{_EXTENSIONS}.http.router.v3.Router"},
            },
        ],
    }
    return {
        "name": "engine",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "per_connection_buffer_limit_bytes": 1 << 26,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


@contextlib.asynccontextmanager
async def _child(command: list[str], core: int) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core % (os.cpu_count() or 1)}),
    )
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _until_ready(listener: int, admin: int, expect_server: bool) -> None:
    wanted = b"cluster.headway.membership_healthy: 1" if expect_server else b"LIVE"
    path = b"/stats?filter=cluster.headway.membership_healthy" if expect_server else b"/ready"
    for _ in range(300):
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", admin)
            writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if wanted in answer:
                return
        await asyncio.sleep(0.1)
    raise RuntimeError(f"Envoy on port {listener} did not become ready")


async def _load(port: int, body: bytes, requests: int, connections: int) -> list[float]:
    """Sends so many requests over so many connections; returns each one's milliseconds."""
    left = requests
    times: list[float] = []
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def connection() -> None:
        nonlocal left
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while left > 0:
            left -= 1
            started_s = time.perf_counter()
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer
            await _body(reader, answer)
            times.append((time.perf_counter() - started_s) * 1e3)
        writer.close()

    await asyncio.wait_for(asyncio.gather(*(connection() for _ in range(connections))), _LOAD_TIMEOUT_S)
    return times


async def _body(reader: asyncio.StreamReader, head: bytes) -> None:
    length = re.search(rb"content-length: (\d+)", head)
    if length is not None:
        await reader.readexactly(int(length.group(1)))
        return
    while size := int(await reader.readuntil(b"\r\n"), 16):
        await reader.readexactly(size + 2)
    await reader.readexactly(2)
