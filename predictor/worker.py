"""One engine of a pool: what is known of it, what it is taken to do, and the tickets that it has."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from math import ceil

from predictor.arrivals import RecentArrivals
from predictor.budget_check import BudgetCheck
from predictor.drafts import Drafts
from predictor.engines.vllm import Settings, room_beside
from predictor.hindsight import Hindsight
from predictor.interval import Calibration
from predictor.pool_cache import CacheSpec
from predictor.prefill_cost import DecodeSample, PrefillCost, PrefillSample
from predictor.prompt import Prompt
from predictor.shadow import Shadow
from predictor.stored_run import StoredRun
from predictor.tickets import Ticket, Usage, Wish

# How much longer than an engine's context an estimate must be before nobody doubts that the prompt is, too.
_FAR_BEYOND = 4
# What is booked may take so long to show in an engine's own count.
_EVIDENCE_GRACE_S = 5.0
# Between two first tokens less time says nothing of a worker's speed.
_SOME_TIME_S = 0.02
# Fewer steps tell little: the end is seen a millisecond late.
_MIN_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One engine: its name, the `ip:port` that Envoy reaches it by, and its settings."""

    name: str
    endpoint: str
    settings: Settings = field(default_factory=Settings)
    cluster: str | None = None  # Envoy's name for it, where routes choose clusters
    adapters: frozenset[str] = frozenset()  # LoRA adapters that it has loaded
    cache: CacheSpec = field(default_factory=CacheSpec)
    rank: int | None = None  # of the endpoint's data-parallel engines; None: it has one, or chooses itself


