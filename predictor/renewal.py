"""Which timelines a decision brings up to date, and how much work it may spend on them.

Everybody is priced on the timeline that stands, however old it is, or by what lies before him as long as there is none.
Then whoever seems best is looked at again as of now, until the best is up to date. What may be spent beside that on
others is an allowance per second, so that a busy fleet costs no more than a bounded part of a core.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace

from predictor.run_forward import Budget

# Spans a decision may list: some 7 us each, on a busy machine three times that. Among nine candidates it is half what
# it is for one, since each of them is priced as well, and so on.
_SPANS, _HALF_AMONG, _LEAST_SPANS = 1000, 8, 100
_SPANS_A_SECOND = 15_000
# The best leaves half of the budget to the next best, but has at least so much.
_LEAST_SHARE = 64


class Renewal:
    """One pool's allowance, and what its decisions did. Counts are of forecasts."""

    def __init__(self) -> None:
        self._allowed = float(_SPANS)
        self._allowed_at_s = float("-inf")
        self._turns = 0
        self.spent = 0  # spans listed so far
        self.cut = 0  # the budget ended before the spans that a forecast asked for
        self.stale = 0  # of requests that were placed by a timeline that was not up to date

    def budget(self, candidates: int, now_s: float) -> Budget:
        """For one decision."""
        since_s = max(0.0, now_s - self._allowed_at_s)
        self._allowed = min(float(_SPANS), self._allowed + since_s * _SPANS_A_SECOND)
        self._allowed_at_s = max(self._allowed_at_s, now_s)
        return Budget(max(_LEAST_SPANS, _SPANS * _HALF_AMONG // (_HALF_AMONG + candidates - 1)))

    def turn(self, candidates: int) -> int:
        """The place of the one whose turn it is: everybody is looked at now and then, however bad he seems."""
        self._turns += 1
        return self._turns % candidates

    def placed(self, fresh: bool) -> None:
        """A request has been placed by a timeline that was up to date, or was not."""
        self.stale += not fresh

    def bring_up(
        self, costs_s: list[float], old: list[int], turn: int, renew: Callable[[int, Budget], float], budget: Budget
    ) -> None:
        """Renews the timelines of those in `old` (places in `costs_s`): first that whose `turn` it is, then best first.

        `renew` does so within a budget, and returns what the candidate costs now.
        """
        before, found = budget.left, False
        unsure = set(old)

        def renewed(place: int, share: int) -> float:
            unsure.discard(place)
            own = Budget(min(share, budget.left))
            cost_s = renew(place, own)
            budget.take(own)
            return cost_s

        if turn in unsure and len(old) > 1 and self._allowed > _LEAST_SHARE:
            costs_s[turn] = renewed(turn, _LEAST_SHARE)
        race = [(cost_s, place) for place, cost_s in enumerate(costs_s)]
        heapify(race)
        while unsure and budget.left > 0:
            _, place = race[0]
            if place not in unsure:
                # The best is up to date. Others are as far as that is allowed.
                found = True
                heappop(race)
                continue
            if found and before - budget.left >= self._allowed:
                break
            share = budget.left if len(unsure) == 1 else max(_LEAST_SHARE, budget.left // 2)
            heapreplace(race, (renewed(place, share), place))
        used = before - budget.left
        self.spent += used
        self.cut += budget.cut
        self._allowed = max(0.0, self._allowed - used)
