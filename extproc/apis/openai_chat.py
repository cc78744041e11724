"""OpenAI's `/v1/chat/completions`, as vLLM 0.32 reads it."""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.apis.request import (
    Api,
    ChatPrompt,
    LlmRequest,
    Unreadable,
    given,
    openai_error,
    priority_or_none,
    text_or_none,
    whole,
)


class _Body(msgspec.Struct):
    """Only what a decision needs. Everything but the model is untyped: a wrong type is the engine's to refuse."""

    model: str
    messages: msgspec.Raw
    stream: Any = False
    max_tokens: Any = None
    max_completion_tokens: Any = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = True
    add_special_tokens: Any = False
    prompt_logprobs: Any = None
    cache_salt: Any = None
    priority: Any = None
    max_queue_wait_s: Any = None


_DECODER = msgspec.json.Decoder(_Body)


def read(body: bytes) -> LlmRequest:
    """Raises Unreadable."""
    try:
        fields = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error
    variables = fields.chat_template_kwargs
    return LlmRequest(
        model=fields.model,
        prompt=ChatPrompt(
            messages=fields.messages,
            tools=given(fields.tools),
            template_variables=variables if isinstance(variables, dict) else None,
            add_generation_prompt=fields.add_generation_prompt is not False,
            add_special_tokens=fields.add_special_tokens is True,
        ),
        streaming=fields.stream is True,
        max_tokens=whole(fields.max_completion_tokens) or whole(fields.max_tokens),
        cache_salt=text_or_none(fields.cache_salt),
        reads_cache=fields.prompt_logprobs is None,
        max_queue_wait_s=fields.max_queue_wait_s,
        body_bytes=len(body),
        priority=priority_or_none(fields.priority),
    )


API = Api("openai_chat", read, openai_error)
