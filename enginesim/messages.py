"""Anthropic's `/v1/messages`, turned into a chat as vLLM 0.32 does it: text only."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from enginesim.api_errors import bad_request
from enginesim.api_replies import MessagesReply
from enginesim.api_requests import ChatBody, decode
from enginesim.completions import Completions

_BILLING_HEADER = "x-anthropic-billing-header"


class MessagesBody(msgspec.Struct, kw_only=True):
    """`POST /v1/messages`."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Messages:
    """The handler, in front of a chat."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions

    async def create(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/messages`."""
        arrived_s = asyncio.get_running_loop().time()
        chat = _as_chat(decode(await http.read(), MessagesBody))
        return await self._completions.converse(http, chat, MessagesReply, arrived_s)


def _as_chat(body: MessagesBody) -> ChatBody:
    system = _system_text(body)
    said = [_plain_message(message, index) for index, message in enumerate(body.messages)]
    return ChatBody(
        model=body.model,
        messages=[*([{"role": "system", "content": system}] if system else []), *(m for m in said if m is not None)],
        tools=[_as_function(tool, index) for index, tool in enumerate(body.tools or [])] or None,
        stream=body.stream,
        max_tokens=body.max_tokens,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _system_text(body: MessagesBody) -> str:
    """Blocks are joined without anything between them; Claude Code's billing header is left out."""
    if isinstance(body.system, str):
        return body.system
    texts = [block.get("text") or "" for block in body.system or [] if block.get("type") == "text"]
    return "".join(text for text in texts if not text.startswith(_BILLING_HEADER))


def _plain_message(message: dict[str, Any], index: int) -> dict[str, Any] | None:
    """Blocks of text become parts of text; a user who says nothing is left out."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise bad_request(f"messages[{index}].role must be user or assistant", "messages")
    if not isinstance(content, list):
        return {"role": role, "content": content}
    for block in content:
        if not isinstance(block, dict) or block.get("type") != "text":
            raise bad_request(f"messages[{index}].content has a block that is not text", "messages")
    parts = [{"type": "text", "text": block["text"]} for block in content if block.get("text")]
    if not parts and role == "user":
        return None
    return {"role": role, "content": parts or None}


def _as_function(tool: dict[str, Any], index: int) -> dict[str, Any]:
    name = tool.get("name")
    if not isinstance(name, str):
        raise bad_request(f"tools[{index}].name is missing", "tools")
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function}
