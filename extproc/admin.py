"""The admin port: metrics for Prometheus, the fleet as JSON for people, and a switch for whoever rolls out engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from predictor.fleet import Fleet

_INDEX = b"""<!doctype html><title>Headway</title><h1>Headway</h1>
<p><a href=/fleet>/fleet</a>: the workers, what they are predicted to do, what was learned of them (JSON)
<p><a href=/metrics>/metrics</a>: Prometheus
<p><a href=/healthz>/healthz</a>
<p>POST /drain/NAME: the worker gets no new requests, and becomes empty; POST /serve/NAME: it gets them again
"""


Drain = Callable[[str, bool], dict[str, int] | None]
"""Has an engine, by its name in the config, drain or serve again; returns its workers with the number of requests that
each has in flight. None: there is none of this name."""


class Admin:
    """Serves until stopped. It shows everything to whoever can reach it, and lets them drain engines: keep it on
    loopback or behind a policy."""

    def __init__(
        self,
        fleet: Fleet,
        registry: CollectorRegistry,
        clock: Callable[[], float],
        drain: Drain,
        on_fault: Callable[[Exception], None] = lambda fault: None,
    ) -> None:
        """`on_fault` is told why the fleet cannot be shown."""
        self._fleet = fleet
        self._on_fault = on_fault
        self._registry = registry
        self._clock = clock
        self._drain = drain
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/fleet", self._show_fleet),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.post("/drain/{name:.+}", partial(self._switch, True)),
                web.post("/serve/{name:.+}", partial(self._switch, False)),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        actual: int = self._runner.addresses[0][1]
        return actual

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _index(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=_INDEX, content_type="text/html")

    async def _show_fleet(self, request: web.Request) -> web.Response:
        del request
        try:
            body = msgspec.json.encode(self._fleet.view(self._clock()))
        except Exception as fault:
            self._on_fault(fault)
            told = f"the fleet cannot be shown, which is a fault of ours: {type(fault).__name__}; the log has more"
            raise web.HTTPInternalServerError(
                text=msgspec.json.encode({"error": told}).decode() + "\n", content_type="application/json"
            ) from fault
        return web.Response(body=msgspec.json.format(body, indent=2), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        del request
        return web.Response(body=generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _switch(self, draining: bool, request: web.Request) -> web.Response:
        if request.headers.get("origin") is not None:
            # No page in somebody's browser may do this. Browsers name the origin of every POST.
            raise web.HTTPForbidden(text="not from a browser\n")
        name = request.match_info["name"]
        in_flight = self._drain(name, draining)
        if in_flight is None:
            raise web.HTTPNotFound(text=f"no worker {name!r} in the config\n")
        told = {"draining": draining, "in_flight": in_flight}
        return web.Response(body=msgspec.json.encode(told) + b"\n", content_type="application/json")

    async def _healthz(self, request: web.Request) -> web.Response:
        del request
        return web.Response(text="ok\n")
