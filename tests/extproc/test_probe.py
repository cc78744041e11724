"""What an engine says of itself, and what happens when it says nothing."""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from enginesim.process import EngineProcess
from extproc import probe as probe_module
from extproc.config import EngineSettings
from extproc.engine_pages import (
    About,
    Events,
    RankState,
    merged,
    read_sglang_info,
    read_sglang_loads,
    read_vllm_about,
    read_vllm_metrics,
)
from extproc.probe import Probe, Watchers
from predictor.drafts import DraftCounts
from predictor.engines.vllm import NO_DRAFTS, Drafting, Settings
from predictor.fleet import Grant, Ticket, Wish, WorkerSpec
from predictor.kv_events import Batch, Stored, Tier
from predictor.prompt import Prompt, as_tokens
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


def read_as_one(text: bytes) -> RankState:
    return merged(read_vllm_metrics(text).values())


def test_ranks_are_told_apart_and_added_up() -> None:
    assert read_vllm_metrics(PAGE) == {0: RankState(13, 32, 2048), 1: RankState(4, 32, 2048)}
    assert read_as_one(PAGE) == RankState(in_progress=17, block_size=32, num_gpu_blocks=2048)


DRAFTS = b"""\
vllm:prompt_tokens_total{engine="0"} 100.0
vllm:generation_tokens_total{engine="0"} 2500.0
vllm:spec_decode_num_drafts_total{engine="0"} 990.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 2970.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 1500.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 800.0
"""


def test_what_was_drafted_and_accepted_is_read_and_added_up_over_ranks() -> None:
    state = read_vllm_metrics(DRAFTS)[0]
    assert state.drafts == DraftCounts(generated=2500, drafted=2970, accepted=1500)
    both = DRAFTS + DRAFTS.replace(b'engine="0"', b'engine="1"')
    assert read_as_one(both).drafts == DraftCounts(5000, 5940, 3000)
    some = read_as_one(both + b'vllm:num_requests_running{engine="2"} 1.0\n')
    assert (some.drafts, some.odd_drafts) == (None, True)


ODD_DRAFTS = [
    (b"1500.0", b"2971.0"),
    (b"1500.0", b"-3"),
    (b"2970.0", b"NaN"),
    (b"2970.0", b"1e17"),
    (b"2500.0", b"-1"),
    (b"num_draft_tokens", b"num_others"),
    (b"num_accepted_tokens_total", b"num_others_total"),
    (b"vllm:generation_tokens", b"vllm:others"),
]


@pytest.mark.parametrize("wrong", ODD_DRAFTS)
def test_drafts_that_make_no_sense_are_not_known(wrong: tuple[bytes, bytes]) -> None:
    page = DRAFTS.replace(*wrong)
    for state in (read_vllm_metrics(page)[0], read_as_one(page + DRAFTS.replace(b'engine="0"', b'engine="1"'))):
        assert (state.drafts, state.odd_drafts) == (None, True)


def test_an_engine_that_says_nothing_of_drafts_has_none() -> None:
    for state in (read_vllm_metrics(PAGE)[0], read_as_one(PAGE)):
        assert (state.drafts, state.odd_drafts) == (None, False)


# method, drafted together, and what each request in a step takes besides with five tokens drafted
SLOTS = [
    ("ngram", False, 0), ("eagle3", False, 0), ("eagle3", True, 4), ("mtp", False, 0), ("dflash", True, 5),
    ("dspark", True, 4), ("draft_model", False, 1), ("draft_model", True, 5),
]  # fmt: skip


