"""A decision does a bounded amount of work whatever its fleet does, and is the naive replay's where that is enough.

Work is counted in spans listed and sequences copied, never in seconds.
"""

import random
import statistics
import sys
from collections import Counter, deque
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from predictor import shadow
from predictor.admission import AdmissionPolicy, Limits, Mode
from predictor.course import Course
from predictor.engines.vllm import Queue, Sequence, Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHasher, Prompt
from predictor.race import Race
from predictor.routing import Prefer
from predictor.run_forward import Budget, RunForward, whole_output
from predictor.shadow import Shadow
from predictor.timeline import Pace, Timeline
from tests.predictor.test_timeline import MEASURED, Shape, replayed, shapes

# What one decision may do; some spans look at several sequences.
MOST_SPANS, MOST_COPIED = 1050, 16_000


class Work:
    """Counts what decisions do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans = self.copied = 0
        extend, begin = RunForward.extend, RunForward.__init__

        def counted_extend(run: RunForward) -> None:
            self.spans += 1
            extend(run)

        def counted_begin(
            run: RunForward, queue: Queue, settings: Settings, cost: StepCost, ends_at: dict[str, int]
        ) -> None:
            self.copied += len(queue)
            begin(run, queue, settings, cost, ends_at)

        monkeypatch.setattr(RunForward, "extend", counted_extend)
        monkeypatch.setattr(RunForward, "__init__", counted_begin)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


# Equal to the naive replay


@given(shape=shapes(), uncached=st.integers(1, 300), spans=st.integers(1, 6))
@hypothesis_settings(max_examples=200)
def test_a_timeline_that_is_asked_again_with_little_budget_gets_to_what_the_replay_says(
    shape: Shape, uncached: int, spans: int
) -> None:
    expected_s, disturbed = replayed(shape, 0, uncached)
    assume(expected_s != float("inf") and not disturbed)
    timeline, blocks = shape.timeline(), -(-uncached // shape.settings.block_size)
    for _ in range(4000):
        budget = Budget(spans)
        priced_s = timeline.finish_s(uncached, blocks, budget)
        if not budget.cut:
            break
    assert budget.cut == 0
    assert priced_s + shape.cost.tokens_s(0, uncached) == pytest.approx(expected_s, abs=1e-6)


@given(
    shape=shapes(),
    later=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 60), st.booleans()), min_size=1, max_size=6),
    uncached=st.integers(1, 300),
)
@hypothesis_settings(max_examples=300)
def test_bookings_are_added_to_a_timeline_as_if_they_had_been_there_when_it_was_begun(
    shape: Shape, later: list[tuple[int, int, bool]], uncached: int
) -> None:
    # An adaptive threshold makes a new timeline necessary (test_shadow).
    shape = replace(shape, settings=replace(shape.settings, long_prefill_token_threshold_adaptive=False))
    timeline = Timeline(0.0, run := RunForward(shape.queue, shape.settings, shape.cost, shape.ends_at))
    blocks = -(-uncached // shape.settings.block_size)
    for number, (tokens, output, asked_before) in enumerate(later):
        if asked_before:
            timeline.finish_s(uncached, blocks)
        seq = Sequence(f"later{number}", tokens, 0, 0)
        run.append(seq, output)
        shape.queue.waiting.append(seq)
        shape.ends_at[seq.id] = output
    expected_s, disturbed = replayed(shape, 0, uncached)
    assume(expected_s != float("inf") and not disturbed)
    priced_s = timeline.finish_s(uncached, blocks) + shape.cost.tokens_s(0, uncached)
    assert priced_s == pytest.approx(expected_s, abs=1e-6)


# Near it beyond the budget


def deep_queue(seed: int, blocks: int | None, slots: int, running: int, waiting: int) -> Shape:
    rng = np.random.default_rng(seed)
    settings = Settings(num_gpu_blocks=blocks, max_num_seqs=slots, max_num_batched_tokens=int(rng.choice([2048, 8192])))
    free = 10**9 if blocks is None else blocks - 1
    queue, ends_at = Queue(free_blocks=settings.usable_blocks), {}
    for number in range(running + waiting):
        tokens, generated = int(np.clip(rng.lognormal(7.2, 0.8), 50, 8000)), int(rng.integers(1, 300))
        computed = tokens + generated - 1
        held = -(-computed // 16)
        if number < running and held <= free:
            seq = Sequence(f"r{number}", tokens, computed, 0, generated=generated, blocks=held)
            queue.running.append(seq)
            free -= held
        else:
            generated = 0
            seq = Sequence(f"w{number}", tokens, 0, 0)
            queue.waiting.append(seq)
        ends_at[seq.id] = generated + 1 + int(rng.exponential(300))
    if blocks is not None:
        queue.free_blocks = free
    return Shape(queue, settings, MEASURED, ends_at)


@pytest.mark.parametrize(
    ("kind", "blocks", "slots", "running", "waiting"),
    [
        ("nothing is short", None, 1024, 200, 900),
        ("KV space is short", 25_000, 1024, 200, 475),
        ("slots are short", None, 220, 200, 475),
        ("outputs outgrow the cache", 6_000, 1024, 60, 250),
    ],
)
def test_beyond_its_budget_a_forecast_is_a_few_percent_off(
    kind: str, blocks: int | None, slots: int, running: int, waiting: int
) -> None:
    errors = []
    for seed in range(40):
        shape = deep_queue(seed, blocks, slots, running, waiting)
        exact_s = shape.timeline().finish_s(2000, 125)
        budget = Budget(100)
        errors.append(abs(shape.timeline().finish_s(2000, 125, budget) / exact_s - 1))
        assert budget.cut
    sys.stdout.write(
        f"\n{kind}: with 100 spans {statistics.median(errors):.1%} off in the median, {max(errors):.1%} at most"
    )
    assert statistics.median(errors) < 0.1
    assert max(errors) < 0.6


# Bounded


def small_fleet(chance: random.Random, workers: int) -> Fleet:
    rng = np.random.default_rng(chance.randrange(2**32))
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    for number in range(workers):
        settings = Settings(
            num_gpu_blocks=chance.choice([None, 300, 3000, 25_000]),
            max_num_batched_tokens=chance.choice([256, 2048, 8192]),
            max_num_seqs=chance.choice([8, 64, 256]),
            long_prefill_token_threshold=chance.choice([0, 0, 128]),
            async_scheduling=chance.random() < 0.3,
        )
        fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", settings))
        fleet.know_cost(f"w{number}", MEASURED)
    return fleet


@pytest.mark.parametrize("seed", range(6))
def test_no_decision_does_more_than_its_budget_allows(work: Work, seed: int) -> None:
    chance = random.Random(seed)
    workers = chance.choice([1, 3, 8, 40])
    fleet, flying = small_fleet(chance, workers), deque[str]()
    now_s, most_spans, most_copied = 0.0, 0, 0
    for number in range(1200):
        now_s += chance.choice([0.0, 0.001, 0.02, 0.5 if number > 900 else 0.01])
        for _ in range(chance.choice([0, 1, 8]) if len(flying) > 600 else 0):
            name = flying[chance.randrange(len(flying))]
            if chance.random() < 0.5:
                fleet.first_token(name, None, now_s)
            else:
                flying.remove(name)
                fleet.finish(name, Usage(output_tokens=chance.choice([None, 20])), now_s)
        work.spans = work.copied = 0
        tokens = min(8000, int(chance.lognormvariate(6.5, 1.2)) + 1)
        decision = fleet.place("m", Prompt(tokens, exact=True), Wish(f"t{number}", now_s), now_s)
        most_spans, most_copied = max(most_spans, work.spans), max(most_copied, work.copied)
        if isinstance(decision, Grant):
            flying.append(f"t{number}")
    sys.stdout.write(f"\nseed {seed}, {workers} workers: at most {most_spans} spans, {most_copied} sequences copied")
    assert most_spans <= MOST_SPANS
    assert most_copied <= MOST_COPIED


@pytest.mark.parametrize("family", ["vllm", "sglang", "tensorrt_llm"])
@pytest.mark.parametrize("workers", [1, 4, 40])
def test_after_a_minute_of_silence_no_decision_follows_all_of_it_and_none_refuses_for_what_was_not_followed(
    family: Literal["vllm", "sglang", "tensorrt_llm"], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0
    pass_oldest = Course.pass_oldest

    def counted(course: Course, now_s: float) -> None:
        nonlocal looked_at
        looked_at += course.looked_at_a_step
        pass_oldest(course, now_s)

    monkeypatch.setattr(Course, "pass_oldest", counted)
    chance, rng = random.Random(1), np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    for number in range(workers):
        settings = Settings(family=family, num_gpu_blocks=25_000, max_num_seqs=64, max_num_batched_tokens=2048)
        fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", settings))
        fleet.know_cost(f"w{number}", MEASURED)
        for place in range(100):
            prompt = Prompt(chance.randrange(500, 8000), exact=True)
            wish = Wish(f"w{number} {place}", 0.0, max_tokens=100, streaming=False)
            fleet.place_on(f"w{number}", prompt, wish, 0.0)
    shadows = [worker.shadow for worker in fleet._pools["m"].workers.values()]
    decided = stale = 0
    for number in range(1000):
        now_s = 60.0 + 0.001 * number
        looked_at, was_stale = 0, fleet.shortcuts("m").forecasts_stale
        wish = Wish(f"t{number}", now_s, max_tokens=100, streaming=False, max_queue_wait_s=5.0)
        decision = fleet.place("m", Prompt(1000, exact=True), wish, now_s)
        decided += 1
        assert looked_at <= 8000 + 300
        behind = {f"w{at}" for at, shadow in enumerate(shadows) if shadow.behind}
        if behind:
            assert isinstance(decision, Grant)
        if isinstance(decision, Grant):
            is_stale = fleet.shortcuts("m").forecasts_stale - was_stale
            assert is_stale or decision.ticket.worker not in behind
            stale += is_stale
            fleet.finish(wish.ticket_id, Usage(), now_s)
        if not behind:
            break
    cut = fleet.shortcuts("m").shadows_cut
    sys.stdout.write(f"\n{family}, {workers} workers: caught up after {decided} decisions, {sum(cut.values())} cut")
    assert 1 < decided < 1000
    assert sum(cut.values()) >= decided - 1


def test_a_view_of_the_whole_is_bounded_too(work: Work) -> None:
    fleet = small_fleet(random.Random(1), 40)
    for number in range(2000):
        fleet.place("m", Prompt(1500, exact=True), Wish(f"t{number}", 0.0), 0.0)
    for number in range(0, 2000, 7):
        fleet.finish(f"t{number}", Usage(), 0.01)
    work.spans = 0
    fleet.view(0.02)
    assert work.spans <= 310


def test_a_booking_costs_no_new_timeline(work: Work) -> None:
    shade = Shadow(Settings(max_num_batched_tokens=2048), MEASURED)
    for number in range(300):
        work.copied = work.spans = 0
        shade.timeline(0.0).finish_s(1000)
        assert work.copied <= 1
        assert work.spans <= 4
        shade.book(Sequence(f"s{number}", 1500, 0, 100), 0.0)


# What is told meanwhile


def test_while_a_new_timeline_is_being_listed_the_old_one_is_told_with_what_was_booked_since() -> None:
    shade = Shadow(Settings(max_num_batched_tokens=2048), MEASURED)
    for number in range(200):
        shade.book(Sequence(f"s{number}", 1500, 0, 100), 0.0)
    old_s = shade.timeline(0.0).admitted_s()
    shade.finish("s100", 0.01)
    assert not shade.timeline_is_fresh
    assert shade.timeline(0.01, Budget(30)).admitted_s(0, Budget(0)) == pytest.approx(old_s)
    shade.book(Sequence("later", 6000, 0, 100), 0.01)
    with_later_s = shade.timeline(0.01, Budget(30)).admitted_s(0, Budget(0))
    assert with_later_s > old_s + 0.1
    told_s = [shade.timeline(0.01, Budget(30)).admitted_s(0, Budget(0)) for _ in range(20)]
    anew = Shadow(Settings(max_num_batched_tokens=2048), MEASURED)
    for number in range(200):
        anew.book(Sequence(f"s{number}", 1500, 0, 100), 0.0)
    anew.finish("s100", 0.01)
    anew.book(Sequence("later", 6000, 0, 100), 0.01)
    assert told_s[0] == pytest.approx(with_later_s)
    assert told_s[-1] == pytest.approx(anew.timeline(0.01).admitted_s())
    assert told_s[-1] < with_later_s - 0.02


def test_a_timeline_that_would_let_somebody_in_before_now_is_told_no_more() -> None:
    shade = Shadow(Settings(max_num_batched_tokens=2048), MEASURED)
    for number in range(200):
        shade.book(Sequence(f"s{number}", 1500, 0, 100, watched=False), 0.0)
    shade.timeline(0.0).admitted_s()
    for now_s in np.arange(0.5, 40.0, 0.5):
        shade.advance(float(now_s))
        assert shade.timeline(float(now_s), Budget(5)).admitted_s() >= now_s


def test_what_decisions_leave_out_is_counted() -> None:
    chance = random.Random(4)
    fleet = small_fleet(chance, 8)
    for number in range(4000):
        fleet.place_on(f"w{number % 8}", Prompt(1500, exact=True), Wish(f"t{number}", 0.0), 0.0)
    assert fleet.shortcuts("m").forecasts_stale == 0
    for number in range(0, 4000, 9):
        fleet.finish(f"t{number}", Usage(), 0.01)
    fleet.place("m", Prompt(1500, exact=True), Wish("one more", 0.01), 0.01)
    known = fleet.shortcuts("m")
    assert known.forecasts_stale == 1
    assert known.spans > 100
    assert known.shadows_cut == {f"w{number}": 0 for number in range(8)}


# Large pools


def test_in_a_large_pool_nobody_who_was_not_priced_would_have_been_sooner() -> None:
    chance = random.Random(7)
    rng = np.random.default_rng(7)
    fleet, now_s, flying = Fleet([PoolPolicy("m")], BlockHasher(rng), rng), 0.0, deque[str]()
    for number in range(80):
        settings = Settings(num_gpu_blocks=25_000, max_num_batched_tokens=chance.choice([1024, 8192]))
        fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", settings))
        fleet.know_cost(f"w{number}", replace(MEASURED, per_token_s=chance.choice([20e-6, 30e-6, 60e-6])))
    home, worse_s = fleet._pools["m"], []
    for number in range(1500):
        now_s += chance.expovariate(200.0)
        tokens = min(30_000, int(chance.lognormvariate(8.0, 1.0)) + 1)
        prompt, wish = Prompt(tokens, exact=True), Wish(f"t{number}", now_s, prefer=Prefer.LATENCY)
        exact_s = {}
        if number % 50 == 49:
            race = Race(home, list(home.workers.values()), prompt, wish, Limits(), fleet._tickets, now_s)
            for name, worker in home.workers.items():
                found = race._prospect(worker, worker.shadow.timeline(now_s), Budget(10**9))
                exact_s[name] = found.forecast.ttft_s
        decision = fleet.place("m", prompt, wish, now_s)
        assert isinstance(decision, Grant)
        assert 16 <= len(decision.forecasts) <= 20
        if exact_s:
            worse_s.append(exact_s[decision.ticket.worker] / min(exact_s.values()) - 1)
        flying.append(f"t{number}")
        if len(flying) > 300:
            name = flying.popleft()
            fleet.first_token(name, None, now_s)
            fleet.finish(name, Usage(), now_s)
    assert max(worse_s) < 0.02


def test_large_pools_of_idle_workers_are_all_used() -> None:
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    for number in range(100):
        fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}"))
        fleet.know_cost(f"w{number}", MEASURED)
    used = Counter[str]()
    for number in range(1000):
        decision = fleet.place("m", Prompt(1000, exact=True), Wish(f"t{number}", float(number)), float(number))
        assert isinstance(decision, Grant)
        used[decision.ticket.worker] += 1
        fleet.finish(f"t{number}", Usage(), number + 0.5)
    assert len(used) == 100
    assert max(used.values()) < 40


def test_where_the_best_of_a_large_pool_are_shut_one_that_is_open_is_found() -> None:
    """What lies on the way to a short wait is not only the wait: these are shut by their demand for KV space."""
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    for number in range(60):
        blocks = 100_000 if number == 33 else 400
        fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", Settings(num_gpu_blocks=blocks)))
        fleet.know_cost(f"w{number}", MEASURED)
        for other in range(8):
            tokens = 60_000 if number == 33 else 5_000
            fleet.place_on(f"w{number}", Prompt(tokens, exact=True), Wish(f"t{number}-{other}", 0.0), 0.0)
    decision = fleet.place("m", Prompt(1000, exact=True), Wish("one more", 0.0), 0.0)
    assert isinstance(decision, Grant)
    assert decision.ticket.worker == "w33"


def test_a_request_that_is_placed_by_an_old_timeline_is_priced_as_by_a_new_one_but_for_a_few_percent() -> None:
    """Deep queues that wait for KV space, and in each of them one ends and one begins between any two decisions."""
    rng = np.random.default_rng(3)
    fleet = Fleet([PoolPolicy("m")], BlockHasher(rng), rng)
    decoding, waiting = dict[str, deque[str]](), dict[str, deque[str]]()
    for number in range(6):
        name = f"w{number}"
        fleet.join("m", WorkerSpec(name, f"10.0.0.1:{number + 1}", Settings(num_gpu_blocks=12_000)))
        fleet.know_cost(name, MEASURED)
        ids = [f"{name}-{at}" for at in range(350)]
        for at, ticket_id in enumerate(ids):
            tokens = int(np.clip(rng.lognormal(7.2, 0.8), 50, 8000))
            fleet.place_on(name, Prompt(tokens, exact=True), Wish(ticket_id, 0.0), 0.0)
            if at >= 250:
                fleet.first_token(ids[at - 250], None, 0.05 * (at - 249))
        decoding[name], waiting[name] = deque(ids[:100]), deque(ids[100:])
    home, now_s, errors = fleet._pools["m"], 5.0, []
    for number in range(60):
        now_s += 0.03
        for name in decoding:
            decoding[name].rotate(-int(rng.integers(len(decoding[name]))))
            fleet.finish(decoding[name].popleft(), Usage(), now_s)
            decoding[name].append(waiting[name].popleft())
            fleet.first_token(decoding[name][-1], None, now_s)
        prompt, wish = Prompt(2000, exact=True), Wish(f"t{number}", now_s)
        race = Race(home, list(home.workers.values()), prompt, wish, Limits(), fleet._tickets, now_s)
        exact_s = {}
        for name, worker in home.workers.items():
            sight = worker.shadow._look(worker.shadow.begins_s(now_s))
            assert sight.others is not None
            # As much is known of other futures as the decision knows, and what is asked here must not help it.
            sight.others.pace = Pace(dict(sight.others.pace.ratios))
            sight.others.close()
            sight.run.opens(None)
            timeline = Timeline(sight.begins_s, sight.run, sight.others)
            exact_s[name] = race._prospect(worker, timeline, Budget(10**9)).forecast.ttft_s
        decision = fleet.place("m", prompt, wish, now_s)
        assert isinstance(decision, Grant)
        errors.append(abs(decision.ticket.forecast.ttft_s / exact_s[decision.ticket.worker] - 1))
        waiting[decision.ticket.worker].append(wish.ticket_id)
    stale = fleet.shortcuts("m").forecasts_stale
    sys.stdout.write(
        f"\n{stale} of 60 by old timelines: {statistics.median(errors):.2%} off, {max(errors):.1%} at most"
    )
    assert stale > 30
    assert statistics.median(errors) < 0.02
    assert max(errors) < 0.25


@pytest.mark.parametrize("ahead", [50, 1900])
def test_who_overtakes_has_only_those_before_him_looked_at_and_a_long_queue_of_them_once(
    ahead: int, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = 0

    def counted(seq: Sequence, output: int) -> int:
        nonlocal looked_at
        looked_at += 1
        return whole_output(seq, output)

    monkeypatch.setattr(shadow, "whole_output", counted)
    rng = np.random.default_rng(1)
    fleet = Fleet([PoolPolicy("m", admission=AdmissionPolicy(Mode.SHADOW))], BlockHasher(rng), rng)
    settings = Settings(num_gpu_blocks=25_000, scheduling_policy="priority")
    for number in range(4):
        fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", settings))
        fleet.know_cost(f"w{number}", MEASURED)
        for place in range(2000):
            wish = Wish(f"w{number} {place}", 0.0, priority=-1 if place < ahead else 1)
            fleet.place_on(f"w{number}", Prompt(1500, exact=True), wish, 0.0)
    most_spans = most_copied = most_looked_at = 0
    for number in range(20):
        work.spans = work.copied = looked_at = 0
        decision = fleet.place("m", Prompt(1500, exact=True), Wish(f"t{number}", 0.0), 0.001 * number)
        assert isinstance(decision, Grant)
        fleet.finish(f"t{number}", Usage(), 0.001 * number)
        most_spans, most_copied = max(most_spans, work.spans), max(most_copied, work.copied)
        most_looked_at = max(most_looked_at, looked_at)
    assert most_spans <= MOST_SPANS
    assert max(most_copied, most_looked_at) <= 4 * (ahead + 1) * (2 if ahead <= 100 else 1)
