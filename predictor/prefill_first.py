"""The steps to come of a worker that prefills before it decodes (SGLang), and what they mean for a newcomer.

Prompts ahead are prefilled in batches, one after the other, and nothing is decoded meanwhile; so what a newcomer waits
for is their tokens. Only where the KV space or the slots are short does decoding go on, until somebody's end lets the
next one in. Once a newcomer is in, what it has left of its prompt has the steps to itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from predictor.engines.sglang import LAST_RATIO, RATIO_STEP, RESERVED_MOST_TOKENS, ratio_after, reserved_tokens
from predictor.engines.vllm import Queue, Sequence, Settings
from predictor.prefill_cost import StepCost
from predictor.run_forward import Budget, RunForward
from predictor.timeline import Course, Others, Timeline

# No more batches and stretches than this are listed of one queue, whatever the budget.
_MOST_SPANS = 1000
# What a stretch of decoding costs to list, in spans.
_STRETCH_WORK = 4
# In less nobody gets in only because less is reserved.
_LONG_STRETCH = 16
_ENDLESS = 1 << 60
_UNTOLD = 1 << 40  # without a `max_tokens` the most stays reserved
_RATIO_AFTER_RETRACTION = 0.1


# What changes as a queue is run forward.
_STATE = (
    "_cut", "_decoders", "_free", "_next_end", "_paces", "_ratio", "_reserved", "_steps", "_waiting", "_waiting_blocks",
    "clock_s", "gated",
)  # fmt: skip
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Counts as of before the first decode step: `tokens` is what its KV would have held then."""

    seq: Sequence
    ends: int  # the step after which it is gone
    reserved: int  # the step until which something is reserved for its output
    tokens: int
    others_blocks: int  # of its KV, blocks that do not count for it


@dataclass(frozen=True, slots=True)
class Opening:
    """A moment at which a newcomer may get in, with the rest of others' batch or with a step of its own."""

    start_s: float  # after the run's own beginning
    end_s: float  # of the batch that it joins; `start_s` where it joins none
    room: int  # tokens that are left to it in the first batch, if it takes them all
    cut_room: int  # and if it needs more: whole pages
    free_blocks: int  # that nobody holds and that are promised to nobody


