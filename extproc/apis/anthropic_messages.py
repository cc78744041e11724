"""Anthropic's `/v1/messages`, as vLLM 0.32 turns it into a chat: text only.

Exact for system text and text messages. What the conversion does with tools, thinking, images, efforts and system
messages between others is not followed yet: such prompts are estimated.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from extproc.apis.request import (
    Api,
    ChatPrompt,
    LlmRequest,
    OpaquePrompt,
    PromptSource,
    Unreadable,
    given,
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
    thinking: Any = None
    output_config: Any = None
    chat_template_kwargs: Any = None
    cache_salt: Any = None
    max_queue_wait_s: Any = None


_DECODER = msgspec.json.Decoder(_Body)
# Claude Code's first system block; vLLM leaves it out of the prompt.
_BILLING = "x-anthropic-billing-header"
# A block that is not text, or a message of neither the user nor the assistant. Inside of a text the quotes would have
# backslashes. Each begins with a literal, for which `re` searches fast.
_OTHER_BLOCK = re.compile(rb'"type"\s*:\s*"(?!text"|ephemeral")')
_OTHER_ROLE = re.compile(rb'"role"\s*:\s*"(?!user"|assistant")')
# Our words for what is Anthropic's in others.
_KINDS = {"service_unavailable_error": "overloaded_error"}


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
    tools = given(fields.tools)
    if tools is not None and bytes(tools) != b"[]":
        return OpaquePrompt()
    if _changes_the_template(fields.thinking, "type", "disabled") or _changes_the_template(
        fields.output_config, "effort"
    ):
        return OpaquePrompt()
    if _OTHER_BLOCK.search(fields.messages) or _OTHER_ROLE.search(fields.messages):
        return OpaquePrompt()
    variables = fields.chat_template_kwargs
    return ChatPrompt(
        messages=fields.messages,
        tools=None,
        template_variables=variables if isinstance(variables, dict) else None,
        add_generation_prompt=True,
        add_special_tokens=False,
        system=_system_text(fields.system),
    )


def _changes_the_template(setting: object, key: str, value: object = None) -> bool:
    """Whether a setting has a key, or a value there, that reaches the template as an effort."""
    told = setting.get(key) if isinstance(setting, dict) else None
    return told is not None if value is None else told == value


def error(message: str, kind: str, param: str | None, code: str) -> bytes:
    """The error object that Anthropic's clients unpack."""
    del param, code
    fault = {"type": _KINDS.get(kind, kind), "message": message}
    return msgspec.json.encode({"type": "error", "error": fault, "request_id": None})


def _system_text(system: object) -> str | None:
    """System blocks are joined without anything between them."""
    if isinstance(system, str):
        return system or None
    if not isinstance(system, list):
        return None
    texts = [block.get("text") for block in system if isinstance(block, dict) and block.get("type") == "text"]
    kept = [text for text in texts if isinstance(text, str) and not text.startswith(_BILLING)]
    return "".join(kept) or None


API = Api("anthropic_messages", read, error)
