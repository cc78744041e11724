"""Whether a worker has changed its speed."""

from math import log

import numpy as np
import pytest

from predictor.drift import Drift, Off, off


def watched(*errors: float) -> Drift:
    drift = Drift()
    for number, error in enumerate(errors, start=1):
        drift.add(Off(error, error), number, (error,))
    return drift


def test_four_samples_twice_as_long_are_a_change_and_three_are_none() -> None:
    calm = [0.0] * 20
    assert watched(*calm, *[log(2)] * 2).found() is None
    found = watched(*calm, *[log(2)] * 4).found()
    assert found is not None
    assert found.level == pytest.approx(log(2))
    assert found.since == 21


def test_what_is_from_before_a_change_is_no_part_of_it() -> None:
    # Three of four are enough, so the oldest of them may be of the old speed.
    found = watched(*[0.0] * 20, *[log(2)] * 3).found()
    assert found is not None
    assert found.level == pytest.approx(log(2))
    assert found.since == 21


def test_one_stalled_among_four_is_none() -> None:
    assert watched(0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 3.0, 0.0).found() is None


def test_a_small_change_takes_more_samples() -> None:
    calm = [0.001 * (-1) ** number for number in range(32)]
    assert watched(*calm, *[0.08] * 8).found() is None
    found = watched(*calm, *[0.08] * 16).found()
    assert found is not None
    assert found.level == pytest.approx(0.08)


def test_noise_is_no_change() -> None:
    rng = np.random.default_rng(6)
    drift, found = Drift(), 0
    for number in range(5000):
        error = float(rng.normal(0.0, 0.2))
        drift.add(Off(error, error), number, ())
        if drift.found() is not None:
            found += 1
            drift.clear()
    assert found <= 2


def test_when_predictions_change_samples_are_measured_against_the_new_ones() -> None:
    drift = watched(*[log(2)] * 6)
    drift.again(lambda sample: Off(sample[0] - log(2), sample[0] - log(2)))
    assert drift.found() is None
    assert drift.since(5) == [0.0, 0.0]


def test_of_what_is_shorter_than_timing_is_off_by_little_is_said() -> None:
    short = off(0.002, 0.001, noise_s=0.01)
    assert short.whole == pytest.approx(log(2))
    assert short.beyond_noise == pytest.approx(log(12 / 11))
    assert off(20.0, 10.0, noise_s=0.01).beyond_noise == pytest.approx(log(2), abs=0.001)
    assert off(1.0, 0.0, noise_s=0.01).whole == pytest.approx(log(1000))
