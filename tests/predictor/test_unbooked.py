"""Requests that came past the filter, as their blocks and the engine's own count show them."""

import itertools

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.arrivals import PromptSizes
from predictor.engines.vllm import Sequence, Settings
from predictor.prefill_cost import StepCost
from predictor.run_forward import Budget
from predictor.shadow import Corrections, Shadow
from predictor.step_sample import StepSample
from predictor.stored_run import StoredRun

# 10 ms a step and 1 ms a token: a full step of 100 tokens takes 0.11 s.
PLAIN = StepCost(0.0, 0.0, 0.010, 0.001, 0.0, 0.0)
SETTINGS = Settings(num_gpu_blocks=1000, max_num_batched_tokens=100)
BLOCK = SETTINGS.block_size


def prompt_of(tokens: int, share: float) -> int:
    """Half of all prompts that are longer than so many tokens have 200 more."""
    return tokens + int(400 * share)


def shadow(samples: list[StepSample] | None = None, settings: Settings = SETTINGS) -> Shadow:
    on_sample = None if samples is None else samples.append
    shade = Shadow(settings, PLAIN, on_sample, prompt_of=prompt_of)
    shade.set_sees_blocks(True)
    return shade


def ours(name: str, blocks: int, first: int) -> Sequence:
    return Sequence(name, blocks * BLOCK, 0, 1000, hashes=range(first, first + blocks))


def begins(blocks: int, last: int = 9001) -> StoredRun:
    """The first blocks of a prompt that nobody has booked."""
    return StoredRun(9000, None, last, blocks)


# Seen by its blocks


def test_a_newcomer_waits_for_the_rest_of_a_prompt_that_is_seen_to_fill_a_step() -> None:
    shade = shadow()
    # Six blocks of a step of 100 tokens: there was no room for a seventh, so the prompt goes on, by 200 tokens as half
    # of all do that are so long.
    shade.stored([begins(6)], 5.0)
    assert shade.unbooked == shade.prefilling == 1
    assert shade.prefill_tokens_ahead() == 200 + BLOCK
    assert shade.timeline(5.0).admitted_s() == pytest.approx(5.0 + 2 * 0.110)


def test_a_prompt_that_left_room_in_its_step_has_ended_there() -> None:
    shade = shadow()
    shade.stored([begins(3)], 5.0)
    assert (shade.unbooked, shade.prefilling, shade.decoding) == (1, 0, 1)
    assert shade.timeline(5.0).admitted_s() == pytest.approx(5.0)


def test_each_chunk_says_that_it_goes_on_until_one_leaves_room() -> None:
    shade = shadow()
    shade.stored([begins(6)], 5.0)
    for number in range(3):
        shade.stored([StoredRun(9100 + number, 9001 + number, 9002 + number, 6)], 5.11 + 0.11 * number)
        assert (shade.unbooked, shade.prefilling) == (1, 1)
    shade.stored([StoredRun(9200, 9004, 9005, 2)], 5.50)
    assert (shade.unbooked, shade.prefilling, shade.forced) == (1, 0, 0)


def test_who_was_booked_gets_what_it_leaves_of_a_step_and_costs_are_learned_of_both() -> None:
    samples: list[StepSample] = []
    shade = shadow(samples)
    shade.book(ours("a", 20, 0), 0.0)
    # Somebody of 32 tokens and a few was there first: of "a" there were 4 blocks in the step, and not 6.
    shade.stored([begins(2), StoredRun(0, None, 3, 4)], 0.110)
    # 32 tokens of it are stored, and no more than four others can have been in the step.
    assert shade.prefill_tokens_ahead() == 320 - 64
    assert [(sample.new_tokens, sample.steps) for sample in samples] == [(100, 1)]
    shade.stored([StoredRun(4, 3, 9, 6)], 0.220)
    # It decodes now, and takes one token of a step.
    assert shade.prefill_tokens_ahead() == 320 - 64 - 99
    assert [(sample.new_tokens, sample.decoding) for sample in samples[1:]] == [(99, 1)]
    assert shade.corrections == Corrections(forced=0, recomposed=1, tokens_held=0)


def test_who_waits_behind_it_is_not_taken_to_have_been_let_in() -> None:
    shade = shadow()
    shade.book(ours("a", 20, 0), 0.0)
    shade.stored([begins(6)], 0.110)
    assert shade.prefill_tokens_ahead() >= 320 + 200
    # With its second chunk it leaves room for three blocks of ours.
    shade.stored([StoredRun(9100, 9001, 9002, 3), StoredRun(0, None, 2, 3)], 0.220)
    assert 320 - 3 * BLOCK - BLOCK < shade.prefill_tokens_ahead() <= 320 - 3 * BLOCK
    assert shade.forced == 0


