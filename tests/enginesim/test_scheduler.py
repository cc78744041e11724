"""The scheduling rule of vLLM V1, step by step with exact numbers."""

from collections.abc import Sequence
from itertools import count

import pytest

from enginesim.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from enginesim.request import Phase, Request
from enginesim.scheduler import Batch, Scheduler
from enginesim.settings import SchedulerSettings

ids = count()


def scheduler(
    block_size: int = 16,
    num_gpu_blocks: int = 8192,
    max_num_batched_tokens: int = 2048,
    max_num_seqs: int = 256,
    long_prefill_token_threshold: int = 0,
    max_model_len: int = 131072,
) -> Scheduler:
    settings = SchedulerSettings(
        block_size,
        num_gpu_blocks,
        max_num_batched_tokens,
        max_num_seqs,
        long_prefill_token_threshold,
        max_model_len,
    )
    return Scheduler(settings, sample=lambda request: 7)


def prompt(tokens: int, first: int) -> list[int]:
    return list(range(first, first + tokens))


def add(to: Scheduler, token_ids: Sequence[int], max_tokens: int = 1, cache_salt: str | None = None) -> Request:
    request = Request(next(ids), list(token_ids), max_tokens, to.settings.block_size, cache_salt)
    request.hash_more()
    to.add(request)
    return request


def shares(batch: Batch) -> dict[int, int]:
    """Tokens by request id."""
    return {chunk.request.id: chunk.tokens for chunk in batch.chunks}


def run_step(engine: Scheduler) -> dict[int, int]:
    batch = engine.schedule()
    engine.complete(batch)
    return shares(batch)


def run_all(engine: Scheduler) -> None:
    while engine.has_work:
        run_step(engine)


def test_a_small_prompt_behind_a_giant_shares_the_giants_last_step() -> None:
    engine = scheduler()
    giant = add(engine, prompt(5000, 0))
    assert run_step(engine) == {giant.id: 2048}
    small = add(engine, prompt(100, 10_000))
    assert run_step(engine) == {giant.id: 2048}
    assert small.phase is Phase.WAITING
    assert run_step(engine) == {giant.id: 904, small.id: 100}
    assert giant.output_tokens == small.output_tokens == 1


def test_a_threshold_lets_the_small_prompt_in_but_does_not_bind_a_giant_that_is_alone() -> None:
    engine = scheduler(long_prefill_token_threshold=1024)
    giant = add(engine, prompt(5000, 0))
    assert run_step(engine) == {giant.id: 2048}
    small = add(engine, prompt(100, 10_000))
    assert run_step(engine) == {giant.id: 1024, small.id: 100}
    assert small.output_tokens == 1
    assert run_step(engine) == {giant.id: 1928}


def test_a_decoding_request_costs_one_token_of_the_budget() -> None:
    engine = scheduler()
    first = add(engine, prompt(100, 0), max_tokens=3)
    run_step(engine)
    giant = add(engine, prompt(3000, 10_000))
    batch = engine.schedule()
    assert shares(batch) == {first.id: 1, giant.id: 2047}
    assert [chunk.is_decode for chunk in batch.chunks] == [True, False]


def test_a_decode_admitted_behind_a_giant_starves_while_the_giant_eats_the_budget() -> None:
    engine = scheduler(max_num_batched_tokens=1000, long_prefill_token_threshold=900)
    giant = add(engine, prompt(5000, 0))
    small = add(engine, prompt(100, 10_000), max_tokens=5)
    assert run_step(engine) == {giant.id: 900, small.id: 100}
    late = add(engine, prompt(500, 20_000))
    assert run_step(engine) == {giant.id: 900, small.id: 1, late.id: 99}
    engine.abort(small)
    engine.abort(late)
    assert run_step(engine) == {giant.id: 1000}


@pytest.mark.parametrize(
    ("tokens", "cached_tokens"), [(15, 0), (16, 0), (17, 16), (31, 16), (63, 48), (64, 48), (65, 64)]
)
def test_a_prompt_sent_again_reuses_whole_blocks_but_never_its_last_token(tokens: int, cached_tokens: int) -> None:
    engine = scheduler()
    first = add(engine, prompt(tokens, 0))
    run_all(engine)
    again = add(engine, prompt(tokens, 0))
    assert run_step(engine) == {again.id: tokens - cached_tokens}
    assert (first.cached_tokens, again.cached_tokens) == (0, cached_tokens)
    assert engine.totals.prefix_cache_queries == 2 * tokens
    assert engine.totals.prefix_cache_hits == cached_tokens


