"""Prompts whose tokens take longer than Envoy waits for any message: the filter asks it for more time."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from extproc.stack import simulator_folder
from tests.e2e.harness import FULL_DUPLEX, Bench, chat, ext_proc_of, running, send_to, set_modes, until
from tests.e2e.scripted import Scripted, digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGE_TIMEOUT_S = 0.4
MOST_S = 20.0
LARGE_BYTES = 100_000
# Renders for longer than Envoy waits on the fastest of machines, and well within what it is asked for on a slow one.
_SLOW = "{% for i in range(24000) %}{% for j in range(1500) %}{% endfor %}{% endfor %}"


@dataclass(slots=True)
class Slow:
    bench: Bench
    engine: Scripted

    async def post(self, size: int) -> tuple[Any, bytes]:
        body = json.dumps(chat("x" * size)).encode()
        async with self.bench.http.post(self.bench.stack.url + "/v1/chat/completions", data=body) as response:
            await response.read()
            return response, body

    async def only_decision(self) -> dict[str, Any]:
        async def written() -> bool:
            return bool(self.bench.logged("decision"))

        await until(written, 5, "log line of the decision")
        (decision,) = self.bench.logged("decision")
        return decision

    async def timeouts(self) -> int:
        return await self.bench.envoy_stat("http.llm.ext_proc.message_timeouts")

    async def asked(self) -> int:
        return await self.bench.envoy_stat("http.llm.ext_proc.override_message_timeout_received")


async def slow_filter(folder: Path, asks: bool, request_mode: str = "BUFFERED") -> AsyncIterator[Slow]:
    """Reading a chat takes it a second or more; Envoy waits 0.4 s, and allows 20 s to who `asks`."""
    model = folder / "model"
    shutil.copytree(simulator_folder() / "model", model)
    template = model / "chat_template.jinja"
    template.write_text(_SLOW + template.read_text())
    async with Scripted("a") as engine:

        def change(config: dict[str, Any]) -> None:
            send_to(config, engine.port)
            set_modes(config, request_mode, "STREAMED")
            ext_proc_of(config)["message_timeout"] = f"{MESSAGE_TIMEOUT_S}s"
            ext_proc_of(config)["max_message_timeout"] = f"{MOST_S}s"

        overrides = {
            "probe": {"interval_s": 0},
            "gateway": {"max_message_timeout_s": MOST_S if asks else 0},
            "tokenization": {"large_bytes": LARGE_BYTES, "deadline_s": 0.2 if asks else 9.0},
        }
        pool = {"tokenizer": str(model), "workers": [{"name": "a", "endpoint": engine.endpoint}]}
        async with running([], overrides, pool, change, "full_duplex.yaml") as bench:
            yield Slow(bench, engine)


@pytest.mark.parametrize("mode", ["BUFFERED", FULL_DUPLEX])
async def test_a_large_prompt_is_waited_for_and_exact(tmp_path: Path, mode: str) -> None:
    async for slow in slow_filter(tmp_path, asks=True, request_mode=mode):
        response, body = await slow.post(3 * LARGE_BYTES)
        assert (response.status, response.headers.get("x-headway-worker")) == (200, "a")
        assert slow.engine.seen[-1].body_digest == digest(body)
        await slow.bench.settled()
        decision = await slow.only_decision()
        assert decision["estimated"] is None
        assert decision["took_ms"] > 1000 * MESSAGE_TIMEOUT_S, "not slow enough to tell anything"
        assert await slow.timeouts() == 0
        assert await slow.asked() == (mode == "BUFFERED")


async def test_a_small_one_is_estimated_in_time(tmp_path: Path) -> None:
    async for slow in slow_filter(tmp_path, asks=True):
        response, _ = await slow.post(LARGE_BYTES // 3)
        assert (response.status, response.headers.get("x-headway-worker")) == (200, "a")
        await slow.bench.settled()
        decision = await slow.only_decision()
        assert decision["estimated"] == "late"
        assert (await slow.timeouts(), await slow.asked()) == (0, 0)


async def test_without_asking_the_decision_would_come_too_late(tmp_path: Path) -> None:
    """Envoy goes on without it: that is what the asking is for. And nothing is left behind."""
    async for slow in slow_filter(tmp_path, asks=False):
        response, body = await slow.post(3 * LARGE_BYTES)
        assert (response.status, response.headers.get("x-headway-worker")) == (200, None)
        assert slow.engine.seen[-1].body_digest == digest(body)
        assert await slow.timeouts() == 1
        await asyncio.sleep(0)
        await slow.bench.settled(15)
