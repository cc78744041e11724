"""Two Headways in one chain, each a process of its own: the first that can decides, the other stays out of its way."""

import asyncio
import copy
import io
import json
import signal
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from extproc.stack import Stack
from tests.e2e.harness import (
    FULL_DUPLEX,
    Answer,
    Bench,
    chat,
    cluster_of,
    ext_proc_of,
    manager_of,
    read,
    running,
    send_to,
    set_modes,
    until,
)
from tests.e2e.scripted import Scripted, digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXT_PROC = "envoy.filters.http.ext_proc"
NO_PROBES = {"probe": {"interval_s": 0}}
CLUSTERS = ("headway", "headway_access_log")


@dataclass(slots=True)
class Chain:
    """`first` knows the models sim and one, `second` knows sim and two; the same engines serve all."""

    first: Bench
    second: Bench
    engines: dict[str, Scripted]

    async def post(self, body: Any, **headers: str) -> Answer:
        return await self.first.post(body, **headers)

    async def settled(self) -> None:
        await self.first.settled()
        await self.second.settled()

    async def counts(self) -> dict[str, float]:
        """What both have done so far."""
        told: dict[str, float] = {}
        for name, bench in (("first", self.first), ("second", self.second)):
            page = await bench.metrics()
            told |= {
                f"{name} routed": page.sum("headway_decisions_total", outcome="routed"),
                f"{name} graded": page.sum("headway_predictions_graded_total"),
                f"{name} ended": page.sum("headway_requests_ended_total", source="access_log"),
                f"{name} decided before": page.sum("headway_passed_total", reason="decided_before"),
                f"{name} unknown model": page.sum("headway_passed_total", reason="unknown_model"),
                f"{name} bugs": page.sum("headway_bugs_total"),
            }
        return told

    async def moved(self, before: dict[str, float]) -> dict[str, float]:
        await self.settled()
        return {key: value - before[key] for key, value in (await self.counts()).items() if value != before[key]}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["BUFFERED", FULL_DUPLEX])
async def chain(request: pytest.FixtureRequest) -> AsyncIterator[Chain]:
    async with Scripted("a") as a, Scripted("b") as b, aiohttp.ClientSession() as http:
        engines = {"a": a, "b": b}
        workers = [{"name": name, "endpoint": engine.endpoint} for name, engine in engines.items()]
        with tempfile.TemporaryDirectory() as folder:
            other = Stack(Path(folder), [], NO_PROBES, {"models": ["sim", "two"], "workers": workers})

            def change(config: dict[str, Any]) -> None:
                send_to(config, a.port, b.port)
                if request.param != FULL_DUPLEX:
                    set_modes(config, request.param, "STREAMED")
                for name in CLUSTERS:
                    cluster = copy.deepcopy(cluster_of(config, name))
                    cluster["name"] = cluster["load_assignment"]["cluster_name"] = f"other_{name}"
                    config["static_resources"]["clusters"].append(cluster)
                    send_to(config, other.grpc_port, cluster=f"other_{name}")
                manager = manager_of(config)
                filters = manager["http_filters"]
                at = next(number for number, found in enumerate(filters) if found["name"] == EXT_PROC)
                second = copy.deepcopy(ext_proc_of(config))
                second["grpc_service"]["envoy_grpc"]["cluster_name"] = "other_headway"
                filters.insert(at + 1, {"name": "another", "typed_config": second})
                logger = copy.deepcopy(manager["access_log"][0])
                service = logger["typed_config"]["common_config"]["grpc_service"]
                service["envoy_grpc"]["cluster_name"] = "other_headway_access_log"
                manager["access_log"].append(logger)

            pool = {"models": ["sim", "one"], "workers": workers}
            try:
                await other.start_filter()
                async with running([], NO_PROBES, pool, change, "full_duplex.yaml") as bench:
                    made = Chain(bench, Bench(other, http), engines)

                    async def healthy() -> bool:
                        return await bench.envoy_stat("cluster.other_headway.membership_healthy") == 1

                    await until(healthy, 15, "healthy second filter")
                    yield made
            finally:
                await other.stop()


