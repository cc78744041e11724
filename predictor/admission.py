"""Whether a caller's bound on queue wait can be kept, and when to come back if not.

Nobody is refused on the word of a model that has not learned: a worker without a learned curve is never infeasible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from predictor.forecast import Forecast
from predictor.prefill_cost import Basis

BOUND_MIN_S, BOUND_MAX_S = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Callers give up on, or ignore, a Retry-After beyond about a minute (peers.md B4); jitter spreads them."""

    cap_s: float = 60.0
    jitter: float = 0.2  # of the estimate, added


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """`uncapped_s` is when the first worker will have drained enough; `told_s` is what the caller is told."""

    told_s: float
    uncapped_s: float

    @property
    def whole_s(self) -> int:
        return max(1, ceil(self.told_s))


def feasible(forecast: Forecast, bound_s: float | None, idle: bool) -> bool:
    """Whether this worker keeps the bound: an idle one does unless the time already waited has used it up."""
    if bound_s is None:
        return True
    if forecast.already_waited_s > bound_s:
        return False
    return idle or forecast.basis is not Basis.CURVE or forecast.queue_wait_s <= bound_s


def retry_after(
    forecasts: Sequence[Forecast], bound_s: float, policy: RetryPolicy, rng: np.random.Generator
) -> RetryAfter:
    """When the first of the workers will have drained enough for a fresh request with this bound: queues drain a
    second each second."""
    drained_s = max(0.0, min(forecast.wait_s for forecast in forecasts) - bound_s)
    jittered_s = drained_s * (1.0 + policy.jitter * float(rng.random()))
    return RetryAfter(told_s=min(policy.cap_s, jittered_s), uncapped_s=drained_s)
