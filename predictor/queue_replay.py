"""A worker's queue run forward: a shadow of its scheduler, and the timeline that prices a newcomer.

The shadow follows the engine from outside. What was booked enters its queue, steps pass at their predicted cost, and
evidence corrects it: a first token says that a prefill is done, an end takes a sequence out. When reality is slower
than predicted, the shadow waits for the first token that it expects; when reality is faster, it catches up.

Requests behind do not change those ahead (first come, first served). So one timeline per worker holds for every
newcomer, until something changes: when each step ends, and how many tokens an endless prompt behind the queue would
have got by then. A newcomer's own chunks lengthen its steps by what its own prefill costs, whatever the chunks are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from math import ceil

from predictor.engines.vllm import Queue, Sequence, Settings, Step, room_beside, schedule
from predictor.prefill_cost import StepCost

# A timeline longer than this is cut: the rest goes on at the last step's pace. Bounds the work of one decision.
MAX_STEPS = 4000


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps to come, up to the first from which on nothing changes any more.

    `room_by_end[k]` is the number of tokens that an endless prompt behind the queue has got by the end of step k; after
    the last step it gets `room_after` tokens a step, each of which takes `step_after_s` beside its own work. Steps are
    in seconds after `begins_s`, so that a timeline moves as a whole with a step that is overdue.
    """

    begins_s: float  # when the first step begins, in absolute seconds: the one under way has ended by then
    starts_s: ReadOnly[float]
    ends_s: ReadOnly[float]
    room_by_end: ReadOnly[int]
    ready_s: float  # when the step after the listed ones begins
    room_after: int
    step_after_s: float

    def beginning_at(self, begins_s: float) -> Timeline:
        return Timeline(
            begins_s, self.starts_s, self.ends_s, self.room_by_end, self.ready_s, self.room_after, self.step_after_s
        )

    def finish_s(self, tokens: int) -> float:
        """When `tokens` of a newcomer would be prefilled, without what computing them costs; absolute seconds."""
        step = bisect_left(self.room_by_end, tokens)
        if step < len(self.ends_s):
            return self.begins_s + self.ends_s[step]
        done = self.room_by_end[-1] if self.room_by_end else 0
        return self.begins_s + self.ready_s + ceil((tokens - done) / self.room_after) * self.step_after_s

    def admitted_s(self) -> float:
        """When a newcomer's first tokens would be scheduled; absolute seconds."""
        step = bisect_right(self.room_by_end, 0)
        return self.begins_s + (self.starts_s[step] if step < len(self.starts_s) else self.ready_s)


@dataclass(frozen=True, slots=True)
class _Load:
    prefilling: int
    decoding: int
    prefill_tokens: int


