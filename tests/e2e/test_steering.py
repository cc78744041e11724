"""Who is chosen is served, by metadata or by header; and nothing that a client sends has a say in it."""

import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from extproc.replies import DESTINATION, LB_NAMESPACE
from tests.e2e.harness import Bench, chat, running, until
from tests.e2e.upstream import Recorder

pytestmark = pytest.mark.asyncio(loop_scope="module")

METADATA = {"metadata": {"key": LB_NAMESPACE, "path": [{"key": DESTINATION}]}}
HEADER = {"header": DESTINATION}
# Plain balancing would send all of so many to one of two upstreams once in 2^19 runs.
ENOUGH = 20
STEERING = (
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    "x-headway-cluster",
    "x-headway-endpoint",
    "x-headway-worker",
    "x-data-parallel-rank",
)


@dataclass(slots=True)
class Two:
    """Two upstreams behind Envoy, of which the filter knows only the first."""

    bench: Bench
    known: Recorder
    unknown: Recorder

    def forget(self) -> None:
        self.known.seen.clear()
        self.unknown.seen.clear()

    @property
    def seen(self) -> list[dict[str, str]]:
        return self.known.seen + self.unknown.seen

    def spoofed(self) -> dict[str, str]:
        """Headers of a client that wants to choose the other one."""
        return dict.fromkeys(STEERING, self.unknown.endpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["as shipped", "metadata only", "header only"])
async def two(request: pytest.FixtureRequest) -> AsyncIterator[Two]:
    async with Recorder("known") as known, Recorder("unknown") as unknown:

        def change(config: dict[str, Any]) -> None:
            engines = next(c for c in config["static_resources"]["clusters"] if c["name"] == "engines")
            engines["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
                {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}
                for port in (known.port, unknown.port)
            ]
            (policy,) = engines["load_balancing_policy"]["policies"]
            override = policy["typed_extension_config"]["typed_config"]
            assert override["override_host_sources"] == [METADATA, HEADER]
            match request.param:
                case "metadata only":
                    override["override_host_sources"] = [METADATA]
                case "header only":
                    override["override_host_sources"] = [HEADER]

        worker = {"name": "known", "endpoint": known.endpoint}
        async with running([], pool={"workers": [worker]}, change_envoy=change) as bench:
            yield Two(bench, known, unknown)


async def test_the_chosen_one_serves(two: Two) -> None:
    two.forget()
    for number in range(ENOUGH):
        answer = await two.bench.post(chat(f"{number}"))
        assert (answer.status, answer.worker, answer.engine) == (200, "known", "known")
    assert len(two.known.seen) == ENOUGH
    assert not two.unknown.seen


async def test_a_client_cannot_choose(two: Two) -> None:
    two.forget()
    for number in range(ENOUGH):
        answer = await two.bench.post(chat(f"{number}"), **two.spoofed())
        assert answer.engine == "known"
    for headers in two.known.seen:
        assert headers["x-gateway-destination-endpoint"] == two.known.endpoint  # ours
        assert not set(STEERING[1:]) & set(headers)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/anything"])
async def test_nor_for_a_request_that_is_passed_on(two: Two, path: str) -> None:
    two.forget()
    for _ in range(ENOUGH):
        await two.bench.post({"model": "nobody's", "messages": []}, path, **two.spoofed())
    assert len(two.seen) == ENOUGH
    assert two.known.seen, "the client's choice was obeyed"
    for headers in two.seen:
        assert not set(STEERING) & set(headers)


async def test_nor_while_the_filter_is_dead(two: Two) -> None:
    bench = two.bench
    assert bench.stack.filter is not None
    await bench.settled()
    await bench.stack.filter.end(signal.SIGKILL)
    two.forget()
    try:
        for number in range(ENOUGH):
            answer = await bench.post(chat(f"{number}"), **two.spoofed())
            assert answer.status == 200
            assert answer.worker is None
        assert two.known.seen, "the client's choice was obeyed"
        for headers in two.seen:
            assert not set(STEERING) & set(headers)
    finally:
        await bench.revive_filter()

    async def routed() -> bool:
        return (await bench.post(chat())).worker == "known"

    await until(routed, 10, "decision after the filter came back")
