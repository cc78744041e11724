"""docs/metrics.md lists what the filter exports, and nothing else."""

import enum
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client import CollectorRegistry, Counter

from extproc.answer import AnswerKind
from extproc.app import App
from extproc.config import parse_config
from extproc.metrics import Counts, Distributions
from extproc.prompt_reader import Estimated
from extproc.request_reader import Cut
from extproc.session import Passed
from predictor.admission import Reason
from predictor.budget_check import BudgetDoubt
from predictor.feed_state import Trust
from predictor.grading import CacheVerdict
from predictor.hindsight import Verdict
from predictor.prefill_cost import Basis
from predictor.routing import Why

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(headway_\w+)` \| (\w+) \| ([^|]*)\| (.+) \|$", re.MULTILINE)
ENVOYS = {"headway_access_log"}  # a cluster's name
LIBRARYS_OWN = ("process_", "python_")


class Known(NamedTuple):
    kind: str
    labels: tuple[str, ...]


@pytest.fixture
async def registry() -> AsyncIterator[CollectorRegistry]:
    app = App(parse_config("pools: [{name: p}]", "f"))
    yield app._metrics.registry
    await app.abandon()


def exported(registry: CollectorRegistry) -> dict[str, Known]:
    """By the name that Prometheus shows."""
    found = {}
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if isinstance(collector, Counts | Distributions):
                labels = collector.names
            elif isinstance(collector, Counter):
                labels = tuple(collector._labelnames)
            else:
                labels = tuple(getattr(family, "_labelnames", ()))
            name = f"{family.name}_total" if family.type == "counter" else family.name
            found[name] = Known(family.type, labels)
    return found


def listed() -> dict[str, Known]:
    rows = ROW.findall(PAGE.read_text())
    assert len({name for name, *_ in rows}) == len(rows)
    return {name: Known(kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}


async def test_every_metric_is_listed_with_its_type_and_labels_and_no_other(registry: CollectorRegistry) -> None:
    ours = {name: known for name, known in exported(registry).items() if not name.startswith(LIBRARYS_OWN)}
    assert len(ours) > 50
    assert listed() == ours


async def test_what_is_not_ours_is_said_to_be_the_librarys(registry: CollectorRegistry) -> None:
    assert any(name.startswith(LIBRARYS_OWN) for name in exported(registry))
    text = PAGE.read_text()
    assert all(f"`{prefix}*`" in text for prefix in LIBRARYS_OWN)


def test_what_to_alert_on_names_only_what_is_listed_and_labels_that_it_has() -> None:
    alerts = PAGE.read_text().split("## ")[1]
    named = re.findall(r"(headway_\w+)(?:\{(\w+)[!=~]+\"[^}]*\})?", alerts)
    assert len(named) >= 10
    known = listed()
    for name, label in named:
        assert name in known
        assert not label or label in known[name].labels


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("headway_routed_total", Why),
        ("headway_refusals_total", Reason),
        ("headway_refusals_graded_total", Verdict),
        ("headway_passed_total", Passed),
        ("headway_prompts_estimated_total", Estimated),
        ("headway_bound_fields_total", Cut),
        ("headway_predictions_graded_total", Basis),
        ("headway_cache_estimates_total", CacheVerdict),
        ("headway_ungraded_total", AnswerKind),
        ("headway_worker_feed", Trust),
        ("headway_worker_token_budget_doubt", BudgetDoubt),
    ],
)
def test_every_word_of_a_label_is_explained(name: str, words: type[enum.Enum]) -> None:
    (meaning,) = [meaning for listed_name, _, _, meaning in ROW.findall(PAGE.read_text()) if listed_name == name]
    said = {word.value for word in words} - {BudgetDoubt.NONE.value, AnswerKind.STREAMED.value}
    assert said <= set(re.findall(r"`(\w+)`", meaning))


@pytest.mark.parametrize(
    "path", sorted((PAGE.parents[1]).glob("*.md")) + sorted(PAGE.parent.glob("*.md")), ids=lambda p: p.name
)
def test_no_page_names_a_metric_that_is_not_listed(path: Path) -> None:
    for name in re.findall(r"`(headway_\w+)", path.read_text()):
        assert name in listed() or name in ENVOYS
