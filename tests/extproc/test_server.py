"""The gRPC services in process: what Envoy gets, whatever goes wrong on either side."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc import judge as judge_module
from extproc import replies, wire
from extproc import server as server_module
from extproc.exchange import Reply
from extproc.ledger import USAGE_NAMESPACE
from extproc.pb.ext_proc_pb2 import ProcessingResponse
from extproc.server import HEALTH_NAMES
from predictor.admission import Limits, Reason, Refusal, RetryAfter
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis
from tests.fakes.envoy import (
    FIRST_TOKEN,
    Envoy,
    destination_header,
    log_entry,
    raw_body,
    request_body,
    request_headers,
    response_body,
)
from tests.fakes.filter import WORKERS, Filter
from tests.fakes.waiting import until

OK = grpc.StatusCode.OK


@pytest.fixture
async def filter_() -> AsyncIterator[Filter]:
    async with Filter() as filter_:
        yield filter_


@pytest.fixture
async def envoy(filter_: Filter) -> AsyncIterator[Envoy]:
    async with Envoy(filter_.port) as envoy:
        yield envoy


def metadata(reply: ProcessingResponse) -> dict[str, dict[str, Any]]:
    return {name: dict(value.struct_value) for name, value in reply.dynamic_metadata.fields.items()}


async def test_a_routed_request_from_headers_to_the_first_token(filter_: Filter, envoy: Envoy) -> None:
    answers, code = await envoy.exchange(request_headers(), request_body(), response_body())
    assert code is OK
    assert [answer.WhichOneof("response") for answer in answers] == ["request_headers", "request_body", "response_body"]
    chosen = destination_header(answers[1])
    told = metadata(answers[1])
    assert chosen is not None
    assert told["envoy.lb"] == {"x-gateway-destination-endpoint": chosen}
    assert set(chosen.split(",")) == set(WORKERS.values())
    assert WORKERS[told["headway"]["worker"]] == chosen.split(",")[0]
    ticket = told["headway"]["ticket"]
    assert filter_.fleet.ticket(ticket) is not None
    assert len(filter_.log.of("graded")) == 1
    usage = {"prompt": 3.0, "cached": 0.0, "output": 9.0}
    await envoy.report([log_entry({"headway": {"ticket": ticket}, USAGE_NAMESPACE: usage}).SerializeToString()])
    assert (filter_.fleet.in_flight, len(filter_.ledger)) == (0, 0)
    (ended,) = filter_.log.of("ended")
    assert ended["output_tokens"] == 9


async def test_the_stream_is_closed_with_the_first_token_by_us(filter_: Filter, envoy: Envoy) -> None:
    stream = envoy.open()
    for message in (request_headers(), request_body(), response_body(b": keep-alive\n\n"), response_body()):
        await stream.write(message)
        assert await stream.read() is not grpc.aio.EOF
    assert await stream.read() is grpc.aio.EOF  # without a done_writing of ours
    assert await stream.code() is OK
    assert filter_.processor.open_streams == 0


async def test_a_bad_wish_is_answered_at_once(filter_: Filter, envoy: Envoy) -> None:
    headers = request_headers(x_max_queue_wait_s="4.99")
    answers, code = await envoy.exchange(headers, request_body())
    assert code is OK
    refusal = answers[1].immediate_response
    assert refusal.status.code == 400
    assert msgspec.json.decode(refusal.body)["error"]["param"] == "x-max-queue-wait-s"
    assert filter_.fleet.in_flight == 0


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ((request_headers("/health"),), "not_ours"),
        ((request_headers(), raw_body(b"{")), "unreadable"),
        ((request_headers(), request_body(model="other")), "unknown_model"),
    ],
)
async def test_what_is_passed_on_is_counted(
    filter_: Filter, envoy: Envoy, messages: tuple[bytes, ...], reason: str
) -> None:
    answers, code = await envoy.exchange(*messages)
    assert (code, len(answers)) == (OK, len(messages))
    assert filter_.counted("passed", reason=reason) == 1


async def test_a_body_beyond_grpcs_own_limit_is_accepted(filter_: Filter, envoy: Envoy) -> None:
    answers, code = await envoy.exchange(request_headers(), request_body(prompt="x" * (6 << 20)))
    assert code is OK
    assert destination_header(answers[1]) is not None
    (decision,) = filter_.log.of("decision")
    assert decision["prompt_tokens"] == 6 << 20


class Bug(Exception):
    pass


def broken(*args: object, **fields: object) -> Any:
    raise Bug("on purpose")


def broken_encode(reply: Reply) -> bytes:
    """Only the routing reply: the first one is needed to get there."""
    if getattr(reply, "set_headers", ()):
        raise Bug("on purpose")
    return ENCODE(reply)


ENCODE = wire.encode
BREAKS: dict[str, Callable[[Filter, pytest.MonkeyPatch], None]] = {
    "parse": lambda filter_, patch: patch.setattr(wire, "parse_request", broken),
    "read": lambda filter_, patch: patch.setattr(wire, "read", broken),
    "decide": lambda filter_, patch: patch.setattr(filter_.judge, "decide", broken),
    "wish": lambda filter_, patch: patch.setattr(judge_module, "read_wishes", broken),
    "block sizes": lambda filter_, patch: patch.setattr(filter_.fleet, "hash_families", broken),
    "tokenize": lambda filter_, patch: patch.setattr(filter_.reader, "_make", broken),
    "place": lambda filter_, patch: patch.setattr(filter_.fleet, "place", broken),
    "report": lambda filter_, patch: patch.setattr(filter_.judge, "_report", broken),
    "reply": lambda filter_, patch: patch.setattr(replies, "route", broken),
    "write": lambda filter_, patch: patch.setattr(wire, "encode", broken_encode),
    "serialize": lambda filter_, patch: patch.setattr(filter_.judge, "_log", SimpleNamespace(later=broken)),
    "first token": lambda filter_, patch: patch.setattr(filter_.fleet, "first_token", broken),
    "grade": lambda filter_, patch: patch.setattr(filter_.metrics, "grade", broken),
}


@pytest.mark.parametrize("place", BREAKS)
async def test_a_bug_anywhere_ends_the_stream_with_ok_and_leaves_no_ticket(
    filter_: Filter, envoy: Envoy, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    BREAKS[place](filter_, monkeypatch)
    answers, code = await envoy.exchange(request_headers(), request_body(), response_body())
    assert code is OK
    assert len(answers) < 3
    assert filter_.counted("bugs", where="stream") == 1
    assert filter_.counted("passed", reason="bug") == 1
    (line,) = filter_.log.of("bug")
    assert "Bug: on purpose" in str(line["trace"])
    if place in ("first token", "grade"):
        # Envoy goes on with a routed request: its end is reported as ever.
        ticket = metadata(answers[1])["headway"]["ticket"]
        await envoy.report([log_entry({"headway": {"ticket": ticket}}).SerializeToString()])
    await until(lambda: filter_.processor.open_streams == 0)
    filter_.ledger.give_up_silent(0)
    assert (filter_.fleet.in_flight, len(filter_.ledger)) == (0, 0)
    monkeypatch.undo()
    _, code = await envoy.exchange(request_headers(), request_body(), response_body())
    assert code is OK
    assert len(filter_.log.of("graded")) == 1


async def test_a_bug_in_the_release_is_caught_as_well(
    filter_: Filter, envoy: Envoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filter_.ledger, "stream_closed", broken)
    _, code = await envoy.exchange(request_headers(), request_body(), response_body())
    assert code is OK
    assert filter_.counted("bugs", where="release") == 1


@pytest.mark.parametrize("after", range(4))
async def test_a_client_that_leaves_at_any_point_leaves_no_ticket(filter_: Filter, envoy: Envoy, after: int) -> None:
    messages = (request_headers(), request_body(), response_body(b": keep-alive\n\n"))
    stream = envoy.open()
    for message in messages[:after]:
        await stream.write(message)
        await stream.read()
    stream.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await stream.code()
    await until(lambda: filter_.processor.open_streams == 0)
    filter_.ledger.give_up_silent(0)
    assert (filter_.fleet.in_flight, len(filter_.ledger)) == (0, 0)
    assert filter_.counted("bugs", where="stream") == 0


async def test_a_client_that_leaves_while_we_decide_leaves_no_ticket(
    filter_: Filter, envoy: Envoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    deciding = asyncio.Event()
    decide = filter_.judge.decide

    async def slow(*args: Any) -> Any:
        verdict = await decide(*args)
        deciding.set()
        await asyncio.sleep(30)
        return verdict

    monkeypatch.setattr(filter_.judge, "decide", slow)
    stream = envoy.open()
    await stream.write(request_headers())
    await stream.read()
    await stream.write(request_body())
    await asyncio.wait_for(deciding.wait(), 10)
    assert filter_.fleet.in_flight == 1
    stream.cancel()
    await until(lambda: filter_.processor.open_streams == 0)
    filter_.ledger.give_up_silent(0)
    assert (filter_.fleet.in_flight, len(filter_.ledger)) == (0, 0)


@pytest.mark.parametrize("garbage", [b"\xff", b"\x12\xff\xff\xff\xff\x0f", b"garbage", b"\x0a\x05ab"])
async def test_garbage_on_the_stream_is_a_counted_bug_and_ok(filter_: Filter, envoy: Envoy, garbage: bytes) -> None:
    _, code = await envoy.exchange(garbage)
    assert code is OK
    assert filter_.counted("bugs", where="stream") == 1


async def test_an_empty_message_is_ignored(filter_: Filter, envoy: Envoy) -> None:
    stream = envoy.open()
    await stream.write(b"")
    await stream.write(request_headers())
    answer = await stream.read()
    assert isinstance(answer, ProcessingResponse)
    assert answer.WhichOneof("response") == "request_headers"
    stream.cancel()
    await until(lambda: filter_.processor.open_streams == 0)


async def test_garbage_in_the_access_log_does_not_end_its_stream(filter_: Filter, envoy: Envoy) -> None:
    answers, _ = await envoy.exchange(request_headers(), request_body(), response_body(FIRST_TOKEN))
    ticket = metadata(answers[1])["headway"]["ticket"]
    entry = log_entry({"headway": {"ticket": ticket}}).SerializeToString()
    await envoy.report([b"\xff\xff", b"", entry, b"\x12\x05abc"])
    assert filter_.fleet.in_flight == 0
    assert filter_.counted("bugs", where="access_log") == 2
    assert filter_.counted("access_log_entries", kind="tracked") == 1


async def test_nonsense_in_the_access_log_neither_stops_the_loop_nor_fills_the_log(
    filter_: Filter, envoy: Envoy
) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def messages() -> AsyncIterator[bytes]:
        counting = asyncio.create_task(count())
        for _ in range(3_000):
            yield b"\xff"
        counting.cancel()

    logs = server_module.AccessLog(filter_.ledger, filter_.metrics, filter_.log)
    await logs.stream(messages())
    assert turns >= 3_000 / server_module._ENTRIES_A_TURN - 1
    assert filter_.counted("bugs", where="access_log") == 3_000
    assert 1 <= len(filter_.log.of("bug")) <= 5


async def health(envoy: Envoy, name: str) -> int:
    stub = health_pb2_grpc.HealthStub(envoy.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return int(response.status)


SERVING = int(health_pb2.HealthCheckResponse.SERVING)
NOT_SERVING = int(health_pb2.HealthCheckResponse.NOT_SERVING)


async def test_every_health_name_is_served_and_no_other(filter_: Filter, envoy: Envoy) -> None:
    assert HEALTH_NAMES == ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
    assert [await health(envoy, name) for name in HEALTH_NAMES] == [SERVING] * 4
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health(envoy, "other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_draining_server_is_alive_but_not_ready_and_lets_open_streams_finish(
    filter_: Filter, envoy: Envoy
) -> None:
    stream = envoy.open()
    await stream.write(request_headers())
    await stream.read()
    stopping = asyncio.create_task(filter_.stop(0.05, 20.0))
    await asyncio.sleep(0.2)
    assert [await health(envoy, name) for name in HEALTH_NAMES] == [NOT_SERVING, SERVING, NOT_SERVING, NOT_SERVING]
    assert not stopping.done()
    await stream.write(request_body())
    assert destination_header(await answer_of(stream)) is not None
    await stream.write(response_body())
    await answer_of(stream)
    assert await stream.code() is OK
    await asyncio.wait_for(stopping, 10)
    assert len(filter_.log.of("graded")) == 1


async def answer_of(stream: Any) -> ProcessingResponse:
    answer = await stream.read()
    assert isinstance(answer, ProcessingResponse)
    return answer


async def test_a_stream_that_never_ends_does_not_hold_up_the_drain(filter_: Filter, envoy: Envoy) -> None:
    stream = envoy.open()
    for message in (request_headers(), request_body()):
        await stream.write(message)
        await stream.read()
    await asyncio.wait_for(filter_.stop(0.0, 0.2), 10)
    assert await stream.code() is not OK
    filter_.ledger.give_up_silent(0)
    assert (filter_.fleet.in_flight, len(filter_.ledger)) == (0, 0)


async def test_a_port_that_is_taken_is_an_os_error(filter_: Filter) -> None:
    logs = server_module.AccessLog(filter_.ledger, filter_.metrics, filter_.log)
    other = server_module.Server(filter_.processor, logs, filter_.metrics, filter_.log)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{filter_.port}"):
        await other.start(f"127.0.0.1:{filter_.port}")
    await other.stop(0.0, 0.0)


async def test_pings_while_an_exchange_waits_for_its_first_token_do_not_end_it(filter_: Filter) -> None:
    """Envoy's keepalive: gRPC's default takes the fourth ping without data for abuse."""
    options = [
        ("grpc.keepalive_time_ms", 1000),  # the client's library sends none faster
        ("grpc.http2.min_time_between_pings_ms", 10),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with Envoy(filter_.port, options) as envoy:
        stream = envoy.open()
        for message in (request_headers(), request_body()):
            await stream.write(message)
            await stream.read()
        await asyncio.sleep(4.5)
        await stream.write(response_body())
        await stream.read()
        await stream.done_writing()
        assert await stream.code() is OK


async def test_hundreds_of_streams_at_once_leave_nothing(filter_: Filter, envoy: Envoy) -> None:
    async def one(number: int) -> None:
        messages = [request_headers(), request_body(), response_body()][: 1 + number % 3]
        _, code = await envoy.exchange(*messages)
        assert code is OK

    await asyncio.gather(*(one(number) for number in range(150)))
    await until(lambda: filter_.processor.open_streams == 0)
    filter_.ledger.give_up_silent(0)
    answered = len(filter_.log.of("graded"))
    assert answered == 50
    assert filter_.fleet.in_flight == len(filter_.ledger) == answered  # these wait for the access log


# Requests that are held


@pytest.fixture
async def holding(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Filter, Envoy]]:
    """A filter that holds all requests for a minute."""
    async with Filter(hold_s=60.0) as filter_, Envoy(filter_.port) as envoy:
        best = Forecast("a", 3, 0, 0.0, 50.0, 1.0, 0.0, 51.0, Basis.CURVE, 9000, exact_tokens=True)
        refusal = Refusal(Reason.QUEUE_WAIT, Limits(10.0), RetryAfter(40.0, 40.0), best, (best,))
        monkeypatch.setattr(filter_.fleet, "place", lambda *_: refusal)
        yield filter_, envoy


@pytest.mark.parametrize("how", ["half-closed", "cancelled"])
async def test_a_client_that_leaves_while_it_is_held_is_seen_to_have_gone(
    holding: tuple[Filter, Envoy], how: str
) -> None:
    """Envoy only ends its own side of the stream, and waits for ours."""
    filter_, envoy = holding
    stream = envoy.open()
    await stream.write(request_headers())
    await stream.read()
    await stream.write(request_body())
    await until(lambda: len(filter_.holding) == 1)
    if how == "cancelled":
        stream.cancel()
    else:
        await stream.done_writing()
        assert await stream.code() is OK
    await until(lambda: len(filter_.holding) == filter_.processor.open_streams == 0)
    assert filter_.counted("held", pool="m", outcome="gone") == 1
    assert filter_.counted("bugs", where="stream") == 0


async def test_what_comes_while_a_request_is_held_is_answered_after_it(
    holding: tuple[Filter, Envoy], monkeypatch: pytest.MonkeyPatch
) -> None:
    filter_, envoy = holding
    stream = envoy.open()
    await stream.write(request_headers())
    await stream.read()
    await stream.write(request_body())
    await until(lambda: len(filter_.holding) == 1)
    await stream.write(response_body())
    monkeypatch.undo()
    answer = await stream.read()
    assert isinstance(answer, ProcessingResponse)
    assert destination_header(answer) is not None
    answer = await stream.read()
    assert isinstance(answer, ProcessingResponse)
    assert answer.WhichOneof("response") == "response_body"
    assert await stream.code() is OK
