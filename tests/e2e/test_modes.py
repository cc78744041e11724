"""Every way in which Envoy can send us bodies, through the real Envoy: one listener for each."""

import asyncio
import contextlib
import copy
import io
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from extproc.stack import free_ports
from tests.e2e.harness import (
    CHAT,
    FULL_DUPLEX,
    Answer,
    Bench,
    Counts,
    RawClient,
    manager_of,
    read,
    running,
    send_to,
    set_modes,
    until,
)
from tests.e2e.scripted import DONE, FULL, TOKEN, Scripted, digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

REQUEST_MODES = ("BUFFERED", "BUFFERED_PARTIAL", "STREAMED", FULL_DUPLEX, "NONE")
RESPONSE_MODES = ("STREAMED", FULL_DUPLEX, "NONE")
PAIRS = list(itertools.product(REQUEST_MODES, RESPONSE_MODES))
WITHOUT_RETRIES = ("without", "retries")  # full duplex
# More than this, and a BUFFERED_PARTIAL body is not whole. The largest of SIZES is.
PARTIAL_BYTES = 1 << 20
SIZES = (0, 4 << 10, 300_000, 5 << 20)
SCRIPTS = ("streamed", "plain", "error", "empty", "empty chunked")
GRPC_SERVICE = "test.Echo"
# A filter before ours that answers by itself, as those do that check credentials.
GUARD = """
function envoy_on_request(handle)
  local size = handle:headers():get("x-denied")
  if size ~= nil then handle:respond({[":status"] = "401"}, string.rep("no", tonumber(size))) end
end
"""


@dataclass(slots=True)
class Edge:
    """Envoy with a listener for each pair of modes, one filter, one upstream."""

    bench: Bench
    upstream: Scripted
    ports: dict[tuple[str, str], int]

    def url(self, modes: tuple[str, str]) -> str:
        return f"http://127.0.0.1:{self.ports[modes]}"

    async def send(
        self, url: str, body: Any, script: str, path: str = CHAT, method: str = "POST", **headers: str
    ) -> Answer:
        named = {"x-script": script, **{name.replace("_", "-"): value for name, value in headers.items()}}
        data = io.BytesIO(body) if isinstance(body, bytes) and body else body
        async with self.bench.http.request(method, url + path, data=data, headers=named) as response:
            return await read(response)

    @property
    def direct(self) -> str:
        return f"http://{self.upstream.endpoint}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def edge() -> AsyncIterator[Edge]:
    ports = dict(zip([*PAIRS, WITHOUT_RETRIES], free_ports(len(PAIRS) + 1), strict=True))
    async with Scripted("a") as upstream, echo_over_grpc() as grpc_port:

        def change(config: dict[str, Any]) -> None:
            send_to(config, upstream.port)
            listeners = config["static_resources"]["listeners"]
            manager = listeners[0]["filter_chains"][0]["filters"][0]["typed_config"]
            manager["http_protocol_options"] = {"enable_trailers": True}
            manager["upgrade_configs"] = [{"upgrade_type": "websocket"}]
            lua = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
            guard = {"@type": lua, "default_source_code": {"inline_string": GUARD}}
            manager["http_filters"].insert(0, {"name": "guard", "typed_config": guard})
            routes = manager["route_config"]["virtual_hosts"][0]["routes"]
            routes.insert(
                0, {"match": {"prefix": f"/{GRPC_SERVICE}/"}, "route": {"cluster": "over_grpc", "timeout": "0s"}}
            )
            clusters = config["static_resources"]["clusters"]
            over_grpc = copy.deepcopy(next(c for c in clusters if c["name"] == "headway_access_log"))
            over_grpc["name"] = over_grpc["load_assignment"]["cluster_name"] = "over_grpc"
            clusters.append(over_grpc)
            send_to(config, grpc_port, cluster="over_grpc")
            for number, ((request, response), port) in enumerate(ports.items(), 1):
                listener = copy.deepcopy(listeners[0])
                listener["name"] = f"{request}-{response}"
                listener["address"]["socket_address"]["port_value"] = port
                if request == "BUFFERED_PARTIAL":
                    listener["per_connection_buffer_limit_bytes"] = PARTIAL_BYTES
                listeners.append(listener)
                if (request, response) == WITHOUT_RETRIES:
                    request = response = FULL_DUPLEX
                    (route,) = manager_of(config, number)["route_config"]["virtual_hosts"][0]["routes"][1:]
                    del route["route"]["retry_policy"]
                set_modes(config, request, response, listener=number)

        worker = {"name": "a", "endpoint": upstream.endpoint}
        async with running([], {"probe": {"interval_s": 0}}, {"workers": [worker]}, change) as bench:
            yield Edge(bench, upstream, ports)


