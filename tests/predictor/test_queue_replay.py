"""The shadow of one engine: what evidence does to it, and a timeline that equals a replay with the newcomer inside."""

import sys
import time
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.engines.vllm import Sequence, Settings
from predictor.prefill_cost import StepCost
from predictor.queue_replay import MAX_STEPS, Shadow, Timeline

# 10 ms a step, 1 ms a token, nothing else: a step of 100 tokens takes 0.11 s.
PLAIN = StepCost(0.0, 0.0, 0.010, 0.001, 0.0, 0.0)
# What the ground truth was measured with: 30 us a token, 37 ps a token squared, 5 ms a step, 50 us a decode.
MEASURED = StepCost(0.0, 0.0, 0.005, 30e-6, 37e-12, 50e-6)
SETTINGS = Settings(max_num_batched_tokens=100)


def prompt(name: str, tokens: int, cached: int = 0, output: int = 1000, watched: bool = True) -> Sequence:
    return Sequence(name, tokens, cached, output, watched)


def shadow(cost: StepCost = PLAIN, settings: Settings = SETTINGS) -> Shadow:
    return Shadow(settings, cost)


# The timeline against a naive twin


@dataclass
class Plain:
    """A request as the twin sees it."""

    left: int  # prompt tokens to be computed
    computed: int
    generated: int
    end: int


def naive_first_token_s(  # the step rule and the costs written down once more, in the simplest form
    shade: Shadow, settings: Settings, cost: StepCost, now_s: float, cached: int, total: int, decodes_end: bool
) -> float:
    """When the newcomer's prompt is computed if it really stands behind the queue.

    `decodes_end` False: nobody ends any more once the newcomer's is the only prefill.
    """
    queue, step = shade._queue, shade._step

    def plain(seq: Sequence) -> Plain:
        end = seq.expected_output if seq.generated < seq.expected_output else 2 * seq.generated
        return Plain(seq.prefill_left, seq.computed, seq.generated, end)

    twin_of = {id(seq): plain(seq) for seq in (*queue.running, *queue.waiting)}
    running = [twin_of[id(seq)] for seq in queue.running]
    waiting = [twin_of[id(seq)] for seq in queue.waiting]
    clock_s = now_s
    if step is not None:
        clock_s = max(now_s, shade._step_end_s)
        work = {id(seq): tokens for seq, tokens in step.chunks} | {id(seq): 0 for seq in step.decodes}
        for key, tokens in work.items():
            if key in twin_of:
                one = twin_of[key]
                one.left, one.computed = one.left - tokens, one.computed + tokens
                one.generated += one.left == 0
    newcomer = Plain(total - cached, cached, 0, 10**9)
    waiting.append(newcomer)
    frozen = False
    while newcomer.left:
        if not frozen:
            running = [one for one in running if one.generated < one.end]
        others = [one for one in running if one is not newcomer]
        if not decodes_end and not any(one.left for one in others) and waiting in ([], [newcomer]):
            frozen = frozen or newcomer in running or len(running) < settings.max_num_seqs
        budget = settings.max_num_batched_tokens
        alone = len(running) + len(waiting) <= 1
        cap = budget if alone or not settings.long_prefill_token_threshold else settings.long_prefill_token_threshold
        clock_s += cost.fixed_s
        served: list[tuple[Plain, int]] = []
        for one in running:
            if budget:
                tokens = min(one.left, cap, budget) or 1
                served.append((one, tokens if one.left else 0))
                budget -= tokens
        while waiting and budget and len(running) < settings.max_num_seqs:
            one = waiting.pop(0)
            running.append(one)
            tokens = min(one.left, cap, budget)
            served.append((one, tokens))
            budget -= tokens
        for one, tokens in served:
            if tokens:
                end = one.computed + tokens
                clock_s += cost.per_token_s * tokens + cost.per_token_squared_s * (end**2 - one.computed**2)
                one.computed, one.left = end, one.left - tokens
                one.generated = int(one.left == 0)
            else:
                clock_s += cost.per_decode_s
                one.generated += 1
    return clock_s


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shadow, Settings, StepCost, float]:
    """A shadow somewhere in its life: decodes, prompts in every phase, perhaps overdue."""
    budget = draw(st.integers(4, 64))
    settings = Settings(
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.integers(1, min(8, budget))),  # vLLM refuses to start with more slots than tokens
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 16, 40, 100])),
    )
    squared = draw(st.sampled_from([0.0, 1e-6]))
    cost = StepCost(0.0, 0.0, draw(st.sampled_from([0.001, 0.01])), 0.001, squared, draw(st.sampled_from([0.0, 0.002])))
    shade = Shadow(settings, cost)
    now_s = 100.0
    for number in range(draw(st.integers(0, settings.max_num_seqs))):
        shade.adopt(Sequence(f"d{number}", 5, 5, draw(st.integers(1, 60))), now_s)
    for number in range(draw(st.integers(0, 8))):
        now_s += draw(st.sampled_from([0.0, 0.004, 0.05]))
        tokens = draw(st.integers(1, 150))
        cached = draw(st.integers(0, tokens - 1))
        shade.book(Sequence(f"p{number}", tokens, cached, draw(st.integers(1, 40)), draw(st.booleans())), now_s)
    now_s += draw(st.sampled_from([0.0, 0.003, 0.02, 0.3, 2.0]))
    shade.advance(now_s)
    return shade, settings, cost, now_s


