"""One line of the table of results."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured, its result, and the budget of DESIGN section 7 where there is one."""

    what: str
    result: str
    budget: str = ""


def collect_garbage_as_the_filter_does() -> None:
    """What is there now is not walked again, and what comes is walked seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def print_table(rows: Sequence[Row]) -> None:
    table = Table(box=None, padding=(0, 3, 0, 0))
    for column in ("what", "result", "budget"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.what, row.result, row.budget)
    Console(width=150).print(table)


def median_ms(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call in milliseconds, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) * 1e3
