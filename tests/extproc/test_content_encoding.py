"""Compressed bodies: decoded where that is safe, refused where it is not, and always within bounds."""

import gzip
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable

import brotli
import pytest
import zstandard

from extproc.answer import AnswerKind, AnswerReader
from extproc.content_encoding import Undecodable, decode, is_plain

LIMIT = 1 << 20
PLAIN = b'{"model":"m","messages":[{"role":"user","content":"' + b"hello w\xc3\xb6rld " * 3000 + b'"}]}'
NOISE = random.Random(1).randbytes(300_000)


def deflate(body: bytes, wbits: int) -> bytes:
    compressor = zlib.compressobj(wbits=wbits)
    return compressor.compress(body) + compressor.flush()


def zlib_format(body: bytes) -> bytes:
    return deflate(body, zlib.MAX_WBITS)


def raw_deflate(body: bytes) -> bytes:
    return deflate(body, -zlib.MAX_WBITS)


def streamed_zstd(body: bytes) -> bytes:
    """Without its size in front."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(body) + compressor.flush()


def brotli_format(body: bytes) -> bytes:
    compressed: bytes = brotli.compress(body, quality=3)
    return compressed


CODINGS: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("x-gzip", gzip.compress),
    ("deflate", zlib_format),
    ("deflate", raw_deflate),
    ("br", brotli_format),
    ("zstd", zstandard.compress),
    ("zstd", streamed_zstd),
]
each_coding = pytest.mark.parametrize(
    ("coding", "compress"), CODINGS, ids=lambda value: getattr(value, "__name__", value)
)


@each_coding
@pytest.mark.parametrize(
    "body", [PLAIN, b"", b"x", NOISE, bytes(LIMIT)], ids=["text", "empty", "one", "noise", "limit"]
)
def test_what_was_compressed_comes_out(coding: str, compress: Callable[[bytes], bytes], body: bytes) -> None:
    assert decode(compress(body), coding, LIMIT) == body
    assert decode(compress(body), f" {coding.upper()} ", LIMIT) == body


@pytest.mark.parametrize("encoding", [None, "", "identity", " Identity "])
def test_a_plain_body_is_itself(encoding: str | None) -> None:
    assert is_plain(encoding)
    assert decode(b"not compressed", encoding, LIMIT) == b"not compressed"


def test_gzip_members_follow_one_another() -> None:
    whole = b"".join(gzip.compress(PLAIN[start : start + 1000]) for start in range(0, len(PLAIN), 1000))
    assert decode(whole, "gzip", LIMIT) == PLAIN


def test_zstd_frames_follow_one_another() -> None:
    skipped = (0x184D2A50).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes"
    whole = zstandard.compress(PLAIN[:500]) + skipped + zstandard.compress(PLAIN[500:])
    assert decode(whole, "zstd", LIMIT) == PLAIN


def test_codings_are_taken_off_in_the_reverse_of_the_order_in_which_they_were_put_on() -> None:
    chained = gzip.compress(zstandard.compress(brotli.compress(zlib_format(PLAIN))))
    assert decode(chained, "deflate, br,zstd , gzip", LIMIT) == PLAIN
    with pytest.raises(Undecodable):
        decode(chained, "gzip, zstd, br, deflate", LIMIT)
    assert decode(gzip.compress(PLAIN), "identity, gzip, identity", LIMIT) == PLAIN


def test_more_codings_than_anybody_needs_are_refused() -> None:
    body = PLAIN
    for _ in range(5):
        body = gzip.compress(body)
    with pytest.raises(Undecodable, match="4 content codings"):
        decode(body, "gzip," * 4 + "gzip", LIMIT)


@pytest.mark.parametrize("encoding", ["compress", "lzma", "gzip, what", "aws-chunked", "gzip;q=1", "*"])
def test_an_unknown_coding_is_named(encoding: str) -> None:
    with pytest.raises(Undecodable, match="is not known"):
        decode(gzip.compress(PLAIN), encoding, LIMIT)


@each_coding
def test_a_truncated_body_is_refused_or_ends_early(coding: str, compress: Callable[[bytes], bytes]) -> None:
    """zstd's decoder does not tell: what comes out then is no JSON any more."""
    whole = compress(PLAIN)
    for cut in sorted({0, 1, 2, 3, 9, len(whole) // 2, len(whole) - 1}):
        if coding == "zstd":
            assert PLAIN.startswith(decode(whole[:cut], coding, LIMIT))
        elif cut or "gzip" not in coding:
            with pytest.raises(Undecodable):
                decode(whole[:cut], coding, LIMIT)


@each_coding
def test_damage_is_refused_or_changes_something_but_is_no_surprise(
    coding: str, compress: Callable[[bytes], bytes]
) -> None:
    whole = compress(PLAIN)
    rng = random.Random(2)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        try:
            decode(bytes(damaged), coding, LIMIT)
        except Undecodable:
            refused += 1
    assert refused > 0


@each_coding
def test_what_is_not_compressed_at_all_is_refused(coding: str, compress: Callable[[bytes], bytes]) -> None:
    del compress
    with pytest.raises(Undecodable):
        decode(PLAIN, coding, LIMIT)


def test_what_follows_a_gzip_member_and_is_none_is_refused() -> None:
    with pytest.raises(Undecodable):
        decode(gzip.compress(PLAIN) + b"more", "gzip", LIMIT)


def bomb(coding: str, size: int) -> bytes:
    """So many zeros, compressed piece by piece."""
    zeros = bytes(1 << 20)
    count = size >> 20
    if coding == "br":
        return bytes(brotli.compress(bytes(size), quality=1))
    if coding == "zstd":
        frames = zstandard.ZstdCompressor().compressobj()
        return b"".join(frames.compress(zeros) for _ in range(count)) + frames.flush()
    wbits = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS, "raw": -zlib.MAX_WBITS}[coding]
    compressor = zlib.compressobj(wbits=wbits)
    return b"".join(compressor.compress(zeros) for _ in range(count)) + compressor.flush()


@pytest.mark.parametrize("kind", ["gzip", "deflate", "raw", "br", "zstd"])
def test_a_bomb_is_refused_with_little_memory_and_soon(kind: str) -> None:
    body = bomb(kind, 256 << 20)
    assert len(body) < 2 << 20
    coding = "deflate" if kind == "raw" else kind
    tracemalloc.start()
    try:
        started_s = time.thread_time()
        with pytest.raises(Undecodable, match="bytes come out"):
            decode(body, coding, 8 << 20)
        took_s = time.thread_time() - started_s
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert took_s < 1


def test_a_bomb_in_a_bomb_is_refused_at_the_first() -> None:
    body = gzip.compress(bomb("gzip", 256 << 20))
    with pytest.raises(Undecodable, match="bytes come out"):
        decode(body, "gzip, gzip", 8 << 20)


def test_a_zstd_window_of_the_senders_choice_is_refused() -> None:
    window = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=window).compressobj()
    body = compressor.compress(NOISE * 40) + compressor.flush()
    with pytest.raises(Undecodable, match="zstd"):
        decode(body, "zstd", 64 << 20)


