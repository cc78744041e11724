"""How good predictions have been since a filter was started, as its metrics tell it: a table for people."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0
_Counts = Mapping[tuple[str, str], Mapping[str, float]]


class NoReport(OSError):
    """The filter could not be asked, or what answered is none."""


def fetch_metrics(admin_url: str) -> str:
    """Raises NoReport."""
    url = admin_url.rstrip("/") + "/metrics"
    if not url.startswith(("http://", "https://")):
        raise NoReport(f"{admin_url!r}: expected http://HOST:PORT of a filter's admin port")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except (urllib.error.URLError, OSError, ValueError) as fault:
        raise NoReport(f"{url}: {fault}") from fault
    return text


def report(metrics: str) -> str:
    """The table. Raises NoReport for a page that is not a filter's."""
    try:
        families = {family.name: family for family in text_string_to_metric_families(metrics)}
    except ValueError as fault:
        raise NoReport(f"no page of metrics: {fault}") from fault
    if "headway_predictions_graded" not in families:
        raise NoReport("no page of a filter's metrics: it has no headway_predictions_graded")

    def counts(name: str, label: str) -> _Counts:
        found: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        if name in families:
            for sample in families[name].samples:
                if sample.name.endswith("_total"):
                    worker = sample.labels.get("pool", ""), sample.labels.get("worker", "")
                    found[worker][sample.labels.get(label, "")] += sample.value
        return found

    graded, held = counts("headway_predictions_graded", "within"), counts("headway_prediction_intervals", "held")
    cache = counts("headway_cache_estimates", "verdict")
    lines = [f"{'pool / worker':<40}{'graded':>8}{'<= 1 s':>9}{'<= 10 s':>9}{'interval':>10}{'cache right':>13}"]
    for pool in sorted({pool for pool, _ in graded}):
        workers = sorted(worker for other, worker in graded if other == pool)
        rows = {worker: [(pool, worker)] for worker in workers}
        lines.append(_row(pool, [(pool, worker) for worker in workers], graded, held, cache))
        lines += [_row(f"  {worker}", keys, graded, held, cache) for worker, keys in rows.items()]
    if not graded:
        lines.append("nothing has been graded yet")
    return "\n".join(lines)


def _row(name: str, keys: list[tuple[str, str]], graded: _Counts, held: _Counts, cache: _Counts) -> str:
    def total(counts: _Counts, *labels: str) -> float:
        return sum(counts[key].get(label, 0.0) for key in keys if key in counts for label in labels)

    def share(part: float, whole: float) -> str:
        return f"{part / whole:.1%}" if whole else "-"

    within = total(graded, "1s"), total(graded, "1s", "10s")
    whole = total(graded, "1s", "10s", "beyond")
    return (
        f"{name:<40}{whole:>8.0f}{share(within[0], whole):>9}{share(within[1], whole):>9}"
        f"{share(total(held, 'yes'), total(held, 'yes', 'no')):>10}"
        f"{share(total(cache, 'right'), total(cache, 'right', 'over', 'under')):>13}"
    )
