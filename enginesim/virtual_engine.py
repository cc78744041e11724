"""The engine in virtual time: what `engine.py` does, with arrivals known in advance and no waiting.

For tests and for judging forecasts: the first-token times that an engine of these settings would give, exactly.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from enginesim.kv_events import KvEvent
from enginesim.request import Request
from enginesim.scheduler import Batch, Output, Scheduler
from enginesim.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Step:
    """One step that has run, on the virtual clock, and what came of it."""

    start_s: float
    end_s: float
    batch: Batch
    outputs: tuple[Output, ...]
    events: tuple[KvEvent, ...]


class VirtualEngine:
    """Runs a scheduler from one step's end to the next. Time starts at 0 and is idle when there is nothing to do."""

    def __init__(self, scheduler: Scheduler, step_time: StepTime) -> None:
        self.scheduler = scheduler
        self.step_time = step_time
        self.now_s = 0.0

    def step(self) -> Step:
        """Run one step and move the clock to its end."""
        start_s = self.now_s
        batch = self.scheduler.schedule()
        self.now_s += self.step_time.duration_s(batch)
        outputs, events = self.scheduler.complete(batch)
        return Step(start_s, self.now_s, batch, tuple(outputs), tuple(events))

    def run(self, arrivals: Iterable[tuple[float, Request]]) -> list[Step]:
        """All steps until everything that arrives (at `(time_s, request)`, ascending) is answered.

        A request that arrives while a step runs is seen by the next one; an idle engine starts at once.
        """
        expected = deque(arrivals)
        steps = []
        while expected or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now_s = max(self.now_s, expected[0][0])
            while expected and expected[0][0] <= self.now_s:
                self.scheduler.add(expected.popleft()[1])
            steps.append(self.step())
        return steps


def first_tokens_s(steps: Iterable[Step]) -> dict[int, float]:
    """When each request, by its id, got its first token, on the clock of the steps."""
    return {output.request.id: step.end_s for step in steps for output in step.outputs if output.position == 0}
