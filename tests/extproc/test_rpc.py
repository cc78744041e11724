"""gRPC over our own HTTP/2: spoken to by an HTTP/2 library and by gRPC's own, neither of which shares code with it."""

import asyncio
import contextlib
import gc
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc import http2, rpc
from extproc.rpc import Call, RpcError, RpcServer, Status
from tests.fakes.waiting import until

LIMIT = 1 << 20
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    (":authority", "x"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


def framed(message: bytes, compressed: int = 0) -> bytes:
    return bytes((compressed,)) + struct.pack(">I", len(message)) + message


class Site:
    """A server with methods to be tried, and what became of their calls."""

    def __init__(self, **settings: Any) -> None:
        self.holding = self.cancelled = 0
        self.peer_faults: list[str] = []
        self.bugs: list[BaseException] = []
        self.read: list[bytes] = []
        self.gate = asyncio.Event()
        methods: dict[str, Callable[[Call], Awaitable[None]]] = {
            "/test/Echo": self.echo,
            "/test/Hold": self.hold,
            "/test/Fail": self.fail,
            "/test/Bug": self.break_down,
            "/test/Big": self.big,
        }
        self.server = RpcServer(methods, LIMIT, self, **settings)
        self.port = 0

    def peer_fault(self, what: str, /) -> None:
        self.peer_faults.append(what)

    def bug(self, fault: BaseException, /) -> None:
        self.bugs.append(fault)

    @contextlib.asynccontextmanager
    async def served(self, host: str = "127.0.0.1") -> AsyncIterator["Site"]:
        self.port = await self.server.start(host, 0)
        yield self
        self.gate.set()
        await self.server.stop(0.1)

    async def echo(self, call: Call) -> None:
        async for message in call:
            await call.write(message)

    async def hold(self, call: Call) -> None:
        self.holding += 1
        try:
            await self.gate.wait()
            async for message in call:
                self.read.append(message)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def fail(self, call: Call) -> None:
        raise RpcError(Status.NOT_FOUND, "nothing like 'ä' here: 100 %")

    async def break_down(self, call: Call) -> None:
        raise ZeroDivisionError

    async def big(self, call: Call) -> None:
        async for message in call:
            for _ in range(int(message)):
                await call.write(b"x" * 100_000)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with Site().served() as site:
        yield site


class Client:
    """A client made of the library h2, that can also send what the library would not."""

    def __init__(self, port: int) -> None:
        self.port = port
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.h2 = h2.connection.H2Connection(config)
        self.events: list[Any] = []
        self.data: dict[int, bytearray] = {}

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.h2.initiate_connection()
        self.flush()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    def open(self, headers: list[tuple[str, str]] | None = None, end: bool = False, path: str = "/test/Echo") -> int:
        stream = self.h2.get_next_available_stream_id()
        told = [(name, path if name == ":path" else value) for name, value in headers or HEADERS]
        self.h2.send_headers(stream, told, end_stream=end)
        self.flush()
        return stream

    def send(self, stream: int, data: bytes, end: bool = False) -> None:
        self.h2.send_data(stream, data, end_stream=end)
        self.flush()

    async def until(self, wanted: Callable[[Any], bool], acknowledge: bool = True) -> Any:
        """The first event that is wanted; all others are kept."""
        for event in self.events:
            if wanted(event):
                return event
        while True:
            received = await asyncio.wait_for(self.reader.read(65536), 10)
            if not received:
                raise EOFError(f"the server has hung up after {self.events}")
            for event in self.h2.receive_data(received):
                self.events.append(event)
                if isinstance(event, h2.events.DataReceived):
                    assert event.stream_id is not None
                    assert event.data is not None
                    self.data.setdefault(event.stream_id, bytearray()).extend(event.data)
                    if acknowledge and event.flow_controlled_length:
                        self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.flush()
            for event in self.events:
                if wanted(event):
                    return event

    async def status(self, stream: int) -> dict[str, str]:
        """What the trailers say, or headers that are trailers at once."""

        def is_last(event: Any) -> bool:
            ends = isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived)
            return ends and event.stream_id == stream and any(name == "grpc-status" for name, _ in event.headers)

        event = await self.until(is_last)
        return {str(name): str(value) for name, value in event.headers}

    async def fault(self) -> tuple[int, bytes]:
        """The error code of the connection's end, and what is said of it."""
        event = await self.until(lambda event: isinstance(event, h2.events.ConnectionTerminated))
        return int(event.error_code), event.additional_data or b""


@pytest.fixture
async def client(site: Site) -> AsyncIterator[Client]:
    async with Client(site.port) as client:
        yield client


