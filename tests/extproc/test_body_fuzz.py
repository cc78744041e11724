"""Bodies that nobody would send, by the ten thousands: read or unreadable, and never long in the reading."""

import contextlib
import gzip
import random
import time
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import brotli
import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginesim.words import MODEL_FOLDER
from extproc.apis import LlmRequest, Unreadable, anthropic_messages, openai_chat, openai_completions
from extproc.apis.large_body import read_large
from extproc.completion_prompt import Parts, read_completion_prompt
from extproc.content_encoding import Undecodable, decode
from extproc.model_files import load_pool_text
from extproc.prompt_reader import Estimated
from extproc.wishes import BadWish, queue_wait_bound

# Examples, and bodies made of each.
STRUCTURED, STRUCTURED_EACH = 1500, 8
MUTATED, MUTATED_EACH = 1200, 25
PROMPTS, PROMPTS_EACH = 1200, 4
CODED, CODED_EACH = 700, 6
LIMIT_S = 0.02
OUTPUT_LIMIT = 1 << 20

READERS = (openai_chat.read, openai_completions.read, anthropic_messages.read, read_large)
TEXT = load_pool_text(MODEL_FOLDER)
T = TypeVar("T")
fuzzed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def test_the_cases_are_as_many_as_promised() -> None:
    bodies = STRUCTURED * STRUCTURED_EACH + MUTATED * MUTATED_EACH + PROMPTS * PROMPTS_EACH + CODED * CODED_EACH
    assert bodies >= 50_000


def in_time(work: Callable[[], T]) -> T:
    """What the work gives; an AssertionError if it takes more CPU time than it may, whenever it is done."""
    took_s: list[float] = []
    while True:
        started_s = time.thread_time()
        result = work()
        took_s.append(time.thread_time() - started_s)
        if took_s[-1] < LIMIT_S:
            return result
        # This machine is shared, and a garbage collection may fall into any one of them.
        assert len(took_s) < 4, took_s


def check(body: bytes, render: bool = False) -> int:
    """Reads a body in every way; how many could."""
    readable = 0
    for read in READERS:
        request = one_reading(read, body)
        if request is None:
            continue
        readable += 1
        assert isinstance(request.model, str)
        assert isinstance(request.streaming, bool)
        assert request.max_tokens is None or request.max_tokens > 0
        assert request.body_bytes == len(body)
        with contextlib.suppress(BadWish):
            bound_s = queue_wait_bound(None, request.max_queue_wait_s)
            assert bound_s is None or 0 <= bound_s < float("inf")
        if render:
            tokens = TEXT.tokens(request)
            assert isinstance(tokens, Estimated) or len(tokens) >= 0
    return readable


def one_reading(read: Callable[[bytes], LlmRequest], body: bytes) -> LlmRequest | None:
    """In time, and Unreadable is the only thing that may be raised."""

    def work() -> LlmRequest | None:
        try:
            return read(body)
        except Unreadable:
            return None

    return in_time(work)


FIELDS = [
    *("model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "tools", "chat_template_kwargs"),
    *("add_generation_prompt", "add_special_tokens", "echo", "prompt_logprobs", "cache_salt", "max_queue_wait_s"),
    *("system", "thinking", "output_config", "n", "stop", "metadata", "role", "content", "type", "text"),
]
KEYS = st.sampled_from([*FIELDS, "", "x", "é", "\x00", "tool_calls", "function", "arguments", "name"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 1e300, -0.0, 1e-320])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(
        ["user", "assistant", "system", "text", "image", "x-anthropic-billing-header", "\ufeff", "{{ 1 }}"]
    )
)
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", ""]), "content": JSON},
        optional={"tool_calls": JSON, "name": JSON, "reasoning": JSON, "tool_call_id": JSON, "tools": JSON},
    ),
    max_size=4,
)
NEEDED = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt": "x"}
BODIES = st.builds(
    lambda fields, messages: {**NEEDED, **fields, **({} if messages is None else {"messages": messages})},
    st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6),
    st.none() | MESSAGES,
)


@settings(fuzzed, max_examples=STRUCTURED)
@given(BODIES, st.integers(0, 2**32))
def test_any_fields_of_any_type(fields: dict[str, Any], seed: int) -> None:
    whole = msgspec.json.encode(fields)
    check(whole, render=True)
    rng = random.Random(seed)
    for _ in range(STRUCTURED_EACH - 1):
        check(mutated(whole, rng))


CORPUS = [
    b'{"model":"m","stream":true,"max_tokens":7,"messages":[{"role":"user","content":"hi \xc3\xa9 \\u00e9"}]}',
    b'{"model":"m","prompt":[1,2,3,4294967295],"max_queue_wait_s":1.5,"stream_options":{"include_usage":true}}',
    b'{"model":"m","prompt":["a","b"],"n":2,"echo":false,"cache_salt":"s"}',
    b'{"model":"m","system":[{"type":"text","text":"x"}],"messages":[{"role":"user","content":[{"type":"text",'
    b'"text":"hello"}]}],"max_tokens":5,"thinking":{"type":"disabled"},"tools":[]}',
    b'\xef\xbb\xbf{"model":"m","messages":[]}',
    b'{"model":"a","model":"b","messages":[],"messages":[{}],"prompt":"x","prompt":1}',
    b'{"model":"m","messages":[' + b"[" * 60 + b"]" * 60 + b'],"prompt":' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}",
    b'{"model":"m","prompt":"' + b"word " * 400 + b'","messages":[{"role":"user","content":"' + b"x" * 2000 + b'"}]}',
]
PIECES = [
    *(
        b"",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b"\\",
        b",",
        b":",
        b"null",
        b"true",
        b"NaN",
        b"Infinity",
        b"-",
        b"1e999",
        b"1E+",
    ),
    *(
        b"\x00",
        b"\xff",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b"\\ud800",
        b"\\u0000",
        b"9" * 400,
        b"0." + b"0" * 400 + b"1",
    ),
    *(
        b'"model":',
        b'"messages":',
        b'"prompt":',
        b'"tools":',
        b'"stream":true,',
        b'"max_queue_wait_s":"',
        b"//",
        b"/*",
        b"\r\n",
    ),
    *(
        b"[" * 2000,
        b'{"a":' * 1000,
        b"]" * 2000,
        b" " * 3000,
        b'"' * 999,
        b"\\" * 999,
        b'"model":"' * 300,
        b"1," * 3000,
    ),
]