class Shadow:
    """One worker's scheduler as seen from outside. Times are absolute seconds of the caller's clock."""

    def __init__(self, settings: Settings, cost: StepCost) -> None:
        self._settings = settings
        self._cost = cost
        self._queue = Queue()
        self._step: Step | None = None
        self._step_end_s = 0.0
        self._given_up = False  # the step under way prefills a sequence that has left
        self._timeline: Timeline | None = None
        self._load: _Load | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def prefilling(self) -> int:
        """Sequences whose prefill is waiting or under way."""
        return self._loaded().prefilling + self._given_up

    @property
    def decoding(self) -> int:
        return self._loaded().decoding

    def prefill_tokens_ahead(self) -> int:
        """Tokens that a newcomer would find still to be prefilled before it."""
        return self._loaded().prefill_tokens

    def generated(self) -> list[int]:
        """How much each sequence that decodes has generated so far, in tokens."""
        return [seq.generated for seq in self._queue.running if not seq.prefilling]

    def set_cost(self, cost: StepCost) -> None:
        if cost != self._cost:
            self._cost = cost
            self._timeline = None

    def set_settings(self, settings: Settings) -> None:
        self._settings = settings
        self._timeline = None

    def book(self, seq: Sequence, now_s: float) -> None:
        self.advance(now_s)
        self._queue.waiting.append(seq)
        if self._step is None:
            self._begin(now_s + self._cost.overhead_s(seq.prompt_tokens))
        self._changed()

    def adopt(self, seq: Sequence, now_s: float) -> None:
        """Takes in one that has had its first token, and got here by another way than ours."""
        self.advance(now_s)
        seq.computed, seq.generated = seq.prompt_tokens, 1
        self._queue.running.append(seq)
        if self._step is None:
            self._begin(now_s)
        self._changed()

    def first_token(self, seq_id: str, now_s: float) -> None:
        """Its prefill is done, and the step that finished it has just ended."""
        self.advance(now_s)
        seq = self._find(seq_id)
        if seq is None or not seq.prefilling:
            return
        step = self._step
        while seq.prefill_left > 0 and step is not None and not step.empty and not self._lasts(step):
            complete(step)
            if seq.prefill_left > 0:
                step = schedule(self._queue, self._settings)
        # Whatever the rule said: the token is there.
        seq.computed = seq.prompt_tokens
        seq.generated = max(1, seq.generated)
        if any(seq is other for other in self._queue.waiting):
            self._queue.waiting = deque(other for other in self._queue.waiting if other is not seq)
            self._queue.running.append(seq)
        self._begin(now_s)

    def finish(self, seq_id: str, now_s: float) -> None:
        """It left the engine, however it ended.

        A prefill that is given up goes on to the end of its step; all other ends are ends of steps.
        """
        self.advance(now_s)
        seq = self._find(seq_id)
        if seq is None:
            return
        queue, step = self._queue, self._step
        queue.running = [other for other in queue.running if other is not seq]
        queue.waiting = deque(other for other in queue.waiting if other is not seq)
        self._changed()
        if step is not None and seq.watched and any(seq is other for other, _ in step.chunks):
            self._given_up = True
        if not len(queue) and not self._given_up:
            self._step = None
        self.advance(now_s)

    def advance(self, now_s: float) -> None:
        """Lets steps pass until `now_s`, but none that should have shown a first token which was not seen."""
        while self._step is not None and self._step_end_s <= now_s:
            if self._awaits_first_token(self._step):
                return
            if self._lasts(self._step):
                self._skip_decode_steps(self._step, now_s)
                continue
            complete(self._step)
            self._begin(self._step_end_s)

    def timeline(self, now_s: float) -> Timeline:
        """The steps to come as of now; computed again only when something has changed since."""
        self.advance(now_s)
        # An idle worker begins now, and while a step is overdue, every later one moves with the clock.
        begins_s = now_s if self._step is None else max(now_s, self._step_end_s)
        if self._timeline is None:
            self._timeline = run_forward(self._queue, self._step, self._settings, self._cost, begins_s)
        elif self._timeline.begins_s != begins_s:
            self._timeline = self._timeline.beginning_at(begins_s)
        return self._timeline

    def _loaded(self) -> _Load:
        if self._load is None:
            queue = self._queue
            lefts = [seq.prefill_left for seq in (*queue.running, *queue.waiting) if seq.prefilling]
            self._load = _Load(len(lefts), len(queue) - len(lefts), sum(lefts))
        return self._load

    def _changed(self) -> None:
        self._timeline = self._load = None

    def _begin(self, start_s: float) -> None:
        step = schedule(self._queue, self._settings)
        self._changed()
        self._given_up = False
        if step.empty:
            self._step = None
        else:
            self._step = step
            self._step_end_s = start_s + self._cost.step_s(step.new_tokens, step.squares, len(step.decodes))

    def _awaits_first_token(self, step: Step) -> bool:
        present = self._queue.running
        return any(
            seq.watched and tokens == seq.prefill_left and any(seq is other for other in present)
            for seq, tokens in step.chunks
        )

    def _lasts(self, step: Step) -> bool:
        """Whether this step is decodes only and will be the same again until somebody comes or goes."""
        queue, settings = self._queue, self._settings
        full = len(queue.running) >= settings.max_num_seqs or len(step.decodes) >= settings.max_num_batched_tokens
        return not step.chunks and (not queue.waiting or full)

    def _skip_decode_steps(self, step: Step, now_s: float) -> None:
        """Decode-only steps are all alike: any number of them passes at once."""
        step_s = self._cost.decode_step_s(len(step.decodes))
        steps = int((now_s - self._step_end_s) / step_s) + 1
        for seq in step.decodes:
            seq.generated += steps
        self._begin(self._step_end_s + (steps - 1) * step_s)

    def _find(self, seq_id: str) -> Sequence | None:
        for seq in self._queue.running:
            if seq.id == seq_id:
                return seq
        for seq in self._queue.waiting:
            if seq.id == seq_id:
                return seq
        return None


