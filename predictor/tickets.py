"""A request on its way through a fleet: what its caller wants, what was granted, and what became of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec

from predictor.admission import Refusal
from predictor.forecast import Forecast
from predictor.grading import CacheVerdict, Grade
from predictor.length_class import LengthClass
from predictor.pool_cache import Left
from predictor.routing import Prefer, Why


class Wish(msgspec.Struct, frozen=True, gc=False):
    """What a caller wants of a request, and since when."""

    ticket_id: str
    received_at_s: float
    waited_before_s: float = 0.0  # before the request reached us, where that is known and trusted
    max_queue_wait_s: float | None = None
    streaming: bool = True  # the first token will be seen
    max_tokens: int | None = None
    subset: frozenset[str] | None = None  # endpoints that may be chosen; None: all of the pool's
    max_ttft_s: float | None = None
    prefer: Prefer | None = None  # None: as the pool does
    tenant: str | None = None  # who shares the pool with whom, where that counts
    session: str | None = None  # what the caller calls the conversation
    adapter: str | None = None  # LoRA adapter that must be loaded
    priority: int | None = None  # for engines that go by it, as the caller gave it


class Attempt(enum.Enum):
    """How often a request has been tried to be placed, where it may be held for a while."""

    FINAL = "final"  # a refusal is one
    FIRST = "first"  # a refusal is none yet: whoever carries it out says so (`Fleet.refused`)
    AGAIN = "again"  # the same, of a request that was counted before


@dataclass(slots=True)
class Ticket:
    """A granted request in flight."""

    id: str
    pool: str
    worker: str
    forecast: Forecast
    wish: Wish
    booked_at_s: float
    joins_at_s: float  # when the step under way ends, and the first that it can be part of begins
    solo: bool  # no other prefill shared the worker with its own
    decodes_beside: int
    cost_changes: int  # of the worker's speed, when it was forecast
    length_class: LengthClass
    number: int = 0  # bookings are numbered in the order in which they join their worker's queue
    kv_tokens: int = 0  # of the worker's KV cache that it will need beside what it shares
    would_refuse: Refusal | None = None  # let through in shadow mode
    decoded_alone: bool = False  # nothing else was in flight on the worker since its first token
    first_token_at_s: float | None = None
    overdue: bool = False  # the upper end of its interval passed without a first token
    moved: bool = False  # Envoy sent it to another endpoint than the chosen one

    def prompt_tokens(self, usage: Usage) -> int | None:
        """The tokens of the prompt, if they are known for certain."""
        if usage.prompt_tokens is not None or not self.forecast.exact_tokens:
            return usage.prompt_tokens
        return self.forecast.prompt_tokens

    def left(self, usage: Usage) -> Left | None:
        """What it has left in its engine's cache, having been served, if that is known."""
        prompt_tokens = self.prompt_tokens(usage)
        if prompt_tokens is None or usage.output_tokens is None:
            return None
        reused = self.forecast.cached_tokens if usage.cached_tokens is None else usage.cached_tokens
        return Left(prompt_tokens + usage.output_tokens, reused)


class Grant(msgspec.Struct, frozen=True):
    ticket: Ticket
    endpoints: tuple[str, ...]  # the chosen one, then whom to fall back to
    forecasts: tuple[Forecast, ...]  # of every worker that was considered
    why: Why
    cluster: str | None = None  # of the chosen one, where routes choose clusters
    would_refuse: Refusal | None = None  # in shadow mode
    rank: int | None = None  # of the chosen one, and of whom to fall back to


@dataclass(frozen=True, slots=True)
class NoWorker:
    pool: str


Decision = Grant | Refusal | NoWorker


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What the engine reported at the end, where it did. Tokens."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    cached_seen: bool = False  # not reported, but read from where the request's first stored block begins


class FirstToken(msgspec.Struct, frozen=True):
    ticket: Ticket
    grade: Grade | None  # None: the request was served elsewhere than predicted for


class Ended(msgspec.Struct, frozen=True):
    ticket: Ticket
    cache: CacheVerdict | None  # None: there is nothing to judge (no first token, or served elsewhere)
    usage: Usage
    learned_from: bool
