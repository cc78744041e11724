"""What a worker's steps cost, learned from the intervals between step ends and from requests that were alone.

A prompt of n tokens of which p are cached, prefilled in s steps beside k decoding sequences a step, takes

    overhead + overhead_per_token*n + fixed*s + per_token*(n-p) + per_token_squared*(n^2-p^2) + per_decode*s*k

seconds, where the overhead is what a server spends on a request outside of its steps (HTTP, tokenization). Splitting a
prompt into chunks changes only the number of steps, so the same numbers price a whole prompt and each single step of
the replay. They are fitted by non-negative least squares on relative errors: what is promised is
the predicted time, never the parameters, some of which a worker's traffic may not tell apart.

Two kinds of samples. Requests that had the worker to themselves are clean, and rare on a busy worker; they tell what a
request costs outside of the steps. Intervals between two observed step ends are plentiful under load. Both stand in one
fit. A worker that changes its speed (throttled, a noisy neighbour) is noticed by its newest samples being off all in
one direction: unless the fit finds a shape that explains them, everything older is taken to be slower by as much.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, exp, log

import numpy as np

from predictor.cost_fit import (
    BENDS,
    DECODES,
    FEATURES,
    REQUEST,
    REQUEST_TOKENS,
    SQUARES,
    STEPS,
    TOKENS,
    Array,
    Fit,
    Samples,
    Stratum,
)
from predictor.drift import Change, Drift, Off, off
from predictor.memory import CostMemory
from predictor.step_sample import StepSample

# What a server spends on a token outside of its engine, at most, of what the engine spends.
_REQUEST_TOKEN_RATIO = 0.1
# No engine steps faster. A fit may find that steps cost nothing, and a replay must get on all the same.
_MIN_STEP_S = 1e-4
# What timing a request, a decode step (over a whole output) and an interval between step ends is off by, whatever its
# length: below it, relative errors mean nothing.
_REQUEST_NOISE_S, _DECODE_NOISE_S, _INTERVAL_NOISE_S = 0.01, 0.01 / 8, 0.001
# Until samples say otherwise, a decoding sequence costs a step this part of what the step costs anyway: alone, requests
# can hardly tell the two apart, and a busy worker multiplies the mistake by all that decode.
_DECODE_RATIO = 0.03
_REQUESTS_KEPT, _DECODES_KEPT, _INTERVALS_KEPT = 40, 64, 64
_SAMPLES_PER_FIT, _ALL_FITTED = 8, 16
# An attention that bends explains so much more of the samples, or is none.
_BEND_GAIN, _BEND_MIN_SAMPLES = 8.0, 100
_PLAIN = [REQUEST, REQUEST_TOKENS, STEPS, TOKENS, SQUARES, DECODES]


class Witness(enum.Enum):
    """What told that a worker runs at another speed."""

    PREFILL = "prefill"  # prompts, and steps with prefill in them
    DECODE = "decode"  # steps of decodes only
    GRADES = "grades"  # forecasts, where no steps are seen


class Basis(enum.Enum):
    """What a forecast rests on."""

    DEFAULT = "default"  # nothing measured: the configured, conservative guess
    RATE = "rate"  # some samples: one measured rate
    CURVE = "curve"  # enough samples over enough lengths: learned


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds a step takes, by its parts; the overhead is spent once per request outside of the steps.

    `per_token_bent_s` is a second square, of an attention that looks back `bend_tokens` at most: quadratic up to there
    and linear beyond (sparse attention).
    """

    per_request_s: float
    per_request_token_s: float  # of the whole prompt, cached or not
    fixed_s: float
    per_token_s: float
    per_token_squared_s: float
    per_decode_s: float
    per_token_bent_s: float = 0.0
    bend_tokens: int = 0

    def overhead_s(self, prompt_tokens: int) -> float:
        return self.per_request_s + self.per_request_token_s * prompt_tokens

    def step_s(self, new_tokens: int, squares: int, decoding: int) -> float:
        """One step: `new_tokens` of prefill chunks, the sum of their end^2 - start^2, and sequences that decode."""
        seconds = self.fixed_s + self.per_decode_s * decoding
        seconds += self.per_token_s * new_tokens + self.per_token_squared_s * squares
        if self.per_token_bent_s and new_tokens:
            seconds += self.per_token_bent_s * _bent_squares(new_tokens, squares, self.bend_tokens)
        return max(_MIN_STEP_S, seconds)

    def decode_step_s(self, decodes: int) -> float:
        return max(_MIN_STEP_S, self.fixed_s + self.per_decode_s * decodes)

    def tokens_s(self, start: int, end: int) -> float:
        """Prefilling positions `start` to `end`, without the part that each step costs."""
        seconds = self.per_token_s * (end - start) + self.per_token_squared_s * (end * end - start * start)
        if self.per_token_bent_s:
            seconds += self.per_token_bent_s * (_bent(end, self.bend_tokens) - _bent(start, self.bend_tokens))
        return seconds

    def alone_s(self, cached_tokens: int, prompt_tokens: int, max_num_batched_tokens: int) -> float:
        """Prefilling a prompt on a worker that does nothing else, without the overhead."""
        steps = ceil(max(1, prompt_tokens - cached_tokens) / max_num_batched_tokens)
        return self.fixed_s * steps + self.tokens_s(cached_tokens, prompt_tokens)


