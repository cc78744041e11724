"""A fault in what is shown of the fleet: whoever runs it finds it counted and in the log."""

import json

import aiohttp
import pytest

from extproc.app import App
from extproc.config import parse_config
from tests.extproc.test_ranks import CONFIG


@pytest.mark.parametrize(("page", "status"), [("fleet", 500), ("metrics", 200)])
async def test_a_fleet_that_cannot_be_shown_is_counted_and_logged_with_its_trace(
    page: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = App(parse_config(CONFIG.format(endpoint="127.0.0.1:9", more=""), "test"))
    _, admin = await app.start()
    try:
        monkeypatch.setattr(app._fleet, "view", lambda now_s: 1 / 0)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{admin}") as http:
            async with http.get(f"/{page}") as response:
                assert response.status == status
            async with http.get("/metrics") as response:
                counted = [line for line in (await response.text()).splitlines() if 'where="fleet_view"' in line]
    finally:
        await app.stop()
    assert any(line.endswith((" 1.0", " 2.0")) for line in counted), counted
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if '"event":"bug"' in line]
    assert {line["where"] for line in lines} == {"fleet_view"}
    assert "ZeroDivisionError" in lines[0]["trace"]
