"""The pool: one producer, every page accounted for, idle pages reclaimed oldest first and their prefix last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.pages import PagePool


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(4, on_reclaim=lambda page: None)
    first = pool.take(3)
    assert len({*first}) == 3 and pool.num_free == 1
    with pytest.raises(AssertionError):
        pool.take(2)
    pool.release(first)
    assert pool.num_free == 4
    with pytest.raises(AssertionError):
        pool.release(first)


def test_idle_pages_count_as_free_and_the_tail_of_a_prefix_goes_first() -> None:
    reclaimed: list[int] = []
    pool = PagePool(4, on_reclaim=reclaimed.append)
    chain = pool.take(4)
    for page in chain:
        pool.publish(page)
    pool.release(chain)
    assert pool.num_free == 4
    assert pool.take(1) == chain[3:] and reclaimed == chain[3:]
    pool.share(chain[:1])
    assert pool.num_free == 2 and pool.num_idle(chain[:3]) == 2


def test_an_unpublished_page_keeps_its_holder_and_is_plainly_free_afterwards() -> None:
    reclaimed: list[int] = []
    pool = PagePool(2, on_reclaim=reclaimed.append)
    held, idle = pool.take(1), pool.take(1)
    for page in held + idle:
        pool.publish(page)
    pool.release(idle)
    for page in held + idle:
        pool.unpublish(page)
    pool.check([held])
    pool.release(held)
    pool.take(2)
    assert not reclaimed


@given(
    st.lists(
        st.tuples(st.sampled_from(["take", "share", "release", "publish", "reset"]), st.integers(0, 9)), max_size=60
    )
)
def test_no_sequence_of_uses_loses_a_page(uses: list[tuple[str, int]]) -> None:
    published: list[int] = []
    pool = PagePool(6, on_reclaim=published.remove)
    held: list[list[int]] = []
    for use, number in uses:
        if use == "take" and number % 3 < pool.num_free:
            held.append(pool.take(number % 3))
        elif use == "share" and published:
            page = published[number % len(published)]
            held.append([page])
            pool.share([page])
        elif use == "release" and held:
            pool.release(held.pop(number % len(held)))
        elif use == "publish" and held and held[-1] and held[-1][0] not in published:
            published.append(held[-1][0])
            pool.publish(held[-1][0])
        elif use == "reset":
            for page in published:
                pool.unpublish(page)
            published.clear()
        pool.check(held)
