"""A field is cut out of a body, and nothing else of it changes."""

import contextlib
import json
import re
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.spare_field import CannotCut, without_field

NAME = "max_queue_wait_s"
BLANKS = st.text(" \t\n\r", max_size=3)
KEYS = st.one_of(st.just(NAME), st.sampled_from(["model", "a\\", 'b"', "max_queue_wait_", "ключ"]), st.text(max_size=6))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


@st.composite
def written(draw: st.DrawFn, value: Any) -> str:
    """`value` as JSON in one of the many ways in which it can be written."""
    match value:
        case str():
            text = json.dumps(value, ensure_ascii=draw(st.booleans()))
            if draw(st.booleans()):
                # Any character may be an escape.
                text = '"' + "".join(f"\\u{ord(c):04x}" if ord(c) < 0x80 else c for c in value) + '"'
            return text
        case list():
            items = [draw(written(item)) for item in value]
            return "[" + ",".join(draw(BLANKS) + item + draw(BLANKS) for item in items) + "]"
        case dict():
            return draw(object_of(list(value.items())))[0]
    return json.dumps(value)


@st.composite
def object_of(draw: st.DrawFn, pairs: list[tuple[str, Any]]) -> tuple[str, list[str]]:
    """An object with these members, and each member by itself, as they are written."""
    members = [draw(written(k)) + draw(BLANKS) + ":" + draw(BLANKS) + draw(written(v)) for k, v in pairs]
    return "{" + ",".join(draw(BLANKS) + member + draw(BLANKS) for member in members) + "}", members


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    pairs = draw(st.lists(st.tuples(KEYS, VALUES), max_size=6))
    text, members = draw(object_of(pairs))
    return draw(BLANKS) + text + draw(BLANKS), [(pair[0], member) for pair, member in zip(pairs, members, strict=True)]


@given(bodies())
def test_what_is_left_is_the_same_without_the_field_and_byte_for_byte(body: tuple[str, list[tuple[str, str]]]) -> None:
    text, members = body
    # A lone surrogate is no UTF-8; no caller can send one unescaped.
    raw = text.encode("utf-8", "replace")
    cut = without_field(raw, NAME)

    def own_pairs(data: bytes) -> list[tuple[str, Any]]:
        outermost: list[tuple[str, Any]] = json.loads(data, object_pairs_hook=lambda pairs: Pairs(pairs))
        return outermost

    assert own_pairs(cut) == [pair for pair in own_pairs(raw) if pair[0] != NAME]
    kept = [member.encode("utf-8", "replace") for key, member in members if key != NAME]
    space = rb"[ \t\n\r]*"
    between = space + b"," + space
    assert re.fullmatch(space + rb"\{" + space + between.join(map(re.escape, kept)) + space + rb"\}" + space, cut)
    if len(kept) == len(members):
        assert cut is raw


class Pairs(list[tuple[str, Any]]):
    """An object's members, repeated ones included."""


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (b'{"max_queue_wait_s": 10, "a": 1}', b'{ "a": 1}'),
        (b'{"a": 1, "max_queue_wait_s": 10}', b'{"a": 1}'),
        (b'{"a": 1 , "max_queue_wait_s" : 10.5e0 , "b": 2}', b'{"a": 1 ,  "b": 2}'),
        (b'{"max_queue_wait_s":null}', b"{}"),
        (b'{"max_queue_wait_s":1,"max_queue_wait_s":2}', b"{}"),
        (b'{"a":1,"max_queue_wait_s":1,"max_queue_wait_s":2}', b'{"a":1}'),
        (b'{"a":1,"max_queue_wait_s":1,"b":0,"max_queue_wait_s":2}', b'{"a":1,"b":0}'),
        (
            rb'{"a":"\\\"","\u006dax_queue_wait_s":[1,{"]":"}\\"}],"b":"max_queue_wait_s"}',
            rb'{"a":"\\\"","b":"max_queue_wait_s"}',
        ),
        (b'{"i":{"max_queue_wait_s":1},"a":[{"max_queue_wait_s":1}]}',) * 2,
        (b'\xef\xbb\xbf {"max_queue_wait_s":1,"n":1.00,"n":-0.0e+1}', b'\xef\xbb\xbf {"n":1.00,"n":-0.0e+1}'),
    ],
)
def test_bodies_as_they_are_seen(body: bytes, left: bytes) -> None:
    assert without_field(body, NAME) == left


@given(st.binary(max_size=60).map(lambda data: b'{"max_queue_wait_s":1,' + data))
@example(b"")
@example(b"[]")
@example(b'{"max_queue_wait_s":1,"a":"')
@example(b'{"max_queue_wait_s":1,"a":[[}')
@example(b'{"max_queue_wait_s" 1}')
@example(b'{"max_queue_wait_s":1,}')
@example(b'{"max_queue_wait_s":}')
def test_what_is_no_json_never_makes_it_fail_otherwise(data: bytes) -> None:
    try:
        sound = isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        sound = False
    if sound:
        assert NAME not in json.loads(without_field(data, NAME))
    else:
        with contextlib.suppress(CannotCut):
            without_field(data, NAME)


@pytest.mark.parametrize(
    "piece", [b"[],", b'"",', b'{"a":"\\\\\\"\\\\"},', b"1234567890,", b'"' + b"\\\\" * 4000 + b'",']
)
def test_a_body_that_is_made_to_be_hard_to_look_at_is_done_in_linear_time(piece: bytes) -> None:
    def took_s(size: int) -> float:
        body = b'{"a":[' + piece * (size // len(piece)) + b'0],"max_queue_wait_s":1}'
        began_s = time.thread_time()
        assert without_field(body, NAME).endswith(b"0]}")
        return time.thread_time() - began_s

    small_s, large_s = min(took_s(200_000) for _ in range(5)), min(took_s(1_200_000) for _ in range(3))
    assert large_s < 6 * 4 * small_s + 0.01


def test_too_many_strings_and_brackets_are_not_looked_at() -> None:
    with pytest.raises(CannotCut, match="more than 1000000"):
        without_field(b'{"a":[' + b"[]," * 600_000 + b'0],"max_queue_wait_s":1}', NAME)
