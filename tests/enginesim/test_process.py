"""An engine as a process: starting, stopping, aborts, speed, and real time against the formula."""

import asyncio
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from enginesim import words
from enginesim.process import EngineProcess

pytestmark = pytest.mark.alone


async def state(http: ClientSession) -> dict[str, Any]:
    async with http.get("/sim/state") as response:
        told: dict[str, Any] = await response.json()
        return told


async def state_when(http: ClientSession, reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    for _ in range(500):
        now = await state(http)
        if reached(now):
            return now
        await asyncio.sleep(0.01)
    raise AssertionError(f"not reached in 5 s: {now}")


async def ttft_s(http: ClientSession, prompt: str) -> float:
    started_s = time.monotonic()
    async with http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "stream": True}) as response:
        await response.content.readany()
        return time.monotonic() - started_s


@pytest.mark.parametrize("stop_signal", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_cleanly_within_a_second_with_requests_in_flight(stop_signal: signal.Signals) -> None:
    engine = EngineProcess("--step-ms", "50")
    try:
        async with ClientSession(engine.url) as http:
            body = {"prompt": "x", "max_tokens": 10_000, "stream": True}
            async with http.post("/v1/completions", json=body) as response:
                await response.content.readany()
                started_s = time.monotonic()
                engine.send_signal(stop_signal)
                with pytest.raises(ClientError):
                    await response.read()
        assert await asyncio.to_thread(engine.wait) == 0
        assert time.monotonic() - started_s < 1
    finally:
        engine.stop()


def test_it_dies_with_its_parent_if_asked_to() -> None:
    start = "subprocess.Popen([sys.executable, '-m', 'enginesim', '--exit-with-parent'])"
    code = f"import subprocess, sys, time; engine = {start}; time.sleep(60)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        assert '"ready": true' in output.readline()
        parent.kill()
        parent.wait()
        assert output.read() == ""  # the end of the file: the engine has closed it


def test_a_bad_argument_is_named_with_what_is_allowed() -> None:
    for flags, message in (
        (["--port", "70000"], "argument --port: must be a whole number from 0 to 65535, not 70000"),
        (["--block-size", "0"], "argument --block-size: must be a whole number of at least 1, not 0"),
        (["--speed", "0"], "argument --speed: must be a number above 0 and at most 1000, not 0"),
        (["--step-ms", "soon"], "argument --step-ms: must be a number of at least 0, not 'soon'"),
        (["--event-format", "xml"], "argument --event-format: invalid choice: 'xml'"),
    ):
        ended = subprocess.run([sys.executable, "-m", "enginesim", *flags], capture_output=True, text=True, check=False)
        assert ended.returncode == 2
        assert message in ended.stderr
        assert ended.stdout == ""


def test_a_taken_port_is_an_error_that_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "enginesim", "--port", str(taken.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "enginesim: cannot listen on --host 127.0.0.1" in ended.stderr


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_its_blocks_which_stay_cached(stream: bool) -> None:
    with EngineProcess("--step-ms", "20") as engine:
        async with ClientSession(engine.url) as http:
            body = {"prompt": words.text(200, seed=1), "max_tokens": 10_000, "stream": stream}
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await state_when(http, lambda now: now["used_blocks"] > 0)
            if stream:
                (await request).close()
            else:
                request.cancel()
            now = await state_when(http, lambda now: now["running"] == 0)
            assert (now["used_blocks"], now["waiting"]) == (0, 0)
            assert now["cached_blocks"] >= 12
            async with http.get("/metrics") as response:
                page = await response.text()
    assert 'vllm:request_success_total{engine="0",model_name="sim",finished_reason="abort"} 1.0' in page
    assert 'vllm:num_requests_running{engine="0",model_name="sim"} 0.0' in page


async def test_the_time_to_first_token_of_a_lone_prompt_is_that_of_the_formula() -> None:
    with EngineProcess() as engine:
        async with ClientSession(engine.url) as http:
            ratios = []
            for tokens in (100, 1000, 3000):
                steps = -(-tokens // 2048)
                expected_s = steps * 0.005 + tokens * 100e-6 + tokens**2 * 1e-9
                measured_s = [await ttft_s(http, words.text(tokens, seed=tokens + i)) for i in range(3)]
                ratios.append(min(measured_s) / expected_s)
    assert all(0.98 <= ratio <= 1.5 for ratio in ratios), ratios


async def test_late_steps_do_not_add_up() -> None:
    with EngineProcess("--step-ms", "3", "--decode-ms", "0") as engine:
        async with ClientSession(engine.url) as http:
            took_s = []
            for _ in range(3):
                started_s = time.monotonic()
                async with http.post("/v1/completions", json={"prompt": "x", "max_tokens": 200}) as response:
                    await response.read()
                took_s.append(time.monotonic() - started_s)
    assert 0.6 <= min(took_s) <= 0.75  # a millisecond of wake-up latency a step would make it 0.8


async def test_speed_changes_at_run_time() -> None:
    with EngineProcess("--step-ms", "50") as engine:
        async with ClientSession(engine.url) as http:
            normal_s = statistics.median([await ttft_s(http, "x") for _ in range(3)])
            async with http.post("/sim/speed", json={"speed": 0.25}) as response:
                assert await response.json() == {"speed": 0.25}
            slow_s = statistics.median([await ttft_s(http, "x") for _ in range(3)])
            assert (await state(http))["speed"] == 0.25
    assert 2.5 <= slow_s / normal_s <= 5


async def test_a_small_prompt_behind_a_giant_waits_for_it_unless_there_is_a_threshold() -> None:
    async def wait_s(*flags: str) -> float:
        with EngineProcess("--prefill-us-per-token", "50", *flags) as engine:
            async with ClientSession(engine.url) as http:
                giant = asyncio.create_task(ttft_s(http, words.text(12_010, seed=1)))
                await state_when(http, lambda now: now["running"] == 1)
                small_s = await ttft_s(http, words.text(210, seed=2))
                await giant
                return small_s

    assert await wait_s() > 0.6
    assert await wait_s("--long-prefill-token-threshold", "512") < 0.35


async def test_time_for_which_an_engine_had_no_core_is_told() -> None:
    with EngineProcess("--step-ms", "20") as engine:
        async with ClientSession(engine.url) as http:
            body = {"prompt": "x", "max_tokens": 10_000, "stream": True}
            async with http.post("/v1/completions", json=body) as response:
                await response.content.readany()
                before_s = (await state(http))["late_s"]
                engine.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.6)
                engine.send_signal(signal.SIGCONT)
                # What it may catch up with, and the step under way, are not lost.
                await state_when(http, lambda now: now["late_s"] > before_s + 0.4)


def test_an_engine_that_cannot_start_is_an_error_of_its_launcher() -> None:
    with pytest.raises(RuntimeError, match="ended with status 2 before it was ready"):
        EngineProcess("--no-such-flag")
