"""Envoy's protobuf, translated: the only module that reads or writes messages of ext_proc v3 and access log v3.

Envoy's messages become the values of `exchange.py`, and replies become Envoy's messages. What a message says is not
trusted: once its bytes have parsed, reading it never raises; what makes no sense becomes None. Source: Envoy 1.40.
"""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from google.protobuf.struct_pb2 import Struct, Value

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
    RequestEnd,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Unknown,
)
from extproc.pb.access_log_pb2 import (
    AccessLogCommon,
    AccessLogType,
    HTTPAccessLogEntry,
    StreamAccessLogsMessage,
    StreamAccessLogsResponse,
)
from extproc.pb.base_pb2 import HeaderMap, HeaderValueOption, StatusCode
from extproc.pb.ext_proc_pb2 import (
    BodyResponse,
    HeaderMutation,
    HeadersResponse,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)

PROCESSOR_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS_METHOD: Final = "Process"
ACCESS_LOG_SERVICE: Final = "envoy.service.accesslog.v3.AccessLogService"
ACCESS_LOG_METHOD: Final = "StreamAccessLogs"

ENDPOINT_NAMESPACE: Final = "envoy.lb"
SERVED_ENDPOINT_KEY: Final = "x-gateway-destination-endpoint-served"
RESPONSE_CODE: Final = "response.code"
RESPONSE_DETAILS: Final = "response.code_details"


# Bytes <-> messages, in the form that grpc's generic handlers take. Parsing raises google.protobuf.message.DecodeError.


def parse_request(data: bytes) -> ProcessingRequest:
    return ProcessingRequest.FromString(data)


def serialize_response(message: ProcessingResponse) -> bytes:
    return message.SerializeToString()


def parse_access_log(data: bytes) -> StreamAccessLogsMessage:
    return StreamAccessLogsMessage.FromString(data)


def serialize_access_log_response(message: StreamAccessLogsResponse) -> bytes:
    return message.SerializeToString()


ACCESS_LOG_RESPONSE: Final = StreamAccessLogsResponse().SerializeToString()


# Envoy -> us.


def read(message: ProcessingRequest) -> Event:
    """The event that `message` reports. Never raises; keeps a reference to `message` until its headers are read."""
    match message.WhichOneof("request"):
        case "request_headers":
            part = message.request_headers
            return RequestHeaders(
                _headers(part.headers), part.end_of_stream, _protocol(message), _metadata(message), _attributes(message)
            )
        case "request_body":
            return RequestBody(message.request_body.body, message.request_body.end_of_stream)
        case "response_body":
            body = message.response_body
            status, details = _told_of_answer(message)
            return ResponseBody(body.body, body.end_of_stream, status, _served_endpoint(message), details)
        case "response_headers":
            part = message.response_headers
            headers = _headers(part.headers)
            told, details = _told_of_answer(message)
            status = _status_of_text(headers.get(":status"))
            status = told if status is None else status
            served = _served_endpoint(message)
            return ResponseHeaders(headers, part.end_of_stream, status, served, details, _protocol(message))
        case "request_trailers":
            return RequestTrailers()
        case "response_trailers":
            return ResponseTrailers()
        case _:
            return Unknown()


def _headers(headers: HeaderMap) -> Headers:
    # Envoy 1.40 sends raw_value.
    return Headers((header.key, header.raw_value or header.value) for header in headers.headers)


_BODY_MODES: Final = {
    ProcessingMode.NONE: BodyMode.NONE,
    ProcessingMode.STREAMED: BodyMode.STREAMED,
    ProcessingMode.BUFFERED: BodyMode.BUFFERED,
    ProcessingMode.BUFFERED_PARTIAL: BodyMode.BUFFERED_PARTIAL,
    ProcessingMode.FULL_DUPLEX_STREAMED: BodyMode.FULL_DUPLEX_STREAMED,
    ProcessingMode.GRPC: BodyMode.GRPC,
}
_BODY_MODE_VALUES: Final = {mode: value for value, mode in _BODY_MODES.items()}


def _protocol(message: ProcessingRequest) -> Protocol | None:
    if not message.HasField("protocol_config"):
        return None
    config = message.protocol_config
    request_body = _BODY_MODES.get(config.request_body_mode)
    response_body = _BODY_MODES.get(config.response_body_mode)
    if request_body is None or response_body is None:
        return None
    return Protocol(request_body, response_body)


