"""From a request's headers and body to a verdict: read, tokenize, place, answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from extproc import replies, request_log
from extproc.apis import LlmRequest, Unreadable
from extproc.exchange import Metadata
from extproc.holding import Holding
from extproc.ledger import Ledger
from extproc.log import JsonLog
from extproc.metrics import Metrics
from extproc.prompt_reader import PoolText, PromptReader, ReadPrompt
from extproc.recorder import Recorder
from extproc.request_reader import RequestReader, UndecodableBody
from extproc.session import Decide, Pass, Passed, Reject, Route, Verdict
from extproc.wishes import BOUND_FIELD, BadWish, read_wishes
from predictor.admission import OnReject, Refusal
from predictor.fleet import Attempt, Decision, Fleet, Grant, NoWorker, Wish

# No prompt is longer than this of a body: each token stands for a byte or more of what is said, and what a template
# adds for a message is less than some multiple of its own JSON.
_MOST_TOKENS_A_BYTE, _TEMPLATE_TOKENS = 4, 4096


@dataclass(frozen=True, slots=True)
class Pool:
    """What the judge needs to know of a pool beside the fleet."""

    name: str
    text: PoolText
    scores: bool = False  # tell Envoy how the candidates compare
    on_reject: OnReject = OnReject.RETRY
    by_tenant: bool = False  # tenants share it fairly
    adapters: frozenset[str] = frozenset()  # models that are LoRA adapters
    name_one: bool = False  # tell Envoy the chosen endpoint alone as well
    removes_bound: bool = False  # its engines refuse fields that they do not know


@dataclass(slots=True)
class Exchange:
    """One request's stay in the filter; `ticket_id` is set the moment that something is booked for it."""

    received_at_s: float
    ticket_id: str | None = None


class Judge:
    """`pools` maps each model name that callers may use to its pool; `boot` makes ticket ids unique across restarts.
    `wall_clock` gives Unix time, where gateways are believed that say since when a request has been waiting. `holding`
    has requests wait where pools want that."""

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
        recorder: Recorder | None = None,
        wall_clock: Callable[[], float] | None = None,
        holding: Holding | None = None,
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
        self._recorder = recorder
        self._wall_clock = wall_clock
        self._holding = holding
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
            wishes = read_wishes(
                case.headers,
                request.max_queue_wait_s,
                by_tenant=pool.by_tenant,
                unix_s=None if self._wall_clock is None else self._wall_clock() - (body_at_s - exchange.received_at_s),
            )
        except BadWish as fault:
            self._metrics.decisions.labels(pool.name, "bad_request").inc()
            return Reject(replies.bad_wish(fault, case.api))
        if request.model in pool.adapters:
            request = msgspec.structs.replace(request, adapter=request.model)
        wish = Wish(
            ticket_id=next(self._ids),
            received_at_s=exchange.received_at_s,
            waited_before_s=wishes.waited_before_s,
            max_queue_wait_s=wishes.max_queue_wait_s,
            streaming=request.streaming and case.answer_seen,
            max_tokens=request.max_tokens,
            subset=_subset(case.metadata),
            max_ttft_s=wishes.max_ttft_s,
            prefer=wishes.prefer,
            tenant=wishes.tenant,
            session=wishes.session,
            adapter=request.adapter,
            priority=request.priority,
        )
        turned_away = self._turned_away(pool, request, case, wish)
        if turned_away is not None:
            self._report(pool, request, None, wish, turned_away, self._clock() - body_at_s)
            return Reject(replies.shed(turned_away, case.api, wishes.on_reject or pool.on_reject))
        read = await self._reader.read(pool.text, request, self._fleet.hash_families(pool.name), case.patient)
        if read.estimated is not None:
            self._metrics.estimated.labels(read.estimated.value).inc()
        body = None
        if pool.removes_bound and case.body is not None and _names_bound(request, case.body):
            result, body = await self._requests.cut(case, BOUND_FIELD)
            if result is not None:
                self._metrics.bound_fields.labels(pool.name, result.value).inc()
        took_s = self._clock() - body_at_s

        def place(attempt: Attempt) -> Decision:
            decision = self._fleet.place(pool.name, read.prompt, wish, self._clock(), attempt)
            if isinstance(decision, Grant):
                # Before anything that could fail: what is booked must be known to whoever releases it.
                exchange.ticket_id = decision.ticket.id
                self._ledger.booked(decision.ticket, pool.text, request.body_bytes)
            return decision

        if self._holding is None:
            decision = place(Attempt.FINAL)
        else:
            decision = await self._holding.decide(pool.name, wish, len(case.body or b""), place)
        if self._recorder is not None:
            self._recorder.decided(pool.name, read.prompt, wish, request.cache_salt, decision)
        self._report(pool, request, read, wish, decision, took_s)
        match decision:
            case Grant():
                return Route(replies.route(decision, pool.scores, pool.name_one), body)
            case Refusal():
                return Reject(replies.shed(decision, case.api, wishes.on_reject or pool.on_reject))
            case NoWorker():
                return Reject(replies.unavailable(decision, case.api))

    def _turned_away(self, pool: Pool, request: LlmRequest, case: Decide, wish: Wish) -> Refusal | None:
        """The refusal of a request whose prompt need not be read for it: while all are full, many come at once."""
        if self._recorder is not None or case.body is None or not case.complete:
            return None
        if self._holding is not None and self._holding.holds(pool.name):
            return None
        most_tokens = _TEMPLATE_TOKENS + _MOST_TOKENS_A_BYTE * request.body_bytes
        return self._fleet.turn_away(pool.name, wish, most_tokens, self._clock())

    def _report(
        self, pool: Pool, request: LlmRequest, read: ReadPrompt | None, wish: Wish, decision: Decision, took_s: float
    ) -> None:
        """`read`: None where the decision did not need it."""
        metrics, name = self._metrics, pool.name
        metrics.decision_seconds.labels(name).observe(took_s)
        match decision:
            case Grant(ticket, _, _, why):
                metrics.decisions.labels(name, "routed").inc()
                metrics.routed.labels(name, ticket.worker, why.value).inc()
                if ticket.would_refuse is not None:
                    metrics.refusals.labels(name, ticket.would_refuse.reason.value, "shadow").inc()
            case Refusal(reason):
                metrics.decisions.labels(name, "refused").inc()
                metrics.refusals.labels(name, reason.value, "enforced").inc()
            case NoWorker():
                metrics.decisions.labels(name, "no_worker").inc()
        tokens = estimated = None
        if read is None:
            metrics.unread.labels(name).inc()
        else:
            tokens = read.prompt.token_count
            estimated = None if read.estimated is None else read.estimated.value
        self._log.later(
            "decision", request_log.decision, name, tokens, estimated, request.streaming, wish, decision, took_s
        )


def _names_bound(request: LlmRequest, body: bytes) -> bool:
    """Whether the body has the field, be it null. One that is found in a text only costs a look."""
    return request.max_queue_wait_s is not None or BOUND_FIELD.encode() in body


def _subset(metadata: Metadata) -> frozenset[str] | None:
    """The endpoints among which a gateway lets us choose: a list, or its elements joined by commas."""
    hint = metadata.get(replies.SUBSET_NAMESPACE, {}).get(replies.SUBSET)
    if hint is None:
        return None
    items = hint.split(",") if isinstance(hint, str) else hint if isinstance(hint, list) else []
    return frozenset(item.strip() for item in items if isinstance(item, str) and item.strip())
