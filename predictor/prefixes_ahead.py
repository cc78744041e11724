"""Prefixes that requests in flight on a worker have computed, or will have before a newcomer's turn comes.

An engine announces a block when its step has run; until then the cache index does not know it. But requests are served
in order, and vLLM lets even the second request of a step hit the blocks that the first is about to compute: of many
copies of one prompt sent at once, an engine computes one. Blocks of requests in flight cannot be evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass
from typing import NamedTuple

from predictor.prompt import BlockHashes

# Requests that are searched for blocks of which only the contents are known.
_SEARCHED = 64


class Share(NamedTuple):
    """Leading blocks that one request shares."""

    with_any: int
    with_later: int  # with one that ends after it


@dataclass(slots=True)
class _Ahead:
    id: str
    hashes: BlockHashes
    reused: int  # leading blocks
    number: int  # in order of arrival
    common: int = 0  # blocks that it has in common with the next, of what the later of the two reuses


class PrefixesAhead:
    """One worker's requests in flight, by the chained hashes of their blocks.

    Those that begin alike are kept in an order in which neighbours have the most in common, as words in a dictionary:
    hundreds may share a system prompt, and only one of them the conversation.
    """

    def __init__(self) -> None:
        self._alike: dict[int, list[_Ahead]] = {}  # by the first block's hash
        self._hashes: dict[str, BlockHashes] = {}  # by request, in order of arrival
        self._number = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, request_id: str, hashes: BlockHashes, reused: int | None = None) -> None:
        """`reused`: the leading blocks that it is expected to find cached, if that is known."""
        if len(hashes):
            self._hashes[request_id] = hashes
            self._number += 1
            alike = self._alike.setdefault(int(hashes[0]), [])
            place = _place(alike, hashes)
            alike.insert(place, _Ahead(request_id, hashes, len(hashes) if reused is None else reused, self._number))
            self._find_common(alike, place - 1)
            self._find_common(alike, place)

    def remove(self, request_id: str) -> BlockHashes | None:
        """The hashes of its blocks, if it was there and has any."""
        hashes = self._hashes.pop(request_id, None)
        if hashes is not None:
            first = int(hashes[0])
            alike = self._alike[first]
            place = _place(alike, hashes) - 1
            while alike[place].id != request_id:
                place -= 1
            del alike[place]
            self._find_common(alike, place - 1)
            if not alike:
                del self._alike[first]
        return hashes

    def credit(self, request_id: str, reused: int) -> None:
        """It is expected to find so many leading blocks cached, and not what was expected when it came."""
        hashes = self._hashes.get(request_id)
        if hashes is None:
            return
        alike = self._alike[int(hashes[0])]
        place = _place(alike, hashes) - 1
        while alike[place].id != request_id:
            place -= 1
        if alike[place].reused != reused:
            alike[place].reused = reused
            self._find_common(alike, place - 1)
            self._find_common(alike, place)

    def shares(self, ends: Mapping[str, float]) -> dict[str, Share]:
        """What each of those that share blocks shares, if they end in this order."""
        shares: dict[str, Share] = {}
        for alike in self._alike.values():
            if len(alike) == 1:
                continue
            lent = [0] * len(alike)
            # Those that nobody after them outlives so far: when they end, their places, what they have in common with
            # the one before them here.
            open_: list[tuple[float, int, int]] = []
            common = 0
            for place, one in enumerate(alike):
                end = ends[one.id]
                while open_ and open_[-1][0] < end:
                    _, other, before = open_.pop()
                    lent[other] = max(lent[other], common)
                    common = min(common, before)
                if open_:
                    lent[place] = common
                open_.append((end, place, common))
                common = one.common
            before = 0
            for one, outlived in zip(alike, lent, strict=True):
                shares[one.id] = Share(max(before, one.common), outlived)
                before = one.common
        return shares

    @staticmethod
    def _find_common(alike: list[_Ahead], place: int) -> None:
        """The one in this place has got another one behind it."""
        if not 0 <= place < len(alike):
            return
        one, common = alike[place], 0
        if place + 1 < len(alike):
            other = alike[place + 1]
            later = one if one.number > other.number else other
            if later.reused:
                common = min(later.reused, common_blocks(one.hashes, other.hashes))
        one.common = common

    @property
    def any_alike(self) -> bool:
        """Whether any two begin alike."""
        return len(self._hashes) > len(self._alike)

    def newest(self) -> Iterator[BlockHashes]:
        """The hashes of the requests that came last, the last first."""
        return itertools.islice(reversed(self._hashes.values()), _SEARCHED)

    def nearest(self, hashes: BlockHashes | ReadOnly[int]) -> Iterator[tuple[str, int]]:
        """Requests that begin alike, and how many leading blocks each has in common with these: the most first."""
        alike = self._alike.get(int(hashes[0])) if len(hashes) else None
        if alike is None:
            return
        after = _place(alike, hashes)
        before = after - 1
        common_before = common_blocks(hashes, alike[before].hashes) if before >= 0 else -1
        common_after = common_blocks(hashes, alike[after].hashes) if after < len(alike) else -1
        while before >= 0 or after < len(alike):
            if common_before >= common_after:
                yield alike[before].id, common_before
                before -= 1
                common_before = _common_at_most(hashes, alike[before].hashes, common_before) if before >= 0 else -1
            else:
                yield alike[after].id, common_after
                after += 1
                common_after = _common_at_most(hashes, alike[after].hashes, common_after) if after < len(alike) else -1

    def run(self, hashes: BlockHashes, known: int) -> int:
        """The number of leading blocks that are known to be cached (`known`) or on their way."""
        return max(known, next((common for _, common in self.nearest(hashes)), 0))


def _place(alike: ReadOnly[_Ahead], hashes: BlockHashes | ReadOnly[int]) -> int:
    """Where these come in the order of those: as numbers, block by block, and what is only longer comes later."""
    low, high = 0, len(alike)
    while low < high:
        middle = (low + high) // 2
        other = alike[middle].hashes
        common = common_blocks(hashes, other)
        if common < len(other) and (common == len(hashes) or hashes[common] < other[common]):
            high = middle
        else:
            low = middle + 1
    return low


def _common_at_most(left: BlockHashes | ReadOnly[int], right: BlockHashes | ReadOnly[int], most: int) -> int:
    """As `common_blocks`, of two that have no more in common than that."""
    if len(right) >= most and left[most - 1] == right[most - 1]:
        return most
    return common_blocks(left, right)


def common_blocks(left: BlockHashes | ReadOnly[int], right: BlockHashes | ReadOnly[int]) -> int:
    """How many leading blocks are equal; hashes are chained, so where two are equal, all before them are."""
    low, high = 0, min(len(left), len(right))
    if high and left[high - 1] == right[high - 1]:
        return high  # the next turn of a conversation, or the same prompt once more
    while low < high:
        middle = (low + high) // 2
        if left[middle] == right[middle]:
            low = middle + 1
        else:
            high = middle
    return low
