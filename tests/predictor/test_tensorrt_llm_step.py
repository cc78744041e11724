"""A step of TensorRT-LLM as its sources say that it is composed, and what its queue means for a newcomer."""

from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor.engines.step_rule import reserved_beside_prompt, rule_of
from predictor.engines.tensorrt_llm import reserved_blocks, schedule
from predictor.engines.vllm import Queue, Sequence, Settings, Step, undo
from predictor.prefill_cost import StepCost
from predictor.run_forward import RunForward
from predictor.shadow import Shadow
from predictor.timeline import Timeline

WHOLE = Settings(family="tensorrt_llm", block_size=32, max_num_batched_tokens=1000, enable_chunked_prefill=False)
CUT = replace(WHOLE, enable_chunked_prefill=True)


def prompt(name: str, tokens: int, max_output: int | None = 100) -> Sequence:
    return Sequence(name, tokens, 0, expected_output=100, max_output=max_output)


def decoding(name: str) -> Sequence:
    return Sequence(name, 10, 10, expected_output=100, generated=1, max_output=100)


def shares(step: Step) -> list[tuple[str, int]]:
    return [(seq.id, end - start) for seq, start, end in step.chunks]


def test_the_family_has_its_own_rule() -> None:
    assert rule_of(WHOLE) is schedule


def test_who_generates_is_in_every_step_and_prompts_share_what_is_left_of_it() -> None:
    queue = Queue([decoding("x"), decoding("y")], deque([prompt("a", 300), prompt("b", 698), prompt("c", 1)]))
    step = schedule(queue, WHOLE)
    assert ([seq.id for seq in step.decodes], shares(step), step.room) == (["x", "y"], [("a", 300), ("b", 698)], 0)
    step = schedule(queue, WHOLE)
    assert ([seq.id for seq in step.decodes], shares(step)) == (["x", "y", "a", "b"], [("c", 1)])
    assert step.room == 1000 - 4 - 1


def test_a_prompt_that_may_not_be_cut_stops_those_behind_it_where_it_does_not_fit() -> None:
    queue = Queue([], deque([prompt("a", 600), prompt("b", 500), prompt("small", 10)]))
    assert [shares(schedule(queue, WHOLE)) for _ in range(2)] == [[("a", 600)], [("b", 500), ("small", 10)]]


def test_a_prompt_that_may_be_cut_gets_whole_blocks_and_a_short_one_behind_it_what_they_leave() -> None:
    queue = Queue([], deque([prompt("giant", 1500), prompt("small", 8)]))
    assert shares(schedule(queue, CUT)) == [("giant", 992), ("small", 8)]
    assert shares(schedule(queue, CUT)) == [("giant", 508)]


def test_of_a_prompt_of_which_no_block_fits_nothing_is_let_in_and_a_shorter_one_passes_it() -> None:
    queue = Queue([], deque([prompt("a", 990), prompt("long", 500), prompt("small", 10), prompt("last", 1)]))
    assert shares(schedule(queue, CUT)) == [("a", 990), ("small", 10)]
    assert [seq.id for seq in queue.waiting] == ["long", "last"]


def test_who_is_let_in_has_space_for_all_it_may_generate_and_keeps_it() -> None:
    queue = Queue([], deque([prompt("a", 64, 64), prompt("b", 64, 65), prompt("c", 1, 1)]), free_blocks=8)
    step = schedule(queue, WHOLE)
    assert (shares(step), queue.free_blocks) == ([("a", 64)], 4)  # "b" needs five, and nobody passes it
    for _ in range(40):
        schedule(queue, WHOLE)
    assert queue.free_blocks == 4
    assert [seq.blocks for seq in queue.running] == [4]


def test_an_output_without_an_end_takes_space_to_the_end_of_the_context() -> None:
    longest = replace(WHOLE, max_model_len=320)
    assert reserved_blocks(prompt("a", 100, None), longest) == 10
    assert reserved_beside_prompt(longest, None, 100) == 220
    assert reserved_beside_prompt(longest, 7, 100) == 7


def test_slots_are_counted() -> None:
    queue = Queue([], deque([prompt("a", 10), prompt("b", 10), prompt("c", 10)]))
    assert shares(schedule(queue, replace(WHOLE, max_num_seqs=2))) == [("a", 10), ("b", 10)]


