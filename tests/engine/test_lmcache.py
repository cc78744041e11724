"""Our view of the host tier against LMCache's own in-process cache engine, which stores, looks up and tells on a CPU."""

import logging
from collections import Counter

import numpy as np
import pytest

from predictor.cache_index import CacheIndex
from predictor.kv_events import decode_batch
from predictor.prompt import BlockHasher, HashFamily, Namespace, as_tokens
from tests.engine.traces import InProcessLmcache

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_logger = logging.getLogger(__name__)

FAMILY = HashFamily(16)  # of the engine that it is in


def test_chunks_that_it_tells_of_are_credited_and_never_more_than_it_has() -> None:
    hasher = BlockHasher(np.random.default_rng(1))
    index = CacheIndex(hasher, FAMILY)
    index.add("w")
    skipped: Counter[str] = Counter()
    told = asked = known = had = 0
    for kind, *record in InProcessLmcache().records():
        if kind != "store":
            continue
        prompt, hit_tokens, payload = record
        hashes = hasher.prompt_hashes(as_tokens(prompt), FAMILY, Namespace())
        credited_tokens = index.match(hashes)["w"].host * FAMILY.block_size
        assert credited_tokens <= hit_tokens, "it has no such chunk"
        assert credited_tokens % 256 == 0
        batch = decode_batch(payload)
        skipped.update(batch.skipped)
        for event in batch.events:
            index.apply("w", event)
        asked += 1
        told += len(batch.events)
        known += credited_tokens
        had += hit_tokens
        if hit_tokens == 0:
            # All that is stored in one go hangs together: then it is all known.
            again = index.match(hashes)["w"].host * FAMILY.block_size
            assert again == len(prompt) // 256 * 256
    _logger.info("%d prompts, %d chunks told; of %d tokens that it had %d were known; %s", asked, told, had, known, skipped)
    assert had > 10_000
    assert told > 100
    # A chunk whose predecessor was stored by an earlier call is told with the parent 0: nobody can place it.
    assert set(skipped) == {"broken_chain"}
    assert known > 0.2 * had
