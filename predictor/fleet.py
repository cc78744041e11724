"""The one mutable whole: pools of workers, what each is known to hold and to do, and the tickets in flight.

Every verb is synchronous and takes the time as an argument. `place` forecasts, chooses and books in one call, so that
two requests can never both take the same idle worker.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from predictor.admission import Limits, Mode, Reason, Refusal, limits_of, refuse
from predictor.budget_check import BudgetDoubt
from predictor.course import State
from predictor.drafts import DraftCounts, Drafts
from predictor.engines.vllm import NO_DRAFTS, Drafting, Sequence, Settings
from predictor.feed_state import Trust
from predictor.fleet_view import pool_view
from predictor.forecast import Forecast
from predictor.grading import grade, judge_cache
from predictor.hindsight import Review, Watched, review_shadow
from predictor.interval import Calibration
from predictor.kv_events import Batch
from predictor.length_class import LengthClass
from predictor.memory import VERSION, PoolMemory, WorkerMemory, fingerprint
from predictor.output_lengths import draws
from predictor.pool import Pool, PoolPolicy
from predictor.pool_cache import PoolCache
from predictor.prefill_cost import PrefillCost, StepCost
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Prompt
from predictor.race import Race, least_prospects
from predictor.run_forward import Budget
from predictor.shadow import Corrections, Shadow
from predictor.step_sample import StepSample
from predictor.tickets import Attempt, Decision, Ended, FirstToken, Grant, NoWorker, Ticket, Usage, Wish
from predictor.worker import Worker, WorkerSpec

# What its verbs are told and answer, for whoever uses them.
__all__ = [
    "Attempt", "Decision", "Ended", "FirstToken", "Fleet", "Grant", "NoWorker", "PoolPolicy", "Shortcuts", "Ticket",
    "Usage", "Wish", "WorkerSpec",
]  # fmt: skip

# Imagined futures of a worker whose queue waits for others to end: more than five tell no more.
_FUTURES = 5
# What a view of the whole may list of all queues together, in spans.
_VIEW_SPANS = 300
_MAX_OUTPUT_TOKENS = 1 << 20
# Reviews that nobody has fetched yet; the oldest are dropped.
_MOST_REVIEWS = 10_000


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """Counts. Spans are the unit of a decision's work (`run_forward.Budget`)."""

    forecasts_cut: int  # the queue was followed as far as the budget went, and was taken to go on at its pace
    forecasts_stale: int  # a request was placed by a timeline that did not know of all that had happened
    spans: int  # listed by decisions
    shadows_cut: Mapping[str, int]  # by worker: more had passed than may be followed at one instant


