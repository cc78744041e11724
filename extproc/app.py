"""The composition root: every object of the service is made here, once, and stopped here, in order."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import zmq.asyncio
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from extproc.admin import Admin
from extproc.config import Config, PoolConfig, Recording, WorkerConfig, notes, port_of_rank
from extproc.engine_pages import About, Events
from extproc.holding import Holding
from extproc.judge import Judge, Pool
from extproc.kv_feed import REPLAYS_AT_ONCE, KvFeed
from extproc.learned_store import LearnedStore
from extproc.ledger import Ledger
from extproc.load_feed import LoadFeed
from extproc.log import JsonLog
from extproc.metrics import FleetCollector, Metrics
from extproc.model_files import load_pool_text
from extproc.probe import Probe, Watchers
from extproc.prompt_reader import PromptReader
from extproc.recorder import Recorder, open_recording
from extproc.request_reader import RequestReader
from extproc.server import AccessLog, Processor, Server
from extproc.session import Patience
from predictor.admission import AdmissionPolicy, Mode, OnReject, RetryPolicy
from predictor.budget_check import BudgetDoubt
from predictor.engines.vllm import Drafting, Settings
from predictor.fairness import FairnessPolicy
from predictor.feed_state import Trust
from predictor.fleet import Fleet, PoolPolicy, Ticket, WorkerSpec
from predictor.hindsight import GuardPolicy
from predictor.prefill_cost import LearningPolicy
from predictor.prompt import BlockHasher
from predictor.routing import Prefer, RoutingPolicy
from predictor.waiting_room import HoldPolicy

_HOUSEKEEPING_S = 1.0
# A replay of 10,000 batches takes about as long; on a busy machine one that is under way may take longer.
_FIRST_REPLAYS_S, _LONGEST_REPLAYS_S = 2.0, 10.0
# Before background work that failed by a fault of ours begins again.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(slots=True)
class _Engine:
    """One endpoint, the workers that it is, and what runs for it."""

    pool: str
    config: WorkerConfig
    names: dict[int | None, str]  # by data-parallel rank; None: all of them as one
    feeds: dict[str, KvFeed] = field(default_factory=dict)
    load_feeds: dict[str, LoadFeed] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    probe: Probe | None = None
    draining: bool = False
    not_followed: tuple[str, ...] = ()

    def contact(self, up: bool) -> None:
        """A feed has found its engine, or lost it: either way its pages have news."""
        del up
        if self.probe is not None:
            self.probe.nudge()


class App:
    """The service. `start` raises OSError when a port cannot be had, and BadModelFiles for a tokenizer."""

    def __init__(self, config: Config) -> None:
        clock = time.monotonic
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        metrics = Metrics(registry)
        log = JsonLog(dropped=metrics.log_dropped.inc)
        # Drawn, not seeded: nobody outside may be able to aim for a hash collision or guess a tie.
        rng = np.random.default_rng(secrets.randbits(128))
        hasher = BlockHasher(rng)
        fleet = Fleet([pool_policy(pool) for pool in config.pools], hasher, rng)
        recorder = _recorder(config.recording, clock, hasher, metrics)
        ledger = Ledger(fleet, metrics, log, clock, recorder)
        tokenization = config.tokenization
        reader = PromptReader(
            hasher,
            tokenization.threads,
            tokenization.max_pending,
            tokenization.deadline_s,
            self._late_fault,
            tokenization.inline_bytes,
            keep_tokens=recorder is not None and recorder.keep_tokens,
            patient_deadline_s=config.large_deadline_s,
        )
        pools = {}
        for pool in config.pools:
            text = load_pool_text(None if pool.tokenizer is None else Path(pool.tokenizer))
            judged = Pool(
                pool.name,
                text,
                pool.scores,
                OnReject(pool.admission.on_reject),
                pool.fairness.enabled,
                pool.adapter_names,
                config.gateway.original_dst,
                pool.admission.remove_bound_field,
            )
            pools.update(dict.fromkeys((*pool.model_names, *pool.adapter_names), judged))
        requests = RequestReader(tokenization.threads, tokenization.deadline_s, config.large_deadline_s)
        gateway = config.gateway
        holds = {
            pool.name: HoldPolicy(pool.admission.hold_s, pool.admission.hold_requests, pool.admission.hold_mb << 20)
            for pool in config.pools
            if pool.admission.hold_s > 0
        }
        holding = Holding(fleet, holds, metrics, clock) if holds else None
        judge = Judge(
            fleet,
            pools,
            requests,
            reader,
            ledger,
            metrics,
            log,
            clock,
            secrets.token_hex(4),
            recorder,
            time.time if gateway.trust_request_start else None,
            holding,
        )
        patience = None
        if gateway.max_message_timeout_s and (config.large_deadline_s or holds):
            large_bytes = tokenization.large_bytes if config.large_deadline_s else sys.maxsize
            patience = Patience(large_bytes, gateway.max_message_timeout_s, always=bool(holds))
        processor = Processor(judge, ledger, metrics, log, clock, gateway.ask_for_body, patience, bool(holds))

        self._config = config
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._fleet = fleet
        self._ledger = ledger
        self._recorder = recorder
        self._store: LearnedStore | None = None
        if config.learned.folder is not None:
            folder = Path(config.learned.folder)
            self._store = LearnedStore(folder, fleet, lambda result: metrics.learned_files.labels(result).inc())
        self._holding = holding
        self._requests = requests
        self._reader = reader
        self._server = Server(processor, AccessLog(ledger, metrics, log), metrics, log)
        registry.register(FleetCollector(fleet, clock, lambda: processor.open_streams, self._fleet_not_shown))
        self._admin = Admin(fleet, registry, clock, self._drain, self._fleet_not_shown)
        self._zmq = zmq.asyncio.Context()
        self._replays = asyncio.Semaphore(REPLAYS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._silent: set[str] = set()  # workers whose silence was logged
        self._budget_doubts: dict[str, BudgetDoubt] = {}  # that were logged
        self._engines: dict[str, _Engine] = {}

    async def start(self) -> tuple[int, int]:
        """Starts everything, and returns the ports that it listens on: gRPC and admin."""
        for note in notes(self._config):
            self._log("config_note", note=note)
        for pool in self._config.pools:
            if self._store is not None:
                self._store.recall_pool(pool.name)
            for worker in pool.workers:
                self._join(pool.name, worker, worker.data_parallel_ranks)
        self._keep_running("housekeeping", self._housekeeping)
        if self._store is not None:
            self._keep_running("learned_store", partial(self._keep_learned, self._store))
        admin_host, admin_port = _host_port(self._config.listen.admin)
        try:
            admin_port = await self._admin.start(admin_host, admin_port)
        except OSError as error:
            raise OSError(f"listen.admin: {self._config.listen.admin}: {error.strerror or error}") from error
        await self._views_known()
        try:
            grpc_port = await self._server.start(self._config.listen.grpc)
        except OSError as error:
            raise OSError(f"listen.grpc: {error}") from error
        pools = [pool.name for pool in self._config.pools]
        self._log("listening", grpc_port=grpc_port, admin_port=admin_port, pools=pools)
        return grpc_port, admin_port

    async def stop(self) -> None:
        """Drains: no new requests, then the open ones see their first token, then everything else ends."""
        self._log("draining", in_flight=self._fleet.in_flight)
        if self._holding is not None:
            self._holding.release()
        shutdown = self._config.shutdown
        await self._server.stop(shutdown.notice_s, shutdown.grace_s)
        await self.abandon()
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)
        if self._store is not None:
            await self._store.save(pool.name for pool in self._config.pools)
        self._log("stopped")
        self._log.close()

    async def abandon(self) -> None:
        """Ends what follows the engines, also where `start` has failed: for open sockets the process would
        wait when it ends, perhaps for ever."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._admin.stop()
        self._requests.close()
        self._reader.close()
        self._zmq.destroy(linger=0)

    async def _views_known(self) -> None:
        """Returns when what the engines have stored was replayed: the first requests would else be decided without it.
        An engine that does not answer is not waited for."""
        feeds = [feed for engine in self._engines.values() for feed in engine.feeds.values()]
        began_s = time.monotonic()
        for wait_s in (_FIRST_REPLAYS_S, _LONGEST_REPLAYS_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(began_s + wait_s - time.monotonic()):
                    for feed in feeds:
                        await feed.settled.wait()
            feeds = [feed for feed in feeds if feed.replaying and not feed.settled.is_set()]

    def _join(self, pool: str, worker: WorkerConfig, ranks: int | None = None) -> None:
        """Takes in an engine, as one worker or as one for each of its data-parallel ranks."""
        names: dict[int | None, str] = {None: worker.name}
        if ranks is not None:
            names = {rank: f"{worker.name}/{rank}" for rank in range(ranks)}
        before = self._engines.get(worker.name)
        draining = worker.drain if before is None else before.draining
        engine = self._engines[worker.name] = _Engine(pool, worker, names, draining=draining)
        settings = worker.settings.for_engine(worker.cache.rule)
        for rank, name in names.items():
            cache, adapters = worker.cache.for_engine(), frozenset(worker.adapters)
            spec = WorkerSpec(name, worker.endpoint, settings, worker.cluster, adapters, cache, rank)
            self._fleet.join(pool, spec)
            self._fleet.set_draining(name, draining)
            if self._recorder is not None:
                self._recorder.worker(pool, name, settings)
            if self._store is not None:
                self._store.worker_joined(name)
            if worker.kv_events is None:
                self._fleet.set_trust(name, Trust.LOST, 0.0)
            else:
                replay = None if worker.kv_replay is None else port_of_rank(worker.kv_replay, rank or 0)
                self._follow(engine, name, Events(port_of_rank(worker.kv_events, rank or 0), replay))
        if self._config.probe.interval_s > 0:
            watchers = Watchers(
                self._engine_ended,
                self._engine_up,
                partial(self._engine_settings, pool),
                self._engine_drafting,
                partial(self._engine_restarted, engine),
                partial(self._engine_about, engine),
            )
            interval_s = self._config.probe.interval_s
            probe = engine.probe = Probe(
                names, worker.endpoint, settings, interval_s, self._fleet, self._metrics, self._clock, watchers,
                worker.settings.left_open,
            )  # fmt: skip
            engine.tasks.append(self._keep_running("probe", probe.run))

    def _follow(self, engine: _Engine, name: str, events: Events) -> None:
        feed = KvFeed(
            name,
            events.endpoint,
            events.replay,
            self._fleet,
            self._metrics,
            self._zmq,
            self._replays,
            engine.contact,
            self._recorder,
        )
        engine.feeds[name] = feed
        engine.tasks.append(self._keep_running("kv_feed", feed.run))

    def _engine_about(self, engine: _Engine, about: About) -> None:
        """How many ranks it has, and where their events are: what the config leaves open is taken from the engine. And
        whether its waits can be foreseen."""
        config = engine.config
        if config.data_parallel_ranks is None and None in engine.names and (about.ranks or 1) > 1:
            self._log("engine_ranks", worker=config.name, ranks=about.ranks)
            for task in engine.tasks:
                task.cancel()
            for name in engine.names.values():
                self._ledger.given_up(self._fleet.leave(name), "ranks")
            self._join(engine.pool, config, about.ranks)
            engine = self._engines[config.name]
        if about.not_followed != engine.not_followed:
            engine.not_followed = about.not_followed
            self._log("engine_settings_not_followed", worker=config.name, settings=about.not_followed)
        for rank, name in engine.names.items():
            events = about.events.get(rank or 0)
            if events is not None and name not in engine.feeds:
                self._follow(engine, name, events)
            load = about.loads.get(rank or 0)
            if load is not None and name not in engine.load_feeds and engine.probe is not None:
                hear = partial(engine.probe.hear, rank)
                feed = engine.load_feeds[name] = LoadFeed(name, load, self._metrics, self._zmq, hear, self._clock)
                engine.tasks.append(self._keep_running("load_feed", feed.run))

    def _drain(self, engine: str, draining: bool) -> dict[str, int] | None:
        known = self._engines.get(engine)
        if known is None:
            return None
        known.draining = draining
        for name in known.names.values():
            self._fleet.set_draining(name, draining)
        in_flight = {name: self._fleet.in_flight_on(name) for name in known.names.values()}
        self._log("engine_drains" if draining else "engine_serves", worker=engine, in_flight=sum(in_flight.values()))
        return in_flight

    def _engine_restarted(self, engine: _Engine, worker: str) -> None:
        self._log("engine_restarted", worker=worker)
        feed = engine.feeds.get(worker)
        if feed is not None:
            feed.doubt("restart_told")

    def _engine_up(self, worker: str, up: bool) -> None:
        self._log("engine_up" if up else "engine_down", worker=worker)

    def _engine_drafting(self, worker: str, drafting: Drafting) -> None:
        if self._recorder is not None:
            self._recorder.drafting(worker, drafting)

    def _engine_settings(self, pool: str, worker: str, settings: Settings) -> None:
        if self._recorder is not None:
            self._recorder.worker(pool, worker, settings)
        if self._store is not None:
            self._store.settings_known(worker)

    async def _keep_learned(self, store: LearnedStore) -> None:
        while True:
            await asyncio.sleep(self._config.learned.every_s)
            await store.save(pool.name for pool in self._config.pools)

    def _engine_ended(self, tickets: list[Ticket]) -> None:
        self._ledger.given_up(tickets, "engine")

    def _late_fault(self, fault: BaseException) -> None:
        self._metrics.bugs.labels("prompt").inc()
        self._log("bug", where="prompt", trace="".join(traceback.format_exception(fault)))

    def _fleet_not_shown(self, fault: Exception) -> None:
        self._metrics.bugs.labels("fleet_view").inc()
        self._log("bug", where="fleet_view", trace="".join(traceback.format_exception(fault)))

    async def _housekeeping(self) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            expired = self._fleet.expire(self._config.tickets.max_age_s, self._clock())
            self._ledger.given_up(expired, "age")
            more = self._ledger.look_back()
            while more:
                await asyncio.sleep(0)
                more = self._ledger.look_back()
            self._ledger.give_up_silent()
            silent = set(self._fleet.silent_workers())
            for worker in silent - self._silent:
                self._log("feed_silent", worker=worker)
            self._silent = silent
            doubts = self._fleet.budget_doubts()
            for worker, doubt in doubts.items():
                if self._budget_doubts.get(worker) is not doubt:
                    self._log("token_budget", worker=worker, seen=doubt.value, key="settings.max_num_batched_tokens")
            self._budget_doubts = doubts

    def _keep_running(self, what: str, work: Callable[[], Coroutine[None, None, None]]) -> asyncio.Task[None]:
        """Background work: a fault in it is counted and logged, and a while later it begins again."""

        async def guarded() -> None:
            pause_s = _FIRST_PAUSE_S
            while True:
                try:
                    await work()
                    return
                except Exception:
                    self._metrics.bugs.labels(what).inc()
                    self._log("bug", where=what, trace=traceback.format_exc())
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

        task = asyncio.create_task(guarded(), name=what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _recorder(
    recording: Recording, clock: Callable[[], float], hasher: BlockHasher, metrics: Metrics
) -> Recorder | None:
    if recording.folder is None:
        return None
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    name = f"headway-{stamp}-{secrets.token_hex(2)}.jsonl" + (".zst" if recording.compress else "")
    return Recorder(
        open_recording(Path(recording.folder) / name),
        clock,
        hasher,
        lambda reason: metrics.recording_lost.labels(reason).inc(),
        recording.tokens,
        recording.max_mb << 20,
    )


def pool_policy(pool: PoolConfig) -> PoolPolicy:
    learning, admission, fairness = pool.learning, pool.admission, pool.fairness
    return PoolPolicy(
        name=pool.name,
        learning=LearningPolicy(
            min_samples=learning.min_samples,
            min_length_ratio=learning.min_length_ratio,
            default_tokens_per_s=learning.default_tokens_per_s,
            default_step_s=learning.default_step_s,
            min_intervals=learning.min_intervals,
        ),
        routing=RoutingPolicy(
            Prefer(pool.routing.prefer),
            {
                Prefer.LATENCY: pool.routing.others.latency,
                Prefer.BALANCED: pool.routing.others.balanced,
                Prefer.CACHE: pool.routing.others.cache,
            },
            pool.routing.session_hint,
            pool.routing.refusal_s,
            learning.share,
        ),
        admission=AdmissionPolicy(
            Mode(admission.mode),
            admission.max_queue_wait_s,
            admission.max_ttft_s,
            admission.overload_wait_s,
            admission.overload_kv_demand,
            admission.risk,
            OnReject(admission.on_reject),
        ),
        guard=GuardPolicy(**msgspec.structs.asdict(admission.guard)),
        fairness=FairnessPolicy(fairness.wait_s, fairness.half_life_s) if fairness.enabled else None,
        retry=RetryPolicy(pool.retry_after.cap_s, pool.retry_after.jitter),
    )


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
