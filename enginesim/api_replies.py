"""Bodies of the answers: whole JSON objects, and server-sent events of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One finished answer: its prompt, its text and why it ended."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request. `cached_tokens` None leaves the details out."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    created_cache_tokens: int | None

    def fields(self) -> dict[str, Any]:
        """As in `usage`. A cached count of zero is reported, as vLLM does since 0.24."""
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self.cached_tokens is not None:
            fields["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
            if self.created_cache_tokens is not None:
                fields["prompt_tokens_details"]["created_cache_tokens"] = self.created_cache_tokens
        return fields


@dataclass(frozen=True, slots=True)
class Head:
    """What every body of one answer begins with."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        """`kind` is OpenAI's `object`."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


class ChatReply:
    """Answers of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    _chunk = "chat.completion.chunk"

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self, index: int, prompt_token_ids: Sequence[int] | None) -> bytes:
        """The role chunk, which vLLM sends together with the first token and not earlier."""
        extra = {"prompt_token_ids": prompt_token_ids}
        return self._event(index, {"role": "assistant", "content": ""}, None, extra)

    def token(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """One token; the last one carries the finish reason."""
        return self._event(index, {"content": text}, finish_reason, {})

    def closing(self, usage: Usage, wanted: bool) -> bytes:
        """The chunk without choices, if wanted, and the end marker."""
        return _openai_closing(self._head.fields(self._chunk), usage, wanted)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The plain answer."""
        entries = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "tool_calls": []},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": None,
            }
            for index, choice in enumerate(choices)
        ]
        return _whole(self._head.fields("chat.completion"), entries, usage)

    def _event(self, index: int, delta: dict[str, Any], finish_reason: str | None, extra: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _event({**self._head.fields(self._chunk), "choices": [choice], **extra})


class TextReply:
    """Answers of `/v1/completions`."""

    id_prefix = "cmpl-"
    _object = "text_completion"

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self, index: int, prompt_token_ids: Sequence[int] | None) -> bytes:
        """Nothing: text completions have no role chunk."""
        return b""

    def token(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """One token; the last one carries the finish reason."""
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
        return _event({**self._head.fields(self._object), "choices": [choice]})

    def closing(self, usage: Usage, wanted: bool) -> bytes:
        """The chunk without choices, if wanted, and the end marker."""
        return _openai_closing(self._head.fields(self._object), usage, wanted)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The plain answer."""
        entries = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": None,
                "prompt_token_ids": choice.prompt_token_ids or None,
            }
            for index, choice in enumerate(choices)
        ]
        return _whole(self._head.fields(self._object), entries, usage)


class MessagesReply:
    """Answers of Anthropic's `/v1/messages`: one text block. vLLM makes them of a chat's chunks."""

    id_prefix = "chatcmpl-"

    def __init__(self, head: Head) -> None:
        self._head = head

    def opening(self, index: int, prompt_token_ids: Sequence[int] | None) -> bytes:
        """With the first token, as it is made of the role chunk."""
        message = {**self._message(), "content": [], "stop_reason": None, "usage": _NO_USAGE}
        block = {"type": "text", "text": ""}
        return _named({"type": "message_start", "message": message}) + _named(
            {"type": "content_block_start", "index": index, "content_block": block}
        )

    def token(self, index: int, text: str, finish_reason: str | None) -> bytes:
        """One token."""
        return _named({"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}})

    def closing(self, usage: Usage, wanted: bool) -> bytes:
        """The end of the block and of the message; usage is always told."""
        delta = {"stop_reason": "max_tokens", "stop_sequence": None}
        return (
            _named({"type": "content_block_stop", "index": 0})
            + _named({"type": "message_delta", "delta": delta, "usage": _anthropic_usage(usage)})
            + _named({"type": "message_stop"})
        )

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The plain answer."""
        content = [{"type": "text", "text": choice.text} for choice in choices]
        return msgspec.json.encode(
            {**self._message(), "content": content, "stop_reason": "max_tokens", "usage": _anthropic_usage(usage)}
        )

    def _message(self) -> dict[str, Any]:
        return {"id": self._head.id, "type": "message", "role": "assistant", "model": self._head.model}


Reply = ChatReply | TextReply | MessagesReply

_NO_USAGE = {"input_tokens": 0, "output_tokens": 0}


def _anthropic_usage(usage: Usage) -> dict[str, int]:
    """Input is what was neither read from the cache nor written to it, where these are told."""
    fields = {"output_tokens": usage.completion_tokens}
    fresh = usage.prompt_tokens
    if usage.cached_tokens is not None:
        fresh -= usage.cached_tokens
        fields["cache_read_input_tokens"] = usage.cached_tokens
        if usage.created_cache_tokens is not None:
            fresh -= usage.created_cache_tokens
            fields["cache_creation_input_tokens"] = usage.created_cache_tokens
    return {**fields, "input_tokens": max(0, fresh)}


def _openai_closing(head: dict[str, Any], usage: Usage, wanted: bool) -> bytes:
    return (_event({**head, "choices": [], "usage": usage.fields()}) if wanted else b"") + DONE


def _whole(head: dict[str, Any], choices: list[dict[str, Any]], usage: Usage) -> bytes:
    # Without the details flag vLLM's plain answers have a null here, its streams nothing.
    return msgspec.json.encode({**head, "choices": choices, "usage": {"prompt_tokens_details": None, **usage.fields()}})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _named(content: dict[str, Any]) -> bytes:
    return b"event: %s\n%s" % (str(content["type"]).encode(), _event(content))
