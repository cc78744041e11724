"""What requests with a bound on their wait are about to meet in a pool, and how many of them a placement crowds out."""

from __future__ import annotations

# The mean of about so many.
_MEMORY = 40
# Where even the shortest queue is so near to where they are refused, each place in it counts: from the first part of it
# on a little, from the second on fully. When somebody is refused, it is too late for those who are.
_NEAR, _FULL = 0.74, 0.84
# They are refused where doubt of the wait begins to reach beyond their bound: at this part of it, until that is seen.
_LINE = 0.95
# How fast what is seen of that is believed: a mean of about so many.
_LINE_MEMORY = 8
# Where fewer of all requests have a bound than this, as many fewer want the place.
_MANY = 0.1
# A queue that is so much longer than the shortest will not be open to them for as long as anybody looks ahead.
_LOST_AFTER_S = 15.0


class Crowding:
    """Where the shortest queue comes near to what requests with a bound may wait, each second of prefill that joins it
    is a second that one of them will not get. A longer queue costs them the less: it will not be theirs for a long time
    anyway. So those without a bound do best to wait behind each other."""

    def __init__(self) -> None:
        self._bounded = 0.0  # share of requests with a bound
        self._bound_s: float | None = None
        self._own_s = 0.0
        self._line = _LINE

    def asked(self, bound_s: float | None, own_s: float | None, shortest_s: float = 0.0, refused: bool = False) -> None:
        """Somebody came who may wait for `bound_s` (None: for ever) and takes `own_s` to prefill (None: as the others
        do). Where the shortest queue was of `shortest_s`, he was let in or refused for its length."""
        self._bounded += ((bound_s is not None) - self._bounded) / _MEMORY
        if bound_s is None:
            return
        if bound_s > 0.0:
            part = min(1.0, shortest_s / bound_s)
            if refused != (part > self._line):
                self._line += (part - self._line) / _LINE_MEMORY
        if self._bound_s is None:
            if own_s is None:
                return
            self._bound_s, self._own_s = bound_s, own_s
        self._bound_s += (bound_s - self._bound_s) / _MEMORY
        if own_s is not None:
            self._own_s += (own_s - self._own_s) / _MEMORY

    def crowds_out(self, wait_s: float, own_s: float, shortest_s: float) -> float:
        """Requests with a bound that will be refused because one of `own_s` joins a queue of `wait_s`, where the
        shortest one is of `shortest_s`."""
        if not self._bound_s or self._own_s <= 0.0:
            return 0.0
        part = shortest_s / (self._line * self._bound_s) if self._line > 0.0 else 1.0
        near = min(1.0, max(0.0, (part - _NEAR) / (_FULL - _NEAR)))
        wanted = max(0.0, 1.0 - max(0.0, wait_s - min(shortest_s, self._bound_s)) / _LOST_AFTER_S)
        return near * wanted * min(1.0, self._bounded / _MANY) * own_s / self._own_s
