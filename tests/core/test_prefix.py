"""The index: exact keys, parents first, roots for salts and weights, and no key that cannot be found."""

from perdure.core.prefix import Node, PrefixIndex


def publish(index: PrefixIndex, tokens: list[int], pages: list[int], salt: str | None = None) -> list[Node]:
    path: list[Node] = []
    for at, page in enumerate(pages):
        path.append(index.publish(path[-1] if path else index.root(salt), tokens[2 * at : 2 * at + 2], page))
    return path


def found(index: PrefixIndex, tokens: list[int], end: int, salt: str | None = None) -> list[int]:
    path: list[Node] = []
    index.extend(path, index.root(salt), tokens, end)
    return [node.page for node in path]


def test_longest_published_prefix_within_the_limit() -> None:
    index = PrefixIndex(2)
    publish(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert found(index, [1, 2, 3, 4, 9, 9], 6) == [10, 11]
    assert found(index, [1, 2, 3, 4, 5, 6], 5) == [10, 11]
    assert found(index, [1, 2, 3, 4, 5, 6], 1) == []
    assert found(index, [3, 4, 5, 6], 4) == []


def test_the_first_to_publish_keeps_the_key_and_others_hang_under_it() -> None:
    index = PrefixIndex(2)
    publish(index, [1, 2, 3, 4], [10, 11])
    assert [node.page for node in publish(index, [1, 2, 3, 4, 5, 6], [20, 21, 22])] == [10, 11, 22]
    assert found(index, [1, 2, 3, 4, 5, 6], 6) == [10, 11, 22]


def test_T60_a_salt_tells_equal_tokens_apart_and_none_is_a_salt_of_its_own() -> None:
    index = PrefixIndex(2)
    for page, salt in enumerate((None, "a", "b")):
        publish(index, [1, 2], [page], salt)
    assert [found(index, [1, 2], 2, salt) for salt in (None, "a", "b", "c")] == [[0], [1], [2], []]


def test_what_hangs_under_a_forgotten_page_is_forgotten_with_it() -> None:
    index = PrefixIndex(2)
    path = publish(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    beside = publish(index, [1, 2, 7, 8], [20, 21])
    assert index.forget(11) == [12]
    assert [node.is_gone for node in path] == [False, True, True] and not beside[1].is_gone
    index.check()
    assert found(index, [1, 2, 3, 4], 4) == [10]
    publish(index, [1, 2, 3, 4], [13, 14])
    assert found(index, [1, 2, 3, 4, 5, 6], 6) == [10, 14]


def test_a_path_is_brought_up_to_date_by_what_is_new() -> None:
    index = PrefixIndex(2)
    tokens = [1, 2, 3, 4, 5, 6]
    first = publish(index, tokens[:4], [10, 11])
    path: list[Node] = []
    index.extend(path, index.root(None), tokens, 6)
    index.publish(first[1], [5, 6], 12)
    index.extend(path, index.root(None), tokens, 6)
    assert [node.page for node in path] == [10, 11, 12]
    index.forget(11)
    index.extend(path, index.root(None), tokens, 6)
    assert [node.page for node in path] == [10]


def test_clear_names_every_page() -> None:
    index = PrefixIndex(2)
    path = publish(index, [1, 2, 3, 4], [10, 11])
    assert sorted(index.clear()) == [10, 11] and all(node.is_gone for node in path)
    assert found(index, [1, 2], 2) == [] and len(index) == 0


def test_weights_find_their_own_pages_and_those_they_were_told_to_keep() -> None:
    """Epoch 1 keeps what 0 published, and adds to it; back at 0, what 1 added is gone, and 0 can publish it anew."""
    index = PrefixIndex(2)
    publish(index, [1, 2, 3, 4], [10, 11])
    assert index.take_weights(1, keep=True) == []
    path = publish(index, [1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert [node.page for node in path] == [10, 11, 22] and not index.is_current(path) and index.is_current(path[2:])
    publish(index, [7, 8, 9, 10], [23, 24])
    index.check()
    assert sorted(index.take_weights(0, keep=False)) == [22, 23, 24]
    assert found(index, [1, 2, 3, 4, 5, 6], 6) == [10, 11] and found(index, [7, 8], 2) == []
    publish(index, [7, 8], [30])
    index.take_weights(2, keep=False)
    assert found(index, [7, 8], 2) == []
    index.take_weights(0, keep=False)
    assert found(index, [7, 8], 2) == [30]
    index.check()


def test_pages_of_one_epoch_never_serve_another_at_any_depth() -> None:
    """Where earlier pages were kept, inner nodes are of several weights. Whatever is found after that is of one: a path
    is cut at its first page of others, with all that hangs under it."""
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    index = PrefixIndex(2)
    publish(index, tokens[:2], [10])
    index.take_weights(1, keep=True)
    publish(index, tokens[:4], [20, 21])
    index.take_weights(2, keep=True)
    publish(index, tokens[:6], [30, 31, 32])
    index.take_weights(0, keep=True)  # back, over pages of others
    path = publish(index, tokens, [40, 41, 42, 43])
    assert [node.page for node in path] == [10, 21, 32, 43], "0 under 2 under 1 under 0"
    index.check()
    assert sorted(index.take_weights(0, keep=False)) == [21, 32, 43], "the leaf is of 0, and was computed over others"
    assert found(index, tokens, 8) == [10]
    for epoch in (1, 2):
        index.take_weights(epoch, keep=False)
        assert found(index, tokens, 8) == []
        publish(index, tokens, [50 + 10 * epoch + at for at in range(4)])
        index.check()
    for epoch, pages in ((1, [60, 61, 62, 63]), (0, [10]), (2, [70, 71, 72, 73])):
        index.take_weights(epoch, keep=False)
        assert found(index, tokens, 8) == pages
