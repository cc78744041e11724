"""The rule of SGLang 0.5.23's scheduler, fcfs: prefill strictly before decode, one chunked request at a time.

Mirrors `get_next_batch_to_run` in `managers/scheduler.py` and `PrefillAdder` in `managers/schedule_policy.py`, without
overlap: what it says of a request that runs in step k+1 there holds for k here.
"""

from __future__ import annotations

from collections.abc import Callable

from enginesim.kv_events import KvEvent
from enginesim.radix_tree import Node, RadixTree
from enginesim.request import Phase, Request
from enginesim.scheduler import Batch, Chunk, Output, Scheduler
from enginesim.settings import SglangSettings

# Nobody reserves more room for a request's output than this (CLIP_MAX_NEW_TOKENS).
_RESERVED_MOST_TOKENS = 4096
# new_token_ratio: so much at first, of it so much at last, after so many decode steps (global defaults of 0.5.23).
_RATIO_AT_FIRST, _RATIO_AT_LAST, _RATIO_STEPS = 0.7, 0.14, 600
# A retraction sets it to what the others have generated and will in so many steps, of all that they may.
_STEPS_AFTER_RETRACTION = 20


class SglangScheduler(Scheduler):
    """As `Scheduler`, over a radix tree."""

    settings: SglangSettings
    pool: RadixTree  # type: ignore[assignment]

    def __init__(self, settings: SglangSettings, sample: Callable[[Request], int]) -> None:
        super().__init__(settings, sample)
        self.pool = RadixTree(settings.usable_blocks * settings.block_size, settings.block_size)
        self._chunked: Request | None = None
        self._nodes: dict[Request, Node] = {}  # where each running request's prefix ends in the tree; it is locked
        self._tree_pages: dict[Request, int] = {}  # how many of its pages are the tree's
        self._held_tokens: dict[Request, int] = {}  # slots that are its own
        self._ratio = self._first_ratio
        self._decode_steps = 0
        self._shut = False  # somebody was turned away, and nobody is tried again before one has left
        self._decodes_first = 0  # so many decode steps, before anybody is prefilled again

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._chunked)

    @property
    def lookahead(self) -> int:
        """A pair of tokens reaches one token beyond its page."""
        return int(self.settings.eagle)

    @property
    def _first_ratio(self) -> float:
        return min(1.0, _RATIO_AT_FIRST * self.settings.schedule_conservativeness)

    def fresh(self) -> SglangScheduler:
        return SglangScheduler(self.settings, self._sample)

    def idle_events(self) -> list[KvEvent]:
        """An engine without work says what it still has to say."""
        return self.pool.take_events()

    def abort(self, request: Request) -> None:
        if request is self._chunked:
            self._chunked = None
            self._release(request)
            request.phase = Phase.FINISHED
            self.totals.aborted_requests += 1
        else:
            super().abort(request)

    def schedule(self) -> Batch:
        """A prefill batch if there is anything to prefill and room for it, else a decode step."""
        chunks = [] if self._defers_prefill() else self._prefill_batch()
        if chunks:
            self._decodes_first = self.settings.prefill_decode_interval
            return Batch(tuple(chunks), ())
        retracted = self._make_room_for_decode()
        return Batch(tuple(self._decode(self.running)), tuple(retracted))

    def _defers_prefill(self) -> bool:
        if not self._decodes_first:
            return False
        # With nobody to decode the loop turns without a step, until it has turned often enough.
        if len(self.running) < max(1, self.settings.prefill_decode_interval_min_bs):
            self._decodes_first = 0
            return False
        self._decodes_first -= 1
        return True

    def _decode(self, requests: list[Request]) -> list[Chunk]:
        decodes = []
        for request in requests:
            self._own(request, request.computed_tokens + 1)
            decodes.append(self._advance(request, 1))
        return decodes

    def complete(self, batch: Batch) -> tuple[list[Output], list[KvEvent]]:
        """Prompts enter the tree with their result, outputs with their request's end. Events are kept while only
        decoding goes on, for `decode_log_interval` steps."""
        prefill = any(not chunk.is_decode for chunk in batch.chunks)
        for chunk in batch.chunks:
            if not chunk.is_decode and chunk.request.phase is Phase.RUNNING:
                self._insert(chunk.request)
        outputs = self._sample_all(batch)
        if not prefill:
            self._decode_steps += 1
        if not prefill and not batch.preempted:
            step = (self._first_ratio - self._first_ratio * _RATIO_AT_LAST) / _RATIO_STEPS
            self._ratio = max(self._first_ratio * _RATIO_AT_LAST, self._ratio - step)
        due = prefill or self._decode_steps % self.settings.decode_log_interval == 0 or not self.has_work
        return outputs, self._drain() if due else []

    def _drain(self) -> list[KvEvent]:
        if not self.has_work:
            self._ratio = self._first_ratio
        return self.pool.take_events()

    # Prefill

    def _prefill_batch(self) -> list[Chunk]:
        page, settings = self.settings.block_size, self.settings
        beside = len(self.running) if settings.enable_mixed_chunk else 0
        left, input_left = settings.max_num_batched_tokens - beside, settings.max_prefill_tokens - beside
        admitted: list[tuple[Request, int]] = []
        promised = sum(self._still_reserved(request) for request in self.running) * self._ratio + beside
        if self._chunked is not None or not self.running:
            self._shut = False
        if self._chunked is not None and left > 0:
            request, self._chunked = self._chunked, None
            missing = len(request.token_ids) - request.computed_tokens
            tokens = min(left, missing)
            space = int(self._space_tokens - promised)
            if space > 0:
                tokens = min(tokens, space)
            padded = -(-tokens // page) * page
            promised += padded + page + (self._most_reserved(request) if tokens == missing else 0)
            admitted.append((request, tokens))
            left -= padded
            input_left -= padded
        while self.waiting and not self._shut and left > 0 and input_left > 0:
            if len(self.running) + len(admitted) >= settings.max_num_seqs:
                self._shut = True
                break
            request = self.waiting[0]
            node = self.pool.match(request, self._most_pages(request))
            self.pool.lock(node)
            hit = self.pool.depth(node) * page
            tokens = len(request.token_ids) - hit
            is_cut = -(-tokens // page) * page > left
            if tokens + self._still_reserved(request) + page >= self._space_tokens - promised:
                self._shut = bool(self.running or admitted)
                self.pool.unlock(node)
                break
            if is_cut:
                tokens = left // page * page
                if not tokens:
                    self.pool.unlock(node)
                    break
            self._nodes[request], self._tree_pages[request] = node, hit // page
            self._held_tokens[request] = 0
            self._admit(request, hit)
            admitted.append((request, tokens))
            padded = -(-tokens // page) * page
            promised += padded + page + (0 if is_cut else self._most_reserved(request))
            left -= padded
            input_left -= padded
            if self._space_tokens - promised <= 0:
                self._shut = True
        if not self.running:
            # The mark is on the batch that decodes; an empty one is replaced by this one, which has none.
            self._shut = False
        decoding = list(self.running)
        chunks = []
        for request, tokens in admitted:
            self._own(request, request.computed_tokens + tokens)
            chunks.append(self._advance(request, tokens))
            if request.computed_tokens < len(request.token_ids):
                self._chunked = request
            else:
                self.running.append(request)
        if chunks and beside and self._decode_fits(decoding):
            self._shut = False  # who decodes is in this batch now, and the mark stays behind
            chunks += self._decode(decoding)
        return chunks

    def _admit(self, request: Request, hit_tokens: int) -> None:
        super()._admit(request, hit_tokens)
        self.running.remove(request)

    def _most_pages(self, request: Request) -> int:
        """At least the last token is computed; with pairs of tokens for keys, a prompt is one shorter."""
        return max(0, len(request.token_ids) - 1 - request.lookahead) // self.settings.block_size

    @property
    def _space_tokens(self) -> int:
        return self.pool.free_tokens + self.pool.evictable_tokens

    def _still_reserved(self, request: Request) -> int:
        return min(max(0, request.max_tokens - request.output_tokens), _RESERVED_MOST_TOKENS)

    def _most_reserved(self, request: Request) -> int:
        return min(request.max_tokens, _RESERVED_MOST_TOKENS)

    # Decode

    def _make_room_for_decode(self) -> list[Request]:
        """Retracts until every running request can have one more token: those with the least output first."""
        retracted: list[Request] = []
        while len(self.running) > 1 and not self._decode_fits(self.running):
            victim = min(self.running, key=lambda request: (request.output_tokens, -request.prompt_tokens))
            self.running.remove(victim)
            self._release(victim)
            victim.phase = Phase.WAITING
            victim.computed_tokens = 0
            victim.preemptions += 1
            self.waiting.append(victim)
            self.totals.preemptions += 1
            retracted.append(victim)
        if retracted:
            generated = sum(request.output_tokens + _STEPS_AFTER_RETRACTION for request in self.running)
            self._ratio = min(1.0, generated / (sum(request.max_tokens for request in self.running) + 1))
        return retracted

    def _decode_fits(self, requests: list[Request]) -> bool:
        page = self.settings.block_size
        needed = sum(page for request in requests if request.computed_tokens % page == 0)
        return needed <= self._space_tokens

    # Memory

    def _own(self, request: Request, tokens: int) -> None:
        """Slots for so many tokens in all; the tree's count."""
        page = self.settings.block_size
        missing = tokens - self._tree_pages[request] * page - self._held_tokens[request]
        if missing > 0:
            padded = -(-missing // page) * page
            if not self.pool.take(padded):
                raise RuntimeError("more was admitted than the pool holds")
            self._held_tokens[request] += padded

    def _insert(self, request: Request) -> None:
        page = self.settings.block_size
        pages = min(max(0, request.computed_tokens - request.lookahead) // page, len(request.block_hashes))
        before = self._tree_pages[request]
        if pages <= before:
            return
        node = self.pool.insert(request, pages, own_from=before)
        self.pool.lock(node)
        self.pool.unlock(self._nodes[request])
        self._nodes[request], self._tree_pages[request] = node, pages
        self._held_tokens[request] -= (pages - before) * page

    def _release(self, request: Request) -> None:
        """Gives back what is its own; what is the tree's may be evicted from now on."""
        node = self._nodes.pop(request, None)
        if node is None:
            return
        self._shut = False
        self.pool.unlock(node)
        self.pool.give_back(self._held_tokens.pop(request))
        del self._tree_pages[request]

    def _finish(self, request: Request) -> None:
        if request.output_tokens and request in self._nodes and request.phase is Phase.RUNNING:
            self._insert(request)
        self._release(request)
        request.phase = Phase.FINISHED

    def _preempt(self, victim: Request) -> None:
        raise AssertionError("SGLang retracts, and never within a prefill")
