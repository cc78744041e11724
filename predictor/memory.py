"""What was learned, as plain values that can be kept: of one worker, and of one pool.

What was learned of a worker holds for the engine that it was learned of. A fingerprint of its settings and version
says which that was.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import msgspec

from predictor.engines.vllm import Settings

VERSION = 1


class SampleRow(msgspec.Struct, frozen=True, array_like=True):
    """One timed piece of work; see `cost_fit`."""

    stratum: tuple[str | int, ...]
    kept: int
    seconds: float
    noise_s: float
    trust: float
    features: tuple[float, ...]


class CostMemory(msgspec.Struct, frozen=True):
    """One worker's samples, oldest first, and what has been counted of them."""

    requests: int
    intervals: int
    shortest: int
    longest: int
    rows: tuple[SampleRow, ...]


class ErrorsMemory(msgspec.Struct, frozen=True):
    """What forecasts of one kind were off by, in units of scale, oldest first; how far out the tails are taken; and the
    longest forecasts graded, which only a pool's memory tells, and older ones do not."""

    waits: bool
    sure: bool
    scores: tuple[float, ...]
    low_tail: float
    high_tail: float
    longest_s: tuple[float, ...] = ()


class WorkerMemory(msgspec.Struct, frozen=True):
    version: int
    worker: str
    fingerprint: str
    cost: CostMemory
    errors: tuple[ErrorsMemory, ...]


class LengthRow(msgspec.Struct, frozen=True, array_like=True):
    """One output's tokens, whether it ended by itself, and its `LengthClass`, of which older memories say nothing."""

    tokens: int
    whole: bool
    prompt_class: int | None = None
    limit_class: int | None = None


class PoolMemory(msgspec.Struct, frozen=True):
    version: int
    pool: str
    lengths: tuple[LengthRow, ...]  # oldest first
    errors: tuple[ErrorsMemory, ...]


def fingerprint(settings: Settings, version: str | None = None) -> str:
    """Equal for engines that what was learned of one holds for the other."""
    told = sorted((name, repr(value)) for name, value in asdict(settings).items())
    return hashlib.sha256(repr((told, version)).encode()).hexdigest()[:16]
