"""Prometheus metrics, all defined here."""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from predictor.budget_check import BudgetDoubt
from predictor.feed_state import Trust
from predictor.fleet import Fleet
from predictor.grading import CacheVerdict, Grade

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_MILLISECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


class Count:
    """Counts up, on the event loop only: the library's own takes a lock, and five calls to get there."""

    __slots__ = ("created_s", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.created_s = time.time()

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Distribution:
    """How many values fell below each bound."""

    __slots__ = ("_bounds", "counts", "created_s", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last is of those above all bounds
        self.sum = 0.0
        self.created_s = time.time()

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


_Child = TypeVar("_Child", Count, Distribution)


class _Labelled(Collector, Generic[_Child]):
    """A metric of ours, shown by the library: its children by their labels' values."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], new: Callable[[], _Child]) -> None:
        self._name = name
        self._text = text
        self.names = labels
        self._new: Callable[[], _Child] = new
        self._children: dict[tuple[str, ...], _Child] = {}

    def labels(self, *values: str) -> _Child:
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self.names):
                raise ValueError(f"{self._name} has the labels {self.names}, and not as many values: {values}")
            child = self._children[values] = self._new()
        return child


class Counts(_Labelled[Count]):
    def __init__(self, name: str, text: str, labels: tuple[str, ...]) -> None:
        super().__init__(name, text, labels, Count)

    def describe(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, labels=self.names)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self.names)
        for values, child in self._children.items():
            family.add_metric(values, child.value, child.created_s)
        yield family


class Distributions(_Labelled[Distribution]):
    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        super().__init__(name, text, labels, lambda: Distribution(bounds))
        self.bounds = bounds
        self._shown = [*map(floatToGoString, bounds), "+Inf"]

    def describe(self) -> Iterable[Metric]:
        yield HistogramMetricFamily(self._name, self._text, labels=self.names)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self.names)
        for values, child in self._children.items():
            below = itertools.accumulate(child.counts)
            family.add_metric(values, list(zip(self._shown, below, strict=True)), child.sum)
            named = dict(zip(self.names, values, strict=True))
            family.add_sample(f"{self._name}_created", named, child.created_s)
        yield family


class Metrics:
    """Every counter of the filter. Labels are pools, workers and words of ours: never anything a caller chose."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counts:
            counts = Counts(f"headway_{name}", text, labels)
            registry.register(counts)
            return counts

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Distributions:
            distributions = Distributions(f"headway_{name}", text, labels, buckets)
            registry.register(distributions)
            return distributions

        def plain(name: str, text: str) -> Counter:
            return Counter(f"headway_{name}", text, registry=registry)

        self.registry = registry
        self.decisions = counter("decisions", "Requests decided", "pool", "outcome")
        self.routed = counter("routed", "Requests routed, by worker and reason", "pool", "worker", "why")
        self.refusals = counter("refusals", "Refusals, and those of shadow mode", "pool", "reason", "carried_out")
        self.unread = counter("refusals_unread", "Requests refused without a look at their prompts", "pool")
        self.refusals_graded = counter(
            "refusals_graded", "Refusals in hindsight", "pool", "reason", "carried_out", "verdict"
        )
        self.admission_steps = counter("admission_steps", "Changes of admission's mode by its guard", "pool", "to")
        self.passed = counter("passed", "Requests passed on without a decision", "reason")
        self.estimated = counter("prompts_estimated", "Prompts estimated from bytes instead of tokenized", "reason")
        self.decision_seconds = histogram(
            "decision_seconds", "From the body received to the decision", _MILLISECONDS, "pool"
        )
        self.ttft = histogram("ttft_seconds", "Actual time to first token", _SECONDS, "pool", "worker")
        self.predicted = histogram(
            "predicted_ttft_seconds", "Predicted, of the same requests", _SECONDS, "pool", "worker"
        )
        self.error = histogram(
            "prediction_error_seconds", "Absolute error of the prediction", _SECONDS, "pool", "worker"
        )
        self.graded = counter(
            "predictions_graded", "Predictions graded, by how far off", "pool", "worker", "within", "basis"
        )
        self.intervals = counter(
            "prediction_intervals", "Predictions graded, by whether their 90 % interval held", "pool", "worker", "held"
        )
        self.bounds = counter("bounds", "Admitted requests with a bound, by whether it was kept", "pool", "kept")
        self.cache = counter("cache_estimates", "Cache credit against reported reuse", "pool", "worker", "verdict")
        self.ungraded = counter("ungraded", "Granted requests that could not be graded", "reason")
        self.retried = plain("requests_retried", "Granted requests that Envoy had to send more than once")
        self.engine_refusals = counter(
            "engine_refusals", "Answers by which an engine said that it is full", "pool", "worker", "status"
        )
        self.undecodable = plain("bodies_undecodable", "Compressed bodies that were not read")
        self.held = counter(
            "held", "Requests held instead of refused at once, by what became of them", "pool", "outcome"
        )
        self.bound_fields = counter(
            "bound_fields",
            "Bodies with max_queue_wait_s for engines that refuse it, by what became of it",
            "pool",
            "result",
        )
        self.ended = counter("requests_ended", "Ends of granted requests, by who told us", "source")
        self.learned = counter("prefill_samples", "Prefills learned from", "pool", "worker")
        self.bugs = counter("bugs", "Faults of ours that were caught at a border", "where")
        self.peer_faults = counter(
            "peer_faults", "Connections and calls ended for what Envoy's side did on them", "what"
        )
        self.access_log_entries = counter("access_log_entries", "Access log entries", "kind")
        self.kv_batches = counter("kv_batches", "Batches of KV events, by what became of them", "worker", "result")
        self.kv_skipped = counter("kv_events_skipped", "KV events not understood", "worker", "reason")
        self.feed_faults = counter("kv_feed_faults", "Gaps, restarts and failed replays", "worker", "kind")
        self.probes = counter("probes", "Probes of engines", "worker", "result")
        self.odd_drafts = counter("odd_drafts", "Pages whose counters of speculative decoding cannot be", "worker")
        self.load_reports = counter("load_reports", "Loads that engines pushed by themselves", "worker", "result")
        # Counted in the recorder's thread as well.
        self.recording_lost = Counter(
            "headway_recording_lost", "Records that are missing in the recording", ("reason",), registry=registry
        )
        self.learned_files = counter("learned_files", "Files of what was learned, by what became of them", "result")
        self.log_dropped = plain("log_lines_dropped", "Log lines dropped because the log could not keep up")

    def grade(self, pool: str, worker: str, basis: str, grade: Grade) -> None:
        error_s = abs(grade.error_s)
        within = "1s" if error_s <= 1 else "10s" if error_s <= 10 else "beyond"
        self.ttft.labels(pool, worker).observe(grade.actual_s)
        self.predicted.labels(pool, worker).observe(grade.predicted_s)
        self.error.labels(pool, worker).observe(error_s)
        self.graded.labels(pool, worker, within, basis).inc()
        self.intervals.labels(pool, worker, "yes" if grade.within_interval else "no").inc()
        if grade.kept_bound is not None:
            self.bounds.labels(pool, "yes" if grade.kept_bound else "no").inc()

    def cache_verdict(self, pool: str, worker: str, verdict: CacheVerdict) -> None:
        self.cache.labels(pool, worker, verdict.value).inc()


class FleetCollector(Collector):
    """Gauges read from the fleet when somebody asks, so that none can drift from what it shows."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float],
        open_streams: Callable[[], int],
        on_fault: Callable[[Exception], None] = lambda fault: None,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._open_streams = open_streams
        self._on_fault = on_fault

    def collect(self) -> Iterable[Metric]:
        try:
            view = self._fleet.view(self._clock())
        except Exception as fault:
            # What counts faults must be there to be read when there is one.
            self._on_fault(fault)
            return
        yield GaugeMetricFamily("headway_tickets_in_flight", "Granted requests in flight", value=self._fleet.in_flight)
        yield GaugeMetricFamily("headway_streams_open", "Open ext_proc streams", value=self._open_streams())
        skipped = CounterMetricFamily(
            "headway_index_skipped", "Blocks the cache index could not use", labels=["reason"]
        )
        for reason, count in self._fleet.skipped_events().items():
            skipped.add_metric([reason], count)
        yield skipped
        pools = view["pools"]
        assert isinstance(pools, dict)
        yield from self._shortcuts(list(pools))
        yield self._corrections(list(pools))
        enforcing = GaugeMetricFamily("headway_admission_enforcing", "1 if refusals are carried out", labels=["pool"])
        for name, pool in pools.items():
            enforcing.add_metric([name], float(pool["admission"]["mode"] == "enforce"))
        yield enforcing
        gauges = {
            "in_flight": "Granted requests in flight",
            "prefill_tokens_ahead": "Prompt tokens that a newcomer would find before it",
            "wait_s": "Predicted wait of a newcomer",
            "cached_blocks": "Blocks known to be cached",
            "up": "1 if the probe reaches the engine",
            "draining": "1 if the worker gets no new requests, so that it becomes empty",
            "feed_trusted": "1 if the cache view is complete (feed is live)",
            "feed_coverage": "Share of the engine's event batches that the cache view follows without a hole",
            "feed_agreement": "Share of the cache view's promises that the engine has kept lately",
            "feed_silent": "1 if the engine serves traffic that must have filled its cache, and sends no events",
        }
        for key, text in gauges.items():
            name = "headway_worker_" + key.removesuffix("_s") + ("_seconds" if key.endswith("_s") else "")
            gauge = GaugeMetricFamily(name, text, labels=["pool", "worker"])
            for pool_name, pool in pools.items():
                for worker_name, worker in pool["workers"].items():
                    gauge.add_metric([pool_name, worker_name], float(worker[key]))
            yield gauge
        budget = GaugeMetricFamily(
            "headway_worker_token_budget_doubt",
            "1 if the engine's steps do not agree with the max_num_batched_tokens that is assumed of it, by how",
            labels=["pool", "worker", "how"],
        )
        for pool_name, pool in pools.items():
            for worker_name, worker in pool["workers"].items():
                for doubt in (BudgetDoubt.EXCEEDED, BudgetDoubt.NEVER_FILLED):
                    doubted = worker["token_budget_doubt"] == doubt.value
                    budget.add_metric([pool_name, worker_name, doubt.value], float(doubted))
        yield budget
        changes = CounterMetricFamily(
            "headway_worker_speed_changes",
            "Times that a worker was found to run at another speed, by what told of it",
            labels=["pool", "worker", "by"],
        )
        for pool_name, pool in pools.items():
            for worker_name, worker in pool["workers"].items():
                for witness, count in worker["cost"]["speed_changes"].items():
                    changes.add_metric([pool_name, worker_name, witness], count)
        yield changes
        feed = GaugeMetricFamily(
            "headway_worker_feed", "1 for the state that the event feed is in", labels=["pool", "worker", "state"]
        )
        for pool_name, pool in pools.items():
            for worker_name, worker in pool["workers"].items():
                for state in Trust:
                    feed.add_metric([pool_name, worker_name, state.value], float(worker["feed"] == state.value))
        yield feed

    def _shortcuts(self, pools: Iterable[str]) -> Iterable[Metric]:
        """What was left out so that no decision takes long."""
        cut = CounterMetricFamily(
            "headway_forecasts_cut", "Forecasts that followed a queue only so far, and then its pace", labels=["pool"]
        )
        stale = CounterMetricFamily(
            "headway_forecasts_stale", "Requests placed by a queue's steps as they were a moment ago", labels=["pool"]
        )
        spans = CounterMetricFamily("headway_forecast_spans", "Spans of steps that decisions listed", labels=["pool"])
        shadows = CounterMetricFamily(
            "headway_shadow_cut", "Times that a worker's steps were followed only so far", labels=["pool", "worker"]
        )
        for pool in pools:
            known = self._fleet.shortcuts(pool)
            cut.add_metric([pool], known.forecasts_cut)
            stale.add_metric([pool], known.forecasts_stale)
            spans.add_metric([pool], known.spans)
            for worker, count in known.shadows_cut.items():
                shadows.add_metric([pool, worker], count)
        yield from (cut, stale, spans, shadows)

    def _corrections(self, pools: Iterable[str]) -> Metric:
        found = CounterMetricFamily(
            "headway_shadow_corrections",
            "Times that a worker's steps were found to be others than they were taken to be",
            labels=["pool", "worker", "kind"],
        )
        for pool in pools:
            for worker, known in self._fleet.corrections(pool).items():
                found.add_metric([pool, worker, "forced"], known.forced)
                found.add_metric([pool, worker, "recomposed"], known.recomposed)
                found.add_metric([pool, worker, "token_held"], known.tokens_held)
        return found
