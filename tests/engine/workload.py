"""Conversations as token ids, drawn from a seed: for engines in virtual time, by the hundred thousand requests.

Standard library only: it runs in the engines' own environments as well as in the tests'.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

VOCABULARY = 100_000


@dataclass(frozen=True, slots=True)
class Shape:
    """What the traffic is like. Lengths are mean tokens; shares are of all requests."""

    seed: int = 1
    requests: int = 1000
    at_once: int = 8  # in the engine, about
    alive: int = 40  # conversations that may come next
    turns: int = 6
    system_tokens: int = 200
    systems: int = 4
    turn_tokens: int = 60
    output_tokens: int = 20
    salted_share: float = 0.0
    adapter_share: float = 0.0
    without_reading_share: float = 0.0  # with prompt_logprobs, which reads nothing from the cache
    again_share: float = 0.0  # sent again as it was, or cut by a token
    most_tokens: int = 4000


@dataclass(slots=True)
class Ask:
    """One request."""

    id: str
    tokens: list[int]
    output_tokens: int
    salt: str | None = None
    adapter: str | None = None
    reads_cache: bool = True
    conversation: Conversation | None = None


@dataclass(slots=True)
class Conversation:
    tokens: list[int]
    salt: str | None
    adapter: str | None
    turns: int = 0


@dataclass(slots=True)
class Workload:
    """`next_ask` draws a request; `answered` gives its conversation the tokens that the engine made of it."""

    shape: Shape
    rng: random.Random = field(init=False)
    made: int = 0
    _systems: list[list[int]] = field(init=False)
    _alive: list[Conversation] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.shape.seed)
        shape = self.shape
        # Unlike lengths, and some that begin alike.
        whole = self._words(shape.system_tokens * 2)
        self._systems = [
            whole[: self.rng.randint(1, 2 * shape.system_tokens)]
            if place % 2
            else self._words(self.rng.randint(1, 2 * shape.system_tokens))
            for place in range(shape.systems)
        ]
        self._alive = [self._begin() for _ in range(shape.alive)]

    @property
    def exhausted(self) -> bool:
        return self.made >= self.shape.requests

    def next_ask(self) -> Ask:
        shape, rng = self.shape, self.rng
        self.made += 1
        conversation = self._alive.pop(rng.randrange(len(self._alive))) if self._alive else self._begin()
        again = conversation.turns > 0 and rng.random() < shape.again_share
        if not again:
            conversation.tokens += self._words(1 + int(rng.expovariate(1 / shape.turn_tokens)))
        tokens = list(conversation.tokens)
        if again and len(tokens) > 1 and rng.random() < 0.5:
            tokens.pop()
        return Ask(
            id=f"r{self.made}",
            tokens=tokens,
            output_tokens=1 + int(rng.expovariate(1 / shape.output_tokens)),
            salt=conversation.salt,
            adapter=conversation.adapter,
            reads_cache=rng.random() >= shape.without_reading_share,
            conversation=conversation,
        )

    def answered(self, ask: Ask, output: list[int]) -> None:
        conversation = ask.conversation
        assert conversation is not None
        conversation.tokens = [*ask.tokens, *output]
        conversation.turns += 1
        ended = conversation.turns >= self.shape.turns or len(conversation.tokens) > self.shape.most_tokens
        self._alive.append(self._begin() if ended else conversation)

    def _begin(self) -> Conversation:
        rng, shape = self.rng, self.shape
        salt = f"tenant-{rng.randrange(5)}" if rng.random() < shape.salted_share else None
        adapter = f"adapter-{rng.randrange(3)}" if rng.random() < shape.adapter_share else None
        return Conversation(list(rng.choice(self._systems)), salt, adapter)

    def _words(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]
