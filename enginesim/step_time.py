"""How long one step takes: the formula that stands in for a GPU."""

import math
import random

from enginesim.scheduler import Batch, Chunk
from enginesim.settings import CostSettings

SPEED_MAX = 1000.0


class StepTime:
    """Durations of steps. A prefill chunk of n tokens behind p costs `a*n + b*((p+n)^2 - p^2)`; a decode a fixed part.

    All of it is divided by `speed`, which may change at run time, and multiplied by a seeded lognormal factor if the
    settings have a jitter.
    """

    def __init__(self, settings: CostSettings) -> None:
        self.settings = settings
        self._speed = check_speed(settings.speed)
        self._random = random.Random(settings.seed)

    @property
    def speed(self) -> float:
        """1 is as configured, 0.5 half as fast."""
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._speed = check_speed(speed)

    def duration_s(self, batch: Batch) -> float:
        """Seconds that the engine is busy with `batch`. Draws from the generator when there is jitter."""
        busy_s = self.settings.step_ms / 1e3 + sum(map(self._chunk_s, batch.chunks))
        if self.settings.jitter:
            busy_s *= math.exp(self._random.gauss(0.0, self.settings.jitter))
        return busy_s / self._speed

    def _chunk_s(self, chunk: Chunk) -> float:
        if chunk.is_decode:
            return self.settings.decode_ms / 1e3
        end = chunk.start + chunk.tokens
        linear_s = self.settings.prefill_us_per_token / 1e6 * chunk.tokens
        return linear_s + self.settings.prefill_ns_per_token2 / 1e9 * (end * end - chunk.start * chunk.start)


def check_speed(speed: object) -> float:
    """`speed` as a float; ValueError that says what is allowed otherwise."""
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed <= SPEED_MAX:
        raise ValueError(f"speed must be a number above 0 and at most {SPEED_MAX:g}, not {speed!r}")
    return float(speed)
