"""What an engine says of itself: whether it is there, how much it has in progress, and how large its cache is.

Asked politely, off the request path: every few seconds, jittered, with a short time box. Nothing waits for a probe.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from http import HTTPStatus

import aiohttp

from extproc.metrics import Metrics
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Ticket
from predictor.prompt import MAX_BLOCK_SIZE

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_MAX_BYTES = 8 << 20
_FAILURES_UNTIL_DOWN = 2
# More than any engine has; what is beyond is no number to reckon with.
_MOST_REQUESTS, _MOST_BLOCKS = 1_000_000, 1_000_000_000
_GAUGE = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^\n]*\})? (\S+)", re.MULTILINE)
_CACHE_CONFIG = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True)
class EngineState:
    """What vLLM's `/metrics` shows; None where it does not."""

    in_progress: int | None
    block_size: int | None
    num_gpu_blocks: int | None


def read_vllm_metrics(text: bytes) -> EngineState:
    """Reads the few lines that matter of vLLM's Prometheus text (names as of 0.10-0.33); ranks are added up."""
    gauges = [_number(value) for value in _GAUGE.findall(text)]
    known = [value for value in gauges if value is not None]
    config = _CACHE_CONFIG.search(text)
    labels = dict(_LABEL.findall(config.group(1))) if config else {}
    return EngineState(
        # A part of the sum would look like less load than there is.
        in_progress=round(sum(known)) if known and len(known) == len(gauges) else None,
        block_size=_count(labels.get(b"block_size"), MAX_BLOCK_SIZE),
        num_gpu_blocks=_count(labels.get(b"num_gpu_blocks"), _MOST_BLOCKS),
    )


def _number(value: bytes) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if 0 <= number <= _MOST_REQUESTS else None


def _count(value: bytes | None, most: int) -> int | None:
    if value is None or len(value) > 18 or not value.isdigit():
        return None
    return int(value) if 0 < int(value) <= most else None


class Probe:
    """Probes one worker until cancelled. `on_ended` is told of tickets that the engine shows to have ended."""

    def __init__(
        self,
        worker: str,
        endpoint: str,
        settings: Settings,
        interval_s: float,
        fleet: Fleet,
        metrics: Metrics,
        on_ended: Callable[[list[Ticket]], None],
        clock: Callable[[], float],
        on_up: Callable[[str, bool], None] = lambda worker, up: None,
        on_settings: Callable[[str, Settings], None] = lambda worker, settings: None,
    ) -> None:
        self._on_settings = on_settings
        self._on_up = on_up
        self._up = True
        self._worker = worker
        self._url = f"http://{endpoint}/metrics"
        self._settings = settings
        self._interval_s = interval_s
        self._fleet = fleet
        self._metrics = metrics
        self._on_ended = on_ended
        self._clock = clock
        self._failures = 0

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            while True:
                try:
                    await self._ask(session)
                except Exception:
                    # Whatever an engine says, it is asked again.
                    self._metrics.bugs.labels("probe").inc()
                await asyncio.sleep(self._interval_s * random.uniform(0.8, 1.2))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        asked_at_s = self._clock()
        try:
            async with session.get(self._url) as response:
                if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    response.raise_for_status()
                # An engine that shows no metrics is there all the same.
                text = await _page(response) if response.status == HTTPStatus.OK else b""
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._failures += 1
            self._metrics.probes.labels(self._worker, "failed").inc()
            if self._failures >= _FAILURES_UNTIL_DOWN:
                self._set_up(False)
            return
        self._failures = 0
        self._metrics.probes.labels(self._worker, "ok").inc()
        self._set_up(True)
        self._take_in(read_vllm_metrics(text), asked_at_s)

    def _set_up(self, up: bool) -> None:
        self._fleet.set_up(self._worker, up)
        if up != self._up:
            self._up = up
            self._on_up(self._worker, up)

    def _take_in(self, state: EngineState, asked_at_s: float) -> None:
        reported = replace(
            self._settings,
            block_size=state.block_size or self._settings.block_size,
            num_gpu_blocks=state.num_gpu_blocks or self._settings.num_gpu_blocks,
        )
        if reported != self._settings:
            self._settings = reported
            self._fleet.configure(self._worker, reported)
            self._on_settings(self._worker, reported)
        if state.in_progress is not None:
            self._on_ended(self._fleet.observe_load(self._worker, state.in_progress, asked_at_s, self._clock()))


async def _page(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, or nothing where it is larger than any page of metrics: half of one would tell half the load."""
    page = bytearray()
    async for piece in response.content.iter_any():
        page += piece
        if len(page) > _MAX_BYTES:
            return b""
    return bytes(page)
