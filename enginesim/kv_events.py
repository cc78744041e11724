"""The KV cache events of one engine, and how vLLM puts a batch of them on the wire.

Two forms: `map` is that of vLLM 0.24 and later (written here as 0.32 does), `array` that of 0.23 and before (as 0.22).
SGLang's events have the same two: maps since 0.5.20 (here as 0.5.23), arrays before (as 0.5.19).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

EventForm = Literal["map", "array"]
DEVICE_MEDIUM = "GPU"
FULL_ATTENTION_GROUP = 0
DATA_PARALLEL_RANK = 0


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive full blocks of one request was registered; `token_ids` is the flat slice of that run."""

    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    extra_keys: Sequence[Sequence[str] | None]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A cached block was handed to someone else. One hash an event, as vLLM does for evictions."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Everything this engine had published is gone."""


@dataclass(frozen=True, slots=True)
class PagesStored:
    """SGLang: pages that follow on each other. With pairs of tokens for keys, `token_ids` are lists of two."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[object]
    block_size: int
    cache_salt: str | None

    def goes_on_with(self, other: "PagesStored") -> bool:
        """Whether SGLang says both in one event."""
        return self.cache_salt == other.cache_salt and other.parent_block_hash == self.block_hashes[-1]

    def joined(self, other: "PagesStored") -> "PagesStored":
        return PagesStored(
            [*self.block_hashes, *other.block_hashes],
            self.parent_block_hash,
            [*self.token_ids, *other.token_ids],
            self.block_size,
            self.cache_salt,
        )


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """SGLang: pages of evicted nodes."""

    block_hashes: list[int]


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared | PagesStored | PagesRemoved


def encode_batch(events: Sequence[KvEvent], wall_time_s: float, form: EventForm) -> bytes:
    """One message payload: msgpack of `[wall clock seconds, events, data parallel rank]`."""
    encode = _as_map if form == "map" else _as_array
    return msgspec.msgpack.encode([wall_time_s, [encode(event) for event in events], DATA_PARALLEL_RANK])


def _as_map(event: KvEvent) -> dict[str, object]:
    # Fields at their default are left out, except the first seven of BlockStored, which have none.
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": DEVICE_MEDIUM,
                "lora_name": None,
                "extra_keys": event.extra_keys,
                "group_idx": FULL_ATTENTION_GROUP,
                "kv_cache_spec_kind": "full_attention",
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": [event.block_hash],
                "medium": DEVICE_MEDIUM,
                "group_idx": FULL_ATTENTION_GROUP,
            }
        case PagesStored():
            told: dict[str, object] = {
                "type": "BlockStored",
                "block_hashes": [_signed(page) for page in event.block_hashes],
                "parent_block_hash": None if event.parent_block_hash is None else _signed(event.parent_block_hash),
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": DEVICE_MEDIUM,
            }
            return told if event.cache_salt is None else {**told, "cache_salt": event.cache_salt}
        case PagesRemoved():
            hashes = [_signed(page) for page in event.block_hashes]
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": DEVICE_MEDIUM}
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: KvEvent) -> list[object]:
    # Trailing None stays on the wire in this form: kv_cache_spec_sliding_window is the last field of 0.22.
    match event:
        case BlockStored():
            return [
                "BlockStored",
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                None,
                DEVICE_MEDIUM,
                None,
                event.extra_keys,
                FULL_ATTENTION_GROUP,
                "full_attention",
                None,
            ]
        case BlockRemoved():
            return ["BlockRemoved", [event.block_hash], DEVICE_MEDIUM, FULL_ATTENTION_GROUP]
        case PagesStored():
            parent = None if event.parent_block_hash is None else _signed(event.parent_block_hash)
            hashes = [_signed(page) for page in event.block_hashes]
            return ["BlockStored", hashes, parent, event.token_ids, event.block_size, None, DEVICE_MEDIUM]
        case PagesRemoved():
            return ["BlockRemoved", [_signed(page) for page in event.block_hashes], DEVICE_MEDIUM]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def _signed(block_hash: int) -> int:
    """SGLang's hashes are signed."""
    return block_hash - (1 << 64) if block_hash >= 1 << 63 else block_hash
