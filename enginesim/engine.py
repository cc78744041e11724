"""The engine in real time: schedule, be busy for as long as the step takes, hand out tokens and events, again."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from enginesim.kv_events import KvEvent
from enginesim.kv_publisher import KvPublisher
from enginesim.metrics import Gauges, Histogram
from enginesim.request import Request
from enginesim.scheduler import Batch, Output, Scheduler
from enginesim.step_time import StepTime

Family = Literal["vllm", "sglang"]

# Steps end at absolute times, so that late wake-ups do not add up. An engine that has fallen further behind than this
# (the machine slept, the process was stopped) starts afresh instead of rushing through what it missed.
CATCH_UP_MAX_S = 0.05
TTFT_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)


class Engine:
    """Runs one scheduler on the event loop. Tokens go to the callback that came with their request.

    A step's events leave before its tokens in vLLM, and after them in SGLang.
    """

    def __init__(
        self, scheduler: Scheduler, step_time: StepTime, publisher: KvPublisher, family: Family = "vllm"
    ) -> None:
        self.family = family
        self.scheduler = scheduler
        self.step_time = step_time
        self.publisher = publisher
        self.gauges = Gauges()
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.late_s = 0.0  # by which steps have taken longer than their costs say, for want of a core
        self._callbacks: dict[Request, Callable[[Output | None], None]] = {}
        self._arrivals_s: dict[Request, float] = {}
        self._aborts: list[Request] = []
        self._wake = asyncio.Event()
        self._restarted: asyncio.Event | None = None  # somebody waits for it
        self.prefilled_tokens, self.prefill_busy_s = 0, 0.0  # since the start
        self.on_step: Callable[[Batch], None] | None = None  # told of each that has ended

    def submit(self, request: Request, on_output: Callable[[Output | None], None], arrived_s: float) -> None:
        """Queue a request; an idle engine starts a step at once. `arrived_s` is on the event loop's clock.

        `on_output` gets None if the engine is lost before the request has finished.
        """
        self.scheduler.add(request)
        self._callbacks[request] = on_output
        self._arrivals_s[request] = arrived_s
        self._wake.set()

    def abort(self, request: Request) -> None:
        """Have a request dropped before the next step. Harmless if it has finished."""
        if self._callbacks.pop(request, None) is not None:
            self._arrivals_s.pop(request, None)
            self._aborts.append(request)
            self._wake.set()

    def turn(self) -> None:
        """Have an idle engine's loop go round once, and say what it has to say."""
        self._wake.set()

    async def restart(self) -> None:
        """Lose everything, as in a crash, between two steps."""
        if self._restarted is None:
            self._restarted = asyncio.Event()
        self._wake.set()
        await self._restarted.wait()

    async def run(self) -> None:
        """Step until cancelled."""
        clock = asyncio.get_running_loop().time
        step_start_s = clock()
        while True:
            self._apply_restart()
            self._apply_aborts()
            if self.scheduler.has_work:
                step_end_s = await self._step(step_start_s)
                step_start_s = max(step_end_s, clock() - CATCH_UP_MAX_S)
                self.late_s += step_start_s - step_end_s
            else:
                self._publish(self.scheduler.idle_events())
                self._wake.clear()
                await self._wake.wait()
                step_start_s = clock()

    async def _step(self, start_s: float) -> float:
        """One step that began at `start_s`; returns when it should have ended."""
        loop = asyncio.get_running_loop()
        batch = self.scheduler.schedule()
        end_s = start_s + self.step_time.duration_s(batch)
        await asyncio.sleep(max(0.0, end_s - loop.time()))
        outputs, events = self.scheduler.complete(batch)
        if self.family == "vllm":
            self._publish(events)
        for output in outputs:
            self._deliver(output, loop.time())
        if self.family == "sglang":
            self._publish(events)
        prefilled = sum(chunk.tokens for chunk in batch.chunks if not chunk.is_decode)
        if prefilled:
            self.prefilled_tokens += prefilled
            self.prefill_busy_s += end_s - start_s
        self._refresh_gauges()
        if self.on_step is not None:
            self.on_step(batch)
        return end_s

    def _publish(self, events: Sequence[KvEvent]) -> None:
        if events:
            self.publisher.publish(events)

    def _deliver(self, output: Output, now_s: float) -> None:
        request = output.request
        callback = self._callbacks.get(request)
        if callback is None:
            return  # aborted while the step ran
        callback(output)
        if request.output_tokens == 1:
            self.ttft_s.observe(now_s - self._arrivals_s.pop(request))
        if output.finish_reason:
            del self._callbacks[request]

    def _apply_restart(self) -> None:
        restarted, self._restarted = self._restarted, None
        if restarted is None:
            return
        lost, self._callbacks = self._callbacks, {}
        self._arrivals_s.clear()
        self._aborts.clear()
        self.scheduler = self.scheduler.fresh()
        self.publisher.restart()
        self.ttft_s = Histogram(TTFT_BOUNDS_S)
        self.prefilled_tokens, self.prefill_busy_s = 0, 0.0
        self._refresh_gauges()
        for callback in lost.values():
            callback(None)
        restarted.set()

    def _apply_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        for request in aborts:
            self.scheduler.abort(request)
        if aborts:
            self._refresh_gauges()

    def _refresh_gauges(self) -> None:
        """vLLM's gauges move once a step: a request that arrives in a long step is not seen before its end."""
        pool = self.scheduler.pool
        self.gauges = Gauges(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_usage_ratio=pool.used_blocks / pool.total_blocks,
        )
