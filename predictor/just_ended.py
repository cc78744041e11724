"""Requests that have just ended, and whose last blocks their engine may not have been heard to announce.

The next turn of a conversation can be quicker than the events of the answer before it: they come by another way. What
an engine has computed of a request that is over is there all the same, and of what comes next it is the most recently
used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from predictor.prefixes_ahead import common_blocks
from predictor.prompt import BlockHashes, HashFamily

_REMEMBERED = 8
# Batches until what an engine published before it answered has surely come.
_UNTIL_ANNOUNCED = 8
# Or until so large a part of the device has been stored anew: what was used last is far from being evicted then.
_TURNED_SHARE = 8
# So many blocks of an answer may have been generated and not announced. Where more is missing the newcomer does not go
# on from the answer as it was generated: templates leave out what a model thought.
_UNANNOUNCED_BLOCKS = 2


@dataclass(slots=True)
class _Ended:
    hashes: BlockHashes  # of the prompt
    first: int
    tokens: int  # prompt and answer
    blocks: int  # full ones that whoever has all of the prompt's has as well
    batches: int = 0  # heard since
    stored: int = 0  # blocks, since


class JustEnded:
    """One worker's. It hears of all requests and blocks, so that it knows when nothing is left to guess."""

    def __init__(self) -> None:
        self._ended: deque[_Ended] = deque(maxlen=_REMEMBERED)
        self._alone: str | None = None  # the one in flight, if it has had the engine to itself
        self._stored_alone = 0  # blocks, since it came

    def __len__(self) -> int:
        return len(self._ended)

    def begun(self, request_id: str, in_flight: int) -> None:
        """A request comes, and finds so many others."""
        self._alone, self._stored_alone = (None if in_flight else request_id), 0

    def add(self, request_id: str, hashes: BlockHashes, tokens: int, reused_tokens: int, family: HashFamily) -> None:
        """A request was served; with its prompt and its answer it had so many tokens, and found so many cached."""
        if not len(hashes):
            return
        blocks = len(hashes)
        if reused_tokens < blocks * family.block_size:
            # The token that was generated last is not computed any more.
            blocks = max(blocks, (tokens - 1 - family.lookahead) // family.block_size)
        # Else others have the same blocks, and may go on from them in another way.
        if request_id == self._alone and self._stored_alone >= blocks - reused_tokens // family.block_size:
            return  # all of it was announced before its end was heard of
        self._ended.append(_Ended(hashes, int(hashes[0]), tokens, blocks))

    def heard(self, stored: int, capacity: int | None) -> None:
        """A batch of events has come, by which so many blocks were stored on a device of so many."""
        self._stored_alone += stored
        for one in self._ended:
            one.batches += 1
            one.stored += stored
        while self._ended and (
            self._ended[0].batches >= _UNTIL_ANNOUNCED
            or (capacity is not None and self._ended[0].stored * _TURNED_SHARE > capacity)
        ):
            self._ended.popleft()

    def clear(self) -> None:
        self._ended.clear()

    def run(self, hashes: BlockHashes, tokens: int, known: int) -> int:
        """Leading blocks of a prompt of so many tokens that are known, or must be there."""
        if not len(hashes):
            return known
        first = int(hashes[0])
        for one in self._ended:
            if one.first != first or one.blocks <= known:
                continue
            common = common_blocks(hashes, one.hashes)
            known = max(known, common)
            goes_on = common == len(one.hashes) and tokens >= one.tokens and len(hashes) >= one.blocks
            if goes_on and one.blocks - known <= _UNANNOUNCED_BLOCKS:
                known = max(known, one.blocks)
        return known