async def test_messages_come_back_however_frames_cut_them(client: Client) -> None:
    rng = random.Random(7)
    messages = [bytes(rng.randrange(256) for _ in range(size)) for size in (0, 1, 4, 5, 6, 300, 20_000, 70_000)]
    whole = b"".join(framed(message) for message in messages)
    for sizes in ([1] * 40, [5, 1, 9, 4], [16_000], [rng.randrange(1, 9000) for _ in range(9)]):
        stream = client.open()
        rest, turn = whole, 0
        while rest:
            size = min(sizes[turn % len(sizes)] if turn < len(sizes) else 16_000, 16_384)
            while client.h2.local_flow_control_window(stream) < size:
                await client.until(lambda event: isinstance(event, h2.events.WindowUpdated))
                client.events.clear()
            piece, rest, turn = rest[:size], rest[size:], turn + 1
            client.send(stream, piece, end=not rest)
        assert (await client.status(stream))["grpc-status"] == "0"
        assert client.data[stream] == whole


async def test_a_padded_frame_is_read_without_its_padding(client: Client) -> None:
    stream = client.open()
    client.h2.send_data(stream, framed(b"padded"), end_stream=True, pad_length=200)
    client.flush()
    assert (await client.status(stream))["grpc-status"] == "0"
    assert client.data[stream] == framed(b"padded")


async def test_the_answer_ends_a_call_whose_caller_has_not(site: Site, client: Client) -> None:
    stream = client.open(path="/test/Fail")
    told = await client.status(stream)
    assert (told[":status"], told["content-type"], told["grpc-status"]) == ("200", "application/grpc", "5")
    assert told["grpc-message"] == "nothing like '%C3%A4' here: 100 %25"
    reset = await client.until(lambda event: isinstance(event, h2.events.StreamReset))
    assert (reset.stream_id, reset.error_code) == (stream, h2.errors.ErrorCodes.NO_ERROR)
    # What was on its way is no fault.
    client.writer.write(raw_frame(http2.DATA, 1, stream, framed(b"late")))
    again = client.open()
    client.send(again, framed(b"still here"), end=True)
    assert (await client.status(again))["grpc-status"] == "0"


async def test_a_fault_of_a_method_is_told_and_reported(site: Site, client: Client) -> None:
    told = await client.status(client.open(path="/test/Bug"))
    assert told["grpc-status"] == "2"
    assert [type(fault) for fault in site.bugs] == [ZeroDivisionError]


@pytest.mark.parametrize(
    ("headers", "told"),
    [
        ([(n, "/test/Other" if n == ":path" else v) for n, v in HEADERS], {":status": "200", "grpc-status": "12"}),
        ([(n, "GET" if n == ":method" else v) for n, v in HEADERS], {":status": "415"}),
        ([(n, "text/plain" if n == "content-type" else v) for n, v in HEADERS], {":status": "415"}),
        ([(n, "application/grpc-web" if n == "content-type" else v) for n, v in HEADERS], {":status": "415"}),
    ],
)
async def test_what_is_no_call_of_ours_is_refused(
    client: Client, headers: list[tuple[str, str]], told: dict[str, str]
) -> None:
    stream = client.h2.get_next_available_stream_id()
    client.h2.send_headers(stream, headers)
    client.flush()
    event = await client.until(lambda event: isinstance(event, h2.events.ResponseReceived))
    assert told.items() <= dict(event.headers).items()
    await client.until(lambda event: isinstance(event, h2.events.StreamReset) and event.stream_id == stream)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (framed(b"x", compressed=1), "12"),
        (b"\0" + struct.pack(">I", LIMIT + 1), "8"),
        (framed(b"xyz")[:-1], "13"),
    ],
)
async def test_a_message_that_cannot_be_taken_ends_its_call_and_no_other(
    site: Site, client: Client, sent: bytes, status: str
) -> None:
    other, stream = client.open(path="/test/Hold"), client.open(path="/test/Hold")
    await until(lambda: site.holding == 2)
    client.send(stream, sent, end=True)
    assert (await client.status(stream))["grpc-status"] == status
    await until(lambda: site.cancelled == 1)
    site.gate.set()
    client.send(other, framed(b"fine"), end=True)
    assert (await client.status(other))["grpc-status"] == "0"
    assert site.read == [b"fine"]


async def test_a_caller_that_leaves_cancels_its_call(site: Site, client: Client) -> None:
    stream = client.open(path="/test/Hold")
    other = client.open()
    client.send(other, framed(b"in between"), end=True)
    await client.status(other)
    client.h2.reset_stream(stream, 8)
    client.flush()
    await until(lambda: site.cancelled == 1)


async def test_a_connection_that_is_lost_cancels_its_calls(site: Site) -> None:
    async with Client(site.port) as client:
        for _ in range(3):
            client.open(path="/test/Hold")
        echo = client.open()
        client.send(echo, framed(b"1"))
        await client.until(lambda event: isinstance(event, h2.events.DataReceived))
    await until(lambda: site.cancelled == 3)


