"""The local stack under test, and what tests ask of it."""

import asyncio
import contextlib
import io
import json
import re
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import aiohttp

from extproc.stack import EngineSpec, Stack

CHAT = "/v1/chat/completions"
FULL_DUPLEX = "FULL_DUPLEX_STREAMED"
_METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def quick(name: str, **changes: Any) -> EngineSpec:
    """An engine that costs next to nothing."""
    costs: dict[str, Any] = {
        "prefill_us_per_token": 1.0,
        "prefill_ns_per_token2": 0.0,
        "step_ms": 1.0,
        "decode_ms": 0.01,
        "max_num_batched_tokens": 8192,
    }
    return EngineSpec(name, **{**costs, **changes})


def manager_of(config: dict[str, Any], listener: int = 0) -> dict[str, Any]:
    """The HTTP connection manager in an Envoy config."""
    chain = config["static_resources"]["listeners"][listener]["filter_chains"][0]
    found: dict[str, Any] = chain["filters"][0]["typed_config"]
    return found


def ext_proc_of(config: dict[str, Any], listener: int = 0) -> dict[str, Any]:
    """How the (first) filter of ours is configured in it."""
    filters = manager_of(config, listener)["http_filters"]
    found: dict[str, Any] = next(f for f in filters if f["name"] == "envoy.filters.http.ext_proc")["typed_config"]
    return found


def cluster_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(c for c in config["static_resources"]["clusters"] if c["name"] == name)
    return found


def send_to(config: dict[str, Any], *ports: int, cluster: str = "engines") -> None:
    """Puts these loopback ports into a cluster."""
    cluster_of(config, cluster)["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}} for port in ports
    ]


def set_modes(config: dict[str, Any], request: str, response: str, listener: int = 0) -> None:
    """How Envoy is to send bodies to the filter. Full duplex brings headers and trailers with it."""
    mode: dict[str, Any] = {
        "request_header_mode": "SEND",
        "request_body_mode": request,
        "response_header_mode": "SKIP",
        "response_body_mode": response,
    }
    if request == FULL_DUPLEX:
        mode["request_trailer_mode"] = "SEND"
    if response == FULL_DUPLEX:
        mode |= {"response_header_mode": "SEND", "response_trailer_mode": "SEND"}
    ext_proc_of(config, listener)["processing_mode"] = mode


def chat(text: str = "hello there", **fields: Any) -> dict[str, Any]:
    """A streamed chat request that asks for its usage."""
    body: dict[str, Any] = {
        "model": "sim",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
        "messages": [{"role": "user", "content": text}],
    }
    return {**body, **fields}


def words(count: int, salt: object = "") -> str:
    """A text of at least `count` tokens, unlike any with another salt from its first block on."""
    return f"{salt} " * 4 + "word " * count


@dataclass(slots=True)
class Answer:
    """A whole answer, as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def complete(self) -> bool:
        return self.body.endswith(b"data: [DONE]\n\n")

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line[6:]) for line in self.body.split(b"\n\n") if line.startswith(b"data: {")]

    @property
    def usage(self) -> dict[str, Any]:
        """Of a stream that asked for it."""
        told: dict[str, Any] = self.events[-1]["usage"]
        return told

    @property
    def engine(self) -> str:
        """Who served it, in the engine's own words."""
        assert "x-engine-name" in self.headers, f"served by no engine: {self}"
        return self.headers["x-engine-name"]

    @property
    def worker(self) -> str | None:
        """Whom the filter chose; None if it did not."""
        return self.headers.get("x-headway-worker")

    @property
    def json(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.body)
        return told


class Counts:
    """A page of metrics."""

    def __init__(self, text: str) -> None:
        found = (match for line in text.splitlines() if (match := _METRIC.match(line)))
        self._series = [(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])) for match in found]

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for known, has, value in self._series if known == name and labels.items() <= has.items())


