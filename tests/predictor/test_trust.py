"""How much of a cache view is credited: all of a live one, none of a lost one, and what has proved true of others."""

import itertools

import numpy as np
import pytest

from predictor.feed_state import Trust
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.kv_events import Batch, Cleared, Removed, Stored, Tier
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens
from predictor.trust import ViewTrust

SIZE, BLOCKS = 16, 20
FAMILY = HashFamily(SIZE)
TOKENS = as_tokens(range(SIZE * BLOCKS + 1))


class One:
    """A fleet of one worker that holds all of one prompt."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.hasher = BlockHasher(rng)
        self.fleet = Fleet([PoolPolicy("m")], self.hasher, rng)
        self.fleet.join("m", WorkerSpec("w", "10.0.0.1:8000"))
        self.ids = itertools.count()
        self.announce()

    def announce(self) -> None:
        tokens = TOKENS[: SIZE * BLOCKS]
        run = Stored(tuple(range(1, BLOCKS + 1)), None, tokens, SIZE, Tier.DEVICE, None, None)
        self.fleet.apply("w", Batch(None, (run,), None))

    def refuted(self, reported: int) -> int:
        """A request after which the engine announces what it had to store."""
        self.fleet.apply("w", Batch(None, (Removed((999,), Tier.DEVICE),), None))
        return self.request(reported)

    def request(self, reported: int | None = None, prompt_tokens: int | None = len(TOKENS)) -> int:
        """One whole request for that prompt; the tokens that were credited."""
        prompt = Prompt(len(TOKENS), True, {FAMILY: self.hasher.prompt_hashes(TOKENS, FAMILY, Namespace())})
        wish = Wish(f"t{next(self.ids)}", 0.0)
        grant = self.fleet.place("m", prompt, wish, 0.0)
        assert isinstance(grant, Grant)
        self.fleet.first_token(wish.ticket_id, None, 1.0)
        self.fleet.finish(wish.ticket_id, Usage(prompt_tokens, reported, 5), 2.0)
        return grant.ticket.forecast.cached_tokens

    def silent(self) -> bool:
        return self.fleet.silent_workers() == ["w"]


@pytest.fixture
def one() -> One:
    return One()


@pytest.mark.parametrize(
    ("trust", "credited"),
    [(Trust.LIVE, 320), (Trust.REPLAYING, 320), (Trust.PARTIAL, 320), (Trust.LOST, 0)],
)
def test_a_view_that_has_not_been_wrong_is_credited_unless_it_is_lost(one: One, trust: Trust, credited: int) -> None:
    one.fleet.set_trust("w", trust, 0.5)
    assert one.request() == credited


def test_what_a_partial_view_promised_in_vain_lowers_its_credit(one: One) -> None:
    one.fleet.set_trust("w", Trust.PARTIAL, 0.5)
    credits = [one.refuted(160) for _ in range(40)]
    assert credits[:8] == sorted(credits[:8], reverse=True)
    assert (credits[0], credits[-1]) == (320, 160)


def test_the_credit_comes_back_when_the_engine_agrees(one: One) -> None:
    """It is held against what the view shows, not against what is left of that after it was lowered."""
    one.fleet.set_trust("w", Trust.PARTIAL, 0.5)
    for _ in range(40):
        one.refuted(0)
    assert one.request() == 0
    for _ in range(40):
        one.request(reported=320)
    assert one.request() in (304, 320)


def test_a_live_view_is_credited_whole_whatever_was(one: One) -> None:
    one.fleet.set_trust("w", Trust.PARTIAL, 0.5)
    one.request(reported=0)
    one.fleet.set_trust("w", Trust.LIVE, 1.0)
    assert one.request() == 320


def test_a_cleared_view_has_promised_nothing(one: One) -> None:
    one.fleet.set_trust("w", Trust.PARTIAL, 0.5)
    one.request(reported=0)
    one.fleet.clear("w")
    one.announce()
    assert one.request() == 320


def test_copies_in_flight_are_credited_whatever_the_feed_says(one: One) -> None:
    one.fleet.set_trust("w", Trust.LOST, 0.0)
    prompt = Prompt(len(TOKENS), True, {FAMILY: one.hasher.prompt_hashes(TOKENS, FAMILY, Namespace())})
    grants = [one.fleet.place("m", prompt, Wish(f"copy{number}", 0.0), 0.0) for number in range(2)]
    assert [grant.ticket.forecast.cached_tokens for grant in grants if isinstance(grant, Grant)] == [0, 320]


def test_an_engine_that_serves_and_never_says_what_it_stores_is_silent(one: One) -> None:
    for number in range(20):
        assert not one.silent(), number
        one.request(reported=0)
    assert one.silent()
    assert one.request() == 0
    one.announce()
    assert not one.silent()


@pytest.mark.parametrize(
    ("reported", "prompt_tokens"), [(320, len(TOKENS)), (None, len(TOKENS)), (None, None), (0, SIZE - 1)]
)
def test_who_had_nothing_new_to_store_may_be_silent(one: One, reported: int, prompt_tokens: int | None) -> None:
    for _ in range(50):
        one.request(reported, prompt_tokens)
    assert not one.silent()


def test_a_feed_that_is_lost_is_not_expected_to_say_anything(one: One) -> None:
    one.fleet.set_trust("w", Trust.LOST, 0.0)
    for _ in range(50):
        one.request(reported=0)
    assert not one.silent()


def test_a_batch_without_events_is_no_sign_of_life() -> None:
    one = One()
    for _ in range(20):
        one.request(reported=0)
    one.fleet.apply("w", Batch(None, (), None))
    assert one.silent()
    one.fleet.apply("w", Batch(None, (Cleared(),), None))
    assert not one.silent()


def test_one_word_moves_the_agreement_by_less_than_a_third() -> None:
    view = ViewTrust(Trust.PARTIAL)
    view.compare(100, 0)
    assert view.agreement == pytest.approx(0.7)
    view.compare(0, 50)
    view.compare(100, 500)
    assert view.agreement == pytest.approx(0.79)
