"""What a worker's steps cost, learned from requests that had the worker's prefill to themselves.

A prompt of n tokens of which p are cached, prefilled in s steps beside k decoding sequences a step, takes

    overhead + overhead_per_token*n + fixed*s + per_token*(n-p) + per_token_squared*(n^2-p^2) + per_decode*s*k

seconds, where the overhead is what a server spends on a request outside of its steps (HTTP, tokenization). Splitting a
prompt into chunks changes only the number of steps, so the same numbers price a whole prompt and each single step of
the replay. They are fitted by non-negative least squares on relative errors: what is promised is
the predicted time, never the parameters, some of which a worker's traffic may not tell apart.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections import deque
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[np.float64]
# What a server spends on a token outside of its engine, at most, of what the engine spends.
_REQUEST_TOKEN_RATIO = 0.1
# No engine steps faster. A fit may find that steps cost nothing, and a replay must get on all the same.
_MIN_STEP_S = 1e-4
# What timing one request from outside is off by, whatever its length: below it, relative errors mean nothing.
_NOISE_S = 0.01
# Until samples say otherwise, a decoding sequence costs a step this part of what the step costs anyway: alone, requests
# can hardly tell the two apart, and a busy worker multiplies the mistake by all that decode.
_DECODE_RATIO = 0.03


class Basis(enum.Enum):
    """What a forecast rests on."""

    DEFAULT = "default"  # nothing measured: the configured, conservative guess
    RATE = "rate"  # some samples: one measured rate
    CURVE = "curve"  # enough samples over enough lengths: learned


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds a step takes, by its parts; the overhead is spent once per request outside of the steps."""

    per_request_s: float
    per_request_token_s: float  # of the whole prompt, cached or not
    fixed_s: float
    per_token_s: float
    per_token_squared_s: float
    per_decode_s: float

    def overhead_s(self, prompt_tokens: int) -> float:
        return self.per_request_s + self.per_request_token_s * prompt_tokens

    def step_s(self, new_tokens: int, squares: int, decoding: int) -> float:
        """One step: `new_tokens` of prefill chunks, the sum of their end^2 - start^2, and sequences that decode."""
        seconds = self.fixed_s + self.per_decode_s * decoding
        seconds += self.per_token_s * new_tokens + self.per_token_squared_s * squares
        return max(_MIN_STEP_S, seconds)

    def decode_step_s(self, decodes: int) -> float:
        return max(_MIN_STEP_S, self.fixed_s + self.per_decode_s * decodes)

    def tokens_s(self, start: int, end: int) -> float:
        """Prefilling positions `start` to `end`, without the part that each step costs."""
        return self.per_token_s * (end - start) + self.per_token_squared_s * (end * end - start * start)

    def alone_s(self, cached_tokens: int, prompt_tokens: int, max_num_batched_tokens: int) -> float:
        """Prefilling a prompt on a worker that does nothing else, without the overhead."""
        steps = ceil(max(1, prompt_tokens - cached_tokens) / max_num_batched_tokens)
        return self.fixed_s * steps + self.tokens_s(cached_tokens, prompt_tokens)