async def test_a_writer_waits_for_a_reader_that_is_slow(site: Site, client: Client) -> None:
    """100 x 100 KB against a window of 64 KB: what is not taken is not sent."""
    stream = client.open(path="/test/Big")
    client.send(stream, framed(b"100"), end=True)
    await client.until(lambda event: len(client.data.get(stream, b"")) >= 65_535, acknowledge=False)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.reader.read(1), 0.2)
    assert len(client.data[stream]) == 65_535
    client.h2.acknowledge_received_data(65_535, stream)
    client.flush()
    assert (await client.status(stream))["grpc-status"] == "0"
    assert client.data[stream] == framed(b"x" * 100_000) * 100


async def test_what_a_reader_does_not_take_is_not_piled_up_however_wide_its_window(site: Site) -> None:
    """Envoy's windows are 256 MiB, and a full-duplex body is sent back whole."""
    async with Client(site.port) as client:
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        client.h2.increment_flow_control_window(1 << 29)
        client.flush()
        stream = client.open(path="/test/Big")
        client.send(stream, framed(b"400"), end=True)
        (connection,) = site.server._connections
        most = 0
        for _ in range(20):
            await asyncio.sleep(0.01)
            assert connection._transport is not None
            most = max(most, connection._transport.get_write_buffer_size())
        assert most < 2 << 20
        assert (await client.status(stream))["grpc-status"] == "0"
        assert len(client.data[stream]) == 400 * 100_005


async def test_a_sender_is_stopped_while_nobody_reads(site: Site, client: Client) -> None:
    stream = client.open(path="/test/Hold")
    # The server's settings open the window.
    await client.until(lambda event: isinstance(event, h2.events.RemoteSettingsChanged))
    sent = 0
    message = framed(b"y" * 1000)
    while client.h2.local_flow_control_window(stream) >= len(message):
        client.send(stream, message)
        sent += 1
    assert sent * len(message) <= http2.STREAM_WINDOW

    def opens(event: Any) -> bool:
        return isinstance(event, h2.events.WindowUpdated) and event.stream_id == stream

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.until(opens), 0.2)
    site.gate.set()
    await client.until(opens)
    assert client.h2.local_flow_control_window(stream) > http2.STREAM_WINDOW // 2
    client.send(stream, framed(b"last"), end=True)
    assert (await client.status(stream))["grpc-status"] == "0"
    assert len(site.read) == sent + 1


async def test_pings_are_answered_and_settings_acknowledged(client: Client) -> None:
    client.h2.ping(b"12345678")
    client.flush()
    answer = await client.until(lambda event: isinstance(event, h2.events.PingAckReceived))
    assert answer.ping_data == b"12345678"
    await client.until(lambda event: isinstance(event, h2.events.SettingsAcknowledged))


async def test_trailers_of_a_request_are_its_end(client: Client) -> None:
    stream = client.open()
    client.send(stream, framed(b"hello"))
    client.h2.send_headers(stream, [("x-trailer", "1")], end_stream=True)
    client.flush()
    assert (await client.status(stream))["grpc-status"] == "0"
    assert client.data[stream] == framed(b"hello")


@pytest.mark.parametrize("cut", [1, 50, 5_000])
async def test_headers_may_be_continued_wherever_they_are_cut(site: Site, cut: int) -> None:
    block = hpack.Encoder().encode([*HEADERS, ("x-long", "v" * 12_000)])
    pieces = [block[at : at + cut] for at in range(0, len(block), cut)]
    async with Client(site.port) as client:
        client.h2.send_headers(1, HEADERS)  # so that the library knows of the stream
        client.h2.data_to_send()
        for number, piece in enumerate(pieces):
            kind = http2.CONTINUATION if number else http2.HEADERS
            client.writer.write(raw_frame(kind, 4 * (number == len(pieces) - 1), 1, piece))
        client.send(1, framed(b"hello"), end=True)
        assert (await client.status(1))["grpc-status"] == "0"


def write_headers(client: Client, block: bytes) -> None:
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    for number, piece in enumerate(pieces):
        kind = http2.CONTINUATION if number else http2.HEADERS
        client.writer.write(raw_frame(kind, 4 * (number == len(pieces) - 1), 1, piece))


async def test_a_callers_header_as_long_as_envoy_takes_it_ends_nobodys_call(site: Site) -> None:
    """A tracer hands the caller's `tracestate` on, and the connection is that of all requests of an Envoy's worker."""
    async with Client(site.port) as client:
        client.h2.send_headers(1, HEADERS)  # so that the library knows of the stream
        client.h2.data_to_send()
        write_headers(client, hpack.Encoder().encode([*HEADERS, ("tracestate", "v" * 60_000)]))
        client.send(1, framed(b"hello"), end=True)
        assert (await client.status(1))["grpc-status"] == "0"
        assert site.peer_faults == []


