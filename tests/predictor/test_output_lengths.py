"""How much requests generate: what ended, what still decodes and what was cut off, in one curve."""

import itertools
import sys
import time
import timeit
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.length_class import LengthClass
from predictor.memory import LengthRow
from predictor.output_lengths import Going, LengthCurve, OutputLengths, Running, draws

NOBODY = Running


def going_on(*tokens: int, since: int = 0) -> Running:
    """Requests that have generated so much, booked one after the other from a number on."""
    return Running([Going(some, since + place) for place, some in enumerate(tokens)])


def curve_of(ended: list[int], running: list[int] | None = None, max_tokens: int | None = None) -> LengthCurve:
    lengths = OutputLengths(256)
    for tokens in ended:
        lengths.ended(tokens, max_tokens)
    return lengths.at(lambda: going_on(*(running or [])), 0.0).curve()


# The curve


def test_of_many_that_have_ended_the_curve_is_the_share_that_was_longer() -> None:
    curve = curve_of(list(range(1, 1001)))
    for tokens in (1, 100, 500, 900, 999):
        assert curve.longer(tokens) == pytest.approx(1 - tokens / 1000, abs=0.005)


def test_those_that_still_decode_count_as_longer_than_what_they_have() -> None:
    # Half ended after 100 tokens; the others have 300 and go on. By the ended alone, nobody would pass 100.
    curve = curve_of([100] * 500, [300] * 500)
    assert curve.longer(100) == pytest.approx(0.5, abs=0.01)
    assert curve.longer(299) == pytest.approx(0.5, abs=0.01)
    assert curve_of([100] * 500).longer(100) < 0.01


def test_one_that_was_cut_off_says_that_outputs_are_at_least_so_long() -> None:
    lengths = OutputLengths(256)
    for _ in range(300):
        lengths.ended(50, max_tokens=1000)
        lengths.ended(64, max_tokens=64)
    assert lengths.at(NOBODY, 0.0).curve().longer(63) == pytest.approx(0.5, abs=0.02)


def test_a_wave_of_which_only_the_short_have_ended_is_not_taken_for_short() -> None:
    # The truth is uniform between 300 and 1500; 200 began together and have been running for 600 tokens.
    rng = np.random.default_rng(1)
    truth = rng.integers(300, 1501, 200)
    ended = [int(tokens) for tokens in truth if tokens <= 600]
    curve = curve_of(ended, [600] * (200 - len(ended)))
    rest = [curve.length(float(rng.random()), 600) for _ in range(4000)]
    assert np.mean(truth > 600) == pytest.approx(curve.longer(600), abs=0.03)
    # Nobody has been seen to end later, so that their end is a guess; but none that is here already.
    assert min(rest) > 600
    assert np.mean(rest) > 700


def test_before_anything_has_ended_half_are_taken_to_be_longer_than_typical() -> None:
    curve = OutputLengths(400).at(NOBODY, 0.0).curve()
    assert curve.longer(400) == pytest.approx(0.5, abs=0.07)
    rng = np.random.default_rng(2)
    outputs = [curve.length(float(rng.random())) for _ in range(4000)]
    assert np.median(outputs) == pytest.approx(400, rel=0.2)
    assert np.quantile(outputs, 0.99) < 12 * 400


def test_ten_ends_outweigh_the_guess() -> None:
    assert curve_of([2000] * 20).longer(1000) > 0.8


# Draws


@given(
    ended=st.lists(st.integers(1, 5000), max_size=60),
    running=st.lists(st.integers(0, 5000), max_size=30),
    draw=st.floats(0, 1, exclude_max=True),
    generated=st.integers(0, 20_000),
    more=st.integers(0, 5000),
)
def test_a_request_goes_on_by_one_token_at_least_and_never_by_less_for_having_more(
    ended: list[int], running: list[int], draw: float, generated: int, more: int
) -> None:
    curve = curve_of(ended, running)
    assert list(curve.lengths) == sorted(set(curve.lengths))
    assert list(curve.survival) == sorted(curve.survival, reverse=True)
    now, later = curve.length(draw, generated), curve.length(draw, generated + more)
    assert now > generated
    assert later >= now
    assert 0.0 <= curve.longer(generated + more) <= curve.longer(generated) <= 1.0


