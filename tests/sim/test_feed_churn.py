"""An hour of churn in virtual time: engines restart, are cleared, come and go, and their event streams lose, repeat and
break off. Whenever a view is called live it is the engine's, and at the end every view is what its engine holds.

Engines run the simulator's own scheduler and block pool; payloads are those of the wire. One seed decides everything.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from enginesim.kv_events import KvEvent, encode_batch
from enginesim.request import Request
from enginesim.scheduler import Batch as EngineBatch
from enginesim.scheduler import Scheduler
from enginesim.settings import CostSettings, SchedulerSettings
from enginesim.step_time import StepTime
from predictor.engines.vllm import Settings
from predictor.feed_state import Apply, Clear, FeedState, Step, Trust
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.kv_events import Cleared, decode_batch
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens

BLOCK, BLOCKS = 16, 400
FAMILY = HashFamily(BLOCK)
LIMITS = SchedulerSettings(num_gpu_blocks=BLOCKS, block_size=BLOCK)
COSTS = CostSettings(step_ms=20.0)
HOUR_S, CALM_S = 3600.0, 90.0
NOTICED_WITHIN_S = 2.0


def _new_scheduler() -> Scheduler:
    return Scheduler(LIMITS, lambda request: (request.seed + len(request.token_ids)) % 5000)


@dataclass(eq=False)
class Engine:
    """One engine, and the wire between it and us."""

    name: str
    scheduler: Scheduler = field(default_factory=_new_scheduler)
    life: int = 0
    under_way: EngineBatch | None = None
    sent: int = 0
    kept: dict[int, bytes] = field(default_factory=dict)
    sent_by_s: list[tuple[float, int]] = field(default_factory=list)  # when, and how many there were then
    lossy: float = 0.0
    repeats: float = 0.0
    up: bool = True
    answers: bool = True
    holes: float = 0.0  # of replays
    gone: bool = False
    served: bool = False  # since we looked last


@dataclass(eq=False)
class Mirror:
    """Our side of one engine; `applied` is what the view is made of."""

    engine: Engine
    state: FeedState
    applied: list[tuple[int, int]] = field(default_factory=list)
    emptied_at: int | None = None  # the place in `applied` behind which it began with nothing
    lives: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # every payload that was ever sent


class Churn:
    """Engines, one fleet, one clock."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.hasher = BlockHasher(self.rng)
        self.fleet = Fleet([PoolPolicy("m")], self.hasher, self.rng)
        self.now_s = 0.0
        self.agenda: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.mirrors: dict[str, Mirror] = {}
        self.request_ids = itertools.count()
        self.names = itertools.count()
        systems = [self._tokens(int(self.rng.integers(20, 400))) for _ in range(3)]
        self.talks = [list(systems[number % 3]) for number in range(12)]
        self.done: Counter[str] = Counter()
        self.trusts: Counter[Trust] = Counter()
        self.step_time = StepTime(COSTS)

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, 5000, count)]

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.agenda, (self.now_s + seconds, next(self.order), what))

    def run(self, until_s: float) -> None:
        while self.agenda and self.agenda[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self.agenda)
            what()
        self.now_s = until_s

    # Engines

    def start(self, history: int = 0) -> None:
        """A new worker; its engine may have served others before."""
        engine = Engine(f"e{next(self.names)}")
        mirror = Mirror(engine, FeedState(can_replay=True))
        for _ in range(history):
            self._serve_now(mirror)
        settings = Settings(block_size=BLOCK, num_gpu_blocks=BLOCKS)
        self.fleet.join("m", WorkerSpec(engine.name, f"10.0.0.{len(self.mirrors)}:8000", settings))
        self.mirrors[engine.name] = mirror
        self.later(0.01, partial(self.contact, mirror, up=True))
        self.later(0.1, partial(self._arrive, mirror))
        self.later(0.1, partial(self._expect, mirror))

    def stop(self, name: str) -> None:
        mirror = self.mirrors.pop(name)
        mirror.engine.gone = True
        self.fleet.leave(name)

    def _serve_now(self, mirror: Mirror) -> None:
        """Before anybody listens."""
        mirror.engine.scheduler.add(self._request())
        while mirror.engine.scheduler.has_work:
            scheduler = mirror.engine.scheduler
            _, events = scheduler.complete(scheduler.schedule())
            if events:
                self._publish(mirror, events)

    def _request(self) -> Request:
        talk = self.talks[int(self.rng.integers(len(self.talks)))]
        if len(talk) > 1500:
            del talk[int(self.rng.integers(20, 400)) :]
        talk += self._tokens(int(self.rng.integers(5, 120)))
        number = next(self.request_ids)
        request = Request(number, list(talk), int(self.rng.integers(1, 40)), BLOCK, seed=number)
        request.hash_more()
        return request

    def _arrive(self, mirror: Mirror) -> None:
        engine = mirror.engine
        if engine.gone or self.now_s > HOUR_S - CALM_S / 2:
            return
        if engine.up:
            engine.served = True
            engine.scheduler.add(self._request())
            self._begin_step(mirror)
        self.later(float(self.rng.exponential(4.0)), partial(self._arrive, mirror))

    def _begin_step(self, mirror: Mirror) -> None:
        engine = mirror.engine
        if engine.under_way is None and engine.scheduler.has_work:
            engine.under_way = engine.scheduler.schedule()
            duration_s = self.step_time.duration_s(engine.under_way)
            self.later(duration_s, partial(self._end_step, mirror, engine.life))

    def _end_step(self, mirror: Mirror, life: int) -> None:
        engine = mirror.engine
        if engine.gone or engine.life != life or engine.under_way is None:
            return
        batch, engine.under_way, engine.served = engine.under_way, None, True
        _, events = engine.scheduler.complete(batch)
        if events:
            self._publish(mirror, events)
        self._begin_step(mirror)

    def _publish(self, mirror: Mirror, events: Sequence[KvEvent]) -> None:
        engine = mirror.engine
        payload = encode_batch(events, self.now_s + 1e-6 * engine.sent, "map")  # no two alike
        seq, engine.sent = engine.sent, engine.sent + 1
        engine.kept[seq] = payload
        engine.sent_by_s.append((self.now_s, engine.sent))
        mirror.lives[payload] = (engine.life, seq)
        if engine.up and engine.name in self.mirrors and self.rng.random() >= engine.lossy:
            for _ in range(2 if self.rng.random() < engine.repeats else 1):
                self.do(mirror, mirror.state.live(seq, payload, self.now_s))

    # Our side

    def contact(self, mirror: Mirror, up: bool) -> None:
        mirror.engine.up = up
        if not mirror.engine.gone:
            self.do(mirror, mirror.state.connected(self.now_s) if up else mirror.state.disconnected(self.now_s))

    def do(self, mirror: Mirror, steps: Sequence[Step]) -> None:
        self._take(mirror, steps)
        while mirror.state.more:
            self._take(mirror, mirror.state.go_on())
        self.fleet.set_trust(mirror.engine.name, mirror.state.trust, mirror.state.coverage)
        if mirror.state.due_s is not None:
            self.later(max(0.0, mirror.state.due_s - self.now_s), partial(self._ask, mirror))

    def _take(self, mirror: Mirror, steps: Sequence[Step]) -> None:
        name = mirror.engine.name
        for step in steps:
            match step:
                case Clear():
                    self.fleet.clear(name)
                    mirror.applied, mirror.emptied_at = [], None
                case Apply(_, payload, _):
                    batch = decode_batch(payload)
                    assert not batch.skipped
                    self.fleet.apply(name, batch)
                    mirror.applied.append(mirror.lives[payload])
                    if any(isinstance(event, Cleared) for event in batch.events):
                        mirror.state.emptied()
                        mirror.emptied_at = len(mirror.applied) - 1

    def _ask(self, mirror: Mirror) -> None:
        engine = mirror.engine
        if engine.gone:
            return
        first = mirror.state.ask(self.now_s)
        number = mirror.state.round
        if first is None or number is None:
            return
        if not engine.answers or not engine.up:
            self.later(mirror.state.patience_s, partial(self._replay_ended, mirror, number, complete=False))
            return
        replayed = [(seq, payload) for seq, payload in engine.kept.items() if seq >= first]
        if len(replayed) > 2 and self.rng.random() < engine.holes:
            del replayed[int(self.rng.integers(1, len(replayed) - 1))]  # what is dropped last takes the end along
        for seq, payload in replayed:
            self.do(mirror, mirror.state.replayed(number, seq, payload, self.now_s))
        self.later(0.05, partial(self._replay_ended, mirror, number, complete=True))

    def _replay_ended(self, mirror: Mirror, number: int, complete: bool) -> None:
        if not mirror.engine.gone:
            self.do(mirror, mirror.state.replay_ended(number, complete, self.now_s))

    def _expect(self, mirror: Mirror) -> None:
        """What the fleet knows of requests that come and go."""
        engine = mirror.engine
        if engine.gone:
            return
        if engine.served or engine.scheduler.has_work:
            engine.served = False
            mirror.state.expect(self.now_s)
            self.do(mirror, ())
        self.later(0.4, partial(self._expect, mirror))

    # Faults

    def trouble(self) -> None:
        """One kind of fault, for one engine, now; the next in a while."""
        if self.now_s > HOUR_S - CALM_S:
            return
        mirror = list(self.mirrors.values())[int(self.rng.integers(len(self.mirrors)))]
        kinds = [
            self._lose, self._repeat, self._blink, self._crash, self._crash_unseen, self._reset, self._no_replays,
            self._holes, self._forget, self._scale,
        ]  # fmt: skip
        kind = kinds[int(self.rng.integers(len(kinds)))]
        self.done[kind.__name__] += 1
        kind(mirror)
        self.later(float(self.rng.exponential(5.0)), self.trouble)

    def _for_a_while(self, mirror: Mirror, name: str, value: float) -> None:
        setattr(mirror.engine, name, value)
        self.later(float(self.rng.uniform(1, 6)), partial(setattr, mirror.engine, name, type(value)(0)))

    def _lose(self, mirror: Mirror) -> None:
        self._for_a_while(mirror, "lossy", 0.4)

    def _repeat(self, mirror: Mirror) -> None:
        self._for_a_while(mirror, "repeats", 0.5)

    def _holes(self, mirror: Mirror) -> None:
        self._for_a_while(mirror, "holes", 0.7)

    def _no_replays(self, mirror: Mirror) -> None:
        mirror.engine.answers = False
        self.later(float(self.rng.uniform(1, 15)), partial(setattr, mirror.engine, "answers", True))

    def _blink(self, mirror: Mirror) -> None:
        if mirror.engine.up:
            self.contact(mirror, up=False)
            self.later(float(self.rng.uniform(0.1, 5)), partial(self.contact, mirror, up=True))

    def _renew(self, mirror: Mirror) -> None:
        engine = mirror.engine
        engine.scheduler, engine.under_way = _new_scheduler(), None
        engine.life += 1
        engine.sent, engine.kept, engine.sent_by_s = 0, {}, []

    def _crash(self, mirror: Mirror) -> None:
        """Back after a while, and perhaps with more behind it than it had before by the time we hear of it."""
        if mirror.engine.up:
            self.contact(mirror, up=False)
            self._renew(mirror)
            for _ in range(int(self.rng.integers(0, 30))):
                self._serve_now(mirror)
            self.later(float(self.rng.uniform(0.1, 10)), partial(self.contact, mirror, up=True))

    def _crash_unseen(self, mirror: Mirror) -> None:
        """Behind something that keeps our connection; its counters tell within a second."""
        if mirror.engine.up:
            self._renew(mirror)
            self.later(1.0, partial(self._doubt, mirror))

    def _doubt(self, mirror: Mirror) -> None:
        if not mirror.engine.gone:
            self.do(mirror, mirror.state.doubt("counters", self.now_s))

    def _reset(self, mirror: Mirror) -> None:
        """Waits, as vLLM's does, until nothing runs; the event leaves with the next step."""
        if mirror.engine.up and not mirror.engine.gone and not mirror.engine.scheduler.pool.clear():
            self.later(0.2, partial(self._reset, mirror))

    def _forget(self, mirror: Mirror) -> None:
        """Batches are lost for good; some time later the cache is emptied."""
        engine = mirror.engine
        engine.kept = dict(list(engine.kept.items())[-2:])
        self._lose(mirror)
        self.later(float(self.rng.uniform(5, 40)), partial(self._reset, mirror))

    def _scale(self, mirror: Mirror) -> None:
        if len(self.mirrors) > 3:
            self.stop(mirror.engine.name)
        else:
            self.start(history=int(self.rng.integers(0, 20)))
            self.start()

    # Judging

    def look(self) -> None:
        """Every second: a view that is called live lacks nothing that is older than two seconds."""
        for mirror in self.mirrors.values():
            self.trusts[mirror.state.trust] += 1
            engine = mirror.engine
            born_s = engine.sent_by_s[0][0] if engine.sent_by_s else self.now_s
            if mirror.state.trust is Trust.LIVE and born_s < self.now_s - NOTICED_WITHIN_S:
                settled = max((n for at_s, n in engine.sent_by_s if at_s < self.now_s - NOTICED_WITHIN_S), default=0)
                self._assert_whole(mirror, settled)
        if self.now_s < HOUR_S:
            self.later(1.0, self.look)

    def _assert_whole(self, mirror: Mirror, settled: int) -> None:
        place = f"{mirror.engine.name} at {self.now_s:.1f} s"
        assert mirror.applied, place
        life, first = mirror.applied[mirror.emptied_at or 0]
        assert mirror.emptied_at is not None or first == 0, place
        expected = [(life, first + number) for number in range(len(mirror.applied) - (mirror.emptied_at or 0))]
        assert mirror.applied[mirror.emptied_at or 0 :] == expected, place
        assert life == mirror.engine.life, place
        assert mirror.applied[-1][1] + 1 >= settled, place

    def assert_equal_to_the_engines(self) -> None:
        views = self.fleet.view(self.now_s)["pools"]
        assert isinstance(views, dict)
        for talk in self.talks:
            for cut in range(40, len(talk), 97):
                self._assert_same_prefix(talk[:cut])
        for name, mirror in self.mirrors.items():
            assert views["m"]["workers"][name]["feed"] == "live", name
            assert views["m"]["workers"][name]["cached_blocks"] == mirror.engine.scheduler.pool.distinct_blocks, name

    def _assert_same_prefix(self, tokens: list[int]) -> None:
        prompt = Prompt(len(tokens), True, {FAMILY: self.hasher.prompt_hashes(as_tokens(tokens), FAMILY, Namespace())})
        wish = Wish(f"look{next(self.request_ids)}", self.now_s)
        grant = self.fleet.place("m", prompt, wish, self.now_s)
        assert isinstance(grant, Grant)
        self.fleet.finish(wish.ticket_id, Usage(), self.now_s)
        request = Request(0, tokens, 1, BLOCK)
        request.hash_more()
        for priced in grant.forecasts:
            pool = self.mirrors[priced.worker].engine.scheduler.pool
            assert priced.cached_tokens == len(pool.find_prefix(request)) * BLOCK, priced.worker


@pytest.mark.parametrize("seed", [20261129, 3])
def test_an_hour_of_churn_ends_with_every_view_equal_to_its_engine(seed: int) -> None:
    churn = Churn(seed)
    for _ in range(3):
        churn.start()
    churn.later(5.0, churn.trouble)
    churn.look()
    churn.run(HOUR_S - CALM_S / 2)
    for mirror in churn.mirrors.values():
        if mirror.state.trust is not Trust.LIVE:
            churn._reset(mirror)
    churn.run(HOUR_S - 30)
    for mirror in churn.mirrors.values():
        churn._serve_now(mirror)  # an idle engine says with its next step that it was emptied
    churn.run(HOUR_S)
    assert len(churn.done) == 10
    assert min(churn.done.values()) > 20, f"seed {seed}: {churn.done}"
    assert churn.trusts[Trust.LIVE] > 0.5 * churn.trusts.total()
    churn.assert_equal_to_the_engines()
