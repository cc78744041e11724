"""What kind of answer an engine gives, told from its first bytes."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable

_FIELDS_BEFORE_DATA = (b"event:", b"id:", b"retry:", b":")
_LONGEST_FIELD = 6
# The specification lets a stream begin with it.
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# A first token is found in the first few bytes; more of a compressed chunk is not worth decoding.
_LOOKED_AT_BYTES = 16 << 10
_GZIP = b"\x1f\x8b"

Inflate = Callable[[bytes], bytes]


class AnswerKind(enum.Enum):
    """`STREAMED` means that the first token is here."""

    STREAMED = "streamed"
    PLAIN = "plain"  # a body that is no event stream
    ERROR = "error"  # any status but 200
    EMPTY = "empty"  # it ended before anything was said
    UNSEEN = "unseen"  # Envoy does not show it to us
    UNANSWERED = "unanswered"  # Envoy's own words: no engine gave an answer


class AnswerReader:
    """Reads the beginning of an answer, chunk by chunk, until its kind is known.

    A `data:` line of an event stream is the first token: in vLLM and SGLang the first one appears when the first token
    exists, while response headers and keep-alive comments (lines that begin with a colon) may come long before it.
    """

    def __init__(self) -> None:
        self._line = b""
        self._started = False
        self._head = b""  # kept until it can be told whether the answer is compressed
        self._inflate: Inflate | None = None

    def feed(self, chunk: bytes, status: int | None, end_of_stream: bool) -> AnswerKind | None:
        """The kind, once known; None means that the next chunk has to be seen."""
        if status is not None and status != 200:
            return AnswerKind.ERROR
        kind = self._scan(self._plain(chunk))
        if kind is None and end_of_stream:
            return AnswerKind.PLAIN if self._line.strip() else AnswerKind.EMPTY
        return kind

    def _plain(self, chunk: bytes) -> bytes:
        """The beginning of a gzipped answer, decoded; headers do not reach us, its first bytes tell."""
        if self._inflate is None:
            chunk = self._head = self._head + chunk
            if len(chunk) < len(_GZIP) and _GZIP.startswith(chunk):
                return b""
            self._inflate = _gunzip() if chunk.startswith(_GZIP) else _as_it_is
        return self._inflate(chunk)

    def _scan(self, chunk: bytes) -> AnswerKind | None:
        text = self._line + chunk
        if not self._started:
            if len(text) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(text):
                self._line = text
                return None
            text = text.removeprefix(_BYTE_ORDER_MARK)
            self._started = True
        *lines, rest = text.replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                return AnswerKind.STREAMED
            if line and not line.startswith(_FIELDS_BEFORE_DATA):
                return AnswerKind.PLAIN
        if rest.startswith(b"data:"):
            return AnswerKind.STREAMED
        if len(rest) >= _LONGEST_FIELD and not rest.startswith(_FIELDS_BEFORE_DATA):
            return AnswerKind.PLAIN
        # A comment may be of any length: its beginning says all.
        self._line = rest[:_LONGEST_FIELD]
        return None


def _gunzip() -> Inflate:
    """Decodes piece by piece; damage ends in nothing."""
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    def inflate(piece: bytes) -> bytes:
        try:
            return decoder.decompress(piece[:_LOOKED_AT_BYTES], _LOOKED_AT_BYTES)
        except zlib.error:
            return b""

    return inflate


def _as_it_is(piece: bytes) -> bytes:
    return piece