@given(draw=st.floats(0, 1, exclude_max=True), generated=st.integers(0, 100), limit=st.integers(1, 300))
def test_nobody_generates_more_than_was_asked_for(draw: float, generated: int, limit: int) -> None:
    assert 1 <= curve_of([1000, 2000], [50]).length(draw, generated, limit) <= limit


def test_draws_follow_the_curve() -> None:
    rng = np.random.default_rng(3)
    truth = rng.lognormal(5.5, 0.9, 2000).astype(int) + 1
    curve = curve_of(truth.tolist())
    outputs = np.array([curve.length(float(rng.random())) for _ in range(5000)])
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(outputs, share) == pytest.approx(np.quantile(truth, share), rel=0.1)
    longer = truth[truth > 400]
    rest = np.array([curve.length(float(rng.random()), 400) for _ in range(5000)])
    assert np.quantile(rest, 0.5) == pytest.approx(np.quantile(longer, 0.5), rel=0.1)


def test_the_draws_of_some_futures_are_spread_evenly_over_them() -> None:
    rng = np.random.default_rng(4)
    for _ in range(50):
        found = draws(rng, 5)
        assert sorted(int(5 * value) for value in found) == [0, 1, 2, 3, 4]
    assert len({draws(rng, 5) for _ in range(20)}) == 20


# Keeping up


def test_only_the_newest_two_thousand_ends_count() -> None:
    lengths = OutputLengths(256)
    for tokens in (1000, 100):
        for _ in range(2000):
            lengths.ended(tokens, None)
    assert len(lengths) == 2000
    assert lengths.at(NOBODY, 0.0).curve().longer(100) < 0.01


def test_a_curve_is_drawn_anew_only_when_enough_is_new() -> None:
    lengths, asked = OutputLengths(256), []

    def running() -> Running:
        asked.append(1)
        return Running()

    for number in range(1000):
        lengths.ended(number + 1, None)
    first = lengths.at(running, 0.0).curve()
    assert lengths.at(running, 10.0).curve() is first, "nothing is new"
    for _ in range(70):
        lengths.ended(5, None)
    assert lengths.at(running, 15.0).curve() is first, "too soon"
    assert lengths.at(running, 20.0).curve() is not first
    assert len(asked) == 3


def test_while_few_have_ended_those_that_run_are_looked_at_every_second() -> None:
    lengths = OutputLengths(256)
    before = lengths.at(lambda: going_on(10), 0.0).curve()
    assert lengths.at(lambda: going_on(*[900] * 50), 0.5).curve() is before
    assert lengths.at(lambda: going_on(*[900] * 50), 1.0).curve().longer(800) > 0.9 > before.longer(800)


@pytest.mark.parametrize("tokens", [0, -1, (1 << 20) + 1])
def test_lengths_that_cannot_be_are_left_out(tokens: int) -> None:
    lengths = OutputLengths(256)
    lengths.ended(tokens, None)
    assert len(lengths) == 0


def test_what_was_learned_can_be_carried_on_and_newer_ends_stay_newest() -> None:
    old = OutputLengths(256)
    for tokens in range(1, 300):
        old.ended(tokens, 250)
    new = OutputLengths(256)
    new.ended(777, None)
    new.recall(old.memory())
    assert new.memory() == (*old.memory(), LengthRow(777, True))
    assert new.at(NOBODY, 0.0).curve().longer(100) == pytest.approx(old.at(NOBODY, 0.0).curve().longer(100), abs=0.01)


def test_a_draw_costs_microseconds_and_a_curve_a_millisecond() -> None:
    rng = np.random.default_rng(5)
    lengths = OutputLengths(256)
    for tokens in rng.lognormal(5.5, 0.9, 2000):
        lengths.ended(int(tokens) + 1, None)
    curve = lengths.at(lambda: going_on(*[100] * 500), 0.0).curve()
    draw_s = timeit.timeit(lambda: curve.length(0.7, 100), number=2000) / 2000
    fresh_s = min(timeit.repeat(lambda: lengths.recall([]), number=1, repeat=5))
    sys.stdout.write(f"\none draw {draw_s * 1e6:.1f} us, one curve {fresh_s * 1e3:.2f} ms")
    assert draw_s < 100e-6
    assert fresh_s < 0.015


