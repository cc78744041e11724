"""When an engine last used which prefixes, and so how much of one will be left once others have been computed.

Engines give up first what was used least recently, and of one request's blocks the last ones first (vLLM 0.32's free
list, SGLang 0.5.23's leaves). So a request that waits behind others may lose blocks that are cached when it is decided
on. How long a block lasts is not computed from sizes but seen: so many blocks were stored between a prefix's last use
and its eviction.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

import numpy as np

from predictor.prompt import BlockHashes

_REMEMBERED = 8192  # blocks
_LASTED = 64  # evictions that the time is taken from, and how many it takes at least
_FEWEST = 8
# Of a prompt the last block is remembered, and these: some of its beginning, which others may share, and one in 16.
_SAMPLED = np.array([*range(3, 32, 4), *range(47, 1 << 16, 16)])
# At the end of a run each block is looked at: somewhere there the prompt before has ended, and its answer begun.
_LOOKED_AT = 64


class LastUse:
    """One worker's. Time is counted in blocks that its device has stored."""

    def __init__(self) -> None:
        self._now = 0
        self._used: dict[int, int] = {}  # block -> when it was last used; the oldest first
        self._lasted: deque[int] = deque(maxlen=_LASTED)

    @property
    def lasts_blocks(self) -> int | None:
        """So many blocks are stored between the last use of a block and its eviction; None: not known."""
        return int(statistics.median(self._lasted)) if len(self._lasted) >= _FEWEST else None

    def stored(self, blocks: int) -> None:
        self._now += blocks

    def used(self, hashes: BlockHashes) -> None:
        """A prompt with these blocks was served, and is not in use any more."""
        if not len(hashes):
            return
        used, now = self._used, self._now
        for block in (*hashes[_sampled_below(len(hashes))].tolist(), int(hashes[-1])):
            used.pop(block, None)
            used[block] = now
        while len(used) > _REMEMBERED:
            del used[next(iter(used))]

    def evicted(self, blocks: Iterable[int]) -> None:
        """These blocks have left the device."""
        for block in self._used.keys() & blocks:
            self._lasted.append(self._now - self._used.pop(block))

    def cleared(self) -> None:
        """The device is empty. How long blocks last stays known."""
        self._used.clear()

    def left_of(self, hashes: BlockHashes, run: int, coming: int) -> int:
        """How many of a run of leading blocks will be left when `coming` more blocks have been stored.

        Where it is not known when they were last used, all.
        """
        lasts = self.lasts_blocks if run and coming > 0 else None
        if lasts is None:
            return run
        oldest = self._now + coming - lasts  # what was last used before is gone by then
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
