"""Our view of the host tier against LMCache's own in-process cache engine, which runs on a CPU as well."""

import logging
from collections import Counter

import numpy as np
import pytest

from predictor.kv_events import decode_batch
from predictor.pool_cache import CacheSpec, PoolCache
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens
from tests.engine.traces import InProcessLmcache

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_logger = logging.getLogger(__name__)

FAMILY = HashFamily(16)  # of the engine that it is in
CHUNK_TOKENS = 256


def test_chunks_that_it_stores_for_requests_in_flight_are_credited_and_no_others() -> None:
    hasher = BlockHasher(np.random.default_rng(1))
    cache = PoolCache(hasher)
    cache.join("w", CacheSpec(), FAMILY.block_size, 100_000)
    skipped: Counter[str] = Counter()
    asked = told = had = 0
    for kind, *record in InProcessLmcache(chunk_tokens=CHUNK_TOKENS).records():
        if kind != "store":
            continue
        ids, hit_tokens, payload = record
        prompt = Prompt(len(ids), True, {FAMILY: hasher.prompt_hashes(as_tokens(ids), FAMILY, Namespace())})
        credited = cache.reuse(prompt)["w"]
        # Of a chunk of which only the last token is asked for nothing is loaded (vLLM computes that one).
        assert credited.host_tokens == credited.tokens
        assert credited.host_tokens == min(hit_tokens, (len(ids) - 1) // FAMILY.block_size * FAMILY.block_size)
        cache.book("w", str(asked), prompt, credited.by_rule)
        batch = decode_batch(payload)
        skipped.update(batch.skipped)
        cache.apply("w", batch)
        cache.release("w", str(asked))
        asked += 1
        told += len(batch.events)
        had += hit_tokens
    _logger.info("%d prompts, %d chunks told; %d tokens had were credited", asked, told, had)
    assert not skipped
    assert not cache.skipped
    assert had > 10_000
    assert told > 100
