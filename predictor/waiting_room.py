"""Requests that no worker is open to yet, and that may wait a moment for one: so many, of so many bytes at most."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HoldPolicy:
    """For how long requests of a pool may be held, and how many of them. `hold_s` 0: none is."""

    hold_s: float = 0.0
    most_requests: int = 256
    most_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True, order=True)
class Held:
    """One request that waits. The order is that in which they are tried: the earliest deadline first."""

    deadline_s: float  # when its bound is used up; where it has none, when it is given up
    number: int  # of two with one deadline, who came first
    until_s: float  # it is decided for good by then
    size: int  # bytes that are kept for it


class WaitingRoom:
    """Every verb takes the time as an argument, where it needs one."""

    def __init__(self, policy: HoldPolicy) -> None:
        self._policy = policy
        self._held: list[Held] = []
        self._came = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held]:
        """The earliest deadline first; who is there now, whoever leaves meanwhile."""
        return iter(list(self._held))

    def enter(self, deadline_s: float | None, size: int, now_s: float) -> Held | None:
        """None: it is full, or there is no time left to wait in."""
        policy = self._policy
        until_s = now_s + policy.hold_s if deadline_s is None else min(now_s + policy.hold_s, deadline_s)
        full = len(self._held) >= policy.most_requests or self.bytes + size > policy.most_bytes
        if full or until_s <= now_s:
            return None
        self._came += 1
        held = Held(until_s if deadline_s is None else deadline_s, self._came, until_s, size)
        insort(self._held, held)
        self.bytes += size
        return held

    def leave(self, held: Held) -> None:
        """Decided, or gone. Twice is as good as once."""
        at = bisect_left(self._held, held)
        if at < len(self._held) and self._held[at] == held:
            del self._held[at]
            self.bytes -= held.size
