"""Messages to text as the engine does it, and a refusal where that cannot be known."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesim import tokenizer as engine
from enginesim.words import MODEL_FOLDER
from predictor.chat import ChatTemplate, NotReproducible
from predictor.tokenizer import Tokenizer

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
# Takes a text as it is and walks over parts, as templates of models that also see do.
PARTS = """\
{%- for message in messages -%}
[{{ message.role }}]
    {%- if message.content is string -%}
        text {{ message.content }};
    {%- else -%}
        {%- for part in message.content -%}
            part {{ part.text }};
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}"""
Messages = list[dict[str, Any]]


def render(source: str, messages: Sequence[Any] = (), **more: Any) -> str:
    return ChatTemplate(source, {}).render(messages, **more)


def user(content: object) -> Messages:
    return [{"role": "user", "content": content}]


def text_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(arguments: object, name: str = "add") -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture(scope="module")
def simulated() -> engine.Tokenizer:
    return engine.Tokenizer.load(MODEL_FOLDER)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    config = json.loads((MODEL_FOLDER / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    return ChatTemplate((MODEL_FOLDER / "chat_template.jinja").read_text(encoding="utf-8"), special)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer((MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))


texts = st.text(max_size=30).filter(lambda text: text.isprintable() or "\n" in text) | st.sampled_from(
    ["", "hello", "<|im_end|>", "a <b> & 'c' \"d\"", "\n\n", "日本語 🙂", "{{ not.jinja }} {% x %}"]
)
contents = texts | st.none() | st.lists(texts | texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, json_values, max_size=3)
calls = st.builds(call, arguments.map(json.dumps) | arguments | st.sampled_from(["", None]), texts)
messages_of = st.builds(
    lambda role, content, tool_calls: {
        "role": role,
        "content": content,
        **({} if tool_calls is None else {"tool_calls": tool_calls}),
    },
    st.sampled_from(["system", "user", "assistant", "tool"]),
    contents,
    st.none() | st.lists(calls, max_size=2),
)
tools_of = st.lists(
    st.builds(
        lambda name, more, order: {
            "function": dict(sorted({"name": name, **more}.items(), reverse=order)),
            "type": "function",
        },
        texts,
        st.fixed_dictionaries({}, optional={"description": texts, "parameters": arguments, "strict": st.booleans()}),
        st.booleans(),
    ),
    max_size=2,
)


@given(st.lists(messages_of, min_size=1, max_size=4), st.none() | tools_of, st.booleans())
def test_any_conversation_becomes_the_tokens_that_the_simulated_engine_makes_of_it(
    simulated: engine.Tokenizer,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Messages | None,
    add_generation_prompt: bool,
) -> None:
    text = template.render(messages, tools, add_generation_prompt)
    assert text == simulated.render_chat(messages, tools, add_generation_prompt)
    assert tokenizer.encode(text, add_special_tokens=False).tolist() == simulated.encode(text)


def test_a_whole_conversation_with_tools(template: ChatTemplate, simulated: engine.Tokenizer) -> None:
    messages: Messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": text_parts("one", "two")},
        {"role": "assistant", "content": None, "tool_calls": [call('{"b": 2, "a": "<é>"}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": " three "},
    ]
    tool = {"function": {"parameters": {"type": "object"}, "name": "add"}, "type": "function"}
    text = template.render(messages, [tool])
    assert text == simulated.render_chat(messages, [tool])
    assert text == (
        "<|im_start|>system\nBe brief.\n\nThese tools can be called, one description a line:\n"
        '{"type": "function", "function": {"name": "add", "description": null, "parameters": {"type": "object"}}}\n'
        'A call is written as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>\n'
        "<|im_start|>user\none\ntwo<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"b": 2, "a": "<é>"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n three <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chatml_begins_and_ends_every_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *user("hi")]
    said = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render(CHATML, messages) == said + "<|im_start|>assistant\n"
    assert render(CHATML, messages, add_generation_prompt=False) == said


@pytest.mark.parametrize(
    ("content", "joined", "walked"),
    [
        ("hi", "hi", "part hi;"),
        ("", "", "part ;"),
        (None, "", ""),
        ([], "", ""),
        (text_parts("a", "b"), "a\nb", "part a;part b;"),
        (["a", *text_parts("b")], "a\nb", "part a;part b;"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "a\nb", "part a;part b;"),
        ([{"type": "refusal", "refusal": "a"}, {"type": "thinking", "thinking": "b"}], "a\nb", "part a;part b;"),
        ([{"type": "text"}, {"type": "text", "text": None}, *text_parts("a")], "a", "part a;"),
    ],
)
def test_parts_are_joined_by_newlines_or_kept_for_a_template_that_walks_over_them(
    content: object, joined: str, walked: str
) -> None:
    assert render("{{ messages[0].content }}", user(content)) == joined
    assert render(PARTS, user(content)) == "[user]" + walked


def test_a_message_without_content_is_one_with_none() -> None:
    assert render("{{ messages[0].content }}.", [{"role": "assistant"}]) == "."
    assert render(PARTS, [{"role": "assistant"}]) == "[assistant]"


@pytest.mark.parametrize(
    "loop",
    [
        "for part in message.content",
        "for part in message['content']",
        "for part in message['content'] | list",
        "for part in message.content[:9]",
        "for part in message.content | reverse | list",
    ],
)
def test_every_way_to_walk_over_content_is_seen(loop: str) -> None:
    source = "{% for message in messages %}{% " + loop + " %}{{ part.text }}.{% endfor %}{% endfor %}"
    assert render(source, user("hi")) == "hi."


def test_a_walk_over_something_else_gets_plain_text() -> None:
    source = (
        "{% for message in messages %}{% for call in message.tool_calls %}{% endfor %}{{ message.content }}{% endfor %}"
    )
    assert render(source, user(text_parts("a", "b"))) == "a\nb"


def test_special_tokens_and_the_callers_variables_are_at_hand() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ 'think' if enable_thinking else 'talk' }}{{ tools }}{{ documents }}", {"bos_token": "<s>"}
    )
    assert template.render(user("x")) == "<s>talkNoneNone"
    assert template.render(user("x"), [], True, {"enable_thinking": True}) == "<s>thinkNoneNone"
    assert template.render(user("x"), variables={"bos_token": "!"}) == "!talkNoneNone"


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ('{"b": 1, "a": [1.5, "<é>"]}', '{"b": 1, "a": [1.5, "<é>"]}'),
        ({"a": 1}, '{"a": 1}'),
        ("", "{}"),
        (None, "{}"),
        # What is no object becomes an empty one: a model's mistake must not end its conversation.
        ("[1]", "{}"),
        ("{", "{}"),
        ([1], "{}"),
        # As long as the caller wrote it: these do not fit 64 bits.
        ('{"n": 123456789012345678901234567890}', '{"n": 123456789012345678901234567890}'),
    ],
)
def test_arguments_of_a_call_are_the_object_that_their_text_holds(sent: object, seen: str) -> None:
    message = {"role": "assistant", "tool_calls": [call(sent)]}
    before = json.dumps(message)
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", [message]) == seen
    assert json.dumps(message) == before
    without = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", [without]) == "{}"


def test_a_tools_answer_is_text_even_to_a_template_that_walks_over_parts() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": text_parts("a", "", "b")}
    assert render(PARTS, [answer]) == "[tool]text a\n\nb;"
    assert render(CHATML, [answer], add_generation_prompt=False) == "<|im_start|>tool\na\nb<|im_end|>\n"


def test_reasoning_is_known_by_both_of_its_names_and_only_of_the_assistant() -> None:
    source = "{% for m in messages %}{{ m.reasoning }}-{{ m.reasoning_content }};{% endfor %}"
    for sent in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "hm", "reasoning_content": "no"}):
        both = [{"role": role, "content": "x", **sent} for role in ("assistant", "user")]
        assert render(source, both) == "hm-hm;-;"


def test_a_line_of_the_client_that_is_never_the_same_does_not_reach_the_template() -> None:
    header = "x-anthropic-billing-header: cc_version=1"
    for role, said in (("system", "Be brief."), ("user", header + "\nBe brief.")):
        assert render("{{ messages[0].content }}", [{"role": role, "content": header + "\nBe brief."}]) == said
    assert render(PARTS, [{"role": "system", "content": text_parts(header, "a")}]) == "[system]part a;"


def test_calls_that_are_no_list_are_none() -> None:
    for calls in (None, "none"):
        message = {"role": "assistant", "content": "x", "tool_calls": calls}
        assert render("{{ 'tool_calls' in messages[0] }}", [message]) == "False"


def test_a_developer_is_the_system_to_a_template_that_does_not_know_any() -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *user("hi")]
    assert render(CHATML, messages).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert messages[0]["role"] == "developer"
    for other in ("system", "developer"):
        both = [*messages, {"role": other, "content": text_parts("More.", "And more.")}]
        merged = "<|im_start|>system\nBe brief.\n\nMore.\nAnd more.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        assert render(CHATML, both, add_generation_prompt=False) == merged


@pytest.mark.parametrize("word", ['"developer"', "'developer'"])
def test_a_developer_stays_one_to_a_template_that_names_the_role(word: str) -> None:
    source = "{% set roles = [" + word + "] %}" + CHATML
    assert render(source, [{"role": "developer", "content": "x"}]).startswith("<|im_start|>developer\n")
    assert render("{# developer #}" + CHATML, [{"role": "developer", "content": "x"}]).startswith(
        "<|im_start|>system\n"
    )


def test_a_tool_is_written_in_the_engines_order_with_nulls() -> None:
    tool = {"function": {"strict": True, "unknown": 1, "name": "f"}, "unknown": 1, "type": "function"}
    function = '{"name": "f", "description": null, "parameters": null, "strict": true}'
    assert render("{{ tools[0] | tojson }}", tools=[tool]) == f'{{"type": "function", "function": {function}}}'
    broken_tools: Messages = [{}, {"function": None}, {"function": {}}, {"function": {"name": 5}}]
    for broken in broken_tools:
        with pytest.raises(NotReproducible, match="tool"):
            render("", tools=[broken])


def test_tojson_is_pythons_own_json_and_not_safe_for_html() -> None:
    value = {"b": "<a> & 'é'", "a": [1, 2.0, None, True]}
    assert render("{{ v | tojson }}", variables={"v": value}) == '{"b": "<a> & \'é\'", "a": [1, 2.0, null, true]}'
    assert render("{{ v | tojson(indent=2, sort_keys=true) }}", variables={"v": value}) == json.dumps(
        value, indent=2, sort_keys=True, ensure_ascii=False
    )
    compact = "{{ v | tojson(ensure_ascii=true, separators=(',', ':')) }}"
    assert render(compact, variables={"v": value}) == '{"b":"<a> & \'\\u00e9\'","a":[1,2.0,null,true]}'


def test_blocks_take_their_line_with_them() -> None:
    assert render("{% if true %}\n  a\n    {% endif %}\nb\n") == "  a\nb"


def test_loops_may_break_and_continue() -> None:
    leaps = "{% if n == 1 %}{% continue %}{% endif %}{% if n == 4 %}{% break %}{% endif %}"
    assert render("{% for n in range(9) %}" + leaps + "{{ n }}{% endfor %}") == "023"


def test_generation_tags_print_what_they_hold() -> None:
    source = "{% for message in messages %}<{% generation %}{{ message.content }}{% endgeneration %}>{% endfor %}"
    assert render(source, [*user("a"), *user("b")]) == "<a><b>"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ strftime_now('%d') }}", "strftime_now"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ nothing.at.all }}", "nothing"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{% include 'file' %}", "loader"),
        ("{{ range(999999999) | list }}", "Range too big"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_not_reproducible(source: str, reason: str) -> None:
    with pytest.raises(NotReproducible, match=reason):
        render(source, user("x"))


@pytest.mark.parametrize(
    "message",
    [
        "hi",
        None,
        {},
        {"content": "hi"},
        {"role": 5, "content": "hi"},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"text": "hi"}},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "thinking"}]},
        {"role": "user", "content": [*text_parts("see"), {"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "user", "content": [{"type": "image_url", "text": "hi"}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "assistant", "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
        {"role": "assistant", "tool_calls": [{**call("{}"), "type": "custom"}]},
        {"role": "developer", "content": "hi", "tools": []},
    ],
    ids=repr,
)
@pytest.mark.parametrize("source", [CHATML, PARTS], ids=["joined", "walked"])
def test_messages_that_hold_more_than_text_are_not_reproducible(message: Mapping[str, Any], source: str) -> None:
    with pytest.raises(NotReproducible):
        render(source, [*user("hi"), message])


@pytest.mark.parametrize("source", ["{% for %}", "{{ ", "{% nonsense %}", "{% generation %}", "{{ x | nofilter }}"])
def test_a_template_that_is_not_jinja_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError, match="not a Jinja template: line 1"):
        ChatTemplate(source, {})


def test_rendering_changes_neither_the_messages_nor_later_renderings(template: ChatTemplate) -> None:
    messages: Messages = [
        *user(text_parts("a", "b")),
        {"role": "assistant", "content": None, "tool_calls": [call("{}")]},
    ]
    before = json.dumps(messages)
    first = template.render(messages)
    assert json.dumps(messages) == before
    for number in range(20):
        template.render(user(str(random.random())), [{"function": {"name": f"f{number}"}}])
    assert template.render(messages) == first
