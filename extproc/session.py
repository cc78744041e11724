"""One exchange with Envoy as a pure state machine: events in, actions out. No I/O, no clock.

Envoy calls a filter in the way that it is configured to, and says how in its first message. Three ways let us decide:

* BUFFERED: headers, then the whole body in one piece; the decision answers the body.
* FULL_DUPLEX_STREAMED: the body comes in pieces, none of which may be kept: headers are answered late, with the
  decision, and then every piece is sent back.
* Without a usable body (NONE, STREAMED, whose headers have to be answered before the body comes): the decision answers
  the headers, by load alone.

With the first token of a STREAMED answer the stream is closed, and Envoy passes the rest without us; an answer in full
duplex has to be sent back to its end. Nor is it closed while pieces of the request may be on their way: Envoy 1.40,
where its route retries, would send the engine twice what it had sent so far (envoy#36119). An event that a state does
not expect is answered with a plain "go on", so that an Envoy configured in yet another way is never left waiting.
"""

from __future__ import annotations

import enum

import msgspec

from extproc.answer import AnswerKind, AnswerReader
from extproc.apis import Api, find_api
from extproc.exchange import (
    NOTHING,
    BodyMode,
    Continue,
    Echo,
    Event,
    Headers,
    Metadata,
    MoreTime,
    Phase,
    Protocol,
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
from extproc.replies import DESTINATION, LB_NAMESPACE, PAYLOAD_TOO_LARGE, VIA_UPSTREAM

# Envoy's flow control wants pieces below 64 KiB, framing included.
PIECE_BYTES = 62_000
# What is kept of a body that comes in pieces; Envoy's own limit (envoy/envoy.yaml) does not hold in full duplex.
MAX_BODY_BYTES = 64 << 20

_DEFAULT_PROTOCOL = Protocol(BodyMode.BUFFERED, BodyMode.STREAMED)


class State(enum.Enum):
    IDLE = "idle"  # nothing has come yet
    AWAIT_BODY = "await_body"
    DECIDING = "deciding"  # the body is complete, the decision is not
    AWAIT_ANSWER = "await_answer"  # routed: the first token is still to come
    RELAY = "relay"  # nothing is left to decide or to see, but pieces are on their way here
    CLOSED = "closed"


class Passed(enum.Enum):
    """Why a request goes on without a decision of ours."""

    NOT_OURS = "not_ours"  # another path or method
    NO_BODY = "no_body"
    DECIDED_BEFORE = "decided_before"  # an endpoint picker before us in the chain has chosen
    TOO_LARGE = "too_large"  # more body than is kept
    UNREADABLE = "unreadable"  # malformed: the engine's to answer
    UNKNOWN_MODEL = "unknown_model"
    BUG = "bug"


# Verdicts: what the judge says of a request.


class Route(msgspec.Struct, frozen=True, gc=False):
    reply: Continue
    body: bytes | None = None  # to go on instead of the one that came


class Reject(msgspec.Struct, frozen=True, gc=False):
    reply: Refuse


class Pass(msgspec.Struct, frozen=True, gc=False):
    reason: Passed


Verdict = Route | Reject | Pass


# Actions: what the server is to do, in order.


class Send(msgspec.Struct, frozen=True, gc=False):
    reply: Reply


class Decide(msgspec.Struct, frozen=True, gc=False):
    """Ask the judge, and hand its verdict to `Session.decided`."""

    api: Api
    headers: Headers
    body: bytes | None  # None: it will not be seen
    metadata: Metadata = msgspec.field(default_factory=lambda: NOTHING)
    complete: bool = True  # False: Envoy sent only its beginning
    answer_seen: bool = True  # False: no first token will be seen
    patient: bool = False  # it may take longer than others


class Answered(msgspec.Struct, frozen=True, gc=False):
    """The answer has begun. `kind` STREAMED means that the first token is here."""

    kind: AnswerKind
    status: int | None
    served_endpoint: str | None
    details: str | None = None


class Note(msgspec.Struct, frozen=True, gc=False):
    """Count a request that goes on without a decision."""

    reason: Passed


class Close(msgspec.Struct, frozen=True, gc=False):
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


_GO_ON = {kind: Send(Continue(phase)) for kind, phase in _PHASES.items()}


class Patience(msgspec.Struct, frozen=True):
    """For bodies of `body_bytes` or more, Envoy is asked to wait `timeout_s` for the decision; with `always` for every
    request, since any may be held."""

    body_bytes: int
    timeout_s: float
    always: bool = False


class Session:
    """One gRPC stream's worth of an exchange.

    `ask_for_body` asks an Envoy that sends no bodies to send this one (`allow_mode_override` must be set there).
    """

    def __init__(self, ask_for_body: bool = False, patience: Patience | None = None) -> None:
        self.state = State.IDLE
        self._ask_for_body = ask_for_body
        self._patience = patience
        self._protocol = _DEFAULT_PROTOCOL
        self._api: Api | None = None
        self._headers = Headers()
        self._metadata: Metadata = {}
        self._pieces: list[bytes] = []
        self._size = 0
        self._trailers = False  # the request ended with trailers
        self._uploading = False  # more of the request may come
        self._decision_phase = Phase.REQUEST_BODY
        self._answer = AnswerReader()
        self._answer_known = False
        self._served_endpoint: str | None = None
        self._status: int | None = None
        self._details: str | None = None

    def on_event(self, event: Event) -> list[Action]:
        state = self.state
        if state is State.CLOSED:
            return []
        self._note_upload(event)
        # By the event first: of many cases, few are looked at.
        match event:
            case ResponseBody() if state is State.AWAIT_ANSWER:
                return self._answer_came(event)
            case RequestBody() if state is State.AWAIT_BODY:
                return self._body_came(event)
            case RequestHeaders() if state is State.IDLE:
                return self._headers_came(event)
            case ResponseHeaders() if state is State.IDLE:
                return self._answered_before_us(event)
            case ResponseHeaders() if state is State.AWAIT_ANSWER:
                return self._answer_began(event)
            case ResponseTrailers() if state is State.AWAIT_ANSWER:
                return self._answer_known_as(self._answer.feed(b"", self._status, end_of_stream=True), event)
            case RequestTrailers() if state is State.AWAIT_BODY and self._duplex_request:
                self._trailers = True
                return self._decide(b"".join(self._pieces))
            case ResponseHeaders() | ResponseBody() if state is State.AWAIT_BODY and not self._duplex_request:
                return self._answered_without_body(event)
            case ResponseHeaders() | ResponseBody() | ResponseTrailers() if state is State.RELAY and self._may_close:
                return [*self._go_on(event), *self._close()]
            case Unknown():
                return []
        return self._go_on(event)

    def decided(self, verdict: Verdict) -> list[Action]:
        """The judge's verdict on what `Decide` asked."""
        if self.state is not State.DECIDING:
            return []
        match verdict:
            case Route(reply, body):
                self.state = State.AWAIT_ANSWER
                if body is not None:
                    reply = self._with_body(reply, body)
                actions: list[Action] = [
                    Send(msgspec.structs.replace(reply, phase=self._decision_phase)),
                    *self._send_back(),
                ]
                if self._protocol.response_body is BodyMode.NONE:
                    # First, since Envoy ends the stream as soon as it has what it waits for.
                    return [Answered(AnswerKind.UNSEEN, None, None), *actions]
                return actions
            case Reject(reply):
                return [Send(reply), *self._close()]
            case Pass(reason):
                return self._pass(self._decision_phase, reason)

    def _with_body(self, reply: Continue, body: bytes) -> Continue:
        """Another body goes on, as long as the headers say: Envoy compares, and would send one without a length."""
        if self._headers.get("content-length") is not None:
            length = ("content-length", str(len(body)))
            reply = msgspec.structs.replace(reply, set_headers=(*reply.set_headers, length))
        if not self._duplex_request:
            return msgspec.structs.replace(reply, body=body)
        self._pieces = [body]
        return reply

    @property
    def _duplex_request(self) -> bool:
        return self._protocol.request_body is BodyMode.FULL_DUPLEX_STREAMED

    @property
    def _duplex_response(self) -> bool:
        return self._protocol.response_body is BodyMode.FULL_DUPLEX_STREAMED

    @property
    def _may_close(self) -> bool:
        """Whether Envoy can go on without us: not while pieces are on their way here."""
        return not self._uploading and not self._duplex_response

    def _note_upload(self, event: Event) -> None:
        match event:
            case RequestHeaders(_, end, protocol):
                mode = (protocol or _DEFAULT_PROTOCOL).request_body
                self._uploading = not end and mode not in (BodyMode.NONE, BodyMode.BUFFERED)
            case RequestBody(_, end) if end or self._protocol.request_body is BodyMode.BUFFERED_PARTIAL:
                self._uploading = False
            case RequestTrailers():
                self._uploading = False

    def _headers_came(self, event: RequestHeaders) -> list[Action]:
        self._protocol = event.protocol or _DEFAULT_PROTOCOL
        self._headers, self._metadata = event.headers, event.metadata
        self._api = find_api(event.headers.get(":method"), event.headers.get(":path"))
        if self._api is None:
            if self._protocol.request_body in (BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL) and _talks(event.headers):
                # Envoy would hold it back until its end. While it does, nothing can be on its way here.
                return [Note(Passed.NOT_OURS), Send(Continue(Phase.REQUEST_HEADERS)), *self._close()]
            return self._pass(Phase.REQUEST_HEADERS, Passed.NOT_OURS)
        if event.end_of_stream:
            return self._pass(Phase.REQUEST_HEADERS, Passed.NO_BODY)
        if DESTINATION in event.metadata.get(LB_NAMESPACE, {}):
            return self._pass(Phase.REQUEST_HEADERS, Passed.DECIDED_BEFORE)
        match self._protocol.request_body:
            case BodyMode.BUFFERED | BodyMode.BUFFERED_PARTIAL:
                self.state = State.AWAIT_BODY
                return [Send(Continue(Phase.REQUEST_HEADERS))]
            case BodyMode.FULL_DUPLEX_STREAMED:
                # Answered with the decision, which needs the body.
                self.state = State.AWAIT_BODY
                self._decision_phase = Phase.REQUEST_HEADERS
                return []
            case BodyMode.NONE if self._ask_for_body:
                self._protocol = _DEFAULT_PROTOCOL
                self.state = State.AWAIT_BODY
                return [Send(Continue(Phase.REQUEST_HEADERS, body_modes=_DEFAULT_PROTOCOL))]
            case _:
                self._decision_phase = Phase.REQUEST_HEADERS
                return self._decide(None)

    def _answered_before_us(self, event: ResponseHeaders) -> list[Action]:
        """A filter before us in the chain, say one that checks credentials, has refused the request by itself."""
        self._protocol = event.protocol or _DEFAULT_PROTOCOL
        self.state = State.RELAY
        actions = self._go_on(event)
        return [*actions, *self._close()] if self._may_close else actions

    def _body_came(self, event: RequestBody) -> list[Action]:
        if not self._duplex_request:
            # A BUFFERED body is whole even where it does not say so, because trailers follow.
            whole = event.end_of_stream or self._protocol.request_body is BodyMode.BUFFERED
            return self._decide(event.body, complete=whole)
        self._pieces.append(event.body)
        self._size += len(event.body)
        if self._size > MAX_BODY_BYTES:
            actions = self._pass(Phase.REQUEST_HEADERS, Passed.TOO_LARGE, more_follows=not event.end_of_stream)
            self._pieces.clear()
            return actions
        return self._decide(b"".join(self._pieces)) if event.end_of_stream else []

    def _decide(self, body: bytes | None, complete: bool = True) -> list[Action]:
        assert self._api is not None
        self.state = State.DECIDING
        seen = self._protocol.response_body in (BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
        patience = self._patience
        patient = patience is not None and body is not None and len(body) >= patience.body_bytes
        decide = Decide(self._api, self._headers, body, self._metadata, complete, seen, patient)
        # Full duplex has no timeout to be lengthened.
        if patience is None or not (patient or patience.always) or self._duplex_request:
            return [decide]
        return [Send(MoreTime(patience.timeout_s)), decide]

    def _send_back(self, more_follows: bool = False) -> list[Action]:
        """The kept pieces of a full-duplex body, in order, and the trailers' answer where they ended it."""
        if not self._duplex_request:
            return []
        body = b"".join(self._pieces)
        self._pieces.clear()
        actions = _echo(Phase.REQUEST_BODY, body, end_of_stream=not self._trailers and not more_follows)
        if self._trailers:
            actions.append(Send(Continue(Phase.REQUEST_TRAILERS)))
        return actions

    def _answered_without_body(self, event: ResponseHeaders | ResponseBody) -> list[Action]:
        """A chunked upload that had nothing in it but trailers, an Envoy that was asked for a body and does not send
        it, or its own refusal of a body above its limit."""
        reason = Passed.TOO_LARGE if event.status == PAYLOAD_TOO_LARGE else Passed.NO_BODY
        self._uploading = False
        self.state = State.RELAY
        actions = [Note(reason), *self._go_on(event)]
        return [*actions, *self._close()] if self._may_close else actions

    def _note_answer(self, event: ResponseHeaders | ResponseBody) -> None:
        self._served_endpoint = event.served_endpoint or self._served_endpoint
        self._status = event.status if event.status is not None else self._status
        self._details = event.details or self._details

    def _answer_began(self, event: ResponseHeaders) -> list[Action]:
        self._note_answer(event)
        kind = self._answer.feed(b"", self._status, end_of_stream=True) if event.end_of_stream else None
        return self._answer_known_as(kind, event)

    def _answer_came(self, event: ResponseBody) -> list[Action]:
        self._note_answer(event)
        kind = self._answer.feed(event.chunk, self._status, event.end_of_stream)
        if kind is AnswerKind.STREAMED and self._protocol.response_body is BodyMode.BUFFERED:
            # The whole answer at once tells nothing of its first token.
            kind = AnswerKind.PLAIN
        return self._answer_known_as(kind, event)

    def _answer_known_as(self, kind: AnswerKind | None, event: Event) -> list[Action]:
        """Reports the kind once it is known: before anything is sent, so that the first token's time is right."""
        answered: list[Action] = []
        if self._details not in (None, VIA_UPSTREAM):
            kind = AnswerKind.UNANSWERED
        if kind is not None and not self._answer_known:
            self._answer_known = True
            answered = [Answered(kind, self._status, self._served_endpoint, self._details)]
        actions = answered + self._go_on(event)
        return [*actions, *self._close()] if self._answer_known and self._may_close else actions

    def _pass(self, phase: Phase, reason: Passed, more_follows: bool = False) -> list[Action]:
        actions: list[Action] = [Note(reason), Send(Continue(phase))]
        if self._duplex_request or not self._may_close:
            kept = self._send_back(more_follows) if self._pieces or self._trailers else []
            self.state = State.RELAY
            return [*actions, *kept]
        return [*actions, *self._close()]

    def _close(self) -> list[Action]:
        self.state = State.CLOSED
        return [Close()]

    def _go_on(self, event: Event) -> list[Action]:
        """The plain answer to an event: pieces of a full-duplex body are sent back."""
        match event:
            case RequestBody() if self._duplex_request:
                return _echo(Phase.REQUEST_BODY, event.body, event.end_of_stream)
            case ResponseBody() if self._duplex_response:
                return _echo(Phase.RESPONSE_BODY, event.chunk, event.end_of_stream)
        return [_GO_ON[type(event)]]


def _talks(headers: Headers) -> bool:
    """Whether the client goes on talking while it is answered: a WebSocket, a tunnel, a gRPC call."""
    content_type = headers.get("content-type") or ""
    return (
        headers.get("upgrade") is not None
        or headers.get(":method") == "CONNECT"
        or content_type.startswith("application/grpc")
    )


def _echo(phase: Phase, body: bytes, end_of_stream: bool) -> list[Action]:
    if len(body) <= PIECE_BYTES:
        return [Send(Echo(phase, body, end_of_stream))]
    starts = range(0, len(body), PIECE_BYTES)
    last = starts[-1]
    return [Send(Echo(phase, body[start : start + PIECE_BYTES], end_of_stream and start == last)) for start in starts]
