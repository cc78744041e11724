"""OpenAI's `/v1/completions`, as vLLM 0.32 reads it: a string, token ids, or a list of either."""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.apis.request import (
    Api,
    CompletionPrompt,
    LlmRequest,
    Unreadable,
    openai_error,
    priority_or_none,
    text_or_none,
    whole,
)


class _Body(msgspec.Struct):
    """Only what a decision needs. Everything but the model is untyped: a wrong type is the engine's to refuse."""

    model: str
    prompt: msgspec.Raw
    stream: Any = False
    max_tokens: Any = 16
    add_special_tokens: Any = True
    echo: Any = False
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
    return LlmRequest(
        model=fields.model,
        prompt=CompletionPrompt(fields.prompt, fields.add_special_tokens is not False),
        streaming=fields.stream is True,
        max_tokens=whole(fields.max_tokens),
        cache_salt=text_or_none(fields.cache_salt),
        reads_cache=fields.prompt_logprobs is None and fields.echo is not True,
        max_queue_wait_s=fields.max_queue_wait_s,
        body_bytes=len(body),
        priority=priority_or_none(fields.priority),
    )


API = Api("openai_completions", read, openai_error)
