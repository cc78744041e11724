"""Which tests belong to a run, which may be run a second time in it, and which have the machine to themselves.

`--run-engine`, `--run-clients`: whether tests with these markers, which need what is installed apart, are among them.
Tests of whole processes (a real Envoy, engines) share their machine with whatever else runs there, and have a second go
if they fail; the summary lists who needed one. All others have one. `make test` runs what is marked `alone` after all
else, and one after the other: all end-to-end tests are, and who measures time says so itself.
"""

from pathlib import Path

import hypothesis
import pytest

# How long an example takes, or drawing one, says more of the machine than of the code.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("any machine")

# The marker, and what its tests need.
_APART = {"engine": "a real vLLM (make test-engine)", "clients": "LiteLLM (make test-clients)"}
_WHOLE_PROCESSES = ("e2e", "engine")


def pytest_addoption(parser: pytest.Parser) -> None:
    for marker, needed in _APART.items():
        parser.addoption(f"--run-{marker}", action="store_true", help=f"run the tests that need {needed}")
    parser.addoption(
        "--reduced", action="store_true", help="with --run-engine: fewer requests, none of the tests marked whole"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        if folder in _WHOLE_PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
        if folder == "e2e":
            item.add_marker(pytest.mark.alone)
    left_out = [marker for marker in _APART if not config.getoption(f"--run-{marker}")]
    left_out += ["whole"] if config.getoption("--reduced") else []
    apart = {item for item in items if any(item.get_closest_marker(marker) for marker in left_out)}
    if apart:
        config.hook.pytest_deselected(items=list(apart))
        items[:] = [item for item in items if item not in apart]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test had a second go: its failure would be seen nowhere else."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"first go of {report.nodeid}")
        terminalreporter.line(report.longreprtext)
