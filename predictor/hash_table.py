"""64-bit keys with values in numpy columns: a few dozen bytes an entry, thousands of entries in one call.

Open addressing inside segments of a fixed number of slots; a directory finds a key's segment by its top bits, and a
segment that fills up is split in two (extendible hashing). So no insertion ever moves more than a segment's entries,
however large the table, and columns stay where they are: nothing here stalls an event loop. Vectorised calls serve long
runs of keys, scalar ones single keys: numpy's calls cost more than a handful of keys is worth.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from predictor.column import Column, longer, zeros

Keys = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.int64]  # positions in the columns; -1 where a key is absent
Flags = npt.NDArray[np.bool_]

_SEGMENT_BITS = 11
_SEGMENT = 1 << _SEGMENT_BITS
_OFFSETS = _SEGMENT - 1
# Slots of a segment that may have been used before it is split or cleaned up. Probes get long beyond.
_FULL = int(_SEGMENT * 0.7)
# A full segment with fewer live entries than this is cleaned of dead ones instead of split.
_SPARSE = int(_SEGMENT * 0.5)
_FEW = 12  # keys that are dealt with one by one, when the others of a call are done
_ROOM = 1 << 28  # slots that a table has addresses for: some hundred million entries
# Without them columns grow by so small a part: what is new is zeroed, even where the rest is not copied.
_GROWTH = 32

_MASK = (1 << 64) - 1
_STAND_IN = 0xD1B54A32D192ED03  # key 0 marks a slot that was never used
# A key counts by its rest of a prime below 2^30, since Python is slow with more bits. The rest's low bits say where in
# its segment a key belongs, the top bits of a multiple of it to which.
_SPOT_BITS = 30
_SPREAD, _SPOTS = 0x1E3779B1, (1 << _SPOT_BITS) - 1
_PRIME = (1 << _SPOT_BITS) - 35
_DEEPEST = 22  # bits of a directory: enough for all keys that memory holds
# Arrays without a dimension: numpy makes one of every scalar that it is given.
_U_SPREAD, _U_SPOTS, _U_OFFSETS = (np.array(number, np.uint64) for number in (_SPREAD, _SPOTS, _OFFSETS))


class HashTable:
    """Base of tables whose subclass says which of its columns make an entry live.

    A slot is *live*, *dead* (its key can still be found, its place may be taken) or was never used. Slots are valid
    until the next insertion. `prime`, between 2^29 and 2^30, is what keys are spread by: one that nobody knows, where
    somebody could choose them.
    """

    def __init__(self, dtypes: tuple[type[np.generic], ...], prime: int) -> None:
        self._prime, self._u_prime = prime, np.array(prime, np.uint64)
        # Longer than the table, and not all alike: only what belongs to a segment is looked at.
        self.keys: Keys = zeros(np.uint64, _SEGMENT, _ROOM)
        self.columns = [zeros(dtype, _SEGMENT, _ROOM) for dtype in dtypes]
        self._segments = 1
        self._used = np.zeros(1, np.int64)  # slots of each segment that were used since it was last put in order
        # The keys of a segment share so many top bits, and these are they.
        self._depths: list[int] = [0]
        self._prefixes: list[int] = [0]
        self._depth = 0
        self._directory: Slots = np.zeros(1, np.int64)  # top bits -> a segment's first slot
        self._open_views()

    # For subclasses

    def _live(self, at: Slots | slice) -> Flags:
        raise NotImplementedError

    def _live_one(self, at: int) -> bool:
        raise NotImplementedError

    # Looking up

    def find(self, keys: Keys) -> Slots:
        """The slot of each key, live or dead; -1 where there is none."""
        keys = _without_zero(keys)
        at = self._homes(keys)
        missed = np.flatnonzero(self.keys[at] != keys)
        if missed.size:
            at[missed] = self._probe(keys[missed], at[missed])
        return at

    def _probe(self, keys: Keys, homes: Slots) -> Slots:
        """Where the search of keys that are not in their first slot ends."""
        result = np.full(len(keys), -1, np.int64)
        rest = (self.keys[homes] != 0).nonzero()[0]
        offset = homes & _OFFSETS
        base = homes - offset
        step = 0
        while len(rest) > _FEW:
            step += 1
            at = base[rest] + ((offset[rest] + (step * (step + 1) >> 1)) & _OFFSETS)
            found = self.keys[at]
            hit = found == keys[rest]
            result[rest[hit]] = at[hit]
            rest = rest[(found != 0) & ~hit]
        if len(rest):
            result[rest] = [self.find_one(key) for key in keys[rest].tolist()]
        return result

    def find_one(self, key: int) -> int:
        key = key or _STAND_IN
        table, at, step = self._key_view, self._home(key), 0
        while (found := table[at]) != key and found:
            step += 1
            at = _next(at, step)
        return at if found else -1

    # Of a hundred keys or less each is looked for in Python, in one loop for all: with a call of `find_one` for each,
    # events of single blocks took a tenth longer. Where keys are entered on the way (`enter_few`, `mark_few`) the
    # search is written out once more for the same reason, since the next must find what was entered before it.

    def _find_few(self, keys: Sequence[int]) -> list[int]:
        """The slot of each, as `find`."""
        table, directory = self._key_view, self._directory_view
        prime, shift = self._prime, _SPOT_BITS - self._depth
        slots: list[int] = []
        for key in keys:
            key = key or _STAND_IN
            spot = key % prime
            base = directory[(spot * _SPREAD & _SPOTS) >> shift]
            at, step = base + (spot & _OFFSETS), 0
            while (found := table[at]) != key and found:
                step += 1
                at = base + ((at + step) & _OFFSETS)
            slots.append(at if found else -1)
        return slots

    # Inserting

    def insert(self, keys: Keys, *values: npt.ArrayLike) -> None:
        """Enters keys that are absent and distinct, with a value (or an array of them) a column.

        A value must make its entry live.
        """
        keys = _without_zero(keys)
        homes = self._make_room(keys)
        self._place(keys, homes, [np.broadcast_to(np.asarray(value), keys.shape) for value in values])

    def insert_one(self, key: int) -> int:
        """Takes a slot for an absent key; the caller fills its columns."""
        key = key or _STAND_IN
        while self._used_view[(home := self._home(key)) >> _SEGMENT_BITS] >= _FULL:
            self._relieve(home >> _SEGMENT_BITS)
        at = self._open_slot(home)
        self._key_view[at] = key
        return at

    def _open_slot(self, home: int) -> int:
        """The first slot on a key's way that is not live."""
        table, at, step = self._key_view, home, 0
        while table[at] and self._live_one(at):
            step += 1
            at = _next(at, step)
        if not table[at]:
            self._used_view[at >> _SEGMENT_BITS] += 1
        return at

    def keys_at(self, slots: Slots) -> list[int]:
        """The keys in these slots, as they were entered."""
        return [0 if key == _STAND_IN else key for key in self.keys[slots].tolist()]

    def live_slots(self) -> Slots:
        return np.flatnonzero(self._live(slice(0, self._segments << _SEGMENT_BITS)))

    @property
    def slots(self) -> int:
        return self._segments << _SEGMENT_BITS

    @property
    def bytes(self) -> int:
        slot = self.keys.itemsize + sum(column.itemsize for column in self.columns)
        return self.slots * slot + self._directory.nbytes

    def add_column(self, dtype: type[np.generic]) -> None:
        self._close_views()
        self.columns.append(zeros(dtype, len(self.keys), _ROOM))
        self._open_views()

    # Inside

    def _home(self, key: int) -> int:
        """Where the search for a key begins."""
        spot = key % self._prime
        return self._directory_view[(spot * _SPREAD & _SPOTS) >> (_SPOT_BITS - self._depth)] + (spot & _OFFSETS)

    def _homes(self, keys: Keys) -> Slots:
        spots = keys % self._u_prime
        offset = (spots & _U_OFFSETS).view(np.int64)
        spots *= _U_SPREAD
        spots &= _U_SPOTS
        spots >>= np.uint64(_SPOT_BITS - self._depth)
        offset += self._directory[spots.view(np.int64)]
        return offset

    def _make_room(self, keys: Keys) -> Slots:
        """Sees to it that these keys can be entered; where the search for each begins."""
        while True:
            homes = self._homes(keys)
            incoming = np.bincount(homes >> _SEGMENT_BITS, minlength=len(self._used))
            incoming[incoming > 0] += self._used[incoming > 0]
            over = (incoming > _FULL).nonzero()[0]
            if not len(over):
                return homes
            for segment in over.tolist():
                self._relieve(segment, int(incoming[segment] - self._used[segment]))

    def _make_room_for_one(self, key: int) -> None:
        self._relieve(self._home(key or _STAND_IN) >> _SEGMENT_BITS)

    def _relieve(self, segment: int, incoming: int = 1) -> None:
        """Cleans a full segment of its dead entries, and splits it if that is not enough."""
        first = segment << _SEGMENT_BITS
        whole = slice(first, first + _SEGMENT)
        live = first + np.flatnonzero(self._live(whole))
        keys = self.keys[live]
        values = [column[live] for column in self.columns]
        split = len(live) + incoming > _SPARSE
        if split:
            self._split(segment)
            first = segment << _SEGMENT_BITS
            whole = slice(first, first + _SEGMENT)
        self.keys[whole] = 0
        for column in self.columns:
            column[whole] = 0
        slots = self._spread(keys)
        for column, value in zip(self.columns, values, strict=True):
            column[slots] = value
        here = int(np.count_nonzero(slots >> _SEGMENT_BITS == segment))
        self._used[segment] = here
        if split:
            self._used[self._segments - 1] = len(keys) - here

    def _spread(self, keys: Keys) -> Slots:
        """Enters distinct keys into segments that are empty."""
        table = self.keys
        slots = self._homes(keys)
        offset = slots & _OFFSETS
        base = slots - offset
        table[slots] = keys
        rest = np.flatnonzero(table[slots] != keys)  # of several that want a slot the last to write has it
        step = 0
        while len(rest):
            step += 1
            at = base[rest] + ((offset[rest] + (step * (step + 1) >> 1)) & _OFFSETS)
            wanted = keys[rest]
            free = np.flatnonzero(table[at] == 0)
            table[at[free]] = wanted[free]
            won = table[at] == wanted
            slots[rest[won]] = at[won]
            rest = rest[~won]
        return slots

    def _split(self, segment: int) -> None:
        """Half of a segment's part of the directory goes to a new one."""
        depth = self._depths[segment]
        assert depth < _DEEPEST, "a thousand keys have a rest in common: somebody knows the prime"
        if depth == self._depth:
            self._directory = np.repeat(self._directory, 2)
            self._depth += 1
        new = self._segments
        self._segments += 1
        self._close_views()
        if self.slots > min(len(column) for column in (self.keys, *self.columns)):
            self._grow()
        if self._segments > len(self._used):
            self._used = np.concatenate([self._used, np.zeros_like(self._used)])
        self._open_views()
        prefix = 2 * self._prefixes[segment] + 1
        self._prefixes[segment] = prefix - 1
        self._prefixes.append(prefix)
        self._depths[segment] = depth + 1
        self._depths.append(depth + 1)
        span = self._depth - depth - 1
        self._directory[prefix << span : (prefix + 1) << span] = new << _SEGMENT_BITS

    def _grow(self) -> None:
        slots = max(self.slots, (self.slots + self.slots // _GROWTH) >> _SEGMENT_BITS << _SEGMENT_BITS)
        self.keys = longer(self.keys, slots, 4 * slots)
        self.columns = [longer(column, slots, 4 * slots) for column in self.columns]

    def _place(self, keys: Keys, homes: Slots, values: list[Column]) -> None:
        table = self.keys
        offset = homes & _OFFSETS
        base = homes - offset
        rest = np.arange(len(keys))
        step = 0
        while len(rest) > _FEW:
            at = base[rest] + ((offset[rest] + (step * (step + 1) >> 1)) & _OFFSETS)
            step += 1
            before = table[at]
            open_ = before == 0
            if not open_.all():
                open_ |= ~self._live(at)
            taken, by = at[open_], rest[open_]
            table[taken] = keys[by]
            won = table[taken] == keys[by]  # of several that want a slot the last to write has it
            slots, winners = taken[won], by[won]
            for column, value in zip(self.columns, values, strict=True):
                column[slots] = value[winners]
            self._count_used(slots[before[open_][won] == 0])
            left = ~open_
            left[open_] = ~won
            rest = rest[left]
        for one in rest.tolist():
            at_one = self._open_slot(int(homes[one]))
            table[at_one] = keys[one]
            for column, value in zip(self.columns, values, strict=True):
                column[at_one] = value[one]

    def _count_used(self, slots: Slots) -> None:
        if len(slots):
            self._used += np.bincount(slots >> _SEGMENT_BITS, minlength=len(self._used))

    def _open_views(self) -> None:
        """Single items are read several times faster through a memoryview than from the array."""
        self._key_view = self.keys.data
        self._directory_view = self._directory.data
        self._used_view = self._used.data
        self.views = [column.data for column in self.columns]

    def _close_views(self) -> None:
        for view in (self._key_view, self._directory_view, self._used_view, *self.views):
            view.release()


def _without_zero(keys: Keys) -> Keys:
    return keys if keys.all() else np.where(keys == 0, np.uint64(_STAND_IN), keys)


def _next(at: int, step: int) -> int:
    """Where the search goes on that has come to `at` in so many steps: round and round in its segment."""
    return at & ~_OFFSETS | (at + step) & _OFFSETS


@functools.cache
def prime_below(number: int) -> int:
    """The largest one; `number` is 5 or more."""
    candidate = (number - 2) | 1
    while not (candidate % np.arange(3, math.isqrt(candidate) + 1, 2)).all():
        candidate -= 2
    return candidate


class NameTable(HashTable):
    """What an engine calls a block, to what we call it; `born` counts up in the order in which they came.

    A dead entry still tells what its name stood for, until its place is taken.
    """

    OURS, BORN = 0, 1  # columns

    def __init__(self, prime: int = _PRIME) -> None:
        super().__init__((np.uint64, np.uint32), prime)

    @property
    def ours(self) -> Keys:
        return self.columns[0]

    @property
    def born(self) -> npt.NDArray[np.uint32]:
        return self.columns[1]

    def _live(self, at: Slots | slice) -> Flags:
        live: Flags = self.columns[1][at] != 0
        return live

    def _live_one(self, at: int) -> bool:
        return self.views[1][at] != 0

    # A hundred names or less.

    def enter_few(self, names: Sequence[int], ours: Sequence[int], first_born: int) -> list[int]:
        """Enters those that are not live, born one after the other; the places among `names` of those that are."""
        live: list[int] = []
        done = self._enter(names, ours, first_born, 0, live)
        while done < len(names):
            self._make_room_for_one(names[done])
            done = self._enter(names, ours, first_born, done, live)
        return live

    def _enter(self, names: Sequence[int], ours: Sequence[int], first_born: int, start: int, live: list[int]) -> int:
        """The same from `start` on, as far as there is room."""
        table, directory, used = self._key_view, self._directory_view, self._used_view
        prime, shift = self._prime, _SPOT_BITS - self._depth
        stand_for, born = self.views
        if start:
            names, ours, first_born = names[start:], ours[start:], first_born + start
        for name, our, birth in zip(names, ours, itertools.count(first_born), strict=False):
            key = name or _STAND_IN
            spot = key % prime
            base = directory[(spot * _SPREAD & _SPOTS) >> shift]
            at, step, open_at = base + (spot & _OFFSETS), 0, -1
            while (found := table[at]) != key and found:
                if open_at < 0 and not born[at]:
                    open_at = at
                step += 1
                at = base + ((at + step) & _OFFSETS)
            if found:
                if born[at]:
                    live.append(start + birth - first_born)
                    continue
            elif open_at >= 0:
                at = open_at
            elif (count := used[at >> _SEGMENT_BITS]) < _FULL:
                used[at >> _SEGMENT_BITS] = count + 1
            else:
                return start + birth - first_born
            table[at] = key
            stand_for[at] = our
            born[at] = birth
        return start + len(names)

    def let_go_of_few(self, names: Sequence[int]) -> tuple[list[int], list[int]]:
        """What those that are live stood for, which they are not from now on; and the others."""
        stand_for, born = self.views
        ours: list[int] = []
        others: list[int] = []
        for name, at in zip(names, self._find_few(names), strict=True):
            if at >= 0 and born[at]:
                born[at] = 0
                ours.append(stand_for[at])
            else:
                others.append(name)
        return ours, others


class HolderTable(HashTable):
    """What we call a block, to the set of its holders: bit b of them is bit b % 64 of column b // 64."""

    def __init__(self, prime: int = _PRIME) -> None:
        super().__init__((np.uint64,), prime)

    def _live(self, at: Slots | slice) -> Flags:
        live: Flags = self.columns[0][at] != 0
        for column in self.columns[1:]:
            live |= column[at] != 0
        return live

    def _live_one(self, at: int) -> bool:
        return self.views[0][at] != 0 or any(view[at] for view in self.views[1:])

    # A hundred blocks or less, as above.

    def mark_few(self, ours: Sequence[int], word: int, mask: int) -> list[int]:
        """Sets a bit of each, entering those that nobody holds; those that had it already."""
        marked: list[int] = []
        done = self._mark(ours, word, mask, 0, marked)
        while done < len(ours):
            self._make_room_for_one(ours[done])
            done = self._mark(ours, word, mask, done, marked)
        return marked

    def _mark(self, ours: Sequence[int], word: int, mask: int, start: int, marked: list[int]) -> int:
        """The same from `start` on, as far as there is room."""
        table, directory, used = self._key_view, self._directory_view, self._used_view
        prime, shift = self._prime, _SPOT_BITS - self._depth
        masks, alone = self.views[word], len(self.views) == 1
        for place, our in enumerate(ours[start:] if start else ours, start):
            key = our or _STAND_IN
            spot = key % prime
            base = directory[(spot * _SPREAD & _SPOTS) >> shift]
            at, step, open_at = base + (spot & _OFFSETS), 0, -1
            while (found := table[at]) != key and found:
                if open_at < 0 and not (masks[at] if alone else self._live_one(at)):
                    open_at = at
                step += 1
                at = base + ((at + step) & _OFFSETS)
            if found:
                if (held := masks[at]) & mask:
                    marked.append(our)
                else:
                    masks[at] = held | mask
                continue
            if open_at >= 0:
                at = open_at
            elif (count := used[at >> _SEGMENT_BITS]) < _FULL:
                used[at >> _SEGMENT_BITS] = count + 1
            else:
                return place
            table[at] = key
            masks[at] = mask
        return len(ours)

    def unmark_few(self, ours: Sequence[int], word: int, mask: int) -> None:
        """Takes a bit from each of those that are there."""
        masks, rest = self.views[word], ~mask & _MASK
        for at in self._find_few(ours):
            if at >= 0:
                masks[at] &= rest