def _metadata(message: ProcessingRequest) -> Metadata:
    if not message.HasField("metadata_context"):
        return NOTHING
    return _Namespaces(message.metadata_context.filter_metadata)


def _attributes(message: ProcessingRequest) -> Mapping[str, object]:
    # Envoy keys them by filter name. The names within are unambiguous without it.
    return _Fields(message.attributes.values()) if message.attributes else NOTHING


def _told_of_answer(message: ProcessingRequest) -> tuple[int | None, str | None]:
    """The attributes that tell of an answer: its status, and where it comes from."""
    status = details = None
    # Envoy keys them by filter name. The names within are unambiguous without it.
    for struct in message.attributes.values():
        fields = struct.fields
        code = fields.get(RESPONSE_CODE)
        if status is None and code is not None and code.WhichOneof("kind") == "number_value":
            status = _http_status(code.number_value)
        told = fields.get(RESPONSE_DETAILS)
        if details is None and told is not None:
            details = told.string_value or None
    return status, details


def _status_of_text(text: str | None) -> int | None:
    # isdigit alone would also take superscripts and other scripts, some of which int() refuses.
    return (
        _http_status(int(text)) if text is not None and len(text) == 3 and text.isascii() and text.isdigit() else None
    )


def _http_status(number: float) -> int | None:
    # A comparison with NaN is false, so NaN ends here too.
    return int(number) if 100 <= number <= 999 else None


def _served_endpoint(message: ProcessingRequest) -> str | None:
    if not message.HasField("metadata_context"):
        return None
    struct = message.metadata_context.filter_metadata.get(ENDPOINT_NAMESPACE)
    value = None if struct is None else struct.fields.get(SERVED_ENDPOINT_KEY)
    # string_value is "" for values of any other kind.
    return None if value is None else value.string_value or None


# Structs -> plain values.


class _Fields(Mapping[str, object]):
    """The fields of some Structs as one mapping. Nothing is converted before the first look, then everything once."""

    __slots__ = ("_plain", "_structs")

    def __init__(self, structs: Iterable[Struct]) -> None:
        self._structs = structs
        self._plain: dict[str, object] | None = None

    def _read(self) -> dict[str, object]:
        if self._plain is None:
            self._plain = {key: value for struct in self._structs for key, value in _plain_struct(struct).items()}
            self._structs = ()
        return self._plain

    def __getitem__(self, key: str) -> object:
        return self._read()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(self._read())


class _Namespaces(Mapping[str, Mapping[str, object]]):
    """Metadata by namespace. A namespace that nobody looks into is never converted."""

    __slots__ = ("_fields", "_structs")

    def __init__(self, structs: Mapping[str, Struct]) -> None:
        self._structs = structs
        self._fields: dict[str, _Fields] = {}

    def __getitem__(self, namespace: str) -> Mapping[str, object]:
        fields = self._fields.get(namespace)
        if fields is None:
            # Not structs[namespace]: looking up an absent key adds it to a protobuf map of messages.
            struct = self._structs.get(namespace)
            if struct is None:
                raise KeyError(namespace)
            fields = self._fields[namespace] = _Fields((struct,))
        return fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._structs)

    def __len__(self) -> int:
        return len(self._structs)

    def __repr__(self) -> str:
        return repr(dict(self))


def _plain_struct(struct: Struct) -> dict[str, object]:
    # protobuf parses at most 100 levels, so the recursion is bounded.
    return {key: _plain(value) for key, value in struct.fields.items()}


def _plain(value: Value) -> object:
    match value.WhichOneof("kind"):
        case "string_value":
            return value.string_value
        case "number_value":
            return value.number_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return _plain_struct(value.struct_value)
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case _:
            return None


# Us -> Envoy.


def encode(reply: Reply) -> bytes:
    """What `write` and `serialize_response` make of it, in a quarter of the time where each request has such a reply:
    of a decision, only the metadata differs from those before it."""
    if type(reply) is Continue and reply.body is None and reply.body_modes is None:
        metadata: bytes | None = b""
        if reply.dynamic_metadata:
            metadata = _texts(reply.dynamic_metadata) if reply.set_headers else None
        if metadata is not None:
            return _same(reply.phase, reply.set_headers, reply.remove_headers, reply.clear_route_cache) + metadata
    return serialize_response(write(reply))


