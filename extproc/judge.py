"""From a request's headers and body to a verdict: read, tokenize, place, answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from extproc import replies
from extproc.apis import LlmRequest, Unreadable
from extproc.exchange import Metadata
from extproc.ledger import Ledger
from extproc.log import JsonLog
from extproc.metrics import Metrics
from extproc.prompt_reader import PoolText, PromptReader, ReadPrompt
from extproc.request_reader import RequestReader, UndecodableBody
from extproc.session import Decide, Pass, Passed, Reject, Route, Verdict
from extproc.wishes import BOUND_HEADER, BadWish, queue_wait_bound
from predictor.fleet import Decision, Fleet, Grant, NoWorker, Refusal, Wish
from predictor.forecast import Forecast

_LOGGED_CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class Pool:
    """What the judge needs to know of a pool beside the fleet."""

    name: str
    text: PoolText
    scores: bool = False  # tell Envoy how the candidates compare


@dataclass(slots=True)
class Exchange:
    """One request's stay in the filter; `ticket_id` is set the moment that something is booked for it."""

    received_at_s: float
    ticket_id: str | None = None


class Judge:
    """`pools` maps each model name that callers may use to its pool; `boot` makes ticket ids unique across restarts."""

    def __init__(
        self,
        fleet: Fleet,
        pools: Mapping[str, Pool],
        requests: RequestReader,
        reader: PromptReader,
        ledger: Ledger,
        metrics: Metrics,
        log: JsonLog,
        clock: Callable[[], float],
        boot: str,
    ) -> None:
        self._fleet = fleet
        self._pools = pools
        only = {pool.name: pool for pool in pools.values()}
        self._only_pool = next(iter(only.values())) if len(only) == 1 else None
        self._requests = requests
        self._reader = reader
        self._ledger = ledger
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._ids = (f"{boot}-{number}" for number in itertools.count(1))

    async def decide(self, case: Decide, exchange: Exchange) -> Verdict:
        body_at_s = self._clock()
        try:
            request = await self._requests.read(case)
        except UndecodableBody:
            self._metrics.undecodable.inc()
            return Pass(Passed.UNREADABLE)
        except Unreadable:
            return Pass(Passed.UNREADABLE)
        pool = self._only_pool if request.model is None else self._pools.get(request.model)
        if pool is None:
            return Pass(Passed.UNKNOWN_MODEL)
        try:
            bound_s = queue_wait_bound(case.headers.get(BOUND_HEADER), request.max_queue_wait_s)
        except BadWish as fault:
            self._metrics.decisions.labels(pool.name, "bad_request").inc()
            return Reject(replies.bad_wish(fault, case.api))
        read = await self._reader.read(pool.text, request, self._fleet.block_sizes(pool.name))
        if read.estimated is not None:
            self._metrics.estimated.labels(read.estimated.value).inc()
        wish = Wish(
            ticket_id=next(self._ids),
            received_at_s=exchange.received_at_s,
            max_queue_wait_s=bound_s,
            streaming=request.streaming and case.answer_seen,
            max_tokens=request.max_tokens,
            subset=_subset(case.metadata),
        )
        now_s = self._clock()
        decision = self._fleet.place(pool.name, read.prompt, wish, now_s)
        if isinstance(decision, Grant):
            # Before anything that could fail: what is booked must be known to whoever releases it.
            exchange.ticket_id = decision.ticket.id
            self._ledger.booked(decision.ticket, pool.text, request.body_bytes)
        self._report(pool, request, read, wish, decision, now_s - body_at_s)
        match decision:
            case Grant():
                return Route(replies.route(decision, pool.scores))
            case Refusal():
                return Reject(replies.shed(decision, case.api))
            case NoWorker():
                return Reject(replies.unavailable(decision, case.api))

    def _report(
        self, pool: Pool, request: LlmRequest, read: ReadPrompt, wish: Wish, decision: Decision, took_s: float
    ) -> None:
        self._metrics.decision_seconds.labels(pool.name).observe(took_s)
        fields: dict[str, object] = {
            "id": wish.ticket_id,
            "pool": pool.name,
            "prompt_tokens": read.prompt.token_count,
            "estimated": None if read.estimated is None else read.estimated.value,
            "bound_s": wish.max_queue_wait_s,
            "streaming": request.streaming,
            "took_ms": round(took_s * 1000, 2),
        }
        match decision:
            case Grant(ticket, endpoints, forecasts, why):
                self._metrics.decisions.labels(pool.name, "routed").inc()
                self._metrics.routed.labels(pool.name, ticket.worker, why.value).inc()
                priced = ticket.forecast
                fields |= {
                    "outcome": "routed",
                    "worker": ticket.worker,
                    "why": why.value,
                    "endpoints": endpoints,
                    "predicted_ttft_s": round(priced.ttft_s, 4),
                    "already_waited_s": round(priced.already_waited_s, 4),
                    "wait_s": round(priced.wait_s, 4),
                    "prefill_s": round(priced.prefill_s, 4),
                    "overhead_s": round(priced.overhead_s, 4),
                    "cached_tokens": priced.cached_tokens,
                    "basis": priced.basis.value,
                    "candidates": _parts(forecasts),
                }
            case Refusal(reason, _, retry, best, forecasts):
                self._metrics.decisions.labels(pool.name, "refused").inc()
                fields |= {
                    "outcome": "refused",
                    "reason": reason.value,
                    "retry_after_s": round(retry.told_s, 3),
                    "best_wait_s": round(best.queue_wait_s, 4),
                    "candidates": _parts(forecasts),
                }
            case NoWorker():
                self._metrics.decisions.labels(pool.name, "no_worker").inc()
                fields["outcome"] = "no_worker"
        self._log("decision", **fields)


def _parts(forecasts: tuple[Forecast, ...]) -> dict[str, dict[str, float]]:
    """The best few, with what their forecasts are made of."""
    best = sorted(forecasts, key=lambda forecast: forecast.ttft_s)[:_LOGGED_CANDIDATES]
    return {
        priced.worker: {
            "ttft_s": round(priced.ttft_s, 4),
            "wait_s": round(priced.wait_s, 4),
            "prefill_s": round(priced.prefill_s, 4),
            "cached_tokens": priced.cached_tokens,
        }
        for priced in best
    }


def _subset(metadata: Metadata) -> frozenset[str] | None:
    """The endpoints among which a gateway lets us choose: a list, or its elements joined by commas."""
    hint = metadata.get(replies.SUBSET_NAMESPACE, {}).get(replies.SUBSET)
    if hint is None:
        return None
    items = hint.split(",") if isinstance(hint, str) else hint if isinstance(hint, list) else []
    return frozenset(item.strip() for item in items if isinstance(item, str) and item.strip())
