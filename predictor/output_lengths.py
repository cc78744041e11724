"""How much requests of a pool generate: a survival curve from those that ended and those that still decode.

A request that is still decoding, and one that was cut off by its `max_tokens`, say that outputs of their kind are at
least so long. Leaving them out would make every output look short: while a wave is running only its short ones have
ended. Kaplan and Meier's estimate takes both in. What is left of one request's output is then drawn from the curve
given what it has generated already; a mean would have all of them end at once, which no wave does.

Prompts tell nothing about the length of the answer (measured on the traces: correlation of the logarithms 0.06-0.09).

What a pool is asked for may change from one minute to the next, and two thousand ends of before would hold the curve
where it was for hours. So those that have come since some moment are compared with the curve of that moment (a log-rank
test, those that go on included), and where they are of another kind, nothing else counts from then on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf, log, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The newest ends that are remembered.
_WINDOW = 2000
# Before anything has ended a guess holds, as if so many had: spread like an exponential about the typical length. A
# heavier tail does harm: nobody would ever be expected to leave.
_GUESSES, _GUESS_WEIGHT = 32, 0.125
# Where some are seen to go on, outputs are taken to be alike (a Weibull distribution of the first shape): were they
# spread wide, somebody would have ended soon. Where that has happened the second is likelier. What was called typical
# may be off by a factor of e^this.
_SHAPES, _DOUBT = (3.0, 1.0), 1.0
_SCALES = np.linspace(-3.0, 6.0, 37)  # logarithms of what the median may be, as a multiple of the typical length
# A curve is drawn anew when so much of what it rests on is new, and not more often than this.
_NEW_RATIO, _AT_FIRST_S, _LATER_S, _FEW = 1 / 16, 1.0, 10.0, 100
_LONGEST = 1 << 20
# Outputs are surely of another kind if there were so many standard deviations, and so many, more or less ends.
_SURE, _SOME = 5.0, 8.0
# What share ends at a length is told by so many that got there; the guess alone are four.
_TELLS = 8.0
# Of one kind, it is the newer ones that those to come are compared with, when they are as many, or so many.
_FEW_ENDS, _MANY_ENDS = 16, 100

_Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LengthCurve:
    """The share of outputs that are longer than each of some lengths (tokens, ascending).

    Beyond the last, what is left of the share dies out exponentially.
    """

    lengths: tuple[int, ...]
    survival: tuple[float, ...]
    tail_tokens: float
    _ended: tuple[float, ...] = field(init=False, repr=False, compare=False)  # ascending, for the search

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ended", tuple(-share for share in self.survival))

    def longer(self, tokens: int) -> float:
        """The share of outputs that are longer than `tokens`."""
        at = bisect_right(self.lengths, tokens)
        if at == 0:
            return 1.0
        share = self.survival[at - 1]
        if at == len(self.lengths) and tokens > self.lengths[-1]:
            share *= 2.0 ** (-(tokens - self.lengths[-1]) / self.tail_tokens)
        return share

    def length(self, draw: float, generated: int = 0, max_tokens: int | None = None) -> int:
        """The whole output of a request that has `generated` so many tokens and goes on; at least one more.

        `draw` is from [0, 1): the share of such requests that end before this one. The same draw asked again, when
        more has been generated, never gives less.
        """
        share = (1.0 - draw) * self.longer(generated)
        # The first length that no more than that share outlives.
        at = bisect_left(self._ended, -share)
        if at < len(self.lengths):
            tokens = self.lengths[at]
        else:
            rest = self.survival[-1] / share if share > 0 else float(_LONGEST)
            tokens = self.lengths[-1] + ceil(self.tail_tokens * min(64.0, log(rest) / log(2.0)))
        tokens = max(generated + 1, min(tokens, _LONGEST))
        return tokens if max_tokens is None else max(1, min(tokens, max_tokens))


class Going(NamedTuple):
    """A request that still decodes: what it has generated so far, and its number in the order of bookings."""

    tokens: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Running:
    """Requests that still decode. What they have generated is seen in their blocks as they are stored, or only counted
    by the time that steps should take."""

    seen: list[Going] = field(default_factory=list)
    counted: list[Going] = field(default_factory=list)

    def after(self, number: int) -> Running:
        """Those that were booked after it."""
        return Running(*([one for one in some if one.number > number] for some in (self.seen, self.counted)))


class _End(NamedTuple):
    tokens: int
    by_itself: bool  # and not cut off
    number: int  # of its request, in the order of bookings


class _Kind:
    """Outputs of some time: what share of those that got to a length ended there, and how many got there."""

    def __init__(self, lengths: _Numbers, share: _Numbers, there: _Numbers, ends: int) -> None:
        told = there >= _TELLS  # else it is a guess, or one
        self._lengths, self._share, self._there = lengths[told], share[told], there[told]
        self.ends = ends

    def differs_from(self, ended: Sequence[_End], going: Sequence[Going]) -> bool:
        """Whether outputs that have ended, and those that have got so far and go on, are surely of another kind."""
        if not len(self._lengths):
            return False
        # Who goes on may be ending with the last token of those that it has.
        reached = np.sort([*(end.tokens for end in ended), *(one.tokens - 1 for one in going)])
        there = len(reached) - np.searchsorted(reached, self._lengths)
        known = sum(end.by_itself and end.tokens <= self._lengths[-1] for end in ended)
        spread = self._share * (1.0 - self._share)
        variance = float(spread @ (there + there * there / self._there))
        return bool(abs(known - float(there @ self._share)) > max(_SOME, _SURE * sqrt(variance)))


def draws(rng: np.random.Generator, samples: int) -> tuple[float, ...]:
    """Numbers from [0, 1) for `LengthCurve.length`, one for each imagined future, evenly spread over them."""
    places = list(range(samples))
    rng.shuffle(places)
    # So few are added up faster by Python than by numpy.
    within = rng.random(samples).tolist()
    return tuple([(place + part) / samples for place, part in zip(places, within, strict=True)])


class OutputLengths:
    """One pool's lengths. `typical_tokens` is what is assumed at first."""

    def __init__(self, typical_tokens: int) -> None:
        self._typical = max(1, typical_tokens)
        self._ended: deque[_End] = deque(maxlen=_WINDOW)
        self._new = 0
        self._looked_s = -inf
        self._of_before = -1  # what was booked up to this number says nothing any more
        self._compared_after = -1  # what was booked after it is compared with what came before
        self._curve, self._kind = _draw(self._ended, Running(), self._typical)

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, tokens: int, max_tokens: int | None, number: int = 0) -> None:
        """A request has ended after so many output tokens; one that reached `max_tokens` would have gone on. `number`
        is its place in the order of bookings."""
        if 0 < tokens <= _LONGEST and number > self._of_before:
            self._ended.append(_End(tokens, max_tokens is None or tokens < max_tokens, number))
            self._new += 1

    def curve(self, running: Callable[[], Running], now_s: float) -> LengthCurve:
        """The present curve; `running` is asked now and then."""
        few = len(self._ended) < _FEW
        if now_s - self._looked_s >= (_AT_FIRST_S if few else _LATER_S):
            self._looked_s = now_s
            going = running()
            changed = self._compare(going)
            if changed or few or self._new > len(self._ended) * _NEW_RATIO:
                self._curve, _ = _draw(self._ended, going.after(self._of_before), self._typical)
                self._new = 0
        return self._curve

    def _compare(self, running: Running) -> bool:
        """Whether outputs are of another kind of late. If so, what was before is forgotten."""
        lately, going = (
            [end for end in self._ended if end.number > self._compared_after],
            running.after(self._compared_after),
        )
        changed = self._kind.differs_from(lately, [*going.seen, *going.counted])
        if changed:
            self._of_before = self._compared_after
            self._ended = deque(lately, maxlen=_WINDOW)
        if changed or len(lately) >= min(_MANY_ENDS, max(_FEW_ENDS, self._kind.ends)):
            going = running.after(self._of_before)
            _, self._kind = _draw(self._ended, going, self._typical)
            booked = [end.number for end in self._ended] + [one.number for one in (*going.seen, *going.counted)]
            self._compared_after = max(booked, default=self._compared_after)
        return changed

    def memory(self) -> list[tuple[int, bool]]:
        """What was learned, as plain values, oldest first."""
        return [(end.tokens, end.by_itself) for end in self._ended]

    def recall(self, memory: Iterable[tuple[int, bool]]) -> None:
        """Begins with what an earlier process has learned."""
        known = [_End(tokens, by_itself, 0) for tokens, by_itself in memory if 0 < tokens <= _LONGEST]
        self._ended.extendleft(reversed(known))
        self._looked_s = -inf
        self._curve, self._kind = _draw(self._ended, Running(), self._typical)


