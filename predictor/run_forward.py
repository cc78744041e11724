"""A worker's queue run forward: which steps come, how long each takes, and what each leaves to somebody behind.

An endless prompt is imagined behind the queue; `room` is what it would get. Running forward is no walk over steps:
steps that are alike are one span, so is a stretch in which everybody waits for others to end, and spans are only listed
as far as somebody asked. Equal to the step rule of `engines.vllm`, step by step; `tests/predictor/test_timeline.py`
compares the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from heapq import heappop, heappush
from math import ceil
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from predictor.engines.tensorrt_llm import reserved_blocks
from predictor.engines.vllm import Queue, Sequence, Settings, chunk_cap
from predictor.prefill_cost import StepCost
from predictor.prefixes_ahead import Share

NO_SHARES: Mapping[str, Share] = MappingProxyType({})
# No more spans than this are listed of one queue, whatever the budget: the rest is taken to go on at their pace.
MAX_SPANS = 4000
ENDLESS = 1 << 60
# Of what a preempted request had computed, the part that it finds again when it is resumed.
_KEPT_AFTER_PREEMPTION = 0.95
# At a timeline that stands, only a newcomer's own steps are listed.
_GLANCE = 6
# So many requests looked at are as much work as one span.
_LOOKED_AT_A_SPAN = 8


class Budget:
    """How much work a decision may still do, in spans: some ten microseconds each."""

    __slots__ = ("_given", "cut", "left")

    def __init__(self, spans: int) -> None:
        self._given = self.left = spans
        self.cut = 0  # times that it did not suffice

    @property
    def used(self) -> int:
        return self._given - self.left

    def part(self, share: float) -> Budget:
        """Some of it, which whoever uses it takes off by `take`."""
        return Budget(int(self.left * share))

    def take(self, part: Budget) -> None:
        self.left -= part.used
        self.cut += part.cut

    def glance(self) -> Budget:
        """As much as is needed where nearly all is listed already; it is granted even where nothing is left."""
        return Budget(_GLANCE)


class Span:
    """Steps that are alike: the same prefills get the same number of tokens in each, beside the same decodes.

    The first `n` of them take `n * first_s + n * (n - 1) / 2 * growth_s`: attention makes each a little longer. Where
    everybody waits, a span also stands for steps with ever fewer decodes; then only its end is exact.
    """

    __slots__ = (
        "blocks_behind", "first_s", "free_blocks", "growth_s", "is_open", "room", "room_before", "spare", "start_s",
        "steps", "tokens_behind",
    )  # fmt: skip

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
        tokens_behind: int,
        blocks_behind: int,
    ) -> None:
        self.start_s = start_s  # after the beginning of the first
        self.steps = steps
        self.first_s = first_s
        self.growth_s = growth_s
        self.room = room  # tokens a step that the endless prompt gets
        self.room_before = room_before  # tokens that it has got before this span
        self.free_blocks = free_blocks  # once the first step is composed
        self.is_open = is_open  # whether nobody before the endless prompt waits, and a slot is free
        self.spare = spare  # tokens a step that are left to those behind it
        self.tokens_behind = tokens_behind  # still to be prefilled when it begins
        self.blocks_behind = blocks_behind  # of KV space that who waits then will need

    def after_s(self, steps: int) -> float:
        return self.start_s + steps * self.first_s + steps * (steps - 1) / 2 * self.growth_s

    @property
    def end_s(self) -> float:
        return self.after_s(self.steps)


class _Late:
    """One that prefills, or decodes where a step may have no room for all its drafts: behind one that prefills, or
    behind decodes that leave less. Tokens, unless it says blocks."""

    __slots__ = ("blocks", "computed", "end", "generated", "prompt_tokens", "shared_blocks")

    def __init__(
        self, prompt_tokens: int, computed: int, generated: int, blocks: int, shared_blocks: int, end: int
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.computed = computed
        self.generated = generated
        self.blocks = blocks
        self.shared_blocks = shared_blocks
        self.end = end  # its whole output

    @property
    def decodes(self) -> bool:
        return self.generated > 0 and self.prompt_tokens + self.generated - self.computed <= 1

    def copy(self) -> _Late:
        return _Late(self.prompt_tokens, self.computed, self.generated, self.blocks, self.shared_blocks, self.end)


# One that waits: prompt tokens, computed, generated, blocks that others hold when it is admitted and when it ends, its
# whole output, blocks that must be there for it beside those of its prompt.
_Waiting = tuple[int, int, int, int, int, int, int]
# One that decodes, with no prefill ahead of it and room for all its drafts: the step before which it is gone, its
# number, its computed tokens less the step's number, prompt tokens, shared blocks. Where space is reserved, in place of
# the last less what it holds.
_Decoder = tuple[int, int, int, int, int]


# What changes as a queue is run forward, beside those in `_late`. A mark is set only where `first_open` is the end.
_NUMBERS = (
    "_decoders", "_free", "_order", "_room", "_step", "_tokens", "_waiting_blocks", "_wanted", "clock_s", "first_open",
    "gated",
)  # fmt: skip
_COLLECTIONS = ("_ends", "_gone", "_phases", "_stack", "_waiting")
_numbers_of, _collections_of = attrgetter(*_NUMBERS), attrgetter(*_COLLECTIONS)


class RunForward:
    """Starts from the state after the steps that are under way; `work` counts what was done so far, in spans."""

    __slots__ = (
        "_cap", "_chunked", "_cost", "_decode_size", "_decoders", "_drafted_steps", "_drafting", "_ends", "_free",
        "_gate", "_gone", "_lag", "_late", "_least_cap", "_limit", "_mark", "_most_counted", "_order", "_phases",
        "_reserves", "_room", "_settings", "_size", "_slots", "_stack", "_step", "_tokens", "_waiting",
        "_waiting_blocks", "_wanted", "_watermark", "_width", "clock_s", "first_open", "gated", "spans", "work",
    )  # fmt: skip

    def __init__(
        self,
        queue: Queue,
        settings: Settings,
        cost: StepCost,
        ends_at: Mapping[str, int],
        shares: Mapping[str, Share] = NO_SHARES,
    ) -> None:
        """`ends_at` tells each sequence's whole output, in tokens; `shares` which blocks some have in common."""
        self._cost = cost
        self._size = settings.block_size
        # Where drafts are accepted, who decodes gets several tokens in a step: its place in a block is then counted in
        # steps, of which a block holds so many fewer.
        self._drafting, self._drafted_steps = queue.drafting, queue.steps
        self._decode_size = max(1, round(self._size / self._drafting.gain))
        self._width = self._drafting.width + settings.slots
        self._limit = settings.max_num_batched_tokens
        self._slots = settings.max_num_seqs
        self._chunked = settings.enable_chunked_prefill
        self._watermark = settings.watermark_blocks
        self._cap = chunk_cap(2, settings)  # whoever is there is not alone: a newcomer is imagined
        self._settings = settings
        self._least_cap = min(self._cap, settings.long_prefill_token_threshold or self._cap)
        # So many decoders have room for all their drafts, whoever else is there.
        self._most_counted = self._limit // self._width if self._drafting.width <= self._least_cap else 0
        # Asynchronous: a step is composed before the one ahead of it shows who has ended.
        self._lag = 1 if settings.async_scheduling else 0
        self._gate = queue.free_blocks is not None
        # Who is let in has all the space that it may ever need, from then on to its end.
        self._reserves = self._gate and settings.family == "tensorrt_llm"
        self._free = ENDLESS if queue.free_blocks is None else queue.free_blocks
        self._step = 0
        self._room = 0
        self.clock_s = 0.0
        self.gated = False
        self.spans: list[Span] = []
        self.first_open = 0  # no span before it lets a newcomer in
        self.work = 1 + len(queue) // (2 * _LOOKED_AT_A_SPAN)
        # Decoders ahead of every prefill are a count, a heap of ends, a stack of who came last, and a count for each
        # place in a block. Those behind a prefill may be starved by it, or be left less than their drafts would take,
        # and so may those for whom a step is too small: from the first of them on, sequences are walked in order.
        self._decoders = 0
        self._ends: list[_Decoder] = []
        self._stack: list[_Decoder] = []
        self._gone: set[int] = set()  # numbers in the heap of those that were preempted
        self._order = 0
        self._phases = [0] * self._decode_size
        self._late = []
        for seq in queue.running:
            held, shared = seq.blocks + seq.shared_blocks, seq.shared_blocks
            if share := shares.get(seq.id):
                shared = min(held, share.with_later)  # what others hold as well is not free when it ends
            late = _Late(seq.prompt_tokens, seq.computed, seq.generated, held - shared, shared, ends_at[seq.id])
            self._late.append(late)
        self._waiting: deque[_Waiting] = deque()
        self._tokens = 0  # still to be prefilled
        self._waiting_blocks = 0
        self._wanted = 0  # tokens that all who wait would take in one step
        self._mark: tuple[tuple[Any, ...], list[Any], list[_Late]] | None = None
        for late in self._late:
            left = late.prompt_tokens + late.generated - late.computed
            if left > 1 or not late.generated:
                self._tokens += left
        for seq in queue.waiting:
            self._queue(self._waits(seq, ends_at[seq.id], shares.get(seq.id)), first=False)
        self._settle()

    # What is asked

    def extend(self) -> None:
        """Lists one more span."""
        ends, late = self._ends, self._late
        if ends and ends[0][0] <= self._step:
            self._retire()
        if late:
            self._retire_late()
            self._settle()  # who has ended may have left room for all of another's drafts
        if not self._decoders and not late and not self._waiting:
            self._set_mark()
            room = self._limit - self._settings.slots
            self._append(ENDLESS, self._cost.step_s(0, 0, 0), 0.0, room, True, ENDLESS, 0)
            return
        if not late and self._waiting and self._decoders and self._wait():
            return
        self._set_mark()
        self._compose()

    def spend(self, budget: Budget | None) -> bool:
        """Lists one more span if that is allowed."""
        if len(self.spans) >= MAX_SPANS or (budget is not None and budget.left <= 0):
            return False
        before = self.work
        self.extend()
        if budget is not None:
            budget.left -= self.work - before
        return True

    def opens(self, budget: Budget | None) -> bool:
        """Lists spans up to the first that lets somebody in, if that is allowed."""
        while self.first_open >= len(self.spans):
            if not self.spend(budget):
                return False
        return True

    def append(self, seq: Sequence, end: int) -> None:
        """One more comes to wait behind all others. What is ahead of it stands as it was listed, which is not right
        where the settings say `shares_steps`."""
        if self._mark is not None:
            self._back_to_mark()
        self.work += 1
        self._queue(self._waits(seq, end, None), first=False)

    def _waits(self, seq: Sequence, end: int, share: Share | None) -> _Waiting:
        shared = later = seq.shared_blocks
        if share is not None:
            shared = max(shared, min(seq.computed // self._size, share.with_any))
            later = share.with_later
        beside = 0
        if self._reserves:
            beside = reserved_blocks(seq, self._settings) + seq.shared_blocks
            beside -= -(-(seq.prompt_tokens + seq.generated) // self._size)
        return seq.prompt_tokens, seq.computed, seq.generated, shared, later, end, beside

    def rest_s(self, blocks: int) -> float:
        """From the last span to where one behind the queue would be let in, by the pace of the newer half of the spans.

        `blocks` is the KV space that it needs."""
        spans = self.spans
        room = max(1, self._limit - self._decoders * self._width)
        work_s = ceil(self._tokens / room) * self._cost.step_s(0, 0, self._decoders)
        work_s += self._cost.per_token_s * self._tokens
        for since in (spans[len(spans) // 2], spans[0]) if spans else ():
            passed_s = self.clock_s - since.start_s
            done, rest = since.tokens_behind - self._tokens, self._tokens
            if self.gated:
                done, rest = since.blocks_behind - self._waiting_blocks, self._waiting_blocks + blocks
            if done > 0 and passed_s > 0:
                return max(work_s, rest * passed_s / done)
        return work_s

    @property
    def cuts_prompts(self) -> bool:
        """Whether who is let in may get a part of a step, and the rest later."""
        return self._chunked

    @property
    def mean_step_s(self) -> float:
        """Of the steps listed."""
        return self.clock_s / self._step if self._step and self.clock_s else self._cost.step_s(0, 0, self._decoders)

    def last_step_s(self) -> tuple[float, int]:
        """How long a step takes with who decodes at the end of what is listed, and what one prefill gets of it."""
        left = self._limit - self._decoders * self._width - self._settings.slots
        return self._cost.step_s(0, 0, self._decoders), max(1, min(left, self._cap))

    # Composition

    def _compose(self) -> None:
        if self._settings.long_prefill_token_threshold_adaptive:
            there = self._decoders + len(self._late) + len(self._waiting)
            self._cap = chunk_cap(there + 1, self._settings)
        size, gate, cap, slots, width = self._size, self._gate, self._cap, self._settings.slots, self._width
        preempted = False
        while True:
            decoding = self._decoders
            budget = self._limit - decoding * width
            free = self._free
            if gate:
                free -= self._phases[-self._step % self._decode_size]
            steps = ENDLESS
            new_tokens = squares = curve = 0
            chunks: list[tuple[_Late, int]] = []
            for late in self._late:
                if budget <= slots:
                    break
                left = late.prompt_tokens + late.generated - late.computed
                decodes_on = left == 1 and late.generated
                want = width - slots if decodes_on else left
                if want > cap:
                    want = cap
                budget -= slots
                if want > budget:
                    want = budget
                budget -= want
                chunks.append((late, want))
                if gate:
                    need = -(-(late.computed + want) // size) - late.blocks - late.shared_blocks
                    if need > 0:
                        free -= need
                if decodes_on:
                    decoding += 1
                    steps = min(steps, self._steps_to(late.end - late.generated, want) + self._lag)
                else:
                    start = late.computed
                    new_tokens += want
                    squares += want * (2 * start + want)
                    curve += want * want
                    steps = 1 if want == left else min(steps, (left - 1) // want)
            if free >= 0 or preempted or not self._make_room():
                break
            preempted = True
        running = self._decoders + len(self._late)
        waiting = self._waiting
        blocked = preempted
        while waiting and not blocked and budget > slots:
            if running >= self._slots:
                self.gated = blocked = True
                break
            prompt_tokens, computed, generated, shared, later, end, beside = waiting[0]
            left = prompt_tokens + generated - computed
            want = left if left < cap else cap
            if want > budget - slots:
                if not self._chunked:
                    blocked = True
                    break
                want = budget - slots
            if gate:
                reserve = self._watermark if running else 0
                need = -(-(prompt_tokens + generated) // size) - shared + beside
                if need + reserve > free:
                    self.gated = blocked = True
                    break
                free -= need if self._reserves else max(0, -(-(computed + want) // size) - shared)
            self._unqueue()
            late = _Late(prompt_tokens, computed, generated, shared - later, later, end)
            if self._reserves:
                late.blocks += need
                self._free -= need
            self._late.append(late)
            chunks.append((late, want))
            running += 1
            budget -= want + slots
            new_tokens += want
            squares += want * (2 * computed + want)
            steps = 1
        self.work += 1 + (len(chunks) + len(self._late) // 8) // _LOOKED_AT_A_SPAN
        if preempted:
            steps = 1
        if not decoding and not chunks:
            # The head can never be admitted; whoever is behind it waits for ever, and that is not to be believed.
            self._tokens -= self._unqueue()
            return
        if self._ends:
            steps = min(steps, self._ends[0][0] - self._step)
        if gate and steps > 1 and (chunks or decoding > 1):  # one that outgrows the cache alone has nobody to give way
            steps = self._steps_in_space(chunks, steps)
        if running >= self._slots:
            self.gated = True  # whoever comes waits for a slot
        budget -= slots
        is_open = not blocked and not waiting and budget > 0 and running < self._slots
        room = spare = 0
        if is_open or (not waiting and self.spans and self.spans[-1].is_open):
            room = max(0, min(budget, cap))
            spare = max(0, budget - room) if room else 0
        first_s = self._cost.step_s(new_tokens, squares, decoding)
        growth_s = 0.0
        if steps > 1 and curve:
            growth_s = self._cost.step_s(new_tokens, squares + 2 * curve, decoding) - first_s
        self._append(steps, first_s, growth_s, room, is_open, free, spare)
        self._tokens -= new_tokens * steps
        self._pass(steps, chunks)

    def _wait(self) -> bool:
        """Lists as one span the steps in which all decode, and the head of the queue finds no slot or no space.

        False if there is none of that kind now."""
        prompt_tokens, _, generated, shared, _, _, beside = self._waiting[0]
        whole = -(-(prompt_tokens + generated) // self._size) - shared + beside + self._watermark
        gate, ends = self._gate, self._ends
        steps = looked_at = 0
        clock_s = self.clock_s
        while 0 < self._decoders * self._width < self._limit:
            free = self._free - (self._phases[-self._step % self._decode_size] if gate else 0)
            if (gate and free < 0) or not (self._decoders >= self._slots or (gate and whole > free)):
                break
            more = ends[0][0] - self._step
            if gate:
                more = self._steps_in_space([], more)
                self._free -= self._growth(more)
            clock_s += more * self._cost.step_s(0, 0, self._decoders)
            self._step += more
            steps += more
            looked_at += 1
            if ends[0][0] <= self._step:
                self._retire()
        if not steps:
            return False
        self.gated = True
        self.work += 1 + looked_at // 4
        self._append(steps, (clock_s - self.clock_s) / steps, 0.0, 0, False, self._free, 0)
        self.clock_s = clock_s
        return True

    def _append(
        self, steps: int, first_s: float, growth_s: float, room: int, is_open: bool, free: int, spare: int
    ) -> None:
        span = Span(
            self.clock_s, steps, first_s, growth_s, room, self._room, free, is_open, spare, self._tokens,
            self._waiting_blocks,
        )  # fmt: skip
        spans = self.spans
        spans.append(span)
        if not is_open and self.first_open == len(spans) - 1:
            self.first_open += 1
            self._mark = None  # nobody behind the queue has a part in this span
        if steps != ENDLESS:
            self.clock_s = span.end_s
            self._room += room * steps

    def _pass(self, steps: int, chunks: list[tuple[_Late, int]]) -> None:
        """Lets the composed steps happen."""
        gate, size = self._gate, self._size
        if gate:
            self._free -= self._growth(steps)
        settles = False
        for late, want in chunks:
            left = late.prompt_tokens + late.generated - late.computed
            decodes_on = left == 1 and late.generated > 0
            total = self._gained(steps, want) if decodes_on else want * steps
            late.computed += total
            if gate:
                new = -(-late.computed // size) - late.blocks - late.shared_blocks
                if new > 0:
                    late.blocks += new
                    self._free -= new
            if decodes_on:
                late.generated += total
                settles = settles or late.generated >= late.end
            elif total == left:
                late.generated += 1
                settles = True
        self._step += steps
        if settles:
            self._settle()

    # Who waits, and who decodes

    def _queue(self, one: _Waiting, first: bool) -> None:
        prompt_tokens, computed, generated, shared, _, _, beside = one
        left = prompt_tokens + generated - computed
        self._tokens += left
        self._wanted += min(left, self._least_cap)
        self._waiting_blocks += -(-(prompt_tokens + generated) // self._size) - shared + beside
        if first:
            self._waiting.appendleft(one)
        else:
            self._waiting.append(one)

    def _unqueue(self) -> int:
        """Takes the head out; returns the tokens that it has to compute."""
        prompt_tokens, computed, generated, shared, _, _, beside = self._waiting.popleft()
        left = prompt_tokens + generated - computed
        self._wanted -= min(left, self._least_cap)
        self._waiting_blocks -= -(-(prompt_tokens + generated) // self._size) - shared + beside
        return left

    def _settle(self) -> None:
        """Decoders that no prefill is ahead of any more join the count, if a step has room for all their drafts."""
        late = self._late
        place = 0
        for one in late:
            if not one.decodes or self._decoders >= self._most_counted:
                break
            place += 1
            self._decoders += 1
            since = self._in_steps(one.computed) - self._step
            if not self._reserves:
                self._phases[since % self._decode_size] += 1
            self._order += 1
            end = self._step + max(0, self._steps_to(one.end - one.generated)) + self._lag
            held = -one.blocks if self._reserves else one.shared_blocks
            decoder = (end, self._order, since, one.prompt_tokens, held)
            heappush(self._ends, decoder)
            self._stack.append(decoder)
        if place:
            del late[:place]

    def _retire(self) -> None:
        """Decoders whose output has ended are gone, and so is the space that they held."""
        ends, step, size, gone = self._ends, self._step, self._decode_size, self._gone
        while ends and (ends[0][0] <= step or ends[0][1] in gone):
            _, order, since, _, shared = heappop(ends)
            if order in gone:
                gone.discard(order)
                continue
            self._decoders -= 1
            if self._reserves:
                self._free -= shared
                continue
            self._phases[since % size] -= 1
            if self._gate:
                self._free += -(-(since + step) // size) - shared

    def _retire_late(self) -> None:
        late = self._late
        for place in range(len(late) - 1, -1, -1):
            one = late[place]
            if one.generated and one.generated >= one.end + self._lag:
                del late[place]
                if self._gate:
                    self._free += one.blocks

    # KV space

    def _growth(self, steps: int) -> int:
        """Blocks that the counted decoders take in so many steps from now."""
        if self._reserves:
            return 0
        size, phases, step = self._decode_size, self._phases, self._step
        if steps == 1:
            return phases[-step % size]
        rounds, rest = divmod(steps, size)
        total = rounds * self._decoders
        for later in range(step, step + rest):
            total += phases[-later % size]
        return total

    def _needs(self, chunks: list[tuple[_Late, int]], steps: int) -> int:
        need = self._growth(steps)
        for late, want in chunks:
            decodes_on = late.generated > 0 and late.prompt_tokens + late.generated - late.computed == 1
            more = self._gained(steps - 1, want) + want if decodes_on else want * steps
            new = -(-(late.computed + more) // self._size) - late.blocks - late.shared_blocks
            if new > 0:
                need += new
        return need

    # Where drafts are accepted

    def _steps_to(self, tokens: int, granted: int | None = None) -> int:
        """Steps from now until one who decodes has got so many more."""
        return self._drafting.steps_to(tokens, self._drafted_steps + self._step, granted)

    def _gained(self, steps: int, granted: int) -> int:
        """Tokens that one who decodes gets in so many steps from now, of each of which it takes so many."""
        return self._drafting.gained(self._drafted_steps + self._step, steps, granted)

    def _in_steps(self, tokens: int) -> int:
        """A place among a sequence's tokens in steps of decoding: in the same block, and as far into it."""
        if self._decode_size == self._size or tokens <= 0:
            return tokens
        blocks, rest = divmod(tokens - 1, self._size)
        return blocks * self._decode_size + rest * self._decode_size // self._size + 1

    def _in_tokens(self, steps: int) -> int:
        if self._decode_size == self._size or steps <= 0:
            return steps
        blocks, rest = divmod(steps - 1, self._decode_size)
        return blocks * self._size + rest * self._size // self._decode_size + 1

    def _steps_in_space(self, chunks: list[tuple[_Late, int]], steps: int) -> int:
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
        preempted = 0
        while self._late and self._tight():
            one = self._late.pop()
            left = one.prompt_tokens + one.generated - one.computed
            if left > 1 or not one.generated:
                self._tokens -= left
            self._free += one.blocks
            self._preempt(one.prompt_tokens, one.computed, one.generated, one.end)
            preempted += 1
        stack, step = self._stack, self._step
        while self._decoders > 1 and self._phases[-step % self._decode_size] > self._free:
            decoder = stack.pop()
            end, order, since, prompt_tokens, shared = decoder
            if end <= step:
                continue  # it has ended before
            self._gone.add(order)
            self._decoders -= 1
            self._phases[since % self._decode_size] -= 1
            computed = self._in_tokens(since + step)
            generated = max(1, computed - prompt_tokens + 1)
            self._free += -(-computed // self._size) - shared
            left = int((end - self._lag - step) * self._drafting.gain)
            self._preempt(prompt_tokens, computed, generated, generated + left)
            preempted += 1
        if preempted:
            self.work += preempted // _LOOKED_AT_A_SPAN
            # No preempted one is at the top of the heap.
            self._retire()
        return preempted > 0

    def _tight(self) -> bool:
        """Whether the next step lacks blocks."""
        budget = self._limit - self._decoders * self._width
        need = self._phases[-self._step % self._decode_size]
        for late in self._late:
            left = late.prompt_tokens + late.generated - late.computed
            if left == 1 and late.generated:
                left = self._drafting.width
            want = min(left, self._cap, max(0, budget - self._settings.slots))
            budget -= want + self._settings.slots
            new = -(-(late.computed + want) // self._size) - late.blocks - late.shared_blocks
            if new > 0:
                need += new
        return need > self._free

    def _preempt(self, prompt_tokens: int, computed: int, generated: int, end: int) -> None:
        self.gated = True
        self._queue((prompt_tokens, int(computed * _KEPT_AFTER_PREEMPTION), generated, 0, 0, end, 0), first=True)

    # One more behind all others

    def _set_mark(self) -> None:
        """Remembers how things stand before the first step that can have room for somebody behind the queue.

        Everything before it is the same whoever comes, so it need not be listed again.
        """
        if self.first_open < len(self.spans):
            return  # it has been listed, and the mark is before it
        waiting, late = self._waiting, self._late
        if late and late[0].decodes and self._drafting.width <= self._least_cap:
            return  # it takes all that those ahead of it leave of a step
        if waiting:
            if self._wanted > self._limit - self._decoders * self._width:
                return
            prompt_tokens, _, generated, shared, _, _, beside = waiting[-1]
            if self._gate and -(-(prompt_tokens + generated) // self._size) - shared + beside > self._free:
                return
        collections = [collection.copy() for collection in _collections_of(self)]
        self._mark = _numbers_of(self), collections, [late.copy() for late in self._late]

    def _back_to_mark(self) -> None:
        """What was listed since the mark holds no more."""
        assert self._mark is not None
        numbers, collections, self._late = self._mark
        for name, value in zip(_NUMBERS, numbers, strict=True):
            setattr(self, name, value)
        for name, value in zip(_COLLECTIONS, collections, strict=True):
            setattr(self, name, value)
        self._mark = None
        del self.spans[self.first_open :]


def whole_output(seq: Sequence, sampled: int) -> int:
    """The output that a sequence is taken to reach: it has outlived what is not longer than what it has generated."""
    ends = sampled if sampled >= max(1, seq.generated) else max(1, 2 * seq.generated)
    return ends if seq.max_output is None else max(1, min(ends, seq.max_output))