@pytest.mark.parametrize("block", ["long", "bomb"])
async def test_headers_have_an_end(site: Site, block: str) -> None:
    """Nor do a few bytes become many: here each refers to one of 4,000 bytes."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 4096
    sent = encoder.encode([*HEADERS, ("x-long", "v" * (150_000 if block == "long" else 4000))])
    if block == "bomb":
        sent += b"\xbe" * 1000
    async with Client(site.port) as client:
        write_headers(client, sent)
        with contextlib.suppress(ConnectionResetError):  # what we left unread of it may overtake what we say of it
            code, _ = await client.fault()
            assert code in (h2.errors.ErrorCodes.COMPRESSION_ERROR, h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
        await until(lambda: site.peer_faults == ["protocol"])


async def test_a_server_that_will_stop_asks_to_go_elsewhere_and_serves_who_comes(site: Site, client: Client) -> None:
    held = client.open(path="/test/Hold")
    await until(lambda: site.holding == 1)
    site.server.retire()
    goaway = raw_frame(http2.GOAWAY, 0, 0, WORD((1 << 31) - 1) + WORD(http2.NO_ERROR))
    received = b""
    while goaway not in received:
        received += await asyncio.wait_for(client.reader.read(65536), 10)
    # On its way when we said so; not by the library, which opens nothing after a GOAWAY.
    client.writer.write(raw_frame(http2.HEADERS, 4, held + 2, hpack.Encoder().encode(HEADERS)))
    client.writer.write(raw_frame(http2.DATA, 1, held + 2, framed(b"late")))
    while framed(b"late") not in received:
        received += await asyncio.wait_for(client.reader.read(65536), 10)
    # Who asks whether we live has to be answered, and gRPC's clients do not ask on a connection that is going away.
    async with grpc.aio.insecure_channel(f"127.0.0.1:{site.port}") as channel:
        echo: Any = channel.stream_stream("/test/Echo")
        assert await echo(iter([b"x"]), timeout=10).read() == b"x"


async def test_calls_that_are_given_up_leave_nothing_for_the_collector(site: Site, client: Client) -> None:
    """It runs seldom, and they hold bodies."""
    await client.until(lambda event: isinstance(event, h2.events.RemoteSettingsChanged))
    gc.collect()
    gc.disable()
    try:
        for number in range(5):
            stream = client.open(path="/test/Hold")
            await until(lambda: site.holding > number)  # noqa: B023 - it is waited for here
            client.send(stream, framed(b"whole") + framed(bytes(9000))[:8000])
            client.h2.reset_stream(stream, 8)
            client.flush()
        await until(lambda: site.cancelled == 5 and not site.server._tasks)
        await asyncio.sleep(0)
        assert [thing for thing in gc.get_objects() if isinstance(thing, Call)] == []
    finally:
        gc.enable()


async def test_a_method_that_gives_up_by_itself_ends_its_call() -> None:
    async def give_up(call: Call) -> None:
        raise asyncio.CancelledError

    site = Site()
    site.server._methods[b"/test/Echo"] = give_up
    async with site.served(), Client(site.port) as client:
        assert (await client.status(client.open()))["grpc-status"] == "2"


async def test_a_server_that_stops_says_so_and_cancels_what_is_left(site: Site, client: Client) -> None:
    held, done = client.open(path="/test/Hold"), client.open()
    client.send(done, framed(b"x"), end=True)
    await client.status(done)
    await asyncio.wait_for(site.server.stop(0.05), 5)
    assert site.cancelled == 1
    # Not by the library, which takes anything after a GOAWAY for a fault.
    received = await asyncio.wait_for(client.reader.read(), 5)
    goaway = raw_frame(http2.GOAWAY, 0, 0, WORD(done) + WORD(http2.NO_ERROR))
    assert goaway in received
    assert received.endswith(raw_frame(http2.RST_STREAM, 0, held, WORD(http2.CANCEL)))


def raw_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


WORD = struct.Struct(">I").pack
BROKEN = {
    "data on no stream": (raw_frame(http2.DATA, 0, 5, b"x"), "which was not opened"),
    "data on stream 0": (raw_frame(http2.DATA, 0, 0, b"x"), "which was not opened"),
    "a frame too large": (b"\0\x40\x01\0\0" + WORD(1), "a frame of 16385 bytes"),
    "too much padding": (raw_frame(http2.DATA, 8, 1, b"\x09abc"), "more padding than frame"),
    "headers on an even stream": (raw_frame(http2.HEADERS, 4, 2, b"\x82"), "cannot open stream 2"),
    "headers that are none": (raw_frame(http2.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff\xff"), "cannot be read"),
    "headers cut short": (
        raw_frame(http2.HEADERS, 0, 1, b"\x82") + raw_frame(http2.PING, 0, 0, bytes(8)),
        "not continued",
    ),
    "data within headers": (raw_frame(http2.HEADERS, 0, 1, b"\x82") + raw_frame(http2.DATA, 0, 1, b"x"), "continued"),
    "a continuation of nothing": (raw_frame(http2.CONTINUATION, 4, 1, b"\x82"), "nothing is to be continued"),
    "headers without end": (
        raw_frame(http2.HEADERS, 0, 1, b"\x82")
        + b"".join(raw_frame(http2.CONTINUATION, 0, 1, b"x" * 16_000) for _ in range(6)),
        "without end",
    ),
    "empty continuations": (
        raw_frame(http2.HEADERS, 0, 1, b"\x82") + raw_frame(http2.CONTINUATION, 0, 1, b""),
        "without end",
    ),
    "a short ping": (raw_frame(http2.PING, 0, 0, b"1234"), "ping"),
    "a ping on a stream": (raw_frame(http2.PING, 0, 1, bytes(8)), "ping"),
    "settings cut short": (raw_frame(http2.SETTINGS, 0, 0, b"\0\x04\0"), "settings"),
    "settings of a stream": (raw_frame(http2.SETTINGS, 0, 1, b""), "settings"),
    "a window too large": (raw_frame(http2.SETTINGS, 0, 0, b"\0\x04" + WORD(1 << 31)), "initial window"),
    "frames too small": (raw_frame(http2.SETTINGS, 0, 0, b"\0\x05" + WORD(100)), "frames of 100 bytes"),
    "a push that is neither": (raw_frame(http2.SETTINGS, 0, 0, b"\0\x02" + WORD(7)), "push"),
    "a promise": (raw_frame(http2.PUSH_PROMISE, 4, 1, bytes(8)), "promises"),
    "a window that runs over": (raw_frame(http2.WINDOW_UPDATE, 0, 0, WORD((1 << 31) - 1)), "impossible window"),
    "a window of nothing": (raw_frame(http2.WINDOW_UPDATE, 0, 0, WORD(0)), "impossible window"),
    "a short window": (raw_frame(http2.WINDOW_UPDATE, 0, 0, b"123"), "window update"),
    "priority of nothing": (raw_frame(http2.PRIORITY, 0, 0, bytes(5)), "type 2 on stream 0"),
    "a stream that goes away": (raw_frame(http2.GOAWAY, 0, 1, bytes(8)), "type 7 on stream 1"),
    "headers shorter than their priority": (raw_frame(http2.HEADERS, 0x24, 1, b"abc"), "too short"),
    "a window of no stream": (raw_frame(http2.WINDOW_UPDATE, 0, 9, WORD(5)), "window for stream 9"),
    "a stream opened again": (
        raw_frame(http2.HEADERS, 4, 1, hpack.Encoder().encode(HEADERS))
        + raw_frame(http2.RST_STREAM, 0, 1, WORD(8))
        + raw_frame(http2.HEADERS, 4, 1, b"\x82"),
        "stream 1 is opened again",
    ),
    "a window that the settings run over": (
        raw_frame(http2.HEADERS, 4, 1, hpack.Encoder().encode(HEADERS))
        + raw_frame(http2.WINDOW_UPDATE, 0, 1, WORD((1 << 31) - 1 - 65_535))
        + raw_frame(http2.SETTINGS, 0, 0, b"\0\x04" + WORD(65_536)),
        "window of stream 1 runs over",
    ),
    "a reset of nothing": (raw_frame(http2.RST_STREAM, 0, 9, WORD(8)), "reset of stream 9"),
    "a short reset": (raw_frame(http2.RST_STREAM, 0, 1, b"1"), "reset"),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_who_breaks_the_protocol_is_told_how_and_hung_up_on(site: Site, name: str) -> None:
    sent, told = BROKEN[name]
    async with Client(site.port) as client:
        client.writer.write(sent)
        code, why = await client.fault()
        assert code != h2.errors.ErrorCodes.NO_ERROR
        assert told in why.decode()
        assert await asyncio.wait_for(client.reader.read(), 5) == b""


WRONGS = {
    "data beyond its window": (
        raw_frame(http2.DATA, 0, 1, framed(bytes(16_000))) * 70,
        h2.errors.ErrorCodes.FLOW_CONTROL_ERROR,
    ),
    "data after its end": (raw_frame(http2.DATA, 1, 1, b"") + raw_frame(http2.DATA, 0, 1, b"x"), 5),
    "a window of nothing": (raw_frame(http2.WINDOW_UPDATE, 0, 1, WORD(0)), 1),
    "a window that runs over": (raw_frame(http2.WINDOW_UPDATE, 0, 1, WORD((1 << 31) - 1)), 3),
}


@pytest.mark.parametrize("name", WRONGS)
async def test_what_a_stream_does_wrong_ends_it_and_no_other(site: Site, client: Client, name: str) -> None:
    sent, code = WRONGS[name]
    stream, other = client.open(path="/test/Hold"), client.open()
    assert stream == 1
    await until(lambda: site.holding == 1)
    client.writer.write(sent)
    reset = await client.until(lambda event: isinstance(event, h2.events.StreamReset))
    assert (reset.stream_id, reset.error_code) == (stream, code)
    await until(lambda: site.cancelled == 1)
    client.send(other, framed(b"fine"), end=True)
    assert (await client.status(other))["grpc-status"] == "0"
    assert site.peer_faults == ["stream"]


async def test_a_window_may_shrink_below_what_was_sent(site: Site) -> None:
    """RFC 9113, 6.9.2: it is negative then, and the writer waits until that has been made up for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    big = hpack.Encoder().encode([(n, "/test/Big" if n == ":path" else v) for n, v in HEADERS])
    writer.write(http2.PREFACE + raw_frame(http2.SETTINGS, 0, 0, b""))
    writer.write(raw_frame(http2.WINDOW_UPDATE, 0, 0, WORD(1 << 20)))
    writer.write(raw_frame(http2.HEADERS, 4, 1, big) + raw_frame(http2.DATA, 1, 1, framed(b"1")))
    got = 0

    async def data_until(size: int) -> None:
        """Reads until so much data is here, and then for what comes before a ping's answer."""
        nonlocal got
        while True:
            head = await asyncio.wait_for(reader.readexactly(9), 5)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == http2.DATA:
                got += len(payload)
                if got == size:
                    writer.write(raw_frame(http2.PING, 0, 0, bytes(8)))
            elif head[3] == http2.PING:
                return

    await data_until(65_535)
    writer.write(raw_frame(http2.SETTINGS, 0, 0, b"\0\x04" + WORD(1000)))
    writer.write(raw_frame(http2.WINDOW_UPDATE, 0, 1, WORD(64_535)) + raw_frame(http2.PING, 0, 0, bytes(8)))
    await data_until(-1)
    assert got == 65_535
    writer.write(raw_frame(http2.WINDOW_UPDATE, 0, 1, WORD(7)))
    await data_until(65_542)
    writer.write(raw_frame(http2.WINDOW_UPDATE, 0, 1, WORD(1 << 17)))
    await data_until(100_005)
    assert got == 100_005
    writer.close()


