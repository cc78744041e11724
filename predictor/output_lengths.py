"""How much requests of a pool generate: a survival curve from those that ended and those that still decode.

A request that is still decoding, and one that was cut off by its `max_tokens`, say that outputs of their kind are at
least so long. Leaving them out would make every output look short: while a wave is running only its short ones have
ended. Kaplan and Meier's estimate takes both in. What is left of one request's output is then drawn from the curve
given what it has generated already; a mean would have all of them end at once, which no wave does.

Whether a prompt tells anything about the length of the answer depends on who asks: in the traces it does not
(correlation of the logarithms 0.06-0.09), among applications that share a pool it may tell nearly all. So each class of
requests is compared with all, and goes by its own as far as it is seen to be unlike.

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
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from predictor.length_class import LengthClass, unlikeness
from predictor.memory import LengthRow

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
# What is known is looked at anew when so much of it is, or somebody decodes, and not more often than this.
_NEW_RATIO, _AT_FIRST_S, _LATER_S, _FEW = 1 / 16, 1.0, 10.0, 100
_LONGEST = 1 << 20
# Outputs are surely of another kind if there were so many standard deviations, and so many, more or less ends.
_SURE, _SOME = 5.0, 8.0
# What share ends at a length is told by so many that got there; the guess alone are four.
_TELLS = 8.0
# Of one kind, it is the newer ones that those to come are compared with, when they are as many, or so many.
_FEW_ENDS, _MANY_ENDS = 16, 100

# Whether a class is unlike all is seen by its ends in bands of length that as many outputs end in, each. Beside such a
# class so many others count in all: those of the same prompts, of the same limits, and any.
_BANDS, _OTHERS = 5, 8.0
_NOBODY = 1e-9  # a weight that is nobody's

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


class Lengths(Protocol):
    """What is known of a pool's outputs at a moment."""

    def curve(self, of: LengthClass | None = None) -> LengthCurve:
        """Of requests of a class; None: of any."""


class Going(NamedTuple):
    """A request that still decodes: what it has so far, its number in the order of bookings, and its class."""

    tokens: int
    number: int = 0
    of: LengthClass | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """Requests that still decode. What they have generated is seen in their blocks as they are stored, or only counted
    by the time that steps should take."""

    seen: list[Going] = field(default_factory=list)
    counted: list[Going] = field(default_factory=list)

    def where(self, counts: Callable[[Going], bool]) -> Running:
        return Running(*([one for one in some if counts(one)] for some in (self.seen, self.counted)))


class _End(NamedTuple):
    tokens: int
    by_itself: bool  # and not cut off
    number: int  # of its request, in the order of bookings
    of: LengthClass | None


