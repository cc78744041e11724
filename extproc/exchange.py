"""The words of one exchange with Envoy: what it tells us (events), what we answer (replies), how a request ended.

Plain frozen values. Nothing here knows protobuf or gRPC: `wire.py` translates, `session.py` decides. `None` means that
Envoy did not say, or said something that makes no sense; it never stands for zero, false or empty.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

import msgspec

Metadata = Mapping[str, Mapping[str, object]]
"""Dynamic metadata: namespace -> key -> plain value (str, float, bool, None, or lists and dicts of them)."""

NOTHING: Final[Mapping[str, Mapping[str, object]]] = MappingProxyType({})
"""No metadata, no attributes: the usual case."""


class Headers:
    """The headers of one message: immutable, in order, names without regard to case, read only when asked for.

    Values come as bytes and are decoded as UTF-8; other bytes become lone surrogates (PEP 383), so reading never fails.
    """

    __slots__ = ("_pairs", "_source")

    def __init__(self, pairs: Iterable[tuple[str, str | bytes]] = ()) -> None:
        """`pairs` of name and value, iterated over once, at the first look: a generator costs nothing until then."""
        self._source = pairs
        self._pairs: list[tuple[str, str | bytes]] | None = None

    def get(self, name: str) -> str | None:
        """The first value of `name`."""
        wanted = name.lower()
        for key, value in self._read():
            if key == wanted:
                return _text(value)
        return None

    def all(self, name: str) -> list[str]:
        """Every value of `name`, in order."""
        wanted = name.lower()
        return [_text(value) for key, value in self._read() if key == wanted]

    def first_of(self, names: Container[str]) -> dict[str, str]:
        """The first value of each of these `names`, written in lower case, that is there."""
        found: dict[str, str] = {}
        for key, value in self._read():
            if key in names and key not in found:
                found[key] = _text(value)
        return found

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(name, value) pairs in order, names in lower case."""
        return ((key, _text(value)) for key, value in self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Headers) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Headers({list(self)!r})"

    def _read(self) -> list[tuple[str, str | bytes]]:
        pairs = self._pairs
        if pairs is None:
            pairs = self._pairs = [(name.lower(), value) for name, value in self._source]
            self._source = ()
        return pairs


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")


class BodyMode(Enum):
    """How the filter is configured to send bodies (ProcessingMode.BodySendMode, Envoy 1.40)."""

    NONE = "none"
    STREAMED = "streamed"
    BUFFERED = "buffered"
    BUFFERED_PARTIAL = "buffered_partial"
    FULL_DUPLEX_STREAMED = "full_duplex_streamed"
    GRPC = "grpc"


class Phase(Enum):
    """The parts of an exchange that Envoy sends and waits for an answer to."""

    __hash__ = object.__hash__  # members are looked up for each message, and hashing their names takes Python code

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


class Protocol(msgspec.Struct, frozen=True, gc=False):
    """The body modes of this stream, as Envoy's first message declares them."""

    request_body: BodyMode
    response_body: BodyMode


# Events: Envoy -> us.


class RequestHeaders(msgspec.Struct, frozen=True, gc=False):
    """The request begins."""

    headers: Headers
    end_of_stream: bool
    """There is no body: no RequestBody will follow."""
    protocol: Protocol | None
    """None: Envoy older than `protocol_config`, or a body mode unknown to this version."""
    metadata: Metadata
    """What earlier filters wrote, in the namespaces that the filter forwards."""
    attributes: Mapping[str, object]
    """The request attributes that the filter is configured to send, by name, such as `source.address`."""


class RequestBody(msgspec.Struct, frozen=True, gc=False):
    """The whole body (BUFFERED), its beginning (BUFFERED_PARTIAL), or a piece of it (streamed modes)."""

    body: bytes
    end_of_stream: bool


class RequestTrailers(msgspec.Struct, frozen=True, gc=False):
    """The request is complete. In FULL_DUPLEX_STREAMED this may stand in for `end_of_stream` on the body."""


