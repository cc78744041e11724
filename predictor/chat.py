"""Chat messages to the text that the engine tokenizes, by the model's own Jinja template.

Follows vLLM 0.32 (`vllm/entrypoints/chat_utils.py`, `vllm/renderers/hf.py`) and the environment in which transformers
5.24 renders templates. What cannot be reproduced outside the engine raises NotReproducible; the request is then
estimated, never guessed at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

Message = Mapping[str, Any]


class NotReproducible(ValueError):
    """The prompt depends on what only the engine has, or on what its template refuses."""


class ChatTemplate:
    """One model's chat template. `special_tokens` are its variables such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ValueError for a template that is not Jinja."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
            self._wants_parts = _loops_over_content(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"not a Jinja template: line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `variables` are the caller's `chat_template_kwargs`.

        Raises NotReproducible for messages that hold more than text, or that the template refuses.
        """
        conversation = [self._normalised(message) for message in messages]
        context = {
            **self._special_tokens,
            "messages": conversation,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        try:
            return self._template.render(context)
        except Exception as error:
            # Templates are programs: sandbox violations, type errors and their own `raise_exception` all end here.
            raise NotReproducible(f"the chat template refused the messages: {error}") from error

    def _normalised(self, message: object) -> dict[str, Any]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotReproducible("a message is no object with a role")
        result = dict(message)
        result["content"] = self._content(message.get("content"))
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            result["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        elif "tool_calls" in result:
            del result["tool_calls"]
        return result

    def _content(self, content: object) -> object:
        if content is None:
            return ""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self._wants_parts else content
        if not isinstance(content, list):
            raise NotReproducible("a message's content is neither text nor a list of parts")
        texts = [_text_of(part) for part in content]
        return [{"type": "text", "text": text} for text in texts] if self._wants_parts else "\n".join(texts)


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise NotReproducible("a message's content has a part that is not text")


def _with_parsed_arguments(call: object) -> object:
    """Clients send a call's arguments as a JSON string; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise NotReproducible("a tool call is no object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments else {}
        except msgspec.DecodeError as error:
            raise NotReproducible("a tool call's arguments are not JSON") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _loops_over_content(tree: jinja2.nodes.Template) -> bool:
    """Whether the template walks over content parts (vLLM's content format "openai") or takes a string."""

    def is_content(node: jinja2.nodes.Node) -> bool:
        match node:
            case jinja2.nodes.Getattr(attr="content"):
                return True
            case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
                return True
            case jinja2.nodes.Filter(node=inner) if inner is not None:
                return is_content(inner)
        return False

    return any(is_content(loop.iter) for loop in tree.find_all(jinja2.nodes.For))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines it: Python's own JSON, without the HTML escaping of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; in a prompt it prints its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it as a class attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    @staticmethod
    def _inside(caller: Callable[[], str]) -> str:
        return caller()