async def test_who_speaks_http_1_is_hung_up_on(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b"no HTTP/2 preface" in answer
    writer.close()


async def test_headers_that_refer_to_earlier_ones_are_understood(site: Site) -> None:
    """A peer need not follow our wish for a table of size 0, and may change its mind."""
    encoder = hpack.Encoder()
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(http2.PREFACE + raw_frame(http2.SETTINGS, 0, 0, b""))
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    answers: dict[int, bytes] = {}
    for number in range(6):
        stream = 2 * number + 1
        client.send_headers(stream, HEADERS)  # so that it knows of the stream
        if number == 2:
            encoder.header_table_size = 0
        if number == 4:
            encoder.header_table_size = 4096
        path = "/test/Echo" if number % 2 else "/test/Fail"
        block = encoder.encode([(name, path if name == ":path" else value) for name, value in HEADERS])
        writer.write(raw_frame(http2.HEADERS, 4, stream, block))
        writer.write(raw_frame(http2.DATA, 1, stream, framed(b"hello")))
        while stream not in answers:
            received = await asyncio.wait_for(reader.read(65536), 5)
            assert received
            for event in client.receive_data(received):
                if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                    told = dict(event.headers or ())
                    if b"grpc-status" in told and event.stream_id is not None:
                        answers[event.stream_id] = told[b"grpc-status"]
    assert list(answers.values()) == [b"5", b"0"] * 3
    writer.close()


async def test_grpcs_own_client_is_served_at_any_size_and_number(site: Site) -> None:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{site.port}", options=options) as channel:
        echo: Any = channel.stream_stream("/test/Echo")

        async def one(size: int) -> None:
            call = echo()
            for _ in range(3):
                await call.write(b"z" * size)
                assert await call.read() == b"z" * size
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK

        await asyncio.gather(*(one(size) for size in [0, 1, 100, 65_535, 300_000, LIMIT] + [1000] * 200))
        fail: Any = channel.unary_unary("/test/Fail")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fail(b"")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "nothing like 'ä' here: 100 %"


class Pipe:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


async def test_an_answer_leaves_in_the_turn_in_which_it_is_made() -> None:
    connection = Site().server._connect()
    pipe: Any = Pipe()
    connection.connection_made(pipe)
    connection.data_received(http2.PREFACE + raw_frame(http2.SETTINGS, 0, 0, b""))
    await asyncio.sleep(0)
    opened = raw_frame(http2.HEADERS, http2.END_HEADERS, 1, hpack.Encoder().encode(HEADERS))
    for message, before in ((b"first", opened), (b"second", b"")):
        connection.data_received(before + raw_frame(http2.DATA, 0, 1, framed(message)))
        await asyncio.sleep(0)
        assert framed(message) in pipe.written
    connection.connection_lost(None)


FRAMES = st.builds(
    raw_frame,
    st.integers(0, 11),
    st.integers(0, 255),
    st.integers(0, 9),
    st.one_of(
        st.binary(max_size=40),
        st.sampled_from([WORD(100), framed(b"hi"), framed(b"long" * 20), bytes(8), hpack.Encoder().encode(HEADERS)]),
    ),
)


@settings(max_examples=400, deadline=None)
@given(frames=st.lists(FRAMES, max_size=12), garbage=st.binary(max_size=30), cuts=st.lists(st.integers(1, 50)))
def test_no_bytes_whatever_make_a_connection_raise(frames: list[bytes], garbage: bytes, cuts: list[int]) -> None:
    async def run() -> None:
        site = Site()
        server = RpcServer({"/test/Echo": _discard}, LIMIT, site, max_kept_bytes=50)
        connection = server._connect()
        pipe: Any = Pipe()
        connection.connection_made(pipe)
        rest = http2.PREFACE + raw_frame(http2.SETTINGS, 0, 0, b"") + b"".join(frames) + garbage
        for cut in cuts:
            connection.data_received(rest[:cut])
            rest = rest[cut:]
        connection.data_received(rest)
        await asyncio.sleep(0)
        await until(lambda: not connection._resting)
        calls: Any = connection.streams.values()
        assert server._kept.now == sum(call._ours for call in calls)
        connection.connection_lost(None)
        assert (connection.streams, server._kept.now, site.bugs) == ({}, 0, [])
        await server.stop(0.0)

    asyncio.run(run())


async def _discard(call: Call) -> None:
    async for _ in call:
        pass


async def test_deadlines_of_callers_are_kept(site: Site) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{site.port}") as channel:
        hold: Any = channel.stream_stream("/test/Hold")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hold(iter([b"x"]), timeout=0.2).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: site.cancelled == 1)


