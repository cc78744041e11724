"""What one observed interval between two step ends says about the cost of a step."""

from __future__ import annotations

import msgspec


class StepSample(msgspec.Struct, frozen=True, gc=False):
    """`steps` engine steps that took `duration_s` together: from one observed step end to the next observed one.

    An interval that follows idleness begins with the arrival. Steps between the two ends that left no sign are counted,
    not timed. All counts are sums over the steps.
    """

    duration_s: float
    new_tokens: int  # prompt tokens computed in prefill chunks
    squares: int  # sum over the prefill chunks of end^2 - start^2, positions in tokens: attention's work
    decoding: int  # sequences that decoded, once for each step
    steps: int = 1
    arrival_tokens: int | None = None  # began with the arrival of a prompt of so many tokens; None: with a step's end
    told_before: bool = False  # of most of this time another sample has told: it is no witness beside that one
