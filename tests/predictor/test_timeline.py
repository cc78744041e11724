"""A timeline equals a replay, step by step, with the newcomer inside, whatever the queue holds."""

import sys
import time
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.engines.vllm import NO_DRAFTS, Drafting, Queue, Sequence, Settings, schedule
from predictor.prefill_cost import StepCost
from predictor.prefixes_ahead import Share
from predictor.run_forward import RunForward
from predictor.timeline import Guess, Timeline

MEASURED = StepCost(0.0, 0.0, 0.005, 30e-6, 37e-12, 50e-6)


@dataclass
class Shape:
    queue: Queue
    settings: Settings
    cost: StepCost
    ends_at: dict[str, int]

    def timeline(self, begins_s: float = 0.0) -> Timeline:
        return Timeline(begins_s, RunForward(self.queue, self.settings, self.cost, self.ends_at))


def replayed(shape: Shape, cached: int, total: int) -> tuple[float, bool]:
    """When the newcomer's prompt is computed, and whether anybody was preempted once it ran."""
    settings, cost = shape.settings, shape.cost
    queue = shape.queue.copy()
    newcomer = Sequence("newcomer", total, cached, 10**9)
    queue.waiting.append(newcomer)
    ends_at = shape.ends_at | {"newcomer": 10**9}
    clock_s, disturbed = 0.0, False
    for _ in range(100_000):
        kept = []
        for seq in queue.running:
            if seq.generated and seq.generated >= ends_at[seq.id]:
                if queue.free_blocks is not None:
                    queue.free_blocks += seq.blocks
            else:
                kept.append(seq)
        queue.running = kept
        step = schedule(queue, settings)
        if step.empty:
            return float("inf"), False
        clock_s += cost.step_s(step.new_tokens, step.squares, len(step.decodes))
        disturbed = disturbed or bool(step.preempted and newcomer in (*queue.running, *step.preempted))
        if newcomer.generated:
            return clock_s, disturbed
    raise AssertionError("it never ends")


DRAFTS = [
    (1.0, 2.0, 0),
    (2.0, 1.0, 1),
    (3.0, 4.0, 0),
    (4.0, 5.0, 2),
    (1.7, 3.0, 0),
    (2.6, 2.9, 1),
]  # tokens gained, tokens drafted, slots of the drafter


@st.composite
def shapes(draw: st.DrawFn, drafts: tuple[float, float, int] | None = None) -> Shape:
    """A queue in the midst of its life: decodes, prompts in every phase, and perhaps hardly any KV space."""
    gain, drafted, slots = drafts or (1.0, 0.0, 0)
    # Where there are drafts, down to what has no room for those of one.
    budget = draw(st.integers(2 if drafts else 4, 64))
    size = draw(st.sampled_from([1, 4, 16]))
    settings = Settings(
        block_size=size,
        num_gpu_blocks=None if drafts else draw(st.sampled_from([None, None, 40, 80, 200])),
        max_num_batched_tokens=budget,
        # vLLM refuses to start with more slots than tokens.
        max_num_seqs=draw(st.integers(1, min(8, budget - 1))),
        draft_slots=slots,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3, 16, 40, 100])),
        long_prefill_token_threshold_adaptive=draw(st.booleans()),
        enable_chunked_prefill=True,
    )
    squared = draw(st.sampled_from([0.0, 1e-6]))
    cost = StepCost(0.0, 0.0, draw(st.sampled_from([0.001, 0.01])), 0.001, squared, draw(st.sampled_from([0.0, 0.002])))
    queue = Queue(free_blocks=settings.usable_blocks, drafting=Drafting(gain, drafted) if drafts else NO_DRAFTS)
    ends_at = {}
    for number in range(draw(st.integers(0, 10))):
        tokens = draw(st.integers(1, 150))
        seq = Sequence(f"p{number}", tokens, draw(st.integers(0, tokens - 1)), 0)
        queue.waiting.append(seq)
        ends_at[seq.id] = draw(st.integers(1, 60))
    for _ in range(draw(st.integers(0, 30))):
        schedule(queue, settings)
        for seq in list(queue.running):
            if seq.generated and seq.generated >= ends_at[seq.id]:
                queue.running.remove(seq)
                if queue.free_blocks is not None:
                    queue.free_blocks += seq.blocks
    return Shape(queue, settings, cost, ends_at)


