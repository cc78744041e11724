"""How much of a pool each tenant has been using."""

from hypothesis import given
from hypothesis import strategies as st

from predictor.fairness import TenantUse


def test_a_tenant_that_is_alone_may_use_it_all() -> None:
    use = TenantUse(60.0)
    use.add("a", 1e9, 0.0)
    assert not use.over_share("a", 1.0)
    assert not use.over_share("b", 1.0)


def test_more_than_an_equal_part_is_over_the_share() -> None:
    use = TenantUse(60.0)
    use.add("giant", 1000.0, 0.0)
    use.add("small", 10.0, 0.0)
    use.add("other", 20.0, 0.0)
    assert use.over_share("giant", 0.5)
    assert not use.over_share("small", 0.5)
    assert not use.over_share("other", 0.5)


def test_what_was_used_fades_and_who_is_gone_counts_no_more() -> None:
    use = TenantUse(10.0)
    use.add("giant", 1000.0, 0.0)
    use.add("small", 100.0, 50.0)  # the giant's are 31 by now
    assert use.over_share("small", 50.0)
    assert not use.over_share("giant", 50.0)
    use.add("small", 100.0, 200.0)
    assert not use.over_share("small", 200.0)
    assert len(use) == 1


@given(st.lists(st.tuples(st.text(max_size=3), st.floats(0, 1e6), st.floats(0, 100)), max_size=60))
def test_somebody_is_never_over_the_share_and_the_total_is_what_it_is_made_of(
    uses: list[tuple[str, float, float]],
) -> None:
    use, now_s = TenantUse(5.0), 0.0
    for tenant, tokens, later_s in uses:
        now_s += later_s
        use.add(tenant, tokens, now_s)
    names = {tenant for tenant, _, _ in uses}
    assert not names or not all(use.over_share(name, now_s) for name in names)


def test_a_flood_of_names_takes_no_more_memory_than_a_thousand() -> None:
    use = TenantUse(60.0)
    use.add("real", 1e6, 0.0)
    for number in range(5000):
        use.add(f"made up {number}", 1.0, 0.0)
    assert len(use) <= 1024
    assert use.over_share("real", 0.0)
