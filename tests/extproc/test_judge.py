"""From headers and body to a verdict."""

import asyncio
import itertools
import time

import msgspec
import pytest

from extproc.apis import openai_chat, openai_completions
from extproc.exchange import Headers
from extproc.judge import Exchange
from extproc.prompt_reader import Estimated
from extproc.recorder import Recorder
from extproc.session import Decide, Pass, Passed, Reject, Route, Verdict
from predictor.admission import Limits, Reason, Refusal, RetryAfter
from predictor.fairness import FairnessPolicy
from predictor.fleet import Attempt, Decision, Wish
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis, StepCost
from predictor.prompt import Prompt
from predictor.routing import Prefer
from tests.fakes.clock import ManualClock
from tests.fakes.filter import WORKERS, Filter
from tests.fakes.waiting import until

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'


class Recorded(Recorder):
    """Remembers what it is told of decisions."""

    def __init__(self) -> None:
        self.decisions: list[tuple[Prompt, Decision]] = []

    def decided(self, pool: str, prompt: Prompt, wish: Wish, cache_salt: str | None, decision: Decision) -> None:
        self.decisions.append((prompt, decision))


class Bench:
    """A judge on a clock."""

    def __init__(
        self, workers: dict[str, str] | None = None, recorder: Recorder | None = None, hold_s: float = 0.0
    ) -> None:
        self.clock = ManualClock()
        self.filter = Filter(workers, self.clock, hold_s=hold_s, recorder=recorder)
        self.exchange = Exchange(received_at_s=self.clock())

    def fill(self) -> None:
        """Each worker with 30 s to prefill."""
        for worker in WORKERS:
            self.filter.fleet.know_cost(worker, StepCost(0.0, 0.0, 0.01, 1e-4, 0.0, 0.0))
            wish = Wish(f"fill {worker}", self.clock())
            self.filter.fleet.place_on(worker, Prompt(300_000, exact=True), wish, self.clock())

    async def decide(self, *, header: str | None = None, **fields: object) -> Verdict:
        headers = Headers([] if header is None else [("x-max-queue-wait-s", header)])
        body = msgspec.json.encode({"model": "m", "prompt": list(range(40)), **fields})
        return await self.filter.judge.decide(Decide(openai_completions.API, headers, body), self.exchange)

    def refuse_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        best = Forecast("a", 40, 0, 0.0, 50.0, 1.0, 0.0, 51.0, Basis.CURVE, 9000, exact_tokens=True)

        def place(pool: str, prompt: Prompt, wish: Wish, now_s: float, attempt: Attempt) -> Refusal:
            assert wish.max_queue_wait_s is not None
            return Refusal(Reason.QUEUE_WAIT, Limits(wish.max_queue_wait_s), RetryAfter(40.0, 40.0), best, (best,))

        monkeypatch.setattr(self.filter.fleet, "place", place)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_request_is_routed_booked_and_told_of(bench: Bench) -> None:
    verdict = await bench.decide(stream=True, max_tokens=5)
    assert isinstance(verdict, Route)
    assert bench.exchange.ticket_id == "boot-1"
    ticket = bench.filter.fleet.ticket("boot-1")
    assert ticket is not None
    assert (ticket.wish.streaming, ticket.wish.max_tokens, ticket.wish.max_queue_wait_s) == (True, 5, None)
    assert ticket.forecast.prompt_tokens == 40
    assert len(bench.filter.ledger) == 1
    (line,) = bench.filter.log.of("decision")
    assert (line["outcome"], line["worker"], line["prompt_tokens"]) == ("routed", ticket.worker, 40)
    parts = [line[key] for key in ("already_waited_s", "wait_s", "prefill_s", "overhead_s")]
    assert sum(part for part in parts if isinstance(part, float)) == pytest.approx(line["predicted_ttft_s"], abs=1e-3)
    candidates = line["candidates"]
    assert isinstance(candidates, dict)
    assert set(candidates) == set(WORKERS)
    assert bench.filter.counted("decisions", pool="m", outcome="routed") == 1


