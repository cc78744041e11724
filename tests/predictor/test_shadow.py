"""The shadow of one engine: what evidence does to it."""

import random
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.engines.vllm import Queue, Sequence, Settings, schedule, undo
from predictor.length_class import LengthClass
from predictor.output_lengths import LengthCurve
from predictor.prefill_cost import StepCost
from predictor.shadow import Corrections, Shadow
from predictor.step_sample import StepSample
from predictor.stored_run import StoredRun

# 10 ms a step, 1 ms a token, nothing else: a step of 100 tokens takes 0.11 s.
PLAIN = StepCost(0.0, 0.0, 0.010, 0.001, 0.0, 0.0)
# What the ground truth was measured with: 30 us a token, 37 ps a token squared, 5 ms a step, 50 us a decode.
MEASURED = StepCost(0.0, 0.0, 0.005, 30e-6, 37e-12, 50e-6)
SETTINGS = Settings(max_num_batched_tokens=100)


def prompt(name: str, tokens: int, cached: int = 0, output: int = 1000, watched: bool = True) -> Sequence:
    return Sequence(name, tokens, cached, output, watched)


class Always:
    """Outputs of one length, whoever asks."""

    def __init__(self, tokens: int) -> None:
        self._curve = LengthCurve((tokens,), (0.0,), 1.0)

    def curve(self, of: LengthClass | None = None) -> LengthCurve:
        del of
        return self._curve


def shadow(cost: StepCost = PLAIN, settings: Settings = SETTINGS) -> Shadow:
    return Shadow(settings, cost)


# Exact numbers


def test_an_idle_worker_begins_now_and_takes_a_fixed_part_a_step() -> None:
    timeline = shadow().timeline(7.0)
    assert timeline.admitted_s() == 7.0
    assert [timeline.finish_s(tokens) for tokens in (1, 100, 101, 250)] == pytest.approx([7.01, 7.01, 7.02, 7.03])


def test_a_newcomer_fills_up_the_last_step_of_the_prompt_ahead() -> None:
    shade = shadow()
    shade.book(prompt("ahead", 250), 0.0)
    # Steps of 100, 100 and 50 tokens; 50 tokens of the third are free.
    timeline = shade.timeline(0.0)
    assert timeline.admitted_s() == pytest.approx(0.22)
    assert timeline.finish_s(50) == pytest.approx(0.22 + 0.06)
    assert timeline.finish_s(51) == pytest.approx(0.28 + 0.01)  # beside "ahead", which decodes at no cost


def test_where_requests_share_a_step_by_their_number_who_is_booked_slows_those_ahead() -> None:
    settings = Settings(
        max_num_batched_tokens=120,
        max_num_seqs=1,
        long_prefill_token_threshold=10,
        long_prefill_token_threshold_adaptive=True,
    )
    asked, unasked = shadow(settings=settings), shadow(settings=settings)
    for shade in (asked, unasked):
        shade.book(prompt("ahead", 150, output=1), 0.0)
    # Two of whom one has a slot: 60 tokens a step, in three steps.
    assert asked.timeline(0.0).admitted_s() == pytest.approx(0.03 + 0.15)
    for shade in (asked, unasked):
        shade.book(prompt("behind", 1, output=1), 0.0)
    # Three: 40 tokens a step, in four steps; and one for who is behind.
    assert asked.timeline(0.0).admitted_s() == pytest.approx(0.04 + 0.15 + 0.01 + 0.001)
    assert asked.timeline(0.0).finish_s(200) == unasked.timeline(0.0).finish_s(200)


def test_by_priority_a_newcomer_waits_for_those_before_it_only_and_those_behind_for_it() -> None:
    shade = shadow(settings=Settings(max_num_batched_tokens=100, scheduling_policy="priority"))
    for number, (name, priority) in enumerate([("runs", 0), ("low", 1), ("high", -1)]):
        shade.book(Sequence(name, 100, 0, 1000, priority=priority), 0.001 * number)
    # "runs" until 0.11, then "high", then "low".
    first, second, last = (shade.timeline(0.01, priority=priority).finish_s(90) for priority in (-2, -1, 1))
    assert first == pytest.approx(0.11 + 0.01)
    # 99 tokens of "high" beside a decode, then its last one and what 90 tokens take.
    assert second == pytest.approx(0.11 + (0.01 + 0.099) + (0.01 + 0.001))
    assert last == shade.timeline(0.01).finish_s(90) > second + 0.1
    shade.first_token("runs", 0.11)
    shade.first_token("high", 0.11 + 0.109 + 0.109)
    assert shade.forced == 0
    fcfs = shadow()
    for number, priority in enumerate([0, 1]):
        fcfs.book(Sequence(str(number), 100, 0, 1000, priority=priority), 0.001 * number)
    assert fcfs.timeline(0.01, priority=-2).finish_s(100) == fcfs.timeline(0.01).finish_s(100)


@pytest.mark.parametrize(
    ("threshold", "small_s"),
    [
        # In with the giant's last chunk, and done with it.
        (0, 13 * 0.005 + 30e-6 * 100_000 + 37e-12 * 100_000**2 + 30e-6 * 200 + 37e-12 * 200**2),
        # Beside 1024 tokens of the giant, right behind the full step (alone: spared by the threshold) under way.
        (1024, 2 * 0.005 + 30e-6 * (8192 + 1024 + 200) + 37e-12 * ((8192 + 1024) ** 2 + 200**2)),
    ],
)
def test_a_small_prompt_behind_a_giant_waits_for_its_end_or_passes_it_under_a_threshold(
    threshold: int, small_s: float
) -> None:
    shade = shadow(MEASURED, Settings(long_prefill_token_threshold=threshold))
    shade.book(prompt("giant", 100_000), 0.0)
    assert shade.timeline(0.1).finish_s(200) + MEASURED.tokens_s(0, 200) == pytest.approx(small_s, abs=1e-6)