class Fleet:
    """Pools by name, workers by name (unique in the fleet), tickets by id."""

    def __init__(self, policies: Iterable[PoolPolicy], hasher: BlockHasher, rng: np.random.Generator) -> None:
        self._hasher = hasher
        self._rng = rng
        self._pools = {policy.name: Pool(policy, PoolCache(hasher)) for policy in policies}
        self._pool_of: dict[str, Pool] = {}
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count(1)
        self._reviews: deque[tuple[str, Review]] = deque(maxlen=_MOST_REVIEWS)
        self._steps: list[tuple[str, Mode, float]] = []

    def add_pool(self, policy: PoolPolicy) -> None:
        """ValueError if there is one of this name."""
        if policy.name in self._pools:
            raise ValueError(f"pool {policy.name!r} is already in the fleet")
        self._pools[policy.name] = Pool(policy, PoolCache(self._hasher))

    # Workers

    def join(self, pool: str, spec: WorkerSpec) -> None:
        """Adds a worker; it has an empty cache view and has learned nothing. ValueError if the name is taken."""
        if spec.name in self._pool_of:
            raise ValueError(f"worker {spec.name!r} is already in the fleet")
        home = self._pools[pool]
        cost = PrefillCost(home.policy.learning)

        def cached_blocks(hashes: BlockHashes) -> int:
            return home.cache.held(spec.name, hashes)

        def learn(sample: StepSample) -> None:
            if sample.new_tokens and home.cache.view(spec.name).trust is Trust.LOST:
                return  # how much of them was cached is known at their end, if at all
            cost.add_steps(sample)
            shadow.set_cost(cost.cost)

        shadow = Shadow(
            spec.settings, cost.cost, learn, cached_blocks, home.lengths_at, home.prompts.longer_than, home.passing
        )
        home.workers[spec.name] = Worker(spec, spec.settings, cost, shadow, Calibration(home.errors))
        self._pool_of[spec.name] = home
        home.cache.join(spec.name, spec.cache, spec.settings.block_size, spec.settings.num_gpu_blocks)

    def leave(self, worker: str) -> list[Ticket]:
        """Forgets a worker at once and wholly; its tickets are given up and returned."""
        home = self._pool_of.pop(worker)
        gone = home.workers.pop(worker)
        home.cache.leave(worker)
        for ticket_id in gone.tickets:
            del self._tickets[ticket_id]
        self._reviewed(home, gone.hindsight.give_up())
        return list(gone.tickets.values())

    def workers(self, pool: str) -> list[WorkerSpec]:
        return [worker.spec for worker in self._pools[pool].workers.values()]

    def hash_families(self, pool: str) -> set[HashFamily]:
        """The ways in which a prompt for this pool must be hashed."""
        return self._pools[pool].cache.families

    def configure(self, worker: str, settings: Settings) -> bool:
        """Takes over settings that the engine itself reports; True if they differ from what was assumed.

        What was learned of an engine with other settings is thrown away.
        """
        home = self._pool_of[worker]
        known = home.workers[worker]
        if settings == known.settings:
            return False
        home.cache.configure(worker, settings.block_size, settings.num_gpu_blocks)
        known.configure(settings)
        return True

    def forget(self, worker: str) -> None:
        """What was learned of this worker was of another engine."""
        home = self._pool_of[worker]
        home.workers[worker].forget()
        home.cache.correction(worker).forget()

    def set_up(self, worker: str, up: bool) -> None:
        self._pool_of[worker].workers[worker].up = up

    def set_draining(self, worker: str, draining: bool) -> None:
        """A worker that drains gets no request, whoever else there is or is not; what it has it may finish."""
        self._pool_of[worker].workers[worker].draining = draining

    def back_off(self, worker: str, seconds: float, now_s: float) -> None:
        """The engine refused a request for want of capacity: others go elsewhere for a while, if there is elsewhere."""
        self._pool_of[worker].workers[worker].backing_off_until_s = now_s + seconds

    # What was learned, for a successor of this process

    def fingerprint(self, worker: str) -> str:
        return fingerprint(self._pool_of[worker].workers[worker].settings)

    def worker_memory(self, worker: str) -> Callable[[], WorkerMemory] | None:
        """None while nothing has been learned. What is returned may be called in another thread."""
        known = self._pool_of[worker].workers[worker]
        if not known.cost.samples:
            return None
        cost, errors, engine = known.cost.memory(), known.calibration.memory(), self.fingerprint(worker)
        return lambda: WorkerMemory(VERSION, worker, engine, cost(), errors)

    def recall_worker(self, memory: WorkerMemory) -> bool:
        """Begins with what was learned of the same engine; False if it is another now, or has taught us itself.

        ValueError for a memory that cannot be.
        """
        known = self._pool_of[memory.worker].workers[memory.worker]
        if known.cost.samples or self.fingerprint(memory.worker) != memory.fingerprint:
            return False
        known.cost.recall(memory.cost)
        known.calibration.recall(memory.errors)
        known.shadow.set_cost(known.cost.cost)
        return True

    def pool_memory(self, pool: str) -> PoolMemory:
        home = self._pools[pool]
        return PoolMemory(VERSION, pool, home.lengths.memory(), home.errors.memory())

    def recall_pool(self, memory: PoolMemory) -> None:
        home = self._pools[memory.pool]
        home.lengths.recall(memory.lengths)
        home.errors.recall(memory.errors)

    # The cache view

    def apply(self, worker: str, batch: Batch, now_s: float | None = None, more: bool = False) -> None:
        """Takes in what an engine published.

        With the time at which it came it also tells what the engine has got to; history, as from a replay, does not.
        `more` of the same batch is to come: what a batch tells is understood only as a whole.
        """
        home = self._pool_of[worker]
        known = home.workers[worker]
        # The step that is told of was composed with what was cached before it.
        known.shadow.settle(now_s)
        runs = home.cache.apply(worker, batch)
        if now_s is not None:
            known.stored(runs, more, home.cache.computes_what_it_stores(worker), now_s)

    def stored_at_once(self, worker: str, blocks: int) -> None:
        """One event, before it was cut into parts, told that so many blocks were stored on the device just now."""
        home = self._pool_of[worker]
        if home.cache.computes_what_it_stores(worker):
            home.workers[worker].budget.stored_at_once(blocks)

    def budget_doubts(self) -> dict[str, BudgetDoubt]:
        """Workers whose steps do not agree with the token budget that is assumed of them."""
        return {
            name: doubt
            for home in self._pools.values()
            for name, worker in home.workers.items()
            if (doubt := home.budget_doubt(worker)) is not BudgetDoubt.NONE
        }

    def clear(self, worker: str) -> None:
        """What this worker's cache holds is not known any more."""
        home = self._pool_of[worker]
        home.cache.clear(worker)
        home.workers[worker].runs = []  # of a batch that was cut off

    def set_trust(self, worker: str, trust: Trust, coverage: float) -> None:
        """How far the view can be believed, and the share of the engine's history that it follows."""
        home = self._pool_of[worker]
        view = home.cache.view(worker)
        view.trust, view.coverage = trust, coverage
        home.workers[worker].trusted = trust is Trust.LIVE

    def activity(self, worker: str) -> tuple[int, bool]:
        """How many requests have come to it and ended, and whether it has something to do now."""
        known = self._pool_of[worker].workers[worker]
        return known.comings_and_goings, bool(known.tickets) or known.foreign_load

    def silent_workers(self) -> list[str]:
        """Workers that serve traffic which must have filled their caches, and send no events."""
        return [name for home in self._pools.values() for name in home.workers if home.cache.view(name).silent]

    # Requests

    def place(self, pool: str, prompt: Prompt, wish: Wish, now_s: float, attempt: Attempt = Attempt.FINAL) -> Decision:
        """Forecasts every worker, chooses, and books the ticket before it returns. KeyError for an unknown pool."""
        home = self._pools[pool]
        workers = home.eligible(prompt, wish, now_s)
        if not workers:
            return NoWorker(pool)
        limits = home.limits(wish, now_s)
        race = Race(home, workers, prompt, wish, limits, self._tickets, now_s)
        race.price(race.likely(self._rng))
        race.renew()
        objections = race.objections()
        choice = race.choose([found is None for found in objections], self._rng)
        if choice is None and race.price(race.in_time()):
            objections = race.objections()
            choice = race.choose([found is None for found in objections], self._rng)
        prospects = race.prospects
        forecasts = tuple(found.forecast for found in prospects)
        if attempt is not Attempt.AGAIN:
            own_s = min(found.forecast.prefill_s for found in prospects)
            shortest_s = min(found.forecast.wait_s for found in prospects)
            full = choice is None and any(found in (Reason.QUEUE_WAIT, Reason.TTFT) for found in objections)
            home.crowding.asked(limits.allows_wait_s(own_s) if limits.bounded else None, own_s, shortest_s, full)
        refusal = None
        if choice is None and not any(worker.could_take(prompt) for worker in workers):
            # Theirs to say: who is told to come back would come back for nothing.
            choice = race.choose([True] * len(prospects), self._rng)
        if choice is None:
            refusal = refuse(prospects, objections, limits, home.policy.retry, self._rng)
            if home.mode is Mode.ENFORCE:
                if attempt is Attempt.FINAL:
                    self._watch(home, wish, refusal, now_s)
                return refusal
            choice = race.choose([True] * len(prospects), self._rng)
            assert choice is not None, "with everybody open, somebody is chosen"
        chosen = choice.ranked[0].forecast
        server = home.workers[chosen.worker]
        home.renewal.placed(server.shadow.timeline_is_fresh)
        hashes = home.cache.hashes(chosen.worker, prompt)
        ticket = self._book(home, server, chosen, wish, hashes, race.may_find(server), now_s)
        ticket.would_refuse = refusal
        expected = race.reuse(server)
        home.cache.book(chosen.worker, ticket.id, prompt, expected.by_rule, expected.promised)
        specs = [home.workers[candidate.forecast.worker].spec for candidate in choice.ranked]
        return Grant(
            ticket, _endpoints(specs), forecasts, choice.why, server.spec.cluster, refusal, rank=server.spec.rank
        )

    def turn_away(self, pool: str, wish: Wish, most_tokens: int, now_s: float) -> Refusal | None:
        """The refusal that `place` would come to whatever the prompt is, as long as it has at most so many tokens; None
        where that has to be looked at. KeyError for an unknown pool.

        It is sure where every worker has a timeline that is up to date, and not even a single token that nothing has to
        be computed for would get through within the bound. So what is told of waits is the least that anybody waits.
        """
        home = self._pools[pool]
        limits = home.limits(wish, now_s)
        bound_s = limits.max_queue_wait_s
        # With a bound on the time to first token the reason is another one for a prompt that takes too long by itself.
        if home.mode is not Mode.ENFORCE or bound_s is None or limits.max_ttft_s is not None:
            return None
        longest = Prompt(most_tokens, exact=True)
        if not all(worker.takes(longest, wish) for worker in home.workers.values()):
            return None
        workers = home.eligible(longest, wish, now_s)
        waited_s = max(0.0, wish.waited_before_s) + max(0.0, now_s - wish.received_at_s)
        prospects = least_prospects(home, workers, wish, waited_s, bound_s, self._tickets, now_s)
        if not prospects:
            return None
        reason = Reason.BOUND_USED_UP if waited_s > bound_s else Reason.QUEUE_WAIT
        shortest_s = min(found.forecast.wait_s for found in prospects)
        home.crowding.asked(bound_s, None, shortest_s, reason is Reason.QUEUE_WAIT)
        refusal = refuse(prospects, [reason] * len(prospects), limits, home.policy.retry, self._rng)
        self._watch(home, wish, refusal, now_s)
        return refusal

    def refused(self, pool: str, wish: Wish, refusal: Refusal, now_s: float) -> None:
        """A refusal that was not yet one is carried out: from now on it is watched whether it was right."""
        self._watch(self._pools[pool], wish, refusal, now_s)

    def place_on(self, worker: str, prompt: Prompt, wish: Wish, now_s: float) -> Ticket:
        """Forecasts and books on this worker, whoever else would be better: where a recording says that it went."""
        home = self._pool_of[worker]
        server = home.workers[worker]
        race = Race(home, [server], prompt, wish, Limits(), self._tickets, now_s)
        race.price([server])
        race.renew()
        priced, reuse = race.prospects[0].forecast, race.reuse(server)
        hashes = home.cache.hashes(worker, prompt)
        ticket = self._book(home, server, priced, wish, hashes, race.may_find(server), now_s)
        home.cache.book(worker, ticket.id, prompt, reuse.by_rule, reuse.promised)
        return ticket

    def know_cost(self, worker: str, cost: StepCost) -> None:
        """Takes these for the worker's true costs."""
        known = self._pool_of[worker].workers[worker]
        known.cost.fix(cost)
        known.shadow.set_cost(cost)

    def shadow_state(self, worker: str, now_s: float) -> State:
        return self._pool_of[worker].workers[worker].shadow.state(now_s)

    def in_flight_on(self, worker: str) -> int:
        return len(self._pool_of[worker].workers[worker].tickets)

    def learned(self, worker: str) -> bool:
        """Whether this worker's costs are learned, rather than guessed."""
        return self._pool_of[worker].workers[worker].cost.learned

    def first_token(self, ticket_id: str, served_endpoint: str | None, now_s: float) -> FirstToken | None:
        """None for a ticket that is unknown or has been graded. `served_endpoint` is Envoy's word for who served."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.first_token_at_s is not None:
            return None
        home = self._pool_of[ticket.worker]
        worker = home.workers[ticket.worker]
        self._reviewed(home, worker.hindsight.before(now_s))
        ticket.first_token_at_s = now_s
        if served_endpoint is not None and served_endpoint != worker.spec.endpoint:
            self._move(ticket, worker, served_endpoint, now_s)
            return FirstToken(ticket, None)
        worker.count_overdue(self._tickets, now_s)
        worker.shadow.first_token(ticket_id, now_s)
        self._look_back(home, worker, now_s)
        ticket.decoded_alone = len(worker.tickets) == 1 and not worker.foreign_load
        actual_s = ticket.wish.waited_before_s + now_s - ticket.wish.received_at_s
        priced = ticket.forecast
        predicted_s = priced.ttft_s - priced.already_waited_s
        worker.calibration.grade(
            priced.kind, priced.shown, predicted_s, actual_s - priced.already_waited_s, ticket.overdue
        )
        lately_s = worker.since_last_token(ticket.booked_at_s, predicted_s, now_s)
        hits_may_be_unseen = worker.unseen_hits and home.cache.view(ticket.worker).trust is Trust.LOST
        if (
            lately_s is not None
            and not hits_may_be_unseen
            and worker.cost.graded(*lately_s, ticket.cost_changes, priced.gated)
        ):
            worker.shadow.set_cost(worker.cost.cost)
        if ticket.would_refuse is not None:
            self._reviewed(home, [review_shadow(ticket.id, ticket.would_refuse, priced, actual_s)])
        limits = limits_of(home.policy.admission, ticket.wish.max_queue_wait_s, ticket.wish.max_ttft_s, None)
        return FirstToken(ticket, grade(priced, actual_s, limits.max_queue_wait_s, limits.max_ttft_s))

    def finish(self, ticket_id: str, usage: Usage, now_s: float, retried: bool = False) -> Ended | None:
        """Releases a ticket, however its request ended; None if it is unknown (released before).

        Of a request that Envoy had to send more than once nothing is learned: its time is not one engine's.
        """
        ticket = self._tickets.pop(ticket_id, None)
        if ticket is None:
            return None
        home = self._pool_of[ticket.worker]
        worker = home.workers[ticket.worker]
        self._reviewed(home, worker.hindsight.before(now_s))
        worker.release(ticket)
        worker.comings_and_goings += 1
        judged = ticket.first_token_at_s is not None and not ticket.moved and not retried
        if judged and usage.cached_tokens is not None:
            home.cache.learn(ticket.worker, ticket_id, usage.cached_tokens)
            worker.unseen_hits |= usage.cached_tokens > ticket.forecast.cached_tokens
        if judged:
            home.cache.served(ticket.worker, ticket_id, ticket.prompt_tokens(usage), usage.cached_tokens)
        seen_tokens = home.cache.release(ticket.worker, ticket_id, ticket.left(usage) if judged else None)
        evicts = home.cache.computes_what_it_stores(ticket.worker)
        worker.shadow.finish(ticket_id, now_s, usage.output_tokens, evicts)
        self._look_back(home, worker, now_s)
        if usage.output_tokens is not None and ticket.first_token_at_s is not None:
            # Nobody generates more than was asked for, whatever is reported.
            seen = min(usage.output_tokens, ticket.wish.max_tokens or _MAX_OUTPUT_TOKENS, _MAX_OUTPUT_TOKENS)
            home.lengths.ended(seen, ticket.wish.max_tokens, ticket.number, ticket.length_class)
        if not judged:
            return Ended(ticket, None, usage, learned_from=False)
        if usage.cached_tokens is None and seen_tokens is not None:
            usage = msgspec.structs.replace(usage, cached_tokens=seen_tokens, cached_seen=True)
        size = home.cache.block_size(ticket.worker)
        verdict = judge_cache(ticket.forecast.cached_tokens, usage.cached_tokens, size)
        return Ended(ticket, verdict, usage, worker.learn(ticket, usage, now_s))

    def observe_load(self, worker: str, in_progress: int, asked_at_s: float, now_s: float) -> list[Ticket]:
        """Takes in an engine's own count of requests in progress; returns tickets that it shows to have ended.

        Ends are reported by Envoy; this is for where its access log stays silent.
        """
        ended = self._pool_of[worker].workers[worker].counted(in_progress, asked_at_s, now_s)
        for ticket in ended:
            self.finish(ticket.id, Usage(), now_s)
        return ended

    def observe_drafts(self, worker: str, counts: DraftCounts | None) -> Drafting | None:
        """Takes in an engine's own counters of speculative decoding, in tokens since it started; None: it has none.

        Returns what a decode gets of a step, and takes of it, if that is another than before.
        """
        known = self._pool_of[worker].workers[worker]
        if counts is None:
            known.drafts = Drafts()
            if known.shadow.drafting == NO_DRAFTS:
                return None
            self.set_drafting(worker, NO_DRAFTS)
            return NO_DRAFTS
        drafts = known.drafts
        if not drafts.count(counts):
            return None
        self.set_drafting(worker, drafts.drafting)
        return drafts.drafting

    def set_drafting(self, worker: str, drafting: Drafting) -> None:
        self._pool_of[worker].workers[worker].shadow.set_drafting(drafting)

    def expire(self, max_age_s: float, now_s: float) -> list[Ticket]:
        """Releases tickets that are older than any request can be, and returns them."""
        old = [ticket for ticket in self._tickets.values() if now_s - ticket.booked_at_s > max_age_s]
        for ticket in old:
            self.finish(ticket.id, Usage(), now_s)
        return old

    def ticket(self, ticket_id: str) -> Ticket | None:
        return self._tickets.get(ticket_id)

    def take_reviews(self, now_s: float, most: int = _MOST_REVIEWS) -> list[tuple[str, Review]]:
        """What has become of refusals since the last call, with their pools; `most` of it, the rest the next time."""
        for home in self._pools.values():
            for worker in home.workers.values():
                if len(worker.hindsight):
                    self._reviewed(home, worker.hindsight.before(now_s))
        return [self._reviews.popleft() for _ in range(min(most, len(self._reviews)))]

    def take_steps(self) -> list[tuple[str, Mode, float]]:
        """Pools whose guard has changed what they do with refusals since the last call, how, and the false-alarm rate
        that led to it."""
        steps, self._steps = self._steps, []
        return steps

    def admission_mode(self, pool: str) -> Mode:
        """As of now: where too many refusals were false alarms, a pool that would enforce is in shadow mode."""
        return self._pools[pool].mode

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    # Views

    def view(self, now_s: float) -> dict[str, object]:
        """The whole as plain values, for people and dashboards."""
        budget = Budget(_VIEW_SPANS)
        return {
            "in_flight": self.in_flight,
            "pools": {name: pool_view(pool, now_s, budget) for name, pool in self._pools.items()},
        }

    def skipped_events(self) -> Mapping[str, int]:
        """What the cache indexes could not use, by reason."""
        total: Counter[str] = Counter()
        for pool in self._pools.values():
            total.update(pool.cache.skipped)
        return total

    def shortcuts(self, pool: str) -> Shortcuts:
        """What decisions and shadows left out so that they would not take too long, since the start."""
        home = self._pools[pool]
        cut = {name: worker.shadow.cut for name, worker in home.workers.items()}
        return Shortcuts(home.renewal.cut, home.renewal.stale, home.renewal.spent, cut)

    def corrections(self, pool: str) -> Mapping[str, Corrections]:
        """By worker, how often its steps were found to be others than they were taken to be."""
        return {name: worker.shadow.corrections for name, worker in self._pools[pool].workers.items()}

    # Inside

    def _watch(self, home: Pool, wish: Wish, refusal: Refusal, now_s: float) -> None:
        """To find out afterwards whether the refusal was right."""
        best, allowed_s = refusal.best, refusal.allowed_wait_s
        if allowed_s is None:
            return
        worker = home.workers[best.worker]
        self._reviewed(home, worker.hindsight.before(now_s))
        newest = next(reversed(worker.tickets.values()), None)
        watched = Watched(
            id=wish.ticket_id,
            reason=refusal.reason,
            behind=0 if newest is None else newest.number,
            refused_at_s=now_s,
            already_waited_s=best.already_waited_s,
            in_time_until_s=now_s + allowed_s - best.already_waited_s,
            new_tokens=best.prompt_tokens - best.cached_tokens,
        )
        sure = not worker.hindsight.full and not worker.foreign_load
        if sure:
            waiting = (ticket for ticket in worker.tickets.values() if ticket.first_token_at_s is None)
            sure = all(ticket.wish.streaming for ticket in waiting)
        self._reviewed(home, worker.hindsight.watch(watched, sure))

    def _look_back(self, home: Pool, worker: Worker, now_s: float) -> None:
        if not len(worker.hindsight):
            return
        tickets = worker.tickets.values()  # in the order of their numbers
        unstarted = next((t.number for t in tickets if t.first_token_at_s is None and t.wish.streaming), None)
        numbers = [ticket.number for ticket in tickets]
        shadow, size = worker.shadow, worker.settings.block_size
        free = shadow.free_blocks
        # Of those that have come, the first so many.
        held = [0, *itertools.accumulate(shadow.blocks_of(ticket.id) for ticket in tickets)]

        def has_room(refused: Watched) -> bool:
            # Who came after it has what it would have had.
            later = held[-1] - held[bisect_right(numbers, refused.behind)]
            return free is None or -(-refused.new_tokens // size) <= free + later

        self._reviewed(home, worker.hindsight.after(unstarted, has_room, now_s))

    def _reviewed(self, home: Pool, reviews: Iterable[Review]) -> None:
        for review in reviews:
            if home.guard.record(review):
                self._steps.append((home.policy.name, home.mode, home.guard.rate_at_last_step))
            self._reviews.append((home.policy.name, review))

    def _book(
        self,
        home: Pool,
        worker: Worker,
        priced: Forecast,
        wish: Wish,
        hashes: BlockHashes,
        may_find: int,
        now_s: float,
    ) -> Ticket:
        shadow = worker.shadow
        solo = not shadow.prefilling and not worker.foreign_load
        of = LengthClass.of(priced.prompt_tokens, wish.max_tokens)
        ticket = Ticket(
            id=wish.ticket_id,
            pool=home.policy.name,
            worker=worker.spec.name,
            forecast=priced,
            wish=wish,
            booked_at_s=now_s,
            joins_at_s=shadow.begins_s(now_s),
            solo=solo,
            decodes_beside=shadow.decoding,
            cost_changes=worker.cost.changes,
            length_class=of,
            number=next(self._numbers),
            kv_tokens=priced.prompt_tokens - priced.cached_tokens + home.expected_output(of, wish.max_tokens, now_s),
        )
        if ticket.id in self._tickets:
            raise ValueError(f"ticket {ticket.id!r} is already in flight")
        worker.spoil_samples()
        # Drawn, not the mean: of requests that all are expected to be of the mean length, all would end at once.
        drawn = draws(self._rng, _FUTURES)
        expected = home.lengths_at(now_s).curve(of).length(drawn[0], 0, wish.max_tokens)
        seq = Sequence(
            ticket.id,
            priced.prompt_tokens,
            priced.cached_tokens,
            expected,
            wish.streaming,
            max_output=wish.max_tokens,
            hashes=hashes,
            draws=drawn,
            length_class=of,
            priority=worker.settings.place(wish.priority),
            may_find=may_find,
        )
        shadow.book(seq, now_s)
        worker.arrivals.add(now_s, priced.prompt_tokens - priced.cached_tokens)
        home.prompts.add(priced.prompt_tokens - priced.cached_tokens)
        worker.take(ticket)
        worker.comings_and_goings += 1
        self._tickets[ticket.id] = ticket
        if wish.streaming:
            heapq.heappush(worker.due, (now_s + priced.high_s - priced.already_waited_s, ticket.id))
        home.granted(wish, priced, now_s)
        return ticket

    def _move(self, ticket: Ticket, chosen: Worker, served_endpoint: str, now_s: float) -> None:
        """Envoy fell back to another endpoint: the booking goes where the request is."""
        ticket.moved = True
        home = self._pool_of[ticket.worker]
        there = [w for w in home.workers.values() if w.spec.endpoint == served_endpoint]
        server = next((w for w in there if w.spec.rank == chosen.spec.rank), there[0] if there else None)
        if server is None:
            chosen.shadow.first_token(ticket.id, now_s)
            self._look_back(home, chosen, now_s)
            return
        home.cache.release(chosen.spec.name, ticket.id)
        chosen.shadow.finish(ticket.id, now_s)
        chosen.release(ticket)
        self._look_back(home, chosen, now_s)
        ticket.worker, ticket.number = server.spec.name, next(self._numbers)
        server.spoil_samples()
        server.take(ticket)
        tokens = ticket.forecast.prompt_tokens
        of = ticket.length_class
        expected = home.lengths_at(now_s).curve(of).length(float(self._rng.random()), 0, ticket.wish.max_tokens)
        server.shadow.adopt(Sequence(ticket.id, tokens, tokens, expected, length_class=of), now_s)


def _endpoints(ranked: Iterable[WorkerSpec]) -> tuple[str, ...]:
    """The chosen one's, and those that can take its place: a request names one rank, wherever it falls back to."""
    specs = list(ranked)
    fits = [spec for spec in specs if specs[0].rank is None or spec.rank == specs[0].rank]
    return tuple(dict.fromkeys(spec.endpoint for spec in fits))
