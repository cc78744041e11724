"""The steps to come of one worker, and what they mean for a newcomer.

A worker's queue is run forward with an endless prompt imagined behind it. Requests behind do not change those ahead
(first come, first served), so one timeline holds for every newcomer until something changes: it is priced by a search
and a closed form, not by a replay. Running forward is no walk over steps either: steps that are alike are one span,
and spans are only listed as far as somebody asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import ceil

from predictor.engines.vllm import Queue, Sequence, Settings, chunk_cap
from predictor.prefill_cost import StepCost

# A timeline of more spans than this is cut: the rest goes on at the last span's pace. Bounds the work of a decision.
MAX_SPANS = 4000
_ENDLESS = 1 << 60
# Of what a preempted request had computed, the part that it finds again when it is resumed.
_KEPT_AFTER_PREEMPTION = 0.8


class Span:
    """Steps that are alike: the same prefills get the same number of tokens in each, beside the same decodes.

    The first `n` of them take `n * first_s + n * (n - 1) / 2 * growth_s`: attention makes each a little longer.
    """

    __slots__ = ("first_s", "free_blocks", "growth_s", "is_open", "room", "room_before", "spare", "start_s", "steps")

    def __init__(
        self,
        start_s: float,
        steps: int,
        first_s: float,
        growth_s: float,
        room: int,
        room_before: int,
        free_blocks: int,
        is_open: bool,
        spare: int,
    ) -> None:
        self.start_s = start_s  # after the timeline's own beginning
        self.steps = steps
        self.first_s = first_s
        self.growth_s = growth_s
        self.room = room  # tokens a step that the endless prompt gets
        self.room_before = room_before  # tokens that it has got before this span
        self.free_blocks = free_blocks  # once the first step is composed
        self.spare = spare  # tokens a step that are left to those behind it
        self.is_open = is_open  # whether nobody before the endless prompt waits, and a slot is free

    def after_s(self, steps: int) -> float:
        return self.start_s + steps * self.first_s + steps * (steps - 1) / 2 * self.growth_s

    @property
    def end_s(self) -> float:
        return self.after_s(self.steps)


@dataclass(frozen=True, slots=True)
class Course:
    """How a newcomer goes through. Times are absolute, without what its own tokens cost."""

    admitted_s: float
    last_s: float  # when its last step begins
    finish_s: float
    last_tokens: int  # what it computes in its last step
    spare_before: int  # tokens that requests behind it can get in its earlier steps
    spare_last: int  # and in its last


class Timeline:
    """When what is queued lets a newcomer in, and when it would be done. Times are absolute seconds.

    `begins_s` is when the step after those under way begins; the timeline moves as a whole with a step that is overdue.
    """

    __slots__ = ("_ahead", "_others", "begins_s", "spans")

    def __init__(self, begins_s: float, ahead: RunForward, others: Others | None = None) -> None:
        self.begins_s = begins_s
        self._others = others
        self.spans: list[Span] = ahead.spans
        self._ahead = ahead

    def beginning_at(self, begins_s: float) -> Timeline:
        return Timeline(begins_s, self._ahead, self._others)

    @property
    def gated(self) -> bool:
        """Whether somebody was seen to wait for KV space or for a slot: then everything hangs on who ends when."""
        return self._ahead.gated

    def _entry(self, blocks: int) -> tuple[int, Span]:
        """The span in whose first step a newcomer of so many blocks is admitted, and its place."""
        place = self._ahead.first_open
        while True:
            while place >= len(self.spans):
                self._ahead.extend()
            span = self.spans[place]
            if (span.is_open and span.free_blocks >= blocks) or span.steps == _ENDLESS:
                return place, span
            place += 1

    def admitted_s(self, blocks: int = 0) -> float:
        """When a newcomer's first tokens would be scheduled."""
        _, span = self._entry(blocks)
        return self.begins_s + span.start_s

    def finish_s(self, tokens: int, blocks: int = 0) -> float:
        """When `tokens` of a newcomer would be prefilled, without what computing them costs."""
        return self.course(tokens, blocks).finish_s

    def likely_course(self, tokens: int, blocks: int = 0, spans: int = 1000) -> Course:
        """As `course`, and where somebody waits for another's end, the median of several imagined futures.

        `spans` bounds the work: only so many futures are looked at as have about so many spans together.
        """
        course = self.course(tokens, blocks)
        if self._others is None or not self.gated:
            return course
        pairs = spans // (2 * max(1, len(self.spans)))
        if not pairs:
            return course
        futures = self._others.futures()[: 2 * pairs]
        others = [Timeline(self.begins_s, ahead).course(tokens, blocks) for ahead in futures]
        courses = sorted([course, *others], key=lambda other: other.finish_s)
        return courses[len(courses) // 2]

    def course(self, tokens: int, blocks: int = 0) -> Course:
        """How a newcomer with so many tokens to compute would go through, without what computing them costs.

        `blocks` is the KV space that must be free before it is admitted.
        """
        place, span = self._entry(blocks)
        admitted_s = self.begins_s + span.start_s
        wanted = span.room_before + max(1, tokens)
        spans = self.spans
        spare = 0
        while span.steps != _ENDLESS and span.room_before + span.room * span.steps < wanted:
            spare += span.spare * span.steps
            place += 1
            while place >= len(spans):
                self._ahead.extend()
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
        )


