"""Faults of an engine, switched on and off while it runs: what goes wrong with its answers and its event stream."""

import asyncio
import zlib
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from aiohttp import web

from enginesim.api_errors import ApiError
from enginesim.api_requests import decode

_COMMENT = b": keep-alive\n\n"
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_WORD_S = 0.05

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]


class FaultSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What is wrong. The batch faults count down as they are used up, one a published batch."""

    delay_s: _Seconds = 0.0  # headers at once, the first event late; a plain answer late
    headers_delay_s: _Seconds = 0.0  # not even headers
    hang: bool = False  # accepts, and never answers
    refuse_status: Annotated[int, msgspec.Meta(ge=400, le=599)] | None = None
    reset: bool = False  # the connection is reset in place of an answer
    reset_after_chunks: _Count | None = None  # a stream's, behind so many writes of events
    comments: _Count = 0  # keep-alive comments before the first event
    empty_stream: bool = False
    gzip: bool = False
    interim: bool = False  # "100 Continue", which nobody asked for, before the answer
    cached_tokens_off: int = 0  # added to the count in usage
    everywhere: bool = False  # hang, refuse, reset and headers_delay_s also for the pages that probes read
    drop_batches: _Count = 0  # lost on their way, but kept for replay
    duplicate_batches: _Count = 0
    skip_sequences: _Count = 0  # numbers that the next batch leaves out, and that no replay can fill


class Faults:
    """The settings as of now; read wherever something may go wrong."""

    def __init__(self) -> None:
        self.now = FaultSettings()
        self._freed = asyncio.Event()

    def change(self, raw: bytes) -> FaultSettings:
        """Set the fields that are named, leave the others. ApiError 400 naming the field at fault."""
        named = decode(raw, FaultSettings)
        known = msgspec.structs.asdict(self.now)
        told: dict[str, Any] = msgspec.json.decode(raw)
        self._become(FaultSettings(**{**known, **{name: getattr(named, name) for name in told}}))
        return self.now

    def clear(self) -> None:
        """Nothing is wrong any more. Requests that hang go on hanging no longer: their connections are cut."""
        self._become(FaultSettings())

    def _become(self, settings: FaultSettings) -> None:
        hung, self.now = self.now.hang, settings
        if hung and not settings.hang:
            self._freed.set()
            self._freed = asyncio.Event()

    async def strike(self, http: web.Request) -> None:
        """Whatever befalls a request before it is looked at: returns if it may go on."""
        now = self.now
        if now.interim and http.transport is not None:
            http.transport.write(_INTERIM)
        if now.headers_delay_s:
            await http.read()
            await asyncio.sleep(now.headers_delay_s)
        if now.hang:
            await http.read()
            await self._freed.wait()
            cut(http)
        if now.reset:
            await http.read()
            cut(http)
        if now.refuse_status is not None:
            status = HTTPStatus(now.refuse_status) if now.refuse_status in set(HTTPStatus) else None
            kind = status.phrase if status is not None else "Error"
            raise ApiError(now.refuse_status, kind, "The engine refuses, because it was told to.")

    def cached_tokens(self, true: int) -> int:
        """What usage says of `true` cached tokens."""
        return max(0, true + self.now.cached_tokens_off)


class Answer:
    """An event stream on its way to the client, and what befalls it."""

    def __init__(self, http: web.Request, faults: Faults) -> None:
        self._http = http
        self._settings = faults.now
        self._response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        self._compressor = None
        self._writes = 0
        if self._settings.gzip:
            self._response.headers["Content-Encoding"] = "gzip"
            self._compressor = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)

    async def begin(self) -> None:
        """Headers, and comments while the first event keeps everybody waiting."""
        await self._response.prepare(self._http)
        for _ in range(self._settings.comments):
            await self._send(_COMMENT)
        if self._settings.delay_s:
            await asyncio.sleep(self._settings.delay_s)

    async def write(self, events: bytes) -> None:
        """Some events, in one chunk. ConnectionResetError if the client has gone, or is said to have."""
        if self._settings.empty_stream:
            return
        if self._settings.reset_after_chunks is not None and self._writes >= self._settings.reset_after_chunks:
            await asyncio.sleep(_LAST_WORD_S)  # what was written is sent before the connection is cut
            cut(self._http)
        self._writes += 1
        await self._send(events)

    async def end(self) -> web.StreamResponse:
        """The last chunk."""
        if self._compressor is not None:
            await self._response.write(self._compressor.flush())
        return self._response

    async def _send(self, data: bytes) -> None:
        if self._compressor is not None:
            data = self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        if data:
            await self._response.write(data)


def cut(http: web.Request) -> None:
    """Reset the connection under a request. Raises ConnectionResetError, for there is nobody left to answer."""
    if http.transport is not None:
        http.transport.abort()
    raise ConnectionResetError("cut on purpose")


class FaultPages:
    """The handlers of `/sim/faults`."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    async def show(self, http: web.Request) -> web.Response:
        """`GET /sim/faults`: what is wrong now, with what is left of the counts."""
        return self._told()

    async def change(self, http: web.Request) -> web.Response:
        """`POST /sim/faults {"delay_s": 2}`: sets what is named, from the next request or batch on. 400 otherwise."""
        self._faults.change(await http.read())
        return self._told()

    async def clear(self, http: web.Request) -> web.Response:
        """`DELETE /sim/faults`: all is well again."""
        self._faults.clear()
        return self._told()

    def _told(self) -> web.Response:
        return web.Response(body=msgspec.json.encode(self._faults.now), content_type="application/json")
