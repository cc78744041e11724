"""The one mutable whole: pools of workers, what each is known to hold and to do, and the tickets in flight.

Every verb is synchronous and takes the time as an argument. `place` forecasts, chooses and books in one call, so that
two requests can never both take the same idle worker.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field
from heapq import nsmallest
from math import ceil

import msgspec
import numpy as np

from predictor.admission import (
    AdmissionPolicy,
    Limits,
    Mode,
    Prospect,
    Reason,
    Refusal,
    RetryPolicy,
    limits_of,
    objection,
    refuse,
)
from predictor.arrivals import PromptSizes, RecentArrivals
from predictor.budget_check import BudgetCheck, BudgetDoubt
from predictor.course import State
from predictor.crowding import Crowding
from predictor.drafts import DraftCounts, Drafts
from predictor.engines.step_rule import reserved_beside_prompt
from predictor.engines.vllm import Sequence, Settings, room_beside
from predictor.fairness import FairnessPolicy, TenantUse
from predictor.feed_state import Trust
from predictor.forecast import Forecast, forecast, least_high_wait_s
from predictor.grading import CacheVerdict, Grade, grade, judge_cache
from predictor.hindsight import Guard, GuardPolicy, Hindsight, Review, Watched, review_shadow
from predictor.interval import Calibration, PoolErrors
from predictor.kv_events import Batch, Tier
from predictor.memory import VERSION, PoolMemory, WorkerMemory, fingerprint
from predictor.output_lengths import Going, LengthCurve, OutputLengths, Running, draws
from predictor.pool_cache import CacheSpec, Left, PoolCache, Reuse
from predictor.prefill_cost import DecodeSample, LearningPolicy, PrefillCost, PrefillSample, StepCost
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Prompt
from predictor.renewal import Renewal
from predictor.routing import Candidate, Choice, Prefer, RoutingPolicy, Why, choose
from predictor.run_forward import Budget
from predictor.shadow import Corrections, Shadow
from predictor.step_sample import StepSample
from predictor.stored_run import StoredRun
from predictor.timeline import Guess, Timeline

_RECENT_GRANTS = 50
# Imagined futures of a worker whose queue waits for others to end: more than five tell no more.
_FUTURES = 5
# Of larger pools only those are priced for a request that can win: so many, by the least that each can cost.
_ALL_PRICED, _LIKELY = 32, 16
# The timeline of so few requests is computed anew in so many spans, hardly ever more.
_FEW, _FEW_SPANS = 8, 24
# What a view of the whole may list of all queues together, in spans.
_VIEW_SPANS = 300
_MAX_OUTPUT_TOKENS = 1 << 20
# How much longer than an engine's context an estimate must be before nobody doubts that the prompt is, too.
_FAR_BEYOND = 4
# What is booked may take so long to show in an engine's own count.
_EVIDENCE_GRACE_S = 5.0
# Fewer steps tell little: the end is seen a millisecond late.
_MIN_OUTPUT_TOKENS = 8
# Sessions remembered in a pool, by the worker that served them last; the oldest are forgotten.
_MOST_SESSIONS = 10_000
# What two ways to add up the same may differ by.
_ROUNDING_S = 1e-6
# Reviews that nobody has fetched yet; the oldest are dropped.
_MOST_REVIEWS = 10_000


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


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """How one pool decides."""

    name: str
    learning: LearningPolicy = field(default_factory=LearningPolicy)
    routing: RoutingPolicy = field(default_factory=RoutingPolicy)
    admission: AdmissionPolicy = field(default_factory=AdmissionPolicy)
    guard: GuardPolicy = field(default_factory=GuardPolicy)
    fairness: FairnessPolicy | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    default_output_tokens: int = 256  # expected of a request, until ends have been seen


class Wish(msgspec.Struct, frozen=True, gc=False):
    """What a caller wants of a request, and since when."""

    ticket_id: str
    received_at_s: float
    waited_before_s: float = 0.0  # before the request reached us, where that is known and trusted
    max_queue_wait_s: float | None = None
    streaming: bool = True  # the first token will be seen
    max_tokens: int | None = None
    subset: frozenset[str] | None = None  # endpoints that may be chosen; None: all of the pool's
    max_ttft_s: float | None = None
    prefer: Prefer | None = None  # None: as the pool does
    tenant: str | None = None  # who shares the pool with whom, where that counts
    session: str | None = None  # what the caller calls the conversation
    adapter: str | None = None  # LoRA adapter that must be loaded
    priority: int | None = None  # for engines that go by it, as the caller gave it


class Attempt(enum.Enum):
    """How often a request has been tried to be placed, where it may be held for a while."""

    FINAL = "final"  # a refusal is one
    FIRST = "first"  # a refusal is none yet: whoever carries it out says so (`Fleet.refused`)
    AGAIN = "again"  # the same, of a request that was counted before


@dataclass(slots=True)
class Ticket:
    """A granted request in flight."""

    id: str
    pool: str
    worker: str
    forecast: Forecast
    wish: Wish
    booked_at_s: float
    joins_at_s: float  # when the step under way ends, and the first that it can be part of begins
    solo: bool  # no other prefill shared the worker with its own
    decodes_beside: int
    cost_changes: int  # of the worker's speed, when it was forecast
    number: int = 0  # bookings are numbered in the order in which they join their worker's queue
    kv_tokens: int = 0  # of the worker's KV cache that it will need beside what it shares
    would_refuse: Refusal | None = None  # let through in shadow mode
    decoded_alone: bool = False  # nothing else was in flight on the worker since its first token
    first_token_at_s: float | None = None
    overdue: bool = False  # the upper end of its interval passed without a first token
    moved: bool = False  # Envoy sent it to another endpoint than the chosen one


class Grant(msgspec.Struct, frozen=True):
    ticket: Ticket
    endpoints: tuple[str, ...]  # the chosen one, then whom to fall back to
    forecasts: tuple[Forecast, ...]  # of every worker that was considered
    why: Why
    cluster: str | None = None  # of the chosen one, where routes choose clusters
    would_refuse: Refusal | None = None  # in shadow mode
    rank: int | None = None  # of the chosen one, and of whom to fall back to


@dataclass(frozen=True, slots=True)
class NoWorker:
    pool: str


Decision = Grant | Refusal | NoWorker


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What the engine reported at the end, where it did. Tokens."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cached_seen: bool = False  # not reported, but read from where the request's first stored block begins


class FirstToken(msgspec.Struct, frozen=True):
    ticket: Ticket
    grade: Grade | None  # None: the request was served elsewhere than predicted for


class Ended(msgspec.Struct, frozen=True):
    ticket: Ticket
    cache: CacheVerdict | None  # None: there is nothing to judge (no first token, or served elsewhere)
    usage: Usage
    learned_from: bool


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """Counts. Spans are the unit of a decision's work (`run_forward.Budget`)."""

    forecasts_cut: int  # the queue was followed as far as the budget went, and was taken to go on at its pace
    forecasts_stale: int  # a request was placed by a timeline that did not know of all that had happened
    spans: int  # listed by decisions
    shadows_cut: Mapping[str, int]  # by worker: more had passed than one call may look at


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    settings: Settings
    cost: PrefillCost
    shadow: Shadow
    calibration: Calibration
    budget: BudgetCheck
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
    kv_tokens: int = 0  # that the tickets in flight will need
    unseen_hits: bool = False  # it has reported more reuse than was seen: what is quick need not be a quick worker
    drafts: Drafts = field(default_factory=Drafts)
    hindsight: Hindsight = field(init=False)

    def __post_init__(self) -> None:
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


