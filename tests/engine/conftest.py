"""Real vLLM engines, started as seldom as the tests allow: each takes half a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.harness import EngineSettings, RealEngine


@pytest.fixture(scope="session")
def log_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Of engines in virtual time, shared by the processes of a run: each workload is played once."""
    own = tmp_path_factory.getbasetemp()
    return (own if worker_id == "master" else own.parent) / "recordings"


@pytest.fixture(scope="session")
def engine(log_folder: Path) -> Iterator[RealEngine]:
    """With room for much, and vLLM's own default of no cap on a chunk."""
    with RealEngine(log_folder, EngineSettings()) as running:
        yield running
