"""Requests that wait inside the filter: how many, in which order, and for how long."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from predictor.admission import Refusal
from predictor.fleet import Attempt, Fleet, Grant, Usage, Wish
from predictor.prompt import Prompt
from predictor.waiting_room import Held, HoldPolicy, WaitingRoom
from tests.predictor.test_fleet import Bench

POLICY = HoldPolicy(hold_s=2.0, most_requests=3, most_bytes=1000)


def test_nobody_waits_where_nobody_is_held() -> None:
    assert WaitingRoom(HoldPolicy()).enter(None, 1, 0.0) is None


def test_the_earliest_deadline_is_first_and_of_equals_who_came_first() -> None:
    room = WaitingRoom(POLICY)
    late, early, also_late = room.enter(9.0, 1, 0.0), room.enter(5.0, 1, 0.1), room.enter(9.0, 1, 0.2)
    assert list(room) == [early, late, also_late]


def test_whoever_has_no_deadline_has_that_of_its_stay() -> None:
    room = WaitingRoom(POLICY)
    held = room.enter(None, 1, 10.0)
    assert held is not None
    assert (held.deadline_s, held.until_s) == (12.0, 12.0)


def test_nobody_waits_beyond_its_deadline() -> None:
    room = WaitingRoom(POLICY)
    held = room.enter(1.5, 1, 0.0)
    assert held is not None
    assert held.until_s == 1.5
    assert room.enter(1.5, 1, 1.5) is None


actions = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), st.one_of(st.none(), st.floats(0, 60)), st.integers(0, 700)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.none()),
        st.tuples(st.just("wait"), st.floats(0, 3), st.none()),
    ),
    max_size=40,
)


@given(actions)
def test_it_never_holds_more_than_it_may_nor_anybody_for_longer(
    actions: list[tuple[str, float | None, int | None]],
) -> None:
    room, now_s = WaitingRoom(POLICY), 0.0
    inside: list[Held] = []
    for what, value, size in actions:
        if what == "enter":
            assert size is not None
            deadline_s = None if value is None else now_s + value
            held = room.enter(deadline_s, size, now_s)
            has_time = deadline_s is None or deadline_s > now_s
            has_room = len(inside) < 3 and sum(one.size for one in inside) + size <= 1000
            assert (held is not None) is (has_time and has_room)
            if held is not None:
                inside.append(held)
                assert now_s < held.until_s <= now_s + POLICY.hold_s
                assert deadline_s is None or held.until_s <= deadline_s
        elif what == "leave" and inside:
            assert value is not None
            gone = inside.pop(int(value) % len(inside))
            room.leave(gone)
            room.leave(gone)
        elif what == "wait":
            assert value is not None
            now_s += value
        assert sorted(inside) == list(room)
        assert len(room) == len(inside)
        assert room.bytes == sum(one.size for one in inside)


# With a fleet, in virtual time


@dataclass
class Doors:
    """What `extproc/holding.py` does, as one step after the other: try all in their order, now and then."""

    fleet: Fleet
    room: WaitingRoom = field(default_factory=lambda: WaitingRoom(HoldPolicy(hold_s=3.0, most_requests=50)))
    waiting: dict[Held, tuple[int, Wish]] = field(default_factory=dict)
    placed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def come(self, wish: Wish, tokens: int, now_s: float) -> None:
        decision = self.fleet.place("m", Prompt(tokens, True), wish, now_s, Attempt.FIRST)
        if isinstance(decision, Grant):
            self.placed.append(wish.ticket_id)
            return
        bound_s = wish.max_queue_wait_s
        held = self.room.enter(None if bound_s is None else wish.received_at_s + bound_s, 1, now_s)
        if held is None:
            self.refused.append(wish.ticket_id)
        else:
            self.waiting[held] = tokens, wish

    def look(self, now_s: float) -> None:
        for held in self.room:
            tokens, wish = self.waiting[held]
            decision = self.fleet.place("m", Prompt(tokens, True), wish, now_s, Attempt.AGAIN)
            if isinstance(decision, Grant):
                self.placed.append(wish.ticket_id)
            elif held.until_s > now_s:
                continue
            else:
                self.refused.append(wish.ticket_id)
            self.room.leave(held)
            del self.waiting[held]


@given(
    gone_after_s=st.floats(0, 6),
    # In hundredths: deadlines that are nearer to each other than a clock can tell are the same one.
    bounds_s=st.lists(st.one_of(st.none(), st.integers(500, 800).map(lambda n: n / 100)), min_size=1, max_size=6),
)
def test_who_is_held_is_placed_when_the_queue_goes_and_else_refused_in_time(
    gone_after_s: float, bounds_s: list[float | None]
) -> None:
    bench = Bench(1)
    now_s = bench.teach()
    queue = bench.grant(200_000, now_s)  # twenty seconds
    doors = Doors(bench.fleet)
    for number, bound_s in enumerate(bounds_s):
        doors.come(Wish(f"h{number}", now_s, max_queue_wait_s=bound_s), 100, now_s)
    bounded = [f"h{number}" for number, bound_s in enumerate(bounds_s) if bound_s is not None]
    assert len(doors.room) == len(bounded), "those without a bound are let in at once"
    doors.placed.clear()
    began_s, gone = now_s, False
    while now_s < began_s + 7.0:
        now_s += 0.05
        if not gone and now_s >= began_s + gone_after_s:
            bench.fleet.finish(queue.id, Usage(), now_s)
            gone = True
        doors.look(now_s)
        assert not doors.room or now_s < began_s + 3.0 + 0.05
    assert sorted(doors.placed + doors.refused) == bounded
    if gone_after_s > 3.1:
        assert len(doors.refused) == len(bounded)
    elif gone_after_s < 2.5:
        assert not doors.refused
        order = sorted(bounded, key=lambda name: (bounds_s[int(name[1:])], int(name[1:])))
        assert doors.placed == order, "the earliest deadline first"


def test_a_request_that_is_tried_again_is_counted_and_watched_once() -> None:
    bench = Bench(1)
    now_s = bench.teach()
    bench.grant(200_000, now_s)
    pool = bench.fleet._pools["m"]
    wish = Wish("held", now_s, max_queue_wait_s=5.0)
    for attempt in (Attempt.FIRST, Attempt.AGAIN, Attempt.AGAIN):
        refusal = bench.fleet.place("m", Prompt(100, True), wish, now_s, attempt)
        assert not isinstance(refusal, Grant)
    assert len(pool.workers["w0"].hindsight) == 0
    assert 0 < pool.crowding._bounded < 0.03
    assert isinstance(refusal, Refusal)
    bench.fleet.refused("m", wish, refusal, now_s)
    assert len(pool.workers["w0"].hindsight) == 1
