"""Simulated engines as processes, started once a module."""

from collections.abc import Iterator

import pytest

from enginesim.process import EngineProcess


@pytest.fixture(scope="module")
def fast_engine() -> Iterator[EngineProcess]:
    """An engine whose steps take about a millisecond."""
    flags = ("--step-ms", "1", "--prefill-us-per-token", "1", "--prefill-ns-per-token2", "0", "--decode-ms", "0.01")
    with EngineProcess("--name", "fast", *flags) as engine:
        yield engine
