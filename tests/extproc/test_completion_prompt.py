"""The prompt of `/v1/completions`: text, token ids, or lists of them."""

import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc import completion_prompt
from extproc.completion_prompt import Parts, read_completion_prompt


def read(text: str | bytes) -> str | list[int] | None:
    """None: not a single prompt."""
    prompt = read_completion_prompt(msgspec.Raw(text.encode() if isinstance(text, str) else text))
    if isinstance(prompt, Parts):
        return None
    return prompt if isinstance(prompt, str) else prompt.tolist()


@pytest.mark.parametrize(
    ("raw", "prompt"),
    [
        ('"a b"', "a b"),
        ('""', ""),
        ('"\\u00e9\\n\\"[1]\\""', 'é\n"[1]"'),
        ('["only one"]', "only one"),
        ('[ "spaced" ]', "spaced"),
        ("[1,2,3]", [1, 2, 3]),
        (" [ 1 ,\n 2\t, 3 ] ", [1, 2, 3]),
        ("[[1,2,3]]", [1, 2, 3]),
        ("[ [ 1 , 2 ] ]", [1, 2]),
        ("[]", []),
        ("[[]]", []),
        ("[0, 4294967295]", [0, 4294967295]),
    ],
)
def test_one_prompt(raw: str, prompt: str | list[int]) -> None:
    assert read(raw) == prompt


@pytest.mark.parametrize(
    "raw",
    [
        '["a","b"]',
        "[[1],[2]]",
        "[[1],2]",
        "[1,[2]]",
        '[1,"a"]',
        '["a",1]',
        "[[[1]]]",
        "[1.5]",
        "[true]",
        "[null]",
        "[-1]",
        "[4294967296]",
        "[99999999999999999999999999]",
        "null",
        "7",
        "{}",
        '[{"prompt_embeds":"x"}]',
        '[[1],"a"]',
    ],
)
def test_several_prompts_or_none_that_we_can_read(raw: str) -> None:
    assert read(raw) is None


def test_text_that_is_not_utf_8_is_not_read() -> None:
    assert read(b'"\xff"') is None
    assert read(b'["\xff"]') is None


def test_eight_hundred_thousand_ids_are_those_that_json_reads() -> None:
    rng = random.Random(5)
    ids = [rng.randrange(200_000) for _ in range(800_000)]
    for raw in (json.dumps(ids), json.dumps([ids], separators=(",", ":"))):
        prompt = read_completion_prompt(msgspec.Raw(raw.encode()))
        assert isinstance(prompt, np.ndarray)
        assert prompt.dtype == np.uint32
        assert np.array_equal(prompt, np.array(ids, np.uint32))


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=60),
    st.sampled_from([(",", ":"), (", ", ":"), (" ,\n", ":")]),
    st.integers(1, 40),
)
def test_ids_do_not_depend_on_where_the_pieces_end(ids: list[int], separators: tuple[str, str], piece: int) -> None:
    before = completion_prompt._PIECE_BYTES
    completion_prompt._PIECE_BYTES = piece
    try:
        assert read(json.dumps(ids, separators=separators)) == ids
    finally:
        completion_prompt._PIECE_BYTES = before


@pytest.mark.parametrize("fault", ["-1", "4294967296", '"x"', "1.5", "[1]"])
def test_a_fault_in_the_last_piece_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_prompt, "_PIECE_BYTES", 8)
    assert read("[" + "11,22," * 10 + fault + "]") is None