# Another kind


def test_outputs_of_another_kind_are_noticed_before_the_first_of_them_have_ended() -> None:
    lengths, second = OutputLengths(256), itertools.count()
    for number in range(1, 65):
        lengths.ended(20, None, number)
        lengths.at(NOBODY, float(next(second))).curve()
    before = lengths.at(NOBODY, float(next(second))).curve()
    assert before.longer(20) < 0.1
    # Those who began later have gone beyond what anybody has had, and one has ended early.
    lengths.ended(3, None, 100)
    still = lengths.at(lambda: going_on(*[24] * 5, since=101), float(next(second))).curve()
    assert still.longer(20) < 0.3, "that may be chance"
    now = lengths.at(lambda: going_on(*[24] * 40, since=101), float(next(second))).curve()
    assert now.longer(20) > 0.7
    assert lengths.memory() == (LengthRow(3, True),), "what was before says nothing any more"
    # Who was booked before does not count when it ends, either.
    lengths.ended(20, None, 60)
    assert len(lengths) == 1


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_after_a_change_of_traffic_a_few_hundred_requests_suffice_where_two_thousand_are_remembered(
    factor: float,
) -> None:
    def sample(rng: np.random.Generator, number: int) -> float:
        return float(rng.lognormal(4.8, 0.9)) * (factor if number > 2000 else 1.0)

    lengths, forgotten = played(sample, 2700, seed=7)
    assert len(forgotten) == 1
    assert 1700 < forgotten[0] <= 2450, "the number of the last one that is forgotten"
    median = lengths.at(NOBODY, 0.0).curve().length(0.5, 0)  # as it was drawn last
    assert median == pytest.approx(factor * np.exp(4.8), rel=0.25)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("kind", ["spread", "memoryless", "two kinds", "alike"])
def test_as_long_as_traffic_stays_as_it_is_nothing_is_forgotten(kind: str, at_once: bool) -> None:
    def sample(rng: np.random.Generator, number: int) -> float:
        match kind:
            case "spread":
                return float(rng.lognormal(4.5, 0.9))
            case "memoryless":
                return float(rng.exponential(120))
            case "two kinds":
                return float(rng.integers(1, 12) if rng.random() < 0.4 else rng.integers(150, 300))
        return float(rng.integers(100, 180))

    for seed in (8, 9):
        lengths, forgotten = played(sample, 2000, seed, at_once)
        assert not forgotten, f"seed {seed}"
        assert len(lengths) > 1700


def played(
    sample: Callable[[np.random.Generator, int], float], count: int, seed: int, at_once: bool = False
) -> tuple[OutputLengths, list[int]]:
    """So many requests on 200 slots, a token a step of 50 ms each; the numbers up to which was forgotten. `at_once`:
    all slots begin together."""
    rng, lengths = np.random.default_rng(seed), OutputLengths(256)
    live: list[tuple[int, int, int]] = []  # number, step of its beginning, length
    number = step = 0
    forgotten: list[int] = []
    while number < count:
        step += 1
        for _ in range((200 if len(live) < 5 else 0) if at_once else int(rng.poisson(1.2)) if len(live) < 200 else 0):
            number += 1
            live.append((number, step, 1 + int(sample(rng, number))))
        for one, began, length in live:
            if step - began == length:
                lengths.ended(length, None, one)
        live = [one for one in live if step - one[1] < one[2]]
        if step % 20 == 0:
            first = min((int(end.number) for end in lengths._ended), default=1)
            going = Running([Going(step - began, one) for one, began, _ in live])
            lengths.at(lambda known=going: known, step * 0.05).curve()  # type: ignore[misc]
            if len(lengths._ended) and min(end.number for end in lengths._ended) > first + 100:
                forgotten.append(lengths._of_before[None])
    return lengths, forgotten


def test_where_a_few_have_ended_soon_the_others_are_not_taken_to_end_as_soon() -> None:
    # A sixth of Mooncake's answers are of some words, and half of more than 180 tokens: this is what shows of them when
    # nobody has got beyond 46.
    rng = np.random.default_rng(10)
    curve = curve_of(rng.integers(1, 24, 23).tolist(), rng.integers(2, 46, 182).tolist())
    assert 90 < curve.length(0.5, 0) < 260


