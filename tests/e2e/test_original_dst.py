"""envoy/clusters.yaml with ORIGINAL_DST: Envoy goes to the endpoint that the filter names, and to nobody's else."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from extproc.replies import ENDPOINT
from tests.e2e.harness import (
    CHAT,
    FULL_DUPLEX,
    Answer,
    Bench,
    chat,
    manager_of,
    read,
    running,
    send_to,
    set_modes,
    words,
)
from tests.e2e.scripted import Scripted, digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENOUGH = 20
OVERRIDES = {"probe": {"interval_s": 0}, "gateway": {"original_dst": True}}


@dataclass(slots=True)
class Net:
    """Two workers that Envoy does not know, one plain upstream that it does, and a secret that nobody may reach."""

    bench: Bench
    workers: dict[str, Scripted]
    plain: Scripted
    secret: Scripted

    def forget(self) -> None:
        for upstream in (*self.workers.values(), self.plain, self.secret):
            upstream.seen.clear()

    async def attack(self, path: str, body: Any, name: str = ENDPOINT) -> Answer:
        """As a client that wants to get to the secret, in every spelling that headers have."""
        headers = [(name, self.secret.endpoint), (name.title(), f"{self.secret.endpoint},127.0.0.1:1")]
        async with self.bench.http.post(self.bench.stack.url + path, json=body, headers=headers) as response:
            return await read(response)


async def net_of(mode: str, change_more: Callable[[dict[str, Any]], None] | None = None) -> AsyncIterator[Net]:
    async with Scripted("a") as a, Scripted("b") as b, Scripted("plain") as plain, Scripted("secret") as secret:

        def change(config: dict[str, Any]) -> None:
            set_modes(config, mode, "STREAMED")
            send_to(config, plain.port)
            if change_more is not None:
                change_more(config)

        workers = {"a": a, "b": b}
        told = [{"name": name, "endpoint": upstream.endpoint} for name, upstream in workers.items()]
        async with running([], OVERRIDES, {"workers": told}, change, "clusters.yaml") as bench:
            yield Net(bench, workers, plain, secret)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["BUFFERED", FULL_DUPLEX, "NONE"])
async def net(request: pytest.FixtureRequest) -> AsyncIterator[Net]:
    async for made in net_of(request.param):
        yield made


async def test_the_chosen_one_serves_though_envoy_has_never_heard_of_it(net: Net) -> None:
    net.forget()
    answers = await asyncio.gather(*(net.bench.post(chat(words(20, number))) for number in range(2 * ENOUGH)))
    for answer in answers:
        assert (answer.status, answer.complete) == (200, True)
        assert answer.worker == answer.engine
    assert {answer.engine for answer in answers} == {"a", "b"}
    for upstream in net.workers.values():
        assert {seen.headers[ENDPOINT] for seen in upstream.seen} == {upstream.endpoint}
    await net.bench.settled()
    assert await net.bench.metric("headway_predictions_graded_total") >= 2 * ENOUGH


async def test_a_large_body_arrives_whole(net: Net) -> None:
    net.forget()
    body = chat(words(1000), pad="x" * (3 << 20))
    answer = await net.bench.post(body)
    assert (answer.status, answer.complete, answer.worker) == (200, True, answer.engine)
    (seen,) = net.workers[answer.engine].seen
    assert seen.body_bytes > 3 << 20


@pytest.mark.parametrize(
    ("path", "body", "decided"),
    [
        (CHAT, chat(), True),
        (CHAT, {"model": "nobody's", "messages": []}, False),
        (CHAT, [1, 2], False),
        ("/v1/files", {}, False),
        ("/v1/models", None, False),
    ],
    ids=["decided", "unknown model", "unreadable", "another path", "no body"],
)
async def test_a_client_that_names_an_endpoint_does_not_get_there(
    net: Net, path: str, body: Any, decided: bool
) -> None:
    net.forget()
    for _ in range(ENOUGH):
        answer = await net.attack(path, body)
        assert answer.status == 200
    assert not net.secret.seen
    reached = [*net.workers["a"].seen, *net.workers["b"].seen, *net.plain.seen]
    assert len(reached) == ENOUGH
    for seen in reached:
        assert net.secret.endpoint not in seen.headers.get(ENDPOINT, "")
        assert digest(seen.headers.get(ENDPOINT, "").encode())
    if not decided and net.plain.seen:
        assert all(ENDPOINT not in seen.headers for seen in net.plain.seen)


async def test_nor_while_the_filter_is_dead(net: Net) -> None:
    assert net.bench.stack.filter is not None
    await net.bench.settled()
    await net.bench.stack.filter.end(signal.SIGKILL)
    net.forget()
    try:
        for _ in range(ENOUGH):
            answer = await net.attack(CHAT, chat())
            # Full duplex loses what comes before Envoy's health check knows.
            assert answer.status in (200, 500)
        assert not net.secret.seen
    finally:
        await net.bench.revive_filter()


async def test_it_is_the_removal_of_the_header_that_protects() -> None:
    """Without it the same requests do arrive: or the tests above would not tell anything."""

    def careless(config: dict[str, Any]) -> None:
        del manager_of(config)["early_header_mutation_extensions"]

    async for net in net_of("BUFFERED", careless):
        headers = {ENDPOINT: net.secret.endpoint}
        async with net.bench.http.post(net.bench.stack.url + "/v1/files", json={}, headers=headers) as response:
            await response.read()
        assert len(net.secret.seen) == 1
