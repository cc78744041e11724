"""The endpoint-picker protocol through the real Envoy: subsets, lists, scores, who served; engines that are full."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from extproc.ledger import BACK_OFF_S
from extproc.replies import DESTINATION, LB_NAMESPACE, SCORES, SUBSET, SUBSET_NAMESPACE
from extproc.stack import free_ports
from tests.e2e.harness import (
    FULL_DUPLEX,
    Answer,
    Bench,
    chat,
    ext_proc_of,
    manager_of,
    running,
    send_to,
    set_modes,
    until,
)
from tests.e2e.scripted import Scripted

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENOUGH = 20
# A gateway's own filter says which endpoints belong to the route: here at the wish of a test, as a list or as text.
SUBSET_BY_HEADER = f"""
function envoy_on_request(handle)
  local metadata = handle:streamInfo():dynamicMetadata()
  local list, text = handle:headers():get("x-list"), handle:headers():get("x-text")
  if list ~= nil then
    local endpoints = {{}}
    for endpoint in string.gmatch(list, "[^, ]+") do table.insert(endpoints, endpoint) end
    metadata:set("{SUBSET_NAMESPACE}", "{SUBSET}", endpoints)
  end
  if text ~= nil then metadata:set("{SUBSET_NAMESPACE}", "{SUBSET}", text) end
