"""The KV cache of one engine as blocks: who uses them, what they hold, which goes next.

Mirrors vLLM 0.32's BlockPool and KVCacheManager for one full-attention group. Blocks count references. A free block
keeps what it holds until it is handed out again. The same content may lie in several blocks: nothing is deduplicated.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from enginesim.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from enginesim.request import Request

NULL_BLOCKS = 1  # vLLM takes one block out of the pool as a placeholder, for good


class BlockPool:
    """Allocates blocks to requests, remembers contents by hash, and records an event for every change of contents."""

    def __init__(self, num_gpu_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.total_blocks = num_gpu_blocks - NULL_BLOCKS
        self._references = [0] * num_gpu_blocks
        self._hash_of_block: list[int | None] = [None] * num_gpu_blocks
        self._blocks_of_hash: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NULL_BLOCKS, num_gpu_blocks))
        self._events: list[KvEvent] = []

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody uses, whatever they hold."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks in use; shared ones count once."""
        return self.total_blocks - len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Blocks with registered contents, used or free; duplicates count."""
        return sum(map(len, self._blocks_of_hash.values()))

    @property
    def distinct_blocks(self) -> int:
        """Cached contents, each counted once: what a mirror of the events knows of."""
        return len(self._blocks_of_hash)

    def hash_counts(self) -> dict[int, int]:
        """How many blocks hold each registered hash."""
        return {block_hash: len(blocks) for block_hash, blocks in self._blocks_of_hash.items()}

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that `request` could reuse now: `floor(min(run * b, n - 1) / b)` of them.

        At least the last token must be computed to sample from it, and hits land on block borders, so a prompt whose
        length is a multiple of the block size computes its whole last block again (vLLM's get_computed_blocks).
        """
        longest_hit = (len(request.token_ids) - 1) // self.block_size
        hit: list[int] = []
        for block_hash in request.block_hashes[:longest_hit]:
            blocks = self._blocks_of_hash.get(block_hash)
            if blocks is None:
                break
            hit.append(blocks[0])
        return hit

    def can_hold_whole(self, request: Request, hit: Sequence[int]) -> bool:
        """Whether all tokens of `request` would fit beside its hit: vLLM's scheduler_reserve_full_isl, watermark 0."""
        return self._blocks_taken(request, len(request.token_ids), hit) <= self.free_blocks

    def can_hold(self, request: Request, tokens: int) -> bool:
        """Whether `request`, which runs already, can grow to `tokens` in all."""
        return -(-tokens // self.block_size) - len(request.block_ids) <= len(self._free)

    def allocate(self, request: Request, tokens: int, hit: Sequence[int] = ()) -> None:
        """Give `request` the blocks of its hit and new ones up to `tokens`, and register those that `tokens` fill.

        Registered means findable, at once, by others in the same step: before anything is computed.
        """
        for block in hit:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        request.block_ids += hit
        request.registered_blocks += len(hit)
        while len(request.block_ids) * self.block_size < tokens:
            request.block_ids.append(self._take_oldest())
        full = tokens // self.block_size
        if full > request.registered_blocks:
            self._register(request, full)

    def release(self, request: Request) -> None:
        """Take the blocks of `request` back, tail first, so that leaves are evicted before the roots they hang on."""
        unhashed: list[int] = []
        hashed: list[int] = []
        for block in reversed(request.block_ids):
            self._references[block] -= 1
            if self._references[block] == 0:
                (hashed if self._hash_of_block[block] is not None else unhashed).append(block)
        self._free.update(dict.fromkeys(hashed))
        for block in reversed(unhashed):
            self._free[block] = None
            self._free.move_to_end(block, last=False)  # nothing is lost with these, so they go first
        request.block_ids = []
        request.registered_blocks = 0

    def clear(self) -> bool:
        """Forget all contents. False, and nothing done, while any block is in use (vLLM reset_prefix_cache)."""
        if self.used_blocks:
            return False
        self._blocks_of_hash.clear()
        self._hash_of_block = [None] * len(self._hash_of_block)
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in the order they happened."""
        events, self._events = self._events, []
        return events

    def eviction_order(self) -> Iterable[int]:
        """Ids of the free blocks, next to be handed out first."""
        return tuple(self._free)

    def references(self, block: int) -> int:
        """How many requests use a block."""
        return self._references[block]

    def _blocks_taken(self, request: Request, tokens: int, hit: Sequence[int]) -> int:
        """Blocks that leave the free list if `request` grows to `tokens`: new ones, and hits that nobody uses yet."""
        needed = -(-tokens // self.block_size)
        revived = sum(self._references[block] == 0 for block in hit)
        return max(0, needed - len(request.block_ids) - len(hit)) + revived

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        evicted = self._hash_of_block[block]
        if evicted is not None:
            self._hash_of_block[block] = None
            twins = self._blocks_of_hash[evicted]
            twins.remove(block)
            if not twins:
                del self._blocks_of_hash[evicted]
            self._events.append(BlockRemoved(evicted))
        return block

    def _register(self, request: Request, full_blocks: int) -> None:
        first = request.registered_blocks
        hashes = request.block_hashes[first:full_blocks]
        for block, block_hash in zip(request.block_ids[first:full_blocks], hashes, strict=True):
            self._hash_of_block[block] = block_hash
            self._blocks_of_hash.setdefault(block_hash, []).append(block)
        extra_keys: list[list[str] | None] = [None] * len(hashes)
        if first == 0 and request.cache_salt is not None:
            extra_keys[0] = [request.cache_salt]
        self._events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=request.block_hashes[first - 1] if first else None,
                token_ids=request.token_ids[first * self.block_size : full_blocks * self.block_size],
                block_size=self.block_size,
                extra_keys=extra_keys,
            )
        )
        request.registered_blocks = full_blocks
