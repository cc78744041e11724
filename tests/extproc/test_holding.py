"""Requests wait inside the filter: decided later, never lost, never for long."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from extproc.holding import Holding
from predictor.admission import Limits, Reason, Refusal, RetryAfter
from predictor.fleet import Attempt, Decision, Grant, NoWorker, Wish
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis
from predictor.waiting_room import HoldPolicy
from tests.fakes.clock import ManualClock
from tests.fakes.filter import Filter
from tests.fakes.waiting import until

BEST = Forecast("a", 40, 0, 0.0, 50.0, 1.0, 0.0, 51.0, Basis.CURVE, 9000, exact_tokens=True)


def refusal(reason: Reason = Reason.QUEUE_WAIT, bound_s: float | None = 10.0) -> Refusal:
    return Refusal(reason, Limits(bound_s), RetryAfter(40.0, 40.0), BEST, (BEST,))


@dataclass
class Door:
    """What `place` says of one request: a refusal, until it is opened."""

    decision: Decision = field(default_factory=refusal)
    attempts: list[Attempt] = field(default_factory=list)
    fault: Exception | None = None

    def __call__(self, attempt: Attempt) -> Decision:
        self.attempts.append(attempt)
        if self.fault is not None:
            raise self.fault
        return self.decision


class Bench:
    def __init__(self, **changes: float) -> None:
        self.clock = ManualClock()
        self.filter = Filter(clock=self.clock)
        policy = HoldPolicy(**{"hold_s": 2.0, **changes})  # type: ignore[arg-type]
        self.holding = Holding(self.filter.fleet, {"m": policy}, self.filter.metrics, self.clock)

    def ask(self, door: Callable[[Attempt], Decision], bound_s: float | None = 10.0) -> asyncio.Task[Decision]:
        wish = Wish("t", self.clock(), max_queue_wait_s=bound_s)
        return asyncio.create_task(self.holding.decide("m", wish, 100, door))

    def counted(self, outcome: str) -> float:
        return self.filter.counted("held", pool="m", outcome=outcome)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def held(bench: Bench, count: int) -> None:
    await until(lambda: len(bench.holding) == count)


NOBODY = NoWorker("m")


async def test_what_is_not_refused_is_decided_at_once(bench: Bench) -> None:
    door = Door(NOBODY)
    assert await bench.ask(door) is NOBODY
    assert door.attempts == [Attempt.FIRST]


@pytest.mark.parametrize("reason", [Reason.OWN_PREFILL, Reason.BOUND_USED_UP])
async def test_what_no_wait_can_help_is_refused_at_once(bench: Bench, reason: Reason) -> None:
    door = Door(refusal(reason))
    assert await bench.ask(door) is door.decision
    assert door.attempts == [Attempt.FIRST]


async def test_a_held_request_is_decided_when_a_worker_opens(bench: Bench) -> None:
    door = Door()
    task = bench.ask(door)
    await held(bench, 1)
    door.decision = NOBODY
    assert await asyncio.wait_for(task, 10) is NOBODY
    assert door.attempts[0] is Attempt.FIRST
    assert set(door.attempts[1:]) == {Attempt.AGAIN}
    assert (bench.counted("placed"), len(bench.holding)) == (1, 0)


async def test_when_its_time_is_over_it_is_refused_by_what_is_true_then(bench: Bench) -> None:
    door = Door()
    task = bench.ask(door)
    await held(bench, 1)
    later = door.decision = refusal()
    bench.clock.advance(2.0)
    assert await asyncio.wait_for(task, 10) is later
    assert (bench.counted("refused"), len(bench.holding)) == (1, 0)


async def test_a_stop_refuses_all_that_wait_and_holds_nobody_any_more(bench: Bench) -> None:
    tasks = [bench.ask(Door()) for _ in range(5)]
    await held(bench, 5)
    bench.holding.release()
    assert all(isinstance(decision, Refusal) for decision in await asyncio.gather(*tasks))
    assert len(bench.holding) == 0
    door = Door()
    await bench.ask(door)
    assert door.attempts == [Attempt.FINAL]


async def test_a_client_that_goes_leaves_nothing_and_is_not_placed_any_more(bench: Bench) -> None:
    door = Door()
    task = bench.ask(door)
    await held(bench, 1)
    task.cancel()
    bench.holding._wake()  # between the cancellation and the task's own end
    before = len(door.attempts)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bench.holding) == 0
    await asyncio.sleep(0.08)
    assert len(door.attempts) == before
    assert bench.counted("gone") == 1


async def test_beyond_the_number_and_the_bytes_that_may_be_held_refusals_come_at_once() -> None:
    for changes in ({"most_requests": 2}, {"most_bytes": 250}):
        bench = Bench(**changes)
        tasks = [bench.ask(Door()) for _ in range(2)]
        await held(bench, 2)
        assert isinstance(await bench.ask(Door()), Refusal)
        assert bench.counted("no_room") == 1
        bench.holding.release()
        await asyncio.gather(*tasks)


async def test_a_fault_goes_to_the_request_whose_it_is(bench: Bench) -> None:
    bad, good = Door(), Door()
    one, other = bench.ask(bad), bench.ask(good)
    await held(bench, 2)
    bad.fault = RuntimeError("broken")
    good.decision = NOBODY
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(one, 10)
    assert await asyncio.wait_for(other, 10) is NOBODY


async def test_the_earliest_deadline_is_tried_first(bench: Bench) -> None:
    tried: list[float] = []

    def door_of(bound_s: float) -> Callable[[Attempt], Decision]:
        def place(attempt: Attempt) -> Decision:
            if attempt is Attempt.AGAIN:
                tried.append(bound_s)
            return refusal(bound_s=bound_s)

        return place

    tasks = [bench.ask(door_of(bound_s), bound_s) for bound_s in (9.0, 5.0, 7.0)]
    await held(bench, 3)
    tried.clear()
    bench.holding._wake()
    assert tried == [5.0, 7.0, 9.0]
    bench.holding.release()
    await asyncio.gather(*tasks)


async def test_trying_again_never_keeps_others_for_long(bench: Bench) -> None:
    tried: list[int] = []

    def slow(number: int) -> Callable[[Attempt], Decision]:
        def place(attempt: Attempt) -> Decision:
            if attempt is Attempt.AGAIN:
                tried.append(number)
                bench.clock.advance(0.004)
            return refusal()

        return place

    tasks = [bench.ask(slow(number)) for number in range(20)]
    await held(bench, 20)
    tried.clear()
    bench.holding._wake()
    assert len(tried) <= 3
    bench.holding.release()
    await asyncio.gather(*tasks)
    assert not any(isinstance(task.result(), Grant) for task in tasks)
