"""What wire.read, wire.write and wire.read_access_log make of messages, sound and odd."""

import math
import re
from collections.abc import Iterator

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from extproc import wire
from extproc.exchange import (
    BodyMode,
    Continue,
    Headers,
    MoreTime,
    Phase,
    Protocol,
    Refuse,
    RequestBody,
    RequestEnd,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Unknown,
)
from extproc.pb.access_log_pb2 import AccessLogType, HTTPAccessLogEntry, StreamAccessLogsMessage
from extproc.pb.base_pb2 import HeaderMap, HeaderValueOption
from extproc.pb.ext_proc_pb2 import CommonResponse, ProcessingMode, ProcessingRequest, ProcessingResponse

Json = str | float | bool | None | dict[str, str] | dict[str, int] | list[str] | list[int]

FILTER = "envoy.filters.http.ext_proc"
SERVED = "x-gateway-destination-endpoint-served"


# Events.


def test_request_headers_are_read_with_end_of_stream_and_protocol() -> None:
    message = ProcessingRequest()
    add(message.request_headers.headers, ":path", b"/v1/chat/completions")
    message.request_headers.end_of_stream = True
    message.protocol_config.request_body_mode = ProcessingMode.BUFFERED
    message.protocol_config.response_body_mode = ProcessingMode.STREAMED
    event = wire.read(message)
    assert isinstance(event, RequestHeaders)
    assert event.end_of_stream
    assert event.headers.get(":path") == "/v1/chat/completions"
    assert event.protocol == Protocol(BodyMode.BUFFERED, BodyMode.STREAMED)
    assert event.metadata == {}
    assert event.attributes == {}


def test_a_stream_without_protocol_config_has_no_protocol() -> None:
    assert request_headers(ProcessingRequest()).protocol is None


def test_a_body_mode_of_a_later_envoy_is_no_protocol() -> None:
    message = ProcessingRequest()
    message.protocol_config.request_body_mode = ProcessingMode.BodySendMode.ValueType(77)
    assert request_headers(message).protocol is None


def test_every_body_mode_has_its_value() -> None:
    for name, number in ProcessingMode.BodySendMode.items():
        message = ProcessingRequest()
        message.protocol_config.request_body_mode = number
        assert request_headers(message).protocol == Protocol(BodyMode[name], BodyMode.NONE)
    assert set(ProcessingMode.BodySendMode.keys()) == set(BodyMode.__members__)


def test_metadata_becomes_plain_values() -> None:
    message = ProcessingRequest()
    message.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
        {"list": ["10.0.0.1:8000", 1.5, None, {"a": True}], "text": "x"}
    )
    metadata = request_headers(message).metadata
    assert metadata == {"envoy.lb.subset_hint": {"list": ["10.0.0.1:8000", 1.5, None, {"a": True}], "text": "x"}}
    assert list(metadata) == ["envoy.lb.subset_hint"]
    assert len(metadata) == 1


def test_looking_for_an_absent_namespace_or_key_adds_nothing() -> None:
    message = ProcessingRequest()
    message.metadata_context.filter_metadata["envoy.lb"].update({"a": "b"})
    before = message.SerializeToString()
    metadata = request_headers(message).metadata
    assert metadata.get("absent") is None
    assert "x" not in metadata["envoy.lb"]
    assert metadata["envoy.lb"] is metadata["envoy.lb"]
    message.ClearField("request_headers")
    assert message.SerializeToString() == before


def test_metadata_is_not_converted_before_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    message = ProcessingRequest()
    message.metadata_context.filter_metadata["one"].update({"a": 1})
    message.metadata_context.filter_metadata["two"].update({"b": 2})
    message.attributes[FILTER].update({"source.port": 4000})
    converted: list[str] = []
    plain_struct = wire._plain_struct

    def noted(struct: Struct) -> dict[str, object]:
        converted.extend(struct.fields)
        return plain_struct(struct)

    monkeypatch.setattr(wire, "_plain_struct", noted)
    event = request_headers(message)
    assert not converted
    assert event.metadata["two"]["b"] == 2
    assert event.metadata["two"]["b"] == 2
    assert converted == ["b"]


def test_attributes_of_the_request_are_read_by_name() -> None:
    message = ProcessingRequest()
    message.attributes[FILTER].update({"source.address": "10.1.1.1:4000", "request.size": 12})
    assert request_headers(message).attributes == {"source.address": "10.1.1.1:4000", "request.size": 12.0}