class ResponseHeaders(msgspec.Struct, frozen=True, gc=False):
    """The answer begins: the upstream's, or one of Envoy's own."""

    headers: Headers
    end_of_stream: bool
    """There is no response body."""
    status: int | None
    """HTTP status: `:status`, else the attribute `response.code`."""
    served_endpoint: str | None
    """The "ip:port" that Envoy's override_host policy picked in the end."""
    details: str | None = None
    """Where the answer comes from (attribute `response.code_details`): `via_upstream`, or why Envoy gives its own."""
    protocol: Protocol | None = None
    """As in RequestHeaders, where this is the first message: a filter before us answered the request itself."""


class ResponseBody(msgspec.Struct, frozen=True, gc=False):
    """A piece of the response body; the first one, in STREAMED mode, carries the first token."""

    chunk: bytes
    end_of_stream: bool
    status: int | None
    """HTTP status from the attribute `response.code`, which rides on the first piece only."""
    served_endpoint: str | None
    """The "ip:port" that Envoy's override_host policy picked in the end."""
    details: str | None = None
    """As in ResponseHeaders; like the status, it rides on the first piece only."""


class ResponseTrailers(msgspec.Struct, frozen=True, gc=False):
    """The response is complete."""


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """A message that this version does not know."""


Event = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers | Unknown


# Replies: us -> Envoy.


class Continue(msgspec.Struct, frozen=True, gc=False):
    """Go on, with these changes. Answers exactly one event, that of the same phase."""

    phase: Phase
    set_headers: tuple[tuple[str, str], ...] = ()
    """Replace, or add, these headers of the request or response."""
    remove_headers: tuple[str, ...] = ()
    dynamic_metadata: Mapping[str, Mapping[str, str | float | bool]] = msgspec.field(default_factory=dict)
    """Namespace -> key -> value. Envoy drops namespaces that its filter config does not receive."""
    clear_route_cache: bool = False
    """Choose the route again with the changed headers. Has no effect on trailers."""
    body_modes: Protocol | None = None
    """Ask for these body modes from here on. Heard only in answers to headers, and only if the filter's configuration
    has `allow_mode_override`; else Envoy ignores it."""
    body: bytes | None = None
    """Instead of the body that came. Only in answers to a whole body; in FULL_DUPLEX_STREAMED the pieces count."""


class Echo(msgspec.Struct, frozen=True, gc=False):
    """A piece of a body sent back in FULL_DUPLEX_STREAMED mode, where whatever is not sent back is lost."""

    phase: Phase
    """REQUEST_BODY or RESPONSE_BODY."""
    piece: bytes
    end_of_stream: bool


class Refuse(msgspec.Struct, frozen=True, gc=False):
    """End the exchange: Envoy answers the client with this, and sends nothing upstream."""

    status: int
    """HTTP status, 200-599."""
    headers: tuple[tuple[str, str], ...]
    body: bytes
    details: str
    """A short token for the access log (`response_code_details`)."""
    dynamic_metadata: Mapping[str, Mapping[str, str | float | bool]] = msgspec.field(default_factory=dict)


class MoreTime(msgspec.Struct, frozen=True, gc=False):
    """Wait so long for the answer to the phase in progress, instead of `message_timeout`. Heard once per phase, and
    only up to the filter's `max_message_timeout`; Envoy goes on waiting for the answer itself."""

    seconds: float


Reply = Continue | Echo | Refuse | MoreTime


# The access log.


class RequestEnd(msgspec.Struct, frozen=True, gc=False):
    """One access log entry. It reports the end of a request when `final`, else how it stands."""

    metadata: Metadata
    """Dynamic metadata at that moment, of the namespaces asked for and present."""
    status: int | None
    """HTTP status sent to the client. None: the client left before there was one."""
    details: str
    """Why it ended (`response_code_details`), such as `via_upstream`, or our own `Refuse.details`. "": not said."""
    body_bytes: int
    """Of the answer, as it was sent to the client."""
    flags: frozenset[str]
    """Names of the response flags that are set, such as `downstream_connection_termination`."""
    attempts: int
    """Upstream attempts: 0 for a refusal, more than 1 after a retry."""
    final: bool
    """False for entries at the start, while the request runs, and of single upstream attempts."""