def test_all_slots_decode_so_a_newcomer_waits_for_the_first_of_them_to_end() -> None:
    shade = shadow(PLAIN, Settings(max_num_batched_tokens=100, max_num_seqs=2))
    shade.adopt(prompt("x", 10, output=31), 0.0)
    shade.adopt(prompt("y", 10, output=91), 0.0)
    # x has one token and 30 to come, a step of 10 ms each; the first step began with x.
    assert shade.timeline(0.0).admitted_s() == pytest.approx(0.30)


# Evidence


def test_a_step_that_is_overdue_moves_the_forecast_with_the_clock_and_is_taken_to_last_as_long_again() -> None:
    shade = shadow()
    shade.book(prompt("a", 100), 0.0)
    assert shade.timeline(0.05).finish_s(50) == pytest.approx(0.11 + 0.01)
    assert shade.timeline(0.11).finish_s(50) == pytest.approx(0.11 + 0.01)
    assert shade.timeline(0.15).finish_s(50) == pytest.approx(0.15 + 0.01)
    assert shade.timeline(3.0).finish_s(50) == pytest.approx(3.0 + (3.0 - 0.11) + 0.01)
    shade.first_token("a", 3.2)
    assert (shade.prefilling, shade.decoding) == (0, 1)
    assert shade.timeline(3.201).finish_s(50) == pytest.approx(3.21 + 0.01)


def test_an_early_first_token_pulls_everything_behind_it_forward() -> None:
    shade = shadow()
    shade.book(prompt("a", 250), 0.0)
    shade.book(prompt("b", 250), 0.0)
    assert shade.timeline(0.0).finish_s(1) == pytest.approx(0.5 + 6 * 0.01)  # a's decodes take a token a step
    shade.first_token("a", 0.02)  # three steps have passed, the third with 50 tokens of b
    assert shade.prefill_tokens_ahead() == 200
    # a decodes: 99 and 99 and 2 tokens of b.
    assert shade.timeline(0.02).finish_s(1) == pytest.approx(0.02 + 3 * 0.01 + 0.2)


def test_a_first_token_shows_that_those_ahead_of_it_are_done_too() -> None:
    shade = shadow()
    for name in ("a", "b", "c"):
        shade.book(prompt(name, 100), 0.0)
    shade.first_token("c", 0.05)
    assert (shade.prefilling, shade.decoding) == (0, 3)
    shade.first_token("a", 0.051)  # seen late
    assert shade.timeline(0.051).finish_s(1) == pytest.approx(0.06 + 0.01)


def test_a_first_token_from_behind_full_slots_is_believed_though_no_end_was_seen() -> None:
    # Ends are reported by another way than first tokens, and often later.
    shade = shadow(PLAIN, Settings(max_num_batched_tokens=100, max_num_seqs=1))
    shade.book(prompt("a", 50), 0.0)
    shade.first_token("a", 0.06)
    shade.book(prompt("b", 50), 0.06)
    shade.first_token("b", 0.5)
    assert (shade.prefilling, shade.decoding) == (0, 2)
    shade.finish("a", 0.51)
    assert (len(shade), shade.decoding) == (1, 1)


def test_a_request_whose_first_token_will_not_be_seen_passes_by_prediction() -> None:
    shade = shadow()
    shade.book(prompt("a", 100, watched=False), 0.0)
    shade.book(prompt("b", 100), 0.0)
    shade.advance(0.12)
    assert (shade.prefilling, shade.decoding) == (1, 1)
    assert shade.timeline(0.25).finish_s(1) == pytest.approx(0.25 + 0.01)  # b is watched, and overdue


def test_an_end_before_anything_ran_takes_a_waiting_request_out() -> None:
    shade = shadow()
    shade.book(prompt("a", 100), 0.0)
    shade.book(prompt("b", 100), 0.0)
    shade.finish("b", 0.01)
    assert len(shade) == 1
    assert shade.timeline(0.01).finish_s(1) == pytest.approx(0.11 + 0.01)


def test_a_prefill_given_up_goes_on_to_the_end_of_its_step_and_no_further() -> None:
    shade = shadow()
    shade.book(prompt("a", 1000), 0.0)
    shade.finish("a", 0.15)  # in its second step of ten
    assert len(shade) == 0
    assert shade.prefilling == 1  # the step is under way: a newcomer is not alone
    assert shade.timeline(0.15).admitted_s() == pytest.approx(0.22)
    assert shade.timeline(0.30).admitted_s() == 0.30
    assert shade.prefilling == 0


def test_a_prefill_given_up_while_its_first_token_is_overdue_holds_nobody_up() -> None:
    shade = shadow()
    shade.book(prompt("a", 100), 0.0)
    shade.book(prompt("b", 100), 0.0)
    shade.finish("a", 0.25)
    # Its step ended at 0.11 by prediction, and so did b's at 0.22: now it is b that is overdue.
    assert shade.timeline(0.25).finish_s(1) == pytest.approx(0.25 + 0.01)
    assert shade.prefilling == 1