async def test_what_is_refused_whatever_its_prompt_is_is_not_even_tokenized(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.fill()
    assert isinstance(await bench.decide(max_queue_wait_s=5.0), Reject)
    monkeypatch.setattr(bench.filter.reader, "read", None)
    monkeypatch.setattr(bench.filter.fleet, "place", None)
    verdict = await bench.decide(max_queue_wait_s=5.0)
    assert isinstance(verdict, Reject)
    assert verdict.reply.status == 429
    assert dict(verdict.reply.headers)["x-headway-reason"] == "queue_wait"
    assert 5 <= int(dict(verdict.reply.headers)["retry-after"]) <= 60
    line = bench.filter.log.of("decision")[-1]
    assert (line["outcome"], line["prompt_tokens"], line["estimated"]) == ("refused", None, None)
    assert bench.filter.counted("decisions", pool="m", outcome="refused") == 2
    assert bench.filter.counted("refusals", pool="m", reason="queue_wait", carried_out="enforced") == 2
    assert bench.filter.counted("refusals_unread", pool="m") == 1


async def test_what_is_recorded_is_read_whatever_becomes_of_it() -> None:
    recorder = Recorded()
    bench = Bench(recorder=recorder)
    bench.fill()
    for _ in range(3):
        assert isinstance(await bench.decide(max_queue_wait_s=5.0), Reject)
    refused = [(prompt, decision) for prompt, decision in recorder.decisions if isinstance(decision, Refusal)]
    assert [prompt.token_count for prompt, _ in refused] == [40, 40, 40]
    assert bench.filter.counted("refusals_unread", pool="m") == 0


async def test_who_may_be_held_is_not_turned_away_at_once() -> None:
    bench = Bench(hold_s=60.0)
    bench.fill()
    asked = [asyncio.create_task(bench.decide(max_queue_wait_s=5.0)) for _ in range(2)]
    await until(lambda: len(bench.filter.holding) == 2)
    bench.filter.holding.release()
    assert all(isinstance(verdict, Reject) for verdict in await asyncio.gather(*asked))
    assert bench.filter.counted("refusals_unread", pool="m") == 0
    # Once nobody is held any more, it is as in any other pool.
    assert isinstance(await bench.decide(max_queue_wait_s=5.0), Reject)
    assert bench.filter.counted("refusals_unread", pool="m") == 1


async def test_a_body_that_was_not_seen_or_only_in_part_is_not_refused_for_what_it_may_be_at_most(
    bench: Bench,
) -> None:
    bench.fill()
    headers = Headers([("x-max-queue-wait-s", "5")])
    beginning = b'{"model":"m","prompt":[1,2,3'
    for case in (
        Decide(openai_completions.API, headers, None),
        Decide(openai_completions.API, headers, beginning, complete=False),
    ) * 2:
        assert isinstance(await bench.filter.judge.decide(case, bench.exchange), Reject)
    assert bench.filter.counted("refusals_unread", pool="m") == 0


async def test_each_request_has_an_id_of_its_own(bench: Bench) -> None:
    ids = set()
    for _ in range(5):
        bench.exchange = Exchange(received_at_s=bench.clock())
        await bench.decide()
        ids.add(bench.exchange.ticket_id)
    assert len(ids) == 5
    assert None not in ids


@pytest.mark.parametrize(
    ("body", "reason"), [(b"{", Passed.UNREADABLE), (b'{"model":"x","prompt":"y"}', Passed.UNKNOWN_MODEL)]
)
async def test_what_is_not_ours_to_judge_is_passed(bench: Bench, body: bytes, reason: Passed) -> None:
    verdict = await bench.filter.judge.decide(Decide(openai_completions.API, Headers(), body), bench.exchange)
    assert verdict == Pass(reason)
    assert bench.exchange.ticket_id is None


@pytest.mark.parametrize(("header", "field", "bound_s"), [("10", None, 10.0), (None, 20, 20.0), ("10", 20, 10.0)])
async def test_the_bound_comes_from_header_or_field(
    bench: Bench, header: str | None, field: object, bound_s: float
) -> None:
    await bench.decide(header=header, max_queue_wait_s=field)
    ticket = bench.filter.fleet.ticket("boot-1")
    assert ticket is not None
    assert ticket.wish.max_queue_wait_s == bound_s


async def test_a_bad_bound_is_refused_before_anything_is_tokenized_or_booked(bench: Bench) -> None:
    verdict = await bench.decide(max_queue_wait_s="soon")
    assert isinstance(verdict, Reject)
    assert verdict.reply.status == 400
    assert bench.filter.fleet.in_flight == 0
    assert bench.filter.counted("decisions", pool="m", outcome="bad_request") == 1


async def test_a_bad_bound_for_a_model_that_is_not_ours_is_not_ours_to_refuse(bench: Bench) -> None:
    assert await bench.decide(model="x", max_queue_wait_s="soon") == Pass(Passed.UNKNOWN_MODEL)


async def test_a_refusal_books_nothing_and_is_told_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.refuse_everything(monkeypatch)
    verdict = await bench.decide(max_queue_wait_s=10)
    assert isinstance(verdict, Reject)
    assert verdict.reply.status == 429
    assert (bench.exchange.ticket_id, len(bench.filter.ledger)) == (None, 0)
    (line,) = bench.filter.log.of("decision")
    assert (line["outcome"], line["reason"], line["best_wait_s"]) == ("refused", "queue_wait", 50.0)
    assert bench.filter.counted("decisions", pool="m", outcome="refused") == 1


async def test_a_pool_without_workers_is_unavailable() -> None:
    bench = Bench({})
    verdict = await bench.decide()
    assert isinstance(verdict, Reject)
    assert verdict.reply.status == 503
    assert bench.filter.counted("decisions", pool="m", outcome="no_worker") == 1


async def test_an_estimate_is_counted_with_its_reason_and_still_routed(bench: Bench) -> None:
    verdict = await bench.filter.judge.decide(Decide(openai_chat.API, Headers(), CHAT), bench.exchange)
    assert isinstance(verdict, Route)
    assert bench.filter.counted("prompts_estimated", reason=Estimated.NO_TEMPLATE.value) == 1
    (line,) = bench.filter.log.of("decision")
    assert line["estimated"] == "no_template"


async def test_time_inside_the_filter_counts_as_waited(bench: Bench) -> None:
    bench.clock.advance(2.5)
    await bench.decide()
    ticket = bench.filter.fleet.ticket("boot-1")
    assert ticket is not None
    assert ticket.forecast.already_waited_s == 2.5


# What callers may say


def said(**headers: str) -> Decide:
    body = msgspec.json.encode({"model": "m", "prompt": list(range(40))})
    named = Headers((name.replace("_", "-"), value) for name, value in headers.items())
    return Decide(openai_completions.API, named, body)


async def test_what_the_headers_say_reaches_the_fleet(bench: Bench) -> None:
    case = said(x_slo_ttft_ms="2500", x_headway_prefer="cache", x_headway_tenant="t", x_session_id="s")
    await bench.filter.judge.decide(case, bench.exchange)
    ticket = bench.filter.fleet.ticket("boot-1")
    assert ticket is not None
    wish = ticket.wish
    assert (wish.max_ttft_s, wish.prefer, wish.tenant, wish.waited_before_s) == (2.5, Prefer.CACHE, "t", 0.0)
    assert wish.session is not None


@pytest.mark.parametrize(
    "header", ["x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-headway-prefer", "x-headway-on-reject", "x-headway-tenant"]
)
async def test_a_header_that_makes_no_sense_is_a_400_that_names_it(bench: Bench, header: str) -> None:
    verdict = await bench.filter.judge.decide(said(**{header.replace("-", "_"): "what ever"}), bench.exchange)
    assert isinstance(verdict, Reject)
    assert verdict.reply.status == 400
    assert header.encode() in verdict.reply.body
    assert b"what ever" in verdict.reply.body
    assert bench.filter.fleet.in_flight == 0


@pytest.mark.parametrize(("header", "should_retry"), [("retry", "true"), ("fail", "false"), (None, "true")])
async def test_a_refused_caller_is_told_to_retry_or_not_as_it_wishes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, header: str | None, should_retry: str
) -> None:
    bench.refuse_everything(monkeypatch)
    headers = {} if header is None else {"x_headway_on_reject": header}
    verdict = await bench.filter.judge.decide(said(x_max_queue_wait_s="10", **headers), bench.exchange)
    assert isinstance(verdict, Reject)
    assert dict(verdict.reply.headers)["x-should-retry"] == should_retry
    assert bench.filter.counted("refusals", pool="m", reason="queue_wait", carried_out="enforced") == 1


