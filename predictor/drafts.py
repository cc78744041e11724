"""Speculative decoding as an engine's own counters tell it: what a decode gets of a step, and what it takes of it."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.engines.vllm import NO_DRAFTS, Drafting

# Of what was counted, this part still counts after so many steps of single sequences: a mix of requests changes within
# minutes, and a few hundred steps tell a rate to a percent or two.
_FORGOTTEN_AFTER = 20_000.0
_ENOUGH_STEPS = 50.0
# Smaller changes are not worth a new look at every queue.
_SAME_RATIO = 0.02
# No drafter is so far ahead.
_MOST = 64.0


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """An engine's counters since it started, in tokens."""

    generated: float
    drafted: float
    accepted: float


class Drafts:
    """What the counters said last, and what they have said of late.

    Each sequence that a step decodes gives one token, and the accepted ones besides: so there were as many of those as
    tokens that were not drafted, whatever the method, and whether or not anything was drafted in a step.
    """

    def __init__(self) -> None:
        self.drafting: Drafting = NO_DRAFTS
        self._last: DraftCounts | None = None
        self._steps = self._accepted = self._drafted = 0.0

    def count(self, counts: DraftCounts) -> bool:
        """Whether `drafting` is another one now. Counters that fall back are another engine's."""
        last, self._last = self._last, counts
        more = None if last is None else _difference(counts, last)
        if more is None:
            self._steps = self._accepted = self._drafted = 0.0
            more = counts
        steps = more.generated - more.accepted
        if steps <= 0:
            return False
        kept = _FORGOTTEN_AFTER / (_FORGOTTEN_AFTER + steps)
        self._steps = self._steps * kept + steps
        self._accepted = self._accepted * kept + more.accepted
        self._drafted = self._drafted * kept + more.drafted
        if self._steps < _ENOUGH_STEPS:
            return False
        gain, drafted = 1.0 + self._accepted / self._steps, self._drafted / self._steps
        known = self.drafting
        if drafted < _SAME_RATIO:
            self.drafting = NO_DRAFTS
            return known.gains
        if abs(gain - known.gain) <= _SAME_RATIO * known.gain and abs(drafted - known.drafted) <= _SAME_RATIO:
            return False
        self.drafting = Drafting(min(gain, _MOST), min(drafted, _MOST))
        return True


def _difference(now: DraftCounts, before: DraftCounts) -> DraftCounts | None:
    more = DraftCounts(now.generated - before.generated, now.drafted - before.drafted, now.accepted - before.accepted)
    return more if min(more.generated, more.drafted, more.accepted) >= 0 else None
