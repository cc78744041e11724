"""One engine's stream of KV events as a subscriber sees it: what may be applied, what is missing, what can be trusted.

Batches are numbered from 0, nothing on the wire names the engine's incarnation, and what a subscriber is not there for
is dropped (engines.md A.0). So this follows the numbers, remembers what it applied, and has replays begin with the last
batch that it knows: an engine that keeps another payload under that number, or none, is in another life than the one
that the view is of.
"""

from __future__ import annotations

import enum
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

# A live copy of a replayed batch comes within fewer.
_REMEMBERED_BATCHES = 4096
# Live batches that wait for a replay; what is beyond comes by another replay.
_MOST_HELD_BYTES = 64 << 20
# The last batch may be the one that was lost: a stream that has fallen silent is asked for its end. With the time that
# the feed takes to see that an engine has something to do, and the patience for an answer, no more than 2 s together.
_QUIET_S, _IDLE_S = 0.6, 30.0
# An engine answers within 0.1 s. Who only looks can try again; who misses something drops the view for want of it.
_LOOK_PATIENCE_S, _PATIENCE_S = 0.5, 2.0
_FIRST_BACK_OFF_S, _LONGEST_BACK_OFF_S = 0.5, 30.0
# What a connection has brought before it broke is read within this time.
_LEFTOVERS_S = 1.0
# So much is decided in one go; the rest by `go_on`.
_TAKEN_AT_ONCE = 256
# A restarted engine has nothing to replay either, but not for long.
_EMPTY_ROUNDS_UNTIL_USELESS = 3


class Trust(enum.Enum):
    """How far a worker's cache view can be believed."""

    LIVE = "live"  # all that the engine has published since its cache was empty was applied
    REPLAYING = "replaying"  # something is missing and being asked for
    PARTIAL = "partial"  # followed without a hole, but not from the beginning
    LOST = "lost"  # nothing says that the view is of this engine, in this life