@dataclass(frozen=True, slots=True)
class LearningPolicy:
    """When a worker counts as learned, and what is assumed before."""

    min_samples: int = 8
    min_length_ratio: float = 4.0  # longest over shortest uncached length among the samples
    default_tokens_per_s: float = 2000.0
    default_step_s: float = 0.01


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill that shared its steps with decodes only."""

    prompt_tokens: int
    cached_tokens: int
    steps: int
    decodes_per_step: float
    seconds: float  # from when it could join, to the first token

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class DecodeSample:
    """What one decode step took, averaged over the output of one request."""

    decodes: int
    step_s: float


class PrefillCost:
    """One worker's cost curve. `cost` is valid at any time; `basis` says what it is worth."""

    _KEPT_PER_OCTAVE, _DECODES_KEPT = 40, 64
    _FORGETTING = 0.995  # weight of a sample per newer one ...
    _OLDEST = 800  # ... up to so many: who has nobody younger of about his length still has a say

    def __init__(self, policy: LearningPolicy) -> None:
        self._policy = policy
        # By length, in powers of two: a thousand requests alike must not push out what is known of others.
        self._octaves: dict[int, deque[tuple[int, PrefillSample]]] = {}
        self._taken = 0
        self._fitted_at = 0
        self._lengths = 1 << 62, 0  # the shortest and the longest so far
        self._decodes: deque[DecodeSample] = deque(maxlen=self._DECODES_KEPT)
        self.cost = _default_cost(policy)
        self.basis = Basis.DEFAULT

    @property
    def learned(self) -> bool:
        return self.basis is Basis.CURVE

    @property
    def samples(self) -> int:
        return sum(len(octave) for octave in self._octaves.values())

    def forget(self) -> None:
        """The engine is another than the one that was measured."""
        self._octaves.clear()
        self._lengths = 1 << 62, 0
        self._decodes.clear()
        self.cost, self.basis = _default_cost(self._policy), Basis.DEFAULT

    def add(self, sample: PrefillSample) -> bool:
        """Learns from one prefill; False if the sample says nothing (no work, or no time)."""
        if sample.computed_tokens <= 0 or not 0 < sample.seconds < 3600:
            return False
        self._taken += 1
        octave = self._octaves.setdefault(sample.computed_tokens.bit_length(), deque(maxlen=self._KEPT_PER_OCTAVE))
        octave.append((self._taken, sample))
        known = self._lengths
        self._lengths = min(known[0], sample.computed_tokens), max(known[1], sample.computed_tokens)
        # A fit takes up to a millisecond; what one more sample among many changes can wait for others.
        if self._lengths != known or self._taken - self._fitted_at >= self.samples // _SAMPLES_PER_FIT:
            self._fit()
        return True

    def add_decode(self, sample: DecodeSample) -> None:
        """Learns what a step without prefill takes: prompts alone hardly tell a step's fixed cost from a token's."""
        if 0 < sample.step_s < 60:
            self._decodes.append(sample)

    def _known(self) -> list[tuple[int, PrefillSample]]:
        return [numbered for octave in self._octaves.values() for numbered in octave]

    def _fit(self) -> None:
        self._fitted_at = self._taken
        lengths = [sample.computed_tokens for _, sample in self._known()]
        spans = max(lengths) >= self._policy.min_length_ratio * min(lengths)
        if len(lengths) >= self._policy.min_samples and spans:
            self.cost, self.basis = self._fit_curve(), Basis.CURVE
        else:
            self.cost, self.basis = self._fit_rate(), Basis.RATE

    def _fit_rate(self) -> StepCost:
        known = [sample for _, sample in self._known()]
        rate = sum(sample.seconds for sample in known) / sum(sample.computed_tokens for sample in known)
        return StepCost(0.0, 0.0, 0.0, rate, 0.0, 0.0)

    def _fit_curve(self) -> StepCost:
        samples = [sample for _, sample in self._known()]
        decodes = [(0.0, 0.0, 1.0, 0.0, 0.0, float(sample.decodes)) for sample in self._decodes]
        # Sixteen decodes a step against one, by the ratio above.
        prior = (0.0, 0.0, -15 * _DECODE_RATIO, 0.0, 0.0, 16 - (1 + 15 * _DECODE_RATIO))
        step_s = float(np.median([s.step_s for s in self._decodes])) if decodes else self._policy.default_step_s
        features = np.array([prior, *decodes, *(_features(sample) for sample in samples)])
        seconds = np.array([0.0] + [s.step_s for s in self._decodes] + [s.seconds for s in samples])
        ages = np.minimum([self._taken - number for number, _ in self._known()], self._OLDEST)
        age = np.concatenate([[0], np.arange(len(decodes) - 1, -1, -1), ages])
        if not any(sample.cached_tokens > 4 * sample.computed_tokens for sample in samples):
            # Cold prompts cannot tell a server's work per token from its engine's: all of it is the engine's then.
            features[:, _PER_REQUEST_TOKEN] = 0.0
        # A decode step is timed over a whole output, and so is less off.
        noise = np.array([5 * step_s] + [_NOISE_S / 8] * len(decodes) + [_NOISE_S] * len(samples))
        weights = self._FORGETTING**age / (seconds + noise) ** 2
        solution = _robust_fit(features, seconds, weights, noise)
        if solution[_PER_REQUEST_TOKEN] > _REQUEST_TOKEN_RATIO * solution[_PER_TOKEN]:
            # No server works so much on a token beside its engine: the cached prompts were held up by something else.
            features[:, _PER_REQUEST_TOKEN] = 0.0
            solution = _robust_fit(features, seconds, weights, noise)
        if solution[_SQUARE] > 0 and solution[_PER_TOKEN] == 0:
            # Of few lengths the square alone may seem to explain everything, and then a giant takes hours.
            features[:, _SQUARE] = 0.0
            solution = _robust_fit(features, seconds, weights, noise)
        request, request_token, fixed, linear, square, decode = (float(value) for value in solution)
        return StepCost(request, request_token, fixed, linear, square, decode)