def test_the_last_decode_ends_with_a_step_so_the_engine_is_idle_at_once() -> None:
    shade = shadow(StepCost(0.0, 0.0, 1.0, 0.001, 0.0, 0.0))
    shade.book(prompt("a", 100), 0.0)
    shade.first_token("a", 1.1)
    shade.finish("a", 1.2)
    assert shade.timeline(1.2).admitted_s() == 1.2


def test_a_request_that_was_answered_whole_leaves_the_engine_idle_although_the_prediction_says_otherwise() -> None:
    shade = shadow()
    shade.book(prompt("a", 1000, watched=False), 0.0)
    shade.finish("a", 0.15)
    assert shade.timeline(0.15).admitted_s() == 0.15


def test_what_is_unknown_or_told_twice_changes_nothing() -> None:
    shade = shadow()
    shade.book(prompt("a", 100), 0.0)
    shade.first_token("a", 0.2)
    before = shade.timeline(0.2).course(100)
    shade.first_token("a", 0.2)
    shade.first_token("nobody", 0.2)
    shade.finish("nobody", 0.2)
    assert shade.timeline(0.2).course(100) == before
    shade.finish("a", 0.3)
    shade.finish("a", 0.3)
    assert len(shade) == 0


def test_one_adopted_from_elsewhere_decodes_and_leaves_those_before_it_as_they_are() -> None:
    shade = shadow()
    shade.book(prompt("giant", 1000), 0.0)
    shade.adopt(prompt("moved", 500), 0.05)
    assert (shade.prefilling, shade.decoding) == (1, 1)
    assert shade.prefill_tokens_ahead() == 1000
    assert shade.timeline(0.05).begins_s == pytest.approx(0.11)


def test_a_wait_is_cut_short_by_output_that_ends_with_the_step_under_way() -> None:
    shade = shadow(PLAIN, Settings(max_num_batched_tokens=100, max_num_seqs=1))
    shade.book(prompt("a", 100, output=1), 0.0)
    assert shade.timeline(0.0).admitted_s() == pytest.approx(0.11)


def test_other_costs_and_settings_hold_from_the_next_forecast_on() -> None:
    shade = shadow()
    shade.book(prompt("a", 1000), 0.0)
    assert shade.timeline(0.0).finish_s(1) == pytest.approx(1.1 + 0.01)
    shade.advance(0.001)
    shade.set_cost(StepCost(0.0, 0.0, 0.010, 0.002, 0.0, 0.0))
    assert shade.timeline(0.001).finish_s(1) == pytest.approx(0.11 + 9 * 0.21 + 0.01)  # the step under way goes on
    shade.set_settings(Settings(max_num_batched_tokens=900))
    assert shade.timeline(0.001).finish_s(1) == pytest.approx(0.11 + 1.81 + 0.01)


# No costs and no clock make it loop

costs = st.builds(
    StepCost,
    *[st.sampled_from([0.0, 1e-12, 0.01, 1e6])] * 2,
    *[st.sampled_from([0.0, 0.0, 1e-300, 1e-9, 0.01, 1e6])] * 4,
)
verbs = st.sampled_from(["book", "book_unwatched", "first_token", "finish", "advance", "timeline", "adopt", "settings"])


