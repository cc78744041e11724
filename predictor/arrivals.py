"""Requests yet to come: what a worker has been sent lately stands for what it will be sent.

Later requests wait behind a newcomer, but they fill up what it leaves of its steps, and so make those longer: the last
step nearly always, all of them where a threshold keeps a long prompt from taking a whole step.
"""

from __future__ import annotations

from collections import deque
from math import exp

from predictor.prefill_cost import StepCost
from predictor.timeline import Course

_KEPT, _ENOUGH = 64, 8
# A burst within less is no rate that goes on.
_WINDOW_S = 10.0


class RecentArrivals:
    """When requests came to one worker, and how many tokens of each it had to compute."""

    __slots__ = ("_sizes", "_sorted", "_times", "_total")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_KEPT)
        self._sizes: deque[int] = deque(maxlen=_KEPT)
        self._total = 0
        self._sorted: list[int] | None = None

    def add(self, at_s: float, tokens: int) -> None:
        if len(self._sizes) == _KEPT:
            self._total -= self._sizes[0]
        self._times.append(at_s)
        self._sizes.append(tokens)
        self._total += tokens
        self._sorted = None

    def per_s(self, now_s: float) -> float:
        if len(self._times) < _ENOUGH:
            return 0.0
        return len(self._times) / max(_WINDOW_S, now_s - self._times[0])

    def stretch_s(self, course: Course, own_before_s: float, cost: StepCost, now_s: float) -> float:
        """By how much requests yet to come make a newcomer's prefill longer.

        `own_before_s` is what its own tokens cost in the steps before its last.
        """
        rate = self.per_s(now_s)
        if not rate or not (course.spare_last or course.spare_before):
            return 0.0
        mean = self._total / len(self._sizes)
        stretch_s = 0.0
        before = 0.0
        last_begins_s = course.last_s + own_before_s - now_s
        if exp(-min(50.0, rate * max(0.0, last_begins_s))) >= 0.5:
            return 0.0  # more likely than not, nobody comes
        if course.spare_before:
            # As many tokens as come and find room; they stretch the time in which more come.
            token_s = cost.per_token_s + cost.per_token_squared_s * mean
            for _ in range(4):
                before = min(rate * mean * (last_begins_s + stretch_s), float(course.spare_before))
                stretch_s = before * token_s
        expected = rate * max(0.0, last_begins_s + stretch_s)
        nobody = exp(-min(50.0, expected))
        if course.spare_before:
            fill = min(float(course.spare_last), max(0.0, expected * mean - before))
        else:
            # The median of what has come by then.
            if self._sorted is None:
                self._sorted = sorted(self._sizes)
            quantile = (0.5 - nobody) / (1.0 - nobody)
            size = self._sorted[min(len(self._sorted) - 1, int(quantile * len(self._sorted)))]
            fill = min(float(course.spare_last), size * max(1.0, expected / (1.0 - nobody)))
        return stretch_s + cost.per_token_s * fill + cost.per_token_squared_s * fill * min(fill, mean)
