"""vLLM's own OpenAI server, made fit for tests: `python -m headway_engine FLAGS`, with this folder on PYTHONPATH.

Everything is vLLM's: HTTP, templates, tokenizer, scheduler, KV cache manager, events, and the forward pass of a model
so small that it takes a millisecond. Only the executor is ours. It sleeps until a step has taken as long as a formula
says, so that an engine shares two cores with Envoy and a test without either slowing the other; and it runs the model
inside the engine's process, where the stock one for CPUs lets two processes spin on shared memory while they wait.

The formula's costs come as JSON in HEADWAY_STEP_COST, named as the simulator's flags are.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput  # type: ignore[import-not-found]

_COST = json.loads(os.environ.get("HEADWAY_STEP_COST", "{}"))
_STEP_S = _COST.get("step_ms", 8.0) / 1e3
_TOKEN_S = _COST.get("prefill_us_per_token", 250.0) / 1e6
_TOKEN2_S = _COST.get("prefill_ns_per_token2", 4.0) / 1e9
_DECODE_S = _COST.get("decode_ms", 0.3) / 1e3

_STOP_MAX_S = 5.0


class PacedExecutor(UniProcExecutor):  # type: ignore[misc]
    """One worker in this process. A step that has tokens ends no sooner than its cost after it began."""

    _ends_at_s = 0.0

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """As vLLM's, after which either the result is there or `sample_tokens` makes it."""
        self._ends_at_s = time.monotonic() + cost_s(scheduler_output)
        result = super().execute_model(scheduler_output, non_block)
        output = result.result() if isinstance(result, Future) else result
        if output is not None:
            self._sleep()
        return result

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """The step's second half."""
        result = super().sample_tokens(*args, **kwargs)
        self._sleep()
        return result

    def _sleep(self) -> None:
        left_s = self._ends_at_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)


def cost_s(step: SchedulerOutput) -> float:
    """A fixed part, and for each request its prefill `a*n + b*((p+n)^2 - p^2)` behind p tokens, or a decode's part."""
    if not step.total_num_scheduled_tokens:
        return 0.0
    running = step.scheduled_cached_reqs
    computed = {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
    computed.update(zip(running.req_ids, running.num_computed_tokens, strict=True))
    generated = dict(zip(running.req_ids, running.num_output_tokens, strict=True))
    seconds: float = _STEP_S
    for request, tokens in step.num_scheduled_tokens.items():
        if tokens == 1 and generated.get(request, 0) > 0:
            seconds += _DECODE_S
        else:
            start = computed[request]
            seconds += _TOKEN_S * tokens + _TOKEN2_S * ((start + tokens) ** 2 - start**2)
    return seconds


def main() -> None:
    """Runs the server, which ends when whoever started it does."""
    threading.Thread(target=_end_with, args=(int(os.environ["HEADWAY_PARENT_PID"]),), daemon=True).start()
    executor = f"{PacedExecutor.__module__}.{PacedExecutor.__qualname__}".replace("__main__", "headway_engine")
    sys.argv += ["--distributed-executor-backend", executor]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


def _end_with(parent: int) -> None:
    """Not left to the kernel's signal at a parent's death: vLLM loses one that comes while it starts.

    The parent names itself: it may have died by the time that vLLM is imported.
    """
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_MAX_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
