"""What an engine says of itself, and what happens when it says nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from enginesim.process import EngineProcess
from extproc import probe as probe_module
from extproc.probe import EngineState, Probe, read_vllm_metrics
from predictor.engines.vllm import Settings
from predictor.fleet import Grant, Ticket, Wish
from predictor.prompt import Prompt
from tests.fakes.clock import ManualClock
from tests.fakes.engine_page import EnginePage
from tests.fakes.filter import Filter
from tests.fakes.waiting import until

# As vLLM 0.32 writes it, with two data-parallel ranks.
PAGE = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta/Llama-3 {x}"} 3.0
vllm:num_requests_running{engine="1",model_name="meta/Llama-3 {x}"} 4.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="meta/Llama-3 {x}"} 10.0
vllm:num_requests_waiting{engine="1",model_name="meta/Llama-3 {x}"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 1000.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_gpu_blocks="2048",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_gpu_blocks="2048",sliding_window="None"} 1.0
"""
IDLE = b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n"


def test_ranks_are_added_up() -> None:
    assert read_vllm_metrics(PAGE) == EngineState(in_progress=17, block_size=32, num_gpu_blocks=2048)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (b"", EngineState(None, None, None)),
        (b"<html>not metrics</html>", EngineState(None, None, None)),
        (b"\xff\xfe\x00", EngineState(None, None, None)),
        (b"vllm:num_requests_running 2\n", EngineState(2, None, None)),
        (b"vllm:num_requests_running 2e0 1700000000\n", EngineState(2, None, None)),
        (b"xvllm:num_requests_running 2\n# vllm:num_requests_waiting 1\n", EngineState(None, None, None)),
        (b'vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0\n', EngineState(None, None, None)),
        (b'vllm:cache_config_info{block_size="0",num_gpu_blocks="-5"} 1.0\n', EngineState(None, None, None)),
        (b'vllm:cache_config_info{num_gpu_blocks="' + b"9" * 5000 + b'"} 1.0\n', EngineState(None, None, None)),
    ],
)
def test_what_is_not_there_is_unknown(text: bytes, state: EngineState) -> None:
    assert read_vllm_metrics(text) == state


@pytest.mark.parametrize("value", [b"1.2.3", b"e", b"1e999", b"NaN", b"+Inf", b"-1", b"many"])
def test_a_gauge_that_is_no_count_makes_the_load_unknown(value: bytes) -> None:
    text = b"vllm:num_requests_running " + value + b"\nvllm:num_requests_waiting 3\n"
    assert read_vllm_metrics(text).in_progress is None


def test_the_simulated_engines_page_is_read() -> None:
    async def page(url: str) -> bytes:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
            return await response.read()

    with EngineProcess("--block-size", "32", "--num-gpu-blocks", "777") as engine:
        assert read_vllm_metrics(asyncio.run(page(engine.url))) == EngineState(0, 32, 777)


