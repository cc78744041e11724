"""envoy/clusters.yaml: the route's cluster is the decision."""

import asyncio
import io
import json
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
import yaml

from extproc.stack import envoy_config_path, find_envoy
from tests.e2e.harness import (
    CHAT,
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
    words,
)
from tests.e2e.scripted import Scripted, digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ("a", "b", "c")
# Plain balancing would send all of so many to one of three upstreams once in 3^19 runs.
ENOUGH = 20


@dataclass(slots=True)
class Mesh:
    bench: Bench
    upstreams: dict[str, Scripted]

    def forget(self) -> None:
        for upstream in self.upstreams.values():
            upstream.seen.clear()

    def served(self) -> dict[str, int]:
        return {name: len(upstream.seen) for name, upstream in self.upstreams.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["BUFFERED", FULL_DUPLEX, "NONE"])
async def mesh(request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    """Three engines with a cluster each; `lost` is one whose cluster Envoy does not know."""
    async with Scripted("a") as a, Scripted("b") as b, Scripted("c") as c:
        upstreams = {"a": a, "b": b, "c": c}

        def change(config: dict[str, Any]) -> None:
            set_modes(config, request.param, "STREAMED")
            send_to(config, a.port, b.port, c.port)
            for name, upstream in upstreams.items():
                send_to(config, upstream.port, cluster=f"engine-{name}")

        workers = [
            {"name": name, "endpoint": upstream.endpoint, "cluster": f"engine-{name}"}
            for name, upstream in upstreams.items()
        ]
        overrides = {"probe": {"interval_s": 0}}
        async with running([], overrides, {"workers": workers}, change, "clusters.yaml") as bench:
            yield Mesh(bench, upstreams)


async def test_the_chosen_cluster_serves(mesh: Mesh) -> None:
    mesh.forget()
    answers = await asyncio.gather(*(mesh.bench.post(chat(words(20, number))) for number in range(3 * ENOUGH)))
    for answer in answers:
        assert (answer.status, answer.complete) == (200, True)
        assert answer.worker == answer.engine
    assert min(mesh.served().values()) > 0
    for name, upstream in mesh.upstreams.items():
        assert {seen.headers["x-headway-cluster"] for seen in upstream.seen} == {f"engine-{name}"}


async def test_a_client_cannot_choose_a_cluster(mesh: Mesh) -> None:
    """Neither for a request that is decided on, nor for one that is passed on."""
    for path, body in ((CHAT, chat()), ("/v1/files", {}), ("/v1/models", None)):
        mesh.forget()
        for _ in range(ENOUGH):
            headers = {"x-headway-cluster": "engine-c"}
            async with mesh.bench.http.post(mesh.bench.stack.url + path, json=body, headers=headers) as response:
                answer = await read(response)
            assert answer.status == 200
            assert answer.worker in (None, answer.engine)
        assert mesh.served()["c"] < ENOUGH
        for upstream in mesh.upstreams.values():
            for seen in upstream.seen:
                assert seen.headers.get("x-headway-cluster") == (f"engine-{upstream.name}" if path == CHAT else None)


async def test_a_large_body_arrives_whole(mesh: Mesh) -> None:
    mesh.forget()
    body = json.dumps(chat(words(1000), pad="x" * (3 << 20))).encode()
    async with mesh.bench.http.post(mesh.bench.stack.url + CHAT, data=io.BytesIO(body)) as response:
        answer: Answer = await read(response)
    assert (answer.status, answer.complete) == (200, True)
    assert answer.worker == answer.engine
    (seen,) = (seen for upstream in mesh.upstreams.values() for seen in upstream.seen)
    assert seen.body_digest == digest(body)


async def test_grades_are_given(mesh: Mesh) -> None:
    """Nobody tells who served: the route leaves no choice."""
    before = await mesh.bench.metric("headway_predictions_graded_total")
    for number in range(5):
        await mesh.bench.post(chat(f"{number}"))
    await mesh.bench.settled()
    assert await mesh.bench.metric("headway_predictions_graded_total") == before + 5


@pytest.mark.parametrize("name", ["clusters.yaml", "full_duplex.yaml"])
async def test_envoy_takes_the_example_as_it_stands(name: str) -> None:
    command = [find_envoy(), "--mode", "validate", "-c", str(envoy_config_path(name)), "-l", "error"]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["clusters.yaml", "full_duplex.yaml"])
async def test_what_is_no_subject_of_an_example_is_as_in_the_main_file(name: str) -> None:
    """Limits, timeouts, health checks and what clients may not send: a fault mended there must be mended here."""
    main, example = (yaml.safe_load(envoy_config_path(file).read_text()) for file in ("envoy.yaml", name))
    for cluster in ("headway", "headway_access_log"):
        assert cluster_of(example, cluster) == cluster_of(main, cluster)
    own, theirs = manager_of(example), manager_of(main)
    assert {key: own[key] for key in own if key not in ("route_config", "http_filters")} == {
        key: theirs[key] for key in theirs if key not in ("route_config", "http_filters")
    }
    assert own["http_filters"][1:] == theirs["http_filters"][1:]
    own, theirs = ext_proc_of(example), ext_proc_of(main)
    varied = ("processing_mode", "metadata_options")
    assert {key: own[key] for key in own if key not in varied} == {
        key: theirs[key] for key in theirs if key not in varied
    }


async def test_a_cluster_that_envoy_does_not_know_is_a_503_and_leaves_nothing_behind() -> None:
    worker = {"name": "lost", "endpoint": "127.0.0.1:1", "cluster": "engine-lost"}
    overrides = {"probe": {"interval_s": 0}}
    async with running([], overrides, {"workers": [worker]}, envoy_file="clusters.yaml") as bench:
        answer = await bench.post(chat())
        assert (answer.status, answer.body) == (503, b"")

        async def released() -> bool:
            return await bench.in_flight() == 0

        await until(released, 5, "release")
        assert await bench.metric("headway_decisions_total", outcome="routed") == 1
        assert await bench.metric("headway_predictions_graded_total") == 0
