"""The KV cache of one SGLang engine: a radix tree of pages over one pool of tokens.

Mirrors what SGLang 0.5.23's UnifiedRadixCache decides for one full-attention component under its `lru` policy: what
matches, what an insertion adds, which whole nodes are evicted, leaves first, and what is said of it in events. Which
slot holds which token does not matter here: tokens are counted.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from enginesim.kv_events import AllBlocksCleared, KvEvent, PagesRemoved, PagesStored
from enginesim.request import Request


@dataclass(slots=True, eq=False)
class Node:
    """A run of pages that hang together. `hashes` names each by itself and all before it, so it is the key as well."""

    parent: Node | None
    hashes: list[int]
    children: dict[int, Node] = field(default_factory=dict)  # by the first page's hash
    locks: int = 0
    used_at: int = 0
    number: int = 0  # nodes are numbered as they are made
    listed: bool = False  # among those that may be evicted

    def path(self) -> Iterator[Node]:
        """From here up to the node below the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree:
    """Pages of `page_size` tokens, of a pool of `total_tokens`. Requests count what is theirs and not the tree's."""

    def __init__(self, total_tokens: int, page_size: int) -> None:
        self.page_size = page_size
        self.total_tokens = total_tokens // page_size * page_size
        self.free_tokens = self.total_tokens
        self._root = Node(None, [])
        self._clock = 0
        self._numbers = itertools.count(1)
        self._unlocked_pages = 0
        # Leaves that nobody has locked, by when they were used last, as far as was known when they became so.
        self._evictable: list[tuple[int, int, Node]] = []
        # The first thing an engine says: its tree was reset.
        self._events: list[KvEvent] = [AllBlocksCleared()]

    # As BlockPool has it, in pages.

    @property
    def total_blocks(self) -> int:
        return self.total_tokens // self.page_size

    @property
    def free_blocks(self) -> int:
        """Pages that nobody uses, whatever they hold."""
        return self.total_blocks - self.used_blocks

    @property
    def used_blocks(self) -> int:
        """Pages of running requests; shared ones count once."""
        return (self.total_tokens - self.free_tokens - self.evictable_tokens) // self.page_size

    @property
    def cached_blocks(self) -> int:
        """Pages in the tree."""
        return sum(len(node.hashes) for node in self._nodes())

    @property
    def distinct_blocks(self) -> int:
        """The same: no page is in it twice."""
        return self.cached_blocks

    @property
    def evictable_tokens(self) -> int:
        return self.page_size * self._unlocked_pages

    def page_hashes(self) -> set[int]:
        """What it holds."""
        return {page for node in self._nodes() for page in node.hashes}

    def match(self, request: Request, pages: int) -> Node:
        """The node where the longest cached run of the first `pages` pages ends; it is split off if need be."""
        return self._walk(request.block_hashes[:pages])[0]

    def lock(self, node: Node) -> None:
        for above in node.path():
            if not above.locks:
                self._unlocked_pages -= len(above.hashes)
            above.locks += 1

    def unlock(self, node: Node) -> None:
        for above in node.path():
            above.locks -= 1
            if not above.locks:
                self._unlocked_pages += len(above.hashes)
        self._may_be_evicted(node)

    def depth(self, node: Node) -> int:
        """Pages from the root to the node's end."""
        return sum(len(above.hashes) for above in node.path())

    def take(self, tokens: int) -> bool:
        """So many tokens' slots, evicting if there are too few; False, and nothing taken, if there are not enough."""
        tokens = -(-tokens // self.page_size) * self.page_size
        if tokens > self.free_tokens:
            self.evict(tokens - self.free_tokens)
        if tokens > self.free_tokens:
            return False
        self.free_tokens -= tokens
        return True

    def give_back(self, tokens: int) -> None:
        self.free_tokens += -(-tokens // self.page_size) * self.page_size

    def insert(self, request: Request, pages: int, own_from: int) -> Node:
        """Makes the first `pages` pages the tree's; those from page `own_from` on were the request's own.

        What others inserted meanwhile is kept, and the request's copies are free. A node ends where the prompt does, so
        that an output can be evicted alone.
        """
        node, known = self._walk(request.block_hashes[:pages])
        if known > own_from:
            self.give_back((known - own_from) * self.page_size)
        if known < pages:
            hashes = request.block_hashes[known:pages]
            added = Node(node, hashes, used_at=self._clock, number=next(self._numbers))
            node.children[hashes[0]] = added
            node = added
            self._unlocked_pages += len(hashes)
            self._may_be_evicted(node)
            self._say_stored(request, known, pages)
        prompt_pages = max(0, request.prompt_tokens - request.lookahead) // self.page_size
        if 0 < prompt_pages < pages:
            self._walk(request.block_hashes[:prompt_pages])
        return node

    def clear(self) -> bool:
        """flush_cache. False, and nothing done, while any request runs."""
        if self.used_blocks:
            return False
        self.free_tokens = self.total_tokens
        self._root = Node(None, [])
        self._unlocked_pages, self._evictable = 0, []
        self._events = [AllBlocksCleared()]
        return True

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in the order they happened."""
        events, self._events = self._events, []
        return events

    def _walk(self, hashes: Sequence[int]) -> tuple[Node, int]:
        """The last node on the way of these pages, and how many of them are on it. Everything on it has been used."""
        self._clock += 1
        node, known = self._root, 0
        while known < len(hashes):
            below = node.children.get(hashes[known])
            if below is None:
                break
            below.used_at = self._clock
            shared = _shared(below.hashes, hashes, known)
            known += shared
            if shared < len(below.hashes):
                return self._split(below, shared), known
            node = below
        return node, known

    def _split(self, node: Node, pages: int) -> Node:
        """Two nodes of one; the upper one, which has so many pages."""
        assert node.parent is not None
        upper = Node(node.parent, node.hashes[:pages], {}, node.locks, node.used_at, next(self._numbers))
        node.parent.children[upper.hashes[0]] = upper
        node.hashes = node.hashes[pages:]
        node.parent = upper
        upper.children[node.hashes[0]] = node
        return upper

    def evict(self, tokens: int) -> None:
        """Drops whole leaves, the longest unused first, until so many tokens more are free."""
        while tokens > 0 and self._evictable:
            used_at, _, leaf = heapq.heappop(self._evictable)
            leaf.listed = False
            if leaf.children or leaf.locks or leaf.parent is None:
                continue
            if used_at != leaf.used_at:
                self._may_be_evicted(leaf)
                continue
            above, leaf.parent = leaf.parent, None
            del above.children[leaf.hashes[0]]
            self._unlocked_pages -= len(leaf.hashes)
            self._may_be_evicted(above)
            freed = len(leaf.hashes) * self.page_size
            self.free_tokens += freed
            tokens -= freed
            self._say_removed(leaf.hashes)

    def _may_be_evicted(self, node: Node) -> None:
        """Of those that were used at the same time the newest goes first."""
        if node.parent is not None and not (node.children or node.locks or node.listed):
            node.listed = True
            heapq.heappush(self._evictable, (node.used_at, -node.number, node))

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def _say_stored(self, request: Request, first: int, last: int) -> None:
        size, ahead = self.page_size, request.lookahead
        tokens: Sequence[object] = request.token_ids[first * size : last * size]
        if ahead:
            following = request.token_ids[first * size + 1 : last * size + 1]
            tokens = [[token, after] for token, after in zip(tokens, following, strict=True)]
        parent = request.block_hashes[first - 1] if first else None
        event = PagesStored(list(request.block_hashes[first:last]), parent, list(tokens), size, request.cache_salt)
        before = self._events[-1] if self._events else None
        if isinstance(before, PagesStored) and before.goes_on_with(event):
            self._events[-1] = before.joined(event)
        else:
            self._events.append(event)

    def _say_removed(self, hashes: Sequence[int]) -> None:
        before = self._events[-1] if self._events else None
        if isinstance(before, PagesRemoved):
            self._events[-1] = PagesRemoved([*before.block_hashes, *hashes])
        else:
            self._events.append(PagesRemoved(list(hashes)))


def _shared(pages: Sequence[int], hashes: Sequence[int], start: int) -> int:
    """How many pages are equal. Hashes are chained: what follows on an unequal one is unequal."""
    low, high = 0, min(len(pages), len(hashes) - start)
    while low < high:
        middle = (low + high) // 2
        if pages[middle] == hashes[start + middle]:
            low = middle + 1
        else:
            high = middle
    return low
