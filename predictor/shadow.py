"""One worker's scheduler as seen from outside.

What was booked enters its queue, steps pass, and evidence corrects it: stored KV blocks name the prefill chunk that a
step has computed, a first token says that a prefill is done, an end how many tokens were generated. Every piece of
evidence shows that a step has just ended, and which: so steps are counted, not timed, wherever they leave a sign. A
step that must leave a sign has not ended before the sign is seen; one that leaves none passes at its predicted cost.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from predictor.announcements import Announcements
from predictor.block_owners import Owner
from predictor.course import MAX_STEPS_BEHIND, Allowance, Course, State, completes
from predictor.engines.sglang import first_ratio
from predictor.engines.vllm import Drafting, Queue, Sequence, Settings, Step, enqueue
from predictor.outlook import Outlook, Sight
from predictor.output_lengths import Lengths
from predictor.prefill_cost import StepCost
from predictor.prefill_first import PrefillFirst, PrefillFirstTimeline
from predictor.prompt import BlockHashes
from predictor.run_forward import Budget, RunForward, whole_output
from predictor.step_interval import StepInterval
from predictor.step_sample import StepSample
from predictor.stored_run import StoredRun
from predictor.strangers import Strangers
from predictor.timeline import Guess, Others, Pace, Timeline
from predictor.unbooked import Unbooked

# Shorter outputs say little about what a decode step takes.
_MIN_OUTPUT_TOKENS = 8
_RUNS: dict[str, tuple[Callable[..., Any], type[Timeline]]] = {
    "vllm": (RunForward, Timeline),
    "sglang": (PrefillFirst, PrefillFirstTimeline),
    "tensorrt_llm": (RunForward, Timeline),
}
# A timeline without those whom a newcomer overtakes is listed for a first price where so many are before it.
_GLANCED_AT = 100


@dataclass(frozen=True, slots=True)
class Corrections:
    """What was found to be otherwise than the rule had it, since the start. Counts."""

    forced: int  # a token came from somebody whom the rule would not have let in by then
    recomposed: int  # a step had others in it than it was composed with
    tokens_held: int  # a first token was quicker than the events that say who was in its step


class Shadow:
    """Times are absolute seconds of the caller's clock.

    `on_sample` is told each interval between two step ends that were seen. `cached_blocks` tells how many of a run of
    blocks, by their hashes, the worker's cache is known to hold at this moment, from the first on. `lengths` is what
    is known of the pool's output lengths at a time, `prompt_of` how long prompts are that are longer than so many
    tokens: what a share of them does not go beyond. `allowance` is shared with the pool's other workers.
    """

    def __init__(
        self,
        settings: Settings,
        cost: StepCost,
        on_sample: Callable[[StepSample], None] | None = None,
        cached_blocks: Callable[[BlockHashes], int] | None = None,
        lengths: Callable[[float], Lengths] | None = None,
        prompt_of: Callable[[int, float], int] | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self._outlook = Outlook(self._look)
        self._course = Course(settings, cost, Unbooked(prompt_of), self._outlook, cached_blocks, on_sample)
        # The same objects, at hand.
        self._queue = self._course.queue
        self._sequences = self._course.sequences
        self._under_way = self._course.under_way
        self._strangers = Strangers(self._course, lengths)
        self._announcements = Announcements(self._course)
        self._on_sample = on_sample
        self._lengths = lengths
        self._booked_s = 0.0
        self._looked_s = 0.0
        self._pace = Pace()
        self.forced = 0  # times that evidence contradicted the rule
        self.cut = 0  # instants at which more had passed than may be followed at one
        self.behind = False  # at the last one
        self._cut_at_s: float | None = None
        self._allowance = Allowance() if allowance is None else allowance

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def prefilling(self) -> int:
        """Sequences whose prefill is waiting or under way."""
        return self._course.load.prefilling + self._course.given_up

    @property
    def decoding(self) -> int:
        return self._course.load.decoding

    def prefill_tokens_ahead(self) -> int:
        """Tokens that a newcomer would find still to be prefilled before it."""
        return self._course.load.prefill_tokens

    def generated(self) -> list[tuple[str, int]]:
        """How much each sequence that decodes has generated so far, in tokens."""
        return [(seq.id, seq.generated) for seq in self._queue.running if seq.booked and not seq.prefilling]

    @property
    def unbooked(self) -> int:
        """Sequences that did not come through us."""
        return len(self._strangers)

    @property
    def sees_decodes(self) -> bool:
        """Whether what is generated is seen as it comes, and not only counted by how long a step should take."""
        return self._course.sees_blocks

    @property
    def free_blocks(self) -> int | None:
        """KV space that nobody holds; None where it is never short."""
        return self._queue.free_blocks

    def blocks_of(self, seq_id: str) -> int:
        """KV blocks that count for this one."""
        seq = self._sequences.get(seq_id)
        return seq.blocks if seq is not None else 0

    @property
    def corrections(self) -> Corrections:
        told = self._announcements
        return Corrections(self.forced, self._strangers.recomposed + told.recomposed, told.held)

    def state(self, now_s: float) -> State:
        self.advance(now_s)
        return self._course.state(now_s)

    def set_cost(self, cost: StepCost) -> None:
        if cost != self._course.cost:
            self._course.cost = cost
            self._outlook.changed()

    @property
    def drafting(self) -> Drafting:
        return self._queue.drafting

    def set_drafting(self, drafting: Drafting) -> None:
        """What is drafted and accepted for each that decodes.

        Where several tokens are, what decodes store tells that a step has ended, but not how many there were.
        """
        self._queue.drafting = drafting
        self.set_sees_blocks(self._course.sees_blocks, self._strangers.are_seen)
        self._outlook.forget()

    def set_settings(self, settings: Settings) -> None:
        self._course.set_settings(settings)
        self.set_sees_blocks(self._course.sees_blocks, self._strangers.are_seen)
        self._outlook.forget()

    def set_sees_blocks(self, sees: bool, computed: bool = True) -> None:
        """Whether each step that stores a block is known to be announced, so that the shadow can wait for it.

        `computed`: whatever the engine stores it has computed, and not loaded.
        """
        course = self._course
        # SGLang announces a chunk with the batch after it, and what is decoded at its end.
        course.sees_blocks = sees and course.settings.family == "vllm"
        # Asynchronous: blocks are announced a step early, and which step a stranger was in cannot be told yet.
        counts_steps = not course.settings.async_scheduling and not self._queue.drafting.gains
        self._strangers.are_seen = course.sees_blocks and computed and counts_steps
        if not self._strangers.are_seen:
            self._strangers.drop_all()

    # What happens

    def book(self, seq: Sequence, now_s: float) -> None:
        self.advance(now_s)
        course, settings = self._course, self._course.settings
        if not self._sequences:
            self._queue.reserve_ratio = first_ratio(settings)
        if seq.computed and self.crowded:
            seq.shared_blocks = seq.computed // settings.block_size  # what will be left is what somebody holds
        course.arrives(seq)
        is_last = enqueue(self._queue, settings, seq)
        course.space.add(seq, seq.computed // settings.block_size)
        self._booked_s = now_s
        if course.interval is not None and not course.sees_blocks and settings.family == "vllm":
            # Nobody sees which step it gets into. (SGLang's batches end with the first tokens of all that they hold.)
            course.interval.guessed = True
        # Who comes while this one is on its way is on its way as long, and finds the step begun.
        lead_s = course.cost.overhead_s(seq.prompt_tokens)
        if course.wake(now_s + lead_s):
            course.lead_s = lead_s
            course.interval = StepInterval(now_s, arrival_tokens=seq.prompt_tokens)
        if is_last:
            self._outlook.booked(seq)
        if not is_last or settings.shares_steps:
            self._outlook.changed()  # for those that it has overtaken, or takes a share from
        course.counts_changed()

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Takes in one that has had its first token, and got here by another way than ours."""
        self.advance(now_s)
        course = self._course
        seq.computed, seq.generated = seq.prompt_tokens, 1
        course.space.fit(seq)
        self._queue.running.append(seq)
        self._sequences[seq.id] = seq
        course.space.add(seq)
        course.wake(now_s)
        course.changed()

    def stored(self, runs: list[StoredRun], now_s: float) -> None:
        """The engine has announced what a step stored: so a step has just ended."""
        self.advance(now_s)
        course = self._course
        if course.takes_turns:
            return
        # All are named before any step is let end: they tell of one step, and the next is composed otherwise.
        owners = [course.whose(run) for run in runs]
        with_strangers = self._strangers.read(runs, owners, now_s) if self._strangers.are_seen and runs else None
        told = self._announcements.read(runs, owners) if with_strangers is None else with_strangers
        if course.unbooked.seen_lately(now_s):
            course.told = _prefilled(runs, told, course.settings.block_size)
        self._find_missed(told, now_s)
        for seq, tokens in told:
            if seq is not None:
                self._stretch(seq, tokens)
        for run, (known, at_least) in zip(runs, told, strict=True):
            seq, tokens = (known, at_least) if known is not None else course.whose(run)
            if seq is not None:
                self._got_to(seq, tokens, now_s)
        self._take_tokens(self._announcements.heard(now_s))

    def count_unbooked(self, count: int, now_s: float) -> None:
        """The engine says that so many are in progress that we did not send."""
        self.advance(now_s)
        if self._strangers.are_seen:
            self._strangers.count(count, now_s)

    def goes_on(self, run: StoredRun) -> bool:
        """Whether these are a prompt's next blocks, after those that a step before has stored of it."""
        return self._course.owners.goes_on(run)

    def first_token(self, seq_id: str, now_s: float) -> None:
        """Its prefill is done, and the step that finished it has just ended."""
        self.advance(now_s)
        if not self._announcements.hold(seq_id, now_s):
            self._first_token(seq_id, now_s)

    def finish(self, seq_id: str, now_s: float, output_tokens: int | None = None, evicts: bool = False) -> None:
        """It left the engine, however it ended, after so many tokens if that is known.

        A prefill that is given up goes on to the end of its step; all other ends are ends of steps. `evicts`: what is
        pushed out of the cache is computed anew, and not fetched from elsewhere.
        """
        self.advance(now_s)
        self._take_tokens(self._announcements.release())
        course = self._course
        seq = self._sequences.get(seq_id)
        if seq is None:
            return
        if course.takes_turns:
            self._learn_from_output(seq, output_tokens, now_s)
        elif output_tokens is not None and course.emitted(seq):
            self._ends_after(seq, output_tokens, now_s)
        course.unbooked.departs(seq, course.owners.tail(seq))
        course.remove(seq)
        if evicts:
            course.space.lower_credits(seq)
        course.kept_out = None
        course.changed()
        oldest = self._under_way[0].step if self._under_way else None
        if oldest is not None and seq.watched and any(seq is other for other, _, _ in oldest.chunks):
            course.gives_up(oldest)
        course.rest()

    def settle(self, now_s: float | None = None) -> None:
        """The step that comes next is composed from what is known so far: newer news of the cache are not for it."""
        if now_s is not None:
            self.advance(now_s)
        elif self._course.composes_s is not None:
            self._course.compose()
        self._course.kept_out = None

    def advance(self, now_s: float) -> None:
        """Lets steps pass that have ended by `now_s` and leave no sign, as far as is allowed."""
        course = self._course
        self.behind = False
        if self._announcements.overdue(now_s):
            self._take_tokens(self._announcements.release())
        if course.is_closed(now_s):
            course.compose()
        while self._under_way and course.began_s + self._under_way[0].seconds <= now_s:
            if course.awaited():
                if not self._strangers.are_overdue(now_s):
                    break
                self._strangers.give_up()
            else:
                if not self._allowance.take(course.looked_at_a_step, now_s):
                    self.behind = True
                    self.cut += now_s != self._cut_at_s
                    self._cut_at_s = now_s
                    break
                course.pass_oldest(now_s)
            if course.is_closed(now_s):
                course.compose()
        if len(self._strangers):
            self._strangers.doubt(now_s)

    # What it says of what was counted

    def _find_missed(self, told: ReadOnly[Owner], now_s: float) -> None:
        """Decodes have got further than the step under way, which prefills, can explain.

        So there were more steps of decodes before it than were counted: whoever it prefills came to the engine later
        than he was booked.
        """
        course = self._course
        if len(self._under_way) == 2:
            self._find_missed_before(self._under_way[0].step, told)
            return
        step = self._under_way[0].step if self._under_way else None
        if step is None or step.preempted or not course.stores(step):
            return
        if any(seq is other for seq, _ in told for other, _, _ in step.chunks):
            self._find_missed_before(step, told)
            return
        missed = max((tokens - course.announced(seq) for seq, tokens in told if seq is not None), default=0)
        drafts = self._queue.drafting.gains
        if drafts and any(seq is not None for seq, _ in told):
            missed = 1
        if missed <= 0 or missed > MAX_STEPS_BEHIND:
            return
        course.take_back()
        decoding = [seq for seq in self._queue.running if seq.generated and not seq.prefilling]
        gained = self._queue.next_gain() if drafts else missed
        for seq in decoding:
            seq.generated += gained
            seq.computed += gained
        if course.interval is not None:
            course.interval.guessed = drafts
            course.interval.add_decodes(missed, len(decoding))
        course.seen(now_s)
        course.composes_s = now_s

    def _find_missed_before(self, step: Step, told: ReadOnly[Owner]) -> None:
        """The step under way has ended as well: it moves each decode by one, and no prefill explains more."""
        course = self._course
        if self._queue.drafting.gains:
            return
        decoding = {id(seq) for seq in step.decodes if seq.id in self._sequences}
        missed = {
            id(seq): tokens - course.announced(seq) - 1
            for seq, tokens in told
            if seq is not None and id(seq) in decoding
        }
        if not missed or not 0 < max(missed.values()) <= MAX_STEPS_BEHIND:
            return
        by_all = max(0, min(missed.values()))
        for seq in step.decodes:
            if id(seq) in decoding:
                course.move_decodes(seq, max(by_all, missed.get(id(seq), 0)))
        if course.interval is not None and course.interval.steps:
            # Else its beginning was seen, and they were before it.
            course.interval.add_decodes(by_all, len(decoding))
        course.changed()

    def _got_to(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """So many tokens of it are announced, and no more."""
        course = self._course
        if self._queue.drafting.gains and tokens > seq.prompt_tokens and seq.generated and not seq.prefilling:
            self._drafted_to(seq, tokens, now_s)
            return
        if seq.id in course.guessed_alike:
            self._strangers.all_alike(seq, tokens, now_s)
            return
        course.catch_up(lambda: course.announced(seq) >= tokens, now_s)
        if tokens <= seq.prompt_tokens or seq.prefilling:
            return
        # A decode stores its block when the block's last token is computed: so it has got there, and no further.
        ahead = course.announced(seq) - tokens
        if ahead > 0:
            course.rewind(seq, ahead)
        if course.interval is not None and course.interval.steps:
            course.interval.guessed = False
            # The step was let pass already, and now it is seen to have ended.
            course.seen(now_s)

    def _drafted_to(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """One that decodes has filled a block in the step that has just ended, which does not say how many steps that
        took: how many drafts are accepted is chance."""
        course = self._course
        item = self._under_way[0] if self._under_way else None
        is_told = course.interval is not None and course.interval.since_s >= now_s  # by others of the same batch
        if item is not None and not is_told and not item.step.chunks:
            if now_s - course.began_s > item.seconds / 2:
                course.end_step(now_s)
            # Else it was let pass already, and has ended only now.
            course.interval, course.began_s = StepInterval(now_s), now_s
            if course.composes_s is not None:
                course.composes_s = now_s
        ahead = course.announced(seq) - tokens
        if ahead < 0 or ahead > self._queue.drafting.width:
            course.move_decodes(seq, -ahead)
        course.changed()

    def _stretch(self, seq: Sequence, tokens: int) -> None:
        """Its chunk was a few tokens longer than composed: it is heard who has ended when the next step is under way,
        and a prompt has got what they would have taken of it."""
        item = self._under_way[0] if len(self._under_way) == 1 else None
        if item is None or tokens > seq.prompt_tokens:
            return
        step = item.step
        for place, (other, start, end) in enumerate(step.chunks):
            most = len(step.decodes) * self._queue.drafting.width
            if other is not seq or not 0 < tokens - end <= most or completes(seq, end):
                continue
            seq.computed += tokens - end
            if completes(seq, tokens):
                seq.generated = 1
            self._course.space.grow(seq)
            chunks = (*step.chunks[:place], (seq, start, tokens), *step.chunks[place + 1 :])
            item.step = msgspec.structs.replace(step, chunks=chunks)
            return

    def _take_tokens(self, tokens: Iterable[tuple[str, float]]) -> None:
        for seq_id, first_token_s in tokens:
            self._first_token(seq_id, first_token_s)

    def _first_token(self, seq_id: str, now_s: float) -> None:
        course = self._course
        seq = self._sequences.get(seq_id)
        if seq is None or seq_id in course.turns:
            return
        if not course.emitted(seq):
            course.catch_up(lambda: course.emitted(seq) > 0, now_s)
            if not course.emitted(seq):
                self._force(seq, now_s)
        if course.takes_turns:
            course.turns.begins(seq_id, now_s)

    def _force(self, seq: Sequence, now_s: float) -> None:
        """Whatever the rule said: its token is there, so its prefill is done."""
        self.forced += 1
        course = self._course
        course.interval = None
        if course.takes_turns:
            # It was prefilled while decoding was taken to go on; with mixed chunks it did.
            step = Step(((seq, min(seq.computed, seq.credited), seq.prompt_tokens),), (), 0)
            if not course.settings.enable_mixed_chunk:
                decode_s = course.cost.step_s(0, 0, course.turns.decoding)
                course.count_decodes(-int(course.step_s(step) / decode_s), {id(seq)})
            course.turns.passed(step)
        if any(seq is other for other in self._queue.waiting):
            self._queue.waiting = deque(other for other in self._queue.waiting if other is not seq)
            self._queue.running.append(seq)
        seq.generated = max(1, seq.generated)
        seq.computed = seq.prompt_tokens + seq.generated - 1
        course.space.grow(seq)
        self._under_way.clear()
        course.composes_s = now_s
        course.changed()

    def _ends_after(self, seq: Sequence, output_tokens: int, now_s: float) -> None:
        """So many tokens of it have left the engine, and it is over."""
        course, drafts = self._course, self._queue.drafting.gains
        if course.interval is not None and not drafts:
            course.interval.guessed = False
        ahead = course.emitted(seq) - output_tokens
        if drafts:
            course.move_decodes(seq, -ahead)
        elif ahead < 0:
            course.catch_up(lambda: course.emitted(seq) >= output_tokens, now_s, timed=False)
        elif ahead > 0:
            course.rewind(seq, ahead)
        # With asynchronous scheduling the one under way was composed before the end was known, whoever is in it.
        can_be_taken_back = len(self._under_way) == 1 and not course.settings.async_scheduling
        if can_be_taken_back and self._booked_s <= course.began_s and not self._under_way[0].step.preempted:
            step = self._under_way[0].step
            if any(seq is other for other in step.decodes) and course.emitted(seq) == output_tokens:
                # Its last token came with the step before: the one under way was composed without it.
                course.take_back()

    def _learn_from_output(self, seq: Sequence, output_tokens: int | None, now_s: float) -> None:
        """How many decode steps there were since its first token is known now, and of what else in the same time."""
        course = self._course
        if output_tokens is None or seq.id not in course.turns or not course.emitted(seq):
            return
        self._step_ended(seq, output_tokens, now_s)
        ahead = course.emitted(seq) - output_tokens
        sample = course.turns.learn(seq.id, output_tokens, now_s)
        if sample is not None and output_tokens >= _MIN_OUTPUT_TOKENS and self._on_sample is not None:
            self._on_sample(sample)
        if not ahead or not course.uncompose(0):
            return
        course.move_decodes(seq, -ahead)
        for other in self._queue.running:
            generated = course.turns.generated(other.id)
            if other is not seq and not other.prefilling and generated is not None:
                course.move_decodes(other, generated - other.generated)
        if course.settings.async_scheduling:
            # It was composed when it was not known yet that this one would end.
            course.composes_s = now_s
            course.compose(1)
        course.changed()

    def _step_ended(self, seq: Sequence, output_tokens: int, now_s: float) -> None:
        """The step that gave its last token has just ended: with overlap one is under way, and the next is composed."""
        course = self._course
        while self._under_way and course.emitted(seq) < output_tokens:
            if not any(seq is other for other in self._under_way[0].step.decodes):
                break
            course.end_step(now_s)
        if course.emitted(seq) == output_tokens and course.uncompose(1 if course.settings.async_scheduling else 0):
            course.began_s = course.composes_s = now_s

    # What is to come

    def begins_s(self, now_s: float) -> float:
        """When the next step begins that a newcomer can be part of."""
        self.advance(now_s)
        course = self._course
        if self.behind:
            return now_s  # the step under way is over long ago
        if course.composes_s is None or self._under_way:
            return course.next_step_s(now_s)
        # Composed by the engine only when this instant is over: the newcomer is part of it.
        return max(now_s, course.composes_s)

    def timeline(self, now_s: float, budget: Budget | None = None, priority: int | None = None) -> Timeline:
        """The steps to come as of now; computed again only when something has changed since, and as far as there is a
        budget for it. Who comes with a `priority` may overtake others, where the engine goes by that."""
        begins_s = self.begins_s(now_s)
        self._looked_s = now_s
        if priority is not None and (ahead := self._ahead_of(priority)) is not None:
            return self._overtaking(ahead, priority, begins_s, budget)
        return self._outlook.renewed(begins_s, budget)

    def standing_timeline(self, now_s: float, budget: Budget, priority: int | None = None) -> Timeline | Guess:
        """What was computed before; of what has happened since it knows bookings only. A guess if it is of no use."""
        begins_s = self.begins_s(now_s)
        course = self._course
        if priority is not None and (ahead := self._ahead_of(priority)) is not None:
            self._looked_s = now_s
            if len(ahead) <= _GLANCED_AT:
                return self._overtaking(ahead, priority, begins_s, budget)
            tokens = sum(seq.prefill_left for seq in itertools.chain(ahead.running, ahead.waiting))
            return Guess(begins_s, tokens, course.settings, course.cost)
        timeline = self._outlook.standing(begins_s, budget)
        if timeline is not None and (self._outlook.fresh or course.load.prefilling):
            return timeline
        return Guess(begins_s, course.load.prefill_tokens, course.settings, course.cost)

    def least_wait_s(self, now_s: float, priority: int) -> float | None:
        """How long whoever comes now waits at least, and be it with a single token; None where no timeline that is up
        to date says so. Everything that he computes takes him what it takes him alone, or longer."""
        saved_a_step_s = 0.0
        if self.crowded:
            # Who needs space will be looked at in other futures too, where those who decode may have ended.
            if self._course.settings.prefill_decode_interval:
                return None
            saved_a_step_s = len(self) * self._course.cost.per_decode_s
        opens_s = self._outlook.surely_opens_s(self.begins_s(now_s), saved_a_step_s)
        if opens_s is None or self.behind or self._ahead_of(priority) is not None:
            return None
        return max(0.0, opens_s - now_s)

    def _ahead_of(self, priority: int) -> Queue | None:
        """Who is before a newcomer of this priority, if it overtakes anybody, or may take the slot of somebody."""
        queue, settings = self._queue, self._course.settings
        if settings.scheduling_policy == "fcfs":
            return None
        waiting = queue.waiting
        may_preempt = settings.preempts and len(queue) >= settings.max_num_seqs
        if not may_preempt and (not waiting or waiting[-1].priority <= priority):
            return None
        return replace(queue, waiting=deque(itertools.takewhile(lambda seq: seq.priority <= priority, waiting)))

    def _overtaking(self, ahead: Queue, place: int, begins_s: float, budget: Budget | None) -> Timeline:
        sight = self._look(begins_s, ahead, place)
        if budget is not None:
            budget.left -= sight.run.work
        return sight.timeline()

    @property
    def crowded(self) -> bool:
        """Whether those who wait need more KV space than is free: what nobody holds is taken by them."""
        return self._course.space.crowded

    def lasting_blocks(self, hashes: BlockHashes, blocks: int, steps: float) -> int:
        """Of a newcomer's first `blocks`, which are cached or on their way now, what quite likely is left when it is
        admitted, so many steps from now."""
        space = self._course.space
        if self._lengths is None or not space.crowded:
            return blocks
        return space.lasting_blocks(hashes, blocks, steps, self._lengths(self._looked_s))

    @property
    def opens_s(self) -> float:
        """When those who prefill let a newcomer in at the earliest, by the timeline that stands."""
        return self._outlook.opens_s

    @property
    def timeline_is_fresh(self) -> bool:
        """Whether nothing has happened since the timeline was computed, and it was computed of now."""
        return self._outlook.fresh and not self.behind

    def _look(self, begins_s: float, ahead: Queue | None = None, place: int | None = None) -> Sight:
        """`ahead`: of the queue, only that part, for a newcomer who waits by `place`."""
        queue = self._queue if ahead is None else ahead
        sequences = self._sequences.values() if ahead is None else [*ahead.running, *ahead.waiting]
        lengths = self._lengths(self._looked_s) if self._lengths is not None else None
        if lengths is not None and ahead is None and self._course.space.reconsider(lengths):
            self._course.counts_changed()
        if lengths is not None:
            for seq in sequences:
                if seq.generated >= seq.expected_output and seq.draws:
                    # It has outlived what was drawn for it.
                    curve = lengths.curve(seq.length_class)
                    seq.expected_output = curve.length(seq.draws[0], seq.generated, seq.max_output)
        ends: Mapping[str, int] = {seq.id: whole_output(seq, seq.expected_output) for seq in sequences}
        # As it is now: a future is imagined when somebody asks, and by then the queue may have moved on.
        settings, cost = self._course.settings, self._course.cost
        run, kind = _RUNS[settings.family]
        if shares := self._course.space.shares(ends):
            run = partial(run, shares=shares)
        if place is not None and run is PrefillFirst:
            run = partial(run, place=place)
        first = run(queue, settings, cost, ends)
        count = min((len(seq.draws) for seq in sequences), default=0) - 1
        if lengths is None or count < 1:
            return Sight(begins_s, first, None, kind)

        def length(seq: Sequence, number: int) -> int:
            curve = lengths.curve(seq.length_class)
            return curve.length(seq.draws[number], seq.generated, seq.max_output)

        def length_if_drawn(seq: Sequence, number: int) -> int | None:
            return length(seq, number) if number < len(seq.draws) else None

        def imagine(number: int) -> RunForward:
            drawn = {seq.id: length(seq, number) for seq in sequences}
            ahead: RunForward = run(queue, settings, cost, drawn)
            return ahead

        others = Others(count, imagine, length_if_drawn, self._pace if ahead is None else None)
        return Sight(begins_s, first, others, kind)


def _prefilled(runs: ReadOnly[StoredRun], owners: ReadOnly[Owner], block_size: int) -> tuple[int, int]:
    """How many of these are chunks of prompts, and their tokens."""
    blocks = [
        run.blocks
        for run, (seq, tokens) in zip(runs, owners, strict=True)
        if seq is not None and (tokens <= len(seq.hashes) * block_size or not seq.booked)
    ]
    return len(blocks), sum(blocks) * block_size
