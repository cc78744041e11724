"""From what Envoy showed of a request to its fields; the event loop stays free meanwhile."""

import asyncio
import gzip
import itertools
import json
import random
import threading
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from extproc import request_reader
from extproc.apis import LlmRequest, Unreadable, openai_chat
from extproc.apis.large_body import PARSED_BYTES
from extproc.apis.request import ChatPrompt, OpaquePrompt
from extproc.content_encoding import Undecodable
from extproc.exchange import Headers
from extproc.request_reader import Cut, RequestReader, UndecodableBody
from extproc.session import MAX_BODY_BYTES, Decide

pytestmark = pytest.mark.alone

BODY = b'{"model":"m","stream":true,"max_tokens":9,"messages":[{"role":"user","content":"hi"}]}'
DEADLINE_S = 60.0  # of what is not about deadlines: a busy machine may take its time
# What the filter promises is 20 ms; the rest is for a machine that others use as well.
STALL_S = 0.06


@pytest.fixture
async def reader() -> AsyncIterator[RequestReader]:
    made = RequestReader(threads=2, deadline_s=DEADLINE_S)
    yield made
    made.close()


def case(body: bytes | None, headers: dict[str, str] | None = None, complete: bool = True) -> Decide:
    return Decide(openai_chat.API, Headers((headers or {}).items()), body, complete=complete)


def coded(body: bytes, encoding: str = "gzip") -> Decide:
    return case(body, {"content-encoding": encoding})


def padded(size: int) -> bytes:
    front = BODY[:-1] + b',"pad":"'
    return front + b"x" * (size - len(front) - 2) + b'"}'


async def test_a_whole_body_is_read_by_its_api(reader: RequestReader) -> None:
    request = await reader.read(case(BODY))
    assert request == openai_chat.read(BODY)
    assert isinstance(request.prompt, ChatPrompt)


@pytest.mark.parametrize(
    ("number", "told"),
    [("NaN", "NaN"), ("Infinity", "Infinity"), ("-Infinity", "-Infinity"), ("1e400", "1e400"), ("-1E999", "-1E999")],
)
async def test_numbers_that_pythons_json_reads_and_json_has_not_are_read_as_no_numbers(
    reader: RequestReader, number: str, told: str
) -> None:
    """Engines read with json.loads and would serve the request."""
    sent = BODY[:-1] + f',"max_queue_wait_s":{number},"temperature":{number}}}'.encode()
    assert json.loads(sent)["model"] == "m"
    request = await reader.read(case(sent))
    assert request.max_queue_wait_s == told
    assert (request.model, request.streaming, request.max_tokens) == ("m", True, 9)


@pytest.mark.parametrize("body", [BODY[:-1], BODY[:-1] + b',"a":' + b"[" * 50_000, padded(1 << 20)[:-1]])
async def test_what_is_no_json_to_anybody_is_unreadable(reader: RequestReader, body: bytes) -> None:
    with pytest.raises(Unreadable):
        await reader.read(case(body))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("text", ["hi", "é", "😀", "x" * 100_000])
async def test_a_body_is_read_in_every_encoding_that_engines_take(
    reader: RequestReader, encoding: str, text: str
) -> None:
    """FastAPI reads with json.loads, which tells encodings by the first bytes, mark or not."""
    plain = BODY.replace(b"hi", text.encode())
    sent = plain.decode().encode(encoding)
    assert json.loads(sent) == json.loads(plain)
    request = await reader.read(case(sent))
    assert request == openai_chat.read(plain)


@pytest.mark.parametrize(
    "body",
    [
        b"\xef\xbb\xbf" * 2 + BODY,
        b" \xef\xbb\xbf" + BODY,
        b"\xef\xbb",
        b"\xef\xbb\xbf",
        BODY.decode().encode("utf-16") + b"\x00",
        padded(1 << 20).decode().encode("utf-16"),
        BODY.decode().encode("utf-32")[:-1],
        b"\xff\xfe\x00\xdc",
        b"",
    ],
)
async def test_what_is_in_no_encoding_or_too_much_of_it_is_unreadable(reader: RequestReader, body: bytes) -> None:
    with pytest.raises(Unreadable):
        await reader.read(case(body))


