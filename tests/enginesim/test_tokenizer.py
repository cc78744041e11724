"""The shipped tokenizer and chat template, text of exact length, and what the simulated model says."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from enginesim import scheduler, words
from enginesim.request import Request
from enginesim.sampling import WordSampler, content_seed
from enginesim.tokenizer import ChatError, Tokenizer
from enginesim.words import MODEL_FOLDER


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_FOLDER)


@pytest.fixture(scope="module")
def hugging_face() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))


TEXTS = [
    "",
    " ",
    "Hello, world!  Two  spaces\n\n\tand tabs\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "<|im_start |> not special <|im_star",
    "naïve café Ωμέγα 日本語のテキスト 🙂🙃 \u200b \x00 \ufeff",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # it's 1234567890.5e-3\n" * 20,
    Path(scheduler.__file__).read_text(encoding="utf-8"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_fastokens_gives_the_ids_of_hugging_face(
    text: str, tokenizer: Tokenizer, hugging_face: HuggingFaceTokenizer
) -> None:
    ids = tokenizer.encode(text)
    assert ids == hugging_face.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


def test_ids_agree_on_random_unicode_too(tokenizer: Tokenizer, hugging_face: HuggingFaceTokenizer) -> None:
    source = random.Random(1)
    for _ in range(200):
        text = "".join(
            chr(source.choice((source.randrange(32, 127), source.randrange(0x800, 0xD800)))) for _ in range(50)
        )
        assert tokenizer.encode(text) == hugging_face.encode(text, add_special_tokens=False).ids


def test_the_vocabulary_is_small_and_begins_with_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocabulary_tokens == 8192
    assert [tokenizer.encode(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [[0], [1], [2]]
    assert (MODEL_FOLDER / "tokenizer.json").stat().st_size < 400_000


def test_every_word_is_one_token(tokenizer: Tokenizer) -> None:
    vocabulary = words.vocabulary()
    assert len(vocabulary) > 1000
    assert tokenizer.encode("".join(vocabulary)) == list(vocabulary.values())


@pytest.mark.parametrize("tokens", [0, 1, 2, 1000, 100_000])
def test_text_has_exactly_as_many_tokens_as_asked_for(tokens: int, tokenizer: Tokenizer) -> None:
    text = words.text(tokens, seed=3)
    assert len(tokenizer.encode(text)) == tokens
    assert text == words.text(tokens, seed=3)
    assert tokens == 0 or text != words.text(tokens, seed=4)
    assert words.text(tokens + 9, seed=3).startswith(text)


def test_a_conversation_is_rendered_as_chatml(tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": "<é>"}'}}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": " three "},
    ]
    assert tokenizer.render_chat(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\none\ntwo<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"b": 2, "a": "<é>"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n three <|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_rendered_as_json_in_vllms_key_order(tokenizer: Tokenizer) -> None:
    tool = {"function": {"strict": True, "parameters": {"type": "object"}, "name": "add"}, "type": "function"}
    text = tokenizer.render_chat([{"role": "user", "content": "x"}], [tool], add_generation_prompt=False)
    described = (
        '{"type": "function", "function": {"name": "add", "description": null, "parameters": {"type": "object"}, '
    )
    assert f'{described}"strict": true}}}}\n' in text
    assert text.startswith("<|im_start|>system\nThese tools")
    assert text.endswith("<|im_start|>user\nx<|im_end|>\n")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, r"messages\[0\].role"),
        ({"role": "user", "content": 5}, r"messages\[0\].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"messages\[0\].content"),
        ({"role": "assistant", "tool_calls": [{}]}, r"messages\[0\].tool_calls"),
    ],
)
def test_a_message_that_cannot_be_rendered_is_refused_by_field(
    message: dict[str, object], field: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ChatError, match=field):
        tokenizer.render_chat([message])


def test_an_answer_sent_back_gives_the_ids_that_were_sampled(tokenizer: Tokenizer) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "hello there"}]
    request = Request(0, tokenizer.encode(tokenizer.render_chat(messages)), 50, 16)
    request.hash_more()
    request.seed = content_seed(request)
    sample = WordSampler(tuple(words.vocabulary().values()))
    for _ in range(50):
        request.append(sample(request))
    answer = tokenizer.decode(request.token_ids[request.prompt_tokens :])
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    follow_up = tokenizer.encode(tokenizer.render_chat(messages))
    assert follow_up[: len(request.token_ids)] == request.token_ids


def test_samples_depend_on_the_prompt_the_choice_and_the_seed() -> None:
    def first_words(token_ids: list[int], choice: int = 0, seed: int = 0) -> list[int]:
        request = Request(0, list(token_ids), 8, 4)
        request.hash_more()
        request.seed = content_seed(request, choice, seed)
        sample = WordSampler(range(1000))
        for _ in range(8):
            request.append(sample(request))
        return request.token_ids[-8:]

    prompt = list(range(10))
    variants = [
        first_words(prompt),
        first_words([0, *prompt]),
        first_words(prompt, choice=1),
        first_words(prompt, seed=1),
    ]
    assert first_words(prompt) == variants[0]
    assert len({tuple(variant) for variant in variants}) == 4