@given(
    cost=costs,
    slots=st.integers(1, 4),
    budget=st.integers(1, 50),
    moves=st.lists(
        st.tuples(verbs, st.integers(0, 5), st.sampled_from([0.0, 1e-9, 0.01, 1.0, 3600.0, 1e6])), max_size=25
    ),
)
@hypothesis_settings(max_examples=250, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_comes_in_whatever_order_at_whatever_cost_the_work_is_bounded(
    cost: StepCost, slots: int, budget: int, moves: list[tuple[str, int, float]]
) -> None:
    settings = Settings(max_num_batched_tokens=budget, max_num_seqs=slots)
    shade = Shadow(settings, cost)
    now_s, known = 1e5, set[str]()
    for verb, number, jump_s in moves:
        now_s += jump_s
        name = f"r{number}"
        if verb in ("book", "book_unwatched", "adopt") and name not in known:
            known.add(name)
            seq = prompt(name, 1 + 37 * number, output=1 + number, watched=verb == "book")
            (shade.adopt if verb == "adopt" else shade.book)(seq, now_s)
        elif verb == "first_token":
            shade.first_token(name, now_s)
        elif verb == "finish":
            known.discard(name)
            shade.finish(name, now_s)
        elif verb == "advance":
            shade.advance(now_s)
        elif verb == "settings":
            shade.set_settings(Settings(max_num_batched_tokens=budget, max_num_seqs=1 + number))
        timeline = shade.timeline(now_s)
        assert timeline.finish_s(1) >= timeline.admitted_s() >= now_s
        assert len(shade) == len(known)
        assert shade.prefilling - shade._course.given_up + shade.decoding == len(known)


def test_steps_that_cost_nothing_pass_a_night_at_once() -> None:
    shade = shadow(StepCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    shade.adopt(prompt("a", 10), 0.0)
    began = time.perf_counter()
    shade.advance(8 * 3600.0)
    assert time.perf_counter() - began < 0.1


def test_a_night_passes_at_once_although_somebody_waits_for_a_slot() -> None:
    shade = shadow(PLAIN, Settings(max_num_batched_tokens=100, max_num_seqs=1))
    shade.adopt(prompt("a", 10), 0.0)
    shade.book(prompt("b", 10), 0.0)
    began = time.perf_counter()
    shade.advance(30 * 24 * 3600.0)
    assert time.perf_counter() - began < 0.1
    assert (shade.prefilling, shade.decoding) == (1, 1)


# What will be left of a full cache


def crowded_shadow(owner_generated: int, output: int = 100) -> Shadow:
    """One that runs holds nearly all, and two wait; `owner_generated` tokens of an output of `output` are there."""
    shade = Shadow(Settings(num_gpu_blocks=101, max_num_batched_tokens=10_000), PLAIN, lengths=lambda _: Always(output))
    shade.book(Sequence("owner", 1440, 0, output, hashes=range(100, 190)), 0.0)
    shade.first_token("owner", 1.45)
    shade.advance(1.45 + 0.010 * (owner_generated - 1) + 0.001)
    for name, first in (("next", 1000), ("last", 2000)):
        shade.book(Sequence(name, 640, 0, output, hashes=range(first, first + 40)), 1.45 + 0.010 * owner_generated)
    return shade


@pytest.mark.parametrize(
    ("generated", "steps", "lasting"),
    [
        (10, 50, 80),  # the owner has ninety tokens to go
        (60, 50, 0),  # it ends ten before the newcomer is let in, and what it had is taken by who comes before
        (60, 42, 80),  # two before: by then they have not got to it
    ],
)
def test_of_a_full_cache_a_newcomer_finds_what_somebody_holds_until_its_turn_or_shortly_before(
    generated: int, steps: int, lasting: int
) -> None:
    shade = crowded_shadow(generated)
    assert shade.crowded
    newcomer = np.array([*range(100, 180), *range(5000, 5010)], np.uint64)
    assert shade.lasting_blocks(newcomer, 80, steps) == lasting


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_cache_that_became_smaller_than_what_runs_is_crowded_only_if_somebody_waits(waiting: int) -> None:
    shade = Shadow(Settings(num_gpu_blocks=101), PLAIN, lengths=lambda _: Always(100))
    shade.book(Sequence("owner", 1440, 0, 100, hashes=range(100, 190)), 0.0)
    shade.first_token("owner", 1.45)
    shade.advance(1.46)
    shade.set_settings(Settings(num_gpu_blocks=51))
    for number in range(waiting):
        shade.book(Sequence(f"next {number}", 640, 0, 100, hashes=range(1000, 1040)), 1.47)
    assert shade.crowded == bool(waiting)
    newcomer = np.array([*range(100, 180), *range(5000, 5010)], np.uint64)
    assert shade.lasting_blocks(newcomer, 80, 10.0) == 80  # the owner holds them
    assert shade.timeline(1.48).finish_s(100) > 1.48


def test_of_one_that_waits_before_it_a_newcomer_finds_what_it_will_hold_then() -> None:
    shade = crowded_shadow(60)
    newcomer = np.array(range(2000, 2050), np.uint64)
    # The last of two is let in half-way, and has a hundred tokens to go from there.
    assert shade.lasting_blocks(newcomer, 40, 150) == 40
    assert shade.lasting_blocks(newcomer, 40, 300) == 0


def test_with_space_for_all_who_wait_everything_stays_cached() -> None:
    shade = Shadow(Settings(num_gpu_blocks=1000), PLAIN, lengths=lambda _: Always(9))
    shade.book(Sequence("owner", 1440, 0, 9, hashes=range(100, 190)), 0.0)
    assert not shade.crowded
    assert shade.lasting_blocks(np.array(range(100, 180), np.uint64), 80, 1e6) == 80


# A prompt that reaches the engine later than it was booked: making tokens of its words takes a while


@pytest.mark.parametrize("late_steps", [1, 3])
def test_decodes_that_got_further_while_a_prompt_was_on_its_way_do_not_move_its_prefill(late_steps: int) -> None:
    samples: list[StepSample] = []
    settings = Settings(num_gpu_blocks=1000, max_num_batched_tokens=100)
    shade = Shadow(settings, PLAIN, samples.append)
    shade.set_sees_blocks(True)
    shade.book(Sequence("a", 32, 0, 1000, hashes=range(2)), 0.0)
    shade.stored([StoredRun(0, None, 1001, 2)], 0.042)
    shade.first_token("a", 0.042)
    # It decodes for so many steps of 10 ms that the first of the prompt's completes its next block.
    decodes = 15 - late_steps
    booked_s = 0.042 + 0.010 * decodes - 0.001
    shade.book(Sequence("b", 320, 0, 1000, hashes=range(100, 120)), booked_s)
    begun_s = 0.042 + 0.010 * 15
    first_s = begun_s + 0.010 + 0.099
    shade.stored([StoredRun(50, 1001, 1002, 1), StoredRun(100, None, 1100, 6)], first_s)
    assert shade.prefill_tokens_ahead() == 320 - 99
    assert shade.forced == 0
    # And the steps that follow are timed for what they are: one chunk each.
    samples.clear()
    for number in range(2):
        shade.stored([StoredRun(106 + 6 * number, 1100 + number, 1101 + number, 6)], first_s + 0.109 * (number + 1))
    assert [(sample.new_tokens, sample.decoding, sample.steps) for sample in samples] == [(99, 1, 1)] * 2
    assert [sample.duration_s for sample in samples] == pytest.approx([0.109] * 2)


def burst(shade: Shadow, count: int, tokens: int = 48, spread_s: float = 0.0) -> None:
    for number in range(count):
        hashes = range(100 * number, 100 * number + tokens // 16)
        shade.book(Sequence(f"r{number}", tokens, 0, 1000, hashes=hashes), number * spread_s)


def announced(numbers: range, tokens: int = 48) -> list[StoredRun]:
    return [StoredRun(100 * number, None, 1000 + number, tokens // 16) for number in numbers]


def test_who_comes_to_an_idle_worker_while_another_is_on_its_way_there_finds_the_step_begun() -> None:
    samples: list[StepSample] = []
    settings = Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000)
    shade = Shadow(settings, StepCost(0.020, 0.0, 0.010, 0.001, 0.0, 0.0), samples.append)
    shade.set_sees_blocks(True)
    shade.book(Sequence("a", 48, 0, 1000, hashes=range(3)), 0.0)
    assert shade.begins_s(0.0) == pytest.approx(0.020)
    first_ends_s = 0.020 + 0.010 + 0.048
    assert shade.begins_s(0.005) == pytest.approx(first_ends_s)
    shade.book(Sequence("b", 48, 0, 1000, hashes=range(100, 103)), 0.005)
    shade.stored([StoredRun(0, None, 1000, 3)], first_ends_s)
    assert shade.prefill_tokens_ahead() == 48
    assert [(sample.new_tokens, sample.arrival_tokens) for sample in samples] == [(48, 48)]
    assert samples[0].duration_s == pytest.approx(first_ends_s)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("admitted", range(1, 8))
def test_with_asynchronous_scheduling_as_well_but_a_step_later(admitted: int, at_once: bool) -> None:
    samples: list[StepSample] = []
    settings = Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000, async_scheduling=True)
    shade = Shadow(settings, PLAIN, samples.append)
    shade.set_sees_blocks(True)
    burst(shade, 7, spread_s=0.0 if at_once else 0.001)
    first_s, left = 0.010 + 0.048 * admitted, 7 - admitted
    for number in range(admitted):
        shade.first_token(f"r{number}", first_s)
    shade.stored(announced(range(admitted)), first_s + 0.002)
    assert shade.prefill_tokens_ahead() == 48 * left
    assert [(sample.new_tokens, sample.steps) for sample in samples] == [(48 * admitted, 1)]
    assert shade.decoding == admitted
    if left:
        # The second step decodes only. While it runs the third is composed, of those who came meanwhile.
        shade.stored(announced(range(admitted, 7)), first_s + 0.012)
        assert shade.prefill_tokens_ahead() == 48 * left
        third_s = first_s + 0.012 + 0.010 + 0.048 * left
        shade.first_token(f"r{admitted}", third_s)
        assert shade.prefill_tokens_ahead() == 0
        assert [sample.new_tokens for sample in samples] == [48 * admitted, 0, 48 * left]
    assert shade.forced == 0


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("admitted", range(1, 8))
def test_of_a_burst_the_first_step_has_whom_it_announces(admitted: int, at_once: bool) -> None:
    samples: list[StepSample] = []
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000), PLAIN, samples.append)
    shade.set_sees_blocks(True)
    burst(shade, 7, spread_s=0.0 if at_once else 0.001)
    step_s, left = 0.010 + 0.048 * admitted, 7 - admitted
    shade.stored(announced(range(admitted)), step_s)
    assert shade.prefill_tokens_ahead() == 48 * left
    assert [(sample.new_tokens, sample.steps) for sample in samples] == [(48 * admitted, 1)]
    assert samples[0].duration_s == pytest.approx(step_s)
    for number in range(admitted):
        shade.first_token(f"r{number}", step_s)
    if left:
        # What comes next is theirs who were not in it.
        shade.stored(announced(range(admitted, 7)), step_s + 0.010 + 0.048 * left)
        assert shade.prefill_tokens_ahead() == 0
        assert [(sample.new_tokens, sample.decoding) for sample in samples[1:]] == [(48 * left, admitted)]
    # It was composed with all that were there when it began; a step that was as it was composed is none more.
    was_otherwise = admitted != (7 if at_once else 1)
    assert shade.corrections == Corrections(forced=0, recomposed=was_otherwise, tokens_held=0)
    assert shade.free_blocks == 999 - 7 * 3 - (admitted if left else 0)


def test_first_tokens_that_come_before_the_blocks_of_their_step_wait_for_them() -> None:
    samples: list[StepSample] = []
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000), PLAIN, samples.append)
    shade.set_sees_blocks(True)
    burst(shade, 7, spread_s=0.001)
    step_s = 0.010 + 3 * 0.048
    for number in range(3):
        shade.first_token(f"r{number}", step_s)
    assert shade.corrections == Corrections(forced=0, recomposed=0, tokens_held=3)
    shade.stored(announced(range(3)), step_s + 0.002)
    assert (shade.prefilling, shade.decoding) == (4, 3)
    assert [(sample.new_tokens, sample.steps, sample.arrival_tokens) for sample in samples] == [(3 * 48, 1, 48)]
    assert shade.corrections == Corrections(forced=0, recomposed=1, tokens_held=3)


