"""What one run comes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.goodput.policies import Judgement
from bench.goodput.world import Outcome


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of all requests, unless they say of what; times of those that got a first token."""

    policy: str
    requests: int
    served: float  # within their bound; a refusal is not served
    served_bounded: float  # of those with a bound
    refused: float
    p50_s: float
    p90_s: float
    p99_s: float
    cache_hits: float  # of the prompt tokens of those that were let in
    prefilled_mtokens: float  # what the engines computed, millions
    false_alarms: float | None  # of refusals, in hindsight
    underpredicted: float | None  # of those let in with a bound


def score(policy: str, outcomes: Iterable[Outcome], prefilled_tokens: int, judgement: Judgement) -> Score:
    every = list(outcomes)
    let_in = [outcome for outcome in every if outcome.ttft_s is not None]
    bounded = [outcome for outcome in every if outcome.ask.bound_s is not None]
    times = sorted(outcome.ttft_s for outcome in let_in if outcome.ttft_s is not None)
    prompts = sum(len(outcome.ask.tokens) for outcome in let_in)
    return Score(
        policy=policy,
        requests=len(every),
        served=_share(sum(outcome.served for outcome in every), len(every)),
        served_bounded=_share(sum(outcome.served for outcome in bounded), len(bounded)),
        refused=_share(sum(outcome.worker is None for outcome in every), len(every)),
        p50_s=_quantile(times, 0.5),
        p90_s=_quantile(times, 0.9),
        p99_s=_quantile(times, 0.99),
        cache_hits=_share(sum(outcome.cached_tokens for outcome in let_in), prompts),
        prefilled_mtokens=prefilled_tokens / 1e6,
        false_alarms=judgement.false_alarms,
        underpredicted=judgement.underpredicted,
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _quantile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else 0.0
