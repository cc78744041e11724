"""The steps to come of a worker that prefills before it decodes (SGLang), and what they mean for a newcomer.

Prompts ahead are prefilled in batches, one after the other, and nothing is decoded meanwhile; so what a newcomer waits
for is their tokens. Only where the KV space or the slots are short does decoding go on, until somebody's end lets the
next one in. Once a newcomer is in, what it has left of its prompt has the steps to itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil
from typing import Any, cast

from predictor.engines.sglang import (
    RESERVED_MOST_TOKENS,
    Intake,
    Victim,
    ratio_after,
    ratio_after_retraction,
    who_gives_way,
)
from predictor.engines.vllm import LAST, Queue, Sequence, Settings
from predictor.prefill_cost import StepCost
from predictor.run_forward import Budget, RunForward
from predictor.timeline import Course, Others, Timeline

# No more batches and stretches than this are listed of one queue, whatever the budget.
_MOST_SPANS = 1000
# The state before an opening is kept for so many: each has all who decode. Whom none of them lets in is priced as if it
# had its steps to itself.
_MOST_STATES = 16
# In spans: what a stretch of decoding costs beside the batch that is tried before it, and, of a batch or of who may be
# retracted, how many requests are as much as one.
_STRETCH_WORK, _ADMITTED_A_SPAN, _LOOKED_AT_A_SPAN = 1, 2, 16
# Where a door is never shut, who was turned away for space is tried again after so many steps: each would be a span.
_TRIED_AGAIN_STEPS = 8
_ENDLESS = 1 << 60
_UNTOLD = 1 << 40  # without a `max_tokens` the most stays reserved
_NEWCOMER = ""  # its tokens cost nothing here: who asks adds that


# What changes as a queue is run forward.
_STATE = (
    "_cut", "_decoders", "_decodes_first", "_ends", "_far", "_far_until", "_free", "_near", "_near_until",
    "_number", "_offered", "_paces", "_phases", "_ratio", "_shut", "_steps", "_unseen", "_waiting", "_waiting_blocks",
    "clock_s", "gated",
)  # fmt: skip


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
    room: int  # tokens that are left to it in the first batch, in whole pages
    free_blocks: int  # that nobody holds and that are promised to nobody


@dataclass(frozen=True, slots=True)
class Chunk:
    """Of the last of a batch: `tokens` of it are in this one, which leaves room for `spare` more."""

    seq: Sequence
    tokens: int
    start_s: float
    end_s: float
    spare: int


class PrefillFirst:
    """A queue run forward, opening by opening. Starts from the state after the steps that are under way.

    Of who decodes sums are kept, so that a stretch of decoding costs the same however many do and however long it is.
    """

    __slots__ = (
        "_chunk", "_cost", "_cut", "_decoders", "_decodes_first", "_ends", "_far", "_far_until", "_free",
        "_lag", "_mark", "_near", "_near_until", "_number", "_offered", "_paces", "_phases", "_place", "_preempts",
        "_ratio", "_settings", "_shut", "_states", "_steps", "_unseen", "_waiting", "_waiting_blocks", "_was_tried",
        "_whole", "clock_s", "first_open", "gated", "mixes", "spans", "work",
    )  # fmt: skip

    def __init__(
        self, queue: Queue, settings: Settings, cost: StepCost, ends_at: dict[str, int], place: int = LAST
    ) -> None:
        """`ends_at` tells each sequence's whole output, in tokens; `place` is what the newcomer would wait by."""
        self._settings, self._cost, self._place = settings, cost, place
        self._preempts = settings.preempts
        # With overlap a batch is composed before the one ahead of it shows who has ended.
        self._lag = 1 if settings.async_scheduling else 0
        self._free = queue.free_blocks
        self._ratio = queue.reserve_ratio
        self._shut = queue.shut
        self._decodes_first = queue.decodes_first
        # Decoding goes on between or beside the chunks of one prompt.
        self.mixes = settings.enable_mixed_chunk or settings.prefill_decode_interval > 0
        self._chunk: Chunk | None = None
        self._offered = False  # nobody has left since the last opening: whom that did not let in has shut the door
        self._whole = ends_at
        self._whole[_NEWCOMER] = _ENDLESS
        self._steps = 0  # of decoding
        self.work = 1 + len(queue) // 4  # done so far, in spans
        self.first_open = 0  # all that is listed lets a newcomer in
        self.clock_s = 0.0
        self.gated = False
        self.spans: list[Opening] = []
        self._waiting: deque[Sequence] = deque()
        self._waiting_blocks = 0
        self._paces: list[tuple[float, int]] = []  # when each span began, and the blocks that waited then
        self._mark: dict[str, Any] | None = None  # the state before the first opening
        self._was_tried = False  # the mark stays, though no opening was listed
        self._states: list[dict[str, Any]] = []  # and before each, where a newcomer's course is listed step by step
        for seq in queue.waiting:
            self._wait(seq.copy())
        self._cut: Sequence | None = None
        # Who decodes, by a number; of them, who ends when, and how many are at which place in their last page.
        self._number = 0
        self._decoders: dict[int, _Decoder] = {}
        self._ends: list[tuple[int, int]] = []
        self._phases = [0] * settings.block_size
        # Reserved for their outputs: the most for so many, until these steps, and for the near rest up to its end.
        self._far, self._near, self._near_until = 0, 0, 0
        self._far_until: list[tuple[int, int]] = []
        self._unseen = 0  # of those near, whose newest token the scheduler does not know of yet
        for seq in queue.running:
            self._join(seq.copy(), seq.id in queue.unseen)

    @property
    def chunk_tokens(self) -> int:
        """What one step holds of prompts; where they are not cut, one that is longer has a step to itself."""
        settings = self._settings
        return settings.max_num_batched_tokens if self.cuts_prompts else settings.max_prefill_tokens

    @property
    def cuts_prompts(self) -> bool:
        """Whether who is let in may get a part of a step, and the rest later."""
        return self._settings.enable_chunked_prefill

    def _opening(self, start_s: float, end_s: float, room: int, free_blocks: int) -> Opening:
        size = self._settings.block_size
        return Opening(start_s, end_s, max(1, room // size * size), free_blocks)

    @property
    def step_s(self) -> float:
        """What such a step takes without its tokens."""
        return self._cost.step_s(0, 0, 0)

    @property
    def mean_step_s(self) -> float:
        """From one step of decoding to the next, with the batches between them."""
        return self.clock_s / self._steps if self._steps and self.clock_s else self._cost.step_s(0, 0, 1)

    def extend(self) -> None:
        """Lets a batch pass, or a stretch of decoding; there is another opening after that, or not yet."""
        self.work += 1
        listed = len(self.spans)
        state: dict[str, Any] = {}
        if (not listed or (self.mixes and listed < _MOST_STATES)) and self._leaves_room():
            state = self._snapshot()
            if not listed and not self._was_tried:
                self._mark = state
        emptied = bool(self._waiting)
        self._go_on()
        # In a batch that empties the queue the next to come would have been tried too, though it would not get in.
        self._was_tried = self._was_tried or (self._mark is state and emptied and not self._waiting)
        if self.mixes and state and len(self._states) == listed:
            self._states += [state] * (len(self.spans) - listed)

    def _go_on(self) -> None:
        self._paces.append((self.clock_s, self._waiting_blocks))
        if not self._decoders:
            self._shut = False
        if self._is_for_decodes():
            self._decode(self._decodes_first)
        elif self._cut is not None or self._waiting:
            if self._shut and self._cut is None:
                self.gated = True
                self._decode()
            elif not self._prefill():
                self.gated = True
                self._shut = not self._preempts
                is_full = len(self._decoders) >= self._settings.max_num_seqs
                self._decode(0 if self._shut or is_full else _TRIED_AGAIN_STEPS)
        elif self._decoders:
            if not self._shut:
                intake = self._intake()
                if self._let_newcomer_in(intake):
                    self._offer(self.clock_s, self.clock_s, intake.room, intake.space)
            self._decode()
        else:
            self.spans.append(self._opening(self.clock_s, self.clock_s, self.chunk_tokens, _ENDLESS))

    def _intake(self) -> Intake:
        decoding, slots = len(self._decoders), self._settings.max_num_seqs - len(self._decoders)
        return Intake(self._settings, self._free, self._ratio * self._reserved, decoding, slots)

    def _let_newcomer_in(self, intake: Intake) -> int:
        """The room for it in what others leave of a batch, where it may be by taking the slot of somebody."""
        if intake.full and self._preempts:
            newcomer = Sequence(_NEWCOMER, 0, 0, 0, max_output=0, priority=self._place)
            for victim in who_gives_way(newcomer, intake.space, self._victims(), self._settings):
                intake.gains(self._held(self._decoders[victim.key]), victim.promised)
            self.work += len(self._decoders) // _LOOKED_AT_A_SPAN
        return intake.room

    def _is_for_decodes(self) -> bool:
        """Whether decode steps have to pass before anybody is prefilled, whoever waits."""
        if not self._decodes_first:
            return False
        if len(self._decoders) < max(1, self._settings.prefill_decode_interval_min_bs):
            self._decodes_first = 0
        return self._decodes_first > 0

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
            self._restore(self._mark)
            self._mark, self._was_tried = None, False
        self.work += 1
        self._whole[seq.id] = end
        self._wait(seq.copy())

    def _next_chunk(self, budget: Budget | None) -> Chunk | None:
        """Of the last in the batch that passes; None if it is a stretch of decoding."""
        self._chunk, before = None, self.work
        self._go_on()
        self.work += 1
        if budget is not None:
            budget.left -= self.work - before
        return self._chunk

    def _leaves_room(self) -> bool:
        """Whether a newcomer may find room in the next batch: one that is filled by who waits already has none."""
        if self._shut and self._waiting and self._cut is None:
            return False
        left = self.chunk_tokens - (self._cut.left if self._cut is not None else 0)
        for seq in self._waiting:
            if left <= 0:
                break
            left -= seq.left
        return left > 0

    def _snapshot(self) -> dict[str, Any]:
        return {name: _copied(getattr(self, name)) for name in _STATE}

    def _restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, _copied(value))
        self.spans, self._states = [], []

    def keeps_state(self, place: int) -> bool:
        """Whether `through` can be asked for this opening."""
        return place < len(self._states)

    def through(self, place: int, tokens: int, budget: Budget | None) -> tuple[float, Chunk] | None:
        """When a newcomer of so many tokens is let in at this opening, and its last chunk: for who decodes goes on
        beside it or in between, and comes to its end. None if it never is: it needs more space than there is."""
        run = copy(self)
        run._restore(self._states[place])
        run._wait(Sequence(_NEWCOMER, max(1, tokens), 0, 0, max_output=0))
        run._offered = True  # nobody else is asked for
        admitted_s: float | None = None
        while True:
            chunk = run._next_chunk(budget)
            if chunk is not None and chunk.seq.id == _NEWCOMER:
                admitted_s = chunk.start_s if admitted_s is None else admitted_s
                if not chunk.seq.prefilling:
                    return admitted_s, chunk
                if budget is not None and budget.left <= 0:
                    budget.cut += 1
                    rest_s = (chunk.end_s - chunk.start_s) * ceil(chunk.seq.left / chunk.tokens)
                    return admitted_s, replace(chunk, start_s=chunk.start_s + rest_s, end_s=chunk.end_s + rest_s)
            elif run._cut is None and not run._waiting:
                return None

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

    def _offer(self, start_s: float, end_s: float, room: int, space: float | None) -> None:
        """`space`: tokens that nobody has and that are promised to nobody, in the moment that a newcomer is tried."""
        if self._offered:
            return
        self._offered = True
        free = _ENDLESS if space is None else ceil(space / self._settings.block_size) - 1
        self.spans.append(self._opening(start_s, end_s, room, free))

    # Who decodes

    @property
    def _reserved(self) -> int:
        """Tokens reserved for their outputs, as the scheduler counts them now."""
        return self._far * RESERVED_MOST_TOKENS + self._near_until - self._near * self._steps + self._unseen

    def _join(self, seq: Sequence, unseen: bool) -> None:
        """It decodes from now on, or its prefill is in the middle."""
        if seq.prefilling:
            self._cut = seq
            return
        left = _UNTOLD if seq.max_output is None else max(0, seq.max_output - seq.generated)
        decoder = _Decoder(
            seq,
            ends=self._steps + max(0, self._whole[seq.id] - seq.generated) + self._lag,
            reserved=self._steps + left,
            tokens=seq.computed - self._steps,
            others_blocks=-(-seq.computed // self._settings.block_size) - seq.blocks,
        )
        self._number += 1
        self._decoders[self._number] = decoder
        heappush(self._ends, (decoder.ends, self._number))
        self._phases[(decoder.tokens - 1) % self._settings.block_size] += 1
        if left > RESERVED_MOST_TOKENS:
            self._far += 1
            heappush(self._far_until, (decoder.reserved - RESERVED_MOST_TOKENS, self._number))
        else:
            self._near += 1
            self._near_until += decoder.reserved
            self._unseen += unseen

    def _leave(self, number: int) -> _Decoder:
        """What it had is free; somebody has left, so others are tried again."""
        decoder = self._decoders.pop(number)
        self._phases[(decoder.tokens - 1) % self._settings.block_size] -= 1
        if decoder.reserved - self._steps > RESERVED_MOST_TOKENS:
            self._far -= 1
        else:
            self._near -= 1
            self._near_until -= decoder.reserved
            self._unseen = min(self._unseen, self._near)
        if self._free is not None:
            self._free += self._held(decoder)
        self._shut = self._offered = False
        return decoder

    def _held(self, decoder: _Decoder) -> int:
        return -(-(decoder.tokens + self._steps) // self._settings.block_size) - decoder.others_blocks

    def _victims(self) -> Iterator[Victim]:
        """Who decodes, as one sees them who wants a slot."""
        for number, decoder in self._decoders.items():
            left = min(max(0, decoder.reserved - self._steps), RESERVED_MOST_TOKENS)
            yield Victim(decoder.seq.priority, decoder.seq.arrived, self._ratio * left, number)

    @property
    def _next_end(self) -> int:
        ends, decoders = self._ends, self._decoders
        while ends and ends[0][1] not in decoders:
            heappop(ends)
        return ends[0][0] if ends else _ENDLESS

    def _retire(self, until: int) -> None:
        """All are gone that end up to this step."""
        while self._next_end <= until:
            self._leave(heappop(self._ends)[1])

    def _pass(self, steps: int) -> None:
        """So many decode steps."""
        self.clock_s += steps * self._cost.step_s(0, 0, len(self._decoders))
        self._ratio = ratio_after(self._ratio, steps, self._settings)
        self._advance(steps)

    def _advance(self, steps: int) -> None:
        """All who decode have so many tokens more."""
        self._steps += steps
        far = self._far_until
        while far and far[0][0] <= self._steps:
            decoder = self._decoders.get(heappop(far)[1])
            if decoder is not None:
                self._far -= 1
                self._near += 1
                self._near_until += decoder.reserved
        self._unseen = self._near if self._lag else 0

    def _growth(self, steps: int) -> int:
        """Blocks that so many more steps take."""
        size, phases = self._settings.block_size, self._phases
        whole, rest = divmod(steps, size)
        blocks = whole * len(self._decoders)
        if rest:
            # Those with less than so much left in their last page.
            last = (size - 1 - self._steps) % size
            first = last - rest + 1
            blocks += sum(phases[max(0, first) : last + 1])
            if first < 0:
                blocks += sum(phases[first:])
        return blocks

    def _steps_in_space(self, steps: int, free_blocks: int) -> int:
        """The most steps for which there are blocks; there are not for so many."""
        low, high = 0, steps
        while low + 1 < high:
            middle = (low + high) // 2
            if self._growth(middle) <= free_blocks:
                low = middle
            else:
                high = middle
        return low

    # Prefill

    def _prefill(self) -> bool:
        """Lets a batch pass, or as many as one long prompt fills alone; False if there is none."""
        settings, decoding = self._settings, len(self._decoders)
        waiting = self._waiting
        reserved = self._ratio * self._reserved
        intake = self._intake()
        batch: list[tuple[Sequence, int]] = []
        victims: list[_Decoder] = []
        is_full = False
        steps = 1
        if self._cut is not None and intake.left > 0:
            seq, self._cut = self._cut.copy(), None
            want = intake.goes_on(seq)
            if want == settings.max_num_batched_tokens and not (self.mixes and decoding):
                steps = max(1, (seq.left - 1) // want)
                if self._free is not None:
                    steps = min(steps, max(1, int(self._free * settings.block_size - reserved) // want))
            batch.append((seq, want))
            self._shut = False
        while waiting and intake.takes_more:
            if self._preempts and (is_full := is_full or intake.full):
                if not (given := self._make_way(waiting[0], intake)):
                    break
                victims += given
            want = intake.let_in(waiting[0])
            if not want:
                if self._preempts:
                    waiting[0] = waiting[0].copy()
                    waiting[0].tried = True
                break
            batch.append((self._next_waiting(), want))
        for victim in victims:
            self._rejoin(victim)
        decoding -= len(victims)
        if not batch:
            return False
        self.work += len(batch) // _ADMITTED_A_SPAN
        # The mark is on the batch that decodes; an empty one is replaced by this one, which has none.
        keeps_mark = decoding > 0
        self._shut = intake.shut and keeps_mark
        start_s, space = self.clock_s, intake.space
        room = self._let_newcomer_in(intake) if not waiting else 0
        for seq, want in batch:
            if self._free is not None:
                new = self._blocks_for(seq, want * steps)
                self._free -= new
                seq.blocks += new
        beside = self._decodes_beside()
        self._pass_batch(batch, steps, beside)
        if room and not waiting and batch[-1][1] == batch[-1][0].left:
            self._offer(start_s, self.clock_s, room, space)
        self._offered = self._offered and keeps_mark and not beside
        self._chunk = Chunk(*batch[-1], start_s, self.clock_s, intake.left)
        self._unseen = 0
        for seq, want in batch:
            done = want * steps
            if done == seq.left:
                seq.computed += done
                seq.generated += 1
            else:
                seq.computed += done
            self._join(seq, bool(self._lag))
        self._retire(self._steps)
        self._decodes_first = settings.prefill_decode_interval
        return True

    def _make_way(self, seq: Sequence, intake: Intake) -> list[_Decoder]:
        """Those that give up their slots for this one."""
        self.work += len(self._decoders) // _LOOKED_AT_A_SPAN
        gone = []
        for victim in who_gives_way(seq, intake.space, self._victims(), self._settings):
            intake.gains(self._held(self._decoders[victim.key]), victim.promised)
            gone.append(self._leave(victim.key))
        return gone

    def _rejoin(self, decoder: _Decoder) -> None:
        """It waits again, to compute all anew; behind the newcomer it is of no interest."""
        seq, waiting = decoder.seq.copy(), self._waiting
        if seq.priority >= self._place:
            return
        seq.generated = max(0, self._generated(decoder) - self._lag)
        seq.computed = seq.blocks = seq.shared_blocks = 0
        waiting.insert(bisect_right(waiting, seq.priority, key=_place), seq)
        self._waiting_blocks += -(-(seq.prompt_tokens + seq.generated) // self._settings.block_size)

    def _decodes_beside(self) -> int:
        """How many go on decoding in the batch that is about to pass: all, or none where there is no page for that."""
        if not self._settings.enable_mixed_chunk or not self._decoders:
            return 0
        growth = self._growth(1) if self._free is not None else 0
        if self._free is not None and growth > self._free:
            return 0
        decoding = len(self._decoders)
        if self._free is not None:
            self._free -= growth
        self._shut = False
        self._advance(1)
        return decoding

    def _pass_batch(self, batch: list[tuple[Sequence, int]], steps: int, beside: int) -> None:
        """The time of so many batches like this, each of whose prompts is further on in the next."""
        priced = [(seq, want) for seq, want in batch if seq.id != _NEWCOMER]
        new_tokens = sum(want for _, want in priced)
        squares = sum((seq.computed + want) ** 2 - seq.computed**2 for seq, want in priced)
        first_s = self._cost.step_s(new_tokens, squares, beside)
        if steps > 1:
            growth_s = self._cost.step_s(new_tokens, squares + 2 * new_tokens * new_tokens, 0) - first_s
            self.clock_s += steps * first_s + steps * (steps - 1) / 2 * growth_s
        else:
            self.clock_s += first_s

    def _blocks_for(self, seq: Sequence, tokens: int) -> int:
        return max(0, -(-(seq.computed + tokens) // self._settings.block_size) - seq.blocks - seq.shared_blocks)

    # Decode

    def _decode(self, most: int = 0) -> None:
        """Lets decode steps pass until somebody leaves, or so many: nobody gets in before."""
        self.work += _STRETCH_WORK
        if not self._decoders:
            # Whoever waits can never be admitted, and that is not to be believed.
            self._next_waiting()
            return
        steps = max(1, self._next_end - self._steps)
        steps = min(steps, most) if most else steps
        ratio = None
        if self._free is not None:
            growth = self._growth(steps)
            if growth > self._free:
                steps = self._steps_in_space(steps, self._free)
                if not steps:
                    if not self._make_room():
                        return
                    steps, ratio = 1, self._ratio  # those who stay go on before anybody is tried again
                growth = self._growth(steps)
            self._free -= growth
        self._pass(steps)
        self._decodes_first = max(0, self._decodes_first - steps)
        self._ratio = self._ratio if ratio is None else ratio
        self._retire(self._steps)

    def _make_room(self) -> bool:
        """There is no page for the next step: those whose last token is on its way are waited for, or else who has
        generated least goes back to the queue and loses what it had. Whether the step passes then."""
        before = len(self._decoders)
        self._retire(self._steps + self._lag)
        if len(self._decoders) < before:
            return False
        self.gated = True
        assert self._free is not None
        retracted = 0
        while self._decoders and self._growth(1) > self._free:
            self._retract()  # one that is alone and has no room is taken to end
            retracted += 1
        self.work += retracted * (1 + len(self._decoders) // _LOOKED_AT_A_SPAN)
        self._ratio = ratio_after_retraction(
            (self._generated(decoder) - self._lag, decoder.seq.max_output) for decoder in self._decoders.values()
        )
        return bool(self._decoders)

    def _generated(self, decoder: _Decoder) -> int:
        return decoder.tokens + self._steps - decoder.seq.prompt_tokens + 1

    def _retract(self) -> None:
        """By arrival it waits behind everybody from now on, the newcomer included: here it is gone."""
        decoder = self._leave(
            min(
                self._decoders,
                key=lambda one: (self._generated(self._decoders[one]), -self._decoders[one].seq.prompt_tokens),
            )
        )
        if self._settings.scheduling_policy == "priority":
            self._rejoin(decoder)


def _place(seq: Sequence) -> int:
    return seq.priority


def _copied(value: object) -> object:
    return value.copy() if isinstance(value, list | dict | deque) else value


class PrefillFirstTimeline(Timeline):
    """`Timeline` of such a worker."""

    __slots__ = ("_run",)

    def __init__(self, begins_s: float, ahead: RunForward, others: Others | None = None) -> None:
        super().__init__(begins_s, ahead, others)
        self._run = cast("PrefillFirst", cast("object", ahead))

    @property
    def _work_of_a_future(self) -> int:
        """Twice what this one needed: by the pace of its beginning it would say less than this one does."""
        return 2 * self._run.work

    def admitted_s(self, blocks: int = 0, budget: Budget | None = None) -> float:
        return self.begins_s + self._opening(blocks, budget)[1].start_s

    def course(self, tokens: int, blocks: int = 0, budget: Budget | None = None) -> Course:
        place, opening = self._opening(blocks, budget)
        tokens = max(1, tokens)
        through = None
        if place is not None and self._run.keeps_state(place):
            through = self._run.through(place, tokens, budget)
        if through is not None:
            (since_s, chunk), begins_s = through, self.begins_s
            return Course(
                begins_s + since_s, begins_s + chunk.start_s, begins_s + chunk.end_s, chunk.tokens, 0, chunk.spare
            )
        admitted_s, end_s = self.begins_s + opening.start_s, self.begins_s + opening.end_s
        most, step_s = self._run.chunk_tokens, self._run.step_s
        joins = opening.end_s > opening.start_s
        steps = 0 if joins else 1  # of its own
        if tokens <= opening.room:
            spare = max(0, min(opening.room, most) - tokens)
            return Course(admitted_s, admitted_s, end_s + steps * step_s, tokens, 0, spare)
        if not self._run.cuts_prompts:
            # Whole, in the batch after.
            return Course(end_s, end_s, end_s + step_s, tokens, 0, max(0, most - tokens))
        tokens -= opening.room
        steps += ceil(tokens / most)
        last = tokens - (ceil(tokens / most) - 1) * most
        return Course(admitted_s, end_s + (steps - 1) * step_s, end_s + steps * step_s, last, 0, most - last)

    def _opening(self, blocks: int, budget: Budget | None) -> tuple[int | None, Opening]:
        """Where a newcomer of so many blocks gets in. Where the budget does not reach so far: when all is prefilled,
        which has no place among those listed."""
        run, place = self._run, 0
        while True:
            while place >= len(run.spans):
                if not run.spend(budget):
                    if budget is not None:
                        budget.cut += 1
                    begins_s = run.clock_s + run.rest_s(blocks)
                    return None, Opening(begins_s, begins_s, run.chunk_tokens, _ENDLESS)
            if run.spans[place].free_blocks >= blocks:
                return place, run.spans[place]
            run.gated = True
            place += 1