def test_a_request_body_is_read_as_it_came() -> None:
    message = ProcessingRequest()
    message.request_body.body = b"\x00\xff"
    message.request_body.end_of_stream = True
    assert wire.read(message) == RequestBody(b"\x00\xff", end_of_stream=True)


def test_the_first_response_chunk_tells_status_and_served_endpoint() -> None:
    message = ProcessingRequest()
    message.response_body.body = b"data: {}\n\n"
    message.attributes[FILTER].update({"response.code": 404})
    message.metadata_context.filter_metadata["envoy.lb"].update({SERVED: "10.0.0.1:8000"})
    assert wire.read(message) == ResponseBody(b"data: {}\n\n", False, 404, "10.0.0.1:8000")


def test_the_first_part_of_an_answer_tells_whose_it_is() -> None:
    for details in (
        "via_upstream",
        "no_healthy_upstream",
        "upstream_reset_before_response_started{connection_refused}",
    ):
        body, headers = ProcessingRequest(), ProcessingRequest()
        body.response_body.body = b"x"
        headers.response_headers.end_of_stream = True
        for message in (body, headers):
            message.attributes[FILTER].update({"response.code": 503, "response.code_details": details})
        assert wire.read(body) == ResponseBody(b"x", False, 503, None, details)
        assert wire.read(headers) == ResponseHeaders(Headers(), True, 503, None, details)


@pytest.mark.parametrize("odd", ["", 1, True, None, {"via": "upstream"}, ["via_upstream"]])
def test_details_that_are_no_text_are_none(odd: Json) -> None:
    message = ProcessingRequest()
    message.response_body.body = b"x"
    message.attributes[FILTER].update({"response.code_details": odd})
    assert wire.read(message) == ResponseBody(b"x", False, None, None)


def test_later_response_chunks_tell_neither() -> None:
    message = ProcessingRequest()
    message.response_body.end_of_stream = True
    assert wire.read(message) == ResponseBody(b"", True, None, None)


@pytest.mark.parametrize("odd", ["200", True, None, {"code": 200}, [200], 0, -1, 1e300, math.inf, math.nan])
def test_a_response_code_that_is_no_status_is_none(odd: Json) -> None:
    message = ProcessingRequest()
    message.response_body.body = b"x"
    message.attributes[FILTER].update({"response.code": odd})
    assert wire.read(message) == ResponseBody(b"x", False, None, None)


@pytest.mark.parametrize("odd", ["", 8000, True, None, {"ip": "10.0.0.1"}, ["10.0.0.1:8000"]])
def test_a_served_endpoint_that_is_no_text_is_none(odd: Json) -> None:
    message = ProcessingRequest()
    message.response_body.body = b"x"
    message.metadata_context.filter_metadata["envoy.lb"].update({SERVED: odd})
    assert wire.read(message) == ResponseBody(b"x", False, None, None)


def test_response_headers_tell_their_status() -> None:
    message = ProcessingRequest()
    add(message.response_headers.headers, ":status", b"503")
    message.attributes[FILTER].update({"response.code": 200})
    event = wire.read(message)
    assert isinstance(event, ResponseHeaders)
    assert event.status == 503


@pytest.mark.parametrize("odd", [b"", b"20", b"2000", b"+20", b"\xff\xff\xff", "²²²".encode(), b"abc", b"099"])
def test_without_a_sound_status_header_the_attribute_counts(odd: bytes) -> None:
    message = ProcessingRequest()
    add(message.response_headers.headers, ":status", odd)
    message.attributes[FILTER].update({"response.code": 200})
    event = wire.read(message)
    assert isinstance(event, ResponseHeaders)
    assert event.status == 200


def test_trailers_are_events_of_their_own() -> None:
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    assert wire.read(message) == RequestTrailers()
    message.response_trailers.SetInParent()
    assert wire.read(message) == ResponseTrailers()


def test_a_message_of_no_known_kind_is_unknown() -> None:
    assert wire.read(ProcessingRequest()) == Unknown()
    future_oneof_member = b"\xa2\x06\x03abc"  # field 100, a message of three bytes
    assert wire.read(wire.parse_request(future_oneof_member)) == Unknown()


def test_bytes_that_are_no_message_raise_only_decode_error() -> None:
    with pytest.raises(DecodeError):
        wire.parse_request(b"\xff\xff\xff")
    with pytest.raises(DecodeError):
        wire.parse_access_log(b"\xff\xff\xff")


# Headers.


