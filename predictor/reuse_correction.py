"""What no rule explains: how an engine's reported reuse differs from what its blocks promise, learned per worker.

Two habits are told apart. An engine may fall short by the same number of tokens each time (a block dropped for
speculation, a window computed again), or by a share of what is cached (layers whose state is not in the events). A
credit is only ever lowered: that an engine reused more than is known of says nothing about the next prompt.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque

_REMEMBERED = 32
_ENOUGH = 8  # samples before anything is corrected
_AGREED = 0.8  # of them, for a habit of falling short by a constant
_FAULTLESS = 0.98  # a share above it is left alone


class ReuseCorrection:
    """Samples are requests of which something was credited and whose true reuse is known."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # credited by the rule, reused; tokens
        self._offset = 0
        self._share = 1.0

    @property
    def offset_tokens(self) -> int:
        return self._offset

    @property
    def share(self) -> float:
        return self._share

    @property
    def confidence(self) -> float:
        """The share of what is remembered that the correction foretells to within 2 % of the credit, 0 without any."""
        if len(self._samples) < _ENOUGH:
            return 0.0
        right = sum(abs(self._corrected(credited) - reused) <= 0.02 * credited for credited, reused in self._samples)
        return right / len(self._samples)

    def observe(self, credited_tokens: int, reused_tokens: int) -> None:
        """`credited_tokens` is what the rule alone says."""
        if credited_tokens <= 0:
            return
        self._samples.append((credited_tokens, reused_tokens))
        self._learn()

    def apply(self, tokens: int, unit: int) -> int:
        """A rule's credit, corrected and ending at a multiple of `unit` tokens."""
        if self._offset == 0 and self._share == 1.0:
            return tokens
        return max(0, int(self._corrected(tokens)) // unit * unit)

    def view(self) -> dict[str, object]:
        """As plain values, for people and dashboards."""
        return {
            "offset_tokens": self._offset,
            "share": round(self._share, 4),
            "confidence": round(self.confidence, 2),
            "samples": len(self._samples),
        }

    def forget(self) -> None:
        self._samples.clear()
        self._offset, self._share = 0, 1.0

    def _corrected(self, tokens: int) -> float:
        return max(0.0, (tokens - self._offset) * self._share)

    def _learn(self) -> None:
        self._offset, self._share = 0, 1.0
        if len(self._samples) < _ENOUGH:
            return
        short = Counter(credited - reused for credited, reused in self._samples)
        offset, times = short.most_common(1)[0]
        if times >= _AGREED * len(self._samples):
            self._offset = max(0, offset)
            return
        share = statistics.median(reused / credited for credited, reused in self._samples)
        if share < _FAULTLESS:
            self._share = share
