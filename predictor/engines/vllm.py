"""vLLM V1: its step rule, for one full-attention group. What it reuses is in `reuse`.

Mirrors `vllm/v1/core/sched/scheduler.py` (schedule, _preempt_request, _update_after_schedule) and
`vllm/v1/core/kv_cache_manager.py` (allocate_slots) as read in vLLM 0.32.0.

"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import ceil
from typing import Literal

import msgspec

from predictor.engines import reuse
from predictor.length_class import LengthClass
from predictor.prompt import BlockHashes

LAST = 1 << 62  # a place in the order behind all others
# From one arrival's number to the next: SGLang's requests that gave way are numbered between two.
ARRIVALS_APART = 1 << 20


@dataclass(frozen=True, slots=True)
class Settings:
    """The engine's own settings that decide what a step holds. Defaults are vLLM's on a GPU of 70 GiB or more."""

    block_size: int = 16
    num_gpu_blocks: int | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    long_prefill_token_threshold: int = 0  # tokens; 0 = no cap
    long_prefill_token_threshold_adaptive: bool = False  # or a fair share of a step, if that is more (since 0.31)
    max_model_len: int | None = None
    async_scheduling: bool = False  # a step is composed while the one before it runs
    enable_chunked_prefill: bool = True
    draft_slots: int = 0  # tokens of a step that each request in it takes for its drafter (since 0.28)
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0  # part of all blocks that an admission must leave free while others run
    family: Literal["vllm", "sglang", "tensorrt_llm"] = "vllm"  # whose step rule holds; its file has its own names
    max_prefill_tokens: int = 16_384  # of a batch, SGLang
    schedule_conservativeness: float = 1.0  # SGLang: how much of outputs to come is kept free, as a multiple
    enable_mixed_chunk: bool = False  # SGLang: who decodes goes on beside prompts
    prefill_decode_interval: int = 0  # SGLang: decode steps after each prefill, before the next; 0 = none
    prefill_decode_interval_min_bs: int = 0  # SGLang: where fewer decode, nobody waits for them
    schedule_low_priority_values_first: bool = False  # SGLang; in vLLM always
    default_priority_value: int | None = None  # SGLang: of who has none; without it, behind all others
    priority_scheduling_preemption_threshold: int = 10  # SGLang: who is worse by more than this gives up its slot
    disable_priority_preemption: bool = False  # SGLang: nobody does

    @property
    def usable_blocks(self) -> int | None:
        """Blocks that requests can hold: vLLM keeps one for itself; SGLang does not count the one that it keeps."""
        if self.num_gpu_blocks is None or self.family != "vllm":
            return self.num_gpu_blocks
        return self.num_gpu_blocks - 1

    def most_in_a_step(self, tokens: int) -> int:
        """Of a prompt of so many tokens: all, where prompts are not cut."""
        return self.max_num_batched_tokens if self.enable_chunked_prefill else max(tokens, self.max_num_batched_tokens)

    @property
    def slots(self) -> int:
        """`draft_slots`, but for a token that an engine must have room for if it is to do anything."""
        return min(self.draft_slots, max(0, self.max_num_batched_tokens - 1))

    @property
    def caps_prompts(self) -> bool:
        """Whether a long prompt gets a part of a step only, and leaves the rest to others."""
        return self.family == "vllm" and 0 < self.long_prefill_token_threshold < self.max_num_batched_tokens

    @property
    def shares_steps(self) -> bool:
        """Whether what a prompt gets of a step depends on how many requests there are, those behind it included."""
        return self.long_prefill_token_threshold > 0 and self.long_prefill_token_threshold_adaptive

    def place(self, priority: int | None) -> int:
        """What a request with this `priority`, if it has one, waits by under the priority policy: less comes first."""
        if self.family != "sglang":
            return priority or 0
        if priority is None:
            priority = self.default_priority_value
        if priority is None:
            return LAST
        return priority if self.schedule_low_priority_values_first else -priority

    @property
    def preempts(self) -> bool:
        """Whether who waits may take the slot of who decodes."""
        return self.family == "sglang" and self.scheduling_policy == "priority" and not self.disable_priority_preemption

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_gpu_blocks) if self.num_gpu_blocks is not None else 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine. All counts are tokens unless they say blocks.

    `computed` and `generated` count what has been scheduled: a step moves them when it is composed, as vLLM does.
    """

    id: str
    prompt_tokens: int
    computed: int  # tokens whose KV exists or is being computed; while it waits, those it is expected to find cached
    expected_output: int
    watched: bool = True  # its first token will be seen, so the shadow can wait for it
    generated: int = 0
    max_output: int | None = None  # the caller's `max_tokens`: the engine stops there by itself
    blocks: int = 0  # KV blocks that count for it: all it has, less those that others had before it
    shared_blocks: int = 0  # leading blocks that others hold as well and that count for them
    hashes: BlockHashes | ReadOnly[int] = ()  # of the prompt's full blocks
    draws: tuple[float, ...] = ()  # for its output's length, one for each imagined future
    priority: int = 0  # where the engine goes by it: less comes first (`Settings.place`)
    arrived: int = 0  # in order
    length_class: LengthClass | None = None  # what its output may be told by; None: nothing is known
    booked: bool = True  # by us; else it is only known by its blocks, or by the engine's count
    may_find: int = 0  # tokens: what it will find cached if all that was there or on its way when it came lasts
    output_hashes: list[int] = field(default_factory=list)  # of the full blocks after those, as they become known
    tried: bool = False  # SGLang: its admission was tried, and it was not let in
    credited: int = field(init=False)  # what it was expected to find cached when it came

    def __post_init__(self) -> None:
        self.credited = self.computed

    @property
    def prefilling(self) -> bool:
        """Whether tokens are missing before it can decode: of its prompt, or, resumed, of its output too."""
        return not self.generated or self.prompt_tokens + self.generated - self.computed > 1

    @property
    def left(self) -> int:
        """Tokens to compute before the next one is generated: one while it decodes."""
        return self.prompt_tokens + self.generated - self.computed

    @property
    def prefill_left(self) -> int:
        return self.left if self.prefilling else 0

    def copy(self) -> Sequence:
        return Sequence(
            self.id, self.prompt_tokens, self.computed, self.expected_output, self.watched, self.generated,
            self.max_output, self.blocks, self.shared_blocks, self.hashes, (), self.priority, self.arrived,
            tried=self.tried,
        )  # fmt: skip

    @property
    def rank(self) -> tuple[int, int]:
        """Who waits is admitted, and who runs is preempted last, by this, least first, under the priority policy."""
        return self.priority, self.arrived


