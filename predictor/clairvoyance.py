"""What a shadow would predict if it knew the future: true costs, true output lengths, and the requests yet to come.

A forecast is off by what nobody can know, and by what the shadow gets wrong. With the unknown told, only the second is
left: that is what a clairvoyant backtest measures. From the shadow's present state the queue is stepped forward one
engine step at a time, by the step rule itself and without the jumps of the timeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import msgspec
import numpy as np

from predictor.course import State
from predictor.engines.step_rule import rule_of
from predictor.engines.vllm import ARRIVALS_APART, Settings, Step, enqueue
from predictor.engines.vllm import Sequence as Seq
from predictor.prefill_cost import StepCost
from predictor.prefixes_ahead import common_blocks
from predictor.prompt import BlockHashes

_NO_HASHES: BlockHashes = np.empty(0, np.uint64)

# A fork goes on for so many requests: later ones read their first tokens from it.
_REQUESTS_A_FORK = 32
# What came otherwise than the fork had it, by more than this, is worth a new one.
_TOLERANCE_S, _TOLERANCE_RATIO = 0.001, 1e-4
# Nothing takes longer; what does will never end.
_MOST_STEPS = 5_000_000
_NO_END = 1 << 30


class BadCosts(ValueError):
    """A file of costs that is none; the message says what is wrong and what is allowed."""


# Shorter names that others use for the same: a*n + b*(n^2 - p^2), c a step, d a decoding sequence.
_ALIASES = {"a": "per_token_s", "b": "per_token_squared_s", "c": "fixed_s", "d": "per_decode_s"}
_PARTS = tuple(one.name for one in fields(StepCost))


@dataclass(frozen=True, slots=True)
class Costs:
    """Of every worker, or of some by name."""

    common: StepCost | None
    of_worker: Mapping[str, StepCost]

    def of(self, worker: str) -> StepCost:
        cost = self.of_worker.get(worker, self.common)
        if cost is None:
            raise BadCosts(f"no costs for worker {worker!r}; known are {', '.join(sorted(self.of_worker)) or 'none'}")
        return cost


def read_costs(raw: bytes) -> Costs:
    """`{"per_token_s": .., "per_token_squared_s": .., "fixed_s": .., "per_decode_s": ..}` (or a, b, c, d), seconds.

    `{"workers": {NAME: {...}}}` gives them for some workers. What is left out is 0. Raises BadCosts.
    """
    try:
        told = msgspec.json.decode(raw, type=dict[str, float | dict[str, dict[str, float]]])
    except (msgspec.MsgspecError, UnicodeDecodeError) as fault:
        raise BadCosts(str(fault)) from fault
    workers = told.pop("workers", {})
    if not isinstance(workers, dict):
        raise BadCosts("`workers` is no object of costs by worker")
    common = {name: value for name, value in told.items() if not isinstance(value, dict)}
    if len(common) != len(told):
        raise BadCosts(f"unknown key {next(iter(told.keys() - common.keys()))!r}")
    return Costs(_cost(common) if common else None, {name: _cost(parts) for name, parts in workers.items()})


def _cost(parts: Mapping[str, float]) -> StepCost:
    named = {_ALIASES.get(name, name): value for name, value in parts.items()}
    for name, value in named.items():
        if name not in _PARTS:
            raise BadCosts(f"unknown cost {name!r}; known are {', '.join((*_ALIASES, *_PARTS))}")
        if not 0 <= value < 1e6:
            raise BadCosts(f"`{name}` is {value}: expected seconds, 0 or more")
    known = {name: named.get(name, 0.0) for name in _PARTS if name != "bend_tokens"}
    return StepCost(**known, bend_tokens=int(named.get("bend_tokens", 0)))


@dataclass(frozen=True, slots=True)
class Coming:
    """A request as the recording will tell it: when it comes, and what will have been true of it.

    `hashes` are chained, of the prompt's full blocks: only equal ones mean anything.
    """

    id: str
    at_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    priority: int | None = None
    hashes: BlockHashes = field(default_factory=lambda: _NO_HASHES, compare=False)


@dataclass(frozen=True, slots=True)
class _GivenBack:
    """Blocks of one that was preempted: free, the newest of all, and its last ones the first to be taken."""

    held_blocks: int  # that others held before it
    own_blocks: int
    full_blocks: int  # of both: the last one may have been begun only
    safe_until: int  # blocks taken by then, since the fork began: from there on each taken is one of them


@dataclass(slots=True)
class _Pool:
    """What the engine's pool of free blocks has been through. Blocks."""

    taken: int = 0
    given_back: dict[str, _GivenBack] = field(default_factory=dict)  # by sequence, until it is resumed


