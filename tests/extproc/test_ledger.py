"""Tickets between their stream and the access log: whatever the order, each is released once and none stays."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc import wire
from extproc.answer import AnswerKind
from extproc.exchange import RequestEnd
from extproc.ledger import USAGE_NAMESPACE
from predictor.admission import Mode, Reason, Refusal
from predictor.fleet import Grant, Ticket, Usage, Wish
from predictor.hindsight import Review, Verdict
from predictor.prefill_cost import StepCost
from predictor.prompt import Prompt
from tests.fakes.clock import ManualClock
from tests.fakes.envoy import log_entry
from tests.fakes.filter import WORKERS, Filter

USAGE: Mapping[str, object] = {"prompt": 100.0, "cached": 0.0, "output": 20.0}


class Desk:
    """A ledger on a clock, with one ticket booked in it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.filter = Filter(clock=self.clock)
        self.ledger = self.filter.ledger
        self.ticket = self.book("t-1")

    def book(self, ticket_id: str) -> Ticket:
        decision = self.filter.fleet.place("m", Prompt(100, exact=True), Wish(ticket_id, self.clock()), self.clock())
        assert isinstance(decision, Grant)
        self.ledger.booked(decision.ticket, self.filter.text, body_bytes=600)
        return decision.ticket

    def answered(self, kind: AnswerKind = AnswerKind.STREAMED, served: str | None = None) -> None:
        self.clock.advance(0.5)
        self.ledger.answered("t-1", kind, 200, served)

    def closed(self, answered: bool = True) -> None:
        self.ledger.stream_closed("t-1", answered)

    def ended(self, usage: Mapping[str, object] = USAGE, status: int | None = 200, **more: Any) -> None:
        self.clock.advance(0.5)
        self.ledger.request_ended(end({"headway": {"ticket": "t-1"}, USAGE_NAMESPACE: usage}, status, **more))

    def spared(self) -> set[str]:
        """The workers that are not chosen while there is another."""
        chosen = set()
        for number in range(10):
            wish = Wish(f"next-{number}", self.clock())
            decision = self.filter.fleet.place("m", Prompt(10, True), wish, self.clock())
            assert isinstance(decision, Grant)
            chosen.add(decision.ticket.worker)
        for number in range(10):
            self.filter.fleet.finish(f"next-{number}", Usage(), self.clock())
        return set(WORKERS) - chosen

    def counted(self, name: str, **labels: str) -> float:
        return self.filter.counted(name, **labels)

    def assert_empty(self) -> None:
        assert len(self.ledger) == 0
        assert self.filter.fleet.in_flight == 0


def end(metadata: Mapping[str, Mapping[str, object]], status: int | None = 200, **more: Any) -> RequestEnd:
    plain = {name: dict(values) for name, values in metadata.items()}
    (entry,) = wire.read_access_log(log_entry(plain, status, **more), list(plain))
    return entry


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_first_token_is_graded_and_the_end_releases(desk: Desk) -> None:
    desk.answered()
    (graded,) = desk.filter.log.of("graded")
    assert graded["actual_ttft_s"] == 0.5
    desk.closed()
    assert len(desk.ledger) == 1
    desk.ended()
    desk.assert_empty()
    (ended,) = desk.filter.log.of("ended")
    assert (ended["status"], ended["source"], ended["output_tokens"]) == (200, "access_log", 20)
    assert desk.counted("requests_ended", source="access_log") == 1
    assert desk.counted("access_log_entries", kind="tracked") == 1


def test_an_end_that_comes_before_the_first_token_waits_for_the_stream(desk: Desk) -> None:
    desk.ended()
    assert len(desk.ledger) == 1
    desk.answered()
    assert len(desk.filter.log.of("graded")) == 1
    desk.closed()
    desk.assert_empty()
    assert desk.counted("requests_ended", source="access_log") == 1


LOST = "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error}"