# Before anybody has ended


@pytest.mark.parametrize(("shortest", "longest", "slots"), [(1500, 6000, 128), (300, 1500, 25)])
def test_of_a_wave_that_nobody_has_left_the_length_is_foreseen(shortest: int, longest: int, slots: int) -> None:
    # Told that 256 are typical, and nothing more than that nobody has ended yet.
    truth = np.random.default_rng(6).integers(shortest, longest, 1000)
    for oldest in (int(0.6 * shortest), int(0.9 * shortest)):
        curve = curve_of([], np.linspace(1, oldest, slots).astype(int).tolist())
        for share in (0.25, 0.5, 0.75):
            assert curve.length(share, oldest) == pytest.approx(np.quantile(truth, share), rel=0.4)


def test_one_that_goes_on_says_less_than_many() -> None:
    one, many = (curve_of([], [400] * count).length(0.5, 0) for count in (1, 100))
    assert 400 < one < 800 < 1600 < many


def test_what_is_only_counted_lengthens_no_guess() -> None:
    # By steps of a length that nobody knows yet, far too much may have been counted.
    curve = OutputLengths(256).at(lambda: Running(counted=[Going(400)] * 100), 0.0).curve()
    assert curve.length(0.5, 0) < 800
    assert curve.longer(399) > 0.9


# Told apart by what is known when they come

CHAT, DOCUMENT = LengthClass.of(120, None), LengthClass.of(20_000, None)


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "expected"),
    [
        (1, None, (0, 0)),
        (255, None, (0, 0)),
        (256, None, (1, 0)),
        (1023, 63, (1, 1)),
        (1024, 64, (2, 2)),
        (300_000, 1, (6, 1)),
        (16_384, 4096, (4, 5)),
    ],
)
def test_classes_are_powers_of_four(prompt_tokens: int, max_tokens: int | None, expected: tuple[int, int]) -> None:
    assert LengthClass.of(prompt_tokens, max_tokens) == expected


def test_outputs_that_go_with_the_prompt_are_foreseen_by_it() -> None:
    rng = np.random.default_rng(11)
    lengths = OutputLengths(256)
    for _ in range(200):
        lengths.ended(int(rng.integers(1500, 6000)), None, of=CHAT)
        lengths.ended(int(rng.integers(20, 600)), None, of=DOCUMENT)
    known = lengths.at(NOBODY, 0.0)
    assert known.curve(CHAT).longer(600) > 0.9
    assert known.curve(DOCUMENT).longer(600) < 0.1
    assert known.curve().longer(600) == pytest.approx(0.5, abs=0.02)


def test_outputs_that_go_with_the_limit_are_foreseen_by_it() -> None:
    lengths, short, long = OutputLengths(256), LengthClass.of(500, 32), LengthClass.of(500, 8192)
    for number in range(100):
        lengths.ended(5, 32, of=short)
        lengths.ended(2000 + number, 8192, of=long)
    assert lengths.at(NOBODY, 0.0).curve(short).longer(5) < 0.2
    assert lengths.at(NOBODY, 0.0).curve(long).longer(1999) > 0.8


def test_a_class_is_told_by_those_that_go_on_as_well() -> None:
    # Of a hundred chats none has ended; by the curve of documents, all should have.
    lengths = OutputLengths(256)
    for number in range(200):
        lengths.ended(20 + number, None, of=DOCUMENT)
    known = lengths.at(lambda: Running([Going(300, 0, CHAT)] * 100), 0.0)
    assert known.curve(CHAT).longer(290) > 0.85
    assert known.curve(DOCUMENT).longer(290) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_where_prompts_tell_nothing_each_class_goes_by_all(seed: int) -> None:
    lengths = OutputLengths(256)
    for number, tokens in enumerate(np.random.default_rng(seed).lognormal(5.5, 0.9, 600)):
        lengths.ended(int(tokens) + 1, None, of=(CHAT, DOCUMENT)[number % 12 == 0])
    every, few = (lengths.at(NOBODY, 0.0).curve(of) for of in (None, DOCUMENT))
    for share in (0.1, 0.5, 0.9):
        assert few.length(share) == pytest.approx(every.length(share), rel=0.12)


