"""What callers may ask of us, and what we answer when they ask wrongly."""

from __future__ import annotations

from predictor.admission import BOUND_MAX_S, BOUND_MIN_S

BOUND_HEADER = "x-max-queue-wait-s"
BOUND_FIELD = "max_queue_wait_s"


class BadWish(ValueError):
    """The caller's fault: names the field, what was wrong with it, and what is allowed."""

    def __init__(self, field: str, value: object) -> None:
        self.field = field
        # A list may be nested too deep to be shown.
        shown = f"a {type(value).__name__}" if isinstance(value, (list, dict)) else repr(value)
        shown = shown if len(shown) <= 80 else shown[:80] + "..."
        super().__init__(f"{field} must be a number of seconds from {BOUND_MIN_S:g} to {BOUND_MAX_S:g}; got {shown}")


def queue_wait_bound(header: str | None, field: object) -> float | None:
    """The caller's bound on queue wait in seconds; the header wins over the body's field. Raises BadWish."""
    if header is not None:
        try:
            bound_s = float(header)
        except ValueError:
            raise BadWish(BOUND_HEADER, header) from None
        return _in_range(BOUND_HEADER, bound_s, header)
    if field is None:
        return None
    if isinstance(field, bool) or not isinstance(field, (int, float)):
        raise BadWish(BOUND_FIELD, field)
    return _in_range(BOUND_FIELD, field, field)


def _in_range(name: str, bound_s: float, shown: object) -> float:
    if not BOUND_MIN_S <= bound_s <= BOUND_MAX_S:  # false for NaN as well
        raise BadWish(name, shown)
    return float(bound_s)