@dataclass(frozen=True, slots=True)
class Drafting:
    """Speculative decoding, as it has been of late, for each that decodes and each step."""

    gain: float = 1.0  # tokens that it gets; more than one where drafts are accepted
    drafted: float = 0.0  # tokens that are verified for it, and take room in the step, accepted or not

    def gained(self, since: int, steps: int, granted: int | None = None) -> int:
        """Whole tokens from so many steps, after so many others; `granted`: the tokens of each that it takes, if a
        step may have less room for it than it could use. Drafts that are cut off cannot be accepted."""
        if granted is not None and granted <= self.gain:
            return granted * steps
        return steps if self.gain == 1.0 else int((since + steps) * self.gain) - int(since * self.gain)

    def steps_to(self, tokens: int, since: int, granted: int | None = None) -> int:
        """Steps until it has got so many more, after so many others; `granted` as in `gained`."""
        if granted is not None and granted <= self.gain:
            return ceil(tokens / granted)
        if self.gain == 1.0:
            return tokens
        steps = int((int(since * self.gain) + tokens) / self.gain) - since  # or up to two more, by what is rounded
        while self.gained(since, steps) < tokens:
            steps += 1
        return steps

    @property
    def gains(self) -> bool:
        """Whether a step may give more than one token."""
        return self.gain != 1.0

    @property
    def width(self) -> int:
        """Tokens of a step that it takes."""
        return 1 + round(self.drafted)


NO_DRAFTS = Drafting()


@dataclass(slots=True)
class Queue:
    """The scheduler's two lists: `running` in order of admission, `waiting` in order of arrival."""

    running: list[Sequence] = field(default_factory=list)
    waiting: deque[Sequence] = field(default_factory=deque)
    free_blocks: int | None = None  # None: never short
    reserve_ratio: float = 0.7  # SGLang: what of the outputs to come is kept free
    shut: bool = False  # SGLang: somebody was turned away, and nobody is tried again before one has left
    unseen: frozenset[str] = frozenset()  # SGLang: whose newest token its scheduler does not know of yet (overlap)
    decodes_first: int = 0  # SGLang: decode steps before anybody is prefilled again (prefill_decode_interval)
    drafting: Drafting = NO_DRAFTS
    steps: int = 0  # composed so far, where drafts are accepted

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def next_gain(self) -> int:
        """What each who decodes gets out of the next step, in whole tokens."""
        if self.drafting.gain == 1.0:
            return 1
        self.steps += 1
        return self.drafting.gained(self.steps - 1, 1)

    def copy(self) -> Queue:
        running, waiting = [seq.copy() for seq in self.running], deque(seq.copy() for seq in self.waiting)
        return replace(self, running=running, waiting=waiting)


