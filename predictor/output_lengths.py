"""How much requests of a pool generate: a survival curve from those that ended and those that still decode.

A request that is still decoding, and one that was cut off by its `max_tokens`, say that outputs of their kind are at
least so long. Leaving them out would make every output look short: while a wave is running only its short ones have
ended. Kaplan and Meier's estimate takes both in. What is left of one request's output is then drawn from the curve
given what it has generated already; a mean would have all of them end at once, which no wave does.

Prompts tell nothing about the length of the answer (measured on the traces: correlation of the logarithms 0.06-0.09).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import ceil, log

import numpy as np
import numpy.typing as npt

# The newest ends that are remembered.
_WINDOW = 2000
# Before anything has ended a guess holds, as if so many had: spread like an exponential about the typical length. A
# heavier tail does harm: nobody would ever be expected to leave.
_GUESSES, _GUESS_WEIGHT = 32, 0.125
# Where some are seen to go on, outputs are taken to be alike (a Weibull distribution of this shape): were they spread
# wide, somebody would have ended soon. What was called typical may be off by a factor of e^this.
_SHAPE, _DOUBT = 3.0, 1.0
_SCALES = np.linspace(-3.0, 6.0, 37)  # logarithms of what the median may be, as a multiple of the typical length
# A curve is drawn anew when so much of what it rests on is new, and not more often than this.
_NEW_RATIO, _AT_FIRST_S, _LATER_S, _FEW = 1 / 16, 1.0, 10.0, 100
_LONGEST = 1 << 20


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


@dataclass(frozen=True, slots=True)
class Running:
    """What each request that still decodes has generated so far, in tokens: seen in its blocks as they are stored, or
    only counted by the time that steps should take."""

    seen: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)


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
        self._ended: deque[tuple[int, bool]] = deque(maxlen=_WINDOW)  # tokens, and whether it ended by itself
        self._new = 0
        self._drawn_s = float("-inf")
        self._curve = _draw(self._ended, Running(), self._typical)

    def __len__(self) -> int:
        return len(self._ended)

    def ended(self, tokens: int, max_tokens: int | None) -> None:
        """A request has ended after so many output tokens; one that reached `max_tokens` would have gone on."""
        if 0 < tokens <= _LONGEST:
            self._ended.append((tokens, max_tokens is None or tokens < max_tokens))
            self._new += 1

    def curve(self, running: Callable[[], Running], now_s: float) -> LengthCurve:
        """The present curve; `running` is asked when it is drawn anew."""
        few = len(self._ended) < _FEW
        pause_s = _AT_FIRST_S if few else _LATER_S
        if now_s - self._drawn_s >= pause_s and (few or self._new > len(self._ended) * _NEW_RATIO):
            self._curve = _draw(self._ended, running(), self._typical)
            self._drawn_s, self._new = now_s, 0
        return self._curve

    def memory(self) -> list[tuple[int, bool]]:
        """What was learned, as plain values, oldest first."""
        return list(self._ended)

    def recall(self, memory: Iterable[tuple[int, bool]]) -> None:
        """Begins with what an earlier process has learned."""
        self._ended.extendleft(reversed([(tokens, whole) for tokens, whole in memory if 0 < tokens <= _LONGEST]))
        self._drawn_s = float("-inf")
        self._curve = _draw(self._ended, Running(), self._typical)


def _draw(ended: Iterable[tuple[int, bool]], running: Running, typical: int) -> LengthCurve:
    """Kaplan and Meier's estimate, with the guess as a few more ends."""
    known = list(ended)
    seen = [tokens for tokens in running.seen if tokens > 0]
    alive = seen + [tokens for tokens in running.counted if tokens > 0]
    guesses = _guess(known, seen, typical)
    tokens = np.concatenate([guesses, [one for one, _ in known], alive])
    whole = np.concatenate([np.ones(_GUESSES), [float(one) for _, one in known], np.zeros(len(alive))])
    weight = np.ones(len(tokens))
    weight[:_GUESSES] = _GUESS_WEIGHT
    order = np.argsort(tokens, kind="stable")
    tokens, whole, weight = tokens[order], whole[order], weight[order]
    lengths, first = np.unique(tokens, return_index=True)
    ends = np.add.reduceat(whole * weight, first)
    # At risk at a length: all that are known to be at least as long.
    at_risk = np.cumsum(weight[::-1])[::-1][first]
    survival = np.cumprod(np.maximum(0.0, 1 - ends / at_risk))
    kept = ends > 0
    lengths, survival = lengths[kept], survival[kept]
    # Who outlives all that have ended goes on as the others did: half of them for a typical length more.
    mean = float(np.sum(tokens * whole * weight) / np.sum(whole * weight))
    return LengthCurve(
        tuple(int(value) for value in lengths), tuple(float(value) for value in survival), max(1.0, mean * log(2.0))
    )


def _guess(ended: list[tuple[int, bool]], seen: list[int], typical: int) -> npt.NDArray[np.float64]:
    """Lengths evenly spread over what is likely."""
    shares = (np.arange(_GUESSES) + 0.5) / _GUESSES
    halvings = -np.log2(1 - shares)
    if not seen:
        vague: npt.NDArray[np.float64] = np.ceil(typical * halvings)
        return vague
    tokens = np.array([*(one for one, _ in ended), *seen], float)
    whole = np.array([*(float(one) for _, one in ended), *(0.0 for _ in seen)])
    # By median and length: 2^-x outlive one of x = (length / median)^shape, and the density goes with x times that.
    powers = _SHAPE * (np.log(tokens / typical)[None, :] - _SCALES[:, None])
    likelihood = (powers * whole - log(2.0) * np.exp(powers)).sum(axis=1) - 0.5 * (_SCALES / _DOUBT) ** 2
    weight = np.exp(likelihood - likelihood.max())
    median = typical * np.exp((weight * _SCALES).sum() / weight.sum())
    alike: npt.NDArray[np.float64] = np.ceil(median * halvings ** (1 / _SHAPE))
    return alike
