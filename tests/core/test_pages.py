"""The pool: one producer, every page accounted for, idle pages reclaimed oldest first and their prefix last."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.pages import PagePool
from perdure.core.prefix import Node, PrefixIndex


def pool_of(num_pages: int) -> tuple[PagePool, PrefixIndex]:
    index = PrefixIndex(1)
    return PagePool(num_pages, index), index


def publish(index: PrefixIndex, tokens: list[int], pages: list[int], salt: str | None = None) -> list[Node]:
    """A path of these tokens, one a page."""
    path: list[Node] = []
    for token, page in zip(tokens, pages, strict=True):
        path.append(index.publish(path[-1] if path else index.root(salt), [token], page))
    return path


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool, _ = pool_of(4)
    first = pool.take(3)
    assert len({*first}) == 3 and pool.num_free == 1
    with pytest.raises(AssertionError):
        pool.take(2)
    pool.release(first)
    assert pool.num_free == 4
    with pytest.raises(AssertionError):
        pool.release(first)


def test_idle_pages_count_as_free_and_the_tail_of_a_prefix_goes_first() -> None:
    pool, index = pool_of(4)
    chain = pool.take(4)
    publish(index, [1, 2, 3, 4], chain)
    pool.release(chain)
    assert pool.num_free == 4
    assert pool.take(1) == chain[3:] and chain[3] not in index
    pool.share(chain[:1])
    assert pool.num_free == 2 and pool.num_idle(chain[:3]) == 2


def test_a_page_that_is_named_no_more_keeps_its_holder_and_is_plainly_free_afterwards() -> None:
    pool, index = pool_of(2)
    held, idle = pool.take(1), pool.take(1)
    publish(index, [1], held)
    publish(index, [2], idle)
    pool.release(idle)
    pool.forget_all()
    pool.check([held])
    pool.release(held)
    assert sorted(pool.unowned()) == [0, 1]


def test_whoever_is_found_through_a_page_is_older_than_it_in_whatever_order_they_come_back() -> None:
    """One request publishes the beginning, another what follows; the second ends last, long after the first."""
    pool, index = pool_of(6)
    first, second, other = pool.take(2), pool.take(3), pool.take(1)
    publish(index, [1, 2], first)
    publish(index, [1, 2, 3], second)  # the first two stay private
    publish(index, [9], other)
    pool.release(first)
    pool.release(other)
    assert [index.publish(index.root(None), [9], 0).page] == other
    pool.release(second)
    pool.check([])
    order = [pool.take(1)[0] for _ in range(6)]
    assert order[2:] == [*other, second[2], first[1], first[0]]


def test_a_page_under_a_reclaimed_one_is_named_no_more() -> None:
    """Its holder computed the beginning a second time, so it does not hold what the index names there."""
    pool, index = pool_of(4)
    first, second = pool.take(1), pool.take(2)
    publish(index, [1], first)
    path = publish(index, [1, 2], second)
    pool.release(first)
    pool.take(2)
    assert all(node.is_gone for node in path) and not len(index)
    index.check()
    pool.release(second)
    assert sorted(pool.unowned()) == sorted(second)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "begin", "share", "release", "publish", "publish", "reset"]),
            st.integers(0, 9),
            st.lists(st.integers(0, 1), min_size=4, max_size=4),
        ),
        max_size=60,
    )
)
def test_no_sequence_of_uses_loses_a_page(uses: list[tuple[str, int, list[int]]]) -> None:
    """Holders of random prompts over two tokens publish what they hold, as far as they like and in any order."""
    pool, index = pool_of(8)
    held: list[tuple[list[int], list[int], list[Node]]] = []
    for use, number, tokens in uses:
        if use == "take" and number % 5 <= pool.num_free:
            held.append((tokens, pool.take(number % 5), []))
        elif use == "begin":
            path: list[Node] = []
            index.extend(path, index.root(None), tokens, 4)
            pages = [node.page for node in path]
            if len(pages) + pool.num_idle(pages) <= pool.num_free:
                pool.share(pages)
                held.append((tokens, pages + pool.take(4 - len(pages)) if pool.num_free >= 4 else pages, path))
        elif use == "share" and held:
            tokens, pages, _ = held[number % len(held)]
            pool.share(pages)
            held.append((tokens, list(pages), []))
        elif use == "release" and held:
            pool.release(held.pop(number % len(held))[1])
        elif use == "publish" and held:
            tokens, pages, path = held[number % len(held)]
            while path and path[-1].is_gone:
                path.pop()
            for at in range(len(path), min(len(pages), 1 + number % 4)):
                parent = path[-1] if path else index.root(None)
                if pages[at] in index and index._nodes.get((parent, (tokens[at],))) is None:
                    break  # shared with somebody who published it
                path.append(index.publish(parent, [tokens[at]], pages[at]))
        elif use == "reset":
            pool.forget_all()
        index.check()
        pool.check([pages for _, pages, _ in held])
