"""Mixed traffic through the real Envoy while the filter and the engines are killed, stopped and restarted at random.

`python -m tests.chaos --minutes 10 --seed 7`. What a client may see is judged by these rules and no others:

* A request may fail if the engine that served it (its `x-engine-name`), or without an answer the one that Envoy tried
  last, was killed or crashed during the request's life. Decided or not: with an engine down there are two others.

Everything else is wrong: a failure, a truncated or incomplete answer, a refusal (there is capacity), and anything that
takes longer than a minute. In the end nothing may be in flight for the filter, for Envoy or for an engine, the filter
must not have grown, and within seconds each request must be decided and served by whom the filter chose.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from extproc.stack import EngineSpec
from tests.e2e.harness import CHAT, Bench, chat, manager_of, read, running, until, words

# 10,000 prompt tokens a second and engine: about 75 requests a second in all, of which a third is sent.
_ENGINES = [EngineSpec(name, prefill_us_per_token=100.0, step_ms=4.0, num_gpu_blocks=8192) for name in "abc"]
_REQUESTS_PER_S = 25.0
_STUCK_S = 60.0
# A request that comes this soon after an event may have been on its way when it happened, and the other way round.
_SLACK_S = 0.25
_MEMORY_MIB = 400
# Envoy asks for the filter's health once a second, and each of its threads hears of the answer in its own time: just
# after a filter is back requests may still pass it by, although the count of healthy ones has it again.
_RESUMED_WITHIN_S = 3.0
# What Envoy says of each answer, its own ones included.
_TOLD = {
    "x-flags": "%RESPONSE_FLAGS%",
    "x-details": "%RESPONSE_CODE_DETAILS%",
    "x-attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "x-host": "%UPSTREAM_HOST%",
    "x-filter": "%FILTER_STATE(envoy.filters.http.ext_proc:PLAIN)%",
}


@dataclass(slots=True)
class Span:
    """When something was not there; `until_s` None: it still is not."""

    what: str
    from_s: float
    until_s: float | None = None

    def overlaps(self, from_s: float, until_s: float) -> bool:
        return self.from_s <= until_s + _SLACK_S and (self.until_s is None or self.until_s >= from_s - _SLACK_S)


@dataclass(slots=True)
class Report:
    seed: int
    requests: int = 0
    complete: int = 0
    decided: int = 0
    excused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    memory_mib: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"seed {self.seed}: {self.requests} requests, {self.complete} complete, {self.decided} of them decided, "
            f"{len(self.wrong)} wrong",
            f"excused: {dict(self.excused)}",
            f"faults: {dict(self.faults)}",
            f"longest request {self.longest_s:.1f} s, filter's memory at most {self.memory_mib:.0f} MiB",
            *self.wrong[:20],
        ]
        return "\n".join(lines)


class Chaos:
    """One run on a running stack."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.report = Report(seed)
        self._bench = bench
        self._rng = random.Random(seed)
        self._faults_rng = random.Random(seed + 1), random.Random(seed + 2)
        self._crashes: list[Span] = []  # of engines: killed, or restarted in their process
        self._engines_down: list[Span] = []
        self._filter_away: list[Span] = []

    async def run(self, seconds: float, trust_within_s: float | None) -> Report:
        ends_s = time.monotonic() + seconds
        sent: set[asyncio.Task[None]] = set()
        troubles = [
            asyncio.create_task(self._trouble_filter(ends_s)),
            asyncio.create_task(self._trouble_engines(ends_s)),
            asyncio.create_task(self._weigh(ends_s)),
        ]
        while time.monotonic() < ends_s:
            task = asyncio.create_task(self._request(self.report.requests))
            self.report.requests += 1
            sent.add(task)
            task.add_done_callback(sent.discard)
            await asyncio.sleep(self._rng.expovariate(_REQUESTS_PER_S))
            for trouble in troubles:
                if trouble.done():
                    trouble.result()
        await asyncio.gather(*troubles)
        await asyncio.gather(*sent)
        await self._settle(trust_within_s)
        return self.report

    async def _request(self, number: int) -> None:
        kind, path, body = self._content(number)
        started_s = time.monotonic()
        engine: str | None = None
        decided = False
        problem: str | None = None
        told: dict[str, str] = {}
        try:
            timeout = aiohttp.ClientTimeout(total=_STUCK_S)
            async with self._bench.http.post(self._bench.stack.url + path, json=body, timeout=timeout) as response:
                engine = response.headers.get("x-engine-name")
                decided = "x-headway-worker" in response.headers
                told = {name: response.headers[name] for name in _TOLD if name in response.headers}
                answer = await read(response)
            if answer.status != 200:
                problem = f"status {answer.status} {answer.body[:100]!r}"
            elif kind == "streamed" and not (answer.complete and _tokens(answer.events) == body["max_tokens"]):
                problem = f"incomplete: {answer.body[-100:]!r}"
            elif kind == "plain" and answer.json["usage"]["completion_tokens"] != body["max_tokens"]:
                problem = "incomplete"
            else:
                self.report.complete += 1
                self.report.decided += answer.worker is not None
        except TimeoutError:
            problem = "stuck"
        except (aiohttp.ClientError, json.JSONDecodeError) as error:
            problem = repr(error)
        ended_s = time.monotonic()
        self.report.longest_s = max(self.report.longest_s, ended_s - started_s)
        if problem is not None:
            excuse = None if problem == "stuck" else self._excuse(engine or self._tried(told), started_s, ended_s)
            if excuse is None:
                self.report.wrong.append(
                    f"{number} {kind} at {engine}, decided {decided}, {started_s:.2f}-{ended_s:.2f}: {problem}; "
                    f"{told}; crashes {self._crashes[-2:]}, down {self._engines_down[-2:]}, "
                    f"filter {self._filter_away[-2:]}"
                )
            else:
                self.report.excused[excuse] += 1

    def _content(self, number: int) -> tuple[str, str, dict[str, Any]]:
        rng = self._rng
        text = words(rng.choice((20, 300, 900)), f"topic {rng.randrange(40)}") + f" question {number}"
        kind = rng.choices(("streamed", "plain", "other"), (75, 20, 5))[0]
        if kind == "other":
            return kind, "/tokenize", {"prompt": text}
        body = chat(text, max_tokens=rng.choice((1, 10, 40, 150)), max_queue_wait_s=rng.choice((None, None, None, 120)))
        if kind == "plain":
            del body["stream"], body["stream_options"]
        return kind, CHAT, body

    def _excuse(self, engine: str | None, from_s: float, until_s: float) -> str | None:
        lost = any(span.what == engine and span.overlaps(from_s, until_s) for span in self._crashes)
        return "its engine was lost" if lost else None

    def _tried(self, told: dict[str, str]) -> str | None:
        """Whom Envoy tried last, of an answer that is none of an engine's."""
        ports = {f"127.0.0.1:{self._bench.stack.engine_port(spec.name)}": spec.name for spec in _ENGINES}
        return ports.get(told.get("x-host", ""))

    async def _trouble_filter(self, ends_s: float) -> None:
        rng, stack = self._faults_rng[0], self._bench.stack
        while await _pause(rng.uniform(2, 6), ends_s):
            assert stack.filter is not None
            fault = rng.choice(("kill", "kill", "stop", "stop", "drain"))
            self.report.faults[f"filter {fault}"] += 1
            away = Span("filter", time.monotonic())
            self._filter_away.append(away)
            if fault == "stop":
                stack.filter.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(rng.uniform(0.2, 4))
                stack.filter.process.send_signal(signal.SIGCONT)
            else:
                await stack.filter.end(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
                await asyncio.sleep(rng.uniform(0, 3))
                await stack.start_filter()
            await stack.filter_seen_healthy()
            away.until_s = time.monotonic()

    async def _trouble_engines(self, ends_s: float) -> None:
        rng, stack = self._faults_rng[1], self._bench.stack
        while await _pause(rng.uniform(1, 5), ends_s):
            spec = rng.choice(stack.specs)
            fault = rng.choice(("kill", "kill", "stop", "stop", "crash"))
            self.report.faults[f"engine {fault}"] += 1
            now_s = time.monotonic()
            match fault:
                case "stop":  # nothing fails of it; it is only slow
                    stack.engines[spec.name].process.send_signal(signal.SIGSTOP)
                    await asyncio.sleep(rng.uniform(0.2, 3))
                    stack.engines[spec.name].process.send_signal(signal.SIGCONT)
                case "crash":
                    crash = Span(spec.name, now_s)
                    self._crashes.append(crash)
                    url = f"http://127.0.0.1:{stack.engine_port(spec.name)}/sim/restart"
                    async with self._bench.http.post(url) as response:
                        assert response.status == 200
                    crash.until_s = time.monotonic()
                case _:
                    crash, down = Span(spec.name, now_s), Span(spec.name, now_s)
                    self._crashes.append(crash)
                    self._engines_down.append(down)
                    await stack.engines[spec.name].end(signal.SIGKILL)
                    crash.until_s = time.monotonic()
                    await asyncio.sleep(rng.uniform(0, 4))
                    await stack.start_engine(spec)
                    down.until_s = time.monotonic()

    async def _weigh(self, ends_s: float) -> None:
        while await _pause(0.5, ends_s):
            child = self._bench.stack.filter
            if child is not None and child.running:
                self.report.memory_mib = max(self.report.memory_mib, _memory_mib(child.process.pid))

    async def _settle(self, trust_within_s: float | None) -> None:
        bench, wrong = self._bench, self.report.wrong
        try:
            await bench.settled(30)
        except AssertionError:
            fleet = await bench.stack.fleet()
            wrong.append(f"left behind: {await bench.in_flight()} in flight: {fleet}")
        active = await bench.envoy_stat("http.llm.downstream_rq_active")
        if active:
            wrong.append(f"Envoy has {active} requests open")
        if bugs := await bench.metric("headway_bugs_total"):
            wrong.append(f"{bugs:g} bugs")
        if self.report.memory_mib > _MEMORY_MIB:
            wrong.append(f"the filter grew to {self.report.memory_mib:.0f} MiB")

        async def trusted() -> bool:
            workers = (await bench.stack.fleet())["pools"]["sim"]["workers"].values()
            return all(worker["feed_trusted"] and worker["up"] for worker in workers)

        if trust_within_s is not None:
            try:
                await until(trusted, trust_within_s, "trusted feeds")
            except AssertionError as error:
                wrong.append(f"{error}: {await bench.stack.fleet()}")
        undecided = list[str]()

        async def resumed() -> bool:
            answers = await asyncio.gather(*(bench.post(chat(words(50, f"after {n}"))) for n in range(30)))
            wrong.extend(f"incomplete in the end: {answer}" for answer in answers if not answer.complete)
            undecided[:] = [
                f"{answer.worker} chosen, {answer.engine} served, {answer.headers.get('x-filter')}"
                for answer in answers
                if answer.complete and answer.worker != answer.engine
            ]
            return not undecided

        try:
            await until(resumed, _RESUMED_WITHIN_S, "decisions")
        except AssertionError as error:
            wrong.append(f"{error}: {undecided[:5]}; filter {self._filter_away[-2:]}, down {self._engines_down[-2:]}")


def _memory_mib(pid: int) -> float:
    """0 if it has just ended."""
    with contextlib.suppress(OSError, IndexError):
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024
    return 0.0


def _tokens(events: list[dict[str, Any]]) -> int:
    return sum(bool(event["choices"]) for event in events) - 1


async def _pause(seconds: float, ends_s: float) -> bool:
    """False at the end of the run."""
    await asyncio.sleep(max(0.0, min(seconds, ends_s - time.monotonic())))
    return time.monotonic() < ends_s


def _told(config: dict[str, Any]) -> None:
    (host,) = manager_of(config)["route_config"]["virtual_hosts"]
    host["response_headers_to_add"] += [{"header": {"key": key, "value": text}} for key, text in _TOLD.items()]


async def play(seconds: float, seed: int, trust_within_s: float | None = None) -> Report:
    """A stack of its own, so much chaos, and what came of it; if wanted, feeds must be trusted again in the end."""
    async with running(_ENGINES, {"shutdown": {"notice_s": 1.5, "grace_s": 3}}, change_envoy=_told) as bench:
        return await Chaos(bench, seed).run(seconds, trust_within_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    options = parser.parse_args()
    sys.stdout.write(f"{options.minutes:g} minutes, seed {options.seed}\n")
    sys.stdout.flush()
    report = asyncio.run(play(options.minutes * 60, options.seed, trust_within_s=60))
    sys.stdout.write(f"{report}\n")
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
