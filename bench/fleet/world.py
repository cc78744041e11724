"""The fleet's engines and clients in virtual time, and Headway, which sees of them what the edge would show it.

That is: requests, first tokens and ends as Envoy reports them, KV batches as they come over the wire and get lost
there, and what a probe is told every few seconds. Nobody tells it what an engine costs, when one slows down, or how
long an output will be.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from bench.fleet.machine import Machine, capacity_per_s
from bench.fleet.plan import EngineKind, Incident, Plan, PoolPlan, Rollout, Trouble, worker_name
from bench.fleet.traffic import TRACE, Ask, Trace, read_trace
from enginesim.request import Phase, Request
from predictor.accuracy import Outcome
from predictor.admission import Refusal
from predictor.feed_state import Apply, Clear, Step
from predictor.fleet import Fleet, Grant, NoWorker, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.hindsight import Verdict
from predictor.kv_events import Cleared, decode_batch
from predictor.prompt import BlockHasher, Namespace, Prompt

# A first token on its way back; an end as the access log tells it, at most.
_TOKEN_LATE_S, _END_LATE_S = 0.002, 0.1
_PROBE_S, _PROBE_AGAIN_S, _ABOUT_S, _DOWN_AFTER = 5.0, 0.5, 60.0, 2
_LOOK_S, _REPLAY_S, _REVIEWS_S, _RECONNECT_S = 0.5, 0.05, 60.0, 1.0
# Rollouts: how long one drains at most, and how long it takes to start.
_DRAIN_S, _START_S = 180.0, 60.0
_CAPACITY_ASKS = 120
_STEP_ENDS, _ELSE = 0, 1


@dataclass(frozen=True, slots=True)
class Judged:
    """One request that Headway placed."""

    pool: str
    at_s: float
    outcome: Outcome


@dataclass(slots=True)
class PoolCount:
    """What became of a pool's requests that no forecast tells."""

    asked: int = 0
    refused: int = 0
    reviews: Counter[Verdict] = field(default_factory=Counter)
    moved: int = 0  # Envoy sent them elsewhere, since the chosen one was gone
    failed: int = 0  # nobody took them, or their engine died
    given_up: int = 0
    bypassed: int = 0
    bounded: int = 0  # let in with a bound, and graded
    late: int = 0  # of these, beyond their bound
    capacity_per_s: float = 0.0


@dataclass(slots=True)
class _Flight:
    """A request on its way; `judged_at` is its place in `World.judged`."""

    pool: PoolPlan
    machine: Machine
    asked_at_s: float
    judged_at: int | None


