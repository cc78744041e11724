"""The metrics page: it parses, has what it should, and names nothing that a caller chose."""

from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.metrics import FleetCollector, Metrics
from predictor.engines.vllm import Settings
from predictor.feed_state import Trust
from predictor.fleet import Grant, Usage, Wish
from predictor.grading import CacheVerdict, Grade
from predictor.kv_events import Batch, Stored, Tier
from predictor.prompt import Prompt, as_tokens
from tests.fakes.clock import ManualClock
from tests.fakes.filter import Filter


def page(registry: CollectorRegistry) -> dict[str, Metric]:
    families: Iterable[Metric] = text_string_to_metric_families(generate_latest(registry).decode())
    return {family.name: family for family in families}


def values(family: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry())


def test_every_metric_is_ours_and_says_what_it_is(metrics: Metrics) -> None:
    families = page(metrics.registry)
    assert len(families) >= 20
    for name, family in families.items():
        assert name.startswith("headway_")
        assert family.documentation
    assert "headway_decisions" in families
    assert "headway_log_lines_dropped" in families


def test_what_we_count_ourselves_is_shown_as_the_library_shows_its_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics = Metrics(ours)
    routed = Counter("headway_routed", "Requests routed, by worker and reason", metrics.routed.names, registry=theirs)
    seconds = Histogram(
        "headway_decision_seconds",
        "From the body received to the decision",
        metrics.decision_seconds.names,
        buckets=metrics.decision_seconds.bounds,
        registry=theirs,
    )
    for worker in ("a", 'b"', "a", "\\"):
        metrics.routed.labels("m", worker, "only").inc()
        routed.labels("m", worker, "only").inc()
    for value in (0.0, 0.0004, 0.0005, 0.00051, 0.3, 1.0, 1.5, 7.0):
        metrics.decision_seconds.labels("m").observe(value)
        seconds.labels("m").observe(value)
    theirs_page, ours_page = page(theirs), page(ours)
    for name in ("headway_routed", "headway_decision_seconds"):
        shown, expected = ours_page[name], theirs_page[name]
        assert (shown.type, shown.documentation, len(shown.samples)) == (
            expected.type,
            expected.documentation,
            len(expected.samples),
        )
        for one, other in zip(shown.samples, expected.samples, strict=True):
            assert (one.name, one.labels) == (other.name, other.labels)
            assert one.value == other.value or one.name.endswith("_created")
        assert f"{name}_created" in ours_page or any(s.name.endswith("_created") for s in shown.samples)


def test_a_label_that_is_missing_is_a_fault_of_ours(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="routed"):
        metrics.routed.labels("m")


@pytest.mark.parametrize(
    ("error_s", "within"), [(0.0, "1s"), (1.0, "1s"), (-1.0, "1s"), (1.01, "10s"), (-10.0, "10s"), (10.5, "beyond")]
)
def test_a_grade_is_counted_by_how_far_off_it_was(metrics: Metrics, error_s: float, within: str) -> None:
    metrics.grade(
        "m", "a", "curve", Grade(predicted_s=20.0, actual_s=20.0 + error_s, kept_bound=None, within_interval=True)
    )
    graded = page(metrics.registry)["headway_predictions_graded"]
    assert [sample.labels["within"] for sample in graded.samples if sample.name.endswith("_total")] == [within]
    assert values(page(metrics.registry)["headway_bounds"]) == {}


def test_kept_and_missed_bounds_are_told_apart(metrics: Metrics) -> None:
    for kept in (True, True, False):
        metrics.grade("m", "a", "curve", Grade(1.0, 1.0, kept, within_interval=True))
    assert metrics.registry.get_sample_value("headway_bounds_total", {"pool": "m", "kept": "yes"}) == 2
    assert metrics.registry.get_sample_value("headway_bounds_total", {"pool": "m", "kept": "no"}) == 1


def test_intervals_that_held_are_told_from_others(metrics: Metrics) -> None:
    for held in (True, True, True, False):
        metrics.grade("m", "a", "curve", Grade(1.0, 1.0, None, held))
    labels = {"pool": "m", "worker": "a"}
    assert metrics.registry.get_sample_value("headway_prediction_intervals_total", labels | {"held": "yes"}) == 3
    assert metrics.registry.get_sample_value("headway_prediction_intervals_total", labels | {"held": "no"}) == 1