def test_header_names_are_compared_without_case() -> None:
    headers = Headers([("X-Max-Queue-Wait-S", "5"), ("accept", "a"), ("Accept", "b")])
    assert headers.get("x-max-queue-wait-s") == "5"
    assert headers.get("X-MAX-QUEUE-WAIT-S") == "5"
    assert headers.get("absent") is None
    assert headers.all("aCCept") == ["a", "b"]
    assert headers.all("absent") == []
    assert list(headers) == [("x-max-queue-wait-s", "5"), ("accept", "a"), ("accept", "b")]
    assert len(headers) == 3


def test_headers_with_the_same_content_are_equal() -> None:
    assert Headers([("A", "1")]) == Headers([("a", b"1")])
    assert hash(Headers([("A", "1")])) == hash(Headers([("a", b"1")]))
    assert Headers([("a", "1")]) != Headers([("a", "2")])
    assert Headers() != "headers"
    assert repr(Headers([("A", "1")])) == "Headers([('a', '1')])"


def test_headers_are_read_once_and_only_when_asked() -> None:
    reads = 0

    def pairs() -> Iterator[tuple[str, str]]:
        nonlocal reads
        reads += 1
        yield "a", "1"

    headers = Headers(pairs())
    assert reads == 0
    assert headers.get("a") == "1"
    assert headers.get("b") is None
    assert reads == 1


def test_the_raw_value_of_a_header_is_preferred() -> None:
    message = ProcessingRequest()
    for raw, text in ((b"raw", ""), (b"", "text"), (b"raw", "text")):
        message.request_headers.headers.headers.add(key="h", raw_value=raw, value=text)
    event = wire.read(message)
    assert isinstance(event, RequestHeaders)
    assert event.headers.all("h") == ["raw", "text", "raw"]


@given(st.binary())
def test_any_bytes_of_a_header_are_readable_and_go_back_unchanged_but_for_controls(raw: bytes) -> None:
    message = ProcessingRequest()
    add(message.request_headers.headers, "h", raw)
    value = request_headers(message).headers.get("h")
    assert value is not None
    assert written("h", value) == re.sub(rb"[\x00-\x08\x0a-\x1f\x7f]", b"?", raw)


def test_a_header_value_that_is_not_utf8_is_read_all_the_same() -> None:
    message = wire.parse_request(b"\x12\x09\x0a\x07\x0a\x05\x0a\x00\x12\x01\xff")  # HeaderValue.value, not raw_value
    event = wire.read(message)
    assert isinstance(event, RequestHeaders)
    assert list(event.headers) == [("", "\udcff")]


# Replies.


@pytest.mark.parametrize("phase", list(Phase))
def test_a_plain_continue_names_its_phase_and_nothing_else(phase: Phase) -> None:
    message = wire.write(Continue(phase))
    assert message.WhichOneof("response") == phase.value
    assert len(wire.serialize_response(message)) == 2
    assert wire.write(Continue(phase)) is message


@pytest.mark.parametrize("phase", list(Phase))
def test_changed_headers_reach_the_answer_of_their_phase(phase: Phase) -> None:
    message = wire.write(Continue(phase, (("x-a", "1"), ("x-b", "")), ("x-c",), {"envoy.lb": {"k": "v"}}, True))
    assert message.WhichOneof("response") == phase.value
    part = getattr(message, phase.value)
    mutation = part.header_mutation if "trailers" in phase.value else part.response.header_mutation
    first, second = mutation.set_headers
    assert (first.header.key, first.header.raw_value, first.header.value) == ("x-a", b"1", "")
    assert first.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert not first.keep_empty_value
    assert second.header.raw_value == b""
    assert second.keep_empty_value
    assert list(mutation.remove_headers) == ["x-c"]
    assert message.dynamic_metadata.fields["envoy.lb"].struct_value["k"] == "v"
    if "trailers" not in phase.value:
        assert part.response.clear_route_cache


def test_writing_changes_leaves_the_shared_plain_answer_alone() -> None:
    before = wire.serialize_response(wire.write(Continue(Phase.REQUEST_BODY)))
    wire.write(Continue(Phase.REQUEST_BODY, (("x", "1"),), ("y",), {"n": {"k": 1.0}}, True))
    assert wire.serialize_response(wire.write(Continue(Phase.REQUEST_BODY))) == before


