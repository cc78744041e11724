"""Which worker holds which prefix: the longest reusable run of blocks, per worker and tier.

One index serves the workers of one pool that hash alike (see `prompt.HashFamily`). Engines name blocks by hashes of
their own; each tier of a worker has a table that maps those to ours, and one table maps each of our hashes to the set
of its holders. A holder is a tier of a worker, or a store that several workers read. Memory is bounded: a holder never
counts more blocks than its cap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predictor.hash_table import HolderTable, Keys, NameTable, Slots, prime_below
from predictor.kv_events import Bundle, Cleared, KvEvent, Named, Removed, Stored, Tier
from predictor.prefixes_ahead import common_blocks
from predictor.prompt import BlockHasher, BlockHashes, HashFamily

_MASK = (1 << 64) - 1
_NEVER = (1 << 32) - 1  # `born` counts up to here before it is renumbered
# From so many blocks on, numpy's calls are cheaper than a loop: in tables, and where hashes are chained.
_MANY, _SEVERAL = 192, 12
# What other tiers may hold where nobody says, in blocks of the device; and without any word at all, blocks.
_HOST_SHARE, _STORAGE_SHARE, _DEFAULT_CAP = 8, 32, 1 << 22
# Orphan blocks a holder, with those that were removed in the meantime; and runs that have a block of one name.
_PARKED_AT_MOST, _PARKED_ALIKE = 16_384, 64
# A run whose parent was never told of is looked for in prompts of so many blocks. A search leaves a debt that such runs
# work off one by one: of so many if it was in vain, as where decodes go on whose beginning was lost, else of one for so
# many blocks. Beyond the greatest debt nothing is looked for.
_PROMPT_BLOCKS_LOOKED_AT, _IN_VAIN, _LOOKED_AT_FOR_ONE, _GREATEST_DEBT = 100_000, 32, 1024, 256
# Of one view, parents that show what is before them, and blocks that are presumed where its capacity is not known. What
# is presumed is spared when others are shed; half of a known capacity is left for what is told.
_PRESUMED_PARENTS, _PRESUMED_BLOCKS = 64, 1 << 16
_REMEMBERED = 4  # blocks for each that is presumed: several parents may show the same ones
# So many blocks are presumed at once, and so many more for every block that is told of.
_PRESUMED_AT_ONCE, _PRESUMED_PER_BLOCK = 4096, 16
_RECENT = 1024  # blocks of small runs: of what is decoded, some are what the next go on from
# Slots of the table of holders that are swept for every block that is taken in, and at least per event.
_SWEPT_PER_BLOCK, _SWEPT_PER_EVENT = 64, 4096
_SWEPT_AT_ONCE = 1 << 20  # a table of so many slots is swept as soon as a bit is wanted: a millisecond or two
# A prompt is looked up in growing pieces: most workers' runs end early.
_FIRST_PIECE, _PIECE_GROWTH = 256, 16
_LOWER = (Tier.HOST, Tier.STORAGE)


class TieredRun(NamedTuple):
    """The leading blocks of a prompt that need no computing: first those on the device, then those to be loaded."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def blocks(self) -> int:
        return self.device + self.host + self.storage


@dataclass(frozen=True, slots=True)
class TierCaps:
    """How many blocks each tier can hold. None: not known, and then a multiple of the device's is assumed."""

    device: int | None = None
    host: int | None = None
    storage: int | None = None

    def of(self, tier: Tier) -> int | None:
        if tier is Tier.DEVICE:
            return self.device
        share, told = (_HOST_SHARE, self.host) if tier is Tier.HOST else (_STORAGE_SHARE, self.storage)
        if told is not None:
            return told
        return _DEFAULT_CAP if self.device is None else self.device * share


@dataclass(slots=True, eq=False)
class _Orphans:
    """A run of blocks whose parent is not known yet: no more than their contents can be told."""

    parent: int
    hashes: tuple[int, ...]
    contents: BlockHashes
    ratio: int
    gone: set[int] = field(default_factory=set)  # removed in the meantime


@dataclass(slots=True, eq=False)
class _Presumed:
    """What is before a block that somebody goes on from; of its leading blocks some are held already."""

    blocks: BlockHashes
    done: int = 0


@dataclass(slots=True, eq=False)
class _Holder:
    """What one tier of a worker, or a shared store, is known to hold."""

    bit: int
    capacity: int | None
    names: NameTable
    shared: bool = False
    on_removed: Callable[[list[int]], None] | None = None
    held: int = 0  # distinct names
    clock: int = 0
    # A block computed again although it is cached becomes a second copy under the same hash: two stores, two removals
    # (engines.md A.1, "Duplicates need reference counts"). Rare, so counted beside the table.
    more_copies: dict[int, int] = field(default_factory=dict)  # engine hash -> copies beyond the first
    more_names: dict[int, int] = field(default_factory=dict)  # our hash -> engine hashes beyond the first
    ratios: set[int] = field(default_factory=set)  # of chunks that are several of our blocks
    orphans: dict[int, list[_Orphans]] = field(default_factory=dict)  # by the unknown parent's hash
    orphan_at: dict[int, list[_Orphans]] = field(default_factory=dict)  # engine hash -> runs with it, the newest last
    parked: int = 0  # blocks of all runs
    # By the engine hash of a block that was never told of. See `_presume`.
    presumed: dict[int, _Presumed] = field(default_factory=dict)
    presumed_blocks: int = 0  # distinct ones
    to_presume: list[_Presumed] = field(default_factory=list)  # those that are not done
    may_presume: int = _PRESUMED_AT_ONCE  # blocks, by now
    debt: int = 0  # runs whose parent is not known that are not looked for
    has_shed: bool = False  # blocks were let go of that the engine may have
    # What the names table says of some that came last, at hand: decoding goes on from one at every block.
    recent: dict[int | None, int] = field(default_factory=dict)

    @property
    def most_presumed(self) -> int:
        """Blocks that may be."""
        return _PRESUMED_BLOCKS if self.capacity is None else self.capacity // 2

    def tick(self, count: int) -> int:
        """The first of so many consecutive birth numbers."""
        if self.clock + count >= _NEVER:
            slots = self.names.live_slots()
            self.names.born[slots[np.argsort(self.names.born[slots])]] = np.arange(1, len(slots) + 1, dtype=np.uint32)
            self.clock = len(slots)
        first = self.clock + 1
        self.clock += count
        return first


