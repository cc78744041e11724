"""What ends tell of how many decode steps there were, where prefill and decode steps take turns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.engines.vllm import Sequence, Step
from predictor.turns import Turns

DECODE = Step((), (), 0)


def prefill(tokens: int) -> Step:
    return Step(((Sequence("p", tokens, 0, 0), 0, tokens),), (), 0)


def test_a_request_that_ends_as_counted_is_a_sample_of_all_that_passed_in_its_time() -> None:
    turns = Turns()
    turns.begins("a", 10.0)
    turns.passed(DECODE, 3)
    turns.passed(prefill(100))
    turns.begins("b", 11.0)
    turns.passed(DECODE, 5)
    sample = turns.learn("a", 9, 12.5)
    assert sample is not None
    assert (sample.duration_s, sample.new_tokens, sample.squares, sample.steps) == (2.5, 100, 10_000, 9)
    assert sample.decoding == 3 * 1 + 5 * 2


def test_what_was_counted_too_much_is_put_right_for_everybody_by_the_time_they_had_in_common() -> None:
    turns = Turns()
    turns.begins("old", 0.0)
    turns.passed(DECODE, 100)
    turns.begins("ends", 1.0)
    turns.passed(DECODE, 50)
    turns.begins("young", 1.5)
    turns.passed(DECODE, 50)
    turns.learn("ends", 1 + 80, 2.0)  # a hundred steps were counted, and there were eighty
    assert turns.generated("ends") == 81
    assert turns.generated("old") == 1 + 100 + 80
    assert turns.generated("young") == 1 + 40


def test_steps_that_were_not_counted_are_counted_for_all() -> None:
    turns = Turns()
    turns.begins("old", 0.0)
    turns.begins("ends", 0.0)
    sample = turns.learn("ends", 4, 1.0)
    assert sample is not None
    assert (sample.steps, sample.decoding) == (3, 6)
    assert turns.generated("old") == 4


def test_a_stretch_of_time_has_one_witness_however_many_decoded_in_it() -> None:
    turns = Turns()
    for number in range(12):
        turns.begins(str(number), 0.1 * number)
    turns.passed(DECODE, 100)
    told = []
    for number in range(12):  # all end within a second, after nine that they had in common
        told.append(turns.learn(str(number), 101, 10.0 + 0.1 * number))
        turns.ends(str(number))
    assert [sample is not None and sample.told_before for sample in told] == [False] + 11 * [True]
    turns.begins("next", 11.2)
    turns.passed(DECODE, 100)
    sample = turns.learn("next", 101, 21.2)
    assert sample is not None
    assert not sample.told_before


def test_steps_that_are_taken_back_are_those_of_the_sequences_that_were_counted_in_them() -> None:
    turns = Turns()
    turns.begins("stays", 0.0)
    turns.passed(DECODE, 100)
    for number in range(40):
        turns.begins(str(number), 1.0)
    turns.passed(DECODE, 100)
    for number in range(40):
        turns.ends(str(number))
    turns.decoded(-50)  # of those in which 41 decoded, though now it is one
    sample = turns.learn("stays", 1 + 150, 2.0)
    assert sample is not None
    assert (sample.steps, sample.decoding) == (150, 100 * 1 + 50 * 41)


def test_no_more_decoded_together_than_ever_did_however_often_counts_were_put_right() -> None:
    turns = Turns()
    for number in range(10):
        turns.begins(str(number), 0.0)
    turns.passed(DECODE, 2000)
    for number in range(9):
        turns.ends(str(number))
    for _ in range(3):
        turns.decoded(-2000)
        turns.passed(DECODE, 50)
    sample = turns.learn("9", 1001, 1.0)
    assert sample is not None
    assert 1000 <= sample.decoding <= 10_000
    turns.begins("alone", 2.0)
    turns.ends("9")
    turns.passed(DECODE, 10)
    sample = turns.learn("alone", 101, 3.0)
    assert sample is not None
    assert 100 <= sample.decoding <= 200


def test_who_was_retracted_says_nothing() -> None:
    turns = Turns()
    turns.begins("a", 0.0)
    turns.passed(DECODE, 10)
    turns.breaks("a")
    assert turns.generated("a") is None
    assert turns.learn("a", 500, 1.0) is None


@given(
    happened=st.lists(
        st.one_of(
            st.tuples(st.just("steps"), st.one_of(st.integers(-20, 200), st.integers(-9000, 9000))),
            st.tuples(st.just("begins"), st.integers(0, 9)),
            st.tuples(st.just("ends"), st.integers(1, 300)),
        ),
        max_size=60,
    )
)
def test_counts_stay_what_they_can_be_whatever_is_told(happened: list[tuple[str, int]]) -> None:
    turns, present, now_s, most, together = Turns(), list[str](), 0.0, 1, [0]
    for kind, number in happened:
        now_s += 1.0
        if kind == "steps":
            turns.decoded(number)
            most += max(0, number)
        elif kind == "begins" and str(number) not in present:
            present.append(str(number))
            turns.begins(str(number), now_s)
            together.append(len(present))
        elif kind == "ends" and present:
            name = present.pop(0)
            most += number
            sample = turns.learn(name, number, now_s)
            turns.ends(name)
            assert sample is not None
            assert sample.steps == number - 1
            assert sample.steps <= sample.decoding <= sample.steps * max(together)
        counts = [turns.generated(name) for name in present]
        assert all(count is not None and 1 <= count <= most for count in counts)
        assert counts == sorted((count for count in counts if count is not None), reverse=True)


def test_a_count_is_taken_back_no_further_than_to_where_somebody_began() -> None:
    turns = Turns()
    turns.begins("old", 0.0)
    turns.passed(DECODE, 10)
    turns.begins("new", 1.0)
    turns.decoded(-4)
    assert turns.generated("new") == 1
    assert turns.generated("old") == pytest.approx(7)
