"""The prefix index: which committed full pages can be reused by a prompt that begins with the same tokens.

- A node is one full page under its parent, and the parent of first pages is a root. A root holds all that must be equal
  beside tokens: which weights, and the caller's salt. A key holds the tokens themselves, so a hit is never a guess.
- Nodes are published by commit only, from committed tokens, parents first; a published page never changes.
- The first to publish a key keeps it; a later page with equal tokens stays private to its request.
- A node that is forgotten takes all nodes under it along: what is named here can be found.
- What else tells pages apart (an adapter, the pictures in a page) belongs into the root or into a page's key.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perdure.api.scores import TokenScores
from perdure.core.prefix_report import PrefixReport

Root = tuple[int, str | None]
"""The weights that pages were begun with, and the salt of their requests."""

NO_PAGE = -1
NO_SCORES = -1


class Node:
    """One published page. weights: the epoch of those that computed it.

    scores: of the prompt tokens in the page, the very first of a prompt left out, with the num_top best of each; None =
    nobody asked for them yet.
    """

    __slots__ = ("children", "key", "num_top", "page", "scores", "weights")

    def __init__(self, parent: Node | Root, tokens: tuple[int, ...], page: int, weights: int) -> None:
        self.key = (parent, tokens)
        self.page = page
        self.weights = weights
        self.children: dict[Node, None] = {}
        self.scores: TokenScores | None = None
        self.num_top = NO_SCORES

    @property
    def parent(self) -> Node | Root:
        return self.key[0]

    @property
    def is_gone(self) -> bool:
        """Forgotten: its page may hold anything now."""
        return self.page == NO_PAGE


Key = tuple[Node | Root, tuple[int, ...]]


class PrefixIndex:
    """The published pages, by key and by number."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nodes: dict[Key, Node] = {}
        self._node_of: dict[int, Node] = {}
        self.weights = 0
        """The epoch that the weights which now compute were loaded as."""
        self._begun_with = 0
        """The weights in the roots of now: others than `weights` where those use what earlier ones published."""
        self._keeps = False
        """Whether they do: what hangs under the roots of now may then be of several weights."""
        self.report: PrefixReport | None = None
        """For whoever routes requests by what is here."""

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: int) -> bool:
        """Whether a node names this page."""
        return page in self._node_of

    def root(self, salt: str | None) -> Root:
        return (self._begun_with, salt)

    def key_after(self, path: Sequence[Node], root: Root, tokens: Sequence[int]) -> Key:
        """Of the page of these tokens that follows the path; tokens is the whole prompt."""
        first = len(path) * self.page_size
        return (path[-1] if path else root, tuple(tokens[first : first + self.page_size]))

    def extend(
        self,
        path: list[Node],
        root: Root,
        tokens: Sequence[int],
        end: int,
        num_top: int = NO_SCORES,
        num_scored: int = 0,
    ) -> None:
        """Bring a path up to date: the longest published one with these tokens before `end`. Costs what has changed.

        num_top: nodes that lack scores with so many of the best, by the weights of now, end it. The first num_scored
        scores are not needed.
        """
        while path and path[-1].is_gone:
            path.pop()
        size, parent = self.page_size, path[-1] if path else root
        for first in range(len(path) * size, end - size + 1, size):
            node = self._nodes.get((parent, tuple(tokens[first : first + size])))
            if node is None:
                break
            if num_top != NO_SCORES and first + size - 1 > num_scored:
                if node.num_top < num_top or node.weights != self.weights:
                    break
            path.append(node)
            parent = node

    def publish(self, parent: Node | Root, tokens: Sequence[int], page: int) -> Node:
        """The node of this page's tokens under the parent; it names this page if none was there before."""
        key = (parent, tuple(tokens))
        node = self._nodes.get(key)
        if node is None:
            node = Node(parent, key[1], page, self.weights)
            self._nodes[key] = self._node_of[page] = node
            if isinstance(parent, Node):
                assert not parent.is_gone
                parent.children[node] = None
            if self.report is not None:
                self.report.published(node)
        return node

    def is_current(self, path: Sequence[Node]) -> bool:
        """Whether the weights that now compute have computed all of these."""
        return all(node.weights == self.weights for node in path)

    def take_weights(self, epoch: int, keep: bool) -> list[int]:
        """Other weights compute from now on. keep: they use what earlier ones published; else they begin under roots of
        their own. Returns pages that are named no more: where they were kept, what hangs under a root is of several
        weights, and that ends here."""
        dropped: list[int] = []
        if not keep and self._keeps:
            for page, node in list(self._node_of.items()):
                if not node.is_gone and node.weights != self._root_of(node)[0]:
                    dropped += [page, *self.forget(page)]
        self.weights, self._keeps = epoch, keep
        if not keep:
            self._begun_with = epoch
        if self.report is not None:
            self.report.begin_anew(self._under_roots_of_now())
        return dropped

    def _under_roots_of_now(self) -> list[Node]:
        """Parents first."""
        found = [node for (parent, _), node in self._nodes.items() if isinstance(parent, tuple)]
        found = [node for node in found if self._root_of(node)[0] == self._begun_with]
        for node in found:
            found += node.children
        return found

    def _root_of(self, node: Node) -> Root:
        parent = node.parent
        while isinstance(parent, Node):
            parent = parent.parent
        return parent

    def lineage(self, page: int) -> Iterator[int]:
        """A published page, and the pages before it on its path."""
        node: Node | Root = self._node_of[page]
        while isinstance(node, Node):
            yield node.page
            node = node.parent

    def forget(self, page: int) -> list[int]:
        """The page is about to be handed out again; returns the pages under it, which nobody can find any more."""
        gone = [self._node_of[page]]
        for node in gone:
            gone += node.children
        for node in gone:
            self._drop(node)
        if isinstance(parent := gone[0].parent, Node):
            del parent.children[gone[0]]
        pages = [node.page for node in gone[1:]]
        for node in gone:
            node.page = NO_PAGE
        return pages

    def clear(self) -> list[int]:
        """Forget every node; returns the pages that were named."""
        pages = list(self._node_of)
        for node in list(self._node_of.values()):
            self._drop(node)
            node.page = NO_PAGE
        return pages

    def _drop(self, node: Node) -> None:
        del self._nodes[node.key], self._node_of[node.page]
        if self.report is not None:
            self.report.forgotten(node)
        node.children.clear()
        node.scores, node.num_top = None, NO_SCORES

    def check(self) -> None:
        """Every node can be found from a root, no page is named twice, and none is forgotten."""
        assert len(self._nodes) == len(self._node_of)
        for page, node in self._node_of.items():
            assert node.page == page and self._nodes[node.key] is node, f"page {page} is named by a wrong node"
            assert len(node.key[1]) == self.page_size
            begun_with = self._root_of(node)[0]
            is_kept = begun_with == self._begun_with and self._keeps
            assert node.weights == begun_with or is_kept, f"page {page} was computed by weights {node.weights}"
            if isinstance(parent := node.parent, Node):
                is_found = not parent.is_gone and self._nodes.get(parent.key) is parent and node in parent.children
                assert is_found, f"page {page} is named, and can never be found"
            assert all(child.parent is node and not child.is_gone for child in node.children)
