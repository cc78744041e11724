"""How much requests generate: what ended, what still decodes and what was cut off, in one curve."""

import sys
import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.output_lengths import LengthCurve, OutputLengths, Running, draws

NOBODY = Running


def curve_of(ended: list[int], running: list[int] | None = None, max_tokens: int | None = None) -> LengthCurve:
    lengths = OutputLengths(256)
    for tokens in ended:
        lengths.ended(tokens, max_tokens)
    return lengths.curve(lambda: Running(running or []), 0.0)


# The curve


def test_of_many_that_have_ended_the_curve_is_the_share_that_was_longer() -> None:
    curve = curve_of(list(range(1, 1001)))
    for tokens in (1, 100, 500, 900, 999):
        assert curve.longer(tokens) == pytest.approx(1 - tokens / 1000, abs=0.005)


def test_those_that_still_decode_count_as_longer_than_what_they_have() -> None:
    # Half ended after 100 tokens; the others have 300 and go on. By the ended alone, nobody would pass 100.
    curve = curve_of([100] * 500, [300] * 500)
    assert curve.longer(100) == pytest.approx(0.5, abs=0.01)
    assert curve.longer(299) == pytest.approx(0.5, abs=0.01)
    assert curve_of([100] * 500).longer(100) < 0.01


def test_one_that_was_cut_off_says_that_outputs_are_at_least_so_long() -> None:
    lengths = OutputLengths(256)
    for _ in range(300):
        lengths.ended(50, max_tokens=1000)
        lengths.ended(64, max_tokens=64)
    assert lengths.curve(NOBODY, 0.0).longer(63) == pytest.approx(0.5, abs=0.02)


def test_a_wave_of_which_only_the_short_have_ended_is_not_taken_for_short() -> None:
    # The truth is uniform between 300 and 1500; 200 began together and have been running for 600 tokens.
    rng = np.random.default_rng(1)
    truth = rng.integers(300, 1501, 200)
    ended = [int(tokens) for tokens in truth if tokens <= 600]
    curve = curve_of(ended, [600] * (200 - len(ended)))
    rest = [curve.length(float(rng.random()), 600) for _ in range(4000)]
    assert np.mean(truth > 600) == pytest.approx(curve.longer(600), abs=0.03)
    # Nobody has been seen to end later, so that their end is a guess; but none that is here already.
    assert min(rest) > 600
    assert np.mean(rest) > 700


def test_before_anything_has_ended_half_are_taken_to_be_longer_than_typical() -> None:
    curve = OutputLengths(400).curve(NOBODY, 0.0)
    assert curve.longer(400) == pytest.approx(0.5, abs=0.07)
    rng = np.random.default_rng(2)
    outputs = [curve.length(float(rng.random())) for _ in range(4000)]
    assert np.median(outputs) == pytest.approx(400, rel=0.2)
    assert np.quantile(outputs, 0.99) < 12 * 400


def test_ten_ends_outweigh_the_guess() -> None:
    assert curve_of([2000] * 20).longer(1000) > 0.8


# Draws


@given(
    ended=st.lists(st.integers(1, 5000), max_size=60),
    running=st.lists(st.integers(0, 5000), max_size=30),
    draw=st.floats(0, 1, exclude_max=True),
    generated=st.integers(0, 20_000),
    more=st.integers(0, 5000),
)
def test_a_request_goes_on_by_one_token_at_least_and_never_by_less_for_having_more(
    ended: list[int], running: list[int], draw: float, generated: int, more: int
) -> None:
    curve = curve_of(ended, running)
    assert list(curve.lengths) == sorted(set(curve.lengths))
    assert list(curve.survival) == sorted(curve.survival, reverse=True)
    now, later = curve.length(draw, generated), curve.length(draw, generated + more)
    assert now > generated
    assert later >= now
    assert 0.0 <= curve.longer(generated + more) <= curve.longer(generated) <= 1.0


@given(draw=st.floats(0, 1, exclude_max=True), generated=st.integers(0, 100), limit=st.integers(1, 300))
def test_nobody_generates_more_than_was_asked_for(draw: float, generated: int, limit: int) -> None:
    assert 1 <= curve_of([1000, 2000], [50]).length(draw, generated, limit) <= limit


def test_draws_follow_the_curve() -> None:
    rng = np.random.default_rng(3)
    truth = rng.lognormal(5.5, 0.9, 2000).astype(int) + 1
    curve = curve_of(truth.tolist())
    outputs = np.array([curve.length(float(rng.random())) for _ in range(5000)])
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(outputs, share) == pytest.approx(np.quantile(truth, share), rel=0.1)
    longer = truth[truth > 400]
    rest = np.array([curve.length(float(rng.random()), 400) for _ in range(5000)])
    assert np.quantile(rest, 0.5) == pytest.approx(np.quantile(longer, 0.5), rel=0.1)


