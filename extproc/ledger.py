"""Tickets between their stream and the access log, which come over different connections and in either order.

A ticket is booked by a decision. Its stream sees the first token; the access log reports the end, of a short request
sometimes before the stream has been read. So an end that comes while the stream is still open waits for it. Where the
stream ends without having shown an answer, the access log tells why: the client has left, or all of the answer was in
its headers. Where it does not tell in time, the request was given up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from extproc import request_log
from extproc.answer import AnswerKind
from extproc.exchange import RequestEnd
from extproc.log import JsonLog
from extproc.metrics import Metrics
from extproc.prompt_reader import PoolText
from extproc.recorder import Recorder
from extproc.replies import ENGINE_FULL, NAMESPACE, TICKET, UPSTREAM_LOST, VIA_UPSTREAM
from predictor.fleet import Fleet, Ticket, Usage

USAGE_NAMESPACE = "headway.usage"
# An engine that is full says nothing about when it will not be.
BACK_OFF_S = 2.0
# The access log reports an end within milliseconds; a ticket without one must not be held for long.
SILENT_S = 1.0
# Verdicts on refusals that are told before others have their turn: about a microsecond each.
_REVIEWS_A_TURN = 1000

_GIVEN_UP = "given_up"
_LEFT = "downstream_connection_termination"


@dataclass(slots=True)
class _Entry:
    text: PoolText
    body_bytes: int
    streaming: bool  # the ext_proc stream is still open
    end: RequestEnd | None = None  # reported while it was
    answered: bool = False  # the stream has shown what kind of answer it is
    full: bool = False  # the engine has said that it is, and that has been noted


class Ledger:
    """`clock` gives monotonic seconds."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        log: JsonLog,
        clock: Callable[[], float],
        recorder: Recorder | None = None,
    ) -> None:
        self._recorder = recorder
        self._fleet = fleet
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._silent_since_s: dict[str, float] = {}  # streams that showed no answer, oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def booked(self, ticket: Ticket, text: PoolText, body_bytes: int) -> None:
        self._entries[ticket.id] = _Entry(text, body_bytes, streaming=True)

    def answered(
        self,
        ticket_id: str,
        kind: AnswerKind,
        status: int | None = None,
        served_endpoint: str | None = None,
        details: str | None = None,
    ) -> None:
        """The answer's kind is known; for a streamed one, this is the first token."""
        entry = self._entries.get(ticket_id)
        if entry is not None:
            entry.answered = True
        if kind is not AnswerKind.STREAMED:
            self._metrics.ungraded.labels(kind.value).inc()
            if entry is not None:
                self._note_refusal(ticket_id, entry, status, details or VIA_UPSTREAM)
            return
        first = self._fleet.first_token(ticket_id, served_endpoint, self._clock())
        if first is None:
            return
        if self._recorder is not None:
            chosen, served = first.ticket.forecast.worker, first.ticket.worker
            # Served by one that is not ours, it is served by nobody we know.
            elsewhere = None if first.grade is not None else served if served != chosen else "elsewhere"
            self._recorder.first_token(ticket_id, elsewhere)
        if first.grade is None:
            self._metrics.ungraded.labels("served_elsewhere").inc()
            # The chosen engine refused the connection or said that it is full, and Envoy went on to the next. Nothing
            # else tells us: seen from here it is idle, and would be chosen again and again.
            self._fleet.back_off(first.ticket.forecast.worker, BACK_OFF_S, self._clock())
            return
        forecast, grade = first.ticket.forecast, first.grade
        self._metrics.grade(first.ticket.pool, first.ticket.worker, forecast.basis.value, grade)
        self._log.later("graded", request_log.graded, ticket_id, first.ticket.worker, grade)

    def _note_refusal(self, ticket_id: str, entry: _Entry, status: int | None, details: str) -> None:
        """An engine that is full, or cannot be reached, is spared; Envoy's other answers are no word of an engine."""
        full = status in ENGINE_FULL and details == VIA_UPSTREAM
        ticket = self._fleet.ticket(ticket_id)
        if entry.full or ticket is None or not (full or details.startswith(UPSTREAM_LOST)):
            return
        self._fleet.back_off(ticket.worker, BACK_OFF_S, self._clock())
        if full:
            entry.full = True
            self._metrics.engine_refusals.labels(ticket.pool, ticket.worker, str(status)).inc()

    def stream_closed(self, ticket_id: str, answered: bool) -> None:
        """The ext_proc stream is over; `answered` unless Envoy ended it before the answer's kind was known."""
        entry = self._entries.get(ticket_id)
        if entry is None:
            return
        entry.streaming = False
        if entry.end is not None:
            self._ended(ticket_id, entry, entry.end)
        elif not answered:
            self._silent_since_s[ticket_id] = self._clock()

    def give_up_silent(self, after_s: float = SILENT_S) -> None:
        """To be called now and then: ends what showed no answer and was not reported within `after_s`."""
        latest_s = self._clock() - after_s
        for ticket_id in [ticket_id for ticket_id, since_s in self._silent_since_s.items() if since_s <= latest_s]:
            self._metrics.ungraded.labels(_GIVEN_UP).inc()
            self._finish(ticket_id, Usage(), None, "stream")

    def request_ended(self, end: RequestEnd) -> None:
        """One access log entry; those of other requests than ours are counted and left."""
        ticket_id = end.metadata.get(NAMESPACE, {}).get(TICKET)
        if not end.final or not isinstance(ticket_id, str):
            self._metrics.access_log_entries.labels("intermediate" if not end.final else "untracked").inc()
            return
        entry = self._entries.get(ticket_id)
        self._metrics.access_log_entries.labels("tracked" if entry else "late").inc()
        if entry is None:
            return
        if entry.streaming:
            entry.end = end
        else:
            self._ended(ticket_id, entry, end)

    def given_up(self, tickets: Iterable[Ticket], source: str) -> None:
        """The fleet has released these by other evidence than the access log's."""
        for ticket in tickets:
            if self._recorder is not None:
                self._recorder.ended(ticket.id, Usage(), None, retried=False)
            if self._entries.pop(ticket.id, None) is not None:
                self._silent_since_s.pop(ticket.id, None)
                self._metrics.ended.labels(source).inc()

    def look_back(self) -> bool:
        """Tells what has become of refusals, and where admission has changed its mode because of it. True if there is
        more to be told, once others have had their turn: a burst of refusals is a burst of verdicts, too."""
        reviews = self._fleet.take_reviews(self._clock(), _REVIEWS_A_TURN)
        for pool, review in reviews:
            carried_out = request_log.carried_out(review)
            self._metrics.refusals_graded.labels(pool, review.reason.value, carried_out, review.verdict.value).inc()
            self._log.later("refusal_graded", request_log.reviewed, review)
        for pool, mode, rate in self._fleet.take_steps():
            self._metrics.admission_steps.labels(pool, mode.value).inc()
            # Whoever runs this has to know: until it steps up again, bounds are not kept by refusing.
            self._log("admission_stepped", pool=pool, to=mode.value, false_alarm_rate=round(rate, 3), level="warning")
        return len(reviews) == _REVIEWS_A_TURN

    def _ended(self, ticket_id: str, entry: _Entry, end: RequestEnd) -> None:
        if not entry.answered:
            self._metrics.ungraded.labels(_unseen_answer(end)).inc()
        self._note_refusal(ticket_id, entry, end.status, end.details)
        usage = _usage(end.metadata.get(USAGE_NAMESPACE, {}))
        self._finish(ticket_id, usage, end.status, "access_log", retried=end.attempts > 1)

    def _finish(self, ticket_id: str, usage: Usage, status: int | None, source: str, retried: bool = False) -> None:
        entry = self._entries.pop(ticket_id)
        self._silent_since_s.pop(ticket_id, None)
        if retried:
            self._metrics.retried.inc()
        ended = self._fleet.finish(ticket_id, usage, self._clock(), retried)
        if ended is None:
            return
        self._metrics.ended.labels(source).inc()
        if self._recorder is not None:
            self._recorder.ended(ticket_id, usage, status, retried)
        ticket = ended.ticket
        if ended.cache is not None:
            self._metrics.cache_verdict(ticket.pool, ticket.worker, ended.cache)
        if ended.learned_from:
            self._metrics.learned.labels(ticket.pool, ticket.worker).inc()
        if usage.prompt_tokens is not None:
            entry.text.learn_size(entry.body_bytes, usage.prompt_tokens)
        self._log.later("ended", request_log.ended, ended, status, source)


def _unseen_answer(end: RequestEnd) -> str:
    """What became of a request whose stream has shown no answer."""
    if end.status is None or _LEFT in end.flags:
        return _GIVEN_UP
    if end.details not in ("", VIA_UPSTREAM):
        return AnswerKind.UNANSWERED.value
    if end.status != 200:
        return AnswerKind.ERROR.value
    return _GIVEN_UP if end.body_bytes else AnswerKind.EMPTY.value


def _usage(reported: Mapping[str, object]) -> Usage:
    def tokens(key: str) -> int | None:
        value = reported.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return round(value) if 0 <= value < 1e12 else None

    prompt, cached = tokens("prompt"), tokens("cached")
    if prompt is None and (fresh := tokens("input")) is not None:
        # Anthropic's way: what was computed, read from the cache and written to it together make up the prompt.
        cached = tokens("cache_read")
        prompt = fresh + (cached or 0) + (tokens("cache_written") or 0)
    return Usage(prompt, cached, tokens("output"))
