"""What engines say of their KV caches: one published payload to events, and sequence numbers to what they mean.

vLLM, SGLang and TensorRT-LLM share one wire form: a msgpack array `[timestamp, events, rank]`; offloading connectors
and LMCache put their events on vLLM's stream. Up to vLLM 0.23 and SGLang 0.5.19 an event is an array
`["BlockStored", ...]`, since then a map with a `type`; vLLM only ever appended fields, so one list of names reads every
version of its arrays, and SGLang's are a beginning of it. What is unknown or malformed is skipped and counted, its
siblings in the batch are kept.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec
import numpy as np

from predictor.prompt import MAX_BLOCK_SIZE, MAX_LOOKAHEAD, Tokens

_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
    "lookahead_token_ids",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")
# Groups whose stored blocks form the contiguous prefix that reuse needs; absent before vLLM 0.22.
_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_OTHER_KINDS = frozenset({
    "sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention", "encoder_only_attention",
    "cross_attention", "unknown",
})  # fmt: skip
_MASK = (1 << 64) - 1
_PIECE_BYTES = 1 << 17
# A small event has so many blocks; a bundle takes so many events or more, and about so many blocks.
_MOST_SMALL, _FEWEST_BUNDLED, _MOST_BUNDLED = 64, 4, 512
# Of an event that is longer than that by itself so many tokens are unpacked at once.
_PART_TOKENS = 8192
_NO_KEYS = [[None] * blocks for blocks in range(_MOST_SMALL + 1)]
_NIL = b"\xc0"
# Bytes of a packed integer by its first one; 0: it is none.
_WIDTHS = bytes([1] * 0x80 + [0] * 0x4C + [2, 3, 5, 9, 2, 3, 5, 9] + [0] * 0x0C + [1] * 0x20)
_NO_FIELDS: Mapping[str, object] = {}
_Place = tuple[object, object, object]


class Tier(enum.Enum):
    """Where blocks are kept. Anything but the engine's own device costs time to load."""

    __hash__ = object.__hash__  # by name takes Python code, and decisions look tiers up

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


_TIERS = {
    "GPU": Tier.DEVICE, "CPU": Tier.HOST, "CPU_PINNED": Tier.HOST,
    "DISK": Tier.STORAGE, "STORAGE": Tier.STORAGE, "FS": Tier.STORAGE, "OBJ": Tier.STORAGE, "EXTERNAL": Tier.STORAGE,
}  # fmt: skip


# The events are made by the hundred thousand: a struct is made in a fifth of the time of a frozen dataclass.