@dataclass(slots=True)
class Worker:
    spec: WorkerSpec
    settings: Settings
    cost: PrefillCost
    shadow: Shadow
    calibration: Calibration
    arrivals: RecentArrivals = field(default_factory=RecentArrivals)
    runs: list[StoredRun] = field(default_factory=list)  # of a batch that has come in part
    due: list[tuple[float, str]] = field(default_factory=list)  # a heap: when a ticket's interval ends
    up: bool = True
    draining: bool = False  # it is to become empty: it gets nothing new
    trusted: bool = True  # the cache view is live
    comings_and_goings: int = 0
    tickets: dict[str, Ticket] = field(default_factory=dict)
    backing_off_until_s: float = 0.0  # the engine has said that it is full
    told_foreign: bool = False  # the engine has said that it has more in progress than came through us
    load_seen: tuple[float, int] | None = None  # when the engine was last asked, and what it had in progress
    last_token_s: tuple[float, float] | None = None  # when the last first token came, and when it was predicted to
    kv_tokens: int = 0  # that the tickets in flight will need
    unseen_hits: bool = False  # it has reported more reuse than was seen: what is quick need not be a quick worker
    drafts: Drafts = field(default_factory=Drafts)
    budget: BudgetCheck = field(init=False)
    hindsight: Hindsight = field(init=False)

    def __post_init__(self) -> None:
        self.budget = _budget_check(self.settings)
        self.hindsight = Hindsight(self.spec.name)

    @property
    def foreign_load(self) -> bool:
        return self.told_foreign or self.shadow.unbooked > 0

    @property
    def idle(self) -> bool:
        return not self.tickets and not self.foreign_load

    @property
    def capacity_tokens(self) -> int | None:
        blocks = self.settings.num_gpu_blocks
        return None if blocks is None else blocks * self.settings.block_size

    def configure(self, settings: Settings) -> None:
        """It has other settings than was assumed: what was learned of an engine with those is thrown away."""
        self.settings = settings
        self.budget = _budget_check(settings)
        self.shadow.set_settings(settings)
        self.forget()

    def forget(self) -> None:
        """What was learned of it was of another engine."""
        self.cost.forget()
        self.calibration.forget()
        self.shadow.set_cost(self.cost.cost)

    def takes(self, prompt: Prompt, wish: Wish) -> bool:
        """False if the engine would answer 400, since prompt and output exceed its context (vLLM 0.32); an engine that
        only refuses looks idle, and would be chosen again and again."""
        longest = self.settings.max_model_len
        return longest is None or not prompt.exact or prompt.token_count + (wish.max_tokens or 1) <= longest

    def could_take(self, prompt: Prompt) -> bool:
        """False if the engine would answer 400 whatever the output, by the tokens or by an estimate that is far
        beyond."""
        longest = self.settings.max_model_len
        return longest is None or prompt.token_count < longest * (1 if prompt.exact else _FAR_BEYOND)

    def kv_demand(self, more_tokens: int) -> float | None:
        """In caches' worth: what the requests in flight and so many tokens more will need, shared blocks left out."""
        capacity = self.capacity_tokens
        return None if not capacity else (self.kv_tokens + more_tokens) / capacity

    # Tickets

    def take(self, ticket: Ticket) -> None:
        self.tickets[ticket.id] = ticket
        self.kv_tokens += ticket.kv_tokens

    def release(self, ticket: Ticket) -> None:
        del self.tickets[ticket.id]
        self.kv_tokens -= ticket.kv_tokens

    def spoil_samples(self) -> None:
        """Another prefill joins: those under way are not alone any more."""
        for ticket in self.tickets.values():
            ticket.decoded_alone = False
            if ticket.first_token_at_s is None:
                ticket.solo = False

    def count_overdue(self, tickets: Mapping[str, Ticket], now_s: float) -> None:
        """A request whose interval has passed is a miss now: the next forecasts must not wait for its token.

        `tickets`: all that are in flight, by name.
        """
        due = self.due
        while due and due[0][0] < now_s:
            ticket = tickets.get(heapq.heappop(due)[1])
            if ticket is not None and ticket.first_token_at_s is None and ticket.worker == self.spec.name:
                ticket.overdue = True
                self.calibration.overdue(ticket.forecast.kind)

    def since_last_token(self, booked_at_s: float, predicted_s: float, now_s: float) -> tuple[float, float] | None:
        """Seconds that a first token was predicted to take, and did take: since the one before, if it came while this
        request was waiting, else since it was booked. None where that is too little.

        Whatever was not foreseen makes all who wait for it late by as much, and would look like a worker that has
        become slower. Between their tokens each has only what is his own.
        """
        since_s = since_predicted_s = booked_at_s
        if self.last_token_s is not None and self.last_token_s[0] > booked_at_s:
            since_s, since_predicted_s = self.last_token_s
        self.last_token_s = now_s, booked_at_s + predicted_s
        told_s = self.last_token_s[1] - since_predicted_s, now_s - since_s
        return told_s if min(told_s) >= _SOME_TIME_S else None

    # What its engine shows

    def stored(self, runs: list[StoredRun], more: bool, computed: bool, now_s: float) -> None:
        """A batch of its events has come, or the next part of one (`more`: and another is to come), and told that these
        blocks were stored; `computed`: and not loaded."""
        _append(self.runs, runs)
        if more:
            return
        runs, self.runs = self.runs, []
        self.shadow.set_sees_blocks(self.trusted, computed)
        goes_on = any(self.shadow.goes_on(run) for run in runs)
        self.budget.step(runs, goes_on, self.shadow.decoding)
        self.shadow.stored(runs, now_s)
        if self.shadow.unbooked:
            self.spoil_samples()

    def counted(self, in_progress: int, asked_at_s: float, now_s: float) -> list[Ticket]:
        """It says that it has so many requests in progress; returns tickets that have ended by that.

        Where it twice has fewer in progress than are booked, the oldest have ended. Only those are taken that were
        booked well before the first of the two, and whose stream is over: a request that is still waiting for its first
        token is seen to be alive.
        """
        self.told_foreign = in_progress > len(self.tickets)
        ours = sum(ticket.booked_at_s <= asked_at_s for ticket in self.tickets.values())
        self.shadow.count_unbooked(max(0, in_progress - ours), now_s)
        earlier, self.load_seen = self.load_seen, (asked_at_s, in_progress)
        if earlier is None:
            return []
        limit_s = earlier[0] - _EVIDENCE_GRACE_S
        settled = [t for t in self.tickets.values() if t.first_token_at_s is not None or not t.wish.streaming]
        aged = sorted((t for t in settled if t.booked_at_s < limit_s), key=lambda ticket: ticket.booked_at_s)
        return aged[: max(0, len(aged) - max(in_progress, earlier[1]))]

    def learn(self, ticket: Ticket, usage: Usage, now_s: float) -> bool:
        """From a request that it has served; False if that was not to be had alone."""
        assert ticket.first_token_at_s is not None
        if ticket.decoded_alone and (usage.output_tokens or 0) >= _MIN_OUTPUT_TOKENS:
            assert usage.output_tokens is not None
            step_s = (now_s - ticket.first_token_at_s) / (usage.output_tokens - 1)
            self.cost.add_decode(DecodeSample(1, step_s))
            self.shadow.set_cost(self.cost.cost)
        if not ticket.solo:
            return False
        if ticket.forecast.exact_tokens:
            prompt_tokens = ticket.forecast.prompt_tokens
        elif usage.prompt_tokens is not None and usage.cached_tokens is not None:
            prompt_tokens = usage.prompt_tokens
        else:
            return False
        cached = ticket.forecast.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        room = room_beside(ticket.decodes_beside, self.settings, self.shadow.drafting)
        steps = ceil(max(1, prompt_tokens - cached) / room)
        seconds = ticket.first_token_at_s - ticket.joins_at_s
        sample = PrefillSample(prompt_tokens, cached, steps, ticket.decodes_beside, seconds)
        if not self.cost.add(sample):
            return False
        self.shadow.set_cost(self.cost.cost)
        return True


def _append(runs: list[StoredRun], more: ReadOnly[StoredRun]) -> None:
    """The next part of a batch: where an event was cut, its run goes on."""
    goes_on = bool(runs and more) and runs[-1].last == more[0].parent
    if goes_on:
        first = runs.pop()
        runs.append(StoredRun(first.first, first.parent, more[0].last, first.blocks + more[0].blocks))
    runs += more[goes_on:]


def _budget_check(settings: Settings) -> BudgetCheck:
    capped = settings.long_prefill_token_threshold > 0
    return BudgetCheck(settings.max_num_batched_tokens, settings.block_size, capped)