def test_first_tokens_whose_blocks_do_not_come_are_believed_all_the_same() -> None:
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000), PLAIN)
    shade.set_sees_blocks(True)
    burst(shade, 7)
    shade.first_token("r0", 0.346)
    shade.advance(0.346 + 0.06)
    assert (shade.prefilling, shade.decoding) == (0, 7)


def test_by_its_end_a_request_has_had_its_first_token_whatever_blocks_are_still_to_come() -> None:
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000), PLAIN)
    shade.set_sees_blocks(True)
    burst(shade, 2)
    shade.first_token("r0", 0.106)
    shade.finish("r0", 0.107, output_tokens=1)
    assert (len(shade), shade.decoding) == (1, 1)


@pytest.mark.parametrize("free", [0, 2])
def test_whom_the_engine_has_let_in_there_was_space_for(free: int) -> None:
    settings = Settings(num_gpu_blocks=1 + 6 + free, max_num_batched_tokens=1000)
    shade = Shadow(settings, PLAIN)
    shade.set_sees_blocks(True)
    burst(shade, 3)
    # By the count two fill the cache, or nearly: blocks are in common that nobody knows of.
    shade.stored(announced(range(3)), 0.010 + 3 * 0.048)
    assert shade.prefill_tokens_ahead() == 0
    assert shade.forced == 0


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("credited_blocks", "found_blocks"), [(18, 3), (3, 18), (18, 0), (0, 18)])
def test_where_the_first_run_of_a_prompt_begins_it_was_found_cached_until(
    credited_blocks: int, found_blocks: int, is_async: bool
) -> None:
    samples: list[StepSample] = []
    settings = Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000, async_scheduling=is_async)
    shade = Shadow(settings, PLAIN, samples.append)
    shade.set_sees_blocks(True)
    shade.book(Sequence("a", 330, 16 * credited_blocks, 1000, hashes=range(20)), 0.0)
    tokens = 330 - 16 * found_blocks
    ended_s = 0.010 + 0.001 * tokens
    shade.stored([StoredRun(found_blocks, 7 if found_blocks else None, 1000, 20 - found_blocks)], ended_s)
    shade.first_token("a", ended_s)
    assert [(sample.new_tokens, sample.steps) for sample in samples] == [(tokens, 1)]
    assert samples[0].duration_s == pytest.approx(ended_s)
    assert (shade.prefilling, shade.decoding, shade.forced) == (0, 1, 0)


