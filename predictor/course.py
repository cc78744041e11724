"""One engine's steps, as far as they are taken to have come.

A queue; the steps that are composed and have not ended, one of them, or with asynchronous scheduling the one after it
as well; and what has passed since an end was seen. Here steps are composed, end and are taken back, and their count is
put right. What tells so, and when, is not known here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace

import msgspec

from predictor.block_owners import BlockOwners, Owner
from predictor.engines.sglang import may_preempt, ratio_after
from predictor.engines.step_rule import rule_of
from predictor.engines.vllm import ARRIVALS_APART, Queue, Sequence, Settings, Step, granted, undo
from predictor.kv_space import KvSpace
from predictor.outlook import Outlook
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHashes
from predictor.step_interval import StepInterval
from predictor.step_sample import StepSample
from predictor.stored_run import StoredRun
from predictor.told_step import storing
from predictor.turns import Turns
from predictor.unbooked import Unbooked

# Evidence that no so many steps explain is about something else than what is known here.
MAX_STEPS_BEHIND = 4096
# What is composed of what has passed, in sequences looked at; a step counts for so many besides. At most so much for a
# piece of evidence, and so much at one instant for all workers of a pool: some six milliseconds.
_MOST_LOOKED_AT, _LOOKED_AT_AN_INSTANT, _STEP_LOOKED_AT = 50_000, 8_000, 100
# A step that is overdue by more than this is taken to last as long again: nobody knows better.
_GRACE_S, _GRACE_RATIO = 0.05, 0.2
# Evidence of one step end comes in several pieces; those of one instant belong together.
_INSTANT_S = 1e-7


@dataclass(slots=True)
class Allowance:
    """How much of what has passed may be followed at one instant, for all who share it.

    A decision asks many workers, and some of them several times. Who is left behind goes on from there when it is asked
    again, and nobody waits for it.
    """

    left: int = 0
    at_s: float | None = None

    def take(self, looked_at: int, now_s: float) -> bool:
        if now_s != self.at_s:
            self.at_s, self.left = now_s, _LOOKED_AT_AN_INSTANT
        if self.left <= 0:
            return False
        self.left -= looked_at
        return True


@dataclass(frozen=True, slots=True)
class Load:
    """What a newcomer finds: sequences, and tokens that are still to be prefilled before it."""

    prefilling: int
    decoding: int
    prefill_tokens: int


@dataclass(slots=True)
class UnderWay:
    """A step that is composed and has not ended."""

    step: Step
    seconds: float  # predicted
    # What the queue had in SGLang's marks: its reserve ratio, whether it was shut, whom it had unseen, decodes first.
    before: tuple[float, bool, frozenset[str], int] = (0.0, False, frozenset(), 0)
    announced: bool = False  # a batch has come that names what it stores


@dataclass(frozen=True, slots=True)
class State:
    """A copy of what a worker is taken to be at, for whoever runs it forward in a way of his own."""

    settings: Settings
    queue: Queue
    under_way: tuple[Step, ...]  # composed and not ended, over the sequences of `queue`
    clock_s: float  # when the oldest of them began, or the next is composed
    emitted: Mapping[str, int]  # tokens of each sequence that have left the engine


class Course:
    """Times are absolute seconds of the caller's clock. `outlook` is told whenever the steps to come may be others."""

    def __init__(
        self,
        settings: Settings,
        cost: StepCost,
        unbooked: Unbooked,
        outlook: Outlook,
        cached_blocks: Callable[[BlockHashes], int] | None,
        on_sample: Callable[[StepSample], None] | None,
    ) -> None:
        self.settings = settings
        self.cost = cost
        self.rule = rule_of(settings)
        self.queue = Queue(free_blocks=settings.usable_blocks)
        self.sequences: dict[str, Sequence] = {}
        self.under_way: deque[UnderWay] = deque()  # the oldest first
        self.began_s = 0.0  # the oldest of them
        # The next step is composed once all that this instant brings has been heard: ends and arrivals are part of it.
        self.composes_s: float | None = None
        self.lead_s = 0.0  # so much earlier it is known who is part of it
        self.interval: StepInterval | None = None
        self._given_up: Step | None = None
        # It could not be let into the newest step, nor into any like it before something else happens than decodes.
        self.kept_out: Sequence | None = None
        # These have decoded for as many steps as were guessed: what one of them shows is true of all.
        self.guessed_alike: set[str] = set()
        self.told = 0, 0  # chunks of prompts that were announced last, and their tokens
        self.sees_blocks = False  # each step that stores a block is announced, and can be waited for
        self.turns = Turns()
        self.space = KvSpace(self.queue, self.sequences, settings, cached_blocks)
        self.owners = BlockOwners(self.sequences, settings.block_size)
        self.unbooked = unbooked
        self._outlook = outlook
        self._on_sample = on_sample
        self._arrivals = itertools.count(ARRIVALS_APART, ARRIVALS_APART)
        self._load: Load | None = None

    def set_settings(self, settings: Settings) -> None:
        self.settings = self.space.settings = settings
        self.owners.block_size = settings.block_size
        self.rule = rule_of(settings)
        usable = settings.usable_blocks
        self.kept_out = None
        self.queue.free_blocks = None if usable is None else usable - sum(seq.blocks for seq in self.queue.running)

    def changed(self) -> None:
        """Steps to come may be others than they were."""
        self._outlook.changed()
        self._load = self.space.wanted = None

    def counts_changed(self) -> None:
        """One more waits, behind all others: steps to come are the same, and then some."""
        self._load = self.space.wanted = None

    # Who is there

    @property
    def takes_turns(self) -> bool:
        """Prefill and decode steps take turns, so that all who decode have had the same decode steps."""
        return self.settings.family == "sglang"

    @property
    def looked_at_a_step(self) -> int:
        """What it takes to compose one, in sequences looked at."""
        queue = self.queue
        # TensorRT-LLM tries whoever waits: a shorter prompt may fit where those before it do not.
        tried = len(queue.waiting) if self.settings.family == "tensorrt_llm" else 0
        return _STEP_LOOKED_AT + len(queue.running) + tried

    @property
    def given_up(self) -> bool:
        """Whether a step is under way that prefills a sequence that has left."""
        return self._given_up is not None and any(item.step is self._given_up for item in self.under_way)

    def gives_up(self, step: Step) -> None:
        """A sequence that this step prefills has left."""
        self._given_up = step

    def wake(self, now_s: float) -> bool:
        """With nothing to do, it composes its next step now; False if it is at work."""
        if self.under_way or self.composes_s is not None:
            return False
        self.composes_s = now_s
        return True

    def rest(self) -> None:
        """It has nothing to do any more, if nobody is left."""
        if not self.sequences and not self.given_up:
            self.under_way.clear()
            self.interval = self.composes_s = None

    def arrives(self, seq: Sequence) -> None:
        seq.arrived = next(self._arrivals)
        self.sequences[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        queue = self.queue
        del self.sequences[seq.id]
        self.guessed_alike.discard(seq.id)
        self.turns.ends(seq.id)
        self.owners.forget(seq)
        before = len(queue.running)
        queue.running = [other for other in queue.running if other is not seq]
        queue.waiting = deque(other for other in queue.waiting if other is not seq)
        queue.shut = queue.shut and len(queue.running) == before
        self.space.remove(seq)

    def let_go(self, step: Step) -> None:
        """Of those that give way in it less is known."""
        for seq in step.preempted:
            self.unbooked.departs(seq, self.owners.tail(seq))
            self.owners.forget(seq)
            self.turns.breaks(seq.id)
            if not seq.booked:
                # Resumed, it will be taken for another.
                self.unbooked.gone(seq)
                self.remove(seq)

    @property
    def load(self) -> Load:
        if self._load is None:
            self._load = self._loaded()
        return self._load

    def _loaded(self) -> Load:
        # What the steps under way do has not happened yet: tokens to come, and where chunks begin.
        to_come = self._to_come()
        starts: dict[int, int] = {}
        for item in self.under_way:
            for seq, start, _ in item.step.chunks:
                starts[id(seq)] = min(start, starts.get(id(seq), start))
        prefilling = tokens = 0
        most = len(self.under_way) * self.queue.drafting.width
        for seq in self.sequences.values():
            if seq.generated > most:
                continue
            key = id(seq)
            if not seq.generated or seq.generated == to_come.get(key):
                prefilling += 1
                left = seq.prompt_tokens - starts.get(key, seq.computed)
                if left > 0:
                    tokens += left
        return Load(prefilling, len(self.sequences) - prefilling, tokens)

    def _to_come(self) -> dict[int, int]:
        """By sequence, tokens of the steps under way."""
        to_come: dict[int, int] = {}
        for item in self.under_way:
            for seq, gained in item.step.gained():
                to_come[id(seq)] = to_come.get(id(seq), 0) + gained
            for seq, _, end in item.step.chunks:
                if completes(seq, end):
                    to_come[id(seq)] = to_come.get(id(seq), 0) + 1
        return to_come

    def emitted(self, seq: Sequence) -> int:
        """Tokens of it that have left the engine."""
        count = seq.generated
        if count:
            for item in self.under_way:
                gained = item.step.gain_of(seq)
                if gained:
                    count -= gained
                elif any(seq is other and completes(seq, end) for other, _, end in item.step.chunks):
                    count -= 1
        return count

    def whose(self, run: StoredRun) -> Owner:
        return self.owners.whose(run, (item.step for item in reversed(self.under_way)))

    def announced(self, seq: Sequence) -> int:
        """Tokens of it whose blocks must have been announced by the step that has ended last.

        Prefill: what was scheduled when that step's output was looked at, so with asynchronous scheduling a step more.
        """
        computed = seq.computed
        if not self.under_way:
            return computed
        gained = sum(item.step.gain_of(seq) for item in self.under_way)
        if gained:
            return computed - gained
        if self.composes_s is None:
            for other, start, _ in self.under_way[-1].step.chunks:
                if other is seq:
                    return start
        return computed

    def state(self, now_s: float) -> State:
        copies = {id(seq): seq.copy() for seq in self.sequences.values()}
        queue = replace(
            self.queue,
            running=[copies[id(seq)] for seq in self.queue.running],
            waiting=deque(copies[id(seq)] for seq in self.queue.waiting),
        )
        steps = [
            Step(
                tuple((copies[id(seq)], start, end) for seq, start, end in item.step.chunks if id(seq) in copies),
                tuple(copies[id(seq)] for seq in item.step.decodes if id(seq) in copies),
                0,
            )
            for item in self.under_way
        ]
        clock_s = self.began_s if self.under_way else now_s if self.composes_s is None else self.composes_s
        emitted = {seq.id: self.emitted(seq) for seq in self.sequences.values()}
        return State(self.settings, queue, tuple(steps), clock_s, emitted)

    # Steps begin and end

    def is_closed(self, now_s: float) -> bool:
        """Whether all are known by now who are part of the step that comes next."""
        return self.composes_s is not None and self.composes_s - self.lead_s < now_s - _INSTANT_S

    def next_step_s(self, now_s: float) -> float:
        """When the first step begins that is not composed yet."""
        if not self.under_way:
            return now_s
        end_s = self.began_s + self.under_way[0].seconds
        late_s = now_s - end_s
        if late_s > _GRACE_S + _GRACE_RATIO * self.under_way[0].seconds:
            end_s = now_s + late_s
        elif late_s > 0:
            end_s = now_s
        return end_s + sum(later.seconds for later in list(self.under_way)[1:])

    def step_s(self, step: Step) -> float:
        return self.cost.step_s(step.new_tokens, step.squares, len(step.decodes))

    def compose(self, depth: int | None = None) -> None:
        """Composes the next step, and with asynchronous scheduling the one after it as well."""
        assert self.composes_s is not None
        queue = self.queue
        if not self.under_way:
            self.began_s = self.composes_s
            queue.unseen = frozenset()
        self.composes_s, self.lead_s = None, 0.0
        depth = depth or (2 if self.settings.async_scheduling else 1)
        while len(self.under_way) < depth:
            before = queue.reserve_ratio, queue.shut, queue.unseen, queue.decodes_first
            step = self.rule(queue, self.settings, lookup=self.space.reusable)
            self.let_go(step)
            if step.empty:
                break
            waiting = queue.waiting
            self.kept_out = waiting[0] if waiting and not step.chunks and not step.preempted else None
            self.under_way.append(UnderWay(step, self.step_s(step), before))
        if not self.under_way:
            self.interval = None
        self.changed()

    def end_step(self, end_s: float) -> None:
        """The oldest step under way has ended; the next one is composed soon."""
        ended = self.under_way.popleft().step
        if self.interval is not None:
            self.interval.add(ended)
        if self.takes_turns:
            self.turns.passed(ended)
        self.began_s = end_s
        if self.sequences:
            self.composes_s = end_s
        elif not self.under_way:
            self.interval = None
        self.changed()

    def seen(self, now_s: float) -> None:
        """A step end was seen just now."""
        interval = self.interval
        if interval is not None and self._on_sample is not None:
            sample = interval.sample(now_s, self.cost)
            # Where others than ours come and go, steps are not counted well enough.
            if sample is not None and (
                not self.unbooked.seen_lately(now_s) or interval.computed(*self.told, self.settings.block_size)
            ):
                self._on_sample(sample)
        self.interval = StepInterval(now_s)
        self.began_s = now_s
        self.changed()

    def stores(self, step: Step, booked_only: bool = False) -> bool:
        """Whether it completes a block of a prompt, which is announced."""
        return self.sees_blocks and any(
            (len(seq.hashes) if seq.booked else not booked_only) and seq.id in self.sequences
            for seq, _ in storing(step, self.settings.block_size)
        )

    def awaited(self, booked_only: bool = False) -> bool:
        """Whether the end of the oldest step under way must leave a sign."""
        present = self.sequences
        for seq, _, end in self.under_way[0].step.chunks:
            if seq.watched and end >= seq.prompt_tokens and seq.generated <= 2 and seq.id in present:
                return True
        # Asynchronous: blocks are announced a step before they are computed.
        return self.stores(self.under_way[-1].step, booked_only)

    def pass_oldest(self, now_s: float) -> None:
        """The oldest step under way has taken its time; if it is one of decodes, so have all like it until now."""
        if self.interval is not None:
            self.interval.guessed = True
        oldest = self.under_way[0]
        if self._lasts(oldest.step):
            self._skip_decode_steps(oldest, now_s)
        else:
            self.end_step(self.began_s + oldest.seconds)

    def _lasts(self, step: Step) -> bool:
        """Whether this step is decodes only and will be the same again until somebody comes or goes."""
        queue, settings = self.queue, self.settings
        taken = len(step.decodes) * (queue.drafting.width + settings.slots)
        full = len(queue.running) >= settings.max_num_seqs or taken >= settings.max_num_batched_tokens
        full = full and not may_preempt(queue, settings)
        kept_out = queue.shut if self.takes_turns else bool(queue.waiting) and queue.waiting[0] is self.kept_out
        shut = not queue.waiting or full or kept_out
        if queue.decodes_first and (queue.waiting or any(seq.prefilling for seq in queue.running)):
            return False
        if not shut or any(item.step.chunks for item in self.under_way):
            return False
        # For who has left, or was preempted since, nothing is computed any more and no space is taken.
        running = {id(seq) for seq in queue.running}
        return all(id(seq) in running for seq in step.decodes)

    def _skip_decode_steps(self, oldest: UnderWay, now_s: float) -> None:
        """Decode-only steps are all alike: any number of them passes at once."""
        steps = int((now_s - self.began_s - oldest.seconds) / oldest.seconds) + 1
        queue = self.queue
        if steps > 1 and queue.free_blocks is not None:
            steps = self._steps_in_space(oldest.step.decodes, steps, queue.free_blocks)
        if steps > 1:
            more = steps - 1
            size = self.settings.block_size
            since = queue.steps
            queue.steps += more
            for seq, most in self._granted(oldest.step.decodes):
                tokens = queue.drafting.gained(since, more, most)
                if seq.max_output is not None and not self.takes_turns:
                    tokens = max(0, min(tokens, seq.max_output - seq.generated))
                seq.generated += tokens
                seq.computed += tokens
                if queue.free_blocks is not None:
                    new = -(-seq.computed // size) - seq.blocks - seq.shared_blocks
                    if new > 0:
                        seq.blocks += new
                        queue.free_blocks -= new
            if self.interval is not None:
                self.interval.plain += more
                self.interval.add_decodes(more, len(oldest.step.decodes))
            self.began_s += more * oldest.seconds
            if self.takes_turns:
                self.turns.passed(oldest.step, more)
                queue.reserve_ratio = ratio_after(queue.reserve_ratio, more, self.settings)
                queue.decodes_first = max(0, queue.decodes_first - more)
        self.end_step(self.began_s + oldest.seconds)

    def _steps_in_space(self, decodes: ReadOnly[Sequence], steps: int, free_blocks: int) -> int:
        """The most steps, up to `steps` and at least one, that preempt nobody."""
        size, drafting, since = self.settings.block_size, self.queue.drafting, self.queue.steps
        low, high = 1, min(steps, (free_blocks + len(decodes)) * size) + 1
        while low + 1 < high:
            middle = (low + high) // 2
            needed = 0
            for seq, most in self._granted(decodes):
                gained = drafting.gained(since, middle, most)
                needed += max(0, -(-(seq.computed + gained) // size) - seq.blocks - seq.shared_blocks)
            if needed <= free_blocks:
                low = middle
            else:
                high = middle
        return low

    def _granted(self, decodes: ReadOnly[Sequence]) -> Iterator[tuple[Sequence, int | None]]:
        """Each, and what it takes of a step in which nobody else is: drafts may have no room."""
        most = granted(len(decodes), len(self.queue), self.settings, self.queue.drafting)
        return zip(decodes, most, strict=True)

    # Their count is put right

    def catch_up(self, reached: Callable[[], bool], now_s: float, timed: bool = True) -> None:
        """Steps have ended, the last of them just now: as many as it takes. Ends are heard of late: not `timed`."""
        behind = looked_at = 0
        while not reached() and behind < MAX_STEPS_BEHIND and looked_at < _MOST_LOOKED_AT:
            looked_at += self.looked_at_a_step
            if self.composes_s is not None:
                self.compose()
            if not self.under_way or (behind and self._stuck()):
                break
            self.end_step(now_s)
            behind += 1
        if behind and timed:
            self.seen(now_s)

    def _stuck(self) -> bool:
        """Whether nothing but decodes goes on while somebody waits: more steps would show nothing."""
        return bool(self.queue.waiting) and not any(item.step.chunks for item in self.under_way)

    def rewind(self, seq: Sequence, steps: int) -> None:
        """More steps of decodes were let pass than there were."""
        interval = self.interval
        if interval is not None and interval.plain >= steps:
            interval.plain -= steps
            interval.steps -= steps
            to_come = self._to_come()
            for other in self.queue.running:
                if other.generated - to_come.get(id(other), 0) > steps and not other.prefilling:
                    self.move_decodes(other, -steps)
                    interval.decoding -= steps
        else:
            # It alone is known better.
            self.move_decodes(seq, -min(steps, seq.generated - 1))
            self.interval = None
        self.changed()

    def move_decodes(self, seq: Sequence, steps: int) -> None:
        """It has generated so many tokens more than was counted, or less."""
        steps = max(steps, 1 - seq.generated, -seq.computed)
        if seq.max_output is not None:
            steps = min(steps, seq.max_output - seq.generated)
        seq.generated += steps
        seq.computed += steps
        # Who has given way holds nothing until it is let in again.
        if seq.blocks or seq.shared_blocks:
            self.space.fit(seq)

    def count_decodes(self, steps: int, but: Set[int] = frozenset()) -> None:
        """There were so many decode steps more than was counted, or less, of all but these."""
        for other in self.queue.running:
            if not other.prefilling and id(other) not in but:
                self.move_decodes(other, steps)
        self.turns.decoded(steps)
        self.changed()

    def take_back(self) -> None:
        """The step under way has not begun, or not like this: it is composed anew."""
        undo(self.queue, self.under_way.popleft().step)
        self.kept_out = None
        self.composes_s = self.began_s
        self.changed()

    def uncompose(self, keep: int) -> bool:
        """Takes back what was composed too early, but for so many steps; False if that cannot be done."""
        if any(item.step.preempted for item in list(self.under_way)[keep:]):
            return False
        queue = self.queue
        while len(self.under_way) > keep:
            item = self.under_way.pop()
            present = self.sequences
            for seq in item.step.decodes:
                if seq.id in present:
                    self.move_decodes(seq, -1)
            undo(queue, msgspec.structs.replace(item.step, decodes=()))
            queue.reserve_ratio, queue.shut, queue.unseen, queue.decodes_first = item.before
        return True


def completes(seq: Sequence, end: int) -> bool:
    """Whether a chunk that ends there is the last of its prompt, whose first token comes with it."""
    return end >= seq.prompt_tokens
