"""The prefix index: which committed full pages can be reused by a prompt that begins with the same tokens.

- A node is one full page of tokens under its parent node; a key holds the tokens themselves, so a hit is never a guess.
- Nodes are published by commit only, from committed tokens, parents first; a published page never changes.
- The first to publish a key keeps it; a later page with equal tokens stays private to its request.
- Other weights may begin under a root of their own, so that pages of earlier ones are found only after a return to
  them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class PrefixIndex:
    """Nodes are named by serial numbers never used twice, so a key under a forgotten parent can never be found."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._weights_of: dict[int, int] = {}
        self.weights = 0
        """The epoch that the weights which now compute were loaded as."""
        self.root = 0
        """The parent of first pages: 0 or less, nodes count from 1."""
        self._serves_stale = False
        self._next_node = 1

    def match(self, tokens: Sequence[int], max_tokens: int) -> tuple[list[int], list[int]]:
        """Pages and nodes of the longest published prefix of at most max_tokens tokens."""
        pages: list[int] = []
        nodes: list[int] = []
        size, parent = self.page_size, self.root
        for first in range(0, max_tokens - size + 1, size):
            found = self._page_of.get((parent, tuple(tokens[first : first + size])))
            if found is None:
                break
            page, parent = found
            if not self._serves_stale and self._weights_of[page] != self.weights:
                break
            pages.append(page)
            nodes.append(parent)
        return pages, nodes

    def publish(self, parent: int, tokens: Sequence[int], page: int) -> tuple[int, bool]:
        """The node of this page's tokens under the parent, and whether it now names this page."""
        key = (parent, tuple(tokens))
        found = self._page_of.get(key)
        if found is not None:
            return found[1], False
        node = self._next_node
        self._next_node += 1
        self._page_of[key] = (page, node)
        self._key_of[page] = key
        self._weights_of[page] = self.weights
        return node, True

    def is_current(self, pages: Sequence[int]) -> bool:
        """Whether the weights that now compute have computed all of these."""
        return all(self._weights_of[page] == self.weights for page in pages)

    def take_weights(self, epoch: int, keep: bool) -> None:
        """Other weights compute from now on. keep: they use what earlier ones published; else they begin under a root
        of their own."""
        self.weights, self._serves_stale = epoch, keep
        if not keep:
            self.root = -epoch

    def forget(self, page: int) -> None:
        """The page is about to be handed out again."""
        del self._page_of[self._key_of.pop(page)], self._weights_of[page]

    def check(self, is_published: Callable[[int], bool]) -> None:
        """Every node names a page that the pool knows as published, and no page is named twice."""
        assert len(self._key_of) == len(self._page_of)
        for page, key in self._key_of.items():
            assert self._page_of[key][0] == page and is_published(page), f"page {page} is named by a wrong node"

    def clear(self) -> list[int]:
        """Forget every node; returns the pages that were named."""
        pages = list(self._key_of)
        self._page_of.clear()
        self._key_of.clear()
        self._weights_of.clear()
        return pages