def test_of_several_who_begin_alike_the_foremost_has_begun() -> None:
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=1000), PLAIN)
    shade.set_sees_blocks(True)
    shade.book(Sequence("first", 48, 0, 1000, hashes=range(3)), 0.0)
    for number, name in enumerate("abc"):
        own = range(1000 * (number + 1), 1000 * (number + 1) + 5)
        # Ten blocks are in common, and taken to be cached. They are not.
        shade.book(Sequence(name, 240, 160, 1000, hashes=[*range(100, 110), *own]), 0.001)
    shade.stored([StoredRun(0, None, 900, 3), StoredRun(100, None, 901, 15)], 0.010 + 0.048 + 0.240)
    assert shade.prefill_tokens_ahead() == 2 * 80
    assert shade.forced == 0


def test_a_step_that_no_rule_composes_is_taken_for_the_one_that_was() -> None:
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=100), PLAIN)
    shade.set_sees_blocks(True)
    burst(shade, 7)
    assert shade.prefill_tokens_ahead() == 7 * 48
    # Two and a part of a third fit into its budget. Of the fourth nothing can have been stored.
    shade.stored([*announced(range(2)), StoredRun(300, None, 1003, 3)], 0.110)
    assert shade.prefill_tokens_ahead() == 7 * 48 - 100


def test_a_step_that_is_taken_back_after_one_of_it_has_left_takes_nobody_else_along() -> None:
    stays, leaves, decodes = (Sequence(name, 48, 0, 1000) for name in ("stays", "leaves", "decodes"))
    decodes.computed, decodes.generated, decodes.blocks = 48, 1, 3
    queue = Queue([decodes], deque([stays, leaves]), free_blocks=100)
    step = schedule(queue, Settings(num_gpu_blocks=104))
    assert step.admitted == 2
    queue.running.remove(leaves)
    queue.free_blocks = (queue.free_blocks or 0) + leaves.blocks
    undo(queue, step)
    assert (queue.running, list(queue.waiting)) == ([decodes], [stays])
    assert queue.free_blocks == 100 - 1  # for the token that was being decoded


# Who has ended is heard of when the step after is under way


def test_a_chunk_that_got_the_tokens_of_one_who_has_ended_is_one_step() -> None:
    samples: list[StepSample] = []
    settings = Settings(block_size=1, num_gpu_blocks=10_000, max_num_batched_tokens=100)
    shade = Shadow(settings, PLAIN, samples.append)
    shade.set_sees_blocks(True)
    for number, name in enumerate("ac"):
        shade.book(Sequence(name, 10, 0, 1000, hashes=range(20 * number, 20 * number + 10)), 0.0)
    shade.stored([StoredRun(20 * number, None, 1000 + number, 10) for number in range(2)], 0.030)
    for name in "ac":
        shade.first_token(name, 0.030)
    # "c" has ended with the step before: the prompt gets 99 tokens of the first step and not 98.
    shade.book(Sequence("b", 320, 0, 1000, hashes=range(100, 420)), 0.030)
    samples.clear()
    shade.stored([StoredRun(100, None, 1100, 99)], 0.140)
    shade.finish("c", 0.145, output_tokens=1)
    assert shade.prefill_tokens_ahead() == 320 - 99
    shade.stored([StoredRun(199, 1100, 1101, 99)], 0.249)
    assert shade.prefill_tokens_ahead() == 320 - 198
    assert (samples[0].new_tokens, samples[0].steps) == (99, 1)
    assert samples[0].duration_s == pytest.approx(0.110)
    assert shade.forced == 0


def test_more_than_any_engine_does_in_the_time_is_no_sample() -> None:
    samples: list[StepSample] = []
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=100), PLAIN, samples.append)
    shade.set_sees_blocks(True)
    shade.book(Sequence("b", 320, 0, 1000, hashes=range(100, 120)), 0.0)
    shade.stored([StoredRun(100, None, 1100, 6)], 0.110)
    assert len(samples) == 1
    # Three more steps in two milliseconds: some of it had been computed before, or was cached.
    shade.first_token("b", 0.112)
    assert shade.prefilling == 0
    assert len(samples) == 1


