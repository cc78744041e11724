"""What we answer: to Envoy, and through it to clients, of which one is the real OpenAI SDK."""

import asyncio
import math
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import openai
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from extproc import replies
from extproc.apis import openai_chat
from extproc.exchange import Phase, Refuse
from extproc.wishes import BadWish
from predictor.admission import Limits, OnReject, Reason, Refusal, RetryAfter
from predictor.fleet import Fleet, Grant, NoWorker, PoolPolicy, Wish, WorkerSpec
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis
from predictor.prompt import BlockHasher, Prompt

WAIT = Forecast("a", 100, 64, 0.5, 41.25, 1.0, 0.25, 43.0, Basis.CURVE, 9000, exact_tokens=True)


def refusal(
    retry: RetryAfter | None,
    reason: Reason = Reason.QUEUE_WAIT,
    bound_s: float = 10.0,
    on_reject: OnReject = OnReject.RETRY,
) -> Refuse:
    limits = Limits(bound_s, max_ttft_s=20.0 if reason in (Reason.TTFT, Reason.OWN_PREFILL) else None)
    return replies.shed(Refusal(reason, limits, retry, WAIT, (WAIT,)), openai_chat.API, on_reject)


def error_of(reply: Refuse) -> dict[str, object]:
    body = msgspec.json.decode(reply.body, type=dict[str, dict[str, object]])
    assert list(body) == ["error"]
    return body["error"]


def test_a_grant_names_the_endpoints_in_header_and_metadata_alike() -> None:
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    for worker in ("a", "b"):
        fleet.join("m", WorkerSpec(worker, f"{worker}.example:8000"))
    grant = fleet.place("m", Prompt.estimated(100), Wish("boot-1", 0.0), 0.5)
    assert isinstance(grant, Grant)
    reply = replies.route(grant)
    endpoints = ",".join(grant.endpoints)
    assert len(grant.endpoints) == 2
    assert reply.phase is Phase.REQUEST_BODY
    assert reply.set_headers == (("x-gateway-destination-endpoint", endpoints),)
    assert reply.dynamic_metadata["envoy.lb"] == {"x-gateway-destination-endpoint": endpoints}
    assert reply.dynamic_metadata["headway"] == {
        "ticket": "boot-1",
        "worker": grant.ticket.worker,
        "predicted_ttft_ms": str(round(grant.ticket.forecast.ttft_s * 1000)),
        "cached_tokens": "0",
        "why": grant.why.value,
    }
    assert not reply.clear_route_cache


def granted(*specs: WorkerSpec) -> Grant:
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    for spec in specs:
        fleet.join("m", spec)
    grant = fleet.place("m", Prompt.estimated(100), Wish("boot-1", 0.0), 0.5)
    assert isinstance(grant, Grant)
    return grant


def test_no_caller_chooses_a_rank() -> None:
    reply = replies.route(granted(WorkerSpec("a", "10.0.0.1:8000")))
    assert reply.remove_headers == ("x-data-parallel-rank",)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_rank_that_was_predicted_for_is_the_one_that_serves(rank: int) -> None:
    grant = granted(WorkerSpec("a/r", "10.0.0.1:8000", rank=rank))
    reply = replies.route(grant)
    assert dict(reply.set_headers)["x-data-parallel-rank"] == str(rank)
    assert reply.remove_headers == ()


def test_who_is_fallen_back_to_has_the_rank_that_the_request_names() -> None:
    ranks = [WorkerSpec(f"{name}/{rank}", f"10.0.0.{name}:8000", rank=rank) for name in (1, 2) for rank in (0, 1)]
    grant = granted(*ranks)
    assert len(grant.endpoints) == len(set(grant.endpoints))
    assert dict(replies.route(grant).set_headers)["x-data-parallel-rank"] == grant.ticket.worker[-1]


def test_two_ranks_of_one_engine_are_named_once() -> None:
    grant = granted(*(WorkerSpec(f"a/{rank}", "10.0.0.1:8000", rank=rank) for rank in range(4)))
    assert grant.endpoints == ("10.0.0.1:8000",)


