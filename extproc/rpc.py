"""gRPC over HTTP/2, server side: messages, statuses, and a task a call.

Follows the protocol as gRPC 1.85 describes it (doc/PROTOCOL-HTTP2.md), without compression, which Envoy does not use.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from typing import Final, Protocol
from urllib.parse import quote

from extproc.http2 import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    NO_ERROR,
    STREAM_WINDOW,
    Connection,
    HeaderList,
    Stream,
)

_PREFIX: Final = 5  # bytes before a message: whether it is compressed, and its length
_EACH: Final = 64  # bytes that keeping a message costs beside what is in it
# Smaller parts of a message are joined as they come: each would cost more than what is in it.
_SMALL_PART, _JOINED_PART = 1 << 10, 16 << 10
# Of all calls together, in messages that came in part or were not read yet. What is more is refused, and Envoy sends
# the request on without us.
MAX_KEPT_BYTES: Final = 1 << 30
_QUIET_S: Final = 20.0
# Of a message that is sent in pieces, whatever frames the peer allows: what is written at once is not yet unread.
_MAX_PIECE: Final = 64 << 10
_BACKLOG: Final = 1024
_ANY_HOST: Final = ("0.0.0.0", "::")
_LENGTH = struct.Struct(">I")
_MESSAGE = struct.Struct(">HBBBIBI")  # a frame's header, and the prefix
_HEAD = struct.Struct(">HBBBI")


class Status(IntEnum):
    """gRPC's status codes, as far as they are used here."""

    OK = 0
    UNKNOWN = 2
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class RpcError(Exception):
    """Ends a call with another status than OK."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


Handler = Callable[["Call"], Awaitable[None]]


class Watcher(Protocol):
    """Who is told of what went wrong."""

    def peer_fault(self, what: str, /) -> None:
        """A connection or a call was ended because of what the peer did; in a word of ours."""

    def bug(self, fault: BaseException, /) -> None: ...


def _literal(name: bytes, value: bytes) -> bytes:
    """A header as HPACK writes it without a table and without Huffman's code; both parts shorter than 127 bytes."""
    return b"\x10" + bytes((len(name),)) + name + bytes((len(value),)) + value


_OK_200 = b"\x88"  # `:status: 200` in HPACK's static table
_HEADERS_BLOCK = _OK_200 + _literal(b"content-type", b"application/grpc")
_TRAILERS_OK = _literal(b"grpc-status", b"0")
_NOT_GRPC = b"\x08\x03415"  # `:status` by the name's place in the static table
_ONLY_PLAIN = _literal(b"grpc-accept-encoding", b"identity")
_GRPC_TYPES: Final = (b"application/grpc", b"application/grpc+", b"application/grpc;")
_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_UNITS_S: Final = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MOST_OF_A_MESSAGE: Final = 120


def _trailers(status: Status, message: str) -> bytes:
    if status is Status.OK and not message:
        return _TRAILERS_OK
    told = quote(message, safe=" !\"#$&'()*+,/:;<=>?@[]^`{|}")[:_MOST_OF_A_MESSAGE].encode()
    return _literal(b"grpc-status", b"%d" % status) + _literal(b"grpc-message", told)


class _Kept:
    """Bytes that all calls of a server keep together."""

    __slots__ = ("most", "now")

    def __init__(self, most: int) -> None:
        self.most = most
        self.now = 0


