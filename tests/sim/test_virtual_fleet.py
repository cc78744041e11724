"""The whole predictor against simulated engines in virtual time, with decisions and evidence as the edge has them.

Engines run their own scheduler and block pool; the fleet sees what the edge would tell it: first tokens, ends with
usage, and KV batches in the form in which they are published. One seed decides everything.
"""

import heapq
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from enginesim.kv_events import BlockStored, encode_batch
from enginesim.request import Phase, Request
from enginesim.scheduler import Batch as EngineBatch
from enginesim.scheduler import Scheduler
from enginesim.settings import CostSettings, SchedulerSettings, SglangSettings
from enginesim.sglang_scheduler import SglangScheduler
from enginesim.step_time import StepTime
from predictor.admission import AdmissionPolicy, Refusal
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.kv_events import decode_batch
from predictor.prefill_cost import Basis
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens

SEED = 20261129
BLOCK = 16


@dataclass(frozen=True)
class Arrival:
    """A request as a client sends it."""

    at_s: float
    tokens: tuple[int, ...]
    max_tokens: int
    bound_s: float | None = None
    abort_after_s: float | None = None


@dataclass
class Outcome:
    """What was promised and what came."""

    worker: str
    at_s: float
    prompt_tokens: int
    predicted_s: float
    predicted_wait_s: float
    credited: int
    learned: bool
    why: str
    actual_s: float | None = None
    cached: int | None = None

    @property
    def error_s(self) -> float:
        assert self.actual_s is not None
        return abs(self.actual_s - self.predicted_s)


@dataclass
class Engine:
    """One engine, stepped from outside so that several share a clock."""

    name: str
    scheduler: Scheduler
    step_time: StepTime
    under_way: EngineBatch | None = None


