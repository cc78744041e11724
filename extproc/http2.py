"""HTTP/2 (RFC 9113) as far as a gRPC server behind Envoy needs it, over an asyncio transport.

All of it happens on the event loop, so that nothing of a request's way is handed from thread to thread. Streams are
bounded by flow control: what a peer may send on one before somebody has taken it is `STREAM_WINDOW`. A flood of frames
is taken in a few at a time, and others have their turn between them.

What one stream does wrong ends that stream, where the RFC leaves the choice: a connection carries many requests.

The peer is asked for header blocks that do not refer to earlier ones (a header table of size 0). Envoy opens each
stream with the same headers, so that a block that was seen before is known and need not be decoded.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Final, cast

import hpack

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
STREAM_WINDOW: Final = 1 << 20
# Streams bound what is kept; the connection's window only must not be what they wait for.
_CONNECTION_WINDOW: Final = 1 << 30
# RFC 9113, 6.5.2 and 6.9.2: what holds until a peer's settings say otherwise, and what none may go beyond.
_DEFAULT_WINDOW, _MAX_WINDOW = 65_535, (1 << 31) - 1
_DEFAULT_FRAME, _MAX_FRAME = 16_384, (1 << 24) - 1
_MAX_STREAMS: Final = 1 << 16
# Envoy takes 60 KiB of headers from a caller, and with tracing hands the caller's `tracestate` on to us. Who is beyond
# that ends the connection: what is not decoded would be missing from the table of what comes later.
_MAX_HEADER_BYTES, _MAX_DECODED_BYTES = 64 << 10, 128 << 10
# Answers to pings and settings of a peer that does not read them.
_MAX_UNREAD: Final = 8 << 20
# Of what is written in one turn of the loop; who has more to say waits for the transport.
_MAX_PENDING: Final = 256 << 10
_CACHED_BLOCKS, _CACHED_BLOCK_BYTES = 256, 1024
# Taken in before the loop has its next turn: as many as 16 requests of one body each. What is more work than a frame
# counts as several: a message beside others in one frame, and so many bytes of headers to decode.
_FRAMES_A_TURN: Final = 64
_HEADER_BYTES_A_FRAME: Final = 32

_FRAME = struct.Struct(">HBBBI")  # length (upper 16 bits, lower 8), type, flags, stream
_WORD = struct.Struct(">I")
_SETTING = struct.Struct(">HI")

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS: Final = 0x4
_PADDED, _WITH_PRIORITY = 0x8, 0x20
_HEADER_TABLE_SIZE, _ENABLE_PUSH, _MAX_CONCURRENT, _INITIAL_WINDOW, _MAX_FRAME_SIZE, _MAX_HEADER_LIST = range(1, 7)

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL, COMPRESSION_ERROR = 5, 6, 7, 8, 9
ENHANCE_YOUR_CALM: Final = 0xB

HeaderList = tuple[tuple[bytes, bytes], ...]


class ConnectionFault(Exception):
    """The peer breaks the protocol: the connection ends with this error code."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Stream:
    """One stream of a connection; who serves it inherits, and is told by `on_data`, `on_end` and `on_gone`."""

    __slots__ = ("_may_receive", "_received", "connection", "id", "local_closed", "remote_closed", "send_window")

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.send_window = connection.initial_send_window
        self.remote_closed = False  # the peer sends nothing any more
        self.local_closed = False  # nor do we, or the stream was reset
        self._may_receive = STREAM_WINDOW
        self._received = 0  # and not yet given back to the peer's window

    def on_data(self, data: bytes) -> None:
        raise NotImplementedError

    def on_end(self) -> None:
        """The peer has sent all that it will."""
        raise NotImplementedError

    def on_gone(self) -> None:
        """The peer has reset the stream, or the connection is lost."""
        raise NotImplementedError

    def on_window(self) -> None:
        """More may be sent."""

    def took_in(self, size: int) -> bool:
        """Whether the peer was allowed to send so much."""
        self._may_receive -= size
        self._received += size
        return self._may_receive >= 0

    def give_window(self) -> None:
        """What was received has its place: the peer may send as much again."""
        if self._received >= STREAM_WINDOW // 2 and not self.remote_closed:
            self.connection.send_frame(WINDOW_UPDATE, 0, self.id, _WORD.pack(self._received))
            self._may_receive += self._received
            self._received = 0


