"""One worker: an engine in virtual time, its event stream, and what stands between the two and us."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bench.fleet.plan import EngineKind
from bench.fleet.traffic import Ask
from enginesim.kv_events import KvEvent, encode_batch
from enginesim.request import Request
from enginesim.scheduler import Batch, Scheduler
from enginesim.settings import SglangSettings
from enginesim.sglang_scheduler import SglangScheduler
from enginesim.step_time import StepTime
from predictor.feed_state import FeedState

# Batches that an engine keeps for replay; vLLM keeps 10,000, which in memory is too much for sixteen of them.
_KEPT_BATCHES = 2000
# Before a request is in an engine's queue: HTTP, and making tokens of its words.
_OVERHEAD_S, _OVERHEAD_PER_TOKEN_S = 0.004, 0.5e-6


@dataclass(slots=True, eq=False)
class Machine:
    """`life` is another after every restart."""

    name: str
    pool: str
    endpoint: str
    kind: EngineKind
    scheduler: Scheduler = field(init=False)
    step_time: StepTime = field(init=False)
    life: int = 0
    up: bool = True
    under_way: Batch | None = None
    flying: dict[int, Request] = field(default_factory=dict)
    busy_s: float = 0.0
    # Its stream.
    sent: int = 0
    kept: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT_BATCHES))
    lost_share: float = 0.0
    keeps: bool = True  # it answers replays
    # Our side.
    feed: FeedState = field(default_factory=lambda: FeedState(can_replay=True))
    ask_at_s: float | None = None
    changes_seen: int = 0
    failures: int = 0
    tokens_seen: int = 0
    asked_about_s: float | None = None
    told: tuple[object, ...] | None = None

    def __post_init__(self) -> None:
        self._boot()

    def _boot(self) -> None:
        limits = self.kind.limits
        new = SglangScheduler if isinstance(limits, SglangSettings) else Scheduler
        self.scheduler = new(limits, _next_token)  # type: ignore[arg-type]
        # No two lives draw the same noise.
        self.step_time = StepTime(replace(self.kind.costs, seed=1000 * self.kind.costs.seed + self.life))

    def stop(self) -> list[int]:
        """Whom it had in progress."""
        self.up, self.under_way, lost = False, None, list(self.flying)
        self.flying.clear()
        return lost

    def start(self, kind: EngineKind) -> None:
        self.kind, self.up = kind, True
        self.life += 1
        self.sent = 0
        self.kept.clear()
        self._boot()

    @property
    def in_progress(self) -> int:
        return len(self.flying)

    def request(self, number: int, ask: Ask) -> Request:
        limits = self.kind.limits
        room = limits.longest_request_tokens - len(ask.tokens)
        request = Request(
            number,
            ask.tokens.tolist(),
            room if ask.max_tokens is None else min(room, ask.max_tokens),
            limits.block_size,
            ends_by_itself_after=ask.output_tokens,
        )
        request.hash_more()
        return request

    def overhead_s(self, ask: Ask) -> float:
        return _OVERHEAD_S + _OVERHEAD_PER_TOKEN_S * len(ask.tokens)

    def publish(self, events: Sequence[KvEvent], now_s: float) -> tuple[int, bytes]:
        """The next batch of its stream."""
        seq, payload = self.sent, encode_batch(events, now_s, "map")
        self.sent += 1
        self.kept.append((seq, payload))
        return seq, payload


def _next_token(request: Request) -> int:
    return 7 + (request.id * 31 + len(request.token_ids)) % 5000


def capacity_per_s(kind: EngineKind, asks: Sequence[Ask]) -> float:
    """Requests a second that an engine gets through while there is always something to do."""
    machine = Machine("", "", "", replace(kind, costs=replace(kind.costs, jitter=0.0)))
    scheduler, now_s = machine.scheduler, 0.0
    for number, ask in enumerate(asks):
        scheduler.add(machine.request(number, ask))
    begun = 0
    while begun < len(asks):
        batch = scheduler.schedule()
        now_s += machine.step_time.duration_s(batch)
        outputs, _ = scheduler.complete(batch)
        begun += sum(not output.position for output in outputs)
    return len(asks) / now_s