@dataclass(slots=True, eq=False)
class _View:
    """What one worker can read: its own tiers, and the stores that it shares."""

    caps: TierCaps
    cleared: frozenset[Tier]  # the tiers that the engine empties when it says that all blocks are cleared
    stores: Mapping[Tier, str]
    on_removed: Callable[[list[int]], None] | None = None
    prompts: Callable[[], Iterable[BlockHashes]] = tuple
    own: dict[Tier, _Holder] = field(default_factory=dict)
    groups: dict[Tier, int | None] = field(default_factory=dict)  # the group of layers that is followed


class CacheIndex:
    """Exact for what it was told; what it could not use is counted in `skipped`, by reason."""

    def __init__(self, hasher: BlockHasher, family: HashFamily) -> None:
        self.family = family
        self.skipped: Counter[str] = Counter()
        self._parked = False  # there may be orphans
        self.adopted = 0  # blocks whose parent came later than they did
        self._hasher = hasher
        self._views: dict[str, _View] = {}
        self._stores: dict[str, _Holder] = {}
        # As secret as the hasher's root: callers choose the tokens that an engine names blocks by.
        self._prime = prime_below((1 << 30) - hasher.root % (1 << 29))
        self._holders = HolderTable(self._prime)
        self._bits: list[bool] = []  # taken or not
        # Bits of holders that are gone are swept from the table piece by piece; then they can be given to others.
        self._swept: list[int] = []
        self._to_sweep: list[int] = []
        self._sweep_at = 0

    # Workers

    def add(
        self,
        worker: str,
        caps: TierCaps | int | None = None,
        *,
        stores: Mapping[Tier, str] | None = None,
        cleared: Iterable[Tier] = (Tier.DEVICE,),
        on_removed: Callable[[list[int]], None] | None = None,
        prompts: Callable[[], Iterable[BlockHashes]] = tuple,
    ) -> None:
        """Starts an empty view; `caps.device` is the engine's own block count.

        `prompts` tells our hashes of the prompts that the worker has in progress, the newest first. `stores` names the
        stores that the worker shares with others, by the tier that it calls them. ValueError if there is such a worker
        already, or if its device is to be shared.
        """
        if worker in self._views:
            raise ValueError(f"worker {worker!r} is already in the index")
        if stores and Tier.DEVICE in stores:
            raise ValueError(f"worker {worker!r}: a device's cache is never shared, only host and storage are")
        caps = caps if isinstance(caps, TierCaps) else TierCaps(caps)
        self._views[worker] = _View(caps, frozenset(cleared), dict(stores or {}), on_removed, prompts)

    def set_capacity(self, worker: str, capacity_blocks: int) -> None:
        """The device holds so many blocks; tiers whose cap nobody told follow it."""
        view = self._views[worker]
        view.caps = TierCaps(capacity_blocks, view.caps.host, view.caps.storage)
        for tier, holder in view.own.items():
            holder.capacity = view.caps.of(tier)
            self._shed(holder)

    def remove(self, worker: str) -> None:
        """Forgets a worker; a store that it shared goes with the last who does."""
        self.clear(worker)
        stores = self._views.pop(worker).stores.values()
        for name in stores:
            if name in self._stores and not any(name in view.stores.values() for view in self._views.values()):
                self._retire(self._stores.pop(name))

    def clear(self, worker: str, tiers: Iterable[Tier] = Tier) -> None:
        """What these tiers of the worker hold is not known any more. A store shared with others stays as it is."""
        view = self._views[worker]
        for tier in tiers:
            holder = view.own.pop(tier, None)
            view.groups.pop(tier, None)
            if holder is not None:
                self._retire(holder)

    def blocks(self, worker: str, tier: Tier = Tier.DEVICE) -> int:
        """Distinct blocks known to be held."""
        holder = self._holder(self._views[worker], tier)
        return holder.held if holder is not None else 0

    def orphans(self, worker: str) -> int:
        """Blocks that wait for their parent to be told."""
        return sum(len(holder.orphan_at) for holder in self._readable(self._views[worker]))

    def knows(self, worker: str, theirs: int) -> bool:
        """Whether it is known what an engine's name for a block stands for, held or not."""
        return self._resolve(self._views[worker], theirs) is not None

    def __len__(self) -> int:
        """Distinct blocks that anybody holds. Looks at all of them: for tests and rare views."""
        table = self._holders
        held = np.zeros(table.slots, np.bool_)
        gone = self._gone()
        for word, column in enumerate(table.columns):
            held |= (column[: table.slots] & np.uint64(~gone[word] & _MASK)) != 0
        return int(held.sum())

    @property
    def bytes(self) -> int:
        """Of all tables. Those that count what is rare are left out."""
        holders = [holder for view in self._views.values() for holder in view.own.values()]
        return self._holders.bytes + sum(holder.names.bytes for holder in (*holders, *self._stores.values()))

    # Events

    def apply(self, worker: str, event: KvEvent, before: int | None = None) -> int | None:
        """Takes in one event; of a run that was stored on a device and has its place, our hash of its first block.

        `before` is our hash of what stands before blocks that are adrift, where somebody knows.
        """
        first: int | None = None
        view = self._views[worker]
        match event:
            case Bundle():
                self.take(worker, event)
                return None
            case Stored():
                first = self._store(view, event, before)
            case Removed():
                self._remove(view, event)
            case Named():
                self._name(view, event)
            case Cleared():
                self.clear(worker, view.cleared)
        self._sweep_for(0 if isinstance(event, Cleared) else len(event.hashes))
        return first

    def take(self, worker: str, bundle: Bundle) -> list[int | None]:
        """Takes in many small events at once; our hash of the first block of each run, where it has its place."""
        view, family = self._views[worker], self.family
        if bundle.group is not None:
            followed = view.groups.setdefault(Tier.DEVICE, bundle.group) == bundle.group
        else:
            followed = True
        held = view.own.get(Tier.DEVICE)
        plain = bundle.block_size == family.block_size and not family.lookahead
        if not followed or not plain or (held is not None and held.has_shed):
            firsts = [(event, self.apply(worker, event)) for event in bundle.events()]
            return [first for event, first in firsts if isinstance(event, Stored)]
        holder = self._holder_for(view, Tier.DEVICE)
        if bundle.removed:
            self._let_go(holder, bundle.removed)
        self._go_on_presuming(holder, len(bundle.hashes))
        chained: list[int | None] = [*self._store_few(view, holder, bundle)]
        chained += [self._store(view, run) for run in bundle.runs(len(chained))]
        self._sweep_for(len(bundle.hashes) + len(bundle.removed))
        return chained

    def _store_few(self, view: _View, holder: _Holder, bundle: Bundle) -> list[int]:
        """Takes in runs up to one that orphans have waited for, or before one whose parent is not known.

        Returns our hash of the first block of each.
        """
        if len(holder.recent) > _RECENT:
            holder.recent.clear()
        awaited = [one.orphans.keys() for one in self._readable(view) if one.orphans] if self._parked else []
        if awaited or len(bundle.lengths) < len(bundle.hashes):
            firsts, ours = self._chain_runs(view, holder, bundle, awaited)
        else:
            firsts = ours = self._chain_singles(view, holder, bundle)
        names = bundle.hashes if len(ours) == len(bundle.hashes) else bundle.hashes[: len(ours)]
        if len(names) < _MANY or not self._hold_many(holder, np.array(names, np.uint64), np.array(ours, np.uint64)):
            self._hold_few(holder, names, ours)
        if self._parked:
            self._adopt(view, names)
        self._shed(holder)
        return firsts

    def _chain_singles(self, view: _View, holder: _Holder, bundle: Bundle) -> list[int]:
        """Our hashes of runs of one block each."""
        recent, hasher = holder.recent, self._hasher
        contents = hasher.contents(bundle.tokens, bundle.block_size).tolist()
        ours: list[int] = []
        for parent, name, content in zip(bundle.parents, bundle.hashes, contents, strict=True):
            before = recent.get(parent)
            if before is None:
                before = hasher.root if parent is None else self._resolve(view, parent, holder)
                if before is None:
                    break
            recent[name] = before = hasher.link_one(before, content)
            ours.append(before)
        return ours

    def _chain_runs(
        self, view: _View, holder: _Holder, bundle: Bundle, awaited: Sequence[Set[int]]
    ) -> tuple[list[int], list[int]]:
        """Our hashes of the first block of each run, and of all."""
        recent, hasher, hashes = holder.recent, self._hasher, bundle.hashes
        contents = hasher.contents(bundle.tokens, bundle.block_size).tolist()
        firsts: list[int] = []
        ours: list[int] = []
        start = 0
        for parent, blocks in zip(bundle.parents, bundle.lengths, strict=True):
            before = hasher.root if parent is None else recent.get(parent)
            if before is None:
                assert parent is not None, "a prompt's first block has the root for a parent"
                before = self._resolve(view, parent, holder)
                if before is None:
                    break
            end = start + blocks
            linked = hasher.link_few(before, contents[start:end])
            recent.update(zip(hashes[start:end], linked, strict=True))
            firsts.append(linked[0])
            ours += linked
            if any(not orphans.isdisjoint(hashes[start:end]) for orphans in awaited):
                break
            start = end
        return firsts, ours

    def _store(self, view: _View, event: Stored, before: int | None = None) -> int | None:
        size = self.family.block_size
        ratio = event.block_size // size
        if event.block_size % size or (ratio != 1 and event.tier is Tier.DEVICE):
            self.skipped["block_size"] += 1
            return None
        if event.lookahead != self.family.lookahead:
            self.skipped["lookahead"] += 1
            return None
        if not self._is_followed(view, event.tier, event.group, new=True):
            return None
        if event.adrift and before is None:
            self.skipped["broken_chain"] += 1
            return None
        holder = self._holder_for(view, event.tier)
        if holder.recent and not holder.recent.keys().isdisjoint(event.hashes):
            holder.recent.clear()
        if event.adrift:
            parent = before
        else:
            parent = self._hasher.root if event.parent is None else self._resolve(view, event.parent, holder)
        digests = self._digests(event, ratio)
        self._go_on_presuming(holder, len(event.hashes))
        if event.tier is Tier.DEVICE and self._is_missed(holder, event.parent, parent):
            parent = self._presume(view, holder, event, digests) or parent
        if parent is not None and len(event.hashes) < _MANY and ratio == 1:
            if len(event.hashes) < _SEVERAL:
                chained = self._hasher.chain_few(parent, event.tokens, size, digests, event.ahead)
            else:
                extras = None if digests is None else np.array(digests, np.uint64)
                chained = self._hasher.chain(parent, event.tokens, size, extras, event.ahead).tolist()
            self._hold_few(holder, event.hashes, chained)
            first = chained[0] if chained else None
        else:
            extras = None if digests is None else np.array(digests, np.uint64)
            contents = self._hasher.contents(event.tokens, size, extras, event.ahead)
            if parent is None:
                assert event.parent is not None, "a prompt's first block has the root for a parent"
                self._park(holder, _Orphans(event.parent, event.hashes, contents, ratio))
                return None
            linked = self._hasher.link(parent, contents)
            self._hold(holder, event.hashes, linked, ratio)
            first = int(linked[0])
        self._adopt(view, event.hashes)
        if event.parent is not None and event.parent in holder.presumed:
            holder.presumed[event.parent] = holder.presumed.pop(event.parent)  # used last
            self._adopt(view, [event.parent])
        self._shed(holder)
        return first if event.tier is Tier.DEVICE else None

    def _digests(self, event: Stored, ratio: int) -> list[int] | None:
        if event.lora_name is None and event.extra_keys is None:
            return None
        keys = event.extra_keys or ((),) * len(event.hashes)
        if ratio == 1:
            return [self._hasher.extra_digest(event.lora_name, entry) for entry in keys]
        # Of a chunk's keys only those of its first block have a place: a salt is in the first of all.
        digests = [self._hasher.extra_digest(event.lora_name, ())] * (ratio * len(event.hashes))
        for at, entry in enumerate(keys):
            digests[at * ratio] = self._hasher.extra_digest(event.lora_name, entry)
        return digests

    def _name(self, view: _View, event: Named) -> None:
        if not self._is_followed(view, event.tier, event.group, new=True):
            return
        holder = self._holder_for(view, event.tier)
        for theirs in event.hashes:
            ours = self._resolve(view, theirs, holder)
            if ours is None:
                self.skipped["unknown_name"] += 1
            else:
                self._hold_one(holder, theirs, ours)
        self._shed(holder)

    def _remove(self, view: _View, event: Removed) -> None:
        # Counted by blocks, as unknown ones are: how removals were put together on the way says nothing.
        if not self._is_followed(view, event.tier, event.group, new=False, skips=len(event.hashes)):
            return
        holder = self._holder(view, event.tier)
        if holder is None:
            self.skipped["unknown_removal"] += len(event.hashes)
            return
        self._let_go(holder, event.hashes)

    def _is_followed(self, view: _View, tier: Tier, group: int | None, *, new: bool, skips: int = 1) -> bool:
        """Of several groups of layers that attend to everything the first is followed: they go together.

        A removal does not tell its group's kind: one of a group that was never taken in is not ours.
        """
        if group is None:
            return True
        if new:
            followed = view.groups.setdefault(tier, group)
        elif tier in view.groups:
            followed = view.groups[tier]
        else:
            followed = None
        if followed == group:
            return True
        self.skipped["other_group"] += skips
        return False

    # Holding and letting go

    def _hold(self, holder: _Holder, hashes: Sequence[int], ours: BlockHashes, ratio: int) -> None:
        names = np.array(hashes, np.uint64)
        if ratio > 1:
            holder.ratios.add(ratio)
            names = _part_names(names, ratio).reshape(-1)
        if len(names) < _MANY or not self._hold_many(holder, names, ours):
            self._hold_few(holder, names.tolist(), ours.tolist())

    def _hold_many(self, holder: _Holder, names: Keys, ours: BlockHashes) -> bool:
        """All at once, if they are all new and distinct; else False, and nothing has changed."""
        table, word, mask = holder.names, holder.bit >> 6, np.uint64(1 << (holder.bit & 63))
        if len(np.unique(names)) < len(names) or len(np.unique(ours)) < len(ours):
            return False
        slots = table.find(names)
        known = slots >= 0
        if known.any():
            old = slots[known]
            if table.born[old].any():
                return False
            # Names that were let go of: their slots are taken again, since a name must not stand in two places.
            absent = ~known
        else:
            old, absent = slots[:0], None
        found = self._holders.find(ours)
        present = found >= 0
        column = self._holders.columns[word]
        if present.any():
            there = found[present]
            if (column[there] & mask).any():
                return False
            column[there] |= mask
            missing = ours[~present]
        else:
            missing = ours
        if len(missing):
            values = [mask if at == word else np.uint64(0) for at in range(len(self._holders.columns))]
            self._holders.insert(missing, *values)
        first = holder.tick(len(names))
        born = np.arange(first, first + len(names), dtype=np.uint32)
        if absent is None:
            table.insert(names, ours, born)
        else:
            table.ours[old] = ours[known]
            table.born[old] = born[known]
            if absent.any():
                table.insert(names[absent], ours[absent], born[absent])
        holder.held += len(names)
        return True

    def _hold_few(self, holder: _Holder, names: Sequence[int], ours: Sequence[int]) -> None:
        """What `_hold_one` does, for each of them."""
        known = holder.names.enter_few(names, ours, holder.tick(len(names)))
        if known:
            places = set(known)
            new: Sequence[int] = [our for place, our in enumerate(ours) if place not in places]
        else:
            new = ours
        holder.held += len(new)
        for our in self._holders.mark_few(new, holder.bit >> 6, 1 << (holder.bit & 63)):
            holder.more_names[our] = holder.more_names.get(our, 0) + 1
        for place in known:
            self._hold_one(holder, names[place], ours[place])

    def _hold_one(self, holder: _Holder, theirs: int, ours: int) -> None:
        table = holder.names
        at = table.find_one(theirs)
        if at >= 0 and table.views[1][at]:
            known = table.views[0][at]
            if not holder.shared:
                holder.more_copies[theirs] = holder.more_copies.get(theirs, 0) + 1
            if known == ours:
                return
            # The same engine hash for other content: believe the newer word.
            self._release_one(holder, known)
            table.views[0][at] = ours
        else:
            born = holder.tick(1)
            if at < 0:
                at = table.insert_one(theirs)
            table.views[0][at] = ours
            table.views[1][at] = born
            holder.held += 1
        holders, word, mask = self._holders, holder.bit >> 6, 1 << (holder.bit & 63)
        at = holders.find_one(ours)
        if at < 0:
            at = holders.insert_one(ours)
            for view in holders.views:
                view[at] = 0
            holders.views[word][at] = mask
        elif holders.views[word][at] & mask:
            holder.more_names[ours] = holder.more_names.get(ours, 0) + 1
        else:
            holders.views[word][at] |= mask

    def _let_go(self, holder: _Holder, hashes: Sequence[int]) -> None:
        for ratio in holder.ratios:
            # Which of the names are chunks, and of how many blocks, shows in what is held under their parts' names.
            parts = _part_names(np.array(hashes, np.uint64), ratio)[:, :-1].reshape(-1)
            slots = holder.names.find(parts)
            held = slots >= 0
            held[held] = holder.names.born[slots[held]] != 0
            for part in parts[held].tolist():
                self._remove_one(holder, part)
        if holder.more_copies and not holder.more_copies.keys().isdisjoint(hashes):
            for theirs in hashes:
                self._remove_one(holder, theirs)
        elif len(hashes) < _MANY or not self._remove_many(holder, hashes):
            self._remove_few(holder, hashes)
        if holder.presumed:
            for theirs in holder.presumed.keys() & set(hashes):
                if not self._are_live(holder, np.array([theirs], np.uint64)).any():
                    self._unpresume(holder, theirs)

    def _remove_few(self, holder: _Holder, hashes: Sequence[int]) -> None:
        """What `_remove_one` does, for each of them; none has a second copy."""
        ours, unheld = holder.names.let_go_of_few(hashes)
        for theirs in unheld:
            self._remove_unheld(holder, theirs)
        holder.held -= len(ours)
        if holder.on_removed is not None:
            holder.on_removed(ours)
        self._release_few(holder, ours)

    def _remove_many(self, holder: _Holder, hashes: Sequence[int]) -> bool:
        """All at once, if they are distinct; else False, and nothing has changed. None has a second copy."""
        names = np.array(hashes, np.uint64)
        if len(np.unique(names)) < len(names):
            return False
        slots = holder.names.find(names)
        live = slots >= 0
        live[live] = holder.names.born[slots[live]] != 0
        if not live.all():
            for theirs in names[~live].tolist():
                self._remove_unheld(holder, theirs)
        if holder.on_removed is not None:
            holder.on_removed(holder.names.ours[slots[live]].tolist())
        self._drop(holder, slots[live])
        return True

    def _remove_one(self, holder: _Holder, theirs: int) -> None:
        if holder.more_copies:
            copies = holder.more_copies.pop(theirs, 0)
            if copies > 1:
                holder.more_copies[theirs] = copies - 1
            if copies:
                return
        at = holder.names.find_one(theirs)
        if at < 0 or not holder.names.views[1][at]:
            self._remove_unheld(holder, theirs)
            return
        holder.names.views[1][at] = 0
        holder.held -= 1
        self._release_one(holder, holder.names.views[0][at])

    def _remove_unheld(self, holder: _Holder, theirs: int) -> None:
        runs = holder.orphan_at.get(theirs)
        if runs is not None:
            runs[-1].gone.add(theirs)
            self._forget_orphan(holder, runs[-1], theirs)
        elif not holder.shared:  # a shared store's removal is told by everybody who reads it
            self.skipped["unknown_removal"] += 1

    def _drop(self, holder: _Holder, slots: Slots) -> None:
        """Lets go of names by their slots, which are live and distinct."""
        if not len(slots):
            return
        ours = holder.names.ours[slots]
        holder.names.born[slots] = 0
        holder.held -= len(slots)
        if holder.more_names or len(slots) < _MANY:
            self._release_few(holder, ours.tolist())
            return
        word, mask = holder.bit >> 6, np.uint64(~(1 << (holder.bit & 63)) & _MASK)
        self._holders.columns[word][self._holders.find(ours)] &= mask

    def _release_few(self, holder: _Holder, ours: Sequence[int]) -> None:
        if holder.more_names:
            for one in ours:
                self._release_one(holder, one)
            return
        self._holders.unmark_few(ours, holder.bit >> 6, 1 << (holder.bit & 63))

    def _release_one(self, holder: _Holder, ours: int) -> None:
        if holder.more_names:
            names = holder.more_names.pop(ours, 0)
            if names > 1:
                holder.more_names[ours] = names - 1
            if names:
                return
        view = self._holders.views[holder.bit >> 6]
        view[self._holders.find_one(ours)] &= ~(1 << (holder.bit & 63)) & _MASK

    def _shed(self, holder: _Holder) -> None:
        """Drops the longest-known blocks beyond a cap: removals were lost, or are never told."""
        if holder.capacity is None or holder.held <= holder.capacity:
            return
        self._presume_at_most(holder, holder.most_presumed)  # the capacity may be another one
        if holder.held <= holder.capacity:
            return
        # Some more than need be, or a full store that tells no removals would be searched at every event.
        count = min(holder.held, holder.held - holder.capacity + holder.capacity // 32)
        slots = holder.names.live_slots()
        holder.has_shed = True
        if holder.presumed:
            spared = np.zeros(holder.names.slots + 1, np.bool_)  # the last one is for names without a slot
            spared[self._presumed_slots(holder)] = True
            slots = slots[~spared[slots]]
        if count < len(slots):
            slots = slots[np.argpartition(holder.names.born[slots], count)[:count]]
        if holder.more_copies:
            for theirs in holder.names.keys_at(slots):
                holder.more_copies.pop(theirs, None)
        self._drop(holder, slots)
        self.skipped["over_capacity"] += len(slots)

    # Blocks that were never told of

    def _is_missed(self, holder: _Holder, theirs: int | None, ours: int | None) -> bool:
        """Whether a block that somebody goes on from, and so the engine holds, is not held here."""
        if theirs is None or (ours is not None and not holder.has_shed):
            return False
        return ours is None or not self._are_live(holder, np.array([theirs], np.uint64)).any()

    def _presume(self, view: _View, holder: _Holder, event: Stored, digests: Sequence[int] | None) -> int | None:
        """Our hash of the parent of blocks, if they stand behind it in the prompt of somebody who is in progress.

        Events that told of it were lost, or it was taken to be gone, and as long as it is in use it is not told of
        again. But who goes on from it has found it, and all before it, cached. They are held from now on until the
        engine lets go of it: what is before a block is evicted after it.
        """
        holder.debt = max(0, holder.debt - 1)
        if holder.debt > _GREATEST_DEBT - _IN_VAIN:
            return None
        theirs = event.parent
        extras = None if digests is None else np.array(digests, np.uint64)
        contents = self._hasher.contents(event.tokens, self.family.block_size, extras, event.ahead)
        prompts = _blocks_at_most(view.prompts(), _PROMPT_BLOCKS_LOOKED_AT)
        before = self._hasher.place(contents, prompts)
        if before is None or theirs is None:
            holder.debt += _IN_VAIN
            return None
        holder.debt += min(_IN_VAIN, 1 + sum(map(len, prompts)) // _LOOKED_AT_FOR_ONE)
        if theirs in holder.presumed:
            self._unpresume(holder, theirs)
        shown = _Presumed(before[:-1][: holder.most_presumed].copy())
        holder.presumed_blocks += len(shown.blocks) - self._shared(holder, shown)
        holder.presumed[theirs] = shown
        self._presume_at_most(holder, holder.most_presumed)
        holder.to_presume.append(shown)
        self._go_on_presuming(holder, 0)
        self._hold_one(holder, theirs, int(before[-1]))
        self.adopted += len(before)
        return int(before[-1])

    def _go_on_presuming(self, holder: _Holder, told: int) -> None:
        """Holds what is presumed and not held yet, the beginnings first: some now, some when more is told."""
        holder.may_presume = min(_PRESUMED_AT_ONCE, holder.may_presume + _PRESUMED_PER_BLOCK * told)
        while holder.to_presume and holder.may_presume:
            shown = holder.to_presume[0]
            piece = shown.blocks[shown.done : shown.done + holder.may_presume]
            self._hold_presumed(holder, piece)
            shown.done += len(piece)
            holder.may_presume -= len(piece)
            if shown.done == len(shown.blocks):
                holder.to_presume.pop(0)

    def _hold_presumed(self, holder: _Holder, ours: BlockHashes) -> None:
        """Holds blocks whose names are not known under names of ours: those that nobody has told of."""
        found = self._holders.find(ours)
        absent = found < 0
        there = found[~absent]
        bits = self._holders.columns[holder.bit >> 6][there] & np.uint64(1 << (holder.bit & 63))
        absent[~absent] = bits == 0
        new = ours[absent]
        if len(new):
            self._hold(holder, self._names_of_ours(new).tolist(), new, 1)

    def _names_of_ours(self, ours: BlockHashes) -> Keys:
        return ours ^ np.uint64(self._prime)

    def _presume_at_most(self, holder: _Holder, blocks: int) -> None:
        """Gives up what was presumed for the parents from which nobody has gone on for longest."""
        remembered = sum(len(shown.blocks) for shown in holder.presumed.values())
        while (
            len(holder.presumed) > _PRESUMED_PARENTS
            or holder.presumed_blocks > blocks
            or remembered > _REMEMBERED * blocks
        ):
            remembered -= self._unpresume(holder, next(iter(holder.presumed)))

    def _unpresume(self, holder: _Holder, theirs: int) -> int:
        """Lets go of what nobody else shows; how many blocks were remembered."""
        shown = holder.presumed.pop(theirs)
        if shown in holder.to_presume:
            holder.to_presume.remove(shown)
        alone = shown.blocks[self._shared(holder, shown) :]
        holder.presumed_blocks -= len(alone)
        names = self._names_of_ours(alone)
        self._drop(holder, holder.names.find(names[self._are_live(holder, names)]))
        return len(shown.blocks)

    @staticmethod
    def _shared(holder: _Holder, shown: _Presumed) -> int:
        """Of its leading blocks those that another parent shows too."""
        others = (other.blocks for other in holder.presumed.values() if other is not shown)
        return max((common_blocks(shown.blocks, other) for other in others), default=0)

    def _presumed_slots(self, holder: _Holder) -> Slots:
        """Of parents that show what is before them, and of that; -1 for some."""
        before = [self._names_of_ours(shown.blocks[: shown.done]) for shown in holder.presumed.values()]
        return holder.names.find(np.concatenate([np.array(list(holder.presumed), np.uint64), *before]))

    @staticmethod
    def _are_live(holder: _Holder, names: Keys) -> npt.NDArray[np.bool_]:
        slots = holder.names.find(names)
        live: npt.NDArray[np.bool_] = slots >= 0
        live[live] = holder.names.born[slots[live]] != 0
        return live

    # Orphans

    def _park(self, holder: _Holder, run: _Orphans) -> None:
        self.skipped["unknown_parent"] += 1
        self._parked = True
        if len(run.hashes) > _PARKED_AT_MOST:
            self.skipped["orphans_dropped"] += len(run.hashes)
            return
        for theirs in run.hashes:
            alike = holder.orphan_at.setdefault(theirs, [])
            if not alike or alike[-1] is not run:
                alike.append(run)
        holder.orphans.setdefault(run.parent, []).append(run)
        holder.parked += len(run.hashes)
        for theirs in run.hashes:
            if len(holder.orphan_at.get(theirs, ())) > _PARKED_ALIKE:
                self._drop_orphans(holder, holder.orphan_at[theirs][0])
        while holder.parked > _PARKED_AT_MOST:
            self._drop_orphans(holder, next(iter(holder.orphans.values()))[0])

    def _drop_orphans(self, holder: _Holder, run: _Orphans) -> None:
        beside = holder.orphans[run.parent]
        beside.remove(run)
        if not beside:
            del holder.orphans[run.parent]
        self.skipped["orphans_dropped"] += self._unpark(holder, run)

    def _unpark(self, holder: _Holder, run: _Orphans) -> int:
        """How many of its blocks were waiting until now."""
        holder.parked -= len(run.hashes)
        left = set(run.hashes) - run.gone
        for theirs in left:
            self._forget_orphan(holder, run, theirs)
        return len(left)

    @staticmethod
    def _forget_orphan(holder: _Holder, run: _Orphans, theirs: int) -> None:
        alike = holder.orphan_at[theirs]
        alike.remove(run)
        if not alike:
            del holder.orphan_at[theirs]

    def _adopt(self, view: _View, hashes: Sequence[int]) -> None:
        """Blocks that waited for one of these get their place, and so may others behind them."""
        waiting = [holder for holder in self._readable(view) if holder.orphans] if self._parked else []
        if not waiting:
            return
        ready: list[Sequence[int]] = [hashes]
        gone: list[tuple[_Holder, list[int]]] = []
        while ready:
            told = ready.pop()
            for holder in waiting:
                if holder.orphans.keys().isdisjoint(told):
                    continue
                for theirs in told:
                    for run in holder.orphans.pop(theirs, ()):
                        parent = self._resolve(view, theirs, holder)
                        assert parent is not None, "its store was just taken in"
                        self._place_orphans(holder, run, parent)
                        ready.append(run.hashes)
                        if run.gone:
                            gone.append((holder, list(run.gone)))
        # Held until here, for what they tell of the blocks behind them: who is let go of may lose its place at once.
        for holder, names in gone:
            self._let_go(holder, names)
        for holder in waiting:
            self._shed(holder)

    def _place_orphans(self, holder: _Holder, run: _Orphans, parent: int) -> None:
        self.adopted += self._unpark(holder, run)
        holder.recent.clear()
        chained = self._hasher.link(parent, run.contents)
        self._hold(holder, run.hashes, chained, run.ratio)

    # Names and bits

    def _resolve(self, view: _View, theirs: int, first: _Holder | None = None) -> int | None:
        """Our hash for what an engine calls a block, in whichever tier it was told of."""
        if first is not None:
            at = first.names.find_one(theirs)
            if at >= 0:
                return int(first.names.views[0][at])
        for holder in self._readable(view):
            at = holder.names.find_one(theirs)
            if at >= 0:
                return int(holder.names.views[0][at])
        return None

    def _readable(self, view: _View) -> Iterator[_Holder]:
        yield from view.own.values()
        for name in view.stores.values():
            if name in self._stores:
                yield self._stores[name]

    def _holder(self, view: _View, tier: Tier) -> _Holder | None:
        return self._stores.get(view.stores[tier]) if tier in view.stores else view.own.get(tier)

    def _holder_for(self, view: _View, tier: Tier) -> _Holder:
        holder = self._holder(view, tier)
        if holder is None:
            names = NameTable(self._prime)
            holder = _Holder(self._take_bit(), view.caps.of(tier), names, shared=tier in view.stores)
            if tier is Tier.DEVICE:
                holder.on_removed = view.on_removed
            if holder.shared:
                self._stores[view.stores[tier]] = holder
            else:
                view.own[tier] = holder
        return holder

    def _take_bit(self) -> int:
        if (self._swept or self._to_sweep) and self._holders.slots <= _SWEPT_AT_ONCE:
            self._sweep(self._holders.slots)
            self._sweep(self._holders.slots)
        gone = self._gone()
        for bit, taken in enumerate(self._bits):
            if not taken and not gone[bit >> 6] >> (bit & 63) & 1:
                self._bits[bit] = True
                return bit
        self._bits.append(True)
        bit = len(self._bits) - 1
        if bit >> 6 >= len(self._holders.columns):
            self._holders.add_column(np.uint64)
        return bit

    def _retire(self, holder: _Holder) -> None:
        """Its bit means nothing from now on, and is swept from the table as events come."""
        self._bits[holder.bit] = False
        words = len(self._holders.columns)
        self._to_sweep += [0] * (words - len(self._to_sweep))
        self._to_sweep[holder.bit >> 6] |= 1 << (holder.bit & 63)

    def _gone(self) -> list[int]:
        words = len(self._holders.columns)
        both = [[*masks, *[0] * (words - len(masks))] for masks in (self._swept, self._to_sweep)]
        return [swept | later for swept, later in zip(*both, strict=True)]

    def _sweep_for(self, blocks: int) -> None:
        if self._swept or self._to_sweep:
            self._sweep(_SWEPT_PER_EVENT + _SWEPT_PER_BLOCK * blocks)

    def _sweep(self, slots: int) -> None:
        table = self._holders
        if not self._swept:
            if not self._to_sweep:
                return
            self._swept, self._to_sweep, self._sweep_at = self._to_sweep, [], 0
        rows = slice(self._sweep_at, min(table.slots, self._sweep_at + slots))
        for word, mask in enumerate(self._swept):
            if mask:
                table.columns[word][rows] &= np.uint64(~mask & _MASK)
        self._sweep_at = rows.stop
        if self._sweep_at >= table.slots:
            self._swept = []

    # Matching

    def runs(self, hashes: Sequence[int] | BlockHashes) -> Mapping[str, int]:
        """For each worker the number of leading blocks of a prompt that its device holds without a hole."""
        return {worker: run.device for worker, run in self.match(hashes).items()}

    def match(self, hashes: Sequence[int] | BlockHashes) -> dict[str, TieredRun]:
        """For each worker the leading blocks of a prompt that it can reuse without a hole.

        First the run on its device; from there on blocks of its other tiers and of stores that it reads.
        """
        if not self._bits:
            return dict.fromkeys(self._views, TieredRun(0))  # nobody has ever held anything
        lookup = _Lookup(self._holders, np.asarray(hashes, np.uint64))
        ends = self._device_ends(lookup)
        runs = {}
        for worker, view in self._views.items():
            device = ends.get(worker, 0)
            if lookup.length > device and (view.stores or len(view.own) > 1 or Tier.DEVICE not in view.own):
                runs[worker] = self._behind(view, device, lookup)
            else:
                runs[worker] = TieredRun(device)
        return runs

    def _device_ends(self, lookup: _Lookup) -> dict[str, int]:
        owners = {view.own[Tier.DEVICE].bit: name for name, view in self._views.items() if Tier.DEVICE in view.own}
        alive = [0] * len(self._holders.columns)
        for bit in owners:
            alive[bit >> 6] |= 1 << (bit & 63)
        ends: dict[str, int] = {}
        piece = 0
        while any(alive) and lookup.has(piece):
            first, words = lookup.pieces[piece]
            for word, masks in enumerate(words):
                if not alive[word]:
                    continue
                held = np.bitwise_and.accumulate(masks)
                held &= np.uint64(alive[word])
                left = int(held[-1])
                if left == alive[word]:
                    continue
                before = alive[word]
                for at in (0, *((held[1:] != held[:-1]).nonzero()[0] + 1).tolist()):
                    now = int(held[at])
                    for bit in _bits(before & ~now):
                        ends[owners[word << 6 | bit]] = first + at
                    before = now
                alive[word] = left
            piece += 1
        for word, mask in enumerate(alive):
            for bit in _bits(mask):
                ends[owners[word << 6 | bit]] = lookup.length
        return ends

    def _behind(self, view: _View, device: int, lookup: _Lookup) -> TieredRun:
        """Goes on from the end of the device's run in the lower tiers."""
        bits = {tier: holder.bit for tier in _LOWER if (holder := self._holder(view, tier)) is not None}
        if not bits:
            return TieredRun(device)
        in_host: list[npt.NDArray[np.uint64]] = []
        end = piece = 0
        while lookup.has(piece):
            first, words = lookup.pieces[piece]
            piece += 1
            length = len(words[0])
            if first + length <= device:
                continue
            start = max(0, device - first)
            held = {tier: (words[bit >> 6][start:] >> np.uint64(bit & 63)) & np.uint64(1) for tier, bit in bits.items()}
            holes = (np.bitwise_or.reduce(list(held.values())) == 0).nonzero()[0]
            end = first + start + (int(holes[0]) if len(holes) else length - start)
            in_host.append(held.get(Tier.HOST, np.zeros(0, np.uint64)))
            if len(holes):
                break
        for tier in bits:
            holder = self._holder(view, tier)
            assert holder is not None
            for ratio in holder.ratios:
                # A chunk is loaded whole or not at all, and a prompt may end in the middle of one.
                end -= end % ratio
        if end <= device:
            return TieredRun(device)
        host = int(np.concatenate(in_host)[: end - device].sum())
        return TieredRun(device, host, end - device - host)


class _Lookup:
    """Who holds the blocks of one prompt, looked up piece by piece and only as far as somebody wants to know."""

    def __init__(self, table: HolderTable, hashes: BlockHashes) -> None:
        self.length = len(hashes)
        self.pieces: list[tuple[int, list[npt.NDArray[np.uint64]]]] = []  # first block, masks a word
        self._table = table
        self._hashes = hashes
        self._done = 0
        self._next = _FIRST_PIECE

    def has(self, piece: int) -> bool:
        if piece == len(self.pieces) and self._done < self.length:
            part = self._hashes[self._done : self._done + self._next]
            slots = self._table.find(part)
            absent = slots < 0
            words = []
            for column in self._table.columns:
                masks = column[slots]
                masks[absent] = 0
                words.append(masks)
            self.pieces.append((self._done, words))
            self._done += len(part)
            self._next *= _PIECE_GROWTH
        return piece < len(self.pieces)


def _part_names(names: Keys, ratio: int) -> Keys:
    """Names for each of the blocks that a chunk is made of, one row a chunk; the last has the chunk's own."""
    parts = names[:, None] ^ (np.arange(ratio, 0, -1, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F))
    parts *= np.uint64(0x9FB21C651E98DF25)
    parts[:, -1] = names
    return parts


def _blocks_at_most(prompts: Iterable[BlockHashes], blocks: int) -> list[BlockHashes]:
    """The first prompts that have no more blocks together."""
    few = []
    for prompt in prompts:
        blocks -= len(prompt)
        if blocks < 0:
            break
        few.append(prompt)
    return few


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
