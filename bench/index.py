"""The cache index: events in, memory, and a long prompt matched; beside NVIDIA Dynamo's RadixTree on the same input."""

from __future__ import annotations

import gzip
import importlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from bench.row import Row, collect_garbage_as_the_filter_does, median_ms
from predictor.cache_index import CacheIndex
from predictor.event_slices import groups_of, slices
from predictor.kv_events import decode_batch, decode_pieces
from predictor.prompt import BlockHasher, HashFamily, Namespace, Tokens

_BLOCK = 16
_FAMILY = HashFamily(_BLOCK)
_CHUNK = 512  # blocks: what a step of 8,192 tokens stores
_WORKERS = 64
_LONG = 50_000  # blocks
_HELD_IN_ALL = 10_000_000  # blocks
_AT_ONCE_EVENTS, _AT_ONCE_BLOCKS = 1024, 512  # as `extproc.kv_feed` has it


def rows() -> Iterator[Row]:
    for part in (_long_prompt, _events, _ten_million):
        collect_garbage_as_the_filter_does()
        yield from part()


def _long_prompt() -> Iterator[Row]:
    """Every fourth worker has the whole prompt, the others a part each of its beginning."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 150_000, _LONG * _BLOCK).astype(np.uint32)
    held = [_LONG if number % 4 == 0 else _LONG * (number + 1) // _WORKERS for number in range(_WORKERS)]
    hasher = BlockHasher(rng)
    index = CacheIndex(hasher, _FAMILY)
    for number, blocks in enumerate(held):
        index.add(str(number))
        for payload in _prompt_payloads(tokens[: blocks * _BLOCK]):
            for event in decode_batch(payload).events:
                index.apply(str(number), event)
    hashes = hasher.prompt_hashes(tokens, _FAMILY, Namespace())
    assert list(index.runs(hashes).values()) == held
    hash_ms = median_ms(lambda: hasher.prompt_hashes(tokens, _FAMILY, Namespace()), 25)
    match_ms = median_ms(lambda: index.runs(hashes), 25)
    yield Row("hash 50,000 blocks (800K tokens)", f"{hash_ms:.1f} ms")
    yield Row("match 50,000 blocks against 64 workers", f"{match_ms:.1f} ms")
    peer = _dynamo(tokens, held)
    if peer is None:
        yield Row("... beside Dynamo's RadixTree", "not installed (make bench installs it)")
        return
    yield Row("... Dynamo's RadixTree: hash", f"{peer.hash_ms:.1f} ms")
    yield Row("... Dynamo's RadixTree: match", f"{peer.match_ms:.1f} ms")
    yield Row(
        "hash + match, of Dynamo's time", f"{(hash_ms + match_ms) / (peer.hash_ms + peer.match_ms):.2f}", "<= 0.25"
    )


@dataclass(frozen=True, slots=True)
class _Peer:
    hash_ms: float
    match_ms: float


def _dynamo(tokens: Tokens, held: list[int]) -> _Peer | None:
    try:
        dynamo = importlib.import_module("dynamo._core")
    except ImportError:
        return None
    ids = tokens.tolist()  # what it takes; its own reading of an array is slower
    hashes = dynamo.compute_block_hash_for_seq(ids, _BLOCK)
    tree = dynamo.RadixTree()
    for worker, blocks in enumerate(held):
        for first in range(0, blocks, _CHUNK):
            told = [
                {"block_hash": at + 1, "tokens_hash": hashes[at], "mm_extra_info": None}
                for at in range(first, min(first + _CHUNK, blocks))
            ]
            event = {
                "event_id": first,
                "data": {"stored": {"parent_hash": first or None, "blocks": told}},
                "storage_tier": "device",
                "dp_rank": 0,
            }
            tree.apply_event(worker, json.dumps(event).encode())
    scores = tree.find_matches(hashes).scores
    assert {worker: scores[(worker, 0)] for worker in range(len(held))} == dict(enumerate(held))
    return _Peer(
        hash_ms=median_ms(lambda: dynamo.compute_block_hash_for_seq(ids, _BLOCK), 25),
        match_ms=median_ms(lambda: tree.find_matches(hashes), 25),
    )


def _events() -> Iterator[Row]:
    """A cache that is full: whatever is stored pushes as much out, and vLLM tells each evicted block by itself."""
    blocks = 160_000
    runs = {
        "a step's 512 blocks stored, 512 evicted one by one": _steady(blocks, 200, [_CHUNK]),
        "32 prompts of 16 blocks stored, 512 evicted": _steady(blocks, 200, [16] * 32),
        "64 decoded blocks stored one by one, 64 evicted": _steady(blocks, 800, [1] * 64),
        "16 of them": _steady(blocks, 1600, [1] * 16),
        "conversations as vLLM tells of them": _captured("conversations", 25_000),
        "prompts while 200 sequences decode, likewise": _captured("decodes", 150_000),
    }
    for name, payloads in runs.items():
        hasher = BlockHasher(np.random.default_rng(2))
        index = CacheIndex(hasher, _FAMILY)
        index.add("w")
        for payload in payloads.filling:
            _apply(index, "w", payload)
        spent = [_apply(index, "w", payload) for payload in payloads.steady]
        rate = payloads.blocks / sum(one.cpu_s for one in spent)
        assert not index.skipped
        yield Row(f"KV events: {name}", f"{rate / 1e3:,.0f}K blocks/s", ">= 300K blocks/s")
        yield Row("... held the loop for at most", _held_ms(spent), "< 20 ms")


@dataclass(frozen=True, slots=True)
class _Payloads:
    filling: list[bytes]
    steady: list[bytes]
    blocks: int  # stored and removed by the steady ones


def _steady(capacity: int, batches: int, runs: list[int]) -> _Payloads:
    """Whoever stores has what it needs evicted first."""
    return _payloads(capacity, [[part for blocks in runs for part in (-blocks, blocks)]] * batches)


def _captured(name: str, capacity: int) -> _Payloads:
    """Batches cut as vLLM 0.32's own scheduler cut them once its cache was full.

    Of a run of `tests.engine.forecast_truth`, "trace 1.3" or "decodes, budget 512": batch by batch the blocks of each
    stored run, and negative the blocks that were evicted one by one.
    """
    shapes = json.loads(gzip.decompress((Path(__file__).parent / "event_shapes.json.gz").read_bytes()))
    return _payloads(capacity, shapes[name])


def _payloads(capacity: int, batches: Sequence[Sequence[int]]) -> _Payloads:
    rng = np.random.default_rng(3)
    every = [part for batch in batches for part in batch]
    stored_blocks = sum(part for part in every if part > 0)
    names = rng.integers(0, 1 << 64, capacity + stored_blocks, dtype=np.uint64).tolist()

    def stored(first: int, blocks: int) -> dict[str, object]:
        ids = rng.integers(0, 150_000, blocks * _BLOCK).tolist()
        parent = names[first - int(rng.integers(1, 200))] if blocks == 1 else None  # a sequence that is decoded goes on
        return _stored(names[first : first + blocks], parent, ids)

    filling = [msgspec.msgpack.encode([0.0, [stored(at, _CHUNK)], 0]) for at in range(0, capacity - _CHUNK, _CHUNK)]
    at, gone = len(filling) * _CHUNK, 0
    steady = []
    for batch in batches:
        events = []
        for part in batch:
            if part > 0:
                events.append(stored(at, part))
                at += part
            else:
                events += [_removed(name) for name in names[gone : gone - part]]
                gone -= part
        steady.append(msgspec.msgpack.encode([0.0, events, 0]))
    return _Payloads(filling, steady, sum(map(abs, every)))


def _ten_million() -> Iterator[Row]:
    """64 engines of 156,250 blocks each, nothing in common."""
    index = CacheIndex(BlockHasher(np.random.default_rng(4)), _FAMILY)
    rng = np.random.default_rng(5)
    each = _HELD_IN_ALL // _WORKERS
    spent: list[_Spent] = []
    for number in range(_WORKERS):
        index.add(str(number), each)
        for first in range(0, each, _CHUNK):
            blocks = min(_CHUNK, each - first)
            names = rng.integers(0, 1 << 64, blocks, dtype=np.uint64).tolist()
            ids = rng.integers(0, 150_000, blocks * _BLOCK).tolist()
            payload = msgspec.msgpack.encode([0.0, [_stored(names, None, ids)], 0])
            spent.append(_apply(index, str(number), payload))
    held = sum(index.blocks(str(number)) for number in range(_WORKERS))
    yield Row("10M blocks over 64 workers: memory per block", f"{index.bytes / held:.0f} B", "<= 120 B")
    rate = held / sum(one.cpu_s for one in spent)
    yield Row("... filled at", f"{rate / 1e3:,.0f}K blocks/s", ">= 300K blocks/s")
    yield Row("... held the loop for at most", _held_ms(spent), "< 20 ms")
    started_s = time.perf_counter()
    index.remove("0")
    gone_s = time.perf_counter() - started_s
    yield Row("... a worker of 156,250 blocks removed in", f"{gone_s * 1e3:.2f} ms", "< 20 ms")


@dataclass(frozen=True, slots=True)
class _Spent:
    cpu_s: float
    longest_s: float  # CPU time without letting others have their turn: on a shared machine a clock shows their load


def _apply(index: CacheIndex, worker: str, payload: bytes) -> _Spent:
    """From the payload to the index, in turns as the feed takes them."""
    longest_s, at_s = 0.0, time.process_time()
    began_s = at_s
    for piece in decode_pieces(payload, _AT_ONCE_EVENTS):
        for group in groups_of(slices(piece.events, _AT_ONCE_BLOCKS), _AT_ONCE_BLOCKS):
            for event in group:
                index.apply(worker, event)
            now_s = time.process_time()
            longest_s, at_s = max(longest_s, now_s - at_s), now_s
    return _Spent(at_s - began_s, longest_s)


def _held_ms(spent: list[_Spent]) -> str:
    longest = sorted(one.longest_s * 1e3 for one in spent)
    return f"{longest[-1]:.1f} ms (p99 {longest[len(longest) * 99 // 100]:.1f})"


def _prompt_payloads(tokens: Tokens) -> Iterator[bytes]:
    """One prompt in chunks of 512 blocks, as vLLM publishes it; a block's name is its place."""
    blocks = len(tokens) // _BLOCK
    for first in range(0, blocks, _CHUNK):
        last = min(first + _CHUNK, blocks)
        ids = tokens[first * _BLOCK : last * _BLOCK].tolist()
        yield msgspec.msgpack.encode([0.0, [_stored(list(range(first + 1, last + 1)), first or None, ids)], 0])


def _stored(names: list[int], parent: int | None, ids: list[int]) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": ids,
        "block_size": _BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removed(name: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}
