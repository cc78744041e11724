"""A field cut out of a JSON body, for engines that refuse what they do not know. Byte for byte all else stays the same.

Nothing is parsed and written again: numbers, escapes, order, repeated keys and blanks are the caller's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = re.compile(rb"[ \t\n\r]*")
_SCALAR = re.compile(rb"[^ \t\n\r,\[\]{}\"]+")
_TOKEN = re.compile(rb'["\[\]{}]')
# A search holds the GIL: for at most a few milliseconds at a time.
_WINDOW_BYTES = 1 << 20
# At half a microsecond each. An agent's longest conversations have some ten thousand.
_MOST_TOKENS = 1_000_000


class CannotCut(ValueError):
    """It is no JSON object, or one with more strings and brackets than we are ready to look at."""


@dataclass(frozen=True, slots=True)
class _Member:
    """One key with its value: bytes from `start` to `end`; `follows` is where the next one's blanks begin, after the
    comma. None: it is the last."""

    name: bytes  # as it is written, without its quotes
    start: int
    end: int
    follows: int | None


def without_field(body: bytes, name: str) -> bytes:
    """`body`, a JSON object in UTF-8, without its own fields of this name; those of objects inside stay. The very same
    body where there is none. Raises CannotCut."""
    cuts: list[tuple[int, int]] = []
    kept_to: int | None = None
    for member in _members(body):
        if not _is_named(member.name, name):
            kept_to = member.end
        elif member.follows is not None:
            cuts.append((member.start, member.follows))
        elif kept_to is None:
            cuts.append((member.start, member.end))
        else:
            # The comma before it goes too, with all fields of the name that come after that.
            cuts = [cut for cut in cuts if cut[0] < kept_to]
            cuts.append((kept_to, member.end))
    if not cuts:
        return body
    ends = [0, *(end for _, end in cuts)]
    starts = [*(start for start, _ in cuts), len(body)]
    return b"".join(body[end:start] for end, start in zip(ends, starts, strict=True))


def _is_named(written: bytes, name: str) -> bool:
    if b"\\" not in written:
        return written == name.encode()
    try:
        return bool(json.loads(b'"' + written + b'"') == name)
    except ValueError:
        return False


def _members(body: bytes) -> Iterator[_Member]:
    at = _expect(body, _blanks(body, len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0), b"{")
    at = _blanks(body, at)
    if body[at : at + 1] == b"}":
        return
    tokens = 0
    while True:
        start = _expect(body, at, b'"') - 1
        key_end = _string_end(body, start + 1)
        value = _blanks(body, _expect(body, _blanks(body, key_end), b":"))
        end, seen = _value_end(body, value, _MOST_TOKENS - tokens)
        tokens += seen + 2
        at = _blanks(body, end)
        last = body[at : at + 1] != b","
        yield _Member(body[start + 1 : key_end - 1], start, end, None if last else at + 1)
        if last:
            at = _blanks(body, _expect(body, at, b"}"))
            if at < len(body):
                raise CannotCut(f"expected the end at byte {at}")
            return
        at = _blanks(body, at + 1)


def _blanks(body: bytes, at: int) -> int:
    found = _SPACE.match(body, at)
    assert found is not None
    return found.end()


def _expect(body: bytes, at: int, wanted: bytes) -> int:
    if body[at : at + 1] != wanted:
        raise CannotCut(f"expected {wanted.decode()} at byte {at}")
    return at + 1


def _string_end(body: bytes, at: int) -> int:
    """Behind the closing quote of the string whose first character is at `at`."""
    while True:
        quote = body.find(b'"', at)
        if quote < 0:
            raise CannotCut("a string has no end")
        first = quote
        while body[first - 1] == 0x5C:
            first -= 1
        at = quote + 1
        if (quote - first) % 2 == 0:
            return at


def _value_end(body: bytes, at: int, most_tokens: int) -> tuple[int, int]:
    """Where the value that begins at `at` ends, and how many strings and brackets were looked at."""
    if body[at : at + 1] not in (b'"', b"[", b"{"):
        scalar = _SCALAR.match(body, at)
        if scalar is None:
            raise CannotCut(f"expected a value at byte {at}")
        return scalar.end(), 1
    depth, tokens = 0, 0
    while True:
        token = _TOKEN.search(body, at, at + _WINDOW_BYTES)
        if token is None:
            at += _WINDOW_BYTES
            if at >= len(body):
                raise CannotCut("a list or an object has no end")
            continue
        tokens += 1
        if tokens > most_tokens:
            raise CannotCut(f"more than {_MOST_TOKENS} strings and brackets")
        at = token.end()
        match token.group():
            case b'"':
                at = _string_end(body, at)
            case b"[" | b"{":
                depth += 1
            case _:
                depth -= 1
        if depth <= 0:
            return at, tokens
