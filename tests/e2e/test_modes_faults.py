"""Full duplex when things go wrong: envoy/full_duplex.yaml with bursts, slow peers, lost clients and a lost filter."""

import asyncio
import contextlib
import copy
import io
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest
import pytest_asyncio

from extproc import wire
from extproc.exchange import (
    Continue,
    Echo,
    Phase,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from extproc.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.session import MAX_BODY_BYTES
from tests.e2e.harness import (
    CHAT,
    FULL_DUPLEX,
    Answer,
    Bench,
    RawClient,
    chat,
    cluster_of,
    ext_proc_of,
    manager_of,
    quick,
    read,
    running,
    send_to,
    set_modes,
    until,
    words,
)
from tests.e2e.scripted import DONE, TOKEN, Scripted, digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXT_PROC = "envoy.filters.http.ext_proc"
NO_PROBES = {"probe": {"interval_s": 0}}


@dataclass(slots=True)
class Duplex:
    bench: Bench
    upstream: Scripted
    response_mode: str

    async def send(self, body: Any, script: str = "streamed", path: str = CHAT) -> Answer:
        data = io.BytesIO(body) if isinstance(body, bytes) else body
        url = self.bench.stack.url + path
        async with self.bench.http.post(url, data=data, headers={"x-script": script}) as response:
            return await read(response)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[FULL_DUPLEX, "STREAMED"])
async def duplex(request: pytest.FixtureRequest) -> AsyncIterator[Duplex]:
    async with Scripted("a") as upstream:

        def change(config: dict[str, Any]) -> None:
            send_to(config, upstream.port)
            if request.param != FULL_DUPLEX:  # as the file has it
                set_modes(config, FULL_DUPLEX, request.param)

        worker = {"name": "a", "endpoint": upstream.endpoint}
        async with running([], NO_PROBES, {"workers": [worker]}, change, "full_duplex.yaml") as bench:
            yield Duplex(bench, upstream, request.param)


