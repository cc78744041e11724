"""The fit through timed work: no negative coefficient, relative errors, outliers held down, bounded rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.cost_fit import FEATURES, SQUARES, STEPS, TOKENS, Array, Fit, Samples

# Beside so much noise all errors weigh alike.
PLENTY = 1e6


def fit(features: Array, values: Array, weights: Array | None = None) -> Fit:
    rows, columns = features.shape
    return Fit(
        features, values, np.ones(rows) if weights is None else weights, np.full(rows, PLENTY), list(range(columns))
    )


# The solver


@given(
    rows=st.lists(st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3), min_size=4, max_size=12),
    truth=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=3, max_size=3),
)
@hypothesis_settings(max_examples=100, deadline=None)
def test_both_solvers_reproduce_what_a_non_negative_combination_made(
    rows: list[list[float]], truth: list[float]
) -> None:
    features, wanted = np.array(rows), np.array(truth)
    values = features @ wanted
    for found in (fit(features, values).least([0, 1, 2]), fit(features, values).chosen([0, 1, 2])):
        assert (found >= 0).all()
        assert features @ found == pytest.approx(values, abs=1e-3 * max(1.0, float(values.max())))


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 7), rows=st.integers(3, 40))
@hypothesis_settings(max_examples=100, deadline=None)
def test_no_column_could_be_moved_for_the_better(seed: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.random((rows, columns))
    values = features @ rng.normal(0.5, 1.0, columns) + rng.normal(0.0, 0.1, rows)
    values = np.maximum(values, 0.01)
    found = fit(features, values).least(list(range(columns)))
    # Karush, Kuhn and Tucker: a column in use cannot be improved, one that is not would have to become negative.
    slope = features.T @ (values - features @ found)
    assert (found >= 0).all()
    assert slope[found > 0] == pytest.approx(0.0, abs=1e-3 * rows)
    assert (slope[found == 0] <= 1e-3 * rows).all()


def test_the_solver_is_as_good_as_the_best_of_a_fine_grid_when_the_free_optimum_is_negative() -> None:
    rng = np.random.default_rng(7)
    features = rng.random((30, 2))
    values = features @ np.array([2.0, -1.0])

    def loss(coefficients: tuple[float, float]) -> float:
        return float(((features @ np.array(coefficients) - values) ** 2).sum())

    grid = [(x, y) for x in np.arange(0, 3, 0.01) for y in np.arange(0, 1, 0.05)]
    for found in (fit(features, values).least([0, 1]), fit(features, values).chosen([0, 1])):
        assert found[1] == 0.0
        assert loss((found[0], found[1])) <= min(loss(point) for point in grid) + 1e-9


def test_weights_say_whom_to_believe() -> None:
    features, values = np.ones((2, 1)), np.array([1.0, 3.0])
    assert fit(features, values, np.array([1.0, 0.0])).least([0])[0] == pytest.approx(1.0)
    assert fit(features, values, np.array([1.0, 1.0])).least([0])[0] == pytest.approx(2.0, rel=1e-5)


def test_a_column_that_explains_only_noise_is_left_out_and_one_that_explains_more_is_not() -> None:
    rng = np.random.default_rng(3)
    features = np.column_stack([np.ones(60), rng.random(60), rng.random(60)])
    values = features @ np.array([1.0, 2.0, 0.0]) + rng.normal(0.0, 0.05, 60)
    found = fit(features, values).chosen([0, 1, 2])
    assert found[1] == pytest.approx(2.0, abs=0.1)
    assert found[2] == 0.0


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(1, 5), rows=st.integers(3, 40))
@hypothesis_settings(max_examples=100, deadline=None)
def test_no_other_set_of_columns_would_have_been_better(seed: int, columns: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.random((rows, columns))
    values = np.maximum(features @ rng.normal(0.5, 1.0, columns) + rng.normal(0.0, 0.1, rows), 0.01)
    fitted = fit(features, values)
    found = fitted.chosen(list(range(columns)))
    for size in range(1, columns + 1):
        for others in itertools.combinations(range(columns), size):
            assert fitted.score(found) <= fitted.score(fitted.least(list(others))) + 1e-6 * rows


@given(seed=st.integers(0, 2**32 - 1), columns=st.integers(2, 5), rows=st.integers(3, 40))
@hypothesis_settings(max_examples=100, deadline=None)
def test_a_column_that_stands_there_once_more_explains_nothing_more(seed: int, columns: int, rows: int) -> None:
    # As the bends of an attention do, where no sample goes beyond them.
    rng = np.random.default_rng(seed)
    features = rng.random((rows, columns))
    features = np.column_stack([features, features[:, -1]])
    values = np.maximum(features @ rng.normal(0.5, 1.0, columns + 1) + rng.normal(0.0, 0.1, rows), 0.01)
    fitted = fit(features, values)
    plain = fitted.chosen(list(range(columns)))
    assert fitted.score(fitted.least(list(range(columns + 1)), plain)) >= fitted.score(plain) - 1e-6 * rows


def test_errors_count_by_their_part_of_the_whole() -> None:
    # 10 % off at 1 s weighs as much as 10 % off at 100 s.
    features, seconds = np.array([[1.0], [1.0], [100.0], [100.0]]), np.array([1.0, 1.1, 100.0, 110.0])
    found = Fit(features, seconds, np.ones(4), np.full(4, 1e-9), [0]).least([0])[0]
    assert found == pytest.approx(1.05, abs=0.001)


def test_one_row_that_is_ten_times_too_long_hardly_counts() -> None:
    features = np.arange(1.0, 31.0)[:, None]
    seconds = 2.0 * features[:, 0]
    seconds[7] *= 10
    assert Fit(features, seconds, np.ones(30), np.full(30, 0.001), [0]).least([0])[0] == pytest.approx(2.0, rel=0.01)


# The rows


def row(steps: float = 1.0, tokens: float = 100.0) -> tuple[float, ...]:
    features = [0.0] * FEATURES
    features[STEPS], features[TOKENS] = steps, tokens
    return tuple(features)


def test_a_stratum_keeps_its_newest_rows_and_pushes_out_nobody_elses() -> None:
    samples = Samples()
    samples.add(("rare",), 4, 9.0, 0.001, row())
    for number in range(100):
        samples.add(("frequent",), 4, float(number), 0.001, row())
    _, seconds, _, weights = samples.known()
    assert sorted(seconds) == [9.0, 96.0, 97.0, 98.0, 99.0]
    assert weights[seconds == 99.0] == pytest.approx(1.0)
    assert weights[seconds == 96.0] < weights[seconds == 98.0] < 1.0
    assert weights[seconds == 9.0] > 0.04
    assert (len(samples), samples.taken) == (5, 101)


def test_the_number_of_strata_is_bounded_and_the_least_used_goes() -> None:
    samples = Samples()
    for number in range(1000):
        samples.add((number,), 4, 1.0, 0.001, row())
        samples.add(("used",), 4, 2.0, 0.001, row())
    assert len(samples) <= 128 * 4
    assert (samples.known()[1] == 2.0).sum() == 4


def test_a_change_of_speed_rescales_what_is_older_and_believes_it_less() -> None:
    samples = Samples()
    for _ in range(6):
        samples.add(("a",), 8, 1.0, 0.001, row())
        samples.add(("decodes",), 8, 1.0, 0.001, row(tokens=0.0))
    changed = samples.rescaled(2.0, before=9, prefills=True, decodes=True)
    _, seconds, _, weights = changed.known()
    assert sorted(seconds) == [1.0] * 4 + [2.0] * 8
    assert weights[seconds == 2.0].max() < weights[seconds == 1.0].min()
    decodes = changed.rescaled(3.0, before=13, prefills=False, decodes=True)
    features, seconds, _, _ = decodes.known()
    assert sorted(seconds[features[:, TOKENS] == 0]) == [3.0] * 2 + [6.0] * 4
    assert sorted(seconds[features[:, TOKENS] > 0]) == [1.0] * 2 + [2.0] * 4
    # Copies: a change that explains nothing is dropped, and nothing is left of it.
    assert (samples.known()[1] == 1.0).all()
    decodes.add(("a",), 8, 5.0, 0.001, row())
    assert (len(samples), len(decodes), decodes.taken, samples.taken) == (12, 13, 13, 12)


def test_nothing_is_known_of_nothing() -> None:
    features, seconds, noise, weights = Samples().known()
    assert features.shape == (0, FEATURES)
    assert len(seconds) == len(noise) == len(weights) == 0
    assert SQUARES < FEATURES