class Others:
    """Futures beside the first, with other lengths of what is being generated; imagined when somebody asks."""

    __slots__ = ("_imagine", "_known")

    def __init__(self, imagine: Callable[[], list[RunForward]]) -> None:
        self._imagine = imagine
        self._known: list[RunForward] | None = None

    def futures(self) -> list[RunForward]:
        if self._known is None:
            self._known = self._imagine()
        return self._known


class RunForward:
    """A queue run forward, span by span. Starts from the state after the steps that are under way."""

    __slots__ = (
        "_base_s", "_cost", "_decoders", "_ends", "_ends_at", "_free", "_lag", "_late", "_order", "_phases", "_room",
        "_settings", "_size", "_step", "_waiting", "clock_s", "first_open", "gated", "spans",
    )  # fmt: skip

    def __init__(self, queue: Queue, settings: Settings, cost: StepCost, ends_at: dict[str, int]) -> None:
        """`ends_at` tells each sequence's whole output, in tokens."""
        self._settings = settings
        self._cost = cost
        self._size = settings.block_size
        self._ends_at = ends_at
        # Asynchronous: a step is composed before the one ahead of it shows who has ended.
        self._lag = 1 if settings.async_scheduling else 0
        self._free = queue.free_blocks if queue.free_blocks is not None else _ENDLESS
        self._step = 0
        self._room = 0
        self.clock_s = 0.0
        self.gated = False
        self.spans: list[Span] = []
        self.first_open = 0  # no span before it lets a newcomer in
        # Decoders ahead of every prefill are a count, a heap of ends, and a count for each place in a block. Those
        # behind a prefill may be starved by it, so from the first prefill on sequences are walked in order.
        self._decoders = 0
        self._ends: list[tuple[int, int, Sequence]] = []
        self._order = 0
        self._phases = [0] * self._size
        self._late: list[Sequence] = []
        for seq in queue.running:
            self._late.append(seq.copy())
        self._waiting: deque[Sequence] = deque(seq.copy() for seq in queue.waiting)
        self._settle()

    def extend(self) -> None:
        """Lists one more span."""
        self._retire()
        if not self._decoders and not self._late and not self._waiting:
            self._append(_ENDLESS, self._cost.step_s(0, 0, 0), 0.0, self._settings.max_num_batched_tokens, True)
            return
        if len(self.spans) >= MAX_SPANS:
            self._cut()
            return
        self._compose()

    # Composition

    def _compose(self) -> None:
        settings, size = self._settings, self._size
        requests = self._decoders + len(self._late) + len(self._waiting)
        cap = chunk_cap(requests + 1, settings)
        served = min(self._decoders, settings.max_num_batched_tokens)
        budget = settings.max_num_batched_tokens - served
        free = self._free
        preempted = self._make_room()
        if preempted:
            requests = self._decoders + len(self._late) + len(self._waiting)
            served = min(self._decoders, settings.max_num_batched_tokens)
            budget = settings.max_num_batched_tokens - served
            free = self._free
        growth = self._phases[-self._step % size] if self._free != _ENDLESS else 0
        free -= growth
        chunks: list[tuple[Sequence, int]] = []
        decoding = served
        new_tokens = squares = curve = 0
        steps = _ENDLESS
        for seq in self._late:
            if budget <= 0:
                break
            left = seq.prompt_tokens + seq.generated - seq.computed
            want = left if left < cap else cap
            if want > budget:
                want = budget
            budget -= want
            chunks.append((seq, want))
            free -= self._new_blocks(seq, want)
            if left == 1 and seq.generated:
                decoding += 1
                steps = min(steps, self._ends_at[seq.id] + self._lag - seq.generated)
            else:
                start = seq.computed
                new_tokens += want
                squares += (start + want) * (start + want) - start * start
                curve += want * want
                steps = 1 if want == left else min(steps, (left - 1) // want)
        running = self._decoders + len(self._late)
        waiting = self._waiting
        blocked = preempted
        if waiting and not blocked and budget > 0:
            while waiting and budget > 0:
                seq = waiting[0]
                if running >= settings.max_num_seqs:
                    self.gated = blocked = True
                    break
                left = seq.prompt_tokens + seq.generated - seq.computed
                want = left if left < cap else cap
                if want > budget:
                    if not settings.enable_chunked_prefill:
                        blocked = True
                        break
                    want = budget
                if self._free != _ENDLESS:
                    whole = -(-(seq.prompt_tokens + seq.generated) // size) - seq.shared_blocks
                    if whole + (settings.watermark_blocks if running else 0) > free:
                        self.gated = blocked = True
                        break
                waiting.popleft()
                running += 1
                budget -= want
                self._late.append(seq)
                chunks.append((seq, want))
                free -= self._new_blocks(seq, want)
                new_tokens += want
                squares += (seq.computed + want) * (seq.computed + want) - seq.computed * seq.computed
                steps = 1
        if preempted:
            steps = 1
        if not decoding and not chunks:
            # The head can never be admitted; whoever is behind it waits for ever, and that is not to be believed.
            waiting.popleft()
            return
        if self._ends:
            steps = min(steps, self._ends[0][0] - self._step)
        if self._free != _ENDLESS and steps > 1:
            steps = self._steps_in_space(chunks, steps)
        is_open = not blocked and not waiting and budget > 0 and running < settings.max_num_seqs
        room = min(budget, cap) if is_open or (not waiting and self.spans and self.spans[-1].is_open) else 0
        first_s = self._cost.step_s(new_tokens, squares, decoding)
        growth_s = 0.0
        if steps > 1 and curve:
            growth_s = self._cost.step_s(new_tokens, squares + 2 * curve, decoding) - first_s
        room = max(0, room)
        spare = max(0, budget - room) if room else 0
        self._append(steps, first_s, growth_s, room, is_open, free, spare)
        self._pass(steps, chunks)

    def _append(
        self,
        steps: int,
        first_s: float,
        growth_s: float,
        room: int,
        is_open: bool,
        free: int = _ENDLESS,
        spare: int = 0,
    ) -> None:
        self.spans.append(Span(self.clock_s, steps, first_s, growth_s, room, self._room, free, is_open, spare))
        if not is_open and self.first_open == len(self.spans) - 1:
            self.first_open += 1
        if steps != _ENDLESS:
            self.clock_s = self.spans[-1].end_s
            self._room += room * steps

    def _pass(self, steps: int, chunks: list[tuple[Sequence, int]]) -> None:
        """Lets the composed steps happen."""
        done = False
        if self._free != _ENDLESS:
            self._free -= self._growth(steps)
        for seq, want in chunks:
            left = seq.prompt_tokens + seq.generated - seq.computed
            total = want * steps
            if self._free != _ENDLESS:
                new = self._new_blocks(seq, total)
                seq.blocks += new
                self._free -= new
            seq.computed += total
            if left == 1 and seq.generated:
                seq.generated += steps
                done = done or seq.generated >= self._ends_at[seq.id]
            elif total == left:
                seq.generated += 1
                done = True
        self._step += steps
        if done:
            self._settle()

    def _settle(self) -> None:
        """Decoders that no prefill is ahead of any more join the count."""
        late = self._late
        place = 0
        while place < len(late):
            seq = late[place]
            if not seq.generated or seq.prompt_tokens + seq.generated - seq.computed > 1:
                break
            place += 1
            self._decoders += 1
            self._phases[(seq.computed - self._step) % self._size] += 1
            end = self._step + max(0, self._ends_at[seq.id] - seq.generated) + self._lag
            # From here on only what it was counts: what it is follows from the step.
            seq.computed -= self._step
            self._order += 1
            heappush(self._ends, (end, self._order, seq))
        if place:
            del late[:place]

    def _retire(self) -> None:
        ends, step, size = self._ends, self._step, self._size
        while ends and ends[0][0] <= step:
            _, _, seq = heappop(ends)
            self._decoders -= 1
            self._phases[seq.computed % size] -= 1
            if self._free != _ENDLESS:
                self._free += -(-(seq.computed + step) // size) - seq.shared_blocks
        late = self._late
        for place in range(len(late) - 1, -1, -1):
            seq = late[place]
            if seq.generated >= self._ends_at[seq.id] + self._lag and seq.generated:
                del late[place]
                if self._free != _ENDLESS:
                    self._free += seq.blocks

    # KV space

    def _new_blocks(self, seq: Sequence, tokens: int) -> int:
        if self._free == _ENDLESS:
            return 0
        need: int = -(-(seq.computed + tokens) // self._size) - seq.blocks - seq.shared_blocks
        return need if need > 0 else 0

    def _growth(self, steps: int) -> int:
        """Blocks that the counted decoders take in so many steps from now."""
        size = self._size
        rounds, rest = divmod(steps, size)
        total = rounds * self._decoders
        for later in range(rest):
            total += self._phases[-(self._step + later) % size]
        return total

    def _needs(self, chunks: list[tuple[Sequence, int]], steps: int) -> int:
        return self._growth(steps) + sum(self._new_blocks(seq, want * steps) for seq, want in chunks)

    def _steps_in_space(self, chunks: list[tuple[Sequence, int]], steps: int) -> int:
        """The most steps, up to `steps` and at least one, for which there are blocks."""
        if self._needs(chunks, steps) <= self._free:
            return steps
        low, high = 1, steps
        while low + 1 < high:
            middle = (low + high) // 2
            if self._needs(chunks, middle) <= self._free:
                low = middle
            else:
                high = middle
        return low

    def _make_room(self) -> bool:
        """Preempts from the end of the running list until the next step has the blocks it needs."""
        if self._free == _ENDLESS:
            return False
        need = self._phases[-self._step % self._size]
        for seq in self._late:
            left = seq.prompt_tokens + seq.generated - seq.computed
            need += self._new_blocks(seq, min(left, self._settings.max_num_batched_tokens))
        if need <= self._free:
            return False
        preempted = False
        while self._late and self._tight():
            self._preempt(self._late.pop())
            preempted = True
        while self._decoders > 1 and self._phases[-self._step % self._size] > self._free:
            place = max(range(len(self._ends)), key=lambda index: self._ends[index][1])
            seq = self._ends.pop(place)[2]
            heapify(self._ends)
            self._decoders -= 1
            self._phases[seq.computed % self._size] -= 1
            seq.computed += self._step
            seq.generated = seq.computed - seq.prompt_tokens + 1
            seq.blocks = -(-seq.computed // self._size) - seq.shared_blocks
            self._preempt(seq)
            preempted = True
        return preempted

    def _tight(self) -> bool:
        budget = self._settings.max_num_batched_tokens - self._decoders
        cap = chunk_cap(self._decoders + len(self._late) + len(self._waiting) + 1, self._settings)
        need = self._phases[-self._step % self._size]
        for seq in self._late:
            want = min(seq.prompt_tokens + seq.generated - seq.computed, cap, max(0, budget))
            budget -= want
            need += self._new_blocks(seq, want)
        return need > self._free

    def _preempt(self, seq: Sequence) -> None:
        self.gated = True
        self._free += seq.blocks
        seq.computed = int(seq.computed * _KEPT_AFTER_PREEMPTION)
        seq.blocks = seq.shared_blocks = 0
        self._waiting.appendleft(seq)

    def _cut(self) -> None:
        """The end of a queue too long to be listed: what is still to be prefilled, as if one after the other."""
        settings, cost = self._settings, self._cost
        rest = [seq for seq in (*self._late, *self._waiting) if seq.prefilling]
        tokens = sum(seq.left for seq in rest)
        squares = sum((seq.computed + seq.left) ** 2 - seq.computed**2 for seq in rest)
        steps = ceil(tokens / settings.max_num_batched_tokens)
        decoding = self._decoders
        if steps:
            mean_s = cost.step_s(tokens // steps, squares // steps, decoding)
            self._append(steps, mean_s, 0.0, 0, False)
        room = max(1, settings.max_num_batched_tokens - decoding)
        self._append(_ENDLESS, cost.step_s(0, 0, decoding), 0.0, room, True)


def whole_output(seq: Sequence, sampled: int) -> int:
    """The output that a sequence is taken to reach: it has outlived what is not longer than what it has generated."""
    ends = sampled if sampled >= max(1, seq.generated) else max(1, 2 * seq.generated)
    return ends if seq.max_output is None else max(1, min(ends, seq.max_output))