@pytest.mark.parametrize("members", [gzip.compress(b""), gzip.compress(b"x")], ids=["empty", "tiny"])
def test_millions_of_members_are_not_followed(members: bytes) -> None:
    body = members * ((8 << 20) // len(members))
    started_s = time.thread_time()
    with pytest.raises(Undecodable, match="4096 gzip members"):
        decode(body, "gzip", 64 << 20)
    assert time.thread_time() - started_s < 2


# Compressed answers: the first token is seen in them as well.

STREAM = b": keep-alive\n\n" * 3 + b'data: {"choices":[]}\n\n' + b"data: more\n\n" * 50


def flushed(pieces: list[bytes]) -> list[bytes]:
    """As engines behind a compressing middleware send them: each can be decoded as it comes."""
    compressor = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    return [compressor.compress(piece) + compressor.flush(zlib.Z_SYNC_FLUSH) for piece in pieces]


def kinds(chunks: list[bytes]) -> list[AnswerKind | None]:
    reader = AnswerReader()
    return [reader.feed(chunk, 200, end_of_stream=False) for chunk in chunks]


def test_the_first_token_of_a_gzipped_stream_is_seen_in_the_chunk_that_brings_it() -> None:
    assert kinds(flushed([b": wait\n\n", b": wait\n\n", b"data: 1\n\n"])) == [None, None, AnswerKind.STREAMED]
    assert kinds(flushed([b"event: message_start\ndata: {}\n\n"])) == [AnswerKind.STREAMED]


def test_a_gzipped_stream_is_told_wherever_it_is_cut() -> None:
    whole = gzip.compress(STREAM)
    for cut in range(1, len(whole)):
        told = [kind for kind in kinds([whole[:cut], whole[cut:]]) if kind is not None]
        assert told[:1] == [AnswerKind.STREAMED], cut
    told = [kind for kind in kinds([whole[at : at + 1] for at in range(len(whole))]) if kind is not None]
    assert told[0] is AnswerKind.STREAMED


def test_gzipped_json_is_a_plain_answer() -> None:
    assert kinds(flushed([b'{"id":"x","choices":[]}'])) == [AnswerKind.PLAIN]


def test_a_damaged_gzipped_answer_is_nothing() -> None:
    reader = AnswerReader()
    assert reader.feed(b"\x1f\x8b" + b"\xff" * 100, 200, end_of_stream=False) is None
    assert reader.feed(b"\xff" * 100, 200, end_of_stream=True) is AnswerKind.EMPTY
