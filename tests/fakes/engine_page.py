"""A tiny engine that has nothing but a `/metrics` page, and can be made to serve it badly."""

import asyncio
from types import TracebackType
from typing import Self

from aiohttp import web


class EnginePage:
    """`pieces` are sent one by one, `pause_s` apart."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces: tuple[bytes, ...] = pieces
        self.pause_s = 0.0
        self.status = 200
        self.asked = 0
        self.endpoint = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get("/metrics", self._metrics)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(self.pause_s)
        return response
