"""Where the first block that a request stored begins: what stands before it was reused.

Engines report `cached_tokens` only when told to. But a block is announced when it is computed, or computed again, so a
request's first stored block tells the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.prompt import BlockHashes

# Requests that have stored nothing yet and are looked through for one event, oldest first.
_LOOKED_AT = 16


@dataclass(slots=True, eq=False)
class _Storing:
    hashes: BlockHashes
    first: int | None = None  # block at which it began to store
    stored: int = 0  # blocks up to which it has


class FirstStored:
    """One worker's requests in flight, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, _Storing] = {}
        self._storing: dict[str, _Storing] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._storing)

    @property
    def waiting(self) -> bool:
        """Whether an event could tell anything."""
        return bool(self._waiting)

    def add(self, request_id: str, hashes: BlockHashes) -> None:
        if len(hashes):
            self._waiting[request_id] = _Storing(hashes)

    def stored(self, first: int, blocks: int) -> None:
        """A run of so many blocks was stored, of which `first` is the first one's hash.

        It belongs to the request that goes on from where it was, or else to the oldest that has such a block: requests
        that begin alike are computed one after the other, and the later ones store only what differs.
        """
        for request in self._storing.values():
            at = request.stored
            if at < len(request.hashes) and request.hashes[at] == first:
                request.stored = at + blocks
                return
        for looked_at, (request_id, request) in enumerate(self._waiting.items()):
            if looked_at == _LOOKED_AT:
                return
            found = (request.hashes == np.uint64(first)).nonzero()[0]
            if len(found):
                request.first = int(found[0])
                request.stored = request.first + blocks
                self._storing[request_id] = self._waiting.pop(request_id)
                return

    def end(self, request_id: str) -> int | None:
        """The blocks that it reused; None if it was not seen to store any of its prompt."""
        self._waiting.pop(request_id, None)
        request = self._storing.pop(request_id, None)
        return None if request is None else request.first
