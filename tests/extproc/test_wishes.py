"""What callers may ask of us, and what is said when they ask wrongly."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.exchange import Headers
from extproc.wishes import BadWish, Wishes, queue_wait_bound, read_wishes, waited_since
from predictor.admission import OnReject
from predictor.routing import Prefer

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


@pytest.mark.parametrize(
    "header",
    [
        *("", "x", "4.99", "300.01", "nan", "inf", "-inf", "1e999", "10s", "5,10", "true"),
        *("5_0", "+10", "١٠", "0x10", "1e", ".", "0" * 60 + "10"),
    ],
)
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


# Headers that steer


def wishes(**headers: str) -> Wishes:
    return read_wishes(Headers((name.replace("_", "-"), value) for name, value in headers.items()), None)


def bad(name: str, value: str) -> str:
    with pytest.raises(BadWish) as caught:
        read_wishes(Headers([(name, value)]), None)
    assert caught.value.field == name
    return str(caught.value)


def test_a_request_that_asks_for_nothing_gets_what_the_pool_does() -> None:
    assert read_wishes(Headers([("content-type", "application/json"), ("authorization", "Bearer k")]), None) == Wishes()


def test_everything_that_may_be_asked_for() -> None:
    asked = wishes(
        x_max_queue_wait_s="10",
        x_slo_ttft_ms="2500",
        x_headway_prefer="Cache",
        x_headway_on_reject=" fail ",
        x_headway_tenant="team-7",
    )
    assert asked == Wishes(10.0, 2.5, Prefer.CACHE, OnReject.FAIL, "team-7")


def test_llm_ds_newer_name_wins() -> None:
    assert wishes(x_slo_ttft_ms="1000", x_llm_d_slo_ttft_ms="2000").max_ttft_s == 2.0
    assert wishes(x_slo_ttft_ms="junk", x_llm_d_slo_ttft_ms="2000").max_ttft_s == 2.0


@pytest.mark.parametrize("name", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"])
@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "1e3", "3600001", "9" * 400, "soon", "nan", "\u0665"])
def test_a_bad_bound_on_the_first_token_is_named_with_its_value_and_the_range(name: str, value: str) -> None:
    told = bad(name, value)
    assert told.startswith(f"{name} must be a whole number of milliseconds from 1 to 3600000; got ")
    assert value[:20] in told


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("x-headway-prefer", "latency, balanced, cache"), ("x-headway-on-reject", "retry, fail")],
)
@pytest.mark.parametrize("value", ["", "fastest", "retry fail", "cache,latency"])
def test_a_bad_choice_is_named_with_its_value_and_what_there_is(name: str, allowed: str, value: str) -> None:
    assert bad(name, value) == f"{name} must be one of {allowed}; got {value!r}"


@pytest.mark.parametrize("value", ["", " ", "a b", "x" * 129, "caf\u00e9", "a\x00b"])
def test_a_bad_tenant_is_named_with_its_value_and_what_is_allowed(value: str) -> None:
    told = bad("x-headway-tenant", value)
    assert told.startswith("x-headway-tenant must be 1 to 128 visible ASCII characters without spaces; got ")
    assert len(told) < 200


def test_without_a_tenant_the_key_stands_for_it_as_a_hash_and_only_where_tenants_count() -> None:
    headers = [("authorization", "Bearer secret")]
    assert read_wishes(Headers(headers), None).tenant is None
    by_key = read_wishes(Headers(headers), None, by_tenant=True).tenant
    assert by_key is not None
    assert "secret" not in by_key
    assert by_key == read_wishes(Headers(headers), None, by_tenant=True).tenant
    assert by_key != read_wishes(Headers([("x-api-key", "other")]), None, by_tenant=True).tenant
    assert read_wishes(Headers([*headers, ("x-headway-tenant", "t")]), None, by_tenant=True).tenant == "t"


@pytest.mark.parametrize("name", ["x-session-id", "x-session-token", "x-claude-code-session-id", "x-session-affinity"])
def test_every_clients_word_for_a_session_is_understood_whatever_it_holds(name: str) -> None:
    one = read_wishes(Headers([(name, "s" * 10_000)]), None).session
    assert one is not None
    assert len(one) < 64
    assert one != read_wishes(Headers([(name, b"\xff\xfe")]), None).session
    assert read_wishes(Headers([(name, "")]), None).session is None


NOW = 1_790_000_000.0


@pytest.mark.parametrize(
    "start", ["1789999997.5", "t=1789999997.5", "1789999997500", "t=1789999997500000", "1789999997500000000"]
)
def test_every_common_form_of_a_requests_start_is_read(start: str) -> None:
    assert waited_since(start, NOW) == pytest.approx(2.5, abs=1e-3)


def test_a_gateways_clock_that_is_a_little_ahead_means_no_waiting() -> None:
    assert waited_since("1790000001", NOW) == 0.0


@pytest.mark.parametrize(
    "start", [None, "", "t=", "soon", "nan", "inf", "-1", "0", "1790000100", "1789990000", "1e400"]
)
def test_what_is_no_time_that_can_be_meant_counts_as_nothing_said(start: str | None) -> None:
    assert waited_since(start, NOW) is None


def test_the_start_is_believed_only_where_it_is_trusted() -> None:
    headers = Headers([("x-request-start", "t=1789999990")])
    assert read_wishes(headers, None).waited_before_s == 0.0
    assert read_wishes(headers, None, unix_s=NOW).waited_before_s == pytest.approx(10.0)


@given(st.text(max_size=30), st.floats(0, 1e12))
def test_whatever_the_start_it_is_a_wait_of_up_to_an_hour_or_nothing(start: str, unix_s: float) -> None:
    waited_s = waited_since(start, unix_s)
    assert waited_s is None or 0.0 <= waited_s <= 3600.0
