"""The index: exact keys, parents first, and never a key under a forgotten parent."""

from perdure.core.prefix import PrefixIndex


def publish(index: PrefixIndex, tokens: list[int], pages: list[int]) -> list[bool]:
    parent, new = index.root, []
    for i, page in enumerate(pages):
        parent, is_new = index.publish(parent, tokens[2 * i : 2 * i + 2], page)
        new.append(is_new)
    return new


def test_longest_published_prefix_within_the_limit() -> None:
    index = PrefixIndex(2)
    assert publish(index, [1, 2, 3, 4, 5, 6], [10, 11, 12]) == [True, True, True]
    assert index.match([1, 2, 3, 4, 9, 9], 6)[0] == [10, 11]
    assert index.match([1, 2, 3, 4, 5, 6], 5)[0] == [10, 11]
    assert index.match([1, 2, 3, 4, 5, 6], 1)[0] == []
    assert index.match([3, 4, 5, 6], 4)[0] == []


def test_the_first_to_publish_keeps_the_key_and_others_hang_under_it() -> None:
    index = PrefixIndex(2)
    publish(index, [1, 2, 3, 4], [10, 11])
    assert publish(index, [1, 2, 3, 4, 5, 6], [20, 21, 22]) == [False, False, True]
    assert index.match([1, 2, 3, 4, 5, 6], 6)[0] == [10, 11, 22]


def test_a_child_of_a_forgotten_page_is_never_found_even_if_its_parent_returns() -> None:
    index = PrefixIndex(2)
    publish(index, [1, 2, 3, 4], [10, 11])
    index.forget(10)
    assert index.match([1, 2, 3, 4], 4)[0] == []
    publish(index, [1, 2], [12])
    assert index.match([1, 2, 3, 4], 4)[0] == [12]


def test_clear_names_every_page() -> None:
    index = PrefixIndex(2)
    publish(index, [1, 2, 3, 4], [10, 11])
    assert sorted(index.clear()) == [10, 11]
    assert index.match([1, 2], 2)[0] == []