def _draw(ended: Iterable[_End], running: Running, typical: int) -> tuple[LengthCurve, _Kind]:
    """Kaplan and Meier's estimate, with the guess as a few more ends."""
    known = list(ended)
    seen = [one.tokens for one in running.seen if one.tokens > 0]
    alive = seen + [one.tokens for one in running.counted if one.tokens > 0]
    guesses = _guess(known, seen, typical)
    tokens = np.concatenate([guesses, [end.tokens for end in known], alive])
    whole = np.concatenate([np.ones(_GUESSES), [float(end.by_itself) for end in known], np.zeros(len(alive))])
    weight = np.ones(len(tokens))
    weight[:_GUESSES] = _GUESS_WEIGHT
    order = np.argsort(tokens, kind="stable")
    tokens, whole, weight = tokens[order], whole[order], weight[order]
    lengths, first = np.unique(tokens, return_index=True)
    ends = np.add.reduceat(whole * weight, first)
    # At risk at a length: all that are known to be at least as long.
    at_risk = np.cumsum(weight[::-1])[::-1][first]
    kept = ends > 0
    share = np.minimum(1.0, ends / at_risk)
    survival = np.cumprod(1.0 - share)[kept]
    # Who outlives all that have ended goes on as the others did: half of them for a typical length more.
    mean = float(np.sum(tokens * whole * weight) / np.sum(whole * weight))
    curve = LengthCurve(
        tuple(int(value) for value in lengths[kept]),
        tuple(float(value) for value in survival),
        max(1.0, mean * log(2.0)),
    )
    return curve, _Kind(lengths[kept], share[kept], at_risk[kept], len(known))