@given(shape=shapes(), cached=st.integers(0, 50), uncached=st.integers(1, 300))
@hypothesis_settings(max_examples=400, deadline=None)
def test_pricing_a_newcomer_on_the_timeline_equals_replaying_the_queue_with_it(
    shape: tuple[Shadow, Settings, StepCost, float], cached: int, uncached: int
) -> None:
    shade, settings, cost, now_s = shape
    total = cached + uncached
    priced_s = shade.timeline(now_s).finish_s(uncached) + cost.tokens_s(cached, total)
    assert priced_s == pytest.approx(naive_first_token_s(shade, settings, cost, now_s, cached, total, False), abs=1e-6)


@given(shape=shapes(), uncached=st.integers(1, 300))
@hypothesis_settings(max_examples=200, deadline=None)
def test_where_decodes_would_end_while_only_the_newcomer_prefills_the_timeline_is_late_and_never_early(
    shape: tuple[Shadow, Settings, StepCost, float], uncached: int
) -> None:
    # By design: behind the last listed step the decodes are taken to stay, so that the rest is a closed form. A decode
    # costs a token of budget, its part of each step, and the newcomer's exemption from the threshold.
    shade, settings, cost, now_s = shape
    priced_s = shade.timeline(now_s).finish_s(uncached) + cost.tokens_s(0, uncached)
    assert priced_s >= naive_first_token_s(shade, settings, cost, now_s, 0, uncached, True) - 1e-6


@given(shape=shapes())
@hypothesis_settings(max_examples=200, deadline=None)
def test_more_tokens_never_finish_earlier_and_nothing_finishes_in_the_past(
    shape: tuple[Shadow, Settings, StepCost, float],
) -> None:
    shade, _, _, now_s = shape
    timeline = shade.timeline(now_s)
    finishes = [timeline.finish_s(tokens) for tokens in (*range(1, 400), 1000, 10**4, 10**6)]
    assert finishes[0] >= timeline.admitted_s() >= now_s
    assert all(earlier <= later for earlier, later in pairwise(finishes))
    assert list(timeline.room_by_end) == sorted(timeline.room_by_end)


@given(shape=shapes(), later_s=st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0]), tokens=st.integers(1, 200))
@hypothesis_settings(max_examples=200, deadline=None)
def test_a_timeline_kept_from_before_says_the_same_as_a_new_one(
    shape: tuple[Shadow, Settings, StepCost, float], later_s: float, tokens: int
) -> None:
    shade, settings, _, now_s = shape
    shade.timeline(now_s)
    kept = shade.timeline(now_s + later_s)
    shade.set_settings(settings)
    fresh = shade.timeline(now_s + later_s)
    assert kept.finish_s(tokens) == pytest.approx(fresh.finish_s(tokens), abs=1e-9)


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


