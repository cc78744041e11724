"""Has requests wait a moment inside the filter for a worker that will be open to them, instead of refusing at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from extproc.metrics import Metrics
from predictor.admission import Reason, Refusal
from predictor.fleet import Attempt, Decision, Fleet, Wish
from predictor.waiting_room import Held, HoldPolicy, WaitingRoom

# Of these something may come: a queue gets shorter than was thought, somebody leaves, a share is used up no more.
_WORTH_WAITING = frozenset(
    (Reason.QUEUE_WAIT, Reason.TTFT, Reason.OVERLOAD_WAIT, Reason.OVERLOAD_KV, Reason.FAIR_SHARE)
)
# How often those that wait are tried again, and for how long at a time: others have to be decided on as well.
_EVERY_S, _AT_A_TIME_S = 0.025, 0.005


@dataclass(slots=True)
class _Waiting:
    place: Callable[[Attempt], Decision]
    wish: Wish
    decided: asyncio.Future[Decision]


class Holding:
    """The waiting rooms of all pools; `policies` has those pools that hold requests."""

    def __init__(
        self, fleet: Fleet, policies: Mapping[str, HoldPolicy], metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._fleet = fleet
        self._rooms = {pool: WaitingRoom(policy) for pool, policy in policies.items() if policy.hold_s > 0}
        self._waiting: dict[str, dict[Held, _Waiting]] = {pool: {} for pool in self._rooms}
        self._metrics = metrics
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._released = False

    def __len__(self) -> int:
        return sum(map(len, self._rooms.values()))

    def holds(self, pool: str) -> bool:
        """Whether who is not let in at once may wait."""
        return pool in self._rooms and not self._released

    async def decide(self, pool: str, wish: Wish, size: int, place: Callable[[Attempt], Decision]) -> Decision:
        """What `place` decides, at once or later. It has to book what it grants for whoever releases it: the caller may
        be gone by the time that this returns."""
        room = self._rooms.get(pool)
        if room is None or self._released:
            return place(Attempt.FINAL)
        decision = place(Attempt.FIRST)
        if not isinstance(decision, Refusal):
            return decision
        now_s = self._clock()
        held = None
        if decision.reason in _WORTH_WAITING:
            held = room.enter(_deadline_s(wish, decision), size, now_s)
            if held is None:
                self._metrics.held.labels(pool, "no_room").inc()
        if held is None:
            self._fleet.refused(pool, wish, decision, now_s)
            return decision
        waiting = _Waiting(place, wish, asyncio.get_running_loop().create_future())
        self._waiting[pool][held] = waiting
        self._wake_later()
        try:
            decision = await waiting.decided
        except asyncio.CancelledError:
            self._metrics.held.labels(pool, "gone").inc()
            raise
        finally:
            room.leave(held)
            self._waiting[pool].pop(held, None)
        self._metrics.held.labels(pool, "refused" if isinstance(decision, Refusal) else "placed").inc()
        return decision

    def release(self) -> None:
        """Decides on all that wait, now and for good, and holds nobody any more."""
        self._released = True
        for pool in self._rooms:
            self._try(pool, self._clock() + float("inf"))

    def _wake_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self._wake)

    def _wake(self) -> None:
        self._timer = None
        for pool in self._rooms:
            self._try(pool, self._clock() + _AT_A_TIME_S)
        if len(self):
            self._wake_later()

    def _try(self, pool: str, until_s: float) -> None:
        """Those whose time is over first: they must not be late."""
        now_s = self._clock()
        held_there = self._waiting[pool]
        room = self._rooms[pool]
        for held in sorted(room, key=lambda held: held.until_s > now_s):
            over = self._released or held.until_s <= now_s
            if not over and self._clock() > until_s:
                return
            waiting = held_there.get(held)
            if waiting is None or waiting.decided.done():
                continue
            try:
                decision = waiting.place(Attempt.AGAIN)
                if isinstance(decision, Refusal):
                    if not over and decision.reason in _WORTH_WAITING:
                        continue
                    self._fleet.refused(pool, waiting.wish, decision, now_s)
            except Exception as fault:  # to the one whose it is: its stream's border knows what to do
                waiting.decided.set_exception(fault)
            else:
                waiting.decided.set_result(decision)
            room.leave(held)


def _deadline_s(wish: Wish, refusal: Refusal) -> float | None:
    """When the time that it may wait is used up."""
    bounds = (refusal.limits.max_queue_wait_s, refusal.limits.max_ttft_s)
    bound_s = min((bound for bound in bounds if bound is not None), default=None)
    return None if bound_s is None else wish.received_at_s - max(0.0, wish.waited_before_s) + bound_s
