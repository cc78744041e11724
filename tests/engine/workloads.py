"""Workloads for one engine in virtual time: what arrives when, and the engine's settings.

Used by two interpreters: the one that has vLLM runs a workload through vLLM's own scheduler, ours predicts it. Needs
nothing but numpy. All token ids are below 128, so that an event's payload takes a byte a token.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

TRACE = Path(__file__).parent / "trace_files" / "mooncake_conversation_head.jsonl.gz"
TRACE_BLOCK = 512  # tokens that one hash id of the trace stands for
VOCABULARY = 128
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Costs:
    """What a step takes: `step_s + sum over chunks (per_token_s * n + per_token_squared_s * (end^2 - start^2)) +
    per_decode_s * decoding`, times lognormal noise of the given sigma. Beyond `bend_tokens` of context attention costs
    no more per token than at the bend (sparse attention)."""

    per_token_s: float = 30e-6
    per_token_squared_s: float = 37e-12
    step_s: float = 0.005
    per_decode_s: float = 50e-6
    noise: float = 0.0
    bend_tokens: int | None = None

    def chunk_s(self, start: int, end: int) -> float:
        return self.per_token_s * (end - start) + self.per_token_squared_s * (self._area(end) - self._area(start))

    def _area(self, tokens: int) -> float:
        bend = self.bend_tokens
        if bend is None or tokens <= bend:
            return float(tokens) * tokens
        return float(bend) * bend + 2.0 * bend * (tokens - bend)


@dataclass(frozen=True)
class Arrival:
    """One request. Its prompt is a run of pieces `(seed, length)`: so many random tokens drawn from the seed."""

    at_s: float
    pieces: tuple[tuple[int, int], ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(length for _, length in self.pieces)

    def tokens(self) -> Tokens:
        return np.concatenate([_piece(seed, length) for seed, length in self.pieces])


def _piece(seed: int, length: int) -> Tokens:
    # A fixed draw size would make a short piece a prefix of a long one, which is what equal ids mean.
    return np.random.default_rng(seed).integers(0, VOCABULARY, length, dtype=np.uint8).astype(np.uint32)


@dataclass(frozen=True)
class EngineSettings:
    """vLLM's own names."""

    num_gpu_blocks: int
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0
    max_model_len: int = 310_000
    async_scheduling: bool = False


@dataclass(frozen=True)
class Workload:
    name: str
    settings: EngineSettings
    arrivals: tuple[Arrival, ...]
    costs: Costs = field(default_factory=Costs)
    max_tokens_told: int | None = None  # what clients put into `max_tokens`; None: nothing