def prompt(size: int) -> bytes:
    frame = b'{"model":"sim","stream":true,"max_tokens":2,"messages":[{"role":"user","content":"hi"}],"pad":"%s"}'
    noise = random.Random(size).randbytes(1 << 16).hex().encode()
    return frame % (noise * (size // len(noise) + 1))[: size - len(frame % b"")]


def expected(tokens: int) -> bytes:
    return b"".join(b": %d\n" % number + TOKEN for number in range(tokens)) + DONE


def dechunked(raw: bytes) -> bytes:
    _, _, rest = raw.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


async def test_eight_bursts_of_3000_chunks(duplex: Duplex) -> None:
    answers = await asyncio.gather(*(duplex.send(prompt(4096), "streamed 3000") for _ in range(8)))
    for answer in answers:
        assert digest(answer.body) == digest(expected(3000))
        assert answer.worker == "a"
    await duplex.bench.settled()


async def test_a_slow_reader_misses_nothing(duplex: Duplex) -> None:
    client = RawClient(duplex.bench.stack.listener_port, receive_buffer=4096)
    await client.send_request(prompt(4096), x_script="streamed 3000", connection="close")
    got = b""
    while piece := await client.receive(4096):
        got += piece
        await asyncio.sleep(0.005)
    client.close()
    assert digest(dechunked(got)) == digest(expected(3000))
    await duplex.bench.settled()


async def test_a_slow_upload_is_decided_when_it_is_whole(duplex: Duplex) -> None:
    body = prompt(300_000)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 20_000):
            yield body[start : start + 20_000]
            await asyncio.sleep(0.02)

    answer = await duplex.send(pieces())
    assert (answer.status, answer.worker, answer.complete) == (200, "a", True)
    assert duplex.upstream.seen[-1].body_digest == digest(body)
    await duplex.bench.settled()


async def test_an_engine_that_answers_before_the_body_is_there(duplex: Duplex) -> None:
    answer = await duplex.send(prompt(5 << 20), "early")
    assert answer.status == 400
    await duplex.bench.settled()


@pytest.mark.parametrize("path", [CHAT, "/v1/files"])
async def test_a_body_above_what_is_kept_passes_unharmed(duplex: Duplex, path: str) -> None:
    before = await duplex.bench.metric("headway_passed_total", reason="too_large")
    body = prompt(MAX_BODY_BYTES + (1 << 20))
    answer = await duplex.send(body, "plain", path)
    assert (answer.status, answer.worker) == (200, None)
    assert duplex.upstream.seen[-1].body_digest == digest(body)
    await duplex.bench.settled()
    assert await duplex.bench.metric("headway_passed_total", reason="too_large") == before + (path == CHAT)


@pytest.mark.parametrize("abruptly", [False, True])
@pytest.mark.parametrize("phase", ["uploading", "waiting", "streaming"])
async def test_a_client_that_leaves(duplex: Duplex, phase: str, abruptly: bool) -> None:
    """Whenever it does: nothing stays booked or open, and the engine hears of it."""
    broken_off = duplex.upstream.broken_off
    seen = len(duplex.upstream.seen)
    client = RawClient(duplex.bench.stack.listener_port)
    body = prompt(300_000)
    match phase:
        case "uploading":
            await client.send_request(body, part=0.5)
            await asyncio.sleep(0.2)
        case "waiting":
            await client.send_request(body, x_script="paced 100000")
            await until(lambda: arrived(duplex, seen + 1), 5, "arrival")
        case _:
            await client.send_request(body, x_script="paced 100000")
            await client.receive_until(TOKEN)
    client.close(abruptly)
    await duplex.bench.settled(5)

    async def heard() -> bool:
        return duplex.upstream.broken_off == broken_off + (phase != "uploading")

    await until(heard, 5, "end at the engine")
    assert len(duplex.upstream.seen) == seen + (phase != "uploading")
    assert (await duplex.send(prompt(4096))).complete


async def arrived(duplex: Duplex, count: int) -> bool:
    return len(duplex.upstream.seen) >= count


async def test_two_hundred_clients_that_leave_at_random(duplex: Duplex) -> None:
    chance = random.Random(4)

    async def one() -> None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(chance.uniform(0.001, 0.4)):
                await duplex.send(prompt(chance.choice((2000, 100_000))), "paced 20")

    for _ in range(4):
        await asyncio.gather(*(one() for _ in range(50)))
    await duplex.bench.settled()
    routed = await duplex.bench.metric("headway_decisions_total", outcome="routed")
    assert await duplex.bench.metric("headway_requests_ended_total") == routed


@pytest.mark.parametrize("size", [1000, 300_000])
async def test_a_bad_wish_is_refused(duplex: Duplex, size: int) -> None:
    seen = len(duplex.upstream.seen)
    answer = await duplex.send(json.dumps(chat("x" * size, max_queue_wait_s=-1)).encode())
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_value")
    assert len(duplex.upstream.seen) == seen
    await duplex.bench.settled()


async def test_a_filter_that_is_killed(duplex: Duplex) -> None:
    """What full duplex costs, fail-open or not: requests that the filter has in hand are lost with it, and some more
    until Envoy's health check finds out; each in a way that its client can see. Later ones pass."""
    bench = duplex.bench
    seen = len(duplex.upstream.seen)
    uploading = RawClient(bench.stack.listener_port)
    await uploading.send_request(prompt(300_000), part=0.5)
    streaming = RawClient(bench.stack.listener_port)
    await streaming.send_request(prompt(4096), x_script="paced 200", connection="close")
    await streaming.receive_until(TOKEN)
    assert bench.stack.filter is not None
    await bench.stack.filter.end(signal.SIGKILL)
    try:
        rest = b""
        with contextlib.suppress(ConnectionError):
            while piece := await streaming.receive():
                rest += piece
        whole = rest.endswith(DONE + b"\r\n0\r\n\r\n")
        # The answer is whole where it was none of the filter's any more.
        assert whole == (duplex.response_mode == "STREAMED"), rest[-200:]
        assert b" 500 " in await uploading.receive_until(b"\r\n\r\n")
        assert len(duplex.upstream.seen) == seen + 1  # nothing of the upload has reached the engine

        async def passed_on() -> bool:
            body = prompt(100_000)
            answer = await duplex.send(body)
            if answer.status == 500:
                return False
            assert (answer.status, answer.worker, answer.complete) == (200, None, True)
            assert duplex.upstream.seen[-1].body_digest == digest(body)
            return True

        await asyncio.wait_for(
            asyncio.gather(bench.stack.filter_seen_healthy(False), *(passed_on() for _ in "abc")), 10
        )
        for _ in range(20):
            assert await passed_on()
    finally:
        uploading.close()
        streaming.close()
        await bench.revive_filter()


async def test_a_refusal_for_want_of_time() -> None:
    """429 in full duplex, also for a long prompt: the client hears why and when, its connection lives, and the engine
    hears nothing."""
    engine = quick("a", prefill_us_per_token=1000, max_num_batched_tokens=256)
    async with running([engine], pool={"learning": {"min_samples": 3}}, envoy_file="full_duplex.yaml") as bench:
        await bench.learn(tokens=(100, 800, 5000))
        ahead = RawClient(bench.stack.listener_port)
        await ahead.send_request(json.dumps(chat(words(15_000, "ahead"))).encode())
        await until(lambda: booked(bench), 5, "booking")
        routed = await bench.metric("headway_decisions_total", outcome="routed")
        client = RawClient(bench.stack.listener_port)
        for size in (10, 20_000, 10):
            started_s = time.monotonic()
            await client.send_request(json.dumps(chat(words(size), max_queue_wait_s=5)).encode())
            told = await client.receive_until(b'"queue_wait_exceeded"}}')
            assert b" 429 " in told
            assert b"\r\nretry-after: " in told
            assert time.monotonic() - started_s < 1.5
        client.close()
        assert await bench.metric("headway_decisions_total", outcome="routed") == routed
        assert await bench.metric("headway_decisions_total", outcome="refused") == 3
        ahead.close()


async def booked(bench: Bench) -> bool:
    return await bench.in_flight() > 0


@contextlib.asynccontextmanager
async def second_filter() -> AsyncIterator[int]:
    """An ext_proc server that sends every piece back as it comes, and changes nothing."""

    async def process(requests: AsyncIterator[ProcessingRequest], context: object) -> AsyncIterator[ProcessingResponse]:
        del context
        async for message in requests:
            match wire.read(message):
                case RequestHeaders():
                    yield wire.write(Continue(Phase.REQUEST_HEADERS))
                case RequestBody(piece, end):
                    yield wire.write(Echo(Phase.REQUEST_BODY, piece, end))
                case RequestTrailers():
                    yield wire.write(Continue(Phase.REQUEST_TRAILERS))
                case ResponseHeaders():
                    yield wire.write(Continue(Phase.RESPONSE_HEADERS))
                case ResponseBody(piece, end, _, _):
                    yield wire.write(Echo(Phase.RESPONSE_BODY, piece, end))
                case ResponseTrailers():
                    yield wire.write(Continue(Phase.RESPONSE_TRAILERS))

    handler: grpc.RpcMethodHandler[ProcessingRequest, ProcessingResponse] = grpc.stream_stream_rpc_method_handler(
        process, request_deserializer=wire.parse_request, response_serializer=wire.serialize_response
    )
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 66 << 20)])
    service = {wire.PROCESS_METHOD: handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.PROCESSOR_SERVICE, service),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(0.1)


