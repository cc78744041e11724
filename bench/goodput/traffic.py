"""What is asked of the engines: a real trace at a chosen load, and agents that go on as fast as they are answered."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import numpy as np

# Mooncake's traces name blocks of so many tokens.
_TRACE_BLOCK = 512
_VOCABULARY = 100_000


@dataclass(frozen=True, slots=True)
class Ask:
    """One request as a client sends it. `bound_s` is on the wait behind other work."""

    at_s: float
    tokens: tuple[int, ...]
    output_tokens: int
    bound_s: float | None = None
    agent: int | None = None  # who goes on when it is answered


def from_trace(path: Path, count: int, per_s: float, bound_s: float, seed: int, scale: float = 0.5) -> list[Ask]:
    """The first `count` requests of a Mooncake trace (github.com/kvcache-ai/Mooncake, FAST25-release/traces) as Poisson
    arrivals, lengths times `scale`, every other one with the bound."""
    rng = np.random.default_rng(seed)
    asks, at_s = [], 0.0
    with open_trace(path) as lines:
        for line, number in zip(lines, range(count), strict=False):
            record = json.loads(line)
            at_s += float(rng.exponential(1 / per_s))
            length = max(16, round(record["input_length"] * scale))
            block = round(_TRACE_BLOCK * scale)
            tokens = tuple(token for name in record["hash_ids"] for token in _block(name, block))[:length]
            output = max(1, round(record["output_length"] * scale))
            asks.append(Ask(at_s, tokens, output, bound_s if number % 2 else None))
    return asks


def open_trace(path: Path) -> IO[str]:
    """Its lines, compressed or not."""
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def _block(name: int, size: int) -> Iterator[int]:
    """Tokens that nobody else has: the same for the same name."""
    rng = np.random.default_rng(name)
    return iter(rng.integers(1, _VOCABULARY, size).tolist())


class Client(Protocol):
    """What comes after an answer or a refusal; None: nothing."""

    def answered(self, ask: Ask, answer: list[int], now_s: float) -> Ask | None: ...

    def refused(self, ask: Ask, now_s: float) -> Ask | None: ...


@dataclass(slots=True)
class Agents:
    """Conversations that grow by what tools return, with think times between turns; now and then a giant.

    An agent that is refused gets its answer elsewhere after `elsewhere_s`, and goes on with a history that is longer by
    it. Everything is drawn per agent and turn, so that policies do not change what is asked, but only when.
    """

    count: int
    bound_s: float
    seed: int
    turns: int = 12
    think_s: float = 4.0
    elsewhere_s: float = 5.0
    giant_share: float = 0.02
    giant_tokens: int = 60_000
    _history: dict[int, list[int]] = field(default_factory=dict)
    _turn: dict[int, int] = field(default_factory=dict)

    def first(self) -> list[Ask]:
        rng = np.random.default_rng([self.seed, 1])
        return [self.next(agent, float(rng.uniform(0, 2 * self.think_s))) for agent in range(self.count)]

    def next(self, agent: int, now_s: float) -> Ask:
        """The agent's next turn, after its think time."""
        turn = self._turn[agent] = self._turn.get(agent, -1) + 1
        rng = np.random.default_rng([self.seed, agent, turn])
        if turn % self.turns == 0:
            self._history[agent] = rng.integers(1, _VOCABULARY, int(rng.integers(1500, 6000))).tolist()
        grown = self.giant_tokens if rng.random() < self.giant_share else int(rng.lognormal(6.5, 0.8))
        self._history[agent] += rng.integers(1, _VOCABULARY, grown).tolist()
        tokens = tuple(self._history[agent])
        if grown == self.giant_tokens:  # what it has read is summed up, and not kept
            del self._history[agent][-grown:]
        output = int(rng.integers(40, 300))
        bound_s = self.bound_s if agent % 2 else None
        return Ask(now_s + float(rng.exponential(self.think_s)), tokens, output, bound_s, agent)

    def answered(self, ask: Ask, answer: list[int], now_s: float) -> Ask:
        assert ask.agent is not None
        self._history[ask.agent] += answer
        return self.next(ask.agent, now_s)

    def refused(self, ask: Ask, now_s: float) -> Ask:
        assert ask.agent is not None
        rng = np.random.default_rng([self.seed, ask.agent, self._turn[ask.agent], 7])
        self._history[ask.agent] += rng.integers(1, _VOCABULARY, ask.output_tokens).tolist()
        return self.next(ask.agent, now_s + self.elsewhere_s)
