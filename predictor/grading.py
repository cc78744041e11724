"""How right a forecast was, once the first token has come and the engine has said what it reused."""

from __future__ import annotations

import enum

import msgspec

from predictor.forecast import Forecast


class CacheVerdict(enum.Enum):
    """Credited reusable tokens against those that the engine reports."""

    RIGHT = "right"  # to the block
    OVER = "over"  # we credited more than was reused
    UNDER = "under"
    UNREPORTED = "unreported"


class Grade(msgspec.Struct, frozen=True, gc=False):
    """One forecast against its first token. Seconds are counted from when the request reached us."""

    predicted_s: float
    actual_s: float
    kept_bound: bool | None  # None: the caller set no bound
    within_interval: bool  # between the ends of the forecast's 90 % interval

    @property
    def error_s(self) -> float:
        """Positive when the truth was slower than promised."""
        return self.actual_s - self.predicted_s


def grade(forecast: Forecast, actual_ttft_s: float, bound_s: float | None, ttft_bound_s: float | None = None) -> Grade:
    """`actual_ttft_s` includes the time waited before us, as the forecast does.

    `bound_s` is on the wait, and only the whole is seen: the actual wait is what is left of it after the request's own
    prefill and overhead at their predicted price. `ttft_bound_s` is on the whole.
    """
    kept = None
    if bound_s is not None:
        kept = actual_ttft_s - forecast.prefill_s - forecast.load_s - forecast.overhead_s <= bound_s
    if ttft_bound_s is not None:
        kept = kept is not False and actual_ttft_s <= ttft_bound_s
    return Grade(forecast.ttft_s, actual_ttft_s, kept, forecast.low_s <= actual_ttft_s <= forecast.high_s)


def judge_cache(credited_tokens: int, reported_tokens: int | None, block_size: int) -> CacheVerdict:
    if reported_tokens is None:
        return CacheVerdict.UNREPORTED
    if abs(credited_tokens - reported_tokens) < block_size:
        return CacheVerdict.RIGHT
    return CacheVerdict.OVER if credited_tokens > reported_tokens else CacheVerdict.UNDER
