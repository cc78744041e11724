"""What the log says of a request. Made by the log's writer: nothing may be read here that still changes."""

from __future__ import annotations

from predictor.admission import Refusal
from predictor.fleet import Decision, Ended, Grant, NoWorker, Wish
from predictor.forecast import Forecast
from predictor.grading import Grade
from predictor.hindsight import Review

_CANDIDATES = 4


def decision(
    pool: str,
    prompt_tokens: int | None,
    estimated: str | None,
    streaming: bool,
    wish: Wish,
    made: Decision,
    took_s: float,
) -> dict[str, object]:
    """The fields of the event `decision`; `estimated` is why the prompt was not tokenized. Without `prompt_tokens` it
    was not even looked at: the decision did not need that."""
    return {
        "id": wish.ticket_id,
        "pool": pool,
        "prompt_tokens": prompt_tokens,
        "estimated": estimated,
        "bound_s": wish.max_queue_wait_s,
        "ttft_bound_s": wish.max_ttft_s,
        "streaming": streaming,
        "took_ms": round(took_s * 1000, 2),
        **_outcome(made),
    }


def graded(ticket_id: str, worker: str, grade: Grade) -> dict[str, object]:
    """The fields of the event `graded`."""
    return {
        "id": ticket_id,
        "worker": worker,
        "predicted_ttft_s": round(grade.predicted_s, 4),
        "actual_ttft_s": round(grade.actual_s, 4),
        "error_s": round(grade.error_s, 4),
        "kept_bound": grade.kept_bound,
    }


def ended(of: Ended, status: int | None, source: str) -> dict[str, object]:
    """The fields of the event `ended`; `source` is who told us."""
    return {
        "id": of.ticket.id,
        "worker": of.ticket.worker,
        "status": status,
        "source": source,
        "credited_tokens": of.ticket.forecast.cached_tokens,
        "cached_tokens": of.usage.cached_tokens,
        "output_tokens": of.usage.output_tokens,
        "cache": None if of.cache is None else of.cache.value,
    }


def reviewed(review: Review) -> dict[str, object]:
    """The fields of the event `refusal_graded`."""
    return {
        "id": review.id,
        "worker": review.worker,
        "reason": review.reason.value,
        "carried_out": carried_out(review),
        "verdict": review.verdict.value,
        "wait_s": None if review.wait_s is None else round(review.wait_s, 3),
    }


def carried_out(review: Review) -> str:
    """What became of the refusal, in a word."""
    return "enforced" if review.enforced else "shadow"


def _outcome(made: Decision) -> dict[str, object]:
    match made:
        case Grant(ticket, endpoints, forecasts, why, _, would_refuse):
            # Not the ticket's worker, which changes when Envoy falls back to another.
            priced = ticket.forecast
            return {
                "outcome": "routed",
                "worker": priced.worker,
                "why": why.value,
                "would_refuse": None if would_refuse is None else would_refuse.reason.value,
                "endpoints": endpoints,
                "predicted_ttft_s": round(priced.ttft_s, 4),
                "already_waited_s": round(priced.already_waited_s, 4),
                "wait_s": round(priced.wait_s, 4),
                "prefill_s": round(priced.prefill_s, 4),
                "load_s": round(priced.load_s, 4),
                "overhead_s": round(priced.overhead_s, 4),
                "cached_tokens": priced.cached_tokens,
                "basis": priced.basis.value,
                "candidates": _parts(forecasts),
            }
        case Refusal(reason, _, retry, best, forecasts):
            return {
                "outcome": "refused",
                "reason": reason.value,
                "retry_after_s": None if retry is None else round(retry.told_s, 3),
                "best_wait_s": round(best.queue_wait_s, 4),
                "candidates": _parts(forecasts),
            }
        case NoWorker():
            return {"outcome": "no_worker"}


def _parts(forecasts: tuple[Forecast, ...]) -> dict[str, dict[str, float]]:
    """The best few, with what their forecasts are made of."""
    best = sorted(forecasts, key=lambda forecast: forecast.ttft_s)[:_CANDIDATES]
    return {
        priced.worker: {
            "ttft_s": round(priced.ttft_s, 4),
            "wait_s": round(priced.wait_s, 4),
            "prefill_s": round(priced.prefill_s, 4),
            "load_s": round(priced.load_s, 4),
            "cached_tokens": priced.cached_tokens,
        }
        for priced in best
    }