def test_cache_verdicts_are_counted(metrics: Metrics) -> None:
    metrics.cache_verdict("m", "a", CacheVerdict.OVER)
    labels = {"pool": "m", "worker": "a", "verdict": "over"}
    assert metrics.registry.get_sample_value("headway_cache_estimates_total", labels) == 1


async def test_gauges_show_the_fleet_as_it_is() -> None:
    clock = ManualClock()
    filter_ = Filter({"a": "10.0.0.1:8000"}, clock)

    def gauge(name: str) -> float:
        return values(page(filter_.registry)[f"headway_worker_{name}"])["m", "a"]

    assert (gauge("in_flight"), gauge("up"), gauge("feed_trusted"), gauge("cached_blocks")) == (0, 1, 1, 0)
    grant = filter_.fleet.place("m", Prompt(500, exact=True), Wish("t", clock()), clock())
    assert isinstance(grant, Grant)
    filter_.fleet.set_up("a", up=False)
    filter_.fleet.set_trust("a", Trust.PARTIAL, 0.25)
    stored = Stored((1, 2), None, as_tokens(range(32)), 16, Tier.DEVICE, None, None)
    orphan = Stored((9,), 777, as_tokens(range(16)), 16, Tier.DEVICE, None, None)
    filter_.fleet.apply("a", Batch(None, (stored, orphan), None))
    assert (gauge("in_flight"), gauge("up"), gauge("feed_trusted"), gauge("cached_blocks")) == (1, 0, 0, 2)
    assert (gauge("feed_coverage"), gauge("feed_silent")) == (0.25, 0)
    states = values(page(filter_.registry)["headway_worker_feed"])
    assert {state: on for (_, state, _), on in states.items()} == {"live": 0, "replaying": 0, "partial": 1, "lost": 0}
    for _ in range(3):
        filter_.fleet.stored_at_once("a", 600)
    doubts = values(page(filter_.registry)["headway_worker_token_budget_doubt"])
    assert doubts == {("exceeded", "m", "a"): 1, ("never_filled", "m", "a"): 0}
    assert gauge("prefill_tokens_ahead") == 500
    clock.advance(0.001)  # a step is composed when the instant of its first request is over
    assert gauge("wait_seconds") > 0
    families = page(filter_.registry)
    assert values(families["headway_tickets_in_flight"]) == {(): 1}
    assert values(families["headway_streams_open"]) == {(): 0}
    assert sum(values(families["headway_index_skipped"]).values()) == 1
    filter_.fleet.finish("t", Usage(), clock())
    assert gauge("in_flight") == 0


async def test_a_fleet_that_cannot_be_shown_leaves_the_rest_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    filter_ = Filter({"a": "10.0.0.1:8000"}, ManualClock())
    faults: list[Exception] = []
    collector = FleetCollector(filter_.fleet, ManualClock(), lambda: 0, faults.append)
    monkeypatch.setattr(filter_.fleet, "view", lambda now_s: 1 / 0)
    registry = CollectorRegistry()
    Metrics(registry)
    registry.register(collector)
    assert "headway_bugs" in page(registry)
    assert isinstance(faults[0], ZeroDivisionError)


def test_it_is_counted_how_often_an_engine_did_otherwise_than_its_replay_had_it() -> None:
    clock = ManualClock()
    filter_ = Filter({"a": "10.0.0.1:8000"}, clock)
    filter_.fleet.configure("a", Settings(max_num_seqs=1))
    for name in "xy":
        filter_.fleet.place("m", Prompt(500, exact=True), Wish(name, clock()), clock())
    corrections = values(page(filter_.registry)["headway_shadow_corrections"])
    assert corrections == {("forced", "m", "a"): 0, ("recomposed", "m", "a"): 0, ("token_held", "m", "a"): 0}
    # It has one slot, and nobody has left it.
    for name in "xy":
        clock.advance(1.0)
        filter_.fleet.first_token(name, None, clock())
    corrections = values(page(filter_.registry)["headway_shadow_corrections"])
    assert corrections == {("forced", "m", "a"): 1, ("recomposed", "m", "a"): 0, ("token_held", "m", "a"): 0}
