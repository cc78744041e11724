"""Predicted times to first token of a real engine behind a real Envoy, up to four fifths of what it can do."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from enginesim.words import text
from tests.e2e.harness import until
from tests.engine.harness import RealEngine, StepCost
from tests.engine.live import Live, live

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.timeout(900)]

SEED = 20261130
UTILISATIONS = (0.4, 0.6, 0.8)
_SHORTEST, _LONGEST = 200, 6000

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Graded:
    """As the filter's log has it."""

    predicted_s: float
    actual_s: float

    @property
    def error(self) -> float:
        return abs(self.actual_s - self.predicted_s) / self.actual_s


@dataclass(frozen=True, slots=True)
class Told:
    at_s: float
    body: dict[str, Any]


@pytest.fixture
def per_utilisation(request: pytest.FixtureRequest) -> int:
    return 30 if request.config.getoption("--reduced") else 100


async def test_up_to_four_fifths_of_what_an_engine_can_do_forecasts_are_near(
    engine: RealEngine, tmp_path: Path, per_utilisation: int
) -> None:
    graded = await _graded(engine, tmp_path, per_utilisation)
    errors = [one.error for one in graded]
    assert len(errors) >= 0.95 * per_utilisation * len(UTILISATIONS)
    assert median(errors) <= 0.06
    assert _p90(errors) <= 0.20


async def _graded(engine: RealEngine, folder: Path, count: int) -> list[Graded]:
    """Prompts of all lengths, some of which begin alike, at rising rates; and what was predicted of each of them."""
    rng = random.Random(SEED)
    async with live(folder, {"real": engine}) as stack:
        for tokens in (60, 3000, 250, 6000, 1200, 100, 700, 2000, 4500, 150) * 2:
            await stack.ask(_body(rng, tokens, 10))
        assert (await stack.worker("real"))["cost"]["basis"] == "curve"
        await _at_rest(stack)
        before = len(_log_of(stack))
        for utilisation in UTILISATIONS:
            begun = len(_log_of(stack))
            await _play(stack, _arrivals(rng, engine.settings.cost, utilisation, count))
            await _at_rest(stack)
            some = _log_of(stack)[begun:]
            _logger.info("seed %d, utilisation %g: %s", SEED, utilisation, _figures(some))
        graded = _log_of(stack)[before:]
    _logger.info("all: %s", _figures(graded))
    return graded


def _arrivals(rng: random.Random, cost: StepCost, utilisation: float, count: int) -> list[Told]:
    shared = [text(rng.randrange(300, 2500), rng.randrange(1 << 30)) for _ in range(4)]
    asks = []
    for _ in range(count):
        tokens = round(math.exp(rng.uniform(math.log(_SHORTEST), math.log(_LONGEST))))
        output = rng.choice((1, 4, 12, 30))
        asks.append((tokens, output, rng.choice(shared) if rng.random() < 0.3 else ""))
    work_s = sum(_work_s(cost, tokens, output) for tokens, output, _ in asks) / count
    at_s, told = 0.0, []
    for tokens, output, begins in asks:
        at_s += rng.expovariate(utilisation / work_s)
        told.append(Told(at_s, _body(rng, tokens, output, begins)))
    return told


def _work_s(cost: StepCost, tokens: int, output: int) -> float:
    """Of the engine's time what one request takes, beside others."""
    prefill_s = cost.prefill_us_per_token / 1e6 * tokens + cost.prefill_ns_per_token2 / 1e9 * tokens * tokens
    return cost.step_ms / 1e3 + prefill_s + output * cost.decode_ms / 1e3


def _body(rng: random.Random, tokens: int, output: int, begins: str = "") -> dict[str, Any]:
    content = f"{begins} {text(tokens, rng.randrange(1 << 30))}".strip()
    return {"messages": [{"role": "user", "content": content}], "max_tokens": output, "ignore_eos": True}


async def _play(stack: Live, told: Sequence[Told]) -> None:
    began_s = time.monotonic()

    async def one(ask: Told) -> None:
        await asyncio.sleep(max(0.0, began_s + ask.at_s - time.monotonic()))
        await stack.ask(ask.body)

    await asyncio.gather(*(one(ask) for ask in told))


async def _at_rest(stack: Live) -> None:
    """Everything has ended, and the log has it."""

    async def written() -> bool:
        counts = await stack.counts()
        in_flight = (await stack.stack.fleet())["in_flight"]
        return not in_flight and len(_log_of(stack)) >= counts.sum("headway_predictions_graded_total")

    await until(written, 30, "log of all grades")


def _log_of(stack: Live) -> list[Graded]:
    assert stack.stack.filter is not None
    lines = stack.stack.filter.log.read_text().splitlines()
    told = [json.loads(line) for line in lines if '"event":"graded"' in line]
    return [Graded(one["predicted_ttft_s"], one["actual_ttft_s"]) for one in told]


def _figures(graded: Sequence[Graded]) -> str:
    errors = [one.error for one in graded]
    within = sum(abs(one.actual_s - one.predicted_s) <= 1.0 for one in graded) / len(graded)
    return (
        f"{len(graded)} graded, relative error median {median(errors):.1%}, 90th percentile {_p90(errors):.1%}, "
        f"{within:.1%} within 1 s, median TTFT {median(one.actual_s for one in graded):.2f} s"
    )


def _p90(errors: Sequence[float]) -> float:
    return sorted(errors)[int(0.9 * len(errors))]