@pytest.mark.parametrize("log_first", [False, True])
@pytest.mark.parametrize(
    ("status", "more", "reason", "refused", "spared"),
    [
        (None, {"details": ""}, "given_up", 0, False),
        (200, {"left": True, "details": "downstream_remote_disconnect"}, "given_up", 0, False),
        (200, {}, "empty", 0, False),
        (200, {"body_bytes": 9}, "given_up", 0, False),  # somebody saw an answer; our stream did not
        (404, {}, "error", 0, False),
        (429, {}, "error", 1, True),
        (503, {}, "error", 1, True),
        (503, {"details": "no_healthy_upstream"}, "unanswered", 0, False),
        (503, {"details": LOST}, "unanswered", 0, True),
        (504, {"details": "upstream_response_timeout"}, "unanswered", 0, False),
    ],
)
def test_of_a_stream_without_an_answer_the_access_log_tells_why(
    desk: Desk, status: int | None, more: dict[str, Any], reason: str, refused: int, spared: bool, log_first: bool
) -> None:
    """Whichever comes first. The headers were all of the answer, or there was none, or its client has left."""
    if log_first:
        desk.ended(status=status, **more)
        desk.closed(answered=False)
    else:
        desk.closed(answered=False)
        desk.ended(status=status, **more)
    desk.assert_empty()
    assert desk.counted("ungraded", reason=reason) == 1 == desk.counted("ungraded")
    assert desk.counted("requests_ended", source="access_log") == 1 == desk.counted("requests_ended")
    assert desk.counted("engine_refusals", status=str(status)) == refused
    assert desk.spared() == ({desk.ticket.worker} if spared else set())


def test_a_stream_of_which_nobody_tells_the_end_was_given_up(desk: Desk) -> None:
    desk.closed(answered=False)
    desk.clock.advance(0.9)
    desk.ledger.give_up_silent()
    assert len(desk.ledger) == 1
    desk.clock.advance(0.2)
    desk.ledger.give_up_silent()
    desk.assert_empty()
    assert desk.counted("ungraded", reason="given_up") == 1
    assert desk.counted("requests_ended", source="stream") == 1
    desk.ended()
    assert desk.counted("access_log_entries", kind="late") == 1
    desk.ledger.give_up_silent(0)
    assert desk.counted("ungraded") == 1


@pytest.mark.parametrize(
    ("details", "refused", "spared"),
    [("via_upstream", 1, True), (None, 1, True), (LOST, 0, True), ("no_healthy_upstream", 0, False)],
)
def test_an_engine_that_is_full_is_told_from_an_envoy_without_engines(
    desk: Desk, details: str | None, refused: int, spared: bool
) -> None:
    """Both are a 503. Where nobody tells whose it is, it is taken for the engine's. It counts once, whoever tells."""
    kind = AnswerKind.ERROR if details in (None, "via_upstream") else AnswerKind.UNANSWERED
    desk.ledger.answered("t-1", kind, 503, None, details)
    desk.closed()
    desk.ended(status=503, details=details or "via_upstream")
    desk.assert_empty()
    assert desk.spared() == ({desk.ticket.worker} if spared else set())
    assert desk.counted("engine_refusals", worker=desk.ticket.worker, status="503") == refused
    assert desk.counted("ungraded", reason=kind.value) == 1 == desk.counted("ungraded")


@pytest.mark.parametrize("status", [429, 503])
def test_a_refusal_that_is_not_shown_to_us_is_told_by_the_access_log(desk: Desk, status: int) -> None:
    desk.answered(AnswerKind.UNSEEN)
    desk.closed()
    desk.ended(status=status)
    assert desk.counted("engine_refusals", worker=desk.ticket.worker, status=str(status)) == 1
    assert desk.spared() == {desk.ticket.worker}


def test_an_end_reported_twice_counts_once(desk: Desk) -> None:
    desk.answered()
    desk.closed()
    desk.ended()
    desk.ended()
    assert desk.counted("requests_ended", source="access_log") == 1
    assert desk.counted("access_log_entries", kind="late") == 1


def test_entries_of_other_requests_are_left(desk: Desk) -> None:
    odd: list[Mapping[str, Mapping[str, object]]] = [
        {},
        {"headway": {}},
        {"headway": {"ticket": 7.0}},
        {"headway": {"ticket": None}},
        {"headway": {"ticket": ["t-1"]}},
        {"other": {"ticket": "t-1"}},
    ]
    for metadata in odd:
        desk.ledger.request_ended(end(metadata))
    desk.ledger.request_ended(end({"headway": {"ticket": "somebody-elses"}}))
    assert desk.counted("access_log_entries", kind="untracked") == len(odd)
    assert desk.counted("access_log_entries", kind="late") == 1
    assert len(desk.ledger) == 1


def test_intermediate_entries_end_nothing(desk: Desk) -> None:
    desk.closed()
    desk.ledger.request_ended(end({"headway": {"ticket": "t-1"}}, final=False))
    assert desk.counted("access_log_entries", kind="intermediate") == 1
    assert len(desk.ledger) == 1


