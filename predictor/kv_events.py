"""What engines say of their KV caches: one published payload to events, and sequence numbers to what they mean.

vLLM, SGLang and TensorRT-LLM share one wire form: a msgpack array `[timestamp, events, rank]`. Up to vLLM 0.23 and
SGLang 0.5.19 an event is an array `["BlockStored", ...]`, since then a map with a `type`; fields were only ever
appended, so one list of names reads every version. What is unknown or malformed is skipped and counted, its siblings
in the batch are kept.
"""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from predictor.prompt import Tokens

_STORED_FIELDS = (
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
    "lookahead_token_ids",
)  # fmt: skip
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "locality", "ownership")
# Groups whose stored blocks form the contiguous prefix that reuse needs; absent before vLLM 0.22.
_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_MASK = (1 << 64) - 1


class Tier(enum.Enum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


_TIERS = {
    "GPU": Tier.DEVICE, "CPU": Tier.HOST, "CPU_PINNED": Tier.HOST,
    "DISK": Tier.STORAGE, "STORAGE": Tier.STORAGE, "FS": Tier.STORAGE, "OBJ": Tier.STORAGE, "EXTERNAL": Tier.STORAGE,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A run of consecutive full blocks entered a cache. Hashes are the engine's, as 64-bit unsigned integers."""

    hashes: tuple[int, ...]
    parent: int | None
    tokens: Tokens
    block_size: int
    tier: Tier
    lora_name: str | None
    extra_keys: tuple[tuple[object, ...], ...] | None  # one entry a block; the adapter's name is not repeated in it
    group: int | None = None  # hybrid models cache each group of layers apart, under the same hashes


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[int, ...]
    tier: Tier
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine dropped its whole prefix cache."""


KvEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """One published payload. `skipped` counts what was not understood, by reason."""

    timestamp_s: float | None
    events: tuple[KvEvent, ...]
    rank: int | None
    skipped: Mapping[str, int] = field(default_factory=dict)


class MalformedBatch(ValueError):
    """The payload is not msgpack, or not an array of two or three."""


class _Skip(Exception):
    pass


def decode_batch(payload: bytes) -> Batch:
    """Reads one payload as published by vLLM 0.10-0.33 (both event forms).

    Raises MalformedBatch when nothing of it can be read.
    """
    try:
        raw = msgspec.msgpack.decode(payload, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBatch(f"not msgpack: {error}") from error
    if not isinstance(raw, list) or len(raw) < 2 or not isinstance(raw[1], list):
        raise MalformedBatch("expected an array [timestamp, events, rank]")
    events: list[KvEvent] = []
    skipped: Counter[str] = Counter()
    for item in raw[1]:
        try:
            events.append(_event(item))
        except _Skip as reason:
            skipped[str(reason)] += 1
    timestamp = float(raw[0]) if isinstance(raw[0], (int, float)) else None
    rank = raw[2] if len(raw) > 2 and isinstance(raw[2], int) else None
    return Batch(timestamp, tuple(events), rank, skipped)


def _event(item: object) -> KvEvent:
    tag, fields = _tag_and_fields(item)
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        if not _is_prefix_group(fields):
            raise _Skip("group")
        return Removed(_hashes(fields.get("block_hashes")), _tier(fields.get("medium")), _group(fields))
    if tag == "AllBlocksCleared":
        return Cleared()
    raise _Skip("unknown_event")


def _tag_and_fields(item: object) -> tuple[object, Mapping[str, object]]:
    if isinstance(item, dict):
        return item.get("type"), item
    if isinstance(item, list) and item:
        names = _STORED_FIELDS if item[0] == "BlockStored" else _REMOVED_FIELDS
        return item[0], dict(zip(names, item[1:], strict=False))
    raise _Skip("malformed")


def _stored(fields: Mapping[str, object]) -> Stored:
    if not _is_prefix_group(fields):
        raise _Skip("group")
    hashes = _hashes(fields.get("block_hashes"))
    block_size, token_ids = fields.get("block_size"), fields.get("token_ids")
    if not isinstance(block_size, int) or isinstance(block_size, bool) or not isinstance(token_ids, list):
        raise _Skip("malformed")
    if not token_ids or block_size <= 0:
        raise _Skip("without_tokens")
    if len(token_ids) != len(hashes) * block_size:
        # Masked groups leave hashes out, and then the position of each hash is not known (engines.md A.1).
        raise _Skip("masked")
    try:
        # Strict, where numpy would take fractions and the digits of strings for ids.
        tokens = np.frombuffer(array("I", token_ids), dtype=np.uint32)
    except (TypeError, OverflowError):
        raise _Skip("token_form") from None
    parent = fields.get("parent_block_hash")
    lora_name = fields.get("lora_name")
    lora_name = lora_name if isinstance(lora_name, str) else None
    if lora_name is None and fields.get("lora_id") is not None:
        # Before vLLM 0.14 adapters are numbered, and no request tells its number.
        raise _Skip("unnamed_adapter")
    return Stored(
        hashes=hashes,
        parent=None if parent is None else _hash(parent),
        tokens=tokens,
        block_size=block_size,
        tier=_tier(fields.get("medium")),
        lora_name=lora_name,
        extra_keys=_extra_keys(fields.get("extra_keys"), lora_name, len(hashes)),
        group=_group(fields),
    )


def _is_prefix_group(fields: Mapping[str, object]) -> bool:
    kind, group = fields.get("kv_cache_spec_kind"), fields.get("group_idx")
    if isinstance(kind, str) or kind is None:
        return kind in _PREFIX_KINDS and (group is None or isinstance(group, int))
    return False


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
    keys = tuple(_block_keys(entry, lora_name) for entry in raw)
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
    if not isinstance(raw, list):
        raise _Skip("malformed")
    return tuple([_hash(value) for value in raw])


def _hash(value: object) -> int:
    """Engines send unsigned or signed 64-bit integers, or 16 to 32 bytes of which vLLM's integers are the last 8."""
    if isinstance(value, int):
        return value & _MASK
    if isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    raise _Skip("malformed")


def _tier(medium: object) -> Tier:
    if medium is None:
        return Tier.DEVICE
    tier = _TIERS.get(medium.upper()) if isinstance(medium, str) else None
    if tier is None:
        raise _Skip("unknown_medium")
    return tier


class Arrival(enum.Enum):
    """What the sequence number of a live batch says."""

    NEXT = "next"
    REPEATED = "repeated"  # a replay has delivered it already
    GAP = "gap"
    RESTARTED = "restarted"


@dataclass(slots=True)
class FeedCursor:
    """Follows one publisher's sequence numbers, which start at 0 and name no incarnation.

    A PUB socket delivers in order, so a live number that goes backwards means that the engine was restarted. A replay
    runs ahead of the live socket, whose copies of what was replayed are still to come: those are no restart.
    """

    next_seq: int = 0  # the first batch that has not been applied
    _live_next: int = 0  # the live socket's numbers only grow from here

    def judge_live(self, seq: int) -> Arrival:
        if seq < self._live_next:
            self.next_seq, self._live_next = 0, seq + 1
            return Arrival.RESTARTED
        self._live_next = seq + 1
        if seq < self.next_seq:
            return Arrival.REPEATED
        return Arrival.NEXT if seq == self.next_seq else Arrival.GAP

    def judge_replayed(self, seq: int) -> Arrival:
        """A replay skips what was applied; a hole in it, or before it, is lost for good."""
        if seq < self.next_seq:
            return Arrival.REPEATED
        return Arrival.NEXT if seq == self.next_seq else Arrival.GAP

    def applied(self, seq: int) -> None:
        self.next_seq = seq + 1

    def caught_up(self) -> None:
        """The live socket holds nothing of what was replayed any more."""
        self._live_next = max(self._live_next, self.next_seq)
