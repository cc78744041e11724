"""What the workers of one pool have cached, and how much of a prompt each would reuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from predictor.cache_index import CacheIndex, TierCaps, TieredRun
from predictor.engines.reuse import ReuseRule
from predictor.first_stored import FirstStored
from predictor.just_ended import JustEnded
from predictor.kv_events import Batch, Bundle, Cleared, Stored, Tier
from predictor.last_use import LastUse
from predictor.prefixes_ahead import PrefixesAhead
from predictor.prompt import BlockHasher, BlockHashes, HashFamily, Prompt
from predictor.reuse_correction import ReuseCorrection
from predictor.stored_run import StoredRun
from predictor.trust import ViewTrust

# Stores in a row that are hashed in another way than was assumed, before that is believed over what came before.
_STRANGERS = 4
_NO_HASHES = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What is told of a worker's cache besides its events."""

    rule: ReuseRule = field(default_factory=ReuseRule)
    host_blocks: int | None = None  # what the tiers can hold; None: a multiple of the device's
    storage_blocks: int | None = None
    # Loading takes time: KV of some 130 KB a token over PCIe, and from a disk or the network.
    host_s_per_token: float = 10e-6
    storage_s_per_token: float = 60e-6
    stores: Mapping[Tier, str] = field(default_factory=dict)  # names of stores shared with other workers, by tier


class Reuse(NamedTuple):
    """What a worker would not compute of a prompt. Tokens, by where they are; and the time that loading takes."""

    device_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    load_s: float = 0.0
    by_rule: int = 0  # what the rule alone says, before what was learned from the engine's reports
    promised: int = 0  # what the rule says of all that the view shows, whatever it is worth

    @property
    def tokens(self) -> int:
        return self.device_tokens + self.host_tokens + self.storage_tokens

    def lasting(self, tokens: int) -> Reuse:
        """The same when only so much stays on the device. What went to a lower tier from there is still reused."""
        if tokens >= self.device_tokens or self.host_tokens or self.storage_tokens:
            return self
        return Reuse(tokens, 0, 0, 0.0, min(tokens, self.by_rule), min(tokens, self.promised))


class Left(NamedTuple):
    """What a request that was served has left in a cache: tokens of its prompt and its answer, and those it found."""

    tokens: int
    reused_tokens: int


_NOTHING, _NO_RUN = Reuse(), TieredRun(0)


@dataclass(slots=True)
class _Cache:
    spec: CacheSpec
    rule: ReuseRule
    family: HashFamily
    capacity: int | None
    ahead: PrefixesAhead = field(default_factory=PrefixesAhead)
    just_ended: JustEnded = field(default_factory=JustEnded)
    first_stored: FirstStored = field(default_factory=FirstStored)
    last_use: LastUse = field(default_factory=LastUse)
    correction: ReuseCorrection = field(default_factory=ReuseCorrection)
    view: ViewTrust = field(default_factory=ViewTrust)
    # Of each request, when it came: tokens by the rule, and those of all that the view showed.
    credited: dict[str, tuple[int, int]] = field(default_factory=dict)
    strangers: int = 0  # stores in a row of another hash family


