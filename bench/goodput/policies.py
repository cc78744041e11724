"""Who decides: plain balancing as Envoy does it, the same with a limit, and Headway."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.goodput.traffic import Ask
from enginesim.request import Request
from enginesim.settings import SchedulerSettings
from predictor.admission import Refusal
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.hindsight import Verdict
from predictor.kv_events import decode_batch
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens


@dataclass(frozen=True, slots=True)
class Judgement:
    """What Headway says of itself afterwards. Shares; None where there was nothing to judge."""

    false_alarms: float | None  # of refusals that can be told
    underpredicted: float | None  # of those let in with a bound


class Policy(abc.ABC):
    """Chooses an engine, or None for a refusal, and hears what an edge would hear."""

    name = ""

    @abc.abstractmethod
    def choose(self, number: int, ask: Ask, now_s: float) -> str | None: ...

    def first_token(self, number: int, now_s: float) -> None:  # noqa: B027 - most do not listen
        pass

    def ended(self, number: int, worker: str, request: Request, now_s: float) -> None:  # noqa: B027
        pass

    def stored(self, worker: str, payload: Callable[[], bytes], now_s: float) -> None:  # noqa: B027
        pass

    def judgement(self, now_s: float) -> Judgement:
        del now_s
        return Judgement(None, None)


class RoundRobin(Policy):
    name = "round robin"

    def __init__(self, workers: list[str]) -> None:
        self._workers = workers
        self._next = 0

    def choose(self, number: int, ask: Ask, now_s: float) -> str | None:
        self._next += 1
        return self._workers[self._next % len(self._workers)]


class LeastRequest(Policy):
    """Envoy's: of two drawn at random the one with fewer requests in flight. `limit` is a circuit breaker on the sum of
    them: an answer of 429 beyond it."""

    def __init__(self, workers: list[str], seed: int, limit: int | None = None) -> None:
        self.name = "least request" if limit is None else f"least request, at most {limit}"
        self._workers = workers
        self._rng = np.random.default_rng(seed)
        self._limit = limit
        self._active = Counter[str]()

    def choose(self, number: int, ask: Ask, now_s: float) -> str | None:
        if self._limit is not None and self._active.total() >= self._limit:
            return None
        one, other = (self._workers[int(at)] for at in self._rng.choice(len(self._workers), 2, replace=False))
        chosen = min(one, other, key=lambda worker: self._active[worker])
        self._active[chosen] += 1
        return chosen

    def ended(self, number: int, worker: str, request: Request, now_s: float) -> None:
        self._active[worker] -= 1


class Headway(Policy):
    name = "Headway"

    def __init__(
        self, workers: list[str], limits: SchedulerSettings, seed: int, policy: PoolPolicy | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        self._hasher = BlockHasher(rng)
        self._family = HashFamily(limits.block_size)
        self.fleet = Fleet([policy or PoolPolicy("m")], self._hasher, rng)
        self.refusals: dict[int, Refusal] = {}
        self._alarms, self._kept = Counter[Verdict](), Counter[bool]()
        settings = Settings(
            block_size=limits.block_size,
            num_gpu_blocks=limits.num_gpu_blocks,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            long_prefill_token_threshold=limits.long_prefill_token_threshold,
            max_model_len=limits.max_model_len,
        )
        for worker in workers:
            self.fleet.join("m", WorkerSpec(worker, f"{worker}:8000", settings))

    def choose(self, number: int, ask: Ask, now_s: float) -> str | None:
        hashes = self._hasher.prompt_hashes(as_tokens(ask.tokens), self._family, Namespace())
        prompt = Prompt(len(ask.tokens), True, {self._family: hashes})
        decision = self.fleet.place("m", prompt, Wish(str(number), now_s, max_queue_wait_s=ask.bound_s), now_s)
        if isinstance(decision, Refusal):
            self.refusals[number] = decision
            return None
        assert isinstance(decision, Grant)
        return decision.ticket.worker

    def first_token(self, number: int, now_s: float) -> None:
        first = self.fleet.first_token(str(number), None, now_s)
        if first is not None and first.grade is not None and first.grade.kept_bound is not None:
            self._kept[first.grade.kept_bound] += 1

    def ended(self, number: int, worker: str, request: Request, now_s: float) -> None:
        self.fleet.finish(
            str(number), Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens), now_s
        )

    def stored(self, worker: str, payload: Callable[[], bytes], now_s: float) -> None:
        self.fleet.apply(worker, decode_batch(payload()), now_s)

    def judgement(self, now_s: float) -> Judgement:
        self.reviews = [review for _, review in self.fleet.take_reviews(now_s)]
        self._alarms.update(review.verdict for review in self.reviews)
        told = self._alarms[Verdict.FALSE_ALARM] + self._alarms[Verdict.RIGHT]
        return Judgement(
            self._alarms[Verdict.FALSE_ALARM] / told if told else None,
            self._kept[False] / self._kept.total() if self._kept else None,
        )
