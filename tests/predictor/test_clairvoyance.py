"""A shadow that is told the future: what is left of its errors is its own."""

import json
from collections import deque

import numpy as np
import pytest

from predictor.clairvoyance import BadCosts, Coming, Seer, read_costs
from predictor.course import State
from predictor.engines.vllm import Queue, Sequence, Settings
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHashes

# 1 ms a token, 10 ms a step.
COST = StepCost(0.0, 0.0, 0.010, 0.001, 0.0, 0.0)
SETTINGS = Settings(max_num_batched_tokens=100)


def idle(now_s: float, *waiting: Sequence) -> State:
    return State(SETTINGS, Queue([], deque(waiting)), (), now_s, {seq.id: 0 for seq in waiting})


def newcomer(request_id: str, tokens: int) -> Sequence:
    return Sequence(request_id, tokens, 0, 1)


def test_alone_a_request_takes_its_steps() -> None:
    seer = Seer([Coming("a", 5.0, 250, 0, 10)], COST)
    # Three steps of 100, 100 and 50 tokens.
    assert seer.first_token_s("a", idle(5.0, newcomer("a", 250))) == pytest.approx(5.0 + 0.250 + 3 * 0.010)


def test_what_will_have_been_cached_is_known() -> None:
    seer = Seer([Coming("a", 5.0, 250, 200, 10)], COST)
    assert seer.first_token_s("a", idle(5.0, newcomer("a", 250))) == pytest.approx(5.0 + 0.050 + 0.010)


def test_one_who_comes_later_fills_up_the_last_step() -> None:
    # The step that begins at 5.11 has room for 50 tokens of the one who came at 5.05.
    seer = Seer([Coming("a", 5.0, 150, 0, 10), Coming("b", 5.05, 80, 0, 10)], COST)
    state = idle(5.0, newcomer("a", 150))
    assert seer.first_token_s("a", state) == pytest.approx(5.0 + 0.110 + 0.110)
    # Asked in its turn, the later one is already known: its last 30 tokens share a step with a decode.
    assert seer.first_token_s("b", idle(9.9)) == pytest.approx(5.22 + 0.030 + 0.010)


def test_who_decodes_leaves_when_its_answer_is_complete() -> None:
    settings = Settings(max_num_batched_tokens=100, max_num_seqs=1)
    decoding = Sequence("d", 10, 12, 99, generated=3)
    state = State(settings, Queue([decoding], deque([newcomer("a", 50)])), (), 5.0, {"d": 3, "a": 0})
    seer = Seer([Coming("d", 1.0, 10, 0, 7), Coming("a", 5.0, 50, 0, 5)], COST)
    # Four more tokens of the one that holds the only slot.
    assert seer.first_token_s("a", state) == pytest.approx(5.0 + 4 * 0.010 + 0.060)


def test_a_fork_is_gone_on_with_until_something_else_happens() -> None:
    coming = [Coming(str(number), 5.0 + number, 50, 0, 3) for number in range(4)]
    seer = Seer(coming, COST)
    assert seer.first_token_s("0", idle(5.0, newcomer("0", 50))) == pytest.approx(5.06)
    seer.came("0", 5.06)
    # The state that is handed in is not looked at: the fork knows.
    assert seer.first_token_s("1", idle(6.0)) == pytest.approx(6.06)
    seer.came("1", 6.2)  # it was otherwise
    late = idle(7.5, newcomer("2", 50))
    assert seer.first_token_s("2", late) == pytest.approx(7.56)
    seer.ended_early("2")
    assert seer.first_token_s("3", idle(8.0, newcomer("3", 50))) == pytest.approx(8.06)


def blocks(*ids: int) -> BlockHashes:
    return np.array(ids, np.uint64)