@contextlib.asynccontextmanager
async def echo_over_grpc() -> AsyncIterator[int]:
    """A gRPC server that sends every message back, and ends with a trailer of its own."""

    async def echo(
        messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message
        context.set_trailing_metadata((("x-ended", "well"),))

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(echo)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(GRPC_SERVICE, {"Both": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.1)


def prompt(size: int) -> bytes:
    """A request of exactly so many bytes, most of them in a field that nobody reads; none at all for 0."""
    frame = b'{"model":"sim","stream":true,"max_tokens":2,"messages":[{"role":"user","content":"hi"}],"pad":"%s"}'
    return frame % (b"x" * (size - len(frame % b""))) if size else b""


def ungraded_as(script: str, response: str) -> str | None:
    """Why a routed request has no grade; None if it has one."""
    if response == "NONE":
        return "unseen"
    return {"streamed": None, "plain": "plain", "error": "error"}.get(script, "empty")


def moved(before: Counts, after: Counts) -> Callable[..., float]:
    def by(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    return by


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("modes", PAIRS, ids="-".join)
async def test_what_comes_out_is_what_went_in(edge: Edge, modes: tuple[str, str], size: int, script: str) -> None:
    """Content in both directions, the one counter that should move, and nothing left behind."""
    body = prompt(size)
    direct = await edge.send(edge.direct, body, script)
    before = await edge.bench.metrics()
    through = await edge.send(edge.url(modes), body, script)
    assert (through.status, digest(through.body)) == (direct.status, digest(direct.body))
    assert through.headers.get("content-type") == direct.headers.get("content-type")
    sent, arrived = edge.upstream.seen[-2:]
    assert (arrived.body_bytes, arrived.body_digest) == (size, digest(body)) == (sent.body_bytes, sent.body_digest)
    await edge.bench.settled()
    by = moved(before, await edge.bench.metrics())
    routed = size > 0
    assert through.worker == ("a" if routed else None)
    assert by("headway_decisions_total", outcome="routed") == routed == by("headway_decisions_total")
    assert by("headway_requests_ended_total") == routed
    assert by("headway_passed_total", reason="no_body") == (not routed) == by("headway_passed_total")
    reason = ungraded_as(script, modes[1])
    assert by("headway_requests_ended_total", source="access_log") == routed
    assert by("headway_predictions_graded_total") == (routed and reason is None)
    assert by("headway_ungraded_total") == (routed and reason is not None)
    if routed and reason is not None:
        assert by("headway_ungraded_total", reason=reason) == 1
    assert by("headway_bugs_total") == 0


@pytest.mark.parametrize("denied", [0, 1, 100_000])
@pytest.mark.parametrize("size", [0, 4 << 10, 300_000])
@pytest.mark.parametrize("modes", PAIRS, ids="-".join)
async def test_what_a_filter_before_us_answers_comes_through(
    edge: Edge, modes: tuple[str, str], size: int, denied: int
) -> None:
    """Envoy shows us its answer without ever having shown us the request."""
    seen = len(edge.upstream.seen)
    before = await edge.bench.metrics()
    answer = await edge.send(edge.url(modes), prompt(size), "streamed", x_denied=str(denied))
    assert (answer.status, digest(answer.body)) == (401, digest(b"no" * denied))
    assert len(edge.upstream.seen) == seen
    await edge.bench.settled()
    by = moved(before, await edge.bench.metrics())
    assert by("headway_decisions_total") == by("headway_passed_total") == by("headway_bugs_total") == 0


FAULTS = {  # script -> why there is no grade; None: there is one
    "late 2": None,
    "slow 2": None,
    "interim": None,
    "cut 3": None,
    "reset": "unanswered",
    "full 503": "error",
    "full 429": "error",
    "mute 503": "error",
    "mute 429": "error",
    "mute 500": "error",
}


@pytest.mark.parametrize("script", FAULTS)
@pytest.mark.parametrize("size", [4 << 10, 300_000])
@pytest.mark.parametrize("modes", PAIRS, ids="-".join)
async def test_whatever_an_engine_does_its_client_sees_that_and_one_counter_moves(
    edge: Edge, modes: tuple[str, str], size: int, script: str
) -> None:
    word, _, number = script.partition(" ")
    body = prompt(size)
    before = await edge.bench.metrics()
    got = b""
    status = 0
    broken = False
    try:
        headers = {"x-script": script}
        url = edge.url(modes) + CHAT
        async with edge.bench.http.post(url, data=io.BytesIO(body), headers=headers) as response:
            status = response.status
            async for piece in response.content.iter_any():
                got += piece
    except aiohttp.ClientPayloadError:
        broken = True
    assert edge.upstream.seen[-1].body_digest == digest(body)
    assert broken == (word == "cut")
    match word:
        case "cut":
            assert (status, got) == (200, b"".join(b": %d\n" % count + TOKEN for count in range(3)))
        case "reset":
            assert status == 503  # Envoy's own
        case "full":
            assert (status, got) == (int(number), FULL)
        case "mute":
            assert (status, got) == (int(number), b"")
        case _:
            assert (status, got.count(TOKEN), got.endswith(DONE)) == (200, 20, True)
    await edge.bench.settled()
    by = moved(before, await edge.bench.metrics())
    reason = "unseen" if modes[1] == "NONE" else FAULTS[script]
    assert by("headway_decisions_total", outcome="routed") == 1 == by("headway_decisions_total")
    assert by("headway_requests_ended_total", source="access_log") == 1 == by("headway_requests_ended_total")
    assert by("headway_predictions_graded_total") == (reason is None)
    assert by("headway_ungraded_total") == (reason is not None)
    if reason is not None:
        assert by("headway_ungraded_total", reason=reason) == 1
    refused = number in ("503", "429")
    assert by("headway_engine_refusals_total") == refused
    assert by("headway_engine_refusals_total", worker="a", status=number) == refused
    assert by("headway_requests_retried_total") == (number == "503")
    assert by("headway_bugs_total") == 0


@pytest.mark.parametrize("phase", ["uploading", "waiting", "streaming"])
@pytest.mark.parametrize("size", [4 << 10, 300_000])
@pytest.mark.parametrize("modes", PAIRS, ids="-".join)
async def test_a_client_that_leaves_is_counted_for_what_it_was(
    edge: Edge, modes: tuple[str, str], size: int, phase: str
) -> None:
    before = await edge.bench.metrics()
    gone, seen = edge.upstream.broken_off, len(edge.upstream.seen)
    client = RawClient(edge.ports[modes])
    body = prompt(size)
    await client.send_request(body, part=0.5 if phase == "uploading" else 1.0, x_script="paced 100000")
    match phase:
        case "uploading":
            await until(lambda: streams_open(edge), 5, "stream to the filter, or one that is over")
            await asyncio.sleep(0.1)
        case "waiting":

            async def arrived() -> bool:
                return len(edge.upstream.seen) > seen

            await until(arrived, 5, "arrival")
        case _:
            await client.receive_until(TOKEN)
    client.close()

    async def heard() -> bool:
        return edge.upstream.broken_off > gone

    if phase != "uploading":
        await until(heard, 5, "end at the engine")
    await edge.bench.settled()
    by = moved(before, await edge.bench.metrics())
    # Without its body a request is decided as soon as its headers are there.
    routed = phase != "uploading" or modes[0] in ("STREAMED", "NONE")
    assert by("headway_decisions_total", outcome="routed") == routed == by("headway_decisions_total")
    assert by("headway_requests_ended_total") == routed
    outcomes = by("headway_predictions_graded_total") + by("headway_ungraded_total")
    assert outcomes == routed
    if modes[1] == "NONE":
        assert by("headway_ungraded_total", reason="unseen") == routed
    elif phase == "streaming":
        assert by("headway_predictions_graded_total") == 1
    elif phase == "uploading":
        assert by("headway_ungraded_total", reason="given_up") == routed
    assert by("headway_bugs_total") == 0


async def streams_open(edge: Edge) -> bool:
    return await edge.bench.metric("headway_streams_open") > 0 or await edge.bench.metric("headway_decisions_total") > 0


@pytest.mark.parametrize("modes", PAIRS, ids="-".join)
class TestNoneOfOurBusiness:
    """Passed on whole, whatever it is; counted; nothing stays open."""

    async def passed_on(self, edge: Edge, before: Counts, requests: int = 1) -> None:
        await edge.bench.settled()
        by = moved(before, await edge.bench.metrics())
        assert by("headway_passed_total", reason="not_ours") == requests == by("headway_passed_total")
        assert by("headway_decisions_total") == by("headway_ungraded_total") == by("headway_bugs_total") == 0

    @pytest.mark.parametrize("script", ["plain", "streamed", "empty", "error"])
    async def test_a_get(self, edge: Edge, modes: tuple[str, str], script: str) -> None:
        before = await edge.bench.metrics()
        direct = await edge.send(edge.direct, None, script, "/v1/models", "GET")
        through = await edge.send(edge.url(modes), None, script, "/v1/models", "GET")
        assert (through.status, through.body) == (direct.status, direct.body)
        await self.passed_on(edge, before)

    @pytest.mark.parametrize("size", [0, 300_000, 5 << 20])
    async def test_a_post_to_another_path(self, edge: Edge, modes: tuple[str, str], size: int) -> None:
        """Several times: where some of it came twice, it was one time in five."""
        before = await edge.bench.metrics()
        body = random.Random(size).randbytes(size)
        for _ in range(3):
            through = await edge.send(edge.url(modes), body, "plain", "/v1/files")
            assert through.status == 200
            assert edge.upstream.seen[-1].body_digest == digest(body)
        await self.passed_on(edge, before, requests=3)

    async def test_a_grpc_call(self, edge: Edge, modes: tuple[str, str]) -> None:
        """Many messages in both directions, and its trailers, without which it would have no status."""
        before = await edge.bench.metrics()
        options = [("grpc.max_receive_message_length", 1 << 22)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.ports[modes]}", options=options) as channel:
            call: Any = channel.stream_stream(f"/{GRPC_SERVICE}/Both")()
            started_s = time.monotonic()
            for number in range(20):
                message = bytes([number]) * (number * 20_000)
                await call.write(message)
                assert await call.read() == message
            assert time.monotonic() - started_s < 3
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            assert ("x-ended", "well") in dict(await call.trailing_metadata()).items()
        await self.passed_on(edge, before)

    async def test_a_websocket(self, edge: Edge, modes: tuple[str, str]) -> None:
        before = await edge.bench.metrics()
        url = f"{edge.url(modes)}/v1/realtime"
        headers = {"x-script": "websocket"}
        started_s = time.monotonic()
        async with edge.bench.http.ws_connect(url, headers=headers, max_msg_size=16 << 20) as socket:
            for size in (1, 1000, 100_000, 1_000_000):
                await socket.send_bytes(b"a" + b"b" * size)
                message = await socket.receive(timeout=10)
                assert message.type is aiohttp.WSMsgType.BINARY
                assert digest(message.data) == digest(b"b" * size + b"a")
            assert time.monotonic() - started_s < 3
        await self.passed_on(edge, before)


def chunked(body: bytes, trailers: str, path: str) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: e2e\r\ntransfer-encoding: chunked\r\ntrailer: x-checksum\r\n"
        "x-script: streamed\r\nconnection: close\r\n\r\n"
    )
    pieces = (body[start : start + 50_000] for start in range(0, len(body), 50_000))
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return head.encode() + chunks + b"0\r\n" + trailers.encode() + b"\r\n"


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
@pytest.mark.parametrize("size", [0, 300_000])
@pytest.mark.parametrize("trailers", ["", "x-checksum: abc\r\n"])
@pytest.mark.parametrize("modes", [*PAIRS, WITHOUT_RETRIES], ids="-".join)
async def test_a_chunked_upload(edge: Edge, modes: tuple[str, str], trailers: str, size: int, path: str) -> None:
    """Also one that turns out to be empty, and one that ends with trailers.

    A fault of Envoy (#45470, seen in 1.40): where its route retries, full duplex and trailers together send the body
    twice. Nothing that a filter can answer changes it.
    """
    copies = 2 if modes[0] == FULL_DUPLEX and trailers and size else 1
    body = prompt(size)
    before = await edge.bench.metrics()
    client = RawClient(edge.ports[modes])
    await client.send(chunked(body, trailers, path))
    got = b""
    while piece := await client.receive():
        got += piece
    client.close()
    assert got.startswith(b"HTTP/1.1 200")
    assert got.count(TOKEN) == 20
    assert DONE in got
    arrived = edge.upstream.seen[-1]
    assert (arrived.body_bytes, arrived.body_digest) == (copies * size, digest(copies * body))
    await edge.bench.settled()
    by = moved(before, await edge.bench.metrics())
    # Of a body that never came, an Envoy that shows no answers says nothing at all.
    unknown = not size and trailers and path == CHAT and modes in (("BUFFERED", "NONE"), ("BUFFERED_PARTIAL", "NONE"))
    assert by("headway_decisions_total") + by("headway_passed_total") == (not unknown)
    assert by("headway_bugs_total") == 0
    if size and path == CHAT:
        assert by("headway_decisions_total", outcome="routed") == 1


@pytest.mark.parametrize("modes", [pair for pair in PAIRS if pair[0] not in ("STREAMED", "NONE")], ids="-".join)
@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ({"model": "sim", "messages": [], "max_queue_wait_s": -1}, 400),
        ({"model": "sim", "messages": [{"role": "user", "content": "x" * 200_000}], "max_queue_wait_s": -1}, 400),
        ({"model": "nobody's", "messages": []}, "unknown_model"),
        ({"model": "nobody's", "messages": [{"role": "user", "content": "x" * 200_000}]}, "unknown_model"),
        ([1, 2, 3], "unreadable"),
    ],
    ids=["bad wish", "bad wish, long", "unknown model", "unknown model, long", "unreadable"],
)
async def test_what_is_not_routed(edge: Edge, modes: tuple[str, str], body: Any, outcome: object) -> None:
    before = await edge.bench.metrics()
    raw = json.dumps(body).encode()
    edge.upstream.seen.clear()
    answer = await edge.send(edge.url(modes), raw, "streamed")
    await edge.bench.settled()
    by = moved(before, await edge.bench.metrics())
    if outcome == 400:
        assert answer.status == 400
        assert answer.headers["x-headway-reason"] == "bad_request"
        assert answer.json["error"]["param"] == "max_queue_wait_s"
        assert not edge.upstream.seen
        assert by("headway_decisions_total", outcome="bad_request") == 1
    else:
        assert (answer.status, answer.complete, answer.worker) == (200, True, None)
        assert edge.upstream.seen[-1].body_digest == digest(raw)
        assert by("headway_passed_total", reason=str(outcome)) == 1


async def test_many_at_once_in_every_mode(edge: Edge) -> None:
    """Ten of each at the same time: none gets what is another's."""

    async def one(number: int, modes: tuple[str, str]) -> None:
        body = prompt(20_000 + 1000 * number)
        answer = await edge.send(edge.url(modes), body, "paced 20", x_number=str(number))
        assert (answer.status, answer.complete, answer.body.count(TOKEN)) == (200, True, 20)
        assert answer.worker == "a"

    edge.upstream.seen.clear()
    await asyncio.gather(*(one(number, modes) for number, modes in enumerate(PAIRS * 10)))
    for seen in edge.upstream.seen:
        assert seen.body_digest == digest(prompt(20_000 + 1000 * int(seen.headers["x-number"])))
    assert len(edge.upstream.seen) == 10 * len(PAIRS)
    await edge.bench.settled()
