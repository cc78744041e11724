"""SGLang: its step rule, first come first served or by priority. What it reuses is in `reuse`.

Mirrors `get_next_batch_to_run` and `update_running_batch` in `sglang/srt/managers/scheduler.py`, `PrefillAdder` in
`sglang/srt/managers/schedule_policy.py` and `retract_decode` in `sglang/srt/managers/schedule_batch.py` of SGLang
0.5.23. Prefill goes strictly before decode, one request at a time is cut into chunks, and a request is admitted where
its output is likely to fit as well. Who does not fit shuts the door: nobody is tried again before somebody has left,
unless who has a better priority may take the slot of who has a worse one.

SGLang's names for the shared settings: `block_size` is its page_size, `max_num_batched_tokens` its
chunked_prefill_size, `max_num_seqs` its max_running_requests, `async_scheduling` its overlap schedule. Without
`enable_chunked_prefill` (a chunked_prefill_size of -1) prompts are never cut, and a batch goes by `max_prefill_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from predictor.engines.vllm import LAST, Lookup, Queue, Sequence, Settings, Step, enqueue

# Nobody reserves more for a request's output than this (CLIP_MAX_NEW_TOKENS).
RESERVED_MOST_TOKENS = 4096
# new_token_ratio: what of an output not yet there is reserved while a request runs. It begins at the first, and loses a
# step's worth with each decode step down to the last: a part of the first, after so many steps (the global defaults).
FIRST_RATIO = 0.7
_LAST_PART, _DECAY_STEPS = 0.14, 600
LAST_RATIO = FIRST_RATIO * _LAST_PART
# A retraction sets it to what the others have generated and will in so many steps, of all that they may.
_STEPS_AFTER_RETRACTION = 20
_MOST_OUTPUT = 1 << 30  # without a `max_tokens`
_ENDLESS = 1 << 60


def reserved_tokens(max_output: int | None, generated: int) -> int:
    """Room that an output may yet take, as the engine counts it. Without a `max_tokens` it counts the most."""
    if max_output is None:
        return RESERVED_MOST_TOKENS
    return min(max(0, max_output - generated), RESERVED_MOST_TOKENS)


def first_ratio(settings: Settings) -> float:
    """What new_token_ratio begins at, and goes back to when there is nothing to do."""
    return min(1.0, FIRST_RATIO * settings.schedule_conservativeness)


def ratio_after(ratio: float, decode_steps: int, settings: Settings) -> float:
    """What new_token_ratio has come down to."""
    first = first_ratio(settings)
    last = first * _LAST_PART
    return max(last, ratio - decode_steps * ((first - last) / _DECAY_STEPS))


def ratio_after_retraction(staying: Iterable[tuple[int, int | None]]) -> float:
    """What it is once somebody was retracted. Of each who stays: the tokens it has generated, and the most it may."""
    count = generated = most = 0
    for tokens, max_output in staying:
        count += 1
        generated += tokens
        most += _MOST_OUTPUT if max_output is None else max_output
    return min(1.0, (generated + _STEPS_AFTER_RETRACTION * count) / (most + 1))


class Intake:
    """Whom one batch of prompts takes in, one after the other (SGLang's PrefillAdder).

    `promised` are the tokens kept free for the outputs of those who decode, `decoding` how many do; `slots` may come in
    beside them. With `free_blocks` None space is never short. What is taken in is counted here and moved by the caller.
    """

    __slots__ = ("_chunked", "_empty", "_input_left", "_size", "_slots", "_space", "left", "shut")

    def __init__(self, settings: Settings, free_blocks: int | None, promised: float, decoding: int, slots: int) -> None:
        beside = decoding if settings.enable_mixed_chunk else 0  # of the batch, and a token of space each
        self._size = settings.block_size
        self._slots = slots
        self._input_left = settings.max_prefill_tokens - beside
        self._space = None if free_blocks is None else free_blocks * settings.block_size - promised - beside
        self._chunked = settings.enable_chunked_prefill
        self._empty = True
        self.left = settings.max_num_batched_tokens - beside if self._chunked else _ENDLESS  # tokens of the batch
        self.shut = False  # somebody was turned away, or would be

    @property
    def takes_more(self) -> bool:
        """Whether one more can be tried."""
        return self.left > 0 and self._input_left > 0 and not self.shut

    @property
    def room(self) -> int:
        """Tokens, in whole pages, for a prompt that would be tried now; where none is cut, the first gets all."""
        if not self.takes_more or self._slots <= 0:
            return 0
        left = self.left if self._chunked or self._empty else self._input_left - 1
        return left // self._size * self._size

    @property
    def full(self) -> bool:
        """Whether there is no slot for one more."""
        return self._slots <= 0

    @property
    def space(self) -> float | None:
        """Tokens that nobody has and that are promised to nobody."""
        return self._space

    def goes_on(self, seq: Sequence) -> int:
        """The tokens that the prompt which was cut before gets: the first of the batch, and nothing keeps it out."""
        want = min(self.left, seq.left)
        if self._space is not None:
            # Of a step that was taken back it has its blocks still.
            self._space += self._size * max(0, seq.blocks + seq.shared_blocks - -(-seq.computed // self._size))
            if int(self._space) > 0:
                want = min(want, int(self._space))
        padded = -(-want // self._size) * self._size
        self.left -= padded
        self._input_left -= padded
        self._slots -= 1
        self._empty = False
        if self._space is not None:
            self._space -= padded + self._size + (0 if want < seq.left else reserved_tokens(seq.max_output, 0))
        return want

    def let_in(self, seq: Sequence) -> int:
        """The tokens that one who waited gets; 0 if it is not let in, and nobody behind it."""
        left, space, size = self.left, self._space, self._size
        if left <= 0 or self._input_left <= 0 or self.shut:
            return 0
        if self._slots <= 0:
            self.shut = True
            return 0
        want = seq.prompt_tokens + seq.generated - seq.computed
        if space is not None:
            space -= max(0, -(-seq.computed // size) - seq.shared_blocks) * size
            if want + reserved_tokens(seq.max_output, seq.generated) + size >= space:
                self.shut = True
                return 0
        padded = -(-want // size) * size
        if not self._chunked and not self._empty and padded >= self._input_left:
            self._input_left = 0
            return 0
        is_cut = padded > left
        if is_cut:
            want = padded = left // size * size
            if not want:
                self.left = 0
                return 0
        self.left = left - padded
        self._input_left -= padded
        self._slots -= 1
        self._empty = False
        if space is not None:
            self._space = space - (padded + size + (0 if is_cut else reserved_tokens(seq.max_output, 0)))
            self.shut = self._space <= 0
        return want

    def gains(self, blocks: int, promised: float) -> None:
        """Somebody gives way who has so many blocks, and for whose output so many tokens were kept free."""
        self._slots += 1
        if self._space is not None:
            self._space += blocks * self._size + promised


class Victim(NamedTuple):
    """One that decodes, as who wants its slot sees it: the first to give way is the greatest."""

    priority: int
    arrived: int
    promised: float  # tokens that are kept free for its output
    key: int  # whatever the caller knows it by


def who_gives_way(seq: Sequence, space: float | None, running: Iterable[Victim], settings: Settings) -> list[Victim]:
    """Of those that decode, whoever must go for one that waits (`preempt_to_schedule`); nobody if that is no help.

    `space` are the tokens that nobody has and that are promised to nobody. Only what is kept free for the outputs of
    others counts for the newcomer, not what they hold; and the prompt of one that was never tried does not count.
    """
    missing = -float(_ENDLESS)
    if space is not None:
        own = seq.left if seq.tried else -seq.computed
        missing = own + min(_MOST_OUTPUT if seq.max_output is None else seq.max_output, RESERVED_MOST_TOKENS) - space
    given: list[Victim] = []
    for victim in sorted(running, reverse=True):
        if victim.priority - seq.priority <= settings.priority_scheduling_preemption_threshold:
            break
        given.append(victim)
        missing -= victim.promised
        if missing <= 0:
            return given
    return []


def may_preempt(queue: Queue, settings: Settings) -> bool:
    """Whether the first who waits has a priority that may cost somebody his slot."""
    if not settings.preempts or not queue.waiting:
        return False
    worst = max((seq.priority for seq in queue.running if not seq.prefilling), default=-LAST)
    return worst - queue.waiting[0].priority > settings.priority_scheduling_preemption_threshold


def schedule(queue: Queue, settings: Settings, newcomers: int = 0, lookup: Lookup | None = None) -> Step:
    """Composes the next step: a prefill batch if there is one, else a decode step; with mixed chunks both in one.

    Moves `computed` and `generated` to where they are after it. `lookup` is asked for each request whose admission is
    tried. With `newcomers` imagined behind the queue, what could be left to them is the step's `room`. With overlap the
    step may be empty although there is work: the next one is composed when the one under way has ended.
    """
    step = Step((), (), 0)
    if not _decodes_first(queue, settings):
        step = _prefill(queue, settings, newcomers, lookup)
    if step.chunks:
        queue.decodes_first = settings.prefill_decode_interval
    else:
        step = _decode(queue, settings, step.room, step.preempted)
    if settings.async_scheduling:
        queue.unseen = frozenset([seq.id for seq in step.decodes] + [seq.id for seq, _, _ in step.chunks])
    return step


def _decodes_first(queue: Queue, settings: Settings) -> bool:
    """Whether this step is for those who decode, whoever waits to be prefilled (`_should_defer_prefill`)."""
    if not queue.decodes_first:
        return False
    decoding = sum(1 for seq in queue.running if not seq.prefilling)
    # Where nobody decodes the engine's loop turns so many times in no time, but for the result that it waits for.
    if decoding < settings.prefill_decode_interval_min_bs or not (decoding or queue.unseen):
        queue.decodes_first = 0
        return False
    queue.decodes_first -= 1
    return True


def _prefill(queue: Queue, settings: Settings, newcomers: int, lookup: Lookup | None) -> Step:
    running, waiting, free = queue.running, queue.waiting, queue.free_blocks
    cut = next((seq for seq in running if seq.prefilling), None)
    decoders = [seq for seq in running if seq is not cut]
    preempts = settings.preempts
    if cut is not None or not decoders or preempts:
        queue.shut = False
    if cut is None and (queue.shut or not (waiting or newcomers)):
        return Step((), (), 0)
    promised = 0.0
    if free is not None:
        promised = queue.reserve_ratio * sum(_reserved(seq, queue) for seq in decoders)
    intake = Intake(settings, free, promised, len(decoders), settings.max_num_seqs - len(decoders))
    chunks: list[tuple[Sequence, int, int]] = []
    if cut is not None and intake.left > 0:
        _chunk(cut, intake.goes_on(cut), queue, settings, chunks)
    admitted, full = 0, False
    preempted: list[Sequence] = []
    while waiting and intake.takes_more and not queue.shut:
        seq = waiting[0]
        if lookup is not None:
            seq.computed, seq.shared_blocks = lookup(seq)
        full = full or intake.full
        if full and preempts:
            # Once one has given way, everybody behind needs another one to.
            victims = _give_way(seq, intake, decoders, queue, settings)
            if not victims:
                break
            decoders = [one for one in decoders if not any(one is victim for victim in victims)]
            preempted += victims
        want = intake.let_in(seq)
        if not want:
            seq.tried = True
            break
        waiting.popleft()
        running.append(seq)
        admitted += 1
        _chunk(seq, want, queue, settings, chunks)
    for victim in preempted:
        _back_to_queue(victim, queue, settings)
    # The mark is on the batch that decodes; an empty one is replaced by this step's, which has none.
    queue.shut = bool(decoders) and (queue.shut or intake.shut) and not preempts
    is_cut = any(seq.prefilling for seq, _, _ in chunks[-1:])
    room = 0 if waiting or is_cut or not (chunks or newcomers) else intake.room
    decodes = _beside(decoders, queue, settings) if chunks and settings.enable_mixed_chunk else ()
    return Step(tuple(chunks), decodes, room, tuple(preempted), admitted)


def _give_way(
    seq: Sequence, intake: Intake, decoders: list[Sequence], queue: Queue, settings: Settings
) -> list[Sequence]:
    """Those that decode and give up their slots for this one; what they had is free."""
    running = (
        Victim(one.priority, one.arrived, queue.reserve_ratio * _reserved(one, queue), place)
        for place, one in enumerate(decoders)
    )
    victims = []
    for victim in who_gives_way(seq, intake.space, running, settings):
        one = decoders[victim.key]
        intake.gains(one.blocks, victim.promised)
        _lose(one, queue)
        victims.append(one)
    return victims


def _reserved(seq: Sequence, queue: Queue) -> int:
    return reserved_tokens(seq.max_output, seq.generated - (seq.id in queue.unseen))


def _lose(victim: Sequence, queue: Queue) -> None:
    """It does not run any more, and has to compute all anew."""
    queue.running.remove(victim)
    if queue.free_blocks is not None:
        queue.free_blocks += victim.blocks
    victim.computed = victim.blocks = victim.shared_blocks = 0
    if victim.id in queue.unseen:
        victim.generated -= 1  # a token on its way to who gave way is thrown away


def _back_to_queue(victim: Sequence, queue: Queue, settings: Settings) -> None:
    """It waits as if it came now."""
    if settings.scheduling_policy == "priority":
        victim.arrived = 1 + max((seq.arrived for seq in chain(queue.running, queue.waiting)), default=victim.arrived)
    enqueue(queue, settings, victim)


def _chunk(seq: Sequence, want: int, queue: Queue, settings: Settings, chunks: list[tuple[Sequence, int, int]]) -> None:
    start = seq.computed
    seq.computed = start + want
    if want == seq.prompt_tokens + seq.generated - start:
        seq.generated += 1
    chunks.append((seq, start, seq.computed))
    _take(seq, queue, settings.block_size)


def _take(seq: Sequence, queue: Queue, size: int) -> None:
    """The pages for what it has got to."""
    if queue.free_blocks is not None:
        new = -(-seq.computed // size) - seq.blocks - seq.shared_blocks
        if new > 0:
            seq.blocks += new
            queue.free_blocks -= new


def _beside(decoders: list[Sequence], queue: Queue, settings: Settings) -> tuple[Sequence, ...]:
    """Those who go on decoding in a batch of prompts: all or, where there is no page for that, none."""
    going_on = [seq for seq in decoders if not _has_all(seq)]
    if len(going_on) < len(decoders):
        queue.shut = False
    free, size = queue.free_blocks, settings.block_size
    if not going_on or (free is not None and free < _pages_needed(going_on, size)):
        return ()
    queue.shut = False  # they are the batch's now, and the mark stays behind
    for seq in going_on:
        _decode_one(seq, queue, size)
    return tuple(going_on)


def _has_all(seq: Sequence) -> bool:
    """Whether its last token is on its way (overlap): it takes no further part."""
    return seq.max_output is not None and seq.generated >= seq.max_output


def _decode_one(seq: Sequence, queue: Queue, size: int) -> None:
    seq.computed += 1
    seq.generated += 1
    _take(seq, queue, size)


def _decode(queue: Queue, settings: Settings, room: int, preempted: tuple[Sequence, ...] = ()) -> Step:
    """`preempted` have given way already, for one that was not let in for all that."""
    size, free = settings.block_size, queue.free_blocks
    decodes = [seq for seq in queue.running if not seq.prefilling and not _has_all(seq)]
    if not decodes:
        queue.shut = False
        return Step((), (), room, preempted)
    retracted: list[Sequence] = []
    if free is not None and free < _pages_needed(decodes, size):
        if len(decodes) < sum(1 for seq in queue.running if not seq.prefilling):
            queue.shut = False
            return Step((), (), 0, preempted)  # what they leave is waited for
        while len(decodes) > 1 and free < _pages_needed(decodes, size):
            victim = min(decodes, key=lambda seq: (seq.generated, -seq.prompt_tokens))
            decodes.remove(victim)
            free += victim.blocks
            _lose(victim, queue)
            _back_to_queue(victim, queue, settings)
            retracted.append(victim)
        queue.reserve_ratio = ratio_after_retraction(
            (seq.generated - (seq.id in queue.unseen), seq.max_output) for seq in decodes
        )
        queue.shut = False
    else:
        queue.reserve_ratio = ratio_after(queue.reserve_ratio, 1, settings)
    for seq in decodes:
        _decode_one(seq, queue, size)
    return Step((), tuple(decodes), room, (*preempted, *retracted), 0)


def _pages_needed(decodes: list[Sequence], size: int) -> int:
    """New pages of the next decode step."""
    return sum(1 for seq in decodes if seq.computed % size == 0)
