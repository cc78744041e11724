"""One step of vLLM as the replay composes it, and the same step as the simulated engine's own scheduler composes it."""

from collections import deque

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from enginesim.request import Request
from enginesim.scheduler import Scheduler
from enginesim.settings import SchedulerSettings
from predictor.engines.vllm import Queue, Sequence, Settings, Step, enqueue, schedule


def prompt(name: str, tokens: int, computed: int = 0) -> Sequence:
    return Sequence(name, tokens, computed, expected_output=100)


def decoding(name: str) -> Sequence:
    return Sequence(name, 10, 10, expected_output=100, generated=1)


def shares(step: Step) -> list[tuple[str, int]]:
    return [(seq.id, end - start) for seq, start, end in step.chunks]


def test_the_budget_goes_to_prompts_in_order_of_arrival_and_the_last_gets_what_is_left() -> None:
    queue = Queue([], deque([prompt("a", 300), prompt("b", 500), prompt("c", 900), prompt("d", 5)]))
    step = schedule(queue, Settings(max_num_batched_tokens=1000))
    assert shares(step) == [("a", 300), ("b", 500), ("c", 200)]
    assert [seq.id for seq in queue.running] == ["a", "b", "c"]
    assert [seq.id for seq in queue.waiting] == ["d"]
    assert step.room == 0


def test_composing_a_step_moves_what_is_scheduled_and_the_last_chunk_yields_a_token() -> None:
    queue = Queue([], deque([prompt("a", 150)]))
    schedule(queue, Settings(max_num_batched_tokens=100))
    assert (queue.running[0].computed, queue.running[0].generated) == (100, 0)
    schedule(queue, Settings(max_num_batched_tokens=100))
    assert (queue.running[0].computed, queue.running[0].generated) == (150, 1)


def test_running_requests_come_first_and_a_decode_takes_one_token_of_the_budget() -> None:
    queue = Queue([decoding("x"), prompt("a", 400, computed=250), decoding("y")], deque([prompt("b", 9000)]))
    step = schedule(queue, Settings(max_num_batched_tokens=1000))
    assert [seq.id for seq in step.decodes] == ["x", "y"]
    assert shares(step) == [("a", 150), ("b", 1000 - 150 - 2)]


def test_a_decode_behind_a_giant_starves_while_the_giant_takes_the_budget() -> None:
    step = schedule(Queue([prompt("giant", 5000), decoding("x")]), Settings(max_num_batched_tokens=1000))
    assert (shares(step), step.decodes) == ([("giant", 1000)], ())


def test_the_threshold_caps_every_chunk_unless_the_request_is_alone() -> None:
    settings = Settings(max_num_batched_tokens=4096, long_prefill_token_threshold=1024)
    assert shares(schedule(Queue([], deque([prompt("a", 9000)])), settings)) == [("a", 4096)]
    both = schedule(Queue([], deque([prompt("a", 9000), prompt("b", 9000)])), settings)
    assert shares(both) == [("a", 1024), ("b", 1024)]
    assert shares(schedule(Queue([decoding("x"), prompt("a", 9000)]), settings)) == [("a", 1024)]


def test_an_adaptive_threshold_gives_way_to_a_fair_share_of_the_step() -> None:
    settings = Settings(
        max_num_batched_tokens=4000, long_prefill_token_threshold=1024, long_prefill_token_threshold_adaptive=True
    )
    two = schedule(Queue([], deque([prompt("a", 9000), prompt("b", 9000)])), settings)
    assert shares(two) == [("a", 2000), ("b", 2000)]
    five = schedule(Queue([decoding("x")], deque(prompt(name, 9000) for name in "abcd")), settings)
    assert shares(five) == [("a", 1024), ("b", 1024), ("c", 1024), ("d", 4000 - 1 - 3 * 1024)]


def ranked(name: str, priority: int, arrived: int, tokens: int = 100) -> Sequence:
    return Sequence(name, tokens, 0, 100, priority=priority, arrived=arrived)


def test_by_priority_the_least_comes_first_and_of_equals_the_first() -> None:
    settings = Settings(max_num_batched_tokens=100, scheduling_policy="priority")
    queue = Queue()
    came = [ranked("a", 1, 1), ranked("b", 0, 2), ranked("c", 1, 3), ranked("d", -1, 4), ranked("e", 0, 5)]
    assert [enqueue(queue, settings, seq) for seq in came] == [True, False, True, False, False]
    assert [schedule(queue, settings).chunks[-1][0].id for _ in range(2)] == ["d", "b"]
    assert [seq.id for seq in queue.waiting] == ["e", "a", "c"]
    fcfs = Queue()
    assert all(enqueue(fcfs, Settings(), seq) for seq in came)
    assert [seq.id for seq in fcfs.waiting] == ["a", "b", "c", "d", "e"]


