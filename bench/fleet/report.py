"""What a run comes to, per pool and in all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.fleet.world import Judged, PoolCount, World
from predictor.accuracy import Accuracy, accuracy
from predictor.hindsight import Verdict

OVERALL = "all"
_CAPTION = (
    "right, wrong: where the cache estimate was right to the block, or not; late: of those let in with a bound; "
    "alarms: false ones of all refusals that can be told"
)


@dataclass(frozen=True, slots=True)
class PoolReport:
    """Shares are from 0 to 1; None: of nothing."""

    pool: str
    asked: int
    whole: Accuracy | None
    learned: Accuracy | None  # of forecasts that rested on learned costs
    right: Accuracy | None
    wrong: Accuracy | None
    wrong_share: float | None  # of those whose cached tokens were reported
    refused: int
    false_alarms: int
    right_refusals: int
    let_in_with_bound: int
    late: int
    moved: int
    failed: int
    given_up: int
    capacity_per_s: float


@dataclass(frozen=True, slots=True)
class Report:
    hours: float
    pools: tuple[PoolReport, ...]  # the last is of all
    done: dict[str, int]  # what happened to the engines
    busy: dict[str, float]  # of each engine's time
    headway_cpu_s: float

    def of(self, pool: str) -> PoolReport:
        return next(report for report in self.pools if report.pool == pool)

    def plain(self) -> dict[str, object]:
        return asdict(self)


def report(world: World) -> Report:
    pools = [_pool_report(name, world.judged, [count]) for name, count in world.counts.items()]
    pools.append(_pool_report(OVERALL, world.judged, list(world.counts.values())))
    busy = {machine.name: machine.busy_s / world.now_s for machine in world.machines.values()}
    return Report(world.now_s / 3600.0, tuple(pools), dict(world.done), busy, world.headway_s)


def _pool_report(name: str, judged: Sequence[Judged], counts: Sequence[PoolCount]) -> PoolReport:
    outcomes = [one.outcome for one in judged if name in (one.pool, OVERALL)]
    right = [outcome for outcome in outcomes if outcome.cache == "right"]
    wrong = [outcome for outcome in outcomes if outcome.cache == "wrong"]

    def total(count: Callable[[PoolCount], int]) -> int:
        return sum(map(count, counts))

    return PoolReport(
        pool=name,
        asked=total(lambda count: count.asked),
        whole=accuracy(outcomes),
        learned=accuracy([outcome for outcome in outcomes if outcome.learned]),
        right=accuracy(right),
        wrong=accuracy(wrong),
        wrong_share=len(wrong) / (len(right) + len(wrong)) if right or wrong else None,
        refused=total(lambda count: count.refused),
        false_alarms=total(lambda count: count.reviews[Verdict.FALSE_ALARM]),
        right_refusals=total(lambda count: count.reviews[Verdict.RIGHT]),
        let_in_with_bound=total(lambda count: count.bounded),
        late=total(lambda count: count.late),
        moved=total(lambda count: count.moved),
        failed=total(lambda count: count.failed),
        given_up=total(lambda count: count.given_up),
        capacity_per_s=sum(count.capacity_per_s for count in counts),
    )


def show(title: str, reports: Iterable[PoolReport]) -> None:
    table = Table(title=title, title_justify="left", caption=_CAPTION, box=None, padding=(0, 2, 0, 0))
    columns = ("pool", "graded", "<= 1 s", "<= 10 s", "median", "cover", "wrong", "right <= 1 s", "<= 10 s")
    for column in (*columns, "wrong <= 1 s", "<= 10 s", "refused", "alarms", "late"):
        table.add_column(column, no_wrap=True)
    for one in reports:
        whole = one.whole
        if whole is None:
            continue
        told = one.false_alarms + one.right_refusals
        table.add_row(
            one.pool,
            str(whole.graded),
            *map(_share, (whole.within_1s, whole.within_10s, whole.median_relative, whole.coverage, one.wrong_share)),
            *_within(one.right),
            *_within(one.wrong),
            _share(one.refused / max(1, one.asked)),
            _share(one.false_alarms / told if told else None),
            _share(one.late / one.let_in_with_bound if one.let_in_with_bound else None),
        )
    Console(width=170).print(table)


def _within(part: Accuracy | None) -> tuple[str, str]:
    return ("-", "-") if part is None else (_share(part.within_1s), _share(part.within_10s))


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