def test_the_draws_of_some_futures_are_spread_evenly_over_them() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        found = draws(rng, 5)
        assert sorted(int(5 * value) for value in found) == [0, 1, 2, 3, 4]
    assert len({draws(rng, 5) for _ in range(20)}) == 20


# Keeping up


def test_only_the_newest_two_thousand_ends_count() -> None:
    lengths = OutputLengths(256)
    for tokens in (1000, 100):
        for _ in range(2000):
            lengths.ended(tokens, None)
    assert len(lengths) == 2000
    assert lengths.curve(NOBODY, 0.0).longer(100) < 0.01


def test_a_curve_is_drawn_anew_only_when_enough_is_new() -> None:
    lengths, asked = OutputLengths(256), []

    def running() -> Running:
        asked.append(1)
        return Running()

    for number in range(1000):
        lengths.ended(number + 1, None)
    first = lengths.curve(running, 0.0)
    assert lengths.curve(running, 100.0) is first
    for _ in range(70):
        lengths.ended(5, None)
    assert lengths.curve(running, 5.0) is first, "too soon"
    assert lengths.curve(running, 10.0) is not first
    assert len(asked) == 2


def test_while_few_have_ended_those_that_run_are_looked_at_every_second() -> None:
    lengths = OutputLengths(256)
    before = lengths.curve(lambda: Running([10]), 0.0)
    assert lengths.curve(lambda: Running([900] * 50), 0.5) is before
    assert lengths.curve(lambda: Running([900] * 50), 1.0).longer(800) > 0.9 > before.longer(800)


@pytest.mark.parametrize("tokens", [0, -1, (1 << 20) + 1])
def test_lengths_that_cannot_be_are_left_out(tokens: int) -> None:
    lengths = OutputLengths(256)
    lengths.ended(tokens, None)
    assert len(lengths) == 0


def test_what_was_learned_can_be_carried_on_and_newer_ends_stay_newest() -> None:
    old = OutputLengths(256)
    for tokens in range(1, 300):
        old.ended(tokens, 250)
    new = OutputLengths(256)
    new.ended(777, None)
    new.recall(old.memory())
    assert new.memory() == [*old.memory(), (777, True)]
    assert new.curve(NOBODY, 0.0).longer(100) == pytest.approx(old.curve(NOBODY, 0.0).longer(100), abs=0.01)


def test_a_draw_costs_microseconds_and_a_curve_a_millisecond() -> None:
    rng = np.random.default_rng(5)
    lengths = OutputLengths(256)
    for tokens in rng.lognormal(5.5, 0.9, 2000):
        lengths.ended(int(tokens) + 1, None)
    curve = lengths.curve(lambda: Running([100] * 500), 0.0)
    draw_s = timeit.timeit(lambda: curve.length(0.7, 100), number=2000) / 2000
    fresh_s = min(timeit.repeat(lambda: lengths.recall([]), number=1, repeat=5))
    sys.stdout.write(f"\none draw {draw_s * 1e6:.1f} us, one curve {fresh_s * 1e3:.2f} ms")
    assert draw_s < 100e-6
    assert fresh_s < 0.015


# Before anybody has ended


@pytest.mark.parametrize(("shortest", "longest", "slots"), [(1500, 6000, 128), (300, 1500, 25)])
def test_of_a_wave_that_nobody_has_left_the_length_is_foreseen(shortest: int, longest: int, slots: int) -> None:
    # Told that 256 are typical, and nothing more than that nobody has ended yet.
    truth = np.random.default_rng(6).integers(shortest, longest, 1000)
    for oldest in (int(0.6 * shortest), int(0.9 * shortest)):
        curve = curve_of([], np.linspace(1, oldest, slots).astype(int).tolist())
        for share in (0.25, 0.5, 0.75):
            assert curve.length(share, oldest) == pytest.approx(np.quantile(truth, share), rel=0.4)


def test_one_that_goes_on_says_less_than_many() -> None:
    one, many = (curve_of([], [400] * count).length(0.5, 0) for count in (1, 100))
    assert 400 < one < 800 < 1600 < many


def test_what_is_only_counted_lengthens_no_guess() -> None:
    # By steps of a length that nobody knows yet, far too much may have been counted.
    curve = OutputLengths(256).curve(lambda: Running(counted=[400] * 100), 0.0)
    assert curve.length(0.5, 0) < 800
    assert curve.longer(399) > 0.9