@pytest.mark.parametrize("cluster", [None, "one-of-many"])
def test_the_chosen_endpoint_is_named_alone_where_that_is_wanted(cluster: str | None) -> None:
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    for worker in ("a", "b"):
        fleet.join("m", WorkerSpec(worker, f"10.0.0.{ord(worker)}:8000", cluster=cluster))
    grant = fleet.place("m", Prompt.estimated(100), Wish("boot-1", 0.0), 0.5)
    assert isinstance(grant, Grant)
    reply = replies.route(grant, name_one=True)
    assert reply.clear_route_cache
    assert dict(reply.set_headers)["x-headway-endpoint"] == grant.endpoints[0]
    assert len(reply.set_headers) == 2 + (cluster is not None)
    assert "x-headway-endpoint" not in dict(replies.route(grant).set_headers)


def test_a_refusal_says_when_to_come_back_and_why() -> None:
    reply = refusal(RetryAfter(told_s=31.2004, uncapped_s=30.123456))
    assert reply.status == 429
    assert dict(reply.headers) == {
        "content-type": "application/json",
        "retry-after": "32",
        "retry-after-ms": "31200",
        "x-headway-retry-after-uncapped-s": "30.123",
        "x-headway-reason": "queue_wait",
        "x-llm-d-request-dropped-reason": "rejected-saturated",
        "x-should-retry": "true",
    }
    assert error_of(reply) == {
        "message": "No worker can start this request within max_queue_wait_s = 10 s; the shortest predicted wait is "
        "41.8 s. Retry in 32 s.",
        "type": "rate_limit_error",
        "param": "max_queue_wait_s",
        "code": "queue_wait_exceeded",
    }
    assert reply.details == "headway_queue_wait"


def test_a_bound_that_was_used_up_says_so() -> None:
    reply = refusal(RetryAfter(0.0, 0.0), Reason.BOUND_USED_UP)
    assert dict(reply.headers)["x-headway-reason"] == "bound_used_up"
    assert "had passed before" in str(error_of(reply)["message"])


@pytest.mark.parametrize(
    ("limits", "param", "code"),
    [
        (Limits(10.0), "max_queue_wait_s", "queue_wait_exceeded"),
        (Limits(max_ttft_s=10.0), None, "ttft_exceeded"),
        (Limits(10.0, max_ttft_s=5.0), None, "ttft_exceeded"),
        (Limits(5.0, max_ttft_s=10.0), "max_queue_wait_s", "queue_wait_exceeded"),
    ],
)
def test_it_is_named_which_bound_was_used_up(limits: Limits, param: str | None, code: str) -> None:
    refused = Refusal(Reason.BOUND_USED_UP, limits, RetryAfter(0.0, 0.0), WAIT, (WAIT,))
    error = error_of(replies.shed(refused, openai_chat.API, OnReject.RETRY))
    assert (error["param"], error["code"]) == (param, code)


@pytest.mark.parametrize(
    ("reason", "code", "told"),
    [
        (Reason.TTFT, "ttft_exceeded", "within the bound on its time to first token of 20 s; the shortest predicted"),
        (Reason.OVERLOAD_WAIT, "overloaded", "the shortest predicted wait is 41.8 s. Retry in 4 s."),
        (Reason.OVERLOAD_KV, "overloaded", "several times its KV cache"),
        (Reason.FAIR_SHARE, "fair_share_exceeded", "more than its share"),
    ],
)
def test_every_reason_has_words_and_a_code_of_its_own(reason: Reason, code: str, told: str) -> None:
    reply = refusal(RetryAfter(3.2, 3.2), reason)
    assert error_of(reply)["code"] == code
    assert told in str(error_of(reply)["message"])
    assert dict(reply.headers)["x-headway-reason"] == reason.value
    assert reply.details == f"headway_{reason.value}"


def test_a_caller_that_wants_to_fall_back_at_once_is_told_not_to_retry_but_still_when_it_could() -> None:
    headers = dict(refusal(RetryAfter(31.2, 31.2), on_reject=OnReject.FAIL).headers)
    assert (headers["x-should-retry"], headers["retry-after"]) == ("false", "32")


def test_where_coming_back_is_no_use_nobody_is_told_when_to() -> None:
    reply = refusal(None, Reason.OWN_PREFILL)
    headers = dict(reply.headers)
    assert headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms", "x-headway-retry-after-uncapped-s"} & set(headers)
    assert "takes 1.25 s to prefill, longer than the bound on its time to first token of 20 s" in str(
        error_of(reply)["message"]
    )
    assert "Retry in" not in str(error_of(reply)["message"])


