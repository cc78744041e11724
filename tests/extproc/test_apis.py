"""Request bodies: read where it matters, passed on where they cannot be read, and never a surprise."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.apis import Api, LlmRequest, Unreadable, find_api, openai_chat, openai_completions
from extproc.apis.request import ChatPrompt, CompletionPrompt, openai_error

CHAT, COMPLETIONS = openai_chat.read, openai_completions.read
READERS = [CHAT, COMPLETIONS]
NEEDED: dict[str, object] = {"model": "m", "messages": [], "prompt": "x"}

Read = Callable[[bytes], LlmRequest]


def encoded(**fields: object) -> bytes:
    return msgspec.json.encode(NEEDED | fields)


@pytest.mark.parametrize(
    ("method", "path", "api"),
    [
        ("POST", "/v1/chat/completions", openai_chat.API),
        ("POST", "/v1/completions", openai_completions.API),
        ("POST", "/v1/completions?a=b?c", openai_completions.API),
        ("GET", "/v1/completions", None),
        ("POST", "/v1/completions/", None),
        ("POST", "/v1/embeddings", None),
        (None, None, None),
    ],
)
def test_an_api_is_found_by_method_and_path(method: str | None, path: str | None, api: Api | None) -> None:
    assert find_api(method, path) is api


def test_a_chat_request_in_full() -> None:
    request = CHAT(
        encoded(
            messages=[{"role": "user", "content": "hi"}],
            tools=[{"type": "function"}],
            stream=True,
            max_tokens=7,
            max_completion_tokens=9,
            chat_template_kwargs={"enable_thinking": False},
            add_generation_prompt=False,
            add_special_tokens=True,
            cache_salt="s",
            prompt_logprobs=1,
            max_queue_wait_s=12.5,
        )
    )
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    assert bytes(prompt.messages) == b'[{"role":"user","content":"hi"}]'
    assert prompt.tools is not None
    assert bytes(prompt.tools) == b'[{"type":"function"}]'
    assert prompt.template_variables == {"enable_thinking": False}
    assert (prompt.add_generation_prompt, prompt.add_special_tokens) == (False, True)
    assert (request.model, request.streaming, request.max_tokens) == ("m", True, 9)
    assert (request.cache_salt, request.reads_cache, request.max_queue_wait_s) == ("s", False, 12.5)


def test_a_chat_request_with_nothing_but_what_it_must_have() -> None:
    request = CHAT(b'{"model":"m","messages":[]}')
    assert isinstance(request.prompt, ChatPrompt)
    assert (request.prompt.tools, request.prompt.template_variables) == (None, None)
    assert (request.prompt.add_generation_prompt, request.prompt.add_special_tokens) == (True, False)
    assert (request.streaming, request.max_tokens, request.cache_salt) == (False, None, None)
    assert (request.reads_cache, request.max_queue_wait_s, request.body_bytes) == (True, None, 27)


def test_a_completion_request_in_full_and_bare() -> None:
    full = COMPLETIONS(encoded(prompt=[1, 2], stream=True, max_tokens=3, add_special_tokens=False, cache_salt="s"))
    assert isinstance(full.prompt, CompletionPrompt)
    assert (bytes(full.prompt.raw), full.prompt.add_special_tokens) == (b"[1,2]", False)
    assert (full.streaming, full.max_tokens, full.cache_salt) == (True, 3, "s")
    bare = COMPLETIONS(b'{"model":"m","prompt":"x"}')
    assert isinstance(bare.prompt, CompletionPrompt)
    assert (bare.prompt.add_special_tokens, bare.streaming, bare.max_tokens) == (True, False, 16)


@pytest.mark.parametrize("field", [{"echo": True}, {"prompt_logprobs": 0}])
def test_prompt_log_probabilities_read_no_cache(field: dict[str, object]) -> None:
    assert not COMPLETIONS(encoded(**field)).reads_cache


ODD = [None, True, -1, 0, 1.5, 1e300, 10**30, "x", "", [], [1], {}, {"a": [None]}]
OPTIONAL = [
    "stream", "max_tokens", "max_completion_tokens", "tools", "chat_template_kwargs", "add_generation_prompt", "echo",
    "add_special_tokens", "prompt_logprobs", "cache_salt", "max_queue_wait_s", "temperature", "stop", "n", "metadata",
]  # fmt: skip


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("field", OPTIONAL)
def test_a_wrong_type_in_a_field_that_we_can_do_without_is_the_engines_to_refuse(read: Read, field: str) -> None:
    for value in ODD:
        request = read(encoded(**{field: value}))
        assert request.model == "m"
        assert request.max_tokens is None or request.max_tokens > 0
        assert isinstance(request.streaming, bool)


@pytest.mark.parametrize(("value", "tokens"), [(True, None), (0, None), (-5, None), (2.0, None), ("7", None), (7, 7)])
def test_max_tokens_is_a_positive_count_or_unknown(value: object, tokens: int | None) -> None:
    assert CHAT(encoded(max_tokens=value)).max_tokens == tokens


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"{}",
        b'{"model":"m"}',
        b'{"messages":[],"prompt":"x"}',
        b'{"model":1,"messages":[],"prompt":"x"}',
        b'{"model":null,"messages":[],"prompt":"x"}',
        b'{"model":"m","messages":[],"prompt":"x"',
        b'{"model":"m","messages":[],"prompt":"x"} x',
        b'{"model":"\xff","messages":[],"prompt":"x"}',
        b'{"model":"\\ud800","messages":[],"prompt":"x"}',
        b'{"model":"m","messages":[],"prompt":"x","x":NaN}',
        b'{"model":"m","messages":[],"prompt":"x","max_tokens":1e999}',
        b'{"model":"m","messages":[],"prompt":"x","max_tokens":' + b"9" * 9999 + b"}",
        b'{"model":"m","messages":[],"prompt":"x","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","messages":[],"prompt":"x","tools":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b"\x1f\x8b\x08\x00",
    ],
)
def test_what_is_no_request_is_unreadable(read: Read, body: bytes) -> None:
    with pytest.raises(Unreadable):
        read(body)


@pytest.mark.parametrize("read", READERS)
def test_the_last_of_double_keys_counts_as_in_python(read: Read) -> None:
    assert read(b'{"model":"a","messages":[],"prompt":"x","model":"b"}').model == "b"


@pytest.mark.parametrize("read", READERS)
def test_every_truncation_is_unreadable(read: Read) -> None:
    whole = encoded(messages=[{"role": "user", "content": "é"}], tools=[{}], stream=True, max_queue_wait_s=5)
    for length in range(len(whole)):
        with pytest.raises(Unreadable):
            read(whole[:length])


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
BODIES = (
    st.dictionaries(st.sampled_from([*OPTIONAL, *NEEDED]), JSON, max_size=6)
    .map(lambda fields: NEEDED | fields)
    .map(msgspec.json.encode)
)


@settings(max_examples=1500, deadline=None)
@given(BODIES, st.integers(0, 400), st.binary(max_size=4), st.integers(0, 4))
def test_a_damaged_body_is_read_or_unreadable(whole: bytes, at: int, noise: bytes, lost: int) -> None:
    """Two readers, two bodies each: 6,000 cases with those of `test_any_bytes`."""
    for body in (whole, whole[:at] + noise + whole[at + lost :]):
        for read in READERS:
            try:
                request = read(body)
            except Unreadable:
                continue
            assert isinstance(request.model, str)
            assert request.body_bytes == len(body)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_unreadable(body: bytes) -> None:
    for read in READERS:
        with pytest.raises(Unreadable):
            read(body)


def test_an_error_has_the_shape_that_openai_clients_unpack() -> None:
    body = msgspec.json.decode(openai_error("no", "rate_limit_error", "max_queue_wait_s", "queue_wait_exceeded"))
    assert body == {
        "error": {
            "message": "no",
            "type": "rate_limit_error",
            "param": "max_queue_wait_s",
            "code": "queue_wait_exceeded",
        }
    }


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("value", "priority"),
    [(0, 0), (7, 7), (-3, -3), (True, None), ("1", None), (1.5, None), (None, None), (1 << 63, None)],
)
def test_a_priority_is_a_whole_number_or_nothing(read: Read, value: object, priority: int | None) -> None:
    assert read(encoded(priority=value)).priority == priority
    assert read(encoded()).priority is None