def test_an_overdue_first_token_moves_the_forecast_with_the_clock() -> None:
    shade = shadow()
    shade.book(prompt("a", 100), 0.0)
    assert shade.timeline(0.05).finish_s(50) == pytest.approx(0.11 + 0.01)
    assert shade.timeline(0.11).finish_s(50) == pytest.approx(0.11 + 0.01)
    assert shade.timeline(3.0).finish_s(50) == pytest.approx(3.0 + 0.01)
    shade.first_token("a", 3.2)
    assert (shade.prefilling, shade.decoding) == (0, 1)
    assert shade.timeline(3.2).finish_s(50) == pytest.approx(3.21 + 0.01)


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
    assert shade.timeline(5.0).finish_s(1) == pytest.approx(5.0 + 0.01)  # b is watched, and overdue


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
    shade.finish("a", 0.5)
    # Its step ended at 0.11 by prediction, and so did b's at 0.22: now it is b that is overdue.
    assert shade.timeline(0.5).finish_s(1) == pytest.approx(0.5 + 0.01)
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
    before = shade.timeline(0.2)
    shade.first_token("a", 0.2)
    shade.first_token("nobody", 0.2)
    shade.finish("nobody", 0.2)
    assert shade.timeline(0.2) == before
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
    shade.set_cost(StepCost(0.0, 0.0, 0.010, 0.002, 0.0, 0.0))
    assert shade.timeline(0.0).finish_s(1) == pytest.approx(0.11 + 9 * 0.21 + 0.01)  # the step under way goes on
    shade.set_settings(Settings(max_num_batched_tokens=900))
    assert shade.timeline(0.0).finish_s(1) == pytest.approx(0.11 + 1.81 + 0.01)


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
        assert shade.prefilling - shade._given_up + shade.decoding == len(known)


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


def timed_timeline(shade: Shadow, settings: Settings) -> tuple[Timeline, float]:
    best_s = 60.0
    for _ in range(3):
        shade.set_settings(settings)
        began = time.perf_counter()
        timeline = shade.timeline(0.0)
        best_s = min(best_s, time.perf_counter() - began)
    return timeline, best_s


def test_a_full_engine_is_run_forward_in_bounded_time() -> None:
    settings = Settings(max_num_batched_tokens=2048, max_num_seqs=320)
    shade = shadow(MEASURED, settings)
    for number in range(256):
        shade.adopt(prompt(f"d{number}", 500, output=300 + number), 0.0)
    for number in range(64):
        shade.book(prompt(f"w{number}", 3000), 0.0)
    timeline, took_s = timed_timeline(shade, settings)
    sys.stdout.write(f"\n256 decoding, 64 waiting: {len(timeline.ends_s)} steps in {took_s * 1e3:.1f} ms")
    assert len(timeline.ends_s) > 100
    assert took_s < 1.0


def test_a_queue_too_long_to_be_replayed_is_priced_as_if_one_came_after_the_other() -> None:
    settings = Settings(max_num_batched_tokens=512)
    shade = shadow(MEASURED, settings)
    for number in range(3):
        shade.book(prompt(f"giant{number}", 1_000_000), 0.0)
    timeline, took_s = timed_timeline(shade, settings)
    sys.stdout.write(f"\n3 x 1M tokens at budget 512: {len(timeline.ends_s)} steps in {took_s * 1e3:.1f} ms")
    assert len(timeline.ends_s) <= MAX_STEPS
    whole_s = 3 * (1_000_000 / 512 * 0.005 + 30e-6 * 1e6 + 37e-12 * 1e12)
    finishes = [timeline.finish_s(tokens) for tokens in (1, 500, 5000, 500_000)]
    assert finishes == sorted(finishes)
    assert finishes[0] == pytest.approx(whole_s, rel=0.01)
    assert finishes[-1] - finishes[0] == pytest.approx(500_000 / 509 * (0.005 + 3 * 50e-6), rel=0.02)
    assert took_s < 1.0


def test_a_giant_of_a_million_tokens_at_a_small_budget_is_replayed_to_its_end() -> None:
    settings = Settings(max_num_batched_tokens=512)
    shade = shadow(MEASURED, settings)
    shade.book(prompt("giant", 1_000_000), 0.0)
    assert shade.timeline(0.0).finish_s(1) == pytest.approx(1954 * 0.005 + 30.0 + 37.0, rel=1e-6)
