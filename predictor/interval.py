"""How far a forecast may be off: quantiles of the errors that were graded, kept up online.

Conformal: nothing is assumed about errors but that the next one is like the last ones. An error is measured in units of
what a forecast of that size is usually off by (`scale_s`), so that short and long forecasts can learn from each other.
Each worker has errors of its own, by kind of forecast; while it has few, those of its pool count as well, and before
there are any at all a wide guess does.

Errors of one congestion come late and together, so that quantiles of a window alone cover too little just then. So the
share of misses on either side is watched too, and the tails are taken further out until it is right again. A request
whose upper limit has passed without a first token is a miss at that moment, not when its token comes.

Errors of short waits say nothing of a first long one, which may hang on things that no short one does (who ends when).
So what is shown of a forecast widens to the guess while none or few of its size were graded.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from math import exp, floor

import msgspec

from predictor.memory import ErrorsMemory

# The probabilities that a spread is kept at. Between them it is interpolated.
LEVELS = (0.005, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.975, 0.995)
# How far a level is from the middle: the nearer, the less a tail counts. A median is no tail.
_OUTWARD = tuple(abs(2 * level - 1) for level in LEVELS)
LOW, HIGH = 0.05, 0.95  # the ends of the interval that is shown and whose coverage is counted

# What any forecast is off by: the clock and the network, and a part of the whole.
_FLOOR_S, _RELATIVE = 0.002, 0.02
_WINDOW, _POOL_WINDOW = 200, 600
# A worker's own quantile counts for n / (n + this) of the whole, and the pool's for the rest.
_POOLING = 20.0
# Nobody's tail is known from fewer errors than this: the guess is mixed in for the rest.
_GUESSED = 12
# Forecasts up to this are of one size. Of longer ones those are that are at least so large a part of it.
_ONE_SIZE_S, _ALIKE = 2.0, 0.5
# A worker looks at its pool's errors again when so many are new, or where many are known, such a part of them. The
# workers of a large pool do so one after the other: all at once would hold a decision up for tens of milliseconds.
_FEW_NEW = 8
# How much one miss moves a tail. At the target rate hits and misses balance.
_STEP = 0.08
_TAIL_MIN, _TAIL_MAX = 0.1, 1.6


class Spread(msgspec.Struct, frozen=True, gc=False):
    """Quantiles of (truth - forecast) / `scale_s(forecast)`, one for each of `LEVELS`, ascending."""

    scores: tuple[float, ...]

    def score(self, probability: float) -> float:
        """Raises ValueError for what is no probability between 0 and 1."""
        if not 0 < probability < 1:
            raise ValueError(f"a quantile needs a probability between 0 and 1, not {probability}")
        at = bisect_left(LEVELS, probability)
        if at == 0:
            return self.scores[0]
        if at == len(LEVELS):
            return self.scores[-1]
        below, above = LEVELS[at - 1], LEVELS[at]
        part = (probability - below) / (above - below)
        return self.scores[at - 1] + part * (self.scores[at] - self.scores[at - 1])

    def quantile_s(self, predicted_s: float, probability: float) -> float:
        """The seconds that a forecast of `predicted_s` stays below with this probability."""
        return max(0.0, predicted_s + self.score(probability) * scale_s(predicted_s))


def scale_s(predicted_s: float) -> float:
    return _FLOOR_S + _RELATIVE * predicted_s


# Before anything is graded: from a third less to twice as much, most of the time. In units of a forecast's scale.
UNKNOWN = Spread((-45.0, -35.0, -30.0, -22.0, -8.0, 0.0, 10.0, 35.0, 50.0, 75.0, 150.0))


class Kind(msgspec.Struct, frozen=True, gc=False):
    """Forecasts whose errors are alike. What is unlike enough to be kept apart, and no more: each kind must learn."""

    waits: bool  # behind other work
    sure: bool  # exact tokens, a complete event feed and learned costs


UNSURE = Kind(waits=True, sure=False)


class Calibration:
    """One worker's spreads, by kind; `pool` is shared by the workers of a pool."""

    def __init__(self, pool: PoolErrors) -> None:
        self._pool = pool
        self._number = pool.number()
        self._kinds: dict[Kind, _Errors] = {}
        self.graded = self.covered = 0  # forecasts, and those of them whose interval held

    @property
    def coverage(self) -> float:
        """The share of graded forecasts whose 90 % interval held; 0 before any was graded."""
        return self.covered / max(1, self.graded)

    def spread(self, kind: Kind) -> Spread:
        errors = self._errors(kind)
        shared = self._pool.errors(kind)
        if errors.spread is None or shared.count >= errors.due:
            pause = max(_FEW_NEW, min(shared.count, _POOL_WINDOW) // _FEW_NEW)
            errors.due = shared.count + pause + self._number % pause
            errors.spread = _pooled(errors, shared)
        return errors.spread

    def shown(self, kind: Kind, predicted_s: float) -> Spread:
        """As `spread`, for a forecast of this size: it counts as far as forecasts as long as it were graded.

        No bound is judged by it: to refuse for a wait that is merely unknown is to refuse without cause.
        """
        return self._pool.errors(kind).widened(self.spread(kind), predicted_s)

    def grade(self, kind: Kind, promised: Spread, predicted_s: float, actual_s: float, overdue: bool = False) -> bool:
        """Takes in one graded forecast; True if the interval that it was `promised` held.

        `overdue`: the miss was counted already, when its upper limit passed.
        """
        errors, shared = self._errors(kind), self._pool.errors(kind)
        score = (actual_s - predicted_s) / scale_s(predicted_s)
        low, high = promised.score(LOW), promised.score(HIGH)
        if not overdue:
            errors.moved(score < low, score > high)
        errors.add(score)
        shared.add(score)
        shared.reached(predicted_s)
        held = low <= score <= high
        self.graded += 1
        self.covered += held
        return held

    def overdue(self, kind: Kind) -> None:
        """A forecast's upper limit has passed, and its first token has not come."""
        self._errors(kind).moved(below=False, above=True)

    def forget(self) -> None:
        """The worker is another than the one that was graded; what its pool does on average still holds."""
        self._kinds.clear()

    def memory(self) -> tuple[ErrorsMemory, ...]:
        return _remembered(self._kinds)

    def recall(self, memory: Iterable[ErrorsMemory]) -> None:
        """Begins with what was graded before."""
        self._kinds = _recalled(memory, _WINDOW)

    def _errors(self, kind: Kind) -> _Errors:
        errors = self._kinds.get(kind)
        if errors is None:
            errors = self._kinds[kind] = _Errors(_WINDOW)
        return errors


class PoolErrors:
    """What the forecasts of a pool were off by, whoever served them."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, _Errors] = {}
        self._numbers = itertools.count()

    def number(self) -> int:
        """Another one for each worker: by it they take turns in looking at the pool again."""
        return next(self._numbers)

    def memory(self) -> tuple[ErrorsMemory, ...]:
        return _remembered(self._kinds)

    def recall(self, memory: Iterable[ErrorsMemory]) -> None:
        self._kinds = _recalled(memory, _POOL_WINDOW)

    def errors(self, kind: Kind) -> _Errors:
        errors = self._kinds.get(kind)
        if errors is None:
            errors = self._kinds[kind] = _Errors(_POOL_WINDOW)
        return errors


class _Errors:
    """The last errors, in units of scale, sorted; and how far out the tails are taken."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._in_order: deque[float] = deque()
        self._sorted: list[float] = []
        self.low_tail = self.high_tail = 1.0  # what of a tail's probability is left to it: less is further out
        self.count = 0
        self.longest_s: list[float] = []  # a heap: the longest forecasts among them, so many as make a guess needless
        self.spread: Spread | None = None
        self.due = 0  # when the pool has so many, the spread is computed anew

    def __len__(self) -> int:
        return len(self._sorted)

    @property
    def in_order(self) -> tuple[float, ...]:
        return tuple(self._in_order)

    def add(self, score: float) -> None:
        if len(self._in_order) == self._window:
            oldest = self._in_order.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._in_order.append(score)
        insort(self._sorted, score)
        self.count += 1
        self.spread = None

    def reached(self, predicted_s: float) -> None:
        if len(self.longest_s) < _GUESSED:
            heapq.heappush(self.longest_s, predicted_s)
        else:
            heapq.heappushpop(self.longest_s, predicted_s)

    def widened(self, spread: Spread, predicted_s: float) -> Spread:
        """The guess is mixed in as far as forecasts of such a size are missing."""
        if predicted_s <= _ONE_SIZE_S:
            return spread
        missing = 1 - sum(other_s >= _ALIKE * predicted_s for other_s in self.longest_s) / _GUESSED
        if not missing:
            return spread
        return Spread(
            tuple(known + missing * (guess - known) for known, guess in zip(spread.scores, UNKNOWN.scores, strict=True))
        )

    def moved(self, below: bool, above: bool) -> None:
        self.low_tail = _moved(self.low_tail, below, LOW)
        self.high_tail = _moved(self.high_tail, above, 1 - HIGH)
        self.spread = None

    def quantile(self, probability: float) -> float:
        """The conformal one: of n errors the next is below the k-th smallest with probability k / (n + 1)."""
        scores = self._sorted
        rank = probability * (len(scores) + 1) - 1
        if rank <= 0:
            return scores[0]
        below = floor(rank)
        if below >= len(scores) - 1:
            return scores[-1]
        return scores[below] + (rank - below) * (scores[below + 1] - scores[below])


def _remembered(kinds: Mapping[Kind, _Errors]) -> tuple[ErrorsMemory, ...]:
    return tuple(
        ErrorsMemory(kind.waits, kind.sure, errors.in_order, errors.low_tail, errors.high_tail, tuple(errors.longest_s))
        for kind, errors in kinds.items()
    )


def _recalled(memory: Iterable[ErrorsMemory], window: int) -> dict[Kind, _Errors]:
    kinds = {}
    for one in memory:
        errors = kinds[Kind(one.waits, one.sure)] = _Errors(window)
        for score in one.scores[-window:]:
            errors.add(score)
        for predicted_s in one.longest_s:
            errors.reached(predicted_s)
        errors.low_tail = min(_TAIL_MAX, max(_TAIL_MIN, one.low_tail))
        errors.high_tail = min(_TAIL_MAX, max(_TAIL_MIN, one.high_tail))
    return kinds


def _moved(tail: float, missed: bool, target: float) -> float:
    return min(_TAIL_MAX, max(_TAIL_MIN, tail * exp(_STEP * (target - 1 if missed else target))))


def _pooled(errors: _Errors, shared: _Errors) -> Spread:
    scores = []
    own = len(errors) / (len(errors) + _POOLING)
    missing = max(0.0, 1 - len(shared) / _GUESSED)
    for level, outward, guess in zip(LEVELS, _OUTWARD, UNKNOWN.scores, strict=True):
        wanted = level * errors.low_tail**outward if level < 0.5 else 1 - (1 - level) * errors.high_tail**outward
        known = shared.quantile(wanted) if len(shared) else 0.0
        if own:
            known += own * (errors.quantile(wanted) - known)
        scores.append(known + missing * (guess - known))
    for at in range(1, len(scores)):  # a mixture of ascending quantiles ascends but for rounding
        scores[at] = max(scores[at], scores[at - 1])
    return Spread(tuple(scores))