class PrefillFirst:
    """A queue run forward, opening by opening. Starts from the state after the steps that are under way."""

    __slots__ = (
        "_arrays", "_cost", "_cut", "_decoders", "_free", "_lag", "_mark", "_next_end", "_paces", "_ratio", "_reserved",
        "_settings", "_steps", "_waiting", "_waiting_blocks", "_whole", "clock_s", "first_open", "gated", "spans",
        "work",
    )  # fmt: skip

    def __init__(self, queue: Queue, settings: Settings, cost: StepCost, ends_at: dict[str, int]) -> None:
        """`ends_at` tells each sequence's whole output, in tokens."""
        self._settings, self._cost = settings, cost
        # With overlap a batch is composed before the one ahead of it shows who has ended.
        self._lag = 1 if settings.async_scheduling else 0
        self._free = queue.free_blocks
        self._ratio = queue.reserve_ratio
        self._whole = ends_at
        self._steps = 0  # of decoding
        self.work = 1 + len(queue) // 16  # done so far, in spans
        self.first_open = 0  # all that is listed lets a newcomer in
        self.clock_s = 0.0
        self.gated = False
        self.spans: list[Opening] = []
        self._waiting: deque[Sequence] = deque()
        self._waiting_blocks = 0
        self._paces: list[tuple[float, int]] = []  # when each span began, and the blocks that waited then
        self._mark: dict[str, Any] | None = None  # the state before the first opening
        for seq in queue.waiting:
            self._wait(seq.copy())
        self._cut: Sequence | None = None
        self._decoders: list[_Decoder] = []
        self._arrays: tuple[Counts, Counts] | None = None
        self._next_end = _ENDLESS
        self._reserved = 0  # for the outputs of those, in tokens
        for seq in queue.running:
            self._join(seq.copy())

    @property
    def chunk_tokens(self) -> int:
        """What a prompt gets in a step that it has to itself."""
        return self._settings.max_num_batched_tokens

    def _opening(self, start_s: float, end_s: float, room: int, free_blocks: int) -> Opening:
        size = self._settings.block_size
        return Opening(start_s, end_s, room, max(1, room // size * size), free_blocks)

    @property
    def step_s(self) -> float:
        """What such a step takes without its tokens."""
        return self._cost.step_s(0, 0, 0)

    def extend(self) -> None:
        """Lets a batch pass, or a stretch of decoding; there is another opening after that, or not yet."""
        self.work += 1
        if not self.spans:
            self._set_mark()
        self._paces.append((self.clock_s, self._waiting_blocks))
        if self._cut is not None or self._waiting:
            if not self._prefill():
                self.gated = True
                self._decode()
        elif self._decoders:
            if len(self._decoders) < self._settings.max_num_seqs:
                self._offer(self.clock_s, self.clock_s, self.chunk_tokens, 0.0)
            self._decode()
        else:
            self.spans.append(self._opening(self.clock_s, self.clock_s, self.chunk_tokens, _ENDLESS))

    def spend(self, budget: Budget | None) -> bool:
        """Goes a span further if that is allowed."""
        if self.work >= _MOST_SPANS or (budget is not None and budget.left <= 0):
            return False
        before = self.work
        self.extend()
        if budget is not None:
            budget.left -= self.work - before
        return True

    def opens(self, budget: Budget | None) -> bool:
        """Goes on to the first opening, if that is allowed."""
        while not self.spans:
            if not self.spend(budget):
                return False
        return True

    def append(self, seq: Sequence, end: int) -> None:
        """One more comes to wait behind all others. What is ahead of it stands as it was listed."""
        if self._mark is not None:
            for name, value in self._mark.items():
                setattr(self, name, value.copy() if isinstance(value, list | deque) else value)
            self.spans = []
            self._arrays = self._mark = None
        self.work += 1
        self._whole[seq.id] = end
        self._wait(seq.copy())

    def _set_mark(self) -> None:
        self._mark = {
            name: value.copy() if isinstance(value := getattr(self, name), list | deque) else value for name in _STATE
        }

    def _wait(self, seq: Sequence) -> None:
        self._waiting.append(seq)
        self._waiting_blocks += -(-(seq.prompt_tokens + seq.generated) // self._settings.block_size)

    def _next_waiting(self) -> Sequence:
        """Off the queue, to be changed: a mark may have the other."""
        seq = self._waiting.popleft()
        self._waiting_blocks -= -(-(seq.prompt_tokens + seq.generated) // self._settings.block_size)
        return seq.copy()

    def rest_s(self, blocks: int) -> float:
        """From here to where one behind the queue that needs so many blocks would be let in: by the pace of the newer
        half of what is listed if space is short, else when all is prefilled, one after the other."""
        if self.gated:
            for since_s, waiting in (self._paces[len(self._paces) // 2], self._paces[0]):
                done, passed_s = waiting - self._waiting_blocks, self.clock_s - since_s
                if done > 0 and passed_s > 0:
                    return passed_s / done * (self._waiting_blocks + blocks)
        rest = [seq for seq in (*([self._cut] if self._cut else []), *self._waiting) if seq.left > 1]
        tokens = sum(seq.left for seq in rest)
        steps = ceil(tokens / self._settings.max_num_batched_tokens)
        if not steps:
            return 0.0
        squares = sum((seq.computed + seq.left) ** 2 - seq.computed**2 for seq in rest)
        return steps * self._cost.step_s(tokens // steps, squares // steps, 0)

    def _offer(self, start_s: float, end_s: float, room: int, promised: float) -> None:
        free = _ENDLESS
        if self._free is not None:
            promised += self._ratio * self._reserved
            free = self._free - ceil(promised / self._settings.block_size) - 1
        self.spans.append(self._opening(start_s, end_s, room, free))

    def _join(self, seq: Sequence) -> None:
        """It decodes from now on, or its prefill is in the middle."""
        if seq.prefilling:
            self._cut = seq
            return
        left = _UNTOLD if seq.max_output is None else seq.max_output - seq.generated
        decoder = _Decoder(
            seq,
            ends=self._steps + max(0, self._whole[seq.id] - seq.generated) + self._lag,
            reserved=self._steps + left,
            tokens=seq.computed - self._steps,
            others_blocks=-(-seq.computed // self._settings.block_size) - seq.blocks,
        )
        self._decoders.append(decoder)
        self._arrays = None
        self._next_end = min(self._next_end, decoder.ends)
        self._reserved += reserved_tokens(seq)

    # Prefill

    def _prefill(self) -> bool:
        """Lets a batch pass, or as many as one long prompt fills alone; False if there is none."""
        settings, size, waiting = self._settings, self._settings.block_size, self._waiting
        left, input_left = settings.max_num_batched_tokens, settings.max_prefill_tokens
        batch: list[tuple[Sequence, int]] = []
        promised = 0.0
        steps = 1
        if self._cut is not None:
            seq, self._cut = self._cut.copy(), None
            want = min(left, seq.left)
            steps = max(1, (seq.left - 1) // want)
            batch.append((seq, want))
            left -= want
            input_left -= want
            promised += seq.left - want + reserved_tokens(seq)
            if self._free is not None:
                self._free -= self._blocks_for(seq, want * steps)
        blocked = left <= 0
        while waiting and not blocked and left >= size and input_left > 0:
            seq = waiting[0]
            if len(self._decoders) + len(batch) >= settings.max_num_seqs:
                break
            want = seq.left
            if self._free is not None:
                hits = max(0, -(-seq.computed // size) - seq.shared_blocks)
                need = want + reserved_tokens(seq) + size
                if self._ratio * self._reserved + promised + need > (self._free - hits) * size:
                    blocked = True
                    break
                promised += need - want
            if want > left:
                want = left // size * size
                blocked = True
            seq = self._next_waiting()
            batch.append((seq, want))
            if self._free is not None:
                self._free -= self._blocks_for(seq, want)
            padded = -(-want // size) * size
            left -= padded
            input_left -= padded
        if not batch:
            return False
        new_tokens = sum(want for _, want in batch)
        squares = sum((seq.computed + want) ** 2 - seq.computed**2 for seq, want in batch)
        start_s = self.clock_s
        first_s = self._cost.step_s(new_tokens, squares, 0)
        if steps > 1:
            want = batch[0][1]
            growth_s = self._cost.step_s(want, squares + 2 * want * want, 0) - first_s
            self.clock_s += steps * first_s + steps * (steps - 1) / 2 * growth_s
        else:
            self.clock_s += first_s
        slots = len(self._decoders) + len(batch) < settings.max_num_seqs
        room = left if left >= size and input_left > 0 else 0
        if not blocked and not waiting and slots and room > 0:
            self._offer(start_s, self.clock_s, room, promised)
        for seq, want in batch:
            done = want * steps
            if self._free is not None:
                seq.blocks += self._blocks_for(seq, done)
            if done == seq.left:
                seq.computed += done
                seq.generated += 1
            else:
                seq.computed += done
            self._join(seq)
        self._retire()
        return True

    def _blocks_for(self, seq: Sequence, tokens: int) -> int:
        return max(0, -(-(seq.computed + tokens) // self._settings.block_size) - seq.blocks - seq.shared_blocks)

    # Decode

    def _decode(self) -> None:
        """Lets decode steps pass until somebody ends, or one who waits gets in without that."""
        self.work += _STRETCH_WORK
        if not self._decoders:
            # Whoever waits can never be admitted, and that is not to be believed.
            self._next_waiting()
            return
        steps = max(1, self._next_end - self._steps)
        if self._free is not None:
            growth = int(self._growth(steps))
            if growth > self._free:
                steps = self._steps_in_space(steps)
                if not steps:
                    self._retract()
                    return
                growth = int(self._growth(steps))
            if steps >= _LONG_STRETCH and self._waiting and len(self._decoders) < self._settings.max_num_seqs:
                steps = self._until_admitted(steps)
                growth = int(self._growth(steps))
            self._free -= growth
        self.clock_s += steps * self._cost.step_s(0, 0, len(self._decoders))
        self._steps += steps
        self._ratio = ratio_after(self._ratio, steps)
        self._reserved = int(self._reserved_after(0))
        self._retire()

    def _retire(self) -> None:
        if self._next_end > self._steps:
            return
        staying: list[_Decoder] = []
        for decoder in self._decoders:
            if decoder.ends > self._steps:
                staying.append(decoder)
            else:
                self._drop(decoder)
        self._set_decoders(staying)

    def _drop(self, decoder: _Decoder) -> None:
        self._reserved -= max(0, min(decoder.reserved - self._steps, RESERVED_MOST_TOKENS))
        if self._free is not None:
            tokens = decoder.tokens + self._steps
            self._free += -(-tokens // self._settings.block_size) - decoder.others_blocks

    def _set_decoders(self, decoders: list[_Decoder]) -> None:
        self._decoders, self._arrays = decoders, None
        self._next_end = min((decoder.ends for decoder in decoders), default=_ENDLESS)

    def _known(self) -> tuple[Counts, Counts]:
        """Of every decoder: until which step something is reserved for it, and its tokens before the first step."""
        if self._arrays is None:
            count = len(self._decoders)
            self._arrays = (
                np.fromiter((decoder.reserved for decoder in self._decoders), np.int64, count),
                np.fromiter((decoder.tokens for decoder in self._decoders), np.int64, count),
            )
        return self._arrays

    def _reserved_after(self, steps: Counts | int) -> np.int64 | Counts:
        """Tokens reserved for outputs after so many more steps; of a column of steps, a row each."""
        until, _ = self._known()
        total: np.int64 | Counts = np.clip(until - self._steps - steps, 0, RESERVED_MOST_TOKENS).sum(-1)
        return total

    def _growth(self, steps: Counts | int) -> np.int64 | Counts:
        """Blocks that so many more steps take."""
        _, tokens = self._known()
        size = self._settings.block_size
        now = tokens + self._steps
        total: np.int64 | Counts = (-(-(now + steps) // size) + now // -size).sum(-1)
        return total

    def _steps_in_space(self, steps: int) -> int:
        """The most steps for which there are blocks; there are not for so many."""
        assert self._free is not None
        low, high = 0, steps
        while low + 1 < high:
            middle = (low + high) // 2
            if self._growth(middle) <= self._free:
                low = middle
            else:
                high = middle
        return low

    def _until_admitted(self, steps: int) -> int:
        """The first of the steps after which the head of the queue fits, since less is reserved; all if it never does.

        Looked at in leaps: whoever fits stays fitting for a while.
        """
        assert self._free is not None
        leap = max(1, steps // 16)
        passed = np.arange(leap, steps, leap)
        if not len(passed):
            return steps
        size, seq = self._settings.block_size, self._waiting[0]
        ratios = np.maximum(LAST_RATIO, self._ratio - passed * RATIO_STEP)
        column = passed[:, None]
        hits = max(0, -(-seq.computed // size) - seq.shared_blocks)
        need = seq.left + reserved_tokens(seq) + size
        fits = ratios * self._reserved_after(column) + need <= (self._free - self._growth(column) - hits) * size
        first = int(fits.argmax())
        return int(passed[first]) if fits[first] else steps

    def _retract(self) -> None:
        """Who has generated least goes back to the queue and loses what it had."""
        self.gated = True
        victim = min(self._decoders, key=lambda item: (item.tokens - item.seq.prompt_tokens, -item.seq.prompt_tokens))
        self._drop(victim)
        self._set_decoders([decoder for decoder in self._decoders if decoder is not victim])
        if not self._decoders:
            return  # alone it has no room: it is taken to end
        seq = victim.seq.copy()
        seq.generated = max(1, victim.tokens + self._steps - seq.prompt_tokens + 1)
        seq.computed = seq.blocks = seq.shared_blocks = 0
        self._waiting.appendleft(seq)
        self._waiting_blocks += -(-(seq.prompt_tokens + seq.generated) // self._settings.block_size)
        self._ratio = min(1.0, self._ratio + _RATIO_AFTER_RETRACTION)


class PrefillFirstTimeline(Timeline):
    """`Timeline` of such a worker."""

    __slots__ = ("_run",)

    def __init__(self, begins_s: float, ahead: RunForward, others: Others | None = None) -> None:
        super().__init__(begins_s, ahead, others)
        self._run = cast("PrefillFirst", cast("object", ahead))

    def admitted_s(self, blocks: int = 0, budget: Budget | None = None) -> float:
        return self.begins_s + self._opening(blocks, budget).start_s

    def course(self, tokens: int, blocks: int = 0, budget: Budget | None = None) -> Course:
        opening, tokens = self._opening(blocks, budget), max(1, tokens)
        admitted_s, end_s = self.begins_s + opening.start_s, self.begins_s + opening.end_s
        most, step_s = self._run.chunk_tokens, self._run.step_s
        joins = opening.end_s > opening.start_s
        if joins and tokens <= opening.room:
            return Course(admitted_s, admitted_s, end_s, tokens, 0, opening.room - tokens)
        steps = 0  # of its own
        if joins:
            tokens -= opening.cut_room
        elif tokens > most:
            tokens -= opening.cut_room  # cut for the first time, it gets whole pages
            steps = 1
        steps += ceil(tokens / most)
        last = tokens - (ceil(tokens / most) - 1) * most
        return Course(admitted_s, end_s + (steps - 1) * step_s, end_s + steps * step_s, last, 0, most - last)

    def _opening(self, blocks: int, budget: Budget | None) -> Opening:
        """Where a newcomer of so many blocks gets in. Where the budget does not reach so far: when all is prefilled."""
        run, place = self._run, 0
        while True:
            while place >= len(run.spans):
                if not run.spend(budget):
                    if budget is not None:
                        budget.cut += 1
                    begins_s = run.clock_s + run.rest_s(blocks)
                    return Opening(begins_s, begins_s, run.chunk_tokens, run.chunk_tokens, _ENDLESS)
            if run.spans[place].free_blocks >= blocks:
                return run.spans[place]
            run.gated = True
            place += 1
