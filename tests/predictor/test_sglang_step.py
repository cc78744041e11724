"""A step of SGLang as the replay composes it, and the same step as the simulated engine's scheduler composes it."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from enginesim.request import Request
from enginesim.settings import SglangSettings
from enginesim.sglang_scheduler import SglangScheduler
from predictor.engines.sglang import FIRST_RATIO, LAST_RATIO, first_ratio, ratio_after, schedule
from predictor.engines.step_rule import reserved_beside_prompt
from predictor.engines.vllm import ARRIVALS_APART, Queue, Sequence, Settings, Step, enqueue, undo

PLAIN = Settings(family="sglang", block_size=1, max_num_batched_tokens=1000)


def prompt(name: str, tokens: int, computed: int = 0, max_output: int = 100) -> Sequence:
    return Sequence(name, tokens, computed, expected_output=100, max_output=max_output)


def decoding(name: str, max_output: int = 100) -> Sequence:
    return Sequence(name, 10, 10, expected_output=100, generated=1, max_output=max_output)


def shares(step: Step) -> list[tuple[str, int]]:
    return [(seq.id, end - start) for seq, start, end in step.chunks]


def test_while_there_is_a_prompt_nobody_decodes() -> None:
    queue = Queue([decoding("x"), decoding("y")], deque([prompt("a", 300)]))
    step = schedule(queue, PLAIN)
    assert (shares(step), step.decodes) == ([("a", 300)], ())
    step = schedule(queue, PLAIN)
    assert (step.chunks, [seq.id for seq in step.decodes]) == ((), ["x", "y", "a"])


def test_one_prompt_at_a_time_is_cut_and_who_is_behind_it_waits_for_its_last_chunk() -> None:
    queue = Queue([], deque([prompt("giant", 2300), prompt("small", 10)]))
    assert shares(schedule(queue, PLAIN)) == [("giant", 1000)]
    assert shares(schedule(queue, PLAIN)) == [("giant", 1000)]
    assert shares(schedule(queue, PLAIN)) == [("giant", 300), ("small", 10)]


def test_a_prompt_in_front_of_a_giant_is_taken_whole_and_the_giant_gets_the_rest_in_whole_pages() -> None:
    queue = Queue([], deque([prompt("small", 100), prompt("giant", 5000)]))
    assert shares(schedule(queue, Settings(family="sglang", max_num_batched_tokens=1000))) == [
        ("small", 100),
        ("giant", (1000 - 112) // 16 * 16),
    ]


def test_a_step_that_is_taken_back_and_composed_again_is_the_same() -> None:
    cut = prompt("cut", 1400, computed=1000)
    cut.blocks = 1000
    queue = Queue([decoding("x"), cut], deque([prompt("behind", 50, max_output=20)]), 600, LAST_RATIO)
    first = schedule(queue, PLAIN)
    assert shares(first) == [("cut", 400), ("behind", 50)]
    undo(queue, first)
    assert shares(schedule(queue, PLAIN)) == shares(first)


def ranked(name: str, place: int, arrived: int, tokens: int = 100) -> Sequence:
    seq = prompt(name, tokens)
    seq.priority, seq.arrived = place, arrived
    return seq


BY_PRIORITY = Settings(
    family="sglang", block_size=1, max_num_batched_tokens=1000, max_num_seqs=2, scheduling_policy="priority"
)


def waiting(settings: Settings, *sequences: Sequence) -> Queue:
    queue = Queue()
    for seq in sequences:
        enqueue(queue, settings, seq)
    return queue


def test_by_priority_higher_values_come_first_or_lower_ones_and_who_has_none_last() -> None:
    def order(settings: Settings) -> list[str]:
        values = {"three": 3, "none": None, "nine": 9, "minus": -1}
        ranks = [ranked(name, settings.place(value), at) for at, (name, value) in enumerate(values.items())]
        return [name for name, _ in shares(schedule(waiting(settings, *ranks), settings))]

    roomy = replace(BY_PRIORITY, max_num_seqs=9)
    assert order(roomy) == ["nine", "three", "minus", "none"]
    assert order(replace(roomy, schedule_low_priority_values_first=True)) == ["minus", "three", "nine", "none"]
    assert order(replace(roomy, default_priority_value=4)) == ["nine", "none", "three", "minus"]


def test_by_priority_who_is_worse_by_more_than_the_threshold_gives_up_its_slot_the_last_comer_first() -> None:
    queue = waiting(BY_PRIORITY, ranked("first", 20, 1), ranked("second", 20, 2))
    schedule(queue, BY_PRIORITY)
    enqueue(queue, BY_PRIORITY, ranked("near", 10, 3))
    assert not schedule(queue, BY_PRIORITY).preempted
    enqueue(queue, BY_PRIORITY, ranked("far", 9, 4))
    step = schedule(queue, BY_PRIORITY)
    assert (shares(step), [seq.id for seq in step.preempted]) == ([("far", 100)], ["second"])
    assert [seq.id for seq in queue.waiting] == ["near", "second"]
    assert [(seq.computed, seq.generated) for seq in queue.waiting] == [(0, 0), (0, 2)]  # it has to compute all anew


def test_by_priority_nobody_gives_up_its_slot_where_that_is_switched_off() -> None:
    settings = replace(BY_PRIORITY, disable_priority_preemption=True)
    queue = waiting(settings, ranked("first", 20, 1), ranked("second", 20, 2))
    schedule(queue, settings)
    enqueue(queue, settings, ranked("far", -100, 3))
    step = schedule(queue, settings)
    assert (step.chunks, step.preempted, [seq.id for seq in step.decodes]) == ((), (), ["first", "second"])


def test_who_gave_way_comes_back_after_its_equals_that_came_before_and_before_those_that_come_later() -> None:
    queue = waiting(BY_PRIORITY, ranked("runs", 0, ARRIVALS_APART), ranked("goes", 20, 2 * ARRIVALS_APART))
    schedule(queue, BY_PRIORITY)
    enqueue(queue, BY_PRIORITY, ranked("equal", 20, 3 * ARRIVALS_APART))
    enqueue(queue, BY_PRIORITY, ranked("better", 0, 4 * ARRIVALS_APART))
    assert [seq.id for seq in schedule(queue, BY_PRIORITY).preempted] == ["goes"]
    enqueue(queue, BY_PRIORITY, ranked("later", 20, 5 * ARRIVALS_APART))
    assert [seq.id for seq in queue.waiting] == ["equal", "goes", "later"]


def test_where_no_prompt_is_cut_a_batch_is_full_of_whole_ones_and_a_longer_one_goes_alone() -> None:
    whole = replace(PLAIN, enable_chunked_prefill=False, max_prefill_tokens=1000)
    queue = Queue([], deque([prompt("a", 600), prompt("giant", 5000), prompt("b", 399), prompt("c", 600)]))
    assert [shares(schedule(queue, whole)) for _ in range(3)] == [
        [("a", 600)],
        [("giant", 5000)],
        [("b", 399), ("c", 600)],
    ]
    exact = Queue([], deque([prompt("a", 600), prompt("b", 400)]))
    assert shares(schedule(exact, whole)) == [("a", 600)]  # what would fill it does not fit


def test_with_mixed_chunks_who_decodes_goes_on_beside_prompts_and_takes_a_token_of_the_batch_each() -> None:
    mixed = Settings(family="sglang", block_size=1, max_num_batched_tokens=1000, enable_mixed_chunk=True)
    queue = Queue([decoding("x"), decoding("y")], deque([prompt("giant", 1200), prompt("small", 10)]))
    step = schedule(queue, mixed)
    assert (shares(step), [seq.id for seq in step.decodes]) == ([("giant", 998)], ["x", "y"])
    step = schedule(queue, mixed)
    assert (shares(step), [seq.id for seq in step.decodes]) == ([("giant", 202), ("small", 10)], ["x", "y"])
    assert [seq.id for seq in schedule(queue, mixed).decodes] == ["x", "y", "giant", "small"]


def test_with_mixed_chunks_a_batch_without_a_page_for_the_decodes_leaves_them_out() -> None:
    mixed = Settings(family="sglang", block_size=1, max_num_batched_tokens=1000, enable_mixed_chunk=True)
    cut = prompt("cut", 100, computed=60)
    cut.blocks = 60
    queue = Queue([decoding("x"), cut], free_blocks=40)
    step = schedule(queue, mixed)
    assert (shares(step), step.decodes, queue.free_blocks) == ([("cut", 40)], (), 0)


def test_with_an_interval_so_many_decode_steps_pass_between_two_prefills() -> None:
    def kinds(least: int) -> str:
        settings = Settings(
            family="sglang",
            block_size=1,
            max_num_batched_tokens=1000,
            prefill_decode_interval=2,
            prefill_decode_interval_min_bs=least,
        )
        queue = Queue([decoding("x")], deque([prompt("giant", 2500), prompt("small", 10)]))
        return "".join("p" if schedule(queue, settings).chunks else "d" for _ in range(9))

    assert kinds(0) == kinds(1) == "pddpddpdd"
    assert kinds(2) == "pppdddddd"  # one alone is not worth waiting for


def test_an_interval_is_not_waited_for_where_nobody_decodes() -> None:
    settings = Settings(family="sglang", block_size=1, max_num_batched_tokens=1000, prefill_decode_interval=5)
    queue = Queue([], deque([prompt("giant", 2500)]))
    assert [shares(schedule(queue, settings)) for _ in range(3)] == [
        [("giant", 1000)],
        [("giant", 1000)],
        [("giant", 500)],
    ]


def test_who_is_let_in_has_room_for_its_output_beside_what_is_promised_to_others() -> None:
    def admitted(free_blocks: int) -> bool:
        queue = Queue([decoding("x", max_output=101)], deque([prompt("a", 50, max_output=20)]), free_blocks, LAST_RATIO)
        return bool(schedule(queue, PLAIN).chunks)

    # 9.8 for who decodes, 50 + 20 of its own, and a page; and not quite all may be taken.
    assert not admitted(80)
    assert admitted(81)


def test_who_was_turned_away_is_not_tried_again_before_somebody_has_left() -> None:
    queue = Queue([decoding("x", 101), decoding("y", 2)], deque([prompt("a", 50, max_output=20)]), 80, LAST_RATIO)
    assert not schedule(queue, PLAIN).chunks
    queue.free_blocks = 1000  # as if there were room now
    assert schedule(queue, PLAIN).decodes
    queue.running.pop()
    queue.shut = False
    assert shares(schedule(queue, PLAIN)) == [("a", 50)]


def test_a_prompt_that_is_cut_opens_the_door_for_its_last_batch() -> None:
    queue = Queue([decoding("x")], deque([prompt("giant", 1500), prompt("small", 30)]))
    assert shares(schedule(queue, PLAIN)) == [("giant", 1000)]
    queue.shut = True
    assert shares(schedule(queue, PLAIN)) == [("giant", 500), ("small", 30)]


def test_with_overlap_the_scheduler_reserves_for_tokens_that_it_has_not_seen_yet() -> None:
    def admitted(max_output: int, unseen: bool) -> bool:
        queue = Queue([decoding("x", max_output)], deque([prompt("a", 50, max_output=20)]), 172, 1.0)
        queue.unseen = frozenset(["x"] if unseen else [])
        return bool(schedule(queue, Settings(family="sglang", block_size=1, async_scheduling=True)).chunks)

    # Of 172, 71 are for the newcomer: 100 may be promised, and the first token of x is not counted while it is unseen.
    assert admitted(101, unseen=False)
    assert not admitted(101, unseen=True)
    assert admitted(100, unseen=True)


def test_with_overlap_the_space_of_who_is_about_to_end_is_waited_for() -> None:
    ending, staying = decoding("ending", 1), decoding("staying")
    ending.blocks = staying.blocks = 10
    queue = Queue([ending, staying], free_blocks=0)
    step = schedule(queue, Settings(family="sglang", block_size=1, async_scheduling=True))
    assert step.empty
    assert not step.preempted


def test_without_max_tokens_the_most_is_reserved() -> None:
    assert reserved_beside_prompt(PLAIN, None) == 4096 + 1
    assert reserved_beside_prompt(PLAIN, 30) == 30 + 1
    assert reserved_beside_prompt(PLAIN, 10**6) == 4096 + 1
    assert reserved_beside_prompt(Settings(), None) == 0


def test_less_is_reserved_the_longer_decoding_goes_on() -> None:
    queue = Queue([decoding("x", max_output=1000)])
    for _ in range(300):
        schedule(queue, PLAIN)
    assert queue.reserve_ratio == pytest.approx((FIRST_RATIO + LAST_RATIO) / 2)
    assert ratio_after(FIRST_RATIO, 10_000, PLAIN) == LAST_RATIO


def test_a_conservative_engine_reserves_more_and_never_more_than_all() -> None:
    lavish, careful = (Settings(family="sglang", schedule_conservativeness=factor) for factor in (0.3, 2.0))
    assert first_ratio(lavish) == pytest.approx(0.3 * FIRST_RATIO)
    assert first_ratio(careful) == 1.0
    assert ratio_after(1.0, 10_000, careful) == pytest.approx(0.14)


def test_where_no_page_is_left_who_has_generated_least_goes_back_with_nothing() -> None:
    old, young = decoding("old"), decoding("young")
    old.generated, old.blocks, young.blocks = 50, 60, 11
    old.computed = 59
    queue = Queue([old, young], free_blocks=1)
    step = schedule(queue, PLAIN)
    assert [seq.id for seq in step.decodes] == ["old"]
    assert [seq.id for seq in step.preempted] == ["young"]
    assert (young.computed, young.blocks, list(queue.waiting)) == (0, 0, [young])


def test_who_is_retracted_waits_behind_all_others_and_more_is_reserved() -> None:
    old, young = decoding("old"), decoding("young")
    old.generated, old.blocks, old.computed, young.blocks = 50, 60, 59, 11
    queue = Queue([old, young], deque([prompt("waiting", 500)]), free_blocks=1, reserve_ratio=LAST_RATIO, shut=True)
    schedule(queue, PLAIN)
    assert [seq.id for seq in queue.waiting] == ["waiting", "young"]
    assert queue.reserve_ratio == pytest.approx((50 + 20) / (100 + 1))
    assert not queue.shut


RULES: list[dict[str, Any]] = [
    {},
    {"enable_mixed_chunk": True},
    {"schedule_conservativeness": 0.3},
    {"schedule_conservativeness": 1.2, "enable_mixed_chunk": True},
    {"prefill_decode_interval": 1},
    {"prefill_decode_interval": 4, "prefill_decode_interval_min_bs": 3},
    {"enable_mixed_chunk": True, "prefill_decode_interval": 2},
]
# Five prompts of which the last find no room: they are not tried again before somebody has left.
CROWDED = [(0, 97, 2), (0, 161, 2), (0, 193, 11), (0, 145, 40), (0, 200, 40)]


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 200), st.integers(1, 40)), min_size=1, max_size=12),
    page=st.sampled_from([1, 4, 16]),
    chunk_pages=st.integers(1, 8),
    slots=st.integers(1, 6),
    total=st.integers(300, 3200),
    rules=st.sampled_from(RULES),
)
@example(arrivals=CROWDED, page=16, chunk_pages=1, slots=5, total=960, rules={})
@example(arrivals=CROWDED, page=16, chunk_pages=2, slots=5, total=960, rules={})
@example(arrivals=CROWDED, page=16, chunk_pages=3, slots=5, total=960, rules={})
@hypothesis_settings(max_examples=300, deadline=None)
def test_every_step_is_what_the_simulated_engine_composes(
    arrivals: list[tuple[int, int, int]], page: int, chunk_pages: int, slots: int, total: int, rules: dict[str, Any]
) -> None:
    chunk = chunk_pages * max(16, page)  # SGLang insists on whole pages
    if "prefill_decode_interval" in rules:
        total = max(total, 1600)  # where decode steps take the space for a prompt's next chunk, it ends with an error
    engine = SglangScheduler(
        SglangSettings(
            block_size=page,
            num_gpu_blocks=total // page + 1,
            max_num_batched_tokens=chunk,
            max_num_seqs=slots,
            **rules,
        ),
        lambda request: 7,
    )
    told = Settings(
        family="sglang",
        block_size=page,
        num_gpu_blocks=total // page,
        max_num_batched_tokens=chunk,
        max_num_seqs=slots,
        **rules,
    )
    queue = Queue(free_blocks=told.usable_blocks)
    coming = deque(sorted(enumerate(arrivals), key=lambda item: item[1][0]))
    known: dict[int, Sequence] = {}
    for at_step in range(3000):
        while coming and coming[0][1][0] <= at_step:
            number, (_, tokens, outputs) = coming.popleft()
            # Every prompt is of tokens of its own: nothing is shared.
            request = Request(number, [number * 1000 + place for place in range(tokens)], outputs, page)
            request.hash_more()
            engine.add(request)
            known[number] = Sequence(str(number), tokens, 0, outputs, max_output=outputs)
            if not len(queue):
                queue.reserve_ratio = first_ratio(told)
            queue.waiting.append(known[number])
        if not engine.has_work:
            if not coming:
                return
            continue
        batch = engine.schedule()
        step = schedule(queue, told)
        chunks = [(str(chunk.request.id), chunk.tokens) for chunk in batch.chunks if not chunk.is_decode]
        decodes = [str(chunk.request.id) for chunk in batch.chunks if chunk.is_decode]
        assert (shares(step), [seq.id for seq in step.decodes]) == (chunks, decodes)
        if batch.preempted:
            return  # what is cached of who was retracted is not the rule's to know
        outputs_of, _ = engine.complete(batch)
        for output in outputs_of:
            if output.finish_reason:
                seq = known[output.request.id]
                queue.running.remove(seq)
                assert queue.free_blocks is not None
                queue.free_blocks += seq.blocks
                queue.shut = False
    raise AssertionError("it never ends")
