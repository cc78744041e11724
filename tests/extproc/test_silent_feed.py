"""An engine that serves and never says what it caches: whoever looks is told."""

import asyncio
import time

import aiohttp
import pytest

from extproc.app import App
from extproc.config import parse_config
from predictor.fleet import Usage, Wish
from predictor.prompt import Prompt
from tests.extproc.test_ranks import CONFIG, workers
from tests.fakes.kv_publisher import FakePublisher
from tests.fakes.waiting import until


async def test_a_silent_engine_is_an_alarm_in_the_log_the_metrics_and_the_fleet_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("extproc.app._HOUSEKEEPING_S", 0.01)
    async with FakePublisher() as publisher:
        feed = f"kv_events: {publisher.endpoint}\n    kv_replay: {publisher.replay_endpoint}"
        app = App(parse_config(CONFIG.format(endpoint="127.0.0.1:9", more=feed), "test"))
        _, admin = await app.start()
        try:
            await _until_live(admin)
            for number in range(20):
                name = str(number)
                app._fleet.place("m", Prompt(1000, True, {}), Wish(name, 0.0), 0.0)
                app._fleet.first_token(name, None, 0.1)
                app._fleet.finish(name, Usage(1000, 0, 1), 0.2)
            seen = await workers(admin)
            assert (seen["a"]["feed"], seen["a"]["feed_coverage"], seen["a"]["feed_silent"]) == ("live", 1.0, True)
            async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{admin}/metrics") as response:
                page = (await response.text()).splitlines()
            assert 'headway_worker_feed_silent{pool="m",worker="a"} 1.0' in page
            assert 'headway_worker_feed{pool="m",state="live",worker="a"} 1.0' in page
            await until(lambda: bool(app._silent))
            await asyncio.sleep(0.1)  # more looks, and no second line
        finally:
            await app.stop()
    assert sum('"feed_silent"' in line for line in capsys.readouterr().err.splitlines()) == 1


async def _until_live(admin: int) -> None:
    deadline_s = time.monotonic() + 20
    while (await workers(admin))["a"]["feed"] != "live":
        assert time.monotonic() < deadline_s, await workers(admin)
        await asyncio.sleep(0.01)
