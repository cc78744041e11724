"""One call to a shadow does a bounded amount of work, however long nobody asked and whatever an engine claims."""

import random

import pytest

from predictor.engines.vllm import Lookup, Queue, Sequence, Settings, Step, schedule
from predictor.prefill_cost import StepCost
from predictor.shadow import Shadow

PLAIN = StepCost(0.0, 0.0, 0.010, 0.001, 0.0, 0.0)
A_DAY_S = 86_400.0


class Composed:
    """Counts the steps that shadows compose."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = 0

        def counted(queue: Queue, settings: Settings, newcomers: int = 0, lookup: Lookup | None = None) -> Step:
            self.steps += 1
            return schedule(queue, settings, newcomers, lookup)

        monkeypatch.setattr("predictor.course.rule_of", lambda settings: counted)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Composed:
    return Composed(monkeypatch)


def unwatched(name: str, tokens: int) -> Sequence:
    return Sequence(name, tokens, 0, 1000, watched=False)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_decodes_beside_a_prompt_that_finds_no_space_pass_at_once(composed: Composed, async_scheduling: bool) -> None:
    settings = Settings(num_gpu_blocks=1001, max_num_batched_tokens=2000, async_scheduling=async_scheduling)
    shade = Shadow(settings, PLAIN)
    shade.book(unwatched("served", 1600), 0.0)
    shade.book(unwatched("too large beside it", 15_000), 0.0)
    shade.advance(100.0)
    assert (shade.decoding, shade.prefilling) == (1, 1)
    assert composed.steps < 20
    # It is let in as soon as there is space.
    shade.finish("served", 100.0)
    shade.advance(105.0)
    assert shade.prefill_tokens_ahead() < 15_000


def test_decodes_that_would_outgrow_the_cache_pass_at_once_as_far_as_it_goes(composed: Composed) -> None:
    shade = Shadow(Settings(num_gpu_blocks=1001, max_num_batched_tokens=2000), PLAIN)
    for number in range(4):
        shade.book(unwatched(f"s{number}", 1600), 0.0)
    shade.advance(A_DAY_S)
    assert composed.steps < 100


def test_who_has_left_takes_no_space_any_more() -> None:
    settings = Settings(num_gpu_blocks=1001, max_num_batched_tokens=2000)
    shade = Shadow(settings, PLAIN)
    shade.book(unwatched("stays", 160), 0.0)
    shade.book(unwatched("leaves", 160), 0.0)
    shade.advance(1.0)
    shade.finish("leaves", 1.005)  # in the middle of a step
    shade.advance(30.0)
    shade.finish("stays", 30.0)
    assert shade.state(30.0).queue.free_blocks == settings.usable_blocks


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_block_is_free_or_some_running_requests(seed: int, async_scheduling: bool) -> None:
    chance = random.Random(seed)
    settings = Settings(
        num_gpu_blocks=chance.choice([12, 60]), max_num_batched_tokens=64, max_num_seqs=3,
        async_scheduling=async_scheduling,
    )  # fmt: skip
    shade, names, now_s = Shadow(settings, PLAIN), list[str](), 0.0
    for number in range(400):
        now_s += chance.choice([0.0, 0.005, 0.3, 20.0])
        match chance.randrange(3):
            case 0:
                names.append(f"s{number}")
                shade.book(unwatched(names[-1], chance.choice([1, 40, 150])), now_s)
            case 1 if names:
                shade.first_token(chance.choice(names), now_s)
            case 2 if names:
                output = chance.choice([None, 1, 30])
                shade.finish(names.pop(chance.randrange(len(names))), now_s, output)
        queue = shade.state(now_s).queue
        assert queue.free_blocks is not None
        assert queue.free_blocks + sum(seq.blocks for seq in queue.running) == settings.usable_blocks


def test_a_shadow_that_is_far_behind_goes_on_from_call_to_call(composed: Composed) -> None:
    shade = Shadow(Settings(max_num_batched_tokens=1), PLAIN)
    shade.book(unwatched("giant", 3000), 0.0)
    left = []
    for number in range(50):
        before = composed.steps
        for _ in range(3):
            shade.advance(A_DAY_S + 0.001 * number)
        assert composed.steps - before <= 90
        left.append(shade.prefill_tokens_ahead())
        assert shade.behind == (left[-1] > 0)
    assert shade.cut == 37
    assert left[0] > left[1] > left[-1] == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_output_length_that_cannot_be_is_not_waited_for(composed: Composed, async_scheduling: bool) -> None:
    shade = Shadow(Settings(async_scheduling=async_scheduling), PLAIN)
    for number in range(200):
        shade.book(Sequence(f"s{number}", 20, 0, 1000), 0.0)
        shade.first_token(f"s{number}", 1.0)
    before = composed.steps
    shade.finish("s0", 2.0, output_tokens=10**9)
    assert composed.steps - before <= 200
    assert len(shade) == 199


def test_who_was_preempted_by_a_step_that_holds_nothing_else_takes_no_space() -> None:
    """Asynchronous: the step before it, which it was a part of, is still under way."""
    settings = Settings(num_gpu_blocks=60, max_num_batched_tokens=64, max_num_seqs=1, async_scheduling=True)
    shade = Shadow(settings, PLAIN)
    shade.book(unwatched("outgrows the cache", 40), 0.0)
    for now_s in range(1, 200):
        shade.advance(now_s)
    queue = shade.state(200.0).queue
    assert queue.free_blocks is not None
    assert queue.free_blocks + sum(seq.blocks for seq in queue.running) == settings.usable_blocks
