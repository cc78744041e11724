"""What could have been known: an engine's blocks over time, by plain Python, from the batches as they came by.

Shares nothing with the product's index. It tells a view that was wrong from one that became wrong after the decision:
an engine evicts blocks in a step that is under way, or for requests ahead, and says so when that step has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec

_Key = tuple[int | None, tuple[int, ...], tuple[Any, ...]]


class Hindsight:
    """One engine's history. Times are those at which a batch could be read, on the monotonic clock."""

    def __init__(self) -> None:
        self.removals = 0
        self._names: dict[_Key, int] = {}  # parent, tokens and salt of a block -> the engine's hash of it
        self._changes: dict[int, list[tuple[float, int]]] = defaultdict(list)  # hash -> when, copies from then on
        self._copies: dict[int, int] = defaultdict(int)

    def saw(self, at_s: float, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    self._stored(at_s, event)
                case "BlockRemoved":
                    self.removals += len(event["block_hashes"])
                    for block in event["block_hashes"]:
                        self._set(at_s, block, self._copies[block] - 1)
                case "AllBlocksCleared":
                    self.emptied(at_s)

    def emptied(self, at_s: float) -> None:
        for block, copies in list(self._copies.items()):
            if copies:
                self._set(at_s, block, 0)

    def _chain(self, tokens: Sequence[int], salt: str | None, block_size: int) -> list[int]:
        """The engine's hashes of a prompt's blocks, as far as it has ever stored them."""
        chain: list[int] = []
        parent: int | None = None
        for start in range(0, len(tokens) - block_size + 1, block_size):
            extra = (salt,) if salt is not None and start == 0 else ()
            found = self._names.get((parent, tuple(tokens[start : start + block_size]), extra))
            if found is None:
                break
            chain.append(found)
            parent = found
        return chain

    def history(
        self, tokens: Sequence[int], salt: str | None, block_size: int, first_s: float, last_s: float
    ) -> list[tuple[float, int]]:
        """The lengths in blocks that the cached run of a prompt had from `first_s` to `last_s`, and since when."""
        chain = self._chain(tokens, salt, block_size)
        changed = {at_s for block in chain for at_s, _ in self._changes[block] if first_s <= at_s <= last_s}
        told: list[tuple[float, int]] = []
        for moment in [first_s, *sorted(changed)]:
            run = self._run(chain, moment)
            if not told or told[-1][1] != run:
                told.append((moment, run))
        return told

    def _run(self, chain: Sequence[int], at_s: float) -> int:
        for position, block in enumerate(chain):
            held = 0
            for changed_s, copies in self._changes[block]:
                if changed_s > at_s:
                    break
                held = copies
            if not held:
                return position
        return len(chain)

    def _stored(self, at_s: float, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        extras = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for place, block in enumerate(event["block_hashes"]):
            tokens = tuple(event["token_ids"][place * size : (place + 1) * size])
            self._names[parent, tokens, tuple(extras[place] or ())] = block
            self._set(at_s, block, self._copies[block] + 1)
            parent = block

    def _set(self, at_s: float, block: int, copies: int) -> None:
        self._copies[block] = copies
        self._changes[block].append((at_s, copies))
