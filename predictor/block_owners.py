"""Whom the blocks belong to that an engine announces, of those in its queue.

What a sequence stores next names the last block that is known of it as its parent; where it begins, its first block is
known by its hash, of a place in a prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from predictor.engines.vllm import Queue, Sequence, Step
from predictor.stored_run import StoredRun

# Whose a run is, and how many of its tokens are scheduled at least; None and 0: nobody's that is known.
Owner = tuple[Sequence | None, int]
NOBODY: Owner = None, 0

# Who waits further back has not been admitted.
_WAITING_LOOKED_AT, _HASHES_LOOKED_AT = 256, 100_000


class BlockOwners:
    """`sequences` are all that are in the queue, by name."""

    def __init__(self, sequences: Mapping[str, Sequence], block_size: int) -> None:
        self.block_size = block_size
        self._sequences = sequences
        self._by_tail: dict[int, Sequence] = {}  # by the engine's name of its last block
        self._tails: dict[str, tuple[int, int]] = {}  # that block, and how many blocks it ends

    def tail(self, seq: Sequence) -> int | None:
        """The engine's name of its last block, if it is known."""
        known = self._tails.get(seq.id)
        return None if known is None else known[0]

    def set_tail(self, seq: Sequence, tail: int, blocks: int) -> None:
        """Of so many blocks this is the last."""
        self.forget(seq)
        self._by_tail[tail] = seq
        self._tails[seq.id] = tail, blocks

    def forget(self, seq: Sequence) -> None:
        known = self._tails.pop(seq.id, None)
        if known is not None and self._by_tail.get(known[0]) is seq:
            del self._by_tail[known[0]]

    def goes_on(self, run: StoredRun) -> bool:
        """Whether these are a prompt's next blocks, after those that a step before has stored of it."""
        seq = self._by_tail.get(run.parent) if run.parent is not None and run.first is not None else None
        return seq is not None and self._next_hash(seq) == run.first

    def whose(self, run: StoredRun, steps: Iterable[Step]) -> Owner:
        """By the block before it, or by where one of these steps, the newest first, begins with somebody's prompt."""
        size = self.block_size
        seq = self._by_tail.get(run.parent) if run.parent is not None else None
        if seq is not None and (
            seq.generated or run.first is None or not seq.booked or self._next_hash(seq) == run.first
        ):
            known = self._tails[seq.id][1]
            blocks = known + run.blocks
            self.set_tail(seq, run.last, blocks)
            if run.first is not None and known == len(seq.hashes) + len(seq.output_hashes):
                seq.output_hashes.append(run.first)
            return seq, blocks * size
        if run.first is None:
            return NOBODY
        for step in steps:
            for seq, start, end in step.chunks:
                place = start // size
                expected = _hash_at(seq, place)
                # Of what a resumed sequence computes beyond what it had stored before, no hash is known.
                fits = expected == run.first if expected is not None else end // size - place == run.blocks
                if fits and seq.id in self._sequences:
                    self.set_tail(seq, run.last, place + run.blocks)
                    if expected is None:
                        seq.output_hashes.append(run.first)
                    return seq, (place + run.blocks) * size
        return NOBODY

    def prompt_with(self, run: StoredRun) -> Owner:
        """Of those that were booked, the first whose prompt has these blocks, wherever it has got to."""
        if run.first is None:
            return NOBODY
        first = np.uint64(run.first)
        for seq in self._sequences.values():
            if len(seq.hashes) and len(found := (np.asarray(seq.hashes, np.uint64) == first).nonzero()[0]):
                blocks = int(found[0]) + run.blocks
                self.set_tail(seq, run.last, blocks)
                return seq, blocks * self.block_size
        return NOBODY

    def begun(self, queue: Queue, step: Step, runs: Iterable[StoredRun]) -> list[tuple[Sequence, int]]:
        """Of those who are taken to wait, or to be admitted with `step`, whom one of these runs tells otherwise: each
        with the tokens that it was found to have cached, since there its first chunk begins."""
        firsts = {run.first for run in runs if run.first is not None}
        newcomers = (seq for seq, _, _ in step.chunks[len(step.chunks) - step.admitted :])
        found, looked_at = [], 0
        for seq in itertools.chain(newcomers, itertools.islice(queue.waiting, _WAITING_LOOKED_AT)):
            looked_at += len(seq.hashes)
            if not firsts or looked_at > _HASHES_LOOKED_AT:
                break
            hashes = np.asarray(seq.hashes, np.uint64)
            places = np.flatnonzero(np.isin(hashes, np.array(list(firsts), np.uint64)))
            if len(places):
                found.append((seq, int(places[0]) * self.block_size))
                # Of several who begin alike it is the foremost.
                firsts.remove(int(hashes[places[0]]))
        return found

    def _next_hash(self, seq: Sequence) -> int | None:
        blocks = self._tails[seq.id][1]
        return int(seq.hashes[blocks]) if blocks < len(seq.hashes) else None


def _hash_at(seq: Sequence, place: int) -> int | None:
    """Our hash of one of its blocks, if that is known."""
    if place < len(seq.hashes):
        return int(seq.hashes[place])
    place -= len(seq.hashes)
    return seq.output_hashes[place] if place < len(seq.output_hashes) else None
