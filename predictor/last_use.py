"""When an engine last used which prefixes, and so how much of one will be left once others have been computed.

Engines give up first what was used least recently, and of one request's blocks the last ones first (vLLM 0.32's free
list, SGLang 0.5.23's leaves). So a request that waits behind others may lose blocks that are cached when it is decided
on. Where the engine has got to is not computed from sizes but seen: what is evicted now was last used then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from predictor.prompt import BlockHashes

_REMEMBERED = 8192  # blocks
_EVICTIONS = 8  # the last, of which the newest block tells how far the engine has got; fewer tell nothing
# Of a prompt the last block is remembered, and these: some of its beginning, which others may share, and one in 16.
_SAMPLED = np.array([*range(3, 32, 4), *range(47, 1 << 16, 16)])
# At the end of a run each block is looked at: somewhere there the prompt before has ended, and its answer begun.
_LOOKED_AT = 64


class LastUse:
    """One worker's. Time is counted in blocks that its device has stored."""

    def __init__(self) -> None:
        self._now = 0
        self._used: dict[int, int] = {}  # block -> when it was last used; the oldest first
        self._gone: deque[int] = deque(maxlen=_EVICTIONS)  # when what was evicted last had been used

    @property
    def front(self) -> int | None:
        """What was last used before is gone; None: not known."""
        return max(self._gone) if len(self._gone) == _EVICTIONS else None

    def stored(self, blocks: int) -> None:
        self._now += blocks

    def used(self, hashes: BlockHashes) -> None:
        """A prompt with these blocks was served, and is not in use any more."""
        if not len(hashes):
            return
        used, now, blocks = self._used, self._now, hashes.tolist()
        # Where other prompts have ended in it as well: what is remembered of a block must not be older than its use.
        for block in (used.keys() & blocks) | {blocks[-1], *hashes[_sampled_below(len(blocks))].tolist()}:
            used.pop(block, None)
            used[block] = now
        while len(used) > _REMEMBERED:
            del used[next(iter(used))]

    def evicted(self, blocks: Iterable[int]) -> None:
        """These blocks have left the device."""
        for block in self._used.keys() & blocks:
            self._gone.append(self._used.pop(block))

    def cleared(self) -> None:
        """The device is empty."""
        self._used.clear()
        self._gone.clear()

    def left_of(self, hashes: BlockHashes, run: int, coming: int) -> int:
        """How many of a run of leading blocks will be left when `coming` more blocks have been stored.

        Where it is not known when they were last used, all.
        """
        front = self.front if run and coming > 0 else None
        if front is None:
            return run
        oldest = front + coming  # where a block is stored one is evicted
        left = None
        looked_at = max(0, run - _LOOKED_AT)
        sampled = _sampled_below(looked_at)
        blocks = [*hashes[sampled].tolist(), *hashes[looked_at:run].tolist()]
        for place in range(len(blocks) - 1, -1, -1):
            used = self._used.get(blocks[place])
            if used is None:
                continue
            if used < oldest:
                if left is None:
                    # It goes from its end, and no more of it than is stored.
                    left = max(0, run - min(coming, oldest - used))
                continue
            if left is None:
                return run
            at = place - len(sampled) + looked_at if place >= len(sampled) else int(sampled[place])
            return max(left, at + 1)
        return run if left is None else left


def _sampled_below(blocks: int) -> np.ndarray:
    return _SAMPLED[: int(_SAMPLED.searchsorted(blocks))]
