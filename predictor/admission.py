"""Whether a request can be let in: its bounds, the rule for overload without one, and when to come back if not.

Nobody is refused on the word of a model that has not learned, or of one that is behind what has passed, and an idle
worker is open to every bound that the time already waited has not used up. The one thing known of an engine before
anything is learned is the size of its KV cache: requests in flight that demand a multiple of it stand for a queue,
whatever its speed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import msgspec
import numpy as np

from predictor.forecast import Forecast
from predictor.prefill_cost import Basis

BOUND_MIN_S, BOUND_MAX_S = 5.0, 300.0
TTFT_BOUND_MIN_S, TTFT_BOUND_MAX_S = 0.001, 3600.0


class Mode(enum.Enum):
    """What becomes of a refusal."""

    ENFORCE = "enforce"
    SHADOW = "shadow"  # decided, counted and graded, but let through
    OFF = "off"  # not even decided


class OnReject(enum.Enum):
    """What a refused client's library is told: by itself it would retry twice."""

    RETRY = "retry"  # come back when told to
    FAIL = "fail"  # raise at once: the caller has somewhere else to go


class Reason(enum.Enum):
    """Why a request was not placed."""

    QUEUE_WAIT = "queue_wait"  # no worker keeps the bound on queue wait
    TTFT = "ttft"  # none keeps the bound on the time to first token, for want of capacity
    OWN_PREFILL = "own_prefill"  # its own prefill alone takes longer than its bound on the time to first token
    BOUND_USED_UP = "bound_used_up"  # the time already waited exceeds the bound
    OVERLOAD_WAIT = "overload_wait"  # without a bound: every worker's queue is longer than the pool allows
    OVERLOAD_KV = "overload_kv"  # requests in flight demand a multiple of every worker's KV cache
    FAIR_SHARE = "fair_share"  # its tenant has more than its share, and others would have to wait


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """How a pool lets in. `None` turns a rule off."""

    mode: Mode = Mode.ENFORCE
    max_queue_wait_s: float | None = None  # for requests that bring no bound
    max_ttft_s: float | None = None  # the same
    overload_wait_s: float | None = 300.0  # for requests without any bound
    overload_kv_demand: float | None = 4.0  # KV caches' worth of requests in flight on one worker
    risk: float = 0.15  # of missing its bound that a request let in may run
    on_reject: OnReject = OnReject.RETRY


class Limits(msgspec.Struct, frozen=True, gc=False):
    """What holds for one request. Seconds; None where nothing does."""

    max_queue_wait_s: float | None = None
    max_ttft_s: float | None = None
    overload_wait_s: float | None = None
    overload_kv_demand: float | None = None
    fair_wait_s: float | None = None  # its tenant has more than its share

    @property
    def bounded(self) -> bool:
        return self.max_queue_wait_s is not None or self.max_ttft_s is not None

    def allows_wait_s(self, own_s: float) -> float:
        """What a request that takes `own_s` to its first token once it has begun may wait."""
        return min(_or_inf(self.max_queue_wait_s), max(0.0, _or_inf(self.max_ttft_s) - own_s))


