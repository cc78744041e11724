"""Prefixes that requests in flight on a worker have computed, or will have before a newcomer's turn comes.

An engine announces a block when its step has run; until then the cache index does not know it. But requests are served
in order, and vLLM lets even the second request of a step hit the blocks that the first is about to compute: of many
copies of one prompt sent at once, an engine computes one. Blocks of requests in flight cannot be evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as ReadOnly

from predictor.prompt import BlockHashes

# Of many that begin alike, the newest are looked at: what they do not share with a newcomer, older ones hardly do.
_LOOKED_AT = 8
# Requests that are searched for blocks of which only the contents are known.
_SEARCHED = 64


class PrefixesAhead:
    """One worker's requests in flight, by the chained hashes of their blocks."""

    def __init__(self) -> None:
        self._alike: dict[int, dict[str, BlockHashes]] = {}  # first block's hash -> request -> all hashes
        self._first: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._first)

    def add(self, request_id: str, hashes: BlockHashes) -> None:
        if len(hashes):
            first = int(hashes[0])
            self._first[request_id] = first
            self._alike.setdefault(first, {})[request_id] = hashes

    def remove(self, request_id: str) -> None:
        first = self._first.pop(request_id, None)
        if first is not None:
            alike = self._alike[first]
            del alike[request_id]
            if not alike:
                del self._alike[first]

    def newest(self) -> Iterator[BlockHashes]:
        """The hashes of the requests that came last, the last first."""
        for request_id, first in itertools.islice(reversed(self._first.items()), _SEARCHED):
            yield self._alike[first][request_id]

    def run(self, hashes: BlockHashes, known: int) -> int:
        """The number of leading blocks that are known to be cached (`known`) or on their way."""
        alike = self._alike.get(int(hashes[0])) if len(hashes) else None
        if alike is None:
            return known
        newest = itertools.islice(reversed(alike.values()), _LOOKED_AT)
        return max(known, *(common_blocks(hashes, other) for other in newest))


def common_blocks(left: BlockHashes | ReadOnly[int], right: BlockHashes | ReadOnly[int]) -> int:
    """How many leading blocks are equal; hashes are chained, so where two are equal, all before them are."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
