"""What we answer: the only place with header names, metadata keys and status codes."""

from __future__ import annotations

from extproc.apis import Api
from extproc.exchange import Continue, Phase, Refuse
from extproc.wishes import BadWish
from predictor.admission import OnReject, Reason, Refusal
from predictor.fleet import Grant, NoWorker

DESTINATION = "x-gateway-destination-endpoint"
LB_NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
SCORES = "x-gateway-destination-endpoint-scores"
# For meshes that route by cluster name; Envoy's route matches or takes the cluster from it.
CLUSTER = "x-headway-cluster"
# For clusters that go wherever a header says (ORIGINAL_DST): one endpoint, and always one of a worker.
ENDPOINT = "x-headway-endpoint"
# Which of an engine's data-parallel ranks is to serve a request (vLLM since 0.12, SGLang since 0.5.13).
RANK = "x-data-parallel-rank"
# Ours; Envoy copies it into response headers and the access log.
NAMESPACE = "headway"
TICKET = "ticket"

# Envoy's own answer to a body above its limit.
PAYLOAD_TOO_LARGE = 413
# By these an engine says that its queue is full.
ENGINE_FULL = (429, 503)
# Response code details (Envoy 1.40): the answer is the upstream's; or there is none, because connecting to it failed or
# the connection was lost. Anything else says nothing of the upstream that was chosen.
VIA_UPSTREAM = "via_upstream"
UPSTREAM_LOST = "upstream_reset_before_response_started"

_JSON = ("content-type", "application/json")
_MESSAGES = {
    Reason.QUEUE_WAIT: "No worker can start this request within max_queue_wait_s = {wait_bound:g} s; "
    "the shortest predicted wait is {wait:.1f} s.",
    Reason.TTFT: "No worker can answer this request within the bound on its time to first token of {ttft_bound:g} s; "
    "the shortest predicted time is {ttft:.1f} s.",
    Reason.OWN_PREFILL: "The prompt alone takes {own:.3g} s to prefill, longer than the bound on its time to first "
    "token of {ttft_bound:g} s.",
    Reason.BOUND_USED_UP: "The bound of {bound:g} s had passed before this request could be placed.",
    Reason.OVERLOAD_WAIT: "Every worker is overloaded; the shortest predicted wait is {wait:.1f} s.",
    Reason.OVERLOAD_KV: "Every worker is overloaded: the requests in flight need several times its KV cache.",
    Reason.FAIR_SHARE: "This tenant has used more than its share of the pool; the shortest predicted wait is "
    "{wait:.1f} s.",
}
# What OpenAI's clients show as param and code, by reason.
_FAULTS: dict[Reason, tuple[str | None, str]] = {
    Reason.QUEUE_WAIT: ("max_queue_wait_s", "queue_wait_exceeded"),
    Reason.TTFT: (None, "ttft_exceeded"),
    Reason.OWN_PREFILL: (None, "ttft_exceeded"),
    Reason.BOUND_USED_UP: ("max_queue_wait_s", "queue_wait_exceeded"),
    Reason.OVERLOAD_WAIT: (None, "overloaded"),
    Reason.OVERLOAD_KV: (None, "overloaded"),
    Reason.FAIR_SHARE: (None, "fair_share_exceeded"),
}