class Prospect(msgspec.Struct, frozen=True, gc=False):
    """One worker as a request would find it. `high` is at the quantile that the pool's risk asks for."""

    forecast: Forecast
    high_wait_s: float
    idle: bool
    kv_demand: float | None  # caches' worth, with this request; None: the size of the cache is not known
    behind: bool = False  # of what has passed there not all was followed yet: it may be let in sooner than is told

    @property
    def high_ttft_s(self) -> float:
        return self.forecast.ttft_s + self.high_wait_s - self.forecast.wait_s


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Callers give up on, or ignore, a Retry-After beyond about a minute (peers.md B4); jitter spreads them."""

    cap_s: float = 60.0
    jitter: float = 0.2  # of the estimate, added


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """`uncapped_s` is when the first worker will have drained enough; `told_s` is what the caller is told."""

    told_s: float
    uncapped_s: float

    @property
    def whole_s(self) -> int:
        return max(1, ceil(self.told_s))


@dataclass(frozen=True, slots=True)
class Refusal:
    """`best` is the worker that the request would have gone to."""

    reason: Reason
    limits: Limits
    retry: RetryAfter | None  # None: coming back is no use
    best: Forecast
    forecasts: tuple[Forecast, ...]

    @property
    def allowed_wait_s(self) -> float | None:
        """The waiting, before us included, by which it would have been served; None where it was about something else
        than a wait."""
        limits = self.limits
        match self.reason:
            case Reason.QUEUE_WAIT:
                return limits.max_queue_wait_s
            case Reason.TTFT if limits.max_ttft_s is not None:
                return limits.max_ttft_s - self.best.prefill_s - self.best.load_s - self.best.overhead_s
            case Reason.OVERLOAD_WAIT:
                return limits.overload_wait_s
        return None


def limits_of(
    policy: AdmissionPolicy, max_queue_wait_s: float | None, max_ttft_s: float | None, fair_wait_s: float | None
) -> Limits:
    """The request's own bounds, the pool's where it brings none, and the rules for overload."""
    if max_queue_wait_s is None and max_ttft_s is None:
        max_queue_wait_s, max_ttft_s = policy.max_queue_wait_s, policy.max_ttft_s
    return Limits(max_queue_wait_s, max_ttft_s, policy.overload_wait_s, policy.overload_kv_demand, fair_wait_s)


def objection(prospect: Prospect, limits: Limits) -> Reason | None:
    """Why this worker is not open to the request; None if it is."""
    forecast = prospect.forecast
    waited_s = forecast.already_waited_s
    learned = forecast.basis is Basis.CURVE
    # Before what time has used up: who is told that comes back, and here coming back is no use.
    if learned and forecast.ttft_s - forecast.wait_s - waited_s > _or_inf(limits.max_ttft_s):
        return Reason.OWN_PREFILL
    if waited_s > _or_inf(limits.max_queue_wait_s) or waited_s > _or_inf(limits.max_ttft_s):
        return Reason.BOUND_USED_UP
    if prospect.idle:
        return None
    # A replay that has learned knows better what a demand for space means for a bound.
    kv_rule = not (learned and limits.bounded)
    if kv_rule and prospect.kv_demand is not None and prospect.kv_demand > _or_inf(limits.overload_kv_demand):
        return Reason.OVERLOAD_KV
    if not learned or prospect.behind:
        return None
    if prospect.high_ttft_s > _or_inf(limits.max_ttft_s):
        return Reason.TTFT
    if waited_s + prospect.high_wait_s > _or_inf(limits.max_queue_wait_s):
        return Reason.QUEUE_WAIT
    if not limits.bounded and forecast.wait_s > _or_inf(limits.overload_wait_s):
        return Reason.OVERLOAD_WAIT
    if forecast.wait_s > _or_inf(limits.fair_wait_s):
        return Reason.FAIR_SHARE
    return None


def refuse(
    prospects: Sequence[Prospect],
    objections: Sequence[Reason | None],
    limits: Limits,
    policy: RetryPolicy,
    rng: np.random.Generator,
) -> Refusal:
    """Rests on those that object, at least one: others have yet to learn, and have no time for more."""
    against = [(prospect, why) for prospect, why in zip(prospects, objections, strict=True) if why is not None]
    best, reason = min(against, key=lambda pair: (pair[1] is Reason.OWN_PREFILL, pair[0].high_wait_s))
    retry = retry_after([drained_in_s(prospect, why, limits) for prospect, why in against], policy, rng)
    return Refusal(reason, limits, retry, best.forecast, tuple(prospect.forecast for prospect in prospects))


def drained_in_s(prospect: Prospect, reason: Reason, limits: Limits) -> float | None:
    """When this worker would take a fresh request like this one, if nobody else came: queues drain a second each
    second. None: never."""
    wait_s = prospect.forecast.wait_s
    # What is doubtful of a wait gets less as it gets shorter.
    sure = wait_s / prospect.high_wait_s if prospect.high_wait_s > wait_s else 1.0
    match reason:
        case Reason.OWN_PREFILL:
            return None
        case Reason.TTFT:
            own_s = prospect.forecast.prefill_s + prospect.forecast.load_s + prospect.forecast.overhead_s
            allowed_s = sure * max(0.0, _or_inf(limits.max_ttft_s) - own_s)
        case Reason.QUEUE_WAIT | Reason.BOUND_USED_UP:
            # A bound on the time to first token that is used up leaves as much wait as a fresh request may find.
            bound_s = limits.max_queue_wait_s if limits.max_queue_wait_s is not None else limits.max_ttft_s
            allowed_s = sure * _or_inf(bound_s)
        case Reason.OVERLOAD_WAIT:
            allowed_s = _or_inf(limits.overload_wait_s)
        case Reason.FAIR_SHARE:
            allowed_s = _or_inf(limits.fair_wait_s)
        case Reason.OVERLOAD_KV:
            # As much of the queue has to go as is beyond the demand that is allowed.
            assert prospect.kv_demand is not None
            allowed_s = wait_s * _or_inf(limits.overload_kv_demand) / prospect.kv_demand
    return max(0.0, wait_s - allowed_s)


def retry_after(drains_s: Sequence[float | None], policy: RetryPolicy, rng: np.random.Generator) -> RetryAfter | None:
    """From when each worker will have drained enough. None: coming back is no use."""
    known = [drain_s for drain_s in drains_s if drain_s is not None]
    if not known:
        return None
    drained_s = min(known)
    jittered_s = drained_s * (1.0 + policy.jitter * float(rng.random()))
    return RetryAfter(told_s=min(policy.cap_s, jittered_s), uncapped_s=drained_s)


def _or_inf(limit: float | None) -> float:
    return inf if limit is None else limit
