"""The pool of equal KV pages: who holds which, which are free, which are idle with content worth keeping.

- `take` is the one producer of private pages; its only caller lists each of them in the plan's `fresh_pages`.
- A page is free, idle (named by the prefix index, held by nobody) or held by one or more requests.
- Idle pages count as free: when the free list is empty the least recently used one is reclaimed and forgotten.
- A page was last used when the last page found through it was: so a leaf is always reclaimed before the pages of its
  prefix, in whatever order these came back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from perdure.core.prefix import PrefixIndex


class PagePool:
    """num_pages pages by number; `index` names those whose content is kept when nobody holds them."""

    def __init__(self, num_pages: int, index: PrefixIndex) -> None:
        self.num_pages = num_pages
        self.version = 0
        """Grows whenever more may fit than before: what did not fit need not be tried again until then."""
        self._index = index
        self._holders = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""

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
                self.let_go(self._index.forget(page))
            self._holders[page] = 1
            taken.append(page)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holder for pages that somebody holds, or that are named."""
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each page of a request, given in order of position."""
        last_named = None
        for page in reversed(pages):
            assert self._holders[page] > 0, page
            self._holders[page] -= 1
            is_named = page in self._index
            if is_named and last_named is None:
                last_named = page
            if self._holders[page] == 0:
                if is_named:
                    self._idle[page] = None
                else:
                    self._free.append(page)
        if last_named is not None:
            for page in self._index.lineage(last_named):
                if page in self._idle:
                    self._idle.move_to_end(page)
        self.version += 1

    def forget_all(self) -> None:
        """The index names nothing any more: idle pages are free, and held ones will be."""
        self.let_go(self._index.clear())

    def let_go(self, pages: Sequence[int]) -> None:
        """These are not named any more."""
        for page in pages:
            if page in self._idle:
                del self._idle[page]
                self._free.append(page)

    def num_idle(self, pages: Sequence[int]) -> int:
        """How many of these nobody holds: sharing them takes that many from `num_free`."""
        return sum(self._holders[page] == 0 for page in pages)

    def kept(self) -> list[int]:
        """Pages with content that somebody wants, ascending: held, or idle."""
        return [page for page in range(self.num_pages) if self._holders[page] or page in self._idle]

    def unowned(self) -> list[int]:
        """Pages whose content nobody wants."""
        return list(self._free)

    def begin_anew(self) -> None:
        """The order of a new pool; nothing is held or named."""
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
        place = {page: number for number, page in enumerate(self._idle)}
        for page in self._idle:
            assert page in self._index, "an idle page is not named"
            before = [place[other] for other in self._index.lineage(page) if other in place]
            assert before == sorted(before), f"page {page} would go after a page of its prefix"
