"""What requests with a bound on their wait have met in a pool lately, and how many of them a placement crowds out."""

from __future__ import annotations

# The mean of about so many.
_MEMORY = 40
# From this share of refusals on, whatever is placed before them costs as many more.
_FULL_AT = 0.05
# A queue that is so much longer than the bound will not be open to them again for as long as anybody looks ahead.
_LOST_AFTER_S = 15.0


class Crowding:
    """Where requests with a bound are being refused, queues stand at their bound: each second of prefill that joins
    such a queue is a second that one of them will not get. The longer a queue is beyond the bound, the less it costs
    them: it will not be theirs for a long time anyway. So those without a bound do best to wait behind each other."""

    def __init__(self) -> None:
        self._refused = 0.0  # share of those with a bound
        self._bound_s: float | None = None
        self._own_s = 0.0

    def decided(self, bound_s: float, own_s: float, refused: bool) -> None:
        """A request that may wait for `bound_s` and takes `own_s` to prefill was let in, or refused."""
        if self._bound_s is None:
            self._bound_s, self._own_s = bound_s, own_s
        self._bound_s += (bound_s - self._bound_s) / _MEMORY
        self._own_s += (own_s - self._own_s) / _MEMORY
        self._refused += (refused - self._refused) / _MEMORY

    def crowds_out(self, wait_s: float, own_s: float) -> float:
        """Requests with a bound that will be refused because one of `own_s` joins a queue of `wait_s`."""
        if self._bound_s is None or self._own_s <= 0.0:
            return 0.0
        wanted = max(0.0, 1.0 - max(0.0, wait_s - self._bound_s) / _LOST_AFTER_S)
        return wanted * min(1.0, self._refused / _FULL_AT) * own_s / self._own_s