async def test_a_deadline_is_kept_for_a_caller_that_does_not_keep_it_itself(site: Site, client: Client) -> None:
    stream = client.open([*HEADERS, ("grpc-timeout", "50m")], path="/test/Hold")
    assert (await client.status(stream))["grpc-status"] == "4"
    await until(lambda: site.cancelled == 1)
    odd = client.open([*HEADERS, ("grpc-timeout", "soon")])
    client.send(odd, framed(b"x"), end=True)
    assert (await client.status(odd))["grpc-status"] == "0"


async def test_who_compresses_is_told_that_we_do_not(client: Client) -> None:
    stream = client.open()
    client.send(stream, framed(b"x", compressed=1))
    told = await client.status(stream)
    assert (told["grpc-status"], told["grpc-accept-encoding"]) == ("12", "identity")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "localhost"])
async def test_who_listens_everywhere_is_reached_over_either_protocol(host: str) -> None:
    async with Site().served(host) as site:
        for address in ("127.0.0.1", "::1") if host in ("0.0.0.0", "::") else ("127.0.0.1",):
            _, writer = await asyncio.open_connection(address, site.port)
            writer.close()


async def test_a_peer_that_is_gone_without_a_word_is_left() -> None:
    """As when its machine has died: it is pinged, and does not answer."""
    async with Site(quiet_s=0.1).served() as site, Client(site.port) as client:
        client.open(path="/test/Hold")
        await until(lambda: site.holding == 1)
        await until(lambda: site.cancelled == 1)
        assert site.peer_faults == ["silent"]
        assert raw_frame(http2.PING, 0, 0, bytes(8)) in await asyncio.wait_for(_all_of(client.reader), 5)


