"""Which worker gets a request: the lowest total cost among those that are open to it.

The cost of a placement is what it costs the caller, the predicted time to first token, and what it costs others. Each
second of prefill keeps those waiting who come behind, and prompts that are cached push out others that will have to be
prefilled again. How much others count is the pool's or the caller's preference, and how busy the pool is: with nobody
else there, nobody pays. Where requests with a bound are being refused, one without a bound pays for those too that
it crowds out (`crowding.py`).

That also decides when a conversation leaves the worker that holds its history. Moving costs its prefill once for the
caller and once more for others, so that a short wait is sat out, and a long one is not.

A worker that has not learned yet gets a bounded share instead of a place in that race: its forecast would be a guess,
and a conservative guess would starve it. As long as a learned worker is there to take the rest, it is given one prefill
at a time, so that it learns from each and is never flooded.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from predictor.forecast import Forecast

# Closer than this, two predictions do not differ: the choice is drawn.
_TIE_S, _TIE_RATIO = 0.001, 0.01
# A learned worker that had none of the recent grants is tried again by this share of requests, if they would not wait
# much longer there: a forecast that keeps everybody away is never graded, and so never found to be wrong.
_REVISITS = 0.05
_REVISIT_RATIO, _REVISIT_S = 2.0, 0.05


class Why(enum.Enum):
    """Why the chosen worker won."""

    FASTEST = "fastest"
    CACHE = "cache"  # without the prefix it holds it would not have won, or would take more than twice as long
    SHORTER_QUEUE = "shorter_queue"  # it would have lost if nobody were waiting anywhere
    SESSION = "session"  # the prefix is not known, but the session was there before
    ROOM = "room"  # elsewhere it would have crowded out requests with a bound
    LEARNING = "learning"  # idle, and has yet to learn
    REVISITED = "revisited"  # it had no request for long, and might be better than it is thought to be
    ONLY = "only"  # there is no other


class Prefer(enum.Enum):
    """What counts beside the caller's own time."""

    __hash__ = object.__hash__

    LATENCY = "latency"  # nothing
    BALANCED = "balanced"  # others as much as the caller, in a pool that is busy
    CACHE = "cache"  # work that need not be done: conversations stay where they are


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """How a pool weighs. `others` is what a second of others' time is worth against one of the caller's, when every
    worker is busy; `session_hint` is the part of its own prefill that a session's last worker is believed to save."""

    prefer: Prefer = Prefer.BALANCED
    others: Mapping[Prefer, float] = field(
        default_factory=lambda: {Prefer.LATENCY: 0.0, Prefer.BALANCED: 1.0, Prefer.CACHE: 4.0}
    )
    session_hint: float = 0.5
    refusal_s: float = 30.0  # a request without a bound rather waits so much longer than have one with a bound refused
    learning_share: float = 0.1  # of recent grants, per worker that has not learned
    fallbacks: int = 2


