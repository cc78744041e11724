"""Our view of the host tier against LMCache's own in-process cache engine and what its server tells, on a CPU."""

import logging
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from predictor.kv_events import Removed, decode_batch
from predictor.pool_cache import CacheSpec, PoolCache
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens
from tests.engine.traces import InProcessLmcache, LmcacheServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_logger = logging.getLogger(__name__)

FAMILY = HashFamily(16)  # of the engine that it is in
CHUNK_TOKENS = 256


def test_chunks_that_it_stores_for_requests_in_flight_are_credited_and_no_others() -> None:
    told = follow(InProcessLmcache(chunk_tokens=CHUNK_TOKENS), CacheSpec())
    assert (told.over, told.under) == (0, 0)
    assert told.had_tokens > 10_000
    assert not told.skipped


def test_of_a_full_memory_whose_size_is_told_hardly_anything_is_credited_that_it_has_evicted() -> None:
    # A chunk takes 8 KiB here: there is room for 196.
    chunks = 196
    told = follow(
        InProcessLmcache(chunk_tokens=CHUNK_TOKENS, host_gib=0.0015),
        CacheSpec(host_blocks=chunks * CHUNK_TOKENS // FAMILY.block_size),
    )
    # It evicts what was not asked for longest, of which nothing is told; what it has had longest is forgotten here.
    assert told.over <= 0.02 * told.asked
    assert set(told.skipped) == {"over_capacity"}, "the memory was large enough for all"
    assert told.under < 0.3 * told.asked


def test_of_its_server_just_what_it_holds_is_credited_while_it_evicts_and_after_it_came_back_empty() -> None:
    told = follow(LmcacheServer(chunk_tokens=CHUNK_TOKENS), CacheSpec())
    assert (told.over, told.under) == (0, 0)
    assert told.had_tokens > 10_000
    assert told.removals > 100
    assert not told.skipped


@dataclass(slots=True)
class Told:
    """How many prompts were credited with more or with less than the engine had of them."""

    asked: int = 0
    over: int = 0
    under: int = 0
    had_tokens: int = 0
    removals: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def follow(engine: InProcessLmcache | LmcacheServer, spec: CacheSpec) -> Told:
    hasher = BlockHasher(np.random.default_rng(1))
    cache = PoolCache(hasher)
    cache.join("w", spec, FAMILY.block_size, 100_000)
    told = Told()
    for kind, *record in engine.records():
        if kind == "batch":
            cache.apply("w", decode_batch(*record))
        if kind != "store":
            continue
        ids, hit_tokens, payload = record
        prompt = Prompt(len(ids), True, {FAMILY: hasher.prompt_hashes(as_tokens(ids), FAMILY, Namespace())})
        credited = cache.reuse(prompt)["w"]
        assert credited.host_tokens == credited.tokens
        # vLLM computes the last token, and so the block that it is in.
        had_tokens = min(hit_tokens, (len(ids) - 1) // FAMILY.block_size * FAMILY.block_size)
        request_id = str(told.asked)
        cache.book("w", request_id, prompt, credited.by_rule)
        batch = decode_batch(payload)
        told.skipped.update(batch.skipped)
        told.removals += sum(len(event.hashes) for event in batch.events if isinstance(event, Removed))
        cache.apply("w", batch)
        cache.release("w", request_id)
        told.asked += 1
        told.over += credited.tokens > had_tokens
        told.under += credited.tokens < had_tokens
        told.had_tokens += had_tokens
    told.skipped.update(cache.skipped)
    _logger.info("%s", told)
    return told
