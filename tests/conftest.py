"""`--run-engine`: whether tests that are marked `engine`, and so need a real vLLM, belong to this run."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-engine", action="store_true", help="run the tests that need a real vLLM (make test-engine)")
    parser.addoption("--reduced", action="store_true", help="with --run-engine: fewer requests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--run-engine"):
        return
    others = [item for item in items if item.get_closest_marker("engine") is None]
    if len(others) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("engine")])
        items[:] = others
