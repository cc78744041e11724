"""Recordings of simulated engines in virtual time: what an observer beside a fleet would have written down."""

from __future__ import annotations

import base64
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from enginesim.kv_events import encode_batch
from enginesim.request import Request
from enginesim.scheduler import Batch, Scheduler
from enginesim.settings import CostSettings, SchedulerSettings
from enginesim.step_time import StepTime
from predictor.prompt import as_tokens
from predictor.recording import (
    EndRecord,
    FirstTokenRecord,
    Header,
    KvRecord,
    Record,
    RequestRecord,
    WorkerRecord,
    encode_tokens,
)

BLOCK = 16


@dataclass
class _Engine:
    name: str
    scheduler: Scheduler
    step_time: StepTime
    under_way: Batch | None = None
    seq: int = 0


def record_fleet(
    rng: np.random.Generator,
    costs: list[CostSettings],
    limits: SchedulerSettings,
    requests: int,
    per_s: float,
    typical_tokens: int = 1500,
    typical_output: int = 80,
    slower: Callable[[float], float] = lambda at_s: 1.0,
) -> list[Record]:
    """Poisson arrivals, sent to the engines in turn; a third go on from one of a few shared prefixes.

    `slower` is how many times as long a step takes that begins at a time.
    """
    engines = [
        _Engine(f"w{number}", Scheduler(limits, lambda request: 7), StepTime(cost)) for number, cost in enumerate(costs)
    ]
    settings = {
        "block_size": BLOCK,
        "num_gpu_blocks": limits.num_gpu_blocks,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "long_prefill_token_threshold": limits.long_prefill_token_threshold,
        "a_setting_of_another_version": True,
    }
    records: list[Record] = [Header(version=1)]
    records += [WorkerRecord(t=0.0, worker=e.name, pool="m", settings=settings) for e in engines]
    prefixes = [rng.integers(1, 100_000, int(size)) for size in rng.integers(300, 3000, 5)]
    agenda: list[tuple[float, int, int, _Engine | int]] = []
    order = itertools.count()
    at_s = 0.0
    for number in range(requests):
        at_s += float(rng.exponential(1 / per_s))
        heapq.heappush(agenda, (at_s, 1, next(order), number))
    while agenda:
        now_s, _, _, what = heapq.heappop(agenda)
        if isinstance(what, _Engine):
            assert what.under_way is not None
            outputs, events = what.scheduler.complete(what.under_way)
            what.under_way = None
            if events:
                payload = base64.b64encode(encode_batch(events, now_s, "map")).decode()
                records.append(KvRecord(t=now_s, worker=what.name, seq=what.seq, payload=payload))
                what.seq += 1
            for output in outputs:
                request = output.request
                if output.position == 0:
                    records.append(FirstTokenRecord(t=now_s, id=f"r{request.id}"))
                if output.finish_reason:
                    records.append(
                        EndRecord(
                            t=now_s,
                            id=f"r{request.id}",
                            prompt_tokens=request.prompt_tokens,
                            cached_tokens=request.cached_tokens,
                            output_tokens=request.output_tokens,
                            status=200,
                        )
                    )
        else:
            body = rng.integers(1, 100_000, int(np.clip(rng.lognormal(np.log(typical_tokens), 1.0), 20, 40_000)))
            prefix = prefixes[int(rng.integers(len(prefixes)))] if rng.random() < 0.33 else body[:0]
            tokens = [int(token) for token in (*prefix, *body)]
            engine = engines[what % len(engines)]
            request = Request(what, tokens, 1 + int(rng.exponential(typical_output)), BLOCK)
            request.hash_more()
            engine.scheduler.add(request)
            records.append(
                RequestRecord(
                    t=now_s, id=f"r{what}", pool="m", worker=engine.name, tokens=encode_tokens(as_tokens(tokens))
                )
            )
        if not agenda or agenda[0][0] > now_s:
            for engine in engines:
                if engine.under_way is None and engine.scheduler.has_work:
                    engine.under_way = engine.scheduler.schedule()
                    ends_s = now_s + slower(now_s) * engine.step_time.duration_s(engine.under_way)
                    heapq.heappush(agenda, (ends_s, 0, next(order), engine))
    return records
