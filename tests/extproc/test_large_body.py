"""Bodies too large to be parsed: the few fields of a decision by load, found at their ends and found fast."""

import contextlib
import json
import time

import pytest

from extproc.apis import LlmRequest, Unreadable
from extproc.apis.large_body import PARSED_BYTES, read_large
from extproc.apis.request import OpaquePrompt

FILLING = "x" * (PARSED_BYTES + 1)


def large(front: str, back: str = "") -> bytes:
    return f'{{{front}"messages":[{{"role":"user","content":"{FILLING}"}}]{back}}}'.encode()


@pytest.mark.parametrize("at_the_end", [False, True])
def test_the_fields_of_a_decision_are_found_at_either_end(at_the_end: bool) -> None:
    fields = '"model": "m", "stream":true , "max_tokens" : 77, "max_queue_wait_s": 12.5'
    body = large("", f",{fields}") if at_the_end else large(f"{fields},")
    json.loads(body)
    assert read_large(body) == LlmRequest(
        model="m",
        prompt=OpaquePrompt(),
        streaming=True,
        max_tokens=77,
        cache_salt=None,
        reads_cache=True,
        max_queue_wait_s=12.5,
        body_bytes=len(body),
    )


def test_what_is_not_said_is_not_assumed() -> None:
    request = read_large(large('"model":"m",'))
    assert (request.streaming, request.max_tokens, request.max_queue_wait_s) == (False, None, None)


@pytest.mark.parametrize(
    ("value", "tokens"),
    [("5", 5), ("0", None), ("-5", None), ("1.5", None), ("true", None), ("null", None), ("1e2", None)],
)
def test_max_tokens_is_a_positive_count_or_unknown(value: str, tokens: int | None) -> None:
    assert read_large(large(f'"model":"m","max_tokens":{value},')).max_tokens == tokens


def test_max_completion_tokens_counts_more() -> None:
    assert read_large(large('"model":"m","max_tokens":5,"max_completion_tokens":9,')).max_tokens == 9


def test_a_bound_that_is_no_number_is_kept_for_who_judges_it() -> None:
    assert read_large(large('"model":"m","max_queue_wait_s":"soon",')).max_queue_wait_s == "soon"


def test_text_that_looks_like_a_field_is_none() -> None:
    text = json.dumps('"model": "other", "stream": true, "max_tokens": 9')
    request = read_large(large(f'"user":{text},', ',"model":"m"'))
    assert (request.model, request.streaming, request.max_tokens) == ("m", False, None)


def test_names_in_other_words_of_json_are_read() -> None:
    assert read_large(large('"model":"m\\u00f6\\"del",')).model == 'mö"del'


@pytest.mark.parametrize(
    "front",
    [
        "",
        '"model":null,',
        '"model":7,',
        '"model":{},',
        '"model":["m"],',
        '"model":"\\ud800",',
        '"model":"\\x",',
        '"model":"' + "m" * 300 + '",',
        '"modell":"m",',
    ],
)
def test_a_body_that_names_no_model_is_unreadable(front: str) -> None:
    with pytest.raises(Unreadable):
        read_large(large(front))


@pytest.mark.parametrize("body", [b'{"model":"\xff"}', b'{"model":"m', b"", b"\x00" * 100, b'"model"', b'"model":'])
def test_bytes_that_are_no_request_are_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read_large(body)


@pytest.mark.parametrize(
    "unit",
    [
        b'"',
        b"\\",
        b'\\"',
        b'"model',
        b'"model"',
        b'"model" ',
        b'"model":',
        b'"model":"',
        b'"model":"' + b"a" * 250,
        b" ",
    ],
)
def test_no_body_takes_long_to_look_at(unit: bytes) -> None:
    """Each runs on the event loop. The best of three: this machine is shared."""
    body = unit * ((64 << 20) // len(unit))
    took_s = []
    for _ in range(3):
        started_s = time.thread_time()
        with contextlib.suppress(Unreadable):
            read_large(body)
        took_s.append(time.thread_time() - started_s)
    assert min(took_s) < 0.02
