"""Generated messages: both implementations agree on all of them, and reading never raises, whatever the bytes say."""

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from google.protobuf.wrappers_pb2 import UInt32Value
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc import wire
from extproc.exchange import Continue, Phase, Refuse, RequestHeaders, ResponseHeaders
from extproc.pb.access_log_pb2 import StreamAccessLogsMessage
from extproc.pb.ext_proc_pb2 import ProcessingRequest, ProcessingResponse

NAMESPACES = ("", "a", "envoy.lb", "headway")


@settings(deadline=None)
@given(data=st.data())
def test_any_request_means_the_same_to_both_implementations(
    data: st.DataObject, envoy_messages: Mapping[type[Message], Any]
) -> None:
    assert_same(data.draw(filled(ProcessingRequest)), envoy_messages)


@settings(deadline=None)
@given(data=st.data())
def test_any_response_means_the_same_to_both_implementations(
    data: st.DataObject, envoy_messages: Mapping[type[Message], Any]
) -> None:
    assert_same(data.draw(filled(ProcessingResponse)), envoy_messages)


@settings(deadline=None)
@given(data=st.data())
def test_any_access_log_message_means_the_same_to_both_implementations(
    data: st.DataObject, envoy_messages: Mapping[type[Message], Any]
) -> None:
    assert_same(data.draw(filled(StreamAccessLogsMessage)), envoy_messages)


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
PAIRS = st.lists(st.tuples(NAMES, TEXTS), max_size=3).map(tuple)
METADATA = st.dictionaries(
    NAMES,
    st.dictionaries(NAMES, TEXTS | st.booleans() | st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    max_size=2,
)
REPLIES = st.builds(
    Continue, st.sampled_from(Phase), PAIRS, st.lists(NAMES, max_size=2).map(tuple), METADATA, st.booleans()
) | st.builds(Refuse, st.sampled_from([400, 429, 503]), PAIRS, st.binary(max_size=20), TEXTS, METADATA)


@settings(deadline=None)
@given(reply=REPLIES)
def test_any_reply_means_the_same_to_both_implementations(
    reply: Continue | Refuse, envoy_messages: Mapping[type[Message], Any]
) -> None:
    assert_same(wire.write(reply), envoy_messages)


ANY_NAMES = NAMES | TEXTS | st.integers(0, 300).map("n".__mul__)
ANY_TEXTS = st.text(max_size=20) | st.integers(0, 40_000).map("x".__mul__)
MORE_METADATA = st.dictionaries(ANY_NAMES, st.dictionaries(ANY_NAMES, ANY_TEXTS, max_size=3), max_size=2)
MORE_REPLIES = REPLIES | st.builds(Continue, st.sampled_from(Phase), PAIRS, dynamic_metadata=MORE_METADATA)


@settings(deadline=None)
@given(reply=MORE_REPLIES)
def test_any_reply_is_encoded_as_it_is_written(reply: Continue | Refuse) -> None:
    assert ProcessingResponse.FromString(wire.encode(reply)) == wire.write(reply)


@settings(deadline=None)
@given(data=st.data())
def test_whatever_parses_as_a_request_can_be_read(data: st.DataObject) -> None:
    raw = data.draw(st.binary() | mangled(filled(ProcessingRequest, sane=False)))
    try:
        message = wire.parse_request(raw)
    except DecodeError:
        return
    event = wire.read(message)
    assert repr(event)
    if isinstance(event, RequestHeaders | ResponseHeaders):
        assert len(list(event.headers)) == len(event.headers)
    if isinstance(event, RequestHeaders):
        assert {key: dict(fields) for key, fields in event.metadata.items()} == event.metadata
        assert dict(event.attributes).keys() == set(event.attributes)


@settings(deadline=None)
@given(data=st.data())
def test_whatever_parses_as_an_access_log_message_can_be_read(data: st.DataObject) -> None:
    raw = data.draw(st.binary() | mangled(filled(StreamAccessLogsMessage, sane=False)))
    try:
        message = wire.parse_access_log(raw)
    except DecodeError:
        return
    ends = list(wire.read_access_log(message, NAMESPACES))
    assert len(ends) == len(message.http_logs.log_entry)
    assert repr(ends)


# Helpers.


@pytest.fixture(scope="session")
def envoy_messages() -> Mapping[type[Message], Any]:
    """For each of our messages the class of envoy-data-plane that Envoy's side is played with."""
    with warnings.catch_warnings():
        # Its pydantic validators are of a deprecated form.
        warnings.simplefilter("ignore")
        ext_proc = importlib.import_module("envoy_data_plane.envoy.service.ext_proc.v3")
        access_log = importlib.import_module("envoy_data_plane.envoy.service.accesslog.v3")
    return {
        ProcessingRequest: ext_proc.ProcessingRequest,
        ProcessingResponse: ext_proc.ProcessingResponse,
        StreamAccessLogsMessage: access_log.StreamAccessLogsMessage,
    }


def assert_same(ours: Message, envoy_messages: Mapping[type[Message], Any]) -> None:
    with warnings.catch_warnings():
        # Envoy 1.40 still sends fields that envoy-data-plane calls deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        theirs = envoy_messages[type(ours)].parse(ours.SerializeToString())
        assert ParseDict(theirs.to_dict(), type(ours)()) == ours
        assert type(ours).FromString(bytes(theirs)) == ours


@st.composite
def mangled(draw: st.DrawFn, messages: st.SearchStrategy[Message]) -> bytes:
    """The bytes of a message, some of them overwritten: most of these still parse, and mean something odd."""
    raw = bytearray(draw(messages).SerializeToString())
    for _ in range(draw(st.integers(0, 3)) if raw else 0):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


@st.composite
def filled(draw: st.DrawFn, kind: type[Message], *, sane: bool = True) -> Message:
    """A message with any subset of its fields set. Sane ones stay within what JSON and Python's times can hold."""
    message = kind()
    fill(draw, message, sane=sane)
    return message


def fill(draw: st.DrawFn, message: Message, *, sane: bool) -> None:
    special = SPECIAL.get(type(message))
    if special is not None:
        special(draw, message, sane)
        return
    fields: Iterable[Any] = message.DESCRIPTOR.fields  # the stubs know two classes of field descriptors
    for field in fields:
        if draw(st.booleans()):
            fill_field(draw, message, field, sane=sane)


def fill_field(draw: st.DrawFn, message: Message, field: FieldDescriptor, *, sane: bool) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in draw(st.lists(st.sampled_from(NAMESPACES), max_size=2)):
            if field.message_type.fields_by_name["value"].message_type is None:
                target[key] = draw(TEXTS)
            else:
                fill(draw, target[key], sane=sane)
    elif field.message_type is not None and field.is_repeated:
        for _ in range(draw(st.integers(0, 2))):
            fill(draw, target.add(), sane=sane)
    elif field.message_type is not None:
        target.SetInParent()
        fill(draw, target, sane=sane)
    elif field.is_repeated:
        target.extend(draw(st.lists(scalar(field, sane=sane), max_size=2)))
    else:
        setattr(message, field.name, draw(scalar(field, sane=sane)))


def scalar(field: FieldDescriptor, *, sane: bool) -> st.SearchStrategy[object]:
    if field.enum_type is not None:
        known = [value.number for value in field.enum_type.values]
        return st.sampled_from(known) if sane else st.integers(-(2**31), 2**31 - 1)
    return {
        FieldDescriptor.TYPE_BOOL: st.booleans(),
        FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
        FieldDescriptor.TYPE_STRING: TEXTS,
        FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
        FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    }[field.type]


def fill_struct(draw: st.DrawFn, message: Any, sane: bool) -> None:
    numbers = st.floats(allow_nan=not sane, allow_infinity=not sane)
    leaves = st.none() | st.booleans() | numbers | TEXTS
    keys = st.sampled_from(["a", "response.code", wire.SERVED_ENDPOINT_KEY]) | TEXTS
    values = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(keys, inner, max_size=2), max_leaves=4
    )
    message.update(draw(st.dictionaries(keys, values, max_size=3)))


def fill_time(draw: st.DrawFn, message: Any, sane: bool) -> None:
    # Python's datetime and timedelta hold whole microseconds of four-digit years.
    most = 2**33 if sane else 2**63 - 1
    message.seconds = draw(st.integers(0 if sane else -most, most))
    message.nanos = draw(st.integers(0, 999_999)) * 1000 if sane else draw(st.integers(-(2**31), 2**31 - 1))


def fill_count(draw: st.DrawFn, message: Any, sane: bool) -> None:
    message.value = draw(st.integers(0, 2**32 - 1))


SPECIAL: dict[type[Message], Callable[[st.DrawFn, Any, bool], None]] = {
    Struct: fill_struct,
    Duration: fill_time,
    Timestamp: fill_time,
    UInt32Value: fill_count,
}
