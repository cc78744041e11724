"""An upstream that keeps what it was sent, in place of an engine."""

import asyncio
from types import TracebackType
from typing import Self

from aiohttp import web


class Recorder:
    """Answers every request with a short event stream, and keeps its headers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[dict[str, str]] = []
        self.port = 0
        self._runner = web.AppRunner(self._app(), access_log=None)

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=128 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.seen.append({name.lower(): value for name, value in request.headers.items()})
        headers = {"content-type": "text/event-stream", "x-engine-name": self.name}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

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
