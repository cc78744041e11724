"""Predictions against the engines' own schedulers: a recorded run is played to a fleet as an outside observer would see
it.

python -m tests.engine.forecast_truth [--recordings FOLDER] [WORKLOAD ...]
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import statistics
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from predictor.admission import AdmissionPolicy, Mode
from predictor.clairvoyance import Coming, Seer
from predictor.drafts import DraftCounts
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.hindsight import Verdict
from predictor.kv_events import decode_batch
from predictor.prefill_cost import Basis, StepCost
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt
from tests.engine import workloads
from tests.engine.harness import engine_home, sglang_home
from tests.engine.workloads import Costs, Workload

HOMES = {"vllm": engine_home, "sglang": sglang_home}
WARM_UP = 0.1  # the part of the requests that is not counted
_POOL, _WORKER = "m", "w"
_PROBE_S = 5.0  # an engine is asked how many requests it has in progress


@dataclass(frozen=True)
class Recording:
    """What happened, by number of the request: `records` are (kind, time, payload or number), in order."""

    work: Workload
    records: list[tuple[str, float, Any]]
    steps: list[tuple[float, float, list[tuple[int, int, int]], int]]  # start, end, chunks, decoding
    cached: dict[int, int]


@dataclass(frozen=True)
class Outcome:
    number: int
    at_s: float
    prompt_tokens: int
    cached_tokens: int
    credited_tokens: int
    actual_s: float
    predicted_s: float
    naive_s: float
    low_s: float  # the interval that was told
    high_s: float


@dataclass(frozen=True)
class Accuracy:
    within_1s: float
    within_10s: float
    median_ratio: float
    p90_ratio: float
    bias_s: float

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Accuracy:
        """Pairs of predicted and actual seconds."""
        errors = [predicted - actual for predicted, actual in pairs]
        ratios = sorted(abs(error) / actual for error, (_, actual) in zip(errors, pairs, strict=True))
        return cls(
            sum(abs(error) <= 1 for error in errors) / len(errors),
            sum(abs(error) <= 10 for error in errors) / len(errors),
            statistics.median(ratios),
            ratios[int(0.9 * len(ratios))],
            statistics.fmean(errors),
        )

    def __str__(self) -> str:
        return f"{self.within_1s:.1%} / {self.within_10s:.1%} / {self.median_ratio:.2%}"


def record(name: str, folder: Path, count: int | None = None) -> Recording:
    """Runs a workload through its engine, or reads what an earlier run wrote, or another process just now."""
    work = workloads.workload(name, count)
    asked: dict[str, Any] = {"name": name, "count": count}
    stem = "".join(char if char.isalnum() else "_" for char in name)
    if count is not None or name not in workloads.NAMES:
        stem += f"_{zlib.crc32(json.dumps(asked, sort_keys=True).encode()):08x}"
    path = folder / f"{stem}.msgpack"
    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            home = HOMES[work.engine]()
            script = Path(__file__).parent / f"{work.engine}-side" / "virtual_engine.py"
            command: list[str | Path] = [home / "venv" / "bin" / "python", "-W", "ignore", script]
            if work.engine == "vllm":
                command.append(home / "model")
            subprocess.run([*command, path, json.dumps(asked)], check=True, timeout=900)
    raw = msgspec.msgpack.decode(path.read_bytes())
    steps = [
        (start, end, [tuple(chunk) for chunk in chunks], decoding) for start, end, chunks, decoding in raw["steps"]
    ]
    records = [(kind, at_s, what) for kind, at_s, what in raw["records"]]
    return Recording(work, records, steps, {int(k): v for k, v in raw["cached"].items()})


def actual_s(recording: Recording) -> list[float]:
    """Each request's TTFT."""
    first_at_s = {what: at_s for kind, at_s, what in recording.records if kind == "first"}
    return [first_at_s[number] - arrival.at_s for number, arrival in enumerate(recording.work.arrivals)]


