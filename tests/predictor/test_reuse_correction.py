"""How far an engine's reported reuse falls short of what its blocks promise."""

import random

from hypothesis import given
from hypothesis import strategies as st

from predictor.reuse_correction import ReuseCorrection


def taught(*samples: tuple[int, int]) -> ReuseCorrection:
    correction = ReuseCorrection()
    for credited, reused in samples:
        correction.observe(credited, reused)
    return correction


def test_the_same_shortfall_each_time_is_an_offset() -> None:
    """DeepSeek's window that is computed again, or a block dropped where nobody said that the engine speculates."""
    lengths = [64, 160, 320, 640, 1600, 3200, 96, 6400]
    correction = taught(*((length, length - 48) for length in lengths))
    assert (correction.offset_tokens, correction.share, correction.confidence) == (48, 1.0, 1.0)
    assert [correction.apply(tokens, 16) for tokens in (16, 48, 64, 1000)] == [0, 0, 16, 944]


def test_a_shortfall_that_grows_with_the_prompt_is_a_share() -> None:
    lengths = [1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000]
    correction = taught(*((length, length // 4) for length in lengths))
    assert (correction.offset_tokens, correction.share) == (0, 0.25)
    assert correction.apply(4096, 16) == 1024
    assert correction.confidence == 1.0


def test_too_few_samples_correct_nothing_and_neither_do_accidents() -> None:
    assert taught(*[(100, 50)] * 7).apply(100, 1) == 100
    assert taught(*[(100, 50)] * 8).apply(100, 1) == 50
    # One prompt in four was evicted before its turn: that is no habit.
    mixed = taught(*[(320, 320), (640, 640), (160, 160), (320, 0)] * 8)
    assert (mixed.apply(320, 16), mixed.confidence) == (320, 0.75)


def test_a_credit_is_never_raised() -> None:
    correction = taught(*[(100, 400)] * 20)
    assert (correction.apply(100, 1), correction.confidence) == (100, 0.0)


def test_a_habit_that_ends_is_unlearned() -> None:
    correction = taught(*[(100, 50)] * 32, *[(100, 100)] * 32)
    assert correction.apply(100, 1) == 100
    correction = taught(*[(100, 50)] * 32)
    correction.forget()
    assert (correction.apply(100, 1), correction.view()["samples"]) == (100, 0)


def test_nothing_credited_teaches_nothing() -> None:
    assert taught(*[(0, 0)] * 20).confidence == 0.0


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)), max_size=50), st.integers(1, 64))
def test_whatever_is_reported_a_credit_stays_within_the_rules_and_ends_at_a_block(
    samples: list[tuple[int, int]], unit: int
) -> None:
    correction = taught(*samples)
    blocks = random.Random(1).randrange(100)
    assert 0 <= correction.apply(blocks * unit, unit) <= blocks * unit
    assert correction.apply(blocks * unit, unit) % unit == 0
    assert 0.0 <= correction.confidence <= 1.0