@pytest.mark.parametrize("kind", [AnswerKind.PLAIN, AnswerKind.ERROR, AnswerKind.EMPTY])
def test_an_answer_that_is_no_stream_is_counted_and_not_graded(desk: Desk, kind: AnswerKind) -> None:
    desk.answered(kind)
    desk.closed()
    desk.ended()
    desk.assert_empty()
    assert desk.counted("ungraded", reason=kind.value) == 1
    assert desk.filter.log.of("graded") == []


def test_a_request_that_was_served_elsewhere_is_not_graded(desk: Desk) -> None:
    (other,) = [endpoint for name, endpoint in WORKERS.items() if name != desk.ticket.worker]
    desk.answered(served=other)
    assert desk.counted("ungraded", reason="served_elsewhere") == 1
    desk.closed()
    desk.ended()
    desk.assert_empty()


def test_who_did_not_take_a_request_that_was_sent_to_it_is_spared_for_a_while(desk: Desk) -> None:
    chosen, fleet = desk.ticket.worker, desk.filter.fleet
    (other,) = [endpoint for name, endpoint in WORKERS.items() if name != chosen]
    desk.answered(served=other)

    def next_worker(ticket_id: str) -> str:
        decision = fleet.place("m", Prompt(10, True), Wish(ticket_id, desk.clock()), desk.clock())
        assert isinstance(decision, Grant)
        return decision.ticket.worker

    assert {next_worker(f"soon-{number}") for number in range(5)} == {name for name in WORKERS if name != chosen}
    desk.clock.advance(2.1)
    assert chosen in {next_worker(f"later-{number}") for number in range(20)}


def test_what_the_fleet_released_by_itself_is_dropped(desk: Desk) -> None:
    desk.closed()
    desk.clock.advance(1e6)
    desk.ledger.given_up(desk.filter.fleet.expire(3600, desk.clock()), "age")
    desk.assert_empty()
    assert desk.counted("requests_ended", source="age") == 1
    desk.ended()
    assert desk.counted("requests_ended", source="access_log") == 0


def test_a_worker_that_leaves_takes_its_tickets_along(desk: Desk) -> None:
    desk.ledger.given_up(desk.filter.fleet.leave(desk.ticket.worker), "left")
    desk.answered()
    desk.closed()
    desk.ended()
    desk.assert_empty()


ODD: list[object] = [None, True, "12", -1.0, math.nan, math.inf, -math.inf, 1e300, [], {}, 0.0, 0.5, 1e11]


@pytest.mark.parametrize("key", ["prompt", "cached", "output", "input", "cache_read", "cache_written"])
def test_odd_usage_is_unknown_usage(key: str) -> None:
    for value in ODD:
        desk = Desk()
        desk.answered()
        desk.closed()
        # Not by way of protobuf, which cannot carry all of these.
        desk.ledger.request_ended(
            RequestEnd(
                {"headway": {"ticket": "t-1"}, USAGE_NAMESPACE: {**USAGE, key: value}},
                200, "", 0, frozenset(), 1, True,
            )
        )  # fmt: skip
        desk.assert_empty()
        (ended,) = desk.filter.log.of("ended")
        if key in ("cached", "output"):
            reported = ended[f"{key}_tokens"]
            sound = isinstance(value, float) and 0 <= value < 1e12
            assert reported == (round(value) if isinstance(value, float) and sound else None)


@pytest.mark.parametrize(
    ("reported", "prompt", "cached"),
    [
        ({"input": 40.0, "cache_read": 48.0, "cache_written": 12.0}, 100, 48),
        ({"input": 40.0, "cache_read": 0.0}, 40, 0),
        ({"input": 40.0}, 40, None),
        ({"cache_read": 48.0}, None, None),
        ({"prompt": 100.0, "cached": 16.0, "input": 1.0, "cache_read": 1.0}, 100, 16),
    ],
)
def test_anthropics_parts_are_added_up(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    reported: Mapping[str, object],
    prompt: int | None,
    cached: int | None,
) -> None:
    learned: list[int] = []
    monkeypatch.setattr(desk.filter.text, "learn_size", lambda body_bytes, tokens: learned.append(tokens))
    desk.answered()
    desk.closed()
    desk.ended({**reported, "output": 3.0})
    (line,) = desk.filter.log.of("ended")
    assert (line["cached_tokens"], line["output_tokens"]) == (cached, 3)
    assert learned == ([] if prompt is None else [prompt])