def own_s(recording: Recording, number: int) -> float:
    """What a request's prefill costs when nothing else runs; true costs and hits."""
    costs, cached = recording.work.costs, recording.cached[number]
    tokens = recording.work.arrivals[number].prompt_tokens
    steps = -(-(tokens - cached) // recording.work.settings.max_num_batched_tokens)
    return costs.chunk_s(cached, tokens) + steps * costs.step_s


def naive_s(recording: Recording) -> list[float]:
    """Each request's TTFT if prefills ran one after the other and nothing else mattered; true costs and hits."""
    free_at_s, predicted = 0.0, []
    for number, arrival in enumerate(recording.work.arrivals):
        free_at_s = max(free_at_s, arrival.at_s) + own_s(recording, number)
        predicted.append(free_at_s - arrival.at_s)
    return predicted


def watching_s(recording: Recording) -> list[float]:
    """The same, but at each arrival it is known who has had a first token and so is no longer ahead."""
    arrivals = recording.work.arrivals
    first_at_s = [arrival.at_s + ttft_s for arrival, ttft_s in zip(arrivals, actual_s(recording), strict=True)]
    predicted, ahead, begun_s = [], list[int](), 0.0  # since when the foremost of them can be under way
    for number, arrival in enumerate(arrivals):
        gone_s = [first_at_s[other] for other in ahead if first_at_s[other] <= arrival.at_s]
        ahead = [other for other in ahead if first_at_s[other] > arrival.at_s]
        begun_s = max(begun_s, *gone_s) if gone_s else begun_s
        costs_s = [own_s(recording, other) for other in ahead]
        if ahead:
            begun_s = max(begun_s, arrivals[ahead[0]].at_s)
            costs_s[0] -= min(costs_s[0], arrival.at_s - begun_s)
        predicted.append(sum(costs_s) + own_s(recording, number))
        ahead.append(number)
    return predicted


# Seconds between an engine and who observes it, at least and on average more, by what is on its way: requests to the
# engine, its events, tokens and ends from there.
_WAYS_S = {
    "arrive": (0.004, 0.004),
    "kv": (0.0005, 0.001),
    "first": (0.002, 0.003),
    "end": (0.003, 0.01),
    "drafts": (0.002, 0.005),
}


def events(recording: Recording, ways_seed: int | None = None) -> Iterator[tuple[str, float, Any]]:
    """As an observer sees them: at once, or with a seed as through real sockets and servers. Events stay in order."""
    arrivals = [("arrive", arrival.at_s, number) for number, arrival in enumerate(recording.work.arrivals)]
    if ways_seed is None:
        return iter(heapq.merge(recording.records, arrivals, key=lambda event: event[1]))
    rng, seen, batch_s = np.random.default_rng(ways_seed), list[tuple[str, float, Any]](), 0.0
    for kind, at_s, what in [*arrivals, *recording.records]:
        least_s, more_s = _WAYS_S[kind]
        way_s = least_s + float(rng.exponential(more_s))
        if kind == "kv":
            batch_s = max(batch_s, at_s + way_s)
        seen.append((kind, at_s - way_s if kind == "arrive" else batch_s if kind == "kv" else at_s + way_s, what))
    return iter(sorted(seen, key=lambda event: event[1]))


@dataclass
class Observer:
    """Feeds one fleet of one worker; may play several recordings one after the other and keeps what it learned."""

    settings: Settings
    max_tokens_told: bool = False
    truth: Costs | None = None  # true costs given instead of learned
    lengths_told: bool = False  # true output lengths given
    bound_s: float | None = None  # on the wait of every other request: what refusing would have been worth
    clairvoyant_every: int = 0  # one of so many requests is also predicted by a shadow that knows the future
    ways_seed: int | None = None  # what it sees comes by ways that take a while
    bypass: float = 0.0  # the share of requests of which only the engine's blocks and its count of requests tell
    offset_s: float = 1000.0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        self.hasher = BlockHasher(rng)
        # Nobody is refused: a recorded run has served them all. Each refusal that would have been is graded by that.
        policy = PoolPolicy(_POOL, admission=AdmissionPolicy(Mode.SHADOW if self.bound_s is not None else Mode.OFF))
        self.fleet = Fleet([policy], self.hasher, rng)
        self.fleet.join(_POOL, WorkerSpec(_WORKER, "10.0.0.1:8000", self.settings))
        self.worker = self.fleet._pool_of[_WORKER].workers[_WORKER]
        if self.truth is not None:
            cost = _true_cost(self.truth)
            self.worker.cost.cost, self.worker.cost.basis = cost, Basis.CURVE
            for verb in ("add", "add_decode", "add_steps"):
                setattr(self.worker.cost, verb, lambda sample: False)
            self.worker.shadow.set_cost(cost)
        self.kept = Counter[bool]()  # of those that would have been let in, whether their bound was kept
        self.clairvoyant: dict[int, float] = {}
        self._foreseen: list[Coming] | None = None
        self.slowest_s = 0.0
        self.spent_s = 0.0

    def _coming(self, recording: Recording) -> list[Coming]:
        """What is yet to come, and what has come, as only the recording knows it."""
        if self._foreseen is None:
            family, arrivals = HashFamily(self.settings.block_size), recording.work.arrivals
            self._foreseen = [
                Coming(
                    f"{self.offset_s}-{number}",
                    self.offset_s + arrival.at_s,
                    arrival.prompt_tokens,
                    recording.cached[number],
                    arrival.output_tokens,
                    arrival.priority,
                    self.hasher.prompt_hashes(arrival.tokens(), family, Namespace()),
                )
                for number, arrival in enumerate(arrivals)
            ]
        return self._foreseen

    def play(self, recording: Recording) -> list[Outcome]:
        self.fleet.clear(_WORKER)  # the engine begins with an empty cache
        naive, predicted, asked_s, at, outcomes = naive_s(recording), {}, {}, {}, []
        offset_s, arrivals = self.offset_s, recording.work.arrivals
        passing = {n for n, draw in enumerate(np.random.default_rng(3).random(len(arrivals))) if draw < self.bypass}
        in_progress, probed_s = 0, 0.0
        for kind, event_s, what in events(recording, self.ways_seed):
            now_s = event_s + offset_s
            while passing and probed_s + _PROBE_S < event_s:
                probed_s += _PROBE_S
                self.fleet.observe_load(_WORKER, in_progress, probed_s + offset_s, probed_s + offset_s)
            in_progress += (kind == "arrive") - (kind == "end")
            if kind == "drafts":
                self.fleet.observe_drafts(_WORKER, DraftCounts(*what))
                continue
            if kind != "kv" and what in passing:
                continue
            if kind == "arrive":
                tokens = arrivals[what].tokens()
                size = self.settings.block_size
                family = HashFamily(size)
                hashes = self.hasher.prompt_hashes(tokens, family, Namespace())
                prompt = Prompt(len(tokens), True, {family: hashes})
            elif kind == "kv":
                batch = decode_batch(what)
            begun = time.perf_counter()
            if kind == "arrive":
                told = (
                    (recording.work.max_tokens_told or arrivals[what].output_tokens) if self.max_tokens_told else None
                )
                bound_s = self.bound_s if what % 2 else None
                wish = Wish(
                    f"{offset_s}-{what}",
                    now_s,
                    max_tokens=told,
                    max_queue_wait_s=bound_s,
                    priority=arrivals[what].priority,
                )
                if self.bound_s is None:
                    ticket = self.fleet.place_on(_WORKER, prompt, wish, now_s)
                else:
                    granted = self.fleet.place(_POOL, prompt, wish, now_s)
                    assert isinstance(granted, Grant), "in shadow mode everybody is let in"
                    ticket = granted.ticket
                predicted[what], asked_s[what] = ticket.forecast, event_s
                if self.clairvoyant_every and what % self.clairvoyant_every == 0:
                    seer = Seer(self._coming(recording), _true_cost(recording.work.costs))
                    told_s = seer.first_token_s(ticket.id, self.worker.shadow.state(now_s))
                    assert told_s is not None, "it was served"
                    self.clairvoyant[what] = told_s - now_s
                if self.lengths_told:
                    seq = self.worker.shadow._sequences[ticket.id]
                    seq.expected_output, seq.draws = arrivals[what].output_tokens, ()
                    self.worker.shadow._course.changed()
            elif kind == "kv":
                self.fleet.apply(_WORKER, batch, now_s)
            elif kind == "first":
                at[what] = event_s
                first = self.fleet.first_token(f"{offset_s}-{what}", None, now_s)
                if first is not None and first.grade is not None and first.ticket.would_refuse is None:
                    self.kept.update([] if first.grade.kept_bound is None else [first.grade.kept_bound])
            else:
                arrival = arrivals[what]
                usage = Usage(arrival.prompt_tokens, recording.cached[what], arrival.output_tokens)
                self.fleet.finish(f"{offset_s}-{what}", usage, now_s)
            spent_s = time.perf_counter() - begun
            self.slowest_s = max(self.slowest_s, spent_s)
            self.spent_s += spent_s
        for number, arrival in enumerate(arrivals):
            if number in passing:
                continue
            priced = predicted[number]
            outcomes.append(
                Outcome(
                    number,
                    arrival.at_s,
                    arrival.prompt_tokens,
                    recording.cached[number],
                    priced.cached_tokens,
                    at[number] - asked_s[number],
                    priced.ttft_s,
                    naive[number],
                    priced.low_s,
                    priced.high_s,
                )
            )
        self.offset_s = now_s + 100.0
        self._foreseen = None
        return outcomes


def _true_cost(true: Costs) -> StepCost:
    cost = StepCost(0.0, 0.0, true.step_s, true.per_token_s, true.per_token_squared_s, true.per_decode_s)
    if true.bend_tokens is None:
        return cost
    squared_s = cost.per_token_squared_s
    return replace(cost, per_token_squared_s=0.0, per_token_bent_s=squared_s, bend_tokens=true.bend_tokens)


def _order(work: Workload) -> dict[str, Any]:
    told = work.settings
    if work.engine == "vllm":
        return {"scheduling_policy": told.scheduling_policy}
    if not told.enable_priority_scheduling:
        return {}
    return {
        "scheduling_policy": "priority",
        "schedule_low_priority_values_first": told.schedule_low_priority_values_first,
        "priority_scheduling_preemption_threshold": told.priority_scheduling_preemption_threshold,
        "disable_priority_preemption": told.disable_priority_preemption,
    }


def observer(
    recording: Recording,
    true_costs: bool = False,
    lengths_told: bool = False,
    bound_s: float | None = None,
    ways_seed: int | None = None,
) -> Observer:
    told = recording.work.settings
    return Observer(
        Settings(
            block_size=told.block_size,
            # vLLM counts the block that it keeps for itself, SGLang does not.
            num_gpu_blocks=told.num_gpu_blocks - (recording.work.engine == "sglang"),
            max_num_batched_tokens=told.max_num_batched_tokens,
            max_num_seqs=told.max_num_seqs,
            long_prefill_token_threshold=told.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=told.long_prefill_token_threshold_adaptive,
            max_prefill_tokens=told.max_prefill_tokens,
            enable_chunked_prefill=told.enable_chunked_prefill,
            max_model_len=told.max_model_len,
            async_scheduling=told.async_scheduling,
            family=recording.work.engine,
            schedule_conservativeness=told.schedule_conservativeness,
            enable_mixed_chunk=told.enable_mixed_chunk,
            prefill_decode_interval=told.prefill_decode_interval,
            **_order(recording.work),
        ),
        max_tokens_told=recording.work.engine == "sglang",
        truth=recording.work.costs if true_costs else None,
        lengths_told=lengths_told,
        bound_s=bound_s,
        ways_seed=ways_seed,
    )


def coverage(outcomes: Sequence[Outcome]) -> float:
    """The share that was within the interval told, which is to hold nine in ten."""
    return sum(outcome.low_s <= outcome.actual_s <= outcome.high_s for outcome in outcomes) / len(outcomes)


def counted(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    return outcomes[int(WARM_UP * len(outcomes)) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recordings", type=Path, help="default: in the engine's home")
    parser.add_argument("--warm", action="store_true", help="play it a second time, with what the first run learned")
    parser.add_argument("--true-costs", action="store_true")
    parser.add_argument("--lengths-told", action="store_true")
    parser.add_argument("--clairvoyant", type=int, default=0, metavar="EVERY")
    parser.add_argument("--bound", type=float, metavar="SECONDS", help="on every other request: who would be refused?")
    parser.add_argument("--ways", type=int, metavar="SEED", help="requests, events and tokens are a while on their way")
    parser.add_argument("--bypass", type=float, default=0.0, help="share of requests that do not come through us")
    parser.add_argument("--requests", type=int, metavar="COUNT", help="only the first so many of each workload")
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--others", action="store_true", help="other arrivals, costs, settings and traces")
    parser.add_argument("workloads", nargs="*", help='"NAME | seed 2 | tokens x10": see tests/engine/workloads.py')
    asked = parser.parse_args()
    for name in asked.workloads or (workloads.OTHERS if asked.others else workloads.NAMES):
        folder = asked.recordings or HOMES[workloads.workload(name).engine]() / "recordings"
        recording = record(name, folder, asked.requests)
        told_s = watching_s(recording)
        watcher = observer(recording, asked.true_costs, asked.lengths_told, asked.bound, asked.ways)
        watcher.clairvoyant_every, watcher.bypass = asked.clairvoyant, asked.bypass
        runs = [watcher.play(recording)] + ([watcher.play(recording)] if asked.warm else [])
        for label, outcomes in zip(("", " (warm)"), runs, strict=False):
            rest = counted(outcomes)
            naive = Accuracy.of([(o.naive_s, o.actual_s) for o in rest])
            watching = Accuracy.of([(told_s[o.number], o.actual_s) for o in rest])
            ours = Accuracy.of([(o.predicted_s, o.actual_s) for o in rest])
            right = sum(o.cached_tokens == o.credited_tokens for o in rest) / len(rest)
            median_s = statistics.median(o.actual_s for o in rest)
            sys.stdout.write(
                f"{name + label:34s} naive {naive!s:24s} watching {watching!s:24s} ours {ours!s:24s} "
                f"p90 {ours.p90_ratio:.1%} bias {ours.bias_s:+.2f} s, 90 % interval covers {coverage(rest):.0%}, "
                f"median ttft {median_s:.2f} s, cache {right:.1%}, "
                f"forced {watcher.worker.shadow.forced}, slowest call {watcher.slowest_s * 1e3:.0f} ms, "
                f"{watcher.spent_s:.1f} s in all\n"
            )
            sys.stdout.flush()
        if asked.bound is not None:
            verdicts = Counter(review.verdict for _, review in watcher.fleet.take_reviews(watcher.offset_s))
            wrong, refused = verdicts[Verdict.FALSE_ALARM], verdicts[Verdict.FALSE_ALARM] + verdicts[Verdict.RIGHT]
            late, let_in = watcher.kept[False], watcher.kept.total()
            said = f"bound {asked.bound:g} s: {wrong} of {refused} refusals wrong, {late} of {let_in} let in late"
            sys.stdout.write(f"{'':34s} {said}\n")
        if watcher.clairvoyant:
            told = watcher.clairvoyant
            exact = Accuracy.of([(told[o.number], o.actual_s) for o in runs[-1] if o.number in told])
            sys.stdout.write(f"{'':34s} clairvoyant {exact!s} p90 {exact.p90_ratio:.3%} of {len(told)}\n")
        if asked.dump:
            asked.dump.write_text("\n".join(json.dumps(asdict(o)) for o in runs[-1]))


if __name__ == "__main__":
    main()
