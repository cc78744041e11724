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

    def drain(name: str, draining: bool) -> dict[str, int] | None:
        if name not in ("a", "b/c"):
            return None
        filter_.fleet.set_draining("a", draining)
        return {"a": 3}

    admin = Admin(filter_.fleet, filter_.registry, clock, drain)
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


async def test_a_fleet_that_cannot_be_shown_is_said_so_and_told_to_whoever_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filter_, faults = Filter(clock=ManualClock()), list[Exception]()
    monkeypatch.setattr(filter_.fleet, "view", lambda now_s: 1 / 0)
    admin = Admin(filter_.fleet, filter_.registry, ManualClock(), lambda name, on: None, faults.append)
    port = await admin.start("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/fleet") as response:
                assert response.status == 500
                assert "ZeroDivisionError" in (await response.json())["error"]
            async with session.get("/metrics") as response:
                assert response.status == 200
    finally:
        await admin.stop()
    assert [type(fault) for fault in faults] == [ZeroDivisionError]


@pytest.mark.parametrize(("path", "shown"), [("/", "/fleet"), ("/healthz", "ok")])
async def test_pages_for_people_and_probes(http: aiohttp.ClientSession, path: str, shown: str) -> None:
    async with http.get(path) as response:
        assert response.status == 200
        assert shown in await response.text()


async def test_a_worker_is_drained_and_put_back_by_a_post(http: aiohttp.ClientSession) -> None:
    async def shown() -> tuple[bool, float]:
        async with http.get("/fleet") as fleet, http.get("/metrics") as metrics:
            view = (await fleet.json())["pools"]["m"]["workers"]["a"]["draining"]
            families = {family.name: family for family in text_string_to_metric_families(await metrics.text())}
            gauge = {s.labels["worker"]: s.value for s in families["headway_worker_draining"].samples}
            return view, gauge["a"]

    assert await shown() == (False, 0)
    async with http.post("/drain/a") as response:
        assert await response.json() == {"draining": True, "in_flight": {"a": 3}}
    assert await shown() == (True, 1)
    async with http.post("/serve/a") as response:
        assert await response.json() == {"draining": False, "in_flight": {"a": 3}}
    assert await shown() == (False, 0)
    async with http.post("/drain/b%2Fc") as response:
        assert response.status == 200
    async with http.post("/drain/nobody") as response:
        assert (response.status, await response.text()) == (404, "no worker 'nobody' in the config\n")


async def test_no_page_in_a_browser_can_drain_a_worker(http: aiohttp.ClientSession) -> None:
    async with http.post("/drain/a", headers={"origin": "http://evil.example"}) as response:
        assert response.status == 403
    async with http.get("/fleet") as fleet:
        assert (await fleet.json())["pools"]["m"]["workers"]["a"]["draining"] is False


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/fleet", 405), ("GET", "/drain/a", 405)]
)
async def test_everything_else_is_not_there(http: aiohttp.ClientSession, method: str, path: str, status: int) -> None:
    async with http.request(method, path) as response:
        assert response.status == status


async def test_a_port_that_is_taken_is_an_os_error() -> None:
    clock = ManualClock()
    filter_ = Filter(clock=clock)
    first, second = (Admin(filter_.fleet, filter_.registry, clock, lambda name, on: None) for _ in range(2))
    port = await first.start("127.0.0.1", 0)
    with pytest.raises(OSError, match="address already in use"):
        await second.start("127.0.0.1", port)
    await second.stop()
    await first.stop()
    await Admin(filter_.fleet, filter_.registry, clock, lambda name, on: None).stop()