@dataclass(slots=True)
class Bench:
    """A running stack and a client for it. `async with`: at the end it checks that nothing was left behind."""

    stack: Stack
    http: aiohttp.ClientSession

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        # Not `json=`: of a large body aiohttp warns that sending its bytes holds the event loop.
        data = None if body is None else io.BytesIO(json.dumps(body).encode())
        named = {"content-type": "application/json", **named} if data is not None else named
        async with self.http.post(self.stack.url + path, data=data, headers=named) as response:
            return await read(response)

    async def get(self, path: str) -> Answer:
        async with self.http.get(self.stack.url + path) as response:
            return await read(response)

    async def post_to_engine(self, engine: str, body: Any, path: str = CHAT, **headers: str) -> Answer:
        """Past Envoy."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{self.stack.engine_port(engine)}{path}"
        async with self.http.post(url, json=body, headers=named) as response:
            return await read(response)

    async def engine_state(self, engine: str) -> dict[str, Any]:
        async with self.http.get(f"http://127.0.0.1:{self.stack.engine_port(engine)}/sim/state") as response:
            told: dict[str, Any] = await response.json()
            return told

    async def worker(self, name: str) -> dict[str, Any]:
        """What the fleet shows of one worker."""
        fleet = await self.stack.fleet()
        told: dict[str, Any] = fleet["pools"]["sim"]["workers"][name]
        return told

    async def in_flight(self) -> int:
        told: int = (await self.stack.fleet())["in_flight"]
        return told

    async def metric(self, name: str, **labels: str) -> float:
        """The sum over all series of the filter's metric that have these labels."""
        return (await self.metrics()).sum(name, **labels)

    async def metrics(self) -> Counts:
        """All of the filter's metrics at one moment."""
        async with self.http.get(f"{self.stack.admin_url}/metrics") as response:
            return Counts(await response.text())

    async def envoy_stat(self, name: str) -> int:
        async with self.http.get(f"{self.stack.envoy_admin_url}/stats", params={"filter": f"^{name}$"}) as response:
            return int((await response.text()).rpartition(": ")[2] or 0)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The lines that the filter's log has so far. It writes them a little after the event."""
        assert self.stack.filter is not None
        lines = self.stack.filter.log.read_text().splitlines()
        return [json.loads(line) for line in lines if f'"event":"{event}"' in line]

    async def last_graded(self) -> dict[str, Any]:
        """The log's line of the grade that was given last."""
        count = await self.metric("headway_predictions_graded_total")

        async def written() -> bool:
            return len(self.logged("graded")) >= count

        await until(written, 5, "log line of the last grade")
        return self.logged("graded")[-1]

    async def settled(self, timeout_s: float = 10) -> None:
        """Nothing in flight, for the filter and for every engine."""

        left = ""

        async def quiet() -> bool:
            nonlocal left
            states = [await self.engine_state(name) for name, child in self.stack.engines.items() if child.running]
            busy = sum(state["running"] + state["waiting"] for state in states)
            in_flight, streams = await self.in_flight(), await self.metric("headway_streams_open")
            left = f"{busy} at engines, {in_flight} in flight, {streams:g} streams"
            return not busy and in_flight == streams == 0

        try:
            await until(quiet, timeout_s, "a settled stack")
        except AssertionError as late:
            raise AssertionError(f"{late}: {left}") from None

    async def learn(self, rounds: int = 3, tokens: Sequence[int] = (40, 300, 900)) -> None:
        """Cold prompts until every worker has learned. Several at a time: a worker that is busy learns elsewhere."""
        count = len(self.stack.specs)
        for number in range(20 * rounds):
            length = tokens[number % len(tokens)]
            salts = [f"learn {time.monotonic_ns()} {index}" for index in range(count)]
            await asyncio.gather(*(self.post(chat(words(length, salt), max_tokens=10)) for salt in salts))
            await self.settled()
            workers = (await self.stack.fleet())["pools"]["sim"]["workers"].values()
            if number >= rounds - 1 and all(worker["cost"]["basis"] == "curve" for worker in workers):
                return
        raise AssertionError(f"not learned: {await self.stack.fleet()}")

    async def revive_filter(self) -> None:
        """Has a filter running that Envoy knows to be healthy and asks again, which may be a second later."""
        fresh = self.stack.filter is None or not self.stack.filter.running
        if fresh:
            await self.stack.start_filter()
        await self.stack.filter_seen_healthy()
        if not fresh:
            return

        async def asked() -> bool:
            assert (await self.post(chat())).status == 200
            return (await self.metrics()).sum("headway_decisions_total") > 0

        await until(asked, 15, "decision of a new filter")
        await self.settled()

    async def __aenter__(self) -> Self:
        try:
            await self.stack.start()
        except BaseException:
            await self.stack.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            assert self.stack.filter is not None
            if self.stack.filter.running:
                await self.settled()
                assert await self.metric("headway_bugs_total") == 0, self.stack.filter.log.read_text()
        finally:
            await self.stack.stop()


@contextlib.asynccontextmanager
async def running(
    engines: Sequence[EngineSpec],
    overrides: dict[str, Any] | None = None,
    pool: dict[str, Any] | None = None,
    change_envoy: Callable[[dict[str, Any]], None] | None = None,
    envoy_file: str = "envoy.yaml",
) -> AsyncIterator[Bench]:
    """A stack for as long as the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(Path(folder), engines, overrides, pool, change_envoy, envoy_file)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as http,
            Bench(stack, http) as bench,
        ):
            yield bench


async def read(response: aiohttp.ClientResponse) -> Answer:
    body = await response.read()
    return Answer(response.status, {name.lower(): value for name, value in response.headers.items()}, body)


async def until(reached: Callable[[], Awaitable[object]], timeout_s: float, what: str) -> None:
    """Asks again and again; AssertionError if it takes longer than `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    pause_s = 0.005
    while not await reached():
        assert time.monotonic() < deadline_s, f"no {what} in {timeout_s:g} s"
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


class RawClient:
    """One connection, byte by byte, that can be cut."""

    open: ClassVar["set[RawClient]"] = set()

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self._socket = socket.socket()
        self.open.add(self)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setblocking(False)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def send_request(self, body: bytes, path: str = CHAT, part: float = 1.0, **headers: str) -> None:
        """A POST, or the first `part` of its body."""
        named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        head = f"POST {path} HTTP/1.1\r\nhost: e2e\r\ncontent-length: {len(body)}\r\n{named}\r\n"
        await self.send(head.encode() + body[: round(len(body) * part)])

    async def receive(self, most: int = 65536) -> bytes:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self._socket, most), 30)

    async def receive_until(self, wanted: bytes) -> bytes:
        got = b""
        while wanted not in got:
            piece = await self.receive()
            assert piece, f"closed by the other side after {got[-200:]!r}"
            got += piece
        return got

    def close(self, abruptly: bool = False) -> None:
        """`abruptly`: with a reset, as when a machine or a middlebox drops the connection."""
        if abruptly:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()
        self.open.discard(self)