@pytest.mark.parametrize("ours", ["BUFFERED", FULL_DUPLEX])
@pytest.mark.parametrize("place", ["before", "after"])
async def test_another_full_duplex_filter_in_the_chain(place: str, ours: str) -> None:
    """Bodies above 6.2 KB were cut short by Envoy before 1.38 (#41654)."""
    async with Scripted("a") as upstream, second_filter() as port:

        def change(config: dict[str, Any]) -> None:
            send_to(config, upstream.port)
            clusters = config["static_resources"]["clusters"]
            other = copy.deepcopy(cluster_of(config, "headway_access_log"))
            other["name"] = other["load_assignment"]["cluster_name"] = "second"
            clusters.append(other)
            send_to(config, port, cluster="second")
            second = copy.deepcopy(ext_proc_of(config))
            second["grpc_service"]["envoy_grpc"]["cluster_name"] = "second"
            filters = manager_of(config)["http_filters"]
            at = next(number for number, f in enumerate(filters) if f["name"] == EXT_PROC)
            if ours != FULL_DUPLEX:
                set_modes(config, ours, "STREAMED")
            filters.insert(at + (place == "after"), {"name": "second", "typed_config": second})

        worker = {"name": "a", "endpoint": upstream.endpoint}
        async with running([], NO_PROBES, {"workers": [worker]}, change, "full_duplex.yaml") as bench:
            duplex = Duplex(bench, upstream, FULL_DUPLEX)
            for size in (1000, 6_300, 20_000, 300_000, 5 << 20):
                for _ in range(4):
                    body = prompt(size)
                    answer = await duplex.send(body, "streamed 500")
                    assert digest(answer.body) == digest(expected(500))
                    assert answer.worker == "a"
                    assert upstream.seen[-1].body_digest == digest(body)


@pytest.mark.parametrize("allowed", [True, False])
async def test_a_body_is_asked_for(allowed: bool) -> None:
    """Where Envoy allows it, a request is decided as if it had always sent bodies; where not, nothing breaks."""
    async with Scripted("a") as upstream:

        def change(config: dict[str, Any]) -> None:
            send_to(config, upstream.port)
            set_modes(config, "NONE", "NONE")
            ext_proc_of(config)["allow_mode_override"] = allowed

        worker = {"name": "a", "endpoint": upstream.endpoint}
        overrides = {**NO_PROBES, "gateway": {"ask_for_body": True}}
        async with running([], overrides, {"workers": [worker]}, change) as bench:
            duplex = Duplex(bench, upstream, "NONE")
            for size in (1000, 300_000, 5 << 20):
                answer = await duplex.send(prompt(size))
                assert (answer.status, answer.complete) == (200, True)
                assert answer.worker == ("a" if allowed else None)
                assert upstream.seen[-1].body_digest == digest(prompt(size))
            assert (await bench.post(chat(max_queue_wait_s=-1))).status == (400 if allowed else 200)
            assert (await bench.post({}, "/v1/files")).status == 200
            await bench.settled()
            assert await bench.metric("headway_predictions_graded_total") == (3 if allowed else 0)
            assert await bench.metric("headway_passed_total", reason="not_ours") == 1