@dataclass(frozen=True, slots=True)
class _Kind:
    """Outputs of a class at some time: what share of those that got to a length ended there, and how many got there."""

    lengths: _Numbers
    share: _Numbers
    there: _Numbers

    def off(self, outputs: Sequence[_End | Going]) -> tuple[float, float]:
        """How many more of these have ended than should have, and what variance that has; who goes on is one of them,
        and may be ending with the last token of those that it has."""
        if not len(self.lengths):
            return 0.0, 0.0
        reached = np.sort([one.tokens if isinstance(one, _End) else one.tokens - 1 for one in outputs])
        there = len(reached) - np.searchsorted(reached, self.lengths)
        ended = sum(isinstance(one, _End) and one.by_itself and one.tokens <= self.lengths[-1] for one in outputs)
        spread = self.share * (1.0 - self.share)
        return ended - float(there @ self.share), float(spread @ (there + there * there / self.there))


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
        self._of_before: dict[LengthClass | None, int] = {}  # what was booked up to this number says nothing any more
        self._compared_after = -1  # what was booked after it is compared with what came before
        self._begin()

    def _begin(self) -> None:
        self._looked_s = -inf
        self._known = KnownLengths(self._ended, Running(), self._typical)
        self._compared = self._known

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, tokens: int, max_tokens: int | None, number: int = 0, of: LengthClass | None = None) -> None:
        """A request has ended after so many output tokens; one that reached `max_tokens` would have gone on. `number`
        is its place in the order of bookings."""
        end = _End(tokens, max_tokens is None or tokens < max_tokens, number, of)
        if 0 < tokens <= _LONGEST and self._counts(end):
            self._ended.append(end)
            self._new += 1

    def at(self, running: Callable[[], Running], now_s: float) -> KnownLengths:
        """What is known now; `running` is asked now and then."""
        few = len(self._ended) < _FEW
        if now_s - self._looked_s >= (_AT_FIRST_S if few else _LATER_S):
            self._looked_s = now_s
            going = running()
            changed = self._compare(going)
            # Nobody's end is news, too, of those that run: a class may be seen to be unlike by it.
            if changed or few or going.seen or going.counted or self._new > len(self._ended) * _NEW_RATIO:
                self._known = KnownLengths(self._ended, going.where(self._counts), self._typical)
                self._new = 0
        return self._known

    def _counts(self, output: _End | Going) -> bool:
        return output.number > self._of_before.get(output.of, -1)

    def _compare(self, running: Running) -> bool:
        """Whether outputs are of another kind of late. If so, what was before is forgotten of their classes."""
        after = self._compared_after
        going = running.where(lambda one: one.number > after)
        lately = [end for end in self._ended if end.number > after]
        changed = self._compared.differ([*lately, *going.seen, *going.counted])
        if changed:
            self._of_before |= dict.fromkeys(changed, after)
            self._ended = deque(filter(self._counts, self._ended), maxlen=_WINDOW)
        if changed or len(lately) >= min(_MANY_ENDS, max(_FEW_ENDS, self._compared.ends)):
            going = running.where(self._counts)
            self._compared = KnownLengths(self._ended, going, self._typical)
            booked = [end.number for end in self._ended] + [one.number for one in (*going.seen, *going.counted)]
            self._compared_after = max(booked, default=after)
        return bool(changed)

    def memory(self) -> tuple[LengthRow, ...]:
        """What was learned, oldest first."""
        return tuple(LengthRow(end.tokens, end.by_itself, *(end.of or (None, None))) for end in self._ended)

    def recall(self, memory: Iterable[LengthRow]) -> None:
        """Begins with what an earlier process has learned."""
        known = [_End(row.tokens, row.whole, 0, _class_of(row)) for row in memory if 0 < row.tokens <= _LONGEST]
        newest = [*known, *self._ended][-_WINDOW:]
        self._ended = deque(newest, maxlen=_WINDOW)
        self._begin()


def _class_of(row: LengthRow) -> LengthClass | None:
    if row.prompt_class is None or row.limit_class is None:
        return None
    return LengthClass(row.prompt_class, row.limit_class)


