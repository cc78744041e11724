"""An engine's loop around the step rule, in virtual time: what it would compose of a workload, step by step."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from predictor.engines.sglang import first_ratio
from predictor.engines.step_rule import rule_of
from predictor.engines.vllm import ARRIVALS_APART, Queue, Sequence, Settings, Step, enqueue
from tests.engine.workloads import Workload


@dataclass(frozen=True)
class Composed:
    """One step: its prompts' chunks as (request, from token, to token), and how many decode in it."""

    starts_s: float
    chunks: list[tuple[int, int, int]]
    decoding: int


class Replay:
    """SGLang's event loops, with overlap and without, around the step rule.

    `starts` tells of each request in which steps it was prefilled, and from which token on in each: so what it found in
    the cache, when it was let in the first time and, retracted, again.
    """

    def __init__(self, work: Workload, settings: Settings, starts: Mapping[int, list[tuple[int, int]]]) -> None:
        self._work = work
        self._settings = settings
        self._rule = rule_of(settings)
        self._starts = starts
        self._composed = 0
        self._queue = Queue(free_blocks=settings.usable_blocks, reserve_ratio=first_ratio(settings))
        self._coming = deque(enumerate(work.arrivals))
        self._numbers = itertools.count(ARRIVALS_APART, ARRIVALS_APART)
        self._emitted: dict[int, int] = {}
        self._clock_s = 0.0

    def steps(self) -> Iterator[Composed]:
        depth = 2 if self._settings.async_scheduling else 1
        under_way: deque[tuple[float, list[Sequence]]] = deque()
        free_at_s = 0.0
        while True:
            self._arrive()
            if not under_way:
                self._queue.unseen = frozenset()
            step = self._rule(self._queue, self._settings, lookup=self._lookup)
            for seq in step.preempted:  # a token on its way to it is thrown away
                under_way = deque((ends_s, [one for one in yields if one is not seq]) for ends_s, yields in under_way)
            if not step.empty:
                starts_s = max(self._clock_s, free_at_s)
                free_at_s = starts_s + self._seconds(step)
                under_way.append((free_at_s, self._yields(step)))
                chunks = [(int(seq.id), start, end) for seq, start, end in step.chunks]
                self._composed += 1
                yield Composed(starts_s, chunks, len(step.decodes))
            if under_way and (step.empty or len(under_way) == depth):
                ends_s, yields = under_way.popleft()
                self._clock_s = max(self._clock_s, ends_s)
                for seq in yields:
                    self._emit(seq)
            elif step.empty:
                if not self._coming:
                    return
                self._queue.reserve_ratio = first_ratio(self._settings)
                self._clock_s = max(self._clock_s, self._coming[0][1].at_s)

    def _arrive(self) -> None:
        while self._coming and self._coming[0][1].at_s <= self._clock_s:
            number, arrival = self._coming.popleft()
            told = self._work.max_tokens_told
            most = arrival.output_tokens if told is None else told
            seq = Sequence(str(number), arrival.prompt_tokens, 0, arrival.output_tokens, max_output=most)
            seq.priority, seq.arrived = self._settings.place(arrival.priority), next(self._numbers)
            enqueue(self._queue, self._settings, seq)
            self._emitted[number] = 0

    def _lookup(self, seq: Sequence) -> tuple[int, int]:
        return next((start for step, start in self._starts[int(seq.id)] if step >= self._composed), 0), 0

    def _seconds(self, step: Step) -> float:
        costs = self._work.costs
        tokens_s = sum(costs.chunk_s(start, end) for _, start, end in step.chunks)
        return costs.step_s + costs.per_decode_s * len(step.decodes) + tokens_s

    def _yields(self, step: Step) -> list[Sequence]:
        done = [seq for seq, _, end in step.chunks if end >= seq.prompt_tokens + max(0, seq.generated - 1)]
        return [*step.decodes, *done]

    def _emit(self, seq: Sequence) -> None:
        number, queue = int(seq.id), self._queue
        self._emitted[number] += 1
        if self._emitted[number] == self._work.arrivals[number].output_tokens:
            queue.running.remove(seq)
            queue.shut = False
            assert queue.free_blocks is not None
            queue.free_blocks += seq.blocks