@pytest.mark.parametrize(("method", "parallel", "slots"), SLOTS)
def test_what_a_drafter_takes_of_a_step_is_read_from_development_pages(method: str, parallel: bool, slots: int) -> None:
    speculation = {"method": method, "parallel_drafting": parallel, "num_speculative_tokens": 5}
    info = page({"vllm_config": {"speculative_config": speculation}})
    assert read_vllm_about(page({"version": "0.32.0"}), None, None, info, "h").settings == {"draft_slots": slots}
    assert not read_vllm_about(page({"version": "0.27.1"}), None, None, info, "h").settings


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (b"", RankState(None, None, None)),
        (b"<html>not metrics</html>", RankState(None, None, None)),
        (b"\xff\xfe\x00", RankState(None, None, None)),
        (b"vllm:num_requests_running 2\n", RankState(2, None, None)),
        (b"vllm:num_requests_running 2e0 1700000000\n", RankState(2, None, None)),
        (b"xvllm:num_requests_running 2\n# vllm:num_requests_waiting 1\n", RankState(None, None, None)),
        (b'vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0\n', RankState(None, None, None)),
        (b'vllm:cache_config_info{block_size="0",num_gpu_blocks="-5"} 1.0\n', RankState(None, None, None)),
        (b'vllm:cache_config_info{num_gpu_blocks="' + b"9" * 5000 + b'"} 1.0\n', RankState(None, None, None)),
    ],
)
def test_what_is_not_there_is_unknown(text: bytes, state: RankState) -> None:
    assert read_as_one(text) == state


@pytest.mark.parametrize("value", [b"1.2.3", b"e", b"1e999", b"NaN", b"+Inf", b"-1", b"many"])
def test_a_gauge_that_is_no_count_makes_the_load_unknown(value: bytes) -> None:
    text = b"vllm:num_requests_running " + value + b"\nvllm:num_requests_waiting 3\n"
    assert read_as_one(text).in_progress is None


def test_the_simulated_engines_page_is_read() -> None:
    async def page(url: str) -> bytes:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
            return await response.read()

    with EngineProcess("--block-size", "32", "--num-gpu-blocks", "777") as engine:
        assert read_as_one(asyncio.run(page(engine.url))) == RankState(0, 32, 777)


