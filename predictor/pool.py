"""The engines that serve one model, and what is known of its requests: how long they are, and whose turn it was."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field

from predictor.admission import AdmissionPolicy, Limits, Mode, RetryPolicy, limits_of
from predictor.arrivals import PromptSizes
from predictor.budget_check import BudgetDoubt
from predictor.course import Allowance
from predictor.crowding import Crowding
from predictor.fairness import FairnessPolicy, TenantUse
from predictor.forecast import Forecast
from predictor.hindsight import Guard, GuardPolicy
from predictor.interval import PoolErrors
from predictor.length_class import LengthClass
from predictor.output_lengths import Going, KnownLengths, OutputLengths, Running
from predictor.pool_cache import PoolCache
from predictor.prefill_cost import LearningPolicy
from predictor.prompt import Prompt
from predictor.renewal import Renewal
from predictor.routing import RoutingPolicy
from predictor.tickets import Wish
from predictor.worker import Worker

_RECENT_GRANTS = 50
# Sessions remembered, by the worker that served them last; the oldest are forgotten.
_MOST_SESSIONS = 10_000


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


@dataclass(slots=True)
class Pool:
    policy: PoolPolicy
    cache: PoolCache
    workers: dict[str, Worker] = field(default_factory=dict)
    prompts: PromptSizes = field(default_factory=PromptSizes)
    recent: deque[str] = field(default_factory=deque)  # workers of the newest grants
    recently: Counter[str] = field(default_factory=Counter)  # how many of these each worker has
    errors: PoolErrors = field(default_factory=PoolErrors)
    renewal: Renewal = field(default_factory=Renewal)
    passing: Allowance = field(default_factory=Allowance)
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

    def eligible(self, prompt: Prompt, wish: Wish, now_s: float) -> list[Worker]:
        """Who may be chosen: nobody who drains, and of the allowed endpoints those that could take such a request, are
        up, and are not full; where nobody is all of that, those who lack the last of it that somebody has."""
        serving = [worker for worker in self.workers.values() if not worker.draining]
        allowed = [worker for worker in serving if wish.subset is None or worker.spec.endpoint in wish.subset]
        if wish.adapter is not None:
            allowed = [worker for worker in allowed if wish.adapter in worker.spec.adapters]
        allowed = [worker for worker in allowed if worker.takes(prompt, wish)] or allowed
        up = [worker for worker in allowed if worker.up]
        return [worker for worker in up if worker.backing_off_until_s <= now_s] or up or allowed

    def evicted_tokens(self, worker: Worker, priced: Forecast) -> int:
        """Cached tokens that a prompt will push out of the worker's cache."""
        blocks, size = worker.settings.num_gpu_blocks, worker.settings.block_size
        if blocks is None:
            return 0
        free = (blocks - self.cache.blocks(worker.spec.name)) * size
        return max(0, priced.prompt_tokens - priced.cached_tokens - max(0, free))

    def budget_doubt(self, worker: Worker) -> BudgetDoubt:
        return worker.budget.doubt if self.cache.computes_what_it_stores(worker.spec.name) else BudgetDoubt.NONE

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

    def expected_output(self, of: LengthClass | None, max_tokens: int | None, now_s: float) -> int:
        """Tokens that half of all requests of a class do not go beyond."""
        return self.lengths_at(now_s).curve(of).length(0.5, 0, max_tokens)

    def lengths_at(self, now_s: float) -> KnownLengths:
        return self.lengths.at(self._generated, now_s)

    def _generated(self) -> Running:
        running = Running()
        for worker in self.workers.values():
            shadow, tickets = worker.shadow, worker.tickets
            going = running.seen if shadow.sees_decodes else running.counted
            for name, tokens in shadow.generated():
                ticket = tickets.get(name)
                if ticket is not None:
                    going.append(Going(tokens, ticket.number, ticket.length_class))
        return running
