"""Which worker holds which prefix: the longest reusable run of blocks, per worker.

One index serves the workers of one pool that share a block size. Engines name blocks by hashes of their own; a view
per worker maps those to ours (see `prompt`), and one table maps each of our hashes to the set of workers that hold it,
as a bit mask. Memory is bounded: a view never holds more blocks than its engine has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from predictor.kv_events import Cleared, KvEvent, Removed, Stored, Tier
from predictor.prompt import BlockHasher


@dataclass(slots=True)
class _View:
    """What one worker is known to hold."""

    bit: int
    capacity_blocks: int | None
    blocks: dict[int, int] = field(default_factory=dict)  # engine hash -> our hash
    # A block computed again although it is cached becomes a second copy under the same hash: two stores, two removals
    # (engines.md A.1, "Duplicates need reference counts"). Rare, so counted beside the table.
    more_copies: dict[int, int] = field(default_factory=dict)  # engine hash -> copies beyond the first
    more_names: dict[int, int] = field(default_factory=dict)  # our hash -> engine hashes beyond the first
    groups: set[int | None] = field(default_factory=set)  # the groups of layers whose blocks were stored


class CacheIndex:
    """Exact for what it was told; what it could not use is counted in `skipped`, by reason."""

    def __init__(self, hasher: BlockHasher, block_size: int) -> None:
        self.block_size = block_size
        self.skipped: Counter[str] = Counter()
        self._hasher = hasher
        self._views: dict[str, _View] = {}
        self._holders: dict[int, int] = {}  # our hash -> mask of the workers that hold it

    def add(self, worker: str, capacity_blocks: int | None) -> None:
        """Starts an empty view; `capacity_blocks` is the engine's own block count, and None means no cap.

        ValueError if there is one already.
        """
        if worker in self._views:
            raise ValueError(f"worker {worker!r} is already in the index")
        taken = {view.bit for view in self._views.values()}
        bit = 1
        while bit in taken:
            bit <<= 1
        self._views[worker] = _View(bit, capacity_blocks)

    def set_capacity(self, worker: str, capacity_blocks: int) -> None:
        view = self._views[worker]
        view.capacity_blocks = capacity_blocks
        self._shed(view)

    def remove(self, worker: str) -> None:
        self.clear(worker)
        del self._views[worker]

    def clear(self, worker: str) -> None:
        view = self._views[worker]
        for ours in view.blocks.values():
            self._release(view, ours)
        view.blocks.clear()
        view.more_copies.clear()
        view.more_names.clear()

    def blocks(self, worker: str) -> int:
        """Distinct blocks known to be held."""
        return len(self._views[worker].blocks)

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, worker: str, event: KvEvent) -> None:
        match event:
            case Stored():
                self._store(self._views[worker], event)
            case Removed():
                self._remove(self._views[worker], event)
            case Cleared():
                self.clear(worker)

    def runs(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """For each worker the number of leading blocks of a prompt that it holds without a hole."""
        names = {view.bit: name for name, view in self._views.items()}
        runs = dict.fromkeys(self._views, 0)
        alive = 0
        for view in self._views.values():
            alive |= view.bit
        holders_of = self._holders.get
        for position, ours in enumerate(hashes):
            holders = holders_of(ours, 0) & alive
            if holders != alive:
                for bit in _bits(alive & ~holders):
                    runs[names[bit]] = position
                alive = holders
                if not alive:
                    return runs
        for bit in _bits(alive):
            runs[names[bit]] = len(hashes)
        return runs

    def _store(self, view: _View, event: Stored) -> None:
        if event.tier is not Tier.DEVICE:
            self.skipped[f"tier_{event.tier.value}"] += 1
            return
        if event.block_size != self.block_size:
            self.skipped["block_size"] += 1
            return
        parent = self._hasher.root if event.parent is None else view.blocks.get(event.parent)
        if parent is None:
            self.skipped["unknown_parent"] += 1
            return
        view.groups.add(event.group)
        extras = None
        if event.lora_name is not None or event.extra_keys is not None:
            keys = event.extra_keys or ((),) * len(event.hashes)
            digests = [self._hasher.extra_digest(event.lora_name, entry) for entry in keys]
            extras = np.array(digests, np.uint64)
        chained = self._hasher.chain(parent, event.tokens, event.block_size, extras).tolist()
        for theirs, ours in zip(event.hashes, chained, strict=True):
            self._hold(view, theirs, ours)
        self._shed(view)

    def _hold(self, view: _View, theirs: int, ours: int) -> None:
        known = view.blocks.get(theirs)
        if known is not None:
            view.more_copies[theirs] = view.more_copies.get(theirs, 0) + 1
            if known == ours:
                return
            # The same engine hash for other content: believe the newer word.
            self._release(view, known)
        view.blocks[theirs] = ours
        holders = self._holders.get(ours, 0)
        if holders & view.bit:
            view.more_names[ours] = view.more_names.get(ours, 0) + 1
        else:
            self._holders[ours] = holders | view.bit

    def _remove(self, view: _View, event: Removed) -> None:
        if event.tier is not Tier.DEVICE:
            return
        if event.group is not None and event.group not in view.groups:
            # A removal does not tell its group's kind: one of a group that was never taken in is not ours.
            self.skipped["other_group"] += 1
            return
        for theirs in event.hashes:
            copies = view.more_copies.pop(theirs, 0)
            if copies > 1:
                view.more_copies[theirs] = copies - 1
            if copies:
                continue
            ours = view.blocks.pop(theirs, None)
            if ours is None:
                self.skipped["unknown_removal"] += 1
            else:
                self._release(view, ours)

    def _release(self, view: _View, ours: int) -> None:
        names = view.more_names.pop(ours, 0)
        if names > 1:
            view.more_names[ours] = names - 1
        if names:
            return
        holders = self._holders[ours] & ~view.bit
        if holders:
            self._holders[ours] = holders
        else:
            del self._holders[ours]

    def _shed(self, view: _View) -> None:
        """Drops the longest-known blocks beyond the engine's own count: removals must have been lost."""
        if view.capacity_blocks is None:
            return
        while len(view.blocks) > view.capacity_blocks:
            theirs = next(iter(view.blocks))
            self._release(view, view.blocks.pop(theirs))
            view.more_copies.pop(theirs, None)
            self.skipped["over_capacity"] += 1


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low
        mask ^= low
