"""One worker's KV space: what of it is free, who holds which blocks in common, and who waits for how many.

A block that several hold counts for one of them. What nobody holds stays cached only until somebody who waits needs its
place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from predictor.engines.tensorrt_llm import reserved_blocks
from predictor.engines.vllm import Queue, Sequence, Settings, reusable_tokens
from predictor.output_lengths import Lengths
from predictor.prefixes_ahead import PrefixesAhead, Share
from predictor.prompt import BlockHashes

# Longer than any output.
_WAITS = 1 << 40
# Of requests that begin like another, those that are asked whether they last until its turn.
_OWNERS_LOOKED_AT = 64
# What lasts with less certainty is not counted on for a newcomer: among workers that which promises too much is chosen.
# Of those who wait, whom nobody chooses any more, what is more likely is taken to be so.
_MAY_BE_GONE, _MAY_BE_GONE_BEHIND = 1 / 3, 1 / 2
# So many of those who wait are looked at again at once, and for each so many who hold the same; all have their turns.
_RECONSIDERED, _OWNERS_RECONSIDERED = 8, 16


class KvSpace:
    """`sequences` are all that are in the queue, by name. `cached_blocks` tells how many of a run of blocks, by their
    hashes, the worker's cache is known to hold at this moment, from the first on.
    """

    def __init__(
        self,
        queue: Queue,
        sequences: Mapping[str, Sequence],
        settings: Settings,
        cached_blocks: Callable[[BlockHashes], int] | None,
    ) -> None:
        self.settings = settings
        self.wanted: int | None = None  # blocks that those who wait need; None: not added up since something changed
        self._queue = queue
        self._sequences = sequences
        self._prefixes = PrefixesAhead()
        self._cached_blocks = cached_blocks
        self._steps_a_block = 0.0  # how long it takes until who waits has so much space; 0: nobody has asked yet
        self._turn = 0
        self._holders: dict[str, list[tuple[str, int]]] = {}  # of who waits: who was ahead of it, and blocks in common

    def add(self, seq: Sequence, reused_blocks: int | None = None) -> None:
        self._prefixes.add(seq.id, np.asarray(seq.hashes, np.uint64), reused_blocks)

    def remove(self, seq: Sequence) -> None:
        """It is neither in the queue nor among the sequences any more: what it held is free, or others' from now on."""
        self._prefixes.remove(seq.id)
        self._holders.pop(seq.id, None)
        if seq.blocks and self._queue.free_blocks is not None and len(seq.hashes):
            self._pass_on(seq)
        self.take(-seq.blocks)

    def take(self, blocks: int) -> None:
        if self._queue.free_blocks is not None:
            self._queue.free_blocks -= blocks

    def fit(self, seq: Sequence) -> None:
        """It holds what it has computed, and no more; where that is kept for it, all that it may ever need."""
        blocks = max(0, -(-seq.computed // self.settings.block_size) - seq.shared_blocks)
        if self.settings.family == "tensorrt_llm":
            blocks = reserved_blocks(seq, self.settings)
        self.take(blocks - seq.blocks)
        seq.blocks = blocks

    def grow(self, seq: Sequence) -> None:
        """It holds what it has computed, and keeps what it had beyond that for its next steps."""
        new = -(-seq.computed // self.settings.block_size) - seq.shared_blocks - seq.blocks
        if new > 0:
            seq.blocks += new
            self.take(new)

    @property
    def crowded(self) -> bool:
        """Whether those who wait need more KV space than is free: what nobody holds is taken by them."""
        free = self._queue.free_blocks
        # Less than none is free where what runs holds more than a cache that has become smaller.
        return free is not None and self.waiting_blocks() > max(0, free)

    def waiting_blocks(self) -> int:
        """Of KV space that who waits needs."""
        if self.wanted is None:
            size = self.settings.block_size
            self.wanted = sum(-(-(seq.prompt_tokens + seq.generated) // size) for seq in self._queue.waiting)
        return self.wanted

    def reusable(self, seq: Sequence) -> tuple[int, int]:
        """What the engine would find cached of a waiting sequence now, in tokens, and blocks of it that others hold."""
        size = self.settings.block_size
        if not len(seq.hashes) or self._cached_blocks is None:
            return seq.computed, seq.shared_blocks
        hashes = np.asarray(seq.hashes, np.uint64)
        run, held = self._cached_blocks(hashes), 0
        if seq.output_hashes and run == len(hashes):
            # Resumed after a preemption: what it generated is stored behind its prompt.
            run = self._cached_blocks(np.concatenate([hashes, np.array(seq.output_hashes, np.uint64)]))
        in_flight = self.settings.family == "vllm"  # a prompt enters SGLang's tree with its result
        for other, common in self._alike(seq):
            if common <= held:
                break
            held = max(held, min(common, -(-other.computed // size)))
            if in_flight:
                run = max(run, min(common, other.computed // size))
        tokens = reusable_tokens(run, size, seq.prompt_tokens + seq.generated)
        return tokens, min(held, tokens // size)

    def lasting_blocks(self, hashes: BlockHashes, blocks: int, steps: float, lengths: Lengths) -> int:
        """Of a newcomer's first `blocks`, which are cached or on their way now, what quite likely is left of a crowded
        cache when it is admitted, so many steps from now; outputs are as long as `lengths` says.

        Nothing stays cached but what somebody still holds or has held until shortly before.
        """
        self._steps_a_block = steps / self.waiting_blocks()
        holders = itertools.islice(self._prefixes.nearest(hashes), _OWNERS_LOOKED_AT)
        return min(blocks, self._lasts(holders, steps, _Admissions(self, self._steps_a_block), lengths, _MAY_BE_GONE))

    def reconsider(self, lengths: Lengths) -> bool:
        """Looks again at what some of those who wait will find when their turn comes: by now it is known better who of
        those ahead of them still holds it then. True if that is not what was expected."""
        free, size = self._queue.free_blocks, self.settings.block_size
        if free is None or not self._steps_a_block or not self.crowded:
            return False
        hopeful = [seq for seq in self._queue.waiting if seq.may_find and not seq.generated]
        if not hopeful:
            return False
        admissions, found = _Admissions(self, self._steps_a_block), False
        for at in range(min(_RECONSIDERED, len(hopeful))):
            seq = hopeful[(self._turn + at) % len(hopeful)]
            (steps, before), holders = admissions.of(seq.id), self._holders_ahead(seq)
            if before > free:
                blocks = self._lasts(holders, steps, admissions, lengths, _MAY_BE_GONE_BEHIND)
            else:
                # Nothing has to go before its turn, whoever ends until then.
                blocks = max(seq.computed // size, holders[0][1] if holders else 0)
            tokens = min(seq.may_find, reusable_tokens(blocks, size, seq.prompt_tokens))
            if tokens != seq.computed:
                self._credit(seq, tokens)
                found = True
        self._turn += _RECONSIDERED
        return found

    def _lasts(
        self,
        holders: Iterable[tuple[str, int]],
        steps: float,
        admissions: _Admissions,
        lengths: Lengths,
        may_be_gone: float,
    ) -> int:
        """Leading blocks that one of these who are ahead still holds in so many steps, or has held shortly before.

        Who has the most in common comes first."""
        # Steps until what nobody holds is taken.
        stays = admissions.steps_a_block * max(0, self._queue.free_blocks or 0)
        gone = 1.0
        for seq_id, common in holders:
            seq = self._sequences[seq_id]
            left = steps - stays
            if not seq.generated and not seq.blocks:
                admitted, _ = admissions.of(seq_id)
                if admitted > steps:
                    continue  # overtaken
                left -= admitted
            ends = seq.generated + max(0, int(left * self._queue.drafting.gain))
            if seq.max_output is None or ends < seq.max_output:
                curve = lengths.curve(seq.length_class)
                gone *= 1.0 - curve.longer(ends) / (curve.longer(seq.generated) or 1.0)
            if gone <= may_be_gone:
                return common
        return 0

    def _holders_ahead(self, seq: Sequence) -> list[tuple[str, int]]:
        """Some of those who came before it and are still there, by what they have in common with it, most first."""
        known = self._holders.get(seq.id)
        left = [one for one in known if one[0] in self._sequences] if known is not None else []
        if not left and (known is None or known):
            ahead = (
                one
                for one in itertools.islice(self._prefixes.nearest(seq.hashes), _OWNERS_LOOKED_AT)
                if self._sequences[one[0]].arrived < seq.arrived
            )
            left = list(itertools.islice(ahead, _OWNERS_RECONSIDERED))
        self._holders[seq.id] = left
        return left

    def _credit(self, seq: Sequence, tokens: int) -> None:
        """What one that waits is expected to find, of which others hold all: nothing else stays."""
        seq.computed = tokens
        seq.shared_blocks = tokens // self.settings.block_size
        self._prefixes.credit(seq.id, seq.shared_blocks)

    def lower_credits(self, gone: Sequence) -> None:
        """Who waits, and was to find what this one held, will not, where the queue before it takes more than is free
        and nobody else ahead of it holds the same."""
        free, size = self._queue.free_blocks, self.settings.block_size
        if free is None or not self.crowded:
            return
        waits: dict[str, tuple[int, int]] | None = None
        for seq_id, common in itertools.islice(self._prefixes.nearest(gone.hashes), _OWNERS_LOOKED_AT):
            seq = self._sequences[seq_id]
            credited = seq.computed // size
            if seq.generated or seq.blocks or not 0 < credited <= common:
                continue
            if waits is None:
                waits = self._waits()
            place, before = waits.get(seq_id, (0, 0))
            if before <= free:
                continue
            kept = 0
            for other_id, shared in itertools.islice(self._prefixes.nearest(seq.hashes), _OWNERS_LOOKED_AT):
                if other_id != seq_id and waits.get(other_id, (-1, 0))[0] < place:
                    kept = shared
                    break
            if kept < credited:
                seq.computed = kept * size
                seq.shared_blocks = min(seq.shared_blocks, kept)
                self._prefixes.credit(seq.id, kept)

    def shares(self, ends: Mapping[str, int]) -> Mapping[str, Share]:
        """Which blocks of those in flight are not free when they end, after so many tokens of output in all. Who waits
        ends after who runs, one by one."""
        if self.settings.family != "vllm" or self._queue.free_blocks is None or not self._prefixes.any_alike:
            return {}
        order: dict[str, float] = {seq.id: ends[seq.id] - seq.generated for seq in self._queue.running}
        order |= {seq.id: _WAITS + place for place, seq in enumerate(self._queue.waiting)}
        return self._prefixes.shares(order)

    # Inside

    def _alike(self, seq: Sequence) -> Iterator[tuple[Sequence, int]]:
        """Running sequences that begin with the same block, and how many blocks they have in common, most first."""
        running = {other.id for other in self._queue.running}
        for seq_id, common in self._prefixes.nearest(seq.hashes):
            if seq_id in running and seq_id != seq.id:
                yield self._sequences[seq_id], common

    def _pass_on(self, seq: Sequence) -> None:
        """Blocks that counted for one that leaves, and that others hold as well, count for one of those from now on."""
        size = self.settings.block_size
        heir, kept = None, 0
        for other, common in self._alike(seq):
            if common <= kept:
                break
            shared = min(common, -(-other.computed // size))
            if shared > kept:
                heir, kept = other, shared
        inherited = kept - seq.shared_blocks
        if heir is not None and inherited > 0:
            inherited = min(inherited, heir.shared_blocks, seq.blocks)
            heir.shared_blocks -= inherited
            heir.blocks += inherited
            seq.blocks -= inherited

    def _waits(self) -> dict[str, tuple[int, int]]:
        """Of each that waits its place in the queue, and the blocks that are filled before its turn."""
        waits, tokens = {}, 0
        for place, seq in enumerate(self._queue.waiting):
            waits[seq.id] = place, tokens // self.settings.block_size
            tokens += seq.left
        return waits

    def until_admitted(self, steps_a_block: float) -> dict[str, tuple[float, int]]:
        """Of each that waits the steps until its turn, and the blocks that others ahead of it take by then."""
        size, before = self.settings.block_size, 0
        until = {}
        for seq in self._queue.waiting:
            until[seq.id] = steps_a_block * before, before
            before += -(-(seq.prompt_tokens + seq.generated) // size)
        return until


class _Admissions:
    """When those who wait are admitted, if space comes at a pace; added up when somebody asks."""

    def __init__(self, space: KvSpace, steps_a_block: float) -> None:
        self.steps_a_block = steps_a_block
        self._space = space
        self._until: dict[str, tuple[float, int]] | None = None

    def of(self, seq_id: str) -> tuple[float, int]:
        """Steps from now, and blocks that others take before."""
        if self._until is None:
            self._until = self._space.until_admitted(self.steps_a_block)
        return self._until.get(seq_id, (0.0, 0))