end
"""


@dataclass(slots=True)
class Pool:
    """Three engines, and a worker on whose port nobody listens."""

    bench: Bench
    engines: dict[str, Scripted]
    endpoints: dict[str, str]

    async def ask(self, **headers: str) -> Answer:
        return await self.bench.post(chat("hi"), **headers)

    @property
    def living(self) -> str:
        return ",".join(self.endpoints[name] for name in "abc")


@contextlib.asynccontextmanager
async def pool_of(mode: str, **settings: Any) -> AsyncIterator[Pool]:
    async with Scripted("a") as a, Scripted("b") as b, Scripted("c") as c:
        (dead_port,) = free_ports(1)
        engines = {"a": a, "b": b, "c": c}
        ports = {**{name: engine.port for name, engine in engines.items()}, "dead": dead_port}

        def change(config: dict[str, Any]) -> None:
            if mode != FULL_DUPLEX:
                set_modes(config, mode, "STREAMED")
            send_to(config, *ports.values())
            metadata = ext_proc_of(config)["metadata_options"]
            assert metadata["forwarding_namespaces"]["untyped"] == [LB_NAMESPACE, SUBSET_NAMESPACE]
            manager = manager_of(config)
            lua = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
            script = {"@type": lua, "default_source_code": {"inline_string": SUBSET_BY_HEADER}}
            manager["http_filters"].insert(0, {"name": "envoy.filters.http.lua", "typed_config": script})
            told = manager["route_config"]["virtual_hosts"][0]["response_headers_to_add"]
            for name, key in (("x-told-endpoints", DESTINATION), ("x-told-scores", SCORES)):
                told.append({"header": {"key": name, "value": f"%DYNAMIC_METADATA({LB_NAMESPACE}:{key})%"}})

        endpoints = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        workers = [{"name": name, "endpoint": endpoint} for name, endpoint in endpoints.items()]
        overrides = {"probe": {"interval_s": 0}}
        async with running([], overrides, {"workers": workers, **settings}, change, "full_duplex.yaml") as bench:
            yield Pool(bench, engines, endpoints)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["BUFFERED", FULL_DUPLEX])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    async with pool_of(request.param) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def pool(shared: Pool) -> Pool:
    for engine in shared.engines.values():
        engine.seen.clear()
    return shared


def arrived(pool: Pool) -> Mapping[str, list[str]]:
    """The endpoints that the header named, by who served."""
    return {
        name: [seen.headers[DESTINATION] for seen in engine.seen]
        for name, engine in pool.engines.items()
        if engine.seen
    }


@pytest.mark.parametrize("form", ["x_list", "x_text"])
async def test_only_the_subset_is_chosen_from(pool: Pool, form: str) -> None:
    for subset in (["a"], ["b", "c"], ["c", "a"]):
        wanted = ",".join(pool.endpoints[name] for name in subset)
        for _ in range(ENOUGH):
            answer = await pool.ask(**{form: wanted})
            assert answer.status == 200
            assert answer.worker == answer.engine
            assert answer.worker in subset
            assert set(answer.headers["x-told-endpoints"].split(",")) <= {pool.endpoints[name] for name in subset}


@pytest.mark.parametrize("subset", [{"x_text": " "}, {"x_list": "10.9.9.9:1"}, {"x_text": "10.9.9.9:1, nonsense"}])
async def test_a_subset_without_one_of_ours_is_a_503(pool: Pool, subset: dict[str, str]) -> None:
    answer = await pool.ask(**subset)
    assert answer.status == 503
    assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    assert answer.json["error"]["code"] == "no_worker"
    assert not arrived(pool)


async def test_header_and_metadata_say_the_same(pool: Pool) -> None:
    for _ in range(ENOUGH):
        answer = await pool.ask(x_list=pool.living)
        (named,) = pool.engines[answer.engine].seen[-1:]
        assert named.headers[DESTINATION] == answer.headers["x-told-endpoints"]
        assert answer.headers["x-told-endpoints"].split(",")[0] == pool.endpoints[answer.engine]
        assert "x-told-scores" not in answer.headers


async def ask_until(pool: Pool, reached: Callable[[Answer], bool], **headers: str) -> list[Answer]:
    """Asks until an answer is the wanted one, the last of those returned. Who was spared comes back in the meantime."""
    answers: list[Answer] = []

    async def asked() -> bool:
        answers.append(await pool.ask(**headers))
        return reached(answers[-1])

    await until(asked, 10 * BACK_OFF_S, "such an answer")
    return answers


async def ask_the_dead(pool: Pool) -> Answer:
    """Until the dead one is chosen; every answer before is good as well."""
    answers = await ask_until(pool, lambda answer: answer.worker == "dead")
    assert all((answer.status, answer.complete) == (200, True) for answer in answers)
    assert all(answer.engine == answer.worker for answer in answers[:-1])
    return answers[-1]


async def test_the_list_is_walked_and_nobody_gets_anothers_grade(pool: Pool) -> None:
    graded = await pool.bench.metric("headway_predictions_graded_total", worker="dead")
    elsewhere = await pool.bench.metric("headway_ungraded_total", reason="served_elsewhere")
    answer = await ask_the_dead(pool)
    assert answer.headers["x-told-endpoints"].split(",")[:2] == [pool.endpoints["dead"], pool.endpoints[answer.engine]]
    await pool.bench.settled()
    assert await pool.bench.metric("headway_ungraded_total", reason="served_elsewhere") == elsewhere + 1
    assert await pool.bench.metric("headway_predictions_graded_total", worker="dead") == graded


async def test_the_booking_moves_to_who_serves(pool: Pool) -> None:
    """While the stream runs, the fleet shows it where it is."""

    async def in_flight() -> dict[str, int]:
        return {name: (await pool.bench.worker(name))["in_flight"] for name in pool.endpoints}

    for _ in range(50):
        await pool.bench.settled()
        elsewhere = await pool.bench.metric("headway_ungraded_total", reason="served_elsewhere")
        asking = asyncio.create_task(pool.ask(x_script="paced 60"))

        async def begun() -> bool:
            return any(engine.seen for engine in pool.engines.values())

        await until(begun, 5, "arrival")
        await asyncio.sleep(0.2)
        shown = await in_flight()
        answer = await asking
        assert shown == {name: int(name == answer.engine) for name in pool.endpoints}
        for engine in pool.engines.values():
            engine.seen.clear()
        if answer.worker == "dead":
            assert await pool.bench.metric("headway_ungraded_total", reason="served_elsewhere") == elsewhere + 1
            return
    raise AssertionError("the dead one was never chosen")


async def test_scores_are_told_where_they_are_wanted() -> None:
    async with pool_of("BUFFERED", scores=True) as pool:
        answer = await pool.ask(x_list=pool.living)
        scores = {
            name: float(text)
            for name, _, text in (s.partition("=") for s in answer.headers["x-told-scores"].split(","))
        }
        assert set(scores) == {"a", "b", "c"}
        assert max(scores.values()) == 1
        assert min(scores.values()) > 0


@pytest_asyncio.fixture(loop_scope="module")
async def full(pool: Pool) -> AsyncIterator[Scripted]:
    """One of the three, to be full until the test is over."""
    engine = pool.engines["b"]
    yield engine
    engine.full = None
    await pool.bench.settled()
    await asyncio.sleep(2.1)  # longer than anybody is spared


async def refusals(pool: Pool, status: int) -> float:
    return await pool.bench.metric("headway_engine_refusals_total", worker="b", status=str(status))


async def test_an_engine_that_answers_429_is_spared_for_a_while(pool: Pool, full: Scripted) -> None:
    """Envoy passes it on: for all that it knows, it is the caller who asks too much."""
    before = await refusals(pool, 429)
    full.full = 429
    *served, refused = await ask_until(pool, lambda answer: answer.status != 200, x_list=pool.living)
    refused_s = time.monotonic()
    assert (refused.status, refused.engine, refused.json["error"]["message"]) == (429, "b", "full")
    while time.monotonic() - refused_s < 0.75 * BACK_OFF_S:
        answer = await pool.ask(x_list=pool.living)
        await asyncio.sleep(0.05)
        if time.monotonic() - refused_s < BACK_OFF_S:  # a machine may be so slow that it is over
            served.append(answer)
    assert {answer.status for answer in served} == {200}
    assert len(full.seen) == 1
    assert await refusals(pool, 429) == before + 1


async def test_who_has_nobody_else_still_asks_it(pool: Pool, full: Scripted) -> None:
    full.full = 429
    for _ in range(3):
        assert (await pool.ask(x_list=pool.endpoints["b"])).status == 429
    full.full = None
    assert (await pool.ask(x_list=pool.endpoints["b"])).status == 200


async def test_a_503_of_an_engine_is_retried_at_the_next_of_the_list(pool: Pool, full: Scripted) -> None:
    retried = await pool.bench.metric("headway_requests_retried_total")
    full.full = 503
    answers = await ask_until(pool, lambda _: bool(full.seen), x_list=pool.living)
    assert [(answer.status, answer.complete) for answer in answers] == [(200, True)] * len(answers)
    assert {answer.engine for answer in answers} <= {"a", "c"}
    await pool.bench.settled()
    assert await pool.bench.metric("headway_requests_retried_total") == retried + len(full.seen)
    for answer in answers:
        if answer.worker == "b":
            assert answer.headers["x-told-endpoints"].split(",")[1] == pool.endpoints[answer.engine]


async def test_where_all_are_full_the_caller_is_told_after_the_list_is_walked(pool: Pool, full: Scripted) -> None:
    before = await pool.bench.metric("headway_engine_refusals_total", status="503")
    for engine in pool.engines.values():
        engine.full = 503
    try:
        answer = await pool.ask(x_list=pool.living)
    finally:
        for engine in pool.engines.values():
            engine.full = None
    assert (answer.status, answer.json["error"]["message"]) == (503, "full")
    assert {name: len(engine.seen) for name, engine in pool.engines.items()} == {"a": 1, "b": 1, "c": 1}
    await pool.bench.settled()
    assert await pool.bench.metric("headway_engine_refusals_total", status="503") == before + 1
    assert full.full is None
