"""Data-parallel ranks of an engine: declared or discovered, each a worker with a feed and a load of its own."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from enginesim.process import EngineProcess
from extproc.app import App
from extproc.config import parse_config, port_of_rank
from tests.extproc.test_probe import PAGE, Pages
from tests.fakes.kv_publisher import FakePublisher, stored

CONFIG = """
listen: {{grpc: 127.0.0.1:0, admin: 127.0.0.1:0}}
shutdown: {{notice_s: 0, grace_s: 0}}
probe: {{interval_s: 0.05}}
pools:
- name: m
  workers:
  - name: a
    endpoint: {endpoint}
    {more}
"""


@contextlib.asynccontextmanager
async def running(endpoint: str, more: str = "adapters: []", config: str = CONFIG) -> AsyncIterator[int]:
    """The whole service; its admin port."""
    app = App(parse_config(config.format(endpoint=endpoint, more=more), "test"))
    _, admin = await app.start()
    try:
        yield admin
    finally:
        await app.stop()


async def workers(admin: int) -> dict[str, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{admin}/fleet") as response:
        told: dict[str, dict[str, Any]] = (await response.json())["pools"]["m"]["workers"]
        return told


async def followed(admin: int, **blocks: int) -> None:
    """These workers are there, live, with so many blocks; and no others."""
    wanted = {name.replace("__", "/"): ("live", count) for name, count in blocks.items()}
    deadline_s = time.monotonic() + 20
    seen: dict[str, tuple[str, int]] = {}
    while seen != wanted:
        assert time.monotonic() < deadline_s, seen
        seen = {name: (told["feed"], told["cached_blocks"]) for name, told in (await workers(admin)).items()}


async def test_ranks_that_an_engine_tells_of_become_workers_with_their_own_events() -> None:
    async with FakePublisher() as first, FakePublisher() as second:
        first.drop(stored(1))
        for number in range(3):
            second.drop(stored(number))
        sources = {
            str(rank): {"endpoint": each.endpoint, "replay_endpoint": each.replay_endpoint}
            for rank, each in enumerate((first, second))
        }
        pages = Pages(metrics=PAGE.replace(b'"32"', b'"16"'), kv_event_sources=sources)
        async with pages as engine, running(engine.endpoint) as admin:
            await followed(admin, a__0=1, a__1=3)
            seen = await workers(admin)
            assert {worker["endpoint"] for worker in seen.values()} == {engine.endpoint}
            await second.publish(stored(9))
            await followed(admin, a__0=1, a__1=4)


async def test_one_engine_that_tells_where_its_events_are_is_followed_there() -> None:
    async with FakePublisher() as publisher:
        publisher.drop(stored(1))
        source = {"0": {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}}
        page = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
        async with Pages(metrics=page, kv_event_sources=source) as engine, running(engine.endpoint) as admin:
            await followed(admin, a=1)


async def test_an_engine_that_pushes_its_load_is_listened_to() -> None:
    context = zmq.asyncio.Context()
    with context, context.socket(zmq.PUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        info = {"max_total_num_tokens": 64000, "dp_size": 1, "kv_events": {"load_endpoint_port_base": port}}
        async with Pages(server_info=info, v1__loads={"loads": []}) as engine, running(engine.endpoint) as admin:
            deadline_s = time.monotonic() + 20
            heard = False
            while not heard:
                assert time.monotonic() < deadline_s
                await publisher.send_multipart([b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", 2, 1])])
                async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{admin}/metrics") as response:
                    heard = 'headway_load_reports_total{result="ok",worker="a"}' in await response.text()


async def test_a_process_that_pushes_its_load_is_heard_and_its_restart_shows_in_it(
    capfd: pytest.CaptureFixture[str],
) -> None:
    flags = ("--family", "sglang", "--page-size", "16", "--load-publish-port", "0", "--prefill-us-per-token", "1")
    config = CONFIG.replace("interval_s: 0.05", "interval_s: 600")  # nobody asks a second time
    with EngineProcess(*flags) as engine:
        async with running(f"127.0.0.1:{engine.port}", config=config) as admin, aiohttp.ClientSession() as http:
            prompt = {"model": "sim", "prompt": list(range(100, 200)), "max_tokens": 2}
            async with http.post(f"{engine.url}/v1/completions", json=prompt) as response:
                assert response.status == 200
            await followed(admin, a=6)
            deadline_s = time.monotonic() + 20
            said = page = ""
            while 'headway_load_reports_total{result="ok",worker="a"}' not in page:
                assert time.monotonic() < deadline_s
                async with http.get(f"http://127.0.0.1:{admin}/metrics") as response:
                    page = await response.text()
            await asyncio.sleep(1.2)  # a heartbeat with what was prefilled so far
            async with http.post(f"{engine.url}/sim/restart") as response:
                assert response.status == 200
            while "engine_restarted" not in said:  # its counters have begun again
                assert time.monotonic() < deadline_s, said
                await asyncio.sleep(0.05)
                said += capfd.readouterr().err


async def test_ranks_that_are_declared_are_there_at_once() -> None:
    async with Pages() as engine, running(engine.endpoint, "data_parallel_ranks: 3") as admin:
        assert list(await workers(admin)) == ["a/0", "a/1", "a/2"]


async def test_an_engine_drains_with_all_of_its_ranks_also_those_that_it_tells_of_later() -> None:
    async with FakePublisher() as first, FakePublisher() as second:
        for publisher in (first, second):
            publisher.drop(stored(1))
        sources = {
            str(rank): {"endpoint": each.endpoint, "replay_endpoint": each.replay_endpoint}
            for rank, each in enumerate((first, second))
        }
        pages = Pages(metrics=PAGE.replace(b'"32"', b'"16"'), kv_event_sources=sources)
        async with pages as engine, running(engine.endpoint, "drain: true") as admin:
            await followed(admin, a__0=1, a__1=1)
            seen = await workers(admin)
            assert [worker["draining"] for worker in seen.values()] == [True, True]
            async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{admin}/serve/a") as response:
                assert await response.json() == {"draining": False, "in_flight": {"a/0": 0, "a/1": 0}}
            assert [worker["draining"] for worker in (await workers(admin)).values()] == [False, False]


def test_ports_of_ranks_count_on() -> None:
    assert port_of_rank("tcp://h:5557", 0) == "tcp://h:5557"
    assert port_of_rank("tcp://h:5557", 3) == "tcp://h:5560"
    assert port_of_rank("ipc:///tmp/events", 2) == "ipc:///tmp/events_dp2"


async def test_who_is_ready_has_read_what_its_engines_keep() -> None:
    """The first request is decided with it."""
    async with FakePublisher() as publisher:
        for number in range(500):
            publisher.drop(stored(number))
        more = f"kv_events: {publisher.endpoint}\n    kv_replay: {publisher.replay_endpoint}"
        async with Pages() as engine, running(engine.endpoint, more) as admin:
            (worker,) = (await workers(admin)).values()
            assert (worker["feed"], worker["cached_blocks"]) == ("live", 500)


async def test_an_engine_that_is_not_there_keeps_nobody_from_being_ready() -> None:
    began_s = time.monotonic()
    async with running("127.0.0.1:9", "kv_events: tcp://127.0.0.1:9\n    kv_replay: tcp://127.0.0.1:10") as admin:
        assert 1.5 < time.monotonic() - began_s < 20
        (worker,) = (await workers(admin)).values()
        assert worker["feed"] == "lost"


@pytest.mark.parametrize(("batches", "known_at_once"), [(30, True), (2000, False)])
async def test_a_replay_that_is_coming_in_is_waited_for_but_not_for_ever(
    batches: int, known_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.app._FIRST_REPLAYS_S", 0.3)
    monkeypatch.setattr("extproc.app._LONGEST_REPLAYS_S", 6.0)
    async with FakePublisher() as publisher:
        publisher.pause_before_each_s = 0.02
        for number in range(batches):
            publisher.drop(stored(number))
        more = f"kv_events: {publisher.endpoint}\n    kv_replay: {publisher.replay_endpoint}"
        began_s = time.monotonic()
        async with Pages() as engine, running(engine.endpoint, more) as admin:
            (worker,) = (await workers(admin)).values()
            assert (worker["feed"] == "live") == known_at_once
            assert 0.3 < time.monotonic() - began_s < 20
