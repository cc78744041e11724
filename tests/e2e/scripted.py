"""An upstream that answers as its caller's `x-script` header says, and keeps what it was sent."""

import asyncio
import hashlib
import json
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN = json.dumps({"id": "x", "choices": [{"message": {"content": "word " * 2000}}]}).encode()
ERROR = b'{"error":{"message":"no such thing","type":"invalid_request_error"}}'
FULL = b'{"error":{"message":"full","type":"overloaded"}}'


@dataclass(frozen=True, slots=True)
class Seen:
    """One request, as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body_bytes: int
    body_digest: str


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class Scripted:
    """Scripts: `streamed` (the default), `streamed N` tokens, `paced N` with 10 ms before each, `late N` tenths of
    a second before the first, `slow N` tenths before the headers, `interim` (a 102 before them), `plain`, `error`,
    `empty`, `empty chunked`, `full N` (status N and why), `mute N` (status N without a body), `early` (an error before
    the body has been read), `reset` (no answer at all), `cut N` (after N tokens), `websocket`. The attribute `full`
    makes it refuse every POST with that status instead."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.full: int | None = None
        self.seen: list[Seen] = []
        self.broken_off = 0
        self.port = 0
        self._runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=256 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        script, _, more = request.headers.get("x-script", "streamed").partition(" ")
        headers = {"x-engine-name": self.name}
        if script == "websocket":
            return await self._converse(request)
        if script == "early":
            return web.Response(status=400, body=ERROR, content_type="application/json", headers=headers)
        try:
            body = await request.read()
        except (ConnectionError, asyncio.CancelledError):
            self.broken_off += 1
            raise
        named = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.method, request.path_qs, named, len(body), digest(body)))
        if self.full is not None and request.method == "POST":
            return web.Response(status=self.full, body=FULL, content_type="application/json", headers=headers)
        match script:
            case "plain":
                return web.Response(body=PLAIN, content_type="application/json", headers=headers)
            case "error":
                return web.Response(status=400, body=ERROR, content_type="application/json", headers=headers)
            case "empty" if not more:
                return web.Response(headers=headers)
            case "full":
                return web.Response(status=int(more), body=FULL, content_type="application/json", headers=headers)
            case "mute":
                return web.Response(status=int(more), headers=headers)
            case "reset":
                return self._reset(request)
            case "slow":
                await asyncio.sleep(int(more) / 10)
                more = ""
            case "interim":
                assert request.transport is not None
                request.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        if script == "empty":
            return response
        try:
            if script == "late":
                await asyncio.sleep(int(more) / 10)
                more = ""
            for number in range(int(more or 20)):
                if script == "paced":
                    await asyncio.sleep(0.01)
                await response.write(b": %d\n" % number + TOKEN)
            if script == "cut":
                # Envoy passes on what it has read before it hears of the end.
                await asyncio.sleep(0.05)
                return self._reset(request)
            await response.write(DONE)
        except (ConnectionError, asyncio.CancelledError):
            self.broken_off += 1
            raise
        return response

    @staticmethod
    def _reset(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _converse(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=16 << 20)
        await socket.prepare(request)
        async for message in socket:
            await socket.send_bytes(message.data[::-1])
        return socket

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