def test_decodes_that_were_counted_while_its_chunk_was_computed_are_taken_back() -> None:
    shade = shadow()
    shade.book(ours("a", 2, 0), 0.0)
    shade.stored([StoredRun(0, None, 1001, 2)], 0.042)
    shade.first_token("a", 0.042)
    # Five decode steps, and then a step of 99 tokens of somebody else that took as long as eleven.
    shade.advance(0.200)
    assert shade.generated()[0][1] > 12
    shade.stored([begins(6)], 0.042 + 5 * 0.010 + 0.109)
    # The first, five, and the one beside the chunk.
    assert [tokens for _, tokens in shade.generated()] == [1 + 5 + 1]


def test_what_is_learned_while_others_come_and_go_is_what_was_stored() -> None:
    samples: list[StepSample] = []
    shade = shadow(samples)
    shade.book(ours("a", 2, 0), 0.0)
    shade.stored([StoredRun(0, None, 1001, 2)], 0.042)
    shade.first_token("a", 0.042)
    shade.stored([begins(6)], 0.201)
    samples.clear()
    # A decode block after a while: how many steps that were nobody knows for certain.
    shade.stored([StoredRun(50, 1001, 1002, 1)], 0.350)
    assert samples == []


def test_one_that_stores_nothing_any_more_is_gone() -> None:
    shade = shadow()
    shade.stored([begins(3)], 5.0)
    # A decode step takes 10 ms: a block would have come after 8 of them, and one more 16 later.
    shade.advance(5.0 + 0.010 * 24)
    assert shade.unbooked == 1
    shade.advance(5.0 + 0.010 * 40)
    assert shade.unbooked == 0
    assert len(shade) == 0


def test_one_that_decodes_stays_as_long_as_its_blocks_come() -> None:
    shade = shadow()
    shade.stored([begins(3)], 5.0)
    for number in range(6):
        shade.stored([StoredRun(9100 + number, 9001 + number, 9002 + number, 1)], 5.1 + 0.16 * number)
        assert (shade.unbooked, shade.decoding) == (1, 1)


def test_a_prompt_whose_next_chunk_does_not_come_is_not_waited_for() -> None:
    shade = shadow()
    shade.stored([begins(6)], 5.0)
    shade.book(ours("a", 2, 0), 5.05)
    # Twice the 0.11 s that its step should take, and a tenth of a second: given up.
    shade.advance(5.0 + 2 * 0.110 + 0.10 - 0.01)
    assert shade.unbooked == 1
    shade.advance(5.0 + 2 * 0.110 + 0.10 + 0.01)
    assert shade.unbooked == 0
    assert shade.prefilling == 1


# What is not taken for one


def test_blocks_of_a_request_that_was_given_up_are_nobody_elses() -> None:
    shade = shadow()
    shade.book(ours("a", 20, 0), 0.0)
    shade.finish("a", 0.05)
    shade.stored([StoredRun(0, None, 5, 6)], 0.110)
    assert shade.unbooked == 0
    shade.book(ours("b", 20, 100), 1.0)
    shade.stored([StoredRun(100, None, 105, 6)], 1.110)
    shade.finish("b", 1.15)
    shade.stored([StoredRun(106, 105, 111, 6)], 1.220)
    assert shade.unbooked == 0


def test_what_a_lower_tier_or_a_store_loads_is_nobodys_prompt() -> None:
    shade = shadow()
    shade.set_sees_blocks(True, computed=False)
    shade.stored([begins(6)], 5.0)
    assert shade.unbooked == 0


def test_with_asynchronous_scheduling_nobody_is_followed() -> None:
    shade = shadow(settings=Settings(num_gpu_blocks=1000, max_num_batched_tokens=100, async_scheduling=True))
    shade.stored([begins(6)], 5.0)
    assert shade.unbooked == 0


def test_a_single_block_is_what_somebody_decodes() -> None:
    shade = shadow()
    shade.stored([begins(1)], 5.0)
    assert shade.unbooked == 0


# Counted by the engine


def test_who_is_only_counted_waits_with_a_prompt_of_the_usual_length() -> None:
    shade = shadow()
    shade.count_unbooked(1, 5.0)
    assert shade.unbooked == 0  # said once, by an engine of which nothing of the kind was seen
    shade.count_unbooked(1, 10.0)
    assert (shade.unbooked, shade.prefill_tokens_ahead()) == (1, 200)
    assert shade.timeline(10.0).admitted_s() > 10.1
    # It was on its way: its first blocks are those that are seen now.
    shade.stored([begins(6)], 10.11)
    assert shade.unbooked == 1


