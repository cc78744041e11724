"""Traffic as chat products make it: conversations that share a few system prompts, each turn longer than the last."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from enginesim.words import text

_TURNS = 8
# Of those who have gone quiet, so many are remembered and may come back.
_QUIET = 60


@dataclass(slots=True)
class Conversation:
    """One caller's history. `next_turn` says what to send, `answered` adds the engine's own words to it."""

    system: str
    salt: str | None
    rng: random.Random
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: int = 0

    def next_turn(self) -> dict[str, Any]:
        question = text(self.rng.choice((3, 15, 40, 90, 250)), seed=self.rng.randrange(1 << 30))
        self.messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {
            "messages": [{"role": "system", "content": self.system}, *self.messages],
            "max_tokens": self.rng.choice((1, 4, 17, 33)),
        }
        if self.salt is not None:
            body["cache_salt"] = self.salt
        return body

    def answered(self, words: str) -> None:
        self.turns += 1
        self.messages.append({"role": "assistant", "content": words})


class Callers:
    """Conversations drawn from one seeded generator: `busy` ones that take turns, and those that have gone quiet, of
    whom one in ten turns comes back after a while.

    `system_tokens` are the lengths of the prompts that they share. A conversation ends after eight turns, or once it
    may exceed `most_tokens`. Every eighth caller has a `cache_salt`, and so shares with nobody.
    """

    def __init__(self, rng: random.Random, busy: int, system_tokens: tuple[int, ...], most_tokens: int) -> None:
        self._rng = rng
        self._most_chars = 4 * most_tokens
        self._systems = [text(tokens, seed=rng.randrange(1 << 30)) for tokens in system_tokens]
        self._busy = [self._begin() for _ in range(busy)]
        self._quiet: list[Conversation] = []

    def take(self) -> Conversation:
        """One whose turn it is; nobody else gets it until it is given back."""
        if self._quiet and self._rng.random() < 0.1:
            return self._quiet.pop(self._rng.randrange(len(self._quiet)))
        return self._busy.pop(self._rng.randrange(len(self._busy)))

    def give_back(self, conversation: Conversation) -> None:
        """It goes on, goes quiet, or is at its end and another begins."""
        length = len(conversation.system) + sum(len(message["content"]) for message in conversation.messages)
        ended = conversation.turns >= _TURNS or length > self._most_chars
        if ended or self._rng.random() < 0.2:
            if not ended and len(self._quiet) < _QUIET:
                self._quiet.append(conversation)
            conversation = self._begin()
        self._busy.append(conversation)

    def _begin(self) -> Conversation:
        salt = f"tenant-{self._rng.randrange(1 << 30)}" if self._rng.random() < 1 / 8 else None
        return Conversation(self._rng.choice(self._systems), salt, random.Random(self._rng.randrange(1 << 30)))
