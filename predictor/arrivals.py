"""Requests yet to come: what a worker has been sent lately stands for what it will be sent.

Later requests wait behind a newcomer, but they fill up what it leaves of its steps, and so make those longer: the last
step nearly always, all of them where a threshold keeps a long prompt from taking a whole step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from math import ceil, exp, log

from predictor.engines.vllm import Settings, chunk_cap
from predictor.prefill_cost import StepCost
from predictor.timeline import Course

_KEPT, _ENOUGH = 64, 8
_SIZES_KEPT = 512
# Where later requests matter in every step, so many futures are imagined, with so many of them at most: gaps in units
# of their mean, and places among the sizes. Steps of irrational length fill the plane more evenly than chance does.
_FUTURES, _MOST = 9, 16
_IMAGINED = tuple(
    tuple(
        (
            -log(1.0 - (future * 0.7548776662 + at * 0.8191725134 + 0.5 / _FUTURES) % 1.0),
            (future * 0.5698402910 + at * 0.6710436067 + 0.5) % 1.0,
        )
        for at in range(_MOST)
    )
    for future in range(_FUTURES)
)
# About as much work as listing so many spans (`run_forward.Budget`).
WORK_UNDER_CAP = 10
# Less than this of a token, or of a step, is nothing: flows do not end on whole ones.
_ROUNDED, _ROUNDED_S = 1e-6, 1e-9
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

    def stretch_under_cap_s(
        self,
        course: Course,
        own_s: float,
        tokens: int,
        output_tokens: int,
        settings: Settings,
        cost: StepCost,
        now_s: float,
    ) -> float:
        """The same where a threshold caps what a prompt gets of a step, unless it is alone in the engine.

        Then who comes later makes each step longer in which it prefills; and until it has generated its output, a
        prompt that could have whole steps gets a part of each. The median of several futures. `own_s` is what all
        `tokens` of the newcomer cost, `output_tokens` what a request generates.
        """
        rate = self.per_s(now_s)
        if not rate or tokens <= 0:
            return 0.0
        if self._sorted is None:
            self._sorted = sorted(self._sizes)
        sizes, count = self._sorted, len(self._sorted)
        flow = CappedPrefill(course, own_s / tokens, tokens, output_tokens, settings, cost)
        takes_s = []
        for future in _IMAGINED:
            at_s, coming = now_s - course.admitted_s, []
            for gap, place in future:
                at_s += gap / rate
                coming.append((at_s, sizes[int(place * count)]))
            takes_s.append(flow.takes_s(coming))
        return max(0.0, sorted(takes_s)[_FUTURES // 2] - flow.takes_s([]))


class PromptSizes:
    """How much of their prompts the requests of a pool have to compute, in tokens."""

    __slots__ = ("_recent", "_sorted")

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_SIZES_KEPT)
        self._sorted: list[int] | None = None

    def add(self, tokens: int) -> None:
        self._recent.append(tokens)
        self._sorted = None

    def longer_than(self, tokens: int, share: float = 0.5) -> int:
        """What this share of those with more than so many does not go beyond; half as much again where none had."""
        if self._sorted is None:
            self._sorted = sorted(self._recent)
        first = bisect_right(self._sorted, tokens)
        if first == len(self._sorted):
            return tokens + max(1, tokens // 2)
        return self._sorted[first + int(share * (len(self._sorted) - first))]


@dataclass(slots=True)
class _There:
    """One that came later: its tokens to prefill, those prefilled, and those that it will generate."""

    left: float
    done: float
    output: float


class CappedPrefill:
    """A newcomer's prefill as a flow, beside those that come while it lasts."""

    __slots__ = (
        "_cap",
        "_cost",
        "_course",
        "_limit",
        "_output_tokens",
        "_room",
        "_settings",
        "_spare",
        "_step_s",
        "_token_s",
        "_tokens",
    )

    def __init__(
        self, course: Course, token_s: float, tokens: int, output_tokens: int, settings: Settings, cost: StepCost
    ) -> None:
        self._course, self._token_s, self._tokens, self._cost = course, token_s, tokens, cost
        self._settings = settings
        self._limit = settings.max_num_batched_tokens
        self._cap = min(self._limit, settings.long_prefill_token_threshold or self._limit)
        self._output_tokens = output_tokens
        # In a step beside those that are there now: what it takes without the newcomer, what he gets, what he leaves.
        steps = max(1, course.shared_steps)
        alone_s = ceil(course.alone_tokens / self._limit) * cost.fixed_s
        self._step_s = max(0.0, course.finish_s - course.admitted_s - alone_s) / steps
        self._room = max(1.0, (tokens - course.alone_tokens) / steps)
        self._spare = (course.spare_before + course.spare_last) / steps if course.shared_steps else 0.0

    def takes_s(self, coming: ReadOnly[tuple[float, int]]) -> float:
        """From its admission; `coming` are times after that and tokens of those that come later, in order."""
        cost, cap, alone = self._cost, self._cap, self._course.alone_tokens
        at_s, left = 0.0, float(self._tokens)
        there: list[_There] = []
        place = 0
        while left > _ROUNDED:
            while place < len(coming) and coming[place][0] <= at_s + _ROUNDED_S:
                there.append(_There(float(coming[place][1]), 0.0, float(self._output_tokens)))
                place += 1
            if left > alone + _ROUNDED:
                room, spare, step_s, until = self._room, self._spare, self._step_s, left - alone
            else:
                room = float(chunk_cap(1 + len(there), self._settings))
                spare, step_s, until = self._limit - room, cost.fixed_s, left
            own = min(room, until)
            spare += room - own
            # As many steps as are alike. Who comes in one of them is part of the next.
            steps = max(1, int(until / own))
            chunks = []
            for one in there:
                chunk = min(float(cap), one.left, spare)
                spare -= chunk
                chunks.append(chunk)
                if chunk:
                    steps = min(steps, max(1, int(one.left / chunk)))
                elif not one.left:
                    steps = min(steps, max(1, ceil(one.output)))
                    step_s += cost.per_decode_s
            squares = sum(
                chunk * (2.0 * one.done + chunk * steps) for chunk, one in zip(chunks, there, strict=True) if chunk
            )
            each_s = step_s + own * self._token_s + cost.per_token_s * sum(chunks) + cost.per_token_squared_s * squares
            if place < len(coming) and at_s + steps * each_s > coming[place][0]:
                steps = min(steps, max(1, ceil((coming[place][0] - at_s - _ROUNDED_S) / each_s)))
            at_s += steps * each_s
            left -= steps * own
            for one, chunk in zip(there, chunks, strict=True):
                if chunk:
                    one.done += chunk * steps
                    one.left -= chunk * steps
                    one.left = one.left if one.left > _ROUNDED else 0.0
                elif not one.left:
                    one.output -= steps
            there = [one for one in there if one.left or one.output > _ROUNDED]
        return at_s
