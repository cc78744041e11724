"""How many tokens a cached run saves: by table, and as a simulated engine itself would find it."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginesim import kv_events as engine
from enginesim.kv_events import EventForm, encode_batch
from enginesim.request import Request
from enginesim.scheduler import Scheduler
from enginesim.settings import CostSettings, SchedulerSettings
from enginesim.step_time import StepTime
from enginesim.virtual_engine import VirtualEngine
from predictor.cache_index import CacheIndex
from predictor.engines.reuse import ReuseRule, sglang, vllm
from predictor.kv_events import Cleared, KvEvent, Tier, decode_batch
from predictor.prompt import BlockHasher, HashFamily, Namespace, as_tokens


@pytest.mark.parametrize(
    ("run_blocks", "block_size", "prompt_tokens", "expected"),
    [
        (0, 16, 1, 0),
        (0, 16, 1000, 0),
        (1, 16, 17, 16),
        (3, 16, 100, 48),
        (6, 16, 100, 96),
        # A fully cached prompt computes at least its last token, and with it the block that it ends.
        (1, 16, 16, 0),
        (2, 16, 32, 16),
        (6, 16, 96, 80),
        (62, 16, 1000, 992),
        (63, 16, 1008, 992),
        # A run longer than the prompt saves no more than the prompt has.
        (100, 16, 33, 32),
        (100, 16, 32, 16),
        (100, 16, 1, 0),
        (1, 16, 1, 0),
        # Blocks of one token, as SGLang has them.
        (1, 1, 1, 0),
        (5, 1, 5, 4),
        (3, 1, 5, 3),
        (2, 1000, 2000, 1000),
        (1, 1000, 999, 0),
    ],
)
def test_reuse_ends_at_a_block_and_before_the_last_token(
    run_blocks: int, block_size: int, prompt_tokens: int, expected: int
) -> None:
    assert vllm().reusable_tokens(run_blocks * block_size, block_size, prompt_tokens) == expected


def test_reuse_is_the_longest_whole_run_that_leaves_a_token_to_compute() -> None:
    for block_size in (1, 2, 3, 16):
        for prompt_tokens in range(1, 70):
            for run_blocks in range(80 // block_size):
                usable = [blocks for blocks in range(run_blocks + 1) if blocks * block_size < prompt_tokens]
                assert (
                    vllm().reusable_tokens(run_blocks * block_size, block_size, prompt_tokens)
                    == usable[-1] * block_size
                )


def blocks_told(events: Iterable[KvEvent]) -> int:
    return sum(1 if isinstance(event, Cleared) else len(event.hashes) for event in events)


def blocks_of(event: engine.KvEvent) -> int:
    return len(event.block_hashes) if isinstance(event, engine.BlockStored) else 1


def test_speculation_costs_one_block_more_until_the_hashes_look_ahead() -> None:
    """EAGLE and MTP: vLLM up to 0.32 computes the last hit again; 0.33 where it cannot look ahead."""
    eagle = vllm(speculative=True)
    assert [eagle.reusable_tokens(run, 16, 100) for run in (0, 16, 32, 96, 200)] == [0, 0, 16, 80, 80]
    assert eagle.reusable_tokens(96, 16, 96) == 64
    ahead = eagle.with_blocks_seen(lookahead=1, pairs=False)
    assert [ahead.reusable_tokens(run, 16, 97) for run in (16, 96)] == [16, 96]
    assert eagle.with_blocks_seen(lookahead=0, pairs=False) == eagle


def test_reuse_in_a_hybrid_model_lands_on_what_all_its_groups_share() -> None:
    hybrid = vllm(cache_hit_alignment=528)
    assert [hybrid.reusable_tokens(run, 16, 2000) for run in (512, 528, 1040, 1056, 1999)] == [0, 528, 528, 1056, 1584]
    assert vllm(speculative=True, cache_hit_alignment=528).reusable_tokens(1056, 16, 2000) == 528


def test_sglang_leaves_a_token_to_compute_and_with_pairs_of_neighbours_two() -> None:
    assert [sglang().reusable_tokens(run, 1, 10) for run in (0, 5, 9, 10)] == [0, 5, 9, 9]
    assert [sglang().reusable_tokens(run, 64, 129) for run in (64, 128)] == [64, 128]
    assert sglang().reusable_tokens(128, 64, 128) == 64
    pairs = sglang().with_blocks_seen(lookahead=1, pairs=True)
    assert [pairs.reusable_tokens(run, 1, 10) for run in (5, 8, 9)] == [5, 8, 8]
    assert [pairs.reusable_tokens(128, 64, length) for length in (129, 130)] == [64, 128]


def test_sglang_shares_nothing_within_a_batch_and_flushes_its_host_copies_too() -> None:
    assert (vllm().shares_in_flight, sglang().shares_in_flight) == (True, False)
    assert vllm().cleared == {Tier.DEVICE}
    assert sglang().cleared == {Tier.DEVICE, Tier.HOST}


@given(
    st.integers(0, 300), st.integers(1, 40), st.integers(1, 300), st.integers(1, 2), st.booleans(), st.integers(0, 60)
)
def test_what_is_reused_is_cached_aligned_and_leaves_what_must_be_computed(
    run: int, block_size: int, prompt_tokens: int, tail: int, drops: bool, alignment: int
) -> None:
    rule = ReuseRule(computed_at_least=tail, alignment=alignment, drops_last_unit=drops)
    reused = rule.reusable_tokens(run, block_size, prompt_tokens)
    assert 0 <= reused <= run
    assert reused == 0 or reused <= prompt_tokens - tail
    assert reused % max(alignment, block_size) == 0
    assert reused <= rule.reusable_tokens(run + 1, block_size, prompt_tokens)


class Conversations:
    """Prompts that share beginnings, go on from each other, and sometimes bear a salt."""

    def __init__(self, source: random.Random, block_size: int) -> None:
        self.source = source
        self.block_size = block_size
        self.past: list[tuple[list[int], str | None]] = [([1, 2, 3, 1, 2, 3, 1], None)]
        self.count = 0

    def prompt(self) -> tuple[list[int], str | None]:
        tokens, salt = self.source.choice(self.past)
        tokens = tokens[: self.source.randint(0, len(tokens))]
        tokens = tokens + [self.source.randrange(3) for _ in range(self.source.randint(0, 12))]
        if self.source.random() < 0.2:
            salt = self.source.choice([None, "salt", "pepper"])
        return tokens[:90] or [1], salt

    def request(self, max_tokens: int) -> Request:
        tokens, salt = self.prompt()
        self.count += 1
        request = Request(self.count, list(tokens), max_tokens, self.block_size, salt)
        request.hash_more()
        self.past = [*self.past[-30:], (request.token_ids, salt)]
        return request


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_after_every_step_of_an_engine_the_index_foretells_what_its_next_prompt_will_hit(
    form: EventForm, block_size: int
) -> None:
    seed = random.randrange(2**32)  # set by pytest-randomly, which prints its own
    source = random.Random(seed)
    hasher = BlockHasher(np.random.default_rng(seed))
    index = CacheIndex(hasher, HashFamily(block_size))
    settings = SchedulerSettings(
        block_size=block_size,
        num_gpu_blocks=1 + 120 // block_size,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        long_prefill_token_threshold=10,
        max_model_len=110,
    )
    made = Conversations(source, block_size)
    engines = {
        name: VirtualEngine(Scheduler(settings, sample=lambda request: source.randrange(3)), StepTime(CostSettings()))
        for name in ("a", "b")
    }
    for name in engines:
        index.add(name, settings.num_gpu_blocks)

    totals = {"hits": 0, "removed": 0, "stored": 0, "cleared": 0}
    for turn in range(1000):
        for name, simulated in engines.items():
            if source.random() < 0.5 and len(simulated.scheduler.waiting) < 5:
                simulated.scheduler.add(made.request(max_tokens=source.randint(1, 12)))
            if source.random() < 0.05 and simulated.scheduler.running:
                simulated.scheduler.abort(source.choice(simulated.scheduler.running))
            if not simulated.scheduler.has_work and source.random() < 0.3:
                totals["cleared"] += simulated.scheduler.pool.clear()
            step = simulated.step()
            batch = decode_batch(encode_batch(step.events, step.end_s, form))
            assert batch.skipped == {}
            assert blocks_told(batch.events) == sum(blocks_of(event) for event in step.events)
            for event in batch.events:
                index.apply(name, event)
                totals["stored" if hasattr(event, "tokens") else "removed"] += 1
            assert index.blocks(name) == len(simulated.scheduler.pool.hash_counts())

        for _ in range(4):
            tokens, salt = made.prompt()
            asked = Request(-1, list(tokens), 1, block_size, salt)
            asked.hash_more()
            hashes = hasher.prompt_hashes(as_tokens(tokens), HashFamily(block_size), Namespace(cache_salt=salt))
            runs = index.runs(hashes)
            for name, simulated in engines.items():
                hit_tokens = len(simulated.scheduler.pool.find_prefix(asked)) * block_size
                foretold = vllm().reusable_tokens(runs[name] * block_size, block_size, len(tokens))
                assert foretold == hit_tokens, f"seed {seed}, turn {turn}, {name}: {tokens} {salt}"
                totals["hits"] += hit_tokens
    assert index.skipped == {}
    # Else the run has tested nothing.
    assert totals["hits"] > 1000
    assert totals["stored"] > 100
    assert totals["removed"] > 100
    assert sum(simulated.scheduler.totals.prefix_cache_hits for simulated in engines.values()) > 100


def test_a_request_is_found_to_have_hit_what_was_foretold_when_it_came() -> None:
    settings = SchedulerSettings(num_gpu_blocks=400)
    simulated = VirtualEngine(Scheduler(settings, sample=lambda request: 7), StepTime(CostSettings()))
    hasher = BlockHasher(np.random.default_rng(1))
    index = CacheIndex(hasher, HashFamily(16))
    index.add("a", None)
    foretold, reported = [], []
    for number, prompt in enumerate([range(1000), range(1000), range(1008), range(1009), range(500), range(16)]):
        request = Request(number, list(prompt), 1, 16)
        request.hash_more()
        runs = index.runs(hasher.prompt_hashes(as_tokens(list(prompt)), HashFamily(16), Namespace()))
        foretold.append(vllm().reusable_tokens(runs["a"] * 16, 16, len(prompt)))
        for step in simulated.run([(0.0, request)]):
            for event in decode_batch(encode_batch(step.events, step.end_s, "map")).events:
                index.apply("a", event)
        reported.append(request.cached_tokens)
    assert foretold == reported == [0, 992, 992, 1008, 496, 0]
