"""A minute and a quarter of `tests/chaos.py`; ten minutes are `make chaos`."""

import random

import pytest

from tests import chaos


@pytest.mark.timeout(240)
async def test_no_client_sees_what_it_would_not_see_without_the_filter() -> None:
    report = await chaos.play(75, random.SystemRandom().randrange(2**32))
    print(report)  # noqa: T201 - shown when it fails, seed and all
    assert report.wrong == [], str(report)
    assert report.complete > 0.9 * report.requests
    assert report.decided > 0.2 * report.complete
    assert sum(report.excused.values()) < 0.1 * report.requests
    assert sum(report.faults.values()) >= 10