async def test_an_adapter_goes_only_where_it_is_loaded_and_shares_no_cache_with_its_model(bench: Bench) -> None:
    credited = []
    for number in range(1, 6):
        bench.exchange = Exchange(received_at_s=bench.clock())
        assert isinstance(await bench.decide(model="sql"), Route)
        ticket = bench.filter.fleet.ticket(f"boot-{number}")
        assert ticket is not None
        assert (ticket.worker, ticket.wish.adapter) == ("b", "sql")
        credited.append(ticket.forecast.cached_tokens)
    await bench.decide()
    plain = bench.filter.fleet.ticket("boot-6")
    assert plain is not None
    assert plain.wish.adapter is None
    # Five copies are being computed on b; to the model itself they are strangers.
    assert (credited[-1], plain.forecast.cached_tokens) == (32, 0)


async def test_an_adapter_that_nobody_has_loaded_is_unavailable(bench: Bench) -> None:
    verdict = await bench.decide(model="poems")
    assert isinstance(verdict, Reject)
    assert verdict.reply.status == 503


async def test_a_trusted_start_counts_as_waited_up_to_when_the_request_reached_us(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.filter.judge, "_wall_clock", lambda: 1_790_000_010.0)
    bench.clock.advance(2.0)  # inside the filter
    await bench.filter.judge.decide(said(x_request_start="t=1790000000"), bench.exchange)
    ticket = bench.filter.fleet.ticket("boot-1")
    assert ticket is not None
    assert ticket.wish.waited_before_s == pytest.approx(8.0)
    assert ticket.forecast.already_waited_s == pytest.approx(10.0)


