"""What the steps to come of one worker mean for a newcomer.

A worker's queue is run forward with an endless prompt imagined behind it (`RunForward`). Requests behind do not change
those ahead (first come, first served), so one timeline holds for every newcomer until something changes: it is priced
by a search and a closed form, not by a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil

import msgspec

from predictor.engines.vllm import Sequence, Settings
from predictor.prefill_cost import StepCost
from predictor.run_forward import ENDLESS, Budget, RunForward, Span

# So many spans of a future tell its pace.
_ENOUGH_OF_A_FUTURE = 200
# Of a shorter wait it says nothing that one future is somewhat slower than another.
_SOME_WAIT_S = 0.1


class Course(msgspec.Struct, frozen=True, gc=False):
    """How a newcomer goes through. Times are absolute, without what its own tokens cost."""

    admitted_s: float
    last_s: float  # when its last step begins
    finish_s: float
    last_tokens: int  # what it computes in its last step
    spare_before: int  # tokens that requests behind it can get in its earlier steps
    spare_last: int  # and in its last
    shared_steps: int = 0  # steps that it is in beside others, the first of them
    alone_tokens: int = 0  # what it computes when they are gone

    def stretched(self, since_s: float, ratio: float) -> Course:
        """The same, if everything took so many times as long from then on."""
        return msgspec.structs.replace(
            self,
            admitted_s=since_s + (self.admitted_s - since_s) * ratio,
            last_s=since_s + (self.last_s - since_s) * ratio,
            finish_s=since_s + (self.finish_s - since_s) * ratio,
        )


class Timeline:
    """When what is queued lets a newcomer in, and when it would be done. Times are absolute seconds.

    `begins_s` is when the step after those under way begins; the timeline moves as a whole with a step that is overdue.
    A `budget` bounds the spans that a question may have listed: beyond it the queue is taken to go on at the pace that
    it has had, and the budget's `cut` counts that. The next question goes on from there.
    """

    __slots__ = ("_ahead", "_others", "begins_s", "spans")

    def __init__(self, begins_s: float, ahead: RunForward, others: Others | None = None) -> None:
        self.begins_s = begins_s
        self._others = others
        self.spans: list[Span] = ahead.spans
        self._ahead = ahead

    @property
    def gated(self) -> bool:
        """Whether somebody was seen to wait for KV space or for a slot: then everything hangs on who ends when."""
        return self._ahead.gated

    @property
    def settled(self) -> bool:
        """Whether no futures are wanted beside this one, or some are known."""
        return self._others is None or not self.gated or self._others.known

    def admitted_s(self, blocks: int = 0, budget: Budget | None = None) -> float:
        """When a newcomer's first tokens would be scheduled."""
        place = self._entry(blocks, budget)
        return self._beyond(1, blocks).admitted_s if place is None else self.begins_s + self.spans[place].start_s

    def steps_until(self, at_s: float) -> float:
        """About how many steps there are from its beginning until then."""
        return max(0.0, at_s - self.begins_s) / self._ahead.mean_step_s

    def finish_s(self, tokens: int, blocks: int = 0, budget: Budget | None = None) -> float:
        """When `tokens` of a newcomer would be prefilled, without what computing them costs."""
        return self.course(tokens, blocks, budget).finish_s

    def likely_course(self, tokens: int, blocks: int = 0, budget: Budget | None = None) -> Course:
        """As `course`, and where somebody waits for another's end, the median of several imagined futures.

        Only so many futures are looked at as there is a budget for.
        """
        if self._others is None or not self.gated:
            if self._others is not None:
                self._others.pace.forget()
            return self.course(tokens, blocks, budget)
        # Beyond what is listed of it, the first goes on at its pace: the budget is for the others.
        is_listed = self._ahead.first_open < len(self.spans)
        course = self.course(tokens, blocks, budget if is_listed or budget is None else Budget(0))
        if budget is not None and not is_listed:
            budget.cut += 1
        pace, first_s = self._others.pace, course.finish_s - self.begins_s
        courses = {0: course}
        for number, ahead, own in self._others.futures(self._work_of_a_future, budget):
            courses[number] = other = type(self)(self.begins_s, ahead).course(tokens, blocks, own)
            if first_s > _SOME_WAIT_S:
                pace.ratios[number] = (other.finish_s - self.begins_s) / first_s
        for number, ratio in pace.ratios.items():
            if number not in courses:
                courses[number] = course.stretched(self.begins_s, ratio)
        in_order = sorted(courses.values(), key=lambda other: other.finish_s)
        return in_order[len(in_order) // 2]

    @property
    def _work_of_a_future(self) -> int:
        """Spans that must be listed of another future before it says anything."""
        return min(len(self.spans), _ENOUGH_OF_A_FUTURE)

    def course(self, tokens: int, blocks: int = 0, budget: Budget | None = None) -> Course:
        """How a newcomer with so many tokens to compute would go through, without what computing them costs.

        `blocks` is the KV space that must be free before it is admitted.
        """
        place = self._entry(blocks, budget, tokens)
        if place is None:
            return self._beyond(tokens, blocks)
        spans, ahead = self.spans, self._ahead
        span = spans[place]
        admitted_s = self.begins_s + span.start_s
        wanted = span.room_before + max(1, tokens)
        spare = shared_steps = 0
        while span.steps != ENDLESS and span.room_before + span.room * span.steps < wanted:
            spare += span.spare * span.steps
            shared_steps += span.steps
            place += 1
            while place >= len(spans):
                if not ahead.spend(budget):
                    if budget is not None:
                        budget.cut += 1
                    return self._from_here(admitted_s, wanted - span.room_before - span.room * span.steps, 0.0, spare)
            span = spans[place]
        room = max(1, span.room)
        steps = max(1, ceil((wanted - span.room_before) / room))
        spare += span.spare * (steps - 1)
        left = max(0, span.room_before + steps * room - wanted)
        return Course(
            admitted_s,
            self.begins_s + span.after_s(steps - 1),
            self.begins_s + span.after_s(steps),
            room - left,
            spare,
            left + span.spare,
            shared_steps + (0 if span.steps == ENDLESS else steps),
            wanted - span.room_before if span.steps == ENDLESS else 0,
        )

    def _entry(self, blocks: int, budget: Budget | None, tokens: int = 1) -> int | None:
        """The place of the span in whose first step a newcomer of so many blocks is admitted; None if the budget does
        not reach so far. Where prompts are not cut its tokens must fit as well."""
        ahead, spans = self._ahead, self.spans
        room = 0 if ahead.cuts_prompts else tokens
        place = ahead.first_open
        while True:
            while place >= len(spans):
                if not ahead.spend(budget):
                    if budget is not None:
                        budget.cut += 1
                    return None
            span = spans[place]
            if (span.is_open and span.free_blocks >= blocks and span.room >= room) or span.steps == ENDLESS:
                return place
            place += 1

    def _beyond(self, tokens: int, blocks: int) -> Course:
        """For who is let in where no span is listed any more."""
        rest_s = self._ahead.rest_s(blocks)
        return self._from_here(self.begins_s + self._ahead.clock_s + rest_s, max(1, tokens), rest_s, 0)

    def _from_here(self, admitted_s: float, tokens: int, rest_s: float, spare: int) -> Course:
        """So many tokens are left for steps that are as at the end of what is listed."""
        step_s, room = self._ahead.last_step_s()
        steps = ceil(tokens / room)
        begins_s = self.begins_s + self._ahead.clock_s + rest_s
        last_tokens = tokens - (steps - 1) * room
        last_s = begins_s + (steps - 1) * step_s
        return Course(admitted_s, last_s, last_s + step_s, last_tokens, spare, room - last_tokens)


@dataclass(slots=True)
class Pace:
    """What each of several futures last said of a wait, as a multiple of what the first said.

    The lengths that a future rests on stay the same until their requests end, so a future that is slow stays slow for a
    while: not each has to be listed again for each decision.
    """

    ratios: dict[int, float] = field(default_factory=dict)
    turn: int = 0  # that of which one comes first next time

    def forget(self) -> None:
        self.ratios.clear()


class Others:
    """Futures beside the first, with other lengths of what is being generated; imagined when somebody asks.

    `imagine(number)` gives the future of this number, from 1 to `count`; `length(seq, number)` the output of one that
    is booked later, or None if there is none for it. `pace` outlives them.
    """

    __slots__ = ("_count", "_imagine", "_is_closed", "_known", "_length", "pace")

    def __init__(
        self,
        count: int,
        imagine: Callable[[int], RunForward],
        length: Callable[[Sequence, int], int | None],
        pace: Pace | None = None,
    ) -> None:
        self._count = count
        self._imagine = imagine
        self._length = length
        self._known: dict[int, RunForward] = {}
        self._is_closed = False
        self.pace = Pace() if pace is None else pace

    @property
    def known(self) -> bool:
        """Whether there are some, or there can be none any more."""
        return bool(self._known) or self._is_closed or self._count < 2

    @property
    def all(self) -> tuple[RunForward, ...] | None:
        """Every one of them; None while some are not imagined yet."""
        return tuple(self._known.values()) if len(self._known) >= self._count else None

    def futures(self, work: int, budget: Budget | None) -> Iterator[tuple[int, RunForward, Budget | None]]:
        """Some of them by number, each with its part of the budget: those known, and as many as can be listed if so
        many spans of one are enough. They take turns."""
        numbers = list(self._known)
        if not self._is_closed:
            turns = (1 + (self.pace.turn + place) % self._count for place in range(self._count))
            new = [number for number in turns if number not in self._known]
            if budget is not None:
                del new[max(0, budget.left) // max(1, work) :]
            if new:
                self.pace.turn = new[-1]
            numbers += new
        for place, number in enumerate(numbers):
            own = None if budget is None else budget.part(1 / (len(numbers) - place))
            ahead = self._known.get(number)
            if ahead is None:
                ahead = self._known[number] = self._imagine(number)
                if own is not None:
                    own.left -= ahead.work
            yield number, ahead, own
            if budget is not None and own is not None:
                budget.left -= own.used

    def close(self) -> None:
        """The queue is not what it was any more: no others are imagined."""
        self._is_closed = True

    def append(self, seq: Sequence) -> bool:
        """One more comes to wait behind all others; False if nothing is known of it that could be imagined."""
        for number, ahead in self._known.items():
            end = self._length(seq, number)
            if end is None:
                return False
            ahead.append(seq, end)
        return len(seq.draws) > self._count


@dataclass(frozen=True, slots=True)
class Guess:
    """In place of a timeline that has not been computed: the least that what is queued can take, its tokens alone."""

    begins_s: float
    tokens_ahead: int
    settings: Settings
    cost: StepCost

    @property
    def gated(self) -> bool:
        """As `Timeline.gated`."""
        return False

    @property
    def settled(self) -> bool:
        """As `Timeline.settled`."""
        return False

    def admitted_s(self, blocks: int = 0, budget: Budget | None = None) -> float:
        """As `Timeline.admitted_s`."""
        return self.likely_course(1, blocks, budget).admitted_s

    def steps_until(self, at_s: float) -> float:
        """As `Timeline.steps_until`."""
        full_s = self.cost.step_s(0, 0, 0) + self.cost.per_token_s * self.settings.max_num_batched_tokens
        return max(0.0, at_s - self.begins_s) / full_s

    def likely_course(self, tokens: int, blocks: int = 0, budget: Budget | None = None) -> Course:
        """As `Timeline.likely_course`."""
        del blocks, budget
        room, step_s = self.settings.max_num_batched_tokens, self.cost.step_s(0, 0, 0)
        full, rest = divmod(self.tokens_ahead, room)
        admitted_s = self.begins_s + self.cost.per_token_s * self.tokens_ahead + full * step_s
        steps = ceil((rest + max(1, tokens)) / room)
        last_s = admitted_s + (steps - 1) * step_s
        return Course(admitted_s, last_s, last_s + step_s, min(max(1, tokens), room), 0, 0)