@dataclass(frozen=True, slots=True)
class Apply:
    """The next batch in order."""

    seq: int
    payload: bytes
    live: bool = False  # it has just come, and tells what the engine has just done


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop the view."""


Step = Apply | Clear


class _Phase(enum.Enum):
    OFFLINE = enum.auto()
    DOUBTED = enum.auto()  # the view may be of another life: live batches are held until a replay has told
    BEHIND = enum.auto()  # something is missing: what comes after it is held
    FOLLOWING = enum.auto()


@dataclass(slots=True)
class _Round:
    """One replay under way."""

    number: int
    first: int
    overlaps: bool  # it is to begin with the last batch that we know
    held_before: bool  # live batches that were there before prove that something is missing
    looks: bool  # nothing is known to be missing
    batches: int = 0
    progress: bool = False
    broken: bool = False


class FeedState:
    """Decides; does no I/O. Each verb returns what is to be done with the view, in order; before the next verb, `go_on`
    has to be called while there is `more`.

    `can_replay`: there is somebody to ask for what was missed. `faults` counts what went wrong, by kind, and `repeated`
    the live batches that had been applied before.
    """

    def __init__(self, can_replay: bool) -> None:
        self.faults: Counter[str] = Counter()
        self.repeated = 0
        self._can_replay = can_replay
        self._replays = can_replay  # False as well while whoever answers keeps nothing
        self._phase = _Phase.OFFLINE
        self._next = 0  # the first batch that was not applied
        self._end = 0  # behind the last batch that was seen, applied or not
        self._begin: int | None = None  # the first of the unbroken row that was; None: none was
        self._whole = False  # nothing is missing that was published since the engine's cache was empty
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._recent = _Recent()
        self._round: _Round | None = None
        self._rounds = 0
        self._ask_at_s: float | None = None
        self._look_at_s: float | None = None
        self._failures = 0
        self._offline_s = 0.0
        self._given_up = False  # nobody answered: followed without what is missing, which is still asked for
        self._hole: int | None = None
        self._found = range(0)  # batches that a look has brought, and of which live copies may still come
        self._empty_rounds = 0

    @property
    def trust(self) -> Trust:
        match self._phase:
            case _Phase.OFFLINE | _Phase.DOUBTED:
                return Trust.LOST
            case _Phase.BEHIND:
                return Trust.REPLAYING
            case _Phase.FOLLOWING:
                return Trust.LIVE if self._whole else Trust.PARTIAL

    @property
    def coverage(self) -> float:
        """The share of all that the engine has published, in batches, that the view follows without a hole."""
        if self._whole:
            return 1.0
        return 0.0 if self._begin is None else (self._next - self._begin) / self._next

    @property
    def due_s(self) -> float | None:
        """When to `ask` next; None: not before something happens."""
        if self._round is not None or self._phase is _Phase.OFFLINE or not self._replays:
            return None
        if self._failures and (self._phase is not _Phase.FOLLOWING or self._given_up):
            return self._ask_at_s
        return min((at_s for at_s in (self._ask_at_s, self._look_at_s) if at_s is not None), default=None)

    @property
    def round(self) -> int | None:
        """The replay under way. Any other need not be read to its end."""
        return None if self._round is None else self._round.number

    @property
    def patience_s(self) -> float:
        """For so long a replay may keep silent before it is taken for unanswered."""
        return _LOOK_PATIENCE_S if self._phase is _Phase.FOLLOWING else _PATIENCE_S

    @property
    def more(self) -> bool:
        """Batches that were held can be applied now."""
        return bool(self._held) and self._phase is not _Phase.DOUBTED and self._held[0][0] <= self._next

    def go_on(self) -> Sequence[Step]:
        """The next few of them."""
        return self._take_held()

    # The connection

    def connected(self, now_s: float) -> Sequence[Step]:
        """The subscription is up; perhaps not for the first time."""
        self._replays = self._can_replay
        self._empty_rounds = 0
        return self._in_doubt("reconnect", now_s)

    def disconnected(self, now_s: float) -> Sequence[Step]:
        """Whoever answers next may be another incarnation."""
        if self._phase is not _Phase.OFFLINE:
            self.faults["disconnect"] += 1
        self._phase, self._offline_s = _Phase.OFFLINE, now_s
        self._round = self._ask_at_s = self._look_at_s = None
        self._found = range(0)
        self._release_held()
        return ()

    def doubt(self, why: str, now_s: float) -> Sequence[Step]:
        """Something else than the stream says that the engine was restarted."""
        return () if self._phase is _Phase.OFFLINE else self._in_doubt(why, now_s)

    def _in_doubt(self, why: str, now_s: float) -> Sequence[Step]:
        self._round = None
        if self._next == 0:
            return self._start_over(None, now_s)
        if not self._replays:
            return self._start_over(why, now_s)
        self._phase, self._ask_at_s = _Phase.DOUBTED, now_s
        return ()

    def expect(self, now_s: float) -> None:
        """The engine has or had something to do: if it says nothing, what it said was lost."""
        soon_s = now_s + _QUIET_S
        if self._look_at_s is None or self._look_at_s > soon_s:
            self._look_at_s = soon_s

    # Live batches

    def live(self, seq: int, payload: bytes, now_s: float) -> Sequence[Step]:
        """A batch came over the subscription."""
        self._look_at_s = now_s + _QUIET_S
        if self._phase is _Phase.OFFLINE:
            if self._next and now_s < self._offline_s + _LEFTOVERS_S:
                return ()  # from a connection that is gone; a replay brings it, if it still means anything
            steps = self.connected(now_s)  # or else it would not have come
            if steps:
                return [*steps, *self.live(seq, payload, now_s)]
        if self._phase is _Phase.DOUBTED:
            self._hold(seq, payload)
            return ()
        if seq < self._next:
            return self._seen_before(seq, payload, now_s)
        self._copies_come_from(seq)
        if seq == self._next and (seq == 0 or self._begin is not None):
            return [self._take(seq, payload, live=True), *self._take_held()]
        return self._too_early(seq, payload, now_s)

    def _seen_before(self, seq: int, payload: bytes, now_s: float) -> Sequence[Step]:
        """A PUB socket delivers in order: what is no copy is from an engine that began again."""
        if self._recent.knows(seq, payload):
            self.repeated += 1
            self._copies_come_from(seq)
            return ()
        return [*self._start_over("restart", now_s), *self.live(seq, payload, now_s)]

    def _copies_come_from(self, seq: int) -> None:
        """A PUB socket delivers in order: what a look has found and is before this batch, was lost."""
        if self._found and self._found.start < seq:
            self.faults["lost_end"] += 1
        self._found = range(max(self._found.start, seq + 1), self._found.stop)

    def _too_early(self, seq: int, payload: bytes, now_s: float) -> Sequence[Step]:
        if self._phase is _Phase.FOLLOWING and self._begin is not None:
            self.faults["gap"] += 1
        if self._replays and not (self._given_up and self._begin is None):
            if self._phase is _Phase.FOLLOWING:
                self._phase, self._ask_at_s = _Phase.BEHIND, now_s
            self._hold(seq, payload)
            return ()
        steps = [] if self._begin is None else self._forget("unfilled_gap")
        self._phase = _Phase.FOLLOWING
        return [*steps, self._take(seq, payload, live=True)]

    # Replays

    def ask(self, now_s: float) -> int | None:
        """The number to ask a replay from, if it is time to; what comes of it is to be reported with `round`."""
        due_s = self.due_s
        if due_s is None or due_s > now_s:
            return None
        if self._look_at_s is not None and self._look_at_s <= now_s:
            self._copies_come_from(self._next)  # they are long overdue
        self._ask_at_s = self._look_at_s = None
        self._rounds += 1
        overlaps = self._next > 0 and not self._given_up
        first = self._next - 1 if overlaps else 0
        looks = self._phase is _Phase.FOLLOWING and self._begin is not None
        self._round = _Round(self._rounds, first, overlaps, bool(self._held), looks)
        return first

    def replayed(self, number: int, seq: int, payload: bytes, now_s: float) -> Sequence[Step]:
        """The next batch of replay `number`."""
        current = self._round
        if current is None or current.number != number:
            return ()
        self._end = max(self._end, seq + 1)
        if current.broken:
            return ()
        current.batches += 1
        self._empty_rounds = 0
        steps: list[Step] = []
        if current.batches == 1 and self._given_up:
            self._given_up = False
            if self._begin is not None and seq < self._begin:
                steps += self._forget(None)  # now the view can be had from further back
                self._phase = _Phase.BEHIND
        if seq < self._next:
            return [*steps, *self._replayed_before(seq, payload, now_s)]
        if seq > self._next:
            if current.batches > 1 and self._hole != self._next:
                # A ROUTER drops what its reader leaves waiting: what is missing may come when asked for again.
                self._hole, current.broken = self._next, True
                self.faults["replay_hole"] += 1
                return steps
            if self._begin is not None:
                # What lies between is gone, and removals with it.
                steps += self._forget("replay_incomplete")
        elif self._phase is _Phase.DOUBTED:
            steps += self._forget("unproven")
        if self._phase is _Phase.DOUBTED or self._begin is None:
            self._phase = _Phase.BEHIND
        current.progress = True
        if current.looks:
            self._found = range(self._found.start if self._found else seq, seq + 1)
        return [*steps, self._take(seq, payload), *self._take_held()]

    def _replayed_before(self, seq: int, payload: bytes, now_s: float) -> Sequence[Step]:
        if self._recent.knows(seq, payload):
            if self._phase is _Phase.DOUBTED:
                self._phase = _Phase.BEHIND
            return self._take_held()
        return self._start_over("restart", now_s) if self._recent.remembers(seq) else ()

    def replay_ended(self, number: int, complete: bool, now_s: float) -> Sequence[Step]:
        """`complete`: with its end marker; else it broke off, or nobody answered."""
        current = self._round
        if current is None or current.number != number:
            return ()
        self._round = None
        if current.broken or (not complete and current.progress):
            self._ask_at_s = now_s  # it goes on where this one stopped
            return ()
        if not complete:
            return self._unanswered(now_s)
        self._failures = 0
        if current.batches == 0 and (self._next > 0 or self._held):
            return self._empty_handed(current, now_s)
        self._given_up = False
        if self._begin is None:
            self._begin, self._whole = 0, True  # nothing was published yet
        return self._caught_up(current, now_s)

    def _unanswered(self, now_s: float) -> Sequence[Step]:
        self.faults["replay_timeout"] += 1
        self._failures += 1
        self._ask_at_s = now_s + min(_LONGEST_BACK_OFF_S, _FIRST_BACK_OFF_S * 2.0 ** (self._failures - 1))
        if self._phase is _Phase.DOUBTED or self._held or self._begin is None:
            return self._go_on_without("unfilled_gap" if self._phase is _Phase.BEHIND else "unproven", given_up=True)
        if not self._given_up:
            self._phase = _Phase.BEHIND  # perhaps: the next batch will tell
        return ()

    def _empty_handed(self, current: _Round, now_s: float) -> Sequence[Step]:
        """Complete, and without a batch, although there have been some."""
        self._empty_rounds += 1
        if self._empty_rounds >= _EMPTY_ROUNDS_UNTIL_USELESS:
            self.faults["replay_useless"] += 1
            self._replays = False
            return self._go_on_without("unfilled_gap", given_up=False) if self._phase is not _Phase.FOLLOWING else ()
        if current.overlaps:
            return self._start_over("restart", now_s, keep_held=True)
        self._ask_at_s = now_s
        return ()

    def _caught_up(self, current: _Round, now_s: float) -> Sequence[Step]:
        steps = self._take_held()
        if self._next < self._end and not self.more:
            if (current.held_before or not self._held) and not current.progress:
                return [*steps, *self._go_on_without("unfilled_gap", given_up=False)]
            self._ask_at_s = now_s  # published, or dropped, while the replay was on its way
            return steps
        self._phase = _Phase.FOLLOWING
        self._hole = None
        if self._look_at_s is None:
            # What a ROUTER drops may be the last that it was given: a replay that brought something is looked after.
            self._look_at_s = now_s + (_QUIET_S if current.progress else _IDLE_S)
        return steps

    def _go_on_without(self, why: str, given_up: bool) -> Sequence[Step]:
        """What is missing stays missing: follow what there is."""
        steps = self._forget(why, keep_held=True)
        self._phase, self._given_up = _Phase.FOLLOWING, given_up
        if self._held:
            seq, payload = self._held.popleft()
            self._held_bytes -= len(payload)
            steps += [self._take(seq, payload), *self._take_held()]
        return steps

    # What the batches said

    def emptied(self) -> None:
        """The batch applied last said that the engine's cache is empty: now all of it is known."""
        self._whole, self._given_up = True, False

    def unreadable(self) -> None:
        """Something of the batch applied last is missing in the view."""
        self._whole = False

    # Inside

    def _take(self, seq: int, payload: bytes, live: bool = False) -> Apply:
        if self._begin is None:
            self._begin, self._whole = seq, seq == 0
        self._recent.add(seq, payload)
        self._next = seq + 1
        self._end = max(self._end, self._next)
        if self._phase is _Phase.BEHIND and self._round is None and not self._held:
            self._phase = _Phase.FOLLOWING
        return Apply(seq, payload, live)

    def _hold(self, seq: int, payload: bytes) -> None:
        if self._held and (seq <= self._held[-1][0] or self._held_bytes > _MOST_HELD_BYTES):
            self._release_held()  # another life's, or too much: the engine keeps them as well
        self._held.append((seq, payload))
        self._held_bytes += len(payload)
        self._end = max(self._end, seq + 1)

    def _release_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0

    def _take_held(self) -> list[Step]:
        steps: list[Step] = []
        while self.more and len(steps) < _TAKEN_AT_ONCE:
            seq, payload = self._held.popleft()
            self._held_bytes -= len(payload)
            if seq == self._next:
                steps.append(self._take(seq, payload))
        return steps

    def _start_over(self, why: str | None, now_s: float, keep_held: bool = False) -> list[Step]:
        """Nothing of this life is known yet; `why` it is another than before."""
        steps = self._forget(why, keep_held) if self._begin is not None or why is not None else []
        self._begin, self._whole, self._round = None, False, None
        self._phase = _Phase.BEHIND if self._replays else _Phase.FOLLOWING
        self._ask_at_s = now_s if self._replays else None
        return steps

    def _forget(self, why: str | None, keep_held: bool = False) -> list[Step]:
        if why is not None:
            self.faults[why] += 1
        self._next, self._begin, self._whole, self._given_up, self._hole = 0, None, False, False, None
        self._recent = _Recent()
        self._end = 0
        self._found = range(0)
        if not keep_held:
            self._release_held()
        return [Clear()]


class _Recent:
    """The last batches applied, by number: enough to tell a copy from another batch under the same number."""

    def __init__(self) -> None:
        self._seqs = array("q", [-1]) * _REMEMBERED_BATCHES
        self._digests = array("q", [0]) * _REMEMBERED_BATCHES

    def add(self, seq: int, payload: bytes) -> None:
        place = seq % _REMEMBERED_BATCHES
        self._seqs[place], self._digests[place] = seq, hash(payload)

    def remembers(self, seq: int) -> bool:
        return self._seqs[seq % _REMEMBERED_BATCHES] == seq

    def knows(self, seq: int, payload: bytes) -> bool:
        return self.remembers(seq) and self._digests[seq % _REMEMBERED_BATCHES] == hash(payload)
