"""The rule of vLLM 0.32's V1 scheduler, fcfs and synchronous: who computes how many tokens in the next step.

`schedule()` says what the step will do, `complete()` what came of it. There is no clock here; time passes between them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from enginesim.block_pool import BlockPool
from enginesim.kv_events import KvEvent
from enginesim.request import Phase, Request
from enginesim.settings import SchedulerSettings


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` tokens of one request, behind `start` that are there already."""

    request: Request
    start: int
    tokens: int
    is_decode: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes. `preempted` lost their blocks to older requests and wait again."""

    chunks: tuple[Chunk, ...]
    preempted: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled token, the `position`th of its request from 0.

    `finish_reason` is "length" with the last one, or "stop" where the request ends by itself.
    """

    request: Request
    token_id: int
    position: int
    finish_reason: str | None


@dataclass(slots=True)
class Totals:
    """Counters since the start, in tokens where the name says nothing else; vLLM's counters of the same names."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0


class Scheduler:
    """Running and waiting requests of one engine over one block pool. `sample` gives a request's next token id."""

    def __init__(self, settings: SchedulerSettings, sample: Callable[[Request], int]) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_gpu_blocks, settings.block_size)
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.totals = Totals()
        self._sample = sample
        self._longest_tokens = settings.longest_request_tokens

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.running or self.waiting)

    @property
    def lookahead(self) -> int:
        """Tokens behind a block that are part of its identity."""
        return 0

    def fresh(self) -> "Scheduler":
        """One of the same settings that has seen nothing."""
        return Scheduler(self.settings, self._sample)

    def add(self, request: Request) -> None:
        """Queue a request behind all others. ValueError if it could never fit, or its blocks are not hashed."""
        limit = self.settings.longest_request_tokens
        if request.prompt_tokens >= limit:
            raise ValueError(f"a prompt of {request.prompt_tokens} tokens leaves no room for output within {limit}")
        hashable = max(0, request.prompt_tokens - request.lookahead)
        if len(request.block_hashes) != hashable // self.settings.block_size:
            raise ValueError("block_hashes is incomplete; call hash_more() first")
        self.waiting.append(request)

    def idle_events(self) -> list[KvEvent]:
        """What an engine without work says: vLLM's nothing, whatever it has to say."""
        return []

    def abort(self, request: Request) -> None:
        """Drop a request wherever it stands; its blocks are free but keep their contents. Harmless once finished."""
        if request.phase is Phase.FINISHED:
            return
        (self.running if request.phase is Phase.RUNNING else self.waiting).remove(request)
        self._finish(request)
        self.totals.aborted_requests += 1

    def schedule(self) -> Batch:
        """Plan one step: running requests first, in admission order, then as many waiting ones as fit."""
        budget = self.settings.max_num_batched_tokens
        threshold = self._chunk_limit()
        chunks: list[Chunk] = []
        preempted: list[Request] = []

        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            tokens = min(len(request.token_ids) - request.computed_tokens, threshold, budget)
            if not self._make_room(request, request.computed_tokens + tokens, preempted):
                break  # it was itself the youngest, and gave way
            self.pool.allocate(request, request.computed_tokens + tokens)
            chunks.append(self._advance(request, tokens))
            budget -= tokens
            position += 1

        while not preempted and self.waiting and budget > 0 and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            hit = self.pool.find_prefix(request)
            if not self.pool.can_hold_whole(request, hit):
                break  # the head of the line blocks all behind it
            hit_tokens = len(hit) * self.settings.block_size
            tokens = min(len(request.token_ids) - hit_tokens, threshold, budget)
            self.pool.allocate(request, hit_tokens + tokens, hit)
            self._admit(request, hit_tokens)
            chunks.append(self._advance(request, tokens))
            budget -= tokens

        return Batch(tuple(chunks), tuple(preempted))

    def complete(self, batch: Batch) -> tuple[list[Output], list[KvEvent]]:
        """Sample a token for every request whose tokens are all computed, and hand out the events of the step.

        Requests aborted since `schedule()` are passed over.
        """
        return self._sample_all(batch), self.pool.take_events()

    def _sample_all(self, batch: Batch) -> list[Output]:
        self.totals.steps += 1
        outputs = []
        for chunk in batch.chunks:
            request = chunk.request
            if request.phase is Phase.FINISHED or request.computed_tokens < len(request.token_ids):
                continue
            token = self._sample(request)
            request.append(token)
            position = request.output_tokens - 1
            outputs.append(Output(request, token, position, self._finish_reason(request, position + 1)))
            if not position:
                self.totals.prompt_tokens += request.prompt_tokens
        self.totals.generation_tokens += len(outputs)
        done = [output.request for output in outputs if output.finish_reason]
        for request in done:
            self._finish(request)
        if done:
            self.running = [request for request in self.running if request.phase is Phase.RUNNING]
            self.totals.finished_requests += len(done)
        return outputs

    def _chunk_limit(self) -> int:
        """long_prefill_token_threshold, which since vLLM 0.31 does not bind a request that is alone."""
        alone = len(self.running) + len(self.waiting) <= 1
        limit = self.settings.long_prefill_token_threshold
        return self.settings.max_num_batched_tokens if alone or limit == 0 else limit

    def _make_room(self, request: Request, tokens: int, preempted: list[Request]) -> bool:
        """Preempt from the youngest up until `request` can grow to `tokens`; False if it had to go itself."""
        while not self.pool.can_hold(request, tokens):
            victim = self.running.pop()
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        """Back to the head of the queue with nothing computed; its blocks stay findable until somebody takes them."""
        self.pool.release(victim)
        victim.computed_tokens = 0
        victim.phase = Phase.WAITING
        victim.preemptions += 1
        self.waiting.appendleft(victim)
        self.totals.preemptions += 1

    def _admit(self, request: Request, hit_tokens: int) -> None:
        self.waiting.popleft()
        self.running.append(request)
        request.phase = Phase.RUNNING
        request.computed_tokens = hit_tokens
        if request.cached_tokens is None:  # hits after a preemption are not counted, neither here nor in usage
            request.cached_tokens = hit_tokens
            self.totals.prefix_cache_queries += len(request.token_ids)
            self.totals.prefix_cache_hits += hit_tokens

    def _advance(self, request: Request, tokens: int) -> Chunk:
        chunk = Chunk(request, request.computed_tokens, tokens, request.is_decoding)
        request.computed_tokens += tokens
        return chunk

    def _finish_reason(self, request: Request, output_tokens: int) -> str | None:
        if output_tokens == request.ends_by_itself_after:
            return "stop"
        full = output_tokens >= request.max_tokens or len(request.token_ids) >= self._longest_tokens
        return "length" if full else None

    def _finish(self, request: Request) -> None:
        self.pool.release(request)
        request.phase = Phase.FINISHED
