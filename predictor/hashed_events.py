"""Published batches of KV events with hashes of ours in place of the engine's own and of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from predictor.kv_events import Cleared, MalformedBatch, Removed, Stored, decode_batch
from predictor.prompt import BlockHasher
from predictor.recording import HashedCleared, HashedEvent, HashedRemoved, HashedStored, encode_hashes

# More than any cache holds; then removals must have been lost.
_MOST_NAMES = 8_000_000


class HashedEvents:
    """What of each batch can be told in chained hashes: an engine's names for its blocks are remembered by worker."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._views: dict[str, dict[int, _Named]] = {}  # by worker, and by the engine's own hash

    def forget(self, worker: str) -> None:
        self._views.pop(worker, None)

    def read(self, worker: str, payload: bytes, block_size: int) -> list[HashedEvent]:
        """What of a batch concerns blocks of this size with known parents; of a malformed batch nothing."""
        view = self._views.setdefault(worker, {})
        try:
            batch = decode_batch(payload)
        except MalformedBatch:
            return []
        events: list[HashedEvent] = []
        for event in batch.events:
            match event:
                case Stored():
                    parent = self._hasher.root if event.parent is None else _name(view, event.parent)
                    if parent is None or event.adrift or event.block_size != block_size:
                        continue
                    ours = self._chained(event, parent)
                    for theirs, name in zip(event.hashes, ours, strict=True):
                        copies = view[theirs].copies if theirs in view else 0
                        view[theirs] = _Named(name, copies + 1)
                    known = None if event.parent is None else encode_hashes([parent])
                    events.append(HashedStored(hashes=encode_hashes(ours), parent=known, tier=event.tier))
                case Removed():
                    gone = [name for name in (_removed(view, theirs) for theirs in event.hashes) if name is not None]
                    if gone:
                        events.append(HashedRemoved(hashes=encode_hashes(gone), tier=event.tier))
                case Cleared():
                    view.clear()
                    events.append(HashedCleared())
        if len(view) > _MOST_NAMES:
            view.clear()
            events.append(HashedCleared())
        return events

    def _chained(self, event: Stored, parent: int) -> list[int]:
        extras = None
        if event.lora_name is not None or event.extra_keys is not None:
            keys = event.extra_keys or ((),) * len(event.hashes)
            extras = np.array([self._hasher.extra_digest(event.lora_name, entry) for entry in keys], np.uint64)
        ours: list[int] = self._hasher.chain(parent, event.tokens, event.block_size, extras).tolist()
        return ours


@dataclass(frozen=True, slots=True)
class _Named:
    name: int  # our hash
    copies: int  # a block may be stored twice under one hash, and is then removed twice


def _name(view: Mapping[int, _Named], theirs: int) -> int | None:
    named = view.get(theirs)
    return None if named is None else named.name


def _removed(view: dict[int, _Named], theirs: int) -> int | None:
    named = view.pop(theirs, None)
    if named is None:
        return None
    if named.copies > 1:
        view[theirs] = _Named(named.name, named.copies - 1)
    return named.name