class World:
    """Ends of steps come first at any instant, then everything else, then new steps begin."""

    def __init__(self, plan: Plan, seed: int, bypass: float = 0.0, capacity_asks: int = _CAPACITY_ASKS) -> None:
        self.plan = plan
        self.now_s = 0.0
        self.judged: list[Judged] = []
        self.counts = {pool.name: PoolCount() for pool in plan.pools}
        self.done: Counter[str] = Counter()
        self.headway_s = 0.0  # CPU time
        self._bypass = bypass
        self._capacity_asks = capacity_asks
        self._rng = np.random.default_rng([seed, 3])
        self._agenda: list[tuple[float, int, int, Callable[[], None]]] = []
        self._order, self._numbers = itertools.count(), itertools.count(1)
        self._flights: dict[int, _Flight] = {}
        self._ready: list[Machine] = []
        lines = read_trace(TRACE)
        self._traces = {pool.name: Trace(pool, lines, seed, place) for place, pool in enumerate(plan.pools)}
        self._turns = {pool.name: itertools.count() for pool in plan.pools}
        ours = np.random.default_rng([seed, 4])
        self._hasher = BlockHasher(ours)
        self.fleet = Fleet([PoolPolicy(pool.name) for pool in plan.pools], self._hasher, ours)
        self.machines: dict[str, Machine] = {}
        for pool in plan.pools:
            self._add(pool)

    def _add(self, pool: PoolPlan) -> None:
        asks = [self._traces[pool.name].ask(number) for number in range(self._capacity_asks)]
        for number, kind in enumerate(pool.engines):
            name, endpoint = worker_name(pool, number), f"{pool.name}.{number}:8000"
            machine = self.machines[name] = Machine(name, pool.name, endpoint, kind)
            self.fleet.join(pool.name, WorkerSpec(name, endpoint, kind.settings))
            self._later(0.01, partial(self._contact, machine, True))
            self._later(float(self._rng.uniform(0.02, _PROBE_S)), partial(self._probe, machine))
            self._later(float(self._rng.uniform(0.02, _LOOK_S)), partial(self._look, machine))
            self.counts[pool.name].capacity_per_s += capacity_per_s(kind, asks)
        self._later(0.1, partial(self._next_ask, pool))

    def run(self, on_hour: Callable[[int], None] = lambda hour: None) -> None:
        """Until nobody asks any more and everything is answered."""
        for incident in self.plan.incidents:
            self._later(incident.at_s, partial(self._befall, incident))
        for rollout in self.plan.rollouts:
            self._later(rollout.at_s, partial(self._roll_out, rollout))
        self._later(_REVIEWS_S, self._review)
        hour = 1
        while self._agenda:
            at_s = self._agenda[0][0]
            if at_s >= 3600.0 * hour:
                on_hour(hour)
                hour += 1
            if at_s > self.plan.ends_at_s and not self._flights:
                break
            self.now_s, _, _, what = heapq.heappop(self._agenda)
            what()
            if self._ready and (not self._agenda or self._agenda[0][0] > self.now_s):
                self._begin_steps()
        self._review()

    def _later(self, seconds: float, what: Callable[[], None], first: int = _ELSE) -> None:
        heapq.heappush(self._agenda, (self.now_s + seconds, first, next(self._order), what))

    # Clients

    def _next_ask(self, pool: PoolPlan) -> None:
        per_s = self.plan.load(pool, self.now_s) * self.counts[pool.name].capacity_per_s
        gap_s = float(self._rng.exponential(1.0 / per_s))
        if self.now_s + gap_s < self.plan.ends_at_s:
            self._later(gap_s, partial(self._ask, pool))

    def _ask(self, pool: PoolPlan) -> None:
        self._next_ask(pool)
        number, count = next(self._numbers), self.counts[pool.name]
        ask = self._traces[pool.name].ask(next(self._turns[pool.name]))
        if self._bypass and self._rng.random() < self._bypass:
            count.bypassed += 1
            machine = self._somebody(pool)
            if machine is not None:
                self._send(number, pool, machine, ask, None)
            return
        count.asked += 1
        began_s = time.process_time()
        families = self.fleet.hash_families(pool.name)
        hashes = {family: self._hasher.prompt_hashes(ask.tokens, family, Namespace()) for family in families}
        wish = Wish(str(number), self.now_s, max_queue_wait_s=ask.bound_s, max_tokens=ask.max_tokens)
        decision = self.fleet.place(pool.name, Prompt(len(ask.tokens), True, hashes), wish, self.now_s)
        self.headway_s += time.process_time() - began_s
        if isinstance(decision, Refusal):
            count.refused += 1
        elif isinstance(decision, NoWorker):
            count.failed += 1
        else:
            self._granted(number, pool, ask, decision)

    def _granted(self, number: int, pool: PoolPlan, ask: Ask, grant: Grant) -> None:
        ticket, priced = grant.ticket, grant.ticket.forecast
        endpoints = {machine.endpoint: machine for machine in self.machines.values()}
        taker = next((endpoints[one] for one in grant.endpoints if endpoints[one].up), None)
        if taker is None:
            self.counts[pool.name].failed += 1
            self._later(_TOKEN_LATE_S, partial(self._ended, number, Usage()))
            return
        self.counts[pool.name].moved += taker.name != ticket.worker
        outcome = Outcome.predicted(
            ticket.id,
            priced,
            priced.ttft_s,
            self.fleet.in_flight_on(ticket.worker) - 1,
            self.fleet.learned(ticket.worker),
            self.machines[ticket.worker].kind.limits.block_size,
        )
        self.judged.append(Judged(pool.name, self.now_s, outcome))
        self._send(number, pool, taker, ask, len(self.judged) - 1)

    def _somebody(self, pool: PoolPlan) -> Machine | None:
        up = [machine for machine in self.machines.values() if machine.pool == pool.name and machine.up]
        return up[int(self._rng.integers(len(up)))] if up else None

    def _send(self, number: int, pool: PoolPlan, machine: Machine, ask: Ask, judged_at: int | None) -> None:
        request = machine.request(number, ask)
        self._flights[number] = _Flight(pool, machine, self.now_s, judged_at)
        machine.flying[number] = request
        self._later(machine.overhead_s(ask), partial(self._queue, machine, machine.life, request))
        if ask.gives_up_after_s is not None:
            self._later(ask.gives_up_after_s, partial(self._give_up, machine, machine.life, request))

    def _queue(self, machine: Machine, life: int, request: Request) -> None:
        if machine.life == life and machine.up and request.id in machine.flying:
            machine.scheduler.add(request)
            self._ready.append(machine)

    def _give_up(self, machine: Machine, life: int, request: Request) -> None:
        if machine.life != life or machine.flying.pop(request.id, None) is None:
            return
        if request.phase is Phase.RUNNING or request in machine.scheduler.waiting:
            machine.scheduler.abort(request)
        self.counts[machine.pool].given_up += 1
        self._ended(request.id, Usage())

    # Engines

    def _begin_steps(self) -> None:
        for machine in self._ready:
            if machine.under_way is None and machine.up and machine.scheduler.has_work:
                machine.under_way = machine.scheduler.schedule()
                seconds = machine.step_time.duration_s(machine.under_way)
                machine.busy_s += seconds
                self._later(seconds, partial(self._step_ended, machine, machine.life), _STEP_ENDS)
        self._ready.clear()

    def _step_ended(self, machine: Machine, life: int) -> None:
        batch = machine.under_way
        if machine.life != life or not machine.up or batch is None:
            return
        machine.under_way = None
        outputs, events = machine.scheduler.complete(batch)
        if not machine.scheduler.has_work:
            events += machine.scheduler.idle_events()
        if events:
            self._publish(machine, *machine.publish(events, self.now_s))
        for output in outputs:
            request = output.request
            if output.position == 0:
                self._later(_TOKEN_LATE_S, partial(self._first_token, request, machine.endpoint))
            if output.finish_reason:
                machine.flying.pop(request.id, None)
                late_s = _TOKEN_LATE_S + _END_LATE_S * float(self._rng.random())
                usage = Usage(request.prompt_tokens, request.cached_tokens, request.output_tokens)
                self._later(late_s, partial(self._ended, request.id, usage))
        self._ready.append(machine)

    def _first_token(self, request: Request, endpoint: str) -> None:
        flight = self._flights.get(request.id)
        if flight is None or flight.judged_at is None:
            return
        began_s = time.process_time()
        first = self.fleet.first_token(str(request.id), endpoint, self.now_s)
        self.headway_s += time.process_time() - began_s
        if first is None or first.grade is None:
            return
        known = self.judged[flight.judged_at]
        outcome = replace(known.outcome, actual_ttft_s=first.grade.actual_s)
        self.judged[flight.judged_at] = replace(known, outcome=outcome)
        if first.grade.kept_bound is not None:
            self.counts[known.pool].bounded += 1
            self.counts[known.pool].late += not first.grade.kept_bound

    def _ended(self, number: int, usage: Usage) -> None:
        flight = self._flights.pop(number, None)
        if flight is not None and flight.judged_at is None:
            return
        began_s = time.process_time()
        self.fleet.finish(str(number), usage, self.now_s)
        self.headway_s += time.process_time() - began_s
        if flight is not None and flight.judged_at is not None:
            known = self.judged[flight.judged_at]
            outcome = replace(known.outcome, actual_cached_tokens=usage.cached_tokens)
            self.judged[flight.judged_at] = replace(known, outcome=outcome)

    # Their event streams

    def _publish(self, machine: Machine, seq: int, payload: bytes) -> None:
        if machine.lost_share and self._rng.random() < machine.lost_share:
            self.done["batches lost"] += 1
            return
        began_s = time.process_time()
        self._do(machine, machine.feed.live(seq, payload, self.now_s))
        self.headway_s += time.process_time() - began_s

    def _contact(self, machine: Machine, up: bool) -> None:
        feed = machine.feed
        self._do(machine, feed.connected(self.now_s) if up else feed.disconnected(self.now_s))

    def _do(self, machine: Machine, steps: Sequence[Step]) -> None:
        self._take(machine, steps)
        feed = machine.feed
        while feed.more:
            self._take(machine, feed.go_on())
        self.fleet.set_trust(machine.name, feed.trust, feed.coverage)
        due_s = feed.due_s
        if due_s is not None and (machine.ask_at_s is None or due_s < machine.ask_at_s):
            machine.ask_at_s = max(due_s, self.now_s)
            self._later(machine.ask_at_s - self.now_s, partial(self._ask_replay, machine, machine.ask_at_s))

    def _take(self, machine: Machine, steps: Sequence[Step]) -> None:
        for step in steps:
            match step:
                case Clear():
                    self.fleet.clear(machine.name)
                case Apply(_, payload, live):
                    batch = decode_batch(payload)
                    self.fleet.apply(machine.name, batch, self.now_s if live else None)
                    if any(isinstance(event, Cleared) for event in batch.events):
                        machine.feed.emptied()

    def _ask_replay(self, machine: Machine, at_s: float) -> None:
        if machine.ask_at_s != at_s:
            return
        machine.ask_at_s = None
        feed = machine.feed
        first, number = feed.ask(self.now_s), feed.round
        if first is None or number is None:
            self._do(machine, ())
        elif machine.up and machine.keeps:
            batches = [(seq, payload) for seq, payload in machine.kept if seq >= first]
            self._later(_REPLAY_S, partial(self._replayed, machine, number, batches))
        else:
            self._later(feed.patience_s, partial(self._replay_ended, machine, number, False))

    def _replayed(self, machine: Machine, number: int, batches: Sequence[tuple[int, bytes]]) -> None:
        self.done["replays"] += 1
        for seq, payload in batches:
            self._do(machine, machine.feed.replayed(number, seq, payload, self.now_s))
        self._replay_ended(machine, number, True)

    def _replay_ended(self, machine: Machine, number: int, complete: bool) -> None:
        self._do(machine, machine.feed.replay_ended(number, complete, self.now_s))

    def _look(self, machine: Machine) -> None:
        """A stream that is silent although its engine has something to do is looked after."""
        changes, busy = self.fleet.activity(machine.name)
        if busy or changes != machine.changes_seen:
            machine.changes_seen = changes
            machine.feed.expect(self.now_s)
            self._do(machine, ())
        self._later(_LOOK_S, partial(self._look, machine))

    # Probes

    def _probe(self, machine: Machine) -> None:
        again_s = _PROBE_S * float(self._rng.uniform(0.8, 1.2))
        if machine.up:
            self._probed(machine)
        else:
            machine.failures += 1
            if machine.failures >= _DOWN_AFTER:
                self.fleet.set_up(machine.name, False)
            else:
                again_s = _PROBE_AGAIN_S
        self._later(again_s, partial(self._probe, machine))

    def _probed(self, machine: Machine) -> None:
        machine.failures, kind = 0, machine.kind
        tokens = machine.scheduler.totals.generation_tokens
        has_restarted, machine.tokens_seen = tokens < machine.tokens_seen, tokens
        asked_s = machine.asked_about_s
        if has_restarted or asked_s is None or self.now_s - asked_s > _ABOUT_S:
            machine.asked_about_s = self.now_s
            told = kind.version, kind.limits.max_num_batched_tokens
            if machine.told not in (None, told):
                self.fleet.forget(machine.name)
            machine.told = told
        self.fleet.set_up(machine.name, True)
        self.fleet.configure(machine.name, kind.settings)
        if has_restarted:
            self._do(machine, machine.feed.doubt("restart_told", self.now_s))
        for ticket in self.fleet.observe_load(machine.name, machine.in_progress, self.now_s, self.now_s):
            self.done["ends found by probes"] += 1
            self._flights.pop(int(ticket.id), None)

    def _review(self) -> None:
        for pool, review in self.fleet.take_reviews(self.now_s):
            self.counts[pool].reviews[review.verdict] += 1
        self._later(_REVIEWS_S, self._review)

    # What happens to engines

    def _befall(self, incident: Incident) -> None:
        machine = self.machines[incident.worker]
        if not machine.up:
            return
        self.done[incident.trouble.value] += 1
        match incident.trouble:
            case Trouble.CRASH:
                self._stop(machine)
                self._later(incident.seconds, partial(self._come_back, machine, machine.life))
            case Trouble.LOST_EVENTS:
                machine.lost_share, machine.keeps = 0.3, bool(self._rng.random() < 0.8)
                self._later(incident.seconds, partial(self._deliver, machine))
            case Trouble.SLOW:
                machine.step_time.speed = float(self._rng.choice((0.5, 0.7)))
                self._later(incident.seconds, partial(self._at_full_speed, machine, machine.life))

    def _come_back(self, machine: Machine, life: int) -> None:
        if not machine.up and machine.life == life:
            self._start(machine, machine.kind)

    def _deliver(self, machine: Machine) -> None:
        machine.lost_share, machine.keeps = 0.0, True

    def _at_full_speed(self, machine: Machine, life: int) -> None:
        if machine.life == life:
            machine.step_time.speed = 1.0

    def _stop(self, machine: Machine) -> None:
        for number in machine.stop():
            flight = self._flights.get(number)
            if flight is not None:
                self.counts[flight.pool.name].failed += 1
                self._later(_END_LATE_S * float(self._rng.random()), partial(self._ended, number, Usage()))
        self._contact(machine, False)

    def _start(self, machine: Machine, kind: EngineKind) -> None:
        machine.start(kind)
        self._later(float(self._rng.uniform(0.1, _RECONNECT_S)), partial(self._contact, machine, True))

    def _roll_out(self, rollout: Rollout) -> None:
        self.done["rollouts"] += 1
        self._roll([machine for machine in self.machines.values() if machine.pool == rollout.pool])

    def _roll(self, left: list[Machine]) -> None:
        """Drains the next one of them."""
        if not left:
            return
        if not left[0].up:  # it has just crashed, and will be back
            self._later(_START_S, partial(self._roll, left))
            return
        self.fleet.set_draining(left[0].name, True)
        self._wait_empty(left, self.now_s + _DRAIN_S)

    def _wait_empty(self, left: list[Machine], until_s: float) -> None:
        machine = left[0]
        if machine.flying and self.now_s < until_s:
            self._later(1.0, partial(self._wait_empty, left, until_s))
            return
        if machine.up:
            self._stop(machine)
        self._later(_START_S, partial(self._replace, left, machine.kind.rolled_out(self._rng)))

    def _replace(self, left: list[Machine], kind: EngineKind) -> None:
        machine = left[0]
        if machine.up:  # it had crashed, and came back too soon
            self._stop(machine)
        self._start(machine, kind)
        self.fleet.set_draining(machine.name, False)
        self._later(_START_S, partial(self._roll, left[1:]))