def test_blocks_in_common_are_free_only_when_the_last_who_holds_them_has_ended() -> None:
    # Ten blocks of 16 tokens, of which "a" holds five and "b" one besides two of those five; four are free.
    settings = Settings(num_gpu_blocks=11, max_num_batched_tokens=100)
    a = Sequence("a", 79, 79, 99, generated=1, blocks=5)
    b = Sequence("b", 40, 40, 99, generated=1, blocks=1, shared_blocks=2)
    coming = [
        Coming("a", 1.0, 79, 0, 2, 0, blocks(1, 2, 3, 4)),
        Coming("b", 2.0, 40, 32, 9, 0, blocks(1, 2)),
        Coming("c", 5.0, 7 * 16, 0, 5),
        Coming("d", 5.0, 8 * 16 - 1, 0, 5),
    ]

    def first_token_s(newcomer: Sequence) -> float | None:
        queue = Queue([a.copy(), b.copy()], deque([newcomer]), free_blocks=4)
        return Seer(coming, COST).first_token_s(newcomer.id, State(settings, queue, (), 5.0, {"a": 1, "b": 1}))

    # "a" ends after the first step and frees three blocks, not five: enough for seven, not for eight.
    seven, eight = Sequence("c", 7 * 16, 0, 5), Sequence("d", 8 * 16 - 1, 0, 5)
    assert first_token_s(seven) == pytest.approx(5.0 + 0.010 + (0.010 + 0.099) + (0.010 + 0.013))
    # The last token of "b" comes with the eighth step.
    assert first_token_s(eight) == pytest.approx(5.0 + 8 * 0.010 + (0.010 + 0.100) + (0.010 + 0.027))


def test_what_a_preempted_one_finds_again_is_what_was_not_taken_since() -> None:
    # Both are about to need a block, and only one is free: "b" gives back its four, of which "a" takes one in 16 steps.
    settings = Settings(num_gpu_blocks=9, max_num_batched_tokens=100)
    a = Sequence("a", 30, 48, 99, generated=19, blocks=3)
    b = Sequence("b", 64, 64, 99, generated=1, blocks=4)
    coming = [
        Coming("a", 1.0, 30, 0, 21),
        Coming("b", 2.0, 64, 0, 3, 0, blocks(1, 2, 3, 4)),
        Coming("c", 5.0, 10, 0, 2),
    ]
    queue = Queue([a, b], deque([Sequence("c", 10, 0, 2)]), free_blocks=1)
    seer = Seer(coming, COST)
    # "a" ends with its second step; "b" comes back before "c", and all of its four blocks are still there.
    state = State(settings, queue, (), 5.0, {"a": 19, "b": 1})
    assert seer.first_token_s("c", state) == pytest.approx(5.0 + 2 * 0.010 + 0.010 + 0.010 + 0.001)


def test_who_never_gets_a_token_is_not_waited_for() -> None:
    seer = Seer([Coming("a", 5.0, 250, 0, 10)], COST)
    assert seer.first_token_s("a", idle(5.0)) is None  # the shadow has lost it


# Costs


def test_costs_are_read_by_their_names_and_by_short_ones() -> None:
    short = read_costs(b'{"a": 30e-6, "b": 37e-12, "c": 0.005, "d": 50e-6}')
    long = read_costs(
        b'{"per_token_s": 30e-6, "per_token_squared_s": 37e-12, "fixed_s": 0.005, "per_decode_s": 50e-6,'
        b' "per_request_s": 0, "per_request_token_s": 0}'
    )
    assert short.of("w0") == long.of("w0") == StepCost(0.0, 0.0, 0.005, 30e-6, 37e-12, 50e-6)


def test_workers_may_have_costs_of_their_own() -> None:
    costs = read_costs(json.dumps({"a": 1.0, "workers": {"w1": {"a": 2.0, "c": 3.0}}}).encode())
    assert costs.of("w0").per_token_s == 1.0
    assert (costs.of("w1").per_token_s, costs.of("w1").fixed_s) == (2.0, 3.0)
    with pytest.raises(BadCosts, match="no costs for worker 'w0'; known are w1"):
        read_costs(b'{"workers": {"w1": {"a": 1}}}').of("w0")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"a": "fast"}', r"\$"),
        (b'{"e": 1}', "unknown cost 'e'; known are a, b, c, d, per_request_s"),
        (b'{"a": -1}', "`per_token_s` is -1.0: expected seconds, 0 or more"),
        (b'{"x": {"w": {"a": 1}}}', "unknown key 'x'"),
        (b'{"workers": 3}', "`workers` is no object"),
    ],
)
def test_what_are_no_costs_is_said(raw: bytes, says: str) -> None:
    with pytest.raises(BadCosts, match=says):
        read_costs(raw)
