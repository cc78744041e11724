"""What an SGLang worker's queue means for a newcomer equals a replay, step by step, with the newcomer inside."""

import sys
from collections import deque
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.engines.sglang import LAST_RATIO, first_ratio, schedule
from predictor.engines.step_rule import reserved_beside_prompt
from predictor.engines.vllm import ARRIVALS_APART, Queue, Sequence, Settings, enqueue
from predictor.prefill_cost import StepCost
from predictor.prefill_first import PrefillFirst, PrefillFirstTimeline
from predictor.run_forward import Budget

LINES_A_SPAN = 220
MEASURED = StepCost(0.0, 0.0, 0.005, 30e-6, 37e-12, 50e-6)


RULES: list[dict[str, Any]] = [
    {},
    {"enable_mixed_chunk": True},
    {"schedule_conservativeness": 0.3},
    {"prefill_decode_interval": 1},
    {"prefill_decode_interval": 4, "prefill_decode_interval_min_bs": 3},
    {"enable_mixed_chunk": True, "prefill_decode_interval": 2},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 100_000, "max_prefill_tokens": 100},
]


@dataclass
class Shape:
    queue: Queue
    settings: Settings
    cost: StepCost
    ends_at: dict[str, int]

    def run(self) -> PrefillFirst:
        return PrefillFirst(self.queue, self.settings, self.cost, dict(self.ends_at))

    def timeline(self, begins_s: float = 0.0) -> PrefillFirstTimeline:
        return PrefillFirstTimeline(begins_s, self.run())  # type: ignore[arg-type]

    def blocks(self, prompt_tokens: int, max_tokens: int | None) -> int:
        needed = prompt_tokens + reserved_beside_prompt(self.settings, max_tokens)
        return -(-needed // self.settings.block_size)


def leave(queue: Queue, ends_at: dict[str, int]) -> None:
    """Whoever has generated all goes."""
    for seq in [seq for seq in queue.running if seq.generated >= ends_at[seq.id]]:
        queue.running.remove(seq)
        queue.shut = False
        if queue.free_blocks is not None:
            queue.free_blocks += seq.blocks


def replayed_s(shape: Shape, tokens: int, max_tokens: int | None) -> float | None:
    """When the newcomer's prompt is computed; None if it never is."""
    queue = shape.queue.copy()
    newcomer = Sequence("newcomer", tokens, 0, 10**9, max_output=max_tokens)
    queue.waiting.append(newcomer)
    ends_at = shape.ends_at | {"newcomer": 10**9}
    clock_s = 0.0
    for _ in range(20_000):
        leave(queue, ends_at)
        step = schedule(queue, shape.settings)
        if step.empty:
            return None
        for _ in step.preempted:
            queue.waiting.pop()  # behind the newcomer: what those share its last batch with is another question
        clock_s += shape.cost.step_s(step.new_tokens, step.squares, len(step.decodes))
        if newcomer.generated:
            return clock_s
    raise AssertionError("it never ends")


@st.composite
def shapes(draw: st.DrawFn, space: bool) -> Shape:
    """A queue in the midst of its life; with `space` limited, of pages and of slots."""
    page = draw(st.sampled_from([1, 4, 16]))
    chunk = draw(st.integers(16 // page, 64 // page)) * page  # SGLang insists on whole pages
    settings = Settings(
        family="sglang",
        block_size=page,
        num_gpu_blocks=draw(st.integers(300, 1200)) // page if space else None,
        max_num_seqs=draw(st.integers(1, 8)) if space else 1000,
        **{"max_num_batched_tokens": chunk, **draw(st.sampled_from(RULES))},
    )
    squared = draw(st.sampled_from([0.0, 1e-6]))
    cost = StepCost(0.0, 0.0, draw(st.sampled_from([0.001, 0.01])), 0.001, squared, draw(st.sampled_from([0.0, 0.002])))
    queue = Queue(free_blocks=settings.usable_blocks, reserve_ratio=first_ratio(settings) * 0.14)
    ends_at = {}
    for number in range(draw(st.integers(0, 10))):
        tokens, output = draw(st.integers(1, 150)), draw(st.integers(1, 60))
        queue.waiting.append(Sequence(f"p{number}", tokens, 0, output, max_output=output))
        ends_at[f"p{number}"] = output
    for _ in range(draw(st.integers(0, 30))):
        schedule(queue, settings)
        leave(queue, ends_at)
    return Shape(queue, settings, cost, ends_at)


@given(shape=shapes(space=False), tokens=st.integers(1, 300))
@hypothesis_settings(max_examples=400, deadline=None)
def test_with_space_for_all_it_is_exact(shape: Shape, tokens: int) -> None:
    expected_s = replayed_s(shape, tokens, None)
    priced_s = shape.timeline(5.0).finish_s(tokens) - 5.0 + shape.cost.tokens_s(0, tokens)
    assert priced_s == pytest.approx(expected_s, abs=1e-6)


@given(shape=shapes(space=True), tokens=st.integers(1, 200), max_tokens=st.integers(1, 80))
@hypothesis_settings(max_examples=400, deadline=None)
def test_where_space_is_short_it_is_exact_as_well(shape: Shape, tokens: int, max_tokens: int) -> None:
    expected_s = replayed_s(shape, tokens, max_tokens)
    assume(expected_s is not None)
    assert expected_s is not None
    needed, page = tokens + reserved_beside_prompt(shape.settings, max_tokens), shape.settings.block_size
    # What it needs is told in whole pages: with one less it is let in too soon, if that matters.
    soon_s, priced_s = (
        shape.timeline().finish_s(tokens, blocks) + shape.cost.tokens_s(0, tokens)
        for blocks in (needed // page, -(-needed // page))
    )
    assert soon_s - 1e-6 <= expected_s <= priced_s + 1e-6
    if soon_s == priced_s or page == 1:
        assert priced_s == pytest.approx(expected_s, abs=1e-6)


@st.composite
def ranked(draw: st.DrawFn) -> tuple[Shape, int]:
    """A queue by priority with few slots and space for all, and what a newcomer would wait by."""
    settings = Settings(
        family="sglang",
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=draw(st.integers(1, 4)),
        scheduling_policy="priority",
        disable_priority_preemption=draw(st.booleans()),
    )
    queue, ends_at = Queue(), {}
    for number in range(draw(st.integers(0, 9))):
        tokens, output, name = draw(st.integers(1, 100)), draw(st.integers(1, 40)), f"p{number}"
        place = draw(st.sampled_from([-20, 0, 5, 20]))
        enqueue(queue, settings, Sequence(name, tokens, 0, output, max_output=output, priority=place, arrived=number))
        ends_at[name] = output
        for _ in range(draw(st.integers(0, 4))):
            schedule(queue, settings)
            leave(queue, ends_at)
    return Shape(queue, settings, StepCost(0.0, 0.0, 0.01, 0.001, 0.0, 0.002), ends_at), draw(
        st.sampled_from([-25, 0, 9])
    )


def one_who_gives_way_to_another_than_the_newcomer() -> tuple[Shape, int]:
    """With its priority: it waits behind the newcomer from then on, and shares its batch."""
    settings = Settings(
        family="sglang", block_size=4, max_num_batched_tokens=32, max_num_seqs=2, scheduling_policy="priority"
    )
    decoding = Sequence("p1", 1, 1, 2, generated=1, max_output=2, arrived=1)
    cut = Sequence("p0", 29, 28, 1, max_output=1, priority=5)
    queue = Queue([decoding, cut])
    queue.waiting.append(Sequence("p2", 1, 0, 1, max_output=1, priority=-20, arrived=2))
    return Shape(queue, settings, StepCost(0.0, 0.0, 0.01, 0.001, 0.0, 0.002), {"p0": 1, "p1": 2, "p2": 1}), 0


def nobody_gives_way_to_one_for_whom_the_batch_has_no_tokens() -> tuple[Shape, int]:
    settings = Settings(
        family="sglang", block_size=4, max_num_batched_tokens=32, max_num_seqs=3, scheduling_policy="priority"
    )
    decoding = [
        Sequence("p0", 1, 1, 2, generated=1, max_output=2, priority=-20),
        Sequence("p1", 1, 1, 2, generated=1, max_output=2, arrived=1),
    ]
    queue = Queue([*decoding, Sequence("p2", 85, 24, 1, max_output=1, arrived=2)])
    queue.waiting.append(Sequence("p3", 1, 0, 1, max_output=1, priority=-20, arrived=3))
    ends_at = {"p0": 2, "p1": 2, "p2": 1, "p3": 1}
    return Shape(queue, settings, StepCost(0.0, 0.0, 0.01, 0.001, 0.0, 0.002), ends_at), 0


@given(ranked(), st.integers(1, 100))
@example(nobody_gives_way_to_one_for_whom_the_batch_has_no_tokens(), 1)
@example(one_who_gives_way_to_another_than_the_newcomer(), 1)
@hypothesis_settings(max_examples=300, deadline=None)
def test_who_overtakes_and_takes_slots_by_priority_is_priced_exactly(ranked: tuple[Shape, int], tokens: int) -> None:
    shape, place = ranked
    queue, settings = shape.queue, shape.settings

    def drop_behind() -> None:
        """What those behind the newcomer share its last batch with is another question."""
        ahead = (place, newcomer.arrived)
        queue.waiting = deque(seq for seq in queue.waiting if (seq.priority, seq.arrived) <= ahead)

    newcomer = Sequence("newcomer", tokens, 0, 10**9, max_output=0, priority=place, arrived=ARRIVALS_APART)
    drop_behind()
    run = PrefillFirst(queue.copy(), settings, shape.cost, dict(shape.ends_at), place)
    timeline = PrefillFirstTimeline(0.0, run)  # type: ignore[arg-type]
    enqueue(queue, settings, newcomer)
    clock_s = 0.0
    while not newcomer.generated:
        leave(queue, shape.ends_at | {"newcomer": 10**9})
        step = schedule(queue, settings)
        clock_s += shape.cost.step_s(step.new_tokens, step.squares, len(step.decodes))
        drop_behind()
    assert timeline.finish_s(tokens) + shape.cost.tokens_s(0, tokens) == pytest.approx(clock_s, abs=1e-6)


def whole_prompts_in_little_space() -> Shape:
    settings = Settings(
        family="sglang",
        block_size=16,
        num_gpu_blocks=18,
        max_num_batched_tokens=100_000,
        max_num_seqs=5,
        enable_chunked_prefill=False,
        max_prefill_tokens=100,
    )
    decoding = Sequence("p0", 17, 17, 42, generated=1, max_output=42, blocks=2)
    queue = Queue([decoding], free_blocks=16, reserve_ratio=LAST_RATIO)
    return Shape(queue, settings, StepCost(0.0, 0.0, 0.001, 0.001, 0.0, 0.0), {"p0": 42})


# The last is turned away from a batch that had no room for it, and shuts the door.
@example(whole_prompts_in_little_space(), [(1, 4), (1, 4), (49, 5), (19, 60)])
@given(shape=shapes(space=True), later=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60)), max_size=4))
@hypothesis_settings(max_examples=200, deadline=None)
def test_what_is_booked_later_is_added_as_if_it_had_been_there(shape: Shape, later: list[tuple[int, int]]) -> None:
    grown = shape.run()
    PrefillFirstTimeline(0.0, grown).course(100, shape.blocks(100, 20))  # type: ignore[arg-type]
    for number, (tokens, output) in enumerate(later):
        seq = Sequence(f"l{number}", tokens, 0, output, max_output=output)
        grown.append(seq, output)
        shape.queue.waiting.append(seq)
        shape.ends_at[seq.id] = output
        shape_s = shape.timeline().finish_s(100, shape.blocks(100, 20))
        grown_s = PrefillFirstTimeline(0.0, grown).finish_s(100, shape.blocks(100, 20))  # type: ignore[arg-type]
        assert grown_s == pytest.approx(shape_s)


def test_who_decodes_takes_nothing_from_a_newcomer() -> None:
    decoders = [Sequence(f"d{n}", 100, 100 + n, 500, generated=n + 1, max_output=500) for n in range(50)]
    settings = Settings(family="sglang", max_num_batched_tokens=8192)
    shape = Shape(Queue(list(decoders)), settings, MEASURED, {seq.id: 500 for seq in decoders})
    assert shape.timeline().finish_s(20_000) == pytest.approx(3 * 0.005)


def test_a_budget_bounds_the_work_and_what_is_beyond_it_goes_on_at_the_pace_so_far() -> None:
    running = [Sequence(f"r{n}", 1000, 1000, 0, generated=1, max_output=900, blocks=1000) for n in range(60)]
    waiting = [Sequence(f"w{n}", 3000, 0, 0, max_output=900) for n in range(300)]
    ends_at = {seq.id: 300 + 9 * place for place, seq in enumerate(running)} | {seq.id: 600 for seq in waiting}
    queue = Queue(list(running), free_blocks=500, reserve_ratio=LAST_RATIO)
    queue.waiting.extend(waiting)
    settings = Settings(family="sglang", block_size=1, num_gpu_blocks=60_500, max_num_batched_tokens=8192)
    shape = Shape(queue, settings, MEASURED, ends_at)
    whole_s = shape.timeline().finish_s(1000, shape.blocks(1000, 900))
    budget = Budget(500)
    bounded_s = shape.timeline().finish_s(1000, shape.blocks(1000, 900), budget)
    assert budget.used <= 510
    assert budget.cut == 1
    assert bounded_s == pytest.approx(whole_s, rel=0.4)


def lines_run(run: PrefillFirst, spans: int) -> int:
    """Lines of Python that are executed while so many spans are listed."""
    lines = 0

    def count(frame: FrameType, event: str, told: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        for _ in range(spans):
            run.extend()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("waiting", [0, 200])
def test_a_stretch_of_decoding_costs_no_more_to_list_however_many_decode_and_however_long_it_is(waiting: int) -> None:
    def work(decoders: int, apart: int) -> tuple[int, int]:
        """Lines, and the work that is put down for them."""
        running = [Sequence(f"r{n}", 100, 100, 0, generated=1, max_output=9000, blocks=7) for n in range(decoders)]
        ends_at = {seq.id: 500 + apart * place for place, seq in enumerate(running)}
        # Of those who wait nobody fits, whoever leaves.
        queue = Queue(list(running), free_blocks=1_000_000, reserve_ratio=LAST_RATIO)
        queue.waiting.extend(Sequence(f"w{n}", 17_000_000, 0, 0, max_output=900) for n in range(waiting))
        settings = Settings(family="sglang", num_gpu_blocks=1_100_000, max_num_batched_tokens=8192)
        run = PrefillFirst(queue, settings, MEASURED, ends_at | {seq.id: 600 for seq in queue.waiting})
        run.extend()  # once, what is needed to book somebody later is kept
        before = run.work
        return lines_run(run, 40), run.work - before

    few, budgeted = work(50, apart=1)
    assert few < LINES_A_SPAN * budgeted
    assert work(500, apart=1)[0] < 1.2 * few
    assert work(500, apart=100)[0] < 1.2 * few


def test_who_is_retracted_costs_about_as_much_to_list_as_the_work_says() -> None:
    running = [Sequence(f"r{n}", 100, 100, 0, generated=1, max_output=9000, blocks=7) for n in range(500)]
    settings = Settings(family="sglang", num_gpu_blocks=4000, max_num_batched_tokens=8192)
    queue = Queue(running, free_blocks=500, reserve_ratio=LAST_RATIO)
    run = PrefillFirst(queue, settings, MEASURED, {seq.id: 9000 for seq in running})
    before = run.work
    assert lines_run(run, 40) < LINES_A_SPAN * (run.work - before)


def test_a_prompt_that_is_let_in_costs_about_as_much_to_list_as_its_work_says() -> None:
    queue = Queue(free_blocks=100_000, reserve_ratio=LAST_RATIO)
    queue.waiting.extend(Sequence(f"w{n}", 40, 0, 0, max_output=900) for n in range(4000))
    settings = Settings(family="sglang", num_gpu_blocks=100_000, max_num_batched_tokens=8192, max_num_seqs=10_000)
    run = PrefillFirst(queue, settings, MEASURED, {seq.id: 600 for seq in queue.waiting})
    before = run.work
    assert lines_run(run, 10) < LINES_A_SPAN * (run.work - before)


@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_that_the_whole_cache_cannot_hold_is_priced_and_not_waited_for(rule: dict[str, Any]) -> None:
    running = [Sequence("r", 5, 5, 40, generated=1, max_output=40, blocks=5)]
    settings = Settings(
        **{"max_num_batched_tokens": 16, "family": "sglang", "block_size": 1, "num_gpu_blocks": 20, **rule}
    )
    shape = Shape(Queue(list(running), free_blocks=15), settings, MEASURED, {"r": 40})
    budget = Budget(500)
    assert 0.0 < shape.timeline().finish_s(500, 500, budget) < 60.0
    assert budget.used <= 500