@functools.lru_cache(maxsize=1024)
def _same(
    phase: Phase, set_headers: tuple[tuple[str, str], ...], remove_headers: tuple[str, ...], clear_route_cache: bool
) -> bytes:
    return serialize_response(write(Continue(phase, set_headers, remove_headers, clear_route_cache=clear_route_cache)))


# Of protobuf's encoding: the tags of what `dynamic_metadata` is made of, all of them lengths and what they are of.
_METADATA: Final = bytes((ProcessingResponse.DESCRIPTOR.fields_by_name["dynamic_metadata"].number << 3 | 2,))
_FIELDS: Final = bytes((Struct.DESCRIPTOR.fields_by_name["fields"].number << 3 | 2,))
_KEY, _VALUE = b"\x0a", b"\x12"  # of a map's entry
_TEXT: Final = bytes((Value.DESCRIPTOR.fields_by_name["string_value"].number << 3 | 2,))
_STRUCT: Final = bytes((Value.DESCRIPTOR.fields_by_name["struct_value"].number << 3 | 2,))
_SHORT: Final = tuple(bytes((length,)) for length in range(128))


def _texts(metadata: Mapping[str, Mapping[str, str | float | bool]]) -> bytes | None:
    """The field `dynamic_metadata`, if there is nothing but texts in it."""
    namespaces = []
    for namespace, values in metadata.items():
        fields: list[bytes] = []
        for key, value in values.items():
            if not isinstance(value, str):
                return None
            name, text = _name(key), (value if value.isascii() else _encodable(value)).encode()
            length = len(text)
            if length < 64 and len(name) < 56:
                fields += (_FIELDS, _SHORT[len(name) + length + 4], name)
                fields += (_VALUE, _SHORT[length + 2], _TEXT, _SHORT[length], text)
            else:
                fields.append(_sized(_FIELDS, name + _sized(_VALUE, _sized(_TEXT, text))))
        struct = _sized(_VALUE, _sized(_STRUCT, b"".join(fields)))
        namespaces.append(_sized(_FIELDS, _name(namespace) + struct))
    return _sized(_METADATA, b"".join(namespaces))


@functools.lru_cache(maxsize=256)
def _name(key: str) -> bytes:
    return _sized(_KEY, key.encode())


def _sized(tag: bytes, content: bytes) -> bytes:
    length = len(content)
    if length < 128:
        return tag + _SHORT[length] + content
    size = bytearray(tag)
    while length >= 128:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return bytes(size) + content


def write(reply: Reply) -> ProcessingResponse:
    """The message for `reply`. Treat it as read-only: all plain replies to one phase share a message."""
    match reply:
        case Refuse():
            return _refusal(reply)
        case Echo():
            return _echo(reply)
        case Continue(phase, (), (), metadata, False, None, None) if not metadata:
            return _PLAIN[phase]
        case Continue():
            return _changes(reply)
        case MoreTime(seconds):
            message = ProcessingResponse()
            message.override_message_timeout.FromNanoseconds(round(seconds * 1e9))
            return message


def _echo(reply: Echo) -> ProcessingResponse:
    message = ProcessingResponse()
    part: BodyResponse = getattr(message, reply.phase.value)
    piece = part.response.body_mutation.streamed_response
    piece.body = reply.piece
    piece.end_of_stream = reply.end_of_stream
    return message


def _refusal(reply: Refuse) -> ProcessingResponse:
    message = ProcessingResponse()
    answer = message.immediate_response
    # The enum is open: a status without a name there is as good as one with.
    answer.status.code = StatusCode.ValueType(reply.status)
    _set_headers(answer.headers, reply.headers)
    answer.body = reply.body
    answer.details = _encodable(reply.details)
    _set_metadata(message.dynamic_metadata, reply.dynamic_metadata)
    return message


