"""Compressed request bodies, decoded for reading only: what Envoy forwards is what the client sent.

All decoders give way to other threads while they work. Output is bounded: a small body that would become a huge one is
not read, and goes on to the engine as it is.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import brotli
import zstandard

_PIECE_BYTES = 1 << 20
_INPUT_BYTES = 64 << 10
# More than these are made to keep us busy: of empty gzip members, 3 million fit into a body.
_MOST_CODINGS, _MOST_MEMBERS = 4, 4096
# A decoder's window is memory that the sender chooses; 8 MiB is what RFC 9659 lets an HTTP sender use.
_ZSTD_WINDOW_BYTES = 8 << 20


class Undecodable(ValueError):
    """An encoding that we do not know, damaged data, or more output than is allowed."""


class _Output:
    """What has come out so far. A buffer that hands itself over: joining pieces would copy 64 MiB with the GIL held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._buffer = io.BytesIO()

    def add(self, piece: bytes) -> None:
        if self._buffer.tell() + len(piece) > self._limit:
            raise Undecodable(f"more than {self._limit} bytes come out")
        self._buffer.write(piece)

    def whole(self) -> bytes:
        return self._buffer.getvalue()


def decode(body: bytes, content_encoding: str | None, limit: int) -> bytes:
    """The body without its content codings (RFC 9110: gzip, deflate, br, zstd, any of them in a row).

    Raises Undecodable, in particular when more than `limit` bytes would come out of any of them.
    """
    named = [coding.strip().lower() for coding in (content_encoding or "").split(",")]
    codings = [coding for coding in named if coding not in ("", "identity")]
    if len(codings) > _MOST_CODINGS:
        raise Undecodable(f"more than {_MOST_CODINGS} content codings")
    for coding in reversed(codings):
        decoder = _DECODERS.get(coding)
        if decoder is None:
            raise Undecodable(f"content-encoding {coding!r} is not known")
        try:
            body = decoder(body, limit)
        except (zlib.error, brotli.error, zstandard.ZstdError, EOFError) as error:
            raise Undecodable(f"content-encoding {coding!r}: {error}") from error
    return body


def is_plain(content_encoding: str | None) -> bool:
    return content_encoding is None or content_encoding.strip().lower() in ("", "identity")


def _gzip(body: bytes, limit: int) -> bytes:
    output = _Output(limit)
    at = 0
    for _ in range(_MOST_MEMBERS):  # several may follow one another
        if at == len(body):
            return output.whole()
        at = _inflate(body, at, zlib.MAX_WBITS | 16, output)
    raise Undecodable(f"more than {_MOST_MEMBERS} gzip members")


def _deflate(body: bytes, limit: int) -> bytes:
    # RFC 9110 means the zlib format; some senders leave its wrapper out.
    wrapped = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    output = _Output(limit)
    _inflate(body, 0, zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS, output)
    return output.whole()


def _inflate(body: bytes, at: int, wbits: int, output: _Output) -> int:
    """Decodes what begins at `at`; returns where it ended. In pieces both ways: each is copied with the GIL held."""
    decoder = zlib.decompressobj(wbits=wbits)
    while not decoder.eof:
        piece = body[at : at + _INPUT_BYTES]
        at += len(piece)
        came = decoder.decompress(piece, _PIECE_BYTES)
        output.add(came)
        while came and not decoder.eof:
            came = decoder.decompress(decoder.unconsumed_tail, _PIECE_BYTES)
            output.add(came)
        if not piece and not decoder.eof:
            raise Undecodable("the data ends early")
    return at - len(decoder.unused_data)


def _brotli(body: bytes, limit: int) -> bytes:
    decoder = brotli.Decompressor()
    output = _Output(limit)
    output.add(decoder.process(body, output_buffer_limit=_PIECE_BYTES))
    while not decoder.is_finished():
        if decoder.can_accept_more_data():
            raise Undecodable("the data ends early")
        output.add(decoder.process(b"", output_buffer_limit=_PIECE_BYTES))
    return output.whole()


def _zstd(body: bytes, limit: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    output = _Output(limit)
    with decoder.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        while piece := reader.read(_PIECE_BYTES):
            output.add(piece)
    return output.whole()


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