@given(shape=shapes(), cached=st.integers(0, 50), uncached=st.integers(1, 300))
@hypothesis_settings(max_examples=500, deadline=None)
def test_pricing_a_newcomer_on_the_timeline_equals_replaying_the_queue_with_it(
    shape: Shape, cached: int, uncached: int
) -> None:
    total = cached + uncached
    expected_s, disturbed = replayed(shape, cached, total)
    assume(expected_s != float("inf") and not disturbed)
    blocks = -(-total // shape.settings.block_size)
    priced_s = shape.timeline().finish_s(uncached, blocks) + shape.cost.tokens_s(cached, total)
    assert priced_s == pytest.approx(expected_s, abs=1e-6)


@pytest.mark.parametrize("drafts", DRAFTS, ids=str)
@given(data=st.data(), cached=st.integers(0, 50), uncached=st.integers(1, 300))
@hypothesis_settings(max_examples=150, deadline=None)
def test_so_it_does_where_drafts_take_room_in_each_step_and_some_of_them_are_accepted(
    drafts: tuple[float, float, int], data: st.DataObject, cached: int, uncached: int
) -> None:
    shape = data.draw(shapes(drafts))
    expected_s, _ = replayed(shape, cached, cached + uncached)
    priced_s = shape.timeline().finish_s(uncached, 0) + shape.cost.tokens_s(cached, cached + uncached)
    assert priced_s == pytest.approx(expected_s, abs=1e-6)


@pytest.mark.parametrize("adaptive", [False, True])
def test_of_a_decode_s_drafts_only_those_that_a_chunk_ahead_of_it_leaves_room_for_can_be_accepted(
    adaptive: bool,
) -> None:
    settings = Settings(
        block_size=1,
        max_num_batched_tokens=20,
        max_num_seqs=3,
        long_prefill_token_threshold=16,
        long_prefill_token_threshold_adaptive=adaptive,
    )
    waiting = deque(Sequence(name, tokens, 0, 0) for name, tokens in (("first", 1), ("long", 30), ("behind", 1)))
    queue = Queue(waiting=waiting, drafting=Drafting(gain=3.0, drafted=4.0))
    shape = Shape(queue, settings, StepCost(0.0, 0.0, 0.001, 0.001, 0.0, 0.002), {"first": 2, "long": 1, "behind": 3})
    # 18 prompt tokens of three; then 14 of the long one, 5 of the first and what is left, 1 of 20, for who is behind:
    # so it is there for one more step, together with the newcomer.
    steps_s = [0.001 + 0.018, 0.001 + 0.014 + 2 * 0.002, 0.001 + 0.001 + 0.002]
    assert shape.timeline().finish_s(1) + shape.cost.tokens_s(0, 1) == pytest.approx(sum(steps_s))
    assert replayed(shape, 0, 1)[0] == pytest.approx(sum(steps_s))


@pytest.mark.parametrize("budget", [1024 + 5 * 8 + 1, 1024 + 5 * 5, 1024 + 5 * 2 + 1, 1024 + 3])
def test_decodes_behind_a_giant_take_a_handful_of_spans_however_much_of_their_drafts_has_room(budget: int) -> None:
    settings = Settings(max_num_batched_tokens=budget, long_prefill_token_threshold=1024)
    queue = Queue(drafting=Drafting(2.6, 4.0))
    queue.running = [Sequence("giant", 900_000, 0, 0)]
    queue.running += [Sequence(f"d{number}", 500, 500, 0, generated=1) for number in range(5)]
    ends_at = {"giant": 10} | {f"d{number}": 900 + 100 * number for number in range(5)}
    shape = Shape(queue, settings, MEASURED, ends_at)
    timeline = shape.timeline()
    assert timeline.finish_s(1) + MEASURED.tokens_s(0, 1) == pytest.approx(replayed(shape, 0, 1)[0], abs=1e-6)
    assert timeline.finish_s(5000) + MEASURED.tokens_s(0, 5000) == pytest.approx(replayed(shape, 0, 5000)[0], abs=1e-6)
    assert len(timeline.spans) < 20


@pytest.mark.parametrize(("slots", "drafted"), [(8, 0.0), (500, 0.0), (0, 40.0), (7, 40.0)])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_a_step_has_no_room_for_delays_and_breaks_nothing(
    slots: int, drafted: float, async_scheduling: bool
) -> None:
    settings = Settings(max_num_batched_tokens=8, max_num_seqs=4, draft_slots=slots, async_scheduling=async_scheduling)
    queue = Queue(drafting=Drafting(2.0, drafted))
    for number in range(6):
        queue.waiting.append(Sequence(f"s{number}", 20, 0, 5))
    ends_at = {f"s{number}": 5 for number in range(6)}
    for number in range(600):
        if not number % 20:
            timeline = Timeline(0.0, RunForward(queue, settings, MEASURED, ends_at))
            assert 0 < timeline.finish_s(30, 0) < float("inf")
        step = schedule(queue, settings)
        for seq in [seq for seq in queue.running if seq.generated >= 5]:
            queue.running.remove(seq)
        if step.empty:
            break
    assert not len(queue)


@given(shape=shapes(), tokens=st.lists(st.integers(1, 400), min_size=2, max_size=6))
@hypothesis_settings(max_examples=200, deadline=None)
def test_more_tokens_are_never_done_earlier_and_nothing_ends_before_it_is_admitted(
    shape: Shape, tokens: list[int]
) -> None:
    timeline = shape.timeline()
    courses = [timeline.course(count) for count in sorted(tokens)]
    assert [c.finish_s for c in courses] == sorted(c.finish_s for c in courses)
    for course, count in zip(courses, sorted(tokens), strict=True):
        assert course.admitted_s <= course.last_s < course.finish_s
        assert 1 <= course.last_tokens <= count


def busy(decoding: int, waiting: int, tokens: int, settings: Settings) -> Shape:
    queue = Queue(free_blocks=settings.usable_blocks)
    ends_at = {}
    for number in range(decoding):
        seq = Sequence(f"d{number}", 500, 500, 0, generated=1, blocks=32)
        if queue.free_blocks is not None:
            queue.free_blocks -= 32
        queue.running.append(seq)
        ends_at[seq.id] = 100 + 7 * number % 400
    for number in range(waiting):
        queue.waiting.append(Sequence(f"w{number}", tokens, 0, 0))
        ends_at[f"w{number}"] = 300 + number
    return Shape(queue, settings, MEASURED, ends_at)


@pytest.mark.parametrize("blocks", [None, 20_000])
def test_a_full_engine_is_run_forward_in_milliseconds(blocks: int | None) -> None:
    shape = busy(256, 64, 3000, Settings(max_num_batched_tokens=2048, max_num_seqs=320, num_gpu_blocks=blocks))
    best_s, spans = 60.0, 0
    for _ in range(5):
        began = time.perf_counter()
        timeline = shape.timeline()
        timeline.finish_s(3000, 188)
        best_s = min(best_s, time.perf_counter() - began)
        spans = len(timeline.spans)
    sys.stdout.write(f"\n256 decoding, 64 waiting, {blocks} blocks: {spans} spans in {best_s * 1e3:.2f} ms")
    assert best_s < 0.1


def test_giants_take_a_handful_of_spans_however_small_the_budget() -> None:
    settings = Settings(max_num_batched_tokens=512)
    shape = busy(0, 3, 1_000_000, settings)
    timeline = shape.timeline()
    assert timeline.finish_s(1) == pytest.approx(3 * (30.0 + 37.0) + 5860 * 0.005, rel=0.01)
    assert len(timeline.spans) < 40


def test_a_queue_too_long_to_be_listed_is_cut_and_its_rest_priced_as_if_one_came_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = busy(20, 300, 700, Settings(max_num_batched_tokens=512))
    whole_s = shape.timeline().finish_s(1)
    monkeypatch.setattr("predictor.run_forward.MAX_SPANS", 100)
    timeline = shape.timeline()
    assert timeline.finish_s(1) == pytest.approx(whole_s, rel=0.3)
    assert len(timeline.spans) <= 102


def test_one_that_can_never_be_admitted_holds_nobody_up_for_ever() -> None:
    shape = Shape(
        Queue([], deque([Sequence("huge", 10_000, 0, 1)]), 10), Settings(num_gpu_blocks=11), MEASURED, {"huge": 5}
    )
    assert shape.timeline().finish_s(10, 1) < 1.0


# Blocks in common


def test_blocks_that_two_hold_are_free_when_the_last_of_them_ends() -> None:
    """Of 100 blocks that both hold, only the one that ended first would have freed any, and it came first."""
    first, second = Sequence("first", 1600, 1600, 10), Sequence("second", 1680, 1680, 50)
    first.generated = second.generated = 1
    first.blocks, second.blocks, second.shared_blocks = 101, 5, 100
    queue = Queue([first, second], deque(), free_blocks=20)
    ends = {"first": 10, "second": 50}
    settings = Settings(num_gpu_blocks=126)

    def admitted_s(shares: dict[str, Share]) -> float:
        return Timeline(0.0, RunForward(queue, settings, MEASURED, ends, shares)).admitted_s(blocks=60)

    of_both, of_one = MEASURED.decode_step_s(2), MEASURED.decode_step_s(1)
    assert admitted_s({}) == pytest.approx(9 * of_both)
    assert admitted_s({"first": Share(100, 100), "second": Share(100, 0)}) == pytest.approx(9 * of_both + 40 * of_one)


def test_who_waits_and_shares_what_others_hold_needs_only_the_rest() -> None:
    runs = Sequence("runs", 1600, 1600, 10)
    runs.generated, runs.blocks = 1, 101
    waits = Sequence("waits", 1680, 1600, 10)
    queue = Queue([runs], deque([waits]), free_blocks=20)
    ends = {"runs": 10, "waits": 10}
    settings = Settings(num_gpu_blocks=122)

    def admitted_s(shares: dict[str, Share]) -> float:
        return Timeline(0.0, RunForward(queue, settings, MEASURED, ends, shares)).admitted_s()

    step_s = MEASURED.decode_step_s(1)
    assert admitted_s({}) == pytest.approx(9 * step_s)
    assert admitted_s({"runs": Share(100, 100), "waits": Share(100, 0)}) == 0.0


@pytest.mark.parametrize("prompts", [1, 10, 60])
def test_a_guess_and_a_timeline_agree_on_how_many_steps_a_wait_has(prompts: int) -> None:
    settings = Settings(max_num_batched_tokens=8192)
    queue = Queue(waiting=deque(Sequence(f"w{n}", 8192, 0, 1) for n in range(prompts)))
    shape = Shape(queue, settings, MEASURED, {seq.id: 1 for seq in queue.waiting})
    for told in (shape.timeline(), Guess(0.0, 8192 * prompts, settings, MEASURED)):
        assert told.steps_until(told.admitted_s()) == pytest.approx(prompts, rel=0.05)