def mutated(body: bytes, rng: random.Random) -> bytes:
    """One to four changes: bytes, pieces, repetitions, cuts."""
    result = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        start = rng.randint(0, len(result))
        end = min(len(result), start + rng.choice((0, 0, 1, 2, 8, 40, 400)))
        match rng.randrange(6):
            case 0:
                result[start:end] = rng.randbytes(end - start)
            case 1:
                result[start:start] = result[start:end] * rng.choice((1, 2, 50))
            case 2:
                del result[start:end]
            case 3 if rng.random() < 0.2:
                del result[start:]
            case _:
                result[start:end] = rng.choice(PIECES)
    return bytes(result)


@settings(fuzzed, max_examples=MUTATED)
@given(st.sampled_from(CORPUS), st.integers(0, 2**32))
def test_requests_damaged_in_every_way(whole: bytes, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(MUTATED_EACH):
        check(mutated(whole, rng))


def test_the_mutations_leave_enough_to_be_read() -> None:
    """A fuzzer all of whose bodies are broken at the first byte would test nothing."""
    rng = random.Random(4)
    readable = sum(check(mutated(CORPUS[number % len(CORPUS)], rng)) > 0 for number in range(1000))
    assert 150 < readable < 950


IDS = st.lists(st.integers(-2, 2**33) | st.floats(allow_nan=False, allow_infinity=False) | st.none(), max_size=30)
COMPLETION_PROMPTS = JSON | IDS | st.lists(IDS, max_size=3) | st.lists(st.text(max_size=5), max_size=3) | st.text()
WHITE = ["", " ", "\n\t", "\r\n  "]


@settings(fuzzed, max_examples=PROMPTS)
@given(COMPLETION_PROMPTS, st.integers(0, 2**32))
def test_any_completion_prompt(prompt: object, seed: int) -> None:
    rng = random.Random(seed)
    encoded = msgspec.json.encode(prompt)
    for number in range(PROMPTS_EACH):
        white = rng.choice(WHITE).encode()
        raw = white + encoded.replace(b",", b"," + white).replace(b"[", b"[" + white) + white if number else encoded
        read = in_time(partial(read_completion_prompt, msgspec.Raw(raw)))
        if isinstance(read, str):
            assert isinstance(prompt, (str, list))
        elif not isinstance(read, Parts):
            assert isinstance(prompt, list)
            assert read.tolist() == (prompt[0] if prompt and isinstance(prompt[0], list) else prompt)


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1),
    "deflate": lambda body: zlib.compress(body, 1),
    "br": lambda body: bytes(brotli.compress(body, quality=1)),
    "zstd": zstandard.compress,
}


@settings(fuzzed, max_examples=CODED)
@given(
    st.lists(st.sampled_from([*CODINGS, "identity"]), min_size=1, max_size=3),
    st.binary(max_size=200) | st.sampled_from(CORPUS) | st.sampled_from([bytes(3 << 20), b"ab" * 200_000]),
    st.text(st.sampled_from("gzipdeflatebrstdidentity, ;=*Q0\x00é"), max_size=20),
    st.integers(0, 2**32),
)
def test_any_compressed_body(codings: list[str], body: bytes, other: str, seed: int) -> None:
    rng = random.Random(seed)
    packed = body
    for coding in codings:
        packed = CODINGS.get(coding, bytes)(packed)
    encoding = ",".join(codings)
    if len(body) <= OUTPUT_LIMIT:
        assert decode(packed, encoding, OUTPUT_LIMIT) == body
    else:
        assert encoding.replace(",", "").replace("identity", "") == "" or refused(packed, encoding)
    for number in range(CODED_EACH - 1):
        damaged, named = mutated(packed, rng), other if number == 0 else encoding
        with contextlib.suppress(Undecodable):
            output = in_time(partial(decode, damaged, named, OUTPUT_LIMIT))
            assert len(output) <= max(OUTPUT_LIMIT, len(damaged))


def refused(packed: bytes, encoding: str) -> bool:
    try:
        decode(packed, encoding, OUTPUT_LIMIT)
    except Undecodable:
        return True
    return False


@pytest.mark.parametrize(
    "unit",
    [
        b"[",
        b"{",
        b'{"a":',
        b'"',
        b"\\",
        b"1,",
        b"[1,",
        b'"a",',
        b'{"role":"user"},',
        b'"type":',
        b'"model":"m",',
        b"\xff",
        b" ",
    ],
)
@pytest.mark.parametrize("front", [b"", b'{"model":"m","messages":[', b'{"model":"m","prompt":['])
def test_a_megabyte_of_anything_takes_little_time_and_memory(front: bytes, unit: bytes) -> None:
    for body in (
        front + unit * ((1 << 20) // len(unit)),
        front + (unit * ((1 << 20) // len(unit))).strip(b",") + b"]}",
    ):
        check(body)
        tracemalloc.start()
        try:
            for read in READERS:
                with contextlib.suppress(Unreadable):
                    read(body)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 24 << 20
