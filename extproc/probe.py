"""Asks one engine how it is: whether it is there, how much it has in progress, what it is and how large its cache is.

Politely and off the request path: every few seconds, jittered, with a short time box, and the pages that hardly ever
change once a minute. Nothing waits for a probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import aiohttp

from extproc.config import without_others
from extproc.engine_pages import (
    About,
    RankState,
    merged,
    read_sglang_info,
    read_sglang_loads,
    read_vllm_about,
    read_vllm_metrics,
)
from extproc.metrics import Metrics
from predictor.engines.vllm import Drafting, Settings
from predictor.fleet import Fleet, Ticket

_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
_MAX_BYTES = 8 << 20
_FAILURES_UNTIL_DOWN = 2
# One lost answer is no proof, and a hung engine takes requests meanwhile.
_AGAIN_S = 0.5
# One that is down is asked at least as often: it comes back at any moment, and its feed some seconds before its pages.
_DOWN_AGAIN_S = 2.0
_ABOUT_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Watchers:
    """Who is told what a probe finds. Workers are named, not endpoints."""

    ended: Callable[[list[Ticket]], None]  # tickets that the engine shows to have ended
    up: Callable[[str, bool], None] = lambda worker, up: None
    settings: Callable[[str, Settings], None] = lambda worker, settings: None
    drafting: Callable[[str, Drafting], None] = lambda worker, drafting: None
    restarted: Callable[[str], None] = lambda worker: None  # counters fell back, or it says so
    about: Callable[[About], None] = lambda about: None


class Probe:
    """Probes one endpoint until cancelled. `workers` are its data-parallel ranks; None stands for all of them.

    `settings` are what is known of it before it is asked, of which those `left_open` are no more than usual.
    """

    def __init__(
        self,
        workers: Mapping[int | None, str],
        endpoint: str,
        settings: Settings,
        interval_s: float,
        fleet: Fleet,
        metrics: Metrics,
        clock: Callable[[], float],
        watchers: Watchers,
        left_open: frozenset[str] = frozenset(),
    ) -> None:
        self._workers = dict(workers)
        self._base = f"http://{endpoint}"
        self._host = endpoint.rpartition(":")[0]
        self._settings = dict.fromkeys(self._workers.values(), settings)
        self._left_open = left_open
        self._interval_s = interval_s
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._watchers = watchers
        self._up = dict.fromkeys(self._workers.values(), True)
        self._failures = 0
        self._urgent = asyncio.Event()
        self._about: About | None = None
        self._about_at_s: float | None = None
        self._sglang = False
        self._fingerprint: tuple[object, ...] | None = None
        self._done: dict[int, float] = {}
        self._heard: dict[int, float] = {}

    async def run(self) -> None:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as session:
            while True:
                self._urgent.clear()
                try:
                    await self._ask(session)
                except Exception:
                    # Whatever an engine says, it is asked again.
                    self._metrics.bugs.labels("probe").inc()
                pause_s = self._interval_s * random.uniform(0.8, 1.2)
                if self._failures:
                    pause_s = min(pause_s, _AGAIN_S if self._failures < _FAILURES_UNTIL_DOWN else _DOWN_AGAIN_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._urgent.wait()

    def nudge(self) -> None:
        """Something else has seen the engine go: ask now."""
        self._urgent.set()

    def hear(self, rank: int | None, state: RankState, since_s: float) -> None:
        """A rank's own word on its load between two looks, counted at `since_s` or later."""
        worker = self._workers.get(rank)
        if worker is None:
            return
        # Told apart from what pages say: one may be older than the other, and come later.
        if _fell_back({rank or 0: state}, self._heard):
            self._watchers.restarted(worker)
            self.nudge()
        elif state.in_progress is not None:
            self._watchers.ended(self._fleet.observe_load(worker, state.in_progress, since_s, self._clock()))

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        asked_at_s = self._clock()
        try:
            text = await self._page(session, "/v1/loads" if self._sglang else "/metrics")
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._failures += 1
            for worker in self._workers.values():
                self._metrics.probes.labels(worker, "failed").inc()
                if self._failures >= _FAILURES_UNTIL_DOWN:
                    self._set_up(worker, False)
            return
        self._failures = 0
        states = read_sglang_loads(text or b"") if self._sglang else read_vllm_metrics(text or b"")
        restarted = _fell_back(states, self._done)
        if restarted or self._about_at_s is None or asked_at_s - self._about_at_s > _ABOUT_EVERY_S:
            self._about_at_s = asked_at_s
            restarted |= await self._ask_about(session, 0 if self._sglang else len(states))
        for rank, worker in self._workers.items():
            self._metrics.probes.labels(worker, "ok").inc()
            state = merged(states.values()) if rank is None else states.get(rank, RankState())
            self._take_in(worker, state, asked_at_s)
            if restarted:
                self._watchers.restarted(worker)

    async def _ask_about(self, session: aiohttp.ClientSession, vllm_ranks: int) -> bool:
        """What hardly ever changes; True if it shows another life of the engine."""
        about: About | None = None
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            info = await self._page(session, "/server_info?config_format=json")
            about = read_sglang_info(info or b"", self._host)
            self._sglang = about is not None and not vllm_ranks
            if about is None and vllm_ranks:
                version = await self._page(session, "/version")
                models = await self._page(session, "/v1/models")
                sources = await self._page(session, "/kv_event_sources")
                about = read_vllm_about(version, models, sources, info, self._host)
                about = replace(about, ranks=about.ranks or vllm_ranks)
        if about is None:
            return False
        before, self._about = self._about, about
        fingerprint = (about.version, about.models, tuple(sorted(about.settings.items())))
        if self._fingerprint is not None and fingerprint != self._fingerprint:
            # Another version or another model under the same address is another engine.
            for worker in self._workers.values():
                self._fleet.forget(worker)
        self._fingerprint = fingerprint
        self._watchers.about(about)
        return before is not None and before.life != about.life

    async def _page(self, session: aiohttp.ClientSession, path: str) -> bytes | None:
        """None where there is no such page: an engine without it is there all the same."""
        async with session.get(self._base + path) as response:
            if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                response.raise_for_status()
            return await _whole(response) if response.status == HTTPStatus.OK else None

    def _set_up(self, worker: str, up: bool) -> None:
        self._fleet.set_up(worker, up)
        if up != self._up[worker]:
            self._up[worker] = up
            self._watchers.up(worker, up)

    def _take_in(self, worker: str, state: RankState, asked_at_s: float) -> None:
        if not state.awake and self._up[worker]:
            self._fleet.clear(worker)  # falling asleep empties a cache, and the event comes with the next step
        self._set_up(worker, state.awake)
        told: dict[str, Any] = {}
        if self._about is not None:
            told = {name: value for name, value in self._about.usual.items() if name in self._left_open}
            told |= self._about.settings
        told |= {
            name: value
            for name, value in (("block_size", state.block_size), ("num_gpu_blocks", state.num_gpu_blocks))
            if value is not None
        }
        reported = replace(self._settings[worker], **told)
        if "family" in told:
            reported = without_others(reported)
        if reported != self._settings[worker]:
            self._settings[worker] = reported
            if self._fleet.configure(worker, reported):
                self._watchers.settings(worker, reported)
        if state.odd_drafts:
            self._metrics.odd_drafts.labels(worker).inc()
        elif not self._sglang and state.in_progress is not None:
            drafting = self._fleet.observe_drafts(worker, state.drafts)
            if drafting is not None:
                self._watchers.drafting(worker, drafting)
        if state.in_progress is not None:
            self._watchers.ended(self._fleet.observe_load(worker, state.in_progress, asked_at_s, self._clock()))


def _fell_back(states: Mapping[int, RankState], done: dict[int, float]) -> bool:
    """Counters only fall back in another process. `done` is what they were by rank, and is brought up to date."""
    back = False
    for rank, state in states.items():
        if state.tokens_done is not None:
            back |= state.tokens_done < done.get(rank, 0.0)
            done[rank] = state.tokens_done
    return back


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """The whole body, or nothing where it is larger than any page of metrics: half of one would tell half the load."""
    page = bytearray()
    async for piece in response.content.iter_any():
        page += piece
        if len(page) > _MAX_BYTES:
            return b""
    return bytes(page)
