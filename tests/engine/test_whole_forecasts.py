"""What is promised of forecasts, on whole workloads: the figures of docs/performance.md as a test.

Each row's engine is recorded once and kept beside it, so the first run takes an hour and later ones minutes.
"""

import sys

import pytest

from tests.engine import workloads
from tests.engine.forecast_truth import HOMES, Accuracy, Recording, counted, coverage, observer, record

pytestmark = [pytest.mark.engine, pytest.mark.whole, pytest.mark.timeout(1800)]

# Within 1 s, within 10 s, the median relative error at most.
ROWS = {
    "long 0.8": (0.975, 1.0, 0.005),
    "long 0.8, threshold 2048": (0.75, 0.99, 0.05),
    "long 1.0": (0.70, 1.0, 0.03),
    # 0.50 is wanted.
    "long 1.3": (0.46, 0.98, 0.02),
    "trace 0.8": (0.99, 1.0, 0.005),
    "trace 0.8, threshold 2048": (0.98, 1.0, 0.03),
    "trace 1.3": (0.90, 1.0, 0.02),
    "giants, threshold 1024": (0.995, 1.0, 0.01),
    "decodes, budget 512": (0.995, 1.0, 0.025),
    "decodes, 128 slots, async": (0.48, 0.97, 0.25),
    "storm": (0.28, 0.72, 0.45),
    "sglang trace 1.0": (0.99, 1.0, 0.04),
    "sglang trace 1.3": (0.80, 1.0, 0.03),
    "sglang giants": (0.995, 1.0, 0.04),
    "sglang conversations": (0.995, 1.0, 0.04),
    "sglang decodes": (0.995, 1.0, 0.5),
    "sglang storm": (0.28, 0.70, 0.45),
}
WARM = {
    "decodes, 128 slots, async": (0.57, 0.99, 0.15),
    "storm": (0.55, 0.98, 0.08),
}
# Where engines keep up nine in ten are within the interval; at waits that hang on who ends when, three in four. Of
# SGLang's storm fewer are (65 % as measured), and nothing is promised.
_NINE_IN_TEN = (
    "long 0.8",
    "long 0.8, threshold 2048",
    "long 1.0",
    "long 1.3",
    "trace 0.8, threshold 2048",
    "giants, threshold 1024",
    "decodes, budget 512",
)
_THREE_IN_FOUR = ("trace 1.3", "decodes, 128 slots, async", "storm")
COVERS = dict.fromkeys(_NINE_IN_TEN, (0.86, 0.94)) | dict.fromkeys(_THREE_IN_FOUR, (0.75, 1.0))


def recorded(name: str) -> Recording:
    return record(name, HOMES[workloads.workload(name).engine]() / "recordings")


@pytest.mark.parametrize("name", ROWS)
def test_forecasts_of_whole_workloads_are_as_near_as_promised(name: str) -> None:
    recording = recorded(name)
    watcher = observer(recording)
    for bars in (ROWS[name], WARM.get(name)):
        if bars is None:
            continue
        rest = counted(watcher.play(recording))
        ours = Accuracy.of([(o.predicted_s, o.actual_s) for o in rest])
        covers = coverage(rest)
        sys.stdout.write(f"\n{name}: {ours}, 90 % interval covers {covers:.0%}")
        assert ours.within_1s >= bars[0]
        assert ours.within_10s >= bars[1]
        assert ours.median_ratio <= bars[2]
        if bars is ROWS[name] and name in COVERS:
            least, most = COVERS[name]
            assert least <= covers <= most


@pytest.mark.parametrize("name", [name for name in ROWS if "storm" not in name and "async" not in name])
def test_a_shadow_that_knew_the_future_of_a_whole_workload_would_be_exact(name: str) -> None:
    recording = recorded(name)
    watcher = observer(recording, true_costs=True)
    watcher.clairvoyant_every = 20
    outcomes = counted(watcher.play(recording))
    exact = Accuracy.of(
        [(watcher.clairvoyant[o.number], o.actual_s) for o in outcomes if o.number in watcher.clairvoyant]
    )
    sys.stdout.write(f"\n{name}: clairvoyant p90 {exact.p90_ratio:.3%}")
    assert exact.p90_ratio <= 0.001
