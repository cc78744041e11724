"""An engine of steps in virtual time that says how each step was composed and how long it took: no scheduler of ours.

Running requests get a token each, then one prompt after the other what is left of the budget. Arrivals are Poisson at a
part of what the engine can do; lengths are lognormal, like the traces'.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from predictor.step_sample import StepSample

# Seconds a step takes: its chunks as (start, end), and the sequences that decode in it.
StepTime = Callable[[list[tuple[int, int]], int], float]


def quadratic(
    fixed_s: float = 0.005,
    per_token_s: float = 30e-6,
    per_token_squared_s: float = 37e-12,
    per_decode_s: float = 50e-6,
    bend_tokens: int | None = None,
) -> StepTime:
    """Attention that grows with the square, up to `bend_tokens` where there is a bend, and linearly from there."""

    def area(position: int) -> float:
        if bend_tokens is None or position <= bend_tokens:
            return float(position * position)
        return float((2 * position - bend_tokens) * bend_tokens)

    def step_s(chunks: list[tuple[int, int]], decoding: int) -> float:
        tokens = sum(end - start for start, end in chunks)
        squares = sum(area(end) - area(start) for start, end in chunks)
        return fixed_s + per_token_s * tokens + per_token_squared_s * squares + per_decode_s * decoding

    return step_s


@dataclass
class StepEngine:
    rng: np.random.Generator
    step_s: StepTime
    budget: int = 8192
    longest: int = 126_000
    scale: float = 1.0
    jitter: float = 0.0
    load: float = 0.8
    outputs: float = 350.0
    slower: float = 1.0  # may be changed while it runs
    seen_every: int = 1  # so many steps end unseen, but for the last
    prompts: deque[tuple[int, int]] = field(default_factory=deque)  # tokens done, tokens in all
    left: list[int] = field(default_factory=list)  # output tokens left of those that decode
    now_s: float = 0.0
    next_arrival_s: float = 0.0

    def length(self) -> int:
        return int(np.clip(self.rng.lognormal(8.8, 1.1) * self.scale, 16, self.longest))

    def prompt_s(self, tokens: int) -> float:
        """What prefilling it alone takes, all its steps together."""
        cuts = [*range(0, tokens, self.budget), tokens]
        return sum(self.step_s([chunk], 0) for chunk in pairwise(cuts)) * self.slower

    def samples(self) -> Iterator[StepSample]:
        """For ever."""
        mean_s = float(np.mean([self.prompt_s(self.length()) for _ in range(200)]))
        pending: list[StepSample] = []
        while True:
            while self.next_arrival_s <= self.now_s:
                self.prompts.append((0, self.length()))
                self.next_arrival_s += float(self.rng.exponential(mean_s / self.load))
            if not self.prompts and not self.left:
                self.now_s = self.next_arrival_s
                continue
            pending.append(self._step())
            if len(pending) >= self.seen_every:
                yield StepSample(
                    sum(one.duration_s for one in pending),
                    sum(one.new_tokens for one in pending),
                    sum(one.squares for one in pending),
                    sum(one.decoding for one in pending),
                    len(pending),
                )
                pending = []

    def _step(self) -> StepSample:
        decoding = len(self.left)
        room, chunks = self.budget - decoding, []
        finished = 0
        while room > 0 and self.prompts:
            done, tokens = self.prompts.popleft()
            taken = min(room, tokens - done)
            chunks.append((done, done + taken))
            room -= taken
            if done + taken < tokens:
                self.prompts.appendleft((done + taken, tokens))
            else:
                finished += 1
        noise = float(np.exp(self.rng.normal(0.0, self.jitter))) if self.jitter else 1.0
        took_s = self.step_s(chunks, decoding) * self.slower * noise
        self.now_s += took_s
        self.left = [left - 1 for left in self.left if left > 1]
        self.left += [1 + int(self.rng.exponential(self.outputs)) for _ in range(finished)]
        return StepSample(
            took_s,
            sum(end - start for start, end in chunks),
            sum(end * end - start * start for start, end in chunks),
            decoding,
        )