@given(st.floats(0, 300))
def test_whole_seconds_are_rounded_up_and_never_below_the_milliseconds(told_s: float) -> None:
    headers = dict(refusal(RetryAfter(told_s, told_s)).headers)
    whole_s, ms = int(headers["retry-after"]), int(headers["retry-after-ms"])
    assert whole_s == max(1, math.ceil(told_s))
    assert 1 <= ms <= whole_s * 1000
    assert abs(ms - told_s * 1000) <= 1


def test_no_worker_is_no_rate_limit() -> None:
    reply = replies.unavailable(NoWorker("m"), openai_chat.API)
    assert reply.status == 503
    assert dict(reply.headers)["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
    assert "retry-after" not in dict(reply.headers)
    assert error_of(reply)["code"] == "no_worker"


def test_a_bad_wish_names_the_field() -> None:
    reply = replies.bad_wish(BadWish("max_queue_wait_s", "soon", "a number of seconds from 5 to 300"), openai_chat.API)
    assert reply.status == 400
    assert error_of(reply) == {
        "message": "max_queue_wait_s must be a number of seconds from 5 to 300; got 'soon'.",
        "type": "invalid_request_error",
        "param": "max_queue_wait_s",
        "code": "invalid_value",
    }


class Gateway:
    """Answers the first requests with refusals, as Envoy would, and then with a chat completion."""

    def __init__(self, *refusals: Refuse) -> None:
        self.refusals = list(refusals)
        self.asked_at_s: list[float] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        del request
        self.asked_at_s.append(asyncio.get_running_loop().time())
        if self.refusals:
            reply = self.refusals.pop(0)
            return web.Response(status=reply.status, headers=dict(reply.headers), body=reply.body)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        )

    async def ask(self, max_retries: int) -> str | None:
        async with openai.AsyncOpenAI(base_url=self.url, api_key="k", max_retries=max_retries) as client:
            answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return answer.choices[0].message.content


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway()
    app = web.Application()
    app.add_routes([web.post("/chat/completions", gateway.answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateway.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield gateway
    await runner.cleanup()


async def test_the_openai_client_sees_a_rate_limit(gateway: Gateway) -> None:
    gateway.refusals.append(refusal(RetryAfter(31.2, 31.2)))
    with pytest.raises(openai.RateLimitError) as caught:
        await gateway.ask(max_retries=0)
    error = caught.value
    assert (error.code, error.param, error.type) == ("queue_wait_exceeded", "max_queue_wait_s", "rate_limit_error")
    assert error.response.headers["retry-after-ms"] == "31200"
    assert "Retry in 32 s." in error.message


async def test_the_openai_client_sees_a_bad_request(gateway: Gateway) -> None:
    gateway.refusals.append(
        replies.bad_wish(BadWish("max_queue_wait_s", 4.99, "a number of seconds from 5 to 300"), openai_chat.API)
    )
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.ask(max_retries=2)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "max_queue_wait_s")
    assert len(gateway.asked_at_s) == 1


async def test_the_openai_client_sees_a_missing_worker(gateway: Gateway) -> None:
    gateway.refusals.append(replies.unavailable(NoWorker("m"), openai_chat.API))
    with pytest.raises(openai.InternalServerError) as caught:
        await gateway.ask(max_retries=0)
    assert caught.value.status_code == 503
    assert caught.value.code == "no_worker"


async def test_the_openai_client_raises_at_once_when_it_is_told_to_although_it_would_retry(gateway: Gateway) -> None:
    gateway.refusals += [refusal(RetryAfter(0.2, 0.2), on_reject=OnReject.FAIL)] * 3
    with pytest.raises(openai.RateLimitError):
        await gateway.ask(max_retries=2)
    assert len(gateway.asked_at_s) == 1


async def test_the_openai_client_gives_up_with_the_last_refusal(gateway: Gateway) -> None:
    gateway.refusals += [refusal(RetryAfter(0.2, 0.2))] * 3
    with pytest.raises(openai.RateLimitError) as caught:
        await gateway.ask(max_retries=2)
    assert len(gateway.asked_at_s) == 3
    assert caught.value.code == "queue_wait_exceeded"


@pytest.mark.alone
async def test_the_openai_client_waits_as_it_is_told(gateway: Gateway) -> None:
    gateway.refusals.append(refusal(RetryAfter(1.3, 1.3)))
    assert await gateway.ask(max_retries=1) == "hello"
    first_s, second_s = gateway.asked_at_s
    # The milliseconds win over the whole seconds, and its own back-off would be below 0.6 s.
    assert 1.25 <= second_s - first_s < 1.95