@pytest.mark.parametrize("header", ["x-ai-eg-model", "x-gateway-model-name"])
async def test_headers_alone_name_the_model_where_a_gateway_does(reader: RequestReader, header: str) -> None:
    request = await reader.read(case(None, {"content-length": "123456", header: "m"}))
    assert request == LlmRequest("m", OpaquePrompt(), True, None, None, True, None, body_bytes=123456)


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (None, 4096),
        ("0", 0),
        ("17", 17),
        ("-1", 4096),
        ("lots", 4096),
        ("1" * 30, MAX_BODY_BYTES),
        ("٣", 4096),
        ("", 4096),
    ],
)
async def test_headers_alone_tell_a_size_that_can_be_believed(
    reader: RequestReader, length: str | None, size: int
) -> None:
    request = await reader.read(case(None, {} if length is None else {"content-length": length}))
    assert (request.model, request.body_bytes) == (None, size)


async def test_the_beginning_of_a_body_is_enough_for_a_decision_by_load(reader: RequestReader) -> None:
    request = await reader.read(case(BODY[:60], complete=False))
    assert (request.model, request.streaming, request.max_tokens) == ("m", True, 9)
    assert isinstance(request.prompt, OpaquePrompt)
    with pytest.raises(Unreadable):
        await reader.read(case(BODY[:10], complete=False))


async def test_a_compressed_body_is_read_like_a_plain_one(reader: RequestReader) -> None:
    request = await reader.read(coded(gzip.compress(BODY)))
    assert request == openai_chat.read(BODY)
    assert request.body_bytes == len(BODY)


async def test_a_huge_body_is_decided_by_its_load(reader: RequestReader) -> None:
    within, beyond = padded(PARSED_BYTES), padded(PARSED_BYTES + 1)
    assert isinstance((await reader.read(case(within))).prompt, ChatPrompt)
    for request in (
        await reader.read(case(beyond)),
        await reader.read(coded(gzip.compress(beyond, 1))),
    ):
        assert isinstance(request.prompt, OpaquePrompt)
        assert (request.model, request.streaming, request.max_tokens) == ("m", True, 9)
        assert request.body_bytes == len(beyond)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [(BODY, "gzip"), (gzip.compress(BODY)[:-1], "gzip"), (gzip.compress(BODY), "what"), (gzip.compress(BODY), "br")],
)
async def test_what_cannot_be_decoded_is_unreadable_and_told_apart(
    reader: RequestReader, body: bytes, encoding: str
) -> None:
    with pytest.raises(UndecodableBody):
        await reader.read(coded(body, encoding))
    with pytest.raises(Unreadable):
        await reader.read(case(body[:-1]))


async def test_decoding_that_takes_too_long_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has not begun by then never does: overload must not feed itself."""
    begun = itertools.count()
    release = threading.Event()

    def slow(body: bytes, content_encoding: str | None, limit: int) -> bytes:
        next(begun)
        release.wait(10)
        return body

    monkeypatch.setattr(request_reader, "decode", slow)
    reader = RequestReader(threads=1, deadline_s=0.2)
    started_s = time.monotonic()
    cases = [reader.read(coded(BODY)) for _ in range(20)]
    outcomes = await asyncio.gather(*cases, return_exceptions=True)
    assert time.monotonic() - started_s < 2
    assert [type(outcome) for outcome in outcomes] == [UndecodableBody] * 20
    release.set()
    assert (await reader.read(coded(BODY))).model == "m"
    assert next(begun) == 2  # the first, and the last
    reader.close()


async def test_a_fault_in_a_thread_that_nobody_waits_for_is_not_shouted_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors in these tests: an exception that was never retrieved would fail one."""

    def late(body: bytes, content_encoding: str | None, limit: int) -> bytes:
        time.sleep(0.2)
        raise Undecodable("late")

    monkeypatch.setattr(request_reader, "decode", late)
    reader = RequestReader(threads=1, deadline_s=0.05)
    with pytest.raises(UndecodableBody, match="too long"):
        await reader.read(coded(BODY))
    await asyncio.sleep(0.3)
    reader.close()


async def longest_stall_s(work: asyncio.Task[Any]) -> float:
    """How long the event loop was away at most while the work was done, but for when its thread had no processor."""
    worst_s, last_s = 0.0, time.perf_counter() - kept_waiting_s()
    while not work.done():
        await asyncio.sleep(0.001)
        now_s = time.perf_counter() - kept_waiting_s()
        worst_s, last_s = max(worst_s, now_s - last_s), now_s
    return worst_s


def kept_waiting_s() -> float:
    """How long this thread was ready to run so far, and others had the processors; where Linux says so."""
    try:
        told = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text()
    except OSError:
        return 0.0
    return int(told.split()[1]) / 1e9


