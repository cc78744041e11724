"""What callers may ask of us, and what is said when they ask wrongly."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.wishes import BadWish, queue_wait_bound

HEADER, FIELD = "x-max-queue-wait-s", "max_queue_wait_s"


def refused(header: str | None, field: object) -> BadWish:
    with pytest.raises(BadWish) as caught:
        queue_wait_bound(header, field)
    return caught.value


@pytest.mark.parametrize("field", [5, 5.0, 42.25, 300, 300.0])
def test_a_field_in_range_is_the_bound(field: float) -> None:
    assert queue_wait_bound(None, field) == float(field)


@pytest.mark.parametrize(("header", "bound_s"), [("5", 5.0), ("42.25", 42.25), (" 300 ", 300.0), ("3e1", 30.0)])
def test_a_header_in_range_is_the_bound(header: str, bound_s: float) -> None:
    assert queue_wait_bound(header, None) == bound_s


def test_nothing_asked_is_no_bound() -> None:
    assert queue_wait_bound(None, None) is None


def test_the_header_wins_over_the_field_even_over_a_bad_one() -> None:
    assert queue_wait_bound("10", 20) == 10.0
    assert queue_wait_bound("10", "junk") == 10.0
    assert refused("junk", 20).field == HEADER


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (4.99, "4.99"),
        (300.01, "300.01"),
        (0, "0"),
        (-10, "-10"),
        (10**40, "1000000"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (True, "True"),
        (False, "False"),
        ("10", "'10'"),
        ("", "''"),
        ([10], "a list"),
        ({"s": 10}, "a dict"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_the_range(value: object, shown: str) -> None:
    fault = refused(None, value)
    assert fault.field == FIELD
    text = str(fault)
    assert text.startswith(f"{FIELD} must be a number of seconds from 5 to 300; got ")
    assert shown in text


@pytest.mark.parametrize("header", ["", "x", "4.99", "300.01", "nan", "inf", "-inf", "1e999", "10s", "5,10", "true"])
def test_a_bad_header_is_named_with_its_value_and_the_range(header: str) -> None:
    fault = refused(header, None)
    assert fault.field == HEADER
    assert str(fault) == f"{HEADER} must be a number of seconds from 5 to 300; got {header!r}"


def test_long_values_are_cut() -> None:
    assert len(str(refused(None, "x" * 10_000))) < 200
    assert len(str(refused("9" * 10_000, None))) < 200


def test_a_list_nested_to_the_limit_is_still_a_bad_wish() -> None:
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert "a list" in str(refused(None, nested))
    while nested:
        nested = nested.pop()  # type: ignore[assignment]  # unwound by hand: freeing it at once could recurse


@given(
    st.none() | st.text(max_size=12),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2),
)
def test_whatever_is_asked_there_is_a_bound_in_range_or_a_bad_wish(header: str | None, field: object) -> None:
    try:
        bound_s = queue_wait_bound(header, field)
    except BadWish:
        return
    assert bound_s is None or 5.0 <= bound_s <= 300.0
