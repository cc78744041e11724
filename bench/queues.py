"""One decision while the queues of the fleet keep changing: prompts get their first tokens, and requests end.

Times are CPU time, since a machine that is busy with something else says nothing of a decision.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from bench.row import Row, collect_garbage_as_the_filter_does
from predictor.engines.vllm import Sequence, Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHasher, Prompt
from predictor.shadow import Shadow

_COST = StepCost(0.0, 0.0, 0.005, 30e-6, 37e-12, 50e-6)
_DECISIONS = 60
# Of a thousand requests a second each has a first token and an end, and a few more of the engines end a step.
_CHANGES = 8


def rows() -> Iterator[Row]:
    collect_garbage_as_the_filter_does()
    for workers in (8, 64, 256):
        fleet = _Changing(workers, 16, 64, Settings(max_num_batched_tokens=2048))
        yield fleet.row(f"decision, {workers} workers x 64 queued", "<= 3 ms" if workers == 256 else "")
    gated = _Changing(8, 200, 475, Settings(num_gpu_blocks=25_000))
    yield gated.row("decision, 8 workers x (200 running + 475 that wait for KV space)", "longest < 20 ms", longest=True)
    yield _recomputed()


def _recomputed() -> Row:
    """A whole timeline anew, as after an end, and a newcomer priced on it."""
    shade = Shadow(Settings(max_num_batched_tokens=2048), _COST)
    rng = np.random.default_rng(5)
    for number in range(80):
        shade.book(Sequence(f"s{number}", _length(rng), 0, 300), 0.0)
    for number in range(16):
        shade.first_token(f"s{number}", 0.05 * (number + 1))
    times_ms, now_s = [], 1.0
    for number in range(16):
        shade.finish(f"s{number}", now_s)
        shade.book(Sequence(f"more{number}", _length(rng), 0, 300), now_s)
        began_s = time.thread_time()
        shade.timeline(now_s).finish_s(2000, 125)
        times_ms.append((time.thread_time() - began_s) * 1e3)
        shade.first_token(f"s{number + 16}", now_s + 0.05)
        now_s += 0.1
    return Row("a timeline computed anew, 64 queued", f"median {statistics.median(times_ms):.2f} ms", "<= 1 ms")


class _Changing:
    """A pool in which all know their costs, and where something happens before each decision."""

    def __init__(self, workers: int, running: int, queued: int, settings: Settings) -> None:
        self._rng = np.random.default_rng(3)
        self._fleet = Fleet([PoolPolicy("p")], BlockHasher(self._rng), self._rng)
        self._decoding: dict[str, deque[str]] = {}
        self._waiting: dict[str, deque[str]] = {}
        self._numbers = 0
        for number in range(workers):
            name = f"w{number}"
            self._fleet.join("p", WorkerSpec(name, f"10.0.0.1:{number + 1}", settings))
            self._fleet.know_cost(name, _COST)
            ids = [self._next() for _ in range(running + queued)]
            for ticket_id in ids:
                self._fleet.place_on(name, Prompt(_length(self._rng), exact=True), Wish(ticket_id, 0.0), 0.0)
            for at, ticket_id in enumerate(ids[:running]):
                self._fleet.first_token(ticket_id, None, 0.05 * (at + 1))
            self._decoding[name], self._waiting[name] = deque(ids[:running]), deque(ids[running:])
        self._now_s = 0.05 * (running + 1)

    def row(self, what: str, budget: str, longest: bool = False) -> Row:
        times_ms = sorted(self._decision_ms() for _ in range(_DECISIONS))
        known = self._fleet.shortcuts("p")
        usual = f"median {statistics.median(times_ms):.2f} ms"
        most = f"longest {times_ms[-1]:.1f} ms" if longest else f"p90 {times_ms[int(0.9 * _DECISIONS)]:.2f} ms"
        return Row(f"{what}, changing", f"{usual}, {most}, {known.spans // _DECISIONS} spans", budget)

    def _decision_ms(self) -> float:
        names = list(self._decoding)
        self._now_s += 0.03 if len(names) <= _CHANGES else 0.002
        for at in self._rng.choice(len(names), min(_CHANGES, len(names)), replace=False):
            self._happens(names[at])
        prompt, wish = Prompt(_length(self._rng), exact=True), Wish(self._next(), self._now_s)
        began_s = time.thread_time()
        decision = self._fleet.place("p", prompt, wish, self._now_s)
        took_s = time.thread_time() - began_s
        assert isinstance(decision, Grant)
        self._waiting[decision.ticket.worker].append(decision.ticket.id)
        return took_s * 1e3

    def _happens(self, worker: str) -> None:
        """One ends, and one has its first token."""
        decoding, waiting = self._decoding[worker], self._waiting[worker]
        if decoding:
            decoding.rotate(-int(self._rng.integers(len(decoding))))
            self._fleet.finish(decoding.popleft(), Usage(), self._now_s)
        if waiting:
            decoding.append(waiting.popleft())
            self._fleet.first_token(decoding[-1], None, self._now_s)

    def _next(self) -> str:
        self._numbers += 1
        return f"t{self._numbers}"


def _length(rng: np.random.Generator) -> int:
    return int(np.clip(rng.lognormal(7.2, 0.8), 50, 8000))