async def test_where_both_could_decide_the_first_does(chain: Chain) -> None:
    before = await chain.counts()
    answers = await asyncio.gather(*(chain.post(chat(f"{number}")) for number in range(40)))
    for answer in answers:
        assert (answer.status, answer.complete, answer.worker) == (200, True, answer.engine)
    assert await chain.moved(before) == {
        "first routed": 40,
        "first graded": 40,
        "first ended": 40,
        "second decided before": 40,
    }


async def test_what_the_first_does_not_know_the_second_decides(chain: Chain) -> None:
    before = await chain.counts()
    answers = await asyncio.gather(*(chain.post(chat(f"{number}", model="two")) for number in range(40)))
    for answer in answers:
        assert (answer.status, answer.complete, answer.worker) == (200, True, answer.engine)
    assert await chain.moved(before) == {
        "first unknown model": 40,
        "second routed": 40,
        "second graded": 40,
        "second ended": 40,
    }


@pytest.mark.parametrize("model", ["sim", "one", "two", "three"])
async def test_bodies_of_every_size_pass_both_unharmed(chain: Chain, model: str) -> None:
    for size in (100, 6_300, 70_000, 5 << 20):
        body = json.dumps(chat("x" * size, model=model)).encode()
        url = chain.first.stack.url + "/v1/chat/completions"
        async with chain.first.http.post(url, data=io.BytesIO(body)) as response:
            answer = await read(response)
        assert (answer.status, answer.complete) == (200, True)
        assert (answer.worker is None) == (model == "three")
        assert chain.engines[answer.engine].seen[-1].body_digest == digest(body)
    await chain.settled()


async def test_a_refusal_of_the_first_is_the_last_word(chain: Chain) -> None:
    before = await chain.counts()
    assert (await chain.post(chat(max_queue_wait_s=-1))).status == 400
    assert (await chain.post(chat(max_queue_wait_s=-1, model="two"))).status == 400
    assert await chain.moved(before) == {"first unknown model": 1}


async def test_a_client_cannot_pretend_that_somebody_has_decided(chain: Chain) -> None:
    """A decision is known by its metadata, which no request can carry."""
    before = await chain.counts()
    headers = {"x_gateway_destination_endpoint": chain.engines["b"].endpoint}
    for _ in range(10):
        answer = await chain.post(chat(model="two"), **headers)
        assert answer.worker == answer.engine
    moved = await chain.moved(before)
    assert moved["second routed"] == 10
    assert "second decided before" not in moved


async def test_clients_that_leave_leave_nothing_in_either(chain: Chain) -> None:
    async def one(number: int) -> None:
        timeout = aiohttp.ClientTimeout(total=0.01 * (1 + number % 20))
        url = chain.first.stack.url + "/v1/chat/completions"
        body = chat(model=("sim", "two")[number % 2])
        try:
            async with chain.first.http.post(
                url, json=body, timeout=timeout, headers={"x-script": "paced 30"}
            ) as response:
                await response.read()
        except (TimeoutError, aiohttp.ClientError):
            pass

    before = await chain.counts()
    await asyncio.gather(*(one(number) for number in range(100)))
    await chain.settled()
    for bench in (chain.first, chain.second):
        page = await bench.metrics()
        assert page.sum("headway_decisions_total", outcome="routed") == page.sum("headway_requests_ended_total")
    assert (await chain.moved(before)).get("first bugs", 0) == 0


async def test_when_the_first_is_gone_the_second_decides(chain: Chain) -> None:
    assert chain.first.stack.filter is not None
    await chain.settled()
    await chain.first.stack.filter.end(signal.SIGKILL)
    try:
        await chain.first.stack.filter_seen_healthy(False)
        before = await chain.second.metric("headway_predictions_graded_total")
        for _ in range(10):
            answer = await chain.post(chat())
            assert (answer.status, answer.complete, answer.worker) == (200, True, answer.engine)
        await chain.second.settled()
        assert await chain.second.metric("headway_predictions_graded_total") == before + 10
    finally:
        await chain.first.revive_filter()
