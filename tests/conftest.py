"""Which tests belong to a run, and which may be run a second time in it.

`--run-engine`: whether tests that are marked `engine`, and so need a real vLLM, are among them. Tests of whole
processes (a real Envoy, engines) share their machine with whatever else runs there, and have a second go if they fail;
the summary lists who needed one. All others have one.
"""

from pathlib import Path

import pytest

_WHOLE_PROCESSES = ("e2e", "engine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-engine", action="store_true", help="run the tests that need a real vLLM (make test-engine)")
    parser.addoption("--reduced", action="store_true", help="with --run-engine: fewer requests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in _WHOLE_PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("--run-engine"):
        return
    others = [item for item in items if item.get_closest_marker("engine") is None]
    if len(others) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("engine")])
        items[:] = others