class Candidate(msgspec.Struct, frozen=True, gc=False):
    forecast: Forecast
    feasible: bool
    prefilling: int  # prefills booked on the worker and not done
    learned: bool
    samples: int
    recent_share: float  # of the pool's recent grants
    uncached_prefill_s: float  # its own prefill if nothing were cached
    eviction_s: float = 0.0  # prefill that others will have to repeat because of it
    session: bool = False  # it served this session last, and nothing better is known
    crowded_out: float = 0.0  # requests with a bound that will be refused because of it


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The chosen worker first, then whom to fall back to, best first."""

    ranked: tuple[Candidate, ...]
    why: Why


def choose(
    candidates: Sequence[Candidate],
    policy: RoutingPolicy,
    prefer: Prefer | None,
    rng: np.random.Generator,
    busy: float | None = None,
) -> Choice | None:
    """None when no candidate is open to the request. `prefer` is the request's own, where it has one. `busy` is the
    share of the pool that prefills; without it, that of the candidates."""
    anyone_learned = any(candidate.learned for candidate in candidates)
    open_to = [c for c in candidates if c.feasible and (c.learned or not c.prefilling or not anyone_learned)]
    if not open_to:
        return None
    if busy is None:
        busy = sum(candidate.prefilling > 0 for candidate in candidates) / len(candidates)
    weight = policy.others[prefer or policy.prefer]
    others = weight * busy
    hint = policy.session_hint
    refusal_s = policy.refusal_s if weight else 0.0

    costs = ((cost_s(candidate, others, hint, refusal_s), candidate) for candidate in open_to)
    by_cost = sorted(costs, key=lambda pair: pair[0])
    learned = [pair for pair in by_cost if pair[1].learned]
    learner = _learner(open_to, policy.learning_share if learned else 1.0, rng)
    revisited = None if learner is not None else _forgotten([pair[1] for pair in learned], rng)
    if learner is not None:
        winner, why = learner, Why.LEARNING
    elif revisited is not None:
        winner, why = revisited, Why.REVISITED
    else:
        race = learned or by_cost
        winner = _draw(race, rng)
        why = _reason(winner, [candidate for _, candidate in race]) if len(candidates) > 1 else Why.ONLY
    rest = [candidate for _, candidate in by_cost if candidate is not winner]
    return Choice((winner, *rest[: policy.fallbacks]), why)


def cost_s(candidate: Candidate, others: float, session_hint: float = 0.0, refusal_s: float = 0.0) -> float:
    """Seconds of the caller's time, with those of others at their weight."""
    own_s = candidate.forecast.prefill_s
    saved_s = session_hint * own_s if candidate.session else 0.0
    price_s = others * (own_s - saved_s + candidate.eviction_s) + refusal_s * candidate.crowded_out
    return candidate.forecast.ttft_s - saved_s + price_s


def _learner(pool: Sequence[Candidate], share: float, rng: np.random.Generator) -> Candidate | None:
    waiting = [c for c in pool if not c.learned and not c.prefilling and c.recent_share <= share]
    if not waiting:
        return None
    fewest = min(candidate.samples for candidate in waiting)
    equals = [candidate for candidate in waiting if candidate.samples == fewest]
    return equals[int(rng.integers(len(equals)))]


def _forgotten(learned: Sequence[Candidate], rng: np.random.Generator) -> Candidate | None:
    if not any(candidate.recent_share for candidate in learned):
        return None  # nobody has had anything yet
    limit_s = _REVISIT_RATIO * learned[0].forecast.ttft_s + _REVISIT_S
    out = [c for c in learned if not c.recent_share and not c.prefilling and c.forecast.ttft_s <= limit_s]
    if not out or rng.random() >= _REVISITS:
        return None
    return out[int(rng.integers(len(out)))]


def _draw(race: Sequence[tuple[float, Candidate]], rng: np.random.Generator) -> Candidate:
    best_s = race[0][0]
    limit_s = best_s + max(_TIE_S, _TIE_RATIO * abs(best_s))
    ties = [candidate for cost, candidate in race if cost <= limit_s]
    return ties[int(rng.integers(len(ties)))] if len(ties) > 1 else ties[0]


def _reason(winner: Candidate, race: Sequence[Candidate]) -> Why:
    def cold_s(candidate: Candidate) -> float:
        return candidate.forecast.ttft_s - candidate.forecast.prefill_s + candidate.uncached_prefill_s

    def unqueued_s(candidate: Candidate) -> float:
        return candidate.forecast.ttft_s - candidate.forecast.wait_s

    rivals = [candidate for candidate in race if candidate is not winner]
    if any(rival.crowded_out > winner.crowded_out and _sooner(rival, winner) for rival in rivals):
        return Why.ROOM
    if winner.session and any(rival.forecast.ttft_s <= winner.forecast.ttft_s + _TIE_S for rival in rivals):
        return Why.SESSION
    if winner.forecast.cached_tokens:
        lost = any(cold_s(rival) <= cold_s(winner) + _TIE_S for rival in rivals)
        if lost or cold_s(winner) > 2 * winner.forecast.ttft_s:
            return Why.CACHE
    if any(unqueued_s(rival) + _TIE_S < unqueued_s(winner) for rival in rivals):
        return Why.SHORTER_QUEUE
    return Why.FASTEST


def _sooner(one: Candidate, other: Candidate) -> bool:
    return one.forecast.ttft_s + _TIE_S < other.forecast.ttft_s
