"""The session: every event in every state, and the ways that exchanges go."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.answer import AnswerKind
from extproc.apis import openai_chat, openai_completions
from extproc.exchange import (
    NOTHING,
    BodyMode,
    Continue,
    Echo,
    Event,
    Headers,
    MoreTime,
    Phase,
    Protocol,
    Refuse,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Unknown,
)
from extproc.session import (
    PIECE_BYTES,
    Action,
    Answered,
    Close,
    Decide,
    Note,
    Pass,
    Passed,
    Patience,
    Reject,
    Route,
    Send,
    Session,
    State,
    Verdict,
)

ROUTE = Route(Continue(Phase.REQUEST_BODY, set_headers=(("to", "10.0.0.1:8000"),)))
REJECT = Reject(Refuse(429, (), b"{}", "full"))
PASS = Pass(Passed.UNKNOWN_MODEL)
TOKEN = b'data: {"choices":[{}]}\n\n'


DUPLEX = Protocol(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


def headers(
    method: str = "POST",
    path: str = "/v1/chat/completions",
    end_of_stream: bool = False,
    protocol: Protocol | None = None,
) -> RequestHeaders:
    return RequestHeaders(Headers([(":method", method), (":path", path)]), end_of_stream, protocol, NOTHING, NOTHING)


def body(content: bytes = b"{}", end_of_stream: bool = True) -> RequestBody:
    return RequestBody(content, end_of_stream)


def answer(chunk: bytes, end_of_stream: bool = False, status: int | None = 200) -> ResponseBody:
    return ResponseBody(chunk, end_of_stream, status, None)


def answer_headers(status: int | None = 200, end_of_stream: bool = False) -> ResponseHeaders:
    return ResponseHeaders(Headers(), end_of_stream, status, "10.0.0.1:8000")


EVENTS: tuple[Event, ...] = (
    headers(),
    body(),
    RequestTrailers(),
    answer_headers(),
    answer(TOKEN),
    ResponseTrailers(),
    Unknown(),
)
PHASES: dict[type[Event], Phase] = {
    RequestHeaders: Phase.REQUEST_HEADERS,
    RequestBody: Phase.REQUEST_BODY,
    RequestTrailers: Phase.REQUEST_TRAILERS,
    ResponseHeaders: Phase.RESPONSE_HEADERS,
    ResponseBody: Phase.RESPONSE_BODY,
    ResponseTrailers: Phase.RESPONSE_TRAILERS,
}


def session_in(state: State) -> Session:
    session = Session()
    if state is State.CLOSED:
        session.on_event(headers(method="GET"))
    elif state is State.RELAY:
        session.on_event(headers(method="GET", protocol=DUPLEX))
    elif state is not State.IDLE:
        session.on_event(headers())
        if state is not State.AWAIT_BODY:
            session.on_event(body())
            if state is State.AWAIT_ANSWER:
                session.decided(ROUTE)
    assert session.state is state
    return session


def go_on(phase: Phase) -> list[Action]:
    return [Send(Continue(phase))]


# What is not "a plain go-on" in the table of states and events.
SPECIAL: dict[tuple[State, type[Event]], list[Action]] = {
    (State.IDLE, ResponseHeaders): [Send(Continue(Phase.RESPONSE_HEADERS)), Close()],
    (State.AWAIT_BODY, RequestBody): [Decide(openai_chat.API, headers().headers, b"{}")],
    (State.AWAIT_BODY, ResponseHeaders): [
        Note(Passed.NO_BODY),
        Send(Continue(Phase.RESPONSE_HEADERS)),
        Close(),
    ],
    (State.AWAIT_BODY, ResponseBody): [Note(Passed.NO_BODY), Send(Continue(Phase.RESPONSE_BODY)), Close()],
    (State.AWAIT_ANSWER, ResponseBody): [
        Answered(AnswerKind.STREAMED, 200, None),
        Send(Continue(Phase.RESPONSE_BODY)),
        Close(),
    ],
    (State.AWAIT_ANSWER, ResponseTrailers): [
        Answered(AnswerKind.EMPTY, None, None),
        Send(Continue(Phase.RESPONSE_TRAILERS)),
        Close(),
    ],
    (State.RELAY, RequestBody): [Send(Echo(Phase.REQUEST_BODY, b"{}", end_of_stream=True))],
    (State.RELAY, ResponseBody): [Send(Echo(Phase.RESPONSE_BODY, TOKEN, end_of_stream=False))],
}
AFTER = {
    (State.IDLE, RequestHeaders): State.AWAIT_BODY,
    (State.IDLE, ResponseHeaders): State.CLOSED,
    (State.AWAIT_BODY, RequestBody): State.DECIDING,
    (State.AWAIT_BODY, ResponseHeaders): State.CLOSED,
    (State.AWAIT_BODY, ResponseBody): State.CLOSED,
    (State.AWAIT_ANSWER, ResponseBody): State.CLOSED,
    (State.AWAIT_ANSWER, ResponseTrailers): State.CLOSED,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, EVENTS)))
def test_every_event_in_every_state(state: State, event: Event) -> None:
    session = session_in(state)
    actions = session.on_event(event)
    if state is State.CLOSED or isinstance(event, Unknown):
        assert actions == []
    else:
        assert actions == SPECIAL.get((state, type(event)), go_on(PHASES.get(type(event), Phase.REQUEST_BODY)))
    assert session.state is AFTER.get((state, type(event)), state)


@pytest.mark.parametrize("state", [state for state in State if state is not State.DECIDING])
@pytest.mark.parametrize("verdict", [ROUTE, REJECT, PASS])
def test_a_verdict_that_nobody_asked_for_is_ignored(state: State, verdict: Verdict) -> None:
    session = session_in(state)
    assert session.decided(verdict) == []
    assert session.state is state


ANY_EVENTS = st.one_of(
    st.builds(
        headers,
        st.sampled_from(["POST", "GET"]),
        st.sampled_from(["/v1/completions", "/v1/chat/completions?x=1", "/health"]),
        st.booleans(),
    ),
    st.builds(body, st.binary(max_size=4), st.booleans()),
    st.builds(
        answer,
        st.sampled_from([b"", b"dat", b"a: x", b": hi\n", TOKEN, b'{"id":1}']),
        st.booleans(),
        st.sampled_from([None, 200, 404]),
    ),
    st.builds(answer_headers, st.sampled_from([None, 200, 500]), st.booleans()),
    st.sampled_from([RequestTrailers(), ResponseTrailers(), Unknown()]),
)


STEPS = st.lists(st.tuples(ANY_EVENTS, st.sampled_from([ROUTE, REJECT, PASS, None])), max_size=12)
# Half of the walks begin with a request that will be decided.
DECIDED = st.tuples(
    st.just((headers(), None)), st.tuples(st.just(body()), st.sampled_from([ROUTE, ROUTE, REJECT, PASS]))
)


@given(STEPS | st.builds(lambda begun, rest: [*begun, *rest], DECIDED, STEPS))
def test_no_walk_breaks_a_promise_to_envoy(walk: list[tuple[Event, Verdict | None]]) -> None:
    session = Session()
    answered = closed = 0
    whole_body = False
    for event, verdict in walk:
        silent = session.state is State.CLOSED
        actions = session.on_event(event)
        if any(isinstance(action, Decide) for action in actions):
            whole_body = isinstance(event, RequestBody)
            assert whole_body
            assert len(actions) == 1
            # None: the judge's answer never comes, as after a cancelled stream.
            actions = session.decided(verdict) if verdict is not None else []
            if verdict is None:
                return
        sends = [action.reply for action in actions if isinstance(action, Send)]
        if silent or isinstance(event, Unknown):
            assert actions == []
        else:
            (reply,) = sends
            assert not isinstance(reply, MoreTime)
            assert isinstance(reply, Refuse) or reply.phase is PHASES[type(event)]
        answered += sum(isinstance(action, Answered) for action in actions)
        closed += sum(isinstance(action, Close) for action in actions)
        assert all(not isinstance(action, Close) for action in actions[:-1])
        assert (session.state is State.CLOSED) == (closed == 1)
        if any(isinstance(reply, Refuse) or (isinstance(reply, Continue) and reply.set_headers) for reply in sends):
            assert whole_body
    assert answered <= 1
    assert closed <= 1


def test_the_happy_path() -> None:
    session = Session()
    assert session.on_event(headers(path="/v1/completions?trace=1")) == go_on(Phase.REQUEST_HEADERS)
    (decide,) = session.on_event(body(b'{"model":"m"}'))
    assert isinstance(decide, Decide)
    assert (decide.api, decide.body) == (openai_completions.API, b'{"model":"m"}')
    assert decide.headers.get(":path") == "/v1/completions?trace=1"
    assert session.decided(ROUTE) == [Send(ROUTE.reply)]
    assert session.on_event(answer_headers()) == go_on(Phase.RESPONSE_HEADERS)
    assert session.on_event(answer(TOKEN, status=None)) == [
        Answered(AnswerKind.STREAMED, 200, "10.0.0.1:8000"),
        Send(Continue(Phase.RESPONSE_BODY)),
        Close(),
    ]


@pytest.mark.parametrize(
    "event",
    [
        headers(method="GET"),
        headers(path="/v1/models"),
        headers(path="/v1/chat/completions/"),
        headers(path="/x?/v1/completions"),
        headers(method="post"),
        RequestHeaders(Headers(), False, None, NOTHING, NOTHING),
    ],
)
def test_what_is_none_of_our_business_is_let_go_at_once(event: RequestHeaders) -> None:
    assert Session().on_event(event) == [Note(Passed.NOT_OURS), *go_on(Phase.REQUEST_HEADERS), Close()]


def test_a_post_without_a_body_is_let_go() -> None:
    actions = Session().on_event(headers(end_of_stream=True))
    assert actions == [Note(Passed.NO_BODY), *go_on(Phase.REQUEST_HEADERS), Close()]


def test_a_buffered_body_is_whole_even_where_trailers_follow_it() -> None:
    (decide,) = session_in(State.AWAIT_BODY).on_event(body(end_of_stream=False))
    assert isinstance(decide, Decide)
    assert decide.complete


def test_the_beginning_of_a_body_is_known_for_what_it_is() -> None:
    session = Session()
    session.on_event(headers(protocol=Protocol(BodyMode.BUFFERED_PARTIAL, BodyMode.STREAMED)))
    (decide,) = session.on_event(body(end_of_stream=False))
    assert isinstance(decide, Decide)
    assert not decide.complete


STREAMED = Protocol(BodyMode.STREAMED, BodyMode.STREAMED)
PARTIAL = Protocol(BodyMode.BUFFERED_PARTIAL, BodyMode.STREAMED)


def test_the_stream_stays_open_while_a_foreign_upload_comes_in_pieces() -> None:
    """Closing it earlier would make Envoy send the upstream some of the body twice."""
    session = Session()
    assert session.on_event(headers(path="/v1/files", protocol=STREAMED)) == [
        Note(Passed.NOT_OURS),
        *go_on(Phase.REQUEST_HEADERS),
    ]
    for end in (False, False, True):
        assert session.on_event(body(end_of_stream=end)) == go_on(Phase.REQUEST_BODY)
    assert session.on_event(answer(b"x")) == [*go_on(Phase.RESPONSE_BODY), Close()]


def test_an_answer_before_the_end_of_the_upload_does_not_close_it_either() -> None:
    session = Session()
    session.on_event(headers(path="/v1/files", protocol=STREAMED))
    assert session.on_event(answer(b"x")) == go_on(Phase.RESPONSE_BODY)
    assert session.on_event(RequestTrailers()) == go_on(Phase.REQUEST_TRAILERS)
    assert session.on_event(answer(b"x")) == [*go_on(Phase.RESPONSE_BODY), Close()]


def test_nor_does_a_first_token_before_the_end_of_the_upload() -> None:
    session = Session()
    session.on_event(headers(protocol=STREAMED))
    session.decided(ROUTE)
    assert session.on_event(answer(TOKEN)) == [
        Answered(AnswerKind.STREAMED, 200, None),
        *go_on(Phase.RESPONSE_BODY),
    ]
    assert session.on_event(body()) == go_on(Phase.REQUEST_BODY)
    assert session.on_event(answer(TOKEN)) == [*go_on(Phase.RESPONSE_BODY), Close()]


def test_of_a_partial_body_nothing_more_comes_after_its_beginning() -> None:
    session = Session()
    assert session.on_event(headers(path="/v1/files", protocol=PARTIAL))[-1] != Close()
    assert session.on_event(body(end_of_stream=False)) == go_on(Phase.REQUEST_BODY)
    assert session.on_event(answer(b"x")) == [*go_on(Phase.RESPONSE_BODY), Close()]


@pytest.mark.parametrize("named", [("upgrade", "websocket"), ("content-type", "application/grpc+proto")])
@pytest.mark.parametrize("request_body", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
@pytest.mark.parametrize("response_body", [BodyMode.STREAMED, BodyMode.FULL_DUPLEX_STREAMED])
def test_a_conversation_is_let_go_before_envoy_waits_for_its_end(
    named: tuple[str, str], request_body: BodyMode, response_body: BodyMode
) -> None:
    came = Headers([(":method", "POST"), (":path", "/talk"), named])
    event = RequestHeaders(came, False, Protocol(request_body, response_body), NOTHING, NOTHING)
    assert Session().on_event(event) == [Note(Passed.NOT_OURS), *go_on(Phase.REQUEST_HEADERS), Close()]


@pytest.mark.parametrize("protocol", [STREAMED, PARTIAL])
def test_without_an_upload_there_is_nothing_to_stay_for(protocol: Protocol) -> None:
    assert Session().on_event(headers(path="/v1/files", end_of_stream=True, protocol=protocol))[-1] == Close()


@pytest.mark.parametrize(("status", "reason"), [(200, Passed.NO_BODY), (413, Passed.TOO_LARGE)])
@pytest.mark.parametrize("by_headers", [False, True])
def test_an_answer_to_a_body_that_never_came(status: int, reason: Passed, by_headers: bool) -> None:
    event = answer_headers(status) if by_headers else answer(b"x", status=status)
    assert session_in(State.AWAIT_BODY).on_event(event) == [Note(reason), *go_on(PHASES[type(event)]), Close()]


def test_a_refusal_ends_the_exchange() -> None:
    session = session_in(State.DECIDING)
    assert session.decided(REJECT) == [Send(REJECT.reply), Close()]
    assert session.state is State.CLOSED


@pytest.mark.parametrize("reason", [Passed.UNREADABLE, Passed.UNKNOWN_MODEL])
def test_what_cannot_be_decided_goes_on_and_is_counted(reason: Passed) -> None:
    actions = session_in(State.DECIDING).decided(Pass(reason))
    assert actions == [Note(reason), *go_on(Phase.REQUEST_BODY), Close()]


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (answer(b'{"error":{}}', status=404), AnswerKind.ERROR),
        (answer(TOKEN, status=503), AnswerKind.ERROR),
        (answer(b'{"id":"x"}'), AnswerKind.PLAIN),
        (answer(b"", end_of_stream=True), AnswerKind.EMPTY),
    ],
)
def test_answers_that_are_no_stream_end_it_too(event: ResponseBody, kind: AnswerKind) -> None:
    assert session_in(State.AWAIT_ANSWER).on_event(event) == [
        Answered(kind, event.status, None),
        Send(Continue(Phase.RESPONSE_BODY)),
        Close(),
    ]


@pytest.mark.parametrize("details", ["no_healthy_upstream", "upstream_reset_before_response_started{overflow}"])
@pytest.mark.parametrize("chunk", [b"no healthy upstream", TOKEN, b""])
def test_envoys_own_words_are_no_answer_of_an_engine(details: str, chunk: bytes) -> None:
    event = ResponseBody(chunk, True, 503, None, details)
    assert session_in(State.AWAIT_ANSWER).on_event(event) == [
        Answered(AnswerKind.UNANSWERED, 503, None, details),
        Send(Continue(Phase.RESPONSE_BODY)),
        Close(),
    ]
    headed = ResponseHeaders(Headers(), False, 503, None, details)
    assert session_in(State.AWAIT_ANSWER).on_event(headed)[0] == Answered(AnswerKind.UNANSWERED, 503, None, details)


def test_an_answer_by_way_of_the_upstream_is_the_engines() -> None:
    told = session_in(State.AWAIT_ANSWER).on_event(ResponseBody(b"full", True, 503, None, "via_upstream"))
    assert told[0] == Answered(AnswerKind.ERROR, 503, None, "via_upstream")


def test_an_answer_of_a_filter_before_us_is_sent_back_whole_in_full_duplex() -> None:
    """Its headers are then the first message, and tell the modes."""
    session = Session()
    first = ResponseHeaders(Headers(), False, 401, None, "lua_response", DUPLEX)
    assert session.on_event(first) == go_on(Phase.RESPONSE_HEADERS)
    piece = ResponseBody(b"denied", False, None, None)
    assert session.on_event(piece) == [Send(Echo(Phase.RESPONSE_BODY, b"denied", end_of_stream=False))]
    assert session.on_event(replace(piece, chunk=b"", end_of_stream=True)) == [
        Send(Echo(Phase.RESPONSE_BODY, b"", end_of_stream=True))
    ]


@pytest.mark.parametrize("mode", BodyMode)
def test_who_comes_after_another_picker_stays_out_of_its_way(mode: BodyMode) -> None:
    """Metadata tells, which no client can write."""
    chosen = {"envoy.lb": {"x-gateway-destination-endpoint": "10.0.0.1:8000"}}
    protocol = Protocol(mode, BodyMode.STREAMED)
    first = replace(headers(protocol=protocol), metadata=chosen)
    session = Session()
    assert session.on_event(first)[:2] == [Note(Passed.DECIDED_BEFORE), *go_on(Phase.REQUEST_HEADERS)]
    assert not any(isinstance(action, Decide) for action in session.on_event(body()))


@pytest.mark.parametrize(("size", "more_time"), [(99, False), (100, True), (101, True)])
def test_for_a_large_body_more_time_is_asked_for_before_anything_is_decided(size: int, more_time: bool) -> None:
    session = Session(patience=Patience(100, 5.0))
    session.on_event(headers())
    *asked, decide = session.on_event(body(b"x" * size))
    assert asked == ([Send(MoreTime(5.0))] if more_time else [])
    assert isinstance(decide, Decide)
    assert decide.patient == more_time
    assert session.decided(ROUTE) == [Send(ROUTE.reply)]


def test_full_duplex_has_no_timeout_to_be_lengthened_and_gets_the_time_all_the_same() -> None:
    session = Session(patience=Patience(100, 5.0))
    session.on_event(headers(protocol=DUPLEX))
    (decide,) = session.on_event(body(b"x" * 100))
    assert isinstance(decide, Decide)
    assert decide.patient


def test_the_status_of_the_headers_counts_for_a_body_without_one() -> None:
    session = session_in(State.AWAIT_ANSWER)
    session.on_event(answer_headers(status=500))
    assert session.on_event(answer(TOKEN, status=None))[0] == Answered(AnswerKind.ERROR, 500, "10.0.0.1:8000")


@pytest.mark.parametrize(("status", "kind"), [(200, AnswerKind.EMPTY), (502, AnswerKind.ERROR)])
def test_an_answer_without_a_body_ends_with_its_headers(status: int, kind: AnswerKind) -> None:
    assert session_in(State.AWAIT_ANSWER).on_event(answer_headers(status, end_of_stream=True)) == [
        Answered(kind, status, "10.0.0.1:8000"),
        Send(Continue(Phase.RESPONSE_HEADERS)),
        Close(),
    ]


def test_comments_that_keep_the_line_open_are_no_first_token() -> None:
    session = session_in(State.AWAIT_ANSWER)
    for _ in range(3):
        assert session.on_event(answer(b": keep-alive\n\n")) == go_on(Phase.RESPONSE_BODY)
    assert session.on_event(answer(TOKEN))[0] == Answered(AnswerKind.STREAMED, 200, None)


# Another body than the one that came


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
@pytest.mark.parametrize("length", [None, "2"])
def test_another_body_goes_on_with_its_own_length(mode: BodyMode, length: str | None) -> None:
    session = Session()
    told = [(":method", "POST"), (":path", "/v1/chat/completions"), *([("content-length", length)] if length else [])]
    protocol = Protocol(mode, BodyMode.STREAMED)
    session.on_event(RequestHeaders(Headers(told), False, protocol, NOTHING, NOTHING))
    session.on_event(body(b"{}"))
    (sent,) = session.decided(Route(ROUTE.reply, b"{  }"))
    lengths = (("content-length", "4"),) if length else ()
    assert sent == Send(Continue(Phase.REQUEST_BODY, (*ROUTE.reply.set_headers, *lengths), body=b"{  }"))


def test_in_full_duplex_another_body_is_sent_back_in_pieces() -> None:
    session = Session()
    told = Headers([(":method", "POST"), (":path", "/v1/chat/completions"), ("content-length", "5")])
    session.on_event(RequestHeaders(told, False, DUPLEX, NOTHING, NOTHING))
    session.on_event(body(b"{", end_of_stream=False))
    session.on_event(body(b"   }"))
    other = b"x" * (PIECE_BYTES + 1)
    first, *pieces = session.decided(Route(ROUTE.reply, other))
    lengths = ("content-length", str(len(other)))
    assert first == Send(Continue(Phase.REQUEST_HEADERS, (*ROUTE.reply.set_headers, lengths)))
    assert pieces == [
        Send(Echo(Phase.REQUEST_BODY, other[:PIECE_BYTES], end_of_stream=False)),
        Send(Echo(Phase.REQUEST_BODY, other[PIECE_BYTES:], end_of_stream=True)),
    ]


@pytest.mark.parametrize("content", [b"{}", b"x" * 1000])
def test_where_any_request_may_be_held_more_time_is_asked_for_each(content: bytes) -> None:
    session = Session(patience=Patience(500, 5.0, always=True))
    session.on_event(headers())
    asked, decide = session.on_event(body(content))
    assert asked == Send(MoreTime(5.0))
    assert isinstance(decide, Decide)
    assert decide.patient is (len(content) > 500), "that one waits for its tokens longer is another matter"