def complete(step: Step) -> None:
    """The step has run: its tokens are computed, and the last chunk of a prompt yields the first output token."""
    for seq, tokens in step.chunks:
        seq.computed += tokens
        if not seq.prefilling:
            seq.generated = 1
    for seq in step.decodes:
        seq.generated += 1


def run_forward(queue: Queue, step: Step | None, settings: Settings, cost: StepCost, begins_s: float) -> Timeline:
    """Runs a copy of the queue forward with an endless prompt behind it, until only decodes are left.

    It begins when `step`, which is under way, has ended. Sequences leave when their expected output is generated; one
    that has outlived it is expected to go on as long again.
    """
    future = queue.copy()
    ends_at = {seq.id: _output_end(seq) for seq in (*future.running, *future.waiting)}
    if step is not None:
        _replay_into(future, queue, step)
    starts, ends, rooms = [], [], []
    room = 0
    clock_s = 0.0
    for _ in range(MAX_STEPS):
        _retire(future, ends_at)
        prefilling = any(seq.prefilling for seq in future.running)
        if not prefilling and len(future.running) >= settings.max_num_seqs:
            clock_s += _until_a_slot_frees_s(future, ends_at, cost)
            continue
        if not prefilling and not future.waiting:
            break
        step = schedule(future, settings, newcomers=1)
        starts.append(clock_s)
        clock_s += cost.step_s(step.new_tokens, step.squares, len(step.decodes))
        room += step.room
        ends.append(clock_s)
        rooms.append(room)
        complete(step)
    else:
        clock_s += _rest_s(future, settings, cost)
    decodes = len(future.running)
    room_after, step_after_s = room_beside(decodes, settings), cost.decode_step_s(decodes)
    return Timeline(begins_s, starts, ends, rooms, clock_s, room_after, step_after_s)


def _replay_into(future: Queue, queue: Queue, step: Step) -> None:
    """Completes, on the copy, the step that the original has under way."""
    copies = {id(seq): copied for seq, copied in zip(queue.running, future.running, strict=True)}
    complete(
        Step(
            tuple((copies[id(seq)], tokens) for seq, tokens in step.chunks if id(seq) in copies),
            tuple(copies[id(seq)] for seq in step.decodes if id(seq) in copies),
            0,
        )
    )


def _output_end(seq: Sequence) -> int:
    return seq.expected_output if seq.generated < seq.expected_output else 2 * seq.generated


def _retire(future: Queue, ends_at: dict[str, int]) -> None:
    if any(seq.generated >= ends_at[seq.id] for seq in future.running):
        future.running = [seq for seq in future.running if seq.generated < ends_at[seq.id]]


def _until_a_slot_frees_s(future: Queue, ends_at: dict[str, int], cost: StepCost) -> float:
    """Every slot decodes, so that nothing is admitted: jumps to the first end, and returns how long that takes."""
    steps = min(ends_at[seq.id] - seq.generated for seq in future.running)
    for seq in future.running:
        seq.generated += steps
    return steps * cost.decode_step_s(len(future.running))


def _rest_s(future: Queue, settings: Settings, cost: StepCost) -> float:
    """What is still to be prefilled, as if one after the other: the end of a queue too long to be replayed."""
    rest = [seq for seq in (*future.running, *future.waiting) if seq.prefilling]
    steps = ceil(sum(seq.prefill_left for seq in rest) / settings.max_num_batched_tokens)
    return steps * cost.fixed_s + sum(cost.tokens_s(seq.computed, seq.prompt_tokens) for seq in rest)