def test_metadata_alone_mutates_no_header() -> None:
    message = wire.write(Continue(Phase.REQUEST_BODY, dynamic_metadata={"n": {"k": 1.0}}))
    assert message.WhichOneof("response") == "request_body"
    assert not common(message).header_mutation.set_headers
    assert not common(message).clear_route_cache


def test_dynamic_metadata_keeps_text_numbers_and_truths_apart() -> None:
    values: dict[str, str | float | bool] = {"text": "1", "float": 1.5, "int": 2, "true": True, "false": False}
    message = wire.write(Continue(Phase.REQUEST_BODY, dynamic_metadata={"headway": values}))
    fields = message.dynamic_metadata.fields["headway"].struct_value.fields
    assert {key: value.WhichOneof("kind") for key, value in fields.items()} == {
        "text": "string_value",
        "float": "number_value",
        "int": "number_value",
        "true": "bool_value",
        "false": "bool_value",
    }
    assert fields["true"].bool_value
    assert not fields["false"].bool_value


def test_a_refusal_is_an_immediate_response() -> None:
    reply = Refuse(429, (("retry-after", "3"),), b'{"error":{}}', "headway_queue_full", {"headway": {"id": "x"}})
    message = wire.write(reply)
    answer = message.immediate_response
    assert message.WhichOneof("response") == "immediate_response"
    assert answer.status.code == 429
    assert answer.body == b'{"error":{}}'
    assert answer.details == "headway_queue_full"
    (option,) = answer.headers.set_headers
    assert (option.header.key, option.header.raw_value) == ("retry-after", b"3")
    assert option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert message.dynamic_metadata.fields["headway"].struct_value["id"] == "x"
    assert not answer.HasField("grpc_status")


@pytest.mark.parametrize("seconds", [0.001, 0.25, 5.0, 61.5])
def test_more_time_is_asked_for_with_nothing_else(seconds: float) -> None:
    message = wire.write(MoreTime(seconds))
    assert message.override_message_timeout.ToTimedelta().total_seconds() == seconds
    assert message.WhichOneof("response") is None


def test_a_status_that_the_enum_does_not_name_travels_all_the_same() -> None:
    message = wire.write(Refuse(499, (), b"", ""))
    assert ProcessingResponse.FromString(wire.serialize_response(message)).immediate_response.status.code == 499


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        ("a\r\nset-cookie: b", b"a??set-cookie: b"),
        ("a\tb", b"a\tb"),
        ("\x00\x7f", b"??"),
        ("\ud800", b"?"),
        ("é", b"\xc3\xa9"),
    ],
)
def test_what_no_header_can_hold_becomes_a_question_mark(value: str, raw: bytes) -> None:
    assert written("x-model", value) == raw
    (option,) = wire.write(Refuse(429, (("x-model", value),), b"", "")).immediate_response.headers.set_headers
    assert option.header.raw_value == raw


@given(st.text(st.characters(codec=None)))
def test_no_text_can_break_an_answer(text: str) -> None:
    metadata = {"headway": {"model": text}}
    for reply in (
        Continue(Phase.REQUEST_BODY, (("x-model", text),), dynamic_metadata=metadata),
        Refuse(429, (("x-model", text),), b"", text, metadata),
    ):
        assert wire.serialize_response(wire.write(reply))


# The access log.


def test_a_typical_entry_is_read_whole() -> None:
    (end,) = wire.read_access_log(logged(typical_entry()), ("headway",))
    assert end == RequestEnd(
        metadata={"headway": {"id": "abc"}},
        status=200,
        details="via_upstream",
        body_bytes=1234,
        flags=frozenset(),
        attempts=1,
        final=True,
    )


def test_an_empty_entry_knows_nothing_and_claims_nothing() -> None:
    (end,) = wire.read_access_log(logged(HTTPAccessLogEntry()), ("headway",))
    assert end == RequestEnd(
        metadata={},
        status=None,
        details="",
        body_bytes=0,
        flags=frozenset(),
        attempts=0,
        final=True,
    )


def test_the_flags_that_are_set_are_named() -> None:
    entry = HTTPAccessLogEntry()
    entry.common_properties.response_flags.downstream_connection_termination = True
    entry.common_properties.response_flags.upstream_retry_limit_exceeded = True
    entry.common_properties.response_flags.local_reset = False
    (end,) = wire.read_access_log(logged(entry), ())
    assert end.flags == {"downstream_connection_termination", "upstream_retry_limit_exceeded"}