def _bent(position: int, bend: int) -> int:
    return position * position if position <= bend else (2 * position - bend) * bend


def _bent_squares(new_tokens: int, squares: int, bend: int) -> float:
    """What is left of a step's squares: where its chunks lie is known from their mean position only."""
    return new_tokens * min(squares / new_tokens, 2.0 * bend)


@dataclass(frozen=True, slots=True)
class LearningPolicy:
    """When a worker counts as learned, and what is assumed before."""

    min_samples: int = 8
    min_length_ratio: float = 4.0  # longest over shortest uncached length among the samples
    default_tokens_per_s: float = 2000.0
    default_step_s: float = 0.01
    min_intervals: int = 30  # of steps with prefill in them: enough instead of the samples above


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
    """One worker's cost curve. `cost` is valid at any time; `basis` says what it is worth.

    `changes` counts how often the worker was found to be another or to run at another speed: forecasts from before one
    say nothing about those after it. `speed_changes` counts the latter, by what told of them.
    """

    def __init__(self, policy: LearningPolicy) -> None:
        self._policy = policy
        self._known: StepCost | None = None
        self.changes = 0
        self.speed_changes: Counter[Witness] = Counter()
        self.forget()

    def forget(self) -> None:
        """The engine is another than the one that was measured."""
        self._samples = Samples()
        self._fitted_at = 0
        self._lengths = 1 << 62, 0  # the shortest and the longest request so far
        self._requests = self._intervals = 0
        self._prefill_drift, self._decode_drift, self._grade_drift = Drift(), Drift(), Drift()
        self._ungraded_intervals = 0
        self._grades_unseen = _UNSEEN  # since a step was seen
        self._coefficients: Array = np.zeros(FEATURES)
        self.cost = _default_cost(self._policy)
        self.basis = Basis.DEFAULT
        self.changes += 1
        if self._known is not None:
            self.cost, self.basis = self._known, Basis.CURVE

    def fix(self, cost: StepCost) -> None:
        """Takes these for the true costs, and learns nothing any more."""
        self._known = cost
        self.forget()

    @property
    def learned(self) -> bool:
        return self.basis is Basis.CURVE

    @property
    def samples(self) -> int:
        return len(self._samples)

    def memory(self) -> Callable[[], CostMemory]:
        """What was learned, as of now; what is returned may be called later, and in another thread."""
        (shortest, longest), samples = self._lengths, self._samples.copy()
        requests, intervals = self._requests, self._intervals
        return lambda: CostMemory(requests, intervals, shortest, longest, tuple(samples.memory()))

    def recall(self, memory: CostMemory) -> None:
        """Begins with what was learned before. ValueError for what cannot have been learned."""
        if min(memory.requests, memory.intervals, memory.shortest, memory.longest) < 0:
            raise ValueError("counts of samples are negative")
        if max(memory.requests, memory.intervals) and not memory.rows:
            raise ValueError("samples were counted, and there are none")
        samples = Samples()
        samples.recall(memory.rows)
        self.forget()
        self._samples = samples
        self._requests, self._intervals = memory.requests, memory.intervals
        self._lengths = memory.shortest, memory.longest
        try:
            self._fit()
        except ValueError:  # nothing goes through them, or there are none
            self.forget()
            raise

    def add(self, sample: PrefillSample) -> bool:
        """Learns from one prefill; False if the sample says nothing (no work, or no time)."""
        if sample.computed_tokens <= 0 or not 0 < sample.seconds < 3600:
            return False
        known = self._lengths
        self._lengths = min(known[0], sample.computed_tokens), max(known[1], sample.computed_tokens)
        self._requests += 1
        self._take(
            ("request", sample.computed_tokens.bit_length(), ceil(sample.decodes_per_step).bit_length() // 3),
            _REQUESTS_KEPT,
            sample.seconds,
            _REQUEST_NOISE_S,
            _request_features(sample),
            at_once=self._lengths != known,
        )
        return True

    def add_decode(self, sample: DecodeSample) -> None:
        """Learns what a step without prefill takes: prompts alone hardly tell a step's fixed cost from a token's."""
        if not 0 < sample.step_s < 60:
            return
        features = (0.0, 0.0, 1.0, 0.0, 0.0, float(sample.decodes), *_NO_BENDS)
        self._take(("output", sample.decodes.bit_length()), _DECODES_KEPT, sample.step_s, _DECODE_NOISE_S, features)

    def add_steps(self, sample: StepSample) -> bool:
        """Learns from the time between two observed step ends; False if the sample says nothing."""
        if sample.steps <= 0 or not 0 < sample.duration_s < 3600 or min(sample.new_tokens, sample.decoding) < 0:
            return False
        if not sample.new_tokens and not sample.decoding:
            return False
        if sample.new_tokens:
            self._intervals += 1
            self._ungraded_intervals += 1
        stratum: Stratum = (
            "steps",
            (sample.new_tokens // sample.steps).bit_length(),
            (sample.squares // max(1, sample.new_tokens)).bit_length(),
            # Beside prefill, decodes are told apart more coarsely: all that matters of them shows without it.
            (sample.decoding // sample.steps).bit_length() // (3 if sample.new_tokens else 1),
        )
        features = _interval_features(sample)
        self._take(
            stratum, _INTERVALS_KEPT, sample.duration_s, _INTERVAL_NOISE_S, features, is_witness=not sample.told_before
        )
        return True

    def graded(self, predicted_s: float, actual_s: float, changes: int, gated: bool = False) -> bool:
        """Takes in how long a request took from its booking to its first token, against what was forecast.

        A worker that shows no step ends has nothing else to tell its speed by while it is busy. `changes` is what it
        was when the forecast was made. `gated`: it waited for others to end, which tells of their outputs rather than
        of the worker; where steps are seen they are to tell, until none was for many first tokens. True if the worker
        is found to run at another speed.
        """
        if changes != self.changes or self._ungraded_intervals or not self.learned or self._known is not None:
            self._grades_unseen = 0 if self._ungraded_intervals else self._grades_unseen + 1
            self._ungraded_intervals = 0
            self._grade_drift.clear()
            return False
        self._grades_unseen += 1
        if min(predicted_s, actual_s) <= 0 or (gated and self._grades_unseen <= _UNSEEN):
            return False
        self._grade_drift.add(off(actual_s, predicted_s, _REQUEST_NOISE_S), self._samples.taken + 1, ())
        found = self._grade_drift.found()
        if found is None or abs(found.level) < _GRADE_DRIFT:
            return False
        self._changed(Witness.GRADES)  # first: what it forgets would be measured anew by each fit
        self._rescale(found, prefills=True, decodes=True)
        return True

    def _take(
        self,
        stratum: Stratum,
        kept: int,
        seconds: float,
        noise_s: float,
        features: tuple[float, ...],
        at_once: bool = False,
        is_witness: bool = True,
    ) -> None:
        """Learns from one sample. `is_witness`: whether it may say, with others, that the worker's speed is another."""
        if self._known is not None:
            return
        first = self._samples.add(stratum, kept, seconds, noise_s, features)
        # A fit takes a millisecond or two; what one more sample among many like it changes can wait for others.
        known = len(self._samples)
        due = known // _SAMPLES_PER_FIT if known > _ALL_FITTED else 1
        enough = not self.learned and self._is_enough()
        if first or at_once or enough or self._samples.taken - self._fitted_at >= due:
            self._fit()
        if self.basis is not Basis.CURVE or not is_witness:
            return
        drift = self._prefill_drift if features[TOKENS] else self._decode_drift
        sample = (seconds, noise_s, *features)
        drift.add(self._off(sample), self._samples.taken, sample)
        found = drift.found()
        if found is not None:
            self._judge(found, prefill=features[TOKENS] > 0)

    def _judge(self, change: Change, prefill: bool) -> None:
        """The newest samples are off: because the worker has changed, or because of what they are made of?

        The first giant after many small prompts shows what its length costs. So a change must explain all samples
        clearly better than a shape does.
        """
        self._fit()
        as_it_is = self._misfit(change.since)
        before = self._samples, self.cost, self._coefficients
        # Decode steps seen since have had their say. What they are off by alone is no change of prefill: contexts that
        # grow do that, and two steps that are taken for one.
        decodes = self._decode_drift.since(change.since) if prefill else []
        settled = len(decodes) >= _SETTLED and abs(float(np.median(decodes))) < abs(change.level) / 2
        self._rescale(change, prefills=prefill, decodes=not settled)
        if self._misfit(change.since) < _CHANGE_GAIN * as_it_is:
            self._changed(Witness.PREFILL if prefill else Witness.DECODE)
        else:
            self._samples, self.cost, self._coefficients = before
            (self._prefill_drift if prefill else self._decode_drift).clear()

    def _rescale(self, change: Change, prefills: bool, decodes: bool) -> None:
        factor = exp(min(_FASTEST_CHANGE, max(-_FASTEST_CHANGE, change.level)))
        self._samples = self._samples.rescaled(factor, change.since, prefills, decodes)
        self._fit()

    def _changed(self, told_by: Witness) -> None:
        self.changes += 1
        self.speed_changes[told_by] += 1
        for drift in (self._prefill_drift, self._decode_drift, self._grade_drift):
            drift.clear()

    def _misfit(self, since: int) -> float:
        """How far off the samples are by the present fit, those since a change for one half and all for the other."""
        features, seconds, noise, weights = self._samples.known()
        errors = np.minimum(1.0, np.abs(features @ self._coefficients - seconds) / (seconds + noise))
        newest = [min(1.0, abs(error)) for error in self._prefill_drift.since(since) + self._decode_drift.since(since)]
        return float(errors @ weights / weights.sum()) + (float(np.mean(newest)) if newest else 0.0)

    def _off(self, sample: Sequence[float]) -> Off:
        return off(sample[0], float(self._coefficients @ np.array(sample[2:])), sample[1])

    def _is_enough(self) -> bool:
        spans = self._lengths[1] >= self._policy.min_length_ratio * self._lengths[0]
        return (self._requests >= self._policy.min_samples and spans) or self._intervals >= self._policy.min_intervals

    def _fit(self) -> None:
        self._fitted_at = self._samples.taken
        if self._is_enough():
            self._coefficients, bend = self._fit_curve()
            self.cost, self.basis = _step_cost(self._coefficients, bend), Basis.CURVE
            self._prefill_drift.again(self._off)
            self._decode_drift.again(self._off)
        else:
            self._fit_rate()

    def _fit_rate(self) -> None:
        features, seconds, noise, weights = self._samples.known()
        prefills, steps = features[:, TOKENS] > 0, features[:, STEPS]
        if not prefills.any():
            return
        # What steps without prefill take, where any were seen, is no part of the rate.
        decodes = ~prefills & (steps > 0)
        fixed_s = 0.0
        if decodes.any():
            beside = features[decodes, DECODES] / steps[decodes] - 1
            fixed_s = float(np.median(seconds[decodes] / steps[decodes] / (1 + _DECODE_RATIO * beside)))
        elif features[prefills, DECODES].any():
            # Prefill was seen together with decode steps only, as SGLang's take turns.
            steps = (1 - _DECODE_RATIO) * steps + _DECODE_RATIO * features[:, DECODES]
            fixed_s = _step_beside_rate_s(steps[prefills], features[prefills, TOKENS], seconds[prefills])
        prompts = features[prefills]
        others_s = fixed_s * (steps[prefills] + _DECODE_RATIO * prompts[:, DECODES])
        rate, square = _rate(prompts, seconds[prefills], others_s, noise[prefills], weights[prefills])
        self.cost = StepCost(0.0, 0.0, fixed_s, rate, square, _DECODE_RATIO * fixed_s)
        self.basis = Basis.RATE

    def _fit_curve(self) -> tuple[Array, int]:
        """The coefficients, and which bend is among them (tokens; 0: none)."""
        features, seconds, noise, weights = self._samples.known()
        columns = list(_PLAIN)
        requests = features[:, REQUEST] > 0
        cached = features[requests, REQUEST_TOKENS] - features[requests, TOKENS] > 4 * features[requests, TOKENS]
        if not cached.any() and (self._intervals < self._policy.min_intervals or not requests.any()):
            # Cold prompts cannot tell a server's work per token from its engine's: all of it is the engine's then.
            columns.remove(REQUEST_TOKENS)
        decode_steps = (features[:, TOKENS] == 0) & (features[:, STEPS] > 0)
        step_s = self._policy.default_step_s
        if decode_steps.any():
            step_s = float(np.median(seconds[decode_steps] / features[decode_steps, STEPS]))
        # Sixteen decodes a step against one, by the ratio above.
        prior = np.zeros(FEATURES)
        prior[STEPS], prior[DECODES] = -15 * _DECODE_RATIO, 16 - (1 + 15 * _DECODE_RATIO)
        fit = Fit(
            np.vstack([features, prior]),
            np.append(seconds, 0.0),
            np.append(weights, 1.0),
            np.append(noise, 5 * step_s),
            columns,
            self._coefficients if self.learned else None,
        )
        found = fit.chosen(columns)
        if found[REQUEST_TOKENS] > _REQUEST_TOKEN_RATIO * found[TOKENS]:
            # No server works so much on a token beside its engine: the cached prompts were held up by something else.
            columns.remove(REQUEST_TOKENS)
            found = fit.chosen(columns)
        if found[SQUARES] > 0 and found[TOKENS] == 0:
            # Of few lengths the square alone may seem to explain everything, and then a giant takes hours.
            columns.remove(SQUARES)
            found = fit.chosen(columns)
        if len(seconds) < _BEND_MIN_SAMPLES:
            return found, 0
        bends: Iterable[int] = range(len(BENDS))
        if SQUARES in columns:
            bends = np.flatnonzero((features[:, _BENT:] != features[:, [SQUARES]]).any(axis=0)).tolist()
        return _bend(fit, found, columns, bends)


def _rate(features: Array, seconds: Array, others_s: Array, noise: Array, weights: Array) -> tuple[float, float]:
    """What a token takes, and a token squared, if prompts of unlike lengths show that; else the mean of all tokens.
    `others_s` is what of each sample's seconds went to steps and decodes."""
    tokens, squares = features[:, TOKENS], features[:, SQUARES]
    reach = squares / tokens
    if len(tokens) >= _SQUARE_MIN_SAMPLES and reach.max() > _SQUARE_MIN_RATIO * reach.min():
        columns = [TOKENS, SQUARES]
        prefill_s = np.maximum(_LEAST_PREFILL * seconds, seconds - others_s)
        found = Fit(features, prefill_s, weights, noise, columns).chosen(columns)
        if found[TOKENS] > 0 and found[SQUARES] > 0:
            return float(found[TOKENS]), float(found[SQUARES])
    took_s = float(seconds.sum())
    return max(_LEAST_PREFILL * took_s, took_s - float(others_s.sum())) / float(tokens.sum()), 0.0


def _step_beside_rate_s(steps: Array, tokens: Array, seconds: Array) -> float:
    """What a step takes, where each sample is of steps and of tokens at a rate; 0 where they cannot be told apart."""
    parts = np.stack([steps, tokens], axis=1) / seconds[:, None]
    if len(seconds) < 2 or np.linalg.cond(parts / np.abs(parts).max(axis=0)) > _COLLINEAR:
        return 0.0
    step_s, per_token_s = np.linalg.lstsq(parts, np.ones(len(seconds)), rcond=None)[0]
    if per_token_s < 0:
        step_s = 1 / parts[:, 0].max()
    return max(0.0, float(step_s))


_BENT = FEATURES - len(BENDS)  # the first of their columns
_COLLINEAR = 100.0
# Of a sample with prefill in it so much is prefill, whatever steps and decodes should take.
_LEAST_PREFILL = 0.1
# A rate has a square as well where so many samples reach unlike far.
_SQUARE_MIN_SAMPLES, _SQUARE_MIN_RATIO = 8, 4.0
_NO_BENDS = (0.0,) * len(BENDS)
# Grades are off for many reasons; this much in one direction, four times in a row, has one.
_GRADE_DRIFT = 0.3
_FASTEST_CHANGE = log(8.0)
# So many first tokens without a sign of a step: whoever shows no steps any more is told by his grades alone.
_UNSEEN = 32
_CHANGE_GAIN = 0.8  # what must be left of the misfit at most
_SETTLED = 4


def _bend(fit: Fit, plain: Array, columns: list[int], bends: Iterable[int]) -> tuple[Array, int]:
    """`bends` are those that make a difference: where no sample goes beyond one, it explains what the squares do."""
    best, best_score, bend = plain, fit.score(plain) - _BEND_GAIN, 0
    for place in bends:
        column = _BENT + place
        found = fit.least([*columns, column], plain)
        score = fit.score(found)
        if score < best_score and found[column] > 0 and found[TOKENS] > 0:
            best, best_score, bend = found, score, BENDS[place]
    return best, bend


def _step_cost(coefficients: Array, bend: int) -> StepCost:
    request, request_token, fixed, linear, square, decode, *bent = (float(value) for value in coefficients)
    return StepCost(request, request_token, fixed, linear, square, decode, sum(bent), bend)


def _request_features(sample: PrefillSample) -> tuple[float, ...]:
    end, start = sample.prompt_tokens, sample.cached_tokens
    bent = [float(_bent(end, bend) - _bent(start, bend)) for bend in BENDS]
    squares = float(end * end - start * start)
    return 1.0, end, sample.steps, end - start, squares, sample.steps * sample.decodes_per_step, *bent


def _interval_features(sample: StepSample) -> tuple[float, ...]:
    tokens, squares = sample.new_tokens, sample.squares
    bent = [_bent_squares(tokens, squares, bend) for bend in BENDS] if tokens else _NO_BENDS
    arrival = (0.0, 0.0) if sample.arrival_tokens is None else (1.0, float(sample.arrival_tokens))
    return *arrival, sample.steps, tokens, float(squares), sample.decoding, *bent


def _default_cost(policy: LearningPolicy) -> StepCost:
    return StepCost(0.0, 0.0, policy.default_step_s, 1.0 / policy.default_tokens_per_s, 0.0, 0.0)
