"""What kind of answer an engine gives, however its first bytes are cut into chunks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.answer import AnswerKind, AnswerReader

BOM = b"\xef\xbb\xbf"
STREAMS = [
    b'data: {"choices":[]}\n\n',
    b"data:x\n\n",
    b": keep-alive\n\n: keep-alive\n\ndata: 1\n\n",
    b": keep-alive\r\n\r\ndata: 1\r\n\r\n",
    b": keep-alive\r\rdata: 1\r\r",
    BOM + b"data: 1\n\n",
    BOM + b": hello\r\n\r\nevent: message\r\nid: 7\r\nretry: 10\r\ndata: 1\r\n\r\n",
    b"event: message\ndata: 1\n\n",
    b"event:message\nid:1\ndata: 1\n\n",
    b"\n\n\ndata: 1\n\n",
    b": " + b"long " * 1000 + b"\ndata: 1\n\n",
]


def kinds(*chunks: bytes, status: int | None = 200, ends: bool = False) -> list[AnswerKind | None]:
    reader = AnswerReader()
    return [
        reader.feed(chunk, status, end_of_stream=ends and number == len(chunks) - 1)
        for number, chunk in enumerate(chunks)
    ]


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_is_told_when_its_data_field_is_complete_wherever_it_is_cut(stream: bytes) -> None:
    complete = stream.index(b"data:") + len(b"data:")
    for cut in range(1, min(len(stream), 200)):
        first, second = kinds(stream[:cut], stream[cut:])
        assert first is (AnswerKind.STREAMED if cut >= complete else None), (cut, stream)
        if first is None:
            assert second is AnswerKind.STREAMED, (cut, stream)


@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_is_told_byte_by_byte(stream: bytes) -> None:
    told = kinds(*(stream[at : at + 1] for at in range(len(stream))))
    first = told.index(AnswerKind.STREAMED)
    assert told[:first] == [None] * first
    assert first + 1 == stream.index(b"data:") + len(b"data:")


@pytest.mark.parametrize("text", [b'{"id":"x"}', b"<html>", b"database: no", b"Data: 1", b' {"a":1}', b"[1,2,3]"])
def test_other_text_is_plain_wherever_it_is_cut(text: bytes) -> None:
    for cut in range(1, len(text)):
        assert [kind for kind in kinds(text[:cut], text[cut:]) if kind] != []
        assert AnswerKind.STREAMED not in kinds(text[:cut], text[cut:])


@pytest.mark.parametrize("text", [b"{}", b"1", b"data", b"\xef\xbb"])
def test_short_text_is_plain_when_it_has_ended(text: bytes) -> None:
    assert kinds(text, b"", ends=True) == [None, AnswerKind.PLAIN]


@pytest.mark.parametrize("chunks", [(b"",), (b"", b""), (b"\n\n",), (b"\r\n", b"\r\n")])
def test_nothing_is_empty_when_it_has_ended(chunks: tuple[bytes, ...]) -> None:
    assert kinds(*chunks, ends=True)[-1] is AnswerKind.EMPTY


@pytest.mark.parametrize("status", [204, 400, 404, 429, 500, 503])
def test_any_other_status_is_an_error_whatever_is_said(status: int) -> None:
    assert kinds(b"data: 1\n\n", status=status) == [AnswerKind.ERROR]


def test_an_unknown_status_counts_as_success() -> None:
    assert kinds(b"data: 1\n\n", status=None) == [AnswerKind.STREAMED]


@given(st.binary(max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_cutting_never_changes_what_an_answer_is(text: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(text)]
    chunks = [text[start:end] for start, end in itertools.pairwise(places) if end >= start]

    def verdict(*parts: bytes) -> AnswerKind | None:
        return next((kind for kind in kinds(*parts, ends=True) if kind is not None), None)

    assert verdict(*chunks) is verdict(text)