def test_reported_prompt_lengths_teach_the_estimate(desk: Desk) -> None:
    before = desk.filter.text.bytes_per_token
    desk.answered()
    desk.closed()
    desk.ended()
    assert desk.filter.text.bytes_per_token > before  # 6 bytes a token were seen


STEPS = ("answered", "closed", "ended", "ended", "foreign", "intermediate")


@given(st.permutations(STEPS), st.sampled_from(AnswerKind), st.booleans(), st.sampled_from([200, 499, 503]))
def test_no_order_leaves_anything_behind(
    order: list[str], kind: AnswerKind, stream_saw_the_answer: bool, status: int
) -> None:
    desk = Desk()
    for step in order:
        match step:
            case "answered" if stream_saw_the_answer:
                desk.answered(kind)
            case "closed":
                desk.closed(answered=stream_saw_the_answer)
            case "ended":
                desk.ended(status=status)
            case "foreign":
                desk.ledger.request_ended(end({"headway": {"ticket": "x"}}))
            case "intermediate":
                desk.ledger.request_ended(end({"headway": {"ticket": "t-1"}}, final=False))
    desk.assert_empty()
    assert len(desk.filter.log.of("ended")) == 1


def test_many_tickets_do_not_disturb_each_other() -> None:
    orders = list(itertools.permutations(["answered", "closed", "ended"]))
    desk = Desk()
    desk.closed(answered=False)
    desk.ledger.give_up_silent(0)
    ids = [desk.book(f"x-{number}").id for number in range(len(orders))]
    for turn in range(3):
        for ticket_id, order in zip(ids, orders, strict=True):
            match order[turn]:
                case "answered":
                    desk.ledger.answered(ticket_id, AnswerKind.STREAMED, None)
                case "closed":
                    desk.ledger.stream_closed(ticket_id, answered=True)
                case "ended":
                    desk.ledger.request_ended(end({"headway": {"ticket": ticket_id}, USAGE_NAMESPACE: USAGE}))
    desk.assert_empty()


def test_what_became_of_refusals_is_counted_and_told_and_a_changed_mode_loudly(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    review = Review("r-1", "a", Reason.QUEUE_WAIT, enforced=True, verdict=Verdict.FALSE_ALARM, wait_s=2.0, spare=0.6)
    monkeypatch.setattr(desk.filter.fleet, "take_reviews", lambda now_s, most: [("m", review)])
    monkeypatch.setattr(desk.filter.fleet, "take_steps", lambda: [("m", Mode.SHADOW, 0.5)])
    desk.ledger.look_back()
    labels = {"pool": "m", "reason": "queue_wait", "carried_out": "enforced", "verdict": "false_alarm"}
    assert desk.filter.counted("refusals_graded", **labels) == 1
    assert desk.filter.counted("admission_steps", pool="m", to="shadow") == 1
    (graded,) = desk.filter.log.of("refusal_graded")
    assert (graded["id"], graded["verdict"], graded["wait_s"]) == ("r-1", "false_alarm", 2.0)
    (stepped,) = desk.filter.log.of("admission_stepped")
    assert (stepped["pool"], stepped["to"], stepped["false_alarm_rate"]) == ("m", "shadow", 0.5)


def test_many_verdicts_at_once_are_told_in_turns(desk: Desk) -> None:
    fleet, now_s = desk.filter.fleet, 1.0
    fleet.know_cost("a", StepCost(0.0, 0.0, 0.01, 1e-4, 0.0, 0.0))
    # Shows no first token: whatever is refused because of it, it can never be told whether that was right.
    fleet.place_on("a", Prompt(300_000, exact=True), Wish("giant", now_s, streaming=False), now_s)
    fleet.set_draining("b", True)
    for number in range(2200):
        wish = Wish(f"r-{number}", now_s, max_queue_wait_s=5.0)
        assert isinstance(fleet.place("m", Prompt(100, exact=True), wish, now_s), Refusal)
    more: list[bool] = []
    told: list[int] = []
    for _ in range(3):
        more.append(desk.ledger.look_back())
        told.append(len(desk.filter.log.of("refusal_graded")))
    assert more == [True, True, False]
    assert told == [1000, 2000, 2200]
    assert {line["verdict"] for line in desk.filter.log.of("refusal_graded")} == {"unknown"}
    assert desk.filter.counted("refusals_graded", verdict="unknown") == 2200
