"""One worker's timeline, kept up to date as far as there is a budget for it.

A booking changes nothing ahead of it, so it is only added at the end. Whatever else happens makes a new timeline
necessary. Where the budget does not suffice for one, the old timeline goes on being told, and the new one is listed
further each time that somebody asks; so what is told rests on evidence that is a few decisions old, but not on guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from predictor.engines.vllm import Sequence
from predictor.run_forward import Budget, RunForward, whole_output
from predictor.timeline import Others, Timeline

# Of a budget, what the likeliest future may use before others are imagined.
_FIRST_SHARE = 0.5


@dataclass(slots=True)
class Sight:
    """A queue as it was at some moment, run forward. `begins_s` is when its first span begins."""

    begins_s: float
    run: RunForward
    others: Others | None
    kind: type[Timeline] = Timeline
    fresh: bool = True  # nothing has happened since that it does not know of

    def open_s(self, budget: Budget | None) -> float | None:
        """When somebody behind the queue is let in; None if the budget does not suffice to list that."""
        run = self.run
        return self.begins_s + run.spans[run.first_open].start_s if run.opens(budget) else None

    def timeline(self) -> Timeline:
        return self.kind(self.begins_s, self.run, self.others)

    def append(self, seq: Sequence) -> None:
        self.run.append(seq, whole_output(seq, seq.expected_output))
        if self.others is not None and not self.others.append(seq):
            self.others = None


class Outlook:
    """`look(begins_s)` sees the queue as it is now, and its first span begin then."""

    def __init__(self, look: Callable[[float], Sight]) -> None:
        self._look = look
        self._told: Sight | None = None  # listed up to where it lets somebody in
        self._coming: Sight | None = None  # newer, and not yet

    def changed(self) -> None:
        """Something has happened that may change every step to come."""
        for sight in (self._told, self._coming):
            if sight is not None and sight.fresh:
                sight.fresh = False
                if sight.others is not None:
                    sight.others.close()

    def forget(self) -> None:
        """Nothing of what was seen holds any more."""
        self._told = self._coming = None

    def booked(self, seq: Sequence) -> None:
        for sight in (self._told, self._coming):
            if sight is not None:
                sight.append(seq)

    @property
    def fresh(self) -> bool:
        return self._told is not None and self._told.fresh

    @property
    def opens_s(self) -> float:
        """When the timeline that is told lets somebody in at the earliest; without one, who knows."""
        told = self._told
        if told is None:
            return float("-inf")
        return told.begins_s + _opens_after_s(told.run)

    def surely_opens_s(self, begins_s: float, saved_a_step_s: float) -> float | None:
        """When somebody is let in at the earliest, whatever he needs, if the next step begins at `begins_s`; where that
        hangs on who ends when, in the middle one of all futures. Where it may turn out to, ends that come early save at
        most so much a step.

        None where that is not sure: the timeline is not up to date, or there are futures that were not imagined yet.
        """
        told = self._told
        if told is None or not told.fresh:
            return None
        told.begins_s = begins_s
        run, others = told.run, told.others
        if others is None or not run.gated:
            after_s = _opens_after_s(run)
            if others is not None and saved_a_step_s:
                after_s -= saved_a_step_s * after_s / run.mean_step_s
            return begins_s + after_s
        futures = others.all
        if futures is None:
            return None
        after = sorted(map(_opens_after_s, (run, *futures)))
        return begins_s + after[len(after) // 2]

    def standing(self, begins_s: float, budget: Budget | None) -> Timeline | None:
        """The timeline as it is, if it lets nobody in before `begins_s`, when the next step begins. The budget is for
        what was booked since."""
        told = self._told
        if told is None:
            return None
        if told.fresh:
            told.begins_s = begins_s
            return told.timeline()
        open_s = told.open_s(budget)
        return told.timeline() if open_s is not None and open_s > begins_s else None

    def renewed(self, begins_s: float, budget: Budget | None) -> Timeline:
        """The timeline as of now; if the budget does not suffice, one that is as new as it gets."""
        if self.fresh:
            return self._standing_fresh(begins_s)
        while True:
            coming = self._coming
            if coming is None or self._better_anew(coming, budget):
                coming = self._coming = self._look(begins_s)
                if budget is not None:
                    budget.left -= coming.run.work
            if not self._opens(coming, budget):
                break
            self._told, self._coming = coming, None
            if coming.fresh:
                return self._standing_fresh(begins_s)
            timeline = self.standing(begins_s, budget)
            if timeline is not None:
                return timeline
        timeline = self.standing(begins_s, budget.glance() if budget is not None else None)
        if timeline is not None:
            return timeline
        if coming.fresh:
            coming.begins_s = begins_s
        else:
            coming.begins_s = max(coming.begins_s, begins_s - coming.run.clock_s)
        return coming.timeline()

    def _standing_fresh(self, begins_s: float) -> Timeline:
        timeline = self.standing(begins_s, None)
        assert timeline is not None
        return timeline

    @staticmethod
    def _opens(coming: Sight, budget: Budget | None) -> bool:
        """Lists it up to where it lets somebody in. Where that hangs on who ends when, something is left of the budget
        for other futures."""
        if budget is None or coming.others is None:
            return coming.run.opens(budget)
        part = budget.part(_FIRST_SHARE)
        opens = coming.run.opens(part)
        budget.take(part)
        return opens or (not coming.run.gated and coming.run.opens(budget))

    @staticmethod
    def _better_anew(coming: Sight, budget: Budget | None) -> bool:
        """Something has happened since it was begun, and what is listed of it is listed again in no time."""
        return not coming.fresh and (budget is None or coming.run.work < budget.left // 2)


def _opens_after_s(run: RunForward) -> float:
    """From its beginning to where it lets somebody in, as far as is listed."""
    return run.spans[run.first_open].start_s if run.first_open < len(run.spans) else run.clock_s
