"""Without Envoy's access log: tickets are ended by what the engines say of themselves."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.harness import Bench, chat, quick, running, until, words

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROBE_S = 0.3
# Until an engine's word is believed, and then two probes, jittered.
BELIEVED_S = 5 + 4 * PROBE_S


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    def without_access_log(config: dict[str, Any]) -> None:
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        del manager["access_log"]

    engines = [quick("a", step_ms=10), quick("b", step_ms=10)]
    async with running(engines, {"probe": {"interval_s": PROBE_S}}, change_envoy=without_access_log) as bench:
        yield bench


async def released(bench: Bench) -> None:
    async def none() -> bool:
        return await bench.in_flight() == 0

    await until(none, BELIEVED_S + 6, "release")


async def test_tickets_are_ended_by_the_engines_word(bench: Bench) -> None:
    before = await bench.metric("headway_requests_ended_total", source="engine")
    answers = await asyncio.gather(*(bench.post(chat(words(20, number))) for number in range(10)))
    assert all(answer.complete for answer in answers)
    assert await bench.in_flight() == 10
    await released(bench)
    assert await bench.metric("headway_requests_ended_total", source="engine") == before + 10


async def test_also_on_engines_that_were_idle_for_long_and_are_not_seen_busy(bench: Bench) -> None:
    """A request so short that no probe sees it."""
    await asyncio.sleep(3 * PROBE_S)
    assert (await bench.post(chat(words(20, "short"), max_tokens=1))).complete
    await released(bench)


async def test_a_long_stream_keeps_its_ticket_while_it_runs(bench: Bench) -> None:
    await released(bench)
    seconds = BELIEVED_S + 2
    streaming = asyncio.create_task(bench.post(chat(words(20, "long"), max_tokens=round(seconds / 0.01))))
    await asyncio.sleep(seconds - 1)
    assert await bench.in_flight() == 1
    assert (await streaming).complete
    await released(bench)
