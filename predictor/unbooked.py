"""Requests on an engine that nobody booked: they came past the filter, or before it started.

Their blocks show them. A chunk of a prompt that belongs to nobody's ticket is the beginning of one; what goes on from
its last block is the same one; and who decodes stores a block each time that it has filled one, so that one which has
been silent for too long is gone. Those that wait have stored nothing: how many they are the engine's own count says,
once those that were seen are taken off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ReadOnly
from itertools import chain

import numpy as np

from predictor.engines.vllm import Sequence
from predictor.prompt import BlockHashes
from predictor.stored_run import StoredRun

# As many as of what is booked, or there would be no other futures for anybody (`fleet`).
_FUTURES = 5
# What has left is remembered, by its last block or by its prompt: an engine may store a little more of it.
_MOST_DEPARTED, _MOST_GIVEN_UP = 64, 8
# No more than so many are believed to wait, whatever an engine counts.
_MOST_EXPECTED = 64
# A first chunk of fewer blocks may be what somebody decodes of whom the events told too little.
FIRST_BLOCKS = 2
# Without a block for so many blocks' worth of steps it is not there any more: steps are counted, and not quite right.
_SILENT_BLOCKS = 2.0
# An engine's count alone is believed when it has said so twice; for so long after some were seen, at once.
_SEEN_LATELY_S = 300.0


class Unbooked:
    """Those of one worker. `prompt_of` tells how long prompts are that are longer than so many tokens: what a share of
    them does not go beyond."""

    def __init__(self, prompt_of: Callable[[int, float], int] | None) -> None:
        self._prompt_of = prompt_of
        self._heard: dict[str, int] = {}  # tokens that its blocks have told of; 0: it is only counted by the engine
        self._sequences: dict[str, Sequence] = {}
        self._departed: deque[int] = deque(maxlen=_MOST_DEPARTED)
        self._given_up: deque[BlockHashes | ReadOnly[int]] = deque(maxlen=_MOST_GIVEN_UP)
        self._number = 0
        self._unseen = 0  # counted by the engine, and neither seen nor waiting
        self._seen_at_s = float("-inf")
        self._counted_before = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.id in self._sequences

    @property
    def everybody(self) -> list[Sequence]:
        return list(self._sequences.values())

    # What becomes of them

    def appears(self, tokens: int, now_s: float) -> Sequence:
        """One more has stored its first blocks; it is one of those that were only counted, if there are any."""
        self._seen_at_s = now_s
        for seq in self._sequences.values():
            if not self._heard[seq.id]:
                break
        else:
            seq = self._new()
        self._heard[seq.id] = tokens
        return seq

    def heard(self, seq: Sequence, tokens: int, now_s: float) -> None:
        """So many of its tokens are stored."""
        self._heard[seq.id] = tokens
        self._seen_at_s = now_s

    def seen_lately(self, now_s: float) -> bool:
        return now_s - self._seen_at_s <= _SEEN_LATELY_S

    def is_seen(self, seq: Sequence) -> bool:
        return self._heard[seq.id] > 0

    def goes_on(self, seq: Sequence, tokens: int, share: float = 0.5) -> None:
        """Its prompt is longer than so many tokens."""
        longer = tokens + tokens // 2 if self._prompt_of is None else self._prompt_of(tokens, share)
        seq.prompt_tokens = max(tokens + 1, longer)

    def gone(self, seq: Sequence) -> None:
        self._heard.pop(seq.id, None)
        self._sequences.pop(seq.id, None)

    def did_not_come(self, seq: Sequence) -> None:
        """Its turn was there, and it was not seen: whatever the engine counts, it does not wait."""
        self._unseen += 1
        self.gone(seq)

    def silent(self, block_size: int, blocks: float = _SILENT_BLOCKS) -> list[Sequence]:
        """Those that decode, as far as is known, and should have stored a block long ago; the most overdue first."""
        late = []
        for seq in self._sequences.values():
            tokens = seq.computed - max(self._heard[seq.id], seq.prompt_tokens)
            if not seq.prefilling and tokens >= blocks * block_size:
                late.append((-tokens, seq.id))
        return [self._sequences[seq_id] for _, seq_id in sorted(late)]

    # What the engine counts

    def counted(self, count: int, now_s: float) -> int:
        """The engine has so many in progress that are not ours. How many of them wait; negative where fewer are there
        than were seen."""
        believed = count if self.seen_lately(now_s) else min(count, self._counted_before)
        self._counted_before = count
        more = believed - sum(heard > 0 for heard in self._heard.values())
        self._unseen = min(self._unseen, max(0, more))
        return more if more < 0 else min(_MOST_EXPECTED, more - self._unseen)

    @property
    def expected(self) -> list[Sequence]:
        """Those that are only counted, oldest first."""
        return [seq for seq in self._sequences.values() if not self._heard[seq.id]]

    def expect(self) -> Sequence:
        """One more waits, or its first chunk is being computed."""
        return self._new()

    # Whom blocks may belong to

    def departs(self, seq: Sequence, tail: int | None) -> None:
        """One of ours has left, or has given way; this is the last block that is known of it."""
        if tail is not None:
            self._departed.append(tail)
        elif len(seq.hashes):
            self._given_up.append(seq.hashes)

    def begins_another(self, run: StoredRun, ours: Iterable[Sequence]) -> bool:
        """Whether blocks that continue nobody's are the first of one more."""
        if run.first is None or run.blocks < FIRST_BLOCKS or run.parent in self._departed:
            return False
        known = chain.from_iterable((seq.hashes, seq.output_hashes) for seq in ours)
        first = np.uint64(run.first)
        return not any(
            len(hashes) and (np.asarray(hashes, np.uint64) == first).any() for hashes in chain(known, self._given_up)
        )

    def _new(self) -> Sequence:
        self._number += 1
        # Spread evenly over the futures, and each time another one first.
        draws = tuple((((place * 2 + self._number) % _FUTURES) + 0.5) / _FUTURES for place in range(_FUTURES))
        seq = Sequence(f"unbooked {self._number}", 0, 0, 1, watched=False, draws=draws, booked=False)
        # Of many the sum counts, so they are of all lengths; a single one is as long as half of them.
        self.goes_on(seq, 0, _spread(len(self.expected)))
        self._heard[seq.id] = 0
        self._sequences[seq.id] = seq
        return seq


def _spread(number: int) -> float:
    """A half, a quarter, three quarters, an eighth, ...: the binary digits of `number` + 1, mirrored at the point."""
    share, part, rest = 0.0, 0.5, number + 1
    while rest:
        share += part * (rest & 1)
        part /= 2
        rest >>= 1
    return share
