"""Workloads for one engine in virtual time: what arrives when, and the engine's settings.

Used by several interpreters: one that has vLLM or SGLang runs a workload through that engine's own scheduler, ours
predicts it. Needs nothing but numpy. All token ids are below 128, so that an event's payload takes a byte a token.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

TRACES = Path(__file__).parent / "trace_files"
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
    """One request. Its prompt is a run of pieces `(seed, length)`: so many random tokens drawn from the seed.

    `answer` is the seed of its output, for a later prompt to repeat; None: whatever the engine makes up. `priority`:
    in SGLang the higher the sooner, in vLLM the later."""

    at_s: float
    pieces: tuple[tuple[int, int], ...]
    output_tokens: int
    answer: int | None = None
    priority: int | None = None

    @property
    def prompt_tokens(self) -> int:
        return sum(length for _, length in self.pieces)

    def tokens(self) -> Tokens:
        return np.concatenate([_piece(seed, length) for seed, length in self.pieces])

    def answer_tokens(self) -> Tokens | None:
        return None if self.answer is None else _piece(self.answer, self.output_tokens)


def _piece(seed: int, length: int) -> Tokens:
    # A fixed draw size would make a short piece a prefix of a long one, which is what equal ids mean.
    return np.random.default_rng(seed).integers(0, VOCABULARY, length, dtype=np.uint8).astype(np.uint32)


@dataclass(frozen=True)
class EngineSettings:
    """vLLM's own names. On SGLang `page_size` is the block size, `max_total_num_tokens` what all blocks but one hold,
    `chunked_prefill_size` the batched tokens, `max_running_requests` the sequences, and the overlap schedule is async
    scheduling; it has nothing like the threshold."""

    num_gpu_blocks: int
    block_size: int = 16
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_model_len: int = 310_000
    async_scheduling: bool = False
    num_speculative_tokens: int = 0  # drafted for each that decodes, by n-gram lookup: it needs no other model
    # Of SGLang, by its own names.
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    prefill_decode_interval: int = 0
    enable_priority_scheduling: bool = False
    schedule_low_priority_values_first: bool = False
    priority_scheduling_preemption_threshold: int = 10
    disable_priority_preemption: bool = False
    schedule_policy: str = "fcfs"
    max_prefill_tokens: int = 16_384
    enable_chunked_prefill: bool = True  # else its chunked_prefill_size is -1


@dataclass(frozen=True)
class Workload:
    name: str
    settings: EngineSettings
    arrivals: tuple[Arrival, ...]
    costs: Costs = field(default_factory=Costs)
    max_tokens_told: int | None = None  # what clients put into `max_tokens`; None: what the output will be
    accepted: float = 0.7  # how likely a drafted token is right, if all before it are
    engine: Literal["vllm", "sglang"] = "vllm"


@dataclass(frozen=True)
class Variant:
    """What of a workload may be otherwise: its arrivals' seed, what a step costs, and where in its trace it begins.

    Whoever sets a load keeps it: arrivals follow what an engine of these costs can do."""

    seed: int | None = None
    costs: Costs = field(default_factory=Costs)
    begins_at: int = 0  # request of the trace

    def rng(self, seed: int) -> np.random.Generator:
        return np.random.default_rng(seed if self.seed is None else self.seed)


Build = Callable[[Variant], Workload]


def _trace(
    trace: str, scale: float, output_scale: float, begins_at: int, count: int, longest: int
) -> list[tuple[tuple[tuple[int, int], ...], int]]:
    """A row without ids shares nothing with any other."""
    requests = []
    block = int(TRACE_BLOCK * scale)
    with gzip.open(TRACES / f"{trace}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            length = int(row["input_length"] * scale)
            if not 0 < length <= longest or number < begins_at:
                continue
            if "hash_ids" not in row:
                row["hash_ids"] = [(9_000_000 + number) * 1000 + place for place in range(-(-length // block))]
            ids = row["hash_ids"][: -(-length // block)]
            pieces = [(int(seed), block) for seed in ids[:-1]]
            pieces.append((int(ids[-1]), length - block * (len(ids) - 1)))
            requests.append((tuple(pieces), max(1, int(row["output_length"] * output_scale))))
            if len(requests) == count:
                break
    return requests


def _poisson(rng: np.random.Generator, count: int, per_s: float) -> list[float]:
    times: list[float] = np.cumsum(rng.exponential(1.0 / per_s, count)).tolist()
    return times


def traced(
    scale: float,
    load: float,
    cache_tokens: int,
    threshold: int = 0,
    count: int = 1000,
    seed: int = 1,
    output_scale: float = 1.0,
    trace: str = "mooncake_conversation_head",
) -> Build:
    """A trace, by default Mooncake's of conversations, with Poisson arrivals. Load 1 is as many requests a second as
    the engine gets through when its cache is always full, with nothing reused."""

    def build(variant: Variant) -> Workload:
        requests = _trace(trace, scale, output_scale, variant.begins_at, count, longest=300_000)
        settings = EngineSettings(
            num_gpu_blocks=cache_tokens // 16 + 1,
            max_model_len=min(310_000, cache_tokens),
            long_prefill_token_threshold=threshold,
        )
        costs = variant.costs
        lengths = [sum(size for _, size in pieces) for pieces, _ in requests]
        beside = cache_tokens / (float(np.mean(lengths)) + float(np.mean([out for _, out in requests])) / 2)
        decode_step_s = costs.step_s + costs.per_decode_s * beside
        work_s = [
            costs.chunk_s(0, length)
            + -(-length // settings.max_num_batched_tokens) * costs.step_s
            + out * decode_step_s / beside
            for length, (_, out) in zip(lengths, requests, strict=True)
        ]
        times = _poisson(variant.rng(seed), len(requests), load / float(np.mean(work_s)))
        arrivals = (Arrival(at_s, pieces, out) for at_s, (pieces, out) in zip(times, requests, strict=True))
        return Workload("", settings, tuple(arrivals), costs)

    return build


def giants(threshold: int, rounds: int = 60, seed: int = 2) -> Build:
    """A giant, and one to eight small prompts while it is being prefilled; then the next."""

    def build(variant: Variant) -> Workload:
        rng, costs = variant.rng(seed), variant.costs
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


def decodes(budget: int, slots: int, async_scheduling: bool, prompts: int = 150, seed: int = 3) -> Build:
    """200 requests that decode for long, and prompts of up to 30K tokens beside them."""

    def build(variant: Variant) -> Workload:
        rng = variant.rng(seed)
        # As busy as it is at the usual costs, a prompt in steps of half the budget.
        slower = _beside_decodes_s(variant.costs, budget) / _beside_decodes_s(Costs(), budget)
        arrivals = [
            Arrival(
                0.05 * slower * number,
                ((2_000_000 + number, int(rng.integers(50, 400))),),
                int(rng.integers(1500, 6000)),
            )
            for number in range(200)
        ]
        at_s = 12.0 * slower
        for number in range(prompts):
            at_s += float(rng.exponential(1.2 * slower))
            length = int(rng.integers(1000, 30_000))
            arrivals.append(Arrival(at_s, ((3_000_000 + number, length),), int(rng.integers(20, 600))))
        settings = EngineSettings(
            num_gpu_blocks=150_001,
            max_num_batched_tokens=budget,
            max_num_seqs=slots,
            async_scheduling=async_scheduling,
        )
        return Workload("", settings, tuple(arrivals), variant.costs)

    return build


def _beside_decodes_s(costs: Costs, budget: int) -> float:
    """A prompt of usual length, beside the usual decodes."""
    tokens, decoding = 15_000, 200
    steps = max(1, tokens // max(1, min(8192, budget) - decoding))
    return costs.chunk_s(0, tokens) + steps * (costs.step_s + decoding * costs.per_decode_s)


def storm(count: int = 120, seed: int = 4) -> Build:
    """Outputs that outgrow a cache of 19K tokens: preemptions."""

    def build(variant: Variant) -> Workload:
        rng = variant.rng(seed)
        times = np.cumsum(rng.exponential(0.05, count)).tolist()
        arrivals = [
            Arrival(at_s, ((4_000_000 + n, int(rng.integers(100, 900))),), int(rng.integers(300, 1500)))
            for n, at_s in enumerate(times)
        ]
        settings = EngineSettings(num_gpu_blocks=1201, max_model_len=18_000)
        return Workload("", settings, tuple(arrivals), variant.costs)

    return build


def conversations(count: int = 900, per_s: float = 8.0, seed: int = 6) -> Build:
    """Chats that share a few system prompts and grow by an answer and a question each turn; the next turn comes some
    twenty-five seconds later. Not all find their past in a cache of 400K tokens."""

    def build(variant: Variant) -> Workload:
        rng = variant.rng(seed)
        systems = [(5_000_000 + number, int(rng.integers(200, 4000))) for number in range(12)]
        arrivals: list[Arrival] = []
        begin_s, fresh = 0.0, 6_000_000
        while len(arrivals) < 2 * count:
            begin_s += float(rng.exponential(4.0 / per_s))
            at_s, pieces = begin_s, [systems[int(rng.zipf(1.5)) % len(systems)]]
            for _ in range(int(rng.geometric(0.25))):
                pieces.append((fresh, int(rng.integers(10, 2000))))
                output = int(rng.integers(10, 500))
                arrivals.append(Arrival(at_s, tuple(pieces), output, answer=fresh + 1))
                pieces.append((fresh + 1, output))
                fresh += 2
                at_s += 5.0 + float(rng.exponential(20.0))
        arrivals.sort(key=lambda arrival: arrival.at_s)
        settings = EngineSettings(num_gpu_blocks=25_001, max_model_len=64_000)
        return Workload("", settings, tuple(arrivals[:count]), variant.costs)

    return build


def bursts(
    page: int = 1,
    overlap: bool = True,
    count: int = 400,
    seed: int = 8,
    tokens: int = 1280,
    slots: int = 8,
    **rules: Any,
) -> Build:
    """A few small prompts at a time for a small engine, then nothing for long: everything that can be scarce is."""

    def build(variant: Variant) -> Workload:
        rng = variant.rng(seed)
        arrivals: list[Arrival] = []
        begin_s = 0.0
        while len(arrivals) < count:
            span_s = float(rng.choice([0.0, 0.05, 0.5]))
            longest, most = int(rng.choice([40, 400])), int(rng.choice([3, 60, 400]))
            for _ in range(int(rng.integers(1, 15))):
                at_s, fresh = begin_s + float(rng.uniform(0, 1)) * span_s, 8_000_000 + len(arrivals)
                prompt = int(rng.integers(1, longest)) if rng.random() < 0.8 else int(rng.integers(300, 700))
                priority = int(rng.choice([0, 5, 20])) if rng.random() < 0.9 else None
                output = min(int(rng.integers(1, most)), 990 - prompt)  # the engine ends at the context's end
                arrivals.append(Arrival(at_s, ((fresh, prompt),), output, priority=priority))
            begin_s += 1000.0
        arrivals.sort(key=lambda arrival: arrival.at_s)
        if not rules.get("enable_priority_scheduling"):
            arrivals = [replace(arrival, priority=None) for arrival in arrivals]
        settings = EngineSettings(
            num_gpu_blocks=tokens // page + 1,
            block_size=page,
            max_num_batched_tokens=96,
            max_num_seqs=slots,
            max_model_len=1000,
            async_scheduling=overlap,
            **rules,
        )
        return Workload("", settings, tuple(arrivals[:count]), variant.costs, engine="sglang")

    return build


def alone(count: int = 24, seed: int = 7) -> Build:
    """Prompts of up to 60K tokens that have the engine to themselves; all but the first few begin as an earlier one."""

    def build(variant: Variant) -> Workload:
        rng = variant.rng(seed)
        arrivals: list[Arrival] = []
        for number in range(count):
            pieces = [(7_000_000 + number, int(rng.integers(1, 40_000)))]
            if number >= 4:
                begun = arrivals[int(rng.integers(0, number))].pieces
                pieces = [*begun[: int(rng.integers(1, 4))], (7_000_000 + number, int(rng.integers(1, 20_000)))][-4:]
            arrivals.append(Arrival(100.0 * number, tuple(pieces), int(rng.integers(1, 100))))
        return Workload("", EngineSettings(num_gpu_blocks=40_001), tuple(arrivals), variant.costs)

    return build


def fair_shares(build: Build) -> Build:
    """The threshold gives way to a fair share of a step."""

    def built(variant: Variant) -> Workload:
        work = build(variant)
        return replace(work, settings=replace(work.settings, long_prefill_token_threshold_adaptive=True))

    return built


def overlapped(build: Build) -> Build:
    """Asynchronous scheduling, as vLLM has it by default on GPUs since 0.14."""

    def built(variant: Variant) -> Workload:
        work = build(variant)
        return replace(work, settings=replace(work.settings, async_scheduling=True))

    return built


def speculative(build: Build, tokens: int, accepted: float) -> Build:
    """So many tokens are drafted for each that decodes, and some of them accepted."""

    def built(variant: Variant) -> Workload:
        work = build(variant)
        settings = replace(work.settings, num_speculative_tokens=tokens)
        return replace(work, settings=settings, accepted=accepted)

    return built


def by_priority(build: Build, seed: int = 9, apart: int = 1) -> Build:
    """A third of the requests may overtake, and a third is overtaken. Priorities are so far `apart`."""

    def built(variant: Variant) -> Workload:
        work = build(variant)
        priorities = np.random.default_rng(seed).integers(-1, 2, len(work.arrivals)).tolist()
        arrivals = tuple(
            replace(one, priority=apart * priority) for one, priority in zip(work.arrivals, priorities, strict=True)
        )
        return replace(work, settings=replace(work.settings, scheduling_policy="priority"), arrivals=arrivals)

    return built


def on_sglang(build: Build, overlap: bool = True, max_tokens_told: int | None = None, **rules: Any) -> Build:
    def built(variant: Variant) -> Workload:
        work = build(variant)
        settings = replace(work.settings, async_scheduling=overlap, **rules)
        return replace(work, engine="sglang", settings=settings, max_tokens_told=max_tokens_told)

    return built


_WORKLOADS: dict[str, Build] = {
    "long 0.8": traced(4, 0.8, 2_000_000),
    "long 0.8, threshold 2048": traced(4, 0.8, 2_000_000, threshold=2048),
    "long 1.0": traced(4, 1.0, 2_000_000),
    "long 1.3": traced(4, 1.3, 2_000_000),
    "trace 0.8": traced(0.5, 0.8, 400_000),
    "trace 0.8, threshold 2048": traced(0.5, 0.8, 400_000, threshold=2048),
    "trace 1.0": traced(0.5, 1.0, 400_000),
    "trace 1.3": traced(0.5, 1.3, 400_000),
    "synthetic 0.8": traced(1, 0.8, 800_000, trace="mooncake_synthetic_head"),
    "synthetic 1.3": traced(1, 1.3, 800_000, trace="mooncake_synthetic_head"),
    "code 0.8": traced(1, 0.8, 100_000, trace="azure_code_head"),
    "code 1.3": traced(1, 1.3, 100_000, trace="azure_code_head"),
    "chat 0.8": traced(1, 0.8, 100_000, trace="azure_conversation_head"),
    "chat 1.3": traced(1, 1.3, 100_000, trace="azure_conversation_head"),
    "papers 0.8": traced(2, 0.8, 200_000, trace="arxiv_summarization_head"),
    "papers 1.3": traced(2, 1.3, 200_000, trace="arxiv_summarization_head"),
    "giants": giants(0),
    "giants, threshold 1024": giants(1024),
    "decodes, budget 512": decodes(512, 256, False),
    "decodes, 128 slots, async": decodes(8192, 128, True),
    "trace 0.8, async": overlapped(traced(0.5, 0.8, 400_000)),
    "trace 0.8, threshold 2048, async": overlapped(traced(0.5, 0.8, 400_000, threshold=2048)),
    "trace 1.3, async": overlapped(traced(0.5, 1.3, 400_000)),
    "giants, threshold 1024, async": overlapped(giants(1024)),
    "storm": storm(),
    "trace 0.8, drafts": speculative(traced(0.5, 0.8, 400_000), 3, 0.7),
    "trace 0.8, threshold 2048, drafts": speculative(traced(0.5, 0.8, 400_000, threshold=2048), 3, 0.7),
    "trace 1.3, drafts": speculative(traced(0.5, 1.3, 400_000), 3, 0.7),
    "decodes, budget 1024, drafts": speculative(decodes(1024, 256, False), 3, 0.7),
    "giants, fair shares of 1024": fair_shares(giants(1024)),
    "trace 1.3, by priority": by_priority(traced(0.5, 1.3, 400_000)),
    "storm, by priority": by_priority(storm()),
    "sglang trace 1.0": on_sglang(traced(0.5, 1.0, 400_000, output_scale=0.5)),
    "sglang trace 1.3": on_sglang(traced(0.5, 1.3, 400_000, output_scale=0.5)),
    "sglang giants": on_sglang(giants(0)),
    "sglang conversations": on_sglang(conversations()),
    "sglang decodes": on_sglang(decodes(8192, 256, True)),
    "sglang storm": on_sglang(storm()),
    "sglang storm, max_tokens 4096": on_sglang(storm(), max_tokens_told=4096),
    "sglang alone, no overlap": on_sglang(alone(), overlap=False),
    "sglang decodes, mixed": on_sglang(decodes(8192, 256, True), enable_mixed_chunk=True),
    "sglang trace 1.0, mixed": on_sglang(traced(0.5, 1.0, 400_000, output_scale=0.5), enable_mixed_chunk=True),
    "sglang trace 1.0, interval": on_sglang(traced(0.5, 1.0, 400_000, output_scale=0.5), prefill_decode_interval=4),
    "sglang trace 1.3, by priority": on_sglang(
        by_priority(traced(0.5, 1.3, 400_000, output_scale=0.5), apart=20), enable_priority_scheduling=True
    ),
    "sglang decodes, by priority, 128 slots": on_sglang(
        by_priority(decodes(8192, 128, True), apart=20), enable_priority_scheduling=True
    ),
    "sglang trace 1.0, whole prompts": on_sglang(
        traced(0.5, 1.0, 400_000, output_scale=0.5),
        enable_chunked_prefill=False,
        max_num_batched_tokens=400_000,
    ),
    "sglang bursts": bursts(),
    "sglang bursts, no overlap": bursts(overlap=False),
    "sglang bursts, pages": bursts(page=16),
    "sglang bursts, pages, no overlap": bursts(page=16, overlap=False),
    "sglang bursts, mixed": bursts(enable_mixed_chunk=True),
    "sglang bursts, mixed, no overlap": bursts(overlap=False, enable_mixed_chunk=True),
    "sglang bursts, mixed, pages": bursts(page=16, enable_mixed_chunk=True),
    "sglang bursts, lavish": bursts(schedule_conservativeness=0.3),
    "sglang bursts, careful, mixed, pages": bursts(page=16, schedule_conservativeness=1.3, enable_mixed_chunk=True),
    # SGLang ends with an error where decode steps between two chunks of a prompt take the space for the next.
    "sglang bursts, interval": bursts(tokens=10_000, prefill_decode_interval=3),
    "sglang bursts, interval, no overlap": bursts(tokens=10_000, overlap=False, prefill_decode_interval=3),
    "sglang bursts, mixed, interval, pages": bursts(
        page=16, tokens=10_000, enable_mixed_chunk=True, prefill_decode_interval=2
    ),
    "sglang bursts, by priority": bursts(enable_priority_scheduling=True),
    "sglang bursts, by priority, no overlap": bursts(
        overlap=False, tokens=2560, slots=4, enable_priority_scheduling=True
    ),
    "sglang bursts, by priority, mixed, pages": bursts(
        page=16, seed=9, enable_priority_scheduling=True, enable_mixed_chunk=True
    ),
    "sglang bursts, by priority, space for all": bursts(
        tokens=10_000, seed=11, slots=3, enable_priority_scheduling=True
    ),
    "sglang bursts, low priorities first": bursts(
        seed=10,
        slots=4,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=True,
        priority_scheduling_preemption_threshold=3,
    ),
    "sglang bursts, by priority, nobody preempted": bursts(
        enable_priority_scheduling=True, disable_priority_preemption=True
    ),
    "sglang bursts, whole prompts": bursts(enable_chunked_prefill=False, max_prefill_tokens=200),
    "sglang bursts, whole prompts, pages, no overlap": bursts(
        page=16, overlap=False, enable_chunked_prefill=False, max_prefill_tokens=150
    ),
}
NAMES = tuple(_WORKLOADS)

_COSTS = Costs()
# What the parts after a workload's name stand for, beside `seed NUMBER`.
_OTHER_COSTS = {
    "no squares": replace(_COSTS, per_token_squared_s=0.0),
    "squares x4": replace(_COSTS, per_token_squared_s=4 * _COSTS.per_token_squared_s),
    "tokens /10": replace(_COSTS, per_token_s=_COSTS.per_token_s / 10),
    "tokens x10": replace(_COSTS, per_token_s=10 * _COSTS.per_token_s),
    "steps of 1 ms": replace(_COSTS, step_s=0.001),
    "steps of 30 ms": replace(_COSTS, step_s=0.030),
    "bend at 32K": replace(_COSTS, bend_tokens=32_768),
    "noise of 10 %": replace(_COSTS, noise=0.1),
}
_OTHER_SETTINGS: dict[str, Callable[[EngineSettings], EngineSettings]] = {
    "async": lambda known: replace(known, async_scheduling=True),
    "no overlap": lambda known: replace(known, async_scheduling=False),
    "blocks of 32": lambda known: replace(
        known, block_size=32, num_gpu_blocks=known.num_gpu_blocks * known.block_size // 32
    ),
    "budget 2048": lambda known: replace(known, max_num_batched_tokens=2048),
    "threshold 1024": lambda known: replace(known, long_prefill_token_threshold=1024),
    "longest prefix first": lambda known: replace(known, schedule_policy="lpm"),
}


def _other_engines() -> Iterator[str]:
    """The table of other arrivals, engines and traces in docs/performance.md."""
    for name in ("trace 0.8", "trace 1.3", "trace 0.8, threshold 2048"):
        yield from (f"{name} | seed {seed}" for seed in (2, 3, 4))
    for other in (*_OTHER_COSTS, "blocks of 32", "budget 2048"):
        yield from (f"trace {load} | {other}" for load in ("0.8", "1.3"))
    yield from ("trace 1.3 | seed 2 | async", "long 1.3 | seed 2", "long 0.8 | seed 2 | squares x4")
    for trace in ("synthetic", "code", "chat", "papers"):
        yield from (f"{trace} {load}" for load in ("0.8", "1.3"))
    yield from (f"sglang trace 1.3 | {other}" for other in ("seed 2", "squares x4", "tokens x10", "steps of 30 ms"))


OTHERS = tuple(_other_engines())


def workload(name: str, count: int | None = None) -> Workload:
    """By name; `count` keeps only the first so many arrivals.

    After the name may stand what is otherwise: "trace 0.8 | seed 2 | tokens x10 | async". Raises KeyError.
    """
    known, *others = name.split(" | ")
    variant = Variant()
    for other in others:
        if other.startswith("seed "):
            variant = replace(variant, seed=int(other.removeprefix("seed ")))
        elif other.startswith("from "):
            variant = replace(variant, begins_at=int(other.removeprefix("from ")))
        elif other not in _OTHER_SETTINGS:
            variant = replace(variant, costs=_OTHER_COSTS[other])
    built = _WORKLOADS[known](variant)
    for other in others:
        if other in _OTHER_SETTINGS:
            built = replace(built, settings=_OTHER_SETTINGS[other](built.settings))
    return replace(built, name=name, arrivals=built.arrivals[:count])
