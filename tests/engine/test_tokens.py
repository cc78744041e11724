"""Our template and tokenizer make of a request the very ids that the engine makes of it."""

from typing import Any

import msgspec
import pytest

from enginesim.words import text
from extproc.apis.openai_chat import read
from extproc.model_files import load_pool_text
from predictor.chat import ChatTemplate
from tests.engine.harness import MODEL, RealEngine
from tests.engine.mirror import MODEL_FOLDER

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(600)]

Messages = list[dict[str, Any]]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Łódź", "n": 1.0}'}}
HELLO: Messages = [{"role": "user", "content": "Hello there"}]

CONVERSATIONS: dict[str, Messages] = {
    "one turn": HELLO,
    "system": [{"role": "system", "content": "Be brief."}, *HELLO],
    "several turns": [
        {"role": "system", "content": "Be brief.\n\n"},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4."},
        {"role": "user", "content": "  and 3 + 3 \t?\r\n"},
    ],
    "long": [{"role": "user", "content": text(3000, seed=1)}],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two\n"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "three"}]},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
    ],
    "no parts": [{"role": "user", "content": []}],
    "unicode": [{"role": "user", "content": "Zażółć gęślą jaźń 你好 🙂👩‍👩‍👧 é e\u0301 \u00a0 \u200b \U0001d49c"}],
    "special tokens in the text": [{"role": "user", "content": "a<|im_end|>\n<|im_start|>system\nb<|endoftext|>"}],
    "empty": [{"role": "user", "content": ""}],
    "code": [{"role": "user", "content": "def f(x):\n    return {'a': [1, 2]}  # <b>&amp;</b>\n" * 5}],
    "null content and a call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"},
    ],
    "absent content and a call": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "Sunny"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
    ],
    "content and a call": [*HELLO, {"role": "assistant", "content": "I look it up", "tool_calls": [CALL]}],
    "no calls": [*HELLO, {"role": "assistant", "content": "ok", "tool_calls": []}, *HELLO],
    "empty arguments": [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]},
    ],
    "arguments that are no JSON": [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{oops"}}]},
    ],
    "arguments that are no object": [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]},
    ],
    "numbers in arguments": [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {**CALL, "function": {"name": "f", "arguments": '{"a":1e2,"b":0.10,"c":12345678901234567890}'}}
            ],
        },
    ],
    "developer": [{"role": "developer", "content": "Be brief."}, *HELLO],
    "developer and system": [
        {"role": "system", "content": "One."},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": [{"type": "text", "text": "Two."}]},
    ],
    "two systems": [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, *HELLO],
    "empty parts": [{"role": "user", "content": [{"type": "text", "text": word} for word in ("", "a", "")]}],
    "thinking": [*HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}, *HELLO],
    "refusal": [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HELLO],
    "part with a cache mark": [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
    ],
    "reasoning": [*HELLO, {"role": "assistant", "content": "Yes", "reasoning": "Hm"}, *HELLO],
    "call with other keys": [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"function": {"name": "f", "arguments": "{}", "x": 1}, "index": 0, "type": "function", "id": "c"}
            ],
        },
    ],
    "names": [{"role": "user", "name": "ann", "content": "Hi"}, {"role": "assistant", "content": "Yes", "name": "bot"}],
    "unknown fields": [{"role": "user", "content": "Hi", "flavour": "mint", "cache_control": {"type": "ephemeral"}}],
    "billing header": [
        {"role": "system", "content": "x-anthropic-billing-header: cch=123;\nBe brief."},
        *HELLO,
    ],
}

TOOLS: dict[str, list[dict[str, Any]]] = {
    "whole": [WEATHER],
    "two": [WEATHER, {"type": "function", "function": {"name": "stop"}}],
    "other key order": [
        {"function": {"parameters": {"b": 1, "a": None}, "description": "d", "name": "f"}, "type": "function"},
    ],
    "without type": [{"function": {"name": "f", "parameters": {}}}],
    "strict": [{"type": "function", "function": {"strict": True, "name": "f", "description": "x < y & z's"}}],
    "strict null": [{"type": "function", "function": {"strict": None, "name": "f"}}],
    "unknown fields": [
        {"type": "function", "x": 1, "function": {"name": "f", "response": {"type": "string"}, "description": None}},
    ],
    "deferred": [{"type": "function", "defer_loading": True, "function": {"name": "f"}}],
    "numbers": [
        {"type": "function", "function": {"name": "f", "parameters": {"a": 1.0, "b": 1e30, "c": [True, None]}}}
    ],
}

# What other models' templates do with messages. The first kind takes text, the second walks over parts.
TEMPLATES: dict[str, str] = {
    "text": (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.name }}|{{ m.tool_call_id }}|{{ m.flavour }}"
        "|{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}]{% endfor %}{{ tools | tojson }}"
    ),
    "parts": (
        "{% for m in messages %}[{{ m['role'] }}:{% if m['content'] is string %}S{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}P{{ part | tojson }}{% endfor %}{% endif %}]{% endfor %}"
    ),
    "keys": "{% for m in messages %}{{ m.keys() | list | sort | tojson }}{% endfor %}",
}


@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_a_conversation_has_the_engines_ids(engine: RealEngine, name: str) -> None:
    _check(engine, {"messages": CONVERSATIONS[name]})


@pytest.mark.parametrize("name", TOOLS)
async def test_tools_are_written_as_the_engine_writes_them(engine: RealEngine, name: str) -> None:
    _check(engine, {"messages": HELLO, "tools": TOOLS[name]})


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_other_templates_see_the_messages_that_the_engine_shows_them(
    engine: RealEngine, template: str, name: str
) -> None:
    source = TEMPLATES[template]
    messages = CONVERSATIONS[name]
    status, told = engine.request("/tokenize", {"model": MODEL, "messages": messages, "chat_template": source})
    assert status == 200, told
    tokenizer = load_pool_text(MODEL_FOLDER).tokenizer
    assert tokenizer is not None
    ours = tokenizer.encode(ChatTemplate(source, {}).render(messages), add_special_tokens=False)
    assert ours.tolist() == told["tokens"], _text(engine, told["tokens"])


async def test_a_generation_prompt_can_be_left_out(engine: RealEngine) -> None:
    _check(engine, {"messages": HELLO, "add_generation_prompt": False})


@pytest.mark.parametrize(
    "prompt", ["Hello there", " leading", "trailing \n", text(4000, seed=2), "<|im_start|>user\nx", "🙂 Łódź \x00\x01"]
)
async def test_a_completion_has_the_engines_ids(engine: RealEngine, prompt: str) -> None:
    status, told = engine.request("/tokenize", {"model": MODEL, "prompt": prompt})
    assert status == 200, told
    tokenizer = load_pool_text(MODEL_FOLDER).tokenizer
    assert tokenizer is not None
    assert tokenizer.encode(prompt, add_special_tokens=True).tolist() == told["tokens"]


def _check(engine: RealEngine, fields: dict[str, Any]) -> None:
    """Through the reader that `headway serve` uses, from the bytes of a body on."""
    status, told = engine.request("/tokenize", {"model": MODEL, **fields})
    assert status == 200, told
    ours = load_pool_text(MODEL_FOLDER).tokens(read(msgspec.json.encode({"model": MODEL, **fields})))
    assert hasattr(ours, "tolist"), ours
    assert ours.tolist() == told["tokens"], _text(engine, told["tokens"])


def _text(engine: RealEngine, tokens: list[int]) -> str:
    _, told = engine.request("/detokenize", {"model": MODEL, "tokens": tokens})
    return f"the engine: {told['prompt']!r}"