def test_of_many_that_are_counted_the_lengths_are_spread() -> None:
    shade = shadow()
    shade.count_unbooked(3, 5.0)
    shade.count_unbooked(3, 10.0)
    assert (shade.unbooked, shade.prefill_tokens_ahead()) == (3, 200 + 100 + 300)
    shade.count_unbooked(1, 10.0)
    assert shade.unbooked == 1


def test_who_does_not_come_when_its_turn_has_come_is_not_expected_again() -> None:
    shade = shadow()
    shade.stored([begins(3)], 9.9)
    shade.count_unbooked(2, 10.0)
    assert shade.unbooked == 2
    # The step in which it would have been has stored another's prompt only.
    shade.book(ours("a", 3, 0), 10.0)
    shade.stored([StoredRun(0, None, 2, 3)], 10.07)
    assert shade.unbooked == 1
    shade.count_unbooked(2, 10.1)
    assert shade.unbooked == 1


def test_a_count_below_what_was_seen_ends_those_that_are_overdue() -> None:
    shade = shadow()
    shade.stored([begins(3)], 5.0)
    shade.count_unbooked(0, 5.1)
    assert shade.unbooked == 1  # its end may be as new as its last block
    shade.count_unbooked(0, 5.3)
    assert shade.unbooked == 0


def test_prompts_longer_than_what_is_known_are_as_long_as_those_that_were() -> None:
    sizes = PromptSizes()
    assert sizes.longer_than(100) == 150
    for tokens in (1000, 10, 400, 200):
        sizes.add(tokens)
    assert [sizes.longer_than(tokens) for tokens in (0, 10, 200, 400, 1000)] == [400, 400, 1000, 1000, 1500]
    assert [sizes.longer_than(0, share) for share in (0.0, 0.25, 0.75)] == [10, 200, 1000]


# Whatever comes


@given(data=st.data())
@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_is_stored_and_counted_space_adds_up_and_who_is_silent_goes(
    data: st.DataObject,
) -> None:
    settings = Settings(
        num_gpu_blocks=data.draw(st.integers(40, 200)),
        max_num_batched_tokens=data.draw(st.sampled_from((40, 100, 300))),
        max_num_seqs=data.draw(st.integers(2, 8)),
    )
    shade = shadow(settings=settings)
    now_s, names = 1.0, itertools.count(100_000)
    booked: list[str] = []
    tails: list[int | None] = [None, 99_999]
    prompts: dict[str, range] = {}
    for number in range(data.draw(st.integers(1, 40))):
        now_s += data.draw(st.sampled_from((0.0, 0.001, 0.03, 0.2, 1.5)))
        what = data.draw(st.sampled_from(("book", "stored", "stored", "stored", "first", "end", "count", "look")))
        if what == "book":
            name, blocks = f"t{number}", data.draw(st.integers(1, 12))
            prompts[name] = range(1000 * number, 1000 * number + blocks)
            shade.book(ours(name, blocks, 1000 * number), now_s)
            booked.append(name)
        elif what == "stored":
            runs = []
            for _ in range(data.draw(st.integers(1, 3))):
                last, blocks = next(names), data.draw(st.integers(1, 8))
                first, parent = last + 1_000_000, data.draw(st.sampled_from(tails))
                is_ours = data.draw(st.booleans())
                if booked and is_ours:
                    first, parent = data.draw(st.sampled_from(prompts[data.draw(st.sampled_from(booked))])), None
                runs.append(StoredRun(first, parent, last, blocks))
                tails.append(last)
            shade.stored(runs, now_s)
        elif what == "count":
            shade.count_unbooked(data.draw(st.integers(0, 6)), now_s)
        elif what == "look":
            assert shade.timeline(now_s, Budget(200)).admitted_s(1) >= now_s
        elif booked and what == "first":
            shade.first_token(data.draw(st.sampled_from(booked)), now_s)
        elif booked:
            name = booked.pop(data.draw(st.integers(0, len(booked) - 1)))
            shade.finish(name, now_s, data.draw(st.one_of(st.none(), st.integers(1, 100))))
        queue = shade.state(now_s).queue
        sequences = [*queue.running, *queue.waiting]
        assert len(sequences) == len(shade) == len(booked) + shade.unbooked
        assert queue.free_blocks is not None
        assert queue.free_blocks + sum(seq.blocks for seq in sequences) == settings.usable_blocks
        assert all(seq.blocks >= 0 for seq in sequences)
    for name in booked:
        shade.finish(name, now_s)
    for _ in range(200):
        now_s += 10.0
        shade.advance(now_s)
    assert (shade.unbooked, len(shade)) == (0, 0)
