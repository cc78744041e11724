"""What a pool's workers would reuse of a prompt: their tiers, their way of hashing, and what is on its way."""

import numpy as np
import pytest

from predictor.engines.reuse import sglang, vllm
from predictor.kv_events import Batch, Cleared, KvEvent, Removed, Stored, Tier
from predictor.pool_cache import CacheSpec, PoolCache, Reuse
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, Tokens, as_tokens

IDS = list(range(100, 164))


class Pool:
    def __init__(self, **workers: CacheSpec) -> None:
        self.hasher = BlockHasher(np.random.default_rng(1))
        self.cache = PoolCache(self.hasher)
        for worker, spec in workers.items():
            self.cache.join(worker, spec, block_size=4, capacity_blocks=1000)

    def prompt(self, ids: list[int], salt: str | None = None) -> Prompt:
        tokens, space = as_tokens(ids), Namespace(cache_salt=salt)
        hashes = {family: self.hasher.prompt_hashes(tokens, family, space) for family in self.cache.families}
        return Prompt(len(ids), True, hashes)

    def tell(self, worker: str, *events: KvEvent) -> None:
        self.cache.apply(worker, Batch(None, events, 0))

    def reuse(self, worker: str, ids: list[int]) -> Reuse:
        return self.cache.reuse(self.prompt(ids))[worker]