class Stored(msgspec.Struct, frozen=True, eq=False):
    """A run of consecutive full blocks entered a cache. Hashes are the engine's, as 64-bit unsigned integers."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: Tokens
    block_size: int
    tier: Tier
    lora_name: str | None
    extra_keys: tuple[tuple[object, ...], ...] | None  # one entry a block; the adapter's name is not repeated in it
    group: int | None = None  # hybrid models cache each group of layers apart, under the same hashes
    ahead: Tokens | None = None  # one row of look-ahead tokens a block, where they are part of its identity
    pairs: bool = False  # told as pairs of neighbouring tokens
    adrift: bool = False  # what stands before it is not told: no parent, and not a prompt's beginning either

    @property
    def lookahead(self) -> int:
        return 0 if self.ahead is None else int(self.ahead.shape[1])


class Named(msgspec.Struct, frozen=True):
    """Blocks entered a tier, told by the names that the engine gave them when it stored them before."""

    hashes: tuple[int, ...]
    tier: Tier
    group: int | None = None


class Removed(msgspec.Struct, frozen=True):
    """Blocks left a tier; neighbouring removals of a batch are told as one."""

    hashes: tuple[int, ...]
    tier: Tier
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True):
    """The engine dropped its whole prefix cache."""


class Bundle(msgspec.Struct, frozen=True, eq=False):
    """Many small events of a device that say the same in any order but this: its removals, then its stored runs.

    As decoding makes them, a block each: without adapter, salt or whatever else is in a block's identity.
    """

    removed: list[int]
    hashes: list[int]  # of all runs, one after the other
    lengths: list[int]  # of each run, in blocks
    parents: list[int | None]  # of each run
    tokens: Tokens  # of all runs
    block_size: int
    group: int | None = None

    def events(self) -> Iterator[Stored | Removed]:
        """The same as events of their own."""
        if self.removed:
            yield Removed(tuple(self.removed), Tier.DEVICE, self.group)
        yield from self.runs()

    def runs(self, start: int = 0) -> Iterator[Stored]:
        """The stored runs, but for the first so many."""
        first = sum(self.lengths[:start])
        for parent, blocks in zip(self.parents[start:], self.lengths[start:], strict=True):
            end, size = first + blocks, self.block_size
            tokens = self.tokens[first * size : end * size]
            yield Stored(tuple(self.hashes[first:end]), parent, tokens, size, Tier.DEVICE, None, None, self.group)
            first = end


KvEvent = Stored | Named | Removed | Cleared | Bundle


class Batch(msgspec.Struct, frozen=True):
    """One published payload. `skipped` counts what was not understood, by reason."""

    timestamp_s: float | None
    events: tuple[KvEvent, ...]
    rank: int | None
    skipped: Mapping[str, int] = {}


class MalformedBatch(ValueError):
    """The payload is not msgpack, or not an array of two or three."""


class _Skip(Exception):
    pass


def decode_batch(payload: bytes) -> Batch:
    """Reads one payload as published by vLLM 0.10-0.33, SGLang 0.5.2-0.5.23 or TensorRT-LLM (streaming).

    Raises MalformedBatch when nothing of it can be read.
    """
    timestamp_s, items, rank = _unpack(payload)
    return _read(timestamp_s, items, rank)


def decode_pieces(payload: bytes, most_events: int) -> Iterator[Batch]:
    """The same, at most so many events at a time, and fewer of long ones, for who must not be kept long.

    Small events that follow one another come as bundles. Raises MalformedBatch at once, and never while the pieces are
    taken.
    """
    if len(payload) <= _PIECE_BYTES:
        timestamp_s, items, rank = _unpack(payload)
        cut = (items[start : start + most_events] for start in range(0, len(items), most_events))
        return (_read(timestamp_s, _bundled(piece), rank) for piece in cut)
    try:
        outline = _OUTLINE.decode(payload)
    except _UNREADABLE:
        timestamp_s, items, rank = _unpack(payload)
        events = max(1, min(most_events, _PIECE_BYTES * len(items) // len(payload)))
        return (_read(timestamp_s, items[start : start + events], rank) for start in range(0, len(items), events))
    return (
        _read(outline.timestamp_s, items, outline.rank)
        for piece in _short_pieces(outline.events, most_events)
        for items in _unpacked_in_turns(piece)
    )


class _PlainStored(msgspec.Struct, tag="BlockStored", tag_field="type", gc=False):
    """What a map of a store may hold, checked while it is unpacked; whatever else there is goes the long way."""

    block_hashes: tuple[int, ...]
    token_ids: list[int]
    block_size: int
    parent_block_hash: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    lookahead_token_ids: list[Any] | None = None


class _PlainRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False):
    block_hashes: tuple[int, ...]
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _PlainCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    pass


class _PlainBatch(msgspec.Struct, array_like=True):
    timestamp_s: float
    events: list[_PlainStored | _PlainRemoved | _PlainCleared]
    rank: int | None = None


class _Outline(msgspec.Struct, array_like=True):
    """Of a long payload only where each event begins: the rest is unpacked in its turn."""

    timestamp_s: float
    events: list[msgspec.Raw]
    rank: int | None = None


class _LongStored(msgspec.Struct, tag="BlockStored", tag_field="type"):
    """Of a store that is long by itself only where its lists are, and what is said of all its blocks."""

    block_hashes: msgspec.Raw
    token_ids: msgspec.Raw
    block_size: int
    parent_block_hash: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: msgspec.Raw = msgspec.Raw(_NIL)
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    lookahead_token_ids: msgspec.Raw = msgspec.Raw(_NIL)


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_PLAIN = msgspec.msgpack.Decoder(_PlainBatch)
_OUTLINE = msgspec.msgpack.Decoder(_Outline)
_PLAIN_EVENT = msgspec.msgpack.Decoder(_PlainStored | _PlainRemoved | _PlainCleared)
_LONG_STORED = msgspec.msgpack.Decoder(_LongStored)
_INTEGERS = msgspec.msgpack.Decoder(list[int])
_ANYTHING = msgspec.msgpack.Decoder(strict=False)


def _unpack(payload: bytes) -> tuple[float | None, list[Any], int | None]:
    try:
        plain = _PLAIN.decode(payload)
    except _UNREADABLE:
        return _unpack_anything(payload)
    return plain.timestamp_s, plain.events, plain.rank


def _unpack_anything(payload: bytes) -> tuple[float | None, list[object], int | None]:
    try:
        raw = _ANYTHING.decode(payload)
    except _UNREADABLE as error:
        raise MalformedBatch(f"not msgpack: {error}") from error
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise MalformedBatch("expected an array [timestamp, events, rank]")
    timestamp_s = float(raw[0]) if isinstance(raw[0], (int, float)) else None
    rank = raw[2] if len(raw) > 2 and isinstance(raw[2], int) else None
    return timestamp_s, raw[1], rank


def _short_pieces(items: list[msgspec.Raw], most_events: int) -> Iterator[list[msgspec.Raw]]:
    piece: list[msgspec.Raw] = []
    size = 0
    for item in items:
        length = len(memoryview(item))
        if piece and (len(piece) == most_events or size + length > _PIECE_BYTES):
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += length
    if piece:
        yield piece


def _unpacked(item: msgspec.Raw) -> object:
    """One event of a long payload; None where it cannot be read."""
    try:
        return _PLAIN_EVENT.decode(item)
    except _UNREADABLE:
        pass
    try:
        return _ANYTHING.decode(item)
    except _UNREADABLE:
        return None


def _unpacked_in_turns(piece: list[msgspec.Raw]) -> Iterator[Sequence[object]]:
    """The events of a piece; of a single long store one part after the other."""
    if len(piece) == 1 and len(memoryview(piece[0])) > _PIECE_BYTES:
        parts = _parts(piece[0])
        if parts is not None:
            for part in parts:
                yield (part,)
            return
    yield _bundled([_unpacked(item) for item in piece])


def _parts(item: msgspec.Raw) -> Iterator[object] | None:
    """A long store as several that say the same; None: it is none, or says something of single blocks."""
    try:
        whole = _LONG_STORED.decode(item)
    except _UNREADABLE:
        return None
    hashes, ids, keys = _Integers(whole.block_hashes), _Integers(whole.token_ids), bytes(whole.extra_keys)
    count, size = hashes.count or 0, whole.block_size
    plain_keys = keys == _NIL or (keys.endswith(_NIL * count) and _Integers(whole.extra_keys).count == count)
    if (
        not 0 < size <= MAX_BLOCK_SIZE
        or count * size <= _PART_TOKENS
        or ids.count != count * size
        or not plain_keys
        or bytes(whole.lookahead_token_ids) != _NIL
    ):
        return None
    return _parts_of(item, whole, hashes, ids)


def _parts_of(item: msgspec.Raw, whole: _LongStored, hashes: _Integers, ids: _Integers) -> Iterator[object]:
    size, parent, done = whole.block_size, whole.parent_block_hash, 0
    at_once = max(1, _PART_TOKENS // size)
    while hashes.left:
        told = hashes.take(at_once)
        tokens = None if told is None else ids.take(len(told) * size)
        if told is None or tokens is None:
            # There is more in it than integers.
            rest: dict[str, Any] = dict(_tag_and_fields(_unpacked(item))[1])
            rest |= {"block_hashes": rest["block_hashes"][done:], "token_ids": rest["token_ids"][done * size :]}
            yield rest | {"type": "BlockStored", "parent_block_hash": parent, "extra_keys": None}
            return
        yield _PlainStored(
            block_hashes=tuple(told),
            token_ids=tokens,
            block_size=size,
            parent_block_hash=parent,
            lora_id=whole.lora_id,
            medium=whole.medium,
            lora_name=whole.lora_name,
            group_idx=whole.group_idx,
            kv_cache_spec_kind=whole.kv_cache_spec_kind,
            cache_salt=whole.cache_salt,
        )
        parent = told[-1]
        done += len(told)


class _Integers:
    """A packed array that is unpacked bit by bit, as far as it holds integers."""

    def __init__(self, packed: msgspec.Raw) -> None:
        self._packed = bytes(packed)
        kind = self._packed[0]
        self._at = {0xDC: 3, 0xDD: 5}.get(kind, 1)
        self.count: int | None = None  # None: it is no array
        if kind in (0xDC, 0xDD):
            self.count = int.from_bytes(self._packed[1 : self._at], "big")
        elif kind & 0xF0 == 0x90:
            self.count = kind & 0x0F
        self.left = self.count or 0

    def take(self, count: int) -> list[int] | None:
        """The next so many, or as many as there are; None: not all of them are integers."""
        packed, end = self._packed, self._at
        count = min(count, self.left)
        for _ in range(count):
            width = _WIDTHS[packed[end]]
            if not width:
                return None
            end += width
        taken = _INTEGERS.decode(b"\xdd" + count.to_bytes(4, "big") + packed[self._at : end])
        self._at, self.left = end, self.left - count
        return taken


def _read(timestamp_s: float | None, items: Sequence[object], rank: int | None) -> Batch:
    events: list[KvEvent] = []
    skipped: dict[str, int] = {}
    removals: list[tuple[int, list[Sequence[int]]]] = []  # an event, and the hashes of those that go with it
    more: list[Sequence[int]] = []
    place: _Place | None = None  # of the removal before, as it stands there
    for item in items:
        if isinstance(item, (Bundle, Removed)):
            place = None
            events.append(item)
            continue
        if type(item) is _PlainStored and (event := _at_a_glance(item)) is not None:
            place = None
            events.append(event)
            continue
        if isinstance(item, _PlainRemoved) or (isinstance(item, dict) and item.get("type") == "BlockRemoved"):
            # vLLM tells one evicted block an event, hundreds in a row: those of one place are read at a glance.
            hashes = item.block_hashes if isinstance(item, _PlainRemoved) else item.get("block_hashes")
            if place is not None and place == _place(item) and _only_hashes(hashes):
                more.append(hashes)
                continue
            place, more = _place(item), []
            removals.append((len(events), more))
        else:
            place = None
        try:
            events.append(_event(item))
        except _Skip as reason:
            place = None
            skipped[str(reason)] = skipped.get(str(reason), 0) + 1
    for at, others in removals:
        if others:
            first = events[at]
            assert isinstance(first, Removed)
            events[at] = Removed(tuple(itertools.chain(first.hashes, *others)), first.tier, first.group)
    return Batch(timestamp_s, tuple(events), rank, skipped)


def _bundled(items: Sequence[object]) -> Sequence[object]:
    """The same, with small events that follow one another read already, and told as one."""
    if len(items) < _FEWEST_BUNDLED:
        return items
    told: list[object] = []
    start = 0
    while start < len(items):
        event, end = _bundle(items, start)
        if event is not None:
            told.append(event)
        else:
            told.extend(items[start:end])
        start = end
    return told


def _bundle(items: Sequence[object], start: int) -> tuple[Bundle | Removed | None, int]:
    """As many of the next as are plain and small, and where they end; None: they are few, or have to be looked at."""
    hashes: list[int] = []
    removed: list[int] = []
    lengths: list[int] = []
    parents: list[int | None] = []
    ids: list[int] = []
    size = 0
    in_front = in_front_blocks = 0  # where the removals before all stores end
    first = items[start]
    group = first.group_idx if isinstance(first, (_PlainStored, _PlainRemoved)) else None
    end = start
    usual: object = None  # what runs say that are told together
    for item in itertools.islice(items, start, start + _MOST_BUNDLED):
        if type(item) is _PlainStored:
            told, keys, parent = item.block_hashes, item.extra_keys, item.parent_block_hash
            blocks = len(told)
            says = (
                item.block_size,
                item.group_idx,
                item.medium,
                item.kv_cache_spec_kind,
                item.lora_id,
                item.lora_name,
                item.cache_salt,
                item.lookahead_token_ids,
            )
            if says != usual:
                if (
                    lengths
                    or says[4:] != (None, None, None, None)
                    or item.group_idx != group
                    or not (item.medium == "GPU" or item.medium is None)
                    or not (item.kv_cache_spec_kind is None or item.kv_cache_spec_kind in _PREFIX_KINDS)
                ):
                    break
                usual, size = says, item.block_size
            if (
                not 0 < blocks <= _MOST_SMALL
                or len(item.token_ids) != blocks * size
                or (keys is not None and keys != _NO_KEYS[blocks])
                or (parent is not None and parent <= 0)
            ):
                break
            if not lengths:
                in_front, in_front_blocks = end, len(removed)
            hashes += told
            lengths.append(blocks)
            parents.append(parent)
            ids += item.token_ids
        elif type(item) is _PlainRemoved:
            told = item.block_hashes
            if (
                item.group_idx != group
                or item.kv_cache_spec_kind is not None
                or not (item.medium == "GPU" or item.medium is None)
            ):
                break
            removed += told
        else:
            break
        end += 1
        if len(told) > 1 and len(hashes) + len(removed) >= _MOST_BUNDLED:
            break
    if 0 < len(lengths) < _FEWEST_BUNDLED <= in_front - start:
        # What is evicted for a step's one prompt, before it.
        del removed[in_front_blocks:]
        lengths, end = [], in_front
    if end - start < _FEWEST_BUNDLED or 0 < len(lengths) < _FEWEST_BUNDLED:
        return None, max(end, start + 1)
    try:
        array("Q", hashes)
        array("Q", removed)
        tokens = np.frombuffer(array("I", ids), np.uint32)
    except OverflowError:
        return None, end
    if not lengths:
        return Removed(tuple(removed), Tier.DEVICE, group), end
    if not 0 < size <= MAX_BLOCK_SIZE or not set(hashes).isdisjoint(removed):
        return None, end
    return Bundle(removed, hashes, lengths, parents, tokens, size, group), end


def _at_a_glance(item: _PlainStored) -> Stored | None:
    """The usual store, of which decoding makes many small ones; None: it has to be looked at."""
    hashes, parent, keys, kind = item.block_hashes, item.parent_block_hash, item.extra_keys, item.kv_cache_spec_kind
    tier = _TIERS.get(item.medium or "")
    blocks = len(hashes)
    if (
        tier is None
        or not blocks
        or item.lora_id is not None
        or item.lora_name is not None
        or item.cache_salt is not None
        or item.lookahead_token_ids is not None
        or len(item.token_ids) != blocks * item.block_size
        or not 0 < item.block_size <= MAX_BLOCK_SIZE
        or (keys is not None and not len(keys) == keys.count(None) == blocks)
        or (kind is not None and kind not in _PREFIX_KINDS)
        or (parent is not None and parent <= 0)
        or min(hashes) < 0
    ):
        return None
    try:
        tokens = np.frombuffer(array("I", item.token_ids), np.uint32)
    except OverflowError:
        return None
    return Stored(hashes, parent, tokens, item.block_size, tier, None, None, item.group_idx)


def _place(item: _PlainRemoved | Mapping[str, object]) -> _Place:
    if isinstance(item, _PlainRemoved):
        return item.medium, item.group_idx, item.kv_cache_spec_kind
    return item.get("medium"), item.get("group_idx"), item.get("kv_cache_spec_kind")


def _only_hashes(raw: object) -> TypeGuard[Sequence[int]]:
    """Whether these are 64-bit unsigned integers already."""
    if not isinstance(raw, (list, tuple)):
        return False
    try:
        array("Q", raw)
    except (TypeError, OverflowError):
        return False
    return True


def _event(item: object) -> KvEvent:
    if type(item) is _PlainRemoved and item.kv_cache_spec_kind is None and min(item.block_hashes, default=-1) >= 0:
        return Removed(item.block_hashes, _tier(item.medium), item.group_idx)
    tag, fields = _tag_and_fields(item)
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        _check_group(fields)
        return Removed(_hashes(fields.get("block_hashes")), _tier(fields.get("medium")), _group(fields))
    if tag == "AllBlocksCleared":
        return Cleared()
    raise _Skip("unknown_event")


def _tag_and_fields(item: object) -> tuple[object, Mapping[str, object]]:
    if isinstance(item, (_PlainStored, _PlainRemoved, _PlainCleared)):
        return item.__struct_config__.tag, msgspec.structs.asdict(item)
    if isinstance(item, dict):
        return item.get("type"), item
    if isinstance(item, list) and item:
        if item[0] == "BlockStored":
            return item[0], dict(zip(_STORED_FIELDS, item[1:], strict=False))
        if item[0] == "BlockRemoved":
            return item[0], dict(zip(_REMOVED_FIELDS, item[1:], strict=False))
        return item[0], _NO_FIELDS
    raise _Skip("malformed")


def _stored(fields: Mapping[str, object]) -> Stored | Named:
    _check_group(fields)
    hashes = _hashes(fields.get("block_hashes"))
    tier = _tier(fields.get("medium"))
    group = _group(fields)
    block_size, token_ids = fields.get("block_size"), fields.get("token_ids")
    if token_ids is None:
        token_ids = []
    if not isinstance(block_size, int) or isinstance(block_size, bool) or not isinstance(token_ids, list):
        raise _Skip("malformed")
    if not token_ids and hashes and tier is not Tier.DEVICE:
        # Offloading connectors call a block what the device called it, and leave it at that.
        return Named(hashes, tier, group)
    if not token_ids or block_size <= 0:
        raise _Skip("without_tokens")
    if block_size > MAX_BLOCK_SIZE:
        raise _Skip("block_size")
    if tier is not Tier.DEVICE and len(hashes) == 1 < block_size == len(token_ids) - 1:
        # LMCache's in-process engine counts the next chunk's first token in (0.5.6: `convert_tokens_to_list`).
        token_ids = token_ids[:-1]
    if len(token_ids) != len(hashes) * block_size:
        # Masked groups leave hashes out, and then the position of each hash is not known (engines.md A.1).
        raise _Skip("masked")
    tokens, ahead = _tokens(token_ids, block_size)
    pairs = ahead is not None
    if ahead is None:
        ahead = _lookahead(fields.get("lookahead_token_ids"), len(hashes))
    parent = fields.get("parent_block_hash")
    # What LMCache's in-process engine says of a chunk whose predecessor was not stored in the same call.
    adrift = parent == 0 and tier is not Tier.DEVICE
    if adrift:
        parent = None
    lora_name = fields.get("lora_name")
    lora_name = lora_name if isinstance(lora_name, str) else None
    if lora_name is None and fields.get("lora_id") is not None:
        # Before vLLM 0.14 adapters are numbered, and no request tells its number.
        raise _Skip("unnamed_adapter")
    extra_keys = _extra_keys(fields.get("extra_keys"), lora_name, len(hashes))
    salt = fields.get("cache_salt")
    if salt is not None:
        # SGLang repeats it with every event, where vLLM has it in a prompt's first block only.
        if not isinstance(salt, str) or extra_keys is not None:
            raise _Skip("malformed")
        if parent is None and salt and not adrift:
            extra_keys = ((salt,), *[()] * (len(hashes) - 1))
    return Stored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=block_size,
        tier=tier,
        lora_name=lora_name,
        extra_keys=extra_keys,
        group=group,
        ahead=ahead,
        pairs=pairs,
        adrift=adrift,
    )


def _tokens(token_ids: list[Any], block_size: int) -> tuple[Tokens, Tokens | None]:
    """Token ids, and the look-ahead token of each block where the ids are pairs of neighbours (SGLang's EAGLE)."""
    try:
        # Strict, where numpy would take fractions and the digits of strings for ids.
        return np.frombuffer(array("I", token_ids), dtype=np.uint32), None
    except (TypeError, OverflowError):
        pass
    if isinstance(token_ids[0], list):
        pairs = [pair for pair in token_ids if isinstance(pair, list) and len(pair) == 2]
        if len(pairs) != len(token_ids):
            raise _Skip("token_form")
        ids, _ = _tokens([pair[0] for pair in pairs], block_size)
        ahead, _ = _tokens([pair[1] for pair in pairs[block_size - 1 :: block_size]], 1)
        return ids, ahead.reshape(-1, 1)
    return np.array([_token(one) for one in token_ids], np.uint32), None


def _token(one: object) -> int:
    """An id; of what is none, multimodal items' own values, one that no vocabulary reaches."""
    if isinstance(one, int) and 0 <= one <= 0xFFFFFFFF:
        return int(one)
    if isinstance(one, (int, str)):
        digest = hashlib.blake2b(str(one).encode("utf-8", "surrogatepass"), digest_size=4).digest()
        return int.from_bytes(digest, "big") | 0x80000000
    raise _Skip("token_form")


def _lookahead(raw: object, blocks: int) -> Tokens | None:
    """vLLM 0.33: for each block the tokens behind it that its hash covers."""
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != blocks:
        raise _Skip("malformed")
    width = len(raw[0]) if isinstance(raw[0], list) else 0
    rows = [row for row in raw if isinstance(row, list) and len(row) == width]
    if len(rows) != len(raw) or not 0 < width <= MAX_LOOKAHEAD:
        # Blocks with and without in one event have no common rule.
        if all(row is None or row == [] for row in raw):
            return None
        raise _Skip("lookahead_form")
    return _tokens([token for row in rows for token in row], 1)[0].reshape(blocks, -1)


def _check_group(fields: Mapping[str, object]) -> None:
    kind, group = fields.get("kv_cache_spec_kind"), fields.get("group_idx")
    if kind is not None:
        if not isinstance(kind, str):
            raise _Skip("group")
        if kind not in _PREFIX_KINDS:
            raise _Skip(f"group_{kind}" if kind in _OTHER_KINDS else "group")
    if group is not None and not isinstance(group, int):
        raise _Skip("group")


def _group(fields: Mapping[str, object]) -> int | None:
    group = fields.get("group_idx")
    return group if isinstance(group, int) else None


def _extra_keys(raw: object, lora_name: str | None, blocks: int) -> tuple[tuple[object, ...], ...] | None:
    """Per block what is in its identity besides tokens and adapter: multimodal items, `cache_salt`.

    The adapter's name stands first in the list, untagged; it is taken out, so that an event of a version that has only
    one of the two fields is hashed alike.
    """
    if raw is None:
        return None
    if not isinstance(raw, list) or len(raw) != blocks:
        raise _Skip("malformed")
    if not any(raw):
        if all(entry is None or entry == [] for entry in raw):
            return None
        raise _Skip("malformed")
    keys = tuple([_block_keys(entry, lora_name) for entry in raw])
    return keys if any(keys) else None


def _block_keys(entry: object, lora_name: str | None) -> tuple[object, ...]:
    if entry is None:
        return ()
    if not isinstance(entry, list):
        raise _Skip("malformed")
    keys = [tuple(key) if isinstance(key, list) else key for key in entry]  # a list is [identifier, offset]
    for key in keys:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, (str, bytes, int, float)) for part in parts):
            raise _Skip("malformed")
    return tuple(keys[1:] if lora_name is not None and keys[:1] == [lora_name] else keys)


