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

from predictor.prefixes_ahead import common_blocks
from predictor.prompt import BlockHashes

_REMEMBERED = 4096  # ends of prompts
_REMEMBERED_BLOCKS = 1 << 16  # of prompts that are kept whole, for what others begin with as well
_LASTED = 32  # evictions that the time is taken from, and how many it takes at least
_FEWEST = 8
# From the end of a run so many blocks are looked through for where a prompt ended.
_LOOKED_THROUGH = 256
_ALIKE = 4  # newest prompts that begin with the same block


class LastUse:
    """One worker's. Time is counted in blocks that its device has stored."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[int, int] = {}  # the last full block of a prompt -> when it was last used; the oldest first
        self._alike: dict[int, deque[tuple[int, BlockHashes]]] = {}  # first block -> the newest, and when
        self._alike_blocks = 0
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
        first, last = int(hashes[0]), int(hashes[-1])
        self._ends.pop(last, None)
        self._ends[last] = self._now
        if len(self._ends) > _REMEMBERED:
            del self._ends[next(iter(self._ends))]
        alike = self._alike.pop(first, None) or deque()
        self._alike[first] = alike
        alike.append((self._now, hashes))
        self._alike_blocks += len(hashes)
        if len(alike) > _ALIKE:
            self._alike_blocks -= len(alike.popleft()[1])
        while self._alike_blocks > _REMEMBERED_BLOCKS:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        first = next(iter(self._alike))
        self._alike_blocks -= len(self._alike[first].popleft()[1])
        if not self._alike[first]:
            del self._alike[first]

    def evicted(self, blocks: Iterable[int]) -> None:
        """These blocks have left the device."""
        for block in self._ends.keys() & blocks:
            self._lasted.append(self._now - self._ends.pop(block))

    def cleared(self) -> None:
        """The device is empty. How long blocks last stays known."""
        self._ends.clear()
        self._alike.clear()
        self._alike_blocks = 0

    def left_of(self, hashes: BlockHashes, run: int, coming: int) -> int:
        """How many of a run of leading blocks will be left when `coming` more blocks have been stored.

        Where it is not known when they were last used, all.
        """
        lasts = self.lasts_blocks if run and coming > 0 else None
        if lasts is None:
            return run
        oldest = self._now + coming - lasts  # what was last used before is gone by then
        start = max(0, run - _LOOKED_THROUGH)
        left = None
        for place, block in zip(range(run, start, -1), reversed(hashes[start:run].tolist()), strict=True):
            used = self._ends.get(block)
            if used is None:
                continue
            if used >= oldest:
                left = run if left is None else max(left, place)
                break
            if left is None:
                # It goes from its end, and no more of it than is stored.
                left = max(0, run - min(coming, oldest - used))
        if left is None or left == run:
            return run
        for used, others in self._alike.get(int(hashes[0]), ()):
            if used >= oldest:
                left = max(left, min(run, common_blocks(hashes, others)))
        return left