class Connection(asyncio.Protocol):
    """The server's side of one connection. `accept` makes a stream of its headers, names in lower case.

    `on_fault` is told in a word why a connection was ended by us, and `on_bug` of a fault of ours. A peer that was not
    heard for `quiet_s` is pinged, and left when it does not answer for as long again: its machine may be gone, and
    nothing else would tell.
    """

    def __init__(
        self,
        accept: Callable[[Connection, int, HeaderList], Stream],
        on_lost: Callable[[Connection], None],
        on_fault: Callable[[str], None],
        on_bug: Callable[[BaseException], None],
        quiet_s: float,
    ) -> None:
        self._accept = accept
        self._on_lost = on_lost
        self._on_fault = on_fault
        self._on_bug = on_bug
        self._quiet_s = quiet_s
        self._heard = True
        self._asked = False
        self._watching: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.streams: dict[int, Stream] = {}
        self.blocked: set[Stream] = set()  # those that wait until they may send
        self._last_stream = 0
        self._rest = b""  # of a frame that has come in part, or what is left for the next turn
        self._resting = False  # until the next turn
        self._began = False  # the peer's preface has come
        self._introduced = False  # and its settings
        self._going = False  # we take no new streams
        self.extra_work = 0  # of what is being taken in, in frames
        self._decoder = hpack.Decoder(max_header_list_size=_MAX_DECODED_BYTES)
        self._blocks: dict[bytes, HeaderList] = {}
        self._headers: tuple[int, int, bytearray] | None = None  # stream, flags and block of headers to be continued
        self.initial_send_window = _DEFAULT_WINDOW
        self.send_window = _DEFAULT_WINDOW
        self.max_frame = _DEFAULT_FRAME
        self._may_receive = _CONNECTION_WINDOW
        self._received = 0
        self._out: list[bytes] = []
        self._pending = 0  # bytes in them
        self._flushing = False
        self.paused = False
        self._lost = False

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)
        settings = (
            (_HEADER_TABLE_SIZE, 0),
            (_MAX_CONCURRENT, _MAX_STREAMS),
            (_INITIAL_WINDOW, STREAM_WINDOW),
            (_MAX_HEADER_LIST, _MAX_DECODED_BYTES),
        )
        self.send_frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*setting) for setting in settings))
        self.send_frame(WINDOW_UPDATE, 0, 0, _WORD.pack(_CONNECTION_WINDOW - _DEFAULT_WINDOW))
        self._watching = self._loop.call_later(self._quiet_s, self._watch)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._transport is None:
            return
        if self._rest:
            data = self._rest + data
        if self._resting:
            self._rest = data
            return
        self._take_in(data)

    def _take_in(self, data: bytes) -> None:
        try:
            self._rest = data[self._frames(data) :]
            # Whoever was woken by them runs before it: their answers leave in the same turn.
            self._flush_soon()
        except ConnectionFault as fault:
            self._on_fault("protocol")
            self._fail(fault)
        except Exception as fault:
            self._on_bug(fault)
            self._fail(ConnectionFault(INTERNAL_ERROR, "a fault of the server"))

    def _rest_a_turn(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._resting = True
        self._transport.pause_reading()
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.resume_reading()
        self._take_in(self._rest)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        if self._lost:
            return
        self._lost = True
        self._transport = None
        self._rest = b""
        if self._watching is not None:
            self._watching.cancel()
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.local_closed = True
            stream.on_gone()
        self._on_lost(self)

    def _watch(self) -> None:
        if self._transport is None:
            return
        if not self._began or (self._asked and not self._heard):
            self._on_fault("silent")
            self._transport.abort()
            return
        self._asked = not self._heard
        if self._asked:
            self.send_frame(PING, 0, 0, bytes(8))
        self._heard = False
        self._watching = self._loop.call_later(self._quiet_s, self._watch)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        self._window_opened()

    def retire(self) -> None:
        """The peer is asked to open streams elsewhere; those that are on their way are served (RFC 9113, 6.8)."""
        if not self._going:
            self.send_frame(GOAWAY, 0, 0, _WORD.pack(_MAX_WINDOW) + _WORD.pack(NO_ERROR))

    def go_away(self, code: int = NO_ERROR, why: str = "") -> None:
        """Streams that are open go on; the peer is asked to open no more."""
        self._going = True
        self.send_frame(GOAWAY, 0, 0, _WORD.pack(self._last_stream) + _WORD.pack(code) + why.encode())

    def close(self) -> None:
        """Sends what is waiting, and ends the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _fail(self, fault: ConnectionFault) -> None:
        self.go_away(fault.code, str(fault))
        transport = self._transport
        self.close()
        # Nothing more is read of a peer that cannot be understood.
        self.connection_lost(None)
        if transport is not None and transport.get_write_buffer_size():
            self._loop.call_later(1.0, transport.abort)

    # Out

    def send(self, *pieces: bytes) -> None:
        """Whole frames. They leave together with all others of this turn of the loop."""
        self._out += pieces
        for piece in pieces:
            self._pending += len(piece)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def send_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        self.send(_FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream_id), payload)

    def reset(self, stream: Stream, code: int) -> None:
        self.send_frame(RST_STREAM, 0, stream.id, _WORD.pack(code))
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """Both sides are done with it."""
        stream.local_closed = True
        self.streams.pop(stream.id, None)

    @property
    def congested(self) -> bool:
        """Whether writers of data are to wait."""
        return self.paused or self._pending > _MAX_PENDING

    async def room(self) -> None:
        """Hands on what is pending, and lets others run meanwhile."""
        self._flush()
        await asyncio.sleep(0)

    def _flush(self) -> None:
        self._flushing = False
        out, self._out, self._pending = self._out, [], 0
        if not out or self._transport is None:
            return
        self._transport.write(b"".join(out))
        if self.paused and self._transport.get_write_buffer_size() > _MAX_UNREAD:
            self._on_fault("unread")
            self._transport.abort()

    # In

    def _frames(self, data: bytes) -> int:
        """Takes in the whole frames of `data`; returns where the next begins."""
        at, end = 0, len(data)
        if not self._began:
            if end < len(PREFACE) and PREFACE.startswith(data):
                return 0
            if not data.startswith(PREFACE):
                raise ConnectionFault(PROTOCOL_ERROR, "no HTTP/2 preface")
            self._began = True
            at = len(PREFACE)
        unpack, left = _FRAME.unpack_from, _FRAMES_A_TURN
        while end - at >= 9:
            left -= self.extra_work
            self.extra_work = 0
            if left <= 0:
                self._rest_a_turn()
                break
            left -= 1
            high, low, kind, flags, stream_id = unpack(data, at)
            size = high << 8 | low
            if size > _DEFAULT_FRAME:
                raise ConnectionFault(FRAME_SIZE_ERROR, f"a frame of {size} bytes")
            begin = at + 9
            if begin + size > end:
                break
            at = begin + size
            payload = data[begin:at]
            if kind == DATA and self._headers is None and self._introduced:
                self._on_data(stream_id & _MAX_WINDOW, flags, payload)
                continue
            self._on_frame(kind, flags, stream_id & _MAX_WINDOW, payload)
            if kind == SETTINGS or (kind == WINDOW_UPDATE and not stream_id):
                # These may concern every stream that there is.
                left = 0
        return at

    def _on_data(self, stream_id: int, flags: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        self._may_receive -= size
        if self._received >= _CONNECTION_WINDOW // 2:
            self.send_frame(WINDOW_UPDATE, 0, 0, _WORD.pack(self._received))
            self._may_receive += self._received
            self._received = 0
        if flags & _PADDED:
            payload = _unpadded(payload)
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_stream or not stream_id & 1:
                raise ConnectionFault(PROTOCOL_ERROR, f"data on stream {stream_id}, which was not opened")
            return  # for one that we have ended: on its way when we did
        if stream.remote_closed or not stream.took_in(size):
            self._end(stream, STREAM_CLOSED if stream.remote_closed else FLOW_CONTROL_ERROR)
            return
        if payload:
            stream.on_data(payload)
        else:
            stream.give_window()
        if flags & END_STREAM and not stream.remote_closed:
            stream.remote_closed = True
            stream.on_end()

    def _end(self, stream: Stream, code: int) -> None:
        """Of a stream on which the peer breaks the protocol."""
        self._on_fault("stream")
        self.reset(stream, code)
        stream.on_gone()

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if not self._introduced:
            if kind != SETTINGS or flags & ACK:
                raise ConnectionFault(PROTOCOL_ERROR, "no settings after the preface")
            self._introduced = True
        if self._headers is not None and (kind != CONTINUATION or stream_id != self._headers[0]):
            raise ConnectionFault(PROTOCOL_ERROR, "headers are not continued")
        if kind == HEADERS:
            if flags & _PADDED:
                payload = _unpadded(payload)
            if flags & _WITH_PRIORITY:
                if len(payload) < 5:
                    raise ConnectionFault(FRAME_SIZE_ERROR, "headers too short for their priority")
                payload = payload[5:]
            if flags & END_HEADERS:
                self._on_headers(stream_id, flags, payload)
            else:
                self._headers = stream_id, flags, bytearray(payload)
        elif kind == CONTINUATION:
            self._on_continuation(flags, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window_update(stream_id, payload)
        elif kind == RST_STREAM:
            self._on_reset(stream_id, payload)
        elif kind == SETTINGS:
            self._on_settings(flags, stream_id, payload)
        elif kind == PING:
            if stream_id or len(payload) != 8:
                raise ConnectionFault(PROTOCOL_ERROR if stream_id else FRAME_SIZE_ERROR, "a malformed ping")
            if not flags & ACK:
                self.send_frame(PING, ACK, 0, payload)
        elif kind == PUSH_PROMISE:
            raise ConnectionFault(PROTOCOL_ERROR, "a client that promises")
        elif (kind == GOAWAY and stream_id) or (kind == PRIORITY and not stream_id):
            raise ConnectionFault(PROTOCOL_ERROR, f"a frame of type {kind} on stream {stream_id}")
        # GOAWAY: who says so opens no more streams. PRIORITY and what is unknown is of no use here.

    def _on_continuation(self, flags: int, payload: bytes) -> None:
        if self._headers is None:
            raise ConnectionFault(PROTOCOL_ERROR, "nothing is to be continued")
        stream_id, first_flags, block = self._headers
        block += payload
        if len(block) > _MAX_HEADER_BYTES or not (payload or flags & END_HEADERS):
            raise ConnectionFault(ENHANCE_YOUR_CALM, "headers without end")
        if flags & END_HEADERS:
            self._headers = None
            self._on_headers(stream_id, first_flags, bytes(block))

    def _on_headers(self, stream_id: int, flags: int, block: bytes) -> None:
        headers = self._decoded(block)
        stream = self.streams.get(stream_id)
        if stream is not None:
            # Trailers of a request: gRPC has none of its own.
            if stream.remote_closed or not flags & END_STREAM:
                raise ConnectionFault(PROTOCOL_ERROR, f"headers on stream {stream_id}, which has had its own")
            stream.remote_closed = True
            stream.on_end()
            return
        if not stream_id & 1:
            raise ConnectionFault(PROTOCOL_ERROR, f"a client cannot open stream {stream_id}")
        if stream_id <= self._last_stream:
            if not flags & END_STREAM:
                raise ConnectionFault(PROTOCOL_ERROR, f"stream {stream_id} is opened again")
            return  # trailers of a stream that we have ended
        self._last_stream = stream_id
        if self._going or len(self.streams) >= _MAX_STREAMS:
            self.send_frame(RST_STREAM, 0, stream_id, _WORD.pack(REFUSED_STREAM))
            return
        stream = self.streams[stream_id] = self._accept(self, stream_id, headers)
        if stream.local_closed:
            self.streams.pop(stream_id, None)
        elif flags & END_STREAM:
            stream.remote_closed = True
            stream.on_end()

    def _decoded(self, block: bytes) -> HeaderList:
        known = self._blocks.get(block)
        if known is not None:
            return known
        self.extra_work += len(block) // _HEADER_BYTES_A_FRAME
        table = self._decoder.header_table
        alone = not table.dynamic_entries
        try:
            headers = tuple((bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True))
        except hpack.HPACKError as error:
            raise ConnectionFault(COMPRESSION_ERROR, f"headers that cannot be read: {error}") from error
        # A block that neither refers to earlier ones nor leaves anything for later ones means the same every time.
        if alone and not table.dynamic_entries and len(block) <= _CACHED_BLOCK_BYTES and not _resizes(block):
            if len(self._blocks) >= _CACHED_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = headers
        else:
            self._blocks.clear()
        return headers

    def _on_window_update(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a malformed window update")
        more = _WORD.unpack(payload)[0] & _MAX_WINDOW
        if not stream_id:
            self.send_window += more
            if not more or self.send_window > _MAX_WINDOW:
                raise ConnectionFault(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR, "an impossible window")
            self._window_opened()
            return
        stream = self.streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_stream:
                raise ConnectionFault(PROTOCOL_ERROR, f"a window for stream {stream_id}, which was not opened")
            return
        stream.send_window += more
        if not more or stream.send_window > _MAX_WINDOW:
            self._end(stream, FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
            return
        stream.on_window()

    def _window_opened(self) -> None:
        for stream in list(self.blocked):
            stream.on_window()

    def _on_reset(self, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(FRAME_SIZE_ERROR, "a malformed reset")
        if stream_id > self._last_stream or not stream_id:
            raise ConnectionFault(PROTOCOL_ERROR, f"a reset of stream {stream_id}, which was not opened")
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.local_closed = True
            stream.on_gone()

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id or len(payload) % 6 or (flags & ACK and payload):
            raise ConnectionFault(PROTOCOL_ERROR if stream_id else FRAME_SIZE_ERROR, "malformed settings")
        if flags & ACK:
            return
        window = self.initial_send_window
        for key, value in _SETTING.iter_unpack(payload):
            if key == _INITIAL_WINDOW:
                if value > _MAX_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, f"an initial window of {value}")
                window = value
            elif key == _MAX_FRAME_SIZE:
                if not _DEFAULT_FRAME <= value <= _MAX_FRAME:
                    raise ConnectionFault(PROTOCOL_ERROR, f"frames of {value} bytes at most")
                self.max_frame = value
            elif key == _ENABLE_PUSH and value > 1:
                raise ConnectionFault(PROTOCOL_ERROR, f"push is neither on nor off: {value}")
        # Only the last one counts: a frame may name thousands, and each would concern every stream.
        if window != self.initial_send_window:
            for stream in self.streams.values():
                stream.send_window += window - self.initial_send_window
                if stream.send_window > _MAX_WINDOW:
                    raise ConnectionFault(FLOW_CONTROL_ERROR, f"the window of stream {stream.id} runs over")
            self.initial_send_window = window
        self.send_frame(SETTINGS, ACK, 0, b"")
        self._window_opened()


def _resizes(block: bytes) -> bool:
    """Whether a header block begins with a change of the table's size (RFC 7541, 6.3)."""
    return bool(block) and block[0] & 0xE0 == 0x20


def _unpadded(payload: bytes) -> bytes:
    padding = payload[0] if payload else 1
    if padding >= len(payload):
        raise ConnectionFault(PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - padding]
