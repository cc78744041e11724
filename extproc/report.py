"""How good predictions have been since a filter was started, as its metrics tell it: a table for people."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 10.0
_EXAMPLE = "http://127.0.0.1:9464"
_NOBODY = "is a filter running there? Its admin port is `listen.admin` in its config, and is named when it starts"
_NOT_ONE = "this is not a filter's admin port. That is `listen.admin` in its config, 9464 if it says nothing"
_Counts = Mapping[tuple[str, str], Mapping[str, float]]


class NoReport(OSError):
    """The filter could not be asked, or what answered is none."""


def fetch_metrics(admin_url: str) -> str:
    """Raises NoReport."""
    base = admin_url.rstrip("/").removesuffix("/metrics").removesuffix("/fleet")
    if not base.startswith(("http://", "https://")):
        raise NoReport(f"{admin_url!r}: expected http://HOST:PORT of a filter's admin port, such as {_EXAMPLE}")
    url = base + "/metrics"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except urllib.error.HTTPError as fault:
        if fault.code >= http.HTTPStatus.INTERNAL_SERVER_ERROR:
            raise NoReport(f"{url}: status {fault.code}: the filter's log has the fault (`event` `bug`)") from fault
        raise NoReport(f"{url}: status {fault.code}: {_NOT_ONE}") from fault
    except urllib.error.URLError as fault:
        raise NoReport(f"{url}: {fault.reason}: {_NOBODY}") from fault
    except TimeoutError as fault:
        raise NoReport(f"{url}: no answer within {_TIMEOUT_S:g} s: {_NOT_ONE}") from fault
    except (http.client.HTTPException, OSError, ValueError) as fault:
        raise NoReport(f"{url}: {str(fault) or type(fault).__name__}: {_NOT_ONE}") from fault
    return text


def report(metrics: str) -> str:
    """The table. Raises NoReport for a page that is not a filter's."""
    try:
        families = {family.name: family for family in text_string_to_metric_families(metrics)}
    except ValueError as fault:
        raise NoReport(f"no page of metrics ({fault}): {_NOT_ONE}") from fault
    if "headway_predictions_graded" not in families:
        raise NoReport(f"no page of a filter's metrics, which would have headway_predictions_graded: {_NOT_ONE}")

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