class PoolCache:
    """One index for each way of hashing in the pool; a worker is in the one that its events fit."""

    def __init__(self, hasher: BlockHasher) -> None:
        self._hasher = hasher
        self._caches: dict[str, _Cache] = {}
        self._indexes: dict[HashFamily, CacheIndex] = {}

    # Workers

    def join(self, worker: str, spec: CacheSpec, block_size: int, capacity_blocks: int | None) -> None:
        """Starts an empty view. ValueError if there is one already."""
        if worker in self._caches:
            raise ValueError(f"worker {worker!r} is already in the pool's cache")
        cache = _Cache(spec, spec.rule, HashFamily(block_size), capacity_blocks)
        self._enter(worker, cache)
        self._caches[worker] = cache

    def leave(self, worker: str) -> None:
        self._leave_index(worker, self._caches.pop(worker))

    def configure(self, worker: str, block_size: int, capacity_blocks: int | None) -> None:
        """The engine's own word on its blocks. Another block size empties the view."""
        cache = self._caches[worker]
        cache.capacity = capacity_blocks
        if block_size != cache.family.block_size:
            self._move(worker, cache, HashFamily(block_size, cache.family.lookahead))
        elif capacity_blocks is not None:
            self._indexes[cache.family].set_capacity(worker, capacity_blocks)
        cache.correction.forget()

    def clear(self, worker: str) -> None:
        """What the worker holds is not known any more."""
        cache = self._caches[worker]
        self._indexes[cache.family].clear(worker)
        cache.view.cleared()
        cache.last_use.cleared()
        cache.just_ended.clear()

    def view(self, worker: str) -> ViewTrust:
        """How far the worker's view is believed."""
        return self._caches[worker].view

    @property
    def families(self) -> set[HashFamily]:
        """The ways in which a prompt must be hashed to be looked up."""
        return {cache.family for cache in self._caches.values()}

    # Events

    def apply(self, worker: str, batch: Batch) -> list[StoredRun]:
        """Takes in a batch, and returns what it says of blocks that were computed."""
        cache = self._caches[worker]
        if batch.events:
            cache.view.announced()
        runs: list[StoredRun] = []
        for event in batch.events:
            if isinstance(event, Bundle):
                self._look_at_family(worker, cache, HashFamily(event.block_size), False, len(event.lengths))
                runs += _runs_of(event, self._indexes[cache.family].take(worker, event))
            elif not isinstance(event, Stored):
                self._indexes[cache.family].apply(worker, event)
                if isinstance(event, Cleared):
                    cache.last_use.cleared()
                    cache.just_ended.clear()
            else:
                on_device = event.tier is Tier.DEVICE
                if on_device:
                    self._look_at_family(worker, cache, HashFamily(event.block_size, event.lookahead), event.pairs)
                first = self._indexes[cache.family].apply(worker, event, self._before(cache, event))
                if on_device and event.hashes:
                    runs.append(StoredRun(first, event.parent, event.hashes[-1], len(event.hashes)))
        blocks = sum(run.blocks for run in runs)
        cache.last_use.stored(blocks)
        if batch.events:
            cache.just_ended.heard(blocks, cache.capacity)
        if cache.first_stored.waiting:
            for run in runs:
                if run.first is not None:
                    cache.first_stored.stored(run.first, run.blocks)
        return runs

    def _before(self, cache: _Cache, event: Stored) -> int | None:
        """What stands before blocks that are adrift: they were stored for a request that is in flight."""
        if not event.adrift or event.block_size % cache.family.block_size:
            return None
        contents = self._hasher.contents(event.tokens, cache.family.block_size)
        for hashes in cache.ahead.newest():
            before = self._hasher.before(contents, hashes)
            if before is not None:
                return before
        return None

    def _look_at_family(self, worker: str, cache: _Cache, shown: HashFamily, pairs: bool, stores: int = 1) -> None:
        """So many stores show how an engine hashes, better than any list of its options does."""
        if shown == cache.family:
            cache.strangers = 0
            return
        cache.strangers += stores
        if cache.strangers >= _STRANGERS or not self._indexes[cache.family].blocks(worker):
            self._move(worker, cache, shown)
            cache.rule = cache.spec.rule.with_blocks_seen(shown.lookahead, pairs)

    # Requests

    def reuse(self, prompt: Prompt) -> dict[str, Reuse]:
        """For each worker what it would reuse of a prompt that came now."""
        runs = {family: index.match(prompt.hashes.get(family, _NO_HASHES)) for family, index in self._indexes.items()}
        return {
            worker: self._reuse(cache, prompt, runs[cache.family][worker]) for worker, cache in self._caches.items()
        }

    def _reuse(self, cache: _Cache, prompt: Prompt, run: TieredRun) -> Reuse:
        if run == _NO_RUN and not self._coming(cache, prompt, 0):
            return _NOTHING
        size = cache.family.block_size
        promised = cache.rule.reusable_tokens(run.blocks * size, size, prompt.token_count)
        run = _first_blocks(run, cache.view.credited(run.blocks))
        device, host, storage = run
        coming = self._coming(cache, prompt, device)
        if coming > device:
            device = coming
            # What will be on the device by then needs no loading.
            host, storage = max(0, min(host, run.blocks - storage - device)), max(0, min(storage, run.blocks - device))
        by_rule = cache.rule.reusable_tokens((device + host + storage) * size, size, prompt.token_count)
        tokens = cache.correction.apply(by_rule, size)
        if not host and not storage:
            return Reuse(tokens, 0, 0, 0.0, by_rule, promised)
        on_device = min(tokens, device * size)
        on_host = min(tokens - on_device, host * size)
        on_storage = tokens - on_device - on_host
        load_s = on_host * cache.spec.host_s_per_token + on_storage * cache.spec.storage_s_per_token
        return Reuse(on_device, on_host, on_storage, load_s, by_rule, promised)

    def at_admission(self, worker: str, prompt: Prompt, reuse: Reuse, tokens_ahead: int) -> Reuse:
        """What will be left of it when the requests ahead have had so many tokens computed.

        Blocks that they begin with as well are in use, or are used again, before the newcomer's turn.
        """
        cache = self._caches[worker]
        if tokens_ahead <= 0 or not reuse.by_rule or reuse.host_tokens or reuse.storage_tokens:
            return reuse
        size, hashes = cache.family.block_size, prompt.hashes[cache.family]
        run = reuse.by_rule // size
        left = cache.last_use.left_of(hashes, run, tokens_ahead // size)
        if left < run:
            left = self._ahead(cache, prompt, left)
        if left >= run:
            return reuse
        by_rule = left * size
        return Reuse(cache.correction.apply(by_rule, size), 0, 0, 0.0, by_rule, min(reuse.promised, by_rule))

    def _coming(self, cache: _Cache, prompt: Prompt, known: int) -> int:
        """Leading blocks that are known, that will have been stored at a newcomer's turn, or that were and are not
        announced."""
        if len(cache.just_ended) and cache.view.whole:
            hashes = prompt.hashes.get(cache.family, _NO_HASHES)
            known = cache.just_ended.run(hashes, prompt.token_count, known)
        return self._ahead(cache, prompt, known) if cache.rule.shares_in_flight else known

    @staticmethod
    def _ahead(cache: _Cache, prompt: Prompt, known: int) -> int:
        """Leading blocks that are known, or that requests ahead will have stored."""
        return cache.ahead.run(prompt.hashes.get(cache.family, _NO_HASHES), known) if len(cache.ahead) else known

    def hashes(self, worker: str, prompt: Prompt) -> BlockHashes:
        """Of the prompt's full blocks, as the worker divides it."""
        return prompt.hashes.get(self._caches[worker].family, _NO_HASHES)

    def held(self, worker: str, hashes: BlockHashes) -> int:
        """How many of these blocks, from the first on, are known to be on the worker's device."""
        return self._indexes[self._caches[worker].family].match(hashes)[worker].device

    def book(
        self, worker: str, request_id: str, prompt: Prompt, by_rule_tokens: int, promised_tokens: int | None = None
    ) -> None:
        """The request goes to this worker: its blocks will be there."""
        cache = self._caches[worker]
        promised = by_rule_tokens if promised_tokens is None else promised_tokens
        cache.just_ended.begun(request_id, len(cache.credited))
        cache.credited[request_id] = by_rule_tokens, promised
        hashes = prompt.hashes.get(cache.family, _NO_HASHES)
        cache.ahead.add(request_id, hashes)
        cache.first_stored.add(request_id, hashes)

    def release(self, worker: str, request_id: str, left: Left | None = None) -> int | None:
        """The request is not here any more; the tokens that it was seen to reuse, if it was seen to store any.

        `left`: what it has left behind, if it was served.
        """
        cache = self._caches[worker]
        cache.credited.pop(request_id, None)
        hashes = cache.ahead.remove(request_id)
        if hashes is not None:
            cache.last_use.used(hashes)
            if left is not None:
                cache.just_ended.add(request_id, hashes, left.tokens, left.reused_tokens, cache.family)
        blocks = cache.first_stored.end(request_id)
        return None if blocks is None else blocks * cache.family.block_size

    def learn(self, worker: str, request_id: str, reused_tokens: int) -> None:
        """What an engine reports to have reused for a request in flight, against what its rule had said."""
        cache = self._caches[worker]
        if request_id in cache.credited:
            by_rule, promised = cache.credited[request_id]
            cache.correction.observe(by_rule, reused_tokens)
            cache.view.compare(promised, reused_tokens)

    def served(self, worker: str, request_id: str, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """A request in flight was served: what of its prompt was not cached, the engine must have stored and said."""
        cache = self._caches[worker]
        if prompt_tokens is None or request_id not in cache.credited:
            return
        cached = cache.credited[request_id][1] if cached_tokens is None else cached_tokens
        size = cache.family.block_size
        cache.view.served(prompt_tokens // size - cached // size)

    # Views

    def blocks(self, worker: str, tier: Tier = Tier.DEVICE) -> int:
        return self._indexes[self._caches[worker].family].blocks(worker, tier)

    def block_size(self, worker: str) -> int:
        return self._caches[worker].family.block_size

    def correction(self, worker: str) -> ReuseCorrection:
        return self._caches[worker].correction

    def computes_what_it_stores(self, worker: str) -> bool:
        """Whether blocks that enter the device were computed there: not where a tier or a store has them loaded, and
        not in SGLang, which stores what it generated in one go."""
        cache = self._caches[worker]
        lower = cache.spec.stores or self.blocks(worker, Tier.HOST) or self.blocks(worker, Tier.STORAGE)
        return cache.rule.shares_in_flight and not lower

    def orphans(self, worker: str) -> int:
        return self._indexes[self._caches[worker].family].orphans(worker)

    @property
    def skipped(self) -> Counter[str]:
        """What the indexes could not use, by reason."""
        total: Counter[str] = Counter()
        for index in self._indexes.values():
            total.update(index.skipped)
        return total

    @property
    def bytes(self) -> int:
        return sum(index.bytes for index in self._indexes.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._caches)

    # Inside

    def _enter(self, worker: str, cache: _Cache) -> None:
        index = self._indexes.get(cache.family)
        if index is None:
            index = self._indexes[cache.family] = CacheIndex(self._hasher, cache.family)
        caps = TierCaps(cache.capacity, cache.spec.host_blocks, cache.spec.storage_blocks)
        evicted = cache.last_use.evicted
        index.add(
            worker,
            caps,
            stores=cache.spec.stores,
            cleared=cache.spec.rule.cleared,
            on_removed=evicted,
            prompts=cache.ahead.newest,
        )

    def _leave_index(self, worker: str, cache: _Cache) -> None:
        self._indexes[cache.family].remove(worker)

    def _move(self, worker: str, cache: _Cache, family: HashFamily) -> None:
        self._leave_index(worker, cache)
        cache.family, cache.strangers = family, 0
        self._enter(worker, cache)


def _runs_of(bundle: Bundle, firsts: Sequence[int | None]) -> Iterator[StoredRun]:
    end = 0
    for first, parent, blocks in zip(firsts, bundle.parents, bundle.lengths, strict=True):
        end += blocks
        yield StoredRun(first, parent, bundle.hashes[end - 1], blocks)


def _first_blocks(run: TieredRun, blocks: int) -> TieredRun:
    """Of a run only so many blocks: first those of the device."""
    if blocks >= run.blocks:
        return run
    device = min(run.device, blocks)
    host = min(run.host, blocks - device)
    return TieredRun(device, host, min(run.storage, blocks - device - host))
