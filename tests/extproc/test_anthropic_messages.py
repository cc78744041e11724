"""Anthropic's Messages API: read as vLLM turns it into a chat, and refused in the shape that its client unpacks."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import msgspec
import pytest
from aiohttp import web

from enginesim.words import MODEL_FOLDER
from extproc import replies
from extproc.apis import Unreadable, anthropic_messages, find_api
from extproc.apis.request import ChatPrompt, OpaquePrompt, PromptSource
from extproc.exchange import Refuse
from extproc.model_files import load_pool_text
from extproc.prompt_reader import Estimated
from extproc.wishes import BadWish
from predictor.admission import Limits, OnReject, Reason, Refusal, RetryAfter
from predictor.fleet import NoWorker
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis

READ = anthropic_messages.read
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
WAIT = Forecast("a", 100, 64, 0.5, 41.25, 1.0, 0.25, 43.0, Basis.CURVE, 9000, exact_tokens=True)


def encoded(**fields: object) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": HELLO, "max_tokens": 5, **fields})


def prompt(**fields: object) -> PromptSource:
    return READ(encoded(**fields)).prompt


def system(value: object) -> str | None:
    source = prompt(system=value)
    assert isinstance(source, ChatPrompt)
    return source.system


def test_its_path_is_ours() -> None:
    assert find_api("POST", "/v1/messages?beta=true") is anthropic_messages.API
    assert find_api("POST", "/v1/messages/count_tokens") is None


def test_a_request_in_full() -> None:
    request = READ(
        encoded(
            system="Be kind.",
            stream=True,
            cache_salt="s",
            max_queue_wait_s=3,
            tools=[],
            temperature=1.0,
            metadata={"user_id": "u"},
            chat_template_kwargs={"enable_thinking": False},
        )
    )
    source = request.prompt
    assert isinstance(source, ChatPrompt)
    assert bytes(source.messages) == b'[{"role":"user","content":"hello"}]'
    assert (source.system, source.tools, source.template_variables) == ("Be kind.", None, {"enable_thinking": False})
    assert (source.add_generation_prompt, source.add_special_tokens) == (True, False)
    assert (request.model, request.streaming, request.max_tokens, request.cache_salt) == ("m", True, 5, "s")
    assert request.max_queue_wait_s == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ("", None),
        ("one", "one"),
        ([], None),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "onetwo"),
        ([{"type": "text", "text": "x-anthropic-billing-header: cc=1;"}, {"type": "text", "text": "two"}], "two"),
        ([{"type": "text", "text": "x-anthropic-billing-header: cc=1;"}], None),
        ([{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}], "one"),
        ([{"type": "other", "text": "one"}], None),
        ([{"type": "text"}, {"type": "text", "text": 7}, 7, None], None),
        (7, None),
    ],
)
def test_the_system_text_is_what_the_engine_makes_of_it(value: object, text: str | None) -> None:
    assert system(value) == text


def content(*blocks: object, role: str = "user") -> dict[str, object]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


TEXT = {"type": "text", "text": "hello"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        content(TEXT),
        content({**TEXT, "cache_control": {"type": "ephemeral"}}),
        content({"type": "text", "text": '{"type": "image", "role": "system"}'}),
        {"messages": [*HELLO, {"role": "assistant", "content": "and"}]},
        {"tools": None},
        {"tools": []},
        {"thinking": {"type": "enabled", "budget_tokens": 1000}},
        {"thinking": None, "output_config": {}},
    ],
)
def test_text_is_read_exactly(fields: dict[str, object]) -> None:
    assert isinstance(prompt(**fields), ChatPrompt)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [TOOL]},
        content({"type": "image", "source": {"type": "url", "url": "http://x"}}),
        content(TEXT, {"type": "tool_result", "tool_use_id": "1", "content": "x"}),
        content({"type": "tool_use", "id": "1", "name": "f", "input": {}}, role="assistant"),
        content({"type": "thinking", "thinking": "hm", "signature": "s"}, TEXT, role="assistant"),
        content({"type": "redacted_thinking", "data": "x"}, TEXT, role="assistant"),
        {"messages": [*HELLO, {"role": "system", "content": "a reminder"}]},
        {"thinking": {"type": "disabled"}},
        {"output_config": {"effort": "low"}},
    ],
)
def test_what_the_engine_turns_into_something_else_is_not_guessed_at(fields: dict[str, object]) -> None:
    assert isinstance(prompt(**fields), OpaquePrompt)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"{}", b'{"model":"m"}', b'{"messages":[]}', b'{"model":1,"messages":[]}', b"\xff", b"null"],
)
def test_what_is_no_request_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        READ(body)


@pytest.mark.parametrize(
    "field", ["system", "stream", "max_tokens", "tools", "thinking", "output_config", "cache_salt"]
)
@pytest.mark.parametrize("value", [None, True, -1, 1.5, 10**30, "x", "", [], [1], {}, {"type": 1, "effort": []}])
def test_a_wrong_type_is_the_engines_to_refuse(field: str, value: object) -> None:
    request = READ(encoded(**{field: value}))
    assert request.model == "m"
    assert request.max_tokens is None or request.max_tokens > 0


def test_text_is_tokenized_and_more_than_text_is_estimated() -> None:
    pool = load_pool_text(MODEL_FOLDER)
    blocks = [TEXT, {"type": "text", "text": "there"}]
    exact = pool.tokens(READ(encoded(system=[TEXT], messages=[{"role": "user", "content": blocks}])))
    assert not isinstance(exact, Estimated)
    assert pool.tokenizer is not None
    wanted = "<|im_start|>system\nhello<|im_end|>\n<|im_start|>user\nhello\nthere<|im_end|>\n<|im_start|>assistant\n"
    assert list(exact) == list(pool.tokenizer.encode(wanted, False))
    assert pool.tokens(READ(encoded(tools=[TOOL]))) is Estimated.OPAQUE


def test_an_error_has_anthropics_shape_and_one_of_its_types() -> None:
    def told(kind: str) -> object:
        return msgspec.json.decode(anthropic_messages.error("no", kind, "p", "c"))

    for ours, theirs in {
        "rate_limit_error": "rate_limit_error",
        "invalid_request_error": "invalid_request_error",
        "service_unavailable_error": "overloaded_error",
    }.items():
        error = {"type": theirs, "message": "no"}
        assert told(ours) == {"type": "error", "error": error, "request_id": None}


class Answering:
    """A server that gives our refusals, and then an answer."""

    def __init__(self, *refusals: Refuse) -> None:
        self.refusals = list(refusals)
        self.asked_at_s: list[float] = []

    async def answer(self, http: web.Request) -> web.Response:
        await http.read()
        self.asked_at_s.append(time.monotonic())
        if self.refusals:
            refusal = self.refusals.pop(0)
            return web.Response(status=refusal.status, headers=dict(refusal.headers), body=refusal.body)
        return web.json_response(
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": [{"type": "text", "text": "hello"}],
                "stop_reason": "end_turn",
                "stop_sequence": None,
                "usage": {"input_tokens": 1, "output_tokens": 1},
            }
        )


Ask = Callable[[Answering, int], Awaitable[Any]]


@pytest.fixture
async def ask() -> AsyncIterator[Ask]:
    runners: list[web.AppRunner] = []
    clients: list[anthropic.AsyncAnthropic] = []

    async def call(server: Answering, max_retries: int) -> Any:
        app = web.Application()
        app.router.add_post("/v1/messages", server.answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=max_retries)
        clients.append(client)
        messages: Any = HELLO
        return await client.messages.create(model="m", max_tokens=5, messages=messages)

    yield call
    for client in clients:
        await client.close()
    await asyncio.gather(*(runner.cleanup() for runner in runners))


def shed(told_s: float, on_reject: OnReject = OnReject.RETRY) -> Refuse:
    refusal = Refusal(Reason.QUEUE_WAIT, Limits(10.0), RetryAfter(told_s, told_s), WAIT, (WAIT,))
    return replies.shed(refusal, anthropic_messages.API, on_reject)


async def test_the_anthropic_client_understands_a_refusal(ask: Ask) -> None:
    with pytest.raises(anthropic.RateLimitError) as raised:
        await ask(Answering(shed(31.2)), 0)
    error = raised.value
    assert (error.status_code, error.type) == (429, "rate_limit_error")
    assert error.response.headers["retry-after"] == "32"
    assert error.response.headers["x-headway-reason"] == "queue_wait"
    assert "Retry in 32 s" in str(error.api_message)


@pytest.mark.alone
async def test_the_anthropic_client_comes_back_when_it_was_told_to(ask: Ask) -> None:
    server = Answering(shed(0.7))
    message = await ask(server, 2)
    assert message.content[0].text == "hello"
    first_s, second_s = server.asked_at_s
    # Its own back-off would be between 0.37 and 0.5 s.
    assert 0.7 <= second_s - first_s < 1.4


async def test_the_anthropic_client_raises_at_once_when_it_is_told_to_although_it_would_retry(ask: Ask) -> None:
    server = Answering(shed(0.2, OnReject.FAIL))
    with pytest.raises(anthropic.RateLimitError):
        await ask(server, 2)
    assert len(server.asked_at_s) == 1


async def test_the_anthropic_client_sees_a_bad_bound_as_its_own_fault(ask: Ask) -> None:
    server = Answering(
        replies.bad_wish(
            BadWish("max_queue_wait_s", "soon", "a number of seconds from 5 to 300"), anthropic_messages.API
        )
    )
    with pytest.raises(anthropic.BadRequestError) as raised:
        await ask(server, 2)
    assert raised.value.type == "invalid_request_error"
    assert "max_queue_wait_s must be a number of seconds" in str(raised.value.api_message)
    assert len(server.asked_at_s) == 1


async def test_the_anthropic_client_sees_an_empty_pool_as_overload(ask: Ask) -> None:
    with pytest.raises(anthropic.InternalServerError) as raised:
        await ask(Answering(replies.unavailable(NoWorker("m"), anthropic_messages.API)), 0)
    assert (raised.value.status_code, raised.value.type) == (503, "overloaded_error")