async def test_a_peer_that_answers_pings_is_kept() -> None:
    async with Site(quiet_s=0.05).served() as site, Client(site.port) as client:
        stream = client.open(path="/test/Hold")
        for _ in range(3):
            await client.until(lambda event: isinstance(event, h2.events.PingReceived))
            client.events.clear()
        assert (site.cancelled, site.peer_faults) == (0, [])
        site.gate.set()
        client.send(stream, b"", end=True)
        assert (await client.status(stream))["grpc-status"] == "0"


async def test_who_connects_and_says_nothing_is_hung_up_on() -> None:
    async with Site(quiet_s=0.1).served() as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
        await asyncio.wait_for(_all_of(reader), 5)
        assert site.peer_faults == ["silent"]
        writer.close()


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while more := await reader.read(65_536):
            received += more
    return received


async def test_calls_together_keep_no_more_than_they_may(site: Site) -> None:
    """Uploads that come in part: the one with which it becomes too much is refused, and the rest can end."""
    async with Site(max_kept_bytes=100_000).served() as site, Client(site.port) as client:
        await client.until(lambda event: isinstance(event, h2.events.RemoteSettingsChanged))
        streams = [client.open() for _ in range(3)]
        for stream in streams:
            whole = framed(bytes(40_000))
            for at in range(0, 35_000, 10_000):
                client.send(stream, whole[at : min(at + 10_000, 35_000)])
        assert (await client.status(streams[2]))["grpc-status"] == "8"
        assert site.peer_faults == ["memory"]
        for stream in streams[:2]:
            client.send(stream, framed(bytes(40_000))[35_000:], end=True)
            assert (await client.status(stream))["grpc-status"] == "0"
            assert client.data[stream] == framed(bytes(40_000))
        assert site.server._kept.now == 0


