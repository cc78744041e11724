"""What an engine announces of the steps that are under way, who was in them first of all.

A batch of events names the newcomers of one step, and the first tokens that come with the same step's end take a way
of their own: who is first differs by milliseconds. So the step is composed again by who is named, and a first token
that is quicker than the batch is held until it has come.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ReadOnly

from predictor.block_owners import Owner
from predictor.course import Course, UnderWay
from predictor.engines.vllm import Sequence, undo
from predictor.stored_run import StoredRun
from predictor.told_step import compose_of, recompose

# Blocks that come later than this after the first tokens of their step will not come.
_EARLY_S = 0.05


class Announcements:
    """Counts are since the start."""

    def __init__(self, course: Course) -> None:
        self.recomposed = 0  # steps that had other newcomers than they were composed with
        self.held = 0  # first tokens that were quicker than what says who was in their step
        self._course = course
        self._early: list[tuple[str, float]] = []  # of the step under way, and when they came
        self._heard_s = 0.0  # when a batch came last

    # Batches

    def read(self, runs: ReadOnly[StoredRun], owners: ReadOnly[Owner]) -> list[Owner]:
        """Whose the runs are: the step under way had other newcomers than it was composed with, if others' blocks are
        announced with it."""
        told, course = list(owners), self._course
        item = self._to_be_announced() if course.sees_blocks else None
        if item is None:
            return told
        prefilled = {id(seq) for seq, _, _ in item.step.chunks}
        named = [seq for seq, _ in told if seq is not None and id(seq) in prefilled]
        unknown = [run for run, (seq, _) in zip(runs, told, strict=True) if seq is None]
        others = course.owners.begun(course.queue, item.step, unknown)
        if not named and not others and not self._ends_oldest(item, told):
            return told
        for one in course.under_way:
            one.announced = True
        if not self._recompose(item, named, others):
            return told
        return [
            (known, tokens) if known is not None else course.whose(run)
            for run, (known, tokens) in zip(runs, told, strict=True)
        ]

    def _to_be_announced(self) -> UnderWay | None:
        """Whose newcomers the next batch names: the newest step's. With the first one after idleness leave both."""
        under_way = self._course.under_way
        if not under_way:
            return None
        oldest, newest = under_way[0], under_way[-1]
        if not oldest.announced and oldest.step.admitted and not newest.step.chunks:
            return oldest
        return None if newest.announced else newest

    def _ends_oldest(self, newest: UnderWay, told: ReadOnly[Owner]) -> bool:
        """Asynchronous: with the oldest step's end leaves what the newest has registered, if anything."""
        course = self._course
        if len(course.under_way) < 2 or newest is not course.under_way[-1]:
            return False
        return any(seq is not None and tokens > course.announced(seq) for seq, tokens in told)

    def _recompose(self, item: UnderWay, named: list[Sequence], begins: list[tuple[Sequence, int]]) -> bool:
        """False if that is how it was."""
        course, queue, settings = self._course, self._course.queue, self._course.settings
        later = course.under_way[-1] if course.under_way[-1] is not item else None
        if later is not None:
            if later.step.preempted:
                return False
            undo(queue, later.step)
        step = recompose(queue, settings, item.step, named, begins)
        found = step is not item.step
        self.recomposed += step.chunks != item.step.chunks
        item.step = step
        if later is not None:
            later.step = compose_of(queue, settings, frozenset())
        for one in (item, later) if later is not None else (item,):
            one.seconds = course.step_s(one.step)
        if found:
            course.kept_out = None
            course.changed()
        return found

    # First tokens

    def heard(self, now_s: float) -> Iterator[tuple[str, float]]:
        """A batch has come: first tokens that were held for it, and when they came."""
        self._heard_s = now_s
        return self.release()

    def hold(self, seq_id: str, now_s: float) -> bool:
        """Keeps a first token if a batch is still to come that says who was in the step under way."""
        course = self._course
        item = self._to_be_announced()
        if item is None or self._heard_s > course.began_s:
            return False
        if not (item.step.admitted or course.queue.waiting) or not course.stores(item.step):
            return False
        self._early.append((seq_id, now_s))
        self.held += 1
        return True

    def overdue(self, now_s: float) -> bool:
        """Whether first tokens are held for a batch that does not come any more."""
        return bool(self._early) and now_s - self._early[0][1] > _EARLY_S

    def release(self) -> Iterator[tuple[str, float]]:
        early, self._early = self._early, []
        return iter(early)