class Watched:
    """A worker under a probe that asks every 10 ms."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.filter = Filter({"a": "10.0.0.1:8000"}, self.clock)
        self.ended: list[Ticket] = []
        self._task: asyncio.Task[None] | None = None

    def watch(self, endpoint: str) -> None:
        fleet, metrics = self.filter.fleet, self.filter.metrics
        probe = Probe("a", endpoint, Settings(), 0.01, fleet, metrics, self.ended.extend, self.clock)
        self._task = asyncio.create_task(probe.run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def shown(self, key: str) -> Any:
        view: dict[str, Any] = self.filter.fleet.view(self.clock())
        return view["pools"]["m"]["workers"]["a"][key]

    def probed(self, result: str) -> float:
        return self.filter.counted("probes", worker="a", result=result)

    async def asked(self, more: int = 2) -> None:
        """That many more answers have been taken in."""
        before = self.probed("ok")
        await until(lambda: self.probed("ok") >= before + more)

    def book(self, ticket_id: str) -> None:
        grant = self.filter.fleet.place("m", Prompt(10, exact=True), Wish(ticket_id, self.clock()), self.clock())
        assert isinstance(grant, Grant)


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr(probe_module, "_TIMEOUT", aiohttp.ClientTimeout(total=0.3))
    watched = Watched()
    yield watched
    await watched.stop()


async def test_an_engines_own_settings_are_taken_over(watched: Watched) -> None:
    async with EnginePage(PAGE) as engine:
        watched.watch(engine.endpoint)
        await watched.asked()
        assert (watched.shown("block_size"), watched.shown("num_gpu_blocks")) == (32, 2048)
        assert watched.shown("max_num_batched_tokens") == Settings().max_num_batched_tokens
        await watched.stop()


async def test_a_page_that_comes_in_pieces_is_read_to_its_end(watched: Watched) -> None:
    async with EnginePage(PAGE[:300], PAGE[300:500], PAGE[500:]) as engine:
        engine.pause_s = 0.02
        watched.watch(engine.endpoint)
        await watched.asked()
        assert watched.shown("num_gpu_blocks") == 2048
        await watched.stop()


async def test_two_failures_in_a_row_take_a_worker_down_and_one_answer_brings_it_back(watched: Watched) -> None:
    async with EnginePage(IDLE) as engine:
        watched.watch(engine.endpoint)
        await watched.asked(1)
        engine.status = 500
        await until(lambda: watched.probed("failed") == 1)
        assert watched.shown("up") is True
        await until(lambda: watched.shown("up") is False)
        assert watched.probed("failed") >= 2
        engine.status = 200
        await until(lambda: watched.shown("up") is True)
        await watched.stop()


async def test_an_engine_that_refuses_connections_is_down(watched: Watched) -> None:
    async with EnginePage(IDLE) as engine:
        endpoint = engine.endpoint
    watched.watch(endpoint)
    await until(lambda: watched.shown("up") is False)


async def test_a_hanging_page_is_a_failure_in_time(watched: Watched) -> None:
    async with EnginePage(IDLE[:10], IDLE[10:]) as engine:
        engine.pause_s = 5
        watched.watch(engine.endpoint)
        await until(lambda: watched.shown("up") is False, timeout_s=5)
        await watched.stop()


async def test_a_huge_page_is_not_kept_and_tells_nothing(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "_MAX_BYTES", 100_000)
    async with EnginePage(PAGE, *[b"# padding\n" * 2000] * 20) as engine:
        watched.watch(engine.endpoint)
        await watched.asked()
        assert watched.shown("up") is True
        assert watched.shown("num_gpu_blocks") is None
        await watched.stop()


async def test_garbage_is_an_answer_without_news(watched: Watched) -> None:
    async with EnginePage(b"\xff\xfevllm:num_requests_running 1.2.3\n") as engine:
        watched.watch(engine.endpoint)
        await watched.asked(3)
        assert watched.shown("up") is True
        await watched.stop()


async def test_an_engine_with_nothing_to_do_has_ended_its_old_tickets(watched: Watched) -> None:
    async with EnginePage(IDLE) as engine:
        watched.book("old")
        watched.filter.fleet.first_token("old", None, watched.clock())
        watched.clock.advance(60)
        watched.book("new")
        watched.watch(engine.endpoint)
        await until(lambda: bool(watched.ended))
        await watched.asked()
        await watched.stop()
    assert [ticket.id for ticket in watched.ended] == ["old"]
    assert watched.filter.fleet.in_flight == 1


async def test_an_engine_with_work_keeps_its_tickets(watched: Watched) -> None:
    async with EnginePage(PAGE) as engine:
        watched.book("old")
        watched.clock.advance(60)
        watched.watch(engine.endpoint)
        await watched.asked(4)
        await watched.stop()
    assert watched.ended == []


def test_numbers_that_no_engine_has_are_not_believed() -> None:
    lines = (
        b'vllm:num_requests_running{a="b"} 1e308\nvllm:num_requests_waiting{a="b"} 1.7e308\n'
        b'vllm:cache_config_info{block_size="100000000000000000",num_gpu_blocks="999999999999"} 1.0\n'
    )
    assert read_vllm_metrics(lines) == EngineState(None, None, None)