def shallow(size: int) -> bytes:
    return zlib.compress(padded(size), 1)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        pytest.param(padded(PARSED_BYTES), None, id="parsed 8 MiB"),
        pytest.param(padded(MAX_BODY_BYTES), None, id="plain 64 MiB"),
        pytest.param(shallow(MAX_BODY_BYTES - 100), "deflate", id="zeros 64 MiB"),
        pytest.param(
            gzip.compress(BODY[:-1] + b',"pad":"' + random.Random(3).randbytes(20 << 20).hex().encode() + b'"}', 1),
            "gzip",
            id="noise 40 MiB",
        ),
    ],
)
async def test_the_event_loop_goes_on_meanwhile(reader: RequestReader, body: bytes, encoding: str | None) -> None:
    stalls_s = []
    for _ in range(4):
        work = asyncio.create_task(reader.read(case(body) if encoding is None else coded(body, encoding)))
        stalls_s.append(await longest_stall_s(work))
        assert work.result().model == "m"
    assert min(stalls_s) < STALL_S, stalls_s


async def test_tools_that_are_null_are_no_tools(reader: RequestReader) -> None:
    """Clients that write every field out send them; their prompts are as exact as any."""
    request = await reader.read(case(BODY[:-1] + b',"tools":null}'))
    assert isinstance(request.prompt, ChatPrompt)
    assert request.prompt.tools is None


# A field that goes on to nobody

BOUNDED = BODY[:-1] + b',"max_queue_wait_s":10}'


@pytest.mark.parametrize("pad", [0, 100_000])
async def test_a_field_is_cut_out_of_a_body_small_or_large(reader: RequestReader, pad: int) -> None:
    body = padded(pad) if pad else BODY
    bounded = body[:-1] + b',"max_queue_wait_s":10}'
    assert await reader.cut(case(bounded), "max_queue_wait_s") == (Cut.REMOVED, body)
    assert await reader.cut(case(b"\xef\xbb\xbf" + bounded), "max_queue_wait_s") == (
        Cut.REMOVED,
        b"\xef\xbb\xbf" + body,
    )
    assert await reader.cut(case(body), "max_queue_wait_s") == (None, None)


@pytest.mark.parametrize(
    ("left", "why"),
    [
        (coded(gzip.compress(BOUNDED)), Cut.COMPRESSED),
        (case(BOUNDED.decode().encode("utf-16")), Cut.OTHER_ENCODING),
        (case(BOUNDED, complete=False), Cut.INCOMPLETE),
        (case(None), Cut.INCOMPLETE),
        (case(padded(PARSED_BYTES)[:-1] + b',"max_queue_wait_s":10}'), Cut.TOO_LARGE),
        (case(BODY[:-1] + b',"a":[' + b"[]," * 600_000 + b'0],"max_queue_wait_s":10}'), Cut.TOO_HARD),
    ],
    ids=lambda value: value.value if isinstance(value, Cut) else "",
)
async def test_a_body_that_it_cannot_be_cut_out_of_is_left_alone(reader: RequestReader, left: Decide, why: Cut) -> None:
    assert await reader.cut(left, "max_queue_wait_s") == (why, None)


async def test_cutting_that_takes_too_long_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(request_reader, "without_field", lambda body, field: released.wait(30) and body)
    reader = RequestReader(threads=1, deadline_s=0.05)
    try:
        assert await reader.cut(case(padded(100_000)), "max_queue_wait_s") == (Cut.TOO_HARD, None)
    finally:
        released.set()
        reader.close()


@pytest.mark.parametrize("piece", [b'"",', b"[[]],", b'"' + b'\\"' * 500 + b'",', b"12345678,"])
async def test_the_event_loop_goes_on_while_a_field_is_cut_out(reader: RequestReader, piece: bytes) -> None:
    # As large as one may be of which the strings and brackets are still all looked at.
    count = min(6_000_000 // len(piece), 200_000)
    body = BODY[:-1] + b',"a":[' + piece * count + b'0],"max_queue_wait_s":10}'
    stalls_s = []
    for _ in range(4):
        work = asyncio.create_task(reader.cut(case(body), "max_queue_wait_s"))
        stalls_s.append(await longest_stall_s(work))
        assert work.result()[0] is Cut.REMOVED
    assert min(stalls_s) < STALL_S, stalls_s