def _trace(scale: float, count: int, longest: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    requests = []
    block = int(TRACE_BLOCK * scale)
    with gzip.open(TRACE, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            length = int(row["input_length"] * scale)
            if not 0 < length <= longest:
                continue
            ids = row["hash_ids"][: -(-length // block)]
            pieces = [(int(seed), block) for seed in ids[:-1]]
            pieces.append((int(ids[-1]), length - block * (len(ids) - 1)))
            requests.append((tuple(pieces), max(1, int(row["output_length"]))))
            if len(requests) == count:
                break
    return requests


def _poisson(seed: int, count: int, per_s: float) -> list[float]:
    times: list[float] = np.cumsum(np.random.default_rng(seed).exponential(1.0 / per_s, count)).tolist()
    return times


def traced(
    scale: float, load: float, cache_tokens: int, threshold: int = 0, count: int = 1000, seed: int = 1
) -> Callable[[], Workload]:
    """The Mooncake conversation trace with Poisson arrivals. Load 1 is as many requests a second as the engine gets
    through when its cache is always full, with nothing reused."""

    def build() -> Workload:
        requests = _trace(scale, count, longest=300_000)
        settings = EngineSettings(
            num_gpu_blocks=cache_tokens // 16 + 1,
            max_model_len=min(310_000, cache_tokens),
            long_prefill_token_threshold=threshold,
        )
        costs = Costs()
        lengths = [sum(size for _, size in pieces) for pieces, _ in requests]
        beside = cache_tokens / (float(np.mean(lengths)) + float(np.mean([out for _, out in requests])) / 2)
        decode_step_s = costs.step_s + costs.per_decode_s * beside
        work_s = [
            costs.chunk_s(0, length)
            + -(-length // settings.max_num_batched_tokens) * costs.step_s
            + out * decode_step_s / beside
            for length, (_, out) in zip(lengths, requests, strict=True)
        ]
        times = _poisson(seed, len(requests), load / float(np.mean(work_s)))
        arrivals = (Arrival(at_s, pieces, out) for at_s, (pieces, out) in zip(times, requests, strict=True))
        return Workload("", settings, tuple(arrivals), costs)

    return build


def giants(threshold: int, rounds: int = 60, seed: int = 2) -> Callable[[], Workload]:
    """A giant, and one to eight small prompts while it is being prefilled; then the next."""

    def build() -> Workload:
        rng = np.random.default_rng(seed)
        costs = Costs()
        arrivals, begin_s, fresh = [], 1.0, 1_000_000
        for _ in range(rounds):
            giant = int(rng.integers(60_000, 250_000))
            work_s = costs.chunk_s(0, giant)
            arrivals.append(Arrival(begin_s, ((fresh, giant),), int(rng.integers(20, 200))))
            for _ in range(int(rng.integers(1, 9))):
                fresh += 1
                at_s = begin_s + float(rng.uniform(0.05, 0.9)) * work_s
                arrivals.append(Arrival(at_s, ((fresh, int(rng.integers(100, 3000))),), int(rng.integers(20, 200))))
            fresh += 1
            begin_s += 1.6 * work_s + 3.0
        arrivals.sort(key=lambda arrival: arrival.at_s)
        settings = EngineSettings(num_gpu_blocks=40_001, long_prefill_token_threshold=threshold)
        return Workload("", settings, tuple(arrivals), costs)

    return build


def decodes(
    budget: int, slots: int, async_scheduling: bool, prompts: int = 150, seed: int = 3
) -> Callable[[], Workload]:
    """200 requests that decode for long, and prompts of up to 30K tokens beside them."""

    def build() -> Workload:
        rng = np.random.default_rng(seed)
        arrivals = [
            Arrival(0.05 * number, ((2_000_000 + number, int(rng.integers(50, 400))),), int(rng.integers(1500, 6000)))
            for number in range(200)
        ]
        at_s = 12.0
        for number in range(prompts):
            at_s += float(rng.exponential(1.2))
            length = int(rng.integers(1000, 30_000))
            arrivals.append(Arrival(at_s, ((3_000_000 + number, length),), int(rng.integers(20, 600))))
        settings = EngineSettings(
            num_gpu_blocks=150_001,
            max_num_batched_tokens=budget,
            max_num_seqs=slots,
            async_scheduling=async_scheduling,
        )
        return Workload("", settings, tuple(arrivals))

    return build


def storm(count: int = 120, seed: int = 4) -> Callable[[], Workload]:
    """Outputs that outgrow a cache of 19K tokens: preemptions."""

    def build() -> Workload:
        rng = np.random.default_rng(seed)
        times = np.cumsum(rng.exponential(0.05, count)).tolist()
        arrivals = [
            Arrival(at_s, ((4_000_000 + n, int(rng.integers(100, 900))),), int(rng.integers(300, 1500)))
            for n, at_s in enumerate(times)
        ]
        return Workload("", EngineSettings(num_gpu_blocks=1201, max_model_len=18_000), tuple(arrivals))

    return build


_WORKLOADS: dict[str, Callable[[], Workload]] = {
    "long 0.8": traced(4, 0.8, 2_000_000),
    "long 0.8, threshold 2048": traced(4, 0.8, 2_000_000, threshold=2048),
    "long 1.0": traced(4, 1.0, 2_000_000),
    "long 1.3": traced(4, 1.3, 2_000_000),
    "trace 0.8": traced(0.5, 0.8, 400_000),
    "trace 0.8, threshold 2048": traced(0.5, 0.8, 400_000, threshold=2048),
    "trace 1.0": traced(0.5, 1.0, 400_000),
    "trace 1.3": traced(0.5, 1.3, 400_000),
    "giants": giants(0),
    "giants, threshold 1024": giants(1024),
    "decodes, budget 512": decodes(512, 256, False),
    "decodes, 128 slots, async": decodes(8192, 128, True),
    "storm": storm(),
}
NAMES = tuple(_WORKLOADS)


def workload(name: str, count: int | None = None, costs: Costs | None = None) -> Workload:
    """By name; `count` keeps only the first so many arrivals."""
    built = _WORKLOADS[name]()
    return replace(built, name=name, arrivals=built.arrivals[:count], costs=costs or built.costs)
