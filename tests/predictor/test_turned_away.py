"""A refusal that is told without a look at the prompt is the one that the whole decision would have come to."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from predictor.admission import AdmissionPolicy, Mode, Reason, Refusal, RetryPolicy
from predictor.engines.vllm import Settings
from predictor.fairness import FairnessPolicy
from predictor.fleet import Fleet, Grant, NoWorker, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.hindsight import Verdict
from predictor.prefill_cost import StepCost
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens

COST = StepCost(0.0, 0.0, 0.01, 100e-6, 1e-10, 1e-4)
SHORT = 1000  # tokens that any engine here takes
NO_JITTER = RetryPolicy(jitter=0.0)


@dataclass
class Scene:
    """Workers that know what they cost, and the time."""

    fleet: Fleet
    hasher: BlockHasher
    now_s: float = 0.0
    ids: "itertools.count[int]" = field(default_factory=itertools.count)

    def wish(self, bound_s: float | None, **more: object) -> Wish:
        return Wish(f"t{next(self.ids)}", self.now_s, max_queue_wait_s=bound_s, **more)  # type: ignore[arg-type]

    def prompt(self, tokens: int, exact: bool = True, begins: int | None = None) -> Prompt:
        """Those that begin alike have the shorter one's tokens in common; by default nobody begins like another."""
        if not exact:
            return Prompt.estimated(tokens)
        first = next(self.ids) * 1_000_000 if begins is None else begins
        hashes = self.hasher.prompt_hashes(as_tokens(range(first, first + tokens)), FAMILY, Namespace())
        return Prompt(tokens, exact=True, hashes={FAMILY: hashes})

    def place(self, tokens: int, bound_s: float | None = None, begins: int | None = None, **more: object) -> object:
        return self.fleet.place("m", self.prompt(tokens, begins=begins), self.wish(bound_s, **more), self.now_s)

    def turned_away(self, bound_s: float | None, most_tokens: int = SHORT, **more: object) -> Refusal | None:
        return self.fleet.turn_away("m", self.wish(bound_s, **more), most_tokens, self.now_s)

    def fill(self, tokens: int = 200_000, times: int = 2) -> "Scene":
        """So many prompts, of 20 s each or as `tokens` say; and somebody has been refused since, as always first."""
        for _ in range(times):
            assert isinstance(self.place(tokens), Grant)
        self.place(100, 5.0)
        return self


FAMILY = HashFamily(16)


def scene(
    workers: int = 2, policy: PoolPolicy | None = None, engines: list[Settings] | None = None, known: bool = True
) -> Scene:
    rng = np.random.default_rng(5)
    hasher = BlockHasher(rng)
    fleet = Fleet([policy or pool()], hasher, rng)
    for number, engine in enumerate(engines or [Settings()] * workers):
        fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.{number}:8000", engine))
        if known:
            fleet.know_cost(f"w{number}", COST)
    return Scene(fleet, hasher)


def pool(fairness: FairnessPolicy | None = None, **admission: object) -> PoolPolicy:
    policy = AdmissionPolicy(**admission)  # type: ignore[arg-type]
    return PoolPolicy("m", admission=policy, fairness=fairness, default_output_tokens=50, retry=NO_JITTER)


# The same, whatever the fleet is


@st.composite
def engines(draw: st.DrawFn) -> Settings:
    families: list[Literal["vllm", "sglang", "tensorrt_llm"]] = ["vllm", "vllm", "sglang", "tensorrt_llm"]
    family = draw(st.sampled_from(families))
    return Settings(
        num_gpu_blocks=draw(st.sampled_from([None, 2_000, 20_000])),
        max_num_batched_tokens=draw(st.sampled_from([512, 2048, 8192])),
        max_num_seqs=draw(st.sampled_from([4, 256])),
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 1024])) if family == "vllm" else 0,
        long_prefill_token_threshold_adaptive=draw(st.booleans()),
        async_scheduling=draw(st.booleans()),
        scheduling_policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])) if family != "tensorrt_llm" else "fcfs",
        priority_scheduling_preemption_threshold=draw(st.sampled_from([0, 10])),
        enable_chunked_prefill=draw(st.booleans()),
        family=family,
        enable_mixed_chunk=family == "sglang" and draw(st.booleans()),
        prefill_decode_interval=draw(st.sampled_from([0, 0, 4])) if family == "sglang" else 0,
        max_model_len=draw(st.sampled_from([None, 32_000])),
    )


