"""Our cache view against vLLM's own scheduler and KV cache manager, in virtual time and by the hundred thousand."""

import logging
from dataclasses import replace

import pytest

from predictor.cache_index import TierCaps
from predictor.engines.reuse import ReuseRule, vllm
from predictor.prompt import HashFamily
from tests.engine.traces import Observer, Verdict, VirtualVllm
from tests.engine.workload import Shape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_logger = logging.getLogger(__name__)

PLAIN = VirtualVllm(Shape(requests=40_000))
CASES = {
    "multi-turn, evicting": PLAIN,
    "block size 64": replace(PLAIN, block_size=64, num_blocks=300),
    "block size 1": replace(
        PLAIN,
        block_size=1,
        num_blocks=6000,
        shape=Shape(requests=10_000, system_tokens=80, turn_tokens=30, output_tokens=12, most_tokens=600),
    ),
    "salts and adapters": replace(PLAIN, shape=Shape(requests=20_000, salted_share=0.3, adapter_share=0.4)),
    "sent again, and not reading": replace(
        PLAIN, shape=Shape(requests=20_000, again_share=0.3, without_reading_share=0.1)
    ),
    "preempting": replace(
        PLAIN,
        num_blocks=160,
        max_model_len=2048,
        shape=Shape(requests=10_000, at_once=24, output_tokens=120, most_tokens=900),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_credit_at_admission_is_what_is_reused(name: str, request: pytest.FixtureRequest) -> None:
    verdict = _follow(_sized(CASES[name], request))
    _is_exact(verdict)
    assert verdict.holds_checked >= 1
    assert verdict.skipped.total() == 0
    assert verdict.cached_tokens > 0.1 * verdict.prompt_tokens
    assert (verdict.counts["preemptions"] > 0) == (name == "preempting")


WAITING = {
    "for a slot": replace(
        PLAIN,
        num_blocks=400,
        max_num_seqs=4,
        shape=Shape(requests=10_000, at_once=16, most_tokens=2500, turn_tokens=150),
    ),
    "for prefill": replace(
        PLAIN,
        max_num_batched_tokens=256,
        shape=Shape(requests=10_000, at_once=16, alive=60, most_tokens=2500, turn_tokens=200),
    ),
}


@pytest.mark.parametrize("name", WAITING)
def test_who_waits_is_credited_with_what_will_be_left(name: str, request: pytest.FixtureRequest) -> None:
    """Those ahead store more than the cache holds, so that most of what is cached on arrival is gone by then."""
    verdict = _follow(_sized(WAITING[name], request))
    _is_exact(verdict)
    wrong, as_it_stood = (verdict.admitted - right for right in (verdict.right_at_arrival, verdict.right_as_it_stood))
    assert as_it_stood > 0.05 * verdict.admitted, "the case shows nothing"
    assert wrong < 0.5 * as_it_stood, str(verdict)
    assert verdict.over_at_arrival < 0.5 * verdict.over_as_it_stood, str(verdict)


def test_what_eagle_drops_is_not_credited(request: pytest.FixtureRequest) -> None:
    verdict = _follow(_sized(replace(PLAIN, eagle=True, shape=Shape(requests=20_000)), request), vllm(speculative=True))
    _is_exact(verdict)


@pytest.mark.parametrize("self_describing", [True, False], ids=["told whole", "told by name"])
def test_what_was_offloaded_to_the_host_is_credited(self_describing: bool, request: pytest.FixtureRequest) -> None:
    engine = replace(
        PLAIN, num_blocks=300, cpu_blocks=600, self_describing=self_describing, shape=Shape(requests=10_000)
    )
    verdict = _follow(_sized(engine, request))
    # Hardly ever, a block that the host's view still has is not loaded: it is on its way out there.
    assert verdict.under == 0, str(verdict)
    assert verdict.right_share >= 0.99, str(verdict)
    assert verdict.loaded > 0.05 * verdict.admitted


@pytest.mark.parametrize("other", ["window:64", "mamba"])
def test_of_a_hybrid_model_the_full_attention_group_is_an_upper_bound(
    other: str, request: pytest.FixtureRequest
) -> None:
    engine = replace(PLAIN, groups=("full", other), num_blocks=1200, shape=Shape(requests=10_000))
    verdict = _follow(_sized(engine, request))
    assert verdict.under == 0, str(verdict)
    assert any(reason.startswith("group_") for reason in verdict.skipped), str(verdict)


def _is_exact(verdict: Verdict) -> None:
    """Every request, but for those whose blocks an older request took in the very schedule() call that admitted them:
    nobody outside can know that before the step has ended."""
    assert verdict.right + verdict.taken_in_the_step == verdict.admitted > 0, str(verdict)
    assert verdict.taken_in_the_step <= 0.02 * verdict.admitted, str(verdict)


def _sized(engine: VirtualVllm, request: pytest.FixtureRequest) -> VirtualVllm:
    requests = engine.shape.requests // (20 if request.config.getoption("--reduced") else 1)
    return replace(engine, shape=replace(engine.shape, requests=requests))


def _follow(engine: VirtualVllm, rule: ReuseRule | None = None) -> Verdict:
    observer = Observer(HashFamily(engine.block_size), TierCaps(engine.num_blocks, engine.cpu_blocks), rule or vllm())
    verdict = observer.follow(engine.records())
    _logger.info("%s", verdict)
    return verdict
