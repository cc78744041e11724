"""The domain alone: hashing, matching, KV events, one decision."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator

import msgspec
import numpy as np

from bench.row import Row, median_ms
from predictor.cache_index import CacheIndex
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Wish, WorkerSpec
from predictor.kv_events import decode_batch
from predictor.prefill_cost import LearningPolicy, PrefillCost
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt
from predictor.step_sample import StepSample

_BLOCK = 16
_FAMILY = HashFamily(_BLOCK)


def rows() -> Iterator[Row]:
    yield from _hash_and_match()
    yield from _kv_events()
    yield from _place()
    yield from _learn()


def _hash_and_match() -> Iterator[Row]:
    rng = np.random.default_rng(1)
    hasher = BlockHasher(rng)
    tokens = rng.integers(0, 150_000, 50_000 * _BLOCK).astype(np.uint32)
    hash_ms = median_ms(lambda: hasher.prompt_hashes(tokens, _FAMILY, Namespace()), 15)
    yield Row("hash 50,000 blocks (800K tokens)", f"{hash_ms:.1f} ms")
    index = CacheIndex(hasher, _FAMILY)
    payload = _stored(tokens, first_hash=1)
    for number in range(64):
        index.add(f"w{number}", None)
        if number % 4 == 0:
            for event in decode_batch(payload).events:
                index.apply(f"w{number}", event)
    hashes = hasher.prompt_hashes(tokens, _FAMILY, Namespace())
    yield Row("match 50,000 blocks against 64 workers", f"{median_ms(lambda: index.runs(hashes), 15):.1f} ms")


def _kv_events() -> Iterator[Row]:
    rng = np.random.default_rng(2)
    hasher = BlockHasher(rng)
    index = CacheIndex(hasher, _FAMILY)
    index.add("w", None)
    prompts, blocks = 200, 500
    payloads = []
    for number in range(prompts):
        tokens = rng.integers(0, 150_000, blocks * _BLOCK).astype(np.uint32)
        payloads.append(_stored(tokens, first_hash=1 + number * blocks))
    started_s = time.perf_counter()
    slowest_s = 0.0
    for payload in payloads:
        batch_s = time.perf_counter()
        for event in decode_batch(payload).events:
            index.apply("w", event)
        slowest_s = max(slowest_s, time.perf_counter() - batch_s)
    rate = prompts * blocks / (time.perf_counter() - started_s)
    yield Row("KV events, 500 blocks a batch", f"{rate / 1e3:,.0f}K blocks/s", ">= 300K blocks/s")
    yield Row("... the longest batch held the loop for", f"{slowest_s * 1e3:.1f} ms", "< 20 ms")
    del payloads
    tracemalloc.start()
    fresh = CacheIndex(hasher, _FAMILY)
    fresh.add("w", None)
    for number in range(100):
        tokens = rng.integers(0, 150_000, blocks * _BLOCK).astype(np.uint32)
        for event in decode_batch(_stored(tokens, first_hash=1 + number * blocks)).events:
            fresh.apply("w", event)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    yield Row("memory per resident block", f"{held / (100 * blocks):.0f} B", "<= 120 B")


def _place() -> Iterator[Row]:
    for workers, queued in ((3, 2), (16, 16), (64, 16), (256, 64)):
        fleet, now_s = _busy_fleet(workers, queued)
        prompt = Prompt(2_000, exact=True, hashes={_FAMILY: np.arange(125, dtype=np.uint64)})
        number = 0

        def place(fleet: Fleet = fleet, prompt: Prompt = prompt, now_s: float = now_s) -> None:
            nonlocal number
            number += 1
            decision = fleet.place("p", prompt, Wish(f"bench-{number}", now_s), now_s)
            assert isinstance(decision, Grant)

        budget = "<= 3 ms" if workers == 256 else ""
        yield Row(f"decision, {workers} workers x {queued} queued", f"{median_ms(place, 20):.2f} ms", budget)


def _learn() -> Iterator[Row]:
    """Taking in what a busy worker shows: steps of all compositions, with noise."""
    rng = np.random.default_rng(4)
    cost = PrefillCost(LearningPolicy())
    samples = []
    for _ in range(6000):
        tokens, start, decoding = int(rng.integers(0, 8192)), int(rng.exponential(20_000)), int(rng.integers(1, 200))
        squares = (start + tokens) ** 2 - start**2
        step_s = 0.005 + 30e-6 * tokens + 37e-12 * squares + 50e-6 * decoding
        samples.append(StepSample(step_s * float(np.exp(rng.normal(0.0, 0.1))), tokens, squares, decoding))
    for sample in samples[:3000]:
        cost.add_steps(sample)
    times = []
    for sample in samples[3000:]:
        started_s = time.perf_counter()
        cost.add_steps(sample)
        times.append(time.perf_counter() - started_s)
    yield Row("a step learned from, fits included", f"{1e6 * sum(times) / len(times):.0f} us")
    yield Row(f"... the longest (a fit of {cost.samples} samples)", f"{1e3 * max(times):.1f} ms", "< 20 ms")


def _busy_fleet(workers: int, queued: int) -> tuple[Fleet, float]:
    rng = np.random.default_rng(3)
    fleet = Fleet([PoolPolicy("p")], BlockHasher(rng), rng)
    settings = Settings(block_size=_BLOCK, max_num_batched_tokens=2048)
    for number in range(workers):
        fleet.join("p", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", settings))
    for number in range(workers * queued):
        prompt = Prompt(int(rng.integers(500, 8_000)), exact=True)
        fleet.place("p", prompt, Wish(f"t{number}", 0.0), 0.0)
    return fleet, 0.001


def _stored(tokens: np.ndarray, first_hash: int) -> bytes:
    """One payload as vLLM publishes it: a run of blocks from a prompt's start."""
    hashes = [(first_hash + number) * 0x9E3779B97F4A7C15 % (1 << 64) for number in range(len(tokens) // _BLOCK)]
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens.tolist(),
        "block_size": _BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])
