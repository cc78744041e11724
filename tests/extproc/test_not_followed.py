"""An engine that schedules otherwise than its queue is replayed is named to the operator, once."""

import asyncio
import json
import time

import pytest

from tests.extproc.test_probe import Pages
from tests.extproc.test_ranks import running


async def test_settings_that_are_not_followed_are_logged_when_they_change(capfd: pytest.CaptureFixture[str]) -> None:
    info = {"max_total_num_tokens": 64000, "dp_size": 1, "schedule_policy": "lof", "enable_priority_scheduling": True}
    async with Pages(server_info=info, v1__loads={"loads": []}) as engine, running(engine.endpoint):
        deadline_s, said = time.monotonic() + 20, ""
        while "engine_settings_not_followed" not in said:
            assert time.monotonic() < deadline_s, said
            await asyncio.sleep(0.05)
            said += capfd.readouterr().err
    told = [json.loads(line) for line in said.splitlines() if "engine_settings_not_followed" in line]
    assert [(line["worker"], line["settings"]) for line in told] == [
        ("a", ["schedule_policy=lof", "enable_priority_scheduling"])
    ]