class Call(Stream):
    """One call. Iterating over it gives the caller's messages; `write` sends one of ours."""

    __slots__ = (
        "_began",
        "_deadline",
        "_ended",
        "_held",
        "_kept",
        "_max_bytes",
        "_messages",
        "_needs",
        "_ours",
        "_parts",
        "_size",
        "_task",
        "_waiter",
        "_watcher",
        "_window",
    )

    def __init__(self, connection: Connection, stream_id: int, max_bytes: int, kept: _Kept, watcher: Watcher) -> None:
        super().__init__(connection, stream_id)
        self._max_bytes = max_bytes
        self._kept = kept
        self._ours = 0  # of what is kept
        self._watcher = watcher
        self._messages: deque[bytes] = deque()
        self._held = 0  # bytes in them
        self._parts: list[bytes] = []  # of a message that has come in part
        self._size = 0
        self._needs = _PREFIX  # so many bytes, before there is more to be known of it
        self._began = False  # our headers are sent
        self._ended = False  # the caller has sent its last message, or something that is none
        self._waiter: asyncio.Future[None] | None = None  # the reader, while there is nothing to read
        self._window: asyncio.Future[None] | None = None  # the writer, while nothing may be sent
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def run(self, handler: Handler, tasks: set[asyncio.Task[None]]) -> None:
        task = self._task = asyncio.get_running_loop().create_task(self._run(handler))
        tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            # A task that was cancelled holds its frames, and they the call: all of it would wait for the collector.
            self._task = None

        task.add_done_callback(over)

    async def _run(self, handler: Handler) -> None:
        try:
            await handler(self)
        except RpcError as error:
            self.finish(error.status, error.message)
        except asyncio.CancelledError:
            self.finish(Status.UNKNOWN, "given up")  # says nothing where the caller is gone
            raise
        except Exception as fault:
            self.finish(Status.UNKNOWN, "a fault of the server")
            self._watcher.bug(fault)
        else:
            self.finish(Status.OK)

    def end_after(self, timeout_s: float) -> None:
        """The caller waits no longer."""
        self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._too_late)

    def _too_late(self) -> None:
        self.finish(Status.DEADLINE_EXCEEDED, "the caller's deadline has passed")
        self.on_gone()

    def _settle(self) -> None:
        """Nothing of it is kept any more."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._kept.now -= self._ours
        self._ours = 0

    # In

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> bytes:
        while not self._messages:
            if self._ended or self.local_closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._messages.popleft()
        size = len(message) + _EACH
        self._held -= size
        if not self.local_closed:
            self._ours -= size
            self._kept.now -= size
        if self._held < STREAM_WINDOW:
            self.give_window()
        return message

    def on_data(self, data: bytes) -> None:
        if self._ended:
            return
        size = len(data)
        self._ours += size
        self._kept.now += size
        if not self._size and size >= _PREFIX and not data[0] and size == _PREFIX + _LENGTH.unpack_from(data, 1)[0]:
            # Most frames hold one whole message.
            self._take(data[_PREFIX:])
        else:
            if size < _SMALL_PART and self._parts and len(self._parts[-1]) < _JOINED_PART:
                self._parts[-1] += data
            else:
                self._parts.append(data)
            self._size += size
            if self._size >= self._needs:
                self._split()
            if self._held < STREAM_WINDOW:
                self.give_window()
        if self._kept.now > self._kept.most and not self._ended:
            self._refuse("memory", Status.RESOURCE_EXHAUSTED, "the server keeps as much as it may")

    def _split(self) -> None:
        """Takes out of what has come the messages that are whole."""
        first, *others = self._parts
        if len(first) < _PREFIX:
            first, others = b"".join(self._parts), []
        at, before = 0, len(self._messages)
        if others:
            whole = self._whole(first, 0)
            if whole is None:
                return
            self._needs = whole
            if self._size < whole:
                return
            # All but the last part belong to it.
            last = others.pop()
            at = len(last) - (self._size - whole)
            self._take(b"".join((memoryview(first)[_PREFIX:], *others, memoryview(last)[:at])))
            first = last
        end = len(first)
        self._needs = _PREFIX
        while end - at >= _PREFIX:
            whole = self._whole(first, at)
            if whole is None:
                return
            if end - at < whole:
                self._needs = whole
                break
            self._take(first[at + _PREFIX : at + whole])
            at += whole
        self._parts = [first[at:]] if at < end else []
        self._size = end - at
        self.connection.extra_work += len(self._messages) - before

    def _whole(self, data: bytes, at: int) -> int | None:
        """How long the message is that begins there, prefix included; None if it is refused."""
        compressed, size = data[at], _LENGTH.unpack_from(data, at + 1)[0]
        if compressed:
            self._refuse("compressed", Status.UNIMPLEMENTED, "messages must not be compressed", _ONLY_PLAIN)
            return None
        if size > self._max_bytes:
            told = f"a message of {size} bytes, more than {self._max_bytes}"
            self._refuse("too_large", Status.RESOURCE_EXHAUSTED, told)
            return None
        return _PREFIX + int(size)

    def _take(self, message: bytes) -> None:
        self._messages.append(message)
        self._held += len(message) + _EACH
        self._ours += _EACH - _PREFIX
        self._kept.now += _EACH - _PREFIX
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def on_end(self) -> None:
        if self._size and not self._ended:
            self._refuse("cut_short", Status.INTERNAL, "the last message is not whole")
        self._end_reading()

    def on_gone(self) -> None:
        self._settle()
        self._parts, self._size, self._held = [], 0, 0
        self._messages.clear()
        self._end_reading()
        if self._task is not None:
            self._task.cancel()

    def _end_reading(self) -> None:
        self._ended = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _refuse(self, what: str, status: Status, message: str, more: bytes = b"") -> None:
        self._parts, self._size = [], 0
        self._watcher.peer_fault(what)
        self.finish(status, message, more)
        self.on_gone()

    # Out

    async def write(self, message: bytes) -> None:
        """Returns once it has been handed on: a caller that does not read keeps its writer waiting."""
        connection, size = self.connection, len(message) + _PREFIX
        fits = size <= min(self.send_window, connection.send_window, connection.max_frame, _MAX_PIECE)
        if fits and not connection.congested and not self.local_closed:
            self.send_window -= size
            connection.send_window -= size
            self._begin()
            connection.send(_MESSAGE.pack(size >> 8, size & 0xFF, DATA, 0, self.id, 0, size - _PREFIX), message)
            return
        await self._write_in_pieces(b"\0" + _LENGTH.pack(len(message)), message)

    async def _write_in_pieces(self, prefix: bytes, message: bytes) -> None:
        connection = self.connection
        self._begin()
        at, end = -len(prefix), len(message)
        while at < end and not self.local_closed:
            size = min(end - at, self.send_window, connection.send_window, connection.max_frame, _MAX_PIECE)
            if size > 0 and connection.congested and not connection.paused:
                await connection.room()
                continue
            if size <= 0 or connection.paused:
                self._window = asyncio.get_running_loop().create_future()
                connection.blocked.add(self)
                try:
                    await self._window
                finally:
                    self._window = None
                    connection.blocked.discard(self)
                continue
            self.send_window -= size
            connection.send_window -= size
            piece = message[at : at + size] if at >= 0 else (prefix[at:] + message[: max(0, at + size)])[:size]
            connection.send_frame(DATA, 0, self.id, piece)
            at += size

    def on_window(self) -> None:
        if self._window is not None and not self._window.done():
            self._window.set_result(None)

    def _begin(self) -> None:
        if not self._began and not self.local_closed:
            self._began = True
            size = len(_HEADERS_BLOCK)
            self.connection.send(_HEAD.pack(0, size, HEADERS, END_HEADERS, self.id), _HEADERS_BLOCK)

    def finish(self, status: Status, message: str = "", more: bytes = b"") -> None:
        """Tells the caller how the call ended; `more` are encoded headers that say more."""
        if self.local_closed:
            return
        self._settle()
        block = _trailers(status, message) + more
        if not self._began:
            block = _HEADERS_BLOCK + block
        self.connection.send_frame(HEADERS, END_HEADERS | END_STREAM, self.id, block)
        if self.remote_closed:
            self.connection.forget(self)
        else:
            self.connection.reset(self, NO_ERROR)


class _Refused(Stream):
    """A stream that is no call of ours."""

    __slots__ = ()

    def __init__(self, connection: Connection, stream_id: int, block: bytes) -> None:
        super().__init__(connection, stream_id)
        connection.send_frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)
        connection.reset(self, NO_ERROR)


class RpcServer:
    """Serves `methods` by their paths, each a coroutine that is given the call."""

    def __init__(
        self,
        methods: Mapping[str, Handler],
        max_bytes: int,
        watcher: Watcher,
        max_kept_bytes: int = MAX_KEPT_BYTES,
        quiet_s: float = _QUIET_S,
    ) -> None:
        """`max_bytes` bounds one message, `max_kept_bytes` all that was received and not yet read. A peer that is not
        heard for `quiet_s` has as long again to answer a ping."""
        self._methods = {path.encode(): handler for path, handler in methods.items()}
        self._max_bytes = max_bytes
        self._watcher = watcher
        self._kept = _Kept(max_kept_bytes)
        self._quiet_s = quiet_s
        self._connections: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Returns the port. OSError if the address cannot be had."""
        loop = asyncio.get_running_loop()
        if host in _ANY_HOST and socket.has_dualstack_ipv6():
            # As gRPC's servers do: who listens everywhere is reached over either protocol.
            both = socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
            self._listener = await loop.create_server(self._connect, sock=both, backlog=_BACKLOG)
        else:
            self._listener = await loop.create_server(self._connect, host, port, backlog=_BACKLOG)
        return int(self._listener.sockets[0].getsockname()[1])

    def retire(self) -> None:
        """Asks all who are connected to go elsewhere with new calls; those that come nevertheless are served."""
        for connection in self._connections:
            connection.retire()

    async def stop(self, grace_s: float) -> None:
        """Takes no more calls, gives those that are open so long to end, and cancels what is left."""
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections:
            connection.go_away()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)
        left = list(self._tasks)
        for connection in list(self._connections):
            for stream in list(connection.streams.values()):
                connection.reset(stream, CANCEL)
                stream.on_gone()
            connection.close()
        if left:
            await asyncio.wait(left, timeout=1.0)

    def _connect(self) -> Connection:
        connection = Connection(
            self._accept, self._connections.discard, self._watcher.peer_fault, self._watcher.bug, self._quiet_s
        )
        self._connections.add(connection)
        return connection

    def _accept(self, connection: Connection, stream_id: int, headers: HeaderList) -> Stream:
        told = dict(headers)
        content_type = told.get(b"content-type", b"")
        if told.get(b":method") != b"POST" or not (
            content_type in _GRPC_TYPES or content_type.startswith(_GRPC_TYPES[1:])
        ):
            return _Refused(connection, stream_id, _NOT_GRPC)
        handler = self._methods.get(told.get(b":path", b""))
        if handler is None:
            return _Refused(connection, stream_id, _HEADERS_BLOCK + _trailers(Status.UNIMPLEMENTED, "no such method"))
        call = Call(connection, stream_id, self._max_bytes, self._kept, self._watcher)
        call.run(handler, self._tasks)
        timeout = told.get(b"grpc-timeout")
        if timeout is not None and (written := _TIMEOUT.fullmatch(timeout)) is not None:
            call.end_after(int(written[1]) * _UNITS_S[written[2]])
        return call
