"""Anthropic's `/v1/messages`, as vLLM 0.32 turns it into a chat: text only.

Exact for system text and text messages. What the conversion does with tools, thinking and images is not followed yet:
such prompts are estimated.
"""

from __future__ import annotations

from typing import Any

import msgspec

from extproc.apis.request import (
    Api,
    ChatPrompt,
    LlmRequest,
    OpaquePrompt,
    PromptSource,
    Unreadable,
    text_or_none,
    whole,
)


class _Body(msgspec.Struct):
    """Only what a decision needs. Everything but the model is untyped: a wrong type is the engine's to refuse."""

    model: str
    messages: msgspec.Raw
    system: Any = None
    stream: Any = False
    max_tokens: Any = None
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    cache_salt: Any = None
    max_queue_wait_s: Any = None


_DECODER = msgspec.json.Decoder(_Body)
# Claude Code's first system block; vLLM leaves it out of the prompt.
_BILLING = "x-anthropic-billing-header"


def read(body: bytes) -> LlmRequest:
    """Raises Unreadable."""
    try:
        fields = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(str(error)) from error
    return LlmRequest(
        model=fields.model,
        prompt=_prompt(fields),
        streaming=fields.stream is True,
        max_tokens=whole(fields.max_tokens),
        cache_salt=text_or_none(fields.cache_salt),
        reads_cache=True,
        max_queue_wait_s=fields.max_queue_wait_s,
        body_bytes=len(body),
    )


def _prompt(fields: _Body) -> PromptSource:
    if not isinstance(fields.tools, msgspec.UnsetType) and fields.tools not in (b"null", b"[]"):
        return OpaquePrompt()
    return ChatPrompt(
        messages=fields.messages,
        tools=None,
        template_variables=None,
        add_generation_prompt=True,
        add_special_tokens=False,
        system=_system_text(fields.system),
    )


def error(message: str, kind: str, param: str | None, code: str) -> bytes:
    """The error object that Anthropic's clients unpack."""
    del param, code
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": None})


def _system_text(system: object) -> str | None:
    """System blocks are joined without anything between them."""
    if isinstance(system, str):
        return system or None
    if not isinstance(system, list):
        return None
    texts = [block.get("text") for block in system if isinstance(block, dict)]
    kept = [text for text in texts if isinstance(text, str) and not text.startswith(_BILLING)]
    return "".join(kept) or None


API = Api("anthropic_messages", read, error)