# Asynchronous scheduling: a step is composed while the one before it runs

ASYNC = Settings(num_gpu_blocks=1000, max_num_seqs=2, max_num_batched_tokens=1000, async_scheduling=True)


def decoding_shadow(names: str, outputs: int = 1000) -> tuple[Shadow, float]:
    """With these in decode, each of whose steps takes 10 ms, and one of which has just ended then."""
    shade = shadow(settings=ASYNC)
    shade.set_sees_blocks(True)
    at_s = 0.0
    for number, name in enumerate(names):
        shade.book(Sequence(name, 32, 0, outputs, hashes=range(100 * number, 100 * number + 2)), at_s)
        shade.stored([StoredRun(100 * number, None, 1000 + number, 2)], at_s + 0.042)
        shade.first_token(name, at_s + 0.042)
        at_s += 0.042
    return shade, at_s


def test_a_prompt_announced_with_the_step_before_its_own_is_still_to_be_computed() -> None:
    shade, at_s = decoding_shadow("a")
    shade.advance(at_s + 0.021)
    shade.book(Sequence("b", 32, 0, 1000, hashes=range(500, 502)), at_s + 0.025)
    # Composed when the step that runs then ends; the blocks are told of when the next one, which has been composed
    # before, has ended as well. Then its own begins: 10 ms and 32 of its tokens.
    shade.stored([StoredRun(500, None, 1500, 2)], at_s + 0.040)
    assert shade.prefilling == 1
    assert shade.begins_s(at_s + 0.041) == pytest.approx(at_s + 0.040 + 0.042 + 0.010)
    shade.first_token("b", at_s + 0.082)
    assert shade.prefilling == 0
    assert shade.forced == 0


@pytest.mark.parametrize("late_steps", [1, 2, 3, 5])
def test_a_prompt_that_was_on_its_way_for_longer_is_in_the_step_that_announces_it(late_steps: int) -> None:
    samples: list[StepSample] = []
    shade = Shadow(ASYNC, PLAIN, samples.append)
    shade.set_sees_blocks(True)
    shade.book(Sequence("a", 32, 0, 1000, hashes=range(2)), 0.0)
    at_s = 0.042
    shade.stored([StoredRun(0, None, 1000, 2)], at_s)
    shade.first_token("a", at_s)
    # The sixteenth decode step completes a block. "b" is booked so long before, and gets into the eighteenth.
    shade.book(Sequence("b", 32, 0, 1000, hashes=range(500, 502)), at_s + 0.010 * (16 - late_steps) - 0.001)
    shade.stored([StoredRun(50, 1000, 1001, 1)], at_s + 0.160)
    assert shade.prefill_tokens_ahead() == 32
    shade.stored([StoredRun(500, None, 1500, 2)], at_s + 0.170)
    assert (shade.prefilling, shade.decoding) == (1, 1)
    samples.clear()
    shade.first_token("b", at_s + 0.170 + 0.042)
    assert (shade.prefilling, shade.decoding) == (0, 2)
    assert [(sample.new_tokens, sample.decoding, sample.steps) for sample in samples] == [(32, 1, 1)]
    assert samples[0].duration_s == pytest.approx(0.042)
    # "a" has had a token with each of the eighteen steps, and one before.
    assert shade._course.emitted(shade._sequences["a"]) == 19
    assert shade.forced == 0


def test_decodes_that_got_further_than_was_counted_do_not_end_a_prefill_that_is_under_way() -> None:
    samples: list[StepSample] = []
    settings = Settings(num_gpu_blocks=1000, max_num_batched_tokens=100, async_scheduling=True)
    shade = Shadow(settings, PLAIN, samples.append)
    shade.set_sees_blocks(True)
    shade.book(Sequence("a", 32, 0, 1000, hashes=range(2)), 0.0)
    at_s = 0.042
    shade.stored([StoredRun(0, None, 1000, 2)], at_s)
    shade.first_token("a", at_s)
    shade.book(Sequence("b", 320, 0, 1000, hashes=range(500, 520)), at_s + 0.001)
    # Thirteen steps were counted until its first chunk, and there were fourteen: with the second "a" completes a block.
    shade.advance(at_s + 0.001)
    for seq in shade._queue.running:
        seq.computed += 12
        seq.generated += 12
    shade.stored([StoredRun(500, None, 1500, 6)], at_s + 0.020)
    samples.clear()
    for number in range(2):
        runs = [StoredRun(506 + 6 * number, 1500 + number, 1501 + number, 6)]
        runs += [StoredRun(50, 1000, 1001, 1)] if number else []
        shade.stored(runs, at_s + 0.020 + 0.109 * (number + 1))
    assert [(sample.new_tokens, sample.steps) for sample in samples] == [(99, 1)] * 2
    assert shade.forced == 0


def test_an_end_frees_its_slot_in_the_step_after_the_one_that_has_been_composed() -> None:
    shade, at_s = decoding_shadow("ab")
    shade.book(Sequence("c", 32, 0, 1000, hashes=range(500, 502)), at_s + 0.002)
    shade.advance(at_s + 0.025)
    begun_s, generated = shade._course.began_s, shade._course.emitted(shade._sequences["a"])
    assert shade.prefilling == 1
    ended_s = begun_s + 0.010
    shade.finish("a", ended_s, output_tokens=generated + 1)
    shade.advance(ended_s + 0.001)
    # The step that runs now was composed with "a" and without "c".
    running = shade._under_way[0].step
    assert not running.chunks
    assert [seq.id for seq, _, _ in shade._under_way[1].step.chunks] == ["c"]


