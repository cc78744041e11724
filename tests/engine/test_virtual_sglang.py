"""Our cache view against SGLang's own radix cache, hierarchy, allocators and event recorder, in virtual time."""

import logging
from dataclasses import replace

import pytest

from predictor.cache_index import TierCaps
from predictor.engines.reuse import sglang
from predictor.prompt import HashFamily
from tests.engine.traces import Observer, Verdict, VirtualSglang
from tests.engine.workload import Shape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_logger = logging.getLogger(__name__)

PLAIN = VirtualSglang(Shape(requests=20_000))
CASES = {
    "page size 1": replace(
        PLAIN, shape=Shape(requests=20_000, system_tokens=120, turn_tokens=40), max_total_num_tokens=6000
    ),
    "page size 16": replace(PLAIN, page_size=16),
    "page size 64": replace(PLAIN, page_size=64, max_total_num_tokens=64 * 300),
    "salts and adapters": replace(
        PLAIN, page_size=16, shape=Shape(requests=20_000, salted_share=0.3, adapter_share=0.4)
    ),
    "pairs of tokens, page size 1": replace(
        PLAIN, shape=Shape(requests=10_000, system_tokens=120, turn_tokens=40), max_total_num_tokens=6000, eagle=True
    ),
    "pairs of tokens, page size 16": replace(PLAIN, page_size=16, eagle=True),
    "sent again": replace(PLAIN, page_size=16, shape=Shape(requests=20_000, again_share=0.3)),
}


@pytest.mark.parametrize("name", CASES)
def test_credit_at_admission_is_what_is_reused(name: str, request: pytest.FixtureRequest) -> None:
    verdict = _follow(_sized(CASES[name], request))
    assert verdict.right == verdict.admitted > 0, str(verdict)
    assert verdict.holds_checked >= 1
    assert verdict.skipped.total() == 0
    assert verdict.cached_tokens > 0.1 * verdict.prompt_tokens


def test_who_waits_is_credited_with_what_will_be_left(request: pytest.FixtureRequest) -> None:
    shape = Shape(requests=10_000, at_once=16, most_tokens=2500, turn_tokens=150)
    engine = replace(PLAIN, page_size=16, max_total_num_tokens=6400, max_running_requests=4, shape=shape)
    verdict = _follow(_sized(engine, request))
    assert verdict.right == verdict.admitted > 0, str(verdict)
    wrong, as_it_stood = (verdict.admitted - right for right in (verdict.right_at_arrival, verdict.right_as_it_stood))
    assert as_it_stood > 0.05 * verdict.admitted, "the case shows nothing"
    assert wrong < 0.5 * as_it_stood, str(verdict)
    assert verdict.over_at_arrival < 0.5 * verdict.over_as_it_stood, str(verdict)


HIERARCHIES = {
    "write_through": replace(PLAIN, page_size=16, host_ratio=2.0),
    "write_back": replace(PLAIN, page_size=16, host_ratio=1.0, write_policy="write_back"),
    "pairs of tokens": replace(PLAIN, page_size=16, host_ratio=2.0, eagle=True),
}


@pytest.mark.parametrize("name", HIERARCHIES)
def test_what_its_hierarchical_cache_has_on_the_host_is_credited(name: str, request: pytest.FixtureRequest) -> None:
    """HiCache: what leaves the device stays on the host, and comes back for who goes on from it."""
    engine = replace(HIERARCHIES[name], shape=Shape(requests=10_000))
    verdict = _follow(_sized(engine, request))
    assert verdict.right == verdict.admitted > 0, str(verdict)
    assert verdict.holds_checked >= 1
    assert verdict.skipped.total() == 0
    assert verdict.loaded > 0.05 * verdict.admitted, "the case shows nothing"


def test_events_that_come_late_cost_little(request: pytest.FixtureRequest) -> None:
    """While it only decodes, SGLang keeps its events for forty steps."""
    verdict = _follow(_sized(replace(PLAIN, page_size=16, decode_log_interval=40), request))
    assert verdict.right_share > 0.95, str(verdict)


def _sized(engine: VirtualSglang, request: pytest.FixtureRequest) -> VirtualSglang:
    requests = engine.shape.requests // (20 if request.config.getoption("--reduced") else 1)
    return replace(engine, shape=replace(engine.shape, requests=requests))


def _follow(engine: VirtualSglang) -> Verdict:
    lookahead = int(engine.eagle)
    family = HashFamily(engine.page_size, lookahead)
    rule = sglang().with_blocks_seen(lookahead, pairs=engine.eagle)
    pages = engine.max_total_num_tokens // engine.page_size
    # SGLang's pool on the host has a page more.
    observer = Observer(family, TierCaps(pages, host=int(pages * engine.host_ratio) + 1), rule)
    verdict = observer.follow(engine.records())
    _logger.info("%s", verdict)
    return verdict