class KnownLengths:
    """What is known at one moment. Curves are drawn when they are asked for: Kaplan and Meier's estimate, with the
    guess as a few more ends.

    As far as a class is seen to be unlike all, others count for little beside its own (Beran's estimate: the same with
    weights).
    """

    def __init__(self, ended: Iterable[_End], running: Running, typical: int) -> None:
        known = list(ended)
        seen = [one for one in running.seen if one.tokens > 0]
        alive = seen + [one for one in running.counted if one.tokens > 0]
        guesses = _guess(known, [one.tokens for one in seen], typical)
        tokens = np.concatenate([guesses, [end.tokens for end in known], [one.tokens for one in alive]])
        whole = np.concatenate([np.ones(_GUESSES), [float(end.by_itself) for end in known], np.zeros(len(alive))])
        weight = np.ones(len(tokens))
        weight[:_GUESSES] = _GUESS_WEIGHT
        order = np.argsort(tokens, kind="stable")
        self._tokens, self._whole, self._weight = tokens[order], whole[order], weight[order]
        classes = [None] * _GUESSES + [end.of for end in known] + [one.of for one in alive]
        self._prompt = np.array([-1 if of is None else of.prompt for of in classes])[order]
        self._limit = np.array([-1 if of is None else of.limit for of in classes])[order]
        self._lengths, self._first = np.unique(self._tokens, return_index=True)
        self.ends = len(known)
        self._curves: dict[LengthClass | None, LengthCurve] = {}
        self._share = self._shares(self._weight)
        # So many ends in each band, by the curve of all.
        before = np.concatenate([[1.0], np.cumprod(1.0 - self._share)[:-1]])
        self._band = np.minimum(_BANDS - 1, ((1 - before) * _BANDS).astype(int))

    def curve(self, of: LengthClass | None = None) -> LengthCurve:
        """As `Lengths.curve`."""
        found = self._curves.get(of)
        if found is None:
            found = self._curves[of] = self._draw(self._weights(of))
        return found

    def differ(self, outputs: Iterable[_End | Going]) -> list[LengthClass | None]:
        """The classes of which these outputs are of another kind than what is known here; none if that is not sure."""
        of_class: dict[LengthClass | None, list[_End | Going]] = {}
        for output in outputs:
            of_class.setdefault(output.of, []).append(output)
        found = {of: self._kind(of).off(some) for of, some in of_class.items()}
        off, variance = (sum(both) for both in zip(*found.values(), strict=True)) if found else (0.0, 0.0)
        if abs(off) <= max(_SOME, _SURE * sqrt(variance)):
            return []
        # Those that have a part in it.
        return [of for of, (own, spread) in found.items() if own * off > 0 and abs(own) > sqrt(spread)]

    def _kind(self, of: LengthClass | None) -> _Kind:
        """Of a class's own outputs: where it goes by others, nothing can be told that has changed."""
        weight = self._weight if of is None else self._weight * self._alike(of)
        share, there = self._shares(weight), self._at_risk(weight)
        told = (share > 0) & (there >= _TELLS)  # else it is a guess, or one
        return _Kind(self._lengths[told], share[told], there[told])

    def _draw(self, weight: _Numbers) -> LengthCurve:
        share = self._shares(weight)
        kept = share > 0
        # Who outlives all that have ended goes on as the others did: half of them for a typical length more.
        mean = float(np.sum(self._tokens * self._whole * weight) / np.sum(self._whole * weight))
        return LengthCurve(
            tuple(self._lengths[kept].astype(int).tolist()),
            tuple(np.cumprod(1.0 - share)[kept].tolist()),
            max(1.0, mean * log(2.0)),
        )

    def _weights(self, of: LengthClass | None) -> _Numbers:
        """How much each output counts for requests of a class."""
        if of is None:
            return self._weight
        alike = self._alike(of)
        if not alike.any():
            return self._weight
        weight = self._weight * alike
        other = unlikeness(self._by_band(self._ended(weight)), self._by_band(self._share * self._at_risk(weight)))
        others = np.zeros(len(weight))
        for group in (self._prompt == of.prompt, self._limit == of.limit, np.ones(len(weight), bool)):
            others += group * min(1.0, _OTHERS / max(1.0, float(self._weight[group].sum())))
        weights: _Numbers = self._weight * np.where(alike, 1.0, 1 - other + other * np.minimum(1.0, others))
        return weights

    def _alike(self, of: LengthClass) -> npt.NDArray[np.bool_]:
        alike: npt.NDArray[np.bool_] = (self._prompt == of.prompt) & (self._limit == of.limit)
        return alike

    def _by_band(self, amounts: _Numbers) -> _Numbers:
        total: _Numbers = np.bincount(self._band, amounts, _BANDS).astype(float)
        return total

    def _ended(self, weight: _Numbers) -> _Numbers:
        ended: _Numbers = np.add.reduceat(self._whole * weight, self._first)
        return ended

    def _at_risk(self, weight: _Numbers) -> _Numbers:
        """By length, all that are known to be at least as long."""
        at_risk: _Numbers = np.cumsum(weight[::-1])[::-1][self._first]
        return at_risk

    def _shares(self, weight: _Numbers) -> _Numbers:
        """By length, what share of those that got there ended there."""
        shares: _Numbers = np.minimum(1.0, self._ended(weight) / np.maximum(self._at_risk(weight), _NOBODY))
        return shares


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