@dataclass(slots=True)
class _Pool:
    policy: PoolPolicy
    cache: PoolCache
    workers: dict[str, _Worker] = field(default_factory=dict)
    prompts: PromptSizes = field(default_factory=PromptSizes)
    recent: deque[str] = field(default_factory=deque)  # workers of the newest grants
    recently: Counter[str] = field(default_factory=Counter)  # how many of these each worker has
    errors: PoolErrors = field(default_factory=PoolErrors)
    renewal: Renewal = field(default_factory=Renewal)
    lengths: OutputLengths = field(init=False)
    reuse: float = 0.0  # running mean of the part of a prompt that is cached
    sessions: OrderedDict[str, str] = field(default_factory=OrderedDict)  # to the worker that served them last
    guard: Guard = field(init=False)
    use: TenantUse | None = field(init=False)
    crowding: Crowding = field(default_factory=Crowding)
    open_at: int = 0  # the place of a worker that was open when a refusal was looked for, among those eligible

    def __post_init__(self) -> None:
        self.lengths = OutputLengths(self.policy.default_output_tokens)
        self.guard = Guard(self.policy.guard)
        fairness = self.policy.fairness
        self.use = None if fairness is None else TenantUse(fairness.half_life_s)

    @property
    def mode(self) -> Mode:
        """Admission's mode as of now: a guard may have stepped it down."""
        mode = self.policy.admission.mode
        return Mode.SHADOW if mode is Mode.ENFORCE and self.guard.stepped_down else mode

    def limits(self, wish: Wish, now_s: float) -> Limits:
        fair_wait_s = None
        if self.use is not None and wish.tenant is not None and self.use.over_share(wish.tenant, now_s):
            assert self.policy.fairness is not None
            fair_wait_s = self.policy.fairness.wait_s
        return limits_of(self.policy.admission, wish.max_queue_wait_s, wish.max_ttft_s, fair_wait_s)

    def granted(self, wish: Wish, priced: Forecast, now_s: float) -> None:
        """Remembers what later decisions go by."""
        self.recent.append(priced.worker)
        self.recently[priced.worker] += 1
        if len(self.recent) > _RECENT_GRANTS:
            oldest = self.recent.popleft()
            self.recently[oldest] -= 1
            if not self.recently[oldest]:
                del self.recently[oldest]
        self.reuse += 0.02 * (priced.cached_tokens / max(1, priced.prompt_tokens) - self.reuse)
        if wish.session is not None:
            self.sessions[wish.session] = priced.worker
            self.sessions.move_to_end(wish.session)
            if len(self.sessions) > _MOST_SESSIONS:
                self.sessions.popitem(last=False)
        if self.use is not None and wish.tenant is not None:
            self.use.add(wish.tenant, priced.prompt_tokens - priced.cached_tokens, now_s)

    def expected_output(self, max_tokens: int | None, now_s: float) -> int:
        """Tokens that half of all requests do not go beyond."""
        return self.length_curve(now_s).length(0.5, 0, max_tokens)

    def length_curve(self, now_s: float) -> LengthCurve:
        return self.lengths.curve(self._generated, now_s)

    def _generated(self) -> Running:
        running = Running()
        for worker in self.workers.values():
            shadow, tickets = worker.shadow, worker.tickets
            going = running.seen if shadow.sees_decodes else running.counted
            going.extend(Going(tokens, tickets[name].number) for name, tokens in shadow.generated() if name in tickets)
        return running


