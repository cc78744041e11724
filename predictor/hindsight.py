"""Whether refusals were right, told afterwards, and what a pool does when too many were not.

A refused request leaves nothing behind that could be timed. But the work that was ahead of it goes on: engines serve
in order, so it would have begun when the last of that had its first token and there was space for it. If that moment
came within the bound, the refusal was a false alarm. A refusal that was only decided, and let through, is graded by
what really came.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from predictor.admission import Reason, Refusal
from predictor.forecast import Forecast

# Under a flood of refusals some are enough to judge by.
_MOST_WATCHED = 256


class Verdict(enum.Enum):
    """Of a refusal, afterwards."""

    RIGHT = "right"  # it would have waited for longer than its bound
    FALSE_ALARM = "false_alarm"
    UNKNOWN = "unknown"  # not to be told: too many to watch, or something in its way that shows no first token


@dataclass(frozen=True, slots=True)
class Review:
    """A refusal, real or in shadow, and what became of it."""

    id: str
    worker: str
    reason: Reason
    enforced: bool
    verdict: Verdict
    wait_s: float | None  # what it waited, or would have; None: longer than was watched, or not to be told
    spare: float = 0.0  # of a false alarm: the part of what it might have waited that it would not have


@dataclass(frozen=True, slots=True)
class Watched:
    """A refused request, as it would stand in the queue of the worker that it would have gone to."""

    id: str
    reason: Reason
    behind: int  # the number of the last booking ahead of it
    refused_at_s: float
    already_waited_s: float
    in_time_until_s: float  # beginning by then, it would have kept its bound
    new_tokens: int  # of its prompt, that it was not expected to find cached

    def began(self, now_s: float) -> tuple[float, float]:
        """What it would have waited, and the part of what it might have that would have been to spare."""
        allowed_s = self.already_waited_s + self.in_time_until_s - self.refused_at_s
        wait_s = self.already_waited_s + now_s - self.refused_at_s
        return wait_s, _spare(wait_s, allowed_s)


class Hindsight:
    """One worker's refused requests that are still being watched, the oldest first."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._watched: deque[Watched] = deque()
        self._first_out_s = inf  # none of them is out of time before

    def __len__(self) -> int:
        return len(self._watched)

    @property
    def full(self) -> bool:
        """Whether enough are watched: of who comes now nothing will be told."""
        return len(self._watched) >= _MOST_WATCHED

    def watch(self, refused: Watched, sure: bool) -> list[Review]:
        """`sure`: everything ahead of it will show its first token."""
        if not sure or self.full:
            return [self._review(refused, Verdict.UNKNOWN, None)]
        self._watched.append(refused)
        self._first_out_s = min(self._first_out_s, refused.in_time_until_s)
        return []

    def before(self, now_s: float) -> list[Review]:
        """Something is about to change: who was still waiting until now, and is out of time, was rightly refused."""
        if now_s <= self._first_out_s:
            return []
        out = [refused for refused in self._watched if refused.in_time_until_s < now_s]
        self._watched = deque(refused for refused in self._watched if refused.in_time_until_s >= now_s)
        self._first_out_s = min((refused.in_time_until_s for refused in self._watched), default=inf)
        return [self._review(refused, Verdict.RIGHT, None) for refused in out]

    def after(self, first_unstarted: int | None, has_room: Callable[[Watched], bool], now_s: float) -> list[Review]:
        """Something has changed: who could begin now, within the bound, was refused wrongly.

        `first_unstarted` is the number of the oldest booking that has had no first token. `has_room` tells whether the
        prompt fits beside those ahead of it that are still being served.
        """
        begun = [
            refused
            for refused in self._watched
            if (first_unstarted is None or first_unstarted > refused.behind) and has_room(refused)
        ]
        if begun:
            gone = {id(refused) for refused in begun}
            self._watched = deque(refused for refused in self._watched if id(refused) not in gone)
        return [self._review(refused, Verdict.FALSE_ALARM, *refused.began(now_s)) for refused in begun]

    def give_up(self) -> list[Review]:
        """The worker has gone, and the queue with it."""
        gone, self._watched = self._watched, deque()
        return [self._review(refused, Verdict.UNKNOWN, None) for refused in gone]

    def _review(self, refused: Watched, verdict: Verdict, wait_s: float | None, spare: float = 0.0) -> Review:
        return Review(refused.id, self._worker, refused.reason, True, verdict, wait_s, spare)


def review_shadow(request_id: str, refusal: Refusal, promised: Forecast, actual_ttft_s: float) -> Review:
    """Of a refusal that was not carried out, by what really came."""
    wait_s = actual_ttft_s - promised.prefill_s - promised.load_s - promised.overhead_s
    allowed_s = refusal.allowed_wait_s
    if allowed_s is None:
        return Review(request_id, promised.worker, refusal.reason, False, Verdict.UNKNOWN, wait_s)
    verdict = Verdict.FALSE_ALARM if wait_s <= allowed_s else Verdict.RIGHT
    return Review(request_id, promised.worker, refusal.reason, False, verdict, wait_s, _spare(wait_s, allowed_s))


def _spare(wait_s: float, allowed_s: float) -> float:
    return max(0.0, 1.0 - wait_s / allowed_s) if allowed_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class GuardPolicy:
    """When admission may no longer refuse: too many of the last refusals were false alarms.

    A queue that is kept at the bound by refusing makes every refusal a close call, of which some are wrong whatever is
    predicted. So an alarm counts here only if it was wrong by more than `margin` of the bound.
    """

    false_alarms: float | None = 0.3  # of the refusals in the window; None: no guard
    margin: float = 0.2
    window: int = 50
    least: int = 20  # refusals, before it is judged


class Guard:
    """Steps one pool's admission down to shadow, and up again when its shadow refusals are right."""

    def __init__(self, policy: GuardPolicy) -> None:
        self._policy = policy
        self._alarms: deque[bool] = deque(maxlen=policy.window)
        self.stepped_down = False
        self.rate_at_last_step = 0.0

    @property
    def false_alarm_rate(self) -> float | None:
        """Of the refusals in the window; None before there is one."""
        return sum(self._alarms) / len(self._alarms) if self._alarms else None

    def record(self, review: Review) -> bool:
        """Takes in one verdict; True if it changed what the pool does."""
        if review.verdict is Verdict.UNKNOWN or self._policy.false_alarms is None:
            return False
        self._alarms.append(review.verdict is Verdict.FALSE_ALARM and review.spare > self._policy.margin)
        if len(self._alarms) < self._policy.least:
            return False
        rate, limit = sum(self._alarms) / len(self._alarms), self._policy.false_alarms
        # Half of the limit to come back: at the limit itself it would go up and down.
        change = rate <= limit / 2 if self.stepped_down else rate > limit
        if change:
            self.stepped_down = not self.stepped_down
            self.rate_at_last_step = rate
            self._alarms.clear()  # what led here says nothing about what comes now
        return change