def test_a_hit_ends_at_the_first_missing_block() -> None:
    engine = scheduler()
    add(engine, prompt(64, 0))
    run_all(engine)
    other = add(engine, [*prompt(16, 0), 999, *prompt(47, 17)])
    run_step(engine)
    assert other.cached_tokens == 16


def test_equal_prompts_in_one_step_share_blocks_that_are_not_computed_yet() -> None:
    engine = scheduler()
    first, second = add(engine, prompt(100, 0)), add(engine, prompt(100, 0))
    assert run_step(engine) == {first.id: 100, second.id: 4}
    assert second.cached_tokens == 96


def test_a_block_computed_twice_is_stored_twice_and_survives_one_removal() -> None:
    engine = scheduler(num_gpu_blocks=7)
    add(engine, prompt(32, 0))
    run_all(engine)
    again = add(engine, prompt(32, 0))
    batch = engine.schedule()
    _, events = engine.complete(batch)
    twin = again.block_hashes[1]
    assert [event.block_hashes for event in events if isinstance(event, BlockStored)] == [[twin]]
    assert engine.pool.hash_counts()[twin] == 2
    add(engine, prompt(63, 1000))
    _, events = engine.complete(engine.schedule())
    assert [event for event in events if isinstance(event, BlockRemoved)] == [BlockRemoved(twin)]
    assert engine.pool.hash_counts()[twin] == 1


def test_one_event_tells_the_run_of_blocks_that_a_step_filled() -> None:
    engine = scheduler(max_num_batched_tokens=40)
    request = add(engine, prompt(70, 0), cache_salt="tenant")
    _, first = engine.complete(engine.schedule())
    _, second = engine.complete(engine.schedule())
    hashes = request.block_hashes
    assert first == [BlockStored(hashes[:2], None, prompt(32, 0), 16, [["tenant"], None])]
    assert second == [BlockStored(hashes[2:4], hashes[1], prompt(32, 32), 16, [None, None])]


def test_a_salt_isolates_equal_prompts() -> None:
    engine = scheduler()
    add(engine, prompt(64, 0), cache_salt="a")
    run_all(engine)
    other, same = add(engine, prompt(64, 0), cache_salt="b"), add(engine, prompt(64, 0), cache_salt="a")
    run_all(engine)
    assert (other.cached_tokens, same.cached_tokens) == (0, 48)


def test_generated_tokens_fill_blocks_except_the_last_one_sampled() -> None:
    engine = scheduler()
    request = add(engine, prompt(12, 0), max_tokens=4)
    run_all(engine)
    assert (len(request.token_ids), engine.pool.cached_blocks) == (16, 0)
    longer = add(engine, prompt(12, 0), max_tokens=5)
    stored = []
    while engine.has_work:
        stored += engine.complete(engine.schedule())[1]
    assert stored == [BlockStored(longer.block_hashes, None, [*prompt(12, 0), 7, 7, 7, 7], 16, [None])]


def test_the_whole_prompt_must_fit_before_its_first_chunk_and_the_head_blocks_the_line() -> None:
    engine = scheduler(num_gpu_blocks=11, max_num_batched_tokens=32)
    holder = add(engine, prompt(60, 0), max_tokens=4)
    run_step(engine)
    large, small = add(engine, prompt(128, 1000)), add(engine, prompt(16, 5000))
    assert run_step(engine) == {holder.id: 28}
    assert [*engine.waiting] == [large, small]
    assert [run_step(engine) for _ in range(3)] == [{holder.id: 1}] * 3
    assert run_step(engine) == {large.id: 32}


def test_no_more_than_max_num_seqs_run_at_once() -> None:
    engine = scheduler(max_num_seqs=2)
    first, second, third = (add(engine, prompt(20, 100 * n), max_tokens=2) for n in range(3))
    assert run_step(engine) == {first.id: 20, second.id: 20}
    assert run_step(engine) == {first.id: 1, second.id: 1}
    assert run_step(engine) == {third.id: 20}


def test_the_youngest_running_request_gives_way_when_a_decode_needs_a_block() -> None:
    engine = scheduler(block_size=4, num_gpu_blocks=5)
    old, young = add(engine, prompt(8, 0), max_tokens=4), add(engine, prompt(7, 100), max_tokens=4)
    assert run_step(engine) == {old.id: 8, young.id: 7}
    batch = engine.schedule()
    assert batch.preempted == (young,)
    assert shares(batch) == {old.id: 1}
    engine.complete(batch)
    assert (young.phase, young.computed_tokens, young.preemptions) == (Phase.WAITING, 0, 1)
    assert engine.waiting[0] is young
    run_all(engine)
    assert old.output_tokens == young.output_tokens == 4
    assert young.cached_tokens == 0  # the hit after the preemption is not reported
    assert engine.totals.preemptions == 1


