"""Which outputs may be told from others by what is known when they are asked for, and whether they are."""

from __future__ import annotations

from math import exp, lgamma, log
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# The highest class of either kind.
_CLASSES = 9
# Ends of a class that is unlike others come more or less often by a factor with a gamma distribution of this shape, one
# in each band of lengths: half as often to twice, give or take. So likely it is, to begin with, that a class is unlike.
_FACTOR_SHAPE, _UNLIKE = 2.0, 0.1


class LengthClass(NamedTuple):
    """What is known of a request when it comes, as far as outputs may go by it: both by powers of four."""

    prompt: int  # 0: below 256 tokens, 1: below 1,024, ...
    limit: int  # of `max_tokens`; 0: none told, 1: below 64, 2: below 256, ...

    @classmethod
    def of(cls, prompt_tokens: int, max_tokens: int | None) -> LengthClass:
        prompt = _power_of_four(prompt_tokens, 4)
        limit = 0 if max_tokens is None else 1 + _power_of_four(max_tokens, 3)
        # Callers choose these numbers: more than any model takes or gives makes no class of its own.
        return cls(min(prompt, _CLASSES), min(limit, _CLASSES))


def _power_of_four(tokens: int, first: int) -> int:
    """0 below 4^first, and one more for each power of four that is reached."""
    return max(0, (tokens.bit_length() + 1) // 2 - first)


def unlikeness(seen: npt.NDArray[np.float64], due: npt.NDArray[np.float64]) -> float:
    """How likely it is that a group of which so many ends were seen, by band, is not one of which so many were due."""
    evidence = 0.0  # the logarithm of how much likelier these are with factors than without
    for ends, expected in zip(seen.tolist(), due.tolist(), strict=True):
        evidence += lgamma(_FACTOR_SHAPE + ends) - lgamma(_FACTOR_SHAPE)
        evidence += _FACTOR_SHAPE * log(_FACTOR_SHAPE / (_FACTOR_SHAPE + expected))
        evidence += expected - ends * log(_FACTOR_SHAPE + expected)
    odds = _UNLIKE / (1 - _UNLIKE) * exp(min(100.0, evidence))
    return odds / (1 + odds)
