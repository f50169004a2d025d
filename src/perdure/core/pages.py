"""The pool of equal KV pages: who holds which, which are free, which are idle with content worth keeping.

- `take` is the one producer of private pages; its only caller lists each of them in the plan's `fresh_pages`.
- A page is free, idle (published in the prefix index, held by nobody) or held by one or more requests.
- Idle pages count as free: when the free list is empty the least recently used one is reclaimed and forgotten.
- Pages are released last first, so an idle page is always reclaimed before the pages of its prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class PagePool:
    """num_pages pages by number. on_reclaim(page) is told when an idle page is about to be handed out again."""

    def __init__(self, num_pages: int, on_reclaim: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self.version = 0
        """Grows whenever more may fit than before: what did not fit need not be tried again until then."""
        self._on_reclaim = on_reclaim
        self._holders = [0] * num_pages
        self._published = bytearray(num_pages)
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Pages held by the caller alone, with whatever bytes they last had."""
        assert count <= self.num_free, (count, self.num_free)
        taken = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._on_reclaim(page)
                self._published[page] = 0
            self._holders[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for pages that are published, or that another request holds."""
        for page in pages:
            assert self._published[page] or self._holders[page], page
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page of a request, given in order of position."""
        for page in reversed(pages):
            assert self._holders[page] > 0, page
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._published[page]:
                    self._idle[page] = None
                else:
                    self._free.append(page)
        self.version += 1

    def publish(self, page: int) -> None:
        """The index now names this page: keep its content when the last holder leaves."""
        assert self._holders[page] > 0 and not self._published[page], page
        self._published[page] = 1

    def unpublish(self, page: int) -> None:
        """The index no longer names it; an idle one becomes free."""
        self._published[page] = 0
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def is_published(self, page: int) -> bool:
        return bool(self._published[page])

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of these nobody holds: sharing them takes that many from `num_free`."""
        return sum(self._holders[page] == 0 for page in pages)

    def kept(self) -> list[int]:
        """Pages with content that somebody wants, ascending: held, or idle."""
        return [page for page in range(self.num_pages) if self._holders[page] or self._published[page]]

    def unowned(self) -> list[int]:
        """Pages whose content nobody wants."""
        return list(self._free)

    def begin_anew(self) -> None:
        """The order of a new pool; nothing is held or published."""
        assert len(self._free) == self.num_pages
        self._free.sort(reverse=True)

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Every page is accounted for by these holders' lists, the free list and the idle ones."""
        count = [0] * self.num_pages
        for pages in held:
            assert len(pages) == len({*pages}), f"a page twice in one block table: {pages}"
            for page in pages:
                count[page] += 1
        assert count == self._holders, "holders and block tables disagree"
        unheld = sorted([*self._free, *self._idle])
        assert unheld == [page for page, n in enumerate(count) if n == 0], "a page is lost or free twice"
        assert all(self._published[page] for page in self._idle), "an idle page is not published"
