"""`PrefixReport`: which pages can be found in the index, told to whoever routes requests, by the names of
`api.prefix_key`.

- It is a log of changes, filled by the loop and emptied by a reader on another thread.
- Only what hangs under the roots of now is told: pages of other weights are of no use to anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from perdure.api.prefix_key import page_key, root_key

if TYPE_CHECKING:
    from perdure.core.prefix import Node, Root

ANEW = b""
"""In place of a name: nothing that was told before holds."""


class PrefixReport:
    """changes: (name, whether it is there now), as they happened."""

    def __init__(self) -> None:
        self.changes: deque[tuple[bytes, bool]] = deque()
        self._names: dict[Node, bytes] = {}

    def published(self, node: Node) -> None:
        before = self._name_of(node.parent)
        if before is not None:
            name = self._names[node] = page_key(before, node.key[1])
            self.changes.append((name, True))

    def forgotten(self, node: Node) -> None:
        name = self._names.pop(node, None)
        if name is not None:
            self.changes.append((name, False))

    def begin_anew(self, nodes: Iterable[Node]) -> None:
        """These are there, parents first, and no others."""
        self._names.clear()
        self.changes.append((ANEW, False))
        for node in nodes:
            self.published(node)

    def _name_of(self, parent: Node | Root) -> bytes | None:
        """None: it hangs under other roots."""
        return root_key(parent[1]) if isinstance(parent, tuple) else self._names.get(parent)
