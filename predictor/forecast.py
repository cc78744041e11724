"""What a worker is predicted to do with a prompt: the time to first token, and the parts it is made of."""

from __future__ import annotations

from math import isclose

import msgspec

from predictor.arrivals import WORK_UNDER_CAP, RecentArrivals
from predictor.engines.vllm import Settings
from predictor.interval import HIGH, LOW, UNKNOWN, UNSURE, Calibration, Kind, Spread, scale_s
from predictor.prefill_cost import Basis, StepCost
from predictor.run_forward import Budget
from predictor.timeline import Guess, Timeline

# Up to so much is no wait, but the rest of a step that is under way.
_NO_WAIT_S = 0.02
_SURE = Kind(waits=True, sure=True)


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """One worker's predicted time to first token, counted from when the request reached us; the parts add up to it."""

    worker: str
    prompt_tokens: int
    cached_tokens: int  # credited as reusable
    already_waited_s: float  # before this forecast: trusted upstream time, and time inside the filter
    wait_s: float  # behind other work on the worker
    prefill_s: float  # the request's own prefill, as if alone
    overhead_s: float  # once a request: HTTP, tokenization by the engine, the way back
    ttft_s: float
    basis: Basis
    tokens_ahead: int  # prefill tokens queued before it
    exact_tokens: bool
    kind: Kind = UNSURE
    spread: Spread = UNKNOWN  # by what was graded of forecasts like it: bounds are judged by it
    shown: Spread = UNKNOWN  # and by how many were as long: the interval
    gated: bool = False  # it hangs on who ends when, and so on outputs that nobody knows
    load_s: float = 0.0  # to fetch what is cached elsewhere than on the device

    def __post_init__(self) -> None:
        parts = (self.already_waited_s, self.wait_s, self.prefill_s, self.load_s, self.overhead_s)
        assert min(parts) >= 0, f"a part of the forecast is negative: {self}"
        assert isclose(sum(parts), self.ttft_s, abs_tol=1e-6), f"the parts of the forecast do not add up: {self}"

    @property
    def queue_wait_s(self) -> float:
        """What a caller's `max_queue_wait_s` bounds: all the waiting, and none of the request's own prefill."""
        return self.already_waited_s + self.wait_s

    def quantile_s(self, probability: float) -> float:
        """The TTFT that is not exceeded with this probability (0 to 1, both excluded), by what was graded so far.

        `ttft_s` is the best single number and need not be the median.
        """
        return self.already_waited_s + self.spread.quantile_s(self.ttft_s - self.already_waited_s, probability)

    def queue_wait_quantile_s(self, probability: float) -> float:
        """The queue wait that is not exceeded with this probability: all doubt is taken to be about the wait."""
        return max(self.already_waited_s, self.quantile_s(probability) - self.prefill_s - self.load_s - self.overhead_s)

    @property
    def low_s(self) -> float:
        """The lower end of the 90 % interval of the TTFT."""
        return self.already_waited_s + self.shown.quantile_s(self.ttft_s - self.already_waited_s, LOW)

    @property
    def high_s(self) -> float:
        return self.already_waited_s + self.shown.quantile_s(self.ttft_s - self.already_waited_s, HIGH)


def least_high_wait_s(
    wait_s: float, probability: float, calibration: Calibration, basis: Basis, trusted: bool
) -> float:
    """The least that the wait of any forecast with a wait of `wait_s` or more can be taken for at this quantile,
    whatever its own prefill and however exact its tokens are."""
    if wait_s <= _NO_WAIT_S:
        return wait_s
    score = calibration.spread(UNSURE).score(probability)
    if trusted and basis is Basis.CURVE:
        score = min(score, calibration.spread(_SURE).score(probability))
    return wait_s + max(0.0, score) * scale_s(wait_s)


def forecast(
    worker: str,
    prompt_tokens: int,
    cached_tokens: int,
    already_waited_s: float,
    timeline: Timeline | Guess,
    settings: Settings,
    cost: StepCost,
    basis: Basis,
    tokens_ahead: int,
    now_s: float,
    exact_tokens: bool,
    calibration: Calibration | None = None,
    trusted: bool = True,
    load_s: float = 0.0,
    arrivals: RecentArrivals | None = None,
    budget: Budget | None = None,
    reserve_tokens: int = 0,
    shared_blocks: int = 0,
    output_tokens: int = 256,
) -> Forecast:
    """Prices a newcomer on a worker's timeline: two bisections and a closed form.

    Its own prefill costs the same however it is cut into chunks, so it is added to the end of the step in which its
    last chunk fits; what is left after subtracting what it would take alone is the wait. Without a `calibration` the
    interval is the widest guess; `trusted` is whether the worker's cache view is complete. `load_s` is what fetching
    the cached part takes that is not on the device. `budget` bounds what is listed and imagined (see `Timeline`).
    `reserve_tokens` must be free beside the prompt before the engine admits it, and `shared_blocks` of it are held by
    others. `output_tokens` is what a request of its kind generates.
    """
    uncached = prompt_tokens - cached_tokens
    own_s = cost.tokens_s(cached_tokens, prompt_tokens)
    needed = prompt_tokens + reserve_tokens
    blocks = -(-needed // settings.block_size) - shared_blocks if settings.num_gpu_blocks is not None else 0
    course = timeline.likely_course(uncached, blocks, budget)
    done_s = course.finish_s + own_s
    if arrivals is not None:
        own_before_s = own_s - cost.tokens_s(prompt_tokens - course.last_tokens, prompt_tokens)
        if settings.caps_prompts:
            done_s += arrivals.stretch_under_cap_s(course, own_s, uncached, output_tokens, settings, cost, now_s)
            if budget is not None:
                budget.left -= WORK_UNDER_CAP
        else:
            done_s += arrivals.stretch_s(course, own_before_s, cost, now_s)
    prefill_s = cost.alone_s(cached_tokens, prompt_tokens, settings.most_in_a_step(prompt_tokens))
    wait_s = max(0.0, done_s - now_s - prefill_s)
    overhead_s = cost.overhead_s(prompt_tokens)
    predicted_s = wait_s + prefill_s + load_s + overhead_s
    kind = Kind(waits=wait_s > _NO_WAIT_S, sure=exact_tokens and trusted and basis is Basis.CURVE)
    return Forecast(
        worker=worker,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        already_waited_s=already_waited_s,
        wait_s=wait_s,
        prefill_s=prefill_s,
        load_s=load_s,
        overhead_s=overhead_s,
        ttft_s=already_waited_s + predicted_s,
        basis=basis,
        tokens_ahead=tokens_ahead,
        exact_tokens=exact_tokens,
        kind=kind,
        gated=kind.waits and timeline.gated,
        spread=UNKNOWN if calibration is None else calibration.spread(kind),
        shown=UNKNOWN if calibration is None else calibration.shown(kind, predicted_s),
    )
