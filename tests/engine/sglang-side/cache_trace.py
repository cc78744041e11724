"""SGLang's own radix cache and allocators in virtual time, and what somebody outside can see of them.

    python cache_trace.py OPTIONS > RECORDS

SGLang's are: `UnifiedRadixCache` with its Rust tree, the token and page allocators, matching, locks, insertion,
eviction and the recorder of KV events, encoded as its publisher does. Ours is the loop around them: prefill strictly
before decode, a prompt inserted when its result is there, an output when the request ends, events drained after
a prefill, every so many decode steps and when idle, as `managers/scheduler.py` of 0.5.23 does.

Records are those of vllm-side/cache_trace.py, with the tokens in the tree (`holds_tokens`) in place of its hashes, and
what was done to the tree, for a twin of it:

    ["matched", id, hit tokens] ["unlocked", id] ["evicted", tokens wanted]
    ["inserted", id, its tokens so far (u32), pages]

and with a hierarchy

    ["loaded", id]                             of what it hits a part comes from the host
    ["holds_tokens", tokens, tokens on the host]
"""

# mypy: disable-error-code="import-not-found"
from __future__ import annotations

import json
import struct
import sys
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import absent  # noqa: F401 - before SGLang
import hicache
import msgspec
import torch
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from workload import Ask, Shape, Workload

_HOLDS_EVERY = 2000  # steps


@dataclass(slots=True)
class Adapted:
    """A request as the table of adapters' names wants to see it."""

    extra_key: str
    lora_id: str


@dataclass(slots=True, eq=False)
class Running:
    """One request in the engine: its tokens, and the slots that hold those that are computed."""

    ask: Ask
    tokens: list[int]
    extra_key: str | None
    slots: torch.Tensor
    computed: int = 0
    lock: Any = None
    inserted: int = 0  # tokens at the front that are the tree's
    output: list[int] = field(default_factory=list)


