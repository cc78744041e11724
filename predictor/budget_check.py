"""Whether an engine's steps agree with the token budget that is assumed of it.

vLLM shows its `max_num_batched_tokens` to nobody, so it comes from the config or from the defaults of a device, and a
wrong one makes every forecast of a queue wrong. Its KV events tell enough to notice: blocks that one event stores as a
run were computed in one step, and a step after which a prompt's prefill goes on had no reason to leave room.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

from predictor.stored_run import StoredRun

# Runs above the budget before it is called too small: now and then a run was loaded, not computed.
_ABOVE = 3
# Steps that should have been full before the budget is called too large, and how full the fullest of them must be.
_HUNGRY, _FULL = 20, 0.8
# A shorter run may be what sequences decode.
_CHUNK_BLOCKS = 3


class BudgetDoubt(enum.Enum):
    """What the steps that were seen say of `max_num_batched_tokens`."""

    NONE = "none"
    EXCEEDED = "exceeded"  # a step computed more than that: it is larger
    NEVER_FILLED = "never_filled"  # steps with more to do stayed below it: it is smaller


class BudgetCheck:
    """One worker's. What was seen counts until the settings change; `capped`: a prompt's share of a step has a cap."""

    def __init__(self, budget_tokens: int, block_size: int, capped: bool = False) -> None:
        self.largest_tokens = 0  # that one prompt got in one step, at least
        self._budget_tokens = budget_tokens
        self._block_size = block_size
        self._capped = capped
        self._above = 0
        self._step_tokens: int | None = None  # of the step seen last, at most
        self._hungry: deque[int] = deque(maxlen=_HUNGRY)  # tokens of steps that left a prefill unfinished, at most

    @property
    def doubt(self) -> BudgetDoubt:
        if self._above >= _ABOVE:
            return BudgetDoubt.EXCEEDED
        if len(self._hungry) == _HUNGRY and max(self._hungry) < _FULL * self._budget_tokens:
            return BudgetDoubt.NEVER_FILLED
        return BudgetDoubt.NONE

    def stored_at_once(self, blocks: int) -> None:
        """One event told of a run of so many blocks. Of the first all tokens but one may have been there before."""
        tokens = max(0, (blocks - 1) * self._block_size + 1)
        self.largest_tokens = max(self.largest_tokens, tokens)
        self._above += tokens > self._budget_tokens

    def step(self, runs: Sequence[StoredRun], goes_on: bool, decoding: int) -> None:
        """All that one step stored, while so many sequences decoded.

        `goes_on`: some of it is of a prompt whose prefill the step before had begun, and left unfinished.
        """
        if goes_on and not self._capped and self._step_tokens is not None:
            self._hungry.append(self._step_tokens)
        size, lasts, tokens = self._block_size, set(), decoding
        for run in runs:
            if run.parent in lasts:
                tokens += run.blocks * size
            elif run.blocks >= _CHUNK_BLOCKS:
                tokens += (run.blocks + 1) * size  # it begins and ends inside a block
            lasts.add(run.last)
        self._step_tokens = tokens
