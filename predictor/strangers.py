"""What those whom nobody booked do to the course of an engine's steps: they come, are prefilled, decode and are gone.

Who they are, `unbooked` knows; here they get their places in the queue and in the steps. The step that has just ended
is composed again with what they had in it, so that who was booked has what was left to him, and the costs what was
really computed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ReadOnly

from predictor.block_owners import NOBODY, Owner
from predictor.course import Course, UnderWay
from predictor.engines.vllm import Sequence, Step, chunk_cap, undo
from predictor.output_lengths import Lengths
from predictor.step_interval import StepInterval
from predictor.stored_run import StoredRun
from predictor.told_step import Participant, compose_as_stored, storing
from predictor.unbooked import FIRST_BLOCKS

# A step that only one of them would leave a sign of is waited for so much longer than it should take.
_DOUBT_S, _DOUBT_RATIO = 0.1, 1.0


class Strangers:
    """`lengths` is what is known of the pool's output lengths at a time. `are_seen` is whether what the engine stores
    tells of them: where its blocks are seen, and are computed and not loaded."""

    def __init__(self, course: Course, lengths: Callable[[float], Lengths] | None) -> None:
        self.are_seen = False
        self.recomposed = 0  # steps that were composed again with them
        self._course = course
        self._unbooked = course.unbooked
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._unbooked)

    # What is heard of them

    def count(self, count: int, now_s: float) -> None:
        """The engine says that so many are in progress that we did not send."""
        course, unbooked = self._course, self._unbooked
        waits = unbooked.counted(count, now_s)
        if waits < 0:
            for seq in unbooked.silent(course.settings.block_size, 1.0)[:-waits]:
                self._drop(seq)
            waits = 0
        expected = unbooked.expected
        if len(expected) == waits:
            return
        for seq in expected[waits:]:
            if any(seq is other for other in course.queue.waiting):
                self._drop(seq)
        for _ in range(waits - len(expected)):
            self._join(unbooked.expect(), now_s)
            course.queue.waiting.append(unbooked.expected[-1])
        course.wake(now_s)
        course.changed()

    def read(self, runs: ReadOnly[StoredRun], owners: ReadOnly[Owner], now_s: float) -> list[Owner] | None:
        """What these runs say of them, given whose they are as far as is known; returns that with theirs, None if there
        is nobody."""
        course, size = self._course, self._course.settings.block_size
        may_be_new = any(seq is None for seq, _ in owners) and not self._resumes()
        new = [
            may_be_new and seq is None and self._unbooked.begins_another(run, course.sequences.values())
            for run, (seq, _) in zip(runs, owners, strict=True)
        ]
        if not len(self._unbooked) and not any(new):
            return None
        told, parts, is_whole = self._participants(runs, owners, new, now_s)
        item = course.under_way[0] if course.under_way else None
        # Of two, as they were composed before settings changed, the one that has ended cannot be composed again.
        if item is None or item.step.preempted or len(course.under_way) > 1:
            for seq, _, stored in parts:
                if not seq.booked:
                    self._take_in(seq, stored, now_s)
            return [NOBODY if seq is not None and not seq.booked else (seq, tokens) for seq, tokens in told]
        absent = self._absent(item.step, parts, is_whole)
        ends = {id(seq): end for seq, _, end in item.step.chunks}
        if not absent and all(
            seq.booked and stored <= ends.get(id(seq), 0) < stored + size for seq, _, stored in parts
        ):
            return told
        self._compose_with(parts, absent, now_s)
        return told

    def _participants(
        self, runs: ReadOnly[StoredRun], owners: ReadOnly[Owner], new: Iterable[bool], now_s: float
    ) -> tuple[list[Owner], list[Participant], bool]:
        """Whose the runs are, with those that begin somebody new; who had which chunk of a prompt; and whether all that
        was stored is understood."""
        course, size = self._course, self._course.settings.block_size
        told, parts, is_whole = list(owners), [], True
        for at, (run, is_new) in enumerate(zip(runs, new, strict=True)):
            seq, tokens = told[at]
            if is_new:
                seq, tokens = self._unbooked.appears(run.blocks * size, now_s), run.blocks * size
                course.owners.set_tail(seq, run.last, run.blocks)
            elif seq is None:
                seq, tokens = course.owners.prompt_with(run)
                is_whole = is_whole and seq is not None
            told[at] = seq, tokens
            if seq is None or (seq.booked and tokens > len(seq.hashes) * size):
                continue
            if not seq.booked:
                self._unbooked.heard(seq, tokens, now_s)
                if run.blocks < FIRST_BLOCKS and seq.id in course.sequences and not seq.prefilling:
                    self._decoded_to(seq, tokens)
                    told[at] = NOBODY
                    continue
            parts.append(Participant(seq, tokens - run.blocks * size, tokens))
        return told, parts, is_whole

    def _absent(self, step: Step, parts: ReadOnly[Participant], is_whole: bool) -> list[Sequence]:
        """Who would have stored a block in this step, and has not; who was booked may have where not all is
        understood."""
        stored = {id(part.seq) for part in parts}
        return [
            seq
            for seq, _ in storing(step, self._course.settings.block_size)
            if id(seq) not in stored and seq.id in self._course.sequences and not (seq.booked and not is_whole)
        ]

    def _resumes(self) -> bool:
        """Whether somebody who has given way comes back, of whom not all blocks are known."""
        course = self._course
        waiting = any(seq.booked and seq.generated for seq in course.queue.waiting)
        chunks = itertools.chain.from_iterable(item.step.chunks for item in course.under_way)
        return waiting or any(seq.booked and end > seq.prompt_tokens for seq, _, end in chunks)

    def _decoded_to(self, seq: Sequence, tokens: int) -> None:
        """It has computed so many tokens, give or take one."""
        if abs(tokens - seq.computed) > 1:
            self._course.move_decodes(seq, tokens - seq.computed)

    # They get their places

    def _join(self, seq: Sequence, now_s: float) -> None:
        if self._lengths is not None:
            seq.expected_output = self._lengths(now_s).curve(seq.length_class).length(seq.draws[0])
        self._course.arrives(seq)

    def _take_in(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """It has got to here, in a step of which nothing else is known."""
        course, queue, settings = self._course, self._course.queue, self._course.settings
        size = settings.block_size
        if seq.id not in course.sequences:
            self._join(seq, now_s)
        if any(seq is other for other in queue.waiting):
            queue.waiting = deque(other for other in queue.waiting if other is not seq)
        if not any(seq is other for other in queue.running):
            queue.running.append(seq)
        decoding = sum(not other.prefilling for other in queue.running)
        room = min(chunk_cap(len(queue), settings), settings.max_num_batched_tokens - decoding)
        chunk = tokens - seq.computed if tokens > seq.computed else tokens
        if chunk + size > room:
            seq.computed, seq.generated = tokens, 0
            self._unbooked.goes_on(seq, tokens + size)
        else:
            seq.computed = seq.prompt_tokens = tokens + size // 2
            seq.generated = 1
        course.space.fit(seq)
        if course.interval is not None:
            course.interval.guessed = True
        course.wake(now_s)
        course.changed()

    def _compose_with(self, parts: ReadOnly[Participant], absent: ReadOnly[Sequence], now_s: float) -> None:
        """The step under way has just ended, and had these in it, and none of who is `absent`."""
        course, queue, settings = self._course, self._course.queue, self._course.settings
        self.recomposed += 1
        item = course.under_way.popleft()
        undo(queue, item.step)
        self._turn_out(absent)
        for seq, _, stored in parts:
            if seq.id not in course.sequences:
                self._join(seq, now_s)
            if not seq.booked:
                self._unbooked.goes_on(seq, stored + 2 * settings.block_size)
        step = compose_as_stored(queue, settings, parts, lambda queue: course.rule(queue, settings))
        course.kept_out = None
        course.let_go(step)
        self._find_longer(step, now_s)
        if step.empty:
            course.interval, course.composes_s = None, now_s
            course.rest()
        else:
            course.under_way.append(UnderWay(step, course.step_s(step), item.before, announced=True))
        course.changed()

    def _turn_out(self, absent: ReadOnly[Sequence]) -> None:
        """These were not in the step that was just undone."""
        course, queue, size = self._course, self._course.queue, self._course.settings.block_size
        running = {id(seq) for seq in queue.running}
        for seq in reversed(absent):
            if not seq.booked and self._unbooked.is_seen(seq):
                # Less than a block of its prompt was left.
                seq.prompt_tokens = seq.computed + max(1, (size - 1 - seq.computed % size) // 2)
            elif not seq.booked:
                self._unbooked.did_not_come(seq)
                course.remove(seq)
            elif id(seq) in running:
                # It was taken to have been let in, and waits.
                queue.running = [other for other in queue.running if other is not seq]
                course.space.take(-seq.blocks)
                seq.blocks, seq.computed = 0, seq.credited
                queue.waiting.appendleft(seq)

    def _find_longer(self, step: Step, now_s: float) -> None:
        """This step has just ended. Where it takes longer than was left for it, steps of decodes before it were counted
        that there have not been."""
        course, interval = self._course, self._course.interval
        if interval is None or not interval.plain:
            return
        decoding = [seq for seq in course.queue.running if not seq.prefilling and seq.generated > 1]
        over_s = course.step_s(step) - (now_s - course.began_s)
        steps = min(interval.plain, round(over_s / course.cost.step_s(0, 0, len(decoding))))
        if steps > 0:
            interval.plain -= steps
            interval.steps -= steps
            interval.decoding = max(0, interval.decoding - steps * len(decoding))
            for seq in decoding:
                course.move_decodes(seq, -steps)
        course.guessed_alike = {seq.id for seq in decoding if seq.booked}

    def all_alike(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """It has computed so many tokens in the step that has just ended, and that puts right all whose steps were
        guessed with its own."""
        course = self._course
        item = course.under_way[0] if course.under_way else None
        # A step of decodes only may have been let pass already.
        ends = item is not None and (bool(item.step.chunks) or now_s - course.began_s > item.seconds / 2)
        if item is not None and ends and not item.step.chunks:
            course.end_step(now_s)
            ends = False
        steps = tokens - course.announced(seq) - ends
        for other in course.queue.running:
            if other.id in course.guessed_alike and not other.prefilling:
                course.move_decodes(other, steps)
        course.guessed_alike.clear()
        if ends:
            course.interval = None
        else:
            course.interval = StepInterval(now_s)
            course.began_s = now_s
        course.changed()

    # They are gone

    def drop_all(self) -> None:
        for seq in self._unbooked.everybody:
            self._drop(seq)

    def doubt(self, now_s: float) -> None:
        """Those go that have been silent for too long, or that an engine with nothing else to do does not let in."""
        course = self._course
        for seq in self._unbooked.silent(course.settings.block_size):
            self._drop(seq)
        if not len(self._unbooked) or not course.wake(now_s):
            return
        course.compose()
        if not course.under_way:
            for seq in [seq for seq in course.queue.waiting if not seq.booked]:
                self._drop(seq)

    def are_overdue(self, now_s: float) -> bool:
        """Whether the oldest step under way is overdue, and only one of them would leave a sign of it."""
        if not len(self._unbooked):
            return False
        oldest = self._course.under_way[0]
        if now_s < self._course.began_s + (1.0 + _DOUBT_RATIO) * oldest.seconds + _DOUBT_S:
            return False
        return not self._course.awaited(booked_only=True)

    def give_up(self) -> None:
        """The step under way had nothing of them: they are not there."""
        course, size = self._course, self._course.settings.block_size
        missed = [seq for item in course.under_way for seq, _ in storing(item.step, size)]
        if len(course.under_way) == 1 and not course.under_way[0].step.preempted:
            course.take_back()
        for seq in missed:
            if seq in self._unbooked:
                if not self._unbooked.is_seen(seq):
                    self._unbooked.did_not_come(seq)
                self._drop(seq)

    def _drop(self, seq: Sequence) -> None:
        """One that nobody booked is not there any more."""
        self._unbooked.gone(seq)
        self._course.remove(seq)
        self._course.kept_out = None
        self._course.rest()
        self._course.changed()