@pytest.mark.parametrize("name", AccessLogType.keys())
def test_only_the_end_of_the_request_is_final(name: str) -> None:
    entry = HTTPAccessLogEntry()
    entry.common_properties.access_log_type = AccessLogType.Value(name)
    (end,) = wire.read_access_log(logged(entry), ())
    assert end.final == (name in {"NotSet", "DownstreamEnd"})


def test_an_intermediate_entry_is_not_final_whatever_its_type() -> None:
    entry = typical_entry()
    entry.common_properties.intermediate_log_entry = True
    (end,) = wire.read_access_log(logged(entry), ())
    assert not end.final


def test_only_the_namespaces_asked_for_are_converted() -> None:
    entry = typical_entry()
    entry.common_properties.metadata.filter_metadata["llm.usage"].update({"prompt": 10})
    entry.common_properties.metadata.filter_metadata["other"].update({"secret": 1})
    before = entry.SerializeToString(deterministic=True)
    message = logged(entry)
    (end,) = wire.read_access_log(message, ("headway", "llm.usage", "absent"))
    assert end.metadata == {"headway": {"id": "abc"}, "llm.usage": {"prompt": 10.0}}
    assert message.http_logs.log_entry[0].SerializeToString(deterministic=True) == before


def test_text_that_is_not_utf8_costs_no_entry() -> None:
    sound = typical_entry()
    # A client may choose its request's id, and what is told of an answer.
    raw = logged(sound, sound).SerializeToString().replace(b"9b0d", b"9b0\xff", 2).replace(b"_upst", b"\xffupst", 1)
    first, second = wire.read_access_log(wire.parse_access_log(raw), ("headway",))
    assert first.details == "via\udcffupstream"
    assert second.details == "via_upstream"
    assert first.metadata == second.metadata == {"headway": {"id": "abc"}}


def test_a_message_without_http_entries_reports_nothing() -> None:
    message = StreamAccessLogsMessage()
    message.identifier.log_name = "llm"
    assert list(wire.read_access_log(message, ("headway",))) == []
    tcp_logs = b"\x1a\x02\x0a\x00"  # field 3: one TCP entry, which our protos leave out
    assert list(wire.read_access_log(wire.parse_access_log(tcp_logs), ())) == []


# Helpers.


def written(name: str, value: str) -> bytes:
    (option,) = common(wire.write(Continue(Phase.REQUEST_HEADERS, ((name, value),)))).header_mutation.set_headers
    return option.header.raw_value


def add(headers: HeaderMap, name: str, raw: bytes) -> None:
    headers.headers.add(key=name, raw_value=raw)


def request_headers(message: ProcessingRequest) -> RequestHeaders:
    message.request_headers.SetInParent()
    event = wire.read(message)
    assert isinstance(event, RequestHeaders)
    return event


def common(message: ProcessingResponse) -> CommonResponse:
    kind = message.WhichOneof("response")
    assert kind is not None
    response: CommonResponse = getattr(message, kind).response
    return response


def logged(*entries: HTTPAccessLogEntry) -> StreamAccessLogsMessage:
    message = StreamAccessLogsMessage()
    message.http_logs.log_entry.extend(entries)
    return message


def typical_entry() -> HTTPAccessLogEntry:
    entry = HTTPAccessLogEntry()
    properties = entry.common_properties
    properties.start_time.FromMilliseconds(1_790_000_000_500)
    properties.duration.FromMilliseconds(2250)
    properties.time_to_last_rx_byte.FromMilliseconds(1)
    properties.time_to_first_upstream_tx_byte.FromMilliseconds(2)
    properties.time_to_first_upstream_rx_byte.FromMilliseconds(3)
    properties.time_to_last_upstream_rx_byte.FromMilliseconds(2000)
    properties.time_to_first_downstream_tx_byte.FromMilliseconds(4)
    properties.time_to_last_downstream_tx_byte.FromMilliseconds(2125)
    properties.upstream_remote_address.socket_address.address = "10.0.0.1"
    properties.upstream_remote_address.socket_address.port_value = 8000
    properties.upstream_cluster = "pool"
    properties.metadata.filter_metadata["headway"].update({"id": "abc"})
    properties.upstream_request_attempt_count = 1
    properties.stream_id = "9b0d"
    properties.access_log_type = AccessLogType.DownstreamEnd
    entry.request.path = "/v1/chat/completions"
    entry.request.request_id = "9b0d"
    entry.response.response_code.value = 200
    entry.response.response_code_details = "via_upstream"
    entry.response.response_body_bytes = 1234
    return entry
