"""Token ids: those of Hugging Face's library, whichever library makes them, and without stopping the event loop."""

import asyncio
import json
import random
import sys
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from enginesim.words import MODEL_FOLDER
from predictor.tokenizer import Tokenizer

TOKENIZER_JSON = (MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8")
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
ours = Tokenizer(TOKENIZER_JSON)
theirs = tokenizers.Tokenizer.from_str(TOKENIZER_JSON)


def with_bos(tokenizer_json: str) -> str:
    """The same tokenizer, which now puts `<|endoftext|>` (id 0) before a text."""
    described = json.loads(tokenizer_json)
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    return json.dumps(described)


def with_nfkc(tokenizer_json: str) -> str:
    """The same tokenizer behind a normalizer that fastokens does not have (as Anthropic's published one)."""
    return json.dumps({**json.loads(tokenizer_json), "normalizer": {"type": "NFKC"}})


def expected(text: str, add_special_tokens: bool = False) -> list[int]:
    ids: list[int] = theirs.encode(text, add_special_tokens=add_special_tokens).ids
    return ids


pieces = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [*SPECIAL, "<|im_start", "|>", "<|im_start|>user\n", "\r\n", "\n\n\n\t", "    ", "'ll", "é", "日本語", "🙂‍↔️"]
    ),
    st.text(alphabet="aeiou tnrs.,'\n0189", max_size=60),
)


@given(st.lists(pieces, max_size=8).map("".join), st.booleans())
def test_ids_are_those_of_hugging_face_for_any_text(text: str, add_special_tokens: bool) -> None:
    assert ours.encode(text, add_special_tokens).tolist() == expected(text, add_special_tokens)


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", []), *[(token, [at]) for token, at in zip(SPECIAL, (1, 2, 0), strict=True)], ("".join(SPECIAL), [1, 2, 0])],
)
def test_special_tokens_in_a_text_are_one_id_each(text: str, ids: list[int]) -> None:
    encoded = ours.encode(text, add_special_tokens=False)
    assert encoded.tolist() == ids
    assert encoded.dtype == np.uint32


def test_special_tokens_are_added_only_on_request() -> None:
    tokenizer = Tokenizer(with_bos(TOKENIZER_JSON))
    assert tokenizer.library == "fastokens"
    plain = expected("hello there")
    assert tokenizer.encode("hello there", add_special_tokens=False).tolist() == plain
    assert tokenizer.encode("hello there", add_special_tokens=True).tolist() == [0, *plain]
    assert tokenizer.encode("", add_special_tokens=True).tolist() == [0]


def test_the_fast_library_reads_the_file_where_it_can() -> None:
    assert ours.library == "fastokens"


def test_the_other_library_steps_in_for_a_file_that_the_fast_one_cannot_read() -> None:
    tokenizer = Tokenizer(with_nfkc(TOKENIZER_JSON))
    assert tokenizer.library == "tokenizers"
    text = "ﬁnd ① and ｆｕｌｌ width <|im_end|>"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tolist() == expected("find 1 and full width <|im_end|>") != expected(text)
    assert encoded.dtype == np.uint32
    assert tokenizer.encode("", add_special_tokens=False).tolist() == []
    both = Tokenizer(with_nfkc(with_bos(TOKENIZER_JSON)))
    assert both.encode("x", add_special_tokens=True).tolist() == [0, *expected("x")]


@pytest.mark.parametrize("library", ["fastokens", "tokenizers"])
def test_a_text_twice_gives_the_same_ids_and_they_outlive_later_texts(library: str) -> None:
    tokenizer = Tokenizer(TOKENIZER_JSON if library == "fastokens" else with_nfkc(TOKENIZER_JSON))
    assert tokenizer.library == library
    first = tokenizer.encode("some words " * 100, add_special_tokens=False)
    kept = first.tolist()
    for number in range(50):
        tokenizer.encode(f"{number} other words " * 200, add_special_tokens=False)
    assert first.tolist() == kept == tokenizer.encode("some words " * 100, add_special_tokens=False).tolist()


@pytest.mark.parametrize("garbage", ["", "{", "[]", "{}", "null", '{"model": {"type": "BPE"}}', TOKENIZER_JSON[:-100]])
def test_a_file_that_is_no_tokenizer_is_a_value_error(garbage: str) -> None:
    with pytest.raises(ValueError, match=r"not a readable tokenizer\.json"):
        Tokenizer(garbage)


@pytest.mark.parametrize("library", ["fastokens", "tokenizers"])
def test_half_a_surrogate_pair_is_a_value_error(library: str) -> None:
    tokenizer = Tokenizer(TOKENIZER_JSON if library == "fastokens" else with_nfkc(TOKENIZER_JSON))
    with pytest.raises(ValueError, match="surrogates not allowed"):
        tokenizer.encode("\ud800", add_special_tokens=False)


@pytest.mark.parametrize(("library", "letters"), [("fastokens", 1_500_000), ("tokenizers", 400_000)])
async def test_an_event_loop_keeps_its_turn_while_a_thread_encodes(library: str, letters: int) -> None:
    tokenizer = Tokenizer(TOKENIZER_JSON if library == "fastokens" else with_nfkc(TOKENIZER_JSON))
    # Random letters: the slowest text there is, and no cache helps.
    text = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=letters))
    work = asyncio.create_task(asyncio.to_thread(tokenizer.encode, text, False))
    started_s = last_s = time.perf_counter()
    longest_pause_s = 0.0
    while not work.done():
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        longest_pause_s = max(longest_pause_s, now_s - last_s)
        last_s = now_s
    took_s = time.perf_counter() - started_s
    assert len(await work) > letters / 10
    assert took_s > 20 * sys.getswitchinterval(), "too short a text to tell"
    assert longest_pause_s < 0.5 * took_s