def _changes(reply: Continue) -> ProcessingResponse:
    message = ProcessingResponse()
    part = _part(message, reply.phase)
    if isinstance(part, TrailersResponse):
        mutation = part.header_mutation
    else:
        mutation = part.response.header_mutation
        part.response.clear_route_cache = reply.clear_route_cache
        if reply.body is not None:
            part.response.body_mutation.body = reply.body
    _set_headers(mutation, reply.set_headers)
    if reply.remove_headers:
        mutation.remove_headers.extend(reply.remove_headers)
    _set_metadata(message.dynamic_metadata, reply.dynamic_metadata)
    if reply.body_modes is not None:
        message.mode_override.request_body_mode = _BODY_MODE_VALUES[reply.body_modes.request_body]
        message.mode_override.response_body_mode = _BODY_MODE_VALUES[reply.body_modes.response_body]
    return message


def _plain_continue(phase: Phase) -> ProcessingResponse:
    message = ProcessingResponse()
    _part(message, phase)
    return message


def _part(message: ProcessingResponse, phase: Phase) -> HeadersResponse | BodyResponse | TrailersResponse:
    """The part of `message` that answers `phase`, made present: even an empty answer must name its phase."""
    part: HeadersResponse | BodyResponse | TrailersResponse = getattr(message, phase.value)
    part.SetInParent()
    return part


_PLAIN: Final = {phase: _plain_continue(phase) for phase in Phase}


def _set_headers(mutation: HeaderMutation, headers: tuple[tuple[str, str], ...]) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key = name
        option.header.raw_value = _header_bytes(value)
        if not value:
            option.keep_empty_value = True


def _set_metadata(target: Struct, metadata: Mapping[str, Mapping[str, str | float | bool]]) -> None:
    for namespace, values in metadata.items():
        struct = target.fields[namespace].struct_value
        struct.SetInParent()  # a Value without a kind is malformed, even where there is nothing to say
        fields = struct.fields
        for key, value in values.items():
            if isinstance(value, str):
                fields[key].string_value = _encodable(value)
            elif isinstance(value, bool):
                fields[key].bool_value = value
            else:
                fields[key].number_value = value


# Envoy 1.40 answers 500 to the client, in spite of failure_mode_allow, when a header it is to set holds one of these.
_CONTROLS: Final = bytes(byte for byte in [*range(0x20), 0x7F] if byte != 0x09)
_WITHOUT_CONTROLS: Final = bytes.maketrans(_CONTROLS, b"?" * len(_CONTROLS))


def _header_bytes(value: str) -> bytes:
    """The bytes that `Headers` reads as `value`, with a question mark for each character that no header can hold."""
    try:
        raw = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raw = value.encode("utf-8", "replace")
    return raw.translate(_WITHOUT_CONTROLS)


def _encodable(text: str) -> str:
    # A lone surrogate (JSON can smuggle one into a model name) would make protobuf raise.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# The access log.


def read_access_log(message: StreamAccessLogsMessage, namespaces: Collection[str]) -> Iterator[RequestEnd]:
    """The HTTP entries of `message`, with the metadata of those `namespaces` that are present. Never raises."""
    return (_request_end(entry, namespaces) for entry in message.http_logs.log_entry)


def _request_end(entry: HTTPAccessLogEntry, namespaces: Collection[str]) -> RequestEnd:
    common, response = entry.common_properties, entry.response
    return RequestEnd(
        metadata=_chosen(common, namespaces),
        status=_http_status(response.response_code.value),
        details=_text(response.response_code_details),
        body_bytes=response.response_body_bytes,
        flags=_flags(common),
        attempts=common.upstream_request_attempt_count,
        final=common.access_log_type in _FINAL_TYPES and not common.intermediate_log_entry,
    )


# NotSet: an entry that does not say. UpstreamEnd is the end of an attempt, not of the request.
_FINAL_TYPES: Final = (AccessLogType.NotSet, AccessLogType.DownstreamEnd)


def _text(value: str | bytes) -> str:
    # Strings that are not UTF-8 come as bytes, whatever the stubs say: see access_log.proto.
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")


def _chosen(common: AccessLogCommon, namespaces: Collection[str]) -> Metadata:
    structs = common.metadata.filter_metadata
    chosen = {}
    for namespace in namespaces:
        struct = structs.get(namespace)
        if struct is not None:
            chosen[namespace] = _plain_struct(struct)
    return chosen


def _flags(common: AccessLogCommon) -> frozenset[str]:
    if not common.HasField("response_flags"):
        return frozenset()
    return frozenset(field.name for field, _ in common.response_flags.ListFields())
