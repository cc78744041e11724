"""Engines that do not listen: nobody has to go there for want of a decision, and Envoy's words are not theirs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from extproc.stack import free_ports
from tests.e2e.harness import FULL_DUPLEX, Bench, chat, running, send_to, set_modes
from tests.e2e.scripted import Scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")

NO_PROBES = {"probe": {"interval_s": 0}}
MODES = [("BUFFERED", "STREAMED"), (FULL_DUPLEX, FULL_DUPLEX), ("BUFFERED", "NONE"), ("NONE", "STREAMED")]


@pytest.mark.parametrize("file", ["envoy.yaml", "full_duplex.yaml", "clusters.yaml"])
async def test_without_a_decision_the_living_serve(file: str) -> None:
    """A dead engine has nothing to do, so that least_request likes it best: of 20 requests at a time one would fail."""
    async with Scripted("a") as a, Scripted("b") as b:
        (dead,) = free_ports(1)

        def change(config: dict[str, Any]) -> None:
            send_to(config, a.port, b.port, dead)

        async with running([], NO_PROBES, {"models": ["another"], "workers": []}, change, file) as bench:
            for _ in range(10):
                answers = await asyncio.gather(*(bench.post(chat(), x_script="paced 3") for _ in range(20)))
                assert {(answer.status, answer.worker) for answer in answers} == {(200, None)}
            assert await bench.envoy_stat("cluster.engines.upstream_cx_connect_fail") > 0, "nobody ever tried it"


@contextlib.asynccontextmanager
async def lone(modes: tuple[str, str], port: int) -> AsyncIterator[Bench]:
    """One worker, on that port."""

    def change(config: dict[str, Any]) -> None:
        set_modes(config, *modes)
        send_to(config, port)

    worker = {"name": "w", "endpoint": f"127.0.0.1:{port}"}
    async with running([], NO_PROBES, {"workers": [worker]}, change, "full_duplex.yaml") as bench:
        yield bench


@pytest.mark.parametrize("modes", MODES, ids="-".join)
async def test_envoys_own_503_is_not_an_engine_that_is_full(modes: tuple[str, str]) -> None:
    (dead,) = free_ports(1)
    async with lone(modes, dead) as bench:
        for _ in range(3):
            answer = await bench.post(chat())
            assert (answer.status, answer.headers.get("x-engine-name")) == (503, None)
        await bench.settled()
        page = await bench.metrics()
        assert page.sum("headway_decisions_total", outcome="routed") == 3
        assert page.sum("headway_engine_refusals_total") == 0
        reason = "unseen" if modes[1] == "NONE" else "unanswered"
        assert page.sum("headway_ungraded_total", reason=reason) == 3 == page.sum("headway_ungraded_total")


@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("script", ["full 503", "mute 503", "full 429", "mute 429"])
async def test_an_engines_503_is(modes: tuple[str, str], script: str) -> None:
    """Also one without a body, one that Envoy does not show to us, and one to a request that is not streamed."""
    async with Scripted("w") as engine, lone(modes, engine.port) as bench:
        status = script[-3:]
        for stream in (True, False, None):
            assert (await bench.post(chat(stream=stream), x_script=script)).status == int(status)
        await bench.settled()
        page = await bench.metrics()
        assert page.sum("headway_engine_refusals_total", worker="w", status=status) == 3
        assert page.sum("headway_ungraded_total", reason="unanswered") == 0