def test_a_step_that_is_taken_back_and_composed_again_is_the_same() -> None:
    queue = Queue([decoding("x")], deque([prompt("a", 300), prompt("b", 500)]), free_blocks=100)
    first = schedule(queue, WHOLE)
    undo(queue, first)
    assert (queue.free_blocks, [seq.id for seq in queue.waiting]) == (100, ["a", "b"])
    assert shares(schedule(queue, WHOLE)) == shares(first)


def test_a_worker_that_is_followed_keeps_the_space_of_each_until_it_ends_however_its_steps_are_counted() -> None:
    settings = replace(WHOLE, num_gpu_blocks=100)
    shade = Shadow(settings, COST)
    for name in "a", "b":
        shade.book(prompt(name, 64, 960), 0.0)
    shade.book(prompt("waits", 64, 1200), 0.0)
    for name in "a", "b":
        shade.first_token(name, 0.138)
    assert shade.free_blocks == 100 - 2 * 32
    shade.advance(1.0)
    shade.finish("a", 1.0, output_tokens=5)  # by the time that has passed it would be some 70
    assert shade.free_blocks == 100 - 32
    shade.advance(1.05)
    assert shade.free_blocks == 100 - 32 - 40
    shade.first_token("waits", 1.1)
    shade.finish("b", 1.2, output_tokens=9)
    shade.finish("waits", 1.3, output_tokens=2)
    assert shade.free_blocks == 100
    assert shade.forced == 0


@dataclass
class Shape:
    queue: Queue
    settings: Settings
    ends_at: dict[str, int]


COST = StepCost(0.0, 0.0, 0.01, 0.001, 0.0, 0.002)


def leave(queue: Queue, ends_at: dict[str, int]) -> None:
    for seq in [seq for seq in queue.running if seq.generated >= ends_at[seq.id]]:
        queue.running.remove(seq)
        if queue.free_blocks is not None:
            queue.free_blocks += seq.blocks


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """A queue in the midst of its life, whose slots and space may be short; prompts fit into a step."""
    size = draw(st.sampled_from([1, 4, 16]))
    settings = Settings(
        family="tensorrt_llm",
        block_size=size,
        num_gpu_blocks=draw(st.sampled_from([None, 400 // size, 900 // size])),
        max_num_batched_tokens=128,
        max_num_seqs=draw(st.sampled_from([2, 4, 100])),
        enable_chunked_prefill=False,
    )
    queue, ends_at = Queue(free_blocks=settings.usable_blocks), {}
    for number in range(draw(st.integers(0, 10))):
        tokens, output, most = draw(st.integers(1, 100)), draw(st.integers(1, 40)), draw(st.integers(0, 60))
        queue.waiting.append(Sequence(f"p{number}", tokens, 0, output, max_output=output + most))
        ends_at[f"p{number}"] = output
    for _ in range(draw(st.integers(0, 30))):
        schedule(queue, settings)
        leave(queue, ends_at)
    return Shape(queue, settings, ends_at)


@given(shapes(), st.integers(1, 100), st.integers(1, 60))
@hypothesis_settings(max_examples=500, deadline=None)
def test_a_newcomer_is_priced_as_if_it_were_replayed(shape: Shape, tokens: int, max_tokens: int) -> None:
    queue, settings = shape.queue, shape.settings
    whole = tokens + reserved_beside_prompt(settings, max_tokens, tokens)
    blocks = -(-whole // settings.block_size)
    assume(settings.usable_blocks is None or blocks <= settings.usable_blocks)
    ahead = RunForward(queue.copy(), settings, COST, dict(shape.ends_at))
    priced_s = Timeline(0.0, ahead).finish_s(tokens, blocks) + COST.tokens_s(0, tokens)
    newcomer = Sequence("newcomer", tokens, 0, 10**6, max_output=max_tokens)
    queue.waiting.append(newcomer)
    clock_s = 0.0
    while not newcomer.generated:
        leave(queue, shape.ends_at | {"newcomer": 10**6})
        step = schedule(queue, settings)
        assert not step.empty
        clock_s += COST.step_s(step.new_tokens, step.squares, len(step.decodes))
    assert priced_s == pytest.approx(clock_s, abs=1e-6)