class Engine:
    def __init__(self, options: dict[str, Any]) -> None:
        self.page: int = options["page_size"]
        self.eagle: bool = options["eagle"]
        self.chunk: int = options["chunked_prefill_size"]
        self.most_running: int = options["max_running_requests"]
        self.drains_every: int = options["decode_log_interval"]
        tokens: int = options["max_total_num_tokens"]
        self.hierarchy: bool = options["host_ratio"] > 0
        pool = hicache.device_pool(tokens, self.page) if self.hierarchy else None
        if self.page == 1:
            self.allocator: Any = TokenToKVPoolAllocator(tokens, torch.bfloat16, "cpu", pool, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(tokens, self.page, torch.bfloat16, "cpu", pool, False)
        self.parameters = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.page,
            is_eagle=self.eagle,
            enable_kv_cache_events=True,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(self.parameters)
        if self.hierarchy:
            hicache.attach(self.cache, self.parameters, self.page, options["host_ratio"], options["write_policy"])
        self.waiting: deque[Running] = deque()
        self.running: list[Running] = []
        self.chunked: Running | None = None
        self.counts = {"steps": 0, "prefills": 0, "preemptions": 0, "tree": 0}
        self._encoder = msgspec.msgpack.Encoder()
        self._out = sys.stdout.buffer
        self._decodes = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.chunked)

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running) + (self.chunked is not None)

    def tell(self, *record: object) -> None:
        raw = self._encoder.encode(record)
        self._out.write(struct.pack("<I", len(raw)) + raw)

    def add(self, ask: Ask) -> None:
        extra_key = None
        if ask.adapter is not None:
            # SGLang appends the adapter's id, 32 hex digits, to the caller's own key.
            lora_id = f"{ask.adapter[-1]}" * 32
            extra_key = lora_id
            self.parameters.kv_event_lora_names.register(Adapted(extra_key, lora_id), ask.adapter)
        self.waiting.append(Running(ask, list(ask.tokens), extra_key, torch.empty(0, dtype=torch.int64)))
        self.tell("asked", ask.id, array("I", ask.tokens).tobytes(), ask.salt, ask.adapter, True)

    def step(self, workload: Workload) -> list[tuple[Ask, list[int]]]:
        self.counts["steps"] += 1
        if self.hierarchy:
            self.cache.check_hicache_events()
        batch = self._prefill_batch()
        ended = self._run_prefill(batch, workload) if batch else self._run_decode(workload)
        if self.hierarchy:
            self.cache.flush_pending_backups()
        if self.counts["steps"] % _HOLDS_EVERY == 0:
            self.tell_what_it_holds()
        return ended

    def drain(self) -> None:
        events = self.cache.take_events()
        if events:
            self.tell("batch", self._encoder.encode(KVEventBatch(ts=0.0, events=events, attn_dp_rank=0)))

    def tell_what_it_holds(self) -> None:
        on_host: tuple[int, ...] = ()
        if self.hierarchy:
            self.cache.writing_check(write_back=True)  # what is on its way there arrives
            pool = self.cache.cache_controller.mem_pool_host
            on_host = (int(pool.size - pool.available_size()),)
        self.drain()
        total = self.cache.total_size()
        tokens = total[0] if isinstance(total, tuple) else total
        self.tell("holds_tokens", int(tokens), *on_host)

    # Prefill

    def _prefill_batch(self) -> list[tuple[Running, int]]:
        """Who computes how much. As in SGLang slots are taken, and others' evicted, once the whole batch is matched."""
        left = self.chunk
        batch: list[tuple[Running, int]] = []
        promised = 0
        if self.chunked is not None:
            request, self.chunked = self.chunked, None
            tokens = min(left, len(request.tokens) - request.computed)
            promised = len(request.tokens) - request.computed + request.ask.output_tokens + self.page
            batch.append((request, tokens))
            left -= tokens
        while self.waiting and left >= self.page and len(self.running) + len(batch) < self.most_running:
            request = self.waiting[0]
            matched = self.cache.match_prefix(MatchPrefixParams(key=self._key(request, len(request.tokens) - 1)))
            hit = matched.device_prefix_len
            self.tell("matched", request.ask.id, hit)
            lock = self.cache.lock(matched.last_device_node)
            need = len(request.tokens) - hit + request.ask.output_tokens + self.page
            if promised + need > self.allocator.available_size() + self.cache.evictable_size():
                self.cache.unlock(lock)
                self.tell("unlocked", request.ask.id)
                break
            self.waiting.popleft()
            promised += need
            last = matched.last_device_node
            if matched.host_hit_length:
                loaded, last = self._load(matched)
                hit += loaded
                self.cache.unlock(lock)
                lock = self.cache.lock(last)
                if loaded:
                    self.tell("loaded", request.ask.id)
            request.lock = lock
            request.slots = self.cache.path_device_indices(last).clone()
            request.computed = request.inserted = hit
            kind = "resumed" if request.output else "admitted"
            self.tell(kind, request.ask.id, hit, len(request.tokens), *([hit] if kind == "admitted" else ()))
            tokens = len(request.tokens) - hit
            if tokens > left:
                tokens = left // self.page * self.page
            batch.append((request, tokens))
            left -= -(-tokens // self.page) * self.page
        if self.hierarchy:
            self.cache.ready_to_load_host_cache()
        for request, tokens in batch:
            if not self._reserve(request, request.computed + tokens):
                raise SystemExit("more was admitted than fits")
        return batch

    def _load(self, matched: Any) -> tuple[int, Any]:
        """What the host has of a match comes back to the device, all of it or nothing."""
        pinned = self.cache.inc_host_lock_ref(matched.best_match_node).to_dec_params()
        loaded, last = self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=matched.best_match_node,
                host_hit_length=matched.host_hit_length,
                req=SimpleNamespace(
                    last_node=matched.last_device_node,
                    swa_host_hit_length=0,
                    mamba_host_hit_length=0,
                    kv=SimpleNamespace(mamba_pool_idx=None),
                ),
            )
        )
        self.cache.dec_host_lock_ref(matched.best_match_node, pinned)
        return loaded, last

    def _run_prefill(self, batch: list[tuple[Running, int]], workload: Workload) -> list[tuple[Ask, list[int]]]:
        self.counts["prefills"] += 1
        ended = []
        for request, tokens in batch:
            request.computed += tokens
            self._insert(request, request.computed)
            if request.computed < len(request.tokens):
                self.chunked = request
                continue
            self.running.append(request)
            ended += self._sample(request, workload)
        self.drain()
        return ended

    # Decode

    def _run_decode(self, workload: Workload) -> list[tuple[Ask, list[int]]]:
        ended = []
        for request in list(self.running):
            if not self._reserve(request, request.computed + 1):
                self._retract(request)
                continue
            request.computed += 1
            ended += self._sample(request, workload)
        self._decodes += 1
        if self._decodes % self.drains_every == 0 or not self.busy:
            self.drain()
        return ended

    def _sample(self, request: Running, workload: Workload) -> list[tuple[Ask, list[int]]]:
        token = workload.rng.randrange(100_000)
        if not request.output:
            self.tell("first", request.ask.id)
        request.output.append(token)
        request.tokens.append(token)
        if len(request.output) < request.ask.output_tokens:
            return []
        self.running.remove(request)
        # The last token was sampled and never computed.
        self._insert(request, request.computed)
        self.allocator.free(request.slots[request.inserted :])
        self.cache.unlock(request.lock)
        self.tell("unlocked", request.ask.id)
        self.tell("ended", request.ask.id)
        return [(request.ask, request.output)]

    def _retract(self, request: Running) -> None:
        """Out of room while decoding: its slots are free again and nothing of it is kept."""
        self.counts["preemptions"] += 1
        self.running.remove(request)
        self.allocator.free(request.slots[request.inserted :])
        self.cache.unlock(request.lock)
        self.tell("unlocked", request.ask.id)
        request.lock, request.computed, request.inserted = None, 0, 0
        request.slots = torch.empty(0, dtype=torch.int64)
        self.waiting.appendleft(request)

    # Memory

    def _key(self, request: Running, tokens: int) -> Any:
        return RadixKey(
            array("q", request.tokens[:tokens]), request.extra_key, is_bigram=self.eagle, cache_salt=request.ask.salt
        )

    def _reserve(self, request: Running, tokens: int) -> bool:
        """Slots for so many tokens in all; evicts as SGLang does when there are too few."""
        need = tokens - len(request.slots)
        if need <= 0:
            return True
        need = -(-need // self.page) * self.page
        missing = need - self.allocator.available_size()
        if missing > 0:
            self.cache.evict(EvictParams(num_tokens=missing))
            self.tell("evicted", missing)
        slots = self.allocator.alloc(need)
        if slots is None:
            return False
        request.slots = torch.cat([request.slots, slots])
        return True

    def _insert(self, request: Running, tokens: int) -> None:
        """What is computed of it becomes the tree's, by whole pages."""
        key = self._key(request, tokens).page_aligned(self.page)
        length = len(key)
        if length <= request.inserted:
            return
        values = request.slots[:length].to(dtype=torch.int64, copy=True)
        result = self.cache.insert(
            InsertParams(key=key, value=values, prev_prefix_len=request.inserted, inserted_len=request.inserted)
        )
        self.tell("inserted", request.ask.id, array("I", request.tokens[:tokens]).tobytes(), length // self.page)
        prompt = self._key(request, len(request.ask.tokens)).page_aligned(self.page)
        if 0 < len(prompt) < length:
            # Splits the leaf where the prompt ends, as `checkpoint_into_tree` does, so that an output can go alone.
            self.cache.insert(
                InsertParams(
                    key=prompt, value=values[: len(prompt)], prev_prefix_len=len(prompt), inserted_len=len(prompt)
                )
            )
        # Others may have inserted the same meanwhile: then theirs are kept, and ours have been freed.
        request.slots = torch.cat([self.cache.path_device_indices(result.last_device_node), request.slots[length:]])
        lock = self.cache.lock(result.last_device_node)
        self.cache.unlock(request.lock)
        request.lock, request.inserted = lock, length


def main() -> None:
    options = json.loads(sys.argv[1])
    workload = Workload(Shape(**options["shape"]))
    engine = Engine(options)
    while not workload.exhausted or engine.busy:
        while not workload.exhausted and engine.load < workload.shape.at_once:
            engine.add(workload.next_ask())
            if workload.rng.random() < 0.3:
                break
        for ask, output in engine.step(workload):
            workload.answered(ask, output)
    engine.tell_what_it_holds()
    engine.tell("done", engine.counts)
    sys.stdout.buffer.flush()


main()