_PER_REQUEST_TOKEN, _PER_TOKEN, _SQUARE = 1, 3, 4
_SAMPLES_PER_FIT = 16


def _robust_fit(features: _Array, seconds: _Array, weights: _Array, noise: _Array) -> _Array:
    """Three rounds, the later ones with outliers held down (Huber): one stalled sample must not bend the curve."""
    solution = non_negative_least_squares(features, seconds, weights)
    for _ in range(2):
        relative = np.abs(features @ solution - seconds) / (seconds + noise)
        spread = max(0.005, 1.5 * float(np.median(relative)))
        robust = weights * np.minimum(1.0, spread / np.maximum(relative, 1e-9))
        solution = non_negative_least_squares(features, seconds, robust)
    return solution


def _features(sample: PrefillSample) -> tuple[float, ...]:
    end, start = sample.prompt_tokens, sample.cached_tokens
    return 1.0, end, sample.steps, end - start, end * end - start * start, sample.steps * sample.decodes_per_step


def _default_cost(policy: LearningPolicy) -> StepCost:
    return StepCost(0.0, 0.0, policy.default_step_s, 1.0 / policy.default_tokens_per_s, 0.0, 0.0)


def non_negative_least_squares(features: _Array, values: _Array, weights: _Array) -> _Array:
    """Weighted least squares with no negative coefficient, by trying every set of active columns.

    Of sets of different size a mild form of Akaike's criterion chooses: a column that explains no more than noise
    would is left out, since far from the samples (a giant after small prompts) it would be all noise. The full
    criterion leaves out too much: that attention grows with the square is known, only the factor is not.

    `features` is samples x columns; with six columns that is 63 small solves, done for all sets of one size
    at once. Columns are scaled and a tiny ridge keeps columns that the samples cannot tell apart from blowing up.
    """
    root = np.sqrt(weights)
    scale = np.sqrt(((features * root[:, None]) ** 2).sum(axis=0))
    scale[scale == 0] = 1.0
    scaled = features * root[:, None] / scale
    target = values * root
    normal, right = scaled.T @ scaled, scaled.T @ target
    total = float(target @ target)
    columns = features.shape[1]
    best, best_score = np.zeros(columns), np.inf
    samples = len(values)
    for size in range(1, columns + 1):
        sets = _column_sets(columns, size)
        matrices, sides = normal[sets[:, :, None], sets[:, None, :]], right[sets]
        parts = np.linalg.solve(matrices + 1e-9 * np.eye(size), sides[:, :, None])[:, :, 0]
        losses = total - 2 * (parts * sides).sum(axis=1) + np.einsum("si,sij,sj->s", parts, matrices, parts)
        losses[(parts < 0).any(axis=1)] = np.inf
        winner = int(losses.argmin())
        # Losses below the floor are rounding errors.
        loss = max(float(losses[winner]), 1e-10 * total, 1e-300)
        score = samples * np.log(loss) + size
        if score < best_score:
            best, best_score = np.zeros(columns), score
            best[sets[winner]] = parts[winner]
    coefficients: _Array = best / scale
    return coefficients


@functools.cache
def _column_sets(columns: int, size: int) -> npt.NDArray[np.intp]:
    return np.array(list(itertools.combinations(range(columns), size)))