async def test_a_message_in_the_smallest_pieces_costs_little_more_than_itself(site: Site, client: Client) -> None:
    stream = client.open(path="/test/Hold")
    await client.until(lambda event: isinstance(event, h2.events.RemoteSettingsChanged))
    piece = raw_frame(http2.DATA, 0, stream, b"x")
    client.send(stream, b"\0" + struct.pack(">I", 300_000))
    for _ in range(100):
        client.writer.write(piece * 1000)
        await client.writer.drain()
    (connection,) = site.server._connections
    call: Any = connection.streams[stream]
    await until(lambda: call._size == 100_005)
    assert len(call._parts) < 20


@pytest.mark.parametrize(
    ("name", "turns_at_least"),
    [
        *((name, 39) for name in ("pings", "settings", "resets", "empty data", "windows", "unknown", "tiny messages")),
        ("frames of tiny messages", 25),
        ("headers", 50),
    ],
)
async def test_a_flood_neither_stops_the_loop_nor_piles_up(site: Site, name: str, turns_at_least: int) -> None:
    """While one peer floods, the loop has its turns, and another peer is served."""
    headers = hpack.Encoder()
    headers.header_table_size = 0
    block = headers.encode([(n, "/test/Hold" if n == ":path" else v) for n, v in HEADERS])

    def flood(stream: int) -> bytes:
        if name == "pings":
            return raw_frame(http2.PING, 0, 0, bytes(8))
        if name == "settings":
            return raw_frame(http2.SETTINGS, 0, 0, (b"\0\x04" + WORD(65_000 + stream % 7)) * 100)
        if name == "resets":
            return raw_frame(http2.HEADERS, 4, stream, block) + raw_frame(http2.RST_STREAM, 0, stream, WORD(8))
        if name == "empty data":
            return raw_frame(http2.DATA, 0, 1, b"")
        if name == "windows":
            return raw_frame(http2.WINDOW_UPDATE, 0, 0, WORD(1)) + raw_frame(http2.WINDOW_UPDATE, 0, 1, WORD(1))
        if name == "unknown":
            return raw_frame(77, 255, 1, b"whatever")
        if name == "frames of tiny messages":
            return raw_frame(http2.DATA, 0, 1, framed(b"") * 3_000) if stream < 63 else b""
        if name == "headers":
            told = headers.encode([*HEADERS, ("x-id", str(stream) * 200)], huffman=True)
            ended = raw_frame(http2.RST_STREAM, 0, stream, WORD(8))
            return raw_frame(http2.HEADERS, 4, stream, told) + ended if stream < 503 else b""
        return raw_frame(http2.DATA, 0, 1, framed(b"") * 40)

    sent = b"".join(flood(3 + 2 * number) for number in range(5000))
    loop = asyncio.get_running_loop()
    turns: list[float] = []

    async def measure() -> None:
        while True:
            began_s = loop.time()
            await asyncio.sleep(0)
            turns.append(loop.time() - began_s)

    async with Client(site.port) as other:
        pipe: Any = Pipe()
        connection = site.server._connect()
        connection.connection_made(pipe)
        path = raw_frame(http2.HEADERS, 4, 1, block)
        connection.data_received(http2.PREFACE + raw_frame(http2.SETTINGS, 0, 0, b"") + path)
        measuring = asyncio.create_task(measure())
        connection.data_received(sent)
        stream = other.open()
        other.send(stream, framed(b"me too"), end=True)
        assert (await other.status(stream))["grpc-status"] == "0"
        assert is_resting(connection)  # it was served in between, not afterwards
        await until(lambda: not is_resting(connection))
        measuring.cancel()
        assert len(turns) >= turns_at_least
        assert len(connection.streams) <= 1
        await until(lambda: len(site.server._tasks) <= 2)
        connection.connection_lost(None)


def is_resting(connection: http2.Connection) -> bool:
    return connection._resting


@pytest.mark.parametrize("max_frame", [16_384, (1 << 24) - 1])
async def test_a_large_answer_is_cut_without_copying_it_again_and_again(site: Site, max_frame: int) -> None:
    """4,000 frames of 16 KB: with a copy of the rest for each, this would take minutes. And one frame alone, however
    large it may be, must not look like a peer that does not read."""
    sent: list[tuple[int, int]] = []

    class Wide(http2.Connection):
        def send_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
            if kind == http2.DATA:
                sent.append((len(payload), payload[0]))

    wide = Wide(None, print, print, print, 9.0)  # type: ignore[arg-type]
    wide.initial_send_window = wide.send_window = 1 << 30
    wide.max_frame = max_frame
    call = Call(wide, 1, LIMIT, rpc._Kept(LIMIT), site)
    message = bytes(64 << 20)
    began_s = asyncio.get_running_loop().time()
    await call.write(message)
    assert sum(size for size, _ in sent) == len(message) + 5
    assert max(size for size, _ in sent) <= 64 << 10
    assert asyncio.get_running_loop().time() - began_s < 5
