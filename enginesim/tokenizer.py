"""Messages to text to token ids, as vLLM 0.32 does it for a model with a Jinja template and string contents."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import fastokens
import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

_BILLING_HEADER = "x-anthropic-billing-header"  # of Claude Code: differs in every request, so vLLM drops the line


class ChatError(ValueError):
    """The messages cannot be rendered; says which field is at fault."""


class Tokenizer:
    """The tokenizer and chat template of one model folder."""

    def __init__(self, encoder: fastokens.Tokenizer, template: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        self._encoder = encoder
        self._template = environment.from_string(template)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `tokenizer.json`, `chat_template.jinja` and `tokenizer_config.json`."""
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        special = {name: config[name] for name in ("bos_token", "eos_token", "pad_token") if config.get(name)}
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(fastokens.Tokenizer.from_file(str(folder / "tokenizer.json")), template, special)

    @property
    def vocabulary_tokens(self) -> int:
        """Token ids are below this."""
        return int(self._encoder.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens in it recognised and none added. The GIL is released while it works."""
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return str(self._encoder.decode(list(token_ids)))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. ChatError if a message or a tool has not the shape the template needs."""
        try:
            return self._template.render(
                **self._special_tokens,
                messages=_one_system([_plain_message(message, index) for index, message in enumerate(messages)]),
                tools=[_plain_tool(tool, index) for index, tool in enumerate(tools)] if tools else None,
                add_generation_prompt=add_generation_prompt,
                **(template_kwargs or {}),
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ChatError(f"messages cannot be rendered by the chat template: {error}") from error


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str):
        raise ChatError(f"messages[{index}].role must be a string")
    plain: dict[str, Any] = {"role": role, "content": _plain_content(message.get("content"), role, index)}
    if role == "assistant" and message.get("tool_calls"):
        plain["tool_calls"] = [_plain_tool_call(call, index) for call in message["tool_calls"]]
    return plain


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template without developers, vLLM makes them the system, and one message of all that the system says."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    said = [message for message in messages if message["role"] in ("system", "developer")]
    text = "\n\n".join(message["content"] for message in said if message["content"])
    return [{"role": "system", "content": text}, *(m for m in messages if m["role"] not in ("system", "developer"))]


def _plain_content(content: object, role: str, index: int) -> str:
    """Text parts that say something, joined with newlines, as vLLM does when the template does not loop over them."""
    match content:
        case None:
            return ""
        case str():
            texts = [content]
        case list():
            texts = [_part_text(part, index) for part in content]
        case _:
            raise ChatError(f"messages[{index}].content must be a string or a list of parts")
    if role == "system":
        texts = [text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text for text in texts]
    return "\n".join(filter(None, texts))


def _part_text(part: object, index: int) -> str:
    match part:
        case str():
            return part
        case {"type": "refusal", "refusal": str(text)} | {"type": "thinking", "thinking": str(text)}:
            return text
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": "text", "text": None} | {"type": "refusal", "refusal": None}:
            return ""
    raise ChatError(f"messages[{index}].content has a part that is not text; this model reads text only")


def _plain_tool_call(call: object, index: int) -> dict[str, Any]:
    """Arguments come as a JSON string and go to the template as the object in it, or an empty one if there is none."""
    match call:
        case {"function": {"name": str(name), **function}}:
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except (ValueError, RecursionError):
                    arguments = None
            return {"function": {"name": name, "arguments": arguments if isinstance(arguments, dict) else {}}}
    raise ChatError(f"messages[{index}].tool_calls has an entry without function.name")


def _plain_tool(tool: Mapping[str, Any], index: int) -> dict[str, Any]:
    """What vLLM's own model of a tool keeps of it, in its key order: some absent keys become null, unknown ones go."""
    match tool:
        case {"function": {"name": str(name), **function}}:
            plain = {"name": name, "description": function.get("description"), "parameters": function.get("parameters")}
            deferred = tool.get("defer_loading")
            if function.get("strict") is not None:
                plain["strict"] = function["strict"]
            if function.get("defer_loading", deferred) is not None:
                plain["defer_loading"] = function.get("defer_loading", deferred)
            outside = {} if deferred is None else {"defer_loading": deferred}
            return {"type": tool.get("type", "function"), "function": plain, **outside}
    raise ChatError(f"tools[{index}] must have a function with a name")


def _to_json(value: object, indent: int | None = None) -> str:
    """Hugging Face's tojson: keys in their order, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
