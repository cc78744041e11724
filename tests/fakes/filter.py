"""The filter of one pool, put together as `app.py` does it, with a log that can be read and nothing outside."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
from prometheus_client import CollectorRegistry

from extproc.holding import Holding
from extproc.judge import Judge, Pool
from extproc.ledger import Ledger
from extproc.metrics import FleetCollector, Metrics
from extproc.prompt_reader import PoolText, PromptReader
from extproc.recorder import Recorder
from extproc.request_reader import RequestReader
from extproc.server import AccessLog, Processor, Server
from predictor.fairness import FairnessPolicy
from predictor.fleet import Fleet, PoolPolicy, WorkerSpec
from predictor.prompt import BlockHasher
from predictor.waiting_room import HoldPolicy
from tests.fakes.encoders import OneTokenAByte
from tests.fakes.notes import Notes, counted

ADAPTERS = {"b": frozenset({"sql"})}
WORKERS = {"a": "10.0.0.1:8000", "b": "10.0.0.2:8000"}


class Filter:
    """Model and pool `m`, and two LoRA adapters: `sql`, which worker b has loaded, and `poems`, which nobody has.

    `port` is set once it is started.
    """

    def __init__(
        self,
        workers: dict[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        removes_bound: bool = False,
        hold_s: float = 0.0,
        fairness: FairnessPolicy | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        rng = np.random.default_rng(7)
        hasher = BlockHasher(rng)
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry)
        self.log = Notes()
        self.fleet = Fleet([PoolPolicy("m", fairness=fairness)], hasher, rng)
        for name, endpoint in (WORKERS if workers is None else workers).items():
            self.fleet.join("m", WorkerSpec(name, endpoint, adapters=ADAPTERS.get(name, frozenset())))
        self.text = PoolText(OneTokenAByte(), None)
        self.ledger = Ledger(self.fleet, self.metrics, self.log, clock)
        self.reader = PromptReader(hasher, 1, 8, 5.0, lambda fault: None)
        self.holding = Holding(self.fleet, {"m": HoldPolicy(hold_s)}, self.metrics, clock)
        pool = Pool(
            "m",
            self.text,
            by_tenant=fairness is not None,
            adapters=frozenset({"sql", "poems"}),
            removes_bound=removes_bound,
        )
        self.judge = Judge(
            self.fleet,
            dict.fromkeys(("m", "sql", "poems"), pool),
            RequestReader(1, 5.0),
            self.reader,
            self.ledger,
            self.metrics,
            self.log,
            clock,
            "boot",
            recorder,
            holding=self.holding if hold_s else None,
        )
        self.processor = Processor(self.judge, self.ledger, self.metrics, self.log, clock, holds=hold_s > 0)
        self.registry.register(FleetCollector(self.fleet, clock, lambda: self.processor.open_streams))
        self.port = 0
        self._server: Server | None = None  # it wants an event loop

    async def __aenter__(self) -> Self:
        self._server = Server(self.processor, AccessLog(self.ledger, self.metrics, self.log), self.metrics, self.log)
        self.port = await self._server.start("127.0.0.1:0")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop(0.0, 0.0)
        self.reader.close()

    async def stop(self, notice_s: float, grace_s: float) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.stop(notice_s, grace_s)

    def counted(self, name: str, **labels: str) -> float:
        return counted(self.registry, name, **labels)