class Step(msgspec.Struct, frozen=True):
    """What one step computes, and what it leaves: `room` tokens for a request queued behind all others."""

    chunks: tuple[tuple[Sequence, int, int], ...]  # prefill: a sequence, and from which token to which
    decodes: tuple[Sequence, ...]
    room: int
    preempted: tuple[Sequence, ...] = ()
    admitted: int = 0  # so many of the chunks, the last, are of sequences that waited before
    gains: tuple[int, ...] = ()  # tokens that each of `decodes` gets out of it; empty: one each

    def gained(self) -> Iterator[tuple[Sequence, int]]:
        """Who decodes in it, and the tokens that each gets out of it."""
        return zip(self.decodes, self.gains or repeat(1), strict=False)

    def gain_of(self, seq: Sequence) -> int:
        """Tokens that this one gets out of it by decoding; 0 if it does not decode in it."""
        for place, other in enumerate(self.decodes):
            if other is seq:
                return self.gains[place] if self.gains else 1
        return 0

    @property
    def new_tokens(self) -> int:
        return sum(end - start for _, start, end in self.chunks)

    @property
    def squares(self) -> int:
        """Sum over the chunks of end^2 - start^2, positions in tokens: attention's work."""
        return sum(end * end - start * start for _, start, end in self.chunks)

    @property
    def empty(self) -> bool:
        return not self.chunks and not self.decodes


# Looks up what an engine would find cached, at the moment of admission: tokens reusable, and blocks of them that
# running requests hold.
Lookup = Callable[[Sequence], tuple[int, int]]


def reusable_tokens(run_blocks: int, block_size: int, prompt_tokens: int) -> int:
    """Tokens that need no prefill, of a prompt whose first `run_blocks` blocks are cached; see `reuse.ReuseRule`."""
    return reuse.vllm().reusable_tokens(run_blocks * block_size, block_size, prompt_tokens)


def room_beside(decodes: int, settings: Settings, drafting: Drafting = NO_DRAFTS) -> int:
    """Tokens that the only prefill gets in a step, beside so many decodes."""
    if settings.family == "sglang":
        return settings.max_num_batched_tokens
    left = settings.max_num_batched_tokens - decodes * (drafting.width + settings.slots) - settings.slots
    return min(chunk_cap(decodes + 1, settings), max(1, left))


def granted(decodes: int, requests: int, settings: Settings, drafting: Drafting) -> Iterator[int | None]:
    """What each of so many decodes takes of a step of nobody else, for `Drafting.gained`, among so many requests."""
    if not drafting.gains:
        yield from repeat(None, decodes)
        return
    each = min(drafting.width, chunk_cap(requests, settings))
    left = settings.max_num_batched_tokens - settings.slots
    for _ in range(decodes):
        yield max(1, min(each, left))
        left -= each + settings.slots