# Space is neither lost nor made up


def test_who_has_given_way_takes_no_space_by_what_is_heard_of_the_steps_before() -> None:
    settings = Settings(block_size=4, num_gpu_blocks=11, max_num_batched_tokens=100, async_scheduling=True)
    shade = Shadow(settings, PLAIN)
    shade.set_sees_blocks(True)
    for number, name in enumerate("ab"):
        shade.book(Sequence(name, 16, 0, 100, hashes=range(10 * number, 10 * number + 4)), 0.0)
    shade.stored([StoredRun(0, None, 100, 4), StoredRun(10, None, 200, 4)], 0.001)
    for name in "ab":
        shade.first_token(name, 0.045)
    now_s = 0.045
    while not (waiting := shade.state(now_s).queue.waiting) and now_s < 1.0:
        now_s += 0.001
    assert [seq.id for seq in waiting] == ["b"]
    # More steps than were counted, both of them in it; and then there is space for the other one again.
    shade.stored([StoredRun(1000, 100, 101, 2)], now_s)
    shade.finish("a", now_s + 0.01)
    shade.advance(now_s + 1.0)
    assert not shade.state(now_s + 1.0).queue.waiting
    shade.finish("b", now_s + 1.01)
    assert shade.free_blocks == 10


def test_who_cannot_be_followed_any_more_is_not_taken_to_be_there() -> None:
    shade = Shadow(Settings(num_gpu_blocks=1000, max_num_batched_tokens=100, max_num_seqs=1), PLAIN)
    shade.set_sees_blocks(True)
    shade.stored([StoredRun(9000, None, 9001, 6)], 5.0)
    for number in range(2):
        shade.count_unbooked(20, 5.0 + 0.1 * number)
    assert shade.unbooked == 20
    shade.set_sees_blocks(False)
    assert (shade.unbooked, len(shade), shade.free_blocks) == (0, 0, 999)


def test_an_engine_that_composes_otherwise_from_now_on_is_followed_through_steps_composed_before() -> None:
    """What is under way by asynchronous scheduling ends, and nobody is taken to have computed less than nothing."""
    for seed in range(150):
        rng = random.Random(seed)
        shade = Shadow(Settings(num_gpu_blocks=60, max_num_batched_tokens=100), PLAIN)
        now_s, names, tails = 0.0, [], [1, 2, 3]
        for number in range(60):
            now_s += rng.choice([0.0, 0.001, 0.011, 0.11])
            settings = Settings(num_gpu_blocks=60, max_num_batched_tokens=100, async_scheduling=rng.random() < 0.5)
            match rng.choice(["book", "stored", "stored", "stored", "settings", "end", "first"]):
                case "book":
                    tokens = rng.choice([1, 15, 100, 250])
                    hashes = range(100 * number, 100 * number + tokens // 16)
                    shade.book(Sequence(f"s{number}", tokens, 0, 100, hashes=hashes), now_s)
                    names.append(f"s{number}")
                case "stored":
                    shade.set_sees_blocks(True)
                    tails.append(rng.randrange(10**6))
                    first, parent = rng.choice([None, 10**7 + number]), rng.choice([None, *tails[-4:]])
                    shade.stored([StoredRun(first, parent, tails[-1], rng.choice([1, 2, 6]))], now_s)
                case "settings":
                    shade.set_settings(settings)
                case "end" if names:
                    shade.finish(names.pop(rng.randrange(len(names))), now_s)
                case "first" if names:
                    shade.first_token(rng.choice(names), now_s)
            state = shade.state(now_s)
            sequences = [*state.queue.running, *state.queue.waiting]
            assert all(seq.computed >= 0 and seq.blocks >= 0 for seq in sequences), f"seed {seed}"
            assert state.queue.free_blocks == 59 - sum(seq.blocks for seq in sequences), f"seed {seed}"


def test_somebody_who_hung_up_in_a_step_that_is_taken_back_leaves_nothing_behind() -> None:
    shade = Shadow(Settings(max_num_batched_tokens=100), StepCost(0.0, 0.0, 0.01, 1e-4, 0.0, 0.0))
    shade.book(Sequence("decodes", 50, 0, 100), 0.0)
    shade.first_token("decodes", 0.015)
    shade.book(Sequence("gives up", 500, 0, 100), 0.016)
    shade.advance(0.03)
    shade.finish("gives up", 0.031)
    for tokens in range(1, 8):
        shade.finish("decodes", 0.032 + tokens / 1000, tokens)
    shade.advance(1.0)
    assert (len(shade), shade.prefilling, shade.decoding) == (0, 0, 0)


@pytest.mark.parametrize("family", ["vllm", "tensorrt_llm"])
def test_nobody_is_taken_to_decode_beyond_what_was_asked_for_however_long_its_end_is_late(family: str) -> None:
    shade = Shadow(Settings(num_gpu_blocks=400, family=family), StepCost(0.0, 0.0, 0.01, 1e-4, 0.0, 0.0))  # type: ignore[arg-type]
    shade.book(Sequence("r", 50, 0, 100, max_output=7), 0.0)
    shade.first_token("r", 0.02)
    shade.advance(60.0)
    (seq,) = shade.state(60.0).queue.running
    assert seq.generated <= 7