def test_a_class_of_which_nobody_has_been_seen_goes_by_all() -> None:
    lengths = OutputLengths(256)
    for number in range(100):
        lengths.ended(100 + number, None, of=CHAT)
    assert lengths.at(NOBODY, 0.0).curve(DOCUMENT) == lengths.at(NOBODY, 0.0).curve()


def test_two_that_were_long_do_not_make_a_class() -> None:
    rng = np.random.default_rng(12)
    lengths = OutputLengths(256)
    for _ in range(300):
        lengths.ended(int(rng.integers(20, 600)), None, of=CHAT)
    for _ in range(2):
        lengths.ended(590, None, of=DOCUMENT)
    assert lengths.at(NOBODY, 0.0).curve(DOCUMENT).longer(300) < 0.7


def test_a_memory_of_before_there_were_classes_is_read() -> None:
    raw = msgspec.json.encode([(300, True), (64, False)])
    new = OutputLengths(256)
    new.recall(msgspec.json.decode(raw, type=tuple[LengthRow, ...]))
    assert new.memory() == (LengthRow(300, True), LengthRow(64, False))


def test_what_is_remembered_keeps_its_class() -> None:
    old, new = OutputLengths(256), OutputLengths(256)
    for number in range(100):
        old.ended(2000 + number, None, of=CHAT)
        old.ended(20 + number, None, of=DOCUMENT)
    new.recall(msgspec.json.decode(msgspec.json.encode(old.memory()), type=tuple[LengthRow, ...]))
    for of in (None, CHAT, DOCUMENT):
        assert new.at(NOBODY, 0.0).curve(of) == old.at(NOBODY, 0.0).curve(of)


def test_curves_of_a_dozen_classes_cost_milliseconds() -> None:
    rng = np.random.default_rng(5)
    lengths, classes = OutputLengths(256), [LengthClass(number // 2, number % 2) for number in range(12)]
    for number, tokens in enumerate(rng.lognormal(5.5, 0.9, 2000)):
        lengths.ended(int(tokens) + 1, None, number, classes[number % 12])

    def look() -> None:
        lengths.recall([])  # so that all are drawn anew
        for of in classes:
            lengths.at(NOBODY, 0.0).curve(of)

    took_s = min(timeit.repeat(look, timer=time.process_time, number=1, repeat=5))
    sys.stdout.write(f"\ntwelve curves {took_s * 1e3:.2f} ms")
    assert took_s < 0.03


def test_what_is_asked_for_just_now_is_forgotten_of_no_class_that_is_as_ever() -> None:
    # A day of chats, and then an hour of documents only: briefly answered, which is no news about chats.
    rng, lengths, number = np.random.default_rng(16), OutputLengths(256), 0
    for of, least, most, count in ((CHAT, 1500, 6000, 200), (DOCUMENT, 20, 600, 200)):
        for _ in range(count):
            number += 1
            lengths.ended(int(rng.integers(least, most)), None, number, of)
            lengths.at(NOBODY, 10.0 * number)
    known = lengths.at(lambda: Running([Going(has, 1000 + has, CHAT) for has in range(500, 0, -4)]), 10.0 * number + 10)
    assert known.curve(CHAT).longer(600) > 0.9
    assert known.curve(DOCUMENT).longer(600) < 0.1


def test_of_a_class_that_has_changed_and_of_no_other_what_was_before_is_forgotten() -> None:
    rng, lengths, number = np.random.default_rng(17), OutputLengths(256), 0
    for scale in (1, 10):
        for _ in range(200):
            number += 2
            lengths.ended(scale * int(rng.integers(100, 200)), None, number, CHAT)
            lengths.ended(int(rng.integers(20, 60)), None, number + 1, DOCUMENT)
            lengths.at(NOBODY, 10.0 * number)
    known = lengths.at(NOBODY, 10.0 * number + 10)
    assert known.curve(CHAT).longer(900) > 0.9
    assert known.curve(DOCUMENT).longer(60) < 0.1
    assert sum(row.tokens < 100 for row in lengths.memory()) == 400, "documents are as ever"
    assert sum(100 <= row.tokens < 300 for row in lengths.memory()) < 100
