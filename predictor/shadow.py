"""One worker's scheduler as seen from outside.

What was booked enters its queue, steps pass, and evidence corrects it: stored KV blocks name the prefill chunk that a
step has computed, a first token says that a prefill is done, an end how many tokens were generated. Every piece of
evidence shows that a step has just ended, and which: so steps are counted, not timed, wherever they leave a sign. A
step that must leave a sign has not ended before the sign is seen; one that leaves none passes at its predicted cost.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from predictor.announced_step import begun, compose_of, recompose
from predictor.engines.sglang import first_ratio, ratio_after
from predictor.engines.step_rule import rule_of
from predictor.engines.vllm import Queue, Sequence, Settings, Step, chunk_cap, enqueue, reusable_tokens, undo
from predictor.outlook import Outlook, Sight
from predictor.output_lengths import LengthCurve
from predictor.prefill_cost import StepCost
from predictor.prefill_first import PrefillFirst, PrefillFirstTimeline
from predictor.prefixes_ahead import PrefixesAhead, Share
from predictor.prompt import BlockHashes
from predictor.run_forward import Budget, RunForward, whole_output
from predictor.step_sample import StepSample
from predictor.stored_run import StoredRun
from predictor.stored_step import StoredChunk, compose_as_stored, would_store
from predictor.timeline import Guess, Others, Pace, Timeline
from predictor.turns import Turns
from predictor.unbooked import FIRST_BLOCKS, Unbooked

# Evidence that no so many steps explain is about something else than what the shadow knows.
_MAX_STEPS_BEHIND = 4096
# What one call may compose of what has passed, in sequences looked at; a step counts for so many besides. The next call
# goes on from there: a worker that was not asked for long is some calls behind, and nobody waits for it.
_MOST_LOOKED_AT, _STEP_LOOKED_AT = 50_000, 100
# Shorter outputs say little about what a decode step takes.
_MIN_OUTPUT_TOKENS = 8
# A step that is overdue by more than this is taken to last as long again: nobody knows better.
_GRACE_S, _GRACE_RATIO = 0.05, 0.2
# A step that only somebody nobody booked would leave a sign of is waited for so much longer than it should take.
_DOUBT_S, _DOUBT_RATIO = 0.1, 1.0
_RUNS: dict[str, tuple[Callable[..., Any], type[Timeline]]] = {
    "vllm": (RunForward, Timeline),
    "sglang": (PrefillFirst, PrefillFirstTimeline),
}
# Longer than any output.
_WAITS = 1 << 40
# Of requests that begin like another, those that are asked whether they last until its turn.
_OWNERS_LOOKED_AT = 64
# What lasts with less certainty is not counted on: among workers that which promises too much is chosen.
_MAY_BE_GONE = 1 / 3
# A timeline without those whom a newcomer overtakes is listed for a first price where so many are before it.
_GLANCED_AT = 100
# No engine is so many times as fast as it was taken to be.
_FASTEST = 50.0
# Blocks that come later than this after the first tokens of their step will not come.
_EARLY_S = 0.05
# Evidence of one step end comes in several pieces; those of one instant belong together.
_INSTANT_S = 1e-7


@dataclass(frozen=True, slots=True)
class _Load:
    prefilling: int
    decoding: int
    prefill_tokens: int


@dataclass(slots=True)
class _UnderWay:
    step: Step
    seconds: float  # predicted
    before: tuple[float, bool, frozenset[str], int] = (
        0.0,
        False,
        frozenset(),
        0,
    )  # what the queue had in SGLang's marks
    announced: bool = False  # a batch has come that names what it stores


@dataclass(slots=True)
class _Interval:
    """What has passed since the last step end that was seen."""

    since_s: float
    steps: int = 0
    new_tokens: int = 0
    squares: int = 0
    decoding: int = 0
    arrival_tokens: int | None = None
    plain: int = 0  # the last of them, if they were decodes only
    guessed: bool = False  # how many there were is by their predicted cost, and not confirmed

    def add(self, step: Step) -> None:
        self.plain = 0 if step.chunks else self.plain + 1
        self.steps += 1
        self.new_tokens += step.new_tokens
        self.squares += step.squares
        self.decoding += len(step.decodes)


@dataclass(frozen=True, slots=True)
class State:
    """A copy of what a shadow takes a worker to be at, for whoever runs it forward in a way of his own."""

    settings: Settings
    queue: Queue
    under_way: tuple[Step, ...]  # composed and not ended, over the sequences of `queue`
    clock_s: float  # when the oldest of them began, or the next is composed
    emitted: Mapping[str, int]  # tokens of each sequence that have left the engine


class Shadow:
    """Times are absolute seconds of the caller's clock.

    `on_sample` is told each interval between two step ends that were seen. `cached_blocks` tells how many of a run of
    blocks, by their hashes, the worker's cache is known to hold at this moment, from the first on. `lengths` is the
    pool's curve of output lengths at a time, `prompt_of` how long prompts are that are longer than so many
    tokens: what a share of them does not go beyond.
    """

    def __init__(
        self,
        settings: Settings,
        cost: StepCost,
        on_sample: Callable[[StepSample], None] | None = None,
        cached_blocks: Callable[[BlockHashes], int] | None = None,
        lengths: Callable[[float], LengthCurve] | None = None,
        prompt_of: Callable[[int, float], int] | None = None,
    ) -> None:
        self._settings = settings
        self._rule = rule_of(settings)
        self._cost = cost
        self._on_sample = on_sample
        self._cached_blocks = cached_blocks
        self._lengths = lengths
        self._queue = Queue(free_blocks=settings.usable_blocks)
        self._sequences: dict[str, Sequence] = {}
        self._prefixes = PrefixesAhead()
        self._unbooked = Unbooked(prompt_of)
        # These have decoded for as many steps as were guessed: what one of them shows is true of all.
        self._guessed_alike: set[str] = set()
        self._told = 0, 0  # chunks of prompts that were announced last, and their tokens
        # Composed and not ended, the oldest first: one step, and with asynchronous scheduling the one after it.
        self._under_way: deque[_UnderWay] = deque()
        self._began_s = 0.0  # the oldest of them
        # The next step is composed once all that this instant brings has been heard: ends and arrivals are part of it.
        self._composes_s: float | None = None
        self._lead_s = 0.0  # so much earlier it is known who is part of it
        self._booked_s = 0.0
        self._arrivals = itertools.count(1)
        self._given_up: Step | None = None  # under way, and it prefills a sequence that has left
        # It could not be let into the newest step, nor into any like it before something else happens than decodes.
        self._kept_out: Sequence | None = None
        # First tokens of the step under way, and when they came; and when a batch came last.
        self._early: list[tuple[str, float]] = []
        self._told_s = 0.0
        self._interval: _Interval | None = None
        # The engine's names of the last full blocks: what a sequence stores next has them for a parent.
        self._tails: dict[int, Sequence] = {}
        self._tail_of: dict[str, tuple[int, int]] = {}  # the tail, and how many blocks it ends
        self._sees_blocks = self._sees_unbooked = False
        self._outlook = Outlook(self._look)
        self._looked_s = 0.0
        self._pace = Pace()
        self._turns = Turns()
        self._load: _Load | None = None
        self._wanted: int | None = None
        self.forced = 0  # times that evidence contradicted the rule
        self.cut = 0  # times that more had passed than one call may look at

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def prefilling(self) -> int:
        """Sequences whose prefill is waiting or under way."""
        return (self._load or self._loaded()).prefilling + (self._given_up is not None)

    @property
    def decoding(self) -> int:
        return self._loaded().decoding

    def prefill_tokens_ahead(self) -> int:
        """Tokens that a newcomer would find still to be prefilled before it."""
        return self._loaded().prefill_tokens

    def generated(self) -> list[int]:
        """How much each sequence that decodes has generated so far, in tokens."""
        return [seq.generated for seq in self._queue.running if seq.booked and not seq.prefilling]

    @property
    def unbooked(self) -> int:
        """Sequences that did not come through us."""
        return len(self._unbooked)

    @property
    def sees_decodes(self) -> bool:
        """Whether what is generated is seen as it comes, and not only counted by how long a step should take."""
        return self._sees_blocks

    @property
    def free_blocks(self) -> int | None:
        """KV space that nobody holds; None where it is never short."""
        return self._queue.free_blocks

    def blocks_of(self, seq_id: str) -> int:
        """KV blocks that count for this one."""
        seq = self._sequences.get(seq_id)
        return seq.blocks if seq is not None else 0

    def state(self, now_s: float) -> State:
        self.advance(now_s)
        copies = {id(seq): seq.copy() for seq in self._sequences.values()}
        queue = replace(
            self._queue,
            running=[copies[id(seq)] for seq in self._queue.running],
            waiting=deque(copies[id(seq)] for seq in self._queue.waiting),
        )
        steps = [
            Step(
                tuple((copies[id(seq)], start, end) for seq, start, end in item.step.chunks if id(seq) in copies),
                tuple(copies[id(seq)] for seq in item.step.decodes if id(seq) in copies),
                0,
            )
            for item in self._under_way
        ]
        clock_s = self._began_s if self._under_way else now_s if self._composes_s is None else self._composes_s
        emitted = {seq.id: self._emitted(seq) for seq in self._sequences.values()}
        return State(self._settings, queue, tuple(steps), clock_s, emitted)

    def set_cost(self, cost: StepCost) -> None:
        if cost != self._cost:
            self._cost = cost
            self._outlook.changed()

    def set_settings(self, settings: Settings) -> None:
        self._settings = settings
        self._rule = rule_of(settings)
        self.set_sees_blocks(self._sees_blocks, self._sees_unbooked)
        usable = settings.usable_blocks
        self._kept_out = None
        self._queue.free_blocks = None if usable is None else usable - sum(seq.blocks for seq in self._queue.running)
        self._outlook.forget()

    def set_sees_blocks(self, sees: bool, computed: bool = True) -> None:
        """Whether each step that stores a block is known to be announced, so that the shadow can wait for it.

        `computed`: whatever the engine stores it has computed, and not loaded.
        """
        # SGLang announces a chunk with the batch after it, and what is decoded at its end.
        self._sees_blocks = sees and self._settings.family == "vllm"
        # Asynchronous: blocks are announced a step early, and which step a stranger was in cannot be told yet.
        self._sees_unbooked = self._sees_blocks and computed and not self._settings.async_scheduling
        if not self._sees_unbooked:
            for unseen in self._unbooked.everybody:
                self._drop(unseen)

    # What happens

    def book(self, seq: Sequence, now_s: float) -> None:
        self.advance(now_s)
        if not self._sequences:
            self._queue.reserve_ratio = first_ratio(self._settings)
        if seq.computed and self.crowded:
            seq.shared_blocks = seq.computed // self._settings.block_size  # what will be left is what somebody holds
        seq.arrived = next(self._arrivals)
        is_last = enqueue(self._queue, self._settings, seq)
        self._sequences[seq.id] = seq
        self._prefixes.add(seq.id, np.asarray(seq.hashes, np.uint64), seq.computed // self._settings.block_size)
        self._booked_s = now_s
        if self._interval is not None and not self._sees_blocks and self._settings.family == "vllm":
            # Nobody sees which step it gets into. (SGLang's batches end with the first tokens of all that they hold.)
            self._interval.guessed = True
        if not self._under_way and self._composes_s is None:
            # Who comes while this one is on its way is on its way as long, and finds the step begun.
            self._lead_s = self._cost.overhead_s(seq.prompt_tokens)
            self._composes_s = now_s + self._lead_s
            self._interval = _Interval(now_s, arrival_tokens=seq.prompt_tokens)
        if is_last:
            self._outlook.booked(seq)
        if not is_last or self._settings.shares_steps:
            self._outlook.changed()  # for those that it has overtaken, or takes a share from
        self._load = self._wanted = None

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Takes in one that has had its first token, and got here by another way than ours."""
        self.advance(now_s)
        seq.computed, seq.generated = seq.prompt_tokens, 1
        seq.blocks = -(-seq.computed // self._settings.block_size)
        self._take(seq.blocks)
        self._queue.running.append(seq)
        self._sequences[seq.id] = seq
        self._prefixes.add(seq.id, np.asarray(seq.hashes, np.uint64))
        if not self._under_way and self._composes_s is None:
            self._composes_s = now_s
        self._changed()

    def stored(self, runs: list[StoredRun], now_s: float) -> None:
        """The engine has announced what a step stored: so a step has just ended."""
        self.advance(now_s)
        if self._settings.family == "sglang":
            return
        # All are named before any step is let end: they tell of one step, and the next is composed otherwise.
        told = [self._whose(run) for run in runs]
        with_others = self._see_unbooked(runs, told, now_s) if self._sees_unbooked and runs else None
        told = self._recomposed(told, runs) if with_others is None else with_others
        if self._unbooked.seen_lately(now_s):
            self._told = self._prefilled(runs, told)
        self._find_missed(told, now_s)
        for seq, tokens in told:
            if seq is not None:
                self._stretch(seq, tokens)
        for run, (known, at_least) in zip(runs, told, strict=True):
            seq, tokens = (known, at_least) if known is not None else self._whose(run)
            if seq is not None:
                self._got_to(seq, tokens, now_s)
        self._told_s = now_s
        self._take_early()

    def count_unbooked(self, count: int, now_s: float) -> None:
        """The engine says that so many are in progress that we did not send."""
        self.advance(now_s)
        if not self._sees_unbooked:
            return
        waits = self._unbooked.counted(count, now_s)
        if waits < 0:
            for seq in self._unbooked.silent(self._settings.block_size, 1.0)[:-waits]:
                self._drop(seq)
            waits = 0
        expected = self._unbooked.expected
        if len(expected) == waits:
            return
        for seq in expected[waits:]:
            if any(seq is other for other in self._queue.waiting):
                self._drop(seq)
        for _ in range(waits - len(expected)):
            self._join(self._unbooked.expect(), now_s)
            self._queue.waiting.append(self._unbooked.expected[-1])
        if not self._under_way and self._composes_s is None:
            self._composes_s = now_s
        self._changed()

    def _join(self, seq: Sequence, now_s: float) -> None:
        seq.arrived = next(self._arrivals)
        if self._lengths is not None:
            seq.expected_output = self._lengths(now_s).length(seq.draws[0])
        self._sequences[seq.id] = seq

    def _drop(self, seq: Sequence) -> None:
        """One that nobody booked is not there any more."""
        self._unbooked.gone(seq)
        self._remove(seq)
        self._kept_out = None
        self._rest()
        self._changed()

    def _rest(self) -> None:
        if not self._sequences and self._given_up is None:
            self._under_way.clear()
            self._interval = self._composes_s = None

    def _see_unbooked(
        self, runs: list[StoredRun], told: list[tuple[Sequence | None, int]], now_s: float
    ) -> list[tuple[Sequence | None, int]] | None:
        """What the blocks say of those that nobody booked; returns `told` with them, None if there is nobody.

        The step that has just ended is composed again with what they had in it, so that those who were booked have what
        was left to them, and the costs what was really computed.
        """
        unexplained = any(seq is None for seq, _ in told)
        may_be_new = unexplained and not self._resumes()
        new = [
            may_be_new and seq is None and self._unbooked.begins_another(run, self._sequences.values())
            for run, (seq, _) in zip(runs, told, strict=True)
        ]
        if not len(self._unbooked) and not any(new):
            return None
        told, size = list(told), self._settings.block_size
        chunks: list[StoredChunk] = []
        is_whole = True  # whether all that was stored is understood
        for at, (run, is_new) in enumerate(zip(runs, new, strict=True)):
            seq, tokens = told[at]
            if is_new:
                seq, tokens = self._unbooked.appears(run.blocks * size, now_s), run.blocks * size
                self._set_tail(seq, run.last, run.blocks)
            elif seq is None:
                seq, tokens = self._prompt_with(run)
                is_whole = is_whole and seq is not None
            told[at] = seq, tokens
            if seq is None or (seq.booked and tokens > len(seq.hashes) * size):
                continue
            if not seq.booked:
                self._unbooked.heard(seq, tokens, now_s)
                if run.blocks < FIRST_BLOCKS and seq.id in self._sequences and not seq.prefilling:
                    self._decoded_to(seq, tokens)
                    told[at] = None, 0
                    continue
            chunks.append(StoredChunk(seq, tokens - run.blocks * size, tokens, seq.booked))
        item = self._under_way[0] if self._under_way else None
        # Of two, as they were composed before settings changed, the one that has ended cannot be composed again.
        if item is None or item.step.preempted or len(self._under_way) > 1:
            for seq, _, tokens, is_booked in chunks:
                if not is_booked:
                    self._take_in(seq, tokens, now_s)
            return [(None, 0) if seq is not None and not seq.booked else (seq, tokens) for seq, tokens in told]
        stored = {id(chunk.seq) for chunk in chunks}
        absent = [seq for seq in would_store(item.step, size) if id(seq) not in stored and seq.id in self._sequences]
        if not is_whole:
            absent = [seq for seq in absent if not seq.booked]
        ends = {id(seq): end for seq, _, end in item.step.chunks}
        if not absent and all(
            is_booked and tokens <= ends.get(id(seq), 0) < tokens + size for seq, _, tokens, is_booked in chunks
        ):
            return told
        self._compose_with(chunks, absent, now_s)
        return told

    def _prefilled(self, runs: list[StoredRun], told: list[tuple[Sequence | None, int]]) -> tuple[int, int]:
        """How many of these are chunks of prompts, and their tokens."""
        size = self._settings.block_size
        blocks = [
            run.blocks
            for run, (seq, tokens) in zip(runs, told, strict=True)
            if seq is not None and (tokens <= len(seq.hashes) * size or not seq.booked)
        ]
        return len(blocks), sum(blocks) * size

    def _resumes(self) -> bool:
        """Whether somebody who has given way comes back, of whom not all blocks are known."""
        waiting = any(seq.booked and seq.generated for seq in self._queue.waiting)
        chunks = itertools.chain.from_iterable(item.step.chunks for item in self._under_way)
        return waiting or any(seq.booked and end > seq.prompt_tokens for seq, _, end in chunks)

    def _prompt_with(self, run: StoredRun) -> tuple[Sequence | None, int]:
        """Of those that were booked, the first whose prompt has these blocks, and up to which token they are."""
        if run.first is None:
            return None, 0
        first = np.uint64(run.first)
        for seq in self._sequences.values():
            if len(seq.hashes) and len(found := (np.asarray(seq.hashes, np.uint64) == first).nonzero()[0]):
                blocks = int(found[0]) + run.blocks
                self._set_tail(seq, run.last, blocks)
                return seq, blocks * self._settings.block_size
        return None, 0

    def _decoded_to(self, seq: Sequence, tokens: int) -> None:
        """It has computed so many tokens, give or take one."""
        if abs(tokens - seq.computed) > 1:
            self._move_decodes(seq, tokens - seq.computed)

    def _take_in(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """It has got to here, in a step of which nothing else is known."""
        size, queue = self._settings.block_size, self._queue
        if seq.id not in self._sequences:
            self._join(seq, now_s)
        if any(seq is other for other in queue.waiting):
            queue.waiting = deque(other for other in queue.waiting if other is not seq)
        if not any(seq is other for other in queue.running):
            queue.running.append(seq)
        decoding = sum(not other.prefilling for other in queue.running)
        room = min(chunk_cap(len(queue), self._settings), self._settings.max_num_batched_tokens - decoding)
        chunk = tokens - seq.computed if tokens > seq.computed else tokens
        if chunk + size > room:
            seq.computed, seq.generated = tokens, 0
            self._unbooked.goes_on(seq, tokens + size)
        else:
            seq.computed = seq.prompt_tokens = tokens + size // 2
            seq.generated = 1
        blocks = -(-seq.computed // size)
        self._take(blocks - seq.blocks)
        seq.blocks = blocks
        if self._interval is not None:
            self._interval.guessed = True
        if not self._under_way and self._composes_s is None:
            self._composes_s = now_s
        self._changed()

    def _compose_with(self, chunks: list[StoredChunk], absent: list[Sequence], now_s: float) -> None:
        """The step under way has just ended, and had these chunks in it, and none of who is `absent`."""
        size, queue = self._settings.block_size, self._queue
        item = self._under_way.popleft()
        undo(queue, item.step)
        running = {id(seq) for seq in queue.running}
        for seq in reversed(absent):
            if not seq.booked and self._unbooked.is_seen(seq):
                # Less than a block of its prompt was left.
                seq.prompt_tokens = seq.computed + max(1, (size - 1 - seq.computed % size) // 2)
            elif not seq.booked:
                self._unbooked.did_not_come(seq)
                self._remove(seq)
            elif id(seq) in running:
                # It was taken to have been let in, and waits.
                queue.running = [other for other in queue.running if other is not seq]
                self._take(-seq.blocks)
                seq.blocks, seq.computed = 0, seq.credited
                queue.waiting.appendleft(seq)
        for seq, _, tokens, is_booked in chunks:
            if seq.id not in self._sequences:
                self._join(seq, now_s)
            if not is_booked:
                self._unbooked.goes_on(seq, tokens + 2 * size)
        step = compose_as_stored(queue, self._settings, chunks, lambda queue: self._rule(queue, self._settings))
        self._kept_out = None
        self._let_go(step)
        self._find_longer(step, now_s)
        if step.empty:
            self._interval, self._composes_s = None, now_s
            self._rest()
        else:
            seconds = self._cost.step_s(step.new_tokens, step.squares, len(step.decodes))
            self._under_way.append(_UnderWay(step, seconds, item.before, announced=True))
        self._changed()

    def _find_longer(self, step: Step, now_s: float) -> None:
        """This step has just ended. Where it takes longer than was left for it, steps of decodes before it were counted
        that there have not been."""
        interval = self._interval
        if interval is None or not interval.plain:
            return
        decoding = [seq for seq in self._queue.running if not seq.prefilling and seq.generated > 1]
        over_s = self._cost.step_s(step.new_tokens, step.squares, len(step.decodes)) - (now_s - self._began_s)
        steps = min(interval.plain, round(over_s / self._cost.step_s(0, 0, len(decoding))))
        if steps > 0:
            interval.plain -= steps
            interval.steps -= steps
            interval.decoding = max(0, interval.decoding - steps * len(decoding))
            for seq in decoding:
                self._move_decodes(seq, -steps)
        self._guessed_alike = {seq.id for seq in decoding if seq.booked}

    def _all_alike(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """It has computed so many tokens in the step that has just ended, and that puts right all whose steps were
        guessed with its own."""
        item = self._under_way[0] if self._under_way else None
        # A step of decodes only may have been let pass already.
        ends = item is not None and (bool(item.step.chunks) or now_s - self._began_s > item.seconds / 2)
        if item is not None and ends and not item.step.chunks:
            self._end_step(now_s)
            ends = False
        steps = tokens - self._announced(seq) - ends
        for other in self._queue.running:
            if other.id in self._guessed_alike and not other.prefilling:
                self._move_decodes(other, steps)
        self._guessed_alike.clear()
        if ends:
            self._interval = None
        else:
            self._interval = _Interval(now_s)
            self._began_s = now_s
        self._changed()

    def _let_go(self, step: Step) -> None:
        """Of those that give way in it less is known."""
        for seq in step.preempted:
            self._unbooked.departs(seq, self._tail(seq))
            self._forget_tail(seq)
            self._turns.breaks(seq.id)
            if not seq.booked:
                # Resumed, it will be taken for another.
                self._unbooked.gone(seq)
                self._remove(seq)

    def goes_on(self, run: StoredRun) -> bool:
        """Whether these are a prompt's next blocks, after those that a step before has stored of it."""
        seq = self._tails.get(run.parent) if run.parent is not None and run.first is not None else None
        return seq is not None and self._next_hash(seq, self._settings.block_size) == run.first

    def _recomposed(
        self, told: list[tuple[Sequence | None, int]], runs: list[StoredRun]
    ) -> list[tuple[Sequence | None, int]]:
        """The step under way had other newcomers than it was composed with, if others' blocks are announced with it."""
        item = self._to_be_announced() if self._sees_blocks else None
        if item is None:
            return told
        prefilled = {id(seq) for seq, _, _ in item.step.chunks}
        named = [seq for seq, _ in told if seq is not None and id(seq) in prefilled]
        unknown = [run for run, (seq, _) in zip(runs, told, strict=True) if seq is None]
        others = begun(self._queue, item.step, unknown, self._settings.block_size)
        if not named and not others and not self._ends_oldest(item, told):
            return told
        for one in self._under_way:
            one.announced = True
        if not self._recompose(item, named, others):
            return told
        return [
            (known, tokens) if known is not None else self._whose(run)
            for run, (known, tokens) in zip(runs, told, strict=True)
        ]

    def _ends_oldest(self, newest: _UnderWay, told: list[tuple[Sequence | None, int]]) -> bool:
        """Asynchronous: with the oldest step's end leaves what the newest has registered, if anything."""
        if len(self._under_way) < 2 or newest is not self._under_way[-1]:
            return False
        return any(seq is not None and tokens > self._announced(seq) for seq, tokens in told)

    def _to_be_announced(self) -> _UnderWay | None:
        """Whose newcomers the next batch names: the newest step's. With the first one after idleness leave both."""
        if not self._under_way:
            return None
        oldest, newest = self._under_way[0], self._under_way[-1]
        if not oldest.announced and oldest.step.admitted and not newest.step.chunks:
            return oldest
        return None if newest.announced else newest

    def _recompose(self, item: _UnderWay, named: list[Sequence], begins: list[tuple[Sequence, int]]) -> bool:
        """False if that is how it was."""
        later = self._under_way[-1] if self._under_way[-1] is not item else None
        if later is not None:
            if later.step.preempted:
                return False
            undo(self._queue, later.step)
        step = recompose(self._queue, self._settings, item.step, named, begins)
        found = step is not item.step
        item.step = step
        if later is not None:
            later.step = compose_of(self._queue, self._settings, frozenset())
        for one in (item, later) if later is not None else (item,):
            one.seconds = self._cost.step_s(one.step.new_tokens, one.step.squares, len(one.step.decodes))
        if found:
            self._kept_out = None
            self._changed()
        return found

    def _find_missed(self, told: list[tuple[Sequence | None, int]], now_s: float) -> None:
        """Decodes have got further than the step under way, which prefills, can explain.

        So there were more steps of decodes before it than were counted: whoever it prefills came to the engine later
        than he was booked.
        """
        if len(self._under_way) == 2:
            self._find_missed_before(self._under_way[0].step, told)
            return
        step = self._under_way[0].step if self._under_way else None
        if step is None or step.preempted or not self._stores(step):
            return
        if any(seq is other for seq, _ in told for other, _, _ in step.chunks):
            self._find_missed_before(step, told)
            return
        missed = max((tokens - self._announced(seq) for seq, tokens in told if seq is not None), default=0)
        if missed <= 0 or missed > _MAX_STEPS_BEHIND:
            return
        self._take_back()
        decoding = [seq for seq in self._queue.running if seq.generated and not seq.prefilling]
        for seq in decoding:
            seq.generated += missed
            seq.computed += missed
        if self._interval is not None:
            self._interval.guessed = False
            self._interval.steps += missed
            self._interval.decoding += missed * len(decoding)
        self._seen(now_s)
        self._composes_s = now_s

    def _find_missed_before(self, step: Step, told: list[tuple[Sequence | None, int]]) -> None:
        """The step under way has ended as well: it moves each decode by one, and no prefill explains more."""
        decoding = {id(seq) for seq in step.decodes if seq.id in self._sequences}
        missed = {
            id(seq): tokens - self._announced(seq) - 1
            for seq, tokens in told
            if seq is not None and id(seq) in decoding
        }
        if not missed or not 0 < max(missed.values()) <= _MAX_STEPS_BEHIND:
            return
        by_all = max(0, min(missed.values()))
        for seq in step.decodes:
            if id(seq) in decoding:
                self._move_decodes(seq, max(by_all, missed.get(id(seq), 0)))
        interval = self._interval
        if interval is not None and interval.steps:
            # Else its beginning was seen, and they were before it.
            interval.steps += by_all
            interval.decoding += by_all * len(decoding)
        self._changed()

    def _take_back(self) -> None:
        """The step under way has not begun, or not like this: it is composed anew."""
        undo(self._queue, self._under_way.popleft().step)
        self._kept_out = None
        self._composes_s = self._began_s
        self._changed()

    def _stores(self, step: Step, booked_only: bool = False) -> bool:
        """Whether it completes a block of a prompt, which is announced."""
        if not self._sees_blocks:
            return False
        size = self._settings.block_size
        return any(
            (len(seq.hashes) if seq.booked else not booked_only)
            and end // size > start // size
            and seq.id in self._sequences
            for seq, start, end in step.chunks
        )

    def _got_to(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """So many tokens of it are announced, and no more."""
        if seq.id in self._guessed_alike:
            self._all_alike(seq, tokens, now_s)
            return
        self._catch_up(lambda: self._announced(seq) >= tokens, now_s)
        if tokens <= seq.prompt_tokens or seq.prefilling:
            return
        # A decode stores its block when the block's last token is computed: so it has got there, and no further.
        ahead = self._announced(seq) - tokens
        if ahead > 0:
            self._rewind(seq, ahead)
        if self._interval is not None and self._interval.steps:
            self._interval.guessed = False
            # The step was let pass already, and now it is seen to have ended.
            self._seen(now_s)

    def _stretch(self, seq: Sequence, tokens: int) -> None:
        """Its chunk was a few tokens longer than composed: it is heard who has ended when the next step is under way,
        and a prompt has got what they would have taken of it."""
        item = self._under_way[0] if len(self._under_way) == 1 else None
        if item is None or tokens > seq.prompt_tokens:
            return
        step, size = item.step, self._settings.block_size
        for place, (other, start, end) in enumerate(step.chunks):
            if other is not seq or not 0 < tokens - end <= len(step.decodes) or self._completes(seq, end):
                continue
            seq.computed += tokens - end
            if self._completes(seq, tokens):
                seq.generated = 1
            new = max(0, -(-seq.computed // size) - seq.shared_blocks - seq.blocks)
            seq.blocks += new
            self._take(new)
            chunks = (*step.chunks[:place], (seq, start, tokens), *step.chunks[place + 1 :])
            item.step = msgspec.structs.replace(step, chunks=chunks)
            return

    def first_token(self, seq_id: str, now_s: float) -> None:
        """Its prefill is done, and the step that finished it has just ended."""
        self.advance(now_s)
        if self._is_early():
            self._early.append((seq_id, now_s))
        else:
            self._first_token(seq_id, now_s)

    def _is_early(self) -> bool:
        """Whether a batch is still to come that says who was in the step under way: it and the tokens come by ways of
        their own, and who is first differs by milliseconds."""
        item = self._to_be_announced()
        if item is None or self._told_s > self._began_s:
            return False
        return (item.step.admitted > 0 or bool(self._queue.waiting)) and self._stores(item.step)

    def _take_early(self) -> None:
        early, self._early = self._early, []
        for seq_id, first_token_s in early:
            self._first_token(seq_id, first_token_s)

    def _first_token(self, seq_id: str, now_s: float) -> None:
        seq = self._sequences.get(seq_id)
        if seq is None or seq_id in self._turns:
            return
        if not self._emitted(seq):
            self._catch_up(lambda: self._emitted(seq) > 0, now_s)
            if not self._emitted(seq):
                self._force(seq, now_s)
        if self._takes_turns:
            self._turns.begins(seq_id, now_s)

    def finish(self, seq_id: str, now_s: float, output_tokens: int | None = None, evicts: bool = False) -> None:
        """It left the engine, however it ended, after so many tokens if that is known.

        A prefill that is given up goes on to the end of its step; all other ends are ends of steps. `evicts`: what is
        pushed out of the cache is computed anew, and not fetched from elsewhere.
        """
        self.advance(now_s)
        self._take_early()
        seq = self._sequences.get(seq_id)
        if seq is None:
            return
        if self._takes_turns:
            self._learn_from_output(seq, output_tokens, now_s)
        elif output_tokens is not None and self._emitted(seq):
            if self._interval is not None:
                self._interval.guessed = False
            ahead = self._emitted(seq) - output_tokens
            if ahead < 0:
                self._catch_up(lambda: self._emitted(seq) >= output_tokens, now_s, timed=False)
            elif ahead > 0:
                self._rewind(seq, ahead)
            # With asynchronous scheduling the one under way was composed before the end was known, whoever is in it.
            can_be_taken_back = len(self._under_way) == 1 and not self._settings.async_scheduling
            if can_be_taken_back and self._booked_s <= self._began_s and not self._under_way[0].step.preempted:
                step = self._under_way[0].step
                if any(seq is other for other in step.decodes) and self._emitted(seq) == output_tokens:
                    # Its last token came with the step before: the one under way was composed without it.
                    self._take_back()
        self._unbooked.departs(seq, self._tail(seq))
        self._remove(seq)
        if evicts:
            self._lower_credits(seq)
        self._kept_out = None
        self._changed()
        oldest = self._under_way[0].step if self._under_way else None
        if oldest is not None and seq.watched and any(seq is other for other, _, _ in oldest.chunks):
            self._given_up = oldest
        self._rest()

    @property
    def _takes_turns(self) -> bool:
        """Prefill and decode steps take turns, so that all who decode have had the same decode steps."""
        return self._settings.family == "sglang"

    def _learn_from_output(self, seq: Sequence, output_tokens: int | None, now_s: float) -> None:
        """How many decode steps there were since its first token is known now, and of what else in the same time."""
        if output_tokens is None or seq.id not in self._turns or not self._emitted(seq):
            return
        self._step_ended(seq, output_tokens, now_s)
        ahead = self._emitted(seq) - output_tokens
        sample = self._turns.learn(seq.id, output_tokens, now_s)
        if sample is not None and output_tokens >= _MIN_OUTPUT_TOKENS and self._on_sample is not None:
            self._on_sample(sample)
        if not ahead or not self._uncompose(0):
            return
        self._move_decodes(seq, -ahead)
        for other in self._queue.running:
            generated = self._turns.generated(other.id)
            if other is not seq and not other.prefilling and generated is not None:
                self._move_decodes(other, generated - other.generated)
        if self._settings.async_scheduling:
            # It was composed when it was not known yet that this one would end.
            self._composes_s = now_s
            self._compose(1)
        self._changed()

    def _step_ended(self, seq: Sequence, output_tokens: int, now_s: float) -> None:
        """The step that gave its last token has just ended: with overlap one is under way, and the next is composed."""
        while self._under_way and self._emitted(seq) < output_tokens:
            if not any(seq is other for other in self._under_way[0].step.decodes):
                break
            self._end_step(now_s)
        if self._emitted(seq) == output_tokens and self._uncompose(1 if self._settings.async_scheduling else 0):
            self._began_s = self._composes_s = now_s

    def _uncompose(self, keep: int) -> bool:
        """Takes back what was composed too early, but for so many steps; False if that cannot be done."""
        if any(item.step.preempted for item in list(self._under_way)[keep:]):
            return False
        queue = self._queue
        while len(self._under_way) > keep:
            item = self._under_way.pop()
            present = self._sequences
            for seq in item.step.decodes:
                if seq.id in present:
                    self._move_decodes(seq, -1)
            undo(queue, msgspec.structs.replace(item.step, decodes=()))
            queue.reserve_ratio, queue.shut, queue.unseen, queue.decodes_first = item.before
        return True

    def _count_decodes(self, steps: int, but: Set[int] = frozenset()) -> None:
        """There were so many decode steps more than was counted, or less."""
        for other in self._queue.running:
            if not other.prefilling and id(other) not in but:
                self._move_decodes(other, steps)
        self._turns.decoded(steps)
        self._changed()

    def settle(self, now_s: float | None = None) -> None:
        """The step that comes next is composed from what is known so far: newer news of the cache are not for it."""
        if now_s is not None:
            self.advance(now_s)
        elif self._composes_s is not None:
            self._compose()
        self._kept_out = None

    def advance(self, now_s: float) -> None:
        """Lets steps pass that have ended by `now_s` and leave no sign."""
        if self._early and now_s - self._early[0][1] > _EARLY_S:
            self._take_early()
        if self._is_closed(now_s):
            self._compose()
        looked_at = 0
        while self._under_way and self._began_s + self._under_way[0].seconds <= now_s:
            oldest = self._under_way[0]
            if self._awaited():
                if not self._is_doubtful(now_s):
                    break
                self._give_up_unbooked()
                if self._is_closed(now_s):
                    self._compose()
                continue
            looked_at += _STEP_LOOKED_AT + len(self._queue.running)
            if looked_at > _MOST_LOOKED_AT:
                self.cut += 1
                break
            if self._interval is not None:
                self._interval.guessed = True
            if self._lasts(oldest.step):
                self._skip_decode_steps(oldest, now_s)
            else:
                self._end_step(self._began_s + oldest.seconds)
            if self._is_closed(now_s):
                self._compose()
        if len(self._unbooked):
            self._doubt_unbooked(now_s)

    def _doubt_unbooked(self, now_s: float) -> None:
        """Those go that have been silent for too long, or that an engine with nothing else to do does not let in."""
        for seq in self._unbooked.silent(self._settings.block_size):
            self._drop(seq)
        if self._under_way or self._composes_s is not None or not len(self._unbooked):
            return
        self._composes_s = now_s
        self._compose()
        if not self._under_way:
            for seq in [seq for seq in self._queue.waiting if not seq.booked]:
                self._drop(seq)

    def _is_doubtful(self, now_s: float) -> bool:
        """Whether the oldest step under way is overdue, and only somebody nobody booked would leave a sign of it."""
        if not len(self._unbooked):
            return False
        oldest = self._under_way[0]
        if now_s < self._began_s + (1.0 + _DOUBT_RATIO) * oldest.seconds + _DOUBT_S:
            return False
        return not self._awaited(booked_only=True)

    def _give_up_unbooked(self) -> None:
        """The step under way had nothing of those that nobody booked: they are not there."""
        size = self._settings.block_size
        missed = [seq for item in self._under_way for seq in would_store(item.step, size)]
        if len(self._under_way) == 1 and not self._under_way[0].step.preempted:
            self._take_back()
        for seq in missed:
            if seq in self._unbooked:
                if not self._unbooked.is_seen(seq):
                    self._unbooked.did_not_come(seq)
                self._drop(seq)

    def _is_closed(self, now_s: float) -> bool:
        """Whether all are known by now who are part of the step that comes next."""
        return self._composes_s is not None and self._composes_s - self._lead_s < now_s - _INSTANT_S

    def begins_s(self, now_s: float) -> float:
        """When the next step begins that a newcomer can be part of."""
        self.advance(now_s)
        if self._composes_s is None or self._under_way:
            return self._next_step_s(now_s)
        # Composed by the engine only when this instant is over: the newcomer is part of it.
        return max(now_s, self._composes_s)

    def timeline(self, now_s: float, budget: Budget | None = None, priority: int | None = None) -> Timeline:
        """The steps to come as of now; computed again only when something has changed since, and as far as there is a
        budget for it. Who comes with a `priority` may overtake others, where the engine goes by that."""
        begins_s = self.begins_s(now_s)
        self._looked_s = now_s
        if priority is not None and (ahead := self._ahead_of(priority)) is not None:
            return self._overtaking(ahead, begins_s, budget)
        return self._outlook.renewed(begins_s, budget)

    def standing_timeline(self, now_s: float, budget: Budget, priority: int | None = None) -> Timeline | Guess:
        """What was computed before; of what has happened since it knows bookings only. A guess if it is of no use."""
        begins_s = self.begins_s(now_s)
        if priority is not None and (ahead := self._ahead_of(priority)) is not None:
            self._looked_s = now_s
            if len(ahead) <= _GLANCED_AT:
                return self._overtaking(ahead, begins_s, budget)
            tokens = sum(seq.prefill_left for seq in itertools.chain(ahead.running, ahead.waiting))
            return Guess(begins_s, tokens, self._settings, self._cost)
        timeline = self._outlook.standing(begins_s, budget)
        if timeline is not None and (self._outlook.fresh or self._loaded().prefilling):
            return timeline
        return Guess(begins_s, self._loaded().prefill_tokens, self._settings, self._cost)

    def least_wait_s(self, now_s: float, priority: int) -> float | None:
        """How long whoever comes now waits at least, and be it with a single token; None where no timeline that is up
        to date says so. Everything that he computes takes him what it takes him alone, or longer."""
        saved_a_step_s = 0.0
        if self.crowded:
            # Who needs space will be looked at in other futures too, where those who decode may have ended.
            if self._settings.prefill_decode_interval:
                return None
            saved_a_step_s = len(self) * self._cost.per_decode_s
        opens_s = self._outlook.surely_opens_s(self.begins_s(now_s), saved_a_step_s)
        if opens_s is None or self._ahead_of(priority) is not None:
            return None
        return max(0.0, opens_s - now_s)

    def _ahead_of(self, priority: int) -> Queue | None:
        """Who is before a newcomer of this priority, if it overtakes anybody."""
        queue = self._queue
        if self._settings.scheduling_policy == "fcfs" or not queue.waiting or queue.waiting[-1].priority <= priority:
            return None
        return replace(queue, waiting=deque(itertools.takewhile(lambda seq: seq.priority <= priority, queue.waiting)))

    def _overtaking(self, ahead: Queue, begins_s: float, budget: Budget | None) -> Timeline:
        sight = self._look(begins_s, ahead)
        if budget is not None:
            budget.left -= sight.run.work
        return sight.timeline()

    @property
    def crowded(self) -> bool:
        """Whether those who wait need more KV space than is free: what nobody holds is taken by them."""
        free = self._queue.free_blocks
        # Less than none is free where what runs holds more than a cache that has become smaller.
        return free is not None and self._waiting_blocks() > max(0, free)

    def lasting_blocks(self, hashes: BlockHashes, blocks: int, steps: float) -> int:
        """Of a newcomer's first `blocks`, which are cached or on their way now, what quite likely is left when it is
        admitted, so many steps from now.

        Where those ahead of it take more space than is free, nothing stays cached but what somebody still holds or has
        held until shortly before.
        """
        free, wanted = self._queue.free_blocks, self._waiting_blocks()
        if free is None or wanted <= max(0, free) or self._lengths is None:
            return blocks
        stays = steps * max(0, free) / wanted  # steps until what nobody holds is taken
        curve = self._lengths(self._looked_s)
        steps_until: dict[str, float] | None = None  # who waits is admitted
        gone = 1.0
        for looked_at, (seq_id, common) in enumerate(self._prefixes.nearest(hashes)):
            if looked_at == _OWNERS_LOOKED_AT:
                break
            seq = self._sequences[seq_id]
            left = steps - stays
            if not seq.generated and not seq.blocks:
                if steps_until is None:
                    steps_until = self._steps_until_admitted(steps / wanted)
                left -= steps_until.get(seq_id, 0.0)
            ends = seq.generated + max(0, int(left))
            if seq.max_output is None or ends < seq.max_output:
                gone *= 1.0 - curve.longer(ends) / (curve.longer(seq.generated) or 1.0)
            if gone <= _MAY_BE_GONE:
                return min(blocks, common)
        return 0

    def _waiting_blocks(self) -> int:
        """Of KV space that who waits needs."""
        if self._wanted is None:
            size = self._settings.block_size
            self._wanted = sum(-(-(seq.prompt_tokens + seq.generated) // size) for seq in self._queue.waiting)
        return self._wanted

    def _steps_until_admitted(self, steps_a_block: float) -> dict[str, float]:
        size, steps = self._settings.block_size, 0.0
        until = {}
        for seq in self._queue.waiting:
            until[seq.id] = steps
            steps += steps_a_block * -(-(seq.prompt_tokens + seq.generated) // size)
        return until

    @property
    def opens_s(self) -> float:
        """When those who prefill let a newcomer in at the earliest, by the timeline that stands."""
        return self._outlook.opens_s

    @property
    def timeline_is_fresh(self) -> bool:
        """Whether nothing has happened since the timeline was computed."""
        return self._outlook.fresh

    def _look(self, begins_s: float, ahead: Queue | None = None) -> Sight:
        """`ahead`: of the queue, only that part."""
        queue = self._queue if ahead is None else ahead
        sequences = self._sequences.values() if ahead is None else [*ahead.running, *ahead.waiting]
        curve = self._lengths(self._looked_s) if self._lengths is not None else None
        if curve is not None:
            for seq in sequences:
                if seq.generated >= seq.expected_output and seq.draws:
                    # It has outlived what was drawn for it.
                    seq.expected_output = curve.length(seq.draws[0], seq.generated, seq.max_output)
        ends = {seq.id: whole_output(seq, seq.expected_output) for seq in sequences}
        run, kind = _RUNS[self._settings.family]
        if shares := self._shares(ends):
            run = partial(run, shares=shares)
        first = run(queue, self._settings, self._cost, ends)
        count = min((len(seq.draws) for seq in sequences), default=0) - 1
        if curve is None or count < 1:
            return Sight(begins_s, first, None, kind)
        # As it is now: a future is imagined when somebody asks, and by then the queue may have moved on.
        settings, cost = self._settings, self._cost

        def length(seq: Sequence, number: int) -> int | None:
            if number >= len(seq.draws):
                return None
            return curve.length(seq.draws[number], seq.generated, seq.max_output)

        def imagine(number: int) -> RunForward:
            drawn = {seq.id: curve.length(seq.draws[number], seq.generated, seq.max_output) for seq in sequences}
            ahead: RunForward = run(queue, settings, cost, drawn)
            return ahead

        return Sight(begins_s, first, Others(count, imagine, length, self._pace if ahead is None else None), kind)

    def _shares(self, ends: Mapping[str, int]) -> Mapping[str, Share]:
        """Which blocks of those in flight are not free when they end. Who waits ends after who runs, one by one."""
        if self._settings.family != "vllm" or self._queue.free_blocks is None or not self._prefixes.any_alike:
            return {}
        order: dict[str, float] = {seq.id: ends[seq.id] - seq.generated for seq in self._queue.running}
        order |= {seq.id: _WAITS + place for place, seq in enumerate(self._queue.waiting)}
        return self._prefixes.shares(order)

    # Inside

    def _next_step_s(self, now_s: float) -> float:
        if not self._under_way:
            return now_s
        end_s = self._began_s + self._under_way[0].seconds
        late_s = now_s - end_s
        if late_s > _GRACE_S + _GRACE_RATIO * self._under_way[0].seconds:
            end_s = now_s + late_s
        elif late_s > 0:
            end_s = now_s
        return end_s + sum(later.seconds for later in list(self._under_way)[1:])

    def _loaded(self) -> _Load:
        if self._load is None:
            # What the steps under way do has not happened yet: tokens to come, and where chunks begin.
            to_come: dict[int, int] = {}
            starts: dict[int, int] = {}
            for item in self._under_way:
                for seq in item.step.decodes:
                    to_come[id(seq)] = to_come.get(id(seq), 0) + 1
                for seq, start, end in item.step.chunks:
                    starts[id(seq)] = min(start, starts.get(id(seq), start))
                    if self._completes(seq, end):
                        to_come[id(seq)] = to_come.get(id(seq), 0) + 1
            prefilling = tokens = 0
            most = len(self._under_way)
            for seq in self._sequences.values():
                if seq.generated > most:
                    continue
                key = id(seq)
                if not seq.generated or seq.generated == to_come.get(key):
                    prefilling += 1
                    left = seq.prompt_tokens - starts.get(key, seq.computed)
                    if left > 0:
                        tokens += left
            self._load = _Load(prefilling, len(self._sequences) - prefilling, tokens)
        return self._load

    def _emitted(self, seq: Sequence) -> int:
        """Tokens of it that have left the engine."""
        count = seq.generated
        if count:
            for item in self._under_way:
                step = item.step
                if any(seq is other for other in step.decodes) or any(
                    seq is other and self._completes(seq, end) for other, _, end in step.chunks
                ):
                    count -= 1
        return count

    @staticmethod
    def _completes(seq: Sequence, end: int) -> bool:
        return end >= seq.prompt_tokens

    def _announced(self, seq: Sequence) -> int:
        """Tokens of it whose blocks must have been announced by the step that has ended last.

        Prefill: what was scheduled when that step's output was looked at, so with asynchronous scheduling a step more.
        """
        computed = seq.computed
        if not self._under_way:
            return computed
        decoding = sum(any(seq is other for other in item.step.decodes) for item in self._under_way)
        if decoding:
            return computed - decoding
        if self._composes_s is None:
            for other, start, _ in self._under_way[-1].step.chunks:
                if other is seq:
                    return start
        return computed

    def _whose(self, run: StoredRun) -> tuple[Sequence | None, int]:
        """Which sequence a stored run belongs to, and how many of its tokens are scheduled at least."""
        size = self._settings.block_size
        seq = self._tails.get(run.parent) if run.parent is not None else None
        if seq is not None and (
            seq.generated or run.first is None or not seq.booked or self._next_hash(seq, size) == run.first
        ):
            known = self._tail_of[seq.id][1]
            blocks = known + run.blocks
            self._set_tail(seq, run.last, blocks)
            if run.first is not None and known == len(seq.hashes) + len(seq.output_hashes):
                seq.output_hashes.append(run.first)
            return seq, blocks * size
        if run.first is None:
            return None, 0
        # Where its chunk begins is where the run is expected to begin.
        for item in reversed(self._under_way):
            for seq, start, end in item.step.chunks:
                place = start // size
                expected = _hash_at(seq, place)
                # Of what a resumed sequence computes beyond what it had stored before, no hash is known.
                fits = expected == run.first if expected is not None else end // size - place == run.blocks
                if fits and seq.id in self._sequences:
                    self._set_tail(seq, run.last, place + run.blocks)
                    if expected is None:
                        seq.output_hashes.append(run.first)
                    return seq, (place + run.blocks) * size
        return None, 0

    def _next_hash(self, seq: Sequence, size: int) -> int | None:
        blocks = self._tail_of[seq.id][1]
        return int(seq.hashes[blocks]) if blocks < len(seq.hashes) else None

    def _set_tail(self, seq: Sequence, tail: int, blocks: int) -> None:
        self._forget_tail(seq)
        self._tails[tail] = seq
        self._tail_of[seq.id] = tail, blocks

    def _reusable(self, seq: Sequence) -> tuple[int, int]:
        """What the engine would find cached of a waiting sequence now, in tokens, and blocks of it that others hold."""
        size = self._settings.block_size
        if not len(seq.hashes) or self._cached_blocks is None:
            return seq.computed, seq.shared_blocks
        hashes = np.asarray(seq.hashes, np.uint64)
        run, held = self._cached_blocks(hashes), 0
        if seq.output_hashes and run == len(hashes):
            # Resumed after a preemption: what it generated is stored behind its prompt.
            run = self._cached_blocks(np.concatenate([hashes, np.array(seq.output_hashes, np.uint64)]))
        in_flight = self._settings.family == "vllm"  # a prompt enters SGLang's tree with its result
        for other, common in self._alike(seq):
            if common <= held:
                break
            held = max(held, min(common, -(-other.computed // size)))
            if in_flight:
                run = max(run, min(common, other.computed // size))
        tokens = reusable_tokens(run, size, seq.prompt_tokens + seq.generated)
        return tokens, min(held, tokens // size)

    def _alike(self, seq: Sequence) -> Iterator[tuple[Sequence, int]]:
        """Running sequences that begin with the same block, and how many blocks they have in common, most first."""
        running = {other.id for other in self._queue.running}
        for seq_id, common in self._prefixes.nearest(seq.hashes):
            if seq_id in running and seq_id != seq.id:
                yield self._sequences[seq_id], common

    def _changed(self) -> None:
        self._outlook.changed()
        self._load = self._wanted = None

    def _compose(self, depth: int | None = None) -> None:
        """Composes the next step, and with asynchronous scheduling the one after it as well."""
        assert self._composes_s is not None
        if not self._under_way:
            self._began_s = self._composes_s
            self._queue.unseen = frozenset()
        self._composes_s, self._lead_s = None, 0.0
        depth = depth or (2 if self._settings.async_scheduling else 1)
        queue = self._queue
        while len(self._under_way) < depth:
            before = queue.reserve_ratio, queue.shut, queue.unseen, queue.decodes_first
            step = self._rule(self._queue, self._settings, lookup=self._reusable)
            self._let_go(step)
            if step.empty:
                break
            waiting = self._queue.waiting
            self._kept_out = waiting[0] if waiting and not step.chunks and not step.preempted else None
            seconds = self._cost.step_s(step.new_tokens, step.squares, len(step.decodes))
            self._under_way.append(_UnderWay(step, seconds, before))
        if not self._under_way:
            self._interval = None
        self._changed()

    def _end_step(self, end_s: float) -> None:
        """The oldest step under way has ended; the next one is composed soon."""
        ended = self._under_way.popleft().step
        if self._given_up is ended:
            self._given_up = None
        if self._interval is not None:
            self._interval.add(ended)
        if self._takes_turns:
            self._turns.passed(ended)
        self._began_s = end_s
        if self._sequences:
            self._composes_s = end_s
        elif not self._under_way:
            self._interval = None
        self._changed()

    def _catch_up(self, reached: Callable[[], bool], now_s: float, timed: bool = True) -> None:
        """Steps have ended, the last of them just now: as many as it takes. Ends are heard of late: not `timed`."""
        behind = looked_at = 0
        while not reached() and behind < _MAX_STEPS_BEHIND and looked_at < _MOST_LOOKED_AT:
            looked_at += _STEP_LOOKED_AT + len(self._queue.running)
            if self._composes_s is not None:
                self._compose()
            if not self._under_way or (self._stuck() and behind):
                break
            self._end_step(now_s)
            behind += 1
        if behind and timed:
            self._seen(now_s)

    def _stuck(self) -> bool:
        """Whether nothing but decodes goes on while somebody waits: more steps would show nothing."""
        return bool(self._queue.waiting) and not any(item.step.chunks for item in self._under_way)

    def _rewind(self, seq: Sequence, steps: int) -> None:
        """The shadow has let more steps of decodes pass than there were."""
        interval = self._interval
        if interval is not None and interval.plain >= steps:
            interval.plain -= steps
            interval.steps -= steps
            for other in self._queue.running:
                if other.generated > steps and not other.prefilling:
                    self._move_decodes(other, -steps)
                    interval.decoding -= steps
        else:
            # It alone is known better.
            self._move_decodes(seq, -min(steps, seq.generated - 1))
            self._interval = None
        self._changed()

    def _move_decodes(self, seq: Sequence, steps: int) -> None:
        """It has generated so many tokens more than was counted, or less."""
        steps = max(steps, 1 - seq.generated)
        if seq.max_output is not None:
            steps = min(steps, seq.max_output - seq.generated)
        seq.generated += steps
        seq.computed += steps
        if not seq.blocks and not seq.shared_blocks:
            return  # it has given way, and holds nothing until it is let in again
        new = max(0, -(-seq.computed // self._settings.block_size) - seq.shared_blocks) - seq.blocks
        seq.blocks += new
        self._take(new)

    def _seen(self, now_s: float) -> None:
        """A step end was seen just now."""
        interval = self._interval
        if (
            interval is not None
            and interval.steps
            and not interval.guessed
            and self._on_sample is not None
            and not self._miscounted(interval, now_s)
            and (not self._unbooked.seen_lately(now_s) or self._confirmed(interval))
        ):
            self._on_sample(
                StepSample(
                    now_s - interval.since_s, interval.new_tokens, interval.squares, interval.decoding,
                    interval.steps, interval.arrival_tokens,
                )
            )  # fmt: skip
        self._interval = _Interval(now_s)
        self._began_s = now_s
        self._changed()

    def _confirmed(self, interval: _Interval) -> bool:
        """Whether what it is taken to have computed is what was stored: where others than ours come and go, steps are
        not counted well enough."""
        chunks, tokens = self._told
        size = self._settings.block_size
        return interval.steps == 1 and chunks > 0 and tokens <= interval.new_tokens < tokens + size * chunks

    def _miscounted(self, interval: _Interval, now_s: float) -> bool:
        """Whether more has passed by the count than any engine can have done in the time."""
        predicted_s = interval.steps * self._cost.fixed_s + self._cost.per_token_s * interval.new_tokens
        return now_s - interval.since_s < predicted_s / _FASTEST

    def _awaited(self, booked_only: bool = False) -> bool:
        """Whether the end of the oldest step under way must leave a sign."""
        present = self._sequences
        for seq, _, end in self._under_way[0].step.chunks:
            if seq.watched and end >= seq.prompt_tokens and seq.generated <= 2 and seq.id in present:
                return True
        # Asynchronous: blocks are announced a step before they are computed.
        return self._stores(self._under_way[-1].step, booked_only)

    def _lasts(self, step: Step) -> bool:
        """Whether this step is decodes only and will be the same again until somebody comes or goes."""
        queue, settings = self._queue, self._settings
        full = len(queue.running) >= settings.max_num_seqs or len(step.decodes) >= settings.max_num_batched_tokens
        kept_out = queue.shut if self._takes_turns else bool(queue.waiting) and queue.waiting[0] is self._kept_out
        shut = not queue.waiting or full or kept_out
        if queue.decodes_first and (queue.waiting or any(seq.prefilling for seq in queue.running)):
            return False
        if not shut or any(item.step.chunks for item in self._under_way):
            return False
        # For who has left, or was preempted since, nothing is computed any more and no space is taken.
        running = {id(seq) for seq in queue.running}
        return all(id(seq) in running for seq in step.decodes)

    def _skip_decode_steps(self, oldest: _UnderWay, now_s: float) -> None:
        """Decode-only steps are all alike: any number of them passes at once."""
        steps = int((now_s - self._began_s - oldest.seconds) / oldest.seconds) + 1
        queue = self._queue
        if steps > 1 and queue.free_blocks is not None:
            steps = self._steps_in_space(oldest.step.decodes, steps, queue.free_blocks)
        if steps > 1:
            more = steps - 1
            size = self._settings.block_size
            for seq in oldest.step.decodes:
                seq.generated += more
                seq.computed += more
                if queue.free_blocks is not None:
                    new = -(-seq.computed // size) - seq.blocks - seq.shared_blocks
                    if new > 0:
                        seq.blocks += new
                        queue.free_blocks -= new
            if self._interval is not None:
                self._interval.steps += more
                self._interval.plain += more
                self._interval.decoding += more * len(oldest.step.decodes)
            self._began_s += more * oldest.seconds
            if self._takes_turns:
                self._turns.passed(oldest.step, more)
                queue.reserve_ratio = ratio_after(queue.reserve_ratio, more, self._settings)
                queue.decodes_first = max(0, queue.decodes_first - more)
        self._end_step(self._began_s + oldest.seconds)

    def _steps_in_space(self, decodes: ReadOnly[Sequence], steps: int, free_blocks: int) -> int:
        """The most steps, up to `steps` and at least one, that preempt nobody."""
        size = self._settings.block_size
        low, high = 1, min(steps, (free_blocks + len(decodes)) * size) + 1
        while low + 1 < high:
            middle = (low + high) // 2
            needs = (-(-(seq.computed + middle) // size) - seq.blocks - seq.shared_blocks for seq in decodes)
            if sum(need for need in needs if need > 0) <= free_blocks:
                low = middle
            else:
                high = middle
        return low

    def _force(self, seq: Sequence, now_s: float) -> None:
        """Whatever the rule said: its token is there, so its prefill is done."""
        self.forced += 1
        self._interval = None
        if self._takes_turns:
            # It was prefilled while decoding was taken to go on; with mixed chunks it did.
            step = Step(((seq, min(seq.computed, seq.credited), seq.prompt_tokens),), (), 0)
            prefill_s = self._cost.step_s(step.new_tokens, step.squares, 0)
            if not self._settings.enable_mixed_chunk:
                self._count_decodes(-int(prefill_s / self._cost.step_s(0, 0, self._turns.decoding)), {id(seq)})
            self._turns.passed(step)
        if any(seq is other for other in self._queue.waiting):
            self._queue.waiting = deque(other for other in self._queue.waiting if other is not seq)
            self._queue.running.append(seq)
        seq.generated = max(1, seq.generated)
        seq.computed = seq.prompt_tokens + seq.generated - 1
        new = max(0, -(-seq.computed // self._settings.block_size) - seq.blocks - seq.shared_blocks)
        seq.blocks += new
        self._take(new)
        self._under_way.clear()
        self._composes_s = now_s
        self._changed()

    def _take(self, blocks: int) -> None:
        if self._queue.free_blocks is not None:
            self._queue.free_blocks -= blocks

    def _remove(self, seq: Sequence) -> None:
        queue = self._queue
        del self._sequences[seq.id]
        self._guessed_alike.discard(seq.id)
        self._prefixes.remove(seq.id)
        self._turns.ends(seq.id)
        self._forget_tail(seq)
        before = len(queue.running)
        queue.running = [other for other in queue.running if other is not seq]
        queue.waiting = deque(other for other in queue.waiting if other is not seq)
        queue.shut = queue.shut and len(queue.running) == before
        if seq.blocks and queue.free_blocks is not None and len(seq.hashes):
            self._pass_on(seq)
        self._take(-seq.blocks)

    def _lower_credits(self, gone: Sequence) -> None:
        """Who waits, and was to find what this one held, will not, where the queue before it takes more than is free
        and nobody else ahead of it holds the same."""
        free, size = self._queue.free_blocks, self._settings.block_size
        if free is None or not self.crowded:
            return
        waits: dict[str, tuple[int, int]] | None = None
        for seq_id, common in itertools.islice(self._prefixes.nearest(gone.hashes), _OWNERS_LOOKED_AT):
            seq = self._sequences[seq_id]
            credited = seq.computed // size
            if seq.generated or seq.blocks or not 0 < credited <= common:
                continue
            if waits is None:
                waits = self._waits()
            place, before = waits.get(seq_id, (0, 0))
            if before <= free:
                continue
            kept = 0
            for other_id, shared in itertools.islice(self._prefixes.nearest(seq.hashes), _OWNERS_LOOKED_AT):
                if other_id != seq_id and waits.get(other_id, (-1, 0))[0] < place:
                    kept = shared
                    break
            if kept < credited:
                seq.computed = kept * size
                seq.shared_blocks = min(seq.shared_blocks, kept)

    def _waits(self) -> dict[str, tuple[int, int]]:
        """Of each that waits its place in the queue, and the blocks that are filled before its turn."""
        waits, tokens = {}, 0
        for place, seq in enumerate(self._queue.waiting):
            waits[seq.id] = place, tokens // self._settings.block_size
            tokens += seq.left
        return waits

    def _pass_on(self, seq: Sequence) -> None:
        """Blocks that counted for one that leaves, and that others hold as well, count for one of those from now on."""
        size = self._settings.block_size
        heir, kept = None, 0
        for other, common in self._alike(seq):
            if common <= kept:
                break
            shared = min(common, -(-other.computed // size))
            if shared > kept:
                heir, kept = other, shared
        inherited = kept - seq.shared_blocks
        if heir is not None and inherited > 0:
            inherited = min(inherited, heir.shared_blocks, seq.blocks)
            heir.shared_blocks -= inherited
            heir.blocks += inherited
            seq.blocks -= inherited

    def _tail(self, seq: Sequence) -> int | None:
        """The engine's name of its last block, if it is known."""
        known = self._tail_of.get(seq.id)
        return None if known is None else known[0]

    def _forget_tail(self, seq: Sequence) -> None:
        known = self._tail_of.pop(seq.id, None)
        if known is not None and self._tails.get(known[0]) is seq:
            del self._tails[known[0]]


def _hash_at(seq: Sequence, place: int) -> int | None:
    """Our hash of one of its blocks, if that is known."""
    if place < len(seq.hashes):
        return int(seq.hashes[place])
    place -= len(seq.hashes)
    return seq.output_hashes[place] if place < len(seq.output_hashes) else None