async def test_a_start_that_nobody_trusts_counts_for_nothing(bench: Bench) -> None:
    await bench.filter.judge.decide(said(x_request_start="t=1"), bench.exchange)
    ticket = bench.filter.fleet.ticket("boot-1")
    assert ticket is not None
    assert ticket.forecast.already_waited_s == 0.0


@pytest.mark.parametrize("value", [10, None])
async def test_where_engines_refuse_the_bounds_field_another_body_goes_on(value: object) -> None:
    filter_ = Filter(removes_bound=True)
    body = msgspec.json.encode({"model": "m", "max_queue_wait_s": value, "prompt": [1, 2]})
    case = Decide(openai_completions.API, Headers(), body)
    verdict = await filter_.judge.decide(case, Exchange(received_at_s=time.monotonic()))
    assert isinstance(verdict, Route)
    assert verdict.body == b'{"model":"m","prompt":[1,2]}'
    assert filter_.counted("bound_fields", pool="m", result="removed") == 1


async def test_where_they_do_not_the_body_goes_on_as_it_is(bench: Bench) -> None:
    verdict = await bench.decide(max_queue_wait_s=10)
    assert isinstance(verdict, Route)
    assert verdict.body is None


async def test_a_body_without_the_field_is_not_counted_as_one_with_it() -> None:
    filter_ = Filter(removes_bound=True)
    for text in (b"{}", b'{"max_queue_wait_s":1}'):
        body = b'{"model":"m","prompt":[1,2],"metadata":' + text + b"}"
        verdict = await filter_.judge.decide(
            Decide(openai_completions.API, Headers(), body), Exchange(received_at_s=time.monotonic())
        )
        assert isinstance(verdict, Route)
        assert verdict.body is None
    assert filter_.counted("bound_fields", pool="m", result="removed") == 0


async def test_one_keys_giants_are_refused_as_such_before_they_get_another_keys_requests_refused() -> None:
    clock = ManualClock()
    filter_ = Filter(clock=clock, fairness=FairnessPolicy(wait_s=2.0))
    for worker in WORKERS:
        filter_.fleet.know_cost(worker, StepCost(0.0, 0.0, 0.005, 100e-6, 0.0, 50e-6))

    firsts = itertools.count(1)

    async def ask(key: str, tokens: int) -> Verdict:
        """A prompt that nobody else has."""
        body = msgspec.json.encode({"model": "m", "prompt": [next(firsts), *range(1, tokens)]})
        headers = Headers([("authorization", f"Bearer {key}"), ("x-max-queue-wait-s", "10")])
        return await filter_.judge.decide(Decide(openai_completions.API, headers, body), Exchange(clock()))

    assert isinstance(await ask("small", 100), Route)
    refused = None
    for _ in range(30):
        refused = await ask("giant", 10_000)
        if isinstance(refused, Reject):
            break
    assert isinstance(refused, Reject)
    assert (refused.reply.status, refused.reply.details) == (429, "headway_fair_share")
    assert msgspec.json.decode(refused.reply.body)["error"]["code"] == "fair_share_exceeded"
    for _ in range(20):
        assert isinstance(await ask("small", 100), Route)


@pytest.mark.parametrize("removes_bound", [False, True])
async def test_a_priority_goes_on_to_the_engine(removes_bound: bool) -> None:
    filter_ = Filter(removes_bound=removes_bound)
    sent = {"model": "m", "priority": -3, "max_queue_wait_s": 10, "prompt": [1, 2]}
    case = Decide(openai_completions.API, Headers(), msgspec.json.encode(sent))
    verdict = await filter_.judge.decide(case, Exchange(received_at_s=time.monotonic()))
    assert isinstance(verdict, Route)
    goes_on = sent if verdict.body is None else msgspec.json.decode(verdict.body)
    assert (verdict.body is not None) == removes_bound
    assert goes_on["priority"] == -3
