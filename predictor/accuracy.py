"""How near predictions were, in the figures by which this project is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from predictor.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Outcome:
    """One predicted request; seconds from when it reached the filter. None: not seen."""

    id: str
    worker: str
    predicted_ttft_s: float
    wait_s: float
    prefill_s: float
    cached_tokens: int
    low_s: float
    high_s: float
    actual_ttft_s: float | None
    actual_cached_tokens: int | None
    prompt_tokens: int
    in_flight: int  # on its worker, when it came
    learned: bool
    block_size: int

    @classmethod
    def predicted(
        cls, request_id: str, priced: Forecast, ttft_s: float, in_flight: int, learned: bool, block_size: int
    ) -> Outcome:
        """Before anything of it has come."""
        return cls(
            id=request_id,
            worker=priced.worker,
            predicted_ttft_s=ttft_s,
            wait_s=priced.wait_s,
            prefill_s=priced.prefill_s,
            cached_tokens=priced.cached_tokens,
            low_s=priced.low_s,
            high_s=priced.high_s,
            actual_ttft_s=None,
            actual_cached_tokens=None,
            prompt_tokens=priced.prompt_tokens,
            in_flight=in_flight,
            learned=learned,
            block_size=block_size,
        )

    @property
    def cache(self) -> str:
        """Whether the cached tokens were credited right, to the block."""
        if self.actual_cached_tokens is None:
            return "unreported"
        return "right" if abs(self.cached_tokens - self.actual_cached_tokens) < self.block_size else "wrong"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of graded requests: shares from 0 to 1, relative errors as parts of the truth."""

    graded: int
    within_1s: float
    within_10s: float
    median_relative: float
    p90_relative: float
    bias_s: float  # positive: the truth was slower
    coverage: float  # of the 90 % interval


def accuracy(outcomes: Sequence[Outcome]) -> Accuracy | None:
    """None where nothing was graded."""
    errors_s, relative = [], []
    covered = 0
    for outcome in outcomes:
        if outcome.actual_ttft_s is None:
            continue
        error_s = outcome.actual_ttft_s - outcome.predicted_ttft_s
        errors_s.append(error_s)
        relative.append(abs(error_s) / max(outcome.actual_ttft_s, 1e-9))
        covered += outcome.low_s - 1e-9 <= outcome.actual_ttft_s <= outcome.high_s + 1e-9
    if not errors_s:
        return None
    count = len(errors_s)
    relative.sort()
    return Accuracy(
        graded=count,
        within_1s=sum(abs(error_s) <= 1 for error_s in errors_s) / count,
        within_10s=sum(abs(error_s) <= 10 for error_s in errors_s) / count,
        median_relative=relative[count // 2],
        p90_relative=relative[min(count - 1, int(0.9 * count))],
        bias_s=sum(errors_s) / count,
        coverage=covered / count,
    )


_LENGTHS = ((1000, "up to 1K"), (8000, "1K to 8K"), (32_000, "8K to 32K"), (128_000, "32K to 128K"))
_LOADS = ((0, "nobody else"), (3, "1 to 3 others"), (15, "4 to 15 others"), (63, "16 to 63 others"))


def _bucket(value: int, bounds: Sequence[tuple[int, str]], beyond: str) -> str:
    return next((name for most, name in bounds if value <= most), beyond)


def by_parts(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Accuracy]]:
    """The same figures for parts of the whole: by worker, load, prompt length and cache agreement."""
    parts: dict[str, Callable[[Outcome], str]] = {
        "worker": lambda outcome: outcome.worker,
        "load": lambda outcome: _bucket(outcome.in_flight, _LOADS, "64 and more others"),
        "prompt length": lambda outcome: _bucket(outcome.prompt_tokens, _LENGTHS, "beyond 128K"),
        "cache estimate": lambda outcome: outcome.cache,
    }
    order = [name for _, name in (*_LOADS, *_LENGTHS)]
    report = {}
    for title, part in parts.items():
        groups: dict[str, list[Outcome]] = {}
        for outcome in outcomes:
            groups.setdefault(part(outcome), []).append(outcome)
        names = sorted(groups, key=lambda name: (order.index(name) if name in order else len(order), name))
        found = {name: accuracy(groups[name]) for name in names}
        report[title] = {name: figures for name, figures in found.items() if figures is not None}
    return report


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Everything as plain values. `after_first_tenth` leaves out what is warm-up."""
    whole = accuracy(outcomes)
    warm = accuracy(outcomes[len(outcomes) // 10 :])
    return {
        "requests": len(outcomes),
        "learned": sum(outcome.learned for outcome in outcomes),
        "all": None if whole is None else asdict(whole),
        "after_first_tenth": None if warm is None else asdict(warm),
        "by": {
            title: {name: asdict(figures) for name, figures in groups.items()}
            for title, groups in by_parts(outcomes).items()
        },
    }


def as_text(outcomes: Sequence[Outcome]) -> str:
    """A table for people."""
    lines = [f"{'':<34}{'graded':>8}{'<= 1 s':>9}{'<= 10 s':>9}{'median':>9}{'p90':>9}{'bias':>10}{'covered':>9}"]

    def row(name: str, figures: Accuracy | None) -> None:
        if figures is not None:
            lines.append(
                f"{name:<34}{figures.graded:>8}{figures.within_1s:>9.1%}{figures.within_10s:>9.1%}"
                f"{figures.median_relative:>9.1%}{figures.p90_relative:>9.1%}{figures.bias_s:>+9.3f}s{figures.coverage:>9.1%}"
            )

    row("all", accuracy(outcomes))
    row("without the first tenth", accuracy(outcomes[len(outcomes) // 10 :]))
    for title, groups in by_parts(outcomes).items():
        lines.append(f"by {title}")
        for name, figures in groups.items():
            row(f"  {name}", figures)
    return "\n".join(lines)