@given(data=st.data(), many=st.lists(engines(), min_size=1, max_size=4), fair=st.booleans())
@settings(max_examples=150, deadline=None)
def test_whoever_is_turned_away_unread_would_be_refused_for_the_same_reason_and_told_to_wait_about_as_long(
    data: st.DataObject, many: list[Settings], fair: bool
) -> None:
    fairness = FairnessPolicy(wait_s=2.0) if fair else None
    here = scene(policy=pool(fairness, max_queue_wait_s=data.draw(st.sampled_from([None, 8.0]))), engines=many)
    flying: list[str] = []
    for _ in range(data.draw(st.integers(1, 25))):
        here.now_s += data.draw(st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3]))
        match data.draw(st.sampled_from(["book", "book", "book", "token", "end"])):
            case "book":
                tokens = data.draw(st.sampled_from([100, 4_000, 15_000, 31_000]))
                priority, begins = data.draw(st.integers(-1, 1)), data.draw(st.sampled_from([None, 0]))
                placed = here.place(tokens, None, begins, priority=priority, tenant="a", max_tokens=50)
                if isinstance(placed, Grant):
                    flying.append(placed.ticket.id)
            case "token" if flying:
                here.fleet.first_token(flying[0], None, here.now_s)
            case "end" if flying:
                here.fleet.finish(flying.pop(0), Usage(output_tokens=50), here.now_s)
    for _ in range(8):
        here.now_s += data.draw(st.sampled_from([0.0, 0.001, 0.5]))
        subset = data.draw(st.sampled_from([None, frozenset({"10.0.0.0:8000"}), frozenset({"10.9.9.9:1"})]))
        wish = here.wish(
            data.draw(st.sampled_from([None, 5.0, 6.0, 20.0])),
            waited_before_s=data.draw(st.sampled_from([0.0, 3.0, 7.0])),
            priority=data.draw(st.integers(-1, 1)),
            max_tokens=data.draw(st.sampled_from([None, 50, 30_000])),
            max_ttft_s=data.draw(st.sampled_from([None, None, None, 9.0])),
            tenant=data.draw(st.sampled_from(["a", "b"])),
            subset=subset,
        )
        tokens = data.draw(st.integers(1, 31_000))
        early = here.fleet.turn_away("m", wish, data.draw(st.sampled_from([tokens, 31_000])), here.now_s)
        event(f"turned away: {early is not None}")
        prompt = here.prompt(tokens, data.draw(st.booleans()), data.draw(st.sampled_from([None, 0])))
        full = here.fleet.place("m", prompt, wish, here.now_s)
        if early is None:
            if isinstance(full, Grant):
                flying.append(full.ticket.id)
            continue
        assert isinstance(full, Refusal)
        assert (early.reason, early.limits) == (full.reason, full.limits)
        assert early.allowed_wait_s == full.allowed_wait_s
        assert early.best.already_waited_s == full.best.already_waited_s
        assert early.best.wait_s <= min(forecast.wait_s for forecast in full.forecasts) + 1e-6
        assert early.retry is not None
        assert full.retry is not None
        assert early.retry.uncapped_s <= full.retry.uncapped_s + 1e-6


def test_what_is_told_of_the_wait_is_less_by_no_more_than_the_step_that_the_prompt_would_share() -> None:
    here = scene().fill()
    full = here.place(100, 5.0)
    early = here.turned_away(5.0)
    assert early is not None
    assert isinstance(full, Refusal)
    assert early.retry is not None
    assert full.retry is not None
    step_s = COST.step_s(8192, 200_000**2 - 191_808**2, 0)
    assert full.best.wait_s - step_s <= early.best.wait_s <= full.best.wait_s
    assert full.retry.uncapped_s - step_s <= early.retry.uncapped_s <= full.retry.uncapped_s


# When it is not sure


def test_nobody_is_turned_away_unread_while_a_worker_is_idle() -> None:
    here = scene()
    busy = here.place(200_000)
    assert isinstance(busy, Grant)
    idle = "w1" if busy.ticket.worker == "w0" else "w0"
    here.fleet.set_draining(idle, True)
    assert isinstance(here.place(100, 5.0), Refusal)
    assert here.turned_away(5.0) is not None
    here.fleet.set_draining(idle, False)
    assert here.turned_away(5.0) is None


def test_nobody_is_turned_away_unread_for_a_close_call() -> None:
    here = scene(workers=1)
    here.place(80_000)
    here.place(100, 5.0)
    full = here.place(100, 300.0)
    assert isinstance(full, Grant)
    wait_s = full.ticket.forecast.wait_s
    assert here.turned_away(wait_s - 0.01) is not None
    assert here.turned_away(3 * wait_s) is None


def test_whose_tokens_may_turn_out_to_be_estimated_is_not_turned_away_by_what_exact_ones_were_off_by() -> None:
    here = scene(workers=1)
    for _ in range(60):
        first, behind = here.place(10_000), here.place(5_000)
        assert isinstance(first, Grant)
        assert isinstance(behind, Grant)
        for grant in (first, behind):
            here.now_s += 6.0  # instead of one
            here.fleet.first_token(grant.ticket.id, None, here.now_s)
        for grant in (first, behind):
            here.fleet.finish(grant.ticket.id, Usage(output_tokens=2), here.now_s)
    here.place(20_000)
    assert isinstance(here.place(100, 5.0), Refusal)
    assert here.turned_away(5.0) is None
    assert isinstance(here.fleet.place("m", here.prompt(100, exact=False), here.wish(5.0), here.now_s), Grant)