def test_by_priority_the_last_in_rank_gives_way_even_if_it_is_in_the_step_already() -> None:
    settings = Settings(block_size=16, num_gpu_blocks=9, scheduling_policy="priority")

    def full(name: str, priority: int, arrived: int) -> Sequence:
        return Sequence(name, 60, 64, 100, generated=5, blocks=4, priority=priority, arrived=arrived)

    low, high = full("low", 1, 1), full("high", 0, 2)
    queue = Queue([low, high], deque([ranked("waits", 0, 3)]), free_blocks=1)
    step = schedule(queue, settings)
    # "low" was first in the list and had the last block; "high" could have none, so "low" gave back all five.
    assert ([seq.id for seq in step.decodes], [seq.id for seq in step.preempted]) == (["high"], ["low"])
    assert (low.generated, low.blocks, high.generated, high.blocks, queue.free_blocks) == (5, 0, 6, 5, 4)
    assert [seq.id for seq in queue.waiting] == ["waits", "low"]
    assert queue.running == [high]


def test_a_newcomer_that_is_only_imagined_ends_the_exemption_and_finds_room_up_to_the_threshold() -> None:
    settings = Settings(max_num_batched_tokens=4096, long_prefill_token_threshold=1024)
    step = schedule(Queue([], deque([prompt("a", 9000)])), settings, newcomers=1)
    assert (shares(step), step.room) == ([("a", 1024)], 1024)
    alone = schedule(Queue(), settings, newcomers=1)
    assert (alone.room, alone.empty) == (4096, True)


def test_room_is_what_the_step_leaves() -> None:
    queue = Queue([decoding("x")], deque([prompt("a", 300)]))
    assert schedule(queue, Settings(max_num_batched_tokens=1000), newcomers=1).room == 699


def test_no_more_requests_run_than_the_engine_has_slots_and_then_there_is_no_room() -> None:
    queue = Queue([decoding("x")], deque([prompt("a", 10), prompt("b", 10)]))
    step = schedule(queue, Settings(max_num_batched_tokens=1000, max_num_seqs=2), newcomers=1)
    assert (shares(step), step.room) == ([("a", 10)], 0)
    assert [seq.id for seq in queue.waiting] == ["b"]


def test_the_last_slot_may_go_to_the_newcomer() -> None:
    step = schedule(Queue([decoding("x")]), Settings(max_num_batched_tokens=1000, max_num_seqs=2), newcomers=1)
    assert step.room == 999


@given(
    budget=st.integers(1, 60),
    threshold=st.sampled_from([0, 0, 1, 7, 20, 100]),
    slots=st.integers(1, 6),
    # When it arrives (in steps), its prompt, and how many tokens it generates.
    requests=st.lists(st.tuples(st.integers(0, 25), st.integers(1, 120), st.integers(1, 9)), min_size=1, max_size=12),
)
@hypothesis_settings(max_examples=150, deadline=None)
def test_step_by_step_the_same_requests_get_the_same_tokens_as_in_the_simulated_engine(
    budget: int, threshold: int, slots: int, requests: list[tuple[int, int, int]]
) -> None:
    limits = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": slots,
        "long_prefill_token_threshold": threshold,
        "max_model_len": 4096,
    }
    engine = Scheduler(SchedulerSettings(block_size=16, num_gpu_blocks=5000, **limits), sample=lambda request: 7)
    ours = Settings(
        num_gpu_blocks=5000,
        max_num_batched_tokens=budget,
        max_num_seqs=slots,
        long_prefill_token_threshold=threshold,
        max_model_len=4096,
    )
    queue = Queue()
    arrivals = deque(sorted(enumerate(requests), key=lambda item: item[1][0]))
    at_step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][1][0] <= at_step:
            number, (_, tokens, outputs) = arrivals.popleft()
            # No two prompts share a block, so that only the step rule decides.
            theirs = Request(number, [number * 1000 + i for i in range(tokens)], outputs, 16)
            theirs.hash_more()
            engine.add(theirs)
            queue.waiting.append(Sequence(str(number), tokens, 0, outputs))
        batch, step = engine.schedule(), schedule(queue, ours)
        expected = [(str(c.request.id), c.tokens) for c in batch.chunks if not c.is_decode]
        assert shares(step) == expected
        assert [seq.id for seq in step.decodes] == [str(c.request.id) for c in batch.chunks if c.is_decode]
        engine.complete(batch)
        queue.running = [seq for seq in queue.running if seq.generated < seq.expected_output]
        at_step += 1
    assert not len(queue)
