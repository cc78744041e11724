"""A short piece of `make chaos`, by the same rules, so that a fault in it or in them is found before the long run."""

import random
from collections.abc import Callable

import pytest

from tests import chaos


@pytest.mark.timeout(180)
async def test_half_a_minute_of_chaos(record_property: Callable[[str, object], None]) -> None:
    seed = random.SystemRandom().randrange(2**32)
    report = await chaos.play(25, seed)
    record_property("chaos", str(report))
    assert not report.wrong, str(report)
    # It was chaos, and there was life in it.
    assert sum(report.faults.values()) >= 5, str(report)
    assert report.complete >= 200, str(report)
    assert report.decided >= 50, str(report)
