"""Engines in virtual time behind one policy. One seed decides everything."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Protocol

from bench.goodput.policies import Policy
from bench.goodput.traffic import Ask, Client
from enginesim.kv_events import encode_batch
from enginesim.request import Request
from enginesim.scheduler import Batch, Output, Scheduler
from enginesim.settings import CostSettings, SchedulerSettings
from enginesim.step_time import StepTime


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds."""

    ask: Ask
    asked_at_s: float
    worker: str | None  # None: refused
    ttft_s: float | None = None
    wait_s: float | None = None  # what is left of it without the prefill that it would have taken alone
    cached_tokens: int = 0

    @property
    def served(self) -> bool:
        """Within its bound, where it has one."""
        bound_s = self.ask.bound_s
        return self.wait_s is not None and (bound_s is None or self.wait_s <= bound_s)


class Core(Protocol):
    """An engine's queue and cache, one step at a time."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def begin(self) -> tuple[float, int]:
        """Composes a step: the seconds that it takes, and the prompt tokens that it computes."""

    def end(self, now_s: float) -> tuple[list[Output], Callable[[], bytes] | None]:
        """What the step has brought, and the payload of its KV events if there are any."""


class SimulatedCore:
    def __init__(self, limits: SchedulerSettings, costs: CostSettings) -> None:
        self._scheduler = Scheduler(limits, lambda request: 7)
        self._step_time = StepTime(costs)
        self._batch: Batch | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, request: Request) -> None:
        request.hash_more()
        self._scheduler.add(request)

    def begin(self) -> tuple[float, int]:
        batch = self._batch = self._scheduler.schedule()
        prefilled = sum(chunk.tokens for chunk in batch.chunks if not chunk.is_decode)
        return self._step_time.duration_s(batch), prefilled

    def end(self, now_s: float) -> tuple[list[Output], Callable[[], bytes] | None]:
        assert self._batch is not None
        outputs, events = self._scheduler.complete(self._batch)
        return outputs, partial(encode_batch, events, now_s, "map") if events else None


@dataclass(slots=True)
class _Engine:
    name: str
    costs: CostSettings
    core: Core
    steps: bool = False  # one is under way
    prefilled_tokens: int = 0


@dataclass
class World:
    """Ends of steps come first at any instant, then what clients do, then new steps begin."""

    costs: Sequence[CostSettings]
    limits: SchedulerSettings
    policy: Policy
    agents: Client | None = None  # who goes on after an answer or a refusal
    until_s: float | None = None  # nobody asks for anything more
    core: Callable[[SchedulerSettings, CostSettings], Core] = SimulatedCore
    now_s: float = 0.0
    outcomes: dict[int, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engines = {
            name: _Engine(name, costs, self.core(self.limits, costs))
            for name, costs in zip(worker_names(len(self.costs)), self.costs, strict=True)
        }
        self._numbers, self._order = itertools.count(1), itertools.count()
        self._agenda: list[tuple[float, int, int, _Engine | Callable[[], None]]] = []
        self._flying: dict[int, Request] = {}

    def run(self, asks: Sequence[Ask]) -> World:
        """Until everything is answered."""
        for ask in asks:
            self._later(ask.at_s, partial(self._ask, ask))
        while self._agenda:
            self.now_s, _, _, what = heapq.heappop(self._agenda)
            if isinstance(what, _Engine):
                self._step_ended(what)
            else:
                what()
            if not self._agenda or self._agenda[0][0] > self.now_s:
                self._begin_steps()
        return self

    @property
    def prefilled_tokens(self) -> int:
        return sum(engine.prefilled_tokens for engine in self.engines.values())

    def _begin_steps(self) -> None:
        for engine in self.engines.values():
            if not engine.steps and engine.core.has_work:
                step_s, prefilled_tokens = engine.core.begin()
                engine.steps = True
                engine.prefilled_tokens += prefilled_tokens
                self._later(self.now_s + step_s, engine)

    def _later(self, at_s: float, what: _Engine | Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at_s, 0 if isinstance(what, _Engine) else 1, next(self._order), what))

    def _ask(self, ask: Ask) -> None:
        if self.until_s is not None and self.now_s > self.until_s:
            return
        number = next(self._numbers)
        worker = self.policy.choose(number, ask, self.now_s)
        self.outcomes[number] = Outcome(ask, self.now_s, worker)
        if worker is None:
            if self.agents is not None:
                self._go_on(self.agents.refused(ask, self.now_s))
            return
        request = Request(number, list(ask.tokens), ask.output_tokens, self.limits.block_size)
        self.engines[worker].core.add(request)
        self._flying[number] = request

    def _go_on(self, ask: Ask | None) -> None:
        if ask is not None:
            self._later(max(ask.at_s, self.now_s), partial(self._ask, ask))

    def _step_ended(self, engine: _Engine) -> None:
        engine.steps = False
        outputs, payload = engine.core.end(self.now_s)
        if payload is not None:
            self.policy.stored(engine.name, payload, self.now_s)
        for output in outputs:
            number, request = output.request.id, output.request
            outcome = self.outcomes[number]
            if output.position == 0:
                outcome.ttft_s = self.now_s - outcome.asked_at_s
                outcome.cached_tokens = request.cached_tokens or 0
                outcome.wait_s = outcome.ttft_s - alone_s(engine.costs, self.limits, request)
                self.policy.first_token(number, self.now_s)
            if output.finish_reason:
                del self._flying[number]
                self.policy.ended(number, engine.name, request, self.now_s)
                if self.agents is not None:
                    answer = request.token_ids[request.prompt_tokens :]
                    self._go_on(self.agents.answered(outcome.ask, answer, self.now_s))


def alone_s(costs: CostSettings, limits: SchedulerSettings, request: Request) -> float:
    """What the engine would take to the first token if there were nothing else."""
    return seconds_alone(costs, limits.max_num_batched_tokens, request.prompt_tokens, request.cached_tokens or 0)


def seconds_alone(costs: CostSettings, step_tokens: int, prompt: int, cached: int) -> float:
    """For a prompt of so many tokens, of which some are cached."""
    steps = ceil(max(1, prompt - cached) / step_tokens)
    linear_s = costs.prefill_us_per_token / 1e6 * (prompt - cached)
    square_s = costs.prefill_ns_per_token2 / 1e9 * (prompt * prompt - cached * cached)
    return steps * costs.step_ms / 1e3 + linear_s + square_s


def worker_names(count: int) -> list[str]:
    return [f"w{number}" for number in range(count)]
