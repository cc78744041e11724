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

Message = Mapping[str, Any]

# The kinds of parts that are text, and where it stands.
_TEXT_OF_PART = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# What vLLM knows of parts of any kind. Other keys reach a template that takes parts.
_KEYS_OF_PARTS = frozenset(
    {
        *("type", "text", "refusal", "thinking", "name", "file", "data", "uuid", "closed", "prompt_cache_breakpoint"),
        *("image_url", "image_embeds", "image_pil", "audio_url", "audio_embeds", "input_audio"),
        *("video_url", "video_embeds"),
    }
)
_BILLING_HEADER = "x-anthropic-billing-header"


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
            # Jinja chains them to the environment's, and would walk that chain twice for each text.
            self._template.globals = dict(self._template.globals)
            self._wants_parts = _loops_over_content(environment.parse(source))
            self._knows_developer = '"developer"' in source or "'developer'" in source
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
        if not self._knows_developer:
            conversation = _with_developers_as_system(conversation)
        context = {
            **self._special_tokens,
            "messages": conversation,
            "tools": [_as_engine_writes_it(tool) for tool in tools] if tools else None,
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
        """What the engine's parsing leaves of a message: the fields that it knows, in its order."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise NotReproducible("a message is no object with a role")
        role = message["role"]
        result: dict[str, Any] = {"role": role, "content": self._content(role, message.get("content"))}
        if role == "assistant":
            calls = message.get("tool_calls")
            if isinstance(calls, list) and calls:
                result["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
            reasoning = message.get("reasoning")
            reasoning = message.get("reasoning_content") if reasoning is None else reasoning
            if reasoning is not None:
                result["reasoning"] = result["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        for key in ("name", "task"):
            if isinstance(message.get(key), str):
                result[key] = message[key]
        if role == "developer" and message.get("tools") is not None:
            raise NotReproducible("a developer message brings tools")
        return result

    def _content(self, role: str, content: object) -> object:
        if content is None:
            parts: list[object] = []
        elif isinstance(content, str):
            parts = [content]
        elif isinstance(content, list):
            parts = content
        else:
            raise NotReproducible("a message's content is neither text nor a list of parts")
        texts = [text for text in map(_text_part, parts) if text is not None]
        if role == "system":
            texts = [text for text in map(_without_billing_header, texts) if text is not None]
        if self._wants_parts and role != "tool":
            return texts
        # Where a tool speaks, templates that take parts take text all the same, and then empty parts count.
        return "\n".join(part["text"] for part in texts if part["text"] or self._wants_parts)


def _text_part(part: object) -> dict[str, Any] | None:
    """A part as the engine hands it to a template that takes parts; None for one that it skips."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_OF_PART.get(kind) if isinstance(kind, str) else None
    if isinstance(part, dict) and key is not None:
        text = part.get(key)
        if isinstance(text, str):
            others = {name: value for name, value in part.items() if name not in _KEYS_OF_PARTS}
            return {"type": "text", "text": text, **others}
        if text is None and kind in ("text", "refusal"):
            return None
    raise NotReproducible("a message's content has a part that is not text")


def _without_billing_header(part: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM drops this line of Claude Code's, which differs in every request; None if nothing is left."""
    if not part["text"].startswith(_BILLING_HEADER):
        return part
    rest = part["text"].partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _with_parsed_arguments(call: object) -> dict[str, Any]:
    """A call as the engine writes it out again; its arguments, which clients send as JSON, become an object.

    What is no JSON object becomes an empty one, so that a conversation with a model's mistake in it can go on.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise NotReproducible("a tool call is no object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # Not msgspec: as the engine's parser, this one takes integers of any length, and NaN.
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    parsed = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function.get("name")}
    written = {"id": call.get("id"), "function": {**parsed, **_without(function, parsed)}, "type": call.get("type")}
    return {key: value for key, value in written.items() if key in call} | _without(call, written)


def _without(fields: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in known}


def _with_developers_as_system(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that never heard of developers: they are the system, which then speaks once, and first."""
    roles = [message["role"] for message in conversation]
    if "developer" not in roles:
        return conversation
    system = [message for message in conversation if message["role"] in ("developer", "system")]
    if len(system) == 1 and system[0] is conversation[0]:
        return [{**system[0], "role": "system"}, *conversation[1:]]
    contents = [_joined(message["content"]) for message in system]
    merged = {"role": "system", "content": "\n\n".join(content for content in contents if content)}
    return [merged, *(message for message in conversation if message["role"] not in ("developer", "system"))]


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _as_engine_writes_it(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The engine parses tools and writes them out again: the keys it knows, in its order, some absent ones as null."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotReproducible("a tool is no object with a named function")
    written = {key: function.get(key) for key in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    own_deferred = function.get("defer_loading")
    more = {"strict": function.get("strict"), "defer_loading": deferred if own_deferred is None else own_deferred}
    written |= {key: value for key, value in more.items() if value is not None}
    return {
        "type": tool.get("type", "function"),
        "function": written,
        **({} if deferred is None else {"defer_loading": deferred}),
    }


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
            case jinja2.nodes.Getitem(node=inner, arg=jinja2.nodes.Slice()):
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
