"""The workers of a pool that may get one request, each priced by what it is taken to do."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ReadOnly
from heapq import nsmallest

import numpy as np

from predictor.admission import Limits, Mode, Prospect, Reason, objection
from predictor.engines.step_rule import reserved_beside_prompt
from predictor.forecast import Forecast, forecast, least_high_wait_s
from predictor.length_class import LengthClass
from predictor.pool import Pool
from predictor.pool_cache import Reuse
from predictor.prompt import Prompt
from predictor.routing import Candidate, Choice, choose
from predictor.run_forward import Budget
from predictor.tickets import Ticket, Wish
from predictor.timeline import Guess, Timeline
from predictor.worker import Worker

# Of larger pools only those are priced for a request that can win: so many, by the least that each can cost.
_ALL_PRICED, _LIKELY = 32, 16
# The timeline of so few requests is computed anew in so many spans, hardly ever more.
_FEW, _FEW_SPANS = 8, 24
# What two ways to add up the same may differ by.
_ROUNDING_S = 1e-6


class Race:
    """One request, and the workers of a pool that may get it, each priced by its timeline."""

    def __init__(
        self,
        home: Pool,
        everybody: ReadOnly[Worker],
        prompt: Prompt,
        wish: Wish,
        limits: Limits,
        tickets: Mapping[str, Ticket],
        now_s: float,
    ) -> None:
        self._found = home.cache.reuse(prompt)
        self._lasting: dict[str, Reuse] = {}  # of full caches, what will be left of that
        self.workers: list[Worker] = []  # who is priced
        self.prospects: list[Prospect] = []  # in the same order
        self._home = home
        self._everybody = everybody
        self._prompt = prompt
        self._wish = wish
        self._limits = limits
        self._tickets = tickets
        self._now_s = now_s
        self._waited_s = max(0.0, wish.waited_before_s) + max(0.0, now_s - wish.received_at_s)
        # Only a bound asks how sure a wait is.
        self._quantile = 1.0 - home.policy.admission.risk if limits.bounded else None
        of = LengthClass.of(prompt.token_count, wish.max_tokens)
        self._output_tokens = home.expected_output(of, wish.max_tokens, now_s)
        self._prefilling = [worker.shadow.prefilling for worker in everybody]
        self._budget = home.renewal.budget(len(everybody), now_s)
        self._old: list[int] = []  # places of those whose timelines are not up to date
        self._others = home.policy.routing.others[wish.prefer or home.policy.routing.prefer]
        self._refusal_s = home.policy.routing.refusal_s if self._others and not limits.bounded else 0.0
        self._shortest_s = self._opens_first_in_s() if self._refusal_s else 0.0

    def likely(self, rng: np.random.Generator) -> list[Worker]:
        """Of a large pool those that may win, by the least that each can cost: when it lets somebody in, and what it
        would have to prefill."""
        home, workers, prefilling = self._home, self._everybody, self._prefilling
        if len(workers) <= _ALL_PRICED:
            return list(workers)
        tokens, weight, crowds = self._prompt.token_count, 1.0 + self._others, self._refusal_s > 0.0
        bounds, cached = [], []
        # Of those that are alike it is not always the same ones.
        first = int(rng.integers(len(workers)))
        for place, worker in enumerate(workers):
            found = self._found[worker.spec.name]
            saved = found.tokens
            own_s = worker.cost.cost.alone_s(saved, tokens, worker.settings.most_in_a_step(tokens)) + found.load_s
            if saved:
                cached.append((own_s, place))
            bound_s = weight * own_s
            wait_s = worker.shadow.opens_s - self._now_s if prefilling[place] else 0.0
            if wait_s > 0.0:
                bound_s += wait_s
            if crowds:
                bound_s += self._price_s(max(0.0, wait_s), own_s) - self._others * own_s
            bounds.append((bound_s, (place - first) % len(workers), place))
        chosen = {place for _, _, place in nsmallest(_LIKELY, bounds)}
        chosen.update(place for _, place in nsmallest(2, cached))
        chosen.add(home.renewal.turn(len(workers)))

        # Who has yet to learn is not chosen by what he costs.
        def seen(place: int) -> tuple[int, int]:
            return prefilling[place], workers[place].cost.samples + len(workers[place].tickets)

        unlearned = (place for place, worker in enumerate(workers) if not worker.cost.learned)
        chosen.update(nsmallest(_LIKELY, unlearned, key=seen))
        last = home.sessions.get(self._wish.session) if self._wish.session is not None else None
        return [worker for place, worker in enumerate(workers) if place in chosen or worker.spec.name == last]

    def in_time(self) -> list[Worker]:
        """Those not priced yet who let somebody in before the request's bound ends, as far as is known."""
        limits = self._limits
        bounds_s = [bound_s for bound_s in (limits.max_queue_wait_s, limits.max_ttft_s) if bound_s is not None]
        until_s = self._now_s - self._waited_s + min(bounds_s, default=limits.overload_wait_s or float("inf"))
        known = {worker.spec.name for worker in self.workers}
        rest = [worker for worker in self._everybody if worker.spec.name not in known]
        shadows = ((worker, worker.shadow) for worker in rest)
        return [worker for worker, one in shadows if not one.prefilling or one.behind or one.opens_s <= until_s]

    def price(self, workers: ReadOnly[Worker]) -> bool:
        """By the timelines that stand, whatever has happened since, but where there is little to compute anew. False if
        there is nobody to price."""
        for worker in workers:
            shadow = worker.shadow
            if len(shadow) <= _FEW and not shadow.timeline_is_fresh and self._budget.left > 0:
                # A new one is as quickly there as the old one is priced.
                own = Budget(_FEW_SPANS)
                timeline: Timeline | Guess = shadow.timeline(self._now_s, own, self._waits_by(worker))
            else:
                own = self._budget.glance()
                timeline = shadow.standing_timeline(self._now_s, own, self._waits_by(worker))
            self.prospects.append(self._prospect(worker, timeline, own))
            self.workers.append(worker)
            self._budget.left -= own.used
            if own.cut or not (shadow.timeline_is_fresh and timeline.settled):
                self._old.append(len(self.workers) - 1)
        return bool(workers)

    def renew(self) -> None:
        """Prices anew, by timelines that are up to date, as many as it takes and the budget allows."""

        def anew(place: int, own: Budget) -> float:
            worker = self.workers[place]
            self.prospects[place] = self._prospect(
                worker, worker.shadow.timeline(self._now_s, own, self._waits_by(worker)), own
            )
            return cost_s(self.prospects[place].forecast)

        def cost_s(priced: Forecast) -> float:
            return priced.ttft_s + self._price_s(priced.wait_s, priced.prefill_s)

        if self._old:
            renewal = self._home.renewal
            costs_s = [cost_s(prospect.forecast) for prospect in self.prospects]
            renewal.bring_up(costs_s, self._old, renewal.turn(len(costs_s)), anew, self._budget)

    def _waits_by(self, worker: Worker) -> int:
        return worker.settings.place(self._wish.priority)

    def objections(self) -> list[Reason | None]:
        """Why each of those priced is not open to the request."""
        if self._home.mode is Mode.OFF:
            return [None] * len(self.prospects)
        return [objection(prospect, self._limits) for prospect in self.prospects]

    def choose(self, open_to: ReadOnly[bool], rng: np.random.Generator) -> Choice | None:
        home, wish, limits = self._home, self._wish, self._limits
        grants, recent = home.recently, max(1, len(home.recent))
        known = any(prospect.forecast.cached_tokens for prospect in self.prospects)
        self._shortest_s = min(prospect.forecast.wait_s for prospect in self.prospects)
        last = None if known or wish.session is None else home.sessions.get(wish.session)
        candidates = []
        for worker, prospect, is_open in zip(self.workers, self.prospects, open_to, strict=True):
            priced, cost = prospect.forecast, worker.cost.cost
            candidates.append(
                Candidate(
                    forecast=priced,
                    feasible=is_open,
                    prefilling=worker.shadow.prefilling,
                    learned=worker.cost.learned,
                    # What is on its way to being a sample counts, or requests in a row would all go to one worker.
                    samples=worker.cost.samples + len(worker.tickets),
                    recent_share=grants[worker.spec.name] / recent,
                    uncached_prefill_s=cost.alone_s(
                        0, priced.prompt_tokens, worker.settings.most_in_a_step(priced.prompt_tokens)
                    ),
                    eviction_s=home.reuse * cost.tokens_s(0, home.evicted_tokens(worker, priced)),
                    session=worker.spec.name == last,
                    crowded_out=0.0 if limits.bounded else self._crowds_out(priced.wait_s, priced.prefill_s),
                )
            )
        busy = 1.0 - self._prefilling.count(0) / len(self._prefilling)
        return choose(candidates, home.policy.routing, wish.prefer, rng, busy)

    def _price_s(self, wait_s: float, own_s: float) -> float:
        """About what a placement costs others; the pool is taken to be busy."""
        crowded_out = self._crowds_out(wait_s, own_s) if self._refusal_s else 0.0
        return self._others * own_s + self._refusal_s * crowded_out

    def _crowds_out(self, wait_s: float, own_s: float) -> float:
        return self._home.crowding.crowds_out(wait_s, own_s, self._shortest_s)

    def _opens_first_in_s(self) -> float:
        """In how long somebody lets a newcomer in, by the timelines that stand."""
        if not all(self._prefilling):
            return 0.0
        return max(0.0, min(worker.shadow.opens_s for worker in self._everybody) - self._now_s)

    def _prospect(self, worker: Worker, timeline: Timeline | Guess, budget: Budget) -> Prospect:
        worker.count_overdue(self._tickets, self._now_s)
        reuse, prompt = self._reuse_then(worker, timeline, budget), self._prompt
        is_crowded = reuse.device_tokens > 0 and worker.shadow.crowded
        priced = forecast(
            worker=worker.spec.name,
            prompt_tokens=prompt.token_count,
            cached_tokens=reuse.tokens,
            load_s=reuse.load_s,
            already_waited_s=self._waited_s,
            timeline=timeline,
            settings=worker.settings,
            cost=worker.cost.cost,
            basis=worker.cost.basis,
            tokens_ahead=worker.shadow.prefill_tokens_ahead(),
            now_s=self._now_s,
            exact_tokens=prompt.exact,
            calibration=worker.calibration,
            trusted=worker.trusted,
            arrivals=worker.arrivals,
            budget=budget,
            reserve_tokens=reserved_beside_prompt(worker.settings, self._wish.max_tokens, prompt.token_count),
            # What is left of a full cache is what somebody holds.
            shared_blocks=reuse.device_tokens // worker.settings.block_size if is_crowded else 0,
            output_tokens=self._output_tokens,
        )
        high_wait_s = priced.wait_s
        if self._quantile is not None:
            # Errors of an empty queue say little about those of a full one: what is predicted is the least.
            high_wait_s = max(high_wait_s, priced.queue_wait_quantile_s(self._quantile) - self._waited_s)
        needed = priced.prompt_tokens - priced.cached_tokens + self._output_tokens
        return Prospect(priced, high_wait_s, worker.idle, worker.kv_demand(needed), worker.shadow.behind)

    def reuse(self, worker: Worker) -> Reuse:
        """What it is taken to reuse."""
        name = worker.spec.name
        return self._lasting.get(name) or self._found[name]

    def may_find(self, worker: Worker) -> int:
        """Tokens that it will reuse if nothing is pushed out before; 0 where what is pushed out comes back from a lower
        tier, and so need not be followed."""
        found = self._found[worker.spec.name]
        if found.host_tokens or found.storage_tokens or not self._home.cache.computes_what_it_stores(worker.spec.name):
            return 0
        return found.device_tokens

    def _reuse_then(self, worker: Worker, timeline: Timeline | Guess, budget: Budget) -> Reuse:
        """What it would reuse now, less what will be gone by the time that it lets the request in."""
        name, size = worker.spec.name, worker.settings.block_size
        found = self._found[name]
        if not found.device_tokens:
            return found
        if not worker.shadow.crowded:
            # Not all that is free will be taken: what was used lately stays.
            ahead = worker.shadow.prefill_tokens_ahead()
            lasting = self._lasting[name] = self._home.cache.at_admission(name, self._prompt, found, ahead)
            return lasting
        whole = -(-self._prompt.token_count // size)
        steps = timeline.steps_until(timeline.admitted_s(whole, budget))
        hashes = self._home.cache.hashes(name, self._prompt)
        blocks = worker.shadow.lasting_blocks(hashes, found.device_tokens // size, steps)
        lasting = self._lasting[name] = found.lasting(blocks * size)
        return lasting


def least_prospects(
    home: Pool,
    workers: ReadOnly[Worker],
    wish: Wish,
    waited_s: float,
    bound_s: float,
    tickets: Mapping[str, Ticket],
    now_s: float,
) -> list[Prospect]:
    """Each worker as any request would find it at the best; none of them if one of them may be open to it."""
    quantile, used_up = 1.0 - home.policy.admission.risk, waited_s > bound_s
    found = []
    for step in range(len(workers)):
        # Who was open lately may well be so again.
        place = (home.open_at + step) % len(workers)
        worker = workers[place]
        shadow, cost = worker.shadow, worker.cost
        wait_s = None
        if used_up and not shadow.prefilling:
            wait_s = 0.0
        elif used_up or (cost.learned and not worker.idle):
            wait_s = shadow.least_wait_s(now_s, worker.settings.place(wish.priority))
        if wait_s is not None:
            worker.count_overdue(tickets, now_s)
            high_wait_s = least_high_wait_s(wait_s, quantile, worker.calibration, cost.basis, worker.trusted)
            if used_up or waited_s + high_wait_s > bound_s + _ROUNDING_S:
                found.append((high_wait_s, place, wait_s))
                continue
        home.open_at = place
        return []
    if len(workers) > _ALL_PRICED:
        found = nsmallest(_LIKELY, found)
    return [_least_prospect(workers[place], waited_s, wait_s, high_wait_s) for high_wait_s, place, wait_s in found]


def _least_prospect(worker: Worker, waited_s: float, wait_s: float, high_wait_s: float) -> Prospect:
    """Of a request that has nothing to compute."""
    least = Forecast(
        worker=worker.spec.name,
        prompt_tokens=0,
        cached_tokens=0,
        already_waited_s=waited_s,
        wait_s=wait_s,
        prefill_s=0.0,
        overhead_s=0.0,
        ttft_s=waited_s + wait_s,
        basis=worker.cost.basis,
        tokens_ahead=worker.shadow.prefill_tokens_ahead(),
        exact_tokens=False,
    )
    return Prospect(least, high_wait_s, worker.idle, None)
