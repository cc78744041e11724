"""The simulator's radix tree against SGLang's own: told to do the same, it finds, keeps and evicts the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from enginesim.kv_events import AllBlocksCleared, KvEvent, PagesRemoved, PagesStored
from enginesim.radix_tree import Node, RadixTree
from enginesim.request import Request
from tests.engine.traces import VirtualSglang
from tests.engine.workload import Shape

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SHAPE = Shape(requests=600, salted_share=0.2, again_share=0.2)


class Twin:
    """Does to the simulator's tree what was done to the real one, and compares what each says of it."""

    def __init__(self, engine: VirtualSglang) -> None:
        self.page, self.lookahead = engine.page_size, int(engine.eagle)
        self.tree = RadixTree(engine.max_total_num_tokens, engine.page_size)
        self.matches = self.evictions = 0
        self._requests: dict[str, Request] = {}
        self._locked: dict[str, Node] = {}
        self._tree_pages: dict[str, int] = {}
        self._names: dict[int, int] = {}  # of a page: the engine's hash, by ours

    def follow(self, kind: str, *fields: Any) -> None:
        match kind, fields:
            case "asked", (name, raw, salt, _, _):
                tokens = np.frombuffer(raw, np.uint32).tolist()
                request = Request(0, tokens, 1, self.page, salt, lookahead=self.lookahead)
                request.hash_more()
                self._requests[name] = request
            case "matched", (name, hit):
                self._match(name, hit)
            case "unlocked", (name,):
                self.tree.unlock(self._locked.pop(name))
            case "evicted", (tokens,):
                self.tree.evict(tokens)
                self.evictions += 1
            case "inserted", (name, raw, pages):
                self._insert(name, np.frombuffer(raw, np.uint32).tolist(), pages)
            case "batch", (payload,):
                self._compare(msgspec.msgpack.decode(payload)[1], self.tree.take_events())
            case "holds_tokens", (tokens,):
                assert self.tree.cached_blocks * self.page == tokens

    def _match(self, name: str, hit: int) -> None:
        request = self._requests[name]
        most = max(0, len(request.token_ids) - 1 - self.lookahead) // self.page
        node = self.tree.match(request, most)
        assert self.tree.depth(node) * self.page == hit
        self.tree.lock(node)
        self._locked[name], self._tree_pages[name] = node, hit // self.page
        self.matches += 1

    def _insert(self, name: str, tokens: Sequence[int], pages: int) -> None:
        request = self._requests[name]
        for token in tokens[len(request.token_ids) :]:
            request.append(token)
        node = self.tree.insert(request, pages, own_from=self._tree_pages[name])
        self.tree.lock(node)
        self.tree.unlock(self._locked[name])
        self._locked[name], self._tree_pages[name] = node, pages

    def _compare(self, theirs: list[dict[str, Any]], ours: list[KvEvent]) -> None:
        assert [event["type"] for event in theirs] == [_TYPES[type(event)] for event in ours]
        for real, simulated in zip(theirs, ours, strict=True):
            match simulated:
                case PagesStored():
                    assert real["token_ids"] == simulated.token_ids
                    assert real.get("cache_salt") == simulated.cache_salt
                    assert real["block_size"] == simulated.block_size
                    self._same(real["block_hashes"], simulated.block_hashes)
                    if simulated.parent_block_hash is None:
                        assert real["parent_block_hash"] is None
                    else:
                        self._same([real["parent_block_hash"]], [simulated.parent_block_hash])
                case PagesRemoved():
                    self._same(real["block_hashes"], simulated.block_hashes)

    def _same(self, theirs: list[int], ours: list[int]) -> None:
        assert [self._names.setdefault(page, name) for page, name in zip(ours, theirs, strict=True)] == theirs


_TYPES = {PagesStored: "BlockStored", PagesRemoved: "BlockRemoved", AllBlocksCleared: "AllBlocksCleared"}


@pytest.mark.parametrize("eagle", [False, True], ids=["tokens", "pairs"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_both_trees_find_keep_and_evict_the_same(page_size: int, eagle: bool, request: pytest.FixtureRequest) -> None:
    shape = replace(SHAPE, requests=200 if request.config.getoption("--reduced") else SHAPE.requests)
    engine = VirtualSglang(shape, page_size=page_size, max_total_num_tokens=6400, eagle=eagle)
    twin = Twin(engine)
    for record in engine.records():
        twin.follow(*record)
    assert twin.matches >= shape.requests
    assert twin.evictions > 10
