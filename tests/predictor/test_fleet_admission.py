"""What the whole does with refusals: modes, bounds of the pool, tenants, hindsight and its guard, idle fleets."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.admission import AdmissionPolicy, Mode, Reason, Refusal
from predictor.engines.vllm import Settings
from predictor.fairness import FairnessPolicy
from predictor.fleet import Decision, Fleet, Grant, NoWorker, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.hindsight import GuardPolicy, Verdict
from predictor.prompt import BlockHasher, Prompt
from predictor.routing import Prefer

TOKENS_PER_S, STEP_S = 10_000.0, 0.01


class Bench:
    """A fleet whose workers have learned: 10 ms a step and 10,000 tokens a second."""

    def __init__(self, workers: int = 1, policy: PoolPolicy | None = None, settings: Settings | None = None) -> None:
        rng = np.random.default_rng(42)
        self.fleet = Fleet([policy or PoolPolicy("m", default_output_tokens=50)], BlockHasher(rng), rng)
        self.ids = itertools.count(1)
        self.now_s = 0.0
        for number in range(workers):
            self.fleet.join("m", WorkerSpec(f"w{number}", f"10.0.0.{number}:8000", settings or Settings()))

    def place(self, tokens: int, bound_s: float | None = None, **wish: object) -> Decision:
        made = Wish(f"t{next(self.ids)}", self.now_s, max_queue_wait_s=bound_s, **wish)  # type: ignore[arg-type]
        return self.fleet.place("m", Prompt(tokens, exact=True), made, self.now_s)

    def grant(self, tokens: int, bound_s: float | None = None, **wish: object) -> Grant:
        decision = self.place(tokens, bound_s, **wish)
        assert isinstance(decision, Grant)
        return decision

    def refuse(self, tokens: int, bound_s: float | None = None, **wish: object) -> Refusal:
        decision = self.place(tokens, bound_s, **wish)
        assert isinstance(decision, Refusal)
        return decision

    def serve(self, ticket_id: str, tokens: int) -> None:
        """Now, on a worker that does nothing else."""
        self.now_s += STEP_S + tokens / TOKENS_PER_S
        self.first_token(ticket_id)
        self.now_s += STEP_S * 19
        self.finish(ticket_id, Usage(tokens, 0, 20))

    def first_token(self, ticket_id: str) -> None:
        assert self.fleet.first_token(ticket_id, None, self.now_s) is not None

    def finish(self, ticket_id: str, usage: Usage | None = None) -> None:
        assert self.fleet.finish(ticket_id, usage or Usage(), self.now_s) is not None

    def learned(self) -> "Bench":
        for tokens in itertools.islice(itertools.cycle((500, 8000, 1000, 4000, 2000, 6000)), 200):
            pools = self.fleet.view(self.now_s)["pools"]
            assert isinstance(pools, dict)
            if all(worker["cost"]["basis"] == "curve" for worker in pools["m"]["workers"].values()):
                return self
            self.serve(self.grant(tokens).ticket.id, tokens)
            self.now_s += 5.0
        raise AssertionError("nothing was learned")

    def verdicts(self) -> list[tuple[Reason, bool, Verdict]]:
        reviews = self.fleet.take_reviews(self.now_s)
        return [(review.reason, review.enforced, review.verdict) for _, review in reviews]


@pytest.mark.parametrize(("tokens", "exact"), [(20_000, True), (2_000_000, False)])
def test_what_no_engine_could_take_is_theirs_to_refuse_however_long_their_queues_are(tokens: int, exact: bool) -> None:
    bench = Bench(2, settings=Settings(max_model_len=20_000)).learned()
    while isinstance(bench.place(15_000, 5.0), Grant):
        pass
    wish = Wish("long", bench.now_s, max_queue_wait_s=5.0)
    assert isinstance(bench.fleet.place("m", Prompt(tokens, exact=exact), wish, bench.now_s), Grant)
    assert isinstance(bench.place(15_000, 5.0), Refusal)


def pool(**admission: object) -> PoolPolicy:
    return PoolPolicy("m", admission=AdmissionPolicy(**admission), default_output_tokens=50)  # type: ignore[arg-type]


# Modes


def test_in_shadow_mode_what_would_be_refused_is_let_through_and_told() -> None:
    bench = Bench(policy=pool(mode=Mode.SHADOW)).learned()
    bench.grant(200_000)  # 20 s
    grant = bench.grant(1000, 5.0)
    assert grant.would_refuse is not None
    assert grant.would_refuse.reason is Reason.QUEUE_WAIT
    assert grant.ticket.would_refuse is grant.would_refuse
    assert bench.grant(1000, 60.0).would_refuse is None


def test_switched_off_nothing_is_even_decided() -> None:
    bench = Bench(policy=pool(mode=Mode.OFF)).learned()
    bench.grant(200_000)
    assert bench.grant(1000, 5.0, waited_before_s=50.0).would_refuse is None


def test_a_pools_own_bound_is_for_requests_that_bring_none() -> None:
    bench = Bench(policy=pool(max_queue_wait_s=10.0)).learned()
    bench.grant(200_000)
    assert bench.refuse(1000).reason is Reason.QUEUE_WAIT
    assert bench.refuse(1000, 15.0).limits.max_queue_wait_s == 15.0
    bench.grant(1000, 60.0)


def test_a_pools_own_bound_is_graded_too() -> None:
    bench = Bench(policy=pool(max_queue_wait_s=10.0)).learned()
    ticket = bench.grant(1000).ticket
    bench.now_s += 30.0
    first = bench.fleet.first_token(ticket.id, None, bench.now_s)
    assert first is not None
    assert first.grade is not None
    assert first.grade.kept_bound is False


def test_a_bound_on_the_first_token() -> None:
    bench = Bench().learned()
    assert bench.refuse(100_000, max_ttft_s=5.0).reason is Reason.OWN_PREFILL
    bench.grant(40_000, max_ttft_s=5.0)
    assert bench.refuse(20_000, max_ttft_s=5.0).reason is Reason.TTFT


def test_without_a_bound_a_pool_that_is_overloaded_refuses() -> None:
    bench = Bench(2, pool(overload_wait_s=30.0)).learned()
    for _ in range(2):
        bench.grant(400_000)  # 40 s on each
    refusal = bench.refuse(1000)
    assert refusal.reason is Reason.OVERLOAD_WAIT
    assert refusal.retry is not None
    assert refusal.retry.uncapped_s == pytest.approx(10, abs=1)
    bench.now_s += refusal.retry.whole_s
    bench.grant(1000)


def test_a_demand_for_several_caches_refuses_before_anything_is_learned_and_ends_with_the_requests() -> None:
    bench = Bench(1, pool(overload_kv_demand=2.0), Settings(num_gpu_blocks=1000))  # 16,000 tokens
    tickets = [bench.grant(10_000).ticket for _ in range(3)]
    assert bench.refuse(10_000).reason is Reason.OVERLOAD_KV
    for ticket in tickets:
        bench.finish(ticket.id)
    bench.grant(100_000)  # idle: whatever it is, it may try


# Idle fleets


@settings(deadline=None, max_examples=60)
@given(
    workers=st.integers(1, 8),
    learned=st.booleans(),
    blocks=st.none() | st.integers(10, 100_000),
    tokens=st.integers(1, 3_000_000),
    bound_s=st.none() | st.floats(5, 300),
    waited_s=st.floats(0, 4.9),
    admission=st.builds(
        AdmissionPolicy,
        mode=st.sampled_from(Mode),
        max_queue_wait_s=st.none() | st.floats(5, 300),
        overload_wait_s=st.none() | st.floats(0.1, 100),
        overload_kv_demand=st.none() | st.floats(1, 10),
        risk=st.floats(0.001, 0.999),
    ),
    fair=st.booleans(),
    prefer=st.none() | st.sampled_from(Prefer),
    down=st.integers(0, 7),
)
def test_an_idle_fleet_never_refuses(
    workers: int,
    learned: bool,
    blocks: int | None,
    tokens: int,
    bound_s: float | None,
    waited_s: float,
    admission: AdmissionPolicy,
    fair: bool,
    prefer: Prefer | None,
    down: int,
) -> None:
    policy = PoolPolicy("m", admission=admission, fairness=FairnessPolicy(0.0) if fair else None)
    bench = Bench(workers, policy, Settings(num_gpu_blocks=blocks))
    if learned:
        bench.learned()
    bench.fleet.set_up(f"w{down % workers}", False)
    for tenant in ("giant", "small"):
        ticket = bench.grant(20_000 if tenant == "giant" else 1, tenant=tenant).ticket
        bench.serve(ticket.id, 20_000)
    bench.grant(tokens, bound_s, tenant="giant", waited_before_s=waited_s, prefer=prefer)


# Tenants


def test_one_tenants_giants_do_not_get_another_ones_small_requests_refused() -> None:
    def refused(fairness: FairnessPolicy | None) -> list[str]:
        """Tenants of the refused, when one sends 5 s of work every second and the other a tenth of one."""
        bench = Bench(2, PoolPolicy("m", fairness=fairness, default_output_tokens=50)).learned()
        told, flying = [], list[tuple[float, str]]()
        free_s = {"w0": bench.now_s, "w1": bench.now_s}
        for _ in range(60):
            for tenant, tokens in (("giant", 50_000), ("small", 1000)):
                decision = bench.place(tokens, 10.0, tenant=tenant)
                if isinstance(decision, Refusal):
                    told.append(tenant)
                else:
                    assert isinstance(decision, Grant)
                    worker = decision.ticket.worker
                    free_s[worker] = max(free_s[worker], bench.now_s) + tokens / TOKENS_PER_S
                    flying.append((free_s[worker], decision.ticket.id))
            bench.now_s += 1.0
            for done_s, ticket_id in sorted(flying):
                if done_s <= bench.now_s:
                    bench.first_token(ticket_id)
                    bench.finish(ticket_id)
            flying = [(done_s, ticket_id) for done_s, ticket_id in flying if done_s > bench.now_s]
        return told

    unfair, fair = refused(None), refused(FairnessPolicy(wait_s=2.0))
    assert unfair.count("small") >= 5
    assert fair.count("small") == 0
    assert fair.count("giant") > 10


# Adapters


def test_an_adapter_is_asked_for_only_where_it_is_loaded() -> None:
    bench = Bench(2)
    bench.fleet.join("m", WorkerSpec("sql", "10.0.0.9:8000", adapters=frozenset({"sql"})))
    for _ in range(20):
        grant = bench.grant(1000, adapter="sql")
        assert grant.endpoints == ("10.0.0.9:8000",)
    assert bench.place(1000, adapter="poems") == NoWorker("m")


# Sessions


def test_a_session_returns_to_its_worker_when_its_prefix_is_not_known() -> None:
    bench = Bench(4).learned()
    home = bench.grant(1000, session="s").ticket
    bench.serve(home.id, 1000)
    for _ in range(10):
        ticket = bench.grant(1000, session="s").ticket
        assert ticket.worker == home.worker
        bench.serve(ticket.id, 1000)
    assert len({bench.grant(1000).ticket.worker for _ in range(4)}) == 4


# Hindsight


def test_a_refusal_that_was_right_is_called_so_when_the_bound_has_passed() -> None:
    bench = Bench().learned()
    giant = bench.grant(200_000).ticket
    bench.refuse(1000, 5.0)
    bench.now_s += 4.0
    assert bench.verdicts() == []
    bench.now_s += 1.1
    assert bench.verdicts() == [(Reason.QUEUE_WAIT, True, Verdict.RIGHT)]
    bench.first_token(giant.id)
    assert bench.verdicts() == []


@pytest.mark.parametrize("how", ["first token", "given up"])
def test_a_refusal_that_was_wrong_is_called_so_as_soon_as_its_turn_would_have_come(how: str) -> None:
    bench = Bench().learned()
    giant = bench.grant(200_000).ticket
    bench.refuse(1000, 5.0)
    bench.grant(1000)  # came later, and would have stood behind it
    bench.now_s += 3.0
    bench.first_token(giant.id) if how == "first token" else bench.finish(giant.id)
    assert bench.verdicts() == [(Reason.QUEUE_WAIT, True, Verdict.FALSE_ALARM)]


def test_a_full_cache_keeps_a_refused_request_waiting_in_hindsight_too() -> None:
    bench = Bench(settings=Settings(num_gpu_blocks=14_000)).learned()  # 224,000 tokens
    giant = bench.grant(200_000).ticket
    bench.refuse(100_000, 5.0)
    bench.now_s += 3.0
    bench.first_token(giant.id)  # decodes, and holds 200,000
    assert bench.verdicts() == []
    bench.now_s += 1.0
    bench.finish(giant.id)
    assert bench.verdicts() == [(Reason.QUEUE_WAIT, True, Verdict.FALSE_ALARM)]


def test_shadow_refusals_are_judged_by_their_own_first_token() -> None:
    bench = Bench(policy=pool(mode=Mode.SHADOW)).learned()
    giant = bench.grant(200_000).ticket
    later = bench.grant(1000, 5.0).ticket
    bench.now_s += 4.0
    bench.first_token(giant.id)
    bench.now_s += 0.2
    bench.first_token(later.id)
    assert bench.verdicts() == [(Reason.QUEUE_WAIT, False, Verdict.FALSE_ALARM)]


def test_admission_steps_down_by_itself_when_its_refusals_were_wrong_and_up_again_when_they_are_right() -> None:
    guarded = PoolPolicy("m", guard=GuardPolicy(0.3, window=20, least=10), default_output_tokens=50)
    bench = Bench(policy=guarded).learned()

    def refusals(count: int, given_up: bool) -> None:
        for _ in range(count):
            giant = bench.grant(200_000).ticket
            small = bench.place(1000, 5.0)
            bench.now_s += 2.0 if given_up else 20.25
            if not given_up:
                bench.first_token(giant.id)
            bench.finish(giant.id)
            if isinstance(small, Grant):
                bench.now_s += 0.2
                bench.first_token(small.ticket.id)
                bench.finish(small.ticket.id)

    refusals(10, given_up=True)  # whose queue it was never waits to the end of it
    assert bench.fleet.admission_mode("m") is Mode.SHADOW
    assert bench.fleet.take_steps() == [("m", Mode.SHADOW, 1.0)]
    refusals(10, given_up=False)
    assert bench.fleet.admission_mode("m") is Mode.ENFORCE
    assert bench.fleet.take_steps() == [("m", Mode.ENFORCE, 0.0)]
    assert bench.fleet.take_steps() == []


def test_reviews_that_nobody_fetches_are_bounded() -> None:
    bench = Bench().learned()
    bench.grant(200_000, streaming=False)  # shows no first token: nothing can be told
    for _ in range(11_000):
        bench.refuse(1000, 5.0)
    assert len(bench.fleet.take_reviews(bench.now_s)) == 10_000
