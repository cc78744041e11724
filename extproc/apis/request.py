"""What every API's request is read into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec


class Unreadable(ValueError):
    """The body is not a request of this API: the engine's to answer."""


class ChatPrompt(msgspec.Struct, frozen=True, gc=False):
    """Chat messages, still as JSON: they are parsed where the template is rendered, beside the event loop."""

    messages: msgspec.Raw
    tools: msgspec.Raw | None
    template_variables: Mapping[str, Any] | None
    add_generation_prompt: bool
    add_special_tokens: bool
    system: str | None = None  # to stand before the messages


class CompletionPrompt(msgspec.Struct, frozen=True, gc=False):
    """Text, token ids, or a list of either, still as JSON for the same reason."""

    raw: msgspec.Raw
    add_special_tokens: bool


class OpaquePrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt that is not read: only its size counts."""


PromptSource = ChatPrompt | CompletionPrompt | OpaquePrompt


class LlmRequest(msgspec.Struct, frozen=True, gc=False):
    """The fields of a request that a decision needs; `max_queue_wait_s` is as the caller wrote it."""

    model: str | None  # None: it was not to be seen
    prompt: PromptSource
    streaming: bool
    max_tokens: int | None
    cache_salt: str | None
    reads_cache: bool
    max_queue_wait_s: object
    body_bytes: int
    adapter: str | None = None  # the model is this LoRA adapter
    priority: int | None = None  # for engines that go by it


class Api(msgspec.Struct, frozen=True, gc=False):
    """One API: how its body is read, and the shape in which its callers expect an error."""

    name: str
    read: Callable[[bytes], LlmRequest]
    error_body: Callable[[str, str, str | None, str], bytes]  # message, type, param, code


def openai_error(message: str, kind: str, param: str | None, code: str) -> bytes:
    """The error object that OpenAI's clients unpack."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def whole(value: object) -> int | None:
    """A positive count of tokens, if that is what it is; engines check such fields themselves."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def priority_or_none(value: object) -> int | None:
    """A priority, if that is what it is."""
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62 else None


def text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def given(raw: msgspec.Raw | msgspec.UnsetType) -> msgspec.Raw | None:
    """A field's JSON unless it is absent or null. Raw never equals bytes, whatever it holds."""
    return None if isinstance(raw, msgspec.UnsetType) or bytes(raw) == b"null" else raw