def chunk_cap(requests: int, settings: Settings) -> int:
    """The most tokens one request gets in a step. The threshold spares a request that is alone (since 0.31)."""
    threshold, limit = settings.long_prefill_token_threshold, settings.max_num_batched_tokens
    if threshold <= 0 or requests <= 1:
        return limit
    return max(threshold, limit // requests) if settings.long_prefill_token_threshold_adaptive else threshold


def enqueue(queue: Queue, settings: Settings, seq: Sequence) -> bool:
    """One more waits; False if it has overtaken somebody."""
    waiting = queue.waiting
    if settings.scheduling_policy == "fcfs" or not waiting or waiting[-1].rank <= seq.rank:
        waiting.append(seq)
        return True
    waiting.insert(bisect_right(waiting, seq.rank, key=_rank), seq)
    return False


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


def schedule(queue: Queue, settings: Settings, newcomers: int = 0, lookup: Lookup | None = None) -> Step:
    """Composes the next step: admits, preempts, and moves `computed` and `generated` to where they are after it.

    `newcomers` requests are imagined behind the queue: they count where the engine counts requests, and `room` is what
    they could take. `lookup` is asked for each request whose admission is tried.
    """
    slots, width = settings.slots, queue.drafting.width
    budget = settings.max_num_batched_tokens - slots  # whoever is next takes its slots besides
    cap = chunk_cap(len(queue) + newcomers, settings)
    size, gain, drafts = settings.block_size, queue.next_gain(), queue.drafting.gains
    by_priority = settings.scheduling_policy == "priority"
    running, waiting = queue.running, queue.waiting
    free = queue.free_blocks
    chunks: list[tuple[Sequence, int, int]] = []
    decodes: list[Sequence] = []
    gains: list[int] = []
    preempted: list[Sequence] = []
    index = 0
    while index < len(running) and budget > 0:
        seq = running[index]
        index += 1
        if seq.max_output is not None and seq.generated >= seq.max_output:
            continue  # its last token is on its way (asynchronous scheduling)
        computed = seq.computed
        left = seq.prompt_tokens + seq.generated - computed
        decodes_on = left == 1 and seq.generated
        want = width if decodes_on else left
        if want > cap:
            want = cap
        if want > budget:
            want = budget
        if free is not None:
            need = -(-(computed + want) // size) - seq.blocks - seq.shared_blocks
            while need > free and running:
                place = len(running) - 1
                if by_priority:
                    place = max(range(len(running)), key=lambda at: running[at].rank)
                victim = running.pop(place)
                if place < index - 1:
                    index -= 1
                    budget += _unscheduled(victim, chunks, decodes, gains, width) + slots
                free += victim.blocks
                _give_back(victim)
                if by_priority:
                    enqueue(queue, settings, victim)
                else:
                    waiting.appendleft(victim)
                preempted.append(victim)
                if victim is seq:
                    break
            if preempted and preempted[-1] is seq:
                break
            if need > 0:
                free -= need
                seq.blocks += need
        budget -= want + slots
        if decodes_on:
            gained = 1
            if drafts:
                gained = min(gain, want, want if seq.max_output is None else seq.max_output - seq.generated)
                gains.append(gained)
            decodes.append(seq)
            seq.computed = computed + gained
            seq.generated += gained
        else:
            seq.computed = computed + want
            chunks.append((seq, computed, computed + want))
            if want == left:
                seq.generated += 1
    blocked = bool(preempted)
    running_before = len(running)
    while not blocked and waiting and budget > 0 and len(running) < settings.max_num_seqs:
        seq = waiting[0]
        if lookup is not None:
            seq.computed, seq.shared_blocks = lookup(seq)
        left = seq.prompt_tokens + seq.generated - seq.computed
        want = min(left, cap)
        if want > budget and not settings.enable_chunked_prefill:
            blocked = True
            break
        want = min(want, budget)
        if free is not None:
            reserve = settings.watermark_blocks if running else 0
            if -(-(seq.prompt_tokens + seq.generated) // size) - seq.shared_blocks + reserve > free:
                blocked = True
                break
            seq.blocks = max(0, -(-(seq.computed + want) // size) - seq.shared_blocks)
            free -= seq.blocks
        waiting.popleft()
        running.append(seq)
        chunks.append((seq, seq.computed, seq.computed + want))
        budget -= want + slots
        seq.computed += want
        if want == left:
            seq.generated += 1
    queue.free_blocks = free
    is_open = not blocked and not waiting and len(running) < settings.max_num_seqs
    room = max(0, min(budget, cap)) if is_open else 0
    admitted = len(running) - running_before
    return Step(tuple(chunks), tuple(decodes), room, tuple(preempted), admitted, tuple(gains))


def _unscheduled(
    victim: Sequence, chunks: list[tuple[Sequence, int, int]], decodes: list[Sequence], gains: list[int], width: int
) -> int:
    """One that gives way is no part of the step any more; returns the tokens that it had in it, a decode `width`."""
    for place, seq in enumerate(decodes):
        if seq is victim:
            gained = gains.pop(place) if gains else 1
            del decodes[place]
            victim.computed -= gained
            victim.generated -= gained
            return width
    for place, (seq, start, end) in enumerate(chunks):
        if seq is victim:
            del chunks[place]
            if end == victim.prompt_tokens + max(0, victim.generated - 1):
                victim.generated -= 1
            victim.computed = start
            return end - start
    return 0


def undo(queue: Queue, step: Step) -> None:
    """Takes back the composition of the newest step, which preempted nobody. Blocks stay with those that still run.

    Who has left since is not brought back, and who has come in by another way stays.
    """
    for seq, gained in step.gained():
        seq.computed -= gained
        seq.generated -= gained
    for seq, start, end in step.chunks:
        if seq.generated and end == seq.prompt_tokens + seq.generated - 1:
            seq.generated -= 1
        seq.computed = start
    admitted = {id(seq) for seq, _, _ in step.chunks[len(step.chunks) - step.admitted :]}
    taken_back = [seq for seq in queue.running if id(seq) in admitted]
    queue.running = [seq for seq in queue.running if id(seq) not in admitted]
    for seq in reversed(taken_back):
        if queue.free_blocks is not None:
            queue.free_blocks += seq.blocks
        seq.blocks = 0
        queue.waiting.appendleft(seq)


# Of what a preempted request had computed, the part that it finds again when it is resumed: its blocks stay cached
# until others need them.
_KEPT_AFTER_PREEMPTION = 0.95


def _give_back(seq: Sequence) -> None:
    seq.computed = int(seq.computed * _KEPT_AFTER_PREEMPTION)
    seq.blocks = seq.shared_blocks = 0
