"""LiteLLM between a caller and Headway: does it hear a refusal, come back when told, and fall back at once?"""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from extproc import replies
from extproc.apis import openai_chat
from predictor.admission import Limits, OnReject, Reason, Refusal, RetryAfter
from predictor.forecast import Forecast
from predictor.prefill_cost import Basis

pytestmark = pytest.mark.clients

WAIT = Forecast("a", 100, 64, 0.5, 41.25, 1.0, 0.25, 43.0, Basis.CURVE, 9000, exact_tokens=True)
HOME = Path(os.environ.get("HEADWAY_CLIENTS_HOME", Path.home() / ".cache/headway-clients"))
# Its list of prices is fetched from the internet otherwise, at every start.
ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}


class Gateways:
    """Headway, which refuses everything, and another provider, which answers."""

    def __init__(self) -> None:
        self.on_reject = OnReject.RETRY
        self.retry = RetryAfter(1.3, 1.3)
        self.refused_at_s: list[float] = []
        self.url = ""

    async def refuse(self, request: web.Request) -> web.Response:
        del request
        self.refused_at_s.append(asyncio.get_running_loop().time())
        refusal = Refusal(Reason.QUEUE_WAIT, Limits(10.0), self.retry, WAIT, (WAIT,))
        reply = replies.shed(refusal, openai_chat.API, self.on_reject)
        return web.Response(status=reply.status, headers=dict(reply.headers), body=reply.body)

    async def answer(self, request: web.Request) -> web.Response:
        del request
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "other", "choices": [choice]}
        )

    async def ask(self, **arguments: Any) -> dict[str, Any]:
        asked = {"model": "openai/m", "api_base": f"{self.url}/v1", **arguments}
        command = [str(HOME / "venv/bin/python"), str(Path(__file__).with_name("ask_litellm.py")), json.dumps(asked)]
        run = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT
        )
        assert run.returncode == 0, run.stderr
        told: dict[str, Any] = json.loads(run.stdout)
        return told


@pytest.fixture
async def gateways() -> AsyncIterator[Gateways]:
    gateways = Gateways()
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/chat/completions", gateways.refuse),
            web.post("/elsewhere/chat/completions", gateways.answer),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gateways.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield gateways
    await runner.cleanup()


async def test_it_comes_back_as_it_is_told_and_gives_up_with_a_rate_limit(gateways: Gateways) -> None:
    told = await gateways.ask()
    assert (told["error"], told["status"], told["retry_after_ms"]) == ("RateLimitError", 429, "1300")
    assert "No worker can start this request within max_queue_wait_s" in told["message"]
    assert len(gateways.refused_at_s) == 3
    # Its own back-off would be below 0.6 s at first.
    assert all(later - earlier >= 1.25 for earlier, later in pairwise(gateways.refused_at_s))


async def test_it_raises_at_once_when_it_is_told_not_to_retry(gateways: Gateways) -> None:
    gateways.on_reject = OnReject.FAIL
    told = await gateways.ask()
    assert (told["error"], told["status"]) == ("RateLimitError", 429)
    assert len(gateways.refused_at_s) == 1


async def test_its_fallbacks_act_on_a_refusal_without_waiting(gateways: Gateways) -> None:
    gateways.on_reject, gateways.retry = OnReject.FAIL, RetryAfter(60.0, 300.0)
    elsewhere = {"model": "openai/other", "api_base": f"{gateways.url}/elsewhere"}
    told = await gateways.ask(fallbacks=[elsewhere])
    assert (told.get("model"), told.get("text")) == ("other", "hello"), told
    assert len(gateways.refused_at_s) == 1
    assert told["took_s"] < 30
