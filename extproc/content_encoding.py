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
# A decoder's window is memory that the sender chooses; 8 MiB is what RFC 9659 lets an HTTP sender use.
_ZSTD_WINDOW_BYTES = 8 << 20


class Undecodable(ValueError):
    """An encoding that we do not know, damaged data, or more output than is allowed."""


def decode(body: bytes, content_encoding: str | None, limit: int) -> bytes:
    """The body without its content codings (RFC 9110: gzip, deflate, br, zstd, any of them in a row).

    Raises Undecodable, in particular when more than `limit` bytes would come out of any of them.
    """
    codings = [coding.strip().lower() for coding in (content_encoding or "").split(",")]
    for coding in reversed(codings):
        if coding in ("", "identity"):
            continue
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
    output = b""
    while body:  # several members may follow one another
        decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        output += _bounded(decoder.decompress(body, limit + 1 - len(output)), limit - len(output))
        if not decoder.eof:
            raise Undecodable("gzip data ends early")
        body = decoder.unused_data
    return output


def _deflate(body: bytes, limit: int) -> bytes:
    # RFC 9110 means the zlib format; some senders leave its wrapper out.
    wrapped = len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0
    decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)
    output = _bounded(decoder.decompress(body, limit + 1), limit)
    if not decoder.eof:
        raise Undecodable("deflate data ends early")
    return output


def _brotli(body: bytes, limit: int) -> bytes:
    decoder = brotli.Decompressor()
    pieces, size = [], 0
    piece = decoder.process(body, output_buffer_limit=_PIECE_BYTES)
    while True:
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise Undecodable(f"more than {limit} bytes come out")
        if decoder.is_finished():
            return b"".join(pieces)
        if decoder.can_accept_more_data():
            raise Undecodable("brotli data ends early")
        piece = decoder.process(b"", output_buffer_limit=_PIECE_BYTES)


def _zstd(body: bytes, limit: int) -> bytes:
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    output = io.BytesIO()
    with decoder.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        while piece := reader.read(_PIECE_BYTES):
            output.write(piece)
            if output.tell() > limit:
                raise Undecodable(f"more than {limit} bytes come out")
    return output.getvalue()


def _bounded(output: bytes, limit: int) -> bytes:
    if len(output) > limit:
        raise Undecodable("more bytes come out than are allowed")
    return output


_DECODERS: dict[str, Callable[[bytes, int], bytes]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": _deflate,
    "br": _brotli,
    "zstd": _zstd,
}