def _guess(ended: Sequence[_End], seen: Sequence[int], typical: int) -> _Numbers:
    """Lengths evenly spread over what is likely."""
    shares = (np.arange(_GUESSES) + 0.5) / _GUESSES
    halvings = -np.log2(1 - shares)
    if not seen:
        vague: _Numbers = np.ceil(typical * halvings)
        return vague
    tokens = np.array([*(end.tokens for end in ended), *seen], float)
    whole = np.array([*(float(end.by_itself) for end in ended), *(0.0 for _ in seen)])
    likeliest, median, shape = -inf, float(typical), 1.0
    for one in _SHAPES:
        # By median and length: 2^-x outlive one of x = (length / median)^shape, and the density goes with x times
        # that, and with the shape.
        powers = one * (np.log(tokens / typical)[None, :] - _SCALES[:, None])
        likelihood = ((powers + log(one)) * whole - log(2.0) * np.exp(powers)).sum(axis=1)
        likelihood -= 0.5 * (_SCALES / _DOUBT) ** 2
        weight = np.exp(likelihood - likelihood.max())
        evidence = float(likelihood.max() + np.log(weight.sum()))
        if evidence > likeliest:
            likeliest, shape = evidence, one
            median = typical * float(np.exp((weight * _SCALES).sum() / weight.sum()))
    spread: _Numbers = np.ceil(median * halvings ** (1 / shape))
    return spread