def _hashes(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, (list, tuple)):
        raise _Skip("malformed")
    try:
        array("Q", raw)
    except (TypeError, OverflowError):
        return tuple([_hash(value) for value in raw])
    return tuple(raw)


def _hash(value: object) -> int:
    """Engines send unsigned or signed 64-bit integers, or 16 to 32 bytes of which vLLM's integers are the last 8."""
    if isinstance(value, int):
        return value & _MASK
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    raise _Skip("malformed")


def _tier(medium: object) -> Tier:
    if medium is None or medium == "GPU":
        return Tier.DEVICE
    tier = _TIERS.get(medium.upper()) if isinstance(medium, str) else None
    if tier is None:
        raise _Skip("unknown_medium")
    return tier


class Arrival(enum.Enum):
    """What the sequence number of a batch says."""

    NEXT = "next"
    GAP = "gap"
    RESTARTED = "restarted"


@dataclass(slots=True)
class FeedCursor:
    """Follows the sequence numbers of one publisher's batches in the order in which they were applied; they start at 0
    and name no incarnation, so one that goes backwards means that the engine was restarted."""

    next_seq: int = 0

    def applied(self, seq: int) -> Arrival:
        expected, self.next_seq = self.next_seq, seq + 1
        if seq < expected:
            return Arrival.RESTARTED
        return Arrival.NEXT if seq == expected else Arrival.GAP
