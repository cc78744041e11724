"""Whether a worker has changed its speed: the newest samples are all off to the same side, by more than noise explains.

Sudden changes show in four samples, small ones in more. Medians, so that one stalled step in four is no change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import median

import msgspec

# So many newest samples, and the least change (a logarithm) that they may find.
_LOOKS = ((4, 0.22), (8, 0.12), (16, 0.06), (32, 0.03))
# A median of n is off by 1.25 sigma / sqrt(n); it is looked at after every sample, so that four of these are needed.
_DEVIATIONS = 4 * 1.25
_NOISE_AT_FIRST, _NOISE_LEAST, _NOISE_RATE = 0.1, 0.005, 0.03
_PER_MEDIAN_DEVIATION = 1.48
_WHOLE_LEAST = 1e-3
_NEW_SIDE = 0.5  # what is off by less than this part of a change is from before it


@dataclass(frozen=True, slots=True)
class Change:
    level: float  # the logarithm of how much longer things take
    since: int  # the number of the oldest sample that says so


class Off(msgspec.Struct, frozen=True, gc=False):
    """How much longer than predicted something took, as a logarithm; nearer to 0 where timing it is a part of that."""

    whole: float
    beyond_noise: float


def off(measured_s: float, predicted_s: float, noise_s: float) -> Off:
    predicted_s = max(0.0, predicted_s)
    whole = log(measured_s / max(predicted_s, measured_s * _WHOLE_LEAST))
    return Off(whole, log((measured_s + noise_s) / (predicted_s + noise_s)))


class _Error(msgspec.Struct, frozen=True, gc=False):
    off: Off
    number: int
    sample: Sequence[float]


class Drift:
    """Follows the errors of one kind of sample, as logarithms of measured over predicted."""

    def __init__(self) -> None:
        self._errors: deque[_Error] = deque(maxlen=_LOOKS[-1][0])
        self._noise = _NOISE_AT_FIRST

    def add(self, off: Off, number: int, sample: Sequence[float]) -> None:
        """`number` ascends over all samples of the worker; `sample` is what `again` needs to measure it anew."""
        error = off.beyond_noise
        newest = self._newest(7)
        if len(newest) == 7:
            deviation = abs(error - sorted(newest)[3]) * _PER_MEDIAN_DEVIATION
            # A change must not pass for noise before it is seen for what it is.
            self._noise += _NOISE_RATE * (min(deviation, 3 * self._noise) - self._noise)
            self._noise = max(_NOISE_LEAST, self._noise)
        self._errors.append(_Error(off, number, sample))

    def found(self) -> Change | None:
        for count, least in _LOOKS:
            if len(self._errors) < count:
                return None
            ordered = sorted(self._newest(count))
            # Of the two in the middle the lesser: half of the samples being old is no change yet.
            level = min(ordered[count // 2 - 1], ordered[count // 2], key=abs)
            if abs(level) > max(least, _DEVIATIONS * self._noise / sqrt(count)):
                begins = len(self._errors) - count
                # The oldest of them may still be from before, and would be taken with others of its time for new ones.
                while self._errors[begins].off.beyond_noise / level < _NEW_SIDE:
                    begins += 1
                newest = [self._errors[at] for at in range(begins, len(self._errors))]
                return Change(median(error.off.whole for error in newest), newest[0].number)
        return None

    def again(self, off: Callable[[Sequence[float]], Off]) -> None:
        """What is predicted has changed: measures every sample against it anew."""
        measured = (_Error(off(error.sample), error.number, error.sample) for error in self._errors)
        self._errors = deque(measured, self._errors.maxlen)

    def since(self, number: int) -> list[float]:
        """The errors of the samples from this one on."""
        return [error.off.beyond_noise for error in self._errors if error.number >= number]

    def clear(self) -> None:
        self._errors.clear()

    def _newest(self, count: int) -> list[float]:
        errors = self._errors
        return [errors[at].off.beyond_noise for at in range(max(0, len(errors) - count), len(errors))]
