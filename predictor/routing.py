"""Which worker gets a request: the lowest predicted time to first token among those that keep the bound.

A worker that has not learned yet gets a bounded share instead of a place in that race: its forecast would be a guess,
and a conservative guess would starve it. As long as a learned worker is there to take the rest, it is given one prefill
at a time, so that it learns from each and is never flooded.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictor.forecast import Forecast

# Closer than this, two predictions do not differ: the choice is drawn.
_TIE_S, _TIE_RATIO = 0.001, 0.01


class Why(enum.Enum):
    """Why the chosen worker won."""

    FASTEST = "fastest"
    CACHE = "cache"  # without the prefix it holds it would not have won, or would take more than twice as long
    SHORTER_QUEUE = "shorter_queue"  # it would have lost if nobody were waiting anywhere
    LEARNING = "learning"  # idle, and has yet to learn
    ONLY = "only"  # there is no other


@dataclass(frozen=True, slots=True)
class Candidate:
    forecast: Forecast
    feasible: bool
    prefilling: int  # prefills booked on the worker and not done
    learned: bool
    samples: int
    recent_share: float  # of the pool's recent grants
    uncached_prefill_s: float  # its own prefill if nothing were cached


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen worker first, then whom to fall back to, best first."""

    ranked: tuple[Candidate, ...]
    why: Why


def choose(
    candidates: Sequence[Candidate], learning_share: float, fallbacks: int, rng: np.random.Generator
) -> Choice | None:
    """None when no candidate is open to the request.

    `learning_share` bounds each unlearned worker's part of the traffic while a learned one is there for the rest.
    """
    anyone_learned = any(candidate.learned for candidate in candidates)
    open_to = [c for c in candidates if c.feasible and (c.learned or not c.prefilling or not anyone_learned)]
    if not open_to:
        return None
    by_ttft = sorted(open_to, key=lambda candidate: candidate.forecast.ttft_s)
    learned = [candidate for candidate in by_ttft if candidate.learned]
    learner = _learner(open_to, learning_share if learned else 1.0, rng)
    if learner is not None:
        winner, why = learner, Why.LEARNING
    else:
        race = learned or by_ttft
        winner = _draw(race, rng)
        why = _reason(winner, race) if len(candidates) > 1 else Why.ONLY
    others = [candidate for candidate in by_ttft if candidate is not winner]
    return Choice((winner, *others[:fallbacks]), why)


def _learner(pool: Sequence[Candidate], share: float, rng: np.random.Generator) -> Candidate | None:
    waiting = [c for c in pool if not c.learned and not c.prefilling and c.recent_share <= share]
    if not waiting:
        return None
    fewest = min(candidate.samples for candidate in waiting)
    equals = [candidate for candidate in waiting if candidate.samples == fewest]
    return equals[int(rng.integers(len(equals)))]


def _draw(race: Sequence[Candidate], rng: np.random.Generator) -> Candidate:
    best_s = race[0].forecast.ttft_s
    limit_s = best_s + max(_TIE_S, _TIE_RATIO * best_s)
    ties = [candidate for candidate in race if candidate.forecast.ttft_s <= limit_s]
    return ties[int(rng.integers(len(ties)))]


def _reason(winner: Candidate, race: Sequence[Candidate]) -> Why:
    def cold_s(candidate: Candidate) -> float:
        return candidate.forecast.ttft_s - candidate.forecast.prefill_s + candidate.uncached_prefill_s

    def unqueued_s(candidate: Candidate) -> float:
        return candidate.forecast.ttft_s - candidate.forecast.wait_s

    rivals = [candidate for candidate in race if candidate is not winner]
    if winner.forecast.cached_tokens:
        lost = any(cold_s(rival) <= cold_s(winner) + _TIE_S for rival in rivals)
        if lost or cold_s(winner) > 2 * winner.forecast.ttft_s:
            return Why.CACHE
    if any(unqueued_s(rival) + _TIE_S < unqueued_s(winner) for rival in rivals):
        return Why.SHORTER_QUEUE
    return Why.FASTEST
