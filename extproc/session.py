"""One exchange with Envoy as a pure state machine: events in, actions out. No I/O, no clock.

The order of a decided request: headers, the whole body, our decision, the first chunks of the answer. With its first
token the stream is closed, and Envoy passes the rest without us. An event that a state does not expect is answered
with a plain "go on", so that an Envoy configured in another way than we advise is never left waiting.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from extproc.answer import AnswerKind, AnswerReader
from extproc.apis import Api, find_api
from extproc.exchange import (
    Continue,
    Event,
    Headers,
    Phase,
    Refuse,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Unknown,
)


class State(enum.Enum):
    IDLE = "idle"  # nothing has come yet
    AWAIT_BODY = "await_body"
    DECIDING = "deciding"  # the body is complete, the decision is not
    AWAIT_ANSWER = "await_answer"  # routed: the first token is still to come
    CLOSED = "closed"


class Passed(enum.Enum):
    """Why a request goes on without a decision of ours."""

    NOT_OURS = "not_ours"  # another path or method
    NO_BODY = "no_body"
    PARTIAL_BODY = "partial_body"  # a body mode in which the decision would come too late
    UNREADABLE = "unreadable"  # malformed: the engine's to answer
    UNKNOWN_MODEL = "unknown_model"
    BUG = "bug"


# Verdicts: what the judge says of a request.


@dataclass(frozen=True, slots=True)
class Route:
    reply: Continue


@dataclass(frozen=True, slots=True)
class Reject:
    reply: Refuse


@dataclass(frozen=True, slots=True)
class Pass:
    reason: Passed


Verdict = Route | Reject | Pass


# Actions: what the server is to do, in order.


@dataclass(frozen=True, slots=True)
class Send:
    reply: Reply


@dataclass(frozen=True, slots=True)
class Decide:
    """Ask the judge, and hand its verdict to `Session.decided`."""

    api: Api
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer has begun. `kind` STREAMED means that the first token is here."""

    kind: AnswerKind
    status: int | None
    served_endpoint: str | None


@dataclass(frozen=True, slots=True)
class Note:
    """Count a request that goes on without a decision."""

    reason: Passed


@dataclass(frozen=True, slots=True)
class Close:
    """End the stream with OK: Envoy goes on without us."""


Action = Send | Decide | Answered | Note | Close

_PHASES: dict[type[Event], Phase] = {
    RequestHeaders: Phase.REQUEST_HEADERS,
    RequestBody: Phase.REQUEST_BODY,
    RequestTrailers: Phase.REQUEST_TRAILERS,
    ResponseHeaders: Phase.RESPONSE_HEADERS,
    ResponseBody: Phase.RESPONSE_BODY,
    ResponseTrailers: Phase.RESPONSE_TRAILERS,
}


class Session:
    """One gRPC stream's worth of an exchange."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self._api: Api | None = None
        self._headers: Headers | None = None
        self._answer = AnswerReader()
        self._served_endpoint: str | None = None
        self._status: int | None = None

    def on_event(self, event: Event) -> list[Action]:
        if self.state is State.CLOSED:
            return []
        match self.state, event:
            case State.IDLE, RequestHeaders():
                return self._headers_came(event)
            case State.AWAIT_BODY, RequestBody():
                return self._body_came(event)
            case State.AWAIT_ANSWER, ResponseHeaders():
                return self._answer_began(event)
            case State.AWAIT_ANSWER, ResponseBody():
                return self._answer_came(event)
            case _, Unknown():
                return []
        return [Send(Continue(_PHASES[type(event)]))]

    def decided(self, verdict: Verdict) -> list[Action]:
        """The judge's verdict on what `Decide` asked."""
        if self.state is not State.DECIDING:
            return []
        match verdict:
            case Route(reply):
                self.state = State.AWAIT_ANSWER
                return [Send(reply)]
            case Reject(reply):
                self.state = State.CLOSED
                return [Send(reply), Close()]
            case Pass(reason):
                return self._pass(Phase.REQUEST_BODY, reason)

    def _headers_came(self, event: RequestHeaders) -> list[Action]:
        api = find_api(event.headers.get(":method"), event.headers.get(":path"))
        if api is None:
            return self._pass(Phase.REQUEST_HEADERS, Passed.NOT_OURS)
        if event.end_of_stream:
            return self._pass(Phase.REQUEST_HEADERS, Passed.NO_BODY)
        self._api, self._headers = api, event.headers
        self.state = State.AWAIT_BODY
        return [Send(Continue(Phase.REQUEST_HEADERS))]

    def _body_came(self, event: RequestBody) -> list[Action]:
        if not event.end_of_stream:
            return self._pass(Phase.REQUEST_BODY, Passed.PARTIAL_BODY)
        assert self._api is not None
        assert self._headers is not None
        self.state = State.DECIDING
        return [Decide(self._api, self._headers, event.body)]

    def _answer_began(self, event: ResponseHeaders) -> list[Action]:
        self._served_endpoint = event.served_endpoint or self._served_endpoint
        self._status = event.status if event.status is not None else self._status
        actions: list[Action] = [Send(Continue(Phase.RESPONSE_HEADERS))]
        if event.end_of_stream:
            kind = self._answer.feed(b"", self._status, end_of_stream=True)
            assert kind is not None
            actions += self._close_with(kind)
        return actions

    def _answer_came(self, event: ResponseBody) -> list[Action]:
        self._served_endpoint = event.served_endpoint or self._served_endpoint
        self._status = event.status if event.status is not None else self._status
        kind = self._answer.feed(event.chunk, self._status, event.end_of_stream)
        send = Send(Continue(Phase.RESPONSE_BODY))
        if kind is None:
            return [send]
        # The first token's time is taken before anything else is done.
        answered, close = self._close_with(kind)
        return [answered, send, close]

    def _close_with(self, kind: AnswerKind) -> list[Action]:
        self.state = State.CLOSED
        return [Answered(kind, self._status, self._served_endpoint), Close()]

    def _pass(self, phase: Phase, reason: Passed) -> list[Action]:
        self.state = State.CLOSED
        return [Note(reason), Send(Continue(phase)), Close()]