class Watched:
    """A worker under a probe that asks every 10 ms."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.filter = Filter({"a": "10.0.0.1:8000"}, self.clock)
        self.ended: list[Ticket] = []
        self.restarted: list[str] = []
        self.about: list[About] = []
        self.workers: dict[int | None, str] = {None: "a"}
        self.settings, self.left_open = Settings(), frozenset[str]()
        self.on_settings: Callable[[str, Settings], None] = lambda worker, settings: None
        self._task: asyncio.Task[None] | None = None

    def watch(self, endpoint: str) -> None:
        fleet, metrics = self.filter.fleet, self.filter.metrics
        watchers = Watchers(
            self.ended.extend,
            settings=lambda worker, settings: self.on_settings(worker, settings),
            restarted=self.restarted.append,
            about=self.about.append,
        )
        self.probe = Probe(
            self.workers, endpoint, self.settings, 0.01, fleet, metrics, self.clock, watchers, self.left_open
        )
        self._task = asyncio.create_task(self.probe.run())

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


async def test_an_engine_that_is_down_is_asked_again_soon_however_rarely_it_is_asked_when_it_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its feed finds it before its pages are there, and nobody tells of those.
    monkeypatch.setattr(probe_module, "_DOWN_AGAIN_S", 0.05)
    monkeypatch.setattr(probe_module, "_AGAIN_S", 0.05)
    fleet = Filter({"a": "10.0.0.1:8000"}, ManualClock())
    async with EnginePage(IDLE) as engine:
        watchers = Watchers(lambda tickets: None)
        probe = Probe(
            {None: "a"}, engine.endpoint, Settings(), 600.0, fleet.fleet, fleet.metrics, time.monotonic, watchers
        )
        engine.status = 500
        task = asyncio.create_task(probe.run())

        def up() -> bool:
            view: dict[str, Any] = fleet.fleet.view(0.0)
            return bool(view["pools"]["m"]["workers"]["a"]["up"])

        try:
            await until(lambda: not up())
            probe.nudge()
            engine.status = 200
            await until(up)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def test_an_engine_that_refuses_connections_is_down(watched: Watched) -> None:
    async with EnginePage(IDLE) as engine:
        endpoint = engine.endpoint
    watched.watch(endpoint)
    await until(lambda: watched.shown("up") is False)


@pytest.mark.parametrize("wrong", ODD_DRAFTS)
async def test_what_a_page_says_of_drafts_holds_until_it_says_otherwise_and_nonsense_is_counted(
    watched: Watched, wrong: tuple[bytes, bytes]
) -> None:
    def drafting() -> Drafting:
        return watched.filter.fleet._pools["m"].workers["a"].shadow.drafting

    async with EnginePage(IDLE + DRAFTS) as engine:
        watched.watch(engine.endpoint)
        await watched.asked()
        assert drafting() == Drafting(gain=2.5, drafted=2.97)
        assert watched.filter.counted("odd_drafts", worker="a") == 0
        engine.pieces = (IDLE + DRAFTS.replace(*wrong),)
        await until(lambda: watched.filter.counted("odd_drafts", worker="a") >= 2)
        assert drafting() == Drafting(gain=2.5, drafted=2.97)
        engine.pieces = (IDLE + DRAFTS,)
        await watched.asked()
        assert drafting() == Drafting(gain=2.5, drafted=2.97)
        engine.pieces = (IDLE,)
        await until(lambda: drafting() == NO_DRAFTS)
        await watched.stop()


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
    assert read_as_one(lines) == RankState(None, None, None)


class Pages:
    """An engine that answers as facts say: whatever pages it is given, 404 for others."""

    def __init__(self, **pages: object) -> None:
        self.pages = {"/" + name.replace("__", "/"): page for name, page in pages.items()}
        self.asked: Counter[str] = Counter()
        self.endpoint = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.endpoint = f"127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked[request.path] += 1
        page = self.pages.get(request.path)
        if page is None:
            return web.Response(status=404)
        return web.Response(body=page) if isinstance(page, bytes) else web.json_response(page)


def counters(prompt: int, running: int = 0) -> bytes:
    return (
        f'vllm:num_requests_running{{engine="0"}} {running}\nvllm:num_requests_waiting{{engine="0"}} 0\n'
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\nvllm:generation_tokens_total{{engine="0"}} 5\n'
    ).encode()


SOURCES = {
    "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657", "topic": ""},
    "1": {"endpoint": "tcp://10.9.9.9:5558", "replay_endpoint": None},
}
SERVER_INFO = {
    "vllm_config": {
        "scheduler_config": {
            "max_num_batched_tokens": 2048, "max_num_seqs": 128, "long_prefill_token_threshold": 0,
            "async_scheduling": True,
            "max_num_scheduled_tokens": None, "long_prefill_token_threshold_adaptive": True, "policy": "priority",
        },
        "cache_config": {"block_size": 32, "num_gpu_blocks": 8192},
    }
}  # fmt: skip
SGLANG_EVENTS = {
    "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, "replay_endpoint_port_base": 5600,
    "topic": "", "block_size": 64, "dp_size": 2,
}  # fmt: skip
SGLANG = {
    "served_model_name": "m", "version": "0.5.23", "startup_time": 11.5, "page_size": 64,
    "chunked_prefill_size": 4096, "max_prefill_tokens": 20_000, "disable_overlap_schedule": False,
    "enable_mixed_chunk": True, "prefill_decode_interval": 3, "prefill_decode_interval_min_bs": 8,
    "schedule_conservativeness": 0.3,
    "max_running_requests": 4096, "dp_size": 2, "max_total_num_tokens": 64000,
    "kv_events": SGLANG_EVENTS,
    "internal_states": [{"effective_max_running_requests_per_dp": 96}],
}  # fmt: skip


def loads(*waiting: int) -> dict[str, object]:
    return {
        "loads": [
            {"dp_rank": rank, "num_running_reqs": 1, "num_waiting_reqs": count} for rank, count in enumerate(waiting)
        ]
    }


def page(value: object) -> bytes:
    return json.dumps(value).encode()


def test_vllm_says_what_it_is() -> None:
    models = {"data": [{"id": "m", "max_model_len": 32768}, {"id": "adapter", "parent": "m"}]}
    about = read_vllm_about(page({"version": "0.32.0"}), page(models), page(SOURCES), page(SERVER_INFO), "10.0.0.1")
    assert (about.version, about.ranks, about.models) == ("0.32.0", 2, ("adapter", "m"))
    assert about.settings == {
        "max_num_batched_tokens": 2048, "max_num_seqs": 128, "long_prefill_token_threshold": 0,
        "long_prefill_token_threshold_adaptive": True, "scheduling_policy": "priority", "async_scheduling": True,
        "block_size": 32, "num_gpu_blocks": 8192, "max_model_len": 32768,
    }  # fmt: skip
    assert about.events == {
        0: Events("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657"),
        1: Events("tcp://10.9.9.9:5558", None),
    }
    assert read_vllm_about(None, None, None, None, "h") == About()


@pytest.mark.parametrize(
    ("version", "usual"),
    [
        ("0.13.0", False), ("0.9.2.dev3+gabc", False), ("v0.11", False), ("0.14.0", None), ("0.32.0rc1", None),
        ("1.0", None), ("dev", None), ("", None),
    ],
)  # fmt: skip
def test_before_014_vllm_composes_a_step_when_the_one_before_has_ended(version: str, usual: bool | None) -> None:
    about = read_vllm_about(page({"version": version}), None, None, None, "h")
    assert about.usual.get("async_scheduling") is usual
    assert "async_scheduling" not in about.settings


@pytest.mark.parametrize(
    ("told", "left_open", "said", "shown"),
    [
        # An old version, and nobody says otherwise; the file does; the engine itself does.
        (True, True, None, False),
        (True, False, None, True),
        (False, False, True, True),
        (False, True, True, True),
        (True, False, False, False),
    ],
)
async def test_whether_steps_overlap_is_said_by_the_engine_or_the_file_or_else_its_version(
    watched: Watched, told: bool, left_open: bool, said: bool | None, shown: bool
) -> None:
    info = {} if said is None else {"vllm_config": {"scheduler_config": {"async_scheduling": said}}}
    async with Pages(metrics=PAGE, server_info=info, version={"version": "0.13.1"}) as engine:
        watched.settings = Settings(async_scheduling=told)
        watched.left_open = frozenset({"async_scheduling"} if left_open else ())
        watched.watch(engine.endpoint)
        await watched.asked(3)
        assert watched.shown("async_scheduling") is shown
        await watched.stop()


def test_sglang_says_what_it_is() -> None:
    about = read_sglang_info(page(SGLANG), "10.0.0.1")
    assert about is not None
    assert (about.version, about.life, about.ranks, about.models) == ("0.5.23", "11.5", 2, ("m",))
    assert about.settings == {
        "family": "sglang", "async_scheduling": True, "max_prefill_tokens": 20_000,
        "block_size": 64, "num_gpu_blocks": 1000, "max_num_batched_tokens": 4096, "max_num_seqs": 96,
        "enable_mixed_chunk": True, "prefill_decode_interval": 3, "prefill_decode_interval_min_bs": 8,
        "schedule_conservativeness": 0.3, "enable_chunked_prefill": True, "scheduling_policy": "fcfs",
    }  # fmt: skip
    assert about.events[1] == Events("tcp://10.0.0.1:5558", "tcp://10.0.0.1:5601")
    assert about.loads == {}
    assert read_sglang_info(page(SERVER_INFO), "h") is None
    silent = {
        **SGLANG, "enable_mixed_chunk": None, "prefill_decode_interval": -1, "schedule_conservativeness": 0,
    }  # fmt: skip
    about = read_sglang_info(page(silent), "h")
    assert about is not None
    assert not {"enable_mixed_chunk", "prefill_decode_interval", "schedule_conservativeness"} & about.settings.keys()
    assert about.not_followed == ()
    others = {"schedule_policy": "lof", "enable_priority_scheduling": True, "retraction_policy": "priority"}
    about = read_sglang_info(page({**SGLANG, **others, "enable_dp_attention": False}), "h")
    assert about is not None
    assert about.not_followed == ("schedule_policy=lof", "enable_priority_scheduling", "retraction_policy=priority")
    pushing = {**SGLANG, "kv_events": {**SGLANG_EVENTS, "load_endpoint_port_base": 5700, "load_topic": "load"}}
    about = read_sglang_info(page(pushing), "10.0.0.1")
    assert about is not None
    assert about.loads == {0: "tcp://10.0.0.1:5700", 1: "tcp://10.0.0.1:5701"}
    assert {rank: state.in_progress for rank, state in read_sglang_loads(page(loads(0, 7))).items()} == {0: 1, 1: 8}


def settings_told(**others: object) -> dict[str, object]:
    about = read_sglang_info(page({**SGLANG, **others}), "h")
    assert about is not None
    assert about.not_followed == ()
    return dict(about.settings)


def test_sglang_says_whom_it_lets_in_first() -> None:
    assert settings_told(schedule_policy="fcfs")["scheduling_policy"] == "fcfs"
    by_priority = Settings(**settings_told(schedule_policy="fcfs", enable_priority_scheduling=True))  # type: ignore[arg-type]
    assert by_priority.preempts
    assert [by_priority.place(priority) for priority in (7, -7)] == [-7, 7]
    assert by_priority.place(None) > 1 << 60
    told = settings_told(
        schedule_policy="fcfs", enable_priority_scheduling=True, schedule_low_priority_values_first=True,
        default_priority_value=3, priority_scheduling_preemption_threshold=2, disable_priority_preemption=True,
    )  # fmt: skip
    low_first = Settings(**told)  # type: ignore[arg-type]
    assert not low_first.preempts
    assert low_first.priority_scheduling_preemption_threshold == 2
    assert [low_first.place(priority) for priority in (7, -7, None)] == [7, -7, 3]


def test_sglang_that_cuts_no_prompt_says_what_a_batch_holds() -> None:
    told = settings_told(chunked_prefill_size=-1)
    assert told["enable_chunked_prefill"] is False
    assert (told["max_num_batched_tokens"], told["max_prefill_tokens"]) == (64_000, 20_000)


_ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([SGLANG, SOURCES, SERVER_INFO, loads(1, 2)]), st.data())
def test_pages_with_anything_anywhere_are_read(whole: dict[str, object], data: st.DataObject) -> None:
    broken = {key: data.draw(_ODD) if data.draw(st.booleans()) else value for key, value in whole.items()}
    text = page(broken)
    read_sglang_info(text, "h")
    read_sglang_loads(text)
    read_vllm_about(text, text, text, text, "h")


async def test_vllms_settings_are_read_from_all_its_pages(watched: Watched) -> None:
    pages = Pages(metrics=PAGE, server_info=SERVER_INFO, version={"version": "0.32.0"}, kv_event_sources=SOURCES)
    async with pages as engine:
        watched.watch(engine.endpoint)
        await watched.asked(5)
        assert (watched.shown("max_num_batched_tokens"), watched.shown("num_gpu_blocks")) == (2048, 2048)
        assert watched.about[0].events[0].endpoint == "tcp://127.0.0.1:5557"
        # Once a minute: they hardly ever change.
        assert (engine.asked["/server_info"], engine.asked["/version"]) == (1, 1)
        await watched.stop()


async def test_sglang_is_known_by_its_pages_and_asked_for_its_load(watched: Watched) -> None:
    async with Pages(server_info=SGLANG, v1__loads=loads(0, 0)) as engine:
        watched.watch(engine.endpoint)
        await until(lambda: engine.asked["/v1/loads"] > 2)
        assert (watched.shown("block_size"), watched.shown("max_num_batched_tokens")) == (64, 4096)
        assert engine.asked["/metrics"] == 1
        watched.book("old")
        watched.filter.fleet.first_token("old", None, watched.clock())
        watched.clock.advance(30)
        engine.pages["/v1/loads"] = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
        await until(lambda: bool(watched.ended))
        await watched.stop()


async def test_what_was_said_of_vllm_has_no_effect_on_an_engine_whose_page_says_that_it_is_sglang(
    watched: Watched,
) -> None:
    ours = EngineSettings(
        long_prefill_token_threshold=512,
        long_prefill_token_threshold_adaptive=True,
        draft_slots=3,
        device="gpu",
    )
    watched.settings, watched.left_open = ours.for_engine("vllm"), ours.left_open
    told: list[Settings] = []
    async with Pages(server_info=SGLANG, v1__loads=loads(0, 0)) as engine:
        watched.on_settings = lambda worker, settings: told.append(settings)
        watched.watch(engine.endpoint)
        await watched.asked(4)
        await watched.stop()
    # As if the configuration had said that it is SGLang.
    (settings,) = told
    assert settings.family == "sglang"
    of_sglang = ours.for_engine("sglang")
    for key in ("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "draft_slots"):
        assert getattr(settings, key) == getattr(of_sglang, key), key


async def test_counters_that_fall_back_are_another_life(watched: Watched) -> None:
    async with Pages(metrics=counters(1000)) as engine:
        watched.watch(engine.endpoint)
        await watched.asked()
        engine.pages["/metrics"] = counters(1500)
        await watched.asked()
        assert watched.restarted == []
        engine.pages["/metrics"] = counters(20)
        await watched.asked(3)
        assert watched.restarted == ["a"]
        await watched.stop()


async def test_what_an_engine_says_of_its_load_between_two_looks_is_heard(watched: Watched) -> None:
    async with Pages(server_info=SGLANG, v1__loads=b"{}") as engine:
        watched.watch(engine.endpoint)
        await watched.asked()
        watched.book("old")
        watched.filter.fleet.first_token("old", None, watched.clock())
        watched.clock.advance(30)
        for _ in range(2):
            watched.probe.hear(None, RankState(in_progress=0, tokens_done=700.0), watched.clock())
        assert [ticket.id for ticket in watched.ended] == ["old"]
        watched.probe.hear(3, RankState(in_progress=5), watched.clock())  # of a rank that is not ours
        assert watched.restarted == []
        # A page that was made before may come after: only what it says itself may not fall back.
        engine.pages["/v1/loads"] = {"loads": [{"total_prefill_uncached_tokens": 600}]}
        await watched.asked()
        assert watched.restarted == []
        watched.probe.hear(None, RankState(in_progress=0, tokens_done=20.0), watched.clock())
        assert watched.restarted == ["a"]
        await watched.stop()


async def test_another_start_of_sglang_is_another_life(watched: Watched) -> None:
    async with Pages(server_info=SGLANG, v1__loads=loads(0, 0)) as engine:
        watched.watch(engine.endpoint)
        await until(lambda: engine.asked["/v1/loads"] > 1)
        engine.pages["/server_info"] = {**SGLANG, "startup_time": 99.0}
        watched.clock.advance(61)
        await until(lambda: watched.restarted == ["a"])
        await watched.stop()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
async def test_what_was_learned_of_another_version_is_forgotten(
    watched: Watched, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(watched.filter.fleet, "forget", forgotten.append)
    async with Pages(metrics=IDLE, version={"version": "0.32.0"}) as engine:
        watched.watch(engine.endpoint)
        await watched.asked()
        engine.pages["/version"] = {"version": version}
        watched.clock.advance(61)
        await until(lambda: engine.asked["/version"] == 2)
        await watched.asked()
        assert forgotten == ([] if version == "0.32.0" else ["a"])
        await watched.stop()


async def test_an_engine_that_sleeps_is_not_up_and_holds_nothing(watched: Watched) -> None:
    asleep = IDLE + b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0\n'
    tokens = as_tokens(range(16))
    watched.filter.fleet.apply("a", Batch(None, (Stored((1,), None, tokens, 16, Tier.DEVICE, None, None),), None))
    async with Pages(metrics=asleep) as engine:
        watched.watch(engine.endpoint)
        await until(lambda: watched.shown("up") is False)
        assert watched.shown("cached_blocks") == 0
        engine.pages["/metrics"] = IDLE + b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0\n'
        await until(lambda: watched.shown("up") is True)
        await watched.stop()


async def test_each_rank_has_the_load_that_is_its_own(watched: Watched) -> None:
    watched.filter.fleet.join("m", WorkerSpec("b", "10.0.0.1:8000", rank=1))
    watched.workers = {0: "a", 1: "b"}
    async with Pages(metrics=PAGE.replace(b" 3.0", b" 0.0").replace(b" 10.0", b" 0.0")) as engine:
        watched.watch(engine.endpoint)
        await watched.asked()
        known = {name: watched.filter.fleet.activity(name)[1] for name in "ab"}
        assert known == {"a": False, "b": True}
        await watched.stop()


async def test_a_probe_that_is_nudged_asks_at_once() -> None:
    filter_ = Filter({"a": "10.0.0.1:8000"})
    async with Pages(metrics=IDLE) as engine:
        watchers = Watchers(lambda tickets: None)
        fleet, metrics = filter_.fleet, filter_.metrics
        probe = Probe({None: "a"}, engine.endpoint, Settings(), 600.0, fleet, metrics, time.monotonic, watchers)
        task = asyncio.create_task(probe.run())
        await until(lambda: engine.asked["/metrics"] == 1)
        await until(lambda: engine.asked["/kv_event_sources"] == 1)
        await asyncio.sleep(0.05)
        probe.nudge()
        await until(lambda: engine.asked["/metrics"] == 2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