def test_nobody_is_turned_away_unread_by_costs_that_are_not_learned() -> None:
    here = scene(known=False)
    for _ in range(20):
        here.place(8000)
    assert here.turned_away(5.0) is None
    # But what time has used up needs no costs.
    idle = scene(known=False).turned_away(5.0, waited_before_s=6.0)
    assert idle is not None
    assert idle.reason is Reason.BOUND_USED_UP


@pytest.mark.parametrize("mode", [Mode.SHADOW, Mode.OFF])
def test_nobody_is_turned_away_unread_where_refusals_are_not_carried_out(mode: Mode) -> None:
    assert scene(policy=pool(mode=mode)).fill().turned_away(5.0) is None


def test_nobody_is_turned_away_unread_without_a_bound_on_the_wait_or_with_one_on_the_time_to_first_token() -> None:
    here = scene().fill()
    assert here.turned_away(None) is None
    assert here.turned_away(5.0, max_ttft_s=6.0) is None
    assert here.turned_away(None, max_ttft_s=6.0) is None


def test_a_pools_own_bound_turns_away_too() -> None:
    refusal = scene(policy=pool(max_queue_wait_s=7.0)).fill().turned_away(None)
    assert refusal is not None
    assert refusal.limits.max_queue_wait_s == 7.0


def test_nobody_is_turned_away_unread_whose_prompt_may_be_too_long_for_every_engine() -> None:
    here = scene(engines=[Settings(max_model_len=32_000)] * 2).fill(31_000, times=8)
    assert here.turned_away(5.0, 31_000) is not None
    # That is the engine's to say, and it says so at once.
    assert here.turned_away(5.0, 33_000) is None
    assert here.turned_away(5.0, 31_000, max_tokens=2000) is None


def test_nobody_is_turned_away_unread_who_overtakes() -> None:
    here = scene(engines=[Settings(scheduling_policy="priority")] * 2)
    here.place(20_000)
    here.place(20_000)
    for _ in range(6):
        here.place(100_000, priority=5)
    here.place(100, 5.0, priority=9)
    assert here.turned_away(5.0, priority=9) is not None
    assert here.turned_away(5.0, priority=-1) is None


def test_nobody_is_turned_away_unread_by_a_timeline_that_is_not_up_to_date() -> None:
    here = scene(workers=1)
    first = here.place(100_000)
    assert isinstance(first, Grant)
    here.place(100_000)
    assert isinstance(here.place(100, 5.0), Refusal)
    assert here.turned_away(5.0) is not None
    here.fleet.first_token(first.ticket.id, None, here.now_s)
    assert here.turned_away(5.0) is None
    assert isinstance(here.place(100, 5.0), Refusal)
    assert here.turned_away(5.0) is not None


def test_behind_a_full_cache_the_middle_one_of_all_futures_counts_once_each_is_imagined() -> None:
    policy = replace(pool(overload_kv_demand=None), default_output_tokens=1_000)
    here = scene(policy=policy, engines=[Settings(num_gpu_blocks=2_000)])
    grants = [here.place(9_000) for _ in range(30)]
    assert isinstance(grants[0], Grant)
    here.now_s += 1.5
    here.fleet.first_token(grants[0].ticket.id, None, here.now_s)
    for _ in range(3):
        full = here.place(2_000, 5.0)
    assert isinstance(full, Refusal)
    early = here.turned_away(5.0)
    assert early is not None
    assert 0.9 * full.best.wait_s <= early.best.wait_s <= full.best.wait_s


def test_where_nobody_can_be_asked_that_is_the_answer() -> None:
    here = scene().fill()
    assert here.turned_away(5.0, subset=frozenset({"10.9.9.9:1"})) is None
    assert isinstance(here.place(100, 5.0, subset=frozenset({"10.9.9.9:1"})), NoWorker)
    assert here.turned_away(5.0, adapter="poems") is None


# What else follows from a refusal


def test_who_was_turned_away_unread_is_graded_in_hindsight() -> None:
    here = scene(workers=1)
    ticket = here.place(100_000)
    assert isinstance(ticket, Grant)
    assert isinstance(here.place(100, 5.0), Refusal)
    right, wrong = here.turned_away(5.0), here.turned_away(8.0)
    assert right is not None
    assert wrong is not None
    here.now_s += 6.0
    here.fleet.first_token(ticket.ticket.id, None, here.now_s)
    reviews = {review.id: review.verdict for _, review in here.fleet.take_reviews(here.now_s)}
    assert sorted(reviews.values(), key=str) == [Verdict.FALSE_ALARM, Verdict.RIGHT, Verdict.RIGHT]


def test_in_a_large_pool_the_best_of_the_others_are_told_of() -> None:
    here = scene(workers=40)
    for _ in range(40):
        here.place(200_000)
    here.place(100, 5.0)
    for _ in range(50):
        if (refusal := here.turned_away(5.0)) is not None:
            break
        here.now_s += 0.05
        assert isinstance(here.place(100, 5.0), Refusal)
    assert refusal is not None
    assert len(refusal.forecasts) == 16
    assert refusal.best.wait_s == min(forecast.wait_s for forecast in refusal.forecasts)