def test_nobody_is_admitted_in_a_step_with_a_preemption_and_the_victim_hits_its_own_blocks_later() -> None:
    engine = scheduler(block_size=4, num_gpu_blocks=6)
    old = add(engine, prompt(8, 0), max_tokens=2)
    young = add(engine, prompt(11, 100), max_tokens=2)
    run_step(engine)
    waiting = add(engine, prompt(2, 200))
    batch = engine.schedule()
    assert (shares(batch), batch.preempted) == ({old.id: 1}, (young,))
    engine.complete(batch)
    # 12 tokens by now, of which the block that old took back for its decode was the unhashed one: two blocks are left
    assert run_step(engine) == {young.id: 4, waiting.id: 2}


def test_leaves_are_evicted_before_roots_and_unhashed_blocks_before_both() -> None:
    engine = scheduler(block_size=4, num_gpu_blocks=6)
    request = add(engine, prompt(14, 0))
    run_all(engine)
    root, middle, leaf = request.block_hashes
    add(engine, prompt(15, 100))
    _, events = engine.complete(engine.schedule())
    removed = [event.block_hash for event in events if isinstance(event, BlockRemoved)]
    assert removed == [leaf, middle]
    assert root in engine.pool.hash_counts()


def test_a_hit_makes_blocks_young_again() -> None:
    engine = scheduler(block_size=4, num_gpu_blocks=7)
    first = add(engine, prompt(5, 0))
    run_all(engine)
    second = add(engine, prompt(5, 100))
    run_all(engine)
    add(engine, prompt(5, 0))
    run_all(engine)
    add(engine, prompt(20, 200))
    _, events = engine.complete(engine.schedule())
    removed = [event.block_hash for event in events if isinstance(event, BlockRemoved)]
    assert removed == [second.block_hashes[0]]
    assert first.block_hashes[0] in engine.pool.hash_counts()


def test_an_aborted_request_frees_its_blocks_and_leaves_their_contents() -> None:
    engine = scheduler()
    request = add(engine, prompt(4000, 0))
    run_step(engine)
    engine.abort(request)
    engine.abort(request)
    assert (engine.has_work, engine.pool.used_blocks, engine.pool.cached_blocks) == (False, 0, 128)
    again = add(engine, prompt(4000, 0))
    run_step(engine)
    assert again.cached_tokens == 2048


def test_a_request_aborted_while_its_step_runs_gets_no_token() -> None:
    engine = scheduler()
    request = add(engine, prompt(20, 0))
    batch = engine.schedule()
    engine.abort(request)
    outputs, events = engine.complete(batch)
    assert outputs == []
    assert len(events) == 1


def test_clearing_waits_for_idle_blocks_and_its_event_for_the_next_step() -> None:
    engine = scheduler()
    add(engine, prompt(40, 0), max_tokens=2)
    run_step(engine)
    assert not engine.pool.clear()
    run_step(engine)
    assert engine.pool.clear()
    assert engine.pool.cached_blocks == 0
    add(engine, prompt(20, 0))
    _, events = engine.complete(engine.schedule())
    assert [type(event) for event in events] == [AllBlocksCleared, BlockStored]


def test_output_ends_where_the_cache_or_the_model_does() -> None:
    engine = scheduler(max_model_len=30)
    request = add(engine, prompt(20, 0), max_tokens=100)
    run_all(engine)
    assert request.output_tokens == 10
    with pytest.raises(ValueError, match="30 tokens leaves no room"):
        add(engine, prompt(30, 0))


def test_a_model_that_ends_by_itself_does_so_before_its_limit_and_says_that_it_stopped() -> None:
    engine = scheduler()
    request = Request(1, prompt(20, 0), 100, engine.settings.block_size, ends_by_itself_after=3)
    request.hash_more()
    engine.add(request)
    reasons = []
    while engine.has_work:
        outputs, _ = engine.complete(engine.schedule())
        reasons += [output.finish_reason for output in outputs]
    assert reasons == [None, None, "stop"]
    assert engine.pool.used_blocks == 0


def test_settings_and_requests_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_gpu_blocks must be at least 2"):
        SchedulerSettings(num_gpu_blocks=1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1"):
        Request(0, [1], 0, 16)
    with pytest.raises(ValueError, match="block_hashes is incomplete"):
        scheduler().add(Request(0, prompt(40, 0), 1, 16))
