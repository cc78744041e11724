"""The domain alone: one decision, and learning."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from bench.row import Row, median_ms
from predictor.engines.vllm import Settings
from predictor.fleet import Fleet, Grant, PoolPolicy, Wish, WorkerSpec
from predictor.prefill_cost import LearningPolicy, PrefillCost
from predictor.prompt import BlockHasher, HashFamily, Prompt
from predictor.step_sample import StepSample

_BLOCK = 16
_FAMILY = HashFamily(_BLOCK)


def rows() -> Iterator[Row]:
    yield from _place()
    yield from _learn()


def _place() -> Iterator[Row]:
    for workers, queued in ((3, 2), (16, 16), (64, 16), (256, 64)):
        fleet, now_s = _busy_fleet(workers, queued)
        prompt = Prompt(2_000, exact=True, hashes={_FAMILY: np.arange(125, dtype=np.uint64)})
        number = 0

        def place(fleet: Fleet = fleet, prompt: Prompt = prompt, now_s: float = now_s) -> None:
            nonlocal number
            number += 1
            decision = fleet.place("p", prompt, Wish(f"bench-{number}", now_s), now_s)
            assert isinstance(decision, Grant)

        budget = "<= 3 ms" if workers == 256 else ""
        yield Row(f"decision, {workers} workers x {queued} queued", f"{median_ms(place, 20):.2f} ms", budget)


def _learn() -> Iterator[Row]:
    """Taking in what a busy worker shows: steps of all compositions, with noise."""
    rng = np.random.default_rng(4)
    cost = PrefillCost(LearningPolicy())
    samples = []
    for _ in range(6000):
        tokens, start, decoding = int(rng.integers(0, 8192)), int(rng.exponential(20_000)), int(rng.integers(1, 200))
        squares = (start + tokens) ** 2 - start**2
        step_s = 0.005 + 30e-6 * tokens + 37e-12 * squares + 50e-6 * decoding
        samples.append(StepSample(step_s * float(np.exp(rng.normal(0.0, 0.1))), tokens, squares, decoding))
    for sample in samples[:3000]:
        cost.add_steps(sample)
    times = []
    for sample in samples[3000:]:
        started_s = time.perf_counter()
        cost.add_steps(sample)
        times.append(time.perf_counter() - started_s)
    yield Row("a step learned from, fits included", f"{1e6 * sum(times) / len(times):.0f} us")
    yield Row(f"... the longest (a fit of {cost.samples} samples)", f"{1e3 * max(times):.1f} ms", "< 20 ms")


def _busy_fleet(workers: int, queued: int) -> tuple[Fleet, float]:
    rng = np.random.default_rng(3)
    fleet = Fleet([PoolPolicy("p")], BlockHasher(rng), rng)
    settings = Settings(block_size=_BLOCK, max_num_batched_tokens=2048)
    for number in range(workers):
        fleet.join("p", WorkerSpec(f"w{number}", f"10.0.0.1:{number + 1}", settings))
    for number in range(workers * queued):
        prompt = Prompt(int(rng.integers(500, 8_000)), exact=True)
        fleet.place("p", prompt, Wish(f"t{number}", 0.0), 0.0)
    return fleet, 0.001