class _Race:
    """One request, and the workers of a pool that may get it, each priced by its timeline."""

    def __init__(
        self,
        home: _Pool,
        everybody: ReadOnly[_Worker],
        prompt: Prompt,
        wish: Wish,
        limits: Limits,
        tickets: Mapping[str, Ticket],
        now_s: float,
    ) -> None:
        self._found = home.cache.reuse(prompt)
        self._lasting: dict[str, Reuse] = {}  # of full caches, what will be left of that
        self.workers: list[_Worker] = []  # who is priced
        self.prospects: list[Prospect] = []  # in the same order
        self._home = home
        self._everybody = everybody
        self._prompt = prompt
        self._wish = wish
        self._limits = limits
        self._tickets = tickets
        self._now_s = now_s
        self._waited_s = max(0.0, wish.waited_before_s) + max(0.0, now_s - wish.received_at_s)
        # Only a bound asks how sure a wait is.
        self._quantile = 1.0 - home.policy.admission.risk if limits.bounded else None
        self._output_tokens = home.expected_output(wish.max_tokens, now_s)
        self._prefilling = [worker.shadow.prefilling for worker in everybody]
        self._budget = home.renewal.budget(len(everybody), now_s)
        self._old: list[int] = []  # places of those whose timelines are not up to date
        self._others = home.policy.routing.others[wish.prefer or home.policy.routing.prefer]
        self._refusal_s = home.policy.routing.refusal_s if self._others and not limits.bounded else 0.0
        self._shortest_s = self._opens_first_in_s() if self._refusal_s else 0.0

    def likely(self, rng: np.random.Generator) -> list[_Worker]:
        """Of a large pool those that may win, by the least that each can cost: when it lets somebody in, and what it
        would have to prefill."""
        home, workers, prefilling = self._home, self._everybody, self._prefilling
        if len(workers) <= _ALL_PRICED:
            return list(workers)
        tokens, weight, crowds = self._prompt.token_count, 1.0 + self._others, self._refusal_s > 0.0
        bounds, cached = [], []
        # Of those that are alike it is not always the same ones.
        first = int(rng.integers(len(workers)))
        for place, worker in enumerate(workers):
            found = self._found[worker.spec.name]
            saved = found.tokens
            own_s = worker.cost.cost.alone_s(saved, tokens, worker.settings.max_num_batched_tokens) + found.load_s
            if saved:
                cached.append((own_s, place))
            bound_s = weight * own_s
            wait_s = worker.shadow.opens_s - self._now_s if prefilling[place] else 0.0
            if wait_s > 0.0:
                bound_s += wait_s
            if crowds:
                bound_s += self._price_s(max(0.0, wait_s), own_s) - self._others * own_s
            bounds.append((bound_s, (place - first) % len(workers), place))
        chosen = {place for _, _, place in nsmallest(_LIKELY, bounds)}
        chosen.update(place for _, place in nsmallest(2, cached))
        chosen.add(home.renewal.turn(len(workers)))

        # Who has yet to learn is not chosen by what he costs.
        def seen(place: int) -> tuple[int, int]:
            return prefilling[place], workers[place].cost.samples + len(workers[place].tickets)

        unlearned = (place for place, worker in enumerate(workers) if not worker.cost.learned)
        chosen.update(nsmallest(_LIKELY, unlearned, key=seen))
        last = home.sessions.get(self._wish.session) if self._wish.session is not None else None
        return [worker for place, worker in enumerate(workers) if place in chosen or worker.spec.name == last]

    def in_time(self) -> list[_Worker]:
        """Those not priced yet who let somebody in before the request's bound ends, as far as is known."""
        limits = self._limits
        bounds_s = [bound_s for bound_s in (limits.max_queue_wait_s, limits.max_ttft_s) if bound_s is not None]
        until_s = self._now_s - self._waited_s + min(bounds_s, default=limits.overload_wait_s or float("inf"))
        known = {worker.spec.name for worker in self.workers}
        rest = [worker for worker in self._everybody if worker.spec.name not in known]
        return [worker for worker in rest if not worker.shadow.prefilling or worker.shadow.opens_s <= until_s]

    def price(self, workers: ReadOnly[_Worker]) -> bool:
        """By the timelines that stand, whatever has happened since, but where there is little to compute anew. False if
        there is nobody to price."""
        for worker in workers:
            shadow = worker.shadow
            if len(shadow) <= _FEW and not shadow.timeline_is_fresh and self._budget.left > 0:
                # A new one is as quickly there as the old one is priced.
                own = Budget(_FEW_SPANS)
                timeline: Timeline | Guess = shadow.timeline(self._now_s, own, self._waits_by(worker))
            else:
                own = self._budget.glance()
                timeline = shadow.standing_timeline(self._now_s, own, self._waits_by(worker))
            self.prospects.append(self._prospect(worker, timeline, own))
            self.workers.append(worker)
            self._budget.left -= own.used
            if own.cut or not (shadow.timeline_is_fresh and timeline.settled):
                self._old.append(len(self.workers) - 1)
        return bool(workers)

    def renew(self) -> None:
        """Prices anew, by timelines that are up to date, as many as it takes and the budget allows."""

        def anew(place: int, own: Budget) -> float:
            worker = self.workers[place]
            self.prospects[place] = self._prospect(
                worker, worker.shadow.timeline(self._now_s, own, self._waits_by(worker)), own
            )
            return cost_s(self.prospects[place].forecast)

        def cost_s(priced: Forecast) -> float:
            return priced.ttft_s + self._price_s(priced.wait_s, priced.prefill_s)

        if self._old:
            renewal = self._home.renewal
            costs_s = [cost_s(prospect.forecast) for prospect in self.prospects]
            renewal.bring_up(costs_s, self._old, renewal.turn(len(costs_s)), anew, self._budget)

    def _waits_by(self, worker: _Worker) -> int:
        return worker.settings.place(self._wish.priority)

    def objections(self) -> list[Reason | None]:
        """Why each of those priced is not open to the request."""
        if self._home.mode is Mode.OFF:
            return [None] * len(self.prospects)
        return [objection(prospect, self._limits) for prospect in self.prospects]

    def choose(self, open_to: ReadOnly[bool], rng: np.random.Generator) -> Choice | None:
        home, wish, limits = self._home, self._wish, self._limits
        grants, recent = home.recently, max(1, len(home.recent))
        known = any(prospect.forecast.cached_tokens for prospect in self.prospects)
        self._shortest_s = min(prospect.forecast.wait_s for prospect in self.prospects)
        last = None if known or wish.session is None else home.sessions.get(wish.session)
        candidates = []
        for worker, prospect, is_open in zip(self.workers, self.prospects, open_to, strict=True):
            priced, cost = prospect.forecast, worker.cost.cost
            candidates.append(
                Candidate(
                    forecast=priced,
                    feasible=is_open,
                    prefilling=worker.shadow.prefilling,
                    learned=worker.cost.learned,
                    # What is on its way to being a sample counts, or requests in a row would all go to one worker.
                    samples=worker.cost.samples + len(worker.tickets),
                    recent_share=grants[worker.spec.name] / recent,
                    uncached_prefill_s=cost.alone_s(0, priced.prompt_tokens, worker.settings.max_num_batched_tokens),
                    eviction_s=home.reuse * cost.tokens_s(0, _evicted_tokens(home, worker, priced)),
                    session=worker.spec.name == last,
                    crowded_out=0.0 if limits.bounded else self._crowds_out(priced.wait_s, priced.prefill_s),
                )
            )
        busy = 1.0 - self._prefilling.count(0) / len(self._prefilling)
        return choose(candidates, home.policy.routing, wish.prefer, rng, busy)

    def _price_s(self, wait_s: float, own_s: float) -> float:
        """About what a placement costs others; the pool is taken to be busy."""
        crowded_out = self._crowds_out(wait_s, own_s) if self._refusal_s else 0.0
        return self._others * own_s + self._refusal_s * crowded_out

    def _crowds_out(self, wait_s: float, own_s: float) -> float:
        return self._home.crowding.crowds_out(wait_s, own_s, self._shortest_s)

    def _opens_first_in_s(self) -> float:
        """In how long somebody lets a newcomer in, by the timelines that stand."""
        if not all(self._prefilling):
            return 0.0
        return max(0.0, min(worker.shadow.opens_s for worker in self._everybody) - self._now_s)

    def _prospect(self, worker: _Worker, timeline: Timeline | Guess, budget: Budget) -> Prospect:
        _count_overdue(worker, self._tickets, self._now_s)
        reuse, prompt = self._reuse_then(worker, timeline, budget), self._prompt
        is_crowded = reuse.device_tokens > 0 and worker.shadow.crowded
        priced = forecast(
            worker=worker.spec.name,
            prompt_tokens=prompt.token_count,
            cached_tokens=reuse.tokens,
            load_s=reuse.load_s,
            already_waited_s=self._waited_s,
            timeline=timeline,
            settings=worker.settings,
            cost=worker.cost.cost,
            basis=worker.cost.basis,
            tokens_ahead=worker.shadow.prefill_tokens_ahead(),
            now_s=self._now_s,
            exact_tokens=prompt.exact,
            calibration=worker.calibration,
            trusted=worker.trusted,
            arrivals=worker.arrivals,
            budget=budget,
            reserve_tokens=reserved_beside_prompt(worker.settings, self._wish.max_tokens),
            # What is left of a full cache is what somebody holds.
            shared_blocks=reuse.device_tokens // worker.settings.block_size if is_crowded else 0,
            output_tokens=self._output_tokens,
        )
        high_wait_s = priced.wait_s
        if self._quantile is not None:
            # Errors of an empty queue say little about those of a full one: what is predicted is the least.
            high_wait_s = max(high_wait_s, priced.queue_wait_quantile_s(self._quantile) - self._waited_s)
        needed = priced.prompt_tokens - priced.cached_tokens + self._output_tokens
        return Prospect(priced, high_wait_s, worker.idle, _kv_demand(worker, needed))

    def reuse(self, worker: _Worker) -> Reuse:
        """What it is taken to reuse."""
        name = worker.spec.name
        return self._lasting.get(name) or self._found[name]

    def _reuse_then(self, worker: _Worker, timeline: Timeline | Guess, budget: Budget) -> Reuse:
        """What it would reuse now, less what will be gone by the time that it lets the request in."""
        name, size = worker.spec.name, worker.settings.block_size
        found = self._found[name]
        if not found.device_tokens:
            return found
        if not worker.shadow.crowded:
            # Not all that is free will be taken: what was used lately stays.
            ahead = worker.shadow.prefill_tokens_ahead()
            lasting = self._lasting[name] = self._home.cache.at_admission(name, self._prompt, found, ahead)
            return lasting
        whole = -(-self._prompt.token_count // size)
        steps = timeline.steps_until(timeline.admitted_s(whole, budget))
        hashes = self._home.cache.hashes(name, self._prompt)
        blocks = worker.shadow.lasting_blocks(hashes, found.device_tokens // size, steps)
        lasting = self._lasting[name] = found.lasting(blocks * size)
        return lasting


class Fleet:
    """Pools by name, workers by name (unique in the fleet), tickets by id."""

    def __init__(self, policies: Iterable[PoolPolicy], hasher: BlockHasher, rng: np.random.Generator) -> None:
        self._hasher = hasher
        self._rng = rng
        self._pools = {policy.name: _Pool(policy, PoolCache(hasher)) for policy in policies}
        self._pool_of: dict[str, _Pool] = {}
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count(1)
        self._reviews: deque[tuple[str, Review]] = deque(maxlen=_MOST_REVIEWS)
        self._steps: list[tuple[str, Mode, float]] = []

    def add_pool(self, policy: PoolPolicy) -> None:
        """ValueError if there is one of this name."""
        if policy.name in self._pools:
            raise ValueError(f"pool {policy.name!r} is already in the fleet")
        self._pools[policy.name] = _Pool(policy, PoolCache(self._hasher))

    # Workers

    def join(self, pool: str, spec: WorkerSpec) -> None:
        """Adds a worker; it has an empty cache view and has learned nothing. ValueError if the name is taken."""
        if spec.name in self._pool_of:
            raise ValueError(f"worker {spec.name!r} is already in the fleet")
        home = self._pools[pool]
        cost = PrefillCost(home.policy.learning)

        def cached_blocks(hashes: BlockHashes) -> int:
            return home.cache.held(spec.name, hashes)

        def learn(sample: StepSample) -> None:
            if sample.new_tokens and home.cache.view(spec.name).trust is Trust.LOST:
                return  # how much of them was cached is known at their end, if at all
            cost.add_steps(sample)
            shadow.set_cost(cost.cost)

        shadow = Shadow(spec.settings, cost.cost, learn, cached_blocks, home.length_curve, home.prompts.longer_than)
        home.workers[spec.name] = _Worker(
            spec, spec.settings, cost, shadow, Calibration(home.errors), _budget_check(spec.settings)
        )
        self._pool_of[spec.name] = home
        home.cache.join(spec.name, spec.cache, spec.settings.block_size, spec.settings.num_gpu_blocks)

    def leave(self, worker: str) -> list[Ticket]:
        """Forgets a worker at once and wholly; its tickets are given up and returned."""
        home = self._pool_of.pop(worker)
        gone = home.workers.pop(worker)
        home.cache.leave(worker)
        for ticket_id in gone.tickets:
            del self._tickets[ticket_id]
        self._reviewed(home, gone.hindsight.give_up())
        return list(gone.tickets.values())

    def workers(self, pool: str) -> list[WorkerSpec]:
        return [worker.spec for worker in self._pools[pool].workers.values()]

    def hash_families(self, pool: str) -> set[HashFamily]:
        """The ways in which a prompt for this pool must be hashed."""
        return self._pools[pool].cache.families

    def configure(self, worker: str, settings: Settings) -> bool:
        """Takes over settings that the engine itself reports; True if they differ from what was assumed.

        What was learned of an engine with other settings is thrown away.
        """
        home = self._pool_of[worker]
        known = home.workers[worker]
        if settings == known.settings:
            return False
        home.cache.configure(worker, settings.block_size, settings.num_gpu_blocks)
        known.settings = settings
        known.budget = _budget_check(settings)
        known.shadow.set_settings(settings)
        known.cost.forget()
        known.calibration.forget()
        known.shadow.set_cost(known.cost.cost)
        return True

    def forget(self, worker: str) -> None:
        """What was learned of this worker was of another engine."""
        home = self._pool_of[worker]
        known = home.workers[worker]
        known.cost.forget()
        known.calibration.forget()
        known.shadow.set_cost(known.cost.cost)
        home.cache.correction(worker).forget()

    def set_up(self, worker: str, up: bool) -> None:
        self._pool_of[worker].workers[worker].up = up

    def set_draining(self, worker: str, draining: bool) -> None:
        """A worker that drains gets no request, whoever else there is or is not; what it has it may finish."""
        self._pool_of[worker].workers[worker].draining = draining

    def back_off(self, worker: str, seconds: float, now_s: float) -> None:
        """The engine refused a request for want of capacity: others go elsewhere for a while, if there is elsewhere."""
        self._pool_of[worker].workers[worker].backing_off_until_s = now_s + seconds

    # What was learned, for a successor of this process

    def fingerprint(self, worker: str) -> str:
        return fingerprint(self._pool_of[worker].workers[worker].settings)

    def worker_memory(self, worker: str) -> Callable[[], WorkerMemory] | None:
        """None while nothing has been learned. What is returned may be called in another thread."""
        known = self._pool_of[worker].workers[worker]
        if not known.cost.samples:
            return None
        cost, errors, engine = known.cost.memory(), known.calibration.memory(), self.fingerprint(worker)
        return lambda: WorkerMemory(VERSION, worker, engine, cost(), errors)

    def recall_worker(self, memory: WorkerMemory) -> bool:
        """Begins with what was learned of the same engine; False if it is another now, or has taught us itself.

        ValueError for a memory that cannot be.
        """
        known = self._pool_of[memory.worker].workers[memory.worker]
        if known.cost.samples or self.fingerprint(memory.worker) != memory.fingerprint:
            return False
        known.cost.recall(memory.cost)
        known.calibration.recall(memory.errors)
        known.shadow.set_cost(known.cost.cost)
        return True

    def pool_memory(self, pool: str) -> PoolMemory:
        home = self._pools[pool]
        return PoolMemory(VERSION, pool, tuple(home.lengths.memory()), home.errors.memory())

    def recall_pool(self, memory: PoolMemory) -> None:
        home = self._pools[memory.pool]
        home.lengths.recall(memory.lengths)
        home.errors.recall(memory.errors)

    # The cache view

    def apply(self, worker: str, batch: Batch, now_s: float | None = None, more: bool = False) -> None:
        """Takes in what an engine published.

        With the time at which it came it also tells what the engine has got to; history, as from a replay, does not.
        `more` of the same batch is to come: what a batch tells is understood only as a whole.
        """
        home = self._pool_of[worker]
        known = home.workers[worker]
        # The step that is told of was composed with what was cached before it.
        known.shadow.settle(now_s)
        runs = home.cache.apply(worker, batch)
        if now_s is not None:
            _append(known.runs, runs)
            if not more:
                runs, known.runs = known.runs, []
                known.shadow.set_sees_blocks(known.trusted, home.cache.computes_what_it_stores(worker))
                goes_on = any(known.shadow.goes_on(run) for run in runs)
                known.budget.step(runs, goes_on, known.shadow.decoding)
                known.shadow.stored(runs, now_s)
                if known.shadow.unbooked:
                    _spoil_samples(known)

    def stored_at_once(self, worker: str, blocks: int) -> None:
        """One event, before it was cut into parts, told that so many blocks were stored on the device just now."""
        home = self._pool_of[worker]
        if home.cache.computes_what_it_stores(worker):
            home.workers[worker].budget.stored_at_once(blocks)

    def budget_doubts(self) -> dict[str, BudgetDoubt]:
        """Workers whose steps do not agree with the token budget that is assumed of them."""
        return {
            name: doubt
            for home in self._pools.values()
            for name, worker in home.workers.items()
            if (doubt := _budget_doubt(home, worker)) is not BudgetDoubt.NONE
        }

    def clear(self, worker: str) -> None:
        """What this worker's cache holds is not known any more."""
        home = self._pool_of[worker]
        home.cache.clear(worker)
        home.workers[worker].runs = []  # of a batch that was cut off

    def set_trust(self, worker: str, trust: Trust, coverage: float) -> None:
        """How far the view can be believed, and the share of the engine's history that it follows."""
        home = self._pool_of[worker]
        view = home.cache.view(worker)
        view.trust, view.coverage = trust, coverage
        home.workers[worker].trusted = trust is Trust.LIVE

    def activity(self, worker: str) -> tuple[int, bool]:
        """How many requests have come to it and ended, and whether it has something to do now."""
        known = self._pool_of[worker].workers[worker]
        return known.comings_and_goings, bool(known.tickets) or known.foreign_load

    def silent_workers(self) -> list[str]:
        """Workers that serve traffic which must have filled their caches, and send no events."""
        return [name for home in self._pools.values() for name in home.workers if home.cache.view(name).silent]

    # Requests

    def place(self, pool: str, prompt: Prompt, wish: Wish, now_s: float, attempt: Attempt = Attempt.FINAL) -> Decision:
        """Forecasts every worker, chooses, and books the ticket before it returns. KeyError for an unknown pool."""
        home = self._pools[pool]
        workers = _eligible(home.workers.values(), prompt, wish, now_s)
        if not workers:
            return NoWorker(pool)
        limits = home.limits(wish, now_s)
        race = _Race(home, workers, prompt, wish, limits, self._tickets, now_s)
        race.price(race.likely(self._rng))
        race.renew()
        objections = race.objections()
        choice = race.choose([found is None for found in objections], self._rng)
        if choice is None and race.price(race.in_time()):
            objections = race.objections()
            choice = race.choose([found is None for found in objections], self._rng)
        prospects = race.prospects
        forecasts = tuple(found.forecast for found in prospects)
        if attempt is not Attempt.AGAIN:
            own_s = min(found.forecast.prefill_s for found in prospects)
            shortest_s = min(found.forecast.wait_s for found in prospects)
            full = choice is None and any(found in (Reason.QUEUE_WAIT, Reason.TTFT) for found in objections)
            home.crowding.asked(limits.allows_wait_s(own_s) if limits.bounded else None, own_s, shortest_s, full)
        refusal = None
        if choice is None and not any(_could_take(worker.settings, prompt) for worker in workers):
            # Theirs to say: who is told to come back would come back for nothing.
            choice = race.choose([True] * len(prospects), self._rng)
        if choice is None:
            refusal = refuse(prospects, objections, limits, home.policy.retry, self._rng)
            if home.mode is Mode.ENFORCE:
                if attempt is Attempt.FINAL:
                    self._watch(home, wish, refusal, now_s)
                return refusal
            choice = race.choose([True] * len(prospects), self._rng)
            assert choice is not None, "with everybody open, somebody is chosen"
        chosen = choice.ranked[0].forecast
        server = home.workers[chosen.worker]
        home.renewal.placed(server.shadow.timeline_is_fresh)
        hashes = home.cache.hashes(chosen.worker, prompt)
        ticket = self._book(home, server, chosen, wish, hashes, now_s)
        ticket.would_refuse = refusal
        expected = race.reuse(server)
        home.cache.book(chosen.worker, ticket.id, prompt, expected.by_rule, expected.promised)
        specs = [home.workers[candidate.forecast.worker].spec for candidate in choice.ranked]
        return Grant(
            ticket, _endpoints(specs), forecasts, choice.why, server.spec.cluster, refusal, rank=server.spec.rank
        )

    def turn_away(self, pool: str, wish: Wish, most_tokens: int, now_s: float) -> Refusal | None:
        """The refusal that `place` would come to whatever the prompt is, as long as it has at most so many tokens; None
        where that has to be looked at. KeyError for an unknown pool.

        It is sure where every worker has a timeline that is up to date, and not even a single token that nothing has to
        be computed for would get through within the bound. So what is told of waits is the least that anybody waits.
        """
        home = self._pools[pool]
        limits = home.limits(wish, now_s)
        bound_s = limits.max_queue_wait_s
        # With a bound on the time to first token the reason is another one for a prompt that takes too long by itself.
        if home.mode is not Mode.ENFORCE or bound_s is None or limits.max_ttft_s is not None:
            return None
        longest = Prompt(most_tokens, exact=True)
        if not all(_takes(worker.settings, longest, wish) for worker in home.workers.values()):
            return None
        workers = _eligible(home.workers.values(), longest, wish, now_s)
        waited_s = max(0.0, wish.waited_before_s) + max(0.0, now_s - wish.received_at_s)
        prospects = self._least_prospects(home, workers, wish, waited_s, bound_s, now_s)
        if not prospects:
            return None
        reason = Reason.BOUND_USED_UP if waited_s > bound_s else Reason.QUEUE_WAIT
        shortest_s = min(found.forecast.wait_s for found in prospects)
        home.crowding.asked(bound_s, None, shortest_s, reason is Reason.QUEUE_WAIT)
        refusal = refuse(prospects, [reason] * len(prospects), limits, home.policy.retry, self._rng)
        self._watch(home, wish, refusal, now_s)
        return refusal

    def refused(self, pool: str, wish: Wish, refusal: Refusal, now_s: float) -> None:
        """A refusal that was not yet one is carried out: from now on it is watched whether it was right."""
        self._watch(self._pools[pool], wish, refusal, now_s)

    def place_on(self, worker: str, prompt: Prompt, wish: Wish, now_s: float) -> Ticket:
        """Forecasts and books on this worker, whoever else would be better: where a recording says that it went."""
        home = self._pool_of[worker]
        server = home.workers[worker]
        race = _Race(home, [server], prompt, wish, Limits(), self._tickets, now_s)
        race.price([server])
        race.renew()
        priced, reuse = race.prospects[0].forecast, race.reuse(server)
        hashes = home.cache.hashes(worker, prompt)
        ticket = self._book(home, server, priced, wish, hashes, now_s)
        home.cache.book(worker, ticket.id, prompt, reuse.by_rule, reuse.promised)
        return ticket

    def know_cost(self, worker: str, cost: StepCost) -> None:
        """Takes these for the worker's true costs."""
        known = self._pool_of[worker].workers[worker]
        known.cost.fix(cost)
        known.shadow.set_cost(cost)

    def shadow_state(self, worker: str, now_s: float) -> State:
        return self._pool_of[worker].workers[worker].shadow.state(now_s)

    def in_flight_on(self, worker: str) -> int:
        return len(self._pool_of[worker].workers[worker].tickets)

    def learned(self, worker: str) -> bool:
        """Whether this worker's costs are learned, rather than guessed."""
        return self._pool_of[worker].workers[worker].cost.learned

    def first_token(self, ticket_id: str, served_endpoint: str | None, now_s: float) -> FirstToken | None:
        """None for a ticket that is unknown or has been graded. `served_endpoint` is Envoy's word for who served."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.first_token_at_s is not None:
            return None
        home = self._pool_of[ticket.worker]
        worker = home.workers[ticket.worker]
        self._reviewed(home, worker.hindsight.before(now_s))
        ticket.first_token_at_s = now_s
        if served_endpoint is not None and served_endpoint != worker.spec.endpoint:
            self._move(ticket, worker, served_endpoint, now_s)
            return FirstToken(ticket, None)
        _count_overdue(worker, self._tickets, now_s)
        worker.shadow.first_token(ticket_id, now_s)
        self._look_back(home, worker, now_s)
        ticket.decoded_alone = len(worker.tickets) == 1 and not worker.foreign_load
        actual_s = ticket.wish.waited_before_s + now_s - ticket.wish.received_at_s
        priced = ticket.forecast
        predicted_s = priced.ttft_s - priced.already_waited_s
        worker.calibration.grade(
            priced.kind, priced.spread, predicted_s, actual_s - priced.already_waited_s, ticket.overdue
        )
        hits_may_be_unseen = worker.unseen_hits and home.cache.view(ticket.worker).trust is Trust.LOST
        if not hits_may_be_unseen and worker.cost.graded(
            predicted_s, actual_s - priced.already_waited_s, ticket.cost_changes
        ):
            worker.shadow.set_cost(worker.cost.cost)
        if ticket.would_refuse is not None:
            self._reviewed(home, [review_shadow(ticket.id, ticket.would_refuse, priced, actual_s)])
        limits = limits_of(home.policy.admission, ticket.wish.max_queue_wait_s, ticket.wish.max_ttft_s, None)
        return FirstToken(ticket, grade(priced, actual_s, limits.max_queue_wait_s, limits.max_ttft_s))

    def finish(self, ticket_id: str, usage: Usage, now_s: float, retried: bool = False) -> Ended | None:
        """Releases a ticket, however its request ended; None if it is unknown (released before).

        Of a request that Envoy had to send more than once nothing is learned: its time is not one engine's.
        """
        ticket = self._tickets.pop(ticket_id, None)
        if ticket is None:
            return None
        home = self._pool_of[ticket.worker]
        worker = home.workers[ticket.worker]
        self._reviewed(home, worker.hindsight.before(now_s))
        del worker.tickets[ticket_id]
        worker.kv_tokens -= ticket.kv_tokens
        worker.comings_and_goings += 1
        judged = ticket.first_token_at_s is not None and not ticket.moved and not retried
        if judged and usage.cached_tokens is not None:
            home.cache.learn(ticket.worker, ticket_id, usage.cached_tokens)
            worker.unseen_hits |= usage.cached_tokens > ticket.forecast.cached_tokens
        if judged:
            home.cache.served(ticket.worker, ticket_id, _told_length(ticket, usage), usage.cached_tokens)
        seen_tokens = home.cache.release(ticket.worker, ticket_id, _left(ticket, usage) if judged else None)
        evicts = home.cache.computes_what_it_stores(ticket.worker)
        worker.shadow.finish(ticket_id, now_s, usage.output_tokens, evicts)
        self._look_back(home, worker, now_s)
        if usage.output_tokens is not None and ticket.first_token_at_s is not None:
            # Nobody generates more than was asked for, whatever is reported.
            seen = min(usage.output_tokens, ticket.wish.max_tokens or _MAX_OUTPUT_TOKENS, _MAX_OUTPUT_TOKENS)
            home.lengths.ended(seen, ticket.wish.max_tokens, ticket.number)
        if not judged:
            return Ended(ticket, None, usage, learned_from=False)
        if usage.cached_tokens is None and seen_tokens is not None:
            usage = msgspec.structs.replace(usage, cached_tokens=seen_tokens, cached_seen=True)
        size = home.cache.block_size(ticket.worker)
        verdict = judge_cache(ticket.forecast.cached_tokens, usage.cached_tokens, size)
        return Ended(ticket, verdict, usage, self._learn(worker, ticket, usage, now_s))

    def observe_load(self, worker: str, in_progress: int, asked_at_s: float, now_s: float) -> list[Ticket]:
        """Takes in an engine's own count of requests in progress; returns tickets that it shows to have ended.

        Ends are reported by Envoy. Where its access log stays silent, an engine that twice has fewer in progress than
        are booked has ended the oldest of them. Only those are taken that were booked well before the first of the two,
        and whose stream is over: a request that is still waiting for its first token is seen to be alive.
        """
        known = self._pool_of[worker].workers[worker]
        known.told_foreign = in_progress > len(known.tickets)
        ours = sum(ticket.booked_at_s <= asked_at_s for ticket in known.tickets.values())
        known.shadow.count_unbooked(max(0, in_progress - ours), now_s)
        earlier, known.load_seen = known.load_seen, (asked_at_s, in_progress)
        if earlier is None:
            return []
        limit_s = earlier[0] - _EVIDENCE_GRACE_S
        settled = [t for t in known.tickets.values() if t.first_token_at_s is not None or not t.wish.streaming]
        aged = sorted((t for t in settled if t.booked_at_s < limit_s), key=lambda ticket: ticket.booked_at_s)
        ended = aged[: max(0, len(aged) - max(in_progress, earlier[1]))]
        for ticket in ended:
            self.finish(ticket.id, Usage(), now_s)
        return ended

    def observe_drafts(self, worker: str, counts: DraftCounts) -> None:
        """Takes in an engine's own counters of speculative decoding, in tokens since it started."""
        known = self._pool_of[worker].workers[worker]
        if known.drafts.count(counts):
            known.shadow.set_drafting(known.drafts.drafting)

    def expire(self, max_age_s: float, now_s: float) -> list[Ticket]:
        """Releases tickets that are older than any request can be, and returns them."""
        old = [ticket for ticket in self._tickets.values() if now_s - ticket.booked_at_s > max_age_s]
        for ticket in old:
            self.finish(ticket.id, Usage(), now_s)
        return old

    def ticket(self, ticket_id: str) -> Ticket | None:
        return self._tickets.get(ticket_id)

    def take_reviews(self, now_s: float, most: int = _MOST_REVIEWS) -> list[tuple[str, Review]]:
        """What has become of refusals since the last call, with their pools; `most` of it, the rest the next time."""
        for home in self._pools.values():
            for worker in home.workers.values():
                if len(worker.hindsight):
                    self._reviewed(home, worker.hindsight.before(now_s))
        return [self._reviews.popleft() for _ in range(min(most, len(self._reviews)))]

    def take_steps(self) -> list[tuple[str, Mode, float]]:
        """Pools whose guard has changed what they do with refusals since the last call, how, and the false-alarm rate
        that led to it."""
        steps, self._steps = self._steps, []
        return steps

    def admission_mode(self, pool: str) -> Mode:
        """As of now: where too many refusals were false alarms, a pool that would enforce is in shadow mode."""
        return self._pools[pool].mode

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    # Views

    def view(self, now_s: float) -> dict[str, object]:
        """The whole as plain values, for people and dashboards."""
        budget = Budget(_VIEW_SPANS)
        return {
            "in_flight": self.in_flight,
            "pools": {name: self._pool_view(pool, now_s, budget) for name, pool in self._pools.items()},
        }

    def skipped_events(self) -> Mapping[str, int]:
        """What the cache indexes could not use, by reason."""
        total: Counter[str] = Counter()
        for pool in self._pools.values():
            total.update(pool.cache.skipped)
        return total

    def shortcuts(self, pool: str) -> Shortcuts:
        """What decisions and shadows left out so that they would not take too long, since the start."""
        home = self._pools[pool]
        cut = {name: worker.shadow.cut for name, worker in home.workers.items()}
        return Shortcuts(home.renewal.cut, home.renewal.stale, home.renewal.spent, cut)

    def corrections(self, pool: str) -> Mapping[str, Corrections]:
        """By worker, how often its steps were found to be others than they were taken to be."""
        return {name: worker.shadow.corrections for name, worker in self._pools[pool].workers.items()}

    def _pool_view(self, pool: _Pool, now_s: float, budget: Budget) -> dict[str, object]:
        return {
            "expected_output_tokens": pool.expected_output(None, now_s),
            "admission": {
                "mode": pool.mode.value,
                "configured": pool.policy.admission.mode.value,
                "false_alarm_rate": pool.guard.false_alarm_rate,
            },
            "workers": {name: self._worker_view(pool, worker, now_s, budget) for name, worker in pool.workers.items()},
        }

    def _worker_view(self, pool: _Pool, worker: _Worker, now_s: float, budget: Budget) -> dict[str, object]:
        shadow = worker.shadow
        timeline = shadow.timeline(now_s, budget) if budget.left > 0 else shadow.standing_timeline(now_s, budget)
        cost, settings = worker.cost.cost, worker.settings
        view = pool.cache.view(worker.spec.name)
        return {
            "endpoint": worker.spec.endpoint,
            "up": worker.up,
            "draining": worker.draining,
            "feed": view.trust.value,
            "feed_trusted": view.trust is Trust.LIVE,
            "feed_coverage": round(view.coverage, 4),
            "feed_agreement": round(view.agreement, 4),
            "feed_silent": view.silent,
            "in_flight": len(worker.tickets),
            "prefilling": worker.shadow.prefilling,
            "decoding": worker.shadow.decoding,
            "prefill_tokens_ahead": worker.shadow.prefill_tokens_ahead(),
            "wait_s": round(max(0.0, timeline.admitted_s(0, budget) - now_s), 4),
            "cached_blocks": pool.cache.blocks(worker.spec.name),
            "cached_blocks_host": pool.cache.blocks(worker.spec.name, Tier.HOST),
            "cached_blocks_storage": pool.cache.blocks(worker.spec.name, Tier.STORAGE),
            "orphan_blocks": pool.cache.orphans(worker.spec.name),
            "num_gpu_blocks": settings.num_gpu_blocks,
            "kv_demand": _kv_demand(worker, 0),
            "block_size": pool.cache.block_size(worker.spec.name),
            "reuse_correction": pool.cache.correction(worker.spec.name).view(),
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "async_scheduling": settings.async_scheduling,
            "tokens_per_decode": round(shadow.drafting.gain, 3),
            "drafted_per_decode": round(shadow.drafting.drafted, 3),
            "token_budget_doubt": _budget_doubt(pool, worker).value,
            "largest_chunk_tokens": worker.budget.largest_tokens,
            "interval": {
                "graded": worker.calibration.graded,
                "coverage": None if not worker.calibration.graded else round(worker.calibration.coverage, 4),
            },
            "cost": {
                "basis": worker.cost.basis.value,
                "samples": worker.cost.samples,
                "ms_per_request": round(cost.per_request_s * 1e3, 3),
                "us_per_request_token": round(cost.per_request_token_s * 1e6, 3),
                "ms_per_step": round(cost.fixed_s * 1e3, 3),
                "us_per_token": round(cost.per_token_s * 1e6, 3),
                "ns_per_token_squared": round(cost.per_token_squared_s * 1e9, 4),
                "ms_per_decode": round(cost.per_decode_s * 1e3, 4),
            },
        }

    # Inside

    def _least_prospects(
        self, home: _Pool, workers: ReadOnly[_Worker], wish: Wish, waited_s: float, bound_s: float, now_s: float
    ) -> list[Prospect]:
        """Each worker as any request would find it at the best; none of them if one of them may be open to it."""
        quantile, used_up = 1.0 - home.policy.admission.risk, waited_s > bound_s
        found = []
        for step in range(len(workers)):
            # Who was open lately may well be so again.
            place = (home.open_at + step) % len(workers)
            worker = workers[place]
            shadow, cost = worker.shadow, worker.cost
            wait_s = None
            if used_up and not shadow.prefilling:
                wait_s = 0.0
            elif used_up or (cost.learned and not worker.idle):
                wait_s = shadow.least_wait_s(now_s, worker.settings.place(wish.priority))
            if wait_s is not None:
                _count_overdue(worker, self._tickets, now_s)
                high_wait_s = least_high_wait_s(wait_s, quantile, worker.calibration, cost.basis, worker.trusted)
                if used_up or waited_s + high_wait_s > bound_s + _ROUNDING_S:
                    found.append((high_wait_s, place, wait_s))
                    continue
            home.open_at = place
            return []
        if len(workers) > _ALL_PRICED:
            found = nsmallest(_LIKELY, found)
        return [_least_prospect(workers[place], waited_s, wait_s, high_wait_s) for high_wait_s, place, wait_s in found]

    def _watch(self, home: _Pool, wish: Wish, refusal: Refusal, now_s: float) -> None:
        """To find out afterwards whether the refusal was right."""
        best, allowed_s = refusal.best, refusal.allowed_wait_s
        if allowed_s is None:
            return
        worker = home.workers[best.worker]
        self._reviewed(home, worker.hindsight.before(now_s))
        newest = next(reversed(worker.tickets.values()), None)
        watched = Watched(
            id=wish.ticket_id,
            reason=refusal.reason,
            behind=0 if newest is None else newest.number,
            refused_at_s=now_s,
            already_waited_s=best.already_waited_s,
            in_time_until_s=now_s + allowed_s - best.already_waited_s,
            new_tokens=best.prompt_tokens - best.cached_tokens,
        )
        sure = not worker.hindsight.full and not worker.foreign_load
        if sure:
            waiting = (ticket for ticket in worker.tickets.values() if ticket.first_token_at_s is None)
            sure = all(ticket.wish.streaming for ticket in waiting)
        self._reviewed(home, worker.hindsight.watch(watched, sure))

    def _look_back(self, home: _Pool, worker: _Worker, now_s: float) -> None:
        if not len(worker.hindsight):
            return
        tickets = worker.tickets.values()  # in the order of their numbers
        unstarted = next((t.number for t in tickets if t.first_token_at_s is None and t.wish.streaming), None)
        numbers = [ticket.number for ticket in tickets]
        shadow, size = worker.shadow, worker.settings.block_size
        free = shadow.free_blocks
        # Of those that have come, the first so many.
        held = [0, *itertools.accumulate(shadow.blocks_of(ticket.id) for ticket in tickets)]

        def has_room(refused: Watched) -> bool:
            # Who came after it has what it would have had.
            later = held[-1] - held[bisect_right(numbers, refused.behind)]
            return free is None or -(-refused.new_tokens // size) <= free + later

        self._reviewed(home, worker.hindsight.after(unstarted, has_room, now_s))

    def _reviewed(self, home: _Pool, reviews: Iterable[Review]) -> None:
        for review in reviews:
            if home.guard.record(review):
                self._steps.append((home.policy.name, home.mode, home.guard.rate_at_last_step))
            self._reviews.append((home.policy.name, review))

    def _book(
        self, home: _Pool, worker: _Worker, priced: Forecast, wish: Wish, hashes: BlockHashes, now_s: float
    ) -> Ticket:
        shadow = worker.shadow
        solo = not shadow.prefilling and not worker.foreign_load
        ticket = Ticket(
            id=wish.ticket_id,
            pool=home.policy.name,
            worker=worker.spec.name,
            forecast=priced,
            wish=wish,
            booked_at_s=now_s,
            joins_at_s=shadow.begins_s(now_s),
            solo=solo,
            decodes_beside=shadow.decoding,
            cost_changes=worker.cost.changes,
            number=next(self._numbers),
            kv_tokens=priced.prompt_tokens - priced.cached_tokens + home.expected_output(wish.max_tokens, now_s),
        )
        if ticket.id in self._tickets:
            raise ValueError(f"ticket {ticket.id!r} is already in flight")
        _spoil_samples(worker)
        # Drawn, not the mean: of requests that all are expected to be of the mean length, all would end at once.
        drawn = draws(self._rng, _FUTURES)
        expected = home.length_curve(now_s).length(drawn[0], 0, wish.max_tokens)
        seq = Sequence(
            ticket.id,
            priced.prompt_tokens,
            priced.cached_tokens,
            expected,
            wish.streaming,
            max_output=wish.max_tokens,
            hashes=hashes,
            draws=drawn,
            priority=worker.settings.place(wish.priority),
        )
        shadow.book(seq, now_s)
        worker.arrivals.add(now_s, priced.prompt_tokens - priced.cached_tokens)
        home.prompts.add(priced.prompt_tokens - priced.cached_tokens)
        worker.tickets[ticket.id] = ticket
        worker.kv_tokens += ticket.kv_tokens
        worker.comings_and_goings += 1
        self._tickets[ticket.id] = ticket
        if wish.streaming:
            heapq.heappush(worker.due, (now_s + priced.high_s - priced.already_waited_s, ticket.id))
        home.granted(wish, priced, now_s)
        return ticket

    def _move(self, ticket: Ticket, chosen: _Worker, served_endpoint: str, now_s: float) -> None:
        """Envoy fell back to another endpoint: the booking goes where the request is."""
        ticket.moved = True
        home = self._pool_of[ticket.worker]
        there = [w for w in home.workers.values() if w.spec.endpoint == served_endpoint]
        server = next((w for w in there if w.spec.rank == chosen.spec.rank), there[0] if there else None)
        if server is None:
            chosen.shadow.first_token(ticket.id, now_s)
            self._look_back(home, chosen, now_s)
            return
        home.cache.release(chosen.spec.name, ticket.id)
        chosen.shadow.finish(ticket.id, now_s)
        del chosen.tickets[ticket.id]
        chosen.kv_tokens -= ticket.kv_tokens
        self._look_back(home, chosen, now_s)
        ticket.worker, ticket.number = server.spec.name, next(self._numbers)
        _spoil_samples(server)
        server.tickets[ticket.id] = ticket
        server.kv_tokens += ticket.kv_tokens
        tokens = ticket.forecast.prompt_tokens
        expected = home.length_curve(now_s).length(float(self._rng.random()), 0, ticket.wish.max_tokens)
        server.shadow.adopt(Sequence(ticket.id, tokens, tokens, expected), now_s)

    def _learn(self, worker: _Worker, ticket: Ticket, usage: Usage, now_s: float) -> bool:
        assert ticket.first_token_at_s is not None
        if ticket.decoded_alone and (usage.output_tokens or 0) >= _MIN_OUTPUT_TOKENS:
            assert usage.output_tokens is not None
            step_s = (now_s - ticket.first_token_at_s) / (usage.output_tokens - 1)
            worker.cost.add_decode(DecodeSample(1, step_s))
            worker.shadow.set_cost(worker.cost.cost)
        if not ticket.solo:
            return False
        if ticket.forecast.exact_tokens:
            prompt_tokens = ticket.forecast.prompt_tokens
        elif usage.prompt_tokens is not None and usage.cached_tokens is not None:
            prompt_tokens = usage.prompt_tokens
        else:
            return False
        cached = ticket.forecast.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        room = room_beside(ticket.decodes_beside, worker.settings, worker.shadow.drafting)
        steps = ceil(max(1, prompt_tokens - cached) / room)
        seconds = ticket.first_token_at_s - ticket.joins_at_s
        sample = PrefillSample(prompt_tokens, cached, steps, ticket.decodes_beside, seconds)
        if not worker.cost.add(sample):
            return False
        worker.shadow.set_cost(worker.cost.cost)
        return True


def _append(runs: list[StoredRun], more: ReadOnly[StoredRun]) -> None:
    """The next part of a batch: where an event was cut, its run goes on."""
    goes_on = bool(runs and more) and runs[-1].last == more[0].parent
    if goes_on:
        first = runs.pop()
        runs.append(StoredRun(first.first, first.parent, more[0].last, first.blocks + more[0].blocks))
    runs += more[goes_on:]


def _count_overdue(worker: _Worker, tickets: Mapping[str, Ticket], now_s: float) -> None:
    """A request whose interval has passed is a miss now: its worker's next forecasts must not wait for its token."""
    due = worker.due
    while due and due[0][0] < now_s:
        ticket = tickets.get(heapq.heappop(due)[1])
        if ticket is not None and ticket.first_token_at_s is None and ticket.worker == worker.spec.name:
            ticket.overdue = True
            worker.calibration.overdue(ticket.forecast.kind)


def _told_length(ticket: Ticket, usage: Usage) -> int | None:
    """The tokens of the prompt, if they are known for certain."""
    if usage.prompt_tokens is not None or not ticket.forecast.exact_tokens:
        return usage.prompt_tokens
    return ticket.forecast.prompt_tokens


def _left(ticket: Ticket, usage: Usage) -> Left | None:
    """What a request that was served has left in its engine's cache, if that is known."""
    prompt_tokens = _told_length(ticket, usage)
    if prompt_tokens is None or usage.output_tokens is None:
        return None
    reused = ticket.forecast.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
    return Left(prompt_tokens + usage.output_tokens, reused)


def _endpoints(ranked: Iterable[WorkerSpec]) -> tuple[str, ...]:
    """The chosen one's, and those that can take its place: a request names one rank, wherever it falls back to."""
    specs = list(ranked)
    fits = [spec for spec in specs if specs[0].rank is None or spec.rank == specs[0].rank]
    return tuple(dict.fromkeys(spec.endpoint for spec in fits))


def _least_prospect(worker: _Worker, waited_s: float, wait_s: float, high_wait_s: float) -> Prospect:
    """Of a request that has nothing to compute."""
    least = Forecast(
        worker=worker.spec.name,
        prompt_tokens=0,
        cached_tokens=0,
        already_waited_s=waited_s,
        wait_s=wait_s,
        prefill_s=0.0,
        overhead_s=0.0,
        ttft_s=waited_s + wait_s,
        basis=worker.cost.basis,
        tokens_ahead=worker.shadow.prefill_tokens_ahead(),
        exact_tokens=False,
    )
    return Prospect(least, high_wait_s, worker.idle, None)


def _spoil_samples(worker: _Worker) -> None:
    """Another prefill joins: those under way are not alone any more."""
    for ticket in worker.tickets.values():
        ticket.decoded_alone = False
        if ticket.first_token_at_s is None:
            ticket.solo = False


def _eligible(workers: Iterable[_Worker], prompt: Prompt, wish: Wish, now_s: float) -> list[_Worker]:
    """Who may be chosen: nobody who drains, and of the allowed endpoints those that could take such a request, are up,
    and are not full; where nobody is all of that, those who lack the last of it that somebody has."""
    serving = [worker for worker in workers if not worker.draining]
    allowed = [worker for worker in serving if wish.subset is None or worker.spec.endpoint in wish.subset]
    if wish.adapter is not None:
        allowed = [worker for worker in allowed if wish.adapter in worker.spec.adapters]
    allowed = [worker for worker in allowed if _takes(worker.settings, prompt, wish)] or allowed
    up = [worker for worker in allowed if worker.up]
    return [worker for worker in up if worker.backing_off_until_s <= now_s] or up or allowed


def _takes(settings: Settings, prompt: Prompt, wish: Wish) -> bool:
    """False if the engine would answer 400, since prompt and output exceed its context (vLLM 0.32); an engine that only
    refuses looks idle, and would be chosen again and again."""
    longest = settings.max_model_len
    return longest is None or not prompt.exact or prompt.token_count + (wish.max_tokens or 1) <= longest


def _could_take(settings: Settings, prompt: Prompt) -> bool:
    """False if the engine would answer 400 whatever the output, by the tokens or by an estimate that is far beyond."""
    longest = settings.max_model_len
    return longest is None or prompt.token_count < longest * (1 if prompt.exact else _FAR_BEYOND)


def _kv_demand(worker: _Worker, more_tokens: int) -> float | None:
    """In caches' worth: what the requests in flight and so many tokens more will need, shared blocks left out."""
    capacity = worker.capacity_tokens
    return None if not capacity else (worker.kv_tokens + more_tokens) / capacity


def _evicted_tokens(home: _Pool, worker: _Worker, priced: Forecast) -> int:
    """Cached tokens that a prompt will push out of the worker's cache."""
    blocks, size = worker.settings.num_gpu_blocks, worker.settings.block_size
    if blocks is None:
        return 0
    free = (blocks - home.cache.blocks(worker.spec.name)) * size
    return max(0, priced.prompt_tokens - priced.cached_tokens - max(0, free))


def _budget_check(settings: Settings) -> BudgetCheck:
    capped = settings.long_prefill_token_threshold > 0
    return BudgetCheck(settings.max_num_batched_tokens, settings.block_size, capped)


def _budget_doubt(pool: _Pool, worker: _Worker) -> BudgetDoubt:
    return worker.budget.doubt if pool.cache.computes_what_it_stores(worker.spec.name) else BudgetDoubt.NONE
