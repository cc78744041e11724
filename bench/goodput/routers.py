"""`python -m bench.goodput.routers TRACE --routers VENV`: the same comparison with routers that know real time only.

So all are in real time: simulated engines, sped up, asked over HTTP. VENV has the packages sglang-router and
vllm-router installed. Of a router nothing is told but the engines' addresses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from bench.goodput.__main__ import BOUND_S, COSTS, LOADS, SEED, TRACE_LIMITS, Fleet, show, trace_capacity_per_s
from bench.goodput.policies import Judgement
from bench.goodput.score import Score, score
from bench.goodput.traffic import Ask, open_trace
from bench.goodput.world import Outcome, seconds_alone
from enginesim import words
from extproc.stack import EngineSpec, Stack, free_ports

_LESSONS = (500, 8000, 1500, 12_000, 3000, 20_000, 700, 5000, 2000, 16_000, 1000, 10_000)
_STARTED_WITHIN_S = 60.0
_ENVOY = "type.googleapis.com/envoy.extensions.load_balancing_policies"
_BALANCERS = {"round robin": ("round_robin", "RoundRobin"), "least request": ("least_request", "LeastRequest")}


class TextTrace:
    """A Mooncake trace as texts: a block of the trace is the same words wherever it comes."""

    def __init__(self, path: Path, count: int, scale: float = 0.5) -> None:
        self.texts: list[str] = []
        self.outputs: list[int] = []
        with open_trace(path) as lines:
            for line in islice(lines, count):
                record = json.loads(line)
                block, length = round(512 * scale), max(16, round(record["input_length"] * scale))
                blocks = [
                    words.text(min(block, length - at * block), name) for at, name in enumerate(record["hash_ids"])
                ]
                self.texts.append("".join(blocks))
                self.outputs.append(max(1, round(record["output_length"] * scale)))

    def arrivals_s(self, per_s: float) -> list[float]:
        rng = np.random.default_rng(SEED)
        gaps_s = rng.exponential(1 / per_s, len(self.texts))
        arrivals: list[float] = np.cumsum(gaps_s).tolist()
        return arrivals


class Client:
    """Asks one URL; times are those of the engines, not of the clock."""

    def __init__(self, url: str, http: aiohttp.ClientSession, speed: float) -> None:
        self._url = url + "/v1/chat/completions"
        self._http = http
        self._speed = speed

    async def ask(self, text: str, output_tokens: int, bound_s: float | None) -> Outcome:
        body: dict[str, Any] = {
            "model": "sim",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": output_tokens,
            "messages": [{"role": "user", "content": text}],
        }
        headers = {} if bound_s is None else {"x-max-queue-wait-s": f"{bound_s / self._speed:g}"}
        began_s = time.perf_counter()
        first_s, usage, engine = None, None, None
        async with self._http.post(self._url, json=body, headers=headers) as response:
            if response.status == 200:
                engine = response.headers.get("x-engine-name")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        first_s = first_s or time.perf_counter()
                        if b'"usage":{' in line:
                            usage = json.loads(line[6:])["usage"]
        tokens = usage["prompt_tokens"] if usage else 0
        ask = Ask(0.0, tuple(range(tokens)), output_tokens, bound_s)
        outcome = Outcome(ask, began_s * self._speed, engine)
        if usage is None or first_s is None:
            return outcome
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        ttft_s = (first_s - began_s) * self._speed
        alone_s = seconds_alone(COSTS, TRACE_LIMITS.max_num_batched_tokens, tokens, cached)
        outcome.ttft_s, outcome.cached_tokens, outcome.wait_s = ttft_s, cached, ttft_s - alone_s
        return outcome


def _specs(engines: int, speed: float) -> list[EngineSpec]:
    return [
        EngineSpec(
            f"w{number}",
            prefill_us_per_token=COSTS.prefill_us_per_token,
            prefill_ns_per_token2=COSTS.prefill_ns_per_token2,
            step_ms=COSTS.step_ms,
            decode_ms=COSTS.decode_ms,
            num_gpu_blocks=TRACE_LIMITS.num_gpu_blocks,
            max_num_batched_tokens=TRACE_LIMITS.max_num_batched_tokens,
            more_flags=("--speed", f"{speed:g}"),
        )
        for number in range(engines)
    ]


def _balanced_by(name: str) -> Callable[[dict[str, Any]], None]:
    """Envoy as it is without us."""
    module, kind = _BALANCERS[name]

    def change(config: dict[str, Any]) -> None:
        resources = config["static_resources"]
        manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"] = [f for f in manager["http_filters"] if f["name"] == "envoy.filters.http.router"]
        engines = next(cluster for cluster in resources["clusters"] if cluster["name"] == "engines")
        typed = {"@type": f"{_ENVOY}.{module}.v3.{kind}"}
        policy = {"name": f"envoy.load_balancing_policies.{module}", "typed_config": typed}
        engines["load_balancing_policy"] = {"policies": [{"typed_extension_config": policy}]}

    return change


@asynccontextmanager
async def _router(stack: Stack, command: Sequence[str]) -> AsyncIterator[str]:
    port, metrics_port = free_ports(2)
    urls = [f"http://127.0.0.1:{stack.engine_port(spec.name)}" for spec in stack.specs]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    with (stack.folder / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, "--worker-urls", *urls, *flags, stdout=log, stderr=log, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await _up(url + "/health", process)
            yield url
        finally:
            # It may have children.
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _up(url: str, process: asyncio.subprocess.Process) -> None:
    until_s = time.monotonic() + _STARTED_WITHIN_S
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < until_s and process.returncode is None:
            try:
                async with http.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.2)
    raise OSError(f"{url}: not up in {_STARTED_WITHIN_S:g} s")


@dataclass(frozen=True, slots=True)
class Setup:
    engines: int
    speed: float  # of the engines; a bound is at least 5 s on the wire, and stands for so many times as much
    trace: TextTrace


async def play(name: str, command: Sequence[str] | None, setup: Setup, per_s: float) -> Score:
    """One policy at one load, on engines that have just been started."""
    change = _balanced_by(name) if name in _BALANCERS else None
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        # As in virtual time: what an engine is told of bounds is what the trace's requests are told.
        stack = Stack(Path(folder), _specs(setup.engines, setup.speed), change_envoy=change)
        try:
            await stack.start()
            timeout = aiohttp.ClientTimeout(total=600)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
                if command is None:
                    return await _played(name, Client(stack.url, http, setup.speed), stack, setup, per_s)
                async with _router(stack, command) as url:
                    return await _played(name, Client(url, http, setup.speed), stack, setup, per_s)
        finally:
            await stack.stop()


async def _played(name: str, client: Client, stack: Stack, setup: Setup, per_s: float) -> Score:
    engines, trace = setup.engines, setup.trace
    for number, tokens in enumerate(_LESSONS):
        texts = [words.text(tokens, -1 - number * engines - engine) for engine in range(engines)]
        await asyncio.gather(*(client.ask(text, 20, None) for text in texts))
    began_s = time.perf_counter()
    asked, late_s = [], []
    for number, (at_s, text, output) in enumerate(
        zip(trace.arrivals_s(per_s), trace.texts, trace.outputs, strict=True)
    ):
        due_s = began_s + at_s / setup.speed
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        late_s.append(time.perf_counter() - due_s)
        asked.append(asyncio.create_task(client.ask(text, output, BOUND_S if number % 2 else None)))
    outcomes = await asyncio.gather(*asked)
    # All share one machine. Where even this process is late, nothing that it measures is worth much.
    behind = ", ".join(f"{late:.1f} s" for late in await _engines_late_s(stack))
    print(
        f"  {name}: requests were sent up to {max(late_s) * 1e3:.0f} ms late; engines lost {behind} of "
        f"{time.perf_counter() - began_s:.0f} s",
        flush=True,
    )
    prefilled = sum(len(outcome.ask.tokens) - outcome.cached_tokens for outcome in outcomes)
    return score(name, outcomes, prefilled, await _judgement(stack) if name == "Headway" else Judgement(None, None))


async def _engines_late_s(stack: Stack) -> list[float]:
    """What steps have taken beyond what they cost: an engine short of a core is another engine than it says."""
    told = []
    async with aiohttp.ClientSession() as http:
        for spec in stack.specs:
            async with http.get(f"http://127.0.0.1:{stack.engine_port(spec.name)}/sim/state") as response:
                told.append(float((await response.json())["late_s"]))
    return told


async def _judgement(stack: Stack) -> Judgement:
    # The last refusals are graded when the queue ahead of them has gone.
    await asyncio.sleep(3.0)
    async with aiohttp.ClientSession() as http, http.get(f"{stack.admin_url}/metrics") as response:
        lines = (await response.text()).splitlines()

    def total(name: str, label: str) -> float:
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{") and label in line)

    refusals, bounds = "headway_refusals_graded_total", "headway_bounds_total"
    wrong, right = total(refusals, 'verdict="false_alarm"'), total(refusals, 'verdict="right"')
    missed, kept = total(bounds, 'kept="no"'), total(bounds, 'kept="yes"')
    return Judgement(
        wrong / (wrong + right) if wrong + right else None, missed / (missed + kept) if missed + kept else None
    )


def policies(venv: Path) -> dict[str, Sequence[str] | None]:
    """What is started in front of the engines, by name; None: Envoy."""
    sglang = [str(venv / "bin/python"), "-m", "sglang_router.launch_router", "--policy"]
    vllm = [str(venv / "bin/vllm-router"), "--policy"]
    return {
        "round robin": None,
        "least request": None,
        "SGLang's router, cache_aware": [*sglang, "cache_aware"],
        "SGLang's router, power_of_two": [*sglang, "power_of_two"],
        "vLLM's router, cache_aware": [*vllm, "cache_aware"],
        "vLLM's router, power_of_two": [*vllm, "power_of_two"],
        "Headway": None,
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.goodput.routers", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--routers", type=Path, required=True, metavar="VENV")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument(
        "--speed", type=float, default=1.0, help="of the engines; at most 2, since bounds are 5 s at least"
    )
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--only", nargs="+", help="names of policies")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    trace = TextTrace(chosen.trace, chosen.requests)
    capacity_per_s = trace_capacity_per_s(Fleet(chosen.engines), chosen.trace, chosen.requests)
    speed = f"{chosen.speed:g} times as fast"
    print(f"seed {SEED}, {chosen.engines} engines, {speed}, capacity {capacity_per_s:.2f} requests/s")
    setup = Setup(chosen.engines, chosen.speed, trace)
    results = []
    for load in chosen.loads:
        scores = []
        for name, command in policies(chosen.routers).items():
            if chosen.only and name not in chosen.only:
                continue
            got = asyncio.run(play(name, command, setup, load * capacity_per_s))
            scores.append(got)
            print(f"  {load:g} {got.policy}: {got.served:.1%}", flush=True)
        results += [{"workload": "routers", "load": load, **asdict(got)} for got in scores]
        show(f"real time, load {load:g}", scores)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
