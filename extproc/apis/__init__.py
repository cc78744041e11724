"""The LLM APIs that we read: which requests are ours, and what they ask for."""

from __future__ import annotations

from extproc.apis import anthropic_messages, openai_chat, openai_completions
from extproc.apis.request import Api, LlmRequest, Unreadable

__all__ = ["Api", "LlmRequest", "Unreadable", "find_api"]

_APIS = {
    "/v1/chat/completions": openai_chat.API,
    "/v1/completions": openai_completions.API,
    "/v1/messages": anthropic_messages.API,
}


def find_api(method: str | None, path: str | None) -> Api | None:
    """The API that a request speaks; None if it is none of our business."""
    if method != "POST" or path is None:
        return None
    return _APIS.get(path.partition("?")[0])
