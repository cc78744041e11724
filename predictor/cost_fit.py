"""Timed work as rows, bounded by kind and composition, and the non-negative fit through them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from predictor.memory import SampleRow

Array = npt.NDArray[np.float64]
Stratum = tuple[str | int, ...]

# The columns that a time is made of: once a request, for each of its tokens, for each step, for each prefilled token,
# for end^2 - start^2 of what was prefilled, and for each sequence that decoded in a step ...
REQUEST, REQUEST_TOKENS, STEPS, TOKENS, SQUARES, DECODES = range(6)
# ... and once more for the squares, of an attention that looks back so many tokens at most.
BENDS = (2048, 8192, 32_768, 131_072)
FEATURES = 6 + len(BENDS)
_SECONDS, _NOISE, _TRUST, _OWN, _NUMBER = range(5)
_META = 5  # features begin here

# A row counts for so much per newer one of its stratum, and never for less than this for being old.
_FORGETTING, _OLD_FORGETTING, _OLD_LEAST = 0.98, 0.9995, 0.05
# What was measured before a change of speed counts for less: how much it changed is known from few rows.
_TRUST_AFTER_CHANGE = 0.3
_STRATA, _MOST_KEPT = 128, 1024
# Of what was kept: more is not measured, and would run over when it is squared.
_LONGEST_S, _LEAST_NOISE_S, _MOST_WORK = 1e9, 1e-9, 1e18


class Samples:
    """Rows by stratum, each of which keeps its newest: a thousand alike must not push out what is known of others."""

    def __init__(self) -> None:
        self._strata: dict[Stratum, _Stratum] = {}
        self.taken = 0
        self._kept = 0

    def __len__(self) -> int:
        return self._kept

    def add(
        self,
        stratum: Stratum,
        kept: int,
        seconds: float,
        noise_s: float,
        features: tuple[float, ...],
        trust: float = 1.0,
    ) -> bool:
        """True if it is the first of its stratum."""
        self.taken += 1
        home = self._strata.pop(stratum, None)
        first = home is None
        if home is None:
            if len(self._strata) >= _STRATA:
                # The one that was not added to for longest; its place in the order says so.
                self._kept -= len(self._strata.pop(next(iter(self._strata))).known())
            home = _Stratum(kept)
        self._strata[stratum] = home
        self._kept += home.taken < kept
        home.rows[home.taken % kept] = (seconds, noise_s, trust, home.taken, self.taken, *features)
        home.taken += 1
        return first

    def memory(self) -> list[SampleRow]:
        """All rows, oldest first."""
        known: list[tuple[float, SampleRow]] = []
        for key, stratum in self._strata.items():
            for row in stratum.known().tolist():
                seconds, noise_s, trust, _, number, *features = row
                known.append((number, SampleRow(key, len(stratum.rows), seconds, noise_s, trust, tuple(features))))
        return [row for _, row in sorted(known, key=lambda one: one[0])]

    def recall(self, rows: Iterable[SampleRow]) -> None:
        """ValueError for rows of another form than ours, or that cannot have been measured."""
        for row in rows:
            home = self._strata.get(row.stratum)
            kept = row.kept if home is None else len(home.rows)
            if len(row.features) != FEATURES or not 0 < row.kept == kept <= _MOST_KEPT:
                raise ValueError(f"a sample has {len(row.features)} features and {row.kept} places, not {FEATURES}")
            timed = 0 < row.seconds <= _LONGEST_S and _LEAST_NOISE_S <= row.noise_s <= _LONGEST_S
            if not timed or not 0 <= row.trust <= 1 or min(row.features) < 0 or max(row.features) > _MOST_WORK:
                raise ValueError("a sample took no time, less than no work, or more of either than there is")
            self.add(row.stratum, row.kept, row.seconds, row.noise_s, row.features, row.trust)

    def copy(self) -> Samples:
        copy = Samples()
        copy.taken, copy._kept = self.taken, self._kept
        for key, stratum in self._strata.items():
            copy._strata[key] = twin = _Stratum(len(stratum.rows))
            twin.rows, twin.taken = stratum.rows.copy(), stratum.taken
        return copy

    def rescaled(self, factor: float, before: int, prefills: bool, decodes: bool) -> Samples:
        """A copy for a worker that has become `factor` times as slow since its `before`-th sample.

        What it took earlier, it would take so much longer now. `prefills` and `decodes` say whether that goes for rows
        with and without prefill.
        """
        copy = self.copy()
        for stratum in copy._strata.values():
            rows = stratum.known()
            prefill = rows[:, _META + TOKENS] > 0
            old = (rows[:, _NUMBER] < before) & ((prefill & prefills) | (~prefill & decodes))
            rows[old, _SECONDS] *= factor
            rows[old, _TRUST] *= _TRUST_AFTER_CHANGE
        return copy

    def known(self) -> tuple[Array, Array, Array, Array]:
        """Of all rows: features, seconds, noise and weight (1 for the newest)."""
        if not self._strata:
            return np.empty((0, FEATURES)), np.empty(0), np.empty(0), np.empty(0)
        parts = [stratum.known() for stratum in self._strata.values()]
        rows = np.concatenate(parts)
        taken = np.repeat([stratum.taken for stratum in self._strata.values()], [len(part) for part in parts])
        recency = _FORGETTING ** (taken - 1 - rows[:, _OWN])
        recency *= np.maximum(_OLD_LEAST, _OLD_FORGETTING ** (self.taken - rows[:, _NUMBER]))
        return rows[:, _META:], rows[:, _SECONDS], rows[:, _NOISE], rows[:, _TRUST] * recency


class _Stratum:
    def __init__(self, kept: int) -> None:
        self.rows: Array = np.zeros((kept, _META + FEATURES))
        self.taken = 0

    def known(self) -> Array:
        return self.rows[: self.taken]


class Fit:
    """Weighted least squares with no negative coefficient, on relative errors, with outliers held down.

    `features` is rows x columns, `noise` (seconds) what timing itself is off by: below it relative errors mean nothing.
    A fit starts with its robust weights, and is then asked for solutions on some of the columns. `start` is a solution
    that may be near: it saves time and changes nothing else.
    """

    def __init__(
        self,
        features: Array,
        seconds: Array,
        weights: Array,
        noise: Array,
        columns: list[int],
        start: Array | None = None,
    ) -> None:
        self._samples = len(seconds)
        self._take(features, seconds, weights / (seconds + noise) ** 2)
        for _ in range(2):
            start = self.least(columns, start)
            expected = features @ start
            # Relative to what is expected: relative to what was measured, whoever was quick by chance would count more.
            unit = np.clip(expected, seconds / 3, seconds * 3) + noise
            relative = np.abs(expected - seconds) / unit
            # One stalled sample must not bend the curve (Huber).
            spread = max(0.005, 1.5 * _median(relative))
            self._take(features, seconds, weights / unit**2 * np.minimum(1.0, spread / np.maximum(relative, 1e-9)))

    def _take(self, features: Array, seconds: Array, weights: Array) -> None:
        scale = np.sqrt(weights @ features**2)
        scale[scale == 0] = 1.0
        scaled = features / scale
        weighted = scaled * weights[:, None]
        self._scale = scale
        self._normal = weighted.T @ scaled
        self._right = weighted.T @ seconds
        self._total = float(weights @ seconds**2)

    def least(self, columns: list[int], start: Array | None = None) -> Array:
        """The best non-negative combination of these columns; all others are 0."""
        found = np.zeros(len(self._scale))
        begins = np.zeros(len(columns), dtype=bool) if start is None else start[columns] > 0
        wanted = np.array(columns)
        found[wanted] = _non_negative(self._normal[wanted[:, None], wanted], self._right[wanted], begins)
        return found / self._scale

    def chosen(self, columns: list[int]) -> Array:
        """The same by a mild form of Akaike's criterion: a column that explains no more than noise would is left out.

        Far from the samples (a giant after small prompts) it would be all noise. The full criterion leaves out too
        much: that attention grows with the square is known, only the factor is not. Every set of columns is tried,
        those of one size at once.
        """
        wanted = np.array(columns)
        normal, right = self._normal[wanted[:, None], wanted], self._right[wanted]
        inside, pairs, outside, begins = _column_sets(len(columns))
        # Who is not in a set is an equation of its own, with nothing on its right side: all sets have one size.
        sides = right * inside
        matrices = normal * pairs
        parts = np.linalg.solve(matrices + outside, sides[:, :, None])[:, :, 0]
        products = (matrices @ parts[:, :, None])[:, :, 0]
        losses = self._total + (parts * (products - 2 * sides)).sum(axis=1)
        losses[(parts < 0).any(axis=1)] = np.inf
        best, best_score = np.zeros(len(self._scale)), np.inf
        for size, (begin, end) in enumerate(itertools.pairwise(begins), start=1):
            winner = begin + int(losses[begin:end].argmin())
            score = self._score(float(losses[winner]), size)
            if score < best_score:
                best, best_score = np.zeros(len(self._scale)), score
                best[wanted] = parts[winner]
        return best / self._scale

    def score(self, coefficients: Array) -> float:
        """Less is better: the loss, and a penalty for each column in use."""
        parts = coefficients * self._scale
        loss = self._total - 2 * float(parts @ self._right) + float(parts @ self._normal @ parts)
        return self._score(loss, int(np.count_nonzero(parts)))

    def _score(self, loss: float, size: int) -> float:
        # Losses below the floor are rounding errors.
        return self._samples * float(np.log(max(loss, 1e-10 * self._total, 1e-300))) + size


# Keeps columns that the rows cannot tell apart from blowing up; columns are scaled to 1.
_RIDGE = 1e-9


def _non_negative(normal: Array, right: Array, inside: npt.NDArray[np.bool_]) -> Array:
    """Lawson and Hanson's active set method on the normal equations, begun with the columns `inside`."""
    size = len(right)
    normal = normal + _ridge(size)
    found = np.zeros(size)
    if inside.any():
        members = np.flatnonzero(inside)
        wanted = np.linalg.solve(normal[members[:, None], members], right[members])
        if (wanted > 0).all():
            found[members] = wanted
        else:
            inside[:] = False
    for _ in range(3 * size):
        gain = right - normal @ found
        gain[inside] = -np.inf
        entering = int(gain.argmax())
        if gain[entering] <= 1e-12:
            break
        inside[entering] = True
        while True:
            members = np.flatnonzero(inside)
            wanted = np.linalg.solve(normal[members[:, None], members], right[members])
            held = found[members]
            found[:] = 0.0
            if (wanted > 0).all():
                found[members] = wanted
                break
            # As far towards it as nobody falls below zero; who reaches it leaves.
            falling = wanted <= 0
            share = float((held[falling] / (held[falling] - wanted[falling] + 1e-300)).min())
            held = np.maximum(held + share * (wanted - held), 0.0)
            found[members] = held
            inside[members[held <= 1e-15]] = False
            if not inside.any():
                break
    return found


@functools.cache
def _ridge(size: int) -> Array:
    return _RIDGE * np.eye(size)


def _median(values: Array) -> float:
    """numpy's own takes ten times as long for a hundred values."""
    ordered = np.sort(values)
    count = len(ordered)
    return float((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)


@functools.cache
def _column_sets(columns: int) -> tuple[Array, Array, Array, list[int]]:
    """All sets of so many columns, the small ones first: who is inside, and both of which pairs; what is added to each
    diagonal, and where the sets of each size begin."""
    sets = [chosen for size in range(1, columns + 1) for chosen in itertools.combinations(range(columns), size)]
    inside = np.array([[float(column in chosen) for column in range(columns)] for chosen in sets])
    outside = np.stack([np.diag(1.0 - row) + _RIDGE * np.diag(row) for row in inside])
    sizes = [len(chosen) for chosen in sets]
    begins = [sizes.index(size) for size in range(1, columns + 1)]
    return inside, inside[:, :, None] * inside[:, None, :], outside, [*begins, len(sets)]
