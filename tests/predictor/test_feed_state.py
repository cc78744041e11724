"""What becomes of a cache view when batches are lost, repeated, late, or of an engine that has begun again."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from predictor.feed_state import Apply, Clear, FeedState, Step, Trust


class Engine:
    """A publisher, its subscriber, and the wire between them, in virtual time. Payloads name life and number."""

    def __init__(self, can_replay: bool = True, buffer: int = 10_000) -> None:
        self.state = FeedState(can_replay)
        self.view: list[str] = []
        self.now_s = 0.0
        self.life = 0
        self.sent = 0
        self.buffer = buffer
        self.answers = True  # replays are answered
        self.ends = True  # with an end marker
        self.skips: set[int] = set()  # never replayed
        self.drops: set[int] = set()  # not replayed the next time
        self.asked: list[int] = []

    def connect(self) -> None:
        self.do(self.state.connected(self.now_s))

    def disconnect(self) -> None:
        self.do(self.state.disconnected(self.now_s))

    def restart(self, seen: bool = True) -> None:
        self.life += 1
        self.sent = 0
        if seen:
            self.disconnect()
            self.connect()

    def payload(self, seq: int) -> bytes:
        return f"{self.life}/{seq}".encode()

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.sent += 1
            self.deliver(self.sent - 1)

    def lose(self, count: int = 1) -> None:
        self.sent += count

    def deliver(self, seq: int) -> None:
        self.do(self.state.live(seq, self.payload(seq), self.now_s))

    def wait(self, seconds: float = 0.0) -> None:
        """Answers what is asked for meanwhile."""
        until_s = self.now_s + seconds
        while (due_s := self.state.due_s) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.answer()
        self.now_s = max(self.now_s, until_s)

    def answer(self) -> None:
        first = self.state.ask(self.now_s)
        assert first is not None
        self.asked.append(first)
        number = self.state.round
        assert number is not None
        if self.answers:
            begin = max(first, self.sent - self.buffer)
            for seq in range(begin, self.sent):
                if seq not in self.skips and (seq == begin or seq not in self.drops):
                    self.do(self.state.replayed(number, seq, self.payload(seq), self.now_s))
            self.drops.clear()
        if not (self.answers and self.ends):
            self.now_s += self.state.patience_s
        self.do(self.state.replay_ended(number, self.answers and self.ends, self.now_s))

    def do(self, steps: Sequence[Step]) -> None:
        self.done(steps)
        while self.state.more:
            self.done(self.state.go_on())

    def done(self, steps: Sequence[Step]) -> None:
        assert len(steps) < 300, "too much in one go"
        for step in steps:
            match step:
                case Clear():
                    self.view.clear()
                case Apply(_, payload, _):
                    self.view.append(payload.decode())

    def history(self, first: int = 0) -> list[str]:
        return [f"{self.life}/{seq}" for seq in range(first, self.sent)]

    @property
    def trust(self) -> Trust:
        return self.state.trust

    def faults(self, kind: str) -> int:
        return self.state.faults[kind]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def followed(engine: Engine, batches: int = 5) -> Engine:
    engine.connect()
    engine.wait()
    engine.publish(batches)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())
    return engine


def test_before_anybody_answers_nothing_is_known(engine: Engine) -> None:
    assert (engine.trust, engine.state.coverage, engine.state.due_s) == (Trust.LOST, 0.0, None)


def test_an_engine_that_has_published_nothing_is_known_wholly(engine: Engine) -> None:
    engine.connect()
    assert engine.trust is Trust.REPLAYING
    engine.wait()
    assert (engine.trust, engine.state.coverage) == (Trust.LIVE, 1.0)


def test_a_late_joiner_replays_from_the_start(engine: Engine) -> None:
    engine.lose(20)
    engine.connect()
    engine.wait()
    assert (engine.trust, engine.view, engine.asked) == (Trust.LIVE, engine.history(), [0])


def test_where_the_buffer_has_lost_the_beginning_the_share_that_is_followed_is_said(engine: Engine) -> None:
    engine.buffer = 5
    engine.lose(20)
    engine.connect()
    engine.wait()
    assert (engine.trust, engine.view, engine.state.coverage) == (Trust.PARTIAL, engine.history(15), 0.25)
    engine.publish(20)
    assert engine.state.coverage == 25 / 40
    engine.state.emptied()
    assert (engine.trust, engine.state.coverage) == (Trust.LIVE, 1.0)


def test_what_cannot_be_read_makes_a_view_partial_until_the_cache_is_emptied(engine: Engine) -> None:
    followed(engine)
    seen = [engine.trust]
    for told in (engine.state.unreadable, engine.state.emptied):
        told()
        seen.append(engine.trust)
    assert seen == [Trust.LIVE, Trust.PARTIAL, Trust.LIVE]


def test_a_gap_is_filled_from_the_last_batch_that_is_known(engine: Engine) -> None:
    followed(engine)
    engine.lose(2)
    engine.publish(2)
    assert (engine.trust, engine.faults("gap")) == (Trust.REPLAYING, 1)
    engine.wait()
    assert (engine.trust, engine.view, engine.asked) == (Trust.LIVE, engine.history(), [0, 4])


def test_thousands_of_held_batches_are_taken_a_few_at_a_time(engine: Engine) -> None:
    engine.connect()
    engine.wait()
    engine.lose()
    engine.publish(5000)
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_a_lost_end_is_found_when_the_stream_falls_silent(engine: Engine) -> None:
    followed(engine)
    engine.lose()
    engine.wait(1.5)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


@pytest.mark.parametrize("batches", [1, 7])
def test_a_lost_end_that_is_found_is_counted_once(engine: Engine, batches: int) -> None:
    followed(engine)
    engine.lose(batches)
    engine.wait(60)
    assert dict(engine.state.faults) == {"lost_end": 1}
    engine.lose(batches)
    engine.state.expect(engine.now_s)
    engine.wait(1)
    engine.publish()
    assert (engine.trust, engine.view, dict(engine.state.faults)) == (Trust.LIVE, engine.history(), {"lost_end": 2})


def test_a_lost_beginning_of_which_nothing_else_came_is_counted(engine: Engine) -> None:
    engine.connect()
    engine.wait()
    engine.lose(3)
    engine.wait(60)
    assert (engine.trust, engine.view, dict(engine.state.faults)) == (Trust.LIVE, engine.history(), {"lost_end": 1})


def test_what_a_look_brings_before_its_live_copies_come_is_not_lost(engine: Engine) -> None:
    followed(engine)
    engine.lose(3)
    engine.wait(0.7)
    assert engine.view == engine.history()
    for seq in (5, 6, 7):
        engine.deliver(seq)
    engine.publish(2)
    engine.wait(60)
    assert (engine.trust, engine.view, dict(engine.state.faults)) == (Trust.LIVE, engine.history(), {})


def test_of_what_a_look_brings_what_comes_no_more_is_lost(engine: Engine) -> None:
    followed(engine)
    engine.lose(3)
    engine.wait(0.7)
    engine.deliver(6)
    assert dict(engine.state.faults) == {"lost_end": 1}
    engine.deliver(7)
    engine.publish(2)
    engine.wait(60)
    assert (engine.view, dict(engine.state.faults)) == (engine.history(), {"lost_end": 1})


def test_what_a_look_brings_of_another_life_is_no_lost_end(engine: Engine) -> None:
    followed(engine)
    engine.restart(seen=False)
    engine.lose(8)
    engine.wait(60)
    assert (engine.trust, engine.view, dict(engine.state.faults)) == (Trust.LIVE, engine.history(), {"restart": 1})


def test_an_engine_with_something_to_do_is_not_left_to_its_silence(engine: Engine) -> None:
    followed(engine)
    engine.wait(5)
    engine.lose()
    engine.state.expect(engine.now_s)
    engine.wait(1)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_an_end_that_nobody_confirms_is_not_believed(engine: Engine) -> None:
    followed(engine)
    engine.answers = False
    engine.lose()
    engine.wait(1.7)
    assert (engine.trust, engine.view) == (Trust.REPLAYING, engine.history()[:5])
    engine.answers = True
    engine.wait(1)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_the_next_batch_confirms_an_end_that_nobody_answered_for(engine: Engine) -> None:
    followed(engine)
    engine.answers = False
    engine.wait(1.7)
    engine.publish()
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_an_idle_engine_is_asked_seldom(engine: Engine) -> None:
    followed(engine)
    engine.wait(300)
    assert 9 <= len(engine.asked) <= 12


def test_a_busy_stream_is_never_asked_for_its_end(engine: Engine) -> None:
    followed(engine)
    for _ in range(100):
        engine.publish()
        engine.wait(0.5)
    assert engine.asked == [0]


def test_a_gap_that_cannot_be_filled_clears_the_view(engine: Engine) -> None:
    followed(engine)
    engine.buffer = 3
    engine.lose(10)
    engine.publish()
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(13))
    assert engine.faults("replay_incomplete") == 1


def test_a_batch_that_is_never_replayed_clears_the_view(engine: Engine) -> None:
    followed(engine)
    engine.skips = {5}
    engine.lose()
    engine.publish()
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(6))


def test_a_hole_in_a_replay_is_asked_for_again(engine: Engine) -> None:
    engine.lose(10)
    engine.drops = {4, 5, 8}
    engine.connect()
    engine.wait()
    assert (engine.trust, engine.view, engine.asked) == (Trust.LIVE, engine.history(), [0, 3])
    assert engine.faults("replay_hole") == 1


def test_a_hole_that_stays_is_a_loss(engine: Engine) -> None:
    engine.lose(10)
    engine.skips = {4}
    engine.connect()
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(5))


def test_copies_of_live_batches_are_no_restart(engine: Engine) -> None:
    followed(engine)
    for seq in (4, 4, 0, 2):
        engine.deliver(seq)
    assert (engine.trust, engine.view, dict(engine.state.faults)) == (Trust.LIVE, engine.history(), {})
    assert engine.state.repeated == 4


def test_live_copies_of_what_a_replay_brought_are_skipped(engine: Engine) -> None:
    engine.lose(10)
    engine.connect()
    engine.wait()
    for seq in range(10):
        engine.deliver(seq)
    assert (engine.view, dict(engine.state.faults)) == (engine.history(), {})


@pytest.mark.parametrize("lost", [0, 2])
def test_a_number_that_goes_backwards_is_a_restart(engine: Engine, lost: int) -> None:
    followed(engine)
    engine.restart(seen=False)
    engine.lose(lost)
    engine.publish()
    assert engine.faults("restart") == 1
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_a_restart_that_has_passed_our_number_shows_in_the_replay(engine: Engine) -> None:
    followed(engine)
    engine.restart(seen=False)
    engine.lose(7)
    engine.publish()
    engine.wait()
    assert (engine.trust, engine.view, engine.faults("restart")) == (Trust.LIVE, engine.history(), 1)


@pytest.mark.parametrize("published", [0, 1, 5, 6, 50])
def test_a_reconnect_to_another_life_is_seen_whatever_its_number(engine: Engine, published: int) -> None:
    followed(engine)
    engine.disconnect()
    assert engine.trust is Trust.LOST
    engine.life, engine.sent = 1, published
    engine.connect()
    assert engine.trust is Trust.LOST
    engine.publish()
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_a_reconnect_to_the_same_life_keeps_the_view(engine: Engine) -> None:
    followed(engine)
    engine.disconnect()
    engine.lose(3)
    engine.connect()
    engine.publish()
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())
    assert (engine.faults("restart"), engine.faults("disconnect")) == (0, 1)


def test_what_is_left_of_a_dead_connection_is_not_applied(engine: Engine) -> None:
    followed(engine)
    engine.disconnect()
    engine.publish()
    assert len(engine.view) == 5
    engine.restart(seen=False)
    engine.connect()
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.LIVE, [])


def test_a_batch_that_comes_proves_a_connection_that_nobody_has_told_of(engine: Engine) -> None:
    followed(engine)
    engine.disconnect()
    engine.now_s += 3
    engine.publish(2)
    engine.wait(1)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_a_reconnect_after_which_the_buffer_shows_no_known_batch_clears_the_view(engine: Engine) -> None:
    """Seven were published since the last known one, and six are kept: nothing tells whose they are."""
    followed(engine)
    engine.buffer = 6
    engine.disconnect()
    engine.lose(6)
    engine.connect()
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(5))


def test_counters_that_fell_back_have_the_view_proven(engine: Engine) -> None:
    followed(engine)
    engine.do(engine.state.doubt("counters", 0.0))
    assert engine.trust is Trust.LOST
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())
    engine.restart(seen=False)
    engine.lose(9)
    engine.do(engine.state.doubt("counters", 0.0))
    engine.wait()
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_nobody_who_answers_is_asked_again_until_somebody_does(engine: Engine) -> None:
    engine.answers = False
    engine.lose(3)
    engine.connect()
    engine.wait(1)
    assert engine.trust is Trust.PARTIAL
    engine.publish(2)
    assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(3))
    engine.wait(200)
    assert 6 <= len(engine.asked) <= 12
    engine.answers = True
    engine.wait(31)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_a_gap_whose_replay_times_out_is_filled_later(engine: Engine) -> None:
    followed(engine)
    engine.answers = False
    engine.lose()
    engine.publish()
    engine.wait(0.1)
    assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(6))
    engine.answers = True
    engine.wait(2)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


def test_a_replay_without_an_end_goes_on_where_it_stopped(engine: Engine) -> None:
    engine.ends = False
    engine.lose(3)
    engine.connect()
    engine.wait(3)
    assert (engine.trust, engine.view) == (Trust.REPLAYING, engine.history())
    engine.ends = True
    engine.wait(10)
    assert engine.trust is Trust.LIVE
    assert set(engine.asked[1:]) == {2}


def test_a_replay_service_that_keeps_nothing_costs_the_view_once(engine: Engine) -> None:
    engine.buffer = 0
    followed(engine)
    for _ in range(20):
        engine.wait(5)
        engine.publish()
    assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(5))
    assert engine.faults("replay_useless") == 1
    assert len(engine.asked) <= 6


@pytest.mark.parametrize("looks", [1, 3, 20])
@pytest.mark.parametrize("restarts", [0, 1, 4])
def test_an_engine_that_had_nothing_to_say_for_long_can_still_replay(engine: Engine, looks: int, restarts: int) -> None:
    """An empty answer is a right one, as long as nothing was published."""
    engine.connect()
    for _ in range(1 + restarts):
        for _ in range(looks):
            engine.state.expect(engine.now_s)
            engine.wait(60)
        engine.restart(seen=False)
        engine.do(engine.state.doubt("restart_told", engine.now_s))
        engine.wait(1)
    assert engine.faults("replay_useless") == 0
    engine.publish(2)
    engine.lose(3)
    engine.publish()
    engine.wait(2)
    assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())


class TestWithoutReplay:
    @pytest.fixture
    def engine(self) -> Engine:
        return Engine(can_replay=False)

    def test_an_engine_seen_from_its_start_is_trusted(self, engine: Engine) -> None:
        engine.connect()
        assert engine.trust is Trust.PARTIAL
        engine.publish(3)
        assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())

    def test_a_late_joiner_begins_with_what_comes(self, engine: Engine) -> None:
        engine.connect()
        engine.lose(3)
        engine.publish(1)
        assert (engine.trust, engine.view, engine.state.coverage) == (Trust.PARTIAL, engine.history(3), 0.25)
        assert dict(engine.state.faults) == {}

    def test_a_gap_and_a_reconnect_clear_the_view(self, engine: Engine) -> None:
        engine.connect()
        engine.publish(3)
        engine.lose()
        engine.publish()
        assert (engine.trust, engine.view) == (Trust.PARTIAL, engine.history(4))
        engine.disconnect()
        engine.connect()
        assert (engine.trust, engine.view) == (Trust.PARTIAL, [])
        engine.publish()
        assert engine.view == engine.history(5)
        engine.restart()
        engine.publish()
        assert (engine.trust, engine.view) == (Trust.LIVE, ["1/0"])
        engine.wait(100)
        assert engine.asked == []


class FeedOverAnyWire(RuleBasedStateMachine):
    """Whatever happens to a stream: when the trouble is over, all that the engine keeps is in the view, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(buffer=30)

    @initialize(connects=st.booleans())
    def begin(self, connects: bool) -> None:
        if connects:
            self.engine.connect()

    @rule(count=st.integers(1, 20))
    def publish(self, count: int) -> None:
        self.engine.publish(count)

    @rule(count=st.integers(1, 40))
    def lose(self, count: int) -> None:
        self.engine.lose(count)

    @rule(back=st.integers(1, 20))
    def repeat(self, back: int) -> None:
        if self.engine.sent >= back:
            self.engine.deliver(self.engine.sent - back)

    @rule(published=st.integers(0, 60))
    def restart(self, published: int) -> None:
        self.engine.disconnect()
        self.engine.life += 1
        self.engine.sent = published
        self.engine.connect()

    @rule()
    def blink(self) -> None:
        self.engine.disconnect()
        self.engine.connect()

    @rule()
    def doubt(self) -> None:
        self.engine.do(self.engine.state.doubt("counters", self.engine.now_s))

    @rule(answers=st.booleans(), ends=st.booleans())
    def trouble(self, answers: bool, ends: bool) -> None:
        self.engine.answers, self.engine.ends = answers, ends

    @rule(back=st.integers(1, 20))
    def drop_in_replay(self, back: int) -> None:
        """Never its first batch: a socket drops when its queue is full."""
        self.engine.drops.add(self.engine.sent - back)

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.5, 10.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.engine.wait(seconds)

    @invariant()
    def the_view_is_a_row_without_a_hole(self) -> None:
        view = [tuple(map(int, item.split("/"))) for item in self.engine.view]
        assert all(one == (before[0], before[1] + 1) for before, one in itertools.pairwise(view))

    @invariant()
    def a_trusted_view_has_its_beginning(self) -> None:
        if self.engine.trust is Trust.LIVE and self.engine.view:
            assert self.engine.view[0] == f"{self.engine.life}/0"

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        if self.engine.trust is Trust.REPLAYING:
            assert self.engine.state.due_s is not None

    def teardown(self) -> None:
        engine = self.engine
        engine.answers = engine.ends = True
        engine.drops.clear()
        if engine.trust is Trust.LOST:
            engine.connect()
        engine.wait(40)
        engine.publish(2)
        engine.wait(2)
        assert engine.trust in (Trust.LIVE, Trust.PARTIAL)
        assert engine.view[-min(engine.sent, 2) :] == engine.history(max(0, engine.sent - 2))
        if engine.sent <= engine.buffer:
            assert (engine.trust, engine.view) == (Trust.LIVE, engine.history())
        elif engine.trust is Trust.LIVE:
            assert engine.view == engine.history()


TestFeedOverAnyWire = FeedOverAnyWire.TestCase
TestFeedOverAnyWire.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