@dataclass
class World:
    """Engines, the fleet, and one clock. Events at the same instant: ends of steps first, then what clients do."""

    rng: np.random.Generator
    costs: list[CostSettings]
    limits: SchedulerSettings
    ends_late_s: float = 0.0  # the access log is flushed now and then, and an end is heard of up to so much later
    tokens_late_s: float = 0.0  # on their way back
    now_s: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    changes: dict[str, list[float]] = field(default_factory=dict)  # when requests came to or were taken off a worker

    def __post_init__(self) -> None:
        self.hasher = BlockHasher(self.rng)
        self.fleet = Fleet([PoolPolicy("m")], self.hasher, self.rng)
        self.engines: dict[str, Engine] = {}
        self.requests: dict[int, tuple[str, Request]] = {}
        self.ids = itertools.count(1)
        self.order = itertools.count()
        self.agenda: list[tuple[float, int, int, Engine | Arrival | Callable[[], None]]] = []
        settings = Settings(
            block_size=self.limits.block_size,
            num_gpu_blocks=self.limits.num_gpu_blocks,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_num_seqs=self.limits.max_num_seqs,
            long_prefill_token_threshold=self.limits.long_prefill_token_threshold,
            max_model_len=self.limits.max_model_len,
        )
        scheduler: type[Scheduler] = Scheduler
        if isinstance(self.limits, SglangSettings):
            scheduler = SglangScheduler
            settings = replace(settings, family="sglang", num_gpu_blocks=self.limits.usable_blocks)
        for number, costs in enumerate(self.costs):
            name = f"w{number}"
            self.engines[name] = Engine(name, scheduler(self.limits, lambda request: 7), StepTime(costs))
            self.fleet.join("m", WorkerSpec(name, f"10.0.0.{number}:8000", settings))

    def run(self, arrivals: list[Arrival]) -> None:
        """Until everything is answered."""
        for arrival in arrivals:
            self._later(arrival.at_s, arrival)
        while self.agenda:
            self.now_s, _, _, what = heapq.heappop(self.agenda)
            if isinstance(what, Engine):
                self._step_ended(what)
            elif isinstance(what, Arrival):
                self._arrive(what)
            else:
                what()
            # A step begins only when all that happens at this instant has happened.
            if not self.agenda or self.agenda[0][0] > self.now_s:
                for engine in self.engines.values():
                    if engine.under_way is None and engine.scheduler.has_work:
                        engine.under_way = engine.scheduler.schedule()
                        self._later(self.now_s + engine.step_time.duration_s(engine.under_way), engine)

    def _later(self, at_s: float, what: Engine | Arrival | Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (at_s, 0 if isinstance(what, Engine) else 1, next(self.order), what))

    def _arrive(self, arrival: Arrival) -> None:
        number = next(self.ids)
        hashes = self.hasher.prompt_hashes(as_tokens(arrival.tokens), HashFamily(BLOCK), Namespace())
        prompt = Prompt(len(arrival.tokens), True, {HashFamily(BLOCK): hashes})
        wish = Wish(str(number), self.now_s, max_queue_wait_s=arrival.bound_s, max_tokens=arrival.max_tokens)
        decision = self.fleet.place("m", prompt, wish, self.now_s)
        if isinstance(decision, Refusal):
            self.refused.append(decision)
            return
        assert isinstance(decision, Grant)
        priced = decision.ticket.forecast
        self.outcomes[str(number)] = Outcome(
            priced.worker,
            self.now_s,
            priced.prompt_tokens,
            priced.ttft_s,
            priced.wait_s,
            priced.cached_tokens,
            priced.basis.value == "curve",
            decision.why.value,
        )
        request = Request(number, list(arrival.tokens), arrival.max_tokens, BLOCK)
        request.hash_more()
        self.engines[priced.worker].scheduler.add(request)
        self.requests[number] = priced.worker, request
        self.changes.setdefault(priced.worker, []).append(self.now_s)
        if arrival.abort_after_s is not None:
            self._later(self.now_s + arrival.abort_after_s, partial(self._abort, number))

    def _abort(self, number: int) -> None:
        worker, request = self.requests[number]
        if request.phase is not Phase.FINISHED:
            self.engines[worker].scheduler.abort(request)
            self.fleet.finish(str(number), Usage(), self.now_s)
            self.changes[worker].append(self.now_s)

    def _step_ended(self, engine: Engine) -> None:
        batch, engine.under_way = engine.under_way, None
        assert batch is not None
        outputs, events = engine.scheduler.complete(batch)
        if events:  # published before the outputs leave
            stored = [len(event.block_hashes) for event in events if isinstance(event, BlockStored)]
            self.fleet.stored_at_once(engine.name, max(stored, default=0))
            self.fleet.apply(engine.name, decode_batch(encode_batch(events, self.now_s, "map")), self.now_s)
        for output in outputs:
            if output.position == 0:
                self._later(self.now_s + self.tokens_late_s, partial(self._first_token, output.request))
            if output.finish_reason:
                late_s = self.tokens_late_s + self.ends_late_s * float(self.rng.random())
                self._later(self.now_s + late_s, partial(self._end, output.request))

    def _first_token(self, request: Request) -> None:
        outcome = self.outcomes[str(request.id)]
        first = self.fleet.first_token(str(request.id), None, self.now_s)
        if first is None:
            return  # given up while its token was on the way
        assert first.grade is not None
        outcome.actual_s, outcome.cached = self.now_s - outcome.at_s, request.cached_tokens
        assert first.grade.actual_s == pytest.approx(outcome.actual_s)

    def _end(self, request: Request) -> None:
        usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
        assert self.fleet.finish(str(request.id), usage, self.now_s) is not None

    def graded(self, since_s: float) -> list[Outcome]:
        return [o for o in self.outcomes.values() if o.at_s >= since_s and o.actual_s is not None]

    def undisturbed(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Those to whose engine nobody came, and nobody gave up, between their decision and their first token."""
        return [
            o
            for o in outcomes
            if o.actual_s is not None
            and not any(o.at_s < at_s < o.at_s + o.actual_s for at_s in self.changes[o.worker])
        ]

    def assert_nothing_is_left(self) -> None:
        assert self.fleet.in_flight == 0
        pools = self.fleet.view(self.now_s)["pools"]
        assert isinstance(pools, dict)
        for view in pools["m"]["workers"].values():
            assert (view["in_flight"], view["prefilling"], view["decoding"]) == (0, 0, 0)
            assert view["cached_blocks"] <= self.limits.usable_blocks
        assert not self.fleet.skipped_events()
        for engine in self.engines.values():
            held = engine.scheduler.pool.distinct_blocks
            assert pools["m"]["workers"][engine.name]["cached_blocks"] == held


A100 = CostSettings(step_ms=8.0, prefill_us_per_token=90.0, prefill_ns_per_token2=1.2, decode_ms=0.25)
SLOWER = CostSettings(step_ms=10.0, prefill_us_per_token=140.0, prefill_ns_per_token2=2.0, decode_ms=0.4)
FASTER = CostSettings(step_ms=6.0, prefill_us_per_token=55.0, prefill_ns_per_token2=0.7, decode_ms=0.15)
LIMITS = SchedulerSettings(num_gpu_blocks=60_000, max_num_batched_tokens=2048, max_num_seqs=256)


class Traffic:
    """Mixed lengths; about half of the prompts go on from one of a few shared prefixes."""

    def __init__(self, rng: np.random.Generator, longest: int = 16_000) -> None:
        self.rng = rng
        self.longest = longest
        self.prefixes = [self.fresh(int(size)) for size in rng.integers(500, 4000, 6)]

    def fresh(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.rng.integers(1, 100_000, tokens).tolist())

    def prompt(self) -> tuple[int, ...]:
        body = self.fresh(int(np.clip(self.rng.lognormal(6.8, 1.0), 20, self.longest)))
        return self.prefixes[int(self.rng.integers(6))] + body if self.rng.random() < 0.5 else body

    def poisson(
        self, start_s: float, count: int, per_s: float, aborts: float = 0.05, bound_s: float | None = None
    ) -> Iterator[Arrival]:
        at_s = start_s
        for _ in range(count):
            at_s += float(self.rng.exponential(1 / per_s))
            abort_s = float(self.rng.exponential(1.0)) if self.rng.random() < aborts else None
            yield Arrival(at_s, self.prompt(), int(self.rng.integers(1, 200)), bound_s, abort_s)

    def one_by_one(self, count: int, workers: int, start_s: float = 0.0) -> list[Arrival]:
        """Far enough apart for each to have an engine to itself."""
        return [Arrival(start_s + 40.0 * i / workers, self.prompt(), 20) for i in range(count)]


@dataclass(frozen=True)
class Accuracy:
    """How near the predictions were."""

    requests: int
    within_1s: float
    within_10s: float
    median_relative: float
    p90_relative: float
    bias_s: float
    median_ttft_s: float
    median_wait_s: float
    cache_right: float

    def __str__(self) -> str:
        return (
            f"{self.requests} graded, within 1 s {self.within_1s:.1%}, within 10 s {self.within_10s:.1%}, relative "
            f"error p50 {self.median_relative:.2%} p90 {self.p90_relative:.2%}, bias {self.bias_s:+.3f} s, "
            f"median ttft {self.median_ttft_s:.3f} s, wait {self.median_wait_s:.3f} s, cache {self.cache_right:.1%}"
        )


def accuracy(outcomes: list[Outcome]) -> Accuracy:
    relative = sorted(o.error_s / o.actual_s for o in outcomes if o.actual_s)
    actual = [o.actual_s for o in outcomes if o.actual_s is not None]
    return Accuracy(
        len(outcomes),
        sum(o.error_s <= 1 for o in outcomes) / len(outcomes),
        sum(o.error_s <= 10 for o in outcomes) / len(outcomes),
        statistics.median(relative),
        relative[int(0.9 * len(relative))],
        statistics.fmean(o.actual_s - o.predicted_s for o in outcomes if o.actual_s is not None),
        statistics.median(actual),
        statistics.median(o.predicted_wait_s for o in outcomes),
        sum(o.cached == o.credited for o in outcomes) / len(outcomes),
    )


def capacity_per_s(costs: list[CostSettings], limits: SchedulerSettings, longest: int) -> float:
    """Requests a second that the engines get through when there is always something to do."""
    rng = np.random.default_rng(SEED)
    world = World(rng, costs, limits)
    world.run(list(Traffic(rng, longest).poisson(0.0, 200, 1000.0, aborts=0.0)))
    return 200 / world.now_s


def loaded(
    load: float,
    costs: list[CostSettings],
    count: int,
    limits: SchedulerSettings = LIMITS,
    longest: int = 16_000,
    bound_s: float | None = None,
    aborts: float = 0.05,
    ends_late_s: float = 0.0,
    tokens_late_s: float = 0.0,
) -> tuple[World, Accuracy, Accuracy]:
    """Learns from requests one by one, and then takes in Poisson arrivals at a part of what the engines can do.

    Returns how near the predictions were, for all and for those that nothing later came between.
    """
    per_s = load * capacity_per_s(costs, limits, longest)
    rng = np.random.default_rng(SEED)
    world, traffic = World(rng, costs, limits, ends_late_s, tokens_late_s), Traffic(rng, longest)
    lessons = traffic.one_by_one(16 * len(costs), len(costs))
    begins_s = lessons[-1].at_s + 100.0
    world.run([*lessons, *traffic.poisson(begins_s, count, per_s, aborts, bound_s)])
    world.assert_nothing_is_left()
    outcomes = world.graded(begins_s + 0.1 * count / per_s)
    everybody, alone = accuracy(outcomes), accuracy(world.undisturbed(outcomes))
    sys.stdout.write(
        f"\nseed {SEED}, {len(costs)} engine(s), load {load}, {per_s:.1f} requests/s, {len(world.refused)} refused"
    )
    sys.stdout.write(f"\n  all: {everybody}\n  undisturbed: {alone}")
    return world, everybody, alone


def test_alone_on_a_learned_engine_every_prediction_is_exact() -> None:
    rng = np.random.default_rng(SEED)
    world, traffic = World(rng, [A100], LIMITS), Traffic(rng)
    world.run(traffic.one_by_one(80, 1))
    world.assert_nothing_is_left()
    result = accuracy(world.graded(since_s=40.0 * 30))
    sys.stdout.write(f"\nseed {SEED}, solo: {result}")
    assert result.p90_relative < 0.001
    assert result.cache_right == 1.0


def test_with_ten_percent_noise_on_every_step_lone_predictions_stay_at_the_noise() -> None:
    rng = np.random.default_rng(SEED)
    world = World(rng, [CostSettings(8.0, 90.0, 1.2, 0.25, jitter=0.1, seed=SEED)], LIMITS)
    world.run(Traffic(rng).one_by_one(150, 1))
    result = accuracy(world.graded(since_s=40.0 * 50))
    sys.stdout.write(f"\nseed {SEED}, solo with 10 % jitter: {result}")
    assert result.median_relative < 0.09


# What is left under load is what comes later: requests that fill up a newcomer's last step, and those that give up
# ahead of it. Where nothing came between, what is left is a fraction of a decode step.


@pytest.mark.parametrize(("load", "within_1s", "median"), [(0.5, 0.99, 0.06), (0.9, 0.97, 0.13)])
@pytest.mark.parametrize("costs", [[A100], [A100, SLOWER, FASTER]], ids=["one", "three"])
def test_under_load_predictions_are_as_near_as_what_comes_later_lets_them_be(
    load: float, within_1s: float, median: float, costs: list[CostSettings]
) -> None:
    _, everybody, undisturbed = loaded(load, costs, 400)
    assert everybody.within_1s >= within_1s
    assert everybody.median_relative < median
    assert everybody.cache_right > 0.98
    assert undisturbed.median_relative < 0.04
    # One engine at its limit: whoever is undisturbed was priced with the requests that would come in four of five such
    # waits, and did not. So it must be off a little.
    unlikely = load == 0.9 and len(costs) == 1
    assert undisturbed.p90_relative < (0.2 if unlikely else 0.15)
    assert (-0.02 if unlikely else -0.01) < undisturbed.bias_s < 0.01


@pytest.mark.parametrize("threshold", [0, 1024])
def test_prompts_of_a_hundred_thousand_tokens_among_small_ones_are_predicted_too(threshold: int) -> None:
    limits = SchedulerSettings(
        num_gpu_blocks=60_000, max_num_batched_tokens=8192, long_prefill_token_threshold=threshold
    )
    _, everybody, undisturbed = loaded(0.6, [A100], 250, limits, longest=100_000)
    assert everybody.within_1s >= 0.96
    assert everybody.median_relative < 0.08
    assert undisturbed.median_relative < 0.05
    assert undisturbed.p90_relative < 0.18


def test_evidence_that_comes_late_costs_a_few_percent() -> None:
    # First tokens 3 ms after their step, ends up to a second after the last token, as an access log has them.
    _, everybody, undisturbed = loaded(0.7, [A100, SLOWER], 300, ends_late_s=1.0, tokens_late_s=0.003)
    assert everybody.within_1s >= 0.98
    assert undisturbed.median_relative < 0.15


def test_decodes_that_cost_eight_times_what_is_assumed_are_found_out_at_moderate_load() -> None:
    dear = CostSettings(step_ms=8.0, prefill_us_per_token=90.0, prefill_ns_per_token2=1.2, decode_ms=2.0)
    _, everybody, undisturbed = loaded(0.5, [dear], 300)
    assert everybody.within_1s >= 0.95
    assert undisturbed.median_relative < 0.15


def test_a_cache_that_evicts_is_followed_block_by_block() -> None:
    limits = SchedulerSettings(num_gpu_blocks=4000, max_num_batched_tokens=2048)
    world, everybody, _ = loaded(0.7, [A100, A100], 300, limits)
    assert any(engine.scheduler.pool.cached_blocks > 3000 for engine in world.engines.values())
    assert everybody.cache_right > 0.95
    assert everybody.within_1s >= 0.98


@pytest.mark.parametrize("load", [0.7, 0.9])
def test_sglang_engines_are_predicted_by_their_own_rule(load: float) -> None:
    """Prefill goes before decode there: by vLLM's rule a prompt beside decodes would seem to take longer."""
    limits = SglangSettings(block_size=BLOCK, num_gpu_blocks=60_000, max_num_batched_tokens=2048)
    world, everybody, undisturbed = loaded(load, [A100, A100], 300, limits)
    assert everybody.cache_right > 0.95
    assert everybody.within_1s >= 0.99
    assert undisturbed.median_relative < 0.03
    assert all(world.fleet._pools["m"].workers[name].shadow.forced <= 3 for name in world.engines)


def test_sglang_engines_whose_cache_is_full_are_followed() -> None:
    limits = SglangSettings(block_size=BLOCK, num_gpu_blocks=3000, max_num_batched_tokens=2048)
    _, everybody, _ = loaded(0.9, [A100, A100], 300, limits)
    assert everybody.within_1s >= 0.95


def test_at_twice_what_the_engines_can_do_those_let_in_keep_the_bound_and_the_others_hear_when_to_come_back() -> None:
    world, everybody, _ = loaded(2.0, [A100, SLOWER], 500, bound_s=5.0, aborts=0.0)
    assert len(world.refused) > 20
    assert everybody.within_1s >= 0.95
    let_in = [o for o in world.outcomes.values() if o.learned and o.actual_s is not None]
    waits_s = [(o.actual_s or 0.0) - (o.predicted_s - o.predicted_wait_s) for o in let_in]
    sys.stdout.write(f"\n  actual waits of {len(waits_s)} let in: longest {max(waits_s):.2f} s")
    assert all(o.predicted_wait_s <= 5.0 for o in let_in)
    assert sum(wait_s <= 5.5 for wait_s in waits_s) / len(waits_s) > 0.95
    for refusal in world.refused:
        learned = [priced for priced in refusal.forecasts if priced.basis is Basis.CURVE]
        assert min(priced.queue_wait_quantile_s(1 - AdmissionPolicy().risk) for priced in learned) > 5.0
        assert refusal.retry is not None
        assert 1 <= refusal.retry.whole_s <= 60
    # Costs stay sane although nobody has an engine to himself any more. What a decode costs was never seen, and one
    # sample that was off once made it ten times too dear for as long as the load lasted.
    pools = world.fleet.view(world.now_s)["pools"]
    assert isinstance(pools, dict)
    for name, truth in (("w0", A100), ("w1", SLOWER)):
        cost = pools["m"]["workers"][name]["cost"]
        step_ms = cost["ms_per_step"] + 50 * cost["ms_per_decode"]
        assert step_ms == pytest.approx(truth.step_ms + 50 * truth.decode_ms, rel=0.3)
