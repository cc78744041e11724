"""The step rule against SGLang's own scheduler, step by step: who is in each, with how many tokens, and when."""

from pathlib import Path

import pytest

from tests.engine.forecast_truth import Recording, observer, record
from tests.engine.replayed_steps import Composed, Replay
from tests.engine.workloads import NAMES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

BURSTS = [name for name in NAMES if name.startswith("sglang bursts")]


def prefill_starts(recording: Recording) -> dict[int, list[tuple[int, int]]]:
    """Of each request, in which steps it was prefilled, and from which token on."""
    starts: dict[int, list[tuple[int, int]]] = {}
    for place, (_, _, chunks, _) in enumerate(recording.steps):
        for number, start, _ in chunks:
            starts.setdefault(number, []).append((place, start))
    return starts


@pytest.mark.parametrize("name", BURSTS)
def test_every_step_is_the_one_that_sglang_takes(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    recording = record(name, tmp_path, 80 if request.config.getoption("--reduced") else None)
    settings = observer(recording).settings
    replay = Replay(recording.work, settings, prefill_starts(recording))
    steps = [Composed(start_s, chunks, decoding) for start_s, _, chunks, decoding in recording.steps]
    for place, (ours, theirs) in enumerate(zip(replay.steps(), steps, strict=True)):
        assert (ours.chunks, ours.decoding) == (theirs.chunks, theirs.decoding), f"step {place} at {theirs.starts_s}"
        assert ours.starts_s == pytest.approx(theirs.starts_s, abs=1e-6)
