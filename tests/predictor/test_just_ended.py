"""A turn that is quicker than the events of the answer before it is credited with what must be there."""

from collections.abc import Sequence

import numpy as np
import pytest

from predictor.engines.vllm import Settings
from predictor.feed_state import Trust
from predictor.fleet import Fleet, Grant, PoolPolicy, Usage, Wish, WorkerSpec
from predictor.just_ended import JustEnded
from predictor.kv_events import Batch, Cleared, KvEvent, Stored, Tier
from predictor.prompt import BlockHasher, HashFamily, Namespace, Prompt, as_tokens

SIZE = 16
FAMILY = HashFamily(SIZE)
# A first turn of five blocks and a bit, an answer of 30 tokens, and what the caller says next.
ASKED = list(range(1000, 1088))
ANSWER = list(range(2000, 2030))
NEXT = [*ASKED, *ANSWER, *range(3000, 3040)]


class Chat:
    """One conversation with one engine, which has not been heard to announce anything unless `tell` says so."""

    def __init__(self, num_gpu_blocks: int | None = 1000) -> None:
        rng = np.random.default_rng(1)
        self.hasher = BlockHasher(rng)
        self.fleet = Fleet([PoolPolicy("m")], self.hasher, rng)
        self.fleet.join("m", WorkerSpec("w", "10.0.0.1:8000", Settings(SIZE, num_gpu_blocks)))
        self.asked = 0

    def ask(
        self, ids: list[int], output_tokens: int | None = 1, served: bool = True, announced: Sequence[KvEvent] = ()
    ) -> int:
        """A whole request, of which so much was announced before its end; the tokens that it was credited with."""
        self.asked += 1
        name = str(self.asked)
        hashes = self.hasher.prompt_hashes(as_tokens(ids), FAMILY, Namespace())
        grant = self.fleet.place("m", Prompt(len(ids), True, {FAMILY: hashes}), Wish(name, 0.0), 0.0)
        assert isinstance(grant, Grant)
        if served:
            self.fleet.first_token(name, None, 1.0)
        for event in announced:
            self.tell(event)
        self.fleet.finish(name, Usage(len(ids), None, output_tokens), 2.0)
        return grant.ticket.forecast.cached_tokens

    def tell(self, *events: KvEvent) -> None:
        self.fleet.apply("w", Batch(None, events, None))

    def others(self, blocks: int, first: int) -> None:
        tokens = as_tokens([first + at for at in range(blocks * SIZE)])
        self.tell(Stored(tuple(range(first, first + blocks)), None, tokens, SIZE, Tier.DEVICE, None, None))


@pytest.fixture
def chat() -> Chat:
    chat = Chat()
    assert chat.ask(ASKED, len(ANSWER)) == 0
    return chat


def test_the_next_turn_is_credited_with_prompt_and_answer(chat: Chat) -> None:
    # 118 tokens, of which the last was not computed: seven blocks.
    assert chat.ask(NEXT) == 7 * SIZE


def test_so_is_the_same_prompt_with_all_but_its_last_token(chat: Chat) -> None:
    assert chat.ask(ASKED) == 5 * SIZE
    assert chat.ask(ASKED[:80]) == 4 * SIZE


def test_of_an_answer_that_was_announced_only_that_counts_which_the_next_turn_has_as_well() -> None:
    told = [
        Stored((1, 2, 3, 4, 5), None, as_tokens(ASKED[:80]), SIZE, Tier.DEVICE, None, None),
        Stored((6,), 5, as_tokens([*ASKED[80:], *ANSWER[:8]]), SIZE, Tier.DEVICE, None, None),
        Stored((7,), 6, as_tokens(ANSWER[8:24]), SIZE, Tier.DEVICE, None, None),
    ]
    # The same words need not become the same tokens again.
    other_words = [*ASKED, *ANSWER[:8], *range(8000, 8060)]
    for announced, credited in ((told, 6), (told[:2], 7)):
        chat = Chat()
        chat.ask(ASKED, len(ANSWER), announced=announced)
        assert chat.ask(other_words) == credited * SIZE


def test_what_branches_off_is_credited_as_far_as_it_goes(chat: Chat) -> None:
    assert chat.ask([*ASKED[:50], *range(5000, 5090)]) == 3 * SIZE


def test_who_leaves_the_answer_out_is_not_credited_with_it(chat: Chat) -> None:
    assert chat.ask([*ASKED, 7]) == 5 * SIZE


def test_an_answer_of_which_more_is_missing_was_not_taken_over_as_it_was() -> None:
    chat = Chat()
    chat.ask(ASKED, 400)
    # A template has left out what the model thought: this is longer all the same.
    assert chat.ask([*ASKED, *range(7000, 7600)]) == 5 * SIZE


def test_of_an_answer_to_a_prompt_whose_blocks_all_are_others_as_well_nothing_is_credited_to_them() -> None:
    chat = Chat()
    chat.ask(ASKED)
    # Both have the first one's five blocks, say a system prompt, and differ in what is no full block yet.
    chat.ask([*ASKED[:80], *range(7000, 7008)], len(ANSWER))
    assert chat.ask([*ASKED[:80], *range(9000, 9060)]) == 5 * SIZE


def test_who_was_not_served_has_left_nothing_for_certain() -> None:
    chat = Chat()
    chat.ask(ASKED, len(ANSWER), served=False)
    assert chat.ask(NEXT) == 0


def test_without_a_word_on_its_length_nothing_is_known_of_an_answer() -> None:
    chat = Chat()
    chat.ask(ASKED, None)
    assert chat.ask(NEXT) == 0


def test_once_all_must_have_been_announced_what_was_announced_counts(chat: Chat) -> None:
    for number in range(7):
        chat.others(1, 10_000 + 100 * number)
    assert chat.ask(NEXT) == 7 * SIZE
    for number in range(8):
        chat.others(1, 20_000 + 100 * number)
    assert chat.ask(NEXT) == 0


def test_nothing_is_taken_for_there_that_may_have_been_evicted_since() -> None:
    chat = Chat(num_gpu_blocks=400)
    chat.ask(ASKED, len(ANSWER))
    chat.others(51, 10_000)
    assert chat.ask(NEXT) == 0


@pytest.mark.parametrize("how", ["cleared", "restarted", "not trusted"])
def test_nothing_is_there_of_a_cache_that_was_emptied_or_that_nobody_knows(chat: Chat, how: str) -> None:
    if how == "cleared":
        chat.tell(Cleared())
    elif how == "restarted":
        chat.fleet.clear("w")
    else:
        chat.fleet.set_trust("w", Trust.PARTIAL, 0.5)
    assert chat.ask(NEXT) == 0


def test_few_are_remembered() -> None:
    ended = JustEnded()
    for number in range(100):
        ended.add(str(number), np.array([number + 1], np.uint64), SIZE, 0, FAMILY)
    assert len(ended) == 8
    assert ended.run(np.array([100], np.uint64), SIZE, 0) == 1
    assert ended.run(np.array([1], np.uint64), SIZE, 0) == 0
