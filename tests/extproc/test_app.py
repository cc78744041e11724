"""What the config file says is what the fleet does."""

from extproc.app import pool_policy
from extproc.config import parse_config
from predictor.admission import AdmissionPolicy, Mode, OnReject, RetryPolicy
from predictor.fairness import FairnessPolicy
from predictor.fleet import PoolPolicy
from predictor.hindsight import GuardPolicy
from predictor.routing import Prefer, RoutingPolicy


def policy(keys: str) -> PoolPolicy:
    (pool,) = parse_config(f"pools:\n- name: p\n  {keys}\n", "f.yaml").pools
    return pool_policy(pool)


def test_a_pool_that_says_nothing_has_the_domains_own_defaults() -> None:
    plain = policy("models: [m]")
    assert plain.admission == AdmissionPolicy()
    assert plain.guard == GuardPolicy()
    assert plain.routing == RoutingPolicy()
    assert plain.retry == RetryPolicy()
    assert plain.fairness is None


def test_every_key_reaches_its_place() -> None:
    said = policy(
        "admission: {mode: shadow, max_queue_wait_s: 11, max_ttft_s: 12, overload_wait_s: 13, overload_kv_demand: 14, "
        "risk: 0.15, on_reject: fail, guard: {false_alarms: 0.16, margin: 0.17, window: 19, least: 18}}"
    )
    assert said.admission == AdmissionPolicy(Mode.SHADOW, 11, 12, 13, 14, 0.15, OnReject.FAIL)
    assert said.guard == GuardPolicy(0.16, 0.17, 19, 18)
    said = policy("routing: {prefer: cache, others: {latency: 1, balanced: 2, cache: 3}, session_hint: 0.4}")
    others = {Prefer.LATENCY: 1, Prefer.BALANCED: 2, Prefer.CACHE: 3}
    assert said.routing == RoutingPolicy(Prefer.CACHE, others, 0.4)
    assert policy("fairness: {enabled: true, wait_s: 5, half_life_s: 6}").fairness == FairnessPolicy(5, 6)
    assert policy("learning: {share: 0.7}").routing.learning_share == 0.7