def route(grant: Grant, scores: bool = False, name_one: bool = False) -> Continue:
    """Sends the request to the chosen endpoint, with the others to fall back to. Gateways read the header or the
    metadata, so both say the same (endpoint-picker protocol, proposal 004). A worker with a cluster is named by its
    cluster as well, and with `name_one` by its endpoint alone; Envoy then chooses the route again."""
    endpoints = ",".join(grant.endpoints)
    forecast = grant.ticket.forecast
    picked: dict[str, str | float | bool] = {DESTINATION: endpoints}
    if scores:
        picked[SCORES] = ",".join(f"{name}={score:.4f}" for name, score in _scores(grant))
    headers: tuple[tuple[str, str], ...] = ((DESTINATION, endpoints),)
    if grant.cluster is not None:
        headers = (*headers, (CLUSTER, grant.cluster))
    if name_one:
        headers = (*headers, (ENDPOINT, grant.endpoints[0]))
    if grant.rank is not None:
        headers = (*headers, (RANK, str(grant.rank)))
    return Continue(
        Phase.REQUEST_BODY,
        set_headers=headers,
        # No caller chooses a rank: its cache and its queue are what was predicted.
        remove_headers=() if grant.rank is not None else (RANK,),
        clear_route_cache=name_one or grant.cluster is not None,
        dynamic_metadata={
            LB_NAMESPACE: picked,
            NAMESPACE: {
                TICKET: grant.ticket.id,
                "worker": grant.ticket.worker,
                "predicted_ttft_ms": str(round(forecast.ttft_s * 1000)),
                "cached_tokens": str(forecast.cached_tokens),
                "why": grant.why.value,
            },
        },
    )


def _scores(grant: Grant) -> list[tuple[str, float]]:
    """In (0, 1], 1 for the shortest predicted time to first token."""
    best_s = min(forecast.ttft_s for forecast in grant.forecasts)
    return [(forecast.worker, (best_s + 1e-3) / (forecast.ttft_s + 1e-3)) for forecast in grant.forecasts]


def shed(refusal: Refusal, api: Api, on_reject: OnReject = OnReject.RETRY) -> Refuse:
    """429: capacity exists, but not in time. OpenAI's and Anthropic's libraries do as `x-should-retry` says, and sleep
    as long as `retry-after-ms` or `retry-after` says, up to a minute."""
    limits, best, retry = refusal.limits, refusal.best, refusal.retry
    used_up = min(bound for bound in (limits.max_queue_wait_s, limits.max_ttft_s, float("inf")) if bound is not None)
    message = _MESSAGES[refusal.reason].format(
        wait_bound=limits.max_queue_wait_s or 0.0,
        ttft_bound=limits.max_ttft_s or 0.0,
        bound=used_up,
        wait=best.queue_wait_s,
        ttft=best.ttft_s,
        own=best.prefill_s + best.overhead_s,
    )
    headers: tuple[tuple[str, str], ...] = (
        _JSON,
        ("x-should-retry", "true" if retry is not None and on_reject is OnReject.RETRY else "false"),
        ("x-headway-reason", refusal.reason.value),
        ("x-llm-d-request-dropped-reason", "rejected-saturated"),
    )
    if retry is not None:
        message += f" Retry in {retry.whole_s} s."
        headers += (
            ("retry-after", str(retry.whole_s)),
            ("retry-after-ms", str(max(1, round(retry.told_s * 1000)))),
            ("x-headway-retry-after-uncapped-s", f"{retry.uncapped_s:.3f}"),
        )
    param, code = _FAULTS[refusal.reason]
    if refusal.reason is Reason.BOUND_USED_UP and used_up != limits.max_queue_wait_s:
        param, code = _FAULTS[Reason.TTFT]
    return Refuse(
        status=429,
        headers=headers,
        body=api.error_body(message, "rate_limit_error", param, code),
        details=f"headway_{refusal.reason.value}",
    )


def unavailable(nobody: NoWorker, api: Api) -> Refuse:
    """503: there is no worker at all."""
    return Refuse(
        status=503,
        headers=(
            _JSON,
            ("x-headway-reason", "no_worker"),
            ("x-llm-d-request-dropped-reason", "rejected-no-endpoints"),
        ),
        body=api.error_body(
            f"The pool {nobody.pool!r} has no workers that could take this request.",
            "service_unavailable_error",
            None,
            "no_worker",
        ),
        details="headway_no_worker",
    )


def bad_wish(fault: BadWish, api: Api) -> Refuse:
    """400: the caller asked for something that is ours to grant, in a way that we cannot read."""
    return Refuse(
        status=400,
        headers=(_JSON, ("x-headway-reason", "bad_request")),
        body=api.error_body(f"{fault}.", "invalid_request_error", fault.field, "invalid_value"),
        details="headway_bad_request",
    )