def stored(ids: list[int], first: int = 1, parent: int | None = None, size: int = 4, **fields: object) -> Stored:
    hashes = tuple(range(first, first + len(ids) // size))
    tier = fields.pop("tier", Tier.DEVICE)
    return Stored(hashes, parent, as_tokens(ids), size, tier, None, None, **fields)  # type: ignore[arg-type]


def pairs(ids: list[int], first: int = 1, size: int = 4) -> Stored:
    """As SGLang with EAGLE tells it: one token more than whole blocks."""
    ahead = np.array(ids[size::size], np.uint32).reshape(-1, 1)
    return stored(ids[:-1], first, size=size, ahead=ahead, pairs=True)


def rows(lookahead: int) -> Tokens:
    """What stands behind each of the first four blocks."""
    return np.array([IDS[4 * block : 4 * block + lookahead] for block in (1, 2, 3, 4)], np.uint32)


def test_what_is_not_on_the_device_takes_time_to_load() -> None:
    pool = Pool(a=CacheSpec(host_s_per_token=1e-3, storage_s_per_token=1e-2), b=CacheSpec())
    pool.tell("a", stored(IDS[:8]))
    pool.tell("a", stored(IDS[:16], first=10, tier=Tier.HOST), stored(IDS[16:24], 14, 13, tier=Tier.STORAGE))
    assert pool.reuse("a", IDS)[:3] == (8, 8, 8)
    assert pool.reuse("a", IDS).load_s == pytest.approx(8 * 1e-3 + 8 * 1e-2)
    assert pool.reuse("b", IDS) == Reuse()
    # What must be computed anyway is not loaded.
    assert pool.reuse("a", IDS[:24])[:3] == (8, 8, 4)
    assert pool.reuse("a", IDS[:24]).load_s == pytest.approx(8 * 1e-3 + 4 * 1e-2)
    assert pool.reuse("a", IDS[:8]) == Reuse(4, 0, 0, 0.0, 4, 4)


def test_what_a_request_ahead_computes_is_on_the_device_by_then() -> None:
    pool = Pool(a=CacheSpec(rule=vllm()), b=CacheSpec(rule=sglang()))
    for worker in ("a", "b"):
        pool.tell(worker, stored(IDS[:8]), stored(IDS[:32], 10, tier=Tier.HOST))
        pool.cache.book(worker, "r", pool.prompt(IDS[:24]), by_rule_tokens=8)
    assert pool.reuse("a", IDS)[:3] == (24, 8, 0)
    assert pool.reuse("b", IDS)[:3] == (8, 24, 0)
    pool.cache.release("a", "r")
    assert pool.reuse("a", IDS)[:3] == (8, 24, 0)


def test_all_blocks_cleared_leaves_vllms_offloaded_blocks_and_takes_sglangs_host_copies() -> None:
    pool = Pool(a=CacheSpec(rule=vllm()), b=CacheSpec(rule=sglang()))
    for worker in ("a", "b"):
        pool.tell(worker, stored(IDS[:16]), stored(IDS[:16], tier=Tier.HOST), Cleared())
    assert [pool.reuse(worker, IDS).tokens for worker in ("a", "b")] == [16, 0]
    pool.cache.clear("a")
    assert pool.reuse("a", IDS).tokens == 0


def test_how_an_engine_hashes_shows_in_its_first_events() -> None:
    pool = Pool(pairs=CacheSpec(rule=sglang()), by_eight=CacheSpec(), plain=CacheSpec(), ahead=CacheSpec())
    pool.tell("pairs", pairs(IDS[:17]))
    pool.tell("by_eight", stored(IDS[:16], size=8))
    pool.tell("plain", stored(IDS[:16]))
    pool.tell("ahead", stored(IDS[:16], ahead=rows(2)))
    assert pool.cache.families == {HashFamily(4), HashFamily(4, 1), HashFamily(4, 2), HashFamily(8)}
    assert {worker: reuse.tokens for worker, reuse in pool.cache.reuse(pool.prompt(IDS)).items()} == dict.fromkeys(
        ("pairs", "by_eight", "plain", "ahead"), 16
    )
    # A prompt of 17 tokens has 16 pairs; of these SGLang leaves one to compute, and with it a block.
    assert [pool.reuse(worker, IDS[:17]).tokens for worker in ("pairs", "plain", "ahead")] == [12, 16, 12]
    assert [pool.reuse("pairs", IDS[:18]).tokens, pool.reuse("ahead", IDS[:18]).tokens] == [16, 16]
    other = [*IDS[:16], 5, *IDS[17:]]
    assert [pool.reuse(worker, other).tokens for worker in ("pairs", "plain", "ahead")] == [12, 16, 12]


def test_one_odd_block_does_not_make_a_view_forgotten_but_several_in_a_row_do() -> None:
    pool = Pool(a=CacheSpec())
    pool.tell("a", stored(IDS[:16]))
    for number in range(3):
        pool.tell("a", stored(IDS[:2], 50 + number, size=2))
    pool.tell("a", stored(IDS[16:20], 5, 4))
    pool.tell("a", stored(IDS[:2], 60, size=2))
    assert pool.reuse("a", IDS).tokens == 20
    assert pool.cache.skipped == {"block_size": 4}
    for number in range(4):
        pool.tell("a", stored(IDS[2 * number : 2 * number + 2], 70 + number, size=2))
    assert pool.cache.families == {HashFamily(2)}
    assert pool.cache.blocks("a") == 2  # the one that was believed, and the next


def test_a_speculating_vllm_loses_its_last_block_until_its_hashes_look_ahead() -> None:
    pool = Pool(a=CacheSpec(rule=vllm(speculative=True)))
    pool.tell("a", stored(IDS[:16]))
    assert pool.reuse("a", IDS).tokens == 12
    pool.cache.clear("a")
    pool.tell("a", stored(IDS[:16], ahead=rows(1)))
    assert pool.reuse("a", IDS).tokens == 16


def test_another_block_size_by_the_engines_own_word_empties_the_view() -> None:
    pool = Pool(a=CacheSpec())
    pool.tell("a", stored(IDS[:16]))
    pool.cache.configure("a", 4, 3)
    assert pool.cache.blocks("a") == 3
    pool.cache.configure("a", 16, 100)
    assert (pool.cache.blocks("a"), pool.cache.block_size("a")) == (0, 16)


def test_stores_that_workers_share_serve_them_all() -> None:
    shared = CacheSpec(stores={Tier.HOST: "lmcache"})
    pool = Pool(a=shared, b=shared, c=CacheSpec())
    pool.tell("a", stored(IDS[:32], size=16, tier=Tier.HOST))
    assert [pool.reuse(worker, IDS).host_tokens for worker in "abc"] == [32, 32, 0]
    pool.cache.leave("a")
    assert pool.reuse("b", IDS).host_tokens == 32


def test_a_habit_of_the_engine_that_no_rule_explains_is_learned_from_its_reports() -> None:
    pool = Pool(a=CacheSpec(), b=CacheSpec())
    for worker in ("a", "b"):
        pool.tell(worker, stored(IDS[:32]))
    for number in range(10):
        reuse = pool.reuse("a", IDS)
        pool.cache.book("a", str(number), pool.prompt(IDS), reuse.by_rule)
        pool.cache.learn("a", str(number), 24)
        pool.cache.release("a", str(number))
    assert [pool.reuse(worker, IDS).tokens for worker in "ab"] == [24, 32]
    assert pool.reuse("a", IDS).by_rule == 32
    pool.cache.configure("a", 4, 1000)
    assert pool.reuse("a", IDS).tokens == 32


def test_what_a_request_reused_is_read_from_where_its_first_stored_block_begins() -> None:
    pool = Pool(a=CacheSpec())
    pool.tell("a", stored(IDS[:16]))
    pool.cache.book("a", "hit", pool.prompt(IDS[:32]), 16)
    pool.cache.book("a", "miss", pool.prompt([*range(40)]), 0)
    pool.cache.book("a", "silent", pool.prompt(IDS[:18]), 16)
    pool.tell("a", stored(IDS[16:24], 5, 4))
    pool.tell("a", stored([*range(20)], 100), stored(IDS[24:32], 7, 6))
    assert [pool.cache.release("a", name) for name in ("hit", "miss", "silent", "nobody")] == [16, 0, None, None]


def test_a_worker_that_leaves_takes_everything_with_it() -> None:
    pool = Pool(a=CacheSpec(), b=CacheSpec())
    pool.tell("a", stored(IDS[:16]))
    pool.cache.leave("a")
    pool.cache.join("a", CacheSpec(), 4, None)
    assert pool.reuse("a", IDS).tokens == 0
    with pytest.raises(ValueError, match="'a' is already"):
        pool.cache.join("a", CacheSpec(), 4, None)
    assert sorted(pool.cache) == ["a", "b"]


def test_removals_are_counted_where_nothing_is_known_of_them() -> None:
    pool = Pool(a=CacheSpec())
    pool.tell("a", Removed((5,), Tier.DEVICE))
    assert pool.cache.skipped == {"unknown_removal": 1}


def test_a_chunk_that_is_adrift_has_its_place_in_the_prompt_that_it_was_stored_for() -> None:
    pool = Pool(a=CacheSpec(), b=CacheSpec())

    def on_host(ids: list[int], salt: str | None, worker: str = "a") -> int:
        return pool.cache.reuse(pool.prompt(ids, salt))[worker].host_tokens

    pool.cache.book("a", "other", pool.prompt(list(range(900, 964))), 0)
    pool.cache.book("a", "asked", pool.prompt(IDS, salt="s"), 0)
    # Chunks of two blocks: the second and third of the prompt, and one that is nobody's.
    second = stored(IDS[8:16], 2, None, 8, tier=Tier.HOST, adrift=True)
    third = stored(IDS[16:24], 3, 2, 8, tier=Tier.HOST)
    pool.tell("a", second, third, stored(list(range(8)), 4, None, 8, tier=Tier.HOST, adrift=True))
    assert pool.cache.skipped == {"broken_chain": 1}
    pool.cache.release("a", "asked")
    assert on_host(IDS, "s") == 0, "what is before them is not there"
    first = Stored((1,), None, as_tokens(IDS[:8]), 8, Tier.HOST, None, (("s",),))
    pool.tell("a", first)
    assert on_host(IDS, "s") == 24
    # Without the salt it is another prompt, and nobody else has it.
    assert on_host(IDS, None) == 0
    assert on_host(IDS, "s", "b") == 0
    # Its request is gone: what is stored now has no place any more.
    pool.tell("a", stored(IDS[24:32], 5, None, 8, tier=Tier.HOST, adrift=True))
    assert pool.cache.skipped == {"broken_chain": 2}
    assert on_host(IDS, "s") == 24
