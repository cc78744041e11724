"""The admin port."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.admin import Admin
from tests.fakes.clock import ManualClock
from tests.fakes.filter import Filter


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    clock = ManualClock()
    filter_ = Filter(clock=clock)
    admin = Admin(filter_.fleet, filter_.registry, clock)
    port = await admin.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        yield session
    await admin.stop()


async def test_metrics_are_prometheus_text(http: aiohttp.ClientSession) -> None:
    async with http.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["content-type"].startswith("text/plain; version=")
        families = {family.name for family in text_string_to_metric_families(await response.text())}
    assert {"headway_decisions", "headway_tickets_in_flight", "headway_worker_up", "headway_bugs"} <= families


async def test_the_fleet_is_json(http: aiohttp.ClientSession) -> None:
    async with http.get("/fleet") as response:
        assert response.content_type == "application/json"
        fleet = await response.json()
    assert fleet["in_flight"] == 0
    assert set(fleet["pools"]["m"]["workers"]) == {"a", "b"}
    worker = fleet["pools"]["m"]["workers"]["a"]
    assert worker["endpoint"] == "10.0.0.1:8000"
    assert (worker["up"], worker["in_flight"], worker["cached_blocks"], worker["wait_s"]) == (True, 0, 0, 0.0)
    assert worker["cost"]["samples"] == 0


@pytest.mark.parametrize(("path", "shown"), [("/", "/fleet"), ("/healthz", "ok")])
async def test_pages_for_people_and_probes(http: aiohttp.ClientSession, path: str, shown: str) -> None:
    async with http.get(path) as response:
        assert response.status == 200
        assert shown in await response.text()


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/fleet", 405)])
async def test_everything_else_is_not_there(http: aiohttp.ClientSession, method: str, path: str, status: int) -> None:
    async with http.request(method, path) as response:
        assert response.status == status


async def test_a_port_that_is_taken_is_an_os_error() -> None:
    clock = ManualClock()
    filter_ = Filter(clock=clock)
    first, second = (Admin(filter_.fleet, filter_.registry, clock) for _ in range(2))
    port = await first.start("127.0.0.1", 0)
    with pytest.raises(OSError, match="address already in use"):
        await second.start("127.0.0.1", port)
    await second.stop()
    await first.stop()
    await Admin(filter_.fleet, filter_.registry, clock).stop()