class Seer:
    """One worker's future. `coming` is everything that it will be sent, in the order of time."""

    def __init__(self, coming: Sequence[Coming], cost: StepCost) -> None:
        self._coming = coming
        self._place = {one.id: place for place, one in enumerate(coming)}
        self._cost = cost
        self._fork: _Fork | None = None
        self._left = 0

    def first_token_s(self, request_id: str, state: State) -> float | None:
        """When the request that was just booked gets its first token; absolute seconds. None if it never does."""
        if self._fork is None or not self._left:
            self._fork = _Fork(state, self._coming, self._place, self._place[request_id] + 1, self._cost)
            self._left = _REQUESTS_A_FORK
        self._left -= 1
        return self._fork.first_token_s(request_id)

    def came(self, request_id: str, at_s: float) -> None:
        """Its first token has come. If that was not to be, the next forecast begins from the shadow again."""
        if self._fork is not None:
            told_s = self._fork.first_s.get(request_id)
            if told_s is None or abs(told_s - at_s) > _TOLERANCE_S + _TOLERANCE_RATIO * abs(at_s - self._fork.began_s):
                self._fork = None

    def ended_early(self, request_id: str) -> None:
        """It was given up: what the fork has it do from here on does not happen."""
        del request_id
        self._fork = None


class _Fork:
    """A copy of a worker's queue that goes on by itself."""

    def __init__(
        self, state: State, coming: Sequence[Coming], place: Mapping[str, int], next_place: int, cost: StepCost
    ) -> None:
        self._settings: Settings = state.settings
        self._rule = rule_of(state.settings)
        self._cost = cost
        self._queue = state.queue
        self._under_way: deque[tuple[float, list[Seq]]] = deque()
        for step in state.under_way:
            done = [seq for seq, _, end in step.chunks if end >= seq.prompt_tokens]
            self._under_way.append((self._seconds(step), [*step.decodes, *done]))
        self._clock_s = self.began_s = state.clock_s
        self._emitted = dict(state.emitted)
        self._coming = coming
        self._next = next_place
        self._lengths = {one.id: one.output_tokens for one in coming}
        self._hashes = {one.id: one.hashes for one in coming}
        self._pool = _Pool()
        self.first_s: dict[str, float] = {}
        for seq in self._queue.waiting:
            known = place.get(seq.id)
            if known is not None and not seq.generated:
                seq.computed = coming[known].cached_tokens
        for seq in (*self._queue.running, *self._queue.waiting):
            self._bound(seq)
        # Who has had its last token in this very moment is gone, though that was not heard yet.
        for seq in [seq for seq in self._queue.running if self._ended(seq)]:
            self._release(seq)

    def first_token_s(self, request_id: str) -> float | None:
        depth = 2 if self._settings.async_scheduling else 1
        for _ in range(_MOST_STEPS):
            known = self.first_s.get(request_id)
            if known is not None:
                return known
            self._arrive()
            while len(self._under_way) < depth:
                step = self._compose()
                if step.empty:
                    break
                # Composing counts the token that is to come.
                done = [seq for seq, _, end in step.chunks if end >= seq.prompt_tokens + max(0, seq.generated - 1)]
                self._under_way.append((self._seconds(step), [*step.decodes, *done]))
            if not self._under_way:
                if self._next >= len(self._coming):
                    return None
                self._clock_s = max(self._clock_s, self._coming[self._next].at_s)
                continue
            seconds, yields = self._under_way.popleft()
            self._clock_s += seconds
            for seq in yields:
                self._emit(seq)
        return None

    def _lose(self, retracted: Sequence[Seq]) -> None:
        """What is on its way to them is thrown away."""
        gone = {seq.id for seq in retracted}
        self._under_way = deque(
            (seconds, [seq for seq in yields if seq.id not in gone]) for seconds, yields in self._under_way
        )

    def _compose(self) -> Step:
        """By the rule; remembers what is taken from the free blocks and given back to them."""
        queue, size = self._queue, self._settings.block_size
        if queue.free_blocks is None or self._settings.family != "vllm":
            step = self._rule(queue, self._settings)
            if step.preempted and self._settings.family == "sglang":
                self._lose(step.preempted)
            return step
        free = queue.free_blocks
        before = {seq.id: (seq.shared_blocks, seq.blocks, seq.computed // size) for seq in queue.running}
        step = self._rule(queue, self._settings, lookup=self._found)
        pool = self._pool
        safe_until = pool.taken + free
        for seq in step.preempted:
            shared, own, full = before[seq.id]
            pool.given_back[seq.id] = _GivenBack(shared, own, full, safe_until)
            safe_until += own
            free += own
        pool.taken += free - queue.free_blocks
        return step

    def _found(self, seq: Seq) -> tuple[int, int]:
        """What it finds cached if it is admitted now, in tokens, and blocks of it that others hold."""
        size = self._settings.block_size
        held = max((common for _, common in self._alike(seq)), default=0)
        gave = self._pool.given_back.get(seq.id)
        tokens = seq.computed
        if gave is not None:
            begun = gave.held_blocks + gave.own_blocks - gave.full_blocks
            lost = max(0, self._pool.taken - gave.safe_until - begun)
            kept = max(held, gave.full_blocks - lost)
            tokens = min(kept, (seq.prompt_tokens + seq.generated - 1) // size) * size
        return tokens, min(held, tokens // size)

    def _alike(self, seq: Seq) -> Iterator[tuple[Seq, int]]:
        """Running ones that begin with the same blocks, and how many of these they hold."""
        mine = self._hashes.get(seq.id, _NO_HASHES)
        for other in self._queue.running if len(mine) else ():
            theirs = self._hashes.get(other.id, _NO_HASHES)
            if other is not seq and (common := common_blocks(mine, theirs)):
                yield other, min(common, -(-other.computed // self._settings.block_size))

    def _release(self, seq: Seq) -> None:
        """It is gone; blocks that others hold as well count for one of these from now on."""
        queue = self._queue
        queue.running = [other for other in queue.running if other is not seq]
        queue.shut = False
        if queue.free_blocks is None:
            return
        heir, kept = max(self._alike(seq), key=lambda one: one[1], default=(None, 0))
        if heir is not None and self._settings.family == "vllm":
            inherited = max(0, min(kept - seq.shared_blocks, heir.shared_blocks, seq.blocks))
            heir.shared_blocks -= inherited
            heir.blocks += inherited
            seq.blocks -= inherited
        queue.free_blocks += seq.blocks

    def _arrive(self) -> None:
        coming = self._coming
        while self._next < len(coming) and coming[self._next].at_s <= self._clock_s:
            one = coming[self._next]
            self._next += 1
            seq = Seq(one.id, one.prompt_tokens, one.cached_tokens, one.output_tokens)
            # Numbered after all that the shadow knows.
            seq.priority = self._settings.place(one.priority)
            seq.arrived = (1 << 60) + self._next * ARRIVALS_APART
            self._bound(seq)
            enqueue(self._queue, self._settings, seq)
            self._emitted[seq.id] = 0

    def _bound(self, seq: Seq) -> None:
        if self._settings.async_scheduling:
            # The scheduler must not compose a step for one whose last token is under way.
            seq.max_output = self._lengths.get(seq.id, seq.max_output)

    def _seconds(self, step: Step) -> float:
        return self._cost.step_s(step.new_tokens, step.squares, len(step.decodes))

    def _emit(self, seq: Seq) -> None:
        count = self._emitted[seq.id] = self._emitted.get(seq.id, 0) + 1
        if count == 1:
            self.first_s[seq.id] = self._clock_s
        if self._ended(seq) and any(seq is other for other in self._queue.running):
            self._release(seq)

    def _ended(self, seq: Seq) -> bool:
        return self._emitted.get(seq.id, 0) >= self._lengths.get(seq.id, _NO_END)
